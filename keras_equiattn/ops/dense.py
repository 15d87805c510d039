"""Self-attention whose scores are one product of matrices.

Queries see a whole image, the window that they lie in where windows do not
overlap (as in Swin transformers), or a reduced image (as in pyramid vision
transformers).
"""

from collections.abc import Callable

import numpy as np
from keras import ops

from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.group.convolution import conv
from keras_equiattn.ops.numerics import is_half
from keras_equiattn.ops.numerics import lowest_score
from keras_equiattn.ops.numerics import softmax


def dense_attention(
    query: Float[Tensor, "*outer queries channels"],
    keys: Float[Tensor, "*outer seen channels"],
    values: Float[Tensor, "*outer seen channels"],
    num_heads: int,
    bias: Float[Tensor, "heads queries seen"] | None = None,
    visible: np.ndarray | None = None,
    dropout: Callable[[Tensor], Tensor] = lambda weights: weights,
) -> tuple[
    Float[Tensor, "*outer queries channels"],
    Float[Tensor, "*outer heads queries seen"],
]:
    """Attention of each query to all keys; it holds all of the weights.

    Args:
        query: the queries, scaled.
        keys, values: the keys and values of the pixels that are seen.
        num_heads: number of heads, contiguous blocks of channels.
        bias: added to the scores; None for none.
        visible: `(..., queries, seen)`, which keys a query sees; None for all.
        dropout: the dropout that is applied to the weights.

    Returns:
        The weighted sums, and the weights before dropout.
    """
    channels = values.shape[-1]
    query, keys, values = (
        _by_head(x, num_heads) for x in (query, keys, values)
    )
    # In half precision, products are summed in float32 and the sums rounded.
    # With scores kept in float32, a step in bfloat16 would move 1.5 times as
    # many bytes (`WindowACmix2D` and `SpatialReductionACmix2D` under PyTorch).
    scores = ops.einsum("...pnc,...qnc->...npq", query, keys)
    if bias is not None:
        # Some backends refuse the maximum of an empty tensor.
        if is_half(scores) and 0 not in tuple(scores.shape):
            # A bias would be lost in the rounding of large scores.
            top = ops.max(scores, axis=-1, keepdims=True)
            scores = scores - ops.stop_gradient(top)
        scores = scores + ops.cast(bias, scores.dtype)
    if visible is not None:
        hidden = backend.constant(~visible[..., None, :, :], scores)
        scores = backend.masked(scores, hidden, lowest_score(scores))
    weights = softmax(scores, (-1,))
    y = ops.einsum("...npq,...qnc->...pnc", dropout(weights), values)
    return ops.reshape(y, (*ops.shape(y)[:-2], channels)), weights


def _by_head(
    x: Float[Tensor, "*outer seen channels"], num_heads: int
) -> Float[Tensor, "*outer seen {num_heads} size"]:
    """Splits channels into heads, contiguous blocks of `size` channels."""
    *outer, channels = ops.shape(x)
    return ops.reshape(x, (*outer, num_heads, channels // num_heads))


def partition(
    x: Float[Tensor, "batch height width channels"], window: tuple[int, int]
) -> Float[Tensor, "batch down along pixels channels"]:
    """Cuts images into windows, whose size divides that of the images."""
    rows, columns = window
    batch, height, width, channels = ops.shape(x)
    down, along = height // rows, width // columns
    x = ops.reshape(x, (batch, down, rows, along, columns, channels))
    x = ops.transpose(x, (0, 1, 3, 2, 4, 5))
    return ops.reshape(x, (batch, down, along, rows * columns, channels))


def join(
    x: Float[Tensor, "batch down along pixels channels"],
    window: tuple[int, int],
) -> Float[Tensor, "batch height width channels"]:
    """Undoes `partition`."""
    rows, columns = window
    batch, down, along, _, channels = ops.shape(x)
    x = ops.reshape(x, (batch, down, along, rows, columns, channels))
    x = ops.transpose(x, (0, 1, 3, 2, 4, 5))
    return ops.reshape(x, (batch, down * rows, along * columns, channels))


def neighbours_in_image(
    size: tuple[int, int], window: tuple[int, int], shift: tuple[int, int]
) -> np.ndarray:
    """`(down, along, pixels, pixels)`: which pixels attend to each other.

    The image was rolled by the shift: pixels that the seam separates share a
    window, but are far apart in the image.
    """
    regions: np.ndarray = np.zeros(size, int)
    for axis in (0, 1):
        place = np.arange(size[axis])
        region = (place >= size[axis] - window[axis]).astype(int)
        region += (place >= size[axis] - shift[axis]) & (shift[axis] > 0)
        shape = (-1, 1) if axis == 0 else (1, -1)
        regions = 3 * regions + region.reshape(shape)
    down, along = (n // w for n, w in zip(size, window, strict=True))
    regions = regions.reshape(down, window[0], along, window[1])
    regions = regions.transpose(0, 2, 1, 3).reshape(down, along, -1)
    return regions[..., :, None] == regions[..., None, :]


def relative_places(window: tuple[int, int]) -> np.ndarray:
    """`(pixels, pixels)`: the entry of a table of offsets for each pair."""
    places = np.indices(window).reshape(2, -1)
    offsets = places[:, :, None] - places[:, None, :]
    rows, columns = window
    return (
        (offsets[0] + rows - 1) * (2 * columns - 1) + offsets[1] + columns - 1
    )


def partitioned_attention(
    query: Float[Tensor, "batch height width channels"],
    keys: Float[Tensor, "batch height width channels"],
    values: Float[Tensor, "batch height width channels"],
    window: tuple[int, int],
    num_heads: int,
    bias: Float[Tensor, "heads pixels pixels"],
    seen: np.ndarray | None = None,
    dropout: Callable[[Tensor], Tensor] = lambda weights: weights,
) -> tuple[
    Float[Tensor, "batch height width channels"],
    Float[Tensor, "batch down along heads pixels pixels"],
]:
    """Attention of each pixel to those of its window.

    Args:
        query: the queries, times the factor of the scores.
        keys, values: like the query.
        window: rows and columns, which divide those of the image.
        num_heads: number of heads, contiguous blocks of channels.
        bias: added to the scores.
        seen: who may see whom, see `neighbours_in_image`; None for all.
        dropout: the dropout that is applied to the weights.

    Returns:
        The weighted sums, and the weights before dropout.
    """
    query, keys, values = (partition(x, window) for x in (query, keys, values))
    batch, down, along, pixels, channels = ops.shape(values)
    # Some exported formats allow at most three outer axes in a product.
    query, keys, values = (
        ops.reshape(x, (batch, down * along, pixels, x.shape[-1]))
        for x in (query, keys, values)
    )
    if seen is not None:
        seen = seen.reshape(down * along, pixels, pixels)
    y, weights = dense_attention(
        query, keys, values, num_heads, bias, seen, dropout
    )
    y = ops.reshape(y, (batch, down, along, pixels, channels))
    weights = ops.reshape(
        weights, (batch, down, along, num_heads, pixels, pixels)
    )
    return join(y, window), weights


def in_whole_image(
    weights: Float[Tensor, "batch down along heads pixels pixels"],
    window: tuple[int, int],
    shift: tuple[int, int],
) -> Float[Tensor, "batch height width heads height width"]:
    """Turns the weights of windows into weights over the whole image."""
    rows, columns = window
    batch, down, along, heads, pixels, _ = ops.shape(weights)
    weights = ops.reshape(weights, (batch, down * along, heads, pixels, pixels))
    # Pixels of a window see that window alone.
    same = ops.eye(down * along, dtype=weights.dtype)
    weights = ops.einsum("zwnpq,wv->zwpnvq", weights, same)
    windows, places = (down, along), (rows, columns)
    weights = ops.reshape(
        weights, (batch, *windows, *places, heads, *windows, *places)
    )
    # Rows and columns of windows beside those within a window.
    weights = ops.transpose(weights, (0, 1, 3, 2, 4, 5, 6, 8, 7, 9))
    size = (down * rows, along * columns)
    weights = ops.reshape(weights, (batch, *size, heads, *size))
    return backend.rolled(weights, (*shift, *shift), (1, 2, 4, 5))


def reduce_space(
    x: Float[Tensor, "batch height width channels"],
    kernel: Float[Tensor, "rows columns channels reduced_channels"],
    bias: Float[Tensor, " reduced_channels"],
) -> Float[Tensor, "batch down along reduced_channels"]:
    """One pixel for each `rows x columns` of an image.

    The first window sits on the first pixel; the last ones may reach beyond
    the image, where they see zeros.
    """
    window = kernel.shape[:2]
    size = ops.shape(x)[1:3]
    beyond = [(0, -n % w) for n, w in zip(size, window, strict=True)]
    x = ops.pad(x, [(0, 0), *beyond, (0, 0)])
    return conv(x, kernel, strides=tuple(window), padding="valid") + bias


def enlarge_space(
    x: Float[Tensor, "batch down along channels"],
    window: tuple[int, int],
    size: tuple[int | Tensor, int | Tensor],
) -> Float[Tensor, "batch height width channels"]:
    """Repeats each pixel over its window, as far as the image reaches."""
    rows, columns = window
    height, width = size
    x = ops.repeat(ops.repeat(x, rows, axis=1), columns, axis=2)
    return x[:, :height, :width]
