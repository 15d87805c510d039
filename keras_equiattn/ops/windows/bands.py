"""The window form for large windows: matrix products of rows of pixels.

All queries of a row meet all keys of a row in one product, and a band of it is
what their windows hold: more arithmetic than needed, in the form that is
computed fastest. The number of operators grows with the rows of the window
alone. For keys as they are, without weights; sizes may be unknown.
`ops.window_form` says what the functions compute.
"""

from typing import NamedTuple

import numpy as np
from keras import ops

from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.windows import products as window_products
from keras_equiattn.ops.windows.form import Form


def scores(
    form: Form, x: Tensor, k: Tensor, w: None, bias: Tensor | None
) -> Tensor:
    """The derivative of the form with respect to `a`."""
    queries, keys = _by_head(form, x), _by_head(form, k)
    numbers: list[int] = []
    planes = []
    for row in _rows(form):
        seen = _key_rows(keys[row.frame], row, queries)
        band = diagonals(queries @ ops.swapaxes(seen, -1, -2))
        band = ops.moveaxis(band[..., row.columns], -1, 0)
        numbers += range(len(form.neighbours))[row.numbers]
        # A copy: a view would keep the whole product.
        planes.append(backend.contiguous(band))
    a = ops.concatenate(planes)
    if numbers != sorted(numbers):
        a = ops.take(a, np.argsort(numbers), axis=0)
    return window_products.with_bias_scores(form, a[:, :, None], x, bias)


def weighted_sums(
    form: Form, a: Tensor, k: Tensor, w: None, bias: Tensor | None
) -> Tensor:
    """The derivative of the form with respect to `x`."""
    keys = _by_head(form, k)
    total = 0.0
    for row in _rows(form):
        band = _band(form, a, row)
        total = total + band @ _key_rows(keys[row.frame], row, band)
    return window_products.with_bias_sums(form, _pixels(total), a, bias)


def spread(form: Form, a: Tensor, x: Tensor) -> Tensor:
    """The derivative of the form with respect to `k`."""
    queries = _by_head(form, x)
    down, along = form.reach
    batch, heads, height, width, channels = ops.shape(queries)
    frame_shape = (batch, heads, height + down, width + along, channels)
    totals = [ops.zeros(frame_shape, x.dtype) for _ in range(form.frames)]
    for row in _rows(form):
        band = ops.swapaxes(_band(form, a, row), -1, -2)
        around = (row.place, down - row.place)
        moved = ops.pad(
            band @ queries, ((0, 0), (0, 0), around, (0, 0), (0, 0))
        )
        totals[row.frame] = totals[row.frame] + moved
    return ops.stack([_pixels(total) for total in totals])


def score_gradients(
    form: Form, d: Tensor, x: Tensor, k: Tensor, w: None, bias: Tensor | None
) -> tuple[Tensor, ...]:
    """Gradients of `sum(scores * d)`: of x, k, and bias if given."""
    return (
        weighted_sums(form, d, k, w, bias),
        spread(form, d, x),
        *window_products.bias_gradient(form, d, x, bias),
    )


def sum_gradients(
    form: Form, d: Tensor, a: Tensor, k: Tensor, w: None, bias: Tensor | None
) -> tuple[Tensor, ...]:
    """Gradients of `sum(weighted_sums * d)`: of a, k, and bias if given."""
    return (
        scores(form, d, k, w, bias),
        spread(form, a, d),
        *window_products.bias_gradient(form, a, d, bias),
    )


class _Row(NamedTuple):
    """The neighbours in one row of a frame, as far apart as the dilation says.

    Attributes:
        frame: the frame.
        place: which row of it.
        numbers: of the neighbours.
        columns: where they lie in the row.
    """

    frame: int
    place: int
    numbers: slice
    columns: slice


def _rows(form: Form) -> list[_Row]:
    """All rows that hold neighbours."""
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for n, place in enumerate(form.neighbours):
        found.setdefault((place.frame, place.row), []).append((n, place.column))
    rows = []
    for (frame, row), places in found.items():
        numbers, columns = zip(*places, strict=True)
        rows.append(_Row(frame, row, _as_slice(numbers), _as_slice(columns)))
    return rows


def _as_slice(numbers: tuple[int, ...]) -> slice:
    """Numbers that grow by equal steps, as a slice."""
    first, last = numbers[0], numbers[-1]
    step = numbers[1] - first if len(numbers) > 1 else 1
    return slice(first, last + 1, step)


def _by_head(form: Form, x: Tensor) -> Tensor:
    """`(..., heads, height, width, channels of a head)`."""
    *outer, height, width, _, channels = ops.shape(x)
    x = ops.reshape(
        x, (*outer, height, width, form.heads, channels // form.heads)
    )
    return ops.moveaxis(x, -2, -4)


def _pixels(x: Tensor) -> Tensor:
    """Undoes `_by_head`."""
    x = ops.moveaxis(x, -4, -2)
    *outer, heads, channels = ops.shape(x)
    return ops.reshape(x, (*outer, 1, heads * channels))


def _key_rows(keys: Tensor, row: _Row, like: Tensor) -> Tensor:
    """The row of keys that each row of queries meets."""
    return keys[:, :, row.place : row.place + ops.shape(like)[2]]


def diagonals(x: Tensor) -> Tensor:
    """Entries `(i, i + c)` of matrices, for every `c` that they all have.

    Rows that are one longer start one further along each time.
    """
    *outer, rows, columns = ops.shape(x)
    x = ops.reshape(x, (*outer, rows * columns))
    x = ops.pad(x, ((0, 0),) * len(outer) + ((0, rows),))
    x = ops.reshape(x, (*outer, rows, columns + 1))
    return x[..., : columns - rows + 1]


def _band(form: Form, a: Tensor, row: _Row) -> Tensor:
    """Matrices with weights at `(i, i + c)`: undoes `diagonals`."""
    band = ops.moveaxis(a[row.numbers, :, 0], 0, -1)
    *outer, rows, count = ops.shape(band)
    before = ((0, 0),) * (len(outer) + 1)
    first, end, step = row.columns.start, row.columns.stop, row.columns.step
    if step > 1:  # zeros between them
        band = ops.pad(band[..., None], (*before, (0, 0), (0, step - 1)))
        band = ops.reshape(band, (*outer, rows, count * step))
        band = band[..., : end - first]
    reach = form.reach[1]
    band = ops.pad(band, (*before, (first, reach + 1 - end + rows)))
    columns = rows + reach
    band = ops.reshape(band, (*outer, rows * (columns + 1)))
    return ops.reshape(band[..., : rows * columns], (*outer, rows, columns))
