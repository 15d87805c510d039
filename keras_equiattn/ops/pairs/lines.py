"""Which neighbours the pixels of a block see, one line after the other.

A line is one row of the window, or one row of the whole image. What it shows
to the pixels of a block comes as a list of tensors that are multiplied with
those of the queries pixel by pixel: `WindowLines` has one tensor for each
column of the window, `ImageLines` one tensor alone, with the neighbours along
the axis of the rows, which then is of size one in queries.
"""

import dataclasses
import functools
from typing import Any

from keras import ops

from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.numerics import in_full_precision
from keras_equiattn.ops.numerics import MASKED


@dataclasses.dataclass(frozen=True)
class WindowLines:
    """Square windows around the pixels of some rows of an image.

    Attributes:
        size: rows and columns of the window, odd.
        rows: of the block.
        first: number of the first of them.
        image: height and width of the image; sizes may be tensors, known only
            at run time.
    """

    size: int
    rows: Any
    first: Any
    image: tuple[Any, Any]

    @property
    def count(self) -> int:
        """How many lines there are."""
        return self.size

    @property
    def together(self) -> int:
        """How many tensors a line has."""
        return self.size

    def encoded(self, encoding: Tensor) -> int:
        """Channels of an encoding."""
        return int(encoding.shape[3])

    def order(self, encoding: Tensor) -> int:
        """Output elements of an encoding."""
        return int(encoding.shape[2])

    def seen(
        self,
        x: Float[Tensor, "channels elements around_rows around_columns images"],
        line: Any,
    ) -> list[Tensor]:
        """What the pixels see of the keys, `(channels, elements, rows,
        columns, images)` for each neighbour in the line."""
        *outer, _, width, images = ops.shape(x)
        reach = self.size - 1
        start = (0, 0, self.first + line, 0, 0)
        rows = backend.part_at(x, start, (*outer, self.rows, width, images))
        rows = in_full_precision(rows)
        return [rows[..., j : j + width - reach, :] for j in range(self.size)]

    def spread(
        self,
        total: Float[
            Tensor, "channels elements around_rows around_columns images"
        ],
        line: Any,
        weights: list[Tensor],
        x: Float[Tensor, "channels query_elements rows columns images"],
    ) -> Tensor:
        """Adds to the keys what comes back from the pixels that see them.

        Args:
            total: sum so far.
            line: number of the line.
            weights: `(elements, query_elements, rows, columns, images)` for
                each neighbour.
            x: of the pixels; the derivative of `sum(weights * <seen, x>)`.
        """
        reach, columns = self.size - 1, ops.shape(x)[-2]
        around = [(0, 0)] * 3 + [(reach, reach), (0, 0)]
        x, terms = ops.pad(x, around), []
        for j, a in enumerate(weights):
            start = reach - j
            at = (..., slice(start, start + columns + reach), slice(None))
            terms.append(ops.pad(a, around)[at][None] * x[at][:, None])
        part = sum_of_all(terms, 2)
        return backend.add_at(total, (0, 0, self.first + line, 0, 0), part)

    def position_scores(
        self,
        query: Float[Tensor, "encoded query_elements rows columns images"],
        encoding: Float[Tensor, "lines neighbours order encoded"],
        line: Any,
    ) -> list[Tensor]:
        """`(order, query_elements, rows, columns, images)` for each
        neighbour; what lies outside of the image is left out."""
        shape = (1, *ops.shape(encoding)[1:])
        encoding = backend.part_at(encoding, (line, 0, 0, 0), shape)[0]
        columns = ops.shape(query)[-2]
        place = self.first + ops.arange(self.rows, dtype="int32")
        inside_rows = _within(place + line - self.size // 2, self.image[0])
        found = []
        for j in range(self.size):
            place = ops.arange(columns, dtype="int32") + (j - self.size // 2)
            inside = ops.logical_and(
                inside_rows[:, None], _within(place, self.image[1])
            )
            p: Any = 0.0
            for c in range(query.shape[0]):
                p = p + encoding[j, :, c, None, None, None, None] * query[c]
            found.append((inside[..., None], p))
        return [
            ops.where(inside, p, ops.cast(MASKED, query.dtype))
            for inside, p in found
        ]

    def position_gradients(
        self,
        total: tuple[Tensor, Tensor],
        query: Float[Tensor, "encoded query_elements rows columns images"],
        encoding: Float[Tensor, "lines neighbours order encoded"],
        line: Any,
        d: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Adds the gradients of query and encoding, given that of the
        scores."""
        shape = (1, *ops.shape(encoding)[1:])
        encoding = backend.part_at(encoding, (line, 0, 0, 0), shape)[0]
        terms = [
            ops.transpose(encoding[j])[:, :, None, None, None, None] * one[None]
            for j, one in enumerate(d)
        ]
        d_query = total[0] + sum_of_all(terms, 1)
        found = ops.stack(
            [ops.einsum("vgbyx,cgbyx->vc", one, query) for one in d]
        )
        return d_query, backend.add_at(total[1], (line, 0, 0, 0), found[None])

    def total(self, terms: list[Tensor]) -> Tensor:
        """The sum over the neighbours."""
        return sum(terms[1:], terms[0])

    def sums(self, weights: list[Tensor], seen: list[Tensor]) -> Tensor:
        """`(channels, query_elements, rows, columns, images)`: what is seen,
        weighted and added up over neighbours and key elements."""
        terms = [
            a[None] * x[:, :, None] for a, x in zip(weights, seen, strict=True)
        ]
        return sum_of_all(terms, 1)

    def products(
        self, x: list[Tensor], y: list[Tensor], z: list[Tensor]
    ) -> Tensor:
        """The sum of products over the neighbours and the first axis."""
        terms = [a * (b * c) for a, b, c in zip(x, y, z, strict=True)]
        return sum_of_all(terms, 0)

    def highest(self, terms: list[Tensor]) -> Tensor:
        top = terms[0]
        for x in terms[1:]:
            top = backend.maximum(top, x)
        return top


@dataclasses.dataclass(frozen=True)
class ImageLines:
    """The whole image around the pixels of one row.

    Attributes:
        row: number of the row of the block.
        image: height and width of the image, see `WindowLines`.
    """

    row: Any
    image: tuple[Any, Any]

    @property
    def count(self) -> Any:
        return self.image[0]

    @property
    def together(self) -> int:
        return 1

    def encoded(self, encoding: Tensor) -> int:
        return int(encoding.shape[2])

    def order(self, encoding: Tensor) -> int:
        return int(encoding.shape[1])

    def seen(
        self,
        x: Float[Tensor, "channels elements rows columns images"],
        line: Any,
    ) -> list[Tensor]:
        *outer, _, width, images = ops.shape(x)
        shape = (*outer, 1, width, images)
        row = backend.part_at(x, (0, 0, line, 0, 0), shape)
        return self._parts(ops.swapaxes(in_full_precision(row), 2, 3), 2)

    def spread(
        self,
        total: Float[Tensor, "channels elements rows columns images"],
        line: Any,
        weights: list[Tensor],
        x: Float[Tensor, "channels query_elements 1 columns images"],
    ) -> Tensor:
        parts = [ops.einsum("mgyxb,cgzxb->cmzyb", a, x) for a in weights]
        part = ops.concatenate(parts, axis=-2)
        return backend.add_at(total, (0, 0, line, 0, 0), part)

    def position_scores(
        self,
        query: Float[Tensor, "encoded query_elements 1 columns images"],
        encoding: Float[Tensor, "offset_rows order encoded offset_columns"],
        line: Any,
    ) -> list[Tensor]:
        encoding = _by_pair(self._of_line(encoding, line), self.image[1])
        p: Any = 0.0
        for c in range(query.shape[0]):
            p = p + encoding[:, c, None, :, :, None] * query[c]
        return self._parts(p, 2)

    def position_gradients(
        self,
        total: tuple[Tensor, Tensor],
        query: Float[Tensor, "encoded query_elements 1 columns images"],
        encoding: Float[Tensor, "offset_rows order encoded offset_columns"],
        line: Any,
        d: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        pairs = _by_pair(self._of_line(encoding, line), self.image[1])
        d_query = sum(
            ops.einsum("vcyx,vgyxb->cgxb", part, one)
            for part, one in zip(self._parts(pairs, 2), d, strict=True)
        )
        d_pairs = ops.concatenate(
            [ops.einsum("vgyxb,cgzxb->vcyx", one, query) for one in d], axis=-2
        )
        found = _by_offset(d_pairs)[None]
        start = (self._offset(line), 0, 0, 0)
        return (
            total[0] + d_query[:, :, None],
            backend.add_at(total[1], start, found),
        )

    def sums(self, weights: list[Tensor], seen: list[Tensor]) -> Tensor:
        return sum(
            ops.einsum("mvyxb,cmyzb->cvzxb", a, x)
            for a, x in zip(weights, seen, strict=True)
        )

    def products(
        self, x: list[Tensor], y: list[Tensor], z: list[Tensor]
    ) -> Tensor:
        terms = [a * (b * c) for a, b, c in zip(x, y, z, strict=True)]
        return self.total(backend.sums_together(terms, 0))

    def total(self, terms: list[Tensor]) -> Tensor:
        return sum(ops.sum(x, axis=-3, keepdims=True) for x in terms)

    def highest(self, terms: list[Tensor]) -> Tensor:
        tops = [ops.max(x, axis=-3, keepdims=True) for x in terms]
        return functools.reduce(backend.maximum, tops)

    def _parts(self, x: Tensor, axis: int) -> list[Tensor]:
        """Halves of the neighbours, of which XLA makes sums together."""
        width = self.image[1]
        even = isinstance(width, int) and width % 2 == 0
        return ops.split(x, 2, axis=axis) if even else [x]

    def _offset(self, line: Any) -> Any:
        return line - self.row + self.image[0] - 1

    def _of_line(self, encoding: Tensor, line: Any) -> Tensor:
        start = (self._offset(line), 0, 0, 0)
        shape = (1, *ops.shape(encoding)[1:])
        return backend.part_at(encoding, start, shape)[0]


def sum_of_all(terms: list[Tensor], axis: int) -> Tensor:
    """The sum of some tensors, and along a short axis of each."""
    half = len(terms) // 2
    parts = [x for x in (terms[:half], terms[half:]) if x]
    added = [sum(part[1:], part[0]) for part in parts]
    return sum(backend.sums_together(added, axis))


def _within(place: Tensor, limit: Any) -> Tensor:
    return ops.logical_and(place >= 0, place < limit)


def _by_pair(
    x: Float[Tensor, "order encoded offsets"], width: Any
) -> Float[Tensor, "order encoded neighbours columns"]:
    """Entry `n - i + width - 1` at each neighbour `n` and pixel `i`."""
    *outer, offsets = ops.shape(x)
    x = ops.broadcast_to(x[..., None, :], (*outer, width, offsets))
    x = ops.reshape(x, (*outer, width * offsets))
    x = ops.pad(x, [(0, 0), (0, 0), (0, width)])
    x = ops.reshape(x, (*outer, width, offsets + 1))[..., :width]
    return ops.swapaxes(ops.flip(x, axis=-2), -1, -2)


def _by_offset(
    x: Float[Tensor, "order encoded neighbours columns"],
) -> Float[Tensor, "order encoded offsets"]:
    """The transpose of `_by_pair`: adds up the pairs of each offset."""
    *outer, width, _ = ops.shape(x)
    x = ops.flip(ops.swapaxes(x, -1, -2), axis=-2)
    x = ops.pad(x, [(0, 0)] * 3 + [(0, width)])
    x = ops.reshape(x, (*outer, 2 * width * width))
    x = x[..., : width * (2 * width - 1)]
    x = ops.reshape(x, (*outer, width, 2 * width - 1))
    return ops.sum(x, axis=-2)
