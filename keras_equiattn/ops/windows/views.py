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
from keras_equiattn.ops.numerics import in_full_precision
from keras_equiattn.ops.windows.form import Form


def scores(
    form: Form,
    x: Float[Tensor, "batch height width elements channels"],
    k: Float[Tensor, "frames batch rows columns key_elements channels"],
    w: Float[Tensor, "neighbours elements key_elements channels"] | None,
    bias: Float[Tensor, "neighbours elements channels"] | None,
) -> Float[Tensor, "neighbours batch elements heads height width"]:
    """The derivative of the form with respect to `a`."""
    queries = in_full_precision(_planes(form, x)[..., None, None, :, :])
    found = []
    for grid in grids(form):
        seen = _affine(
            form, grid, _seen(form, grid, k, tuple(x.shape[1:3])), w, bias
        )
        found.append(_by_neighbour(ops.sum(queries * seen, axis=3)))
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
        seen = _affine(
            form, grid, _seen(form, grid, k, tuple(a.shape[4:])), w, bias
        )
        weights = _by_row_and_column(grid, in_full_precision(a))[:, :, :, None]
        y = y + ops.sum(weights * seen, axis=(4, 5))
    return _pixels(y)


def spread(
    form: Form,
    a: Float[Tensor, "neighbours batch elements heads height width"],
    x: Float[Tensor, "batch height width elements channels"],
    w: Float[Tensor, "neighbours elements key_elements channels"] | None,
) -> Float[Tensor, "frames batch rows columns key_elements channels"]:
    """The derivative of the form with respect to `k`."""
    # Seen from a key, the neighbours are the other way round.
    down, along = form.reach
    around = ((down, down), (along, along))
    queries = backend.laid_out(
        ops.pad(_planes(form, x), ((0, 0),) * 4 + around)
    )
    height, width = (
        n + r for n, r in zip(x.shape[1:3], form.reach, strict=True)
    )
    frames = {}
    for grid in grids(form):
        weights = ops.flip(_by_row_and_column(grid, a), (3, 4))
        weights = ops.pad(weights, ((0, 0),) * 5 + around)
        start = down - grid.places[-1][0], along - grid.places[-1][1]
        weights = backend.own_windows_of(
            backend.laid_out(weights), start, grid.steps, (height, width)
        )
        seen = backend.windows_of(
            queries, start, grid.size, grid.steps, (height, width)
        )
        # (batch, elements, heads, channels, rows, columns, height, width)
        both = in_full_precision(weights[:, :, :, None])
        both = both * in_full_precision(seen)
        if w is None:
            found = ops.sum(both, axis=(4, 5))
        else:
            w_grid = ops.flip(_weights(form, grid, w), (4, 5))
            found = ops.sum(both[:, :, None] * w_grid, axis=(1, 5, 6))
        frames[grid.frame] = _pixels(found)
    nothing = ops.zeros_like(next(iter(frames.values())))
    return ops.stack([frames.get(n, nothing) for n in range(form.frames)])


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
    queries = in_full_precision(_planes(form, x)[..., None, None, :, :])
    of_w, of_bias = [], []
    for grid in grids(form):
        weights = _by_row_and_column(grid, in_full_precision(a))[:, :, :, None]
        # Not one product for both: Inductor would write it to memory.
        if bias is not None:
            found = ops.sum(weights * queries, axis=(0, 6, 7))
            of_bias.append(_by_neighbour_first(found))
        if w is not None:
            seen = _seen(form, grid, k, tuple(x.shape[1:3]))
            found = queries[:, :, None] * seen
            found = ops.sum(weights[:, :, None] * found, axis=(0, 7, 8))
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
    seen = backend.windows_of(
        _planes(form, k[grid.frame]), grid.start, grid.size, grid.steps, size
    )
    return in_full_precision(seen[:, None])


def _affine(
    form: Form,
    grid: Grid,
    seen: Float[
        Tensor, "batch 1 key_elements heads channels rows columns height width"
    ],
    w: Float[Tensor, "neighbours elements key_elements all"] | None,
    bias: Float[Tensor, "neighbours elements all"] | None,
) -> Float[Tensor, "batch elements heads channels rows columns height width"]:
    """What the pixels see, as their elements see it."""
    if w is not None:
        seen = seen * _weights(form, grid, w)
    seen = ops.sum(seen, axis=2) if seen.shape[2] > 1 else seen[:, :, 0]
    return seen if bias is None else seen + _weights(form, grid, bias)


def _weights(
    form: Form,
    grid: Grid,
    w: Float[Tensor, "neighbours *elements all"],
) -> Float[Tensor, "*elements heads channels rows columns 1 1"]:
    """The weights, or the bias, of the neighbours in a frame."""
    w = in_full_precision(w)
    w = ops.moveaxis(_heads(form, _of_grid(form, grid, w)), 0, -1)
    return ops.reshape(w, (*w.shape[:-1], *grid.size, 1, 1))


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
    return ops.reshape(a, (a.shape[0] * a.shape[1], *a.shape[2:]))


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
    x = ops.transpose(_heads(form, x), (0, 3, 4, 5, 1, 2))
    return backend.laid_out(x)


def _pixels(
    x: Float[Tensor, "batch elements heads channels height width"],
) -> Float[Tensor, "batch height width elements all"]:
    """Undoes `_planes`."""
    return _joined(backend.laid_out(ops.transpose(x, (0, 4, 5, 1, 2, 3))))


def _heads(
    form: Form, x: Float[Tensor, "*outer all"]
) -> Float[Tensor, "*outer heads channels"]:
    channels = x.shape[-1] // form.heads
    return ops.reshape(x, (*x.shape[:-1], form.heads, channels))


def _joined(
    x: Float[Tensor, "*outer heads channels"],
) -> Float[Tensor, "*outer all"]:
    return ops.reshape(x, (*x.shape[:-2], x.shape[-2] * x.shape[-1]))
