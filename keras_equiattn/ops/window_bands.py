"""The window form for large windows: matrix products of rows of pixels.

All queries of a row meet all keys of a row in one product, and a band of it is
what their windows hold: more arithmetic than needed, in the form that is
computed fastest. For keys as they are, without weights; sizes may be unknown.
`ops.window_form` says what the functions compute.
"""

from collections.abc import Iterator

import numpy as np
from keras import ops

from keras_equiattn.ops import window_products
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.window_form import Form


def scores(
    form: Form, x: Tensor, k: Tensor, w: None, bias: Tensor | None
) -> Tensor:
    """The derivative of the form with respect to `a`."""
    queries, keys = _by_head(form, x), _by_head(form, k)
    numbers, planes = [], []
    for frame, row, places in _rows(form):
        seen = _key_rows(keys[frame], row, queries)
        band = diagonals(queries @ ops.swapaxes(seen, -1, -2))
        numbers += [n for n, _ in places]
        # A copy: a view would keep the whole product.
        planes.append(ops.stack([band[..., column] for _, column in places]))
    a = ops.take(ops.concatenate(planes), np.argsort(numbers), axis=0)
    return window_products.with_bias_scores(form, a[:, :, None], x, bias)


def weighted_sums(
    form: Form, a: Tensor, k: Tensor, w: None, bias: Tensor | None
) -> Tensor:
    """The derivative of the form with respect to `x`."""
    keys = _by_head(form, k)
    total = 0.0
    for frame, row, places in _rows(form):
        band = _band(form, a, places)
        total = total + band @ _key_rows(keys[frame], row, band)
    return window_products.with_bias_sums(form, _pixels(total), a, bias)


def spread(form: Form, a: Tensor, x: Tensor) -> Tensor:
    """The derivative of the form with respect to `k`."""
    queries = _by_head(form, x)
    down, along = form.reach
    batch, heads, height, width, channels = ops.shape(queries)
    frame_shape = (batch, heads, height + down, width + along, channels)
    totals = [ops.zeros(frame_shape, x.dtype) for _ in range(form.frames)]
    for frame, row, places in _rows(form):
        band = ops.swapaxes(_band(form, a, places), -1, -2)
        around = (row, down - row)
        moved = ops.pad(
            band @ queries, ((0, 0), (0, 0), around, (0, 0), (0, 0))
        )
        totals[frame] = totals[frame] + moved
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


def _rows(form: Form) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """Frame, row, and the neighbours there: number and column."""
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for n, place in enumerate(form.neighbours):
        found.setdefault((place.frame, place.row), []).append((n, place.column))
    for (frame, row), places in found.items():
        yield frame, row, places


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


def _key_rows(keys: Tensor, row: int, like: Tensor) -> Tensor:
    """The row of keys that each row of queries meets."""
    return keys[:, :, row : row + ops.shape(like)[2]]


def diagonals(x: Tensor) -> Tensor:
    """Entries `(i, i + c)` of matrices, for every `c` that they all have.

    Rows that are one longer start one further along each time.
    """
    *outer, rows, columns = ops.shape(x)
    x = ops.reshape(x, (*outer, rows * columns))
    x = ops.pad(x, ((0, 0),) * len(outer) + ((0, rows),))
    x = ops.reshape(x, (*outer, rows, columns + 1))
    return x[..., : columns - rows + 1]


def _band(form: Form, a: Tensor, places: list[tuple[int, int]]) -> Tensor:
    """Matrices with weights at `(i, i + c)`: undoes `diagonals`."""
    numbers = {column: n for n, column in places}
    nothing = ops.zeros_like(a[0])
    band = ops.stack(
        [
            a[numbers[column]] if column in numbers else nothing
            for column in range(form.reach[1] + 1)
        ],
        axis=-1,
    )
    *outer, rows, count = ops.shape(band[:, 0])
    band = ops.pad(band[:, 0], ((0, 0),) * (len(outer) + 1) + ((0, rows),))
    columns = rows + count - 1
    band = ops.reshape(band, (*outer, rows * (columns + 1)))
    return ops.reshape(band[..., : rows * columns], (*outer, rows, columns))
