"""Which neighbours the pixels of a block see, one line after the other.

A line is one row of the window, or one row of the whole image. What it shows
to the pixels of a block comes as a list of tensors that are multiplied with
those of the queries pixel by pixel: `WindowLines` has one tensor for each
column of the window, `ImageLines` one tensor alone, with the neighbours along
the axis of the rows, which then is of size one in queries.

What depends on the number of the line is cut first, by `cut`: the other
methods compute the same for each line.
"""

import dataclasses
import functools
from typing import Any
from typing import NamedTuple

from keras import ops

from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.numerics import dtype_of_sums
from keras_equiattn.ops.numerics import in_full_precision
from keras_equiattn.ops.numerics import MASKED


class Place(NamedTuple):
    """Where a block lies.

    Attributes:
        first: number of the first of its rows.
        rows: how many it has.
        height: of the image; sizes may be tensors, known only at run time.
    """

    first: Any
    rows: Any
    height: Any


class Line(NamedTuple):
    """What the pixels of a block see of one line.

    Attributes:
        keys, values: in rows of the line.
        encoding: of the line.
        inside: `(rows,)`, whether rows of the line lie in the image; None if
            all of them do.
    """

    keys: Float[Tensor, "channels elements rows around_columns images"]
    values: Float[Tensor, "channels elements rows around_columns images"]
    encoding: Tensor
    inside: Tensor | None


@dataclasses.dataclass(frozen=True)
class WindowLines:
    """Square windows around the pixels of some rows of an image.

    Attributes:
        size: rows and columns of the window, odd.
    """

    size: int

    def count(self, place: Place) -> int:
        """How many lines there are."""
        return self.size

    def listed(self, x: Tensor) -> list[Tensor]:
        """As many as what is seen of a line has tensors."""
        return [x] * self.size

    def encoded(self, encoding: Tensor) -> int:
        """Channels of an encoding."""
        return int(encoding.shape[-1])

    def order(self, encoding: Tensor) -> int:
        """Output elements of an encoding."""
        return int(encoding.shape[-2])

    def scores_shape(self, query: Tensor) -> tuple[Any, ...]:
        """Neighbours in a line, and the shape of scores of each."""
        return self.size, *ops.shape(query)[1:]

    def cut(
        self,
        keys: Float[
            Tensor, "channels elements around_rows around_columns images"
        ],
        values: Float[
            Tensor, "channels elements around_rows around_columns images"
        ],
        encoding: Float[Tensor, "lines neighbours order encoded"],
        place: Place,
        number: Any,
    ) -> Line:
        """What is seen of a line.

        Args:
            keys, values: with their surroundings.
            encoding: of all lines.
            place: where the block lies.
            number: of the line.
        """
        at_keys, at_values, at_encoding = self.starts(place, number)
        rows = ops.arange(place.rows, dtype="int32") + place.first
        return Line(
            _rows_at(keys, at_keys, place.rows),
            _rows_at(values, at_values, place.rows),
            _line_at(encoding, at_encoding),
            _within(rows + (number - self.size // 2), place.height),
        )

    def starts(self, place: Place, number: Any) -> tuple[Any, ...]:
        """Where in keys, values and encoding a line is cut."""
        rows = 0, 0, place.first + number, 0, 0
        return rows, rows, (number, 0, 0, 0)

    def seen(
        self,
        x: Float[Tensor, "channels elements rows around_columns images"],
    ) -> list[Tensor]:
        """What the pixels see of the keys, `(channels, elements, rows,
        columns, images)` for each neighbour in the line."""
        columns = ops.shape(x)[-2] - (self.size - 1)
        return [x[..., j : j + columns, :] for j in range(self.size)]

    def spread(
        self,
        weights: list[Tensor],
        x: Float[Tensor, "channels query_elements rows columns images"],
    ) -> Float[Tensor, "channels elements rows around_columns images"]:
        """What comes back to the keys from the pixels that see them.

        Args:
            weights: `(elements, query_elements, rows, columns, images)` for
                each neighbour.
            x: of the pixels; the derivative of `sum(weights * <seen, x>)`.
        """
        reach, columns = self.size - 1, ops.shape(x)[-2]
        if backend.find_target(x).compiler is None:
            *_, rows, _, images = ops.shape(x)
            shape = x.shape[0], weights[0].shape[0], rows, columns + reach
            total = ops.zeros((*shape, images), dtype_of_sums(x))
            for j, a in enumerate(weights):
                part = total[..., j : j + columns, :]
                backend.add_products(part, a[None], x[:, None], 2)
            return total
        around = [(0, 0)] * 3 + [(reach, reach), (0, 0)]
        x, pairs = ops.pad(x, around), []
        for j, a in enumerate(weights):
            start = reach - j
            at = (..., slice(start, start + columns + reach), slice(None))
            pairs.append((ops.pad(a, around)[at][None], x[at][:, None]))
        return backend.sum_of_products(pairs, 2)

    def position_scores(
        self,
        query: Float[Tensor, "encoded query_elements rows columns images"],
        encoding: Float[Tensor, "neighbours order encoded"],
        inside_rows: Tensor,
    ) -> list[Tensor]:
        """`(order, query_elements, rows, columns, images)` for each
        neighbour; what lies outside of the image is left out."""
        columns = ops.shape(query)[-2]
        found = []
        for j in range(self.size):
            place = ops.arange(columns, dtype="int32") + (j - self.size // 2)
            inside = ops.logical_and(
                inside_rows[:, None], _within(place, columns)
            )
            p: Any = 0.0
            if backend.find_target(query).compiler is None:
                p = ops.einsum("vc,cgyxb->vgyxb", encoding[j], query)
            else:
                for c in range(query.shape[0]):
                    p = p + encoding[j, :, c, None, None, None, None] * query[c]
            found.append((inside[..., None], p))
        return [
            ops.where(inside, p, ops.cast(MASKED, query.dtype))
            for inside, p in found
        ]

    def position_gradients(
        self,
        query: Float[Tensor, "encoded query_elements rows columns images"],
        encoding: Float[Tensor, "neighbours order encoded"],
        d: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """The gradients of query and encoding, the latter as one line of all,
        given that of the scores."""
        pairs = [
            (ops.transpose(encoding[j])[..., None, None, None, None], one[None])
            for j, one in enumerate(d)
        ]
        found = ops.stack(
            [
                ops.einsum("vgbyx,cgbyx->vc", in_full_precision(one), query)
                for one in d
            ]
        )
        return backend.sum_of_products(pairs, 1), found[None]

    def total(self, terms: list[Tensor]) -> Tensor:
        """The sum over the neighbours."""
        return sum(terms[1:], terms[0])

    def sums(self, weights: list[Tensor], seen: list[Tensor]) -> Tensor:
        """`(channels, query_elements, rows, columns, images)`: what is seen,
        weighted and added up over neighbours and key elements."""
        pairs = zip(weights, seen, strict=True)
        return backend.sum_of_products(
            ((a[None], x[:, :, None]) for a, x in pairs), 1
        )

    def products(
        self, x: list[Tensor], y: list[Tensor], z: list[Tensor]
    ) -> Tensor:
        """The sum of products over the neighbours and the first axis."""
        pairs = [
            (a, in_full_precision(b) * in_full_precision(c))
            for a, b, c in zip(x, y, z, strict=True)
        ]
        return backend.sum_of_products(pairs, 0)

    def highest(self, terms: list[Tensor]) -> Tensor:
        top = terms[0]
        for x in terms[1:]:
            top = backend.maximum(top, x)
        return top


@dataclasses.dataclass(frozen=True)
class ImageLines:
    """The whole image around the pixels of one row."""

    def count(self, place: Place) -> Any:
        return place.height

    def listed(self, x: Tensor) -> list[Tensor]:
        return [x] * _halves(ops.shape(x)[-2])

    def encoded(self, encoding: Tensor) -> int:
        return int(encoding.shape[-2])

    def order(self, encoding: Tensor) -> int:
        return int(encoding.shape[-3])

    def scores_shape(self, query: Tensor) -> tuple[Any, ...]:
        _, elements, _, width, images = ops.shape(query)
        count = _halves(width)
        return count, elements, width // count, width, images

    def cut(
        self,
        keys: Float[Tensor, "channels elements rows columns images"],
        values: Float[Tensor, "channels elements rows columns images"],
        encoding: Float[Tensor, "offset_rows order encoded offset_columns"],
        place: Place,
        number: Any,
    ) -> Line:
        at_keys, at_values, at_encoding = self.starts(place, number)
        return Line(
            _rows_at(keys, at_keys, 1),
            _rows_at(values, at_values, 1),
            _line_at(encoding, at_encoding),
            None,
        )

    def starts(self, place: Place, number: Any) -> tuple[Any, ...]:
        row, offset = (0, 0, number, 0, 0), number - place.first
        return row, row, (offset + place.height - 1, 0, 0, 0)

    def seen(
        self, x: Float[Tensor, "channels elements 1 columns images"]
    ) -> list[Tensor]:
        return _parts(ops.swapaxes(x, 2, 3), 2)

    def spread(
        self,
        weights: list[Tensor],
        x: Float[Tensor, "channels query_elements 1 columns images"],
    ) -> Float[Tensor, "channels elements 1 columns images"]:
        x = in_full_precision(x)
        parts = [
            ops.einsum("mgyxb,cgzxb->cmzyb", in_full_precision(a), x)
            for a in weights
        ]
        return ops.concatenate(parts, axis=-2)

    def position_scores(
        self,
        query: Float[Tensor, "encoded query_elements 1 columns images"],
        encoding: Float[Tensor, "order encoded offset_columns"],
        inside_rows: None,
    ) -> list[Tensor]:
        encoding = _by_pair(encoding, ops.shape(query)[-2])
        p: Any = 0.0
        for c in range(query.shape[0]):
            p = p + encoding[:, c, None, :, :, None] * query[c]
        return _parts(p, 2)

    def position_gradients(
        self,
        query: Float[Tensor, "encoded query_elements 1 columns images"],
        encoding: Float[Tensor, "order encoded offset_columns"],
        d: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        pairs = _by_pair(encoding, ops.shape(query)[-2])
        d = [in_full_precision(one) for one in d]
        d_query = sum(
            ops.einsum("vcyx,vgyxb->cgxb", part, one)
            for part, one in zip(_parts(pairs, 2), d, strict=True)
        )
        d_pairs = ops.concatenate(
            [ops.einsum("vgyxb,cgzxb->vcyx", one, query) for one in d], axis=-2
        )
        return d_query[:, :, None], _by_offset(d_pairs)[None]

    def sums(self, weights: list[Tensor], seen: list[Tensor]) -> Tensor:
        return sum(
            ops.einsum(
                "mvyxb,cmyzb->cvzxb", in_full_precision(a), in_full_precision(x)
            )
            for a, x in zip(weights, seen, strict=True)
        )

    def products(
        self, x: list[Tensor], y: list[Tensor], z: list[Tensor]
    ) -> Tensor:
        terms = [
            in_full_precision(a) * (in_full_precision(b) * in_full_precision(c))
            for a, b, c in zip(x, y, z, strict=True)
        ]
        return self.total(backend.sums_together(terms, 0))

    def total(self, terms: list[Tensor]) -> Tensor:
        return sum(ops.sum(x, axis=-3, keepdims=True) for x in terms)

    def highest(self, terms: list[Tensor]) -> Tensor:
        tops = [ops.max(x, axis=-3, keepdims=True) for x in terms]
        return functools.reduce(backend.maximum, tops)


def _rows_at(x: Tensor, start: tuple[Any, ...], rows: Any) -> Tensor:
    *outer, _, width, images = ops.shape(x)
    return backend.part_at(x, start, (*outer, rows, width, images))


def _line_at(encoding: Tensor, start: tuple[Any, ...]) -> Tensor:
    shape = (1, *ops.shape(encoding)[1:])
    return backend.part_at(encoding, start, shape)[0]


def _halves(width: Any) -> int:
    return 2 if isinstance(width, int) and width % 2 == 0 else 1


def _parts(x: Tensor, axis: int) -> list[Tensor]:
    """Halves of the neighbours, of which XLA makes sums together."""
    count = _halves(ops.shape(x)[axis])
    return ops.split(x, count, axis=axis) if count > 1 else [x]


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
