"""Group self-attention of one tile after the other.

A tile is some heads of some images, as many as fill a cache. A head that does
not even fit by itself is done a block of rows at a time; with attention to the
whole image a block is one row. The backward pass keeps queries, keys, values
and one number for all neighbours of a pixel, and computes each block anew.
"""

import dataclasses
import functools
import math
from typing import Any
from typing import NamedTuple

from keras import ops

from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.pairs import factors as pair_attention
from keras_equiattn.ops.pairs.factors import Positions
from keras_equiattn.ops.pairs.neighbours import Planes
from keras_equiattn.ops.pairs.neighbours import Products
from keras_equiattn.ops.pairs.neighbours import Row

# Scores of a block: about what a cache holds; without a compiler, what makes up
# for the calls of many small functions; and what keeps a GPU busy.
COMPILED_TILE = 2**19
CPU_TILE = 2**21
GPU_TILE = 2**24
# Seeds are passed as float32, which holds these integers and, added to them,
# as many numbers of blocks.
SEEDS = 2**23


def attend_in_tiles(
    query: Float[Tensor, "batch height width query_order heads channels"],
    keys: Float[Tensor, "batch height width key_order heads channels"],
    values: Float[Tensor, "batch height width key_order heads channels"],
    encoding: Float[Tensor, "rows columns order encoded"],
    embedding: Float[Tensor, "query_order key_order embedded"] | None,
    local: bool,
    dropout: float,
    seed: Float[Tensor, "2"] | None,
) -> Float[Tensor, "batch height width order heads channels"]:
    """`ops.group_self_attention`, see there."""
    height, width = ops.shape(query)[1:3]
    size = encoding.shape[0] if local else None
    together, rows = block_size(query, keys, encoding, local, block_limit())
    tiles = _Tiles(
        size,
        query.shape[1] if local else None,
        rows,
        embedding is not None,
        0.0 if seed is None else dropout,
    )
    pieces = tiles.padded(query, keys, values)
    given = [x for x in (embedding, seed) if x is not None]
    tensors = (
        *(_as_tiles(x, together) for x in pieces),
        _by_element(encoding, local),
        *given,
    )
    y = _tiled(tiles, tuple(tuple(x.shape) for x in tensors))(*tensors)
    y = _as_images(y, query.shape[4])[:, :height, :width]
    # TensorFlow forgets axes of tiles whose sizes it does not know.
    shape = (ops.shape(query)[0], height, width, encoding.shape[2])
    return ops.reshape(y, (*shape, *query.shape[4:]))


def block_limit() -> int:
    """How many scores a block may have."""
    if not backend.on_cpu():
        return GPU_TILE
    return COMPILED_TILE if backend.will_compile() else CPU_TILE


def block_size(
    query: Tensor, keys: Tensor, encoding: Tensor, local: bool, limit: int
) -> tuple[int, int | None]:
    """How many heads, of all images, and rows make a block; None for all."""
    batch, height, width, elements, heads, _ = query.shape
    if not local:
        return 1, 1
    if not (isinstance(height, int) and isinstance(width, int)):
        return 1, None
    rows, columns, order, _ = encoding.shape
    pairs = elements * max(keys.shape[3], order)
    scores = rows * columns * pairs * height * (width + columns - 1)
    # JAX exports sizes as symbols.
    count = heads * (batch if isinstance(batch, int) else 1)
    fitting = (n for n in range(count, 1, -1) if n * scores <= limit)
    together = next((n for n in fitting if count % n == 0), 1)
    return together, math.ceil(height / math.ceil(scores / limit))


class _Part(NamedTuple):
    """What the rows of a block see.

    Attributes:
        windows: where neighbours lie.
        tensors: keys, values and encoding, as the windows take them.
        starts: where in the whole tensors they start.
    """

    windows: Any
    tensors: tuple[Tensor, Tensor, Tensor]
    starts: tuple[Any, Any, Any]


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """How attention takes tiles apart, and what it does with the parts.

    Queries, keys and values of a tile are `(channels, elements, heads, height,
    width)`.

    Attributes:
        size: rows and columns of the windows; None for the whole image.
        height: of the images; None if unknown, or without windows.
        rows: of a block; None for all.
        embedded: whether there is an embedding of relative elements.
        rate: of dropout.
    """

    size: int | None
    height: int | None
    rows: int | None
    embedded: bool
    rate: float

    def padded(
        self, query: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values with what windows see, queries as wide as they.

        With as many rows as fill the blocks.
        """
        if self.size is None:
            return query, keys, values
        reach = self.size // 2
        more = 0
        if self.rows is not None and self.height is not None:
            more = -self.height % self.rows
        rest = [(0, 0)] * 3
        behind = [(0, 0), (0, more), (0, self.size - 1), *rest]
        around = [(0, 0), (reach, reach + more), (reach, reach), *rest]
        query = ops.pad(query, behind)
        return query, ops.pad(keys, around), ops.pad(values, around)

    def unpack(self, rest: Any) -> tuple[Positions, Tensor | None]:
        """Positions, and the seed if there is one."""
        encoding, *rest = rest
        embedding = rest.pop(0) if self.embedded else None
        return Positions(encoding, embedding), rest.pop() if rest else None

    def attend(
        self, piece: Any, positions: Positions, seed: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The output of a tile, from query, keys, values and its number.

        And what `gradients` takes of each block.
        """
        query, keys, values, index = piece
        blocks, numbers = self._blocks(query)
        first = index * ops.cast(ops.shape(blocks)[0], "float32")

        def block(_: Any, piece: Any) -> Any:
            query, number = piece
            part = self._part(query, keys, values, positions, number)
            y, logs = pair_attention.attend(
                part.windows,
                part.windows.flat_queries(query),
                *part.tensors[:2],
                positions._replace(encoding=part.tensors[2]),
                self._dropout(seed, first + ops.cast(number, "float32")),
            )
            y = ops.reshape(y, (*ops.shape(y)[:3], *ops.shape(query)[3:]))
            return (), (y, logs)

        like = (query, query)
        y, logs = backend.scan(block, (), (blocks, numbers), like=like)[1]
        return _joined(y), logs

    def gradients(
        self,
        piece: Any,
        positions: Positions,
        seed: Tensor | None,
        logs: Tensor,
        upstream: Tensor,
    ) -> tuple[tuple[Tensor, Tensor, Tensor], list[Tensor]]:
        """Those of query, keys and values, and those of the positions."""
        query, keys, values, index = piece
        blocks, numbers = self._blocks(query)
        first = index * ops.cast(ops.shape(blocks)[0], "float32")

        def block(totals: Any, piece: Any) -> Any:
            query, upstream, number, logs = piece
            part = self._part(query, keys, values, positions, number)
            (d_query, *d_seen), d_positions = pair_attention.gradients(
                part.windows,
                part.windows.flat_queries(query),
                *part.tensors[:2],
                positions._replace(encoding=part.tensors[2]),
                self._dropout(seed, first + ops.cast(number, "float32")),
                logs,
                part.windows.flat_queries(upstream),
            )
            d_encoding, *rest = d_positions.given
            found = [*map(part.windows.rows_of_keys, d_seen), d_encoding]
            seen = [
                backend.add_at(total, start, d)
                for total, start, d in zip(
                    totals[:3], part.starts, found, strict=True
                )
            ]
            d_query = ops.reshape(d_query, ops.shape(query))
            return [*seen, *_added(totals[3:], rest)], d_query

        encoding, *rest = positions.given
        totals = [ops.zeros_like(x) for x in (keys, values, encoding, *rest)]
        pieces = (blocks, self._blocks(upstream)[0], numbers, logs)
        (d_keys, d_values, *d_positions), d_query = backend.scan(
            block, totals, pieces, like=query
        )
        return (_joined(d_query), d_keys, d_values), d_positions

    def _blocks(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`(blocks, channels, elements, heads, rows, width)` and numbers."""
        *outer, height, width = ops.shape(x)
        rows = height if self.rows is None else self.rows
        count = height // rows
        x = ops.reshape(x, (*outer, count, rows, width))
        return ops.moveaxis(x, 3, 0), backend.steps(count)

    def _part(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        positions: Positions,
        number: Tensor,
    ) -> _Part:
        """What the block of this number sees."""
        *outer, height, width = ops.shape(keys)
        encoding = positions.encoding
        if self.size is None:
            # All keys, at the offsets from this row.
            place: Any = (0,) * 5
            start: Any = (height - 1 - number, 0, 0, 0)
            encoding = backend.part_at(
                encoding, start, (height, *ops.shape(encoding)[1:])
            )
            windows: Any = Row(width)
        else:
            rows, columns = ops.shape(query)[3:]
            windows = self._windows(rows, columns, number * rows)
            place = (0, 0, 0, number * rows, 0)
            start = (0,) * 3
            shape = (*outer, rows + self.size - 1, width)
            keys, values = (
                backend.part_at(x, place, shape) for x in (keys, values)
            )
        flat = windows.flat_keys(keys), windows.flat_keys(values)
        return _Part(windows, (*flat, encoding), (place, place, start))

    def _windows(self, rows: Any, columns: Any, first: Tensor) -> Any:
        size = self.size or 1
        known = isinstance(rows, int) and isinstance(columns, int)
        kind = Planes if backend.in_xla() and known else Products
        height = rows if self.height is None else self.height
        return kind(size, rows, columns - size + 1, first, height)

    def _dropout(self, seed: Tensor | None, number: Tensor) -> Any:
        """Draws the factors of dropout for the scores of a block."""
        if seed is None:
            return None
        seed = ops.stack([seed[0] + number, seed[1]])
        return lambda scores: backend.dropout_factors(
            ops.shape(scores), self.rate, seed, scores.dtype
        )


def _joined(x: Tensor) -> Tensor:
    """`(blocks, channels, elements, heads, rows, width)` as a tile."""
    x = ops.moveaxis(x, 0, 3)
    return ops.reshape(x, (*ops.shape(x)[:3], -1, ops.shape(x)[5]))


def _added(totals: Any, terms: Any) -> list[Tensor]:
    return [total + x for total, x in zip(totals, terms, strict=True)]


@functools.lru_cache(maxsize=512)
def _tiled(tiles: _Tiles, shapes: Any) -> Any:
    """Attention of all tiles, as a differentiable function.

    One for each set of shapes, see `ops.windows`.
    """

    def forward(*tensors: Tensor) -> Any:
        positions, seed = tiles.unpack(tensors[3:])

        def tile(_: Any, piece: Any) -> Any:
            return (), tiles.attend(piece, positions, seed)

        pieces = (*tensors[:3], _numbers(tensors[0]))
        return backend.scan(tile, (), pieces, like=tensors[:2])[1]

    def backward(
        tensors: tuple[Tensor, ...], logs: Tensor, upstream: Tensor
    ) -> tuple[Tensor, ...]:
        positions, seed = tiles.unpack(tensors[3:])

        def tile(totals: Any, piece: Any) -> Any:
            *piece, logs, upstream = piece
            gradients, d_positions = tiles.gradients(
                piece, positions, seed, logs, upstream
            )
            return _added(totals, d_positions), gradients

        totals = list(map(ops.zeros_like, positions.given))
        pieces = (*tensors[:3], _numbers(tensors[0]), logs, upstream)
        totals, gradients = backend.scan(tile, totals, pieces, like=tensors[:3])
        unmoved = [] if seed is None else [ops.zeros_like(seed)]
        return (*gradients, *totals, *unmoved)

    return backend.custom_vjp(forward, backward, "recompute=False")


def _numbers(tiles: Tensor) -> Tensor:
    return ops.arange(ops.shape(tiles)[0], dtype="float32")


def _by_element(encoding: Tensor, local: bool) -> Tensor:
    """The encoding in the form that windows and rows take."""
    rows, columns, order, channels = ops.shape(encoding)
    if local:
        return ops.reshape(encoding, (rows * columns, order, channels))
    return ops.transpose(encoding, (0, 2, 3, 1))


def _as_tiles(x: Tensor, together: int) -> Tensor:
    """`(batch, height, width, elements, heads, channels)` as tiles.

    Returns:
        `(tiles, channels, elements, heads, height, width)`. Heads of a tile are
        as many as asked for of all images, whose number they divide.
    """
    _, height, width, elements, _, channels = ops.shape(x)
    x = ops.transpose(x, (0, 4, 5, 3, 1, 2))
    x = ops.reshape(x, (-1, together, channels, elements, height, width))
    return ops.transpose(x, (0, 2, 3, 1, 4, 5))


def _as_images(x: Tensor, heads: int) -> Tensor:
    """Undoes `_as_tiles`, for all the heads of an image."""
    _, channels, elements, _, height, width = ops.shape(x)
    x = ops.transpose(x, (0, 3, 1, 2, 4, 5))
    x = ops.reshape(x, (-1, heads, channels, elements, height, width))
    return ops.transpose(x, (0, 4, 5, 3, 1, 2))
