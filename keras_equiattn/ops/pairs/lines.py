"""Which neighbours the pixels of a block see, one line after the other.

A line is one row of the window, or some pixels of one row of the image. To the
pixels of a block, the neighbours in a line are views of one tensor, one each.
The keys of windows slide along with the pixels, so their views have as many
rows and columns as the block, while all pixels see a neighbour at the same
offset. Where pixels see the whole image it is the other way round: all of them
see the same key, and the offsets slide. So a view either has an entry for each
pixel, or one that stands for all of them.
"""

from typing import Any
from typing import NamedTuple
from typing import TypeAlias

import numpy as np
from keras import ops

from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Shaped
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.geometry import disc_log_weights
from keras_equiattn.ops.numerics import dtype_of_sums
from keras_equiattn.ops.numerics import lowest_score
from keras_equiattn.ops.numerics import smaller

Queries: TypeAlias = Float[
    Tensor, "channels query_elements rows columns images"
]
Keys: TypeAlias = Float[
    Tensor, "channels key_elements key_rows key_columns images"
]
Offsets: TypeAlias = Float[Tensor, "encoded order offset_rows offset_columns 1"]


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
    """A line of neighbours as the pixels of a block see it.

    Attributes:
        keys, values: the keys and values in the rows of the line.
        encoding: the encoding of the line.
        log_weights: the logarithms of the weights of neighbours in a disc,
            which are added to their scores; None for squares.
        hidden: whether keys lie outside of the image, or in the line before;
            None if none of them does.
    """

    keys: Float[Tensor, "channels elements seen_rows seen_columns images"]
    values: Float[Tensor, "channels elements seen_rows seen_columns images"]
    encoding: Float[Tensor, "encoded order seen_rows line_columns 1"]
    log_weights: Float[Tensor, "1 1 1 line_columns 1"] | None
    hidden: Shaped[Tensor, "1 1 seen_rows seen_columns 1"] | None


class Lines(NamedTuple):
    """The neighbours of the pixels in some rows of an image.

    Attributes:
        size: rows and columns of the window, odd; None for the whole image.
        disc: whether the window is a disc.
        neighbours: how many there are in a line.
    """

    size: int | None
    disc: bool
    neighbours: int

    def count(self, place: Place) -> Any:
        """How many lines there are."""
        if self.size is not None:
            return self.size
        height, width = place.size
        return height * self._lines_of_row(width)

    def of_offsets(
        self, encoding: Float[Tensor, "rows offset_columns order encoded"]
    ) -> Offsets:
        """The encoding as `cut` takes it.

        For whole images it is turned around: the further right a pixel, the
        further left its neighbour.
        """
        encoding = ops.transpose(encoding, (3, 2, 0, 1))[..., None]
        return encoding if self.size else ops.flip(encoding, axis=(2, 3))

    def starts(self, place: Place, number: Any) -> tuple[Any, Any]:
        """Where the line of this number starts in keys, and in offsets."""
        if self.size is not None:
            return (0, 0, place.first + number, 0, 0), (0, 0, number, 0, 0)
        height, width = place.size
        row, _, column = self._in_image(width, number)
        offsets = (
            height - 1 - row + place.first,
            width - self.neighbours - column,
        )
        return (0, 0, row, column, 0), (0, 0, *offsets, 0)

    def cut(
        self,
        keys: Keys,
        values: Keys,
        encoding: Offsets,
        place: Place,
        number: Any,
    ) -> Line:
        """Cuts a line of neighbours out of keys, values and encoding.

        Args:
            keys, values: the keys and values, padded for windows.
            encoding: the encoding of all lines, see `of_offsets`.
            place: where the block lies.
            number: the number of the line.
        """
        (_, width), n = place.size, self.neighbours
        hidden = None
        if self.size is None:
            shape, of_line = (1, n), (place.rows, width + n - 1)
            if n > 1 and width % n:
                _, first, column = self._in_image(width, number)
                columns = ops.arange(n, dtype="int32") + column
                hidden = (columns < first)[None, None, None, :, None]
        else:
            shape, of_line = (place.rows, width + n - 1), (1, n)
            rows, columns = (
                ops.arange(count, dtype="int32") - n // 2 for count in shape
            )
            rows = rows + (place.first + number)
            hidden = ops.logical_or(
                _beyond(rows, place.size[0])[:, None, None],
                _beyond(columns, width)[:, None],
            )[None, None]
        at_keys, at_offsets = self.starts(place, number)
        return Line(
            _part(keys, at_keys, shape),
            _part(values, at_keys, shape),
            _part(encoding, at_offsets, of_line),
            self._log_weights(keys, at_offsets, of_line),
            hidden,
        )

    def _log_weights(
        self, like: Keys, start: tuple[Any, ...], shape: tuple[Any, Any]
    ) -> Float[Tensor, "1 1 1 line_columns 1"] | None:
        """The log weights of the line that starts here in the window."""
        if self.size is None or not self.disc:
            return None
        weights = disc_log_weights(self.size)[None, None, :, :, None]
        weights = np.maximum(weights, lowest_score(like))
        weights = backend.constant(weights, like, dtype_of_sums(like))
        return _part(weights, start, shape)

    def keys(self, width: Any) -> list[slice]:
        """Columns of the keys of a line at which each neighbour is seen."""
        return self._views(width, self.size is not None)

    def offsets(self, width: Any) -> list[slice]:
        """Columns of the encoding of a line, for each neighbour."""
        if self.size is not None:
            return self._views(width, False)
        return self._views(width, True)[::-1]

    def _lines_of_row(self, width: Any) -> Any:
        """How many lines the neighbours in one row of the image make."""
        return (width + self.neighbours - 1) // self.neighbours

    def _in_image(self, width: Any, number: Any) -> tuple[Any, Any, Any]:
        """Where a line of the whole image lies.

        The last line of a row ends with the row. Where lines do not divide the
        row, the first neighbours of the last line belong to the line before.

        Returns:
            The row, the column that follows the line before, and the column
            that the line starts at.
        """
        lines = self._lines_of_row(width)
        row, first = number // lines, number % lines * self.neighbours
        if self.neighbours == 1:  # where the width is not known, too
            return row, first, first
        return row, first, smaller(first, width - self.neighbours)

    def _views(self, width: Any, slides: bool) -> list[slice]:
        """The columns of each neighbour: as many as pixels, or one for all."""
        length = width if slides else 1
        return [slice(j, j + length) for j in range(self.neighbours)]


def seen(
    x: Shaped[Tensor, "outer inner seen_rows seen_columns images"],
    views: list[slice],
) -> list[Shaped[Tensor, "outer inner rows columns images"]]:
    """The views of a tensor along its columns."""
    return [x[..., columns, :] for columns in views]


def spread(
    parts: list[Float[Tensor, "outer inner rows columns images"]],
    views: list[slice],
) -> Float[Tensor, "outer inner seen_rows seen_columns images"]:
    """The transpose of `seen`: adds each part where its view comes from."""
    return backend.sum_at(parts, [view.start for view in views], axis=3)


def _part(
    x: Float[Tensor, "outer inner all_rows all_columns images"],
    start: tuple[Any, ...],
    size: tuple[Any, Any],
) -> Float[Tensor, "outer inner rows columns images"]:
    """Cuts some rows and columns out of a tensor."""
    *outer, _, _, images = ops.shape(x)
    return backend.part_at(x, start, (*outer, *size, images))


def _beyond(place: Shaped[Tensor, " places"], limit: Any) -> Tensor:
    """Whether places along an axis lie below zero, or not below a limit."""
    return ops.logical_or(place < 0, place >= limit)
