"""The window form as XLA likes it: sums written out over planes of pixels.

XLA makes one loop of a sum that is written out, and vectorises it along the
last axis: so the columns of the image come last here. What can be long (key
elements, blocks of channels) is a loop that XLA compiles once. Sizes must be
known. `ops.window_form` says what the functions compute.
"""

from collections.abc import Callable
from typing import Any

from keras import ops

from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.windows.form import Form
from keras_equiattn.ops.windows.form import Neighbour

# Neighbours that one reduction over the channels is made for: with more, a core
# has too few registers, with fewer, queries and keys are read again and again.
TOGETHER = 5
# Channels up to which a reduction is vectorised along the columns: XLA writes
# out so many terms.
SHORT = 8


def scores(
    form: Form, x: Tensor, k: Tensor, w: Tensor | None, bias: Tensor | None
) -> Tensor:
    """The derivative with respect to `a`."""
    x, k = _planes(form, x), _planes(form, k)
    w, bias = _weights(form, w), _weights(form, bias)
    found = []
    for some in _some(form):
        seen = _seen(form, some, k, w, bias, x.shape[-2:])
        found += _channel_sums([x * y for y in seen])
    return ops.stack(found)


def weighted_sums(
    form: Form, a: Tensor, k: Tensor, w: Tensor | None, bias: Tensor | None
) -> Tensor:
    """The derivative with respect to `x`."""
    k, w, bias = _planes(form, k), _weights(form, w), _weights(form, bias)
    a = ops.expand_dims(a, axis=4)
    total: Any = 0.0
    for some in _some(form):
        seen = _seen(form, some, k, w, bias, a.shape[-2:])
        for n, y in zip(some, seen, strict=True):
            total = total + a[n] * y
    return _pixels(total)


def score_gradients(
    form: Form,
    d: Tensor,
    x: Tensor,
    k: Tensor,
    w: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, ...]:
    """Gradients of `sum(scores * d)`: of x, k, and w and bias if given."""
    return (
        weighted_sums(form, d, k, w, bias),
        spread(form, d, x, w),
        *correlate(form, d, x, k, w is not None, bias is not None),
    )


def sum_gradients(
    form: Form,
    d: Tensor,
    a: Tensor,
    k: Tensor,
    w: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, ...]:
    """Gradients of `sum(weighted_sums * d)`: of a, k, w and bias."""
    return (
        scores(form, d, k, w, bias),
        spread(form, a, d, w),
        *correlate(form, a, d, k, w is not None, bias is not None),
    )


def spread(form: Form, a: Tensor, x: Tensor, w: Tensor | None) -> Tensor:
    """The derivative with respect to `k`."""
    x, w = _planes(form, x), _weights(form, w)
    down, along = form.reach
    height, width = x.shape[4] + down, x.shape[5] + along
    around = ((0, 0),) * 4 + ((down, down), (along, along))
    a = ops.expand_dims(ops.pad(a, around), axis=4)
    x = ops.pad(x, around)

    def add(totals: list[Tensor], piece: Any) -> list[Tensor]:
        a, x, w = piece
        totals = list(totals)
        for n, place in enumerate(form.neighbours):
            i, j = down - place.row, along - place.column
            rows, columns = slice(i, i + height), slice(j, j + width)
            term = a[n, ..., rows, columns] * x[..., rows, columns]
            total = totals[place.frame]
            totals[place.frame] = total + (term if w is None else term * w[n])
        return totals

    order = 1 if w is None else w.shape[2]
    shape = (ops.shape(x)[0], order, *x.shape[2:4], height, width)
    totals = [ops.zeros(shape, x.dtype) for _ in range(form.frames)]
    if w is not None:
        w = ops.moveaxis(w, 1, 0)
    pieces = _elements(a, 2), _elements(x, 1), w
    return _pixels(ops.stack(_loop(add, totals, pieces)))


def correlate(
    form: Form,
    a: Float[Tensor, "neighbours batch elements heads height width"],
    x: Float[Tensor, "batch height width elements channels"],
    k: Float[Tensor, "frames batch rows columns key_elements channels"],
    weighted: bool,
    biased: bool,
) -> list[Tensor]:
    """The derivatives with respect to `w` and the bias, of those given.

    Summed over the rows first, in loops that are vectorised along the
    columns, then over images and columns: short sums lose few digits.
    """
    if not weighted and not biased:
        return []
    x, k = _planes(form, x), _planes(form, k)
    # (batch, elements, heads, 1, height, width) for each neighbour.
    a = ops.expand_dims(a, axis=4)
    elements = k.shape[2] if weighted else 0
    of_w, of_bias = [], []
    for some in _some(form):
        terms = []
        for n in some:
            product = a[n] * x
            seen = _window(k, form.neighbours[n], x.shape[-2:])
            terms += [product * seen[:, None, r] for r in range(elements)]
            terms += [product] if biased else []
        sums = [
            ops.sum(y, axis=(0, 4))
            for y in backend.sums_together(terms, axis=4)
        ]
        while sums:
            of_w += [sums.pop(0) for _ in range(elements)]
            of_bias += [sums.pop(0)] if biased else []
    found = []
    if weighted:
        # (neighbours, key elements, elements, heads, channels)
        of_all = ops.stack(of_w)
        shape = (len(form.neighbours), elements, *of_all.shape[1:])
        found.append(ops.swapaxes(ops.reshape(of_all, shape), 1, 2))
    if biased:
        found.append(ops.stack(of_bias))
    return [_channels(w) for w in found]


def _some(form: Form) -> list[range]:
    """The neighbours, as many at a time as are reduced together."""
    count = len(form.neighbours)
    return [
        range(start, min(start + TOGETHER, count))
        for start in range(0, count, TOGETHER)
    ]


def _seen(
    form: Form,
    some: range,
    k: Float[Tensor, "frames batch key_elements heads channels rows columns"],
    w: Float[Tensor, "neighbours elements key_elements heads channels 1 1"]
    | None,
    bias: Float[Tensor, "neighbours elements heads channels 1 1"] | None,
    size: tuple[int, int],
) -> list[Float[Tensor, "batch elements heads channels height width"]]:
    """Some of the neighbours, as the query elements see them."""
    found = []
    for n in some:
        seen = _window(k, form.neighbours[n], size)[:, None]
        # A slice for each use: XLA would store one of all key elements.
        parts = [
            seen[:, :, r] if w is None else seen[:, :, r] * w[n, :, r]
            for r in range(k.shape[2])
        ]
        if bias is not None:
            parts.append(bias[n])
        found.append(sum(parts[1:], parts[0]))
    return found


def _channel_sums(
    terms: list[Float[Tensor, "batch elements heads channels height width"]],
) -> list[Float[Tensor, "batch elements heads height width"]]:
    """Sums over the channels of a head, in blocks of `SHORT` of them."""
    blocks = [
        backend.sums_together(
            [x[:, :, :, start : start + SHORT] for x in terms], axis=3
        )
        for start in range(0, terms[0].shape[3], SHORT)
    ]
    return [sum(parts[1:], parts[0]) for parts in zip(*blocks, strict=True)]


def _planes(
    form: Form, x: Float[Tensor, "*outer height width elements all"]
) -> Float[Tensor, "*outer elements heads channels height width"]:
    """Pixels last, so that XLA vectorises along the columns."""
    n = len(x.shape) - 4
    *outer, height, width, elements, channels = ops.shape(x)
    x = ops.reshape(x, (*outer, height, width, elements * channels))
    x = backend.by_parts(_pixels_last, x, axis=n + 2, joined=n)
    split = (elements, form.heads, channels // form.heads)
    return ops.reshape(x, (*outer, *split, height, width))


def _pixels(
    x: Float[Tensor, "*outer elements heads channels height width"],
) -> Float[Tensor, "*outer height width elements all"]:
    """Undoes `_planes`."""
    n = len(x.shape) - 5
    *outer, elements, heads, channels, height, width = ops.shape(x)
    x = ops.reshape(x, (*outer, elements * heads * channels, height, width))
    x = backend.by_parts(_pixels_first, x, axis=n + 1, joined=n)
    return ops.reshape(x, (*outer, height, width, elements, heads * channels))


def _pixels_last(
    x: Float[Tensor, "*outer height width channels"],
) -> Float[Tensor, "*outer channels height width"]:
    return ops.moveaxis(x, -1, -3)


def _pixels_first(
    x: Float[Tensor, "*outer channels height width"],
) -> Float[Tensor, "*outer height width channels"]:
    return ops.moveaxis(x, -3, -1)


def _weights(form: Form, w: Tensor | None) -> Tensor | None:
    """Channels split into heads, and axes for height and width."""
    if w is None:
        return None
    *outer, channels = w.shape
    return ops.reshape(w, (*outer, form.heads, channels // form.heads, 1, 1))


def _channels(w: Tensor) -> Tensor:
    """Joins the heads in the last two axes."""
    *outer, heads, channels = w.shape
    return ops.reshape(w, (*outer, heads * channels))


def _window(k: Tensor, place: Neighbour, size: Any) -> Tensor:
    """What is seen at this place from every pixel."""
    height, width = size
    rows = slice(place.row, place.row + height)
    return k[place.frame, ..., rows, place.column : place.column + width]


def _elements(x: Tensor, axis: int) -> Tensor:
    """An axis as the first, with 1 left in its place."""
    return ops.expand_dims(ops.moveaxis(x, axis, 0), axis + 1)


def _loop(
    step: Callable[[Any, Any], Any], total: Any, pieces: tuple[Any, ...]
) -> Any:
    """What `step` makes of the total, once for each slice of the pieces.

    A piece that is None stays None.
    """
    given = [piece for piece in pieces if piece is not None]

    def add(total: Any, slices: Any) -> Any:
        left = iter(slices)
        return step(
            total, tuple(None if p is None else next(left) for p in pieces)
        )

    if given[0].shape[0] == 1:
        return add(total, [piece[0] for piece in given])
    return backend.scan(lambda t, s: (add(t, s), ()), total, given)[0]
