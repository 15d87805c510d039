"""The one sum behind everything that looks at a window of neighbours.

    F(weights, queries, keys, scale) =
        sum weights[n, p, i] queries[i, p, c] keys[i + d_n, r, c]
            scale[n, p, r, c]

over pixels `i`, neighbours `n` at offsets `d_n`, query elements `p`, key
elements `r` and the channels `c` of a head, for each head by itself. Its
derivative with respect to the weights is the scores of queries against keys
transformed by the scale. Its derivative with respect to the queries is the
weighted sum of values, where the values stand in the place of the keys. The
other two derivatives are gradients of these two, and all gradients of any of
the four are among the four again. A bias `b[n, p, c]` may stand beside the
product of keys and scale, as in an affine map.

The modules `planes`, `views`, `products` and `tiles` are ways to compute it.
Each has one function, `derivatives`, and none builds the neighbours of all
pixels:

    derivatives(form, wanted, weights, queries, keys, scale, bias)

`wanted` says with respect to what: `("weights",)` are scores and `("queries",)`
weighted sums. With "keys" as a second name the derivatives with respect to the
keys and, where they are given, scale and bias are found, too: `("queries",
"keys")` are all gradients of scores, and `("weights", "keys")` those of sums.
Weights or queries may be None where they are not needed. Arguments may be in
half precision. `planes` and `views` widen them before they multiply; `products`
and `tiles` multiply them as they are, and where they then add up the products
of several neighbours, tiles or images, they do so in float32.

This module is the vocabulary of the others:

    weights  `NeighbourWeights`  (neighbours, batch, query elements, heads,
                                 height, width)
    queries  `Queries`  (batch, height, width, query elements, channels)
    keys     `Keys`     (frames, batch, rows, columns, key elements, channels)
    scale    `Scales`   (neighbours, query elements, key elements, channels);
                        None for ones, with one query and one key element
    bias     `Biases`   (neighbours, query elements, channels), or None

`QueryPlanes` and `KeyPlanes` are queries and keys with the channels of each
head before the rows and columns. A `Source` holds the image that keys or values
come from, and the scale and the bias, each of which may be None.

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
Scales: TypeAlias = Float[Tensor, "neighbours elements key_elements channels"]
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
Source: TypeAlias = tuple[Image, Scales | None, Biases | None]
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
    scores: Callable[[Form, Queries, Keys, Scales, Biases], NeighbourWeights],
    sums: Callable[[Form, NeighbourWeights, Keys, Scales, Biases], Queries],
    spread: Callable[[Form, NeighbourWeights, Queries, Scales], Keys],
    affine_gradients: Callable[..., list[Tensor]],
) -> Derivatives:
    """The function `derivatives` of a module that computes each one alone.

    Args:
        scores: finds the derivative with respect to the weights from the other
            arguments of the form.
        sums: finds that with respect to the queries.
        spread: finds that with respect to the keys, which has no bias.
        affine_gradients: finds those with respect to scale and bias, where
            they are given, from all arguments.
    """

    def derivatives(
        form: Form,
        wanted: tuple[str, ...],
        weights: NeighbourWeights | None,
        queries: Queries | None,
        keys: Keys,
        scale: Scales | None,
        bias: Biases | None,
    ) -> tuple[Tensor, ...]:
        """Derivatives of the form, those with respect to what is wanted."""
        found = []
        if "weights" in wanted:
            found.append(scores(form, queries, keys, scale, bias))
        if "queries" in wanted:
            found.append(sums(form, weights, keys, scale, bias))
        if "keys" in wanted:
            found.append(spread(form, weights, queries, scale))
            found += affine_gradients(form, weights, queries, keys, scale, bias)
        return tuple(found)

    return derivatives
