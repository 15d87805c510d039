"""The window form as PyTorch's CPU likes it: matrix products of tiles.

The queries of a tile meet all keys that any of them sees in one product of
matrices, and each takes its window out of that. In tiles of 4 x 4 a window of
7 x 7 costs twice the multiply-adds that it needs, and far fewer passes over
memory. For keys as they are, without weights; sizes must be known.
`ops.windows.form` says what the functions compute.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from keras import ops

from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.numerics import in_full_precision
from keras_equiattn.ops.windows import products as window_products
from keras_equiattn.ops.windows.form import Form

# Rows of a tile that would cost as much as what is done once for its keys.
ONCE = 4


def scores(
    form: Form, x: Tensor, k: Tensor, w: None, bias: Tensor | None
) -> Tensor:
    """The derivative of the form with respect to `a`."""
    tiles = _tiles(form, tuple(x.shape[1:3]))

    def images(x: Tensor, k: Tensor) -> tuple[Tensor]:
        a = _scores(tiles, _queries(tiles, x), k)
        return (window_products.with_bias_scores(form, a, x, bias),)

    return _over_images(tiles, images, [(x, 0), (k, 1)], (1,))[0]


def weighted_sums(
    form: Form, a: Tensor, k: Tensor, w: None, bias: Tensor | None
) -> Tensor:
    """The derivative of the form with respect to `x`."""
    tiles = _tiles(form, tuple(a.shape[4:]))

    def images(a: Tensor, k: Tensor) -> tuple[Tensor]:
        y = _sums(tiles, _matrices(tiles, a), k)
        return (window_products.with_bias_sums(form, y, a, bias),)

    return _over_images(tiles, images, [(a, 1), (k, 1)], (0,))[0]


def score_gradients(
    form: Form, d: Tensor, x: Tensor, k: Tensor, w: None, bias: Tensor | None
) -> tuple[Tensor, ...]:
    """Gradients of `sum(scores * d)`: of x, k, and bias if given."""
    tiles = _tiles(form, tuple(x.shape[1:3]))

    def images(d: Tensor, x: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        matrices = _matrices(tiles, d)
        y = _sums(tiles, matrices, k)
        return (
            window_products.with_bias_sums(form, y, d, bias),
            _spread(tiles, matrices, _queries(tiles, x)),
            *window_products.bias_gradient(form, d, x, bias),
        )

    return _over_images(tiles, images, [(d, 1), (x, 0), (k, 1)], (0, 1))


def sum_gradients(
    form: Form, d: Tensor, a: Tensor, k: Tensor, w: None, bias: Tensor | None
) -> tuple[Tensor, ...]:
    """Gradients of `sum(weighted_sums * d)`: of a, k, and bias if given."""
    tiles = _tiles(form, tuple(d.shape[1:3]))

    def images(a: Tensor, d: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        queries = _queries(tiles, d)
        of_a = _scores(tiles, queries, k)
        return (
            window_products.with_bias_scores(form, of_a, d, bias),
            _spread(tiles, _matrices(tiles, a), queries),
            *window_products.bias_gradient(form, a, d, bias),
        )

    return _over_images(tiles, images, [(a, 1), (d, 0), (k, 1)], (1, 1))


class _Window(NamedTuple):
    """The neighbours in one frame: where they lie among the keys of a tile.

    Attributes:
        frame: the frame.
        numbers: of the neighbours, row by row.
        start: of the first neighbour of the first query, in the product of a
            tile as a vector.
        shape: rows and columns of the tile, rows and columns of the window.
        strides: from one to the next along each of these.
    """

    frame: int
    numbers: list[int]
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Tiles(NamedTuple):
    """How images are cut; zeros fill the last tiles.

    Attributes:
        form: what is computed.
        image: its rows and columns.
        size: rows and columns of a tile.
        windows: the neighbours, frame by frame.
    """

    form: Form
    image: tuple[int, int]
    size: tuple[int, int]
    windows: list[_Window]

    @property
    def counts(self) -> tuple[int, int]:
        """Tiles among each other, and side by side."""
        rows, columns = (
            -(-n // size) for n, size in zip(self.image, self.size, strict=True)
        )
        return rows, columns

    @property
    def seen(self) -> tuple[int, int]:
        """Rows and columns of the keys of a tile."""
        down, along = self.form.reach
        return self.size[0] + down, self.size[1] + along

    @property
    def missing(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """What fills the last tiles, as `ops.pad` takes it."""
        rows, columns = (
            (0, count * size - n)
            for n, size, count in zip(
                self.image, self.size, self.counts, strict=True
            )
        )
        return rows, columns


def _tiles(form: Form, image: tuple[int, int]) -> _Tiles:
    rows, columns = map(_tile_size, image, form.reach)
    reach = form.reach[1]
    across = columns + reach  # keys of a tile in a row
    keys = (rows + form.reach[0]) * across
    windows = []
    for frame in range(form.frames):
        numbers, places = [], []
        for n, place in enumerate(form.neighbours):
            if place.frame == frame:
                numbers.append(n)
                places.append((place.row, place.column))
        if not numbers:
            continue
        seen = [sorted(set(axis)) for axis in zip(*places, strict=True)]
        # Neighbours are equally far apart.
        steps = [x[1] - x[0] if len(x) > 1 else 1 for x in seen]
        windows.append(
            _Window(
                frame,
                numbers,
                seen[0][0] * across + seen[1][0],
                (rows, columns, len(seen[0]), len(seen[1])),
                (
                    columns * keys + across,
                    keys + 1,
                    steps[0] * across,
                    steps[1],
                ),
            )
        )
    return _Tiles(form, image, (rows, columns), windows)


def _tile_size(image: int, reach: int) -> int:
    """Rows of a tile: small ones waste less, large ones see keys less often."""

    def cost(size: int) -> int:
        return -(-image // size) * (size + reach) * (size + ONCE)

    return min(range(1, max(image, 1) + 1), key=cost)


def _queries(
    tiles: _Tiles, x: Tensor
) -> Float[Tensor, "tiles queries channels"]:
    """The queries of each tile and head."""
    (down, along), (rows, columns) = tiles.counts, tiles.size
    x = ops.pad(x[:, :, :, 0], ((0, 0), *tiles.missing, (0, 0)))
    heads, channels = tiles.form.heads, x.shape[-1]
    shape = (-1, down, rows, along, columns, heads, channels // heads)
    x = ops.transpose(ops.reshape(x, shape), (0, 1, 3, 5, 2, 4, 6))
    return ops.reshape(x, (-1, rows * columns, channels // heads))


def _keys(tiles: _Tiles, k: Tensor) -> Float[Tensor, "tiles keys channels"]:
    """The keys that each tile and head meets, of one frame."""
    (rows, columns), seen = tiles.size, tiles.seen
    k = ops.pad(k[:, :, :, 0], ((0, 0), *tiles.missing, (0, 0)))
    heads, channels = tiles.form.heads, k.shape[-1]
    k = backend.overlapping(k, 2, seen[1], columns)
    k = backend.overlapping(k, 1, seen[0], rows)
    shape = (*ops.shape(k)[:5], heads, channels // heads)
    k = ops.transpose(ops.reshape(k, shape), (0, 1, 3, 5, 2, 4, 6))
    return ops.reshape(k, (-1, math.prod(seen), channels // heads))


def _scores(tiles: _Tiles, queries: Tensor, k: Tensor) -> Tensor:
    """Scores of neighbours `(neighbours, batch, 1, heads, height, width)`."""
    (down, along), (height, width) = tiles.counts, tiles.image
    heads = tiles.form.heads
    numbers, planes = [], []
    for window in tiles.windows:
        keys = _keys(tiles, k[window.frame])
        products = queries @ ops.swapaxes(keys, 1, 2)
        products = ops.reshape(products, (-1, math.prod(products.shape[1:])))
        a = backend.strided(
            products, window.start, window.shape, window.strides
        )
        a = ops.reshape(a, (-1, down, along, heads, *window.shape))
        a = ops.transpose(a, (6, 7, 0, 3, 1, 4, 2, 5))
        size = down * window.shape[0], along * window.shape[1]
        count = len(window.numbers)
        a = ops.reshape(a, (count, -1, 1, heads, *size))
        planes.append(a[..., :height, :width])
        numbers += window.numbers
    a = ops.concatenate(planes) if len(planes) > 1 else planes[0]
    if numbers == sorted(numbers):
        return a
    return ops.take(a, np.argsort(numbers), axis=0)


def _matrices(
    tiles: _Tiles, a: Tensor
) -> list[Float[Tensor, "tiles queries keys"]]:
    """What takes keys to queries in each tile, frame by frame."""
    (down, along), heads = tiles.counts, tiles.form.heads
    queries, keys = math.prod(tiles.size), math.prod(tiles.seen)
    matrices = []
    for window in tiles.windows:
        b = a[:, :, 0]
        if len(window.numbers) < len(tiles.form.neighbours):
            b = ops.take(b, np.array(window.numbers), axis=0)
        b = ops.pad(b, ((0, 0),) * 3 + tiles.missing)
        rows, columns, high, wide = window.shape
        shape = (high, wide, -1, heads, down, rows, along, columns)
        b = ops.transpose(ops.reshape(b, shape), (2, 4, 6, 3, 5, 7, 0, 1))
        b = ops.reshape(b, (-1, *window.shape))
        b = backend.at_strides(b, window.start, queries * keys, window.strides)
        matrices.append(ops.reshape(b, (-1, queries, keys)))
    return matrices


def _sums(
    tiles: _Tiles, matrices: list[Tensor], k: Tensor
) -> Float[Tensor, "batch height width 1 channels"]:
    (down, along), (rows, columns) = tiles.counts, tiles.size
    parts = [
        matrix @ _keys(tiles, k[window.frame])
        for window, matrix in zip(tiles.windows, matrices, strict=True)
    ]
    total = sum(map(in_full_precision, parts)) if parts[1:] else parts[0]
    heads, channels = tiles.form.heads, total.shape[-1]
    x = ops.reshape(total, (-1, down, along, heads, rows, columns, channels))
    x = ops.transpose(x, (0, 1, 4, 2, 5, 3, 6))
    size = down * rows, along * columns
    x = ops.reshape(x, (-1, *size, 1, heads * channels))
    return x[:, : tiles.image[0], : tiles.image[1]]


def _spread(
    tiles: _Tiles, matrices: list[Tensor], queries: Tensor
) -> Float[Tensor, "frames batch rows columns 1 channels"]:
    """The derivative of the form with respect to `k`."""
    (down, along), (rows, columns) = tiles.counts, tiles.size
    heads, channels = tiles.form.heads, queries.shape[-1]
    height, width = (
        n + reach
        for n, reach in zip(tiles.image, tiles.form.reach, strict=True)
    )
    frames: dict[int, Tensor] = {}
    for window, matrix in zip(tiles.windows, matrices, strict=True):
        k = ops.swapaxes(matrix, 1, 2) @ queries
        k = ops.reshape(k, (-1, down, along, heads, *tiles.seen, channels))
        k = ops.transpose(k, (0, 1, 4, 2, 5, 3, 6))
        k = backend.overlap_add(k, 1, rows)
        k = backend.overlap_add(k, 2, columns)
        k = k[:, :height, :width]
        k = ops.reshape(k, (-1, height, width, 1, heads * channels))
        frames[window.frame] = k
    nothing = ops.zeros_like(next(iter(frames.values())))
    return ops.stack([frames.get(n, nothing) for n in range(tiles.form.frames)])


def _over_images(
    tiles: _Tiles,
    function: Callable[..., tuple[Tensor, ...]],
    tensors: list[tuple[Tensor, int]],
    joined: tuple[int, ...],
) -> tuple[Tensor, ...]:
    """As many images at a time as have products that fit the cache."""
    sizes = *tiles.counts, *tiles.size, *tiles.seen, tiles.form.heads
    item = 8 if "64" in str(tensors[0][0].dtype) else 4
    images = max(1, window_products.CACHE // (item * math.prod(sizes) or 1))
    return window_products.over_images(function, tensors, joined, images)
