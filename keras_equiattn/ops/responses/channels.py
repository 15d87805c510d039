"""Reductions over groups of input channels, and their gradients.

Everything here is for one input group element and one chunk of output channels.
Tensors as large as the responses live within one step of a loop over
groups of input channels. Axes are those of `spec`.
"""

from typing import Any
from typing import NamedTuple

import numpy as np
from keras import ops

from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Shaped
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.geometry import FilterWindow
from keras_equiattn.ops.numerics import dtype_name
from keras_equiattn.ops.numerics import dtype_of_sums
from keras_equiattn.ops.numerics import in_full_precision
from keras_equiattn.ops.numerics import mean
from keras_equiattn.ops.numerics import sums_of_blocks
from keras_equiattn.ops.responses import dispatch
from keras_equiattn.ops.responses.spec import Kernel
from keras_equiattn.ops.responses.spec import Overall
from keras_equiattn.ops.responses.spec import Pixels
from keras_equiattn.ops.responses.spec import Places
from keras_equiattn.ops.responses.spec import Planes
from keras_equiattn.ops.responses.spec import Responses

# The relative distance between adjacent numbers of a dtype.
HALF_STEPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


def responses(
    window: FilterWindow,
    planes: Planes,
    kernel: Kernel,
    alpha: Overall | None,
    written_out: bool,
) -> Responses:
    """The responses, each times its channel attention where there is one.

    Args:
        window: where the filters look.
        planes: the padded input at one input group element.
        kernel: the filters of a chunk.
        alpha: channel attention, or None.
        written_out: whether a response is a sum of products. A compiler makes
            such a sum part of what reduces it.
    """
    if written_out:
        found = 0.0
        for tap, view in enumerate(window.views(planes)):
            weights = kernel[:, tap, None, None, None]
            view = in_full_precision(view)[..., None]
            found = found + view * in_full_precision(weights)
        found = found if alpha is None else found * alpha[:, :, None, None]
        return ops.cast(found, planes.dtype)
    scaled = kernel[:, None]
    if alpha is not None:
        scaled = in_full_precision(scaled) * alpha[:, :, None]
        scaled = ops.cast(scaled, planes.dtype)
    found = ops.swapaxes(stacked_views(window, planes), 2, 3) @ scaled
    return ops.reshape(found, _shape(window, planes, kernel))


def stacked_views(
    window: FilterWindow, planes: Planes
) -> Float[Tensor, "channels batch taps positions"]:
    """The pixels under each entry of a filter, at all output positions."""
    seen = ops.stack(window.views(planes), axis=2)
    *front, height, width = ops.shape(seen)
    return ops.reshape(seen, (*front, height * width))


def mean_responses(
    window: FilterWindow, planes: Planes, kernel: Kernel
) -> Overall:
    """The means of the responses over space, without the responses.

    A mean is linear, so that the filters are applied to the means of the views.
    """
    views = (in_full_precision(x) for x in window.views(planes))
    seen = ops.stack([mean(x, (2, 3)) for x in views], axis=-1)
    return ops.einsum("cbt,ctn->cbn", seen, in_full_precision(kernel))


@backend.compiled_part(fuses_sums=True)
def sums(
    planes: Planes,
    kernel: Kernel,
    alpha: Overall | None,
    *,
    window: FilterWindow,
) -> Pixels:
    """The sum of the weighted responses over the channels, without responses.

    It is a convolution with filters that are weighted for each image. Views and
    filters are in float32: the difference of a convolution and the attended sum
    may be a thousandth of that sum.

    Args:
        planes, kernel, alpha, window: see `responses`.
    """

    def step(total: Any, group: Any) -> Any:
        """Adds some channels to the sum."""
        planes, kernel, alpha = group
        scaled = in_full_precision(kernel)[:, None] * alpha[:, :, None]
        # With the images first, channels and taps are one axis of a product.
        planes = in_full_precision(ops.swapaxes(planes, 0, 1))
        both = stacked_views(window, planes), ops.swapaxes(scaled, 0, 1)
        seen, scaled = (
            ops.reshape(x, (batch, -1, ops.shape(x)[-1])) for x in both
        )
        return total + ops.swapaxes(seen, 1, 2) @ scaled, ()

    if alpha is None:
        ones = ops.ones_like(planes[:, :, 0, :1] + kernel[:, :1])
        alpha = in_full_precision(ones)
    batch, height, width, filters = _shape(window, planes, kernel)[1:]
    size = dispatch.schedule(window, planes, kernel).stacked
    start = ops.zeros((batch, height * width, filters), alpha.dtype)
    groups = planes, kernel, alpha
    total, _ = backend.scan_groups(step, start, groups, size)
    return ops.reshape(total, (batch, height, width, filters))


@backend.compiled_part(fuses_sums=True)
def peaks(planes: Planes, kernel: Kernel, *, window: FilterWindow) -> Overall:
    """The maximum of each response over space.

    Args:
        planes, kernel, window: see `responses`.
    """
    schedule = dispatch.schedule(window, planes, kernel)

    def step(carry: Any, group: Any) -> Any:
        planes, kernel = group
        found = responses(window, planes, kernel, None, schedule.written_out)
        return carry, ops.max(found, axis=(2, 3))

    groups, size = (planes, kernel), schedule.reduced
    found = backend.scan_groups(step, (), groups, size, planes)[1]
    return in_full_precision(found)


@backend.compiled_part(fuses_sums=True)
def maxima(
    planes: Planes,
    kernel: Kernel,
    alpha: Overall | None,
    *,
    window: FilterWindow,
    where: bool,
) -> tuple[Pixels] | tuple[Pixels, Places]:
    """The largest weighted response of all channels, at each position.

    Args:
        planes, kernel, alpha, window: see `responses`.
        where: whether to return the number of its channel, too. If responses
            are equal, the first channel counts.

    Returns:
        The maximum, as precise as the responses, and the number if asked for.
    """
    schedule = dispatch.schedule(window, planes, kernel)
    shape, numbers = _shape(window, planes, kernel)[1:], _numbers(planes)
    best = backend.filled(shape, float("-inf"), planes.dtype)
    index = (ops.zeros(shape, numbers.dtype),) if where else ()

    def step(carry: Any, group: Any) -> Any:
        """Compares the maxima so far with the responses of some channels."""
        number, planes, kernel, *alpha = group
        weight = alpha[0] if alpha else None
        found = responses(window, planes, kernel, weight, schedule.written_out)
        if schedule.one_by_one:
            count = range(found.shape[0])
            candidates = [(found[n], number[n]) for n in count]
        else:
            place = ops.argmax(found, axis=0) if where else 0
            place = number[0] + ops.cast(place, number.dtype)
            candidates = [(ops.max(found, axis=0), place)]
        best, index = carry
        for value, place in candidates:
            index = tuple(ops.where(value > best, place, x) for x in index)
            best = backend.maximum(best, value)
        return (best, index), ()

    groups = (numbers, planes, kernel, *(() if alpha is None else (alpha,)))
    carry, size = (best, index), schedule.reduced
    (best, index), _ = backend.scan_groups(step, carry, groups, size)
    return (best, *index)


@backend.compiled_part(fuses_sums=True)
def through_attention(
    planes: Planes,
    kernel: Kernel,
    alpha: Overall,
    floor: Overall,
    d_total: Pixels,
    of_maxima: Pixels | None,
    index: Places | None,
    *,
    window: FilterWindow,
) -> tuple[Overall, Overall]:
    """The gradient of the logarithm of channel attention, and a count.

    The gradient is the sum over space of each weighted response times its
    gradient. The part that flows through the sum of the responses needs none of
    them, so it has its own loop, over more channels at a time. Each of the
    maxima over the channels belongs to one channel.

    Args:
        planes, kernel, alpha, window: see `responses`.
        floor: the value from which on a response counts as the maximum.
        d_total: the gradient of the sum over the channels.
        of_maxima: the maximum over the channels times its gradient.
        index: the channel of that maximum.

    Returns:
        The gradient, and at how many positions a response has its maximum.
    """
    batch, height, width, filters = ops.shape(d_total)
    flat = ops.reshape(d_total, (batch, height * width, filters))
    schedule = dispatch.schedule(window, planes, kernel)

    def through_sum(carry: Any, group: Any) -> Any:
        """The part of the gradient that flows through the sum."""
        planes, kernel, alpha = group
        seen = stacked_views(window, planes)
        of_views = backend.einsum_in_full_precision(
            "cbtp,bpn->cbtn", seen, flat
        )
        weights = in_full_precision(kernel)[:, None]
        return carry, alpha * ops.sum(of_views * weights, axis=2)

    def through_maxima(carry: Any, group: Any) -> Any:
        """The count, and the part that flows through the maxima, if any."""
        number, planes, kernel, floor = group
        values = responses(window, planes, kernel, None, schedule.written_out)
        terms = [_hits(values, floor)]
        if of_maxima is not None:
            hidden = ops.not_equal(index, _along_channels(number))
            terms.append(backend.masked(of_maxima, hidden, 0.0))
        shape = (*ops.shape(floor)[:2], -1, filters)
        terms = [ops.reshape(x, shape) for x in terms]
        found = backend.sums_together(terms, 2)
        return carry, tuple(ops.cast(x, alpha.dtype) for x in found)

    groups: Any = planes, kernel, alpha
    size = schedule.stacked
    found = backend.scan_groups(through_sum, (), groups, size, alpha)[1]
    groups = _numbers(planes), planes, kernel, floor
    like = (alpha,) * (1 if of_maxima is None else 2)
    count, *own = backend.scan_groups(
        through_maxima, (), groups, schedule.reduced, like
    )[1]
    return found + own[0] if own else found, count


class OfChannel(NamedTuple):
    """The part of channel attention in the gradients of the responses.

    Attributes:
        alpha: the attention, a factor of the responses.
        floor: the number from which on a response counts as its maximum over
            space.
        d_every: the gradient of all responses through their mean over space.
        d_largest: the gradient of each response that is the maximum; equal
            ones share it.
    """

    alpha: Overall
    floor: Overall
    d_every: Overall
    d_largest: Overall


def gradients(
    window: FilterWindow,
    planes: Planes,
    kernel: Kernel,
    d_total: Pixels,
    index: Places | None,
    d_both: Pixels | None,
    of_channel: OfChannel | None,
    blocks: int,
) -> tuple[Planes, Float[Tensor, "channels blocks taps filters"]]:
    """The gradients of the planes and, for blocks of images, of the filters.

    Args:
        window, planes, kernel: see `responses`.
        d_total: the gradient of the sum of the weighted responses.
        index: the channel of their maximum, or None.
        d_both: the gradient of their sum and of their maximum, or None.
        of_channel: for channel attention, or None.
        blocks: see `dispatch.blocks`.
    """

    def step(carry: Any, group: Any) -> Any:
        some, options = (*group[:3], d_total, index, d_both), group[3:] or None
        return carry, _gradients(*some, options, window=window, blocks=blocks)

    groups = _numbers(planes), planes, kernel, *(of_channel or ())
    size = dispatch.schedule(window, planes, kernel).together
    like = (np.zeros((), dtype_of_sums(planes)),) * 2
    return backend.scan_groups(step, (), groups, size, like)[1]


@backend.compiled_part(fuses_sums=True)
def _gradients(
    number: Shaped[Tensor, " channels"],
    planes: Planes,
    kernel: Kernel,
    d_total: Pixels,
    index: Places | None,
    d_both: Pixels | None,
    of_channel: tuple[Overall, ...] | None,
    *,
    window: FilterWindow,
    blocks: int,
) -> tuple[Planes, Float[Tensor, "channels blocks taps filters"]]:
    """Computes `gradients` for a few channels, whose numbers are given."""
    d = d_total[None]
    if index is not None:
        d = ops.where(_is_at(index, number), d_both, d)
    if of_channel is not None:
        alpha, floor, d_every, d_largest = of_channel
        schedule = dispatch.schedule(window, planes, kernel)
        values = responses(window, planes, kernel, None, schedule.written_out)
        alpha, every, largest = (
            ops.cast(x, d.dtype)[:, :, None, None]
            for x in (alpha, d_every, d_every + d_largest)
        )
        own = ops.where(_hits(values, floor), largest, every)
        d = backend.add_product(own, d, alpha)
    count, batch, height, width, filters = ops.shape(d)
    d = ops.reshape(d, (count, batch, height * width, filters))
    seen = stacked_views(window, planes)
    d_kernel = backend.einsum_in_full_precision("cbtp,cbpn->cbtn", seen, d)
    turned = ops.swapaxes(kernel, 1, 2)[:, None]
    # One product for all images would make XLA compute `d` anew for it.
    turned = ops.broadcast_to(turned, (count, batch, *turned.shape[2:]))
    d_views = ops.reshape(d @ turned, (count, batch, height, width, -1))
    d_planes = backend.sum_of_views(
        window.views, in_full_precision(d_views), in_full_precision(planes)
    )
    return d_planes, sums_of_blocks(d_kernel, blocks, axis=1)


def rounded_down(peaks: Overall, planes: Planes, kernel: Kernel) -> Overall:
    """The maxima of the responses over space, lowered by a rounding error.

    Responses that are computed within different loops differ by that much,
    since a compiler may round the products or not. In half precision the next
    smaller number counts as the maximum, too.

    Args:
        peaks: the maxima.
        planes, kernel: the tensors that the responses were computed from.
    """
    digits = kernel.shape[1] * float(np.finfo(dtype_of_sums(kernel)).eps)
    largest = in_full_precision(ops.max(ops.abs(planes), axis=(2, 3)))
    size = ops.sum(ops.abs(in_full_precision(kernel)), axis=1)
    lost = digits * largest[..., None] * size[:, None]
    return (
        peaks - lost - HALF_STEPS.get(dtype_name(kernel), 0.0) * ops.abs(peaks)
    )


def _hits(
    found: Responses, floor: Overall
) -> Shaped[Tensor, "channels batch height width filters"]:
    """Whether a response is as large as its maximum over space."""
    return found >= ops.cast(floor, found.dtype)[:, :, None, None]


def _shape(
    window: FilterWindow, planes: Planes, kernel: Kernel
) -> tuple[Any, ...]:
    """The shape of the responses: channels, batch, height, width, filters."""
    return *ops.shape(window.views(planes)[0]), kernel.shape[-1]


def _numbers(planes: Planes) -> Shaped[Tensor, " channels"]:
    """A number for each channel, in two bytes if they suffice.

    Places of maxima have one such number for each output position.
    """
    channels = planes.shape[0]
    numbers = ops.arange(channels, dtype="int32")
    return ops.cast(numbers, "int16" if channels < 2**15 else "int32")


def _is_at(
    index: Places, number: Shaped[Tensor, " channels"]
) -> Shaped[Tensor, "channels batch height width filters"]:
    """Whether the maximum at each position is that of a channel."""
    return ops.equal(index, _along_channels(number))


def _along_channels(
    number: Shaped[Tensor, " channels"],
) -> Shaped[Tensor, "channels 1 1 1 1"]:
    """Numbers of channels beside the maxima at all positions."""
    return number[:, None, None, None, None]
