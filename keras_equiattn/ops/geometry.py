"""Where windows lie: the windows of convolutions, and those of attention."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import numpy as np
from keras import ops

from keras_equiattn import _checks
from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Shape
from keras_equiattn.ops._types import Shaped
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.numerics import larger
from keras_equiattn.ops.numerics import MASKED

BORDERS = ("zeros", "mask", "reflect")
WINDOW_SHAPES = ("square", "disc")
# The width of the edge of a disc, in pixels, at most half of the window. With a
# width of one the errors of `AffineSelfConv2D` in turns by 45 degrees grow for
# windows of 3 x 3 and 5 x 5 pixels. A wider edge makes them smaller for windows
# of 5 x 5 and 7 x 7, but leaves fewer neighbours: see
# `benchmarks/angle_choices.py`.
DISC_EDGE = 2.0


def effective_window(window: int, dilation: int) -> int:
    """Extent of a dilated window, in pixels."""
    return dilation * (window - 1) + 1


def output_size(
    size: int | None,
    window: int,
    strides: int = 1,
    dilation: int = 1,
    padding: str = "valid",
) -> int | None:
    """Number of window positions along one axis, as Keras counts them."""
    if size is None:
        return None
    if padding == "same":
        return -(-size // strides)
    return (size - effective_window(window, dilation)) // strides + 1


def same_padding(
    size: int | None, window: int, strides: int = 1, dilation: int = 1
) -> int:
    """How many pixels padding "same" adds along one axis, before and after.

    The number is negative where windows have gaps between them and the last
    one ends before the image does; nothing is added then.

    Args:
        size: the size of the image along the axis; only needed for strides
            above 1.
        window, strides, dilation: the size, strides and dilation of the
            windows.
    """
    extent = effective_window(window, dilation)
    if strides == 1:
        return extent - 1
    if size is None:
        raise ValueError(
            "The size of an image must be known where padding is 'same' and "
            f"strides are above 1. Received: size=None, strides={strides}"
        )
    return (-(-size // strides) - 1) * strides + extent - size


def before_and_after(padding: int) -> tuple[int, int]:
    """Splits padding between both ends as Keras does, the larger half last."""
    padding = max(padding, 0)
    return padding // 2, -(-padding // 2)


@dataclasses.dataclass(frozen=True)
class FilterWindow:
    """Where the filter of a convolution looks at each output position.

    Attributes:
        size: rows and columns of the filter.
        strides: from one output position to the next.
        dilation_rate: distance between adjacent entries of the filter.
    """

    size: tuple[int, int]
    strides: tuple[int, int] = (1, 1)
    dilation_rate: tuple[int, int] = (1, 1)

    def output_size(self, size: Shape, padding: str) -> list[int | None]:
        """Height and width of the output for an input without padding."""
        return [
            output_size(length, window, strides, dilation, padding)
            for length, window, strides, dilation in self._axes(size)
        ]

    def padding(self, size: Shape, padding: str) -> list[tuple[int, int]]:
        """Zeros before and after along both axes, as Keras pads."""
        if padding == "valid":
            return [(0, 0), (0, 0)]
        return [
            before_and_after(same_padding(*axis)) for axis in self._axes(size)
        ]

    def _axes(self, size: Shape) -> Any:
        """For rows and columns: `(size, window, strides, dilation)`."""
        return zip(
            size, self.size, self.strides, self.dilation_rate, strict=True
        )

    def views(
        self, image: Float[Tensor, "*outer height width"]
    ) -> list[Float[Tensor, "*outer new_height new_width"]]:
        """Returns the pixels of a padded image under each entry of the filter.

        One view for each entry, row by row: at each output position it has
        the pixel under that entry.
        """
        height, width = (
            effective_window(window, dilation) - 1
            for window, dilation in zip(
                self.size, self.dilation_rate, strict=True
            )
        )
        found = []
        for row, column in np.ndindex(*self.size):
            top, left = np.array((row, column)) * self.dilation_rate
            rows = slice(int(top), int(top - height) or None, self.strides[0])
            columns = slice(
                int(left), int(left - width) or None, self.strides[1]
            )
            found.append(image[..., rows, columns])
        return found


def disc_log_weights(size: int) -> np.ndarray:
    """`(size, size)`: logarithms of the weights in a disc, see `Window`.

    `MASKED` stands for the logarithm of zero.

    Args:
        size: rows and columns of the window, odd.
    """
    radius = size / 2
    edge = min(DISC_EDGE, radius)
    rows, columns = np.indices((size, size)) - size // 2
    depth = (np.hypot(rows, columns) - (radius - edge)) / edge
    inside = depth < 1
    weights = np.cos(np.pi / 2 * np.clip(depth, 0, 1)) ** 2
    return np.where(inside, np.log(np.where(inside, weights, 1)), MASKED)


class Neighbour(NamedTuple):
    """Where a neighbour of the first query lies in the frames of a window.

    See `Window.frames`.
    """

    frame: int
    row: int
    column: int

    def seen(self, size: tuple[Any, Any]) -> tuple[slice, slice]:
        """Rows and columns of the frame that all queries see at this place.

        Args:
            size: rows and columns of queries.
        """
        rows = slice(self.row, self.row + size[0])
        return rows, slice(self.column, self.column + size[1])


def reach(neighbours: Sequence[Neighbour]) -> tuple[int, int]:
    """How many more rows and columns frames have than there are queries."""
    return (
        max(place.row for place in neighbours),
        max(place.column for place in neighbours),
    )


@dataclasses.dataclass(frozen=True)
class Window:
    """The neighbours that a query looks at, centred on its own pixel.

    Attributes:
        size: rows and columns, odd.
        strides: the distances between queries; query `i` sits on the pixel
            `strides * i`.
        dilation_rate: distance between adjacent neighbours.
        border: how neighbours outside of the image count. "zeros": keys and
            values are zero there (before a bias); "mask": the softmax leaves
            them out; "reflect": the image continues as its mirror image, which
            does not repeat the outermost pixels.
        shape: "square": all neighbours count alike; "disc": the softmax weighs
            them by their distance from the centre. With `n` rows, the weight is
            one up to `max(n / 2 - 2, 0)` pixels (before dilation), falls as a
            squared cosine, and is zero from `n / 2` pixels on.

    A square that turns by 45 degrees covers other pixels with its corners. A
    disc covers the same part of the image after a turn by any angle. Its edge
    is smooth, since a sharp edge could only see a whole pixel or none of it.
    An error remains because pixels lie on a grid: it is small where attention
    and images are smooth. The effective number of neighbours in a disc, the
    square of the sum of its weights over the sum of their squares, is about 3,
    11 and 25 for 3, 5 and 7 rows.

    Raises:
        ValueError: for sizes that are not odd, strides or dilation rates that
            are not positive, an unknown border or shape, and a disc that has
            not as many rows as columns, or has two dilation rates.

    Example:
        >>> Window((5, 5), shape="disc").offsets.shape
        (25, 2)
    """

    size: tuple[int, int]
    strides: tuple[int, int] = (1, 1)
    dilation_rate: tuple[int, int] = (1, 1)
    border: str = "zeros"
    shape: str = "square"

    def __post_init__(self) -> None:
        """Checks the attributes."""
        for name in ("size", "strides", "dilation_rate"):
            pair = _checks.pair(getattr(self, name), name)
            object.__setattr__(self, name, pair)
        if any(n % 2 == 0 for n in self.size):
            raise ValueError(
                "A window needs odd sizes, to have a centre. "
                f"Received: size={self.size}"
            )
        _checks.choice(self.border, "border", BORDERS)
        _checks.choice(self.shape, "shape", WINDOW_SHAPES)
        unequal = len({*self.size}) > 1 or len({*self.dilation_rate}) > 1
        if self.shape == "disc" and unequal:
            raise ValueError(
                "A disc has as many rows as columns, and one dilation rate. "
                f"Received: shape='disc', size={self.size}, "
                f"dilation_rate={self.dilation_rate}"
            )

    @functools.cached_property
    def offsets(self) -> np.ndarray:
        """`(neighbours, 2)`: rows and columns from the query, row by row."""
        places = np.array(list(itertools.product(*map(range, self.size))))
        return (places - np.array(self.size) // 2) * self.dilation_rate

    @functools.cached_property
    def log_weights(self) -> np.ndarray | None:
        """`(neighbours,)`, added to the scores of a disc; None for a square."""
        if self.shape == "square":
            return None
        return disc_log_weights(self.size[0]).ravel()

    def output_size(self, size: Shape) -> tuple[Any, Any]:
        """Rows and columns of queries on an image of this size."""
        height, width = (
            None if n is None else math.ceil(n / stride)
            for n, stride in zip(size, self.strides, strict=True)
        )
        return height, width

    @functools.cached_property
    def neighbours(self) -> tuple[Neighbour, ...]:
        """Where the neighbours of the first query lie in `frames`."""
        places = self.offsets - self.offsets[0]
        steps, phases = np.divmod(places, self.strides)
        frames = phases @ (self.strides[1], 1)
        return tuple(
            Neighbour(int(frame), int(row), int(column))
            for frame, (row, column) in zip(frames, steps, strict=True)
        )

    def frames(
        self, x: Float[Tensor, "batch height width order channels"]
    ) -> Float[Tensor, "frames batch rows columns order channels"]:
        """The image with its surroundings, one frame for each phase.

        Frame `(i, j)` holds the pixels that lie `(i, j)` from a multiple of
        the strides, counted from the first neighbour of the first query.
        """
        down, along = self.strides
        for axis in (0, 1):
            x = self._with_surroundings(x, axis)
        if self.strides == (1, 1):
            return x[None]
        batch, height, width, order, channels = ops.shape(x)
        shape = (batch, height // down, down, width // along, along)
        x = ops.reshape(x, (*shape, order, channels))
        x = ops.transpose(x, (2, 4, 0, 1, 3, 5, 6))
        return ops.reshape(x, (down * along, *ops.shape(x)[2:]))

    def _with_surroundings(
        self, x: Float[Tensor, "batch height width order channels"], axis: int
    ) -> Float[Tensor, "batch new_height new_width order channels"]:
        """The image with what windows see beyond it, along one axis.

        Args:
            x: the image.
            axis: 0 for rows above and below, 1 for columns on both sides.

        Returns:
            The image, with a whole number of strides along the axis.
        """
        stride, size = self.strides[axis], ops.shape(x)[axis + 1]
        before = after = self._margin[axis]
        if stride > 1:
            # The last pixels may have no query that sees them.
            steps = -(-size // stride) + 2 * before // stride
            after = steps * stride - size - before
        if self.border == "reflect":
            return _mirrored(x, axis + 1, before, after)
        pads = [(0, 0)] * 5
        # Enough for any size, since some are known only at run time.
        pads[axis + 1] = (before, before + stride - 1)
        x = ops.pad(x, pads)
        if stride == 1:
            return x
        keep = slice(None, before + size + after)
        return x[:, keep] if axis == 0 else x[:, :, keep]

    @property
    def _margin(self) -> tuple[int, int]:
        """Rows and columns from a query to its first neighbour."""
        rows, columns = (
            rate * (n // 2)
            for rate, n in zip(self.dilation_rate, self.size, strict=True)
        )
        return rows, columns

    def image_of(
        self,
        frames: Float[Tensor, "frames batch rows columns order channels"],
        size: tuple[Any, Any],
    ) -> Float[Tensor, "batch height width order channels"]:
        """The transpose of `frames`, which takes gradients back to images.

        Args:
            frames: a gradient with respect to the frames.
            size: height and width of the image.
        """
        x = frames[0]
        if self.strides != (1, 1):
            down, along = self.strides
            batch, height, width, order, channels = ops.shape(x)
            shape = (down, along, batch, height, width, order, channels)
            x = ops.transpose(ops.reshape(frames, shape), (2, 3, 0, 4, 1, 5, 6))
            x = ops.reshape(
                x, (batch, height * down, width * along, order, channels)
            )
        for axis in (1, 0):
            x = self._without_surroundings(x, axis, size[axis])
        return x

    def _without_surroundings(
        self,
        x: Float[Tensor, "batch height width order channels"],
        axis: int,
        size: Any,
    ) -> Float[Tensor, "batch new_height new_width order channels"]:
        """The transpose of `_with_surroundings`.

        Args:
            x: a gradient of the image with its surroundings.
            axis: 0 for rows, 1 for columns.
            size: rows (or columns) of the image.
        """
        stride, before = self.strides[axis], self._margin[axis]
        if self.border == "reflect":
            after = ops.shape(x)[axis + 1] - size - before
            image = list(ops.shape(x))
            image[axis + 1] = size

            def mirrored(image: Tensor) -> Tensor:
                return _mirrored(image, axis + 1, before, after)

            zeros = ops.zeros(image, x.dtype)
            return backend.vjp(mirrored, (zeros,), x)[1][0]
        if stride > 1:
            # Adds the last pixels, which no query sees.
            pads = [(0, 0)] * 5
            pads[axis + 1] = (0, stride - 1)
            x = ops.pad(x, pads)
        keep = slice(before, before + size)
        return x[:, keep] if axis == 0 else x[:, :, keep]

    def inside(self, size: tuple[Any, Any]) -> Tensor:
        """`(neighbours, rows, columns)`: whether a neighbour is in the image.

        Args:
            size: the size of the image.
        """
        axes = []
        for n, stride, offset in zip(
            size, self.strides, self.offsets.T, strict=True
        ):
            place = ops.arange(0, n, stride, dtype="int32")
            place = place + backend.constant(offset[:, None], place, "int32")
            axes.append(ops.logical_and(place >= 0, place < n))
        rows, columns = axes
        return ops.logical_and(rows[:, :, None], columns[:, None])


def _mirrored(
    x: Float[Tensor, "batch rows columns order channels"],
    axis: int,
    before: int,
    after: Any,
) -> Float[Tensor, "batch new_rows new_columns order channels"]:
    """The image and, before and after it, its mirror image.

    If `after` is negative, the last pixels are left out.
    """
    size = ops.shape(x)[axis]
    if not isinstance(size, int) or max(before, after) >= size:
        index = reflected(ops.arange(-before, size + after), size)
        return ops.take(x, index, axis=axis)

    def part(start: int, stop: int) -> Tensor:
        return x[(slice(None),) * axis + (slice(start, stop),)]

    # The gradient of slices is a sum. A gather's is a loop over all values.
    parts = [part(0, size + min(after, 0))]
    if before:
        parts.insert(0, ops.flip(part(1, 1 + before), axis))
    if after > 0:
        parts.append(ops.flip(part(size - 1 - after, size - 1), axis))
    return ops.concatenate(parts, axis) if len(parts) > 1 else parts[0]


def reflected(
    index: Shaped[Tensor, "*places"], size: int | Tensor
) -> Shaped[Tensor, "*places"]:
    """The rows or columns that reflection shows at these indices."""
    period = size - 1
    index = backend.remainder(index, larger(2 * period, 1))
    return ops.minimum(index, 2 * period - index)
