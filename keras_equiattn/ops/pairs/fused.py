"""Computes group self-attention for one block.

Scores of group self-attention have two parts, for output elements `v`, query
elements `g`, key elements `m` and neighbours `o`:

    S(v, g, m, o) = s(g, m, o) + p(v, g, o)

where `s` scores content and group elements, and `p` scores positions. So the
softmax over `m` and `o` is a product of two factors, neither of which depends
on all three elements:

    softmax(S) = softmax_o(p + l)(v, g, o) softmax_m(s)(g, m, o)
    l(g, o) = log sum_m exp s(g, m, o)

This is exact, and safe: both factors are softmaxes of scores. The values are
weighted by the sum over `g`,

    W(m, v, o) = sum_g softmax_m(s)(g, m, o) softmax_o(p + l)(v, g, o)
    y(v, i) = sum_(m, o) W(m, v, o, i) x(m, i + o)

There are two passes over the lines of neighbours, see `ops.pairs.lines`: the
first finds sums over all neighbours, and the second what needs them. The four
functions `add_*` compute what a line adds. They take what is cut for the line,
and do not know which line it is: so PyTorch can have each of them compiled
once, and run it for every line. What the first pass finds for a line is kept
for the second, so a block holds it for all of its lines.

Only differences of scores enter. So attention that falls on a single neighbour
is exactly one, even if the large score of that neighbour was rounded. With the
attention `a(v, g, m, o)` after dropout and the gradient `d(m, v, o)` of the
weights, `mean(v, g) = sum_(m, o) a d` is the same for both parts: the gradient
of `S` is `a d - softmax(S) mean`.

Tensors of a line are in the dtype of the keys, and so are the factors of
products. Sums over neighbours, the softmax among them, are in single precision
at least.
"""

import functools
from collections.abc import Callable
from typing import Any
from typing import NamedTuple
from typing import TypeAlias

from keras import ops

from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.numerics import dtype_of_sums
from keras_equiattn.ops.numerics import in_full_precision
from keras_equiattn.ops.numerics import lowest_score
from keras_equiattn.ops.numerics import MASKED
from keras_equiattn.ops.numerics import sum_in_full_precision
from keras_equiattn.ops.pairs.dispatch import reduces_score_gradients
from keras_equiattn.ops.pairs.lines import Keys
from keras_equiattn.ops.pairs.lines import Line
from keras_equiattn.ops.pairs.lines import Lines
from keras_equiattn.ops.pairs.lines import Offsets
from keras_equiattn.ops.pairs.lines import Place
from keras_equiattn.ops.pairs.lines import Queries
from keras_equiattn.ops.pairs.lines import seen
from keras_equiattn.ops.pairs.lines import spread
from keras_equiattn.ops.pairs.matrices import add
from keras_equiattn.ops.pairs.matrices import add_products
from keras_equiattn.ops.pairs.matrices import product
from keras_equiattn.ops.pairs.matrices import products

# Draws factors for scores, from their shape and the number of the line.
Dropout: TypeAlias = Callable[[Any, Any], Tensor]
Outputs: TypeAlias = Float[Tensor, "channels order rows columns images"]
# Scores of key elements and query elements, and of output elements and query
# elements.
ElementScores: TypeAlias = Float[
    Tensor, "key_elements query_elements rows columns images"
]
PositionScores: TypeAlias = Float[
    Tensor, "order query_elements rows columns images"
]
# Weights of the values, added up over query elements.
Weights: TypeAlias = Float[Tensor, "key_elements order rows columns images"]
# Factors of dropout: the key elements of each neighbour, one after the other.
Factors: TypeAlias = Float[
    Tensor, "key_elements_of_all query_elements rows columns images"
]
Embedding: TypeAlias = Float[Tensor, "query_elements key_elements embedded"]


class Block(NamedTuple):
    """The tensors from which the attention of a block is computed.

    Attributes:
        lines: the lines of neighbours that the pixels see.
        place: where the block lies.
        query: the queries of its pixels.
        keys, values: the keys and values of all rows, padded for windows.
        offsets: the encoding of offsets as `lines` takes it; meets the first
            channels of the queries.
        embedding: the embedding of the relative elements; meets the other
            channels. None if there is none.
        dropout: the function that draws factors of dropout; None without
            dropout.
    """

    lines: Lines
    place: Place
    query: Queries
    keys: Keys
    values: Keys
    offsets: Offsets
    embedding: Embedding | None
    dropout: Dropout | None

    def line(self, number: Any) -> Line:
        """The keys, values and encodings of the line of this number."""
        seen = self.keys, self.values, self.offsets
        return self.lines.cut(*seen, self.place, number)

    def kept(self, number: Any) -> Factors | None:
        """Factors of dropout, or None.

        The first axis has one neighbour after the other, and the key elements
        of each.
        """
        if self.dropout is None:
            return None
        count = self.lines.neighbours * ops.shape(self.keys)[1]
        return self.dropout((count, *ops.shape(self.query)[1:]), number)

    def group_scores(self) -> ElementScores | None:
        """Scores of the embedding, which are those of every neighbour."""
        if self.embedding is None:
            return None
        rest = self.query[self.offsets.shape[0] :]
        return ops.einsum("gmc,cgyxb->mgyxb", self.embedding, rest)

    def group_gradients(
        self, d: ElementScores
    ) -> tuple[Float[Tensor, "embedded ..."], Embedding]:
        """Gradients of the query channels that meet the embedding, and of it.

        Args:
            d: the gradient of the scores of group elements.
        """
        rest = in_full_precision(self.query[self.offsets.shape[0] :])
        return (
            ops.einsum(
                "gmc,mgyxb->cgyxb", in_full_precision(self.embedding), d
            ),
            ops.einsum("mgyxb,cgyxb->gmc", d, rest),
        )

    def listed(self, x: Float[Tensor, "..."]) -> list[Float[Tensor, "..."]]:
        """A list with `x` for each neighbour in a line."""
        return [x] * self.lines.neighbours


class Scores(NamedTuple):
    """The parts of the scores in a line, each with a tensor per neighbour.

    Attributes:
        of_elements: exponentials of the scores of content and group, minus
            the highest of all key elements.
        kept: `of_elements` after dropout.
        of_positions: those highest scores plus the scores of positions.
    """

    of_elements: list[ElementScores]
    kept: list[ElementScores]
    of_positions: list[PositionScores]


class Gradients(NamedTuple):
    """The tensors that the gradients of the scores in a line are made of.

    With `mean` they give these gradients. Each part has a tensor per neighbour.

    Attributes:
        of_elements: see `Scores`.
        kept: `of_elements` after dropout; None without dropout.
        of_neighbours: the softmax over neighbours.
        d_weights: the gradient of the weights of the values.
        d_positions: the gradient of the scores of positions, before `mean` is
            subtracted. None where a reduction finds the gradients.
    """

    of_elements: list[ElementScores]
    kept: list[ElementScores] | None
    of_neighbours: list[PositionScores]
    d_weights: list[Weights]
    d_positions: list[PositionScores] | None


def attend(block: Block) -> tuple[Outputs, PositionScores]:
    """The output of a block, and what `gradients` needs of the softmax.

    That is the logarithm of the sum that the softmax is divided by.
    """
    query, lines = block.query, block.lines
    order, dtype = block.offsets.shape[1], dtype_of_sums(query)
    shape = (order, *ops.shape(query)[1:])
    numbers = backend.steps(lines.count(block.place))
    group = block.group_scores()

    def first(carry: Any, number: Any) -> Any:
        """Finds the scores of a line."""
        given = query, group, block.line(number), block.kept(number)
        return add_exponentials(carry, *given, lines=lines)

    start = backend.filled(shape, MASKED, dtype), ops.zeros(shape, dtype)
    like = block.listed(block.keys)
    (highest, total), found = backend.scan(
        first, start, numbers, (like, like, block.keys), stacked=False
    )
    inverse = 1 / total

    def second(y: Any, piece: Any) -> Any:
        """Adds the values of a line to the output."""
        number, found = piece
        given = block.line(number).values, found, highest, inverse
        return add_values(y, *given, lines=lines), ()

    nothing = ops.zeros((ops.shape(block.values)[0], order, *shape[2:]), dtype)
    y = backend.scan(second, nothing, (numbers, found))[0]
    return y, highest + ops.log(total)


def gradients(
    block: Block,
    logs: PositionScores,
    upstream: Outputs,
    totals: tuple[Keys, Keys, Offsets],
) -> tuple[Queries, tuple[Keys, Keys, Offsets], Embedding | None]:
    """Gradients of a block.

    Args:
        block: the block that was given to `attend`.
        logs: the logarithms that `attend` returned.
        upstream: the gradient of the output.
        totals: the gradients of keys, values and offsets so far, which are
            added to.

    Returns:
        The gradient of the query, the totals, and the gradient of the
        embedding.
    """
    query, lines, place = block.query, block.lines, block.place
    numbers = backend.steps(lines.count(place))
    group = block.group_scores()
    d_keys, d_values, d_offsets = totals

    def first(carry: Any, number: Any) -> Any:
        """Adds a line to the means, and to the gradient of the values."""
        mean, d_values = carry
        given = query, group, block.line(number), block.kept(number)
        mean, part, found = add_means(mean, *given, logs, upstream, lines=lines)
        at_keys, _ = lines.starts(place, number)
        return (mean, backend.add_at(d_values, at_keys, part)), found

    # Not `zeros_like`, whose memory layout would differ from that of a sum.
    nothing = ops.zeros(ops.shape(logs), logs.dtype)
    like = block.listed(block.keys)
    kept = None if block.dropout is None else like
    reduces = reduces_score_gradients(query, block.dropout is not None)
    d_positions = None if reduces else like
    (mean, d_values), found = backend.scan(
        first,
        (nothing, d_values),
        numbers,
        Gradients(like, kept, like, like, d_positions),
        stacked=False,
    )

    def second(carry: Any, piece: Any) -> Any:
        """Adds the gradients of a line to those of all lines."""
        number, found = piece
        sums, d_keys, d_offsets = carry
        given = query, block.line(number), found, mean
        sums, parts = add_gradients(sums, *given, lines=lines)
        at_keys, at_offsets = lines.starts(place, number)
        d_keys = backend.add_at(d_keys, at_keys, parts[0])
        d_offsets = backend.add_at(d_offsets, at_offsets, parts[1])
        return (sums, d_keys, d_offsets), ()

    encoded, elements = block.offsets.shape[0], ops.shape(block.keys)[1]
    shape = ops.shape(query)
    sums = tuple(
        ops.zeros(shape, logs.dtype)
        for shape in (shape, (encoded, *shape[1:]), (elements, *shape[1:]))
    )
    (sums, d_keys, d_offsets), _ = backend.scan(
        second, (sums, d_keys, d_offsets), (numbers, found)
    )
    d_query, d_first, d_group = sums
    d_rest, d_embedding = ops.zeros_like(d_query[encoded:]), None
    if block.embedding is not None:
        d_rest, d_embedding = block.group_gradients(d_group)
    d_query = d_query + ops.concatenate([d_first, d_rest])
    return d_query, (d_keys, d_values, d_offsets), d_embedding


@backend.compiled_part()
def add_exponentials(
    carry: tuple[PositionScores, PositionScores],
    query: Queries,
    group: ElementScores | None,
    line: Line,
    factors: Factors | None,
    *,
    lines: Lines,
) -> tuple[
    Any, tuple[list[ElementScores], list[PositionScores], PositionScores]
]:
    """Adds a line to the highest score, and to the sum of exponentials.

    Args:
        carry: the highest score and the sum.
        query: the queries of the block.
        group: scores of the embedding, if there is one.
        line: the keys, values and encodings of the line.
        factors: the factors of dropout, if there is any.
        lines: the lines of neighbours that the pixels see.

    Returns:
        Both, and what `add_values` takes: exponentials over key elements,
        those over neighbours, and the highest score of the line that was
        subtracted from the latter.
    """
    highest, total = carry
    found = _scores(lines, query, group, line, factors)
    # Exponentials overwrite the scores, so a single tensor is copied first.
    first, *others = found.of_positions
    top = functools.reduce(backend.maximum, others or [ops.copy(first)], first)
    of_neighbours = [backend.exp_below(x, top) for x in found.of_positions]
    of_line = ops.zeros(ops.shape(total), total.dtype)
    for e, f in zip(found.of_elements, of_neighbours, strict=True):
        e = ops.cast(sum_in_full_precision(e, (0,)), f.dtype)
        of_line = backend.add_product(of_line, f, e)
    higher = backend.maximum(highest, in_full_precision(top))
    scale = ops.exp(in_full_precision(top) - higher)
    total = total * ops.exp(highest - higher) + of_line * scale
    return (higher, total), (found.kept, of_neighbours, top)


@backend.compiled_part()
def add_values(
    y: Outputs,
    values: Float[
        Tensor, "channels key_elements seen_rows seen_columns images"
    ],
    found: tuple[list[ElementScores], list[PositionScores], PositionScores],
    highest: PositionScores,
    inverse: PositionScores,
    *,
    lines: Lines,
) -> Outputs:
    """Adds the values of a line to the output.

    Args:
        y: the output.
        values: the values of the line.
        found: the results of `add_exponentials` for the line.
        highest: the highest scores.
        inverse: one over the sum of exponentials.
        lines: the lines of neighbours that the pixels see.
    """
    kept, of_neighbours, top = found
    scale = ops.exp(in_full_precision(top) - highest) * inverse
    of_neighbours = [backend.multiplied(x, scale) for x in of_neighbours]
    pairs = list(zip(kept, of_neighbours, strict=True))
    weights = products("mg,vg->mv", pairs, values.dtype)
    near = seen(values, lines.keys(ops.shape(y)[-2]))
    pairs = list(zip(near, weights, strict=True))
    return add_products(y, "cm,mv->cv", pairs)


@backend.compiled_part()
def add_means(
    mean: PositionScores,
    query: Queries,
    group: ElementScores | None,
    line: Line,
    factors: Factors | None,
    logs: PositionScores,
    upstream: Outputs,
    *,
    lines: Lines,
) -> tuple[
    PositionScores,
    Float[Tensor, "channels key_elements seen_rows seen_columns images"],
    Gradients,
]:
    """Adds a line to the means of `a d`.

    Args:
        mean: the means so far.
        query, group, line, factors, lines: see `add_exponentials`.
        logs: the logarithms of the sums that the softmax is divided by.
        upstream: the gradient of the output.

    Returns:
        The means, the gradient of the values of the line, and what
        `add_gradients` takes.
    """
    found = _scores(lines, query, group, line, factors)
    dtype, kept = line.keys.dtype, found.kept
    # Reductions find the same sums anew, and the means must cancel them.
    reduces = reduces_score_gradients(query, factors is not None)
    precise = dtype_of_sums(line.keys) if reduces else dtype
    of_neighbours = [backend.exp_below(x, logs) for x in found.of_positions]
    views = lines.keys(ops.shape(query)[-2])
    near = seen(line.values, views)
    d_weights = products("cm,cv->mv", [(x, upstream) for x in near], dtype)
    pairs = list(zip(kept, of_neighbours, strict=True))
    weights = products("mg,vg->mv", pairs, dtype)
    d_values = _spread(lines, "cv,mv->cm", upstream, weights)
    pairs = list(zip(d_weights, kept, strict=True))
    d_positions = [
        ops.cast(f, precise) * d
        for f, d in zip(
            of_neighbours, products("mv,mg->vg", pairs, precise), strict=True
        )
    ]
    mean = add(mean, d_positions)
    parts = Gradients(
        found.of_elements,
        None if factors is None else kept,
        of_neighbours,
        d_weights,
        None if reduces else d_positions,
    )
    return mean, d_values, parts


@backend.compiled_part()
def add_gradients(
    sums: tuple[Queries, Float[Tensor, "encoded ..."], ElementScores],
    query: Queries,
    line: Line,
    found: Gradients,
    mean: PositionScores,
    *,
    lines: Lines,
) -> tuple[Any, tuple[Tensor, Tensor]]:
    """The gradients of a line.

    Args:
        sums: the gradients of the query from the keys, of its first channels
            from the encoding, and of the scores of group elements, which are
            added to.
        query: the queries of the block.
        line: the keys, values and encodings of the line.
        found: the result of `add_means` for the line.
        mean: the means over all lines.
        lines: the lines of neighbours that the pixels see.

    Returns:
        The sums, and the gradients of what is cut for the line: keys and
        encoding.
    """
    d_query, d_first, d_group = sums
    width, dtype = ops.shape(query)[-2], line.keys.dtype
    if found.d_positions is None:
        d_positions, d_scores = _gradients_by_reduction(found, mean, dtype)
    else:
        d_positions, d_scores = _gradients_from_products(found, mean, dtype)
    encoded = line.encoding.shape[0]
    encodings = seen(line.encoding, lines.offsets(width))
    pairs = list(zip(encodings, d_positions, strict=True))
    d_first = add_products(d_first, "cv,vg->cg", pairs)
    over = "b" if lines.size is None else "yxb"
    d_encoding = spread(
        [product("cg,vg->cv", query[:encoded], d, over) for d in d_positions],
        lines.offsets(width),
    )
    near = seen(line.keys, lines.keys(width))
    pairs = list(zip(near, d_scores, strict=True))
    d_query = add_products(d_query, "cm,mg->cg", pairs)
    d_keys = _spread(lines, "cg,mg->cm", query, d_scores)
    d_group = add(d_group, d_scores)
    return (d_query, d_first, d_group), (d_keys, d_encoding)


def _gradients_by_reduction(
    found: Gradients, mean: PositionScores, dtype: Any
) -> tuple[list[PositionScores], list[ElementScores]]:
    """The gradients of the scores of positions, and of content and group.

    Both are sums of the same terms, over key elements and over output elements.

    Args:
        found: the result of `add_means` for a line.
        mean: the means over all lines.
        dtype: the dtype of the results.
    """
    of_elements, kept, of_neighbours, d_weights, _ = found
    kept, terms = kept or of_elements, []
    for parts in zip(of_elements, kept, of_neighbours, d_weights, strict=True):
        element, dropped, neighbour, d = map(in_full_precision, parts)
        above = dropped[:, None] * d[:, :, None]
        above = above - element[:, None] * mean[None]
        terms.append(neighbour[None] * above)
    d_positions = backend.sums_together(terms, 0)
    d_scores = backend.sums_together(terms, 1)
    return (
        [ops.cast(x, dtype) for x in d_positions],
        [ops.cast(x, dtype) for x in d_scores],
    )


def _gradients_from_products(
    found: Gradients, mean: PositionScores, dtype: Any
) -> tuple[list[PositionScores], list[ElementScores]]:
    """The same, from products to which the part of the mean is added."""
    of_elements, kept, of_neighbours, d_weights, d_positions = found
    pairs = list(zip(d_weights, of_neighbours, strict=True))
    d_scores = [
        k * d
        for k, d in zip(
            kept or of_elements,
            products("mv,vg->mg", pairs, dtype),
            strict=True,
        )
    ]
    minus, added = ops.cast(-mean, dtype), []
    for element, neighbour, d_position, d_score in zip(
        of_elements, of_neighbours, d_positions or (), d_scores, strict=True
    ):
        factor = neighbour * minus
        total = ops.cast(sum_in_full_precision(element, (0,)), dtype)
        d_position = backend.add_product(d_position, factor, total)
        total = ops.cast(sum_in_full_precision(factor, (0,)), dtype)
        added.append((d_position, backend.add_product(d_score, element, total)))
    d_positions, d_scores = map(list, zip(*added, strict=True))
    return d_positions, d_scores


def _scores(
    lines: Lines,
    query: Queries,
    group: ElementScores | None,
    line: Line,
    factors: Factors | None,
) -> Scores:
    """Computes the scores of all neighbours in a line.

    Args:
        lines, query, group, line, factors: see `add_exponentials`.
    """
    width, dtype = ops.shape(query)[-2], line.keys.dtype
    near = seen(line.keys, lines.keys(width))
    scores = products("cm,cg->mg", [(k, query) for k in near], dtype, group)
    tops = [ops.max(x, axis=0) for x in scores]
    found = [backend.exp_below(x, y) for x, y in zip(scores, tops, strict=True)]
    kept = found
    if factors is not None:
        size = found[0].shape[0]
        kept = [
            ops.cast(e * factors[n * size : (n + 1) * size], dtype)
            for n, e in enumerate(found)
        ]
    encodings = seen(line.encoding, lines.offsets(width))
    first = query[: line.encoding.shape[0]]
    positions = products("cv,cg->vg", [(e, first) for e in encodings], dtype)
    if line.log_weights is not None:
        added = seen(line.log_weights, lines.offsets(width))
        positions = [in_full_precision(p) for p in positions]
        tops = [
            in_full_precision(x) + w[0]
            for x, w in zip(tops, added, strict=True)
        ]
    above = [
        ops.cast(p + x, dtype) for p, x in zip(positions, tops, strict=True)
    ]
    if line.hidden is not None:
        # Masked last: a sum with the lowest score may not be finite.
        lowest = lowest_score(line.keys)
        hidden = seen(line.hidden, lines.keys(width))
        above = [
            backend.masked(x, h, lowest, owned=True)
            for h, x in zip(hidden, above, strict=True)
        ]
    return Scores(found, kept, above)


def _spread(
    lines: Lines,
    equation: str,
    x: Float[Tensor, "channels elements rows columns images"],
    weights: list[Float[Tensor, "key_elements elements rows columns images"]],
) -> Float[Tensor, "channels key_elements seen_rows seen_columns images"]:
    """The gradient of keys or values, from the pixels that see them.

    Args:
        lines: the lines of neighbours that the pixels see.
        equation: the equation of the product of pixels and weights.
        x: the tensor of the pixels.
        weights: the weights of each neighbour.
    """
    over = "yx" if lines.size is None else ""
    parts = [product(equation, x, a, over) for a in weights]
    return spread(parts, lines.keys(ops.shape(x)[-2]))
