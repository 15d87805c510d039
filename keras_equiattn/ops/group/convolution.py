"""Lifting and group convolutions: one ordinary convolution each.

The orbit of the kernel is folded into the channel axes, so the cost is that of
a plain convolution with `order` times the channels.
"""

from typing import Any

from keras import ops

from keras_equiattn import _checks
from keras_equiattn import groups
from keras_equiattn.groups import Group
from keras_equiattn.ops._arguments import checked
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.backend import with_an_image
from keras_equiattn.ops.geometry import effective_window
from keras_equiattn.ops.group import dispatch
from keras_equiattn.ops.group.bases import FILTER_BASES
from keras_equiattn.ops.group.kernels import kernel_orbit
from keras_equiattn.ops.group.linear import group_linear


@checked()
def lifting_conv(
    x: Float[Tensor, "batch height width channels"],
    kernel: Float[Tensor, "rows columns channels filters"],
    group: str | Group,
    filter_basis: str = "pixel",
    **options: Any,
) -> Float[Tensor, "batch new_height new_width order filters"]:
    """Correlates images with every transformed copy of each filter.

    `y(x, h) = sum_d f(x + d) K(h^-1 d)`.

    Args:
        x: images.
        kernel: filters on the plane.
        group: a group or its name.
        filter_basis: how filters turn, "pixel" or "steerable", see
            `kernel_orbit`.
        **options: `strides`, `padding`, `dilation_rate` of `keras.ops.conv`.

    Returns:
        A feature map on the group.

    Raises:
        ValueError: for shapes that do not fit, and for bad options.
        TypeError: for tensors that do not hold floating point numbers.
    """
    group = groups.get(group)
    if tuple(kernel.shape[:2]) == (1, 1):
        _checks.choice(filter_basis, "filter_basis", FILTER_BASES)
        # A pixel looks the same in all poses.
        y = ops.expand_dims(conv(x, kernel, **options), 3)
        return ops.concatenate([y] * group.order, axis=3)
    orbit = kernel_orbit(
        kernel, group, group_axis=False, filter_basis=filter_basis
    )
    channels, filters = orbit.shape[-2:]
    folded = ops.reshape(
        ops.transpose(orbit, (1, 2, 3, 0, 4)),
        (*orbit.shape[1:3], channels, group.order * filters),
    )
    return unfold_channels(conv(x, folded, **options), group.order)


@checked()
def group_conv(
    x: Float[Tensor, "batch height width order channels"],
    kernel: Float[Tensor, "rows columns order channels filters"],
    group: str | Group,
    filter_basis: str = "pixel",
    **options: Any,
) -> Float[Tensor, "batch new_height new_width order filters"]:
    """Correlates feature maps on a group with filters on the group.

    `y(x, h) = sum_j sum_d f(x + d, j) K(h^-1 d, h^-1 j)`. With filters of one
    pixel this is `group_linear`, and JAX and PyTorch compute it by blocks under
    the conditions given there. Blocks cannot be differentiated in forward mode,
    unless `config.disable_recompute` was called.

    Args:
        x: feature maps on the group.
        kernel: filters on the group.
        group: a group or its name.
        filter_basis: how filters turn, "pixel" or "steerable", see
            `kernel_orbit`.
        **options: `strides`, `padding`, `dilation_rate` of `keras.ops.conv`.

    Returns:
        A feature map on the group.

    Raises:
        ValueError: for shapes that do not fit, and for bad options.
        TypeError: for tensors that do not hold floating point numbers.
    """
    group = groups.get(group)
    if tuple(kernel.shape[:2]) == (1, 1) and (
        dispatch.convolution_basis(x, kernel.shape[-1]) == "irreps"
    ):
        _checks.choice(filter_basis, "filter_basis", FILTER_BASES)
        strides, *_ = conv_options(**options)
        if strides != (1, 1):
            x = x[:, :: strides[0], :: strides[1]]
        return group_linear(x, kernel[0, 0], None, group, "irreps")
    orbit = kernel_orbit(
        kernel, group, group_axis=True, filter_basis=filter_basis
    )
    channels, filters = orbit.shape[-2:]
    folded = ops.reshape(
        ops.transpose(orbit, (1, 2, 3, 4, 0, 5)),
        (*orbit.shape[1:3], group.order * channels, group.order * filters),
    )
    return unfold_channels(
        conv(fold_channels(x), folded, **options), group.order
    )


@checked()
def group_depthwise_conv(
    x: Float[Tensor, "batch height width order channels"],
    kernel: Float[Tensor, "rows columns order channels multiplier"],
    group: str | Group,
    filter_basis: str = "pixel",
    **options: Any,
) -> Float[Tensor, "batch new_height new_width order filters"]:
    """Group convolution of each channel with filters of its own.

    `y(x, h, c, m) = sum_j sum_d f(x + d, j, c) K(h^-1 d, h^-1 j, c, m)`: it
    mixes pixels and group elements, but no channels.

    Args:
        x: feature maps on the group.
        kernel: filters on the group, `multiplier` for each channel.
        group: a group or its name.
        filter_basis: how filters turn, "pixel" or "steerable", see
            `kernel_orbit`.
        **options: `strides`, `padding`, `dilation_rate` of `keras.ops.conv`.

    Returns:
        A feature map on the group with `channels * multiplier` channels, those
        of one input channel beside each other.

    Raises:
        ValueError: for shapes that do not fit, and for bad options.
        TypeError: for tensors that do not hold floating point numbers.
    """
    group = groups.get(group)
    orbit = kernel_orbit(
        kernel, group, group_axis=True, filter_basis=filter_basis
    )
    *window, _, channels, multiplier = orbit.shape[1:]
    # Backends convolve blocks of channels that lie beside each other: here the
    # elements of one channel.
    folded = ops.reshape(
        ops.transpose(orbit, (1, 2, 3, 4, 0, 5)),
        (*window, group.order, channels * group.order * multiplier),
    )
    y = conv(fold_channels(ops.swapaxes(x, 3, 4)), folded, **options)
    size = ops.shape(y)[:3]
    y = ops.reshape(y, (*size, channels, group.order, multiplier))
    y = ops.swapaxes(y, 3, 4)
    return ops.reshape(y, (*size, group.order, channels * multiplier))


@checked()
def group_conv_transpose(
    x: Float[Tensor, "batch height width order channels"],
    kernel: Float[Tensor, "rows columns order channels filters"],
    group: str | Group,
    strides: int | tuple[int, int] = 1,
    padding: str = "valid",
    filter_basis: str = "pixel",
) -> Float[Tensor, "batch new_height new_width order filters"]:
    """Transposed group convolution: each value paints a transformed filter.

    `y(x, h) = sum_j sum_d f(x', j) K(h^-1 d, h^-1 j)` over all pixels `x'` and
    offsets `d` with `strides * x' + d = x`: the filters are painted `strides`
    pixels apart, so the output is larger than the input.

    Args:
        x: feature maps on the group.
        kernel: filters on the group.
        group: a group or its name.
        strides: an integer or a pair.
        padding: "valid" keeps all that is painted; "same" crops it to
            `strides` times the size of the input.
        filter_basis: how filters turn, "pixel" or "steerable", see
            `kernel_orbit`.

    Returns:
        A feature map on the group.

    Raises:
        ValueError: for shapes that do not fit, and for bad options.
        TypeError: for tensors that do not hold floating point numbers.
    """
    group = groups.get(group)
    strides = _checks.pair(strides, "strides")
    _checks.choice(padding, "padding", ("valid", "same"))
    orbit = kernel_orbit(
        kernel, group, group_axis=True, filter_basis=filter_basis
    )
    channels, filters = orbit.shape[-2:]
    folded = ops.reshape(
        ops.transpose(orbit, (1, 2, 0, 5, 3, 4)),
        (*orbit.shape[1:3], group.order * filters, group.order * channels),
    )
    y = ops.conv_transpose(
        with_an_image(fold_channels(x)),
        folded,
        strides=strides,
        padding=padding,
        data_format="channels_last",
    )
    y = y[:0] if x.shape[0] == 0 else y
    return unfold_channels(y, group.order)


def fold_channels(
    x: Float[Tensor, "batch height width order channels"],
) -> Float[Tensor, "batch height width folded"]:
    """Merges the group axis into the channels, group-major."""
    *outer, order, channels = ops.shape(x)
    return ops.reshape(x, (*outer, order * channels))


def unfold_channels(
    x: Float[Tensor, "batch height width folded"], order: int
) -> Float[Tensor, "batch height width {order} channels"]:
    """Undoes `fold_channels`."""
    *outer, folded = ops.shape(x)
    return ops.reshape(x, (*outer, order, folded // order))


def conv_options(
    strides: int | tuple[int, int] = 1,
    padding: str = "valid",
    dilation_rate: int | tuple[int, int] = 1,
) -> tuple[tuple[int, int], str, tuple[int, int]]:
    """The options of a convolution, checked; numbers become pairs."""
    strides = _checks.pair(strides, "strides")
    dilation_rate = _checks.pair(dilation_rate, "dilation_rate")
    _checks.strides_or_dilation(strides, dilation_rate)
    _checks.choice(padding, "padding", ("valid", "same"))
    return strides, padding, dilation_rate


def conv(
    x: Float[Tensor, "batch height width channels"],
    kernel: Float[Tensor, "rows columns inputs filters"],
    strides: int | tuple[int, int] = 1,
    padding: str = "valid",
    dilation_rate: int | tuple[int, int] = 1,
) -> Float[Tensor, "batch new_height new_width filters"]:
    """`keras.ops.conv` with channels last, which also takes an empty batch.

    A kernel with fewer `inputs` than there are channels makes it a grouped
    convolution: each block of that many channels has its share of the filters.
    """
    strides, padding, dilation_rate = conv_options(
        strides, padding, dilation_rate
    )
    size, window = tuple(x.shape)[1:3], tuple(kernel.shape)[:2]
    for n, k, d in zip(size, window, dilation_rate, strict=True):
        extent = effective_window(k, d)
        if padding == "valid" and isinstance(n, int) and extent > n:
            raise ValueError(
                f"A kernel that covers {extent} pixels does not fit with "
                f"padding 'valid'. Received: x.shape={tuple(x.shape)}, "
                f"kernel.shape={tuple(kernel.shape)}"
            )
    y = ops.conv(
        with_an_image(x),
        kernel,
        strides=strides,
        padding=padding,
        data_format="channels_last",
        dilation_rate=dilation_rate,
    )
    return y[:0] if x.shape[0] == 0 else y
