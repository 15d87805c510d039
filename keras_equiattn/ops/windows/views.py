"""The window form over views: one line of algebra for each function.

The keys seen by all pixels are a tensor with two more axes, the rows and the
columns of the window. As a view it takes no memory: PyTorch has such views,
and Inductor makes one kernel of what is computed with them. Elsewhere the view
is a copy, and these functions are the reference that the others are tested
against. Sizes must be known.

Planes `(batch, elements, heads, channels of a head, height, width)` are used
throughout. `ops.windows.form` says what the functions compute.
"""

from typing import NamedTuple

import numpy as np
from keras import ops

from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.windows.form import Form


def scores(
    form: Form,
    x: Float[Tensor, "batch height width elements channels"],
    k: Float[Tensor, "frames batch rows columns key_elements channels"],
    w: Float[Tensor, "neighbours elements key_elements channels"] | None,
    bias: Float[Tensor, "neighbours elements channels"] | None,
) -> Float[Tensor, "neighbours batch elements heads height width"]:
    """The derivative of the form with respect to `a`."""
    queries = _planes(form, x)[:, :, None, :, :, None, None]
    found = []
    for grid in grids(form):
        seen = _transformed(form, grid, _seen(form, grid, k, x.shape[1:3]), w)
        a = ops.sum(queries * seen, axis=(2, 4))
        if bias is not None:
            # Without the axis of key elements.
            a = a + ops.sum(queries[:, :, 0] * _bias(form, grid, bias), axis=3)
        found.append(_by_neighbour(a))
    return _in_order(form, found)


def weighted_sums(
    form: Form,
    a: Float[Tensor, "neighbours batch elements heads height width"],
    k: Float[Tensor, "frames batch rows columns key_elements channels"],
    w: Float[Tensor, "neighbours elements key_elements channels"] | None,
    bias: Float[Tensor, "neighbours elements channels"] | None,
) -> Float[Tensor, "batch height width elements channels"]:
    """The derivative of the form with respect to `x`."""
    y = 0.0
    for grid in grids(form):
        seen = _transformed(form, grid, _seen(form, grid, k, a.shape[4:]), w)
        # (batch, elements, heads, rows, columns, height, width)
        weights = _by_row_and_column(grid, a)
        y = y + ops.sum(weights[:, :, None, :, None] * seen, axis=(2, 5, 6))
        if bias is not None:
            added = weights[:, :, :, None] * _bias(form, grid, bias)
            y = y + ops.sum(added, axis=(4, 5))
    return _pixels(y)


def spread(
    form: Form,
    a: Float[Tensor, "neighbours batch elements heads height width"],
    x: Float[Tensor, "batch height width elements channels"],
    w: Float[Tensor, "neighbours elements key_elements channels"] | None,
) -> Float[Tensor, "frames batch rows columns key_elements channels"]:
    """The derivative of the form with respect to `k`."""
    down, along = form.reach
    around = ((0, 0),) * 4 + ((down, down), (along, along))
    a, queries = ops.pad(a, around), ops.pad(_planes(form, x), around)
    height, width = (
        n - r for n, r in zip(a.shape[4:], form.reach, strict=True)
    )
    frames = [0.0] * form.frames
    for grid in grids(form):
        total = 0.0
        for n, place in zip(grid.numbers, grid.places, strict=True):
            i, j = down - place[0], along - place[1]
            at = (..., slice(i, i + height), slice(j, j + width))
            term = (a[n][:, :, :, None] * queries)[at][:, :, None]
            if w is not None:
                term = term * _heads(form, w[n])[:, :, :, :, None, None]
            total = total + ops.sum(term, axis=1)
        frames[grid.frame] = _pixels(total)
    nothing = ops.zeros_like(frames[grids(form)[0].frame])
    return ops.stack([nothing if isinstance(f, float) else f for f in frames])


def score_gradients(
    form: Form,
    d: Float[Tensor, "neighbours batch elements heads height width"],
    x: Float[Tensor, "batch height width elements channels"],
    k: Float[Tensor, "frames batch rows columns key_elements channels"],
    w: Float[Tensor, "neighbours elements key_elements channels"] | None,
    bias: Float[Tensor, "neighbours elements channels"] | None,
) -> tuple[Tensor, ...]:
    """Gradients of `sum(scores * d)`: of x, k, and w and bias if given."""
    return (
        weighted_sums(form, d, k, w, bias),
        spread(form, d, x, w),
        *_weight_gradients(form, d, x, k, w, bias),
    )


def sum_gradients(
    form: Form,
    d: Float[Tensor, "batch height width elements channels"],
    a: Float[Tensor, "neighbours batch elements heads height width"],
    k: Float[Tensor, "frames batch rows columns key_elements channels"],
    w: Float[Tensor, "neighbours elements key_elements channels"] | None,
    bias: Float[Tensor, "neighbours elements channels"] | None,
) -> tuple[Tensor, ...]:
    """Gradients of `sum(weighted_sums * d)`: of a, k, and w and bias."""
    return (
        scores(form, d, k, w, bias),
        spread(form, a, d, w),
        *_weight_gradients(form, a, d, k, w, bias),
    )


def _weight_gradients(
    form: Form,
    a: Float[Tensor, "neighbours batch elements heads height width"],
    x: Float[Tensor, "batch height width elements channels"],
    k: Float[Tensor, "frames batch rows columns key_elements channels"],
    w: Float[Tensor, "neighbours elements key_elements channels"] | None,
    bias: Float[Tensor, "neighbours elements channels"] | None,
) -> list[Tensor]:
    """The derivatives with respect to `w` and `bias`, of those given."""
    queries = _planes(form, x)[:, :, :, :, None, None]
    of_w, of_bias = [], []
    for grid in grids(form):
        weights = _by_row_and_column(grid, a)[:, :, :, None]
        both = weights * queries
        if bias is not None:
            # (elements, heads, channels, rows, columns)
            found = ops.sum(both, axis=(0, 6, 7))
            of_bias.append(_by_neighbour_first(found))
        if w is not None:
            seen = _seen(form, grid, k, x.shape[1:3])
            found = ops.sum(both[:, :, None] * seen, axis=(0, 7, 8))
            of_w.append(_by_neighbour_first(found))
    return [_in_order(form, found) for found in (of_w, of_bias) if found]


class Grid(NamedTuple):
    """The neighbours in one frame, which lie on a grid.

    Attributes:
        frame: the frame.
        numbers: of the neighbours, row by row.
        places: row and column of each, in the frame.
        start: row and column of the first.
        steps: from one row to the next, and from one column to the next.
        size: rows and columns.
    """

    frame: int
    numbers: tuple[int, ...]
    places: tuple[tuple[int, int], ...]
    start: tuple[int, int]
    steps: tuple[int, int]
    size: tuple[int, int]


def grids(form: Form) -> list[Grid]:
    """The neighbours, frame by frame; frames without any are left out."""
    found = []
    for frame in range(form.frames):
        numbered = [
            (n, (place.row, place.column))
            for n, place in enumerate(form.neighbours)
            if place.frame == frame
        ]
        if not numbered:
            continue
        numbers, places = zip(*numbered, strict=True)
        axes = [sorted(set(axis)) for axis in zip(*places, strict=True)]
        steps = [axis[1] - axis[0] if len(axis) > 1 else 1 for axis in axes]
        found.append(
            Grid(
                frame,
                numbers,
                places,
                (axes[0][0], axes[1][0]),
                (steps[0], steps[1]),
                (len(axes[0]), len(axes[1])),
            )
        )
    return found


def _seen(
    form: Form,
    grid: Grid,
    k: Float[Tensor, "frames batch frame_rows frame_columns key_elements all"],
    size: tuple[int, int],
) -> Float[
    Tensor,
    "batch 1 key_elements heads channels rows columns height width",
]:
    """What the pixels see, with an axis for their elements."""
    seen = _planes(form, k[grid.frame])
    for axis in (0, 1):
        seen = backend.sliding(
            seen,
            axis=len(seen.shape) - 2 + axis,
            start=grid.start[axis],
            count=grid.size[axis],
            step=grid.steps[axis],
            size=size[axis],
        )
    # (..., rows, height, columns, width) so far.
    return ops.swapaxes(seen, 5, 6)[:, None]


def _transformed(
    form: Form,
    grid: Grid,
    seen: Float[
        Tensor, "batch 1 key_elements heads channels rows columns height width"
    ],
    w: Float[Tensor, "neighbours elements key_elements all"] | None,
) -> Float[
    Tensor,
    "batch elements key_elements heads channels rows columns height width",
]:
    """What the pixels see, as their elements see it."""
    if w is None:
        return seen
    w = ops.moveaxis(_heads(form, _of_grid(form, grid, w)), 0, -1)
    return seen * ops.reshape(w, (*w.shape[:-1], *grid.size, 1, 1))


def _bias(
    form: Form,
    grid: Grid,
    bias: Float[Tensor, "neighbours elements all"],
) -> Float[Tensor, "elements heads channels rows columns 1 1"]:
    """The bias of the neighbours in a frame."""
    bias = ops.moveaxis(_heads(form, _of_grid(form, grid, bias)), 0, -1)
    return ops.reshape(bias, (*bias.shape[:-1], *grid.size, 1, 1))


def _of_grid(
    form: Form, grid: Grid, x: Float[Tensor, "neighbours ..."]
) -> Float[Tensor, "some ..."]:
    """Of all neighbours those of a frame."""
    if len(grid.numbers) == len(form.neighbours):
        return x
    return ops.take(x, np.array(grid.numbers), axis=0)


def _by_row_and_column(
    grid: Grid, a: Float[Tensor, "neighbours batch elements heads height width"]
) -> Float[Tensor, "batch elements heads rows columns height width"]:
    if len(grid.numbers) < a.shape[0]:
        a = ops.take(a, np.array(grid.numbers), axis=0)
    a = ops.reshape(a, (*grid.size, *a.shape[1:]))
    return ops.transpose(a, (2, 3, 4, 0, 1, 5, 6))


def _by_neighbour(
    a: Float[Tensor, "batch elements heads rows columns height width"],
) -> Float[Tensor, "some batch elements heads height width"]:
    """Undoes `_by_row_and_column`."""
    a = ops.transpose(a, (3, 4, 0, 1, 2, 5, 6))
    return ops.reshape(a, (-1, *a.shape[2:]))


def _by_neighbour_first(
    w: Float[Tensor, "*elements heads channels rows columns"],
) -> Float[Tensor, "some *elements all"]:
    rank = len(w.shape)
    w = ops.transpose(w, (rank - 2, rank - 1, *range(rank - 2)))
    return _joined(ops.reshape(w, (-1, *w.shape[2:])))


def _in_order(
    form: Form, found: list[Float[Tensor, "..."]]
) -> Float[Tensor, "neighbours ..."]:
    """What was found frame by frame, in the order of the neighbours."""
    if len(found) == 1:
        return found[0]
    numbers = [n for grid in grids(form) for n in grid.numbers]
    return ops.take(ops.concatenate(found), np.argsort(numbers), axis=0)


def _planes(
    form: Form, x: Float[Tensor, "batch height width elements all"]
) -> Float[Tensor, "batch elements heads channels height width"]:
    return ops.transpose(_heads(form, x), (0, 3, 4, 5, 1, 2))


def _pixels(
    x: Float[Tensor, "batch elements heads channels height width"],
) -> Float[Tensor, "batch height width elements all"]:
    """Undoes `_planes`."""
    return _joined(ops.transpose(x, (0, 4, 5, 1, 2, 3)))


def _heads(
    form: Form, x: Float[Tensor, "*outer all"]
) -> Float[Tensor, "*outer heads channels"]:
    channels = x.shape[-1] // form.heads
    return ops.reshape(x, (*x.shape[:-1], form.heads, channels))


def _joined(
    x: Float[Tensor, "*outer heads channels"],
) -> Float[Tensor, "*outer all"]:
    return ops.reshape(x, (*x.shape[:-2], x.shape[-2] * x.shape[-1]))
