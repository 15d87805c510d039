"""Attention maps of whole networks: they are found, and they transform."""

import keras
import numpy as np
import oracles
import pytest
from attention_helpers import images
from attention_helpers import randomize
from attention_helpers import small_layers
from attention_helpers import small_network
from keras import ops

from keras_equiattn import layers
from keras_equiattn.applications import RotMNISTCNN
from keras_equiattn.testing import relative_difference
from keras_equiattn.visualization import attention_maps
from keras_equiattn.visualization import sites


def moved(values, name, group, element, group_axes):
    """`L_g` of one map, without its batch axis."""
    first = 0
    if name != "channel":
        values = oracles.turn(values, group, element)
        first = 2
    for axis in range(first, first + group_axes):
        size = values.shape[axis]
        assert size == oracles.order(group)
        source = [oracles.relative(group, element, j) for j in range(size)]
        values = values.take(source, axis=axis)
    return values


def group_axes(attention, lifting, name):
    """How many axes of a map are group elements: h, or h and j."""
    if attention in ("input", "co"):
        return 0 if lifting else 1
    return 1 if lifting or name == "effective" else 2


SLOW = [pytest.mark.slow]
# Channel attention of these networks is uniform on these images.
HARDLY_USED = pytest.mark.filterwarnings(
    "ignore:The attention of layer 'conv:UserWarning"
)


@HARDLY_USED
@pytest.mark.parametrize(
    ("group", "attention"),
    [
        ("p4", "input"),
        ("p4", "co"),
        pytest.param("p4", "full", marks=[*SLOW, pytest.mark.every_backend]),
        pytest.param("p4m", "input", marks=SLOW),
        pytest.param("p4m", "co", marks=SLOW),
        pytest.param("p4m", "full", marks=SLOW),
    ],
)
def test_maps_of_a_network_transform(group, attention):
    model = randomize(RotMNISTCNN(group, attention, filters=4))
    names = [f"conv{index}" for index in range(1, 8)]
    if attention == "input":
        names = [f"{name}_attention" for name in names]
    check_maps_transform(model, names, group, attention)


@pytest.mark.parametrize("group", ["p4", "p4m"])
def test_maps_on_responses_transform(group):
    """As in a network, with fewer layers."""
    inputs = keras.Input((6, 6, 1))
    x = layers.AttentiveLiftingConv2D(2, 3, group=group, name="lift")(inputs)
    x = layers.AttentiveGroupConv2D(1, 3, group=group, name="conv")(x)
    model = randomize(keras.Model(inputs, x))
    check_maps_transform(model, ["lift", "conv"], group, "full")


@HARDLY_USED
@pytest.mark.parametrize("attention", ["input", "co"])
def test_maps_of_a_trained_network_transform(attention):
    model = RotMNISTCNN("p4", attention, weights="rot_mnist")
    names = [f"conv{index}" for index in range(1, 8)]
    if attention == "input":
        names = [f"{name}_attention" for name in names]
    # The last layer hardly uses its attention.
    check_maps_transform(model, names, "p4", attention, least=1e-4)


def check_maps_transform(model, names, group, attention, least=1e-3):
    (image,) = images(1, model.input_shape[1:])
    order = oracles.order(group)
    batch = np.stack([oracles.turn(image, group, g) for g in range(order)])
    found = attention_maps(model, batch)
    assert list(found) == names
    for layer, maps in found.items():
        kinds = {"spatial", "effective"}
        assert set(maps) == (
            kinds if attention == "co" else kinds | {"channel"}
        )
        for name, values in maps.items():
            axes = group_axes(attention, layer == names[0], name)
            for g in range(order):
                error = relative_difference(
                    values[g], moved(values[0], name, group, g, axes)
                )
                assert error < 1e-5, (layer, name, g)
        # The maps tell the elements apart.
        wrong = relative_difference(*maps["spatial"][:2])
        assert wrong > least, layer


def by_hand(model, x):
    """The maps of `small_network`, layer after layer."""
    get = model.get_layer
    x = get("bn")(ops.convert_to_tensor(x, "float32"), training=False)
    found = {}
    for name in ("lift", "inner", "conv"):
        x, maps = get(name)(x, return_attention_maps=True)
        found[name] = {k: ops.convert_to_numpy(v) for k, v in maps.items()}
    return found


def assert_same_maps(actual, expected):
    assert list(actual) == list(expected)
    for name, maps in expected.items():
        assert set(actual[name]) == set(maps)
        for key, values in maps.items():
            assert isinstance(actual[name][key], np.ndarray)
            np.testing.assert_allclose(
                actual[name][key], values, rtol=1e-5, atol=1e-6
            )


def test_maps_are_those_of_the_layers_in_inference_mode():
    model, x = small_network(), images(3, (8, 8, 2))
    assert_same_maps(attention_maps(model, x), by_hand(model, x))


def test_the_model_stays_as_it_is():
    model, x = small_network(), images(2, (8, 8, 2))
    before = model.get_config()
    attention_maps(model, x)
    for layer in model.layers:  # raises for a layer in two places
        assert layer.output is not None
    assert model.get_config() == before


def test_selected_layers():
    model, x = small_network(), images(2, (8, 8, 2))
    expected = by_hand(model, x)
    found = attention_maps(model, x, layers=["conv", "lift"])
    assert_same_maps(found, {n: expected[n] for n in ("lift", "conv")})
    found = attention_maps(model, x, layers="inner")
    assert_same_maps(found, {"inner": expected["inner"]})
    assert attention_maps(model, x, layers=[]) == {}


def test_query():
    model, x = small_network(), images(2, (8, 8, 2))
    found = attention_maps(model, x, query=(1, 3))
    for name, maps in by_hand(model, x).items():
        np.testing.assert_allclose(
            found[name]["effective"], maps["effective"][:, 1, 3], rtol=1e-6
        )


def test_nested_models():
    """Models in models, one of them Sequential, give the same maps."""
    flat, x = small_network(), images(2, (8, 8, 2))
    expected = by_hand(flat, x)
    middle = keras.Input((6, 6, 4, 3))
    inner = keras.Model(
        middle, flat.get_layer("inner")(middle), name="functional"
    )
    sequential = keras.Sequential(
        [keras.Input((6, 6, 4, 3)), inner, flat.get_layer("conv")],
        name="sequential",
    )
    plain = keras.Sequential(  # without attention
        [keras.Input((4, 4, 4, 2)), keras.layers.ReLU()], name="plain"
    )
    inputs = keras.Input((8, 8, 2))
    y = flat.get_layer("lift")(flat.get_layer("bn")(inputs))
    outer = keras.Model(inputs, plain(sequential(y)))
    names = {
        "lift": "lift",
        "sequential/functional/inner": "inner",
        "sequential/conv": "conv",
    }
    expected = {full: expected[name] for full, name in names.items()}
    assert_same_maps(attention_maps(outer, x), expected)
    for name in names:
        found = attention_maps(outer, x, layers=name)
        assert_same_maps(found, {name: expected[name]})


@pytest.mark.every_backend
def test_sequential_model():
    lift, inner, conv = small_layers()
    model = keras.Sequential(
        [keras.layers.BatchNormalization(name="bn"), lift, inner, conv]
    )
    x = images(2, (8, 8, 2))
    with pytest.raises(ValueError, match=r"functional or Sequential .* built"):
        attention_maps(model, x)
    model(x)
    randomize(model)
    assert_same_maps(attention_maps(model, x), by_hand(model, x))


@pytest.mark.once
@pytest.mark.parametrize(
    ("shape", "shrink", "enlarge"),
    [
        (
            (8, 8, 2),
            keras.layers.MaxPooling2D((2, 4)),
            keras.layers.UpSampling2D((2, 4)),
        ),
        (
            (8, 8, 2),
            keras.layers.Conv2D(2, 4, strides=(2, 4), padding="same"),
            keras.layers.Conv2DTranspose(2, 4, strides=(2, 4), padding="same"),
        ),
        (
            (8, 8, 2, 2),
            layers.SpatialPooling2D((2, 4), group="p2"),
            layers.SpatialUpSampling2D((2, 4), group="p2"),
        ),
    ],
    ids=["pooling", "strides", "feature maps"],
)
def test_the_pitch_follows_pooling_and_upsampling(shape, shrink, enlarge):
    """A map of the size of the image has one pixel per pixel again."""
    inputs = keras.Input(shape)
    x = layers.InputAttention(group="p2", name="small")(shrink(inputs))
    x = layers.InputAttention(group="p2", name="large")(enlarge(x))
    model = keras.Model(inputs, x)
    assert model.output_shape[1:3] == (8, 8)
    found = sites.leaves(sites.find(model))
    pitches = {name: site.pitches for name, site in found.items()}
    assert pitches == {"small": ((2, 4),) * 2, "large": ((1, 1),) * 2}


def test_shared_layers_come_up_once_a_call():
    shared = layers.InputAttention(group="p4", name="shared")
    inputs = keras.Input((6, 6, 4, 2))
    x = ops.convert_to_tensor(images(2, (6, 6, 4, 2)), "float32")
    model = keras.Model(inputs, shared(ops.square(shared(inputs))))
    randomize(model)
    other = keras.Input((6, 6, 4, 2))
    keras.Model(other, shared(other))  # elsewhere: none of the model's calls
    y, first = shared(x, return_attention_maps=True)
    _, second = shared(ops.square(y), return_attention_maps=True)
    expected = {
        name: {k: ops.convert_to_numpy(v) for k, v in maps.items()}
        for name, maps in (("shared", first), ("shared#2", second))
    }
    assert_same_maps(attention_maps(model, x), expected)
    found = attention_maps(model, x, layers="shared#2")
    assert_same_maps(found, {"shared#2": expected["shared#2"]})


def test_half_precision_is_returned_as_float32():
    keras.config.set_dtype_policy("mixed_bfloat16")
    found = attention_maps(small_network(), images(1, (8, 8, 2)))
    for maps in found.values():
        assert {values.dtype for values in maps.values()} == {
            np.dtype("float32")
        }


def test_layers_without_a_path_of_attention_are_left_out():
    inputs = keras.Input((4, 4, 3))
    x = layers.ACmix2D(4, paths="convolution", name="shift")(inputs)
    alone = keras.Model(inputs, x, name="alone")
    x = layers.ACmix2D(4, attention_kernel_size=3, name="both")(x)
    model = randomize(keras.Model(inputs, x))
    x = images(2, (4, 4, 3))
    found = attention_maps(model, x)
    get = model.get_layer
    _, maps = get("both")(
        get("shift")(ops.convert_to_tensor(x, "float32")),
        return_attention_maps=True,
    )
    maps = {key: ops.convert_to_numpy(value) for key, value in maps.items()}
    assert_same_maps(found, {"both": maps})
    with pytest.raises(ValueError, match=r"attentive layer 'shift'.*are: both"):
        attention_maps(model, x, layers="shift")
    with pytest.raises(ValueError, match="'alone' has no attentive layers"):
        attention_maps(alone, x)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__(name="subclassed")
        self.attention = layers.InputAttention(group="p4")

    def call(self, x):
        return self.attention(x)


def test_models_that_cannot_be_read():
    x = images(1, (8, 8, 1))
    subclassed = Subclassed()
    subclassed(x)
    with pytest.raises(ValueError, match="subclassed models do not have"):
        attention_maps(subclassed, x)
    with pytest.raises(ValueError, match="must be a functional or Sequential"):
        attention_maps(subclassed.attention, x)
    inputs = keras.Input((8, 8, 1))
    hiding = keras.Model(inputs, subclassed(inputs), name="hiding")
    with pytest.raises(
        ValueError, match="Layer 'subclassed' of 'hiding' calls attentive"
    ):
        attention_maps(hiding, x)
    plain = keras.Model(inputs, keras.layers.ReLU()(inputs), name="plain")
    with pytest.raises(ValueError, match="'plain' has no attentive layers"):
        attention_maps(plain, x)


def test_wrong_arguments():
    model = small_network()
    with pytest.raises(
        ValueError,
        match=r"attentive layer 'lifft'. Did you mean 'lift'.* lift, inner",
    ):
        attention_maps(model, images(1, (8, 8, 2)), layers=["lifft"])
    with pytest.raises(
        ValueError, match=r"batch of rank 4.*\(None, 8, 8, 2\).*\(8, 8, 2\)"
    ):
        attention_maps(model, images(1, (8, 8, 2))[0])
    a, b = keras.Input((8, 8, 2)), keras.Input((8, 8, 2))
    two = keras.Model([a, b], layers.InputAttention(group="p4")(a + b))
    with pytest.raises(ValueError, match=r"must have one input.* with 2"):
        attention_maps(two, images(1, (8, 8, 2)))
