"""Lifting and group convolution: contract, oracle, vectors, errors."""

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
from keras_equiattn import ops
from keras_equiattn.layers import GroupConv2D
from keras_equiattn.layers import LiftingConv2D
from keras_equiattn.ops import is_exact
from keras_equiattn.testing import assert_equivariant
from keras_equiattn.testing import equivariance_error
from keras_equiattn.testing import relative_difference

# Every argument away from its default, with strides or with dilation.
ARGUMENTS = {
    "filters": 3,
    "kernel_size": (5, 5),
    "padding": "same",
    "data_format": "channels_first",
    "activation": "tanh",
    "use_bias": False,
    "kernel_initializer": keras.initializers.HeNormal(seed=1),
    "bias_initializer": keras.initializers.Constant(0.5),
    "kernel_regularizer": keras.regularizers.L2(0.01),
    "bias_regularizer": keras.regularizers.L1(0.01),
    "activity_regularizer": keras.regularizers.L2(0.02),
    "kernel_constraint": keras.constraints.MaxNorm(3.0),
    "bias_constraint": keras.constraints.NonNeg(),
    "group": "p4m",
    "exact": False,
    "filter_basis": "steerable",
}
ARGUMENTS = (
    {**ARGUMENTS, "strides": (2, 2)},
    {**ARGUMENTS, "dilation_rate": (2, 2)},
)


def cases(layer, planar):
    def case(group, arguments, shape, output, **options):
        rest = (2,) if planar else (groups.get(group).order, 2)
        order = groups.get(group).order
        return LayerCase(
            layer,
            {"group": group, "filters": 3, **arguments},
            (2, *shape, *rest),
            (2, *output, order, 3),
            weights=2,
            group=group,
            **options,
        )

    return (
        case("p4", {"kernel_size": 3}, (8, 8), (6, 6), rectangle=(7, 5)),
        case(
            "p4m",
            {"kernel_size": 3, "padding": "same", "activation": "relu"},
            (7, 7),
            (7, 7),
            rectangle=(6, 9),
            reach=1,
        ),
        case(
            "z2m",
            {"kernel_size": (2, 3), "dilation_rate": (1, 2)},
            (6, 9),
            (5, 5),
            rectangle=(9, 6),
        ),
        case(
            "p2",
            {"kernel_size": (3, 4), "strides": (2, 3)},
            (7, 10),
            (3, 3),
            unknown_size=False,
        ),
        case("p8", {"kernel_size": 3}, (7, 7), (5, 5), rectangle=(8, 6)),
        case("p8", {"kernel_size": 3, "filter_basis": "pixel"}, (5, 5), (3, 3)),
    )


class TestLiftingConv2D(LayerContract):
    cases = cases(LiftingConv2D, planar=True)
    arguments = ARGUMENTS
    layer = LiftingConv2D


class TestGroupConv2D(LayerContract):
    cases = cases(GroupConv2D, planar=False)
    arguments = ARGUMENTS
    layer = GroupConv2D


def lifted(layer, group):
    return () if layer is LiftingConv2D else (groups.get(group).order,)


@pytest.mark.parametrize("layer", [LiftingConv2D, GroupConv2D])
@pytest.mark.parametrize(
    ("group", "size", "options"),
    [
        ("z2", (5, 4), {"kernel_size": 3}),
        ("z2m", (6, 7), {"kernel_size": (2, 3)}),
        ("p2m", (5, 4), {"kernel_size": 3, "padding": "same"}),
        ("p4", (7, 7), {"kernel_size": 3, "strides": 2, "padding": "same"}),
        ("p4m", (7, 6), {"kernel_size": 3, "dilation_rate": 2}),
    ],
)
def test_agrees_with_oracle(layer, group, size, options):
    """Outputs, and gradients by the linearity of the oracle."""
    rng = np.random.default_rng(0)
    conv = layer(4, group=group, **options)
    x = rng.normal(size=(2, *size, *lifted(layer, group), 3))
    conv.build(x.shape)
    kernel, bias = (rng.normal(size=v.shape) for v in conv.weights)
    conv.set_weights([kernel, bias])
    convolve = {
        LiftingConv2D: oracles.lifting_conv,
        GroupConv2D: oracles.group_conv,
    }[layer]
    options = {
        "strides": options.get("strides", 1),
        "padding": options.get("padding", "valid"),
        "dilation": options.get("dilation_rate", 1),
    }
    expected = convolve(x, kernel, group, **options) + bias
    x32 = x.astype("float32")
    assert relative_difference(as_array(conv(x32)), expected) < 1e-5

    cotangent = rng.normal(size=expected.shape)
    of_x, of_kernel, of_bias = gradients(conv, x32, cotangent.astype("float32"))
    direction = rng.normal(size=x.shape)
    moved = convolve(direction, kernel, group, **options)
    np.testing.assert_allclose(
        (of_x * direction).sum(), (moved * cotangent).sum(), rtol=1e-3
    )
    direction = rng.normal(size=kernel.shape)
    moved = convolve(x, direction, group, **options)
    np.testing.assert_allclose(
        (of_kernel * direction).sum(), (moved * cotangent).sum(), rtol=1e-3
    )
    np.testing.assert_allclose(
        of_bias, cotangent.sum(axis=(0, 1, 2, 3)), rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize("group", ["p4", "p4m"])
@pytest.mark.parametrize("kind", ["lift", "group"])
def test_agrees_with_the_authors_of_attentive_convolution(kind, group):
    vectors = load_vectors(f"conv_{kind}_{group}")
    # Their element 4 m + r is ours 4 m + (2 - r) for m = 1, see the README.
    ours = {"p4": [0, 1, 2, 3], "p4m": [0, 1, 2, 3, 6, 5, 4, 7]}[group]
    x, kernel = vectors["x"], vectors["w.weight"].astype("float64")
    if kind == "lift":
        layer = LiftingConv2D(kernel.shape[0], 3, group=group, use_bias=False)
        x = x.transpose(0, 2, 3, 1)
        kernel = kernel.transpose(2, 3, 1, 0)
    else:
        layer = GroupConv2D(kernel.shape[0], 3, group=group, use_bias=False)
        x = x.transpose(0, 3, 4, 2, 1)[..., ours, :]
        haar = {"p4": np.pi / 2, "p4m": np.pi}[group]
        kernel = haar * kernel.transpose(3, 4, 2, 1, 0)[:, :, ours]
    y = vectors["y_float64"].transpose(0, 3, 4, 2, 1)[..., ours, :]
    _assert_agrees(layer, x, [kernel], y)


@pytest.mark.parametrize("group", ["p4", "p4m"])
def test_agrees_with_the_reference_of_affine_self_convolution(group):
    vectors = load_vectors(f"{group}_lift_conv_6x6_3to4_k3")
    weights = [vectors["w_W"], vectors["w_b"]]
    layer = LiftingConv2D(4, 3, padding="same", group=group)
    x = vectors["x"][None]
    _assert_agrees(layer, x, weights, np.moveaxis(vectors["y"], 0, 2)[None])


def _assert_agrees(layer, x, weights, expected):
    """In float32, and in float64 where the backend has it."""
    dtypes = {"float32": 1e-5, "float64": 1e-10}
    if keras.backend.backend() not in FLOAT64_BACKENDS:
        del dtypes["float64"]
    for dtype, tolerance in dtypes.items():
        config = {**layer.get_config(), "dtype": dtype}
        copy = type(layer).from_config(config)
        copy.build(x.shape)
        copy.set_weights(weights)
        y = as_array(copy(x.astype(dtype)))
        assert relative_difference(y, expected) < tolerance


@pytest.mark.slow
@pytest.mark.parametrize("group", ["z2m", "p2", "p4", "p4m"])
@pytest.mark.parametrize("layer", [LiftingConv2D, GroupConv2D])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_equivariance_sweep(layer, group, dtype):
    """Every size, padding, dilation and exact stride, with biases."""
    if dtype == "float64" and keras.backend.backend() not in FLOAT64_BACKENDS:
        pytest.skip("float64 is off by default on this backend")
    verdicts = []
    for size in ((7, 7), (8, 8), (31, 31), (32, 32), (7, 8), (31, 9)):
        for options in (
            {"padding": "valid"},
            {"padding": "same"},
            {"padding": "valid", "kernel_size": 4},
            {"padding": "same", "dilation_rate": 2},
            {"padding": "valid", "dilation_rate": 3},
            {"padding": "same", "strides": 2},
            {"padding": "valid", "strides": 2},
            {"padding": "valid", "strides": 2, "kernel_size": 2},
        ):
            arguments = {"kernel_size": 3, **options, "group": group}
            conv = layer(3, **arguments, dtype=dtype, exact=False)
            shape = (2, *size, *lifted(layer, group), 2)
            conv.build(shape)
            rng = np.random.default_rng(0)
            conv.set_weights([rng.normal(size=v.shape) for v in conv.weights])
            rule = is_exact(
                group,
                size,
                conv.kernel_size,
                conv.strides,
                conv.dilation_rate,
                conv.padding,
            )
            verdicts.append(rule)
            if rule:
                layer(3, **arguments).build(shape)
                tolerance = {"float32": 1e-5, "float64": 1e-12}[dtype]
                assert_equivariant(
                    conv, group, shape, dtype=dtype, rtol=tolerance
                )
            else:
                with pytest.raises(ValueError, match="exactly equivariant"):
                    layer(3, **arguments).build(shape)
                error = equivariance_error(conv, group, shape, dtype=dtype)
                assert error.max() > 1e-3
    assert verdicts.count(True) >= 20
    assert verdicts.count(False) >= 5


def test_planar_group_convolution_is_a_convolution():
    x = np.random.default_rng(0).normal(size=(2, 6, 7, 3)).astype("float32")
    plain = keras.layers.Conv2D(4, 3)
    expected = as_array(plain(x))
    kernel, bias = plain.get_weights()
    layer = GroupConv2D(4, 3, group="z2")
    assert layer(x).shape == (2, 4, 5, 4)
    layer.set_weights([kernel[:, :, None], bias])
    assert relative_difference(as_array(layer(x)), expected) < 1e-6
    five = as_array(layer(x[:, :, :, None]))
    assert relative_difference(five[:, :, :, 0], expected) < 1e-6
    lift = LiftingConv2D(4, 3, group="z2")
    assert lift(x).shape == (2, 4, 5, 1, 4)
    model = keras.Sequential([keras.Input((6, 7, 3)), layer])
    assert model.output_shape == (None, 4, 5, 4)


def test_fan_in_includes_the_input_order():
    """He's variance is 2 over the number of inputs of one output."""
    layer = GroupConv2D(256, 3, group="p4", kernel_initializer="he_normal")
    layer.build((None, 8, 8, 4, 8))
    variance = as_array(layer.kernel).var()
    np.testing.assert_allclose(variance, 2 / (9 * 4 * 8), rtol=0.05)
    layer = LiftingConv2D(512, 3, group="p4", kernel_initializer="he_normal")
    layer.build((None, 8, 8, 8))
    variance = as_array(layer.kernel).var()
    np.testing.assert_allclose(variance, 2 / (9 * 8), rtol=0.05)


class TestSteerableFilters:
    @pytest.mark.parametrize("layer", [LiftingConv2D, GroupConv2D])
    def test_basis_of_each_group(self, layer):
        for name in groups.names():
            group = groups.get(name)
            expected = "pixel" if group.acts_on_grid else "steerable"
            assert layer(2, 3, group=name).filter_basis == expected
        assert layer(2, 3, filter_basis="steerable").kernel_size == (3, 3)

    @pytest.mark.parametrize("layer", [LiftingConv2D, GroupConv2D])
    def test_filters_are_those_of_pixels(self, layer):
        """The projection of pixels on the basis gives the same output."""
        shape = (2, 7, 7, *lifted(layer, "p8"), 3)
        x = np.random.default_rng(0).normal(size=shape).astype("float32")
        steerable = layer(4, 5, group="p8")
        y = as_array(steerable(x))
        assert steerable.kernel.shape == (13, *shape[3:], 4)
        pixels = as_array(steerable.filters_of(steerable.kernel, 5))
        operation = {
            LiftingConv2D: ops.lifting_conv,
            GroupConv2D: ops.group_conv,
        }[layer]
        found = operation(x, pixels, "p8", filter_basis="steerable")
        assert relative_difference(as_array(found), y) < 1e-5

    def test_on_a_grid_they_are_ordinary_filters(self):
        layer = GroupConv2D(4, 3, group="p4m", filter_basis="steerable")
        x = np.random.default_rng(0).normal(size=(2, 6, 6, 8, 3))
        x = x.astype("float32")
        y = as_array(layer(x))
        plain = GroupConv2D(4, 3, group="p4m")
        plain.build(x.shape)
        kernel = as_array(layer.filters_of(layer.kernel, 3))
        plain.set_weights([kernel, as_array(layer.bias)])
        assert relative_difference(as_array(plain(x)), y) < 1e-5

    @pytest.mark.parametrize("size", [3, 5, 7])
    def test_initial_outputs_are_as_large_as_those_of_pixels(self, size):
        x = np.random.default_rng(0).normal(size=(4, 21, 21, 8))
        spread = []
        for basis in ("pixel", "steerable"):
            layer = LiftingConv2D(
                64, size, group="p4", filter_basis=basis, use_bias=False
            )
            spread.append(as_array(layer(x.astype("float32"))).std())
        assert spread[1] == pytest.approx(spread[0], rel=0.1)

    def test_files_from_before_there_was_a_choice(self):
        config = GroupConv2D(4, 3, group="p8").get_config()
        del config["filter_basis"]
        assert GroupConv2D.from_config(config).filter_basis == "pixel"

    def test_rectangles_are_refused(self):
        message = r"square\. Received: kernel_size=\(3, 5\), filter_basis"
        with pytest.raises(ValueError, match=message):
            LiftingConv2D(2, (3, 5), group="z2", filter_basis="steerable")


def test_variables():
    layer = GroupConv2D(5, 3, group="p4m", name="g")
    layer.build((None, 8, 8, 8, 2))
    shapes = {v.name: tuple(v.shape) for v in layer.weights}
    assert shapes == {"kernel": (3, 3, 8, 2, 5), "bias": (5,)}
    assert layer.group == groups.get("p4m")


def test_numpy_integers_are_integers():
    conv = LiftingConv2D(np.int64(2), np.int32(3), strides=np.array([1, 1]))
    config = conv.get_config()
    assert (config["filters"], config["kernel_size"]) == (2, (3, 3))
    assert type(config["filters"]) is int
    free = LiftingConv2D(2, 2, padding="same", exact=False)
    assert free(np.ones((1, 4, 4, 1), "float32")).shape == (1, 4, 4, 4, 2)


@pytest.mark.parametrize("layer", [LiftingConv2D, GroupConv2D])
def test_unknown_sizes_are_checked_in_the_call(layer):
    rest = (*lifted(layer, "p4"), 2)
    conv = layer(3, 3, strides=2, exact="call")
    conv.build((None, None, None, *rest))
    assert conv.compute_output_shape((None, None, 7, *rest))[2] == 3
    assert tuple(conv(np.ones((1, 7, 9, *rest))).shape) == (1, 3, 4, 4, 3)
    with pytest.raises(ValueError, match="would not be exactly equivariant"):
        conv(np.ones((1, 7, 8, *rest)))
    assert layer.from_config(conv.get_config()).exact == "call"
    # No size would be exact.
    with pytest.raises(ValueError, match="use an odd window"):
        layer(3, 2, padding="same", exact="call")
    with pytest.raises(ValueError, match="square window and equal strides"):
        layer(3, 3, strides=(1, 2), exact="call")


def test_built_at_an_exact_size_called_at_another():
    layer = LiftingConv2D(2, 3, strides=2, padding="same", group="p4")
    layer.build((None, 31, 31, 1))
    assert layer(np.ones((1, 33, 33, 1), "float32")).shape == (1, 17, 17, 4, 2)
    with pytest.raises(ValueError, match=r"size \(32, 32\).*31, 33"):
        layer(np.ones((1, 32, 32, 1), "float32"))
    with pytest.raises(ValueError, match=r"size \(32, 32\)"):
        layer.compute_output_shape((None, 32, 32, 1))
    free = LiftingConv2D(
        2, 3, strides=2, padding="same", group="p4", exact=False
    )
    assert free(np.ones((1, 32, 32, 1), "float32")).shape == (1, 16, 16, 4, 2)


@pytest.mark.parametrize("layer", [LiftingConv2D, GroupConv2D])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"filters": 0}, "`filters` must be a positive integer.*0"),
        ({"filter_basis": "fourier"}, "'pixel' or 'steerable'.*'fourier'"),
        ({"filters": 2.5}, "`filters` must be a positive integer.*2.5"),
        ({"kernel_size": (3, 3, 3)}, r"`kernel_size` must.*\(3, 3, 3\)"),
        ({"kernel_size": 0}, "`kernel_size` must be a positive integer"),
        ({"strides": "2"}, "`strides` must be a positive integer"),
        ({"dilation_rate": -1}, "`dilation_rate` must be a positive"),
        ({"padding": "full"}, "`padding` must be 'valid' or 'same'.*'full'"),
        ({"data_format": "last"}, "`data_format` must be.*'last'"),
        ({"group": "p5"}, "Unknown group 'p5'.*The groups are"),
        ({"kernel_size": (3, 5)}, r"square kernel.*\(3, 5\)"),
        ({"strides": 2, "dilation_rate": 2}, "cannot be combined"),
        ({"activation": "no"}, "activation function identifier: no"),
        ({"use_bias": "no"}, "`use_bias` must be True or False.*'no'"),
        ({"exact": 1}, "`exact` must be True or False.*1"),
        # Exact at no size, which is known before a size is.
        ({"kernel_size": 2, "padding": "same"}, "use an odd window"),
        ({"strides": (1, 2)}, "equal strides and dilation rates"),
        ({"dilation_rate": (1, 2)}, "equal strides and dilation rates"),
    ],
)
def test_bad_arguments(layer, arguments, message):
    with pytest.raises(ValueError, match=message):
        layer(**{"filters": 2, "kernel_size": 3, **arguments})


def test_kernels_that_no_memory_holds():
    layer = GroupConv2D(10**6, 3, group="p4", name="wide")
    message = r"'kernel' of GroupConv2D 'wide' would hold 3,600,000,000 n.*13 G"
    with pytest.raises(ValueError, match=message):
        layer.build((None, 8, 8, 4, 100))


def test_bad_shapes():
    lift = LiftingConv2D(2, 3, name="lift")
    with pytest.raises(ValueError, match=r"'lift' takes images \(batch"):
        lift.build((None, 8, 8, 4, 1))
    with pytest.raises(ValueError, match="known number of channels"):
        lift.build((None, 8, 8, None))
    with pytest.raises(ValueError, match="covers 3 pixels does not fit"):
        lift.build((None, 2, 8, 1))
    conv = GroupConv2D(2, 3, name="conv")
    with pytest.raises(ValueError, match="see LiftingConv2D"):
        conv.build((None, 8, 8, 1))
    with pytest.raises(ValueError, match="size 8, group 'p4' has 4 elements"):
        conv.build((None, 8, 8, 8, 1))
    conv.build((None, 8, 8, 4, 1))
    with pytest.raises(ValueError, match="expected axis -1"):
        conv(np.ones((1, 8, 8, 4, 2), "float32"))
