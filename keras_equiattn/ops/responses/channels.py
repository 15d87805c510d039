"""What is reduced over groups of input channels, and what flows back to them.

For one input group element and one chunk of output channels. All that is as
large as the responses lives within one step of a loop over groups of input
channels. Axes are those of `form`.
"""

from typing import Any
from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Shaped
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.geometry import FilterWindow
from keras_equiattn.ops.numerics import mean
from keras_equiattn.ops.numerics import sums_of_blocks
from keras_equiattn.ops.responses import dispatch


class Reduced(NamedTuple):
    """What is left of the weighted responses over the input channels.

    Attributes:
        total: their sum `(batch, height, width, filters)`.
        maximum: the largest, likewise.
        channel: which it belongs to, the first of equal ones, likewise.
    """

    total: Tensor
    maximum: Tensor | None = None
    channel: Tensor | None = None


def responses(
    window: FilterWindow,
    planes: Float[Tensor, "channels batch padded_height padded_width"],
    kernel: Float[Tensor, "channels taps filters"],
    alpha: Float[Tensor, "channels batch filters"] | None = None,
) -> Float[Tensor, "channels batch height width filters"]:
    """The responses, each times its channel attention.

    Args:
        window: of the convolution.
        planes: some channels of the padded input.
        kernel: the filters.
        alpha: channel attention, or None for 1.
    """
    if plan_for(window, planes, kernel).written_out:
        # Not a product: a compiler makes it part of what reduces it.
        found = 0.0
        for tap, view in enumerate(window.views(planes)):
            weights = kernel[:, tap, None, None, None]
            found = found + view[..., None] * weights
        return found if alpha is None else found * alpha[:, :, None, None]
    seen = stacked_views(window, planes)
    scaled = kernel[:, None]
    if alpha is not None:
        scaled = scaled * alpha[:, :, None]
    *front, height, width = ops.shape(window.views(planes)[0])
    found = ops.swapaxes(seen, 2, 3) @ scaled
    return ops.reshape(found, (*front, height, width, kernel.shape[-1]))


def stacked_views(
    window: FilterWindow,
    planes: Float[Tensor, "channels batch padded_height padded_width"],
) -> Float[Tensor, "channels batch taps positions"]:
    """What each entry of a filter sees, at all output positions."""
    seen = ops.stack(window.views(planes), axis=2)
    *front, height, width = ops.shape(seen)
    return ops.reshape(seen, (*front, height * width))


def mean_views(
    window: FilterWindow,
    planes: Float[Tensor, "channels batch padded_height padded_width"],
) -> Float[Tensor, "channels batch taps"]:
    """The mean over space of what each entry of a filter sees.

    That of a response is this times the filter.
    """
    return ops.stack([mean(x, (2, 3)) for x in window.views(planes)], axis=-1)


def sums(
    window: FilterWindow,
    planes: Float[Tensor, "channels batch padded_height padded_width"],
    kernel: Float[Tensor, "channels taps filters"],
    alpha: Float[Tensor, "channels batch filters"],
) -> Float[Tensor, "batch height width filters"]:
    """Sum over the channels of `responses`, which it does not compute."""
    seen = stacked_views(window, planes)
    scaled = kernel[:, None] * alpha[:, :, None]
    found = ops.einsum("cbtp,cbtn->bpn", seen, scaled)
    batch, height, width = ops.shape(window.views(planes[0])[0])
    return ops.reshape(found, (batch, height, width, kernel.shape[-1]))


@backend.part(fuses_sums=True)
def peaks(
    planes: Float[Tensor, "channels batch padded_height padded_width"],
    kernel: Float[Tensor, "channels taps filters"],
    *,
    window: FilterWindow,
) -> Float[Tensor, "channels batch filters"]:
    """The maximum of each response over space."""

    def step(carry: Any, group: Any) -> Any:
        found = responses(window, *group)
        return carry, ops.max(found, axis=(2, 3))

    groups = planes, kernel
    plan = plan_for(window, planes, kernel)
    # XLA would keep all of them for what is reduced next.
    size = plan.together if backend.find_target(planes).xla else plan.reduced
    return backend.scan_groups(step, (), groups, size, planes)[1]


@backend.part(fuses_sums=True)
def reduce(
    planes: Float[Tensor, "channels batch padded_height padded_width"],
    kernel: Float[Tensor, "channels taps filters"],
    alpha: Float[Tensor, "channels batch filters"] | None,
    *,
    window: FilterWindow,
    maxima: bool,
    where: bool,
) -> tuple[Tensor, ...]:
    """Sum and maximum of the weighted responses over the channels.

    Args:
        planes, kernel, alpha: see `responses`.
        window: of the convolution.
        maxima: whether the maximum is asked for.
        where: whether its channel is, too.

    Returns:
        What `Reduced` has, as far as it is asked for.
    """
    like = window.views(planes[0])[0][..., None]
    zeros = ops.zeros_like(like) + ops.zeros(kernel.shape[-1:], like.dtype)
    carry: tuple[Tensor, ...] = (zeros,)
    if maxima:
        carry += (zeros + float(np.finfo(_dtype(zeros)).min),)
    if maxima and where:
        carry += (ops.cast(zeros, "int32"),)

    def step(carry: Any, group: Any) -> Any:
        first, *group = group
        if not maxima:
            return (carry[0] + sums(window, *group),), ()
        found = responses(window, *group)
        count = found.shape[0]
        if count <= dispatch.FOLDED and backend.find_target(found).xla_on_cpu:
            total, best, *index = carry
            for n in range(count):
                better = found[n] > best
                total = total + found[n]
                index = [ops.where(better, first[n], i) for i in index]
                best = ops.maximum(best, found[n])
            return (total, best, *index), ()
        total, maximum, *index = backend.sum_and_maximum(found, 0, where)
        best = backend.maximum(carry[1], maximum)
        if not where:
            return (carry[0] + total, best), ()
        better = maximum > carry[1]
        index = ops.where(better, first[0] + index[0], carry[2])
        return (carry[0] + total, best, index), ()

    groups = [_numbers(planes), planes, kernel]
    if alpha is not None:
        groups.append(alpha)
    size = plan_for(window, planes, kernel).reduced
    return tuple(backend.scan_groups(step, carry, tuple(groups), size)[0])


@backend.part(fuses_sums=True)
def through_attention(
    planes: Float[Tensor, "channels batch padded_height padded_width"],
    kernel: Float[Tensor, "channels taps filters"],
    alpha: Float[Tensor, "channels batch filters"],
    floor: Float[Tensor, "channels batch filters"],
    d_total: Float[Tensor, "batch height width filters"],
    reduced: Reduced,
    d_maximum: Float[Tensor, "batch height width filters"] | None,
    *,
    window: FilterWindow,
) -> tuple[
    Float[Tensor, "channels batch filters"],
    Float[Tensor, "channels batch filters"],
]:
    """Gradient of the logarithm of channel attention, and how many maxima.

    The gradient is the sum over space of each weighted response times its
    gradient. That through the sum of the responses takes none of them, and of
    the maxima over the channels each belongs to one channel.

    Args:
        planes, kernel, alpha: see `responses`.
        floor: from which on a response counts as its maximum over space.
        d_total, d_maximum: gradients of sum and maximum over the channels.
        reduced: what is left over the channels.
        window: of the convolution.

    Returns:
        The gradient, and how many positions of a response have its maximum.
    """
    batch, height, width, filters = ops.shape(d_total)
    flat = ops.reshape(d_total, (batch, height * width, filters))
    of_maxima = None if d_maximum is None else d_maximum * reduced.maximum

    def step(carry: Any, group: Any) -> Any:
        number, planes, kernel, alpha, floor = group
        seen = stacked_views(window, planes)
        of_views = ops.einsum("cbtp,bpn->cbtn", seen, flat)
        found = alpha * ops.sum(of_views * kernel[:, None], axis=2)
        hits = _hits(responses(window, planes, kernel), floor)
        terms = [ops.cast(hits, _dtype(planes))]
        if of_maxima is not None:
            at = _is_at(reduced.channel, number)
            terms.append(ops.where(at, of_maxima, 0.0))
        terms = [
            ops.reshape(x, (*ops.shape(x)[:2], -1, filters)) for x in terms
        ]
        count, *own = backend.sums_together(terms, 2)
        return carry, (found + own[0] if own else found, count)

    groups = _numbers(planes), planes, kernel, alpha, floor
    size = plan_for(window, planes, kernel).reduced
    return backend.scan_groups(step, (), groups, size, (planes, planes))[1]


class OfChannel(NamedTuple):
    """What channel attention adds to the gradients of the responses.

    Attributes, all `(channels, batch, filters)`:
        alpha: the attention, a factor of the responses.
        floor: from which on a response counts as its maximum over space.
        d_every: gradient of all responses through their mean over space.
        d_largest: gradient of each response that is the maximum; ties share.
    """

    alpha: Tensor
    floor: Tensor
    d_every: Tensor
    d_largest: Tensor


def gradients(
    window: FilterWindow,
    planes: Float[Tensor, "channels batch padded_height padded_width"],
    kernel: Float[Tensor, "channels taps filters"],
    d_total: Float[Tensor, "batch height width filters"],
    index: Shaped[Tensor, "batch height width filters"] | None,
    d_maximum: Float[Tensor, "batch height width filters"] | None,
    of_channel: OfChannel | None,
) -> tuple[Tensor, Tensor]:
    """Gradients of the planes and of the filters.

    Args:
        window, planes, kernel: see `responses`.
        d_total: gradient of the sum of the weighted responses.
        index: channel of their maximum, or None.
        d_maximum: gradient of their maximum, or None.
        of_channel: for channel attention, or None.

    Returns:
        `(channels, batch, padded_height, padded_width)` and, for blocks of
        images, `(channels, blocks, taps, filters)`.
    """

    plan = plan_for(window, planes, kernel)

    def step(carry: Any, group: Any) -> Any:
        found = _gradients(
            *group[:3],
            d_total,
            index,
            d_maximum,
            OfChannel(*group[3:]) if of_channel else None,
            window=window,
            blocks=plan.blocks,
        )
        return carry, found

    groups = _numbers(planes), planes, kernel, *(of_channel or ())
    like = planes, kernel
    return backend.scan_groups(step, (), groups, plan.together, like)[1]


@backend.part(fuses_sums=True)
def _gradients(
    number: Shaped[Tensor, " channels"],
    planes: Float[Tensor, "channels batch padded_height padded_width"],
    kernel: Float[Tensor, "channels taps filters"],
    d_total: Float[Tensor, "batch height width filters"],
    index: Shaped[Tensor, "batch height width filters"] | None,
    d_maximum: Float[Tensor, "batch height width filters"] | None,
    of_channel: OfChannel | None,
    *,
    window: FilterWindow,
    blocks: int,
) -> tuple[Tensor, Tensor]:
    """The same for a few channels, whose numbers are given."""
    d = d_total[None]
    if index is not None:
        own = _is_at(index, number)
        d = ops.where(own, d_total + d_maximum, d_total)
    if of_channel is not None:
        of = of_channel
        hits = _hits(responses(window, planes, kernel), of.floor)
        every = of.d_every[:, :, None, None]
        largest = every + of.d_largest[:, :, None, None]
        d = backend.update(
            "add",
            d * of.alpha[:, :, None, None],
            ops.where(hits, largest, every),
        )
    count, batch, height, width, filters = ops.shape(d)
    d = ops.reshape(d, (count, batch, height * width, filters))
    d_kernel = stacked_views(window, planes) @ d
    turned = ops.swapaxes(kernel, 1, 2)[:, None]
    # Not of all images at once: XLA would make `d` anew for that.
    turned = ops.broadcast_to(turned, (count, batch, *turned.shape[2:]))
    d_views = ops.reshape(d @ turned, (count, batch, height, width, -1))
    return (
        backend.sum_of_views(window.views, d_views, planes),
        sums_of_blocks(d_kernel, blocks, axis=1),
    )


def rounded_down(
    peaks: Float[Tensor, "channels batch filters"],
    planes: Float[Tensor, "channels batch padded_height padded_width"],
    kernel: Float[Tensor, "channels taps filters"],
) -> Float[Tensor, "channels batch filters"]:
    """Maxima of responses, lower by what rounding may be.

    Responses that are computed within different loops differ by that much,
    since a compiler may round the products or not.

    Args:
        peaks: the maxima.
        planes, kernel: see `responses`.
    """
    digits = kernel.shape[1] * float(np.finfo(_dtype(kernel)).eps)
    largest = ops.max(ops.abs(planes), axis=(2, 3))[..., None]
    return peaks - digits * largest * ops.sum(ops.abs(kernel), 1)[:, None]


def _hits(
    found: Float[Tensor, "channels batch height width filters"],
    floor: Float[Tensor, "channels batch filters"],
) -> Shaped[Tensor, "channels batch height width filters"]:
    """Whether a response is as large as its maximum over space."""
    return found >= floor[:, :, None, None]


def plan_for(
    window: FilterWindow,
    planes: Float[Tensor, "channels batch padded_height padded_width"],
    kernel: Float[Tensor, "channels taps filters"],
) -> dispatch.Plan:
    """How the responses are computed."""
    return dispatch.plan(window.views(planes[0])[0], *kernel.shape)


def _numbers(planes: Tensor) -> Tensor:
    """A number for each channel."""
    return ops.arange(planes.shape[0], dtype="int32")


def _is_at(index: Tensor, number: Tensor) -> Tensor:
    """Whether the maximum is in a channel `(channels, batch, ...)`."""
    return ops.equal(index, number[:, None, None, None, None])


def _dtype(x: Tensor) -> str:
    return str(keras.backend.standardize_dtype(x.dtype))
