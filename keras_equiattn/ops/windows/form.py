"""The one sum behind everything that looks at a window of neighbours.

    F(a, x, k, w) = sum a[n, p, i] x[i, p, c] k[i + d_n, r, c] w[n, p, r, c]

over pixels `i`, neighbours `n` at offsets `d_n`, query elements `p`, key
elements `r` and the channels `c` of a head, for each head by itself. Its
derivative with respect to `a` are the scores of queries `x` against keys `k`
transformed by `w`; with respect to `x` it is the sum of values `k` transformed
by `w` and weighted by `a`. The other two are gradients of these, and all
gradients of any of the four are among the four again. A bias `b[n, p, c]` may
stand beside the product `k w`, as in an affine map.

The modules `planes`, `views`, `products` and `tiles` are ways to compute it.
Each has one function, `derivatives`, and none builds the neighbours of all
pixels:

    derivatives(form, wanted, a, x, k, w, bias)

`wanted` is a string of names. It starts with "a" or "x", for the derivative
with respect to `a` or `x`; a "k" after it asks for those with respect to `k`
and, where they are given, `w` and `bias`, too. Thus "a" are scores and "x"
weighted sums; "xk" are all gradients of scores, and "ak" those of sums. `a` or
`x` may be None where it is not needed. Arguments may be in half precision.
`planes` and `views` widen them before they multiply; `products` and `tiles`
multiply them as they are, and where they then add up the products of several
neighbours, tiles or images, they do so in float32.

This module is the vocabulary of the others:

    a     `NeighbourWeights`  (neighbours, batch, query elements, heads, height,
                              width)
    x     `Queries`  (batch, height, width, query elements, channels)
    k     `Keys`     (frames, batch, rows, columns, key elements, channels)
    w     `Maps`     (neighbours, query elements, key elements, channels); None
                     for one, with one query element and one key element
    bias  `Biases`   (neighbours, query elements, channels), or None

`QueryPlanes` and `KeyPlanes` are queries and keys with the channels of each
head before the rows and columns. A `Source` is what is seen: the image that
keys or values are, and `w` and `bias`, or None.

The keys are padded, and cut into `strides[0] * strides[1]` frames in which
the neighbours of adjacent queries are adjacent, see `geometry.Window.frames`.
"""

from collections.abc import Callable
from typing import NamedTuple
from typing import TypeAlias

import numpy as np
from keras import ops

from keras_equiattn.ops import backend
from keras_equiattn.ops import geometry
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor

NeighbourWeights: TypeAlias = Float[
    Tensor, "neighbours batch elements heads height width"
]
Queries: TypeAlias = Float[Tensor, "batch height width elements channels"]
Keys: TypeAlias = Float[
    Tensor, "frames batch rows columns key_elements channels"
]
Maps: TypeAlias = Float[Tensor, "neighbours elements key_elements channels"]
Biases: TypeAlias = Float[Tensor, "neighbours elements channels"]
QueryPlanes: TypeAlias = Float[
    Tensor, "batch elements heads head_channels height width"
]
KeyPlanes: TypeAlias = Float[
    Tensor, "frames batch key_elements heads head_channels rows columns"
]
Image: TypeAlias = Float[
    Tensor, "batch image_height image_width order channels"
]
Source: TypeAlias = tuple[Image, Maps | None, Biases | None]
# The type of the function `derivatives` of each of these modules.
Derivatives: TypeAlias = Callable[..., tuple[Tensor, ...]]


class Grid(NamedTuple):
    """The neighbours in one frame, which lie on a grid.

    Attributes:
        frame: the frame.
        numbers: the numbers of the neighbours, row by row.
        start: row and column of the first.
        steps: from one row to the next, and from one column to the next.
        size: rows and columns.
    """

    frame: int
    numbers: tuple[int, ...]
    start: tuple[int, int]
    steps: tuple[int, int]
    size: tuple[int, int]

    def part(
        self, x: Float[Tensor, "neighbours ..."]
    ) -> Float[Tensor, "some ..."]:
        """Selects the entries of the neighbours that lie on this grid."""
        if len(self.numbers) == x.shape[0]:
            return x
        return ops.take(x, backend.constant(np.array(self.numbers), x), axis=0)


class Form(NamedTuple):
    """The neighbours and heads that the sum runs over.

    Attributes:
        neighbours: the neighbours of the first pixel.
        heads: the number of heads, contiguous blocks of channels.
        frames: number of frames of the keys.
    """

    neighbours: tuple[geometry.Neighbour, ...]
    heads: int
    frames: int = 1

    @property
    def reach(self) -> tuple[int, int]:
        """Rows and columns that the keys have more than the queries."""
        return geometry.reach(self.neighbours)

    def grids(self) -> list[Grid]:
        """The neighbours, frame by frame; frames without any are left out."""
        found = []
        for frame in sorted({place.frame for place in self.neighbours}):
            numbers, places = zip(
                *(
                    (n, (place.row, place.column))
                    for n, place in enumerate(self.neighbours)
                    if place.frame == frame
                ),
                strict=True,
            )
            rows, columns = (
                sorted(set(axis)) for axis in zip(*places, strict=True)
            )
            start, size = (rows[0], columns[0]), (len(rows), len(columns))
            down, along = (
                axis[1] - axis[0] if len(axis) > 1 else 1
                for axis in (rows, columns)
            )
            found.append(Grid(frame, numbers, start, (down, along), size))
        return found

    def in_order(
        self, found: list[Float[Tensor, "..."]]
    ) -> Float[Tensor, "neighbours ..."]:
        """Joins results for each grid, in the order of the neighbours."""
        if len(found) == 1:
            return found[0]
        numbers = [n for grid in self.grids() for n in grid.numbers]
        order = backend.constant(np.argsort(numbers), found[0])
        return ops.take(ops.concatenate(found), order, axis=0)

    def all_frames(
        self, found: list[Float[Tensor, "..."]]
    ) -> Float[Tensor, "frames ..."]:
        """Stacks results for each grid; frames without neighbours are zero."""
        by_frame = {
            grid.frame: x for grid, x in zip(self.grids(), found, strict=True)
        }
        nothing = ops.zeros_like(found[0])
        return ops.stack([by_frame.get(n, nothing) for n in range(self.frames)])

    def split(
        self, x: Float[Tensor, "*outer all"]
    ) -> Float[Tensor, "*outer heads channels"]:
        """The channels of each head apart."""
        channels = x.shape[-1] // self.heads
        return ops.reshape(x, (*x.shape[:-1], self.heads, channels))


def joined(
    x: Float[Tensor, "*outer heads channels"],
) -> Float[Tensor, "*outer all"]:
    """The channels of all heads along one axis."""
    return ops.reshape(x, (*x.shape[:-2], x.shape[-2] * x.shape[-1]))


def derivatives_from(
    scores: Callable[[Form, Queries, Keys, Maps, Biases], NeighbourWeights],
    sums: Callable[[Form, NeighbourWeights, Keys, Maps, Biases], Queries],
    spread: Callable[[Form, NeighbourWeights, Queries, Maps], Keys],
    weight_gradients: Callable[..., list[Tensor]],
) -> Derivatives:
    """The function `derivatives` of a module that finds each by itself.

    Args:
        scores: finds the derivative with respect to `a` from the other
            arguments of the form.
        sums: finds that with respect to `x`.
        spread: finds that with respect to `k`, which has no bias.
        weight_gradients: finds those with respect to `w` and `bias`, of what
            is given, from all arguments.
    """

    def derivatives(
        form: Form,
        wanted: str,
        a: NeighbourWeights | None,
        x: Queries | None,
        k: Keys,
        w: Maps | None,
        bias: Biases | None,
    ) -> tuple[Tensor, ...]:
        """Derivatives of the form, those with respect to what is wanted."""
        found = []
        if "a" in wanted:
            found.append(scores(form, x, k, w, bias))
        if "x" in wanted:
            found.append(sums(form, a, k, w, bias))
        if "k" in wanted:
            found.append(spread(form, a, x, w))
            found += weight_gradients(form, a, x, k, w, bias)
        return tuple(found)

    return derivatives
