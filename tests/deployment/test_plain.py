"""Networks of Keras' own layers that compute the same."""

import re
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest
from keras.layers import Activation
from keras.layers import Add
from keras.layers import BatchNormalization
from keras.layers import Concatenate
from keras.layers import Conv2D
from keras.layers import Dense
from keras.layers import Dropout
from keras.layers import GlobalAveragePooling3D
from keras.layers import GroupNormalization
from keras.layers import LayerNormalization
from keras.layers import Multiply
from keras.layers import ReLU
from layer_contract import as_array
from rewritten_layers import LAYERS

from keras_equiattn import applications
from keras_equiattn import layers
from keras_equiattn import plain
from keras_equiattn.layers import GroupConv2D
from keras_equiattn.layers import LiftingConv2D
from keras_equiattn.testing import assert_equivariant
from keras_equiattn.testing import relative_difference

SIDE = 9
GROUPS = [
    "p4m",
    *(
        pytest.param(g, marks=pytest.mark.slow)
        for g in ("z2", "z2m", "p2", "p4", "p8")
    ),
]


def draw(model):
    """Draws weights away from zero and one, and positive variances."""
    rng = np.random.default_rng(0)
    for weight in model.weights:
        if keras.backend.is_float_dtype(weight.dtype):
            value = rng.normal(scale=0.5, size=weight.shape)
            if "variance" in weight.name:
                value = abs(value) + 0.5
            weight.assign(value.astype("float32"))


def images(model, count=2):
    size = [n or SIDE for n in model.input_shape[1:]]
    rng = np.random.default_rng(1)
    return rng.normal(size=(count, *size)).astype("float32")


def lifted(group, *steps, size=(SIDE, SIDE), first=LiftingConv2D):
    """A network that lifts images, and what comes after."""
    inputs = keras.Input((*size, 2))
    x = first(3, 3, group=group, activation="relu", name="lift")(inputs)
    for step in steps:
        x = step(x)
    return keras.Model(inputs, x, name="network")


def assert_same(model, network, rtol=1e-5):
    x = images(model)
    expected = as_array(model(x))
    assert np.ptp(expected) > 0
    assert relative_difference(expected, as_array(network(x))) < rtol


def change_by_last_bits(model):
    """How much outputs change when every pixel changes by its last bit."""
    x = images(model)
    signs = np.random.default_rng(2).choice([-1, 1], size=x.shape)
    changed = np.nextafter(x, (np.inf * signs).astype("float32"))
    return relative_difference(as_array(model(x)), as_array(model(changed)))


def with_statistics_of(model, x):
    """Sets the moving statistics to those of `x`, or numbers would grow."""
    normalizations = [
        layer for layer in model.layers if isinstance(layer, BatchNormalization)
    ]
    for layer in normalizations:
        layer.momentum = 0.0
    if normalizations:
        model(x, training=True)


def kinds(network):
    return [type(layer).__name__ for layer in network.layers[1:]]


def is_plain(network):
    modules = {
        type(layer).__module__.split(".")[0]
        for layer in network._flatten_layers()
    }
    return modules == {"keras"}


def rewritten(model, **options):
    """The plain network; a warning would be an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return plain(model, **options)


# Layers whose rewritten form depends on that of their input.
SOME_LAYERS = [
    kind
    if kind in ("convolution", "depthwise", "input_attention", "maximum")
    else pytest.param(kind, marks=pytest.mark.slow)
    for kind in LAYERS
]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("kind", LAYERS)
def test_layers(kind, group):
    model = lifted(group, LAYERS[kind](group))
    draw(model)
    network = rewritten(model)
    assert is_plain(network)
    assert network.output_shape == model.output_shape
    assert_same(model, network)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize(
    "kind", [layers.GroupToVector2D, layers.GroupToAngle2D]
)
def test_directions(kind, signed):
    model = lifted(
        "p4m", GroupConv2D(4, 1, group="p4m"), kind(signed, group="p4m")
    )
    draw(model)
    network = rewritten(model)
    assert is_plain(network)
    assert_same(model, network)


@pytest.mark.parametrize(
    "first", [layers.CoAttentiveLiftingConv2D, LiftingConv2D]
)
def test_images_of_any_size(first):
    """`Reshape` infers one unknown size, and here there are two."""
    inputs = keras.Input((None, None, 2))
    x = layers.InputAttention("p4")(inputs)
    x = layers.SqueezeExcite(1, group="p4")(x)
    x = first(3, 3, group="p4")(x)
    x = layers.GroupDepthwiseConv2D(3, group="p4")(x)
    x = layers.InputAttention("p4")(BatchNormalization()(x))
    x = layers.SpatialPadding2D(1, group="p4")(x)
    model = keras.Model(inputs, layers.GroupPooling()(x))
    draw(model)
    network = rewritten(model)
    assert is_plain(network)
    assert_same(model, network)


def test_layers_of_keras_between():
    inputs = keras.Input((SIDE, SIDE, 2))
    x = keras.layers.Rescaling(0.5)(inputs)
    x = LiftingConv2D(4, 3, group="p4")(x)
    x = BatchNormalization(momentum=0.5)(x)
    x = ReLU(negative_slope=0.1)(x)
    x = shortcut = Dropout(0.5)(x)
    x = GroupConv2D(4, 3, padding="same", group="p4")(x)
    x = Activation("silu")(GroupNormalization(1)(x))
    x = Add()([x, shortcut])
    x = LayerNormalization()(Dense(4)(x))
    x = Concatenate()([x, shortcut])
    x = Dropout(0.5, noise_shape=(None, 1, 1, None, 1))(x)
    x = GroupConv2D(4, 1, group="p4")(x) * 0.5
    gate = layers.GlobalSpatialPooling2D(group="p4")(x)
    x = Multiply()([x, Activation("softmax")(gate)])
    x = keras.ops.relu(x)
    model = keras.Model(inputs, Dense(3)(GlobalAveragePooling3D()(x)))
    draw(model)
    network = rewritten(model)
    assert is_plain(network)
    assert_same(model, network)
    assert network.layers[3].momentum == 0.5


def test_channels_and_group_elements_are_broadcast():
    inputs = keras.Input((SIDE, SIDE, 2))
    x = LiftingConv2D(3, 3, group="p4")(inputs)
    one = GroupConv2D(1, 1, group="p4")(x)
    planar = keras.layers.Reshape((7, 7, 1, 12))(x)
    planar = GroupConv2D(3, 1, group="z2")(planar)
    model = keras.Model(inputs, Add()([Multiply()([x, one]), planar]))
    draw(model)
    network = rewritten(model)
    assert is_plain(network)
    assert_same(model, network)


class MyConv2D(GroupConv2D):
    """It may compute anything."""


def test_what_extends_a_layer_stays_and_is_named():
    model = lifted("p4", MyConv2D(2, 3, group="p4", name="mine"))
    with pytest.warns(UserWarning, match=r"'mine' \(MyConv2D\)"):
        network = plain(model)
    assert_same(model, network)


# Keras warns of what is tested.
@pytest.mark.filterwarnings("ignore:The object being serialized includes a")
def test_function_without_a_name():
    """A `Lambda` is shared; other layers have to be made again."""
    model = lifted("p4", keras.layers.Lambda(lambda x: x / 3))
    assert_same(model, rewritten(model))
    convolution = Conv2D(2, 3, activation=lambda x: x / 3, name="thirds")
    inputs = keras.Input((SIDE, SIDE, 2))
    model = keras.Model(inputs, convolution(inputs))
    with pytest.raises(ValueError, match=r"'thirds'.*made again from its conf"):
        plain(model)


def test_statistics_of_each_batch_are_not_folded():
    model = lifted("p4", lambda x: BatchNormalization()(x, training=True))
    draw(model)
    network = rewritten(model, fold_batch_normalization=True)
    assert "BatchNormalization" in kinds(network)
    assert_same(model, network)


def test_statistics_of_data():
    normalization = keras.layers.Normalization()
    normalization.adapt(
        np.random.default_rng(0).normal(3, 2, size=(4, SIDE, SIDE, 2))
    )
    inputs = keras.Input((SIDE, SIDE, 2))
    x = LiftingConv2D(3, 3)(normalization(inputs))
    model = keras.Model(inputs, x)
    assert_same(model, rewritten(model))


def test_layers_and_models_that_are_called_twice():
    convolution = GroupConv2D(3, 3, padding="same", group="p4")
    block = lifted(
        "p4", convolution, ReLU(), convolution, layers.GroupPooling()
    )
    inputs = keras.Input((SIDE, SIDE, 2))
    x = block(inputs)[..., :2]
    x = block(keras.layers.ZeroPadding2D(1)(x))
    model = keras.Model(inputs, x)
    draw(model)
    network = rewritten(model)
    assert_same(model, network)
    assert kinds(network).count("Conv2D") == 2
    assert network.count_params() == (9 * 2 * 12 + 12) + (9 * 12 * 12 + 12)


@pytest.mark.parametrize("kind", SOME_LAYERS)
def test_layers_that_are_called_twice(kind):
    """On a map that is folded, and on one that is not."""
    step = LAYERS[kind]("p4")
    inputs = keras.Input((SIDE, SIDE, 2))
    x = LiftingConv2D(3, 3, group="p4")(inputs)
    outputs = [step(x), step(LayerNormalization()(x))]
    model = keras.Model(inputs, keras.ops.stack(outputs))
    draw(model)
    network = rewritten(model)
    assert is_plain(network)
    assert_same(model, network)


@pytest.mark.parametrize("kind", SOME_LAYERS)
def test_inputs_that_are_feature_maps(kind):
    inputs = keras.Input((SIDE, SIDE, 4, 3))
    model = keras.Model(inputs, LAYERS[kind]("p4")(inputs))
    draw(model)
    network = rewritten(model)
    assert is_plain(network)
    assert network.output_shape == model.output_shape
    assert_same(model, network)


def test_channels_first():
    options = {"group": "p4", "data_format": "channels_first"}
    inputs = keras.Input((2, SIDE, SIDE))
    x = layers.InputAttention(attention_kernel_size=3, **options)(inputs)
    x = LiftingConv2D(3, 3, **options)(x)
    x = BatchNormalization(axis=1)(x)
    x = layers.SpatialPooling2D(3, 2, **options)(x)
    x = GroupConv2D(4, 3, activation="relu", **options)(x)
    model = keras.Model(
        inputs, layers.GroupPooling(data_format="channels_first")(x)
    )
    draw(model)
    network = rewritten(model)
    assert is_plain(network)
    assert_same(model, network)


def test_planar_layers_take_images():
    inputs = keras.Input((SIDE, SIDE, 2))
    x = GroupConv2D(4, 3, group="z2", activation="relu")(inputs)
    x = BatchNormalization()(x)
    x = layers.GroupDepthwiseConv2D(3, group="z2")(x)
    x = layers.SpatialPooling2D(3, 2, group="z2")(x)
    model = keras.Model(inputs, x)
    draw(model)
    network = rewritten(model)
    assert is_plain(network)
    assert network.output_shape == model.output_shape
    assert_same(model, network)


def test_inputs_and_outputs_keep_their_names():
    image = keras.Input((SIDE, SIDE, 2), name="image")
    age = keras.Input((3,), name="age")
    x = LiftingConv2D(3, 3)(image)
    x = keras.ops.mean(x, axis=(1, 2, 3))
    model = keras.Model(
        {"image": image, "age": age},
        {"sum": Add()([x, age]), "map": x},
        name="two",
    )
    network = rewritten(model, name="other")
    given = {"image": images(lifted("p4")), "age": np.ones((2, 3), "float32")}
    expected, found = model(given), network(given)
    for name in ("sum", "map"):
        np.testing.assert_allclose(
            as_array(found[name]), as_array(expected[name]), rtol=1e-5
        )
    assert (network.name, plain(model).name) == ("other", "two")


def test_batch_normalization_goes_into_convolutions():
    model = lifted(
        "p4",
        BatchNormalization(),  # after an activation
        GroupConv2D(4, 3, group="p4", use_bias=False),
        BatchNormalization(),
        ReLU(),
        layers.GroupDense(4, "p4", activation="relu", input_activation="gelu"),
        layers.GroupConv2DTranspose(4, 3, group="p4"),
        BatchNormalization(scale=False),
        GlobalAveragePooling3D(),
        Dense(5),
        BatchNormalization(center=False),
    )
    draw(model)
    network = rewritten(model, fold_batch_normalization=True)
    assert kinds(network).count("BatchNormalization") == 1
    assert_same(model, network)


def test_batch_normalization_of_what_others_take_stays():
    inputs = keras.Input((SIDE, SIDE, 2))
    x = GroupConv2D(2, 3, padding="same", group="z2")(inputs)
    y = BatchNormalization()(x)
    model = keras.Model(inputs, Add()([x, y]))
    draw(model)
    network = rewritten(model, fold_batch_normalization=True)
    assert "BatchNormalization" in kinds(network)
    assert_same(model, network)
    # So does one whose convolution is called twice, or is an output.
    convolution = Conv2D(2, 3, padding="same")
    y = BatchNormalization()(convolution(convolution(inputs)))
    model = keras.Model(inputs, y)
    draw(model)
    network = rewritten(model, fold_batch_normalization=True)
    assert "BatchNormalization" in kinds(network)
    assert_same(model, network)
    x = Conv2D(2, 3)(inputs)
    model = keras.Model(inputs, [x, BatchNormalization()(x)])
    network = rewritten(model, fold_batch_normalization=True)
    assert "BatchNormalization" in kinds(network)


def test_attention_that_stays_is_named():
    model = lifted(
        "p4",
        layers.AttentiveGroupConv2D(2, 3, attention_kernel_size=3, name="one"),
        layers.AffineSelfConv2D(8, 3, group="p4", name="two"),
        GroupConv2D(2, 1, group="p4"),
    )
    draw(model)
    message = r": 'one' \(AttentiveGroupConv2D\), 'two' \(AffineSelfConv2D\)"
    with pytest.warns(UserWarning, match=message):
        network = plain(model)
    assert kinds(network).count("Conv2D") == 2
    assert_same(model, network)


def test_layers_whose_maps_are_outputs_stay():
    inputs = keras.Input((SIDE, SIDE, 2))
    x = LiftingConv2D(3, 3)(inputs)
    y, maps = layers.InputAttention()(x, return_attention_maps=True)
    model = keras.Model(inputs, [y, maps["spatial"]])
    with pytest.warns(UserWarning, match="InputAttention"):
        network = plain(model)
    x = images(model)
    for a, b in zip(model(x), network(x), strict=True):
        np.testing.assert_allclose(as_array(a), as_array(b), rtol=1e-5)


@pytest.mark.every_backend
def test_numbers_are_copies():
    model = lifted("p4", GroupConv2D(3, 3, group="p4"), BatchNormalization())
    draw(model)
    network = plain(model)
    x = images(model)
    expected = as_array(network(x))
    for weight in model.weights:
        weight.assign(np.ones(weight.shape))
    np.testing.assert_array_equal(as_array(network(x)), expected)


@pytest.mark.every_backend
def test_equivariance():
    model = lifted(
        "p4m",
        layers.InputAttention("p4m"),
        GroupConv2D(3, 3, group="p4m"),
        layers.GroupPooling(),
    )
    draw(model)
    network = rewritten(model, fold_batch_normalization=True)
    assert_equivariant(network, "p4m", images(model), rtol=1e-5)


def test_dtype_policies():
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = lifted(
        "p4",
        layers.InputAttention("p4"),
        GroupConv2D(4, 3, group="p4"),
        BatchNormalization(),
        GlobalAveragePooling3D(dtype="float32"),
    )
    draw(model)
    keras.config.set_dtype_policy("float32")
    network = rewritten(model)
    policies = {layer.name: layer.dtype_policy.name for layer in network.layers}
    assert policies["lift"] == "mixed_bfloat16"
    assert network.layers[-1].dtype_policy.name == "float32"
    assert_same(model, network, rtol=3e-2)


def test_models_without_a_graph_are_refused():
    with pytest.raises(ValueError, match="functional or Sequential"):
        plain(keras.Sequential([LiftingConv2D(3, 3)]))
    with pytest.raises(ValueError, match="functional or Sequential"):
        plain(LiftingConv2D(3, 3))
    with pytest.raises(ValueError, match=r"fold_batch_normalization.*'yes'"):
        plain(lifted("p4"), fold_batch_normalization="yes")


LOAD = """
import sys
sys.modules["keras_equiattn"] = None
import keras, numpy as np
x = np.load(sys.argv[1] + "/images.npy")
y = keras.saving.load_model(sys.argv[1] + "/plain.keras")(x)
np.save(sys.argv[1] + "/outputs.npy", keras.ops.convert_to_numpy(y))
"""


def test_files_need_keras_alone(tmp_path):
    steps = [
        LAYERS[kind]("p4")
        for kind in ("input_attention", "depthwise", "squeeze_excite", "co")
    ]
    model = lifted("p4", *steps, BatchNormalization(), layers.GroupPooling())
    draw(model)
    rewritten(model).save(tmp_path / "plain.keras")
    x = images(model)
    np.save(tmp_path / "images.npy", x)
    command = [sys.executable, "-c", LOAD, str(tmp_path)]
    subprocess.run(command, check=True, timeout=300)
    found = np.load(tmp_path / "outputs.npy")
    assert relative_difference(as_array(model(x)), found) < 1e-5


# The layers of the networks that have a form in layers of Keras.
REWRITTEN = {
    "CoAttentiveGroupConv2D",
    "CoAttentiveLiftingConv2D",
    "GroupConv2D",
    "GroupConv2DTranspose",
    "GroupPooling",
    "GroupProjection",
    "GroupToVector2D",
    "GroupDense",
    "InputAttention",
    "LiftingConv2D",
    "SpatialPadding2D",
    "SpatialPooling2D",
    "SpatialUpSampling2D",
    "SqueezeExcite",
}
FAST = ("rotmnist_p4cnn", "rotmnist_p4cnn_full", "rotmnist_p4cnn_input")


@pytest.mark.parametrize(
    "name",
    [
        *FAST,
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in applications.list_models()
            # Of transformers, the small ones for small images.
            if name not in FAST
            and not name.startswith(
                ("octic", "vit_base", "vit_small", "vit_tiny")
            )
        ),
    ],
)
def test_registered_networks(name):
    model = applications.get_model(name)
    with_statistics_of(model, images(model))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        network = plain(model)
    said = "".join(str(w.message) for w in caught if "equiattn" in str(w))
    stay = {
        layer.name
        for layer in model.layers
        if type(layer).__module__.startswith("keras_equiattn")
        and type(layer).__name__ not in REWRITTEN
    }
    assert set(re.findall(r"'(\w+)' \(", said)) == stay
    assert is_plain(network) == (not stay)
    if not stay:
        # Deep networks amplify rounding errors.
        rtol = max(1e-5, 3 * change_by_last_bits(model))
        assert rtol < 1e-4
        assert_same(model, network, rtol=rtol)
