"""Plain networks become equivariant ones of the same topology."""

import keras
import numpy as np
import pytest
from layer_contract import as_array
from plain_networks import features
from plain_networks import image_input
from plain_networks import images_for
from plain_networks import in_every_pose
from plain_networks import NETWORKS
from plain_networks import outputs_of
from plain_networks import residual
from plain_networks import sequential
from plain_networks import siamese
from plain_networks import squeeze_excite
from plain_networks import turned
from plain_networks import u_net
from plain_networks import with_random_weights

from keras_equiattn import conversion_summary
from keras_equiattn import equivariant
from keras_equiattn import groups
from keras_equiattn import layers
from keras_equiattn.testing import relative_difference


def slow(value):
    """A value that is tried in the slow tests alone."""
    return pytest.param(value, marks=pytest.mark.slow)


def worst_error(model, inputs, group):
    """How far the outputs are from turning with the image."""
    expected = outputs_of(model, inputs)
    errors = []
    for element in range(groups.get(group).order):
        found = outputs_of(model, turned(inputs, group, element))
        errors += map(
            relative_difference, found, turned(expected, group, element)
        )
    return max(errors)


def logits(network):
    """The network without the probabilities that it ends with."""
    model = network()
    last = model.layers[-1]
    if isinstance(last, (keras.layers.Softmax, keras.layers.Activation)):
        return keras.Model(model.input, last.input)
    if getattr(last, "activation", None) is keras.activations.softmax:
        last.activation = keras.activations.linear
    return model


@pytest.mark.parametrize("group", ["p4m", *map(slow, ("z2m", "p2", "p4"))])
@pytest.mark.parametrize("network", NETWORKS)
def test_inflated_network_is_the_mean_over_poses(network, group):
    plain = with_random_weights(logits(network))
    inputs = images_for(plain)
    every = in_every_pose(plain, inputs, group)
    # The plain network gives each pose another output.
    assert min(np.ptp(poses, axis=0).max() for poses in every) > 1e-2
    inflated = equivariant(plain, group, inflate=True)
    for found, poses in zip(outputs_of(inflated, inputs), every, strict=True):
        assert relative_difference(found, poses.mean(0)) < 1e-5
    assert worst_error(inflated, inputs, group) < 1e-5


@pytest.mark.parametrize("network", [sequential, squeeze_excite])
def test_inflated_network_computes_the_plain_one_in_each_pose(network):
    plain = with_random_weights(network())
    inputs = images_for(plain)
    probes = [
        keras.Model(model.inputs[0], model.get_layer("pool").output)
        for model in (plain, equivariant(plain, "p4m", inflate=True))
    ]
    (every,) = in_every_pose(probes[0], inputs, "p4m")
    (found,) = outputs_of(probes[1], inputs)
    found = np.moveaxis(found, 3, 0).reshape(every.shape)
    assert relative_difference(found, every) < 1e-5


@pytest.mark.parametrize(
    "network", [residual, squeeze_excite, u_net], ids=lambda f: f.__name__
)
def test_probabilities_are_those_of_the_mean(network):
    plain = with_random_weights(network())
    scores = with_random_weights(logits(network))
    inputs = images_for(plain)
    (found,) = outputs_of(equivariant(plain, "p4", inflate=True), inputs)
    (mean,) = outputs_of(equivariant(scores, "p4", inflate=True), inputs)
    expected = as_array(keras.ops.softmax(mean))
    assert relative_difference(found, expected) < 1e-5


@pytest.mark.parametrize(
    "width", ["parameters", *map(slow, ("compute", "channels"))]
)
@pytest.mark.parametrize("network", NETWORKS)
def test_converted_network_is_equivariant(network, width):
    plain = network()
    model = equivariant(plain, "p4m", width)
    assert [x.shape for x in model.outputs] == [x.shape for x in plain.outputs]
    with_random_weights(model)
    inputs = images_for(plain)
    # With random weights, probabilities hardly differ.
    assert worst_error(model, inputs, "p4m") < 2e-6
    for array in outputs_of(model, inputs):
        assert np.ptp(array, axis=0).max() > 2e-5


def test_groups_between_the_quarter_turns():
    model = with_random_weights(equivariant(sequential(), "p8"))
    inputs = images_for(model)
    quarter = turned(inputs, "p4", 1)
    (expected,), (found,) = (
        outputs_of(model, inputs),
        outputs_of(model, quarter),
    )
    assert relative_difference(found, expected) < 1e-5


def test_trivial_group_is_the_plain_network():
    plain = with_random_weights(squeeze_excite())
    inputs = images_for(plain)
    (expected,) = outputs_of(plain, inputs)
    (found,) = outputs_of(equivariant(plain, "z2", inflate=True), inputs)
    assert relative_difference(found, expected) < 1e-5


def test_plain_network_stays_as_it_is():
    plain = with_random_weights(squeeze_excite())
    before = plain.get_weights()
    names = [layer.name for layer in plain.layers]
    calls = [len(layer._inbound_nodes) for layer in plain.layers]
    model = equivariant(plain, inflate=True)
    for weight in model.weights:
        weight.assign(weight + 1)
    assert [layer.name for layer in plain.layers] == names
    assert [len(layer._inbound_nodes) for layer in plain.layers] == calls
    for old, new in zip(before, plain.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_poses_see_each_other_after_training():
    plain = with_random_weights(sequential())
    model = equivariant(plain, "p4", inflate=True)
    (kernel,) = (
        layer.kernel
        for layer in model.layers
        if isinstance(layer, layers.GroupConv2D)
    )
    assert not as_array(kernel)[:, :, 1:].any()
    model.compile("sgd", "mse")
    (x,) = images_for(plain)
    model.fit(x, np.ones((3, 3)), verbose=0)
    assert as_array(kernel)[:, :, 1:].any()
    assert worst_error(model, [x], "p4") < 1e-5


def test_layers_that_are_called_twice_stay_one():
    plain = siamese()
    model = equivariant(plain, "p4", "channels")
    lifting = [
        layer
        for layer in model.layers
        if isinstance(layer, layers.LiftingConv2D)
    ]
    assert len(lifting) == 1
    summary = conversion_summary(plain, "p4", "channels")
    assert summary.parameters == (plain.count_params(), model.count_params())


def test_outputs_keep_their_structure():
    model = equivariant(features(), "p4")
    (x,) = images_for(model)
    assert {name: y.shape for name, y in model(x).items()} == {
        "fine": (3, 8, 8, 4),
        "pooled": (3, 4),
    }


def test_what_is_added_has_the_channels_of_what_it_is_added_to():
    inputs = image_input()
    # Rounded to 2 channels each, so 4 and not 5 together.
    towers = [keras.layers.Conv2D(n, 3)(inputs) for n in (7, 7)]
    x = keras.layers.Concatenate()(towers)
    y = keras.layers.Conv2D(14, 3, padding="same", name="up")(x)
    y = keras.layers.BatchNormalization()(y)
    x = keras.layers.ReLU()(keras.layers.Add()([x, y]))
    plain = keras.Model(inputs, keras.layers.GlobalMaxPooling2D()(x))
    ends = keras.Model(inputs, keras.layers.Dense(2)(plain.outputs[0]))
    assert equivariant(ends, "p4m").get_layer("up").filters == 2 * round(
        7 / 8**0.5
    )
    # In the other order the width of the sum is needed before it is known.
    z = keras.layers.Conv2D(14, 3)(inputs)
    x = keras.layers.Concatenate()(towers)
    x = keras.layers.GlobalMaxPooling2D()(keras.layers.Add(name="sum")([z, x]))
    plain = keras.Model(inputs, keras.layers.Dense(2)(x))
    (problem,) = conversion_summary(plain, "p4m").problems
    assert "[4, 5] channels. With" in problem.problem
    assert equivariant(plain, "p4m", "channels").output_shape == (None, 2)


@pytest.mark.parametrize(("count", "found"), [(12, "[4, 12]"), (2, "[1, 2]")])
def test_rounded_channels_are_not_broadcast(count, found):
    """Twelve channels become four, and two become one; single ones stay."""
    inputs = image_input()
    z = keras.layers.Conv2D(count, 3)(inputs)
    towers = [keras.layers.Conv2D(1, 3)(inputs) for _ in range(count)]
    x = keras.layers.Add(name="sum")([z, keras.layers.Concatenate()(towers)])
    x = keras.layers.GlobalMaxPooling2D()(x)
    plain = keras.Model(inputs, keras.layers.Dense(2)(x))
    (problem,) = conversion_summary(plain, "p4m").problems
    assert f"{found} channels. With" in problem.problem


def test_one_channel_of_the_plain_network_is_broadcast():
    inputs = image_input()
    one = keras.layers.Conv2D(1, 3)(inputs)
    x = keras.layers.Conv2D(2, 3)(inputs)
    y = keras.layers.DepthwiseConv2D(1, depth_multiplier=2)(one)
    x = keras.layers.Add(name="sum")([y, x])
    y = keras.layers.Add()([x, one])
    x = keras.layers.GlobalMaxPooling2D()(y)
    plain = keras.Model(inputs, keras.layers.Dense(2)(x))
    assert not conversion_summary(plain, "p4m").problems


def test_layers_that_cannot_be_made_again_are_reported():
    class Halve:
        def __call__(self, x):
            return x / 2

        def get_config(self):
            return {}

    inputs = image_input()
    x = keras.layers.Conv2D(3, 3)(inputs)
    x = keras.layers.Activation(Halve())(x)
    x = keras.layers.PReLU()(x)
    problems = conversion_summary(keras.Model(inputs, x), "p4").problems
    assert [row.kind for row in problems] == ["Activation", "PReLU"]


def test_file_round_trip(tmp_path):
    model = with_random_weights(equivariant(squeeze_excite(), "p4"))
    inputs = images_for(model)
    expected = outputs_of(model, inputs)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(outputs_of(loaded, inputs)[0], expected[0])


def test_options_of_layers_survive():
    options = {
        "kernel_regularizer": keras.regularizers.L2(1e-3),
        "kernel_initializer": keras.initializers.HeNormal(seed=3),
        "kernel_constraint": keras.constraints.NonNeg(),
        "dtype": "mixed_bfloat16",
    }
    plain = keras.Sequential(
        [
            image_input(),
            keras.layers.Conv2D(4, 3, name="frozen", trainable=False),
            keras.layers.Conv2D(4, 3, dilation_rate=2, name="conv", **options),
            keras.layers.GlobalAveragePooling2D(),
        ]
    )
    model = equivariant(plain, "p4")
    conv = model.get_layer("conv")
    assert not model.get_layer("frozen").trainable
    assert conv.trainable
    assert conv.dilation_rate == (2, 2)
    assert conv.kernel_regularizer.l2 == np.float32(1e-3)
    assert conv.kernel_initializer.seed == 3
    assert isinstance(conv.kernel_constraint, keras.constraints.NonNeg)
    assert conv.compute_dtype == "bfloat16"
    assert model.get_layer("frozen").compute_dtype == "float32"


def test_half_precision_stays_half():
    with_policy = {"dtype": "mixed_bfloat16"}
    plain = keras.Sequential(
        [
            image_input(8),
            keras.layers.Conv2D(4, 3, padding="same", **with_policy),
            keras.layers.MaxPooling2D(2, **with_policy),
            keras.layers.UpSampling2D(2, **with_policy),
            keras.layers.ZeroPadding2D(1, **with_policy),
            keras.layers.Cropping2D(1, **with_policy),
            keras.layers.Dropout(0.1, **with_policy),
            keras.layers.GlobalAveragePooling2D(**with_policy),
        ]
    )
    model = equivariant(plain, "p4")
    for layer in model.layers[1:]:
        assert layer.compute_dtype == "bfloat16", layer.name


def test_network_without_layers():
    inputs = image_input()
    model = keras.Model(inputs, inputs)
    assert conversion_summary(model).parameters == (0, 0)
    (x,) = images_for(model)
    np.testing.assert_array_equal(outputs_of(equivariant(model), [x])[0], x)


@pytest.mark.parametrize("inflate", [True, False])
def test_statistics_of_the_data_survive(inflate):
    normalization = keras.layers.Normalization(axis=3)
    plain = keras.Sequential(
        [
            image_input(),
            normalization,
            keras.layers.Conv2D(4, 3),
            keras.layers.GlobalAveragePooling2D(),
        ]
    )
    (x,) = images_for(plain)
    normalization.adapt(3 * x + 1)
    model = equivariant(plain, "p4", inflate=inflate)
    new = model.get_layer(normalization.name)
    np.testing.assert_allclose(as_array(new(x)), as_array(normalization(x)))


def test_spatial_dropout_drops_whole_channels():
    x = inputs = image_input()
    x = keras.layers.Conv2D(64, 1, kernel_initializer="ones")(x)
    x = keras.layers.SpatialDropout2D(0.5, name="drop")(x)
    x = keras.layers.Dropout(0.5, noise_shape=(None, 1, 1, 1), name="path")(x)
    plain = keras.Model(inputs, keras.layers.GlobalAveragePooling2D()(x))
    model = equivariant(plain, "p4", "channels")
    ones = keras.ops.ones((40, 5, 5, 4, 64))
    drop = as_array(model.get_layer("drop")(ones, training=True))
    assert set(np.unique(drop)) == {0, 2}
    assert not np.ptp(drop, axis=(1, 2, 3)).any()
    assert np.ptp(drop[:, 0, 0, 0], axis=1).all()
    path = as_array(model.get_layer("path")(ones, training=True))
    assert not np.ptp(path, axis=(1, 2, 3, 4)).any()
    assert np.ptp(path[:, 0, 0, 0, 0]) > 0
