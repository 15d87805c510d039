"""Group Squeeze-and-Excitation: contract, oracle, vectors, errors."""

import keras
import numpy as np
import oracles
import pytest
from layer_contract import as_array
from layer_contract import FLOAT64_BACKENDS
from layer_contract import gradients
from layer_contract import LayerCase
from layer_contract import LayerContract
from vectors import load_vectors

from keras_equiattn import groups
from keras_equiattn.layers import SqueezeExcite
from keras_equiattn.testing import relative_difference

# float64 is off by default on JAX.
PRECISE = keras.backend.backend() in FLOAT64_BACKENDS
DTYPE, TOLERANCE = ("float64", 1e-10) if PRECISE else ("float32", 1e-5)


class TestSqueezeExcite(LayerContract):
    layer = SqueezeExcite
    cases = (
        LayerCase(
            SqueezeExcite,
            {"group": "p4m", "reduction_ratio": 2},
            (2, 6, 6, 8, 4),
            (2, 6, 6, 8, 4),
            weights=4,
            group="p4m",
            rectangle=(7, 5),
            reach=None,
        ),
        LayerCase(
            SqueezeExcite,
            {"group": "p4", "reduction_ratio": 3},
            (2, 7, 7, 3),
            (2, 7, 7, 3),
            weights=4,
            group="p4",
            reach=None,
        ),
        LayerCase(
            SqueezeExcite,
            {"group": "z2m", "reduction_ratio": 1},
            (2, 6, 9, 2, 3),
            (2, 6, 9, 2, 3),
            weights=4,
            group="z2m",
            reach=None,
        ),
    )
    arguments = (
        {
            "reduction_ratio": 3,
            "group": "p4m",
            "kernel_initializer": keras.initializers.HeNormal(seed=1),
            "bias_initializer": keras.initializers.Constant(0.5),
            "kernel_regularizer": keras.regularizers.L2(0.01),
            "bias_regularizer": keras.regularizers.L1(0.01),
            "data_format": "channels_first",
        },
    )


def random_layer(shape, group):
    layer = SqueezeExcite(2, group, dtype=DTYPE)
    layer.build(shape)
    rng = np.random.default_rng(0)
    layer.set_weights([rng.normal(size=v.shape) for v in layer.weights])
    return layer, rng.normal(size=shape).astype(DTYPE)


@pytest.mark.parametrize("group", ["z2", "z2m", "p4", "p4m", "p8"])
@pytest.mark.parametrize("on_group", [True, False])
def test_agrees_with_oracle(group, on_group):
    """Outputs, maps, and gradients along random directions."""
    order = (groups.get(group).order,) if on_group else ()
    layer, x = random_layer((2, 5, 4, *order, 6), group)
    # In float64, so that only the layer rounds.
    values = [np.float64(a) for a in (x, *layer.get_weights())]
    expected = oracles.squeeze_excite(*values)
    y, maps = layer(x, return_attention_maps=True, query=(1, 2))
    assert relative_difference(as_array(y), expected) < TOLERANCE
    assert list(maps) == ["channel"]
    channel = as_array(maps["channel"])
    inner = (1,) * (x.ndim - 2)
    scaled = x * channel.reshape(2, *inner, 6)
    assert relative_difference(scaled, expected) < TOLERANCE

    rng = np.random.default_rng(1)
    cotangent = rng.normal(size=x.shape)
    found = gradients(layer, x, cotangent.astype(DTYPE))
    assert len(found) == len(values) == 5
    for index, gradient in enumerate(found):
        direction = rng.normal(size=gradient.shape)
        moved = list(values)
        # A complex step: exact to rounding, since nothing is subtracted.
        moved[index] = values[index] + 1e-30j * direction
        slope = oracles.squeeze_excite(*moved).imag / 1e-30
        terms = slope * cotangent
        difference = (gradient * direction).sum() - terms.sum()
        assert abs(difference) < TOLERANCE * np.abs(terms).sum()


def test_agrees_with_the_reference_of_affine_self_convolution():
    vectors = load_vectors("p4_group_se_5x4_c6")
    layer = SqueezeExcite(2, "p4", dtype=DTYPE)
    x, y = (np.moveaxis(vectors[name], 0, 2)[None] for name in "xy")
    layer.build(x.shape)
    names = ("w_W2", "w_b2", "w_W1", "w_b1")
    layer.set_weights([vectors[name] for name in names])
    found = as_array(layer(x.astype(DTYPE)))
    assert relative_difference(found, y) < TOLERANCE


def test_map_is_invariant():
    layer, x = random_layer((2, 5, 5, 8, 6), "p4m")
    one = np.stack([oracles.act(f, "p4m", 6) for f in x]).copy()
    channels = [
        as_array(layer(f, return_attention_maps=True)[1]["channel"])
        for f in (x, one)
    ]
    assert channels[0].shape == (2, 6)
    assert relative_difference(*channels) < TOLERANCE


def test_hidden_units_and_names():
    layer = SqueezeExcite()
    layer.build((None, 8, 8, 4, 10))
    shapes = {v.name: tuple(v.shape) for v in layer.weights}
    assert shapes == {
        "reduce_kernel": (10, 1),
        "reduce_bias": (1,),
        "expand_kernel": (1, 10),
        "expand_bias": (10,),
    }
    # One initialiser, and yet two draws.
    kernels = [as_array(v.value).ravel() for v in layer.weights[::2]]
    assert not np.allclose(*kernels)


def test_initializers_may_be_functions():
    layer = SqueezeExcite(
        kernel_initializer=lambda shape, dtype: np.ones(shape)
    )
    layer.build((None, 8, 8, 2))
    np.testing.assert_array_equal(as_array(layer.reduce_kernel.value), 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reduction_ratio": 0}, "`reduction_ratio` must be a positive.*0"),
        ({"group": "p5"}, "Unknown group 'p5'"),
        ({"data_format": "last"}, "`data_format` must be.*'last'"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        SqueezeExcite(**arguments)


def test_a_pixel_that_is_not_there():
    with pytest.raises(ValueError, match=r"`query` must be.*\(5, 0\)"):
        SqueezeExcite(group="z2")(
            np.ones((1, 5, 5, 2), "float32"),
            return_attention_maps=True,
            query=(5, 0),
        )


def test_bad_shapes():
    layer = SqueezeExcite(group="p4")
    with pytest.raises(ValueError, match="size 8, group 'p4' has 4 elements"):
        layer.build((None, 5, 5, 8, 2))
    with pytest.raises(ValueError, match="known number of channels"):
        layer.build((None, 5, 5, None))


def test_another_number_of_channels_is_refused():
    layer = SqueezeExcite()
    layer.build((None, 4, 4, 8))
    with pytest.raises(ValueError, match="8"):
        layer(np.ones((1, 4, 4, 6), "float32"))
