"""Patchwise attention: a window's weights from all of its keys at once.

A query `q` of `channels` numbers and the keys `k` of its window are normalised
over the batch, each channel of each neighbour by itself, and go through a ReLU
and a linear map to a few features. These become the weights of the window. All
keys of a window, `neighbours * channels` numbers for each pixel, are never
built: their statistics are sums over the image with a count for each pixel, and
the linear map adds up one row of the window after the other.

Three kinds of tensors have names here: `Features`, the few numbers of each
position; `Frames`, the image cut as `Window.frames` does it; and `Strips`, what
each row of the window sees of these.
"""

import functools
from collections.abc import Callable
from typing import Any
from typing import TypeAlias

import keras
from keras import ops

from keras_equiattn import config
from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.geometry import reach
from keras_equiattn.ops.geometry import reflected
from keras_equiattn.ops.geometry import Window
from keras_equiattn.ops.numerics import dtype_of_sums
from keras_equiattn.ops.numerics import in_full_precision
from keras_equiattn.ops.numerics import is_half
from keras_equiattn.ops.numerics import mean
from keras_equiattn.ops.numerics import moments
from keras_equiattn.ops.windows.api import window_sum

Features: TypeAlias = Float[Tensor, "batch new_height new_width features"]
Frames: TypeAlias = Float[Tensor, "frames batch height columns channels"]
Strips: TypeAlias = Float[
    Tensor, "rows phases batch new_height columns channels"
]


def patch_moments(
    query: Float[Tensor, "batch new_height new_width order channels"],
    keys: Float[Tensor, "batch height width order channels"],
    window: Window,
) -> tuple[Float[Tensor, "seen channels"], Float[Tensor, "seen channels"]]:
    """Means and variances of the query and of each neighbour in the window.

    Args:
        query: one for each position of the window.
        keys: one for each pixel.
        window: the neighbours, with the border "reflect".

    Returns:
        Means and variances over the batch and the positions of the window, with
        `seen = 1 + neighbours`: the query comes first.
    """
    # Squares of numbers above 255 are infinite in float16.
    query, keys = map(in_full_precision, (query, keys))
    # Neighbours have a mean close to that of all keys. Without that mean, the
    # difference of mean square and squared mean is not lost in rounding.
    centre = mean(keys, (0, 1, 2, 3))
    rest = keys - centre
    rows, columns = (
        _seen(window, axis, ops.shape(keys)[axis + 1], keys.dtype)
        for axis in (0, 1)
    )
    first, second = (
        _neighbour_means(rows, columns, mean(x, (0, 3)))
        for x in (rest, rest * rest)
    )
    of_query = moments(query, (0, 1, 2, 3))
    means = ops.concatenate([of_query[0][None], first + centre])
    variances = ops.concatenate([of_query[1][None], second - first * first])
    return means, backend.maximum(variances, ops.zeros_like(variances))


def _neighbour_means(
    rows: Float[Tensor, "offset_rows height"],
    columns: Float[Tensor, "offset_columns width"],
    image: Float[Tensor, "height width channels"],
) -> Float[Tensor, "neighbours channels"]:
    """The mean at each neighbour, from how often it shows each pixel."""
    of_rows = ops.einsum("mi,ijc->mjc", rows, image)
    means = ops.einsum("nj,mjc->mnc", columns, of_rows)
    return ops.reshape(means, (-1, image.shape[-1]))


def _seen(
    window: Window, axis: int, size: Any, dtype: Any
) -> Float[Tensor, "offsets pixels"]:
    """How often each offset along one axis shows each row, or column.

    The counts are divided by the number of positions of the window, so that
    they add up to one over the pixels.
    """
    extent, stride = window.size[axis], window.strides[axis]
    offsets = (ops.arange(extent) - extent // 2) * window.dilation_rate[axis]
    places = offsets[:, None] + ops.arange(0, size, stride)
    shown = reflected(places, size)[..., None] == ops.arange(size)
    return mean(ops.cast(shown, dtype), 1)


def patch_features(
    query: Float[Tensor, "batch new_height new_width 1 channels"],
    keys: Float[Tensor, "batch height width 1 channels"],
    scale: Float[Tensor, "seen channels"],
    shift: Float[Tensor, "seen channels"],
    kernel: Float[Tensor, "seen channels features"],
    window: Window,
    recompute: bool = True,
) -> Features:
    """Features of each position, from its query and the keys in its window.

    `h(i) = relu(s_0 q(i) + t_0) W_0 + sum_n relu(s_n k(i + d_n) + t_n) W_n`.

    Args:
        query: one for each position of the window.
        keys: one for each pixel; the border of the window is "reflect".
        scale, shift: the normalisation as an affine map, first for the query,
            then for the neighbours, row by row.
        kernel: the linear map of the query and the neighbours, in the same
            order.
        window: the neighbours.
        recompute: see `window_scores`.

    Returns:
        The features, in float32 for half precision.
    """
    if is_half(keys):
        query, keys, shift = _centred(query, keys, scale, shift)
    scale, shift, kernel = (
        ops.cast(x, keys.dtype) for x in (scale, shift, kernel)
    )
    of_query = _features(query[:, :, :, 0], scale[0], shift[0], kernel[0])
    rows, columns = window.size
    by_row = [
        ops.reshape(x[1:], (rows, columns * x.shape[1], *x.shape[2:]))
        for x in (scale, shift, kernel)
    ]
    frames = ops.squeeze(window.frames(keys), axis=4)
    if recompute and config.is_recompute_enabled():
        tensors = (frames, *by_row)
        run = _of_keys(window, backend.signature(tensors))
        return of_query + run(*tensors)
    strips = _strips(window, frames)
    return of_query + sum(
        _of_row(window, strips[index], *(x[index] for x in by_row))
        for index in range(rows)
    )


def _centred(
    query: Float[Tensor, "batch new_height new_width 1 channels"],
    keys: Float[Tensor, "batch height width 1 channels"],
    scale: Float[Tensor, "seen channels"],
    shift: Float[Tensor, "seen channels"],
) -> tuple[
    Float[Tensor, "batch new_height new_width 1 channels"],
    Float[Tensor, "batch height width 1 channels"],
    Float[Tensor, "seen channels"],
]:
    """Rewrites a normalisation as an equal one with smaller shifts.

    `s x + t = s (x - c) + (t + s c)` for any `c`. In half precision the left
    side loses digits where large numbers cancel. The `c` taken here, one for
    each channel, makes the squares of the new shifts smallest.
    """
    scale, shift = map(in_full_precision, (scale, shift))
    centre = -ops.sum(scale * shift, axis=0) / (
        ops.sum(scale * scale, axis=0) + keras.config.epsilon()
    )
    # The largest float16 is 65504.
    centre = ops.cast(backend.clamped(centre, -3e4, 3e4), keys.dtype)
    centre = ops.stop_gradient(centre)
    shift = shift + scale * in_full_precision(centre)
    return query - centre, keys - centre, shift


def patch_weights(
    features: Features,
    kernel: Float[Tensor, "features neighbours heads"],
    bias: Float[Tensor, "neighbours heads"],
) -> Float[Tensor, "neighbours batch 1 heads new_height new_width"]:
    """The weights of the window, a linear map of the features."""
    weights = ops.einsum("bijf,fnh->nbhij", features, kernel)
    return (weights + bias[:, None, :, None, None])[:, :, None]


def shared_window_sum(
    weights: Float[Tensor, "neighbours batch 1 heads new_height new_width"],
    values: Float[Tensor, "batch height width 1 filters"],
    window: Window,
    recompute: bool = True,
) -> Float[Tensor, "batch new_height new_width 1 filters"]:
    """`window_sum` where channel `c` takes the weights of head `c mod heads`.

    Args:
        weights: the weights of the neighbours.
        values: one for each pixel.
        window: the neighbours.
        recompute: see `window_scores`.

    Returns:
        One sum for each position of the window.
    """
    heads = weights.shape[3]
    each = values.shape[-1] // heads
    values = _reordered(values, each, heads)
    y = window_sum(weights, values, window, recompute=recompute)
    return _reordered(y, heads, each)


def _reordered(
    x: Float[Tensor, "batch height width 1 channels"], outer: int, inner: int
) -> Float[Tensor, "batch height width 1 channels"]:
    """Channels `(outer, inner)` as channels `(inner, outer)`."""
    *rest, channels = ops.shape(x)
    x = ops.swapaxes(ops.reshape(x, (*rest, outer, inner)), -1, -2)
    return ops.reshape(x, (*rest, channels))


@functools.lru_cache(maxsize=512)
def _of_keys(window: Window, shapes: Any) -> Callable[..., Tensor]:
    """The function that adds up the features of the neighbours, from frames.

    It is a differentiable function of frames and of scales, shifts and kernels,
    row by row of the window. There is one for each set of shapes, as in
    `ops.windows`.
    """

    def forward(
        frames: Frames, *by_row: Float[Tensor, "..."]
    ) -> tuple[Features, tuple[()]]:
        """The sum. Nothing but the arguments is kept."""
        strips = _strips(window, frames)
        batch, height, width = ops.shape(strips)[2:5]
        width = width - reach(window.neighbours)[1]
        total = ops.zeros(
            (batch, height, width, by_row[-1].shape[-1]), dtype_of_sums(frames)
        )

        def add(total: Features, row: Any) -> tuple[Features, tuple[()]]:
            return total + _of_row(window, *row), ()

        return backend.scan(add, total, (strips, *by_row))[0], ()

    def backward(
        arguments: tuple[Tensor, ...], _: Any, d: Features
    ) -> tuple[Tensor, ...]:
        """The gradients of the frames and of the parts of each row."""
        frames, *by_row = arguments
        rows = (_strips(window, frames), *by_row)
        of_row = functools.partial(_of_row, window)

        def step(_: Any, row: Any) -> Any:
            return (), backend.vjp(of_row, tuple(row), d)[1]

        _, (of_strips, *rest) = backend.scan(step, (), rows, like=rows)
        strips_of = functools.partial(_strips, window)
        _, (of_frames,) = backend.vjp(strips_of, (frames,), of_strips)
        return (of_frames, *rest)

    return backend.custom_vjp(forward, backward, "`recompute=False`")


def _strips(window: Window, frames: Frames) -> Strips:
    """The pixels that each row of the window sees, from frames of phases."""
    along = window.strides[1]
    height = ops.shape(frames)[2] - reach(window.neighbours)[0]
    strips = []
    for place in window.neighbours[:: window.size[1]]:
        first = place.frame - place.frame % along
        rows = slice(place.row, place.row + height)
        strips.append(frames[first : first + along, :, rows])
    return ops.stack(strips)


def _of_row(
    window: Window,
    strip: Float[Tensor, "phases batch new_height columns channels"],
    scale: Float[Tensor, " seen_channels"],
    shift: Float[Tensor, " seen_channels"],
    kernel: Float[Tensor, "seen_channels features"],
) -> Features:
    """The features that a row of the window adds.

    Scale, shift and kernel are the parts that belong to that row, with the
    channels of its first neighbour before those of the second.
    """
    width = ops.shape(strip)[3] - reach(window.neighbours)[1]
    # All rows of the window see the same columns.
    seen = [
        strip[place.frame, :, :, place.column : place.column + width]
        for place in window.neighbours[: window.size[1]]
    ]
    return _features(ops.concatenate(seen, axis=-1), scale, shift, kernel)


def _features(
    x: Float[Tensor, "batch new_height new_width channels"],
    scale: Float[Tensor, " channels"],
    shift: Float[Tensor, " channels"],
    kernel: Float[Tensor, "channels features"],
) -> Features:
    """`relu(scale x + shift) kernel`, in float32 for half precision."""
    return in_full_precision(ops.relu(x * scale + shift) @ kernel)
