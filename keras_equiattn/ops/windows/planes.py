"""The window form as XLA likes it: sums written out over planes of pixels.

XLA makes one loop of a sum that is written out, and vectorises it along the
last axis: so the columns of the image come last here. What can be long (key
elements, blocks of channels) is a loop that XLA compiles once. Sizes must be
known. `ops.window_form` says what the functions compute.
"""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from keras import ops

from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.windows.form import Form
from keras_equiattn.ops.windows.form import Neighbour

# Terms that are written out in one loop over the pixels.
TERMS = 16
# Rows that are added up in one loop over the columns.
ROWS = 32


def scores(
    form: Form, x: Tensor, k: Tensor, w: Tensor | None, bias: Tensor | None
) -> Tensor:
    """The derivative with respect to `a`."""
    x, k = _planes(form, x), _planes(form, k)
    w, bias = _weights(form, w), _weights(form, bias)
    size = x.shape[-2:]
    blocks = math.ceil(x.shape[3] / TERMS)

    def add_block(totals: list[Tensor], piece: Any) -> list[Tensor]:
        x, k, w, bias = piece
        sums = []
        for n, total in enumerate(totals):
            for c in range(x.shape[3]):
                at = n, slice(None), slice(None), c
                # A slice for each use: XLA would store one of all channels.
                total = total + x[:, :, :, c] * _affine(
                    _window(k[:, :, :, :, c], form.neighbours[n], size),
                    None if w is None else w[at],
                    None if bias is None else bias[at],
                )
            sums.append(total)
        return sums

    def add(totals: list[Tensor], piece: Any) -> list[Tensor]:
        k, w, bias = piece
        split = [_split(t, 3, blocks) for t in (w, bias)]
        pieces = (_split(x, 3, blocks), _split(k, 4, blocks), *split)
        return _loop(add_block, totals, pieces)

    totals = [ops.zeros_like(x[:, :, :, 0]) for _ in form.neighbours]
    return ops.stack(_loop(add, totals, _by_key_element(k, w, bias)))


def weighted_sums(
    form: Form, a: Tensor, k: Tensor, w: Tensor | None, bias: Tensor | None
) -> Tensor:
    """The derivative with respect to `x`."""
    k, w, bias = _planes(form, k), _weights(form, w), _weights(form, bias)
    size = a.shape[-2:]
    a = ops.expand_dims(a, axis=4)

    def add(total: Tensor, piece: Any) -> Tensor:
        k, w, bias = piece
        for n, place in enumerate(form.neighbours):
            total = total + a[n] * _affine(
                _window(k, place, size),
                None if w is None else w[n],
                None if bias is None else bias[n],
            )
        return total

    shape = (*ops.shape(a)[1:4], k.shape[4], *size)
    total = ops.zeros(shape, a.dtype)
    return _pixels(_loop(add, total, _by_key_element(k, w, bias)))


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
        *([correlate(form, d, x, k)] if w is not None else []),
        *([correlate_bias(form, d, x)] if bias is not None else []),
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
        *([correlate(form, a, d, k)] if w is not None else []),
        *([correlate_bias(form, a, d)] if bias is not None else []),
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
    form: Form, a: Tensor, x: Tensor, k: Tensor
) -> Float[Tensor, "neighbours query_elements key_elements channels"]:
    """The derivative with respect to `w`."""
    x, k = _planes(form, x), _planes(form, k)
    blocks, rows, extra = _row_blocks(x.shape[4])
    a, x, k = (_more_rows(t, extra) for t in (a, x, k))
    size = (*ops.shape(k)[1:5], *x.shape[4:])
    a, x = a[:, :, :, None, :, None], x[:, :, None]

    def step(_: Any, piece: Any) -> Any:
        a, frame, row, column = piece
        start = (frame, 0, 0, 0, 0, row, column)
        seen = ops.slice(k, start, (1, *size))[0][:, None]
        return (), _sum_over_pixels((a, x, seen), blocks, rows)

    places = np.array(form.neighbours, "int32").T
    pieces = (a, *map(ops.convert_to_tensor, places))
    return _channels(backend.scan(step, (), pieces, like=x)[1])


def correlate_bias(
    form: Form, a: Tensor, x: Tensor
) -> Float[Tensor, "neighbours query_elements channels"]:
    """The derivative with respect to the bias."""
    x = _planes(form, x)
    blocks, rows, extra = _row_blocks(x.shape[4])
    a, x = _more_rows(a, extra), _more_rows(x, extra)

    def step(_: Any, a: Tensor) -> Any:
        return (), _sum_over_pixels((a[:, :, :, None], x), blocks, rows)

    return _channels(backend.scan(step, (), a, like=x)[1])


def _sum_over_pixels(
    factors: tuple[Tensor, ...], blocks: int, rows: int
) -> Tensor:
    """Products of `(batch, ..., height, width)`, summed over batch and pixels.

    Blocks of rows are added up first: that is one loop, vectorised along the
    columns.
    """
    total: Any = 0.0
    for block in range(blocks):
        at = slice(block * rows, (block + 1) * rows)
        first, *others = (x[..., at, :] for x in factors)
        total = total + functools.reduce(operator.mul, others, first)
    return ops.sum(total, axis=(0, -2, -1))


def _planes(form: Form, x: Tensor) -> Tensor:
    """`(..., height, width, elements, channels)` to `(..., elements, heads,
    channels of a head, height, width)`."""
    *outer, height, width, elements, channels = ops.shape(x)
    split = (elements, form.heads, channels // form.heads)
    x = ops.reshape(x, (*outer, height, width, *split))
    n = len(outer)
    return ops.transpose(x, (*range(n), n + 2, n + 3, n + 4, n, n + 1))


def _pixels(x: Tensor) -> Tensor:
    """Undoes `_planes`."""
    return backend.one_by_one(_as_pixels, x, len(x.shape) - 5)


def _as_pixels(x: Tensor) -> Tensor:
    n = len(x.shape) - 5
    x = ops.transpose(x, (*range(n), n + 3, n + 4, n, n + 1, n + 2))
    *outer, heads, channels = ops.shape(x)
    return ops.reshape(x, (*outer, heads * channels))


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


def _affine(seen: Tensor, w: Tensor | None, bias: Tensor | None) -> Tensor:
    """What a query sees, transformed."""
    if w is not None:
        seen = seen * w
    return seen if bias is None else seen + bias


def _by_key_element(
    k: Tensor, w: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Keys, weights and bias with key elements along a new first axis.

    The bias goes with the first key element.
    """
    if w is not None:
        w = ops.moveaxis(w, 2, 0)
    if bias is not None:
        nothing = ops.zeros_like(bias)
        bias = ops.stack([bias, *[nothing] * (k.shape[2] - 1)])
    return _elements(k, 2), w, bias


def _elements(x: Tensor, axis: int) -> Tensor:
    """An axis as the first, with 1 left in its place."""
    return ops.expand_dims(ops.moveaxis(x, axis, 0), axis + 1)


def _split(x: Tensor | None, axis: int, blocks: int) -> Tensor | None:
    """Blocks of an axis, along a new first axis; zeros fill the last one."""
    if x is None:
        return None
    size = math.ceil(x.shape[axis] / blocks)
    extra = blocks * size - x.shape[axis]
    if extra:
        pads = [(0, 0)] * len(x.shape)
        pads[axis] = (0, extra)
        x = ops.pad(x, pads)
    shape = ops.shape(x)
    x = ops.reshape(x, (*shape[:axis], blocks, size, *shape[axis + 1 :]))
    return ops.moveaxis(x, axis, 0)


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


def _row_blocks(height: int) -> tuple[int, int, int]:
    """Number of blocks, rows in each, and rows to add to fill them."""
    rows = math.ceil(height / ROWS)
    blocks = math.ceil(height / rows)
    return blocks, rows, blocks * rows - height


def _more_rows(x: Tensor, extra: int) -> Tensor:
    pads = [(0, 0)] * (len(x.shape) - 2) + [(0, extra), (0, 0)]
    return ops.pad(x, pads) if extra else x
