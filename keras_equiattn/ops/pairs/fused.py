"""Attention of a block.

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

One line of neighbours comes after the other, see `ops.pairs.lines`; what is
computed for one is elementwise, or the sum of products along short axes, so a
compiler makes few loops of it. The first pass over the lines finds the highest
score and the sum that the softmax is divided by, the second what is weighted.
Gradients take two passes as well. Of large scores only differences are taken,
so attention that falls on a single neighbour is one, whatever rounding made of
its score. With the attention `a(v, g, m, o)` after dropout and the gradient
`d(m, v, o)` of the weights, `mean(v, g) = sum_(m, o) a d` is the same for both
parts: the gradient of `S` is `a d - softmax(S) mean`.
"""

from collections.abc import Callable
from typing import Any
from typing import NamedTuple

from keras import ops

from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.numerics import MASKED
from keras_equiattn.ops.pairs.lines import ImageLines
from keras_equiattn.ops.pairs.lines import WindowLines

Lines = WindowLines | ImageLines
Dropout = Callable[[Any, Any], Tensor] | None


class Positions(NamedTuple):
    """What scores know of positions and group elements.

    Attributes:
        encoding: of the offsets, in the form that the lines take; meets the
            first channels of the queries.
        embedding: `(query elements, key elements, channels)` of the relative
            elements, meets the other channels; None for none.
    """

    encoding: Tensor
    embedding: Tensor | None = None


class _Block(NamedTuple):
    """Queries, keys and what scores know of positions and group elements.

    Attributes:
        embedded: `(channels, key_elements, query_elements, 1, 1, 1)`, the
            embedding as if it were added to the keys; None for none.
        dropout: draws factors for the scores of a line, from their shape and
            the number of the line; None for none.
    """

    lines: Lines
    query: Tensor
    keys: Tensor
    positions: Positions
    embedded: Tensor | None
    dropout: Dropout

    @property
    def encoded(self) -> int:
        """Channels of the queries that meet the encoding."""
        return self.lines.encoded(self.positions.encoding)


class _Line(NamedTuple):
    """Exponentials for a line of neighbours, a tensor for each.

    Attributes:
        of_elements: `(key elements, query elements, ...)`, of the scores of
            content and group above `top`.
        kept: these after dropout.
        top: `(query elements, ...)`, the highest score of a key element.
    """

    of_elements: list[Tensor]
    kept: list[Tensor]
    top: list[Tensor]


def attend(
    lines: Lines,
    query: Float[Tensor, "channels query_elements rows columns images"],
    keys: Float[Tensor, "channels key_elements key_rows key_columns images"],
    values: Float[Tensor, "channels key_elements key_rows key_columns images"],
    positions: Positions,
    dropout: Dropout,
) -> tuple[
    Float[Tensor, "channels order rows columns images"],
    Float[Tensor, "order query_elements rows columns images"],
]:
    """The output of a block, and the logarithm of what its softmax is divided
    by, which `gradients` takes.

    Args:
        lines: what the pixels of the block see.
        query: of the block, in float32 at least.
        keys, values: of all rows, with their surroundings.
        positions: encoding and embedding, the encoding as `lines` takes it.
        dropout: see `_Block`.
    """
    block = _block(lines, query, keys, positions, dropout)
    order = lines.order(positions.encoding)
    shape = (order, *ops.shape(query)[1:])

    def add_exponentials(carry: Any, number: Any) -> Any:
        highest, total = carry
        line = _line(block, number)
        scores = [
            p + top
            for p, top in zip(
                _position_scores(block, number), line.top, strict=True
            )
        ]
        higher = backend.maximum(highest, lines.highest(scores))
        terms = [
            _added(e) * ops.exp(x - higher)
            for e, x in zip(line.of_elements, scores, strict=True)
        ]
        total = total * ops.exp(highest - higher) + lines.total(terms)
        return (higher, total), ()

    lowest = ops.full(shape, MASKED, query.dtype)
    (highest, total), _ = backend.scan(
        add_exponentials,
        (lowest, ops.zeros(shape, query.dtype)),
        backend.steps(lines.count),
    )
    inverse = 1 / total

    def add_values(y: Tensor, number: Any) -> Any:
        line = _line(block, number)
        of_neighbours = [
            x * inverse
            for x in _of_neighbours(block, number, line.top, highest)
        ]
        weights = _weights(line.kept, of_neighbours)
        return y + lines.sums(weights, lines.seen(values, number)), ()

    nothing = ops.zeros((ops.shape(values)[0], order, *shape[2:]), query.dtype)
    y = backend.scan(add_values, nothing, backend.steps(lines.count))[0]
    return y, highest + ops.log(total)


def gradients(
    lines: Lines,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Positions,
    dropout: Dropout,
    logs: Tensor,
    upstream: Tensor,
    totals: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, tuple[Tensor, ...], Tensor | None]:
    """Gradients of a block.

    Args:
        totals: of keys, values and encoding, to be added to.

    Returns:
        That of the query, the totals, and that of the embedding.
    """
    block = _block(lines, query, keys, positions, dropout)
    first = block.encoded

    def add_means(mean: Tensor, number: Any) -> Any:
        line = _line(block, number)
        of_neighbours = _of_neighbours(block, number, line.top, logs)
        d_weights = _weight_gradients(block, number, values, upstream)
        means = lines.products(
            [f[None] for f in of_neighbours],
            [d[:, :, None] for d in d_weights],
            [e[:, None] for e in line.kept],
        )
        return mean + means, ()

    mean = backend.scan(
        add_means,
        ops.zeros_like(logs),
        backend.steps(lines.count),
    )[0]

    def add_gradients(totals: Any, number: Any) -> Any:
        d_query, d_first, d_keys, d_values, d_encoding, d_group = totals
        line = _line(block, number)
        of_neighbours = _of_neighbours(block, number, line.top, logs)
        weights = _weights(line.kept, of_neighbours)
        d_weights = _weight_gradients(block, number, values, upstream)
        d_values = lines.spread(d_values, number, weights, upstream)
        # (key elements, order, query elements, ...)
        d_pairs = [
            f[None] * (k[:, None] * d[:, :, None] - e[:, None] * mean[None])
            for e, f, d, k in zip(
                *(line.of_elements, of_neighbours, d_weights, line.kept),
                strict=True,
            )
        ]
        d_first, d_encoding = lines.position_gradients(
            (d_first, d_encoding),
            query[:first],
            positions.encoding,
            number,
            backend.sums_together(d_pairs, 0),
        )
        d_scores = backend.sums_together(d_pairs, 1)
        d_query = d_query + lines.sums(d_scores, lines.seen(keys, number))
        d_keys = lines.spread(d_keys, number, d_scores, query)
        if positions.embedding is not None:
            d_group = d_group + lines.total(d_scores)
        return (d_query, d_first, d_keys, d_values, d_encoding, d_group), ()

    d_group: Any = ()
    if positions.embedding is not None:
        shape = (ops.shape(keys)[1], *ops.shape(query)[1:])
        d_group = ops.zeros(shape, query.dtype)
    start = (
        ops.zeros_like(query),
        ops.zeros_like(query[:first]),
        *totals,
        d_group,
    )
    (d_query, d_first, *totals, d_group), _ = backend.scan(
        add_gradients, start, backend.steps(lines.count)
    )
    d_embedding = None
    rest = query[first:]
    if positions.embedding is not None:
        embedding = ops.transpose(positions.embedding, (2, 1, 0))
        d_rest = ops.sum(
            d_group[None] * embedding[..., None, None, None], axis=1
        )
        d_embedding = ops.einsum("mgbyx,cgbyx->gmc", d_group, rest)
        d_first = ops.concatenate([d_first, d_rest])
    elif first < query.shape[0]:
        d_first = ops.concatenate([d_first, ops.zeros_like(rest)])
    return d_query + d_first, tuple(totals), d_embedding


def _block(
    lines: Lines,
    query: Tensor,
    keys: Tensor,
    positions: Positions,
    dropout: Dropout,
) -> _Block:
    embedded = None
    if positions.embedding is not None:
        # (channels, key elements, query elements, 1, 1, 1), as if keys were
        # others for each query element.
        embedded = ops.transpose(positions.embedding, (2, 1, 0))
        before = query.shape[0] - embedded.shape[0]
        embedded = ops.pad(embedded, [(before, 0), (0, 0), (0, 0)])
        embedded = embedded[..., None, None, None]
    return _Block(lines, query, keys, positions, embedded, dropout)


def _line(block: _Block, number: Any) -> _Line:
    seen = (x[:, :, None] for x in block.lines.seen(block.keys, number))
    if block.embedded is not None:
        embedded = block.embedded
        seen = (x + embedded for x in seen)
    query = block.query[:, None]
    scores = backend.sums_together((backend.product(query, x) for x in seen), 0)
    top = [_highest(x) for x in scores]
    found = [ops.exp(x - y) for x, y in zip(scores, top, strict=True)]
    kept = found
    if block.dropout is not None:
        size = found[0].shape[0]
        shape = (size * len(found), *ops.shape(found[0])[1:])
        factors = block.dropout(shape, number)
        kept = [
            e * factors[n * size : (n + 1) * size] for n, e in enumerate(found)
        ]
    return _Line(found, kept, top)


def _position_scores(block: _Block, number: Any) -> list[Tensor]:
    """`(order, query elements, ...)`."""
    return block.lines.position_scores(
        block.query[: block.encoded], block.positions.encoding, number
    )


def _of_neighbours(
    block: _Block, number: Any, top: list[Tensor], logs: Tensor
) -> list[Tensor]:
    """Exponentials of the highest scores of key elements, above `logs`."""
    return [
        ops.exp((p + x) - logs)
        for p, x in zip(_position_scores(block, number), top, strict=True)
    ]


def _weights(kept: list[Tensor], of_neighbours: list[Tensor]) -> list[Tensor]:
    """`(key elements, order, ...)`: of the values."""
    terms = (
        e[:, None] * f[None] for e, f in zip(kept, of_neighbours, strict=True)
    )
    return backend.sums_together(terms, 2)


def _weight_gradients(
    block: _Block, number: Any, values: Tensor, upstream: Tensor
) -> list[Tensor]:
    """`(key elements, order, ...)`."""
    terms = (
        backend.product(upstream[:, None], x[:, :, None])
        for x in block.lines.seen(values, number)
    )
    return backend.sums_together(terms, 0)


def _added(x: Tensor) -> Tensor:
    """The sum along the first axis, written out."""
    return sum((x[n] for n in range(1, x.shape[0])), x[0])


def _highest(x: Tensor) -> Tensor:
    """The maximum along the first axis, written out."""
    top = x[0]
    for n in range(1, x.shape[0]):
        top = backend.maximum(top, x[n])
    return top
