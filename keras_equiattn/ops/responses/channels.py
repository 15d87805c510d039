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
from keras_equiattn.ops.numerics import dtype_of_sums
from keras_equiattn.ops.numerics import in_full_precision
from keras_equiattn.ops.numerics import mean
from keras_equiattn.ops.numerics import sums_of_blocks
from keras_equiattn.ops.responses import dispatch
from keras_equiattn.ops.responses.form import Kernel
from keras_equiattn.ops.responses.form import Overall
from keras_equiattn.ops.responses.form import Pixels
from keras_equiattn.ops.responses.form import Places
from keras_equiattn.ops.responses.form import Planes
from keras_equiattn.ops.responses.form import Responses

# The distance of adjacent numbers, divided by them.
HALF_STEPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


class Reduced(NamedTuple):
    """What is left of the weighted responses over the input channels.

    Attributes:
        total: their sum, in float32 at least.
        maximum: the largest, as precise as the responses.
        channel: the number of the channel that it belongs to, and of equal
            ones the first.
    """

    total: Pixels
    maximum: Pixels | None = None
    channel: Places | None = None


def responses(
    window: FilterWindow,
    planes: Planes,
    kernel: Kernel,
    alpha: Overall | None = None,
) -> Responses:
    """The responses, each times its channel attention where there is one."""
    if plan_for(window, planes, kernel).written_out:
        # Not a product: a compiler makes it part of what reduces it.
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
    """What each entry of a filter sees, at all output positions."""
    seen = ops.stack(window.views(planes), axis=2)
    *front, height, width = ops.shape(seen)
    return ops.reshape(seen, (*front, height * width))


def mean_responses(
    window: FilterWindow, planes: Planes, kernel: Kernel
) -> Overall:
    """The means of the responses over space, which it does not compute."""
    views = (in_full_precision(x) for x in window.views(planes))
    seen = ops.stack([mean(x, (2, 3)) for x in views], axis=-1)
    return ops.einsum("cbt,ctn->cbn", seen, in_full_precision(kernel))


def sums(
    window: FilterWindow,
    planes: Planes,
    kernel: Kernel,
    alpha: Overall | None,
) -> Pixels:
    """The sum of `responses` over the channels, which it does not compute.

    The views and the filters are in float32: what remains of a convolution
    after the attended sum may be a thousandth of that sum.
    """

    def step(total: Any, group: Any) -> Any:
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
    groups = planes, kernel, alpha
    # As many as take the memory of the responses of some.
    size = plan_for(window, planes, kernel).together
    size = max(size * filters // kernel.shape[1], 1)
    start = ops.zeros((batch, height * width, filters), alpha.dtype)
    total, _ = backend.scan_groups(step, start, groups, size)
    return ops.reshape(total, (batch, height, width, filters))


@backend.part(fuses_sums=True)
def peaks(planes: Planes, kernel: Kernel, *, window: FilterWindow) -> Overall:
    """The maximum of each response over space."""

    def step(carry: Any, group: Any) -> Any:
        found = responses(window, *group)
        return carry, ops.max(found, axis=(2, 3))

    groups = planes, kernel
    plan = plan_for(window, planes, kernel)
    # XLA would keep all of them for what is reduced next.
    size = plan.together if backend.find_target(planes).xla else plan.reduced
    found = backend.scan_groups(step, (), groups, size, planes)[1]
    return in_full_precision(found)


@backend.part(fuses_sums=True)
def reduce(
    planes: Planes,
    kernel: Kernel,
    alpha: Overall | None,
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
    if not maxima:
        return (sums(window, planes, kernel, alpha),)
    shape = _shape(window, planes, kernel)[1:]
    # The sum of responses that were rounded to half precision is another one.
    total: tuple[Tensor, ...] = ()
    if dtype_of_sums(planes) == _dtype(planes):
        total = (ops.zeros(shape, planes.dtype),)
    best = ops.full(shape, float("-inf"), planes.dtype)
    numbers = _numbers(planes)
    index = (ops.zeros(shape, numbers.dtype),) if where else ()

    def step(carry: Any, group: Any) -> Any:
        total, best, index = carry
        first, *group = group
        found = responses(window, *group)
        if dispatch.folds(found):
            for n in range(found.shape[0]):
                total = tuple(x + found[n] for x in total)
                index = tuple(
                    ops.where(found[n] > best, first[n], x) for x in index
                )
                best = backend.maximum(best, found[n])
            return (total, best, index), ()
        added, maximum, *place = backend.sum_and_maximum(found, 0, where)
        total = tuple(x + added for x in total)
        if where:
            place = first[0] + ops.cast(place[0], numbers.dtype)
            index = (ops.where(maximum > best, place, index[0]),)
        return (total, backend.maximum(best, maximum), index), ()

    groups = [numbers, planes, kernel]
    if alpha is not None:
        groups.append(alpha)
    size = plan_for(window, planes, kernel).reduced
    carry = total, best, index
    carry, _ = backend.scan_groups(step, carry, tuple(groups), size)
    total, best, index = carry
    if not total:
        total = (sums(window, planes, kernel, alpha),)
    return (*total, best, *index)


@backend.part(fuses_sums=True)
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
    """Gradient of the logarithm of channel attention, and how many maxima.

    The gradient is the sum over space of each weighted response times its
    gradient. That through the sum of the responses takes none of them, and of
    the maxima over the channels each belongs to one channel.

    Args:
        planes, kernel, alpha: see `responses`.
        floor: from which on a response counts as its maximum over space.
        d_total: gradient of the sum over the channels.
        of_maxima: the maximum over the channels times its gradient.
        index: the channel of that maximum.
        window: of the convolution.

    Returns:
        The gradient, and how many positions of a response have its maximum.
    """
    batch, height, width, filters = ops.shape(d_total)
    flat = ops.reshape(d_total, (batch, height * width, filters))

    def step(carry: Any, group: Any) -> Any:
        number, planes, kernel, alpha, floor = group
        seen = stacked_views(window, planes)
        of_views = ops.einsum("cbtp,bpn->cbtn", seen, flat)
        of_views = in_full_precision(of_views)
        weights = in_full_precision(kernel)[:, None]
        found = alpha * ops.sum(of_views * weights, axis=2)
        terms = [_hits(responses(window, planes, kernel), floor)]
        if of_maxima is not None:
            terms.append(ops.where(_is_at(index, number), of_maxima, 0.0))
        shape = (*ops.shape(found)[:2], -1, filters)
        terms = [ops.reshape(x, shape) for x in terms]
        count, *own = backend.sums_together(terms, 2)
        return carry, (found + own[0] if own else found, count)

    groups = _numbers(planes), planes, kernel, alpha, floor
    size = plan_for(window, planes, kernel).reduced
    return backend.scan_groups(step, (), groups, size, (alpha, alpha))[1]


class OfChannel(NamedTuple):
    """What channel attention adds to the gradients of the responses.

    Attributes:
        alpha: the attention, a factor of the responses.
        floor: from which on a response counts as its maximum over space.
        d_every: gradient of all responses through their mean over space.
        d_largest: gradient of each response that is the maximum; ties share.
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
) -> tuple[Planes, Float[Tensor, "channels blocks taps filters"]]:
    """Gradients of the planes and, for blocks of images, of the filters.

    Args:
        window, planes, kernel: see `responses`.
        d_total: gradient of the sum of the weighted responses.
        index: channel of their maximum, or None.
        d_both: gradient of their sum and of their maximum, or None.
        of_channel: for channel attention, or None.
    """
    plan = plan_for(window, planes, kernel)

    def step(carry: Any, group: Any) -> Any:
        return carry, _gradients(
            *group[:3],
            d_total,
            index,
            d_both,
            group[3:] or None,
            window=window,
            blocks=plan.blocks,
        )

    groups = _numbers(planes), planes, kernel, *(of_channel or ())
    like = (np.zeros((), dtype_of_sums(planes)),) * 2
    return backend.scan_groups(step, (), groups, plan.together, like)[1]


@backend.part(fuses_sums=True)
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
    """The same for a few channels, whose numbers are given."""
    d = d_total[None]
    if index is not None:
        d = ops.where(_is_at(index, number), d_both, d)
    if of_channel is not None:
        alpha, floor, d_every, d_largest = of_channel
        hits = _hits(responses(window, planes, kernel), floor)
        alpha, every, largest = (
            ops.cast(x, d.dtype)[:, :, None, None]
            for x in (alpha, d_every, d_every + d_largest)
        )
        d = backend.add_product(ops.where(hits, largest, every), d, alpha)
    count, batch, height, width, filters = ops.shape(d)
    d = ops.reshape(d, (count, batch, height * width, filters))
    d_kernel = in_full_precision(stacked_views(window, planes) @ d)
    turned = ops.swapaxes(kernel, 1, 2)[:, None]
    # Not of all images at once: XLA would make `d` anew for that.
    turned = ops.broadcast_to(turned, (count, batch, *turned.shape[2:]))
    d_views = ops.reshape(d @ turned, (count, batch, height, width, -1))
    d_planes = backend.sum_of_views(
        window.views, in_full_precision(d_views), in_full_precision(planes)
    )
    return d_planes, sums_of_blocks(d_kernel, blocks, axis=1)


def rounded_down(peaks: Overall, planes: Planes, kernel: Kernel) -> Overall:
    """Maxima of responses, lower by what rounding may be.

    Responses that are computed within different loops differ by that much,
    since a compiler may round the products or not. In half precision the next
    smaller number counts as the maximum, too.
    """
    digits = kernel.shape[1] * float(np.finfo(dtype_of_sums(kernel)).eps)
    largest = in_full_precision(ops.max(ops.abs(planes), axis=(2, 3)))
    size = ops.sum(ops.abs(in_full_precision(kernel)), axis=1)
    lost = digits * largest[..., None] * size[:, None]
    return peaks - lost - HALF_STEPS.get(_dtype(kernel), 0.0) * ops.abs(peaks)


def _hits(
    found: Responses, floor: Overall
) -> Shaped[Tensor, "channels batch height width filters"]:
    """Whether a response is as large as its maximum over space."""
    return found >= ops.cast(floor, found.dtype)[:, :, None, None]


def plan_for(
    window: FilterWindow, planes: Planes, kernel: Kernel
) -> dispatch.Plan:
    """How the responses are computed."""
    return dispatch.plan(window.views(planes[0])[0], *kernel.shape)


def _shape(
    window: FilterWindow, planes: Planes, kernel: Kernel
) -> tuple[Any, ...]:
    """The shape of the responses."""
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
    """Whether the maximum at each position is in a channel."""
    return ops.equal(index, number[:, None, None, None, None])


def _dtype(x: Tensor) -> str:
    return str(keras.backend.standardize_dtype(x.dtype))
