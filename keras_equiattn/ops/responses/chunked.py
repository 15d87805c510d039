"""Attentive convolution without holding its responses.

The responses of a convolution, one for each pair of input and output channel
and of group elements, are too many to be stored: about 100 GB for 128 CIFAR
images in the p4 All-CNN. Only their statistics are needed, so here they are
computed for some output channels (a chunk) and a few input channels at a time,
reduced at once, and computed again in the backward pass.

Axes are those of `spec`. No loop runs over images: where they are spread over
several devices, only gradients of weights have to move between devices.
"""

import functools
import math
from typing import Any
from typing import NamedTuple

import numpy as np
from keras import ops

from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.numerics import divided
from keras_equiattn.ops.numerics import dtype_of_sums
from keras_equiattn.ops.numerics import in_full_precision
from keras_equiattn.ops.responses import channels
from keras_equiattn.ops.responses import dispatch
from keras_equiattn.ops.responses.channels import OfChannel
from keras_equiattn.ops.responses.depthwise import depthwise_gradients
from keras_equiattn.ops.responses.depthwise import depthwise_sum
from keras_equiattn.ops.responses.spec import AllPlanes
from keras_equiattn.ops.responses.spec import AttentionSpec
from keras_equiattn.ops.responses.spec import channel_scores
from keras_equiattn.ops.responses.spec import Overall
from keras_equiattn.ops.responses.spec import Pixels
from keras_equiattn.ops.responses.spec import Places
from keras_equiattn.ops.responses.spec import Planes
from keras_equiattn.ops.responses.spec import Statistics
from keras_equiattn.ops.responses.spec import Weights


class Reduced(NamedTuple):
    """The statistics of the responses of a chunk, and attention from them.

    Attributes:
        alpha: channel attention, or None.
        total: the sum of the weighted responses over the channels, in float32
            at least.
        statistics: for spatial attention their mean and maximum over the
            channels, or None.
        gate: spatial attention, or None.
        places: the number of the channel that has the maximum, the first one
            if several are equal; None where it was not asked for.
    """

    # Types without None: each is read only where the spec has it.
    alpha: Overall
    total: Pixels
    statistics: Statistics = None
    gate: Pixels = None
    places: Places = None


def attended_sum(
    spec: AttentionSpec, planes: AllPlanes, weights: Weights
) -> Float[Tensor, "chunks _ height width filters"]:
    """The sum of the attended responses over input elements and channels.

    Args:
        spec: the convolution and the attention.
        planes: the padded input.
        weights: by name, each with first axes `(elements, chunks)`.

    Returns:
        `(chunks, batch, height, width, filters)`. TensorFlow forgets the sizes
        if the same form was compiled for several of them.
    """
    blocks = dispatch.blocks(planes.shape[2])
    tensors = planes, *(weights[name] for name in spec.names)
    return _attended_sum(spec, blocks, backend.signature(tensors))(*tensors)


def attention_maps(
    spec: AttentionSpec, planes: AllPlanes, weights: Weights
) -> tuple[
    Float[Tensor, "elements chunks channels batch filters"],
    Float[Tensor, "elements chunks batch height width filters"],
]:
    """Channel and spatial attention, ones where there is none.

    No gradient passes through the result.

    Args:
        spec, planes, weights: see `attended_sum`.
    """
    tensors = planes, *(weights[name] for name in spec.names)
    return _attention_maps(spec, backend.signature(tensors))(*tensors)


@functools.lru_cache(maxsize=256)
def _attended_sum(spec: AttentionSpec, blocks: int, shapes: Any) -> Any:
    """The function of planes and weights that has a gradient of its own."""
    return backend.custom_vjp(
        functools.partial(_forward, spec),
        functools.partial(_backward, spec, blocks),
        "`chunk_size=None`",
    )


@functools.lru_cache(maxsize=256)
def _attention_maps(spec: AttentionSpec, shapes: Any) -> Any:
    """The function of planes and weights that returns attention."""
    return backend.without_gradient(functools.partial(_maps, spec))


def _named(
    spec: AttentionSpec, weights: tuple[Float[Tensor, "..."], ...]
) -> Weights:
    """The weights by name, for functions that take them one by one."""
    return dict(zip(spec.names, weights, strict=True))


def _forward(
    spec: AttentionSpec, planes: AllPlanes, *tensors: Float[Tensor, "..."]
) -> tuple[Float[Tensor, "chunks batch height width filters"], Weights]:
    """The sum, and what to keep for the backward pass.

    With channel attention this is the maximum of each response over space:
    "peaks" `(elements, chunks, channels, batch, filters)`.

    Args:
        spec: the convolution and the attention.
        planes: the padded input.
        *tensors: the weights, in the order of `spec.names`.
    """
    like = _like(planes)
    kept_like = {"peaks": like} if spec.has_channel else {}

    def element(total: Tensor, piece: Any) -> Any:
        """Adds the responses at one input group element to the total."""
        planes, weights = piece

        def chunk(carry: Any, weights: Weights) -> Any:
            """The sum of some filters, and the maxima that are kept."""
            kept = _peaks(spec, planes, weights)
            found = _reduced(spec, planes, weights | kept)
            gated = spec.has_spatial
            return carry, (
                found.total * found.gate if gated else found.total,
                kept,
            )

        like_chunk = like, kept_like
        _, (attended, kept) = backend.scan(chunk, (), weights, like_chunk)
        return total + attended, kept

    weights = _named(spec, tensors)
    chunks, filters = weights["kernel"].shape[1], weights["kernel"].shape[-1]
    size = ops.shape(spec.window.views(planes[0, 0])[0])
    total = ops.zeros((chunks, *size, filters), like.dtype)
    return backend.scan(element, total, (planes, weights), kept_like)


def _backward(
    spec: AttentionSpec,
    blocks: int,
    arguments: tuple[Float[Tensor, "..."], ...],
    peaks: Weights,
    upstream: Float[Tensor, "chunks batch height width filters"],
) -> tuple[Float[Tensor, "..."], ...]:
    """The gradients with respect to planes and weights, in their order.

    Args:
        spec: the convolution and the attention.
        blocks: see `dispatch.blocks`.
        arguments: planes and weights.
        peaks: the maxima that `_forward` kept.
        upstream: the gradient with respect to the sum.
    """
    planes, weights = arguments[0], _named(spec, arguments[1:])
    like = _like(planes)
    kept_like = dict.fromkeys(spec.names, like)

    def element(carry: Any, piece: Any) -> Any:
        """The gradients of the planes and weights of one input element."""
        planes, weights = piece

        def chunk(d_planes: Tensor, piece: Any) -> Any:
            """Adds the gradient of some filters to that of the planes."""
            weights, upstream = piece
            found, kept = _chunk_gradients(
                spec, planes, weights, upstream, blocks
            )
            return d_planes + found, kept

        start = ops.zeros_like(planes, dtype=like.dtype)
        return carry, backend.scan(chunk, start, (weights, upstream), kept_like)

    pieces = planes, weights | peaks
    _, (d_planes, kept) = backend.scan(element, (), pieces, (like, kept_like))
    found = (ops.sum(kept[name], axis=2) for name in spec.names)
    gradients = d_planes, *found
    return tuple(
        ops.cast(d, x.dtype) for d, x in zip(gradients, arguments, strict=True)
    )


def _like(planes: AllPlanes) -> Any:
    """An array of the dtype of sums and statistics, for `scan`."""
    return np.zeros((), dtype_of_sums(planes))


def _chunk_gradients(
    spec: AttentionSpec,
    planes: Planes,
    weights: Weights,
    upstream: Pixels,
    blocks: int,
) -> tuple[Planes, Weights]:
    """The gradients of the planes and, for blocks of images, of the weights.

    Args:
        spec, planes: the arguments of the chunk.
        weights: the weights of the chunk, and its "peaks" with channel
            attention.
        upstream: the gradient of its attended sum.
        blocks: see `dispatch.blocks`.

    Returns:
        The gradient of the planes, and by name those of the weights, with the
        blocks along the first axis.
    """
    window, kernel = spec.window, weights["kernel"]
    found = _reduced(spec, planes, weights, where=True)
    d_total, kept = upstream, {}
    d_both = of_maxima = of_channel = None
    if spec.has_spatial:
        d_total, d_maximum, kept["spatial"] = _through_spatial(
            spec, planes, weights, found, upstream, blocks
        )
        # Gradients of the responses are as precise as the responses.
        d_both = ops.cast(d_total + d_maximum, planes.dtype)
        of_maxima = d_maximum * found.statistics[..., 1, :]
        of_maxima = ops.cast(of_maxima, planes.dtype)
    d_total = ops.cast(d_total, planes.dtype)
    if spec.has_channel:
        of_channel, of_layers = _through_channel(
            spec, planes, weights, found, d_total, of_maxima, blocks
        )
        kept |= of_layers
    d_planes, d_kernel = channels.gradients(
        window,
        planes,
        kernel,
        d_total,
        found.places,
        d_both,
        of_channel,
        blocks,
    )
    return d_planes, kept | {"kernel": ops.moveaxis(d_kernel, 1, 0)}


def _through_spatial(
    spec: AttentionSpec,
    planes: Planes,
    weights: Weights,
    found: Reduced,
    upstream: Pixels,
    blocks: int,
) -> tuple[Pixels, Pixels, Float[Tensor, "blocks rows columns 2 filters"]]:
    """The gradients of sum, maximum and filters of spatial attention.

    Args:
        spec, planes, weights, upstream, blocks: see `_chunk_gradients`.
        found: the statistics of the chunk.
    """
    gate = found.gate
    d_statistics, d_kernel = depthwise_gradients(
        found.statistics,
        weights["spatial"],
        upstream * found.total * gate * (1 - gate),
        spec.attention_dilation_rate,
        _columns(spec, planes, weights),
        blocks,
    )
    d_mean, d_maximum = d_statistics[..., 0, :], d_statistics[..., 1, :]
    return upstream * gate + d_mean / planes.shape[0], d_maximum, d_kernel


def _through_channel(
    spec: AttentionSpec,
    planes: Planes,
    weights: Weights,
    found: Reduced,
    d_total: Pixels,
    of_maxima: Pixels | None,
    blocks: int,
) -> tuple[OfChannel, Weights]:
    """The part of channel attention in the gradients of a chunk.

    Args:
        spec, planes, weights, blocks: see `_chunk_gradients`.
        found: the statistics of the chunk.
        d_total: the gradient of the sum of the weighted responses.
        of_maxima: their maximum over the channels times its gradient, or None.

    Returns:
        The argument of `channels.gradients`, and by name the gradients of both
        layers.
    """
    window, kernel, alpha = spec.window, weights["kernel"], found.alpha
    floor = channels.rounded_down(weights["peaks"], planes, kernel)
    d_log, count = channels.through_attention(
        planes,
        kernel,
        alpha,
        floor,
        d_total,
        of_maxima,
        found.places,
        window=window,
    )
    d_scores = d_log * (1 - alpha)
    means = channels.mean_responses(window, planes, kernel)
    number, batch, filters = ops.shape(means)
    images = batch // blocks if blocks > 1 else batch
    of_images = [
        ops.moveaxis(ops.reshape(x, (number, blocks, images, filters)), 1, 0)
        for x in (means, weights["peaks"], d_scores)
    ]
    layers = [
        ops.broadcast_to(weights[name], (blocks, *weights[name].shape))
        for name in ("first", "second")
    ]
    *statistics, d_scores = of_images
    d_means, d_peaks, *d_layers = backend.vjp(
        channel_scores, (*statistics, *layers), d_scores
    )[1]
    d_means, d_peaks = (
        ops.reshape(ops.moveaxis(x, 0, 1), (number, batch, filters))
        for x in (d_means, d_peaks)
    )
    height, width = ops.shape(d_total)[1:3]
    d_every = divided(d_means, height, width)
    count = ops.cast(backend.clamped(count, 1.0, math.inf), d_peaks.dtype)
    d_largest = d_peaks / count
    of_channel = OfChannel(alpha, floor, d_every, d_largest)
    return of_channel, dict(zip(("first", "second"), d_layers, strict=True))


def _peaks(spec: AttentionSpec, planes: Planes, weights: Weights) -> Weights:
    """The maxima of the responses over space, where attention needs them."""
    if not spec.has_channel:
        return {}
    kernel, window = weights["kernel"], spec.window
    return {"peaks": channels.peaks(planes, kernel, window=window)}


def _reduced(
    spec: AttentionSpec, planes: Planes, weights: Weights, where: bool = False
) -> Reduced:
    """The statistics of the responses of a chunk, and attention from them.

    Args:
        spec, planes: the arguments of the chunk.
        weights: the weights of the chunk, and its "peaks" with channel
            attention.
        where: whether to say which channel has the maximum.
    """
    kernel, alpha, window = weights["kernel"], None, spec.window
    if spec.has_channel:
        means = channels.mean_responses(window, planes, kernel)
        layers = weights["first"], weights["second"]
        alpha = ops.sigmoid(channel_scores(means, weights["peaks"], *layers))
    total = channels.sums(planes, kernel, alpha, window=window)
    if not spec.has_spatial:
        return Reduced(alpha, total)
    maximum, *places = channels.maxima(
        planes, kernel, alpha, window=window, where=where
    )
    statistics = ops.stack(
        [total / planes.shape[0], ops.cast(maximum, total.dtype)], axis=3
    )
    scores = depthwise_sum(
        statistics,
        weights["spatial"],
        spec.attention_dilation_rate,
        _columns(spec, planes, weights),
    )
    return Reduced(alpha, total, statistics, ops.sigmoid(scores), *places)


def _columns(
    spec: AttentionSpec, planes: Planes, weights: Weights
) -> int | None:
    """Over how many columns the convolution of statistics is written out."""
    schedule = dispatch.schedule(spec.window, planes, weights["kernel"])
    return schedule.depthwise_columns


def _maps(
    spec: AttentionSpec, planes: AllPlanes, *tensors: Float[Tensor, "..."]
) -> tuple[
    Float[Tensor, "elements chunks channels batch filters"],
    Float[Tensor, "elements chunks batch height width filters"],
]:
    """Channel and spatial attention, ones where there is none.

    Args:
        spec, planes, *tensors: see `_forward`.
    """

    def element(carry: Any, piece: Any) -> Any:
        """The attention at one input group element."""
        planes, weights = piece

        def chunk(carry: Any, weights: Weights) -> Any:
            """The attention to the responses of some filters."""
            peaks = _peaks(spec, planes, weights)
            found = _reduced(spec, planes, weights | peaks)
            gate = (
                found.gate if spec.has_spatial else ops.ones_like(found.total)
            )
            if spec.has_channel:
                return carry, (found.alpha, gate)
            ones = ops.ones_like(planes[:, :, :1, 0] + weights["kernel"][:, :1])
            return carry, (in_full_precision(ones), gate)

        return carry, backend.scan(chunk, (), weights, like)[1]

    like = (_like(planes),) * 2
    return backend.scan(element, (), (planes, _named(spec, tensors)), like)[1]
