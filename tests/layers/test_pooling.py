"""Pooling over space and over the group."""

import keras
import numpy as np
import oracles
import pytest
from layer_contract import as_array
from layer_contract import FLOAT64_BACKENDS
from layer_contract import gradients
from layer_contract import LayerCase
from layer_contract import LayerContract
from scipy import ndimage

from keras_equiattn import groups
from keras_equiattn import ops
from keras_equiattn.layers import GlobalSpatialPooling2D
from keras_equiattn.layers import GroupPooling
from keras_equiattn.layers import SpatialPooling2D
from keras_equiattn.ops import is_exact
from keras_equiattn.testing import assert_equivariant
from keras_equiattn.testing import equivariance_error
from keras_equiattn.testing import relative_difference


class TestSpatialPooling2D(LayerContract):
    cases = (
        LayerCase(
            SpatialPooling2D,
            {"pool_size": 2, "group": "p4"},
            (2, 8, 8, 4, 3),
            (2, 4, 4, 4, 3),
            weights=0,
            group="p4",
            rectangle=(6, 4),
            unknown_size=False,
        ),
        LayerCase(
            SpatialPooling2D,
            {"pool_size": 3, "strides": 2, "mode": "mean", "group": "p4m"},
            (2, 7, 7, 8, 2),
            (2, 3, 3, 8, 2),
            weights=0,
            group="p4m",
            rectangle=(9, 5),
            unknown_size=False,
        ),
        LayerCase(
            SpatialPooling2D,
            {"pool_size": 2, "strides": 1, "mode": "max", "group": "z2m"},
            (2, 6, 7, 3),
            (2, 5, 6, 3),
            weights=0,
            group="z2m",
            rectangle=(5, 8),
        ),
        LayerCase(
            SpatialPooling2D,
            {"pool_size": 4, "strides": 2, "mode": "binomial", "group": "p4"},
            (2, 8, 8, 4, 3),
            (2, 3, 3, 4, 3),
            weights=0,
            group="p4",
            rectangle=(6, 10),
            unknown_size=False,
        ),
        LayerCase(
            SpatialPooling2D,
            {
                "pool_size": (1, 3),
                "strides": (1, 2),
                "mode": "binomial",
                "group": "p2",
            },
            (2, 6, 9, 2),
            (2, 6, 4, 2),
            weights=0,
            group="p2",
            unknown_size=False,
        ),
        LayerCase(
            SpatialPooling2D,
            {"pool_size": (2, 3), "mode": "mean", "group": "p2"},
            (2, 6, 9, 2),
            (2, 3, 3, 2),
            weights=0,
            group="p2",
            unknown_size=False,
        ),
    )
    layer = SpatialPooling2D
    arguments = (
        {
            "pool_size": (3, 3),
            "strides": (2, 2),
            "mode": "mean",
            "group": "p4m",
            "exact": False,
            "data_format": "channels_first",
        },
    )


class TestGlobalSpatialPooling2D(LayerContract):
    cases = tuple(
        LayerCase(
            GlobalSpatialPooling2D,
            {"mode": mode, "group": group},
            (2, 5, 5, groups.get(group).order, 3),
            (2, 1, 1, groups.get(group).order, 3),
            weights=0,
            group=group,
            reach=None,
            rectangle=(5, 4),
        )
        for mode, group in (("mean", "p4"), ("max", "p4m"))
    )
    layer = GlobalSpatialPooling2D
    arguments = (
        {"mode": "max", "group": "p2", "data_format": "channels_first"},
    )


class TestGroupPooling(LayerContract):
    cases = tuple(
        LayerCase(
            GroupPooling,
            {"mode": mode},
            (2, 6, 6, groups.get(group).order, 3),
            (2, 6, 6, 3),
            weights=0,
            group=group,
            rectangle=(5, 4),
        )
        for mode, group in (("mean", "p4"), ("max", "p4m"))
    )
    layer = GroupPooling
    arguments = ({"mode": "mean", "data_format": "channels_first"},)


@pytest.mark.parametrize("mode", ["max", "mean", "binomial"])
@pytest.mark.parametrize(("size", "strides"), [(1, 2), (2, 2), (3, 2), (3, 1)])
def test_agrees_with_oracle(mode, size, strides):
    x = np.random.default_rng(0).normal(size=(2, 7, 7, 4, 3))
    x = x.astype("float32")
    layer = SpatialPooling2D(size, strides, mode, exact=False)
    expected = oracles.pool(x, size, strides, mode)
    assert relative_difference(as_array(layer(x)), expected) < 1e-6
    image = as_array(layer(x[:, :, :, 0]))
    assert relative_difference(image, expected[:, :, :, 0]) < 1e-6
    # The gradient of a maximum goes to its place, of a mean to everywhere.
    cotangent = np.random.default_rng(1).normal(size=expected.shape)
    (of_x,) = gradients(layer, x, cotangent.astype("float32"))
    direction = np.random.default_rng(2).normal(size=x.shape)
    step = 1e-6 * direction
    change = oracles.pool(x + step, size, strides, mode) - oracles.pool(
        x - step, size, strides, mode
    )
    np.testing.assert_allclose(
        (of_x * direction).sum(), (change * cotangent).sum() / 2e-6, rtol=1e-3
    )


def test_eighth_turns():
    """On smooth images a binomial window has the smallest error."""
    rng = np.random.default_rng(0)
    radius = np.hypot(*(np.indices((48, 48)) - 23.5))
    images = ndimage.gaussian_filter(rng.normal(size=(3, 48, 48)), (0, 2, 2))
    images *= np.exp(-((radius / 14) ** 4))
    turned = ndimage.rotate(images, 45, axes=(2, 1), reshape=False, order=5)
    errors = []
    for layer in (
        SpatialPooling2D(4, 2, "binomial"),
        SpatialPooling2D(4, 2, "mean"),
        SpatialPooling2D(2, mode="mean"),
        SpatialPooling2D(2),
    ):
        still, moved = (
            as_array(layer(x[..., None].astype("float32")))[..., 0]
            for x in (images, turned)
        )
        expected = ndimage.rotate(
            still, 45, axes=(2, 1), reshape=False, order=5
        )
        errors.append(abs(moved - expected).max() / abs(still).max())
    binomial, *means, maximum = errors
    assert binomial < 0.8 * min(means) < 0.2 * maximum


def test_binomial_windows_that_are_not_square():
    """Along each axis the weights are those of a square window."""
    x = np.random.default_rng(0).normal(size=(2, 9, 9, 3)).astype("float32")
    layer = SpatialPooling2D((2, 4), (2, 1), "binomial", "z2", exact=False)
    rows = (x[:, 0:8:2] + x[:, 1:9:2]) / 2
    parts = [n * rows[:, :, k : k + 6] for k, n in enumerate((1, 3, 3, 1))]
    assert relative_difference(as_array(layer(x)), sum(parts) / 8) < 1e-6


@pytest.mark.parametrize("mode", ["max", "mean"])
def test_pooling_of_all_pixels_agrees_with_numpy(mode):
    x = np.random.default_rng(0).normal(size=(2, 3, 5, 4, 6))
    x = x.astype("float32")
    expected = getattr(x, mode)(axis=(1, 2), keepdims=True)
    layer = GlobalSpatialPooling2D(mode)
    assert relative_difference(as_array(layer(x)), expected) < 1e-6
    image = as_array(layer(x[:, :, :, 0]))
    assert relative_difference(image, expected[:, :, :, 0]) < 1e-6


def test_group_pooling_agrees_with_numpy():
    x = np.random.default_rng(0).normal(size=(2, 3, 3, 4, 5))
    x = x.astype("float32")
    np.testing.assert_array_equal(as_array(GroupPooling()(x)), x.max(axis=3))
    np.testing.assert_allclose(
        as_array(GroupPooling("mean")(x)), x.mean(axis=3), atol=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("group", ["z2m", "p2", "p4", "p4m"])
@pytest.mark.parametrize("mode", ["max", "mean"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_equivariance_sweep(group, mode, dtype):
    if dtype == "float64" and keras.backend.backend() not in FLOAT64_BACKENDS:
        pytest.skip("float64 is off by default on this backend")
    tolerance = {"float32": 1e-5, "float64": 1e-12}[dtype]
    verdicts = []
    for size in ((7, 7), (8, 8), (31, 31), (32, 32), (7, 8), (31, 9)):
        for pool, strides in ((2, 2), (3, 2), (2, 1), (3, 3), (3, 1)):
            order = groups.get(group).order
            arguments = (pool, strides, mode, group)
            layer = SpatialPooling2D(*arguments, dtype=dtype)
            verdicts.append(is_exact(group, size, pool, strides))
            for shape in ((2, *size, order, 2), (2, *size, 3)):
                if verdicts[-1]:
                    assert_equivariant(
                        layer, group, shape, dtype=dtype, rtol=tolerance
                    )
                    continue
                with pytest.raises(ValueError, match="exactly equivariant"):
                    layer.compute_output_shape(shape)
                free = SpatialPooling2D(*arguments, exact=False, dtype=dtype)
                error = equivariance_error(free, group, shape, dtype=dtype)
                assert error.max() > 1e-3
    assert verdicts.count(True) >= 10
    assert verdicts.count(False) >= 5


@pytest.mark.parametrize("name", ["avg", "average", "mean"])
def test_names_of_the_mean(name):
    for layer in (SpatialPooling2D(2, mode=name), GroupPooling(name)):
        assert layer.mode == "mean"
        assert layer.get_config()["mode"] == "mean"
    x = np.random.default_rng(0).normal(size=(1, 2, 2, 4, 3))
    y = as_array(ops.group_pool(keras.ops.convert_to_tensor(x), name))
    np.testing.assert_allclose(y, x.mean(axis=3), atol=1e-6)
    with pytest.raises(ValueError, match=r"'max' or 'mean'.*'sum'"):
        ops.group_pool(x, "sum")


@pytest.mark.parametrize("mode", ["max", "mean"])
def test_group_pooling_of_nothing(mode):
    x = np.ones((2, 0, 3, 4, 5), "float32")
    assert as_array(GroupPooling(mode)(x)).shape == (2, 0, 3, 5)


def test_mean_over_the_group_does_not_overflow():
    x = np.full((1, 1, 1, 32, 2), 3000, "float16")
    y = as_array(GroupPooling("mean", dtype="float16")(x))
    np.testing.assert_allclose(y, 3000, rtol=1e-3)


def test_refuses_what_is_inexact():
    layer = SpatialPooling2D(2, group="p4", name="pool")
    with pytest.raises(ValueError, match=r"'pool'.*size \(31, 31\).*30, 32"):
        layer.build((None, 31, 31, 4, 1))
    with pytest.raises(ValueError, match=r"size \(31, 31\)"):
        layer.compute_output_shape((None, 31, 31, 1))
    layer.build((None, 32, 32, 4, 1))
    with pytest.raises(ValueError, match=r"size \(31, 32\)"):
        layer(np.ones((1, 31, 32, 4, 1), "float32"))
    SpatialPooling2D(2, group="z2").build((None, 31, 31, 1))


def test_unknown_sizes_are_checked_in_the_call():
    with pytest.raises(ValueError, match=r"`exact=\"call\"` the size"):
        SpatialPooling2D(2).build((None, None, None, 4, 1))
    layer = SpatialPooling2D(2, exact="call", name="pool")
    inputs = keras.Input((None, None, 4, 1))
    model = keras.Model(inputs, layer(inputs))
    assert model.output_shape == (None, None, None, 4, 1)
    x = np.ones((1, 8, 8, 4, 1), "float32")
    assert tuple(model(x).shape) == (1, 4, 4, 4, 1)
    assert model.predict(x, verbose=0).shape == (1, 4, 4, 4, 1)
    message = r"'pool' would not be exactly.*`exact=False` to accept"
    with pytest.raises(ValueError, match=message) as error:
        model(np.ones((1, 8, 7, 4, 1), "float32"))
    assert 'exact="call"' not in str(error.value)
    # Known sizes are refused at once, even if one side is unknown.
    for size in ((7, 7), (None, 7), (7, None)):
        with pytest.raises(ValueError, match="would not be exactly"):
            SpatialPooling2D(2, exact="call").build((None, *size, 4, 1))
    revived = SpatialPooling2D.from_config(layer.get_config())
    assert revived.exact == "call"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pool_size": 0}, "`pool_size` must be a positive integer"),
        ({"pool_size": 2, "strides": (1, 2, 3)}, "`strides` must be"),
        ({"pool_size": 2, "mode": "sum"}, "'mean' or 'binomial'.*'sum'"),
        ({"pool_size": 2, "group": "q4"}, "Unknown group 'q4'"),
        ({"pool_size": 2, "data_format": "nchw"}, "`data_format` must be"),
        ({"pool_size": 2, "exact": "no"}, "`exact` must be True or False"),
        ({"pool_size": 2, "exact": 1}, "`exact` must be True or False or 'c"),
        ({"pool_size": (1, 2)}, "would not be exactly equivariant"),
        ({"pool_size": (1, 2), "exact": "call"}, "would not be exactly"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        SpatialPooling2D(**arguments)


def test_bad_shapes():
    with pytest.raises(ValueError, match="does not fit an input of size"):
        SpatialPooling2D(3).build((None, 2, 5, 1))
    with pytest.raises(ValueError, match="size 5, group 'p4' has 4"):
        SpatialPooling2D(3).build((None, 6, 6, 5, 1))
    with pytest.raises(ValueError, match=r"takes images.*or feature maps"):
        SpatialPooling2D(3).build((None, 6, 6))
    with pytest.raises(ValueError, match="'max' or 'mean'"):
        GroupPooling("binomial")
    with pytest.raises(ValueError, match="'gp' takes feature maps on a group"):
        GroupPooling(name="gp").build((None, 2, 2, 1))
