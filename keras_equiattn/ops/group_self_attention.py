"""Self-attention on groups with relative positions, local and global.

For output elements `v`, query elements `g`, key elements `m`, pixels `i` and
offsets `o`, with relative elements in the group,

    S(v, g, m, i, o) = <q(i, g), k(i + o, m)> + <q'(i, g), e(v^-1 o)>
                       + <q''(i, g), E(g^-1 m)>
    y(i, v) = sum_g sum_(m, o) softmax_(m, o)(S) x(i + o, m)

where `q'` are the first channels of the queries, as many as positions are
encoded with, and `q''` the others. Lifting has one query and key element, and
no embedding. `ops.pair_attention` says how this is computed without all three
elements at once.
"""

import dataclasses
import functools
from typing import Any

import numpy as np
from jaxtyping import Float
from keras import ops

from keras_equiattn.ops import backend
from keras_equiattn.ops import pair_attention
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.pair_attention import MASKED
from keras_equiattn.ops.pair_attention import Positions
from keras_equiattn.ops.pair_windows import Planes
from keras_equiattn.ops.pair_windows import Products
from keras_equiattn.ops.pair_windows import Row
from keras_equiattn.ops.pair_windows import tiles
from keras_equiattn.ops.pair_windows import untiled
from keras_equiattn.ops.pair_windows import Windows
from keras_equiattn.ops.statistics import in_full_precision

# Scores of a tile: about what a cache holds, or what keeps a GPU busy.
CPU_TILE = 2**19
GPU_TILE = 2**24
# Seeds are passed as float32, which holds these integers and, added to them,
# as many numbers of tiles.
SEEDS = 2**23


def group_self_attention(
    query: Float[Tensor, "batch height width query_order heads channels"],
    keys: Float[Tensor, "batch height width key_order heads channels"],
    values: Float[Tensor, "batch height width key_order heads channels"],
    encoding: Float[Tensor, "rows columns order encoded"],
    embedding: Float[Tensor, "query_order key_order embedded"] | None = None,
    local: bool = True,
    dropout: float = 0.0,
    seed: Float[Tensor, "2"] | None = None,
    recompute: bool = True,
) -> Float[Tensor, "batch height width order heads channels"]:
    """Group self-attention, see the module.

    Args:
        query: scaled.
        keys, values: one for each pixel and group element.
        encoding: of the offsets, as each output element sees them: `e(v^-1
            o)`. Local: of the window; global: of all offsets, from `1 -
            height` to `height - 1` and from `1 - width` to `width - 1`.
        embedding: of the relative elements, `E(g^-1 m)`.
        local: whether a pixel sees the window around it, or all pixels.
            Neighbours outside of the image are left out.
        dropout: rate at which factors `(g, m, i, o)` of the attention are
            dropped.
        seed: two whole numbers below `SEEDS`; needed with dropout.
        recompute: the backward pass keeps the arguments alone and computes
            everything else anew, as does the forward pass, one tile at a time.
            False is `plain_attention`: for tests, and to be differentiated
            twice.

    Returns:
        What the output elements attend to.
    """
    dtype = query.dtype
    query, keys, values, encoding, embedding = _full(
        query, keys, values, encoding, embedding
    )
    if not recompute:
        y = plain_attention(
            *(query, keys, values, encoding, embedding),
            local=local,
            dropout=dropout,
            seed=seed,
        )
        return ops.cast(y, dtype)
    heads = query.shape[4]
    together = _heads_together(query, keys, encoding) if local else 1
    window = encoding.shape[0] if local else None
    pieces = [
        tiles(x, together)
        for x in _with_surroundings(query, keys, values, window)
    ]
    given = [x for x in (embedding, seed) if x is not None]
    tensors = (*pieces, _by_element(encoding, local), *given)
    attention = _Attention(
        window, embedding is not None, dropout if seed is not None else 0.0
    )
    y = _tiled(attention, tuple(tuple(x.shape) for x in tensors))(*tensors)
    size = ops.shape(query)
    y = untiled(y, heads)[:, :, : size[2]]
    # TensorFlow forgets axes of tiles whose sizes it does not know.
    y = ops.reshape(y, (*size[:3], encoding.shape[2], *size[4:]))
    return ops.cast(y, dtype)


def _with_surroundings(
    query: Tensor, keys: Tensor, values: Tensor, size: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values with what windows see, queries as wide as they."""
    if size is None:
        return query, keys, values
    reach = size // 2
    sides = [(0, 0), (reach, reach), (reach, reach)] + [(0, 0)] * 3
    behind = [(0, 0), (0, 0), (0, size - 1)] + [(0, 0)] * 3
    return ops.pad(query, behind), ops.pad(keys, sides), ops.pad(values, sides)


def _by_element(encoding: Tensor, local: bool) -> Tensor:
    """The encoding in the form that windows and rows take."""
    rows, columns, order, channels = ops.shape(encoding)
    if local:
        return ops.reshape(encoding, (rows * columns, order, channels))
    return ops.transpose(encoding, (0, 2, 3, 1))


def _heads_together(query: Tensor, keys: Tensor, encoding: Tensor) -> int:
    """How many heads make a tile of the right size."""
    _, height, width, elements, heads, _ = query.shape
    if height is None or width is None:
        return 1
    rows, columns, order, _ = encoding.shape
    pixels = height * (width + columns - 1)
    scores = rows * columns * elements * max(keys.shape[3], order) * pixels
    limit = CPU_TILE if backend.on_cpu() else GPU_TILE
    fitting = (n for n in range(heads, 1, -1) if n * scores <= limit)
    return next((n for n in fitting if heads % n == 0), 1)


@dataclasses.dataclass(frozen=True)
class _Attention:
    """What attention does with a tile, `(channels, elements, heads, height,
    width)` of query, keys and values.

    Attributes:
        size: rows and columns of the windows; None for the whole image.
        embedded: whether there is an embedding of relative elements.
        rate: of dropout.
    """

    size: int | None
    embedded: bool
    rate: float

    def unpack(self, rest: Any) -> tuple[Positions, Tensor | None]:
        """Positions, and the seed if there is one."""
        encoding, *rest = rest
        embedding = rest.pop(0) if self.embedded else None
        return Positions(encoding, embedding), rest.pop() if rest else None

    def forward(
        self, piece: Any, positions: Positions, seed: Tensor | None
    ) -> Tensor:
        query, keys, values, index = piece
        if self.size is None:
            return self._forward_rows(piece, positions, seed)
        windows = self._windows(query)
        y = pair_attention.attend(
            windows,
            windows.flat_queries(query),
            windows.flat_keys(keys),
            windows.flat_keys(values),
            positions,
            self._dropout(seed, index),
        )
        return ops.reshape(y, (*ops.shape(y)[:3], *ops.shape(query)[3:]))

    def gradients(
        self,
        piece: Any,
        positions: Positions,
        seed: Tensor | None,
        upstream: Tensor,
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Positions]:
        query, keys, values, index = piece
        if self.size is None:
            return self._row_gradients(piece, positions, seed, upstream)
        windows = self._windows(query)
        (d_query, *others), d_positions = pair_attention.gradients(
            windows,
            windows.flat_queries(query),
            windows.flat_keys(keys),
            windows.flat_keys(values),
            positions,
            self._dropout(seed, index),
            windows.flat_queries(upstream),
        )
        d_query = ops.reshape(d_query, ops.shape(query))
        d_keys, d_values = map(windows.padded_keys, others)
        return (d_query, d_keys, d_values), d_positions

    def _windows(self, query: Tensor) -> Windows:
        height, width = ops.shape(query)[3:]
        known = None not in query.shape
        kind = Planes if backend.in_xla() and known else Products
        return kind(self.size, height, width - self.size + 1)

    def _dropout(self, seed: Tensor | None, index: Tensor) -> Any:
        """Draws the factors of dropout for scores of a shape."""
        if seed is None:
            return None
        seed = ops.stack([seed[0] + index, seed[1]])
        return lambda scores: backend.dropout_factors(
            ops.shape(scores), self.rate, seed, scores.dtype
        )

    def _forward_rows(
        self, piece: Any, positions: Positions, seed: Tensor | None
    ) -> Tensor:
        query, keys, values, index = piece
        keys, values = _flat(keys), _flat(values)
        width = ops.shape(query)[4]

        def row(_: Any, piece: Any) -> Any:
            query, start, number = piece
            return (), pair_attention.attend(
                Row(width),
                query,
                keys,
                values,
                _of_row(positions, start),
                self._dropout(seed, number),
            )

        query = ops.moveaxis(query, 3, 0)
        pieces = (query, *_rows(query, index))
        y = backend.scan(row, (), pieces, like=query[0])[1]
        return ops.moveaxis(y, 0, 3)

    def _row_gradients(
        self,
        piece: Any,
        positions: Positions,
        seed: Tensor | None,
        upstream: Tensor,
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Positions]:
        query, keys, values, index = piece
        size = ops.shape(keys)
        keys, values = _flat(keys), _flat(values)
        width = ops.shape(query)[4]

        def row(totals: Any, piece: Any) -> Any:
            query, upstream, start, number = piece
            (d_query, *others), d_positions = pair_attention.gradients(
                Row(width),
                query,
                keys,
                values,
                _of_row(positions, start),
                self._dropout(seed, number),
                upstream,
            )
            d_encoding, *rest = d_positions.given
            total, *totals = totals
            at = (start, 0, 0, 0)
            part = ops.slice(total, at, ops.shape(d_encoding))
            total = ops.slice_update(total, at, part + d_encoding)
            return [total, *_added(totals, [*others, *rest])], d_query

        query, upstream = (ops.moveaxis(x, 3, 0) for x in (query, upstream))
        encoding, *rest = positions.given
        totals = [ops.zeros_like(x) for x in (encoding, keys, values, *rest)]
        pieces = (query, upstream, *_rows(query, index))
        (d_encoding, d_keys, d_values, *rest), d_query = backend.scan(
            row, totals, pieces, like=query[0]
        )
        d_keys, d_values = (ops.reshape(x, size) for x in (d_keys, d_values))
        d_query = ops.moveaxis(d_query, 0, 3)
        return (d_query, d_keys, d_values), Positions(d_encoding, *rest)


def _flat(x: Tensor) -> Tensor:
    return ops.reshape(x, (*ops.shape(x)[:3], -1))


def _rows(query: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Where the encodings of each row start, and a number for each."""
    height = ops.shape(query)[0]
    starts = height - 1 - ops.arange(height, dtype="int32")
    numbers = index * ops.cast(height, index.dtype)
    return starts, numbers + ops.cast(starts, index.dtype)


def _of_row(positions: Positions, start: Tensor) -> Positions:
    """The encodings of the offsets that a row sees."""
    encoding = positions.encoding
    rows, *others = ops.shape(encoding)
    shape = ((rows + 1) // 2, *others)
    return positions._replace(
        encoding=ops.slice(encoding, (start, 0, 0, 0), shape)
    )


@functools.lru_cache(maxsize=512)
def _tiled(attention: _Attention, shapes: Any) -> Any:
    """Attention of all tiles, as a differentiable function.

    One for each set of shapes, see `ops.windows`.
    """

    def forward(*tensors: Tensor) -> Any:
        positions, seed = attention.unpack(tensors[3:])

        def tile(_: Any, piece: Any) -> Any:
            return (), attention.forward(piece, positions, seed)

        pieces = (*tensors[:3], _numbers(tensors[0]))
        return backend.scan(tile, (), pieces, like=tensors[0])[1], ()

    def backward(
        tensors: tuple[Tensor, ...], _: Any, upstream: Tensor
    ) -> tuple[Tensor, ...]:
        positions, seed = attention.unpack(tensors[3:])

        def tile(totals: Any, piece: Any) -> Any:
            *piece, upstream = piece
            gradients, d_positions = attention.gradients(
                piece, positions, seed, upstream
            )
            return _added(totals, d_positions.given), gradients

        totals = list(map(ops.zeros_like, positions.given))
        pieces = (*tensors[:3], _numbers(tensors[0]), upstream)
        totals, gradients = backend.scan(tile, totals, pieces, like=tensors[:3])
        unmoved = [] if seed is None else [ops.zeros_like(seed)]
        return (*gradients, *totals, *unmoved)

    return backend.recomputed(forward, backward, "recompute=False")


def _added(totals: Any, terms: Any) -> list[Tensor]:
    return [total + x for total, x in zip(totals, terms, strict=True)]


def _numbers(tiles: Tensor) -> Tensor:
    return ops.arange(ops.shape(tiles)[0], dtype="float32")


def plain_attention(
    query: Float[Tensor, "batch height width query_order heads channels"],
    keys: Float[Tensor, "batch height width key_order heads channels"],
    values: Float[Tensor, "batch height width key_order heads channels"],
    encoding: Float[Tensor, "rows columns order encoded"],
    embedding: Float[Tensor, "query_order key_order embedded"] | None = None,
    local: bool = True,
    dropout: float = 0.0,
    seed: Float[Tensor, "2"] | None = None,
) -> Float[Tensor, "batch height width order heads channels"]:
    """`group_self_attention` as it is written, for all elements at once.

    Takes memory of the order of the group cubed, times that of the windows.
    With dropout it draws other numbers.
    """
    seen = neighbourhood(ops.shape(keys)[1:3], encoding, local)
    content, position = _scores(query, keys, encoding, embedding, seen)
    scores = content[:, :, None] + position[:, :, :, :, :, None]
    weights = _softmax(scores, (-2, -1))
    if seed is not None:
        shape = ops.shape(content)
        keep = backend.dropout_factors(shape, dropout, seed, content.dtype)
        weights = weights * keep[:, :, None]
    y = ops.einsum("btvigmo,biomtc->bivtc", weights, seen.of(values))
    return ops.reshape(y, (*ops.shape(query)[:3], *ops.shape(y)[2:]))


def attention_weights(
    query: Float[Tensor, "batch height width query_order heads channels"],
    keys: Float[Tensor, "batch height width key_order heads channels"],
    encoding: Float[Tensor, "rows columns order encoded"],
    embedding: Float[Tensor, "query_order key_order embedded"] | None = None,
    local: bool = True,
    pixel: tuple[int, int] | None = None,
) -> Float[Tensor, "batch pixels order heads key_order neighbours"]:
    """The weights of the values in `group_self_attention`.

    Args:
        query, keys, encoding, embedding, local: see there.
        pixel: row and column of the only query; None for all of them.

    Returns:
        Weights, added up over the query elements: they add up to
        `query_order` over key elements and neighbours. Neighbours are those
        of the window, or all pixels, row by row.
    """
    query, keys, encoding, embedding = _full(query, keys, encoding, embedding)
    seen = neighbourhood(ops.shape(keys)[1:3], encoding, local, pixel)
    content, position = _scores(query, keys, encoding, embedding, seen)
    # The same two factors as in `ops.pair_attention`.
    of_elements = _softmax(content, (-2,))
    logits = position + ops.logsumexp(content, axis=-2)[:, :, None]
    of_neighbours = _softmax(logits, (-1,))
    return ops.einsum("btigmo,btvigo->bivtmo", of_elements, of_neighbours)


@dataclasses.dataclass(frozen=True)
class Neighbourhood:
    """Which pixels some pixels see, row by row.

    Attributes:
        queries: `(pixels,)`, where the pixels lie.
        places: `(pixels, neighbours)`, where their neighbours lie.
        offsets: `(pixels, neighbours)`, which encodings these have.
        inside: `(pixels, neighbours)`, whether they lie in the image.
    """

    queries: np.ndarray
    places: np.ndarray
    offsets: np.ndarray
    inside: np.ndarray

    def of(self, x: Tensor) -> Tensor:
        """`(batch, pixels, neighbours, ...)` of an image."""
        return ops.take(_by_pixel(x), self.places, axis=1)


def neighbourhood(
    size: tuple[int, int],
    encoding: Tensor,
    local: bool,
    pixel: tuple[int, int] | None = None,
) -> Neighbourhood:
    """What the pixels of an image of this size see, or one of them."""
    queries = np.indices(size).reshape(2, -1)
    if pixel is not None:
        queries = np.array(pixel)[:, None]
    window = encoding.shape[:2]
    centre = np.array(window)[:, None, None] // 2
    if local:
        offsets = np.indices(window).reshape(2, 1, -1) - centre
        places = queries[:, :, None] + offsets
    else:
        places = np.indices(size).reshape(2, 1, -1)
        offsets = places - queries[:, :, None]
    limits = np.array(size)[:, None, None]
    inside = ((places >= 0) & (places < limits)).all(axis=0)
    rows, columns = np.clip(places, 0, limits - 1)
    offset_rows, offset_columns = offsets + centre
    shape = (queries.shape[1], offsets.shape[2])
    return Neighbourhood(
        queries[0] * size[1] + queries[1],
        np.broadcast_to(rows * size[1] + columns, shape),
        np.broadcast_to(offset_rows * window[1] + offset_columns, shape),
        np.broadcast_to(inside, shape),
    )


def _scores(
    query: Tensor,
    keys: Tensor,
    encoding: Tensor,
    embedding: Tensor | None,
    seen: Neighbourhood,
) -> tuple[Tensor, Tensor]:
    """Scores of content and group, and of positions.

    Returns:
        `(batch, heads, pixels, query elements, key elements, neighbours)` and
        `(batch, heads, elements, pixels, query elements, neighbours)`.
    """
    query = ops.take(_by_pixel(query), seen.queries, axis=1)
    content = ops.einsum("bigtc,biomtc->btigmo", query, seen.of(keys))
    *_, order, encoded = ops.shape(encoding)
    if embedding is not None:
        rest = query[..., encoded:]
        group = ops.einsum("bigtc,gmc->btigm", rest, embedding)
        content = content + group[..., None]
    encoding = ops.reshape(encoding, (-1, order, encoded))
    encoding = ops.take(encoding, seen.offsets, axis=0)
    position = ops.einsum("bigtc,iovc->btvigo", query[..., :encoded], encoding)
    lowest = ops.cast(MASKED, position.dtype)
    inside = ops.convert_to_tensor(seen.inside)[:, None]
    return content, ops.where(inside, position, lowest)


def _softmax(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Over several axes; TensorFlow's own takes no more than five axes."""
    top = ops.stop_gradient(ops.max(x, axis=axes, keepdims=True))
    x = ops.exp(x - top)
    return x / ops.sum(x, axis=axes, keepdims=True)


def _full(*tensors: Tensor | None) -> list[Any]:
    """At least in single precision."""
    return [None if x is None else in_full_precision(x) for x in tensors]


def _by_pixel(x: Tensor) -> Tensor:
    """`(batch, pixels, ...)`."""
    batch, height, width, *rest = ops.shape(x)
    return ops.reshape(x, (batch, height * width, *rest))
