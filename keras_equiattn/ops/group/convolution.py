"""Lifting and group convolution: one ordinary convolution each.

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
from keras_equiattn.ops.group.kernels import kernel_orbit


@checked()
def lifting_conv(
    x: Float[Tensor, "batch height width channels"],
    kernel: Float[Tensor, "rows columns channels filters"],
    group: str | Group,
    **options: Any,
) -> Float[Tensor, "batch new_height new_width order filters"]:
    """Correlates images with every transformed copy of each filter.

    `y(x, h) = sum_d f(x + d) K(h^-1 d)`.

    Args:
        x: images.
        kernel: filters on the plane.
        group: a group or its name.
        **options: `strides`, `padding`, `dilation_rate` of `keras.ops.conv`.

    Returns:
        A feature map on the group.
    """
    group = groups.get(group)
    orbit = kernel_orbit(kernel, group, group_axis=False)
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
    **options: Any,
) -> Float[Tensor, "batch new_height new_width order filters"]:
    """Correlates feature maps on a group with filters on the group.

    `y(x, h) = sum_j sum_d f(x + d, j) K(h^-1 d, h^-1 j)`.

    Args:
        x: feature maps on the group.
        kernel: filters on the group.
        group: a group or its name.
        **options: `strides`, `padding`, `dilation_rate` of `keras.ops.conv`.

    Returns:
        A feature map on the group.
    """
    group = groups.get(group)
    orbit = kernel_orbit(kernel, group, group_axis=True)
    channels, filters = orbit.shape[-2:]
    folded = ops.reshape(
        ops.transpose(orbit, (1, 2, 3, 4, 0, 5)),
        (*orbit.shape[1:3], group.order * channels, group.order * filters),
    )
    return unfold_channels(
        conv(fold_channels(x), folded, **options), group.order
    )


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


def conv(
    x: Float[Tensor, "batch height width channels"],
    kernel: Float[Tensor, "rows columns channels filters"],
    strides: int | tuple[int, int] = 1,
    padding: str = "valid",
    dilation_rate: int | tuple[int, int] = 1,
) -> Float[Tensor, "batch new_height new_width filters"]:
    """`keras.ops.conv` with channels last, also of an empty batch."""
    strides = _checks.pair(strides, "strides")
    dilation_rate = _checks.pair(dilation_rate, "dilation_rate")
    _checks.strides_or_dilation(strides, dilation_rate)
    _checks.choice(padding, "padding", ("valid", "same"))
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
