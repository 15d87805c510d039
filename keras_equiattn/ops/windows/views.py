"""The window form over views: one line of algebra for each function.

The keys seen by all pixels are a tensor with two more axes, the rows and the
columns of the window. As a view it takes no memory, and Inductor makes one
kernel of what is computed with it. Only PyTorch has such views; sizes must be
known.

`ops.windows.form` says what `derivatives` computes.
"""

from typing import TypeAlias

from keras import ops

from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.numerics import in_full_precision
from keras_equiattn.ops.windows import dispatch
from keras_equiattn.ops.windows.form import Biases
from keras_equiattn.ops.windows.form import derivatives_from
from keras_equiattn.ops.windows.form import Form
from keras_equiattn.ops.windows.form import Grid
from keras_equiattn.ops.windows.form import joined
from keras_equiattn.ops.windows.form import Keys
from keras_equiattn.ops.windows.form import NeighbourWeights
from keras_equiattn.ops.windows.form import Queries
from keras_equiattn.ops.windows.form import QueryPlanes
from keras_equiattn.ops.windows.form import Scales

# The keys that all pixels see, with an axis for key elements.
Views: TypeAlias = Float[
    Tensor,
    "batch 1 key_elements heads head_channels down along height width",
]
# Weights by the rows and columns of a grid.
GridWeights: TypeAlias = Float[
    Tensor, "batch elements heads down along height width"
]


def scores(
    form: Form,
    queries: Queries,
    keys: Keys,
    scale: Scales | None,
    bias: Biases | None,
) -> NeighbourWeights:
    """The derivative of the form with respect to the weights."""
    queries = in_full_precision(_planes(form, queries)[..., None, None, :, :])
    found = []
    for grid in form.grids():
        seen = _affine(form, grid, _seen(form, grid, keys), scale, bias)
        found.append(_by_neighbour(ops.sum(queries * seen, axis=3)))
    return form.in_order(found)


def sums(
    form: Form,
    weights: NeighbourWeights,
    keys: Keys,
    scale: Scales | None,
    bias: Biases | None,
) -> Queries:
    """The derivative of the form with respect to the queries."""
    y = 0.0
    for grid in form.grids():
        seen = _affine(form, grid, _seen(form, grid, keys), scale, bias)
        own = _by_row_and_column(grid, in_full_precision(weights))
        y = y + ops.sum(own[:, :, :, None] * seen, axis=(4, 5))
    return _pixels(y)


def spread(
    form: Form,
    weights: NeighbourWeights,
    queries: Queries,
    scale: Scales | None,
) -> Keys:
    """The derivative of the form with respect to the keys."""
    # Seen from a key, the neighbours are the other way round.
    down, along = form.reach
    around = ((down, down), (along, along))
    size = queries.shape[1] + down, queries.shape[2] + along
    queries = ops.pad(_planes(form, queries), ((0, 0),) * 4 + around)
    queries = _laid_out(queries)
    frames = []
    for grid in form.grids():
        own = ops.flip(_by_row_and_column(grid, weights), (3, 4))
        own = _laid_out(ops.pad(own, ((0, 0),) * 5 + around))
        last = form.neighbours[grid.numbers[-1]]
        flipped = grid._replace(start=(down - last.row, along - last.column))
        own = _own_windows(flipped, own, size)
        seen = _windows(flipped, queries, size)
        # (batch, elements, heads, channels, rows, columns, height, width)
        both = in_full_precision(own[:, :, :, None])
        both = both * in_full_precision(seen)
        if scale is None:
            found = ops.sum(both, axis=(4, 5))
        else:
            own_scale = ops.flip(_on_grid(form, grid, scale), (4, 5))
            found = ops.sum(both[:, :, None] * own_scale, axis=(1, 5, 6))
        frames.append(_pixels(found))
    return form.all_frames(frames)


def affine_gradients(
    form: Form,
    weights: NeighbourWeights,
    queries: Queries,
    keys: Keys,
    scale: Scales | None,
    bias: Biases | None,
) -> list[Tensor]:
    """The derivatives with respect to the scale and the bias, if given."""
    queries = in_full_precision(_planes(form, queries)[..., None, None, :, :])
    of_scale, of_bias = [], []
    for grid in form.grids():
        own = _by_row_and_column(grid, in_full_precision(weights))
        own = own[:, :, :, None]
        # Not one product for both: Inductor would write it to memory.
        if bias is not None:
            found = ops.sum(own * queries, axis=(0, 6, 7))
            of_bias.append(_by_neighbour_first(found))
        if scale is not None:
            found = queries[:, :, None] * _seen(form, grid, keys)
            found = ops.sum(own[:, :, None] * found, axis=(0, 7, 8))
            of_scale.append(_by_neighbour_first(found))
    return [form.in_order(found) for found in (of_scale, of_bias) if found]


_derivatives = derivatives_from(scores, sums, spread, affine_gradients)
# The axes of the images and of their columns.
_AXES = {"weights": (1, 5), "queries": (0, 2), "keys": (1, 3)}


def derivatives(
    form: Form,
    wanted: tuple[str, ...],
    weights: NeighbourWeights | None,
    queries: Queries | None,
    keys: Keys,
    scale: Scales | None,
    bias: Biases | None,
) -> tuple[Tensor, ...]:
    """Derivatives of the form, those with respect to what is wanted.

    Narrow images are computed side by side or in more columns. Their queries
    have columns of zeros between them, and zeros add nothing to any sum.
    """
    columns, reach = keys.shape[3], form.reach[1]
    count, pitch = dispatch.side_by_side(keys, reach)
    if (count, pitch) == (1, columns):
        return _derivatives(form, wanted, weights, queries, keys, scale, bias)
    given = {"weights": weights, "queries": queries, "keys": keys}
    size = count * pitch
    sizes = {"weights": size - reach, "queries": size - reach, "keys": size}
    wide = {
        name: None if x is None else _beside(x, _AXES[name], pitch, sizes[name])
        for name, x in given.items()
    }
    found = _derivatives(form, wanted, **wide, scale=scale, bias=bias)
    images = [
        _apart(x, _AXES[name], pitch, columns - (size - sizes[name]))
        for name, x in zip(
            [name for name in given if name in wanted], found, strict=False
        )
    ]
    return (*images, *found[len(images) :])


def _beside(
    x: Float[Tensor, "..."], axes: tuple[int, int], pitch: int, size: int
) -> Float[Tensor, "..."]:
    """Puts images side by side.

    Args:
        x: a tensor.
        axes: those of the images and of their columns.
        pitch: from one image to the next; what is between them is zero.
        size: the columns of the wide images.
    """
    images, columns = axes
    count = -(-size // pitch)
    x = _split(_resized(x, columns, pitch), images, count)
    x = _merged(ops.moveaxis(x, images + 1, columns), columns)
    # Inductor would compute it again for each channel that needs it.
    return _laid_out(_resized(x, columns, size))


def _apart(
    x: Float[Tensor, "..."], axes: tuple[int, int], pitch: int, size: int
) -> Float[Tensor, "..."]:
    """Undoes `_beside`, for images with this number of columns."""
    images, columns = axes
    count = -(-x.shape[columns] // pitch)
    x = _split(_resized(x, columns, count * pitch), columns, pitch)
    x = _merged(ops.moveaxis(x, columns, images + 1), images)
    return _resized(x, columns, size)


def _split(
    x: Float[Tensor, "..."], axis: int, size: int
) -> Float[Tensor, "..."]:
    """Makes two axes of one; the second has this size."""
    count = x.shape[axis] // size
    return ops.reshape(x, (*x.shape[:axis], count, size, *x.shape[axis + 1 :]))


def _merged(x: Float[Tensor, "..."], axis: int) -> Float[Tensor, "..."]:
    """Makes one axis of this one and the next."""
    size = x.shape[axis] * x.shape[axis + 1]
    return ops.reshape(x, (*x.shape[:axis], size, *x.shape[axis + 2 :]))


def _resized(
    x: Float[Tensor, "..."], axis: int, size: int
) -> Float[Tensor, "..."]:
    """Cuts an axis to this size, or adds zeros at its end."""
    if x.shape[axis] >= size:
        return x[(*(slice(None),) * axis, slice(size))]
    pads = [(0, 0)] * len(x.shape)
    pads[axis] = (0, size - x.shape[axis])
    return ops.pad(x, pads)


def _seen(form: Form, grid: Grid, keys: Keys) -> Views:
    """The keys that the pixels see, with an axis for key elements."""
    size = keys.shape[2] - form.reach[0], keys.shape[3] - form.reach[1]
    seen = _windows(grid, _planes(form, keys[grid.frame]), size)
    return in_full_precision(seen[:, None])


def _affine(
    form: Form,
    grid: Grid,
    seen: Views,
    scale: Scales | None,
    bias: Biases | None,
) -> Float[
    Tensor, "batch elements heads head_channels down along height width"
]:
    """The keys that the pixels see, mapped for each query element."""
    if scale is not None:
        seen = seen * _on_grid(form, grid, scale)
    seen = ops.sum(seen, axis=2) if seen.shape[2] > 1 else seen[:, :, 0]
    return seen if bias is None else seen + _on_grid(form, grid, bias)


def _on_grid(
    form: Form, grid: Grid, x: Float[Tensor, "neighbours *elements all"]
) -> Float[Tensor, "*elements heads channels rows columns 1 1"]:
    """The weights, or the bias, of the neighbours on a grid."""
    x = form.split(grid.part(in_full_precision(x)))
    x = ops.moveaxis(x, 0, -1)
    return ops.reshape(x, (*x.shape[:-1], *grid.size, 1, 1))


def _by_row_and_column(grid: Grid, weights: NeighbourWeights) -> GridWeights:
    """Selects the weights of the neighbours on a grid.

    The rows and the columns of the window become two axes.
    """
    weights = grid.part(weights)
    weights = ops.reshape(weights, (*grid.size, *weights.shape[1:]))
    return ops.transpose(weights, (2, 3, 4, 0, 1, 5, 6))


def _by_neighbour(weights: GridWeights) -> NeighbourWeights:
    """Undoes `_by_row_and_column`."""
    weights = ops.transpose(weights, (3, 4, 0, 1, 2, 5, 6))
    return ops.reshape(
        weights, (weights.shape[0] * weights.shape[1], *weights.shape[2:])
    )


def _by_neighbour_first(
    x: Float[Tensor, "*elements heads channels rows columns"],
) -> Float[Tensor, "some *elements all"]:
    """Moves the neighbours of a grid to the first axis, as affine maps do."""
    rank = len(x.shape)
    x = ops.transpose(x, (rank - 2, rank - 1, *range(rank - 2)))
    return joined(ops.reshape(x, (-1, *x.shape[2:])))


def _planes(form: Form, x: Queries) -> QueryPlanes:
    """Queries, or keys of a frame, with rows and columns last."""
    return _laid_out(ops.transpose(form.split(x), (0, 3, 4, 5, 1, 2)))


def _pixels(x: QueryPlanes) -> Queries:
    """Undoes `_planes`."""
    return joined(_laid_out(ops.transpose(x, (0, 4, 5, 1, 2, 3))))


def _laid_out(x: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """Lays a tensor out in memory in the order of its axes, under Inductor too.

    Left alone, Inductor would load it from where it comes from each time it is
    used, in the order in which it lies there: far apart. It leaves a view with
    given strides as it is.
    """
    x = x.contiguous()
    return x.as_strided(x.shape, x.stride())


def _windows(
    grid: Grid,
    x: Float[Tensor, "*outer frame_rows frame_columns"],
    size: tuple[int, int],
) -> Float[Tensor, "*outer rows columns height width"]:
    """Windows on a grid: `x[..., start + (i, j) * steps + (m, n)]`.

    Args:
        grid: where the windows `(i, j)` begin.
        x: the image that the windows lie in.
        size: the rows and columns of a window.
    """
    x = ops.expand_dims(x, (-4, -3))
    x = ops.broadcast_to(x, (*x.shape[:-4], *grid.size, *x.shape[-2:]))
    return _own_windows(grid, x, size)


def _own_windows(
    grid: Grid,
    x: Float[Tensor, "*outer rows columns frame_rows frame_columns"],
    size: tuple[int, int],
) -> Float[Tensor, "*outer rows columns height width"]:
    """`_windows`, where each window has an image of its own."""
    rows, columns = grid.steps
    *outer, i, j, down, along = x.stride()
    return x.as_strided(
        (*x.shape[:-2], *size),
        (*outer, i + rows * down, j + columns * along, down, along),
        x.storage_offset() + grid.start[0] * down + grid.start[1] * along,
    )
