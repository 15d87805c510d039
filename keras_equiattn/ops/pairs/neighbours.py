"""What the pixels of a tile see, and sums over it as matrix products.

`WindowNeighbours` and `ImageNeighbours` (a row of pixels that sees the whole
image) have three sums over pairs of a query element and a key element,

    scores(x, k, y)  sum over channels of x(i) k(i + o), and y(i) if given
    sums(a, k)       sum over neighbours and key elements of a(o, i) k(i + o)
    spread(a, x, k)  like k: sum over neighbours and x's elements of
                     a(o, i) x(i), at i + o

and say how positions come into the scores. `ops.pairs.factors` says what
stands in the tensors.

For windows, images are padded and flattened: then a neighbour lies at the same
distance from every pixel. Queries have the width of the padded image, and what
the pixels in excess give is dropped in the end.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from keras import ops

from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.numerics import MASKED


@dataclasses.dataclass(frozen=True)
class Windows:
    """Square windows of all pixels in some rows of an image.

    Attributes:
        size: rows and columns of the window, odd.
        rows: number of the rows.
        width: of the image; sizes may be tensors, known only at run time.
        first: number of the first row.
        height: of the image.
    """

    size: int
    rows: Any
    width: Any
    first: Any
    height: Any

    @property
    def padded_width(self) -> Any:
        return self.width + self.size - 1

    def flat_queries(self, x: Tensor) -> Tensor:
        """Rows of the padded width, one behind the other."""
        return _flat(x)

    def flat_keys(self, x: Tensor) -> Tensor:
        """The same of padded keys or values."""
        # The window of the last pixel in excess ends behind the image.
        behind = [(0, 0)] * 3 + [(0, self.size - 1)]
        return ops.pad(_flat(x), behind)

    def rows_of_keys(self, x: Tensor) -> Tensor:
        """Undoes `flat_keys`."""
        x = x[..., : 1 - self.size or None]
        return ops.reshape(x, (*ops.shape(x)[:3], -1, self.padded_width))

    def position_channels(self, encoding: Tensor) -> int:
        return int(encoding.shape[-1])

    def positions(self, query: Tensor, encoding: Tensor) -> Tensor:
        """Scores of all offsets; the encoding is `(neighbours, elements,
        channels)`."""
        count, elements, channels = encoding.shape
        size = ops.shape(query)[1:]
        scores = ops.reshape(encoding, (-1, channels)) @ ops.reshape(
            query, (channels, -1)
        )
        return ops.reshape(scores, (count, elements, *size))

    def position_gradients(
        self, query: Tensor, encoding: Tensor, d: Tensor
    ) -> tuple[Tensor, Tensor]:
        count, elements, channels = encoding.shape
        d = ops.reshape(d, (count * elements, -1))
        flat = ops.reshape(encoding, (-1, channels))
        d_query = ops.transpose(flat) @ d
        d_encoding = d @ ops.transpose(ops.reshape(query, (channels, -1)))
        return (
            ops.reshape(d_query, ops.shape(query)),
            ops.reshape(d_encoding, (count, elements, channels)),
        )

    def masked(self, scores: Tensor) -> Tensor:
        """Scores with what lies outside of the image left out."""
        offset = ops.arange(self.size, dtype="int32") - self.size // 2
        rows, columns = (
            _within(
                start + ops.arange(count, dtype="int32") + offset[:, None],
                limit,
            )
            for start, count, limit in (
                (self.first, self.rows, self.height),
                (0, self.padded_width, self.width),
            )
        )
        inside = ops.logical_and(
            rows[:, None, :, None], columns[None, :, None, :]
        )
        inside = ops.reshape(inside, (self.size**2, 1, 1, 1, -1))
        return ops.where(inside, scores, ops.cast(MASKED, scores.dtype))


class WindowNeighbours(Windows):
    """As one small matrix product for each pixel, without a compiler.

    One head and one row of the window at a time: what these see lies in the
    memory of the keys, and what comes of it in a cache.
    """

    def scores(self, x: Tensor, k: Tensor, y: Tensor | None = None) -> Tensor:
        x, seen = _by_pixel(x), self._seen(k)
        heads, pixels, elements, _ = ops.shape(x)

        def one(head: int, start: Any) -> Tensor:
            near = seen[head, start : start + pixels]
            return ops.transpose(
                x[head] @ ops.swapaxes(near, -1, -2), (2, 1, 0)
            )

        rows = [
            ops.stack([one(head, start) for head in range(heads)], axis=2)
            for start in self._starts()
        ]
        shape = (self.size**2, k.shape[1], elements, heads, pixels)
        scores = ops.reshape(ops.concatenate(rows), shape)
        return scores if y is None else backend.update("add", scores, y)

    def sums(self, a: Tensor, k: Tensor) -> Tensor:
        matrices, seen = self._matrices(a), self._seen(k)
        *_, heads, pixels = ops.shape(a)

        def one(head: int) -> Tensor:
            total = None
            for row, start in enumerate(self._starts()):
                near = seen[head, start : start + pixels]
                part = matrices(row, head) @ near
                total = (
                    part
                    if total is None
                    else backend.update("add", total, part)
                )
            return ops.transpose(total, (2, 1, 0))

        # Products have the elements in front of the channels.
        y = ops.stack([one(head) for head in range(heads)], axis=2)
        return backend.contiguous(y)

    def spread(self, a: Tensor, x: Tensor, k: Tensor) -> Tensor:
        matrices, x = self._matrices(a), _by_pixel(x)
        channels, elements, heads, length = ops.shape(k)
        pixels = ops.shape(x)[1]
        total = ops.zeros((heads, length, elements * channels), k.dtype)
        for head in range(heads):
            for row, start in enumerate(self._starts()):
                part = ops.swapaxes(matrices(row, head), -1, -2) @ x[head]
                shape = (pixels, self.size, elements * channels)
                part = backend.overlap_add(ops.reshape(part, shape), 0, 1)
                total = backend.add_at(total, (head, start, 0), part[None])
        total = ops.reshape(total, (heads, length, elements, channels))
        return backend.contiguous(ops.transpose(total, (3, 2, 0, 1)))

    def _seen(self, k: Tensor) -> Tensor:
        """`(heads, pixels, columns and key elements, channels)`: what a row of
        a window sees that starts at a pixel."""
        k = backend.overlapping(_by_pixel(k), 1, self.size, 1)
        heads, starts, _, _, channels = ops.shape(k)
        return ops.reshape(k, (heads, starts, -1, channels))

    def _matrices(self, a: Tensor) -> Callable[[int, int], Tensor]:
        """Of a row of the windows and a head, `(pixels, elements, columns and
        key elements)`."""
        _, elements, others, heads, pixels = ops.shape(a)
        shape = (self.size, self.size * elements, others, heads, pixels)
        a = ops.reshape(a, shape)
        return lambda row, head: backend.contiguous(
            ops.transpose(a[row, :, :, head])
        )

    def _starts(self) -> list[Any]:
        """Where the rows of the window of the first pixel start."""
        return [row * self.padded_width for row in range(self.size)]


def _flat(x: Tensor) -> Tensor:
    """`(..., height, width)` to `(..., pixels)`."""
    return ops.reshape(x, (*ops.shape(x)[:3], -1))


def _diagonals(
    x: Float[Tensor, "*outer rows columns"],
) -> Float[Tensor, "*outer rows more"]:
    """Entries `(i, i + c)` of matrices, for every `c` that they all have.

    Rows that are one longer start one further along each time.
    """
    *outer, rows, columns = ops.shape(x)
    x = ops.reshape(x, (*outer, rows * columns))
    x = ops.pad(x, ((0, 0),) * len(outer) + ((0, rows),))
    x = ops.reshape(x, (*outer, rows, columns + 1))
    return x[..., : columns - rows + 1]


def _within(place: Tensor, limit: Any) -> Tensor:
    return ops.logical_and(place >= 0, place < limit)


def _by_pixel(x: Tensor) -> Tensor:
    """`(heads, pixels, elements, channels)`."""
    return backend.contiguous(ops.transpose(x, (2, 3, 1, 0)))


@dataclasses.dataclass(frozen=True)
class ImageNeighbours:
    """One row of an image; every pixel sees the whole image.

    Neighbours are the pixels of the image, row by row.

    Attributes:
        width: of the image.
    """

    width: Any

    def flat_queries(self, x: Tensor) -> Tensor:
        return _flat(x)

    def flat_keys(self, x: Tensor) -> Tensor:
        return _flat(x)

    def rows_of_keys(self, x: Tensor) -> Tensor:
        """Undoes `flat_keys`."""
        return ops.reshape(x, (*ops.shape(x)[:3], -1, self.width))

    def position_channels(self, encoding: Tensor) -> int:
        return int(encoding.shape[2])

    def positions(self, query: Tensor, encoding: Tensor) -> Tensor:
        """Scores of all pixels; the encoding is `(rows, elements, channels,
        columns)` of the offsets, from the first row of the image to the last
        and from `1 - width` to `width - 1`."""
        channels, elements, heads, width = ops.shape(query)
        # The further right the query, the further left an offset starts.
        query = ops.reshape(ops.flip(query, axis=-1), (channels, -1))
        scores = ops.transpose(query) @ encoding
        rows, outputs = ops.shape(scores)[:2]
        shape = (rows, outputs, elements, heads, width, 2 * width - 1)
        scores = ops.flip(_diagonals(ops.reshape(scores, shape)), axis=-2)
        scores = ops.transpose(scores, (0, 5, 1, 2, 3, 4))
        return ops.reshape(scores, (-1, outputs, elements, heads, width))

    def position_gradients(
        self, query: Tensor, encoding: Tensor, d: Tensor
    ) -> tuple[Tensor, Tensor]:
        _, found = backend.vjp(self.positions, (query, encoding), d)
        return found[0], found[1]

    def masked(self, scores: Tensor) -> Tensor:
        """All pixels are seen."""
        return scores

    def scores(self, x: Tensor, k: Tensor, y: Tensor | None = None) -> Tensor:
        channels, *size = ops.shape(x)
        scores = self._pairs(k) @ ops.reshape(x, (channels, -1))
        scores = ops.reshape(scores, (-1, k.shape[1], *size))
        return scores if y is None else scores + y

    def sums(self, a: Tensor, k: Tensor) -> Tensor:
        y = ops.transpose(self._pairs(k)) @ self._matrix(a)
        return ops.reshape(y, (-1, *ops.shape(a)[2:]))

    def spread(self, a: Tensor, x: Tensor, k: Tensor) -> Tensor:
        channels, elements, heads, _ = ops.shape(k)
        x = ops.reshape(x, (channels, -1))
        total = x @ ops.transpose(self._matrix(a))
        total = ops.reshape(total, (channels, -1, elements, heads))
        return ops.transpose(total, (0, 2, 3, 1))

    def _pairs(self, k: Tensor) -> Tensor:
        """`(pixels and key elements, channels)`."""
        k = ops.transpose(k, (3, 1, 2, 0))
        return ops.reshape(k, (-1, k.shape[-1]))

    def _matrix(self, a: Tensor) -> Tensor:
        """`(pixels and key elements, elements and queries)`."""
        shape = ops.shape(a)
        return ops.reshape(a, (shape[0] * shape[1], -1))
