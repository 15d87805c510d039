"""Transposed, depthwise and separable group convolutions."""

import keras
import numpy as np
import oracles
import pytest
from layer_contract import as_array
from layer_contract import call_of
from layer_contract import DTYPE
from layer_contract import gradients
from layer_contract import LayerCase
from layer_contract import LayerContract
from layer_contract import LIMIT

from keras_equiattn import groups
from keras_equiattn.layers import GroupConv2D
from keras_equiattn.layers import GroupConv2DTranspose
from keras_equiattn.layers import GroupDepthwiseConv2D
from keras_equiattn.layers import GroupSeparableConv2D
from keras_equiattn.testing import equivariance_error
from keras_equiattn.testing import relative_difference

# Every argument away from its default, with strides or with dilation.
ARGUMENTS = {
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
STRIDES = {**ARGUMENTS, "strides": (2, 2)}
DILATION = {**ARGUMENTS, "dilation_rate": (2, 2)}


def case(layer, group, arguments, size, output, weights=2, **options):
    """An input of two channels, an output of six."""
    order = groups.get(group).order
    filters = {"filters": 6}
    if layer is GroupDepthwiseConv2D:
        filters = {"depth_multiplier": 3}
    return LayerCase(
        layer,
        {"group": group, **filters, **arguments},
        (2, *size, order, 2),
        (2, *output, order, 6),
        weights=weights,
        group=group,
        **options,
    )


class TestGroupConv2DTranspose(LayerContract):
    layer = GroupConv2DTranspose
    without = ("dilation_rate",)
    arguments = ({"filters": 3, **STRIDES},)
    cases = (
        case(
            layer,
            "p4",
            {"kernel_size": 4, "strides": 2, "padding": "same"},
            (3, 3),
            (6, 6),
            rectangle=(4, 3),
            reach=None,
            no_shift="a shift of one pixel shifts the output by two",
        ),
        case(
            layer,
            "p4m",
            {"kernel_size": 3, "activation": "relu"},
            (4, 4),
            (6, 6),
            rectangle=(3, 5),
            reach=2,
        ),
        case(
            layer,
            "z2m",
            {"kernel_size": (2, 4), "strides": (1, 2)},
            (4, 3),
            (5, 8),
            reach=None,
            no_shift="a shift of one pixel shifts the output by two",
        ),
        case(layer, "p8", {"kernel_size": 3}, (4, 4), (6, 6), reach=2),
    )


class TestGroupDepthwiseConv2D(LayerContract):
    layer = GroupDepthwiseConv2D
    arguments = tuple(
        {"depth_multiplier": 2, **options} for options in (STRIDES, DILATION)
    )
    without = ("filters",)
    cases = (
        case(layer, "p4", {"kernel_size": 3}, (6, 6), (4, 4), rectangle=(7, 5)),
        case(
            layer,
            "p4m",
            {"kernel_size": 3, "padding": "same", "activation": "relu"},
            (5, 5),
            (5, 5),
            rectangle=(6, 4),
            reach=1,
        ),
        case(layer, "p8", {"kernel_size": 3}, (5, 5), (3, 3)),
    )


class TestGroupSeparableConv2D(LayerContract):
    layer = GroupSeparableConv2D
    arguments = tuple(
        {
            "filters": 3,
            "depth_multiplier": 2,
            "pointwise_initializer": keras.initializers.HeNormal(seed=2),
            "pointwise_regularizer": keras.regularizers.L2(0.03),
            "pointwise_constraint": keras.constraints.MaxNorm(2.0),
            **options,
        }
        for options in (STRIDES, DILATION)
    )
    cases = (
        case(
            layer,
            "p4",
            {"kernel_size": 3, "depth_multiplier": 2},
            (6, 6),
            (4, 4),
            weights=3,
            rectangle=(7, 5),
        ),
        case(
            layer,
            "p2m",
            {"kernel_size": (3, 1), "padding": "same"},
            (5, 4),
            (5, 4),
            weights=3,
            reach=1,
        ),
        case(layer, "p8", {"kernel_size": 3}, (5, 5), (3, 3), weights=3),
    )


def built(layer, x):
    """Builds the layer with random weights, and returns them."""
    layer.build(x.shape)
    rng = np.random.default_rng(1)
    weights = [rng.normal(size=v.shape) for v in layer.weights]
    layer.set_weights(weights)
    return weights


def check(layer, x, linear):
    """Compares with an oracle that is linear in the input and the kernel.

    Args:
        layer: not built.
        x: its input.
        linear: the oracle, of the input and the kernel.
    """
    kernel, bias, *others = built(layer, x)
    expected = linear(x, kernel, *others) + bias
    given = x.astype(DTYPE)
    assert (
        relative_difference(as_array(call_of(layer)(given)), expected) < LIMIT
    )

    rng = np.random.default_rng(2)
    cotangent = rng.normal(size=expected.shape)
    of_x, of_kernel, of_bias, *_ = gradients(
        layer, given, cotangent.astype(DTYPE)
    )
    for gradient, values, moved in (
        (of_x, x, lambda d: linear(d, kernel, *others)),
        (of_kernel, kernel, lambda d: linear(x, d, *others)),
    ):
        direction = rng.normal(size=values.shape)
        np.testing.assert_allclose(
            (gradient * direction).sum(),
            (moved(direction) * cotangent).sum(),
            rtol=1e-3,
        )
    np.testing.assert_allclose(
        of_bias, cotangent.sum(axis=(0, 1, 2, 3)), rtol=1e-3, atol=1e-4
    )


def images(group, size, channels=2):
    shape = (2, *size, groups.get(group).order, channels)
    return np.random.default_rng(0).normal(size=shape)


@pytest.mark.parametrize(
    ("group", "size", "kernel_size", "strides", "padding"),
    [
        ("p4", (3, 3), (4, 4), (2, 2), "same"),
        ("p2m", (2, 3), (3, 4), (2, 1), "valid"),
        pytest.param(
            *("p4m", (3, 2), (3, 3), (1, 1), "same"),
            marks=pytest.mark.torch_first,
        ),
        pytest.param(
            *("z2m", (3, 3), (3, 2), (3, 2), "valid"),
            marks=pytest.mark.torch_first,
        ),
    ],
)
def test_transposed_agrees_with_oracle(
    group, size, kernel_size, strides, padding
):
    layer = GroupConv2DTranspose(
        3,
        kernel_size,
        strides=strides,
        padding=padding,
        group=group,
        dtype=DTYPE,
    )
    check(
        layer,
        images(group, size),
        lambda x, kernel: oracles.group_conv_transpose(
            x, kernel, group, strides, padding
        ),
    )


def test_transposed_is_the_transpose_of_a_convolution():
    """`<conv(x), y> = <x, transposed(y)>` with the kernel exchanged."""
    group = groups.get("p4m")
    x, y = images("p4m", (8, 8)), images("p4m", (4, 4), 3)
    conv = GroupConv2D(
        3, 4, 2, "same", use_bias=False, group=group, exact=False, dtype=DTYPE
    )
    back = GroupConv2DTranspose(
        2,
        4,
        strides=2,
        padding="same",
        use_bias=False,
        group=group,
        dtype=DTYPE,
    )
    (kernel,) = built(conv, x)
    back.build(y.shape)
    # The transpose exchanges the two poses, so `g` becomes its inverse.
    turned = np.stack(
        [
            oracles.turn(kernel, "p4m", g)[:, :, g_inverse]
            for g, g_inverse in enumerate(group.inverse)
        ],
        axis=2,
    )
    back.set_weights([np.swapaxes(turned, 3, 4)])
    there = as_array(call_of(conv)(x.astype(DTYPE)))
    return_ = as_array(call_of(back)(y.astype(DTYPE)))
    np.testing.assert_allclose(
        (there * y).sum(), (x * return_).sum(), rtol=1e-4
    )


@pytest.mark.torch_first
@pytest.mark.parametrize(
    ("kernel_size", "strides", "padding", "exact"),
    [
        (3, 2, "valid", True),
        (2, 2, "valid", True),
        (1, 2, "valid", False),
        (2, 2, "same", True),
        (4, 2, "same", True),
        (3, 2, "same", False),
        (1, 3, "same", False),
        (5, 3, "same", True),
        (3, 1, "same", True),
        (2, 1, "same", False),
    ],
)
def test_what_is_refused_is_what_is_not_exact(
    kernel_size, strides, padding, exact
):
    options = {"strides": strides, "padding": padding, "dtype": DTYPE}
    layer = GroupConv2DTranspose(2, kernel_size, exact=False, **options)
    x = images("p4", (3, 3))
    built(layer, x)
    if tuple(layer(x).shape) != layer.compute_output_shape(x.shape):
        pytest.skip("this version of Keras returns images of another size")
    error = equivariance_error(layer, "p4", x.astype(DTYPE)).max()
    assert (error < 1e-5) == exact
    if exact:
        GroupConv2DTranspose(2, kernel_size, **options)
        return
    message = rf"exactly equivariant under 'p4'.*kernel_size=\({kernel_size}, "
    with pytest.raises(ValueError, match=message):
        GroupConv2DTranspose(2, kernel_size, **options)


@pytest.mark.once
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dilation_rate": 2}, r"`dilation_rate` must be 1.*\(2, 2\)"),
        ({"strides": (1, 2)}, "equal ones along both axes"),
        ({"padding": "full"}, "`padding` must be 'valid' or 'same'"),
    ],
)
def test_bad_arguments_of_transposed(arguments, message):
    with pytest.raises(ValueError, match=message):
        GroupConv2DTranspose(2, 4, **arguments)


@pytest.mark.parametrize(
    ("group", "size", "options"),
    [
        ("p4", (5, 5), {"kernel_size": 3, "strides": 2, "padding": "same"}),
        pytest.param(
            *("p4m", (4, 3), {"kernel_size": 3}),
            marks=pytest.mark.torch_first,
        ),
        pytest.param(
            *("z2m", (4, 6), {"kernel_size": (2, 3), "dilation_rate": (1, 2)}),
            marks=pytest.mark.torch_first,
        ),
    ],
)
def test_depthwise_and_separable_agree_with_oracle(group, size, options):
    of_oracle = {
        "strides": options.get("strides", 1),
        "padding": options.get("padding", "valid"),
    }
    x = images(group, size)
    options = {"group": group, "dtype": DTYPE, **options}
    if "dilation_rate" in options:
        # The oracle dilates both axes alike: its kernel has gaps instead.
        assert options["kernel_size"] == (2, 3)

        def spread(kernel):
            spaced = np.zeros((2, 5, *kernel.shape[2:]))
            spaced[:, ::2] = kernel
            return spaced

    else:

        def spread(kernel):
            return kernel

    def depthwise(x, kernel):
        return oracles.group_depthwise_conv(
            x, spread(kernel), group, **of_oracle
        )

    def separable(x, kernel, pointwise):
        zero = np.zeros(pointwise.shape[-1])
        return oracles.group_linear(
            depthwise(x, kernel), pointwise, zero, group
        )

    check(GroupDepthwiseConv2D(depth_multiplier=3, **options), x, depthwise)
    check(GroupSeparableConv2D(3, depth_multiplier=2, **options), x, separable)


@pytest.mark.once
def test_the_multiplier_has_a_name():
    """Keras' layers take the strides there."""
    for layer, sizes in (
        (GroupDepthwiseConv2D, (3,)),
        (GroupSeparableConv2D, (4, 3)),
    ):
        with pytest.raises(TypeError, match="positional argument"):
            layer(*sizes, 2)
