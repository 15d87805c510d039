"""Upsampling, and padding with rows and columns."""

import numpy as np
import oracles
import pytest
from layer_contract import as_array
from layer_contract import DTYPE
from layer_contract import gradients
from layer_contract import LayerCase
from layer_contract import LayerContract
from layer_contract import LIMIT

from keras_equiattn import ops
from keras_equiattn.layers import SpatialPadding2D
from keras_equiattn.layers import SpatialUpSampling2D
from keras_equiattn.testing import relative_difference


class TestSpatialUpSampling2D(LayerContract):
    layer = SpatialUpSampling2D
    arguments = (
        {
            "size": (3, 3),
            "interpolation": "bilinear",
            "group": "p4m",
            "data_format": "channels_first",
        },
    )
    cases = (
        LayerCase(
            layer,
            {"size": 3, "interpolation": "bilinear", "group": "p4"},
            (2, 4, 4, 4, 3),
            (2, 12, 12, 4, 3),
            weights=0,
            group="p4",
            rectangle=(3, 5),
            reach=None,
            no_shift="the output shifts by several pixels",
        ),
        LayerCase(
            layer,
            {"size": (2, 1), "group": "p2m"},
            (2, 4, 3, 3),
            (2, 8, 3, 3),
            weights=0,
            group="p2m",
            rectangle=(3, 5),
            reach=None,
            no_shift="the output shifts by several pixels",
        ),
    )


class TestSpatialPadding2D(LayerContract):
    layer = SpatialPadding2D
    arguments = (
        {
            "padding": (2, 2),
            "mode": "reflect",
            "group": "p4m",
            "data_format": "channels_first",
        },
    )
    cases = tuple(
        LayerCase(
            SpatialPadding2D,
            {"padding": padding, "mode": mode, "group": group},
            (2, 5, 5, *order, 3),
            (2, *output, *order, 3),
            weights=0,
            group=group,
            rectangle=(4, 6),
            reach=2,
        )
        for padding, mode, group, order, output in (
            (2, "reflect", "p4", (4,), (9, 9)),
            ((1, 2), "wrap", "p2m", (4,), (7, 9)),
            (1, "zeros", "p4m", (), (7, 7)),
        )
    )


def images(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(DTYPE)


def check(layer, x, oracle):
    """The output, and the gradient, since all is linear."""
    expected = oracle(x.astype("float64"))
    assert relative_difference(as_array(layer(x)), expected) < LIMIT
    rng = np.random.default_rng(1)
    cotangent = rng.normal(size=expected.shape)
    (of_x,) = gradients(layer, x, cotangent.astype(DTYPE))
    direction = rng.normal(size=x.shape)
    np.testing.assert_allclose(
        (of_x * direction).sum(),
        (oracle(direction) * cotangent).sum(),
        rtol=1e-4,
    )


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
@pytest.mark.parametrize(
    "size",
    [
        (2, 2),
        pytest.param((3, 1), marks=pytest.mark.torch_first),
        pytest.param((1, 4), marks=pytest.mark.torch_first),
    ],
)
def test_upsampling_agrees_with_oracle(size, interpolation):
    layer = SpatialUpSampling2D(size, interpolation, "p2", dtype=DTYPE)
    check(
        layer,
        images(2, 3, 4, 2, 3),
        lambda x: oracles.upsample(x, size, interpolation),
    )


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
def test_upsampling_of_one_pixel(interpolation):
    x = images(2, 1, 1, 4, 3)
    y = as_array(SpatialUpSampling2D(2, interpolation, dtype=DTYPE)(x))
    np.testing.assert_allclose(y, np.broadcast_to(x, (2, 2, 2, 4, 3)))


@pytest.mark.parametrize("mode", ["zeros", "reflect", "wrap"])
@pytest.mark.parametrize(
    "padding", [(2, 3), pytest.param((1, 1), marks=pytest.mark.torch_first)]
)
def test_padding_agrees_with_numpy(padding, mode):
    layer = SpatialPadding2D(padding, mode, "p2", dtype=DTYPE)
    (rows, columns) = padding
    pads = ((0, 0), (rows, rows), (columns, columns), (0, 0), (0, 0))
    of_numpy = {"zeros": "constant"}.get(mode, mode)
    check(layer, images(2, 4, 5, 2, 3), lambda x: np.pad(x, pads, of_numpy))


@pytest.mark.parametrize(("mode", "least"), [("reflect", 4), ("wrap", 3)])
def test_padding_shows_no_more_than_there_is(mode, least):
    layer = SpatialPadding2D(3, mode)
    assert layer(images(1, least, least, 4, 1)).shape[1] == least + 6
    message = rf"'{mode}' of 3 pixels needs at least {least}.*\({least - 1}, "
    with pytest.raises(ValueError, match=message):
        layer(images(1, least - 1, least, 4, 1))
    assert SpatialPadding2D(3)(images(1, 1, 1, 4, 1)).shape[1] == 7


@pytest.mark.once
@pytest.mark.parametrize(
    ("layer", "arguments", "message"),
    [
        (SpatialUpSampling2D, {"size": (1, 2)}, r"same `size`.*\(1, 2\)"),
        (SpatialUpSampling2D, {"size": 0}, "`size` must be"),
        (
            SpatialUpSampling2D,
            {"interpolation": "bicubic"},
            "'nearest' or 'bilinear'.*'bicubic'",
        ),
        (SpatialPadding2D, {"padding": (2, 1)}, r"same `padding`.*\(2, 1\)"),
        (SpatialPadding2D, {"padding": ((0, 1), (0, 1))}, "`padding` must be"),
        (SpatialPadding2D, {"mode": "edge"}, "'zeros' or 'reflect' or 'wrap'"),
    ],
)
def test_bad_arguments(layer, arguments, message):
    with pytest.raises(ValueError, match=message):
        layer(**arguments)


def test_one_factor_for_both_axes():
    x = np.random.default_rng(0).normal(size=(1, 2, 3, 4, 2)).astype(DTYPE)
    found, expected = (
        as_array(ops.spatial_upsample(x, factors)) for factors in (2, (2, 2))
    )
    np.testing.assert_array_equal(found, expected)
    with pytest.raises(ValueError, match=r"`factors` must be a positive.*0"):
        ops.spatial_upsample(x, 0)
