"""Attention on the input of a convolution.

Attention `a` takes `a x` away. What it leaves, `1 - sigmoid(s)`, is computed as
`sigmoid(-s)`: the difference has few digits where `a` is near 1, and none in
half precision. Scores are computed in float32; what has the size of the input
keeps its dtype.
"""

from keras import ops

from keras_equiattn import groups
from keras_equiattn.groups import Group
from keras_equiattn.ops import backend
from keras_equiattn.ops._arguments import checked
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.backend import with_an_image
from keras_equiattn.ops.group.convolution import group_conv
from keras_equiattn.ops.group.convolution import lifting_conv
from keras_equiattn.ops.group.kernels import kernel_orbit
from keras_equiattn.ops.numerics import dtype_name
from keras_equiattn.ops.numerics import dtype_of_sums
from keras_equiattn.ops.numerics import in_full_precision
from keras_equiattn.ops.numerics import mean


@checked(
    channel_kernels_0="*order channels hidden",
    channel_kernels_1="*order hidden channels",
    spatial_kernel="rows columns *order 2 1",
)
def input_attention(
    x: Float[Tensor, "batch height width *order channels"],
    channel_kernels: tuple[
        Float[Tensor, "*order channels hidden"],
        Float[Tensor, "*order hidden channels"],
    ]
    | None,
    spatial_kernel: Float[Tensor, "rows columns *order 2 1"] | None,
    group: str | Group,
    dilation_rate: int = 1,
    filter_basis: str = "pixel",
) -> tuple[
    Float[Tensor, "batch height width *order channels"], dict[str, Tensor]
]:
    """Attention on the input of a convolution: alpha_F of Romero et al.

    `y = (1 - aX aC) x`, with channel attention `aC` from the mean and maximum
    of `x` over space, and spatial attention `aX` from the mean and maximum of
    `aC x` over the channels.

    Args:
        x: images or feature maps on the group.
        channel_kernels: `([order,] channels, hidden)` and
            `([order,] hidden, channels)`, or None for none.
        spatial_kernel: `(rows, columns, [order,] 2, 1)`, for (mean, maximum),
            or None for none.
        group: a group or its name.
        dilation_rate: the dilation of the spatial kernel.
        filter_basis: how the spatial kernel turns, "pixel" or "steerable", see
            `kernel_orbit`.

    Returns:
        `y` like `x`, and the attention as applied by name: "channel" `(batch,
        [order,] channels)`, `1 - aC`, and "spatial" `(batch, height, width[,
        order])`, `1 - aX`, where there are kernels; "effective" like `x`,
        `1 - aX aC`.

    Raises:
        ValueError: if there are no kernels.

    References:
        - [Romero et al., 2020](https://arxiv.org/abs/2002.03830), eq. 20
    """
    if channel_kernels is None and spatial_kernel is None:
        raise ValueError(
            "`input_attention` needs `channel_kernels` or `spatial_kernel`: "
            "both are None."
        )
    if x.shape[0] == 0:  # some backends refuse its maximum
        y, maps = input_attention(
            with_an_image(x),
            channel_kernels,
            spatial_kernel,
            group,
            dilation_rate,
            filter_basis,
        )
        return y[:0], {name: value[:0] for name, value in maps.items()}
    dtype, maps, attended = x.dtype, {}, x
    effective: Tensor = None
    if channel_kernels is not None:
        scores = _channel_scores(x, *channel_kernels, group)
        maps["channel"] = ops.cast(ops.sigmoid(-scores), dtype)
        effective = maps["channel"][:, None, None]
        channel = ops.cast(ops.sigmoid(scores), dtype)[:, None, None]
        attended = x * channel
    if spatial_kernel is not None:
        scores = _spatial_scores(
            attended, spatial_kernel, group, dilation_rate, filter_basis
        )
        maps["spatial"] = ops.cast(ops.sigmoid(-scores), dtype)
        spatial = maps["spatial"][..., None]
        # 1 - aX aC, without subtracting nearly equal numbers.
        both = effective is not None
        effective = effective + channel * spatial if both else spatial
    maps["effective"] = ops.broadcast_to(effective, ops.shape(x))
    return x * effective, maps


@checked()
def co_attention(
    x: Float[Tensor, "batch height width *order channels"],
    kernel: Float[Tensor, "1 1 *order channels 1"],
    group: str | Group,
) -> Float[Tensor, "batch height width *order"]:
    """Attention per pixel from all of its channels: alpha_RH of Romero et al.

    The result is `1 - a`, the factor of each pixel.

    Args:
        x: images or feature maps on the group.
        kernel: a 1 x 1 convolution to one channel.
        group: a group or its name.

    Returns:
        Values in (0, 1) for each pixel and group element.

    Raises:
        ValueError: for shapes that do not fit.
        TypeError: for tensors that do not hold floating point numbers.

    References:
        - [Romero et al., 2020](https://arxiv.org/abs/2002.03830), table 1
    """
    dtype = dtype_name(x)
    # One score weights all channels of a pixel: rounded to half precision, a
    # large one would move them all.
    x, kernel = in_full_precision(x), in_full_precision(kernel)
    if len(x.shape) == 5:
        scores = group_conv(x, kernel, group)
    else:
        # Not `ops.matmul`: under PyTorch it rounds float64 to float32.
        scores = backend.times_matrix(x, kernel[0, 0])
    return ops.cast(ops.sigmoid(-scores[..., 0]), dtype)


def _channel_scores(
    x: Float[Tensor, "batch height width *order channels"],
    first: Float[Tensor, "*order channels hidden"],
    second: Float[Tensor, "*order hidden channels"],
    group: str | Group,
) -> Float[Tensor, "batch *order channels"]:
    """The scores of channel attention: a two-layer perceptron on the group.

    It sees the mean and the maximum of `x` over space, and is computed in
    float32 at least.

    Args:
        x: images or feature maps on the group.
        first, second: the weights of both layers.
        group: a group or its name.
    """
    first, second = in_full_precision(first), in_full_precision(second)
    if len(x.shape) == 5:
        first, second = (group_dense_orbit(k, group) for k in (first, second))
        layer = "bjc,hjck->bhk"
    else:
        layer = "bc,ck->bk"
    means = mean(x, (1, 2), dtype_of_sums(x))
    maxima = in_full_precision(ops.max(x, axis=(1, 2)))
    scores = 0.0
    for statistic in (means, maxima):
        hidden = ops.relu(ops.einsum(layer, statistic, first))
        scores = scores + ops.einsum(layer, hidden, second)
    return scores


def _spatial_scores(
    x: Float[Tensor, "batch height width *order channels"],
    kernel: Float[Tensor, "rows columns *order 2 1"],
    group: str | Group,
    dilation_rate: int,
    filter_basis: str,
) -> Float[Tensor, "batch height width *order"]:
    """The scores of spatial attention: a convolution of two statistics.

    These are the mean and the maximum of `x` over the channels. Images are
    lifted to the group, and the largest score of all group elements counts.
    Scores are computed in float32 at least.

    Args:
        x: images or feature maps on the group, times channel attention.
        kernel: the filters for (mean, maximum).
        group: a group or its name.
        dilation_rate: the dilation of the kernel.
        filter_basis: how it turns, see `kernel_orbit`.
    """
    means = mean(x, -1, dtype_of_sums(x))
    maxima = in_full_precision(ops.max(x, axis=-1))
    on_group = len(x.shape) == 5
    scores = (group_conv if on_group else lifting_conv)(
        ops.stack([means, maxima], axis=-1),
        in_full_precision(kernel),
        group,
        filter_basis=filter_basis,
        padding="same",
        dilation_rate=dilation_rate,
    )[..., 0]
    return scores if on_group else ops.max(scores, axis=-1)


def group_dense_orbit(
    kernel: Float[Tensor, "order ..."], group: str | Group
) -> Float[Tensor, "order order ..."]:
    """`L_h W` of weights on the group alone: `(h, j)` holds `W[h^-1 j]`."""
    group = groups.get(group)
    moved = kernel_orbit(kernel[None, None], group, group_axis=True)
    return ops.squeeze(moved, (1, 2))
