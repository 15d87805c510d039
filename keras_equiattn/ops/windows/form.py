"""The one sum behind everything that looks at a window of neighbours.

    F(a, x, k, w) = sum a[n, p, i] x[i, p, c] k[i + d_n, r, c] w[n, p, r, c]

over pixels `i`, neighbours `n` at offsets `d_n`, query elements `p`, key
elements `r` and the channels `c` of a head, for each head by itself. Its
derivative with respect to `a` are the scores of queries `x` against keys `k`
transformed by `w`; with respect to `x` it is the sum of values `k` transformed
by `w` and weighted by `a`. The other two are gradients of these, and all
gradients of any of the four are among the four again. A bias `b[n, p, c]` may
stand beside the product `k w`, as in an affine map.

The modules `planes`, `views`, `products` and `tiles` compute it. Each has
`scores`, `weighted_sums`, and the gradients of both, `score_gradients` and
`sum_gradients`, and none builds the neighbours of all pixels. Arguments may be
in half precision: products are made of them as they are, and sums are in
float32. Tensors in these modules:

    a     (neighbours, batch, query elements, heads, height, width)
    x     (batch, height, width, query elements, channels)
    k     (frames, batch, rows, columns, key elements, channels)
    w     (neighbours, query elements, key elements, channels), or None for
          one, with one query element and one key element
    bias  (neighbours, query elements, channels), or None

The keys are padded, and cut into `strides[0] * strides[1]` frames in which
the neighbours of adjacent queries are adjacent.
"""

from typing import NamedTuple


class Neighbour(NamedTuple):
    """Where a neighbour of the first pixel lies in the keys."""

    frame: int
    row: int
    column: int


class Form(NamedTuple):
    """What the sum runs over.

    Attributes:
        neighbours: of the first pixel.
        heads: blocks of channels.
        frames: number of frames of the keys.
    """

    neighbours: tuple[Neighbour, ...]
    heads: int
    frames: int = 1

    @property
    def reach(self) -> tuple[int, int]:
        """Rows and columns that the keys have more than the queries."""
        return (
            max(place.row for place in self.neighbours),
            max(place.column for place in self.neighbours),
        )
