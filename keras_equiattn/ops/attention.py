"""Channel and spatial attention of attentive group convolution.

Both look at two statistics, mean and maximum, through one set of weights, and
return values in (0, 1) by which features are multiplied.
"""

from jaxtyping import Float
from keras import ops

from keras_equiattn import groups
from keras_equiattn.groups import Group
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.convolution import group_conv
from keras_equiattn.ops.convolution import lifting_conv
from keras_equiattn.ops.kernels import kernel_orbit
from keras_equiattn.ops.statistics import mean


def input_attention(
    x: Float[Tensor, "batch height width *order channels"],
    channel_kernels: tuple[Tensor, Tensor] | None,
    spatial_kernel: Tensor | None,
    group: str | Group,
    dilation_rate: int = 1,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Attention on the input of a convolution: alpha_F of the paper.

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
        dilation_rate: of the spatial kernel.

    Returns:
        `y` like `x`; `aC (batch, [order,] channels)`; `aX (batch, height,
        width[, order])`. The last two are None where there are no kernels.
    """
    on_group = len(x.shape) == 5
    channel = spatial = None
    attended = x
    if channel_kernels is not None:
        channel = _input_channel_attention(x, *channel_kernels, group)
        attended = x * channel[:, None, None]
    if spatial_kernel is not None:
        statistics = ops.stack(
            [mean(attended, -1), ops.max(attended, axis=-1)], axis=-1
        )
        convolve = group_conv if on_group else lifting_conv
        scores = convolve(
            statistics,
            spatial_kernel,
            group,
            padding="same",
            dilation_rate=dilation_rate,
        )[..., 0]
        if not on_group:
            scores = ops.max(scores, axis=-1)
        spatial = ops.sigmoid(scores)
        attended = attended * spatial[..., None]
    return x - attended, channel, spatial


def co_attention(
    x: Float[Tensor, "batch height width *order channels"],
    kernel: Float[Tensor, "1 1 *order channels 1"],
    group: str | Group,
) -> Float[Tensor, "batch height width *order"]:
    """Attention per pixel from all channels there: alpha_RH of the paper.

    Args:
        x: images or feature maps on the group.
        kernel: a 1 x 1 convolution to one channel.
        group: a group or its name.

    Returns:
        Values in (0, 1) for each pixel and group element.
    """
    if len(x.shape) == 5:
        return ops.sigmoid(group_conv(x, kernel, group)[..., 0])
    # Not `ops.matmul`: under PyTorch it passes float64 through float32.
    return ops.sigmoid((x @ kernel[0, 0])[..., 0])


def _input_channel_attention(
    x: Tensor, first: Tensor, second: Tensor, group: str | Group
) -> Tensor:
    """`(batch, [order,] channels)`: a two-layer perceptron on the group."""
    if len(x.shape) == 5:
        first, second = (group_dense_orbit(k, group) for k in (first, second))
        layer = "bjc,hjck->bhk"
    else:
        layer = "bc,ck->bk"
    scores = 0.0
    for statistic in (mean(x, (1, 2)), ops.max(x, axis=(1, 2))):
        hidden = ops.relu(ops.einsum(layer, statistic, first))
        scores = scores + ops.einsum(layer, hidden, second)
    return ops.sigmoid(scores)


def group_dense_orbit(
    kernel: Float[Tensor, "order ..."], group: str | Group
) -> Float[Tensor, "order order ..."]:
    """`L_h W` of weights on the group alone: `(h, j)` holds `W[h^-1 j]`."""
    group = groups.get(group)
    return kernel_orbit(kernel[None, None], group, group_axis=True)[:, 0, 0]
