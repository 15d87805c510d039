"""The window form as matrix products of tiles, which PyTorch is fast at.

The queries of a tile meet all keys that any of them sees in one product of
matrices, and each takes its window out of that. In tiles of 4 x 4 a window of
7 x 7 costs twice the multiply-adds that it needs, and far fewer passes over
memory. This form takes keys without weights. Sizes must be known, and tensors
must be PyTorch's, which has views with strides. `ops.windows.form` says what
`derivatives` computes.

There is one matrix for each image, tile and head, in this order.
"""

import math
from typing import Any
from typing import NamedTuple
from typing import TypeAlias

from keras import ops

from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.numerics import dtype_of_sums
from keras_equiattn.ops.numerics import in_full_precision
from keras_equiattn.ops.windows import dispatch
from keras_equiattn.ops.windows import products
from keras_equiattn.ops.windows.form import Biases
from keras_equiattn.ops.windows.form import Form
from keras_equiattn.ops.windows.form import Grid
from keras_equiattn.ops.windows.form import Keys
from keras_equiattn.ops.windows.form import NeighbourWeights
from keras_equiattn.ops.windows.form import Queries

TileQueries: TypeAlias = Float[Tensor, "tiles queries head_channels"]
Matrices: TypeAlias = list[Float[Tensor, "tiles queries keys"]]


def derivatives(
    form: Form,
    wanted: tuple[str, ...],
    weights: NeighbourWeights | None,
    queries: Queries | None,
    keys: Keys,
    scale: None,
    bias: Biases | None,
) -> tuple[Tensor, ...]:
    """Derivatives of the form, those with respect to what is wanted."""
    size = keys.shape[2] - form.reach[0], keys.shape[3] - form.reach[1]
    tiles = Tiles(form, size, tuple(map(_tile_size, size, form.reach)))

    def images(
        weights: Tensor, queries: Tensor, keys: Keys
    ) -> tuple[Tensor, ...]:
        """Derivatives for some images, without those of the bias."""
        cut: Any = None if queries is None else _queries(tiles, queries)
        matrices: Any = None if weights is None else _matrices(tiles, weights)
        found = {}
        if "weights" in wanted:
            found["weights"] = _scores(tiles, cut, keys)
        if "queries" in wanted:
            found["queries"] = _sums(tiles, matrices, keys)
        if "keys" in wanted:
            found["keys"] = _spread(tiles, matrices, cut)
        return products.with_bias(form, found, weights, queries, bias)

    sizes = *tiles.counts, *tiles.size, *tiles.seen, form.heads
    return products.over_images(
        images, wanted, weights, queries, keys, math.prod(sizes)
    )


class Tiles(NamedTuple):
    """How images are cut; zeros fill the last tiles.

    Attributes:
        form: the sum that is computed.
        image: the rows and columns of the image.
        size: rows and columns of a tile.
    """

    form: Form
    image: tuple[int, int]
    size: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, int]:
        """How many tiles there are from top to bottom, and side by side."""
        rows, columns = (
            -(-n // size) for n, size in zip(self.image, self.size, strict=True)
        )
        return rows, columns

    @property
    def seen(self) -> tuple[int, int]:
        """Rows and columns of the keys of a tile."""
        down, along = self.form.reach
        return self.size[0] + down, self.size[1] + along

    def filled(
        self, x: Float[Tensor, "..."], axis: int
    ) -> Float[Tensor, "..."]:
        """Adds rows and columns of zeros for whole tiles, from this axis on."""
        pads = [(0, 0)] * len(x.shape)
        pads[axis : axis + 2] = [
            (0, count * size - n)
            for n, size, count in zip(
                self.image, self.size, self.counts, strict=True
            )
        ]
        return ops.pad(x, pads)

    def windows(
        self, grid: Grid
    ) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Where the windows of all queries lie in a matrix, as a vector.

        Returns:
            Sizes, and the distance of adjacent entries, for rows and columns of
            the tile and then of the window; and the number of the first entry.
        """
        across = self.seen[1]
        keys = self.seen[0] * across
        strides = self.size[1] * keys + across, keys + 1
        steps = grid.steps[0] * across, grid.steps[1]
        start = grid.start[0] * across + grid.start[1]
        return (*self.size, *grid.size), (*strides, *steps), start


def _tile_size(image: int, reach: int) -> int:
    """Rows of a tile: small ones waste less work, large ones read keys less."""

    def cost(size: int) -> int:
        return (
            -(-image // size)
            * (size + reach)
            * (size + dispatch.TILE_SETUP_ROWS)
        )

    return min(range(1, max(image, 1) + 1), key=cost)


def _queries(tiles: Tiles, queries: Queries) -> TileQueries:
    """The queries of each tile and head."""
    (down, along), (rows, columns) = tiles.counts, tiles.size
    queries = tiles.form.split(tiles.filled(queries[:, :, :, 0], 1))
    shape = (-1, down, rows, along, columns, *queries.shape[3:])
    queries = ops.transpose(ops.reshape(queries, shape), (0, 1, 3, 5, 2, 4, 6))
    return ops.reshape(queries, (-1, rows * columns, queries.shape[-1]))


def _keys(
    tiles: Tiles,
    keys: Float[Tensor, "batch rows columns 1 channels"],
) -> Float[Tensor, "tiles keys head_channels"]:
    """The keys that each tile and head meets, of one frame."""
    keys = tiles.form.split(tiles.filled(keys[:, :, :, 0], 1))
    for axis in (0, 1):
        # (batch, tiles, [tiles,] ...); the rows and columns of a tile are last.
        keys = keys.unfold(axis + 1, tiles.seen[axis], tiles.size[axis])
    keys = ops.transpose(keys, (0, 1, 2, 3, 5, 6, 4))
    return ops.reshape(keys, (-1, math.prod(tiles.seen), keys.shape[-1]))


def _scores(tiles: Tiles, queries: TileQueries, keys: Keys) -> NeighbourWeights:
    """The derivative of the form with respect to the weights."""
    (down, along), (height, width) = tiles.counts, tiles.image
    found = []
    for grid in tiles.form.grids():
        seen = _keys(tiles, keys[grid.frame])
        matrices = queries @ ops.swapaxes(seen, 1, 2)
        shape, strides, start = tiles.windows(grid)
        count, entries = matrices.shape[0], math.prod(matrices.shape[1:])
        x = matrices.as_strided((count, *shape), (entries, *strides), start)
        x = ops.reshape(x, (-1, down, along, tiles.form.heads, *shape))
        x = ops.transpose(x, (6, 7, 0, 3, 1, 4, 2, 5))
        size = down * shape[0], along * shape[1]
        x = ops.reshape(x, (len(grid.numbers), -1, 1, x.shape[3], *size))
        found.append(x[..., :height, :width])
    return tiles.form.in_order(found)


def _matrices(tiles: Tiles, weights: NeighbourWeights) -> Matrices:
    """Matrices of weights that take keys to queries in each tile, by frame."""
    (down, along), heads = tiles.counts, tiles.form.heads
    queries, keys = math.prod(tiles.size), math.prod(tiles.seen)
    matrices = []
    for grid in tiles.form.grids():
        windows, strides, start = tiles.windows(grid)
        rows, columns, high, wide = windows
        b = tiles.filled(grid.part(weights[:, :, 0]), 3)
        shape = (high, wide, -1, heads, down, rows, along, columns)
        b = ops.transpose(ops.reshape(b, shape), (2, 4, 6, 3, 5, 7, 0, 1))
        b = ops.reshape(b, (-1, *windows))
        matrix = b.new_zeros((b.shape[0], queries, keys))
        strides = queries * keys, *strides
        matrix.as_strided(tuple(b.shape), strides, start).copy_(b)
        matrices.append(matrix)
    return matrices


def _sums(tiles: Tiles, matrices: Matrices, keys: Keys) -> Queries:
    """The derivative of the form with respect to the queries."""
    (down, along), (rows, columns) = tiles.counts, tiles.size
    parts = [
        matrix @ _keys(tiles, keys[grid.frame])
        for grid, matrix in zip(tiles.form.grids(), matrices, strict=True)
    ]
    total = sum(map(in_full_precision, parts)) if parts[1:] else parts[0]
    heads, channels = tiles.form.heads, total.shape[-1]
    x = ops.reshape(total, (-1, down, along, heads, rows, columns, channels))
    x = ops.transpose(x, (0, 1, 4, 2, 5, 3, 6))
    size = down * rows, along * columns
    x = ops.reshape(x, (-1, *size, 1, heads * channels))
    return x[:, : tiles.image[0], : tiles.image[1]]


def _spread(tiles: Tiles, matrices: Matrices, queries: TileQueries) -> Keys:
    """The derivative of the form with respect to the keys."""
    (down, along), heads = tiles.counts, tiles.form.heads
    channels = queries.shape[-1]
    height, width = (
        n + reach
        for n, reach in zip(tiles.image, tiles.form.reach, strict=True)
    )
    found = []
    for matrix in matrices:
        x = ops.swapaxes(matrix, 1, 2) @ queries
        x = ops.reshape(x, (-1, down, along, heads, *tiles.seen, channels))
        x = ops.transpose(x, (0, 1, 4, 2, 5, 3, 6))
        x = _overlap_add(_overlap_add(x, 1, tiles.size[0]), 2, tiles.size[1])
        x = x[:, :height, :width]
        found.append(ops.reshape(x, (-1, height, width, 1, heads * channels)))
    return tiles.form.all_frames(found)


def _overlap_add(
    x: Float[Tensor, "..."], axis: int, step: int
) -> Float[Tensor, "..."]:
    """Adds pieces up where they overlap.

    Args:
        x: pieces along `axis`, each along the next axis.
        axis: the axis of the pieces.
        step: the distance from one piece to the next.

    Returns:
        The sum, which may have zeros at the end.
    """
    if x.shape[axis] == 1:
        return ops.squeeze(x, axis)
    *outer, count, size = x.shape[: axis + 2]
    inner = x.shape[axis + 2 :]
    parts = -(-size // step)
    before = (slice(None),) * axis
    shape = (*outer, count + parts - 1, step, *inner)
    total = ops.zeros(shape, dtype_of_sums(x))
    for n in range(parts):
        part = x[(*before, slice(None), slice(n * step, (n + 1) * step))]
        length = part.shape[axis + 1]
        total[(*before, slice(n, n + count), slice(length))].add_(part)
    return ops.reshape(total, (*outer, (count + parts - 1) * step, *inner))
