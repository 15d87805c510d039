"""Attentive convolution without holding its responses.

The responses of a convolution, one for each pair of input and output channel
and of group elements, are too many to be stored: about 100 GB for 128 CIFAR
images in the p4 All-CNN. Only their statistics are needed, so here they are
computed for some output channels (a chunk) and a few input channels at a time,
reduced at once, and computed again in the backward pass.

Axes are those of `form`. No loop is over images: with some of them on each of
several devices, nothing has to move between those but gradients of weights.
"""

import functools
from typing import Any

import numpy as np
from keras import ops

from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.numerics import dtype_of_sums
from keras_equiattn.ops.numerics import in_full_precision
from keras_equiattn.ops.responses import channels
from keras_equiattn.ops.responses.channels import OfChannel
from keras_equiattn.ops.responses.channels import Reduced
from keras_equiattn.ops.responses.depthwise import depthwise_gradients
from keras_equiattn.ops.responses.depthwise import depthwise_sum
from keras_equiattn.ops.responses.form import AllPlanes
from keras_equiattn.ops.responses.form import channel_scores
from keras_equiattn.ops.responses.form import Form
from keras_equiattn.ops.responses.form import Overall
from keras_equiattn.ops.responses.form import Pixels
from keras_equiattn.ops.responses.form import Planes
from keras_equiattn.ops.responses.form import Statistics
from keras_equiattn.ops.responses.form import Weights


def attended_sum(
    form: Form,
    planes: AllPlanes,
    weights: Weights,
) -> Float[Tensor, "chunks _ height width filters"]:
    """Sum of the attended responses over input elements and channels.

    Args:
        form: what is computed.
        planes: the padded input.
        weights: by name, each with first axes `(elements, chunks)`.

    Returns:
        `(chunks, batch, height, width, filters)`. TensorFlow forgets the sizes
        if the same form was compiled for several of them.
    """
    tensors = (planes, *(weights[name] for name in form.names))
    shapes = tuple((tuple(x.shape), str(x.dtype)) for x in tensors)
    return _attended_sum(form, shapes)(*tensors)


def attention_maps(
    form: Form,
    planes: AllPlanes,
    weights: Weights,
) -> tuple[
    Float[Tensor, "elements chunks channels batch filters"],
    Float[Tensor, "elements chunks batch height width filters"],
]:
    """Channel and spatial attention, ones where there is none.

    No gradient passes through the result.

    Args:
        form, planes, weights: see `attended_sum`.
    """
    tensors = (planes, *(weights[name] for name in form.names))
    shapes = tuple((tuple(x.shape), str(x.dtype)) for x in tensors)
    return _attention_maps(form, shapes)(*tensors)


@functools.lru_cache(maxsize=256)
def _attended_sum(form: Form, shapes: Any) -> Any:
    """One for each set of shapes: where they are compiled, calls count."""

    def forward(planes: Tensor, *weights: Tensor) -> Any:
        return _forward(form, planes, _named(form, weights))

    def backward(arguments: Any, peaks: Tensor, upstream: Tensor) -> Any:
        planes, *weights = arguments
        named = _named(form, weights)
        d_planes, d_weights = _backward(form, planes, named, peaks, upstream)
        found = d_planes, *(d_weights[name] for name in form.names)
        return tuple(
            ops.cast(d, x.dtype) for d, x in zip(found, arguments, strict=True)
        )

    return backend.custom_vjp(forward, backward, "chunk_size=None")


@functools.lru_cache(maxsize=256)
def _attention_maps(form: Form, shapes: Any) -> Any:
    """One for each set of shapes, as `_attended_sum`."""

    def maps(planes: Tensor, *weights: Tensor) -> Any:
        def element(carry: Any, piece: Any) -> Any:
            planes, weights = piece

            def chunk(carry: Any, weights: Weights) -> Any:
                return carry, _maps(form, planes, weights)

            return carry, backend.scan(chunk, (), weights, like)[1]

        pieces, like = (planes, _named(form, weights)), (_like(planes),) * 2
        return backend.scan(element, (), pieces, like)[1]

    return backend.without_gradient(maps)


def _named(form: Form, weights: Any) -> Weights:
    return dict(zip(form.names, weights, strict=True))


def _forward(
    form: Form,
    planes: AllPlanes,
    weights: Weights,
) -> tuple[Tensor, Tensor]:
    """The sum, and the maxima of the responses over space.

    These are kept for the backward pass: `(elements, chunks, channels, batch,
    filters)`, or zeros in place of filters without channel attention.
    """

    def element(total: Tensor, piece: Any) -> Any:
        planes, weights = piece

        def chunk(carry: Any, weights: Weights) -> Any:
            peaks, _, reduced = _statistics(form, planes, weights)
            attended = reduced.total
            if form.has_spatial:
                attended *= _gate(form, planes, reduced, weights)[1]
            return carry, (attended, peaks)

        _, (attended, peaks) = backend.scan(chunk, (), weights, (like, like))
        return total + attended, peaks

    chunks, filters = weights["kernel"].shape[1], weights["kernel"].shape[-1]
    like = _like(planes)
    size = ops.shape(form.window.views(planes[0, 0])[0])
    total = ops.zeros((chunks, *size, filters), like.dtype)
    return backend.scan(element, total, (planes, weights), like)


def _backward(
    form: Form,
    planes: AllPlanes,
    weights: Weights,
    peaks: Float[Tensor, "elements chunks channels batch kept"],
    upstream: Float[Tensor, "chunks batch height width filters"],
) -> tuple[Tensor, Weights]:
    """Gradients of the planes and of the weights."""

    def element(carry: Any, piece: Any) -> Any:
        planes, weights, peaks = piece

        def chunk(d_planes: Tensor, piece: Any) -> Any:
            weights, peaks, upstream = piece
            found, kept = _chunk_gradients(
                form, planes, weights, peaks, upstream
            )
            return d_planes + found, kept

        start = ops.zeros_like(planes, dtype=like[0].dtype)
        pieces = weights, peaks, upstream
        return carry, backend.scan(chunk, start, pieces, like[1])

    like = _like(planes), _kept_like(form, _like(planes))
    pieces = planes, weights, peaks
    _, (d_planes, kept) = backend.scan(element, (), pieces, like)
    d_weights = {"kernel": ops.sum(kept["kernel"], axis=3)}
    if form.has_spatial:
        d_weights["spatial"] = ops.sum(kept["spatial"], axis=2)
    if form.has_channel:
        first, second = weights["first"], weights["second"]

        def scores(first: Tensor, second: Tensor) -> Tensor:
            return channel_scores(kept["means"], peaks, first, second)

        _, found = backend.vjp(scores, (first, second), kept["scores"])
        d_weights["first"], d_weights["second"] = found
    return d_planes, d_weights


def _like(planes: AllPlanes) -> Any:
    """An array of the dtype of sums and statistics, for `scan`."""
    return np.zeros((), dtype_of_sums(planes))


def _kept_like(form: Form, like: Any) -> Weights:
    """Any tensors by the names of what `_chunk_gradients` keeps."""
    names = ["kernel"]
    if form.has_spatial:
        names.append("spatial")
    if form.has_channel:
        names += ["means", "scores"]
    return dict.fromkeys(names, like)


def _chunk_gradients(
    form: Form,
    planes: Planes,
    weights: Weights,
    peaks: Float[Tensor, "channels batch kept"],
    upstream: Pixels,
) -> tuple[Planes, Weights]:
    """Gradients with respect to the planes, and what those of weights are of.

    Args:
        form, planes, weights: of the chunk.
        peaks: maxima of its responses.
        upstream: gradient of its attended sum.

    Returns:
        That of the planes, and by name: "kernel" `(channels, blocks, taps,
        filters)` and "spatial" `(blocks, rows, columns, 2, filters)` for each
        block of images; for channel attention the gradient of its "scores" and
        its "means", `(channels, batch, filters)`.
    """
    window, kernel = form.window, weights["kernel"]
    blocks = channels.plan_for(window, planes, kernel).blocks
    _, alpha, reduced = _statistics(form, planes, weights, peaks, where=True)
    kept = {}
    # Gradients of the responses are as precise as the responses.
    own = planes.dtype
    d_total, d_both, of_maxima = upstream, None, None
    if form.has_spatial:
        statistics, gate = _gate(form, planes, reduced, weights)
        d_statistics, kept["spatial"] = depthwise_gradients(
            statistics,
            weights["spatial"],
            upstream * reduced.total * gate * (1 - gate),
            form.attention_dilation_rate,
            blocks,
        )
        d_mean, d_maximum = d_statistics[..., 0, :], d_statistics[..., 1, :]
        d_total = upstream * gate + d_mean / planes.shape[0]
        d_both = ops.cast(d_total + d_maximum, own)
        of_maxima = ops.cast(d_maximum * statistics[..., 1, :], own)
    d_total = ops.cast(d_total, own)
    of_channel = None
    if alpha is not None:
        floor = channels.rounded_down(peaks, planes, kernel)
        d_log, count = channels.through_attention(
            planes,
            kernel,
            alpha,
            floor,
            d_total,
            of_maxima,
            reduced.channel,
            window=window,
        )
        kept["scores"] = d_log * (1 - alpha)
        kept["means"] = means = channels.mean_responses(window, planes, kernel)

        def scores(means: Overall, peaks: Overall) -> Overall:
            first, second = weights["first"], weights["second"]
            return channel_scores(means, peaks, first, second)

        _, (d_means, d_peaks) = backend.vjp(
            scores, (means, peaks), kept["scores"]
        )
        height, width = ops.shape(upstream)[1:3]
        d_every = d_means / ops.cast(height * width, d_means.dtype)
        count = ops.cast(ops.maximum(count, 1.0), d_peaks.dtype)
        d_largest = d_peaks / count
        of_channel = OfChannel(alpha, floor, d_every, d_largest)
    d_planes, kept["kernel"] = channels.gradients(
        window, planes, kernel, d_total, reduced.channel, d_both, of_channel
    )
    return d_planes, kept


def _statistics(
    form: Form,
    planes: Planes,
    weights: Weights,
    peaks: Float[Tensor, "channels batch kept"] | None = None,
    where: bool = False,
) -> tuple[Tensor, Overall | None, Reduced]:
    """What attention is made of, for a chunk.

    Args:
        form, planes, weights: of the chunk.
        peaks: maxima of the responses over space, where they are known.
        where: whether to say which channel has the maximum.

    Returns:
        The peaks; channel attention, if any; what is left over the channels.
    """
    kernel, alpha, window = weights["kernel"], None, form.window
    if not form.has_channel:
        peaks = in_full_precision(ops.zeros_like(planes[:, :, 0, :1]))
    else:
        if peaks is None:
            peaks = channels.peaks(planes, kernel, window=window)
        first, second = weights["first"], weights["second"]
        means = channels.mean_responses(window, planes, kernel)
        alpha = ops.sigmoid(channel_scores(means, peaks, first, second))
    reduced = channels.reduce(
        planes,
        kernel,
        alpha,
        window=window,
        maxima=form.has_spatial,
        where=where,
    )
    return peaks, alpha, Reduced(*reduced)


def _maps(
    form: Form, planes: Planes, weights: Weights
) -> tuple[Overall, Pixels]:
    """Channel and spatial attention of a chunk, ones where there is none."""
    _, alpha, reduced = _statistics(form, planes, weights)
    if alpha is None:
        kernel = weights["kernel"]
        alpha = ops.ones_like(planes[:, :, :1, 0] + kernel[:, :1])
        alpha = in_full_precision(alpha)
    gate = ops.ones_like(reduced.total)
    if form.has_spatial:
        gate = _gate(form, planes, reduced, weights)[1]
    return alpha, gate


def _gate(
    form: Form, planes: Planes, reduced: Reduced, weights: Weights
) -> tuple[Statistics, Pixels]:
    """Mean and maximum over the channels, and spatial attention from them."""
    means, maxima = reduced.total / planes.shape[0], reduced.maximum
    statistics = ops.stack([means, ops.cast(maxima, means.dtype)], axis=3)
    rate = form.attention_dilation_rate
    scores = depthwise_sum(statistics, weights["spatial"], rate)
    return statistics, ops.sigmoid(scores)
