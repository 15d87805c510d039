"""Which neighbours the pixels of a block see, one line after the other.

A line is one row of the window, or some pixels of one row of the image. What
a line shows to the pixels of a block are views of one tensor along its
columns, a view for each neighbour. The keys of windows slide along with the
pixels, so their views are as wide as the image, while all pixels see a
neighbour at the same offset. Where pixels see the whole image it is the other
way round: all of them see the same key, and the offsets slide. So a view is
either as wide as the image, or one column that stands for all pixels.
"""

from typing import Any
from typing import NamedTuple
from typing import TypeAlias

from keras import ops

from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Shaped
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.numerics import dtype_of_sums

Queries: TypeAlias = Float[
    Tensor, "channels query_elements rows columns images"
]
Keys: TypeAlias = Float[
    Tensor, "channels key_elements key_rows key_columns images"
]
Offsets: TypeAlias = Float[Tensor, "lines encoded order 1 offset_columns 1"]


class Place(NamedTuple):
    """Where a block lies; sizes may be tensors, known only at run time.

    Attributes:
        first: number of the first of its rows.
        rows: how many it has.
        size: height and width of the image.
    """

    first: Any
    rows: Any
    size: tuple[Any, Any]


class Line(NamedTuple):
    """What the pixels of a block see of one line.

    Attributes:
        keys, values: in rows of the line.
        encoding: of the line.
        inside: whether keys lie in the image; None if all of them do.
    """

    keys: Float[Tensor, "channels elements rows seen_columns images"]
    values: Float[Tensor, "channels elements rows seen_columns images"]
    encoding: Float[Tensor, "encoded order 1 offset_columns 1"]
    inside: Shaped[Tensor, "1 1 rows seen_columns 1"] | None


class Lines(NamedTuple):
    """The neighbours of the pixels in some rows of an image.

    Attributes:
        size: rows and columns of the window, odd; None for the whole image.
        neighbours: how many there are in a line.
    """

    size: int | None
    neighbours: int

    def count(self, place: Place) -> Any:
        """How many lines there are."""
        if self.size is not None:
            return self.size
        height, width = place.size
        return height * (width // self.neighbours)

    def of_offsets(
        self, encoding: Float[Tensor, "rows offset_columns order encoded"]
    ) -> Offsets:
        """The encoding as `cut` takes it. For whole images its columns are
        reversed: the further right a pixel, the further left its neighbour."""
        encoding = ops.transpose(encoding, (0, 3, 2, 1))
        if self.size is None:
            encoding = ops.flip(encoding, axis=-1)
        return encoding[:, :, :, None, :, None]

    def starts(self, place: Place, number: Any) -> tuple[Any, Any]:
        """Where the line of this number starts in keys, and in offsets."""
        if self.size is not None:
            return (0, 0, place.first + number, 0, 0), (number, *[0] * 5)
        height, width = place.size
        parts = width // self.neighbours
        row, part = number // parts, number % parts
        column = part * self.neighbours
        offset = width - self.neighbours - column
        return (
            (0, 0, row, column, 0),
            (row - place.first + height - 1, 0, 0, 0, offset, 0),
        )

    def cut(
        self,
        keys: Keys,
        values: Keys,
        encoding: Offsets,
        place: Place,
        number: Any,
    ) -> Line:
        """What is seen of a line.

        Args:
            keys, values: with what lies around the image, for windows.
            encoding: of all lines, see `of_offsets`.
            place: where the block lies.
            number: of the line.
        """
        width, n = place.size[1], self.neighbours
        at_keys, at_offsets = self.starts(place, number)
        if self.size is None:
            columns, offsets, inside = n, width + n - 1, None
        else:
            columns, offsets = width + n - 1, n
            rows = ops.arange(place.rows, dtype="int32")
            rows = rows + (place.first + number - n // 2)
            around = ops.arange(columns, dtype="int32") - n // 2
            inside = ops.logical_and(
                _within(rows, place.size[0])[:, None, None],
                _within(around, width)[:, None],
            )[None, None]
        shape = ops.shape(keys)
        shape = (*shape[:2], place.rows, columns, shape[-1])
        line = (1, *ops.shape(encoding)[1:4], offsets, 1)
        return Line(
            backend.part_at(keys, at_keys, shape),
            backend.part_at(values, at_keys, shape),
            backend.part_at(encoding, at_offsets, line)[0],
            inside,
        )

    def keys(self, width: Any) -> list[slice]:
        """Columns of the keys of a line, for each neighbour."""
        return self._views(width, self.size is not None)

    def offsets(self, width: Any) -> list[slice]:
        """Columns of the encoding of a line, for each neighbour."""
        if self.size is not None:
            return self._views(width, False)
        return self._views(width, True)[::-1]

    def _views(self, width: Any, slides: bool) -> list[slice]:
        length = width if slides else 1
        return [slice(j, j + length) for j in range(self.neighbours)]


def seen(
    x: Shaped[Tensor, "outer inner rows seen_columns images"],
    views: list[slice],
) -> list[Shaped[Tensor, "outer inner rows columns images"]]:
    """The views of a tensor along its columns."""
    return [x[..., columns, :] for columns in views]


def spread(
    parts: list[Float[Tensor, "outer inner rows columns images"]],
    views: list[slice],
) -> Float[Tensor, "outer inner rows seen_columns images"]:
    """The transpose of `seen`: adds each part where its view comes from."""
    end = max(columns.stop for columns in views)
    if backend.find_target(parts[0]).compiler is None:
        *outer, _, images = parts[0].shape
        total = ops.zeros((*outer, end, images), dtype_of_sums(parts[0]))
        for columns, part in zip(views, parts, strict=True):
            total[..., columns, :].add_(part)
        return total
    padded = [
        ops.pad(
            part,
            [(0, 0)] * 3 + [(columns.start, end - columns.stop), (0, 0)],
        )
        for columns, part in zip(views, parts, strict=True)
    ]
    return sum(padded[1:], padded[0])


def _within(place: Shaped[Tensor, "count"], limit: Any) -> Tensor:
    """Whether places along an axis lie from zero to below a limit."""
    return ops.logical_and(place >= 0, place < limit)
