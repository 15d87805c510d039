"""Self-attention on a group, for the pairs of query and key elements of a tile.

Scores of group self-attention have two parts, for output elements `v`, query
elements `g`, key elements `m` and neighbours `o`:

    S(v, g, m, o) = s(g, m, o) + p(v, g, o)

content and group first, position second. So their softmax over `m` and `o`
is a product of two, and neither holds all three elements:

    softmax(S) = softmax_o(p + l)(v, g, o) softmax_m(s)(g, m, o)
    l(g, o) = log sum_m exp s(g, m, o)

This is exact, and safe: both factors are softmaxes of scores. What is weighted
needs the sum over `g` alone,

    W(m, v, o) = sum_g softmax_m(s)(g, m, o) softmax_o(p + l)(v, g, o)
    y(v, i) = sum_(m, o) W(m, v, o, i) x(m, i + o)

A tile is some heads of some images. Tensors of a tile, with pixels in a
form that `ops.pairs.neighbours` knows:

    query    (channels, query elements, heads, pixels), scaled
    keys     (channels, key elements, heads, key pixels); values likewise
    scores   (neighbours, key elements, query or output elements, heads, pixels)
"""

import functools
import operator
from typing import Any
from typing import NamedTuple

from keras import ops

from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Tensor


class Positions(NamedTuple):
    """What scores know of positions and group elements.

    Attributes:
        encoding: of the offsets, in the form that the windows take; meets the
            first channels of the queries.
        embedding: `(query elements, key elements, channels)` of the relative
            elements, meets the other channels; None for none.
    """

    encoding: Tensor
    embedding: Tensor | None = None

    @property
    def given(self) -> list[Tensor]:
        """Those that are not None."""
        return [x for x in self if x is not None]


class Factors(NamedTuple):
    """The two factors of the attention, and what dropout makes of one.

    Attributes:
        of_elements: softmax over the key elements.
        of_neighbours: softmax over the neighbours.
        kept: `of_elements` after dropout.
        logs: logarithms of the sums that `of_neighbours` was divided by,
            `(1, output elements, query elements, heads, pixels)`.
    """

    of_elements: Tensor
    of_neighbours: Tensor
    kept: Tensor
    logs: Tensor


def attend(
    windows: Any, query: Tensor, keys: Tensor, values: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    """The output of a tile, and what makes its gradient cheaper.

    Args:
        windows: where the neighbours lie, see `ops.pairs.neighbours`.
        query, keys, values: of the tile.
        *rest: positions, and what draws the factors of dropout for scores,
            or None.

    Returns:
        The output `(channels, output elements, heads, pixels)`, and the `logs`
        of its factors.
    """
    found = factors(windows, query, keys, *rest)
    return windows.sums(pair_weights(found), values), found.logs


def factors(
    windows: Any,
    query: Tensor,
    keys: Tensor,
    positions: Positions,
    dropout: Any,
    logs: Tensor | None = None,
) -> Factors:
    """The two softmaxes whose product is the attention.

    With the `logs` found before, the neighbours take one pass instead of four.
    """
    first = windows.position_channels(positions.encoding)
    of_group = None
    if positions.embedding is not None:
        of_group = _group_scores(query[first:], positions.embedding)
    scores = windows.scores(query, keys, of_group)
    top = _maximum(scores, axis=1)
    scores = _exp(scores, top[:, None])
    total = added(scores, axis=1)
    of_elements = backend.update("divide", scores, total[:, None])
    logits = windows.positions(query[:first], positions.encoding)
    of_all = (top + ops.log(total))[:, None]
    logits = windows.masked(backend.update("add", logits, of_all))
    if logs is None:
        of_neighbours, logs = _softmax(logits)
    else:
        of_neighbours = _exp(logits, logs)
    kept = of_elements
    if dropout is not None:
        kept = backend.update("multiply", dropout(of_elements), of_elements)
    return Factors(of_elements, of_neighbours, kept, logs)


def pair_weights(found: Factors) -> Tensor:
    """Weights of the values, added up over the query elements."""
    elements, neighbours = found.kept, found.of_neighbours
    return _products(
        [elements[:, :, g][:, :, None] for g in range(elements.shape[2])],
        [neighbours[:, :, g][:, None] for g in range(elements.shape[2])],
    )


def gradients(
    windows: Any,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Positions,
    dropout: Any,
    logs: Tensor,
    upstream: Tensor,
) -> tuple[tuple[Tensor, Tensor, Tensor], Positions]:
    """Gradients of `sum(output * upstream)`; all but `logs` is computed anew.

    Returns:
        Those of query, keys and values, and those of the positions.
    """
    first = windows.position_channels(positions.encoding)
    found = factors(windows, query, keys, positions, dropout, logs)
    d_values = windows.spread(pair_weights(found), upstream, values)
    d_weights = windows.scores(upstream, values)
    d_scores, d_logits = _score_gradients(found, d_weights)

    d_query = windows.sums(d_scores, keys)
    d_keys = windows.spread(d_scores, query, keys)
    d_first, d_encoding = windows.position_gradients(
        query[:first], positions.encoding, d_logits
    )
    d_embedding = None
    if positions.embedding is not None:
        d_rest, d_embedding = _group_gradients(
            query[first:], positions.embedding, ops.sum(d_scores, axis=0)
        )
        d_first = ops.concatenate([d_first, d_rest])
    elif first < query.shape[0]:
        nothing = ops.zeros_like(query[first:])
        d_first = ops.concatenate([d_first, nothing])
    return (
        (d_query + d_first, d_keys, d_values),
        Positions(d_encoding, d_embedding),
    )


def _score_gradients(
    found: Factors, d_weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the content scores and of the position scores.

    With the attention `a(v, g, m, o)` after dropout and the gradient `d(m, v,
    o)` of the weights, `mean(v, g) = sum_(m, o) a d` is the same for both: the
    gradient of `S` is `a d - softmax(S) mean`. Position scores have its sum
    over `m`, content scores over `v`.
    """
    of_elements, of_neighbours, kept, _ = found
    d_neighbours = _products(
        [d_weights[:, m][:, :, None] for m in range(kept.shape[1])],
        [kept[:, m][:, None] for m in range(kept.shape[1])],
    )
    mean = _total(of_neighbours * d_neighbours)
    d_neighbours = backend.update("subtract", d_neighbours, mean)
    d_logits = backend.update("multiply", d_neighbours, of_neighbours)
    outputs = range(of_neighbours.shape[1])
    d_kept = _products(
        [d_weights[:, :, v][:, :, None] for v in outputs],
        [of_neighbours[:, v][:, None] for v in outputs],
    )
    means = added(of_neighbours * mean, axis=1)
    d_scores = backend.update("multiply", d_kept, kept)
    d_scores = backend.add_product(d_scores, of_elements, -means[:, None])
    return d_scores, d_logits


def _products(xs: list[Tensor], ys: list[Tensor]) -> Tensor:
    """Sum of the products of short lists of tensors, written out."""
    total = xs[0] * ys[0]
    for x, y in zip(xs[1:], ys[1:], strict=True):
        total = backend.add_product(total, x, y)
    return total


def _group_scores(query: Tensor, embedding: Tensor) -> Tensor:
    """Of every key element for every query element, at every pixel."""
    return added(query[:, None] * _by_channel(embedding), axis=0)


def _group_gradients(
    query: Tensor, embedding: Tensor, d: Tensor
) -> tuple[Tensor, Tensor]:
    d_query = added(d * _by_channel(embedding), axis=1)
    d_embedding = ops.sum(d * query[:, None], axis=(-1, -2))
    return d_query, ops.transpose(d_embedding, (2, 1, 0))


def _by_channel(embedding: Tensor) -> Tensor:
    """`(channels, key elements, query elements, 1, 1)`."""
    return ops.transpose(embedding, (2, 1, 0))[..., None, None]


def added(x: Tensor, axis: int) -> Tensor:
    """The sum along a short axis, written out."""
    return functools.reduce(operator.add, _slices(x, axis))


def _maximum(x: Tensor, axis: int) -> Tensor:
    """The maximum along a short axis, written out."""
    return functools.reduce(backend.maximum, _slices(x, axis))


def _slices(x: Tensor, axis: int) -> list[Tensor]:
    """Along a short axis; one by itself is no part of `x`, which may change."""
    before = (slice(None),) * axis
    slices = [x[(*before, index)] for index in range(x.shape[axis])]
    return slices if len(slices) > 1 else [ops.copy(slices[0])]


def _softmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """Over the neighbours, and the logarithm of the sum of exponentials."""
    top = _top(x)
    x = _exp(x, top)
    total = _total(x)
    return backend.update("divide", x, total), top + ops.log(total)


def _exp(x: Tensor, from_zero: Tensor) -> Tensor:
    """`exp(x - from_zero)`, where `x` is ours alone."""
    return backend.update("exp", backend.update("subtract", x, from_zero))


def _total(x: Tensor) -> Tensor:
    """The sum over the neighbours, with an axis of size one for them."""
    return ops.sum(x, axis=0, keepdims=True)


def _top(x: Tensor) -> Tensor:
    """The maximum over the neighbours, with an axis of size one for them."""
    return ops.max(x, axis=0, keepdims=True)
