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
compiler makes few loops of it. The functions `add_*` compute it from what is
cut for the line, and do not know which line it is: so PyTorch can have each of
them compiled once, and run it for every line. The first pass over the lines
finds the highest score and the sum that the softmax is divided by, the second
what is weighted. The second pass takes the scores that the first one has found,
so a block holds those of all its lines. Gradients take two passes as well. Of
large scores only differences are taken, so attention that falls on a single
neighbour is one, whatever rounding made of its score. With the attention `a(v,
g, m, o)` after dropout and the gradient `d(m, v, o)` of the weights, `mean(v,
g) = sum_(m, o) a d` is the same for both parts: the gradient of `S` is `a d -
softmax(S) mean`.
"""

from collections.abc import Callable
from typing import Any
from typing import NamedTuple

from keras import ops

from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.numerics import dtype_of_sums
from keras_equiattn.ops.numerics import in_full_precision
from keras_equiattn.ops.numerics import MASKED
from keras_equiattn.ops.pairs.lines import ImageLines
from keras_equiattn.ops.pairs.lines import Line
from keras_equiattn.ops.pairs.lines import Place
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


class Block(NamedTuple):
    """Queries, and what their scores know of group elements.

    Attributes:
        query: of the block.
        embedded: `(channels, key_elements, query_elements, 1, 1, 1)`, the
            embedding as if it were added to the keys: a compiler sums both
            together. None for none, and without a compiler.
        group: `(key_elements, query_elements, rows, columns, images)`, scores
            of the embedding. None for none, and where it is `embedded`.
    """

    query: Float[Tensor, "channels query_elements rows columns images"]
    embedded: Tensor | None = None
    group: Tensor | None = None


class _Line(NamedTuple):
    """Exponentials and scores for a line of neighbours, a tensor for each.

    Attributes:
        of_elements: `(key elements, query elements, ...)`, exponentials of the
            scores of content and group above the highest of a key element, in
            the dtype of the keys.
        kept: these after dropout.
        scores: `(order, query elements, ...)`, those highest scores and the
            scores of positions, in single precision at least.
    """

    of_elements: list[Tensor]
    kept: list[Tensor]
    scores: list[Tensor]


class Factors(NamedTuple):
    """What the gradients of a line are made of, a tensor for each of the line.

    Attributes:
        of_elements: as in `_Line`.
        kept: as in `_Line`; empty without dropout, where both are the same.
        of_neighbours: `(order, query elements, ...)`, the softmax of the
            scores.
        d_weights: `(key elements, order, ...)`, gradients of the weights.
    """

    of_elements: list[Tensor]
    kept: list[Tensor]
    of_neighbours: list[Tensor]
    d_weights: list[Tensor]


def attend(
    lines: Lines,
    place: Place,
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
        lines: what the pixels see.
        place: where the block lies.
        query: of the block.
        keys, values: of all rows, with their surroundings.
        positions: encoding and embedding, the encoding as `lines` takes it.
        dropout: draws factors for the scores of a line, from their shape and
            the number of the line; None for none.
    """
    block = _block(query, positions)
    order, dtype = lines.order(positions.encoding), dtype_of_sums(query)
    shape = (order, *ops.shape(query)[1:])
    numbers = backend.steps(lines.count(place))

    def cut(number: Any) -> Line:
        return lines.cut(keys, values, positions.encoding, place, number)

    def with_exponentials(carry: Any, number: Any) -> Any:
        factors = _factors(lines, dropout, query, keys, number)
        return add_exponentials(carry, block, cut(number), factors, lines=lines)

    lowest = ops.full(shape, MASKED, dtype)
    (highest, total), found = backend.scan(
        with_exponentials,
        (lowest, ops.zeros(shape, dtype)),
        numbers,
        like=(lines.listed(keys), lines.listed(lowest)),
    )
    inverse = 1 / total

    def with_values(y: Tensor, piece: Any) -> Any:
        number, found = piece
        given = cut(number).values, found, highest, inverse
        return add_values(y, *given, lines=lines), ()

    nothing = ops.zeros((ops.shape(values)[0], order, *shape[2:]), dtype)
    y = backend.scan(with_values, nothing, (numbers, found))[0]
    return y, highest + ops.log(total)


def gradients(
    lines: Lines,
    place: Place,
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
    block = _block(query, positions)
    first = lines.encoded(positions.encoding)
    numbers = backend.steps(lines.count(place))

    def cut(number: Any) -> Line:
        return lines.cut(keys, values, positions.encoding, place, number)

    def with_means(mean: Tensor, number: Any) -> Any:
        factors = _factors(lines, dropout, query, keys, number)
        given = block, cut(number), factors, logs, upstream
        return add_means(mean, *given, lines=lines)

    # Not `zeros_like`, whose layout would be another than that of a sum.
    nothing = ops.zeros(ops.shape(logs), logs.dtype)
    like = lines.listed(keys)
    kept = [] if dropout is None else like
    mean, found = backend.scan(
        with_means, nothing, numbers, like=Factors(like, kept, like, like)
    )

    def with_gradients(totals: Any, piece: Any) -> Any:
        number, found = piece
        added, at_place = totals
        given = block, cut(number), found, upstream, mean
        added, parts = add_gradients(added, *given, lines=lines)
        starts = lines.starts(place, number)
        at_place = tuple(
            backend.add_at(total, start, part)
            for total, start, part in zip(at_place, starts, parts, strict=True)
        )
        return (added, at_place), ()

    d_group: Any = ()
    if positions.embedding is not None:
        shape = (ops.shape(keys)[1], *ops.shape(query)[1:])
        d_group = ops.zeros(shape, logs.dtype)
    start = (
        ops.zeros(ops.shape(query), logs.dtype),
        ops.zeros(ops.shape(query[:first]), logs.dtype),
        d_group,
    )
    ((d_query, d_first, d_group), totals), _ = backend.scan(
        with_gradients, (start, totals), (numbers, found)
    )
    d_embedding = None
    rest = in_full_precision(query[first:])
    if positions.embedding is not None:
        embedding = ops.transpose(positions.embedding, (2, 1, 0))
        d_rest = ops.sum(
            d_group[None] * embedding[..., None, None, None], axis=1
        )
        d_embedding = ops.einsum("mgbyx,cgbyx->gmc", d_group, rest)
        d_first = ops.concatenate([d_first, d_rest])
    elif first < query.shape[0]:
        d_first = ops.concatenate([d_first, ops.zeros_like(rest)])
    return d_query + d_first, totals, d_embedding


@backend.part()
def add_exponentials(
    carry: tuple[Tensor, Tensor],
    block: Block,
    line: Line,
    factors: Tensor | None,
    *,
    lines: Lines,
) -> tuple[tuple[Tensor, Tensor], tuple[list[Tensor], list[Tensor]]]:
    """Adds a line to the highest score, and to the sum of exponentials.

    Returns:
        Both, and what `add_values` takes: exponentials and scores.
    """
    highest, total = carry
    found = _line(lines, block, line, factors)
    higher = backend.maximum(highest, lines.highest(found.scores))
    terms = [
        _added(e) * ops.exp(x - higher)
        for e, x in zip(found.of_elements, found.scores, strict=True)
    ]
    total = total * ops.exp(highest - higher) + lines.total(terms)
    return (higher, total), (found.kept, found.scores)


@backend.part()
def add_values(
    y: Tensor,
    values: Tensor,
    found: tuple[list[Tensor], list[Tensor]],
    highest: Tensor,
    inverse: Tensor,
    *,
    lines: Lines,
) -> Tensor:
    """Adds the values of a line to the output.

    Args:
        values: of the line.
        found: its exponentials and scores.
        highest: scores.
        inverse: one over the sum of exponentials.
    """
    kept, scores = found
    of_neighbours = [
        ops.cast(ops.exp(x - highest) * inverse, values.dtype) for x in scores
    ]
    weights = _weights(kept, of_neighbours)
    return y + lines.sums(weights, lines.seen(values))


@backend.part()
def add_means(
    mean: Tensor,
    block: Block,
    line: Line,
    factors: Tensor | None,
    logs: Tensor,
    upstream: Tensor,
    *,
    lines: Lines,
) -> tuple[Tensor, Factors]:
    """Adds the means of `a d` over a line, and returns what they are of."""
    found = _line(lines, block, line, factors)
    of_neighbours = [
        ops.cast(ops.exp(x - logs), line.keys.dtype) for x in found.scores
    ]
    d_weights = _weight_gradients(lines, line, upstream)
    if backend.find_target(mean).compiler is None:
        pairs = zip(d_weights, found.kept, strict=True)
        sums = backend.sums_of_products(
            ((d[:, :, None], e[:, None]) for d, e in pairs), 0
        )
        terms = [f * x for f, x in zip(of_neighbours, sums, strict=True)]
        mean = mean + lines.total(terms)
    else:
        mean = mean + lines.products(
            [f[None] for f in of_neighbours],
            [d[:, :, None] for d in d_weights],
            [e[:, None] for e in found.kept],
        )
    kept = found.kept if factors is not None else []
    return mean, Factors(found.of_elements, kept, of_neighbours, d_weights)


@backend.part()
def add_gradients(
    totals: tuple[Tensor, Tensor, Any],
    block: Block,
    line: Line,
    found: Factors,
    upstream: Tensor,
    mean: Tensor,
    *,
    lines: Lines,
) -> tuple[tuple[Tensor, Tensor, Any], tuple[Tensor, Tensor, Tensor]]:
    """The gradients of a line.

    Args:
        totals: of the query by keys, of its first channels by the encoding,
            and of the scores of group elements if there is an embedding.
        found: by `add_means`.

    Returns:
        The totals, to which the line is added, and the gradients of what is
        cut for it: keys, values and encoding.
    """
    d_query, d_first, d_group = totals
    of_elements, kept, of_neighbours, d_weights = found
    kept = kept or of_elements
    d_values = lines.spread(_weights(kept, of_neighbours), upstream)
    given = of_elements, of_neighbours, d_weights, kept
    d_positions, d_scores = _score_gradients(*given, mean)
    dtype = line.keys.dtype
    of_first, d_encoding = lines.position_gradients(
        in_full_precision(block.query[: lines.encoded(line.encoding)]),
        line.encoding,
        [ops.cast(d, dtype) for d in d_positions],
    )
    d_scores = [ops.cast(d, dtype) for d in d_scores]
    d_query = d_query + lines.sums(d_scores, lines.seen(line.keys))
    d_keys = lines.spread(d_scores, block.query)
    if block.embedded is not None or block.group is not None:
        d_group = d_group + lines.total(d_scores)
    totals = d_query, d_first + of_first, d_group
    return totals, (d_keys, d_values, d_encoding)


def _block(
    query: Float[Tensor, "channels query_elements rows columns images"],
    positions: Positions,
) -> Block:
    if positions.embedding is None:
        return Block(query)
    embedded = ops.transpose(positions.embedding, (2, 1, 0))
    before = query.shape[0] - embedded.shape[0]
    if backend.find_target(query).compiler is None:
        pair = embedded[..., None, None, None], query[before:, None]
        return Block(query, group=backend.sums_of_products([pair], 0)[0])
    embedded = ops.pad(embedded, [(before, 0), (0, 0), (0, 0)])
    return Block(query, embedded[..., None, None, None])


def _factors(
    lines: Lines, dropout: Dropout, query: Tensor, keys: Tensor, number: Any
) -> Tensor | None:
    """Those of dropout, one neighbour after the other along the first axis."""
    if dropout is None:
        return None
    neighbours, *rest = lines.scores_shape(query)
    return dropout((neighbours * ops.shape(keys)[1], *rest), number)


def _line(
    lines: Lines, block: Block, line: Line, factors: Tensor | None
) -> _Line:
    seen = (x[:, :, None] for x in lines.seen(line.keys))
    if block.embedded is not None:
        embedded = block.embedded
        seen = (in_full_precision(x) + embedded for x in seen)
    query = block.query[:, None]
    scores = backend.sums_of_products(
        ((query, x) for x in seen), 0, block.group
    )
    top = [_highest(x) for x in scores]
    dtype = line.keys.dtype
    found = [
        ops.cast(ops.exp(x - y), dtype)
        for x, y in zip(scores, top, strict=True)
    ]
    kept = found
    if factors is not None:
        size = found[0].shape[0]
        kept = [
            ops.cast(e * factors[n * size : (n + 1) * size], dtype)
            for n, e in enumerate(found)
        ]
    first = in_full_precision(block.query[: lines.encoded(line.encoding)])
    of_positions = lines.position_scores(first, line.encoding, line.inside)
    above = [p + x for p, x in zip(of_positions, top, strict=True)]
    return _Line(found, kept, above)


def _score_gradients(
    of_elements: list[Tensor],
    of_neighbours: list[Tensor],
    d_weights: list[Tensor],
    kept: list[Tensor],
    mean: Tensor,
) -> tuple[list[Tensor], list[Tensor]]:
    """Of the scores of positions, and of content and group."""
    given = of_elements, of_neighbours, d_weights, kept
    if backend.find_target(mean).compiler is None:
        # Of `f (k d - e mean)` each sum by itself, of products of two.
        d_positions, d_scores = [], []
        for e, f, d, k in zip(*given, strict=True):
            pairs = [(d[:, :, None], k[:, None]), (d[:, :, None], f[None])]
            (kd,) = backend.sums_of_products(pairs[:1], 0)
            (fd,) = backend.sums_of_products(pairs[1:], 1)
            d_positions.append(f * (kd - _added(e) * mean))
            of_mean = ops.sum(f * mean, axis=0)
            d_scores.append(k * fd - e * of_mean)
        return d_positions, d_scores
    # (key elements, order, query elements, ...)
    d_pairs = [
        f[None] * (k[:, None] * d[:, :, None] - e[:, None] * mean[None])
        for e, f, d, k in (
            map(in_full_precision, x) for x in zip(*given, strict=True)
        )
    ]
    return backend.sums_together(d_pairs, 0), backend.sums_together(d_pairs, 1)


def _weights(kept: list[Tensor], of_neighbours: list[Tensor]) -> list[Tensor]:
    """`(key elements, order, ...)`: of the values."""
    both = zip(kept, of_neighbours, strict=True)
    pairs = ((e[:, None], f[None]) for e, f in both)
    dtype = kept[0].dtype
    return [ops.cast(x, dtype) for x in backend.sums_of_products(pairs, 2)]


def _weight_gradients(
    lines: Lines, line: Line, upstream: Tensor
) -> list[Tensor]:
    """`(key elements, order, ...)`."""
    pairs = (
        (upstream[:, None], x[:, :, None]) for x in lines.seen(line.values)
    )
    dtype = line.values.dtype
    return [ops.cast(x, dtype) for x in backend.sums_of_products(pairs, 0)]


def _added(x: Tensor) -> Tensor:
    """The sum along the first axis, written out for compilers."""
    if backend.find_target(x).compiler is None:
        return ops.sum(in_full_precision(x), axis=0)
    x = in_full_precision(x)
    return sum((x[n] for n in range(1, x.shape[0])), x[0])


def _highest(x: Tensor) -> Tensor:
    """The maximum along the first axis, written out for compilers."""
    if backend.find_target(x).compiler is None:
        return ops.max(x, axis=0)
    top = x[0]
    for n in range(1, x.shape[0]):
        top = backend.maximum(top, x[n])
    return top
