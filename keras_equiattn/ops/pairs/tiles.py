"""Group self-attention of one tile after the other, without a compiler.

A tile is some heads, of any images, and takes few large operators. A head that
is too large by itself is done a block of rows at a time; with attention to the
whole image a block is one row. The backward pass keeps queries, keys, values
and one number for all neighbours of a pixel, and computes each block anew.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import keras
from keras import ops

from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.numerics import in_full_precision
from keras_equiattn.ops.pairs import factors as pair_attention
from keras_equiattn.ops.pairs.factors import Positions
from keras_equiattn.ops.pairs.neighbours import ImageNeighbours
from keras_equiattn.ops.pairs.neighbours import WindowNeighbours


def attend_in_tiles(
    query: Float[Tensor, "batch height width query_order heads channels"],
    keys: Float[Tensor, "batch height width key_order heads channels"],
    values: Float[Tensor, "batch height width key_order heads channels"],
    encoding: Float[Tensor, "rows columns order encoded"],
    embedding: Float[Tensor, "query_order key_order embedded"] | None,
    seed: Float[Tensor, "4"] | None,
    local: bool,
    dropout: float,
    count: int,
    rows: int | None,
) -> Float[Tensor, "batch height width order heads channels"]:
    """`ops.group_self_attention`, see there.

    Args:
        query, keys, values, encoding, embedding, local, dropout: see there.
        seed: of `backend.seed_as_floats`.
        count: heads of a tile.
        rows: of a block; None for all.
    """
    height, width = ops.shape(query)[1:3]
    tiles = _Tiles(
        encoding.shape[0] if local else None,
        query.shape[1] if local else None,
        count,
        rows,
        embedding is not None,
        0.0 if seed is None else dropout,
    )
    maps = tiles.padded(query, keys, values)
    given = [x for x in (embedding, seed) if x is not None]
    tensors = (*map(_by_head, maps), _by_element(encoding, local), *given)
    y = _tiled(tiles, tuple(tuple(x.shape) for x in tensors))(*tensors)
    y = _as_images(y, query.shape[4])[:, :height, :width]
    # TensorFlow forgets axes of tiles whose sizes it does not know.
    shape = (ops.shape(query)[0], height, width, encoding.shape[2])
    return ops.reshape(y, (*shape, *query.shape[4:]))


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
    width)`, with the heads of several images along one axis.

    Attributes:
        size: rows and columns of the windows; None for the whole image.
        height: of the images; None if unknown, or without windows.
        count: heads of a tile.
        rows: of a block; None for all.
        embedded: whether there is an embedding of relative elements.
        rate: of dropout.
    """

    size: int | None
    height: int | None
    count: int
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

    def unpack(self, rest: Any) -> tuple[Positions, Any]:
        """Positions, and the seed if there is one."""
        encoding, *rest = rest
        encoding = in_full_precision(encoding)
        embedding = in_full_precision(rest.pop(0)) if self.embedded else None
        seed = backend.prepared_seed(rest.pop()) if rest else None
        return Positions(encoding, embedding), seed

    def attend(
        self, maps: Any, number: Any, positions: Positions, seed: Any
    ) -> tuple[Tensor, Tensor]:
        """The output of a tile, from its query, keys and values.

        And what `gradients` takes of each block.
        """
        query, keys, values = map(in_full_precision, maps)
        tile = number
        blocks, numbers = self._blocks(query)

        def block(_: Any, piece: Any) -> Any:
            query, number = piece
            part = self._part(query, keys, values, positions, number)
            y, logs = pair_attention.attend(
                part.windows,
                part.windows.flat_queries(query),
                *part.tensors[:2],
                positions._replace(encoding=part.tensors[2]),
                self._dropout(seed, (tile, number), query),
            )
            y = ops.reshape(y, (*ops.shape(y)[:3], *ops.shape(query)[3:]))
            return (), (y, logs)

        like = (query, query)
        y, logs = backend.scan(block, (), (blocks, numbers), like=like)[1]
        return _joined(y), logs

    def gradients(
        self,
        maps: Any,
        number: Any,
        positions: Positions,
        seed: Any,
        logs: Tensor,
        upstream: Tensor,
    ) -> tuple[tuple[Tensor, Tensor, Tensor], list[Tensor]]:
        """Those of query, keys and values, and those of the positions."""
        query, keys, values = map(in_full_precision, maps)
        upstream = in_full_precision(upstream)
        tile = number
        blocks, numbers = self._blocks(query)

        def block(totals: Any, piece: Any) -> Any:
            query, upstream, number, logs = piece
            part = self._part(query, keys, values, positions, number)
            (d_query, *d_seen), d_positions = pair_attention.gradients(
                part.windows,
                part.windows.flat_queries(query),
                *part.tensors[:2],
                positions._replace(encoding=part.tensors[2]),
                self._dropout(seed, (tile, number), query),
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
            windows: Any = ImageNeighbours(width)
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
        height = rows if self.height is None else self.height
        width = columns - size + 1
        return WindowNeighbours(size, rows, width, first, height)

    def _dropout(self, seed: Any, place: tuple[Any, Any], like: Tensor) -> Any:
        """Draws the factors of dropout for the scores of a block."""
        if seed is None:
            return None
        return lambda scores: backend.dropout_factors(
            ops.shape(scores), self.rate, seed, place, like
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

        def tile(number: Any, maps: Any) -> Any:
            maps = [_elements_first(x) for x in maps]
            y, logs = tiles.attend(maps, number, positions, seed)
            y = ops.cast(_heads_first(y), tensors[2].dtype)
            return number + 1, (y, ops.moveaxis(logs, 4, 0))

        like = (tensors[2], in_full_precision(tensors[0]))
        return _over_tiles(tile, 0, tensors[:3], tiles.count, like)[1]

    def backward(
        tensors: tuple[Tensor, ...], logs: Tensor, upstream: Tensor
    ) -> tuple[Tensor, ...]:
        positions, seed = tiles.unpack(tensors[3:])

        def tile(carry: Any, pieces: Any) -> Any:
            number, totals = carry
            *maps, logs, upstream = pieces
            found, d_positions = tiles.gradients(
                [_elements_first(x) for x in maps],
                number,
                positions,
                seed,
                ops.moveaxis(logs, 0, 4),
                _elements_first(upstream),
            )
            found = tuple(
                ops.cast(_heads_first(d), x.dtype)
                for d, x in zip(found, maps, strict=True)
            )
            return (number + 1, _added(totals, d_positions)), found

        totals = list(map(ops.zeros_like, positions.given))
        pieces = (*tensors[:3], logs, upstream)
        (_, totals), gradients = _over_tiles(
            tile, (0, totals), pieces, tiles.count, tensors[:3]
        )
        totals = [
            ops.cast(d, x.dtype)
            for d, x in zip(totals, tensors[3:], strict=False)
        ]
        unmoved = [] if seed is None else [ops.zeros_like(tensors[-1])]
        return (*gradients, *totals, *unmoved)

    return backend.custom_vjp(forward, backward, "recompute=False")


def _over_tiles(
    function: Callable[..., Any], carry: Any, xs: Any, count: int, like: Any
) -> Any:
    """`backend.scan_groups`, or `scan` where it is not known how many."""
    if isinstance(xs[0].shape[0], int):
        return backend.scan_groups(function, carry, xs, count, like)

    def one(carry: Any, xs: Any) -> Any:
        carry, outputs = function(carry, [x[None] for x in xs])
        return carry, keras.tree.map_structure(lambda y: y[0], outputs)

    return backend.scan(one, carry, xs, like)


def _by_element(encoding: Tensor, local: bool) -> Tensor:
    """The encoding in the form that windows and rows take."""
    rows, columns, order, channels = ops.shape(encoding)
    if local:
        return ops.reshape(encoding, (rows * columns, order, channels))
    return ops.transpose(encoding, (0, 2, 3, 1))


def _by_head(
    x: Float[Tensor, "batch height width order heads channels"],
) -> Float[Tensor, "all_heads order channels height width"]:
    """The heads of all images along the first axis, image by image."""
    _, height, width, order, _, channels = ops.shape(x)
    x = ops.transpose(x, (0, 4, 3, 5, 1, 2))
    return ops.reshape(x, (-1, order, channels, height, width))


def _as_images(
    x: Float[Tensor, "all_heads order channels height width"], heads: int
) -> Float[Tensor, "batch height width order heads channels"]:
    """Undoes `_by_head`."""
    _, order, channels, height, width = ops.shape(x)
    x = ops.reshape(x, (-1, heads, order, channels, height, width))
    return ops.transpose(x, (0, 4, 5, 2, 1, 3))


def _elements_first(
    x: Float[Tensor, "heads order channels height width"],
) -> Float[Tensor, "channels order heads height width"]:
    """A tile as it is taken."""
    return ops.transpose(x, (2, 1, 0, 3, 4))


def _heads_first(
    x: Float[Tensor, "channels order heads height width"],
) -> Float[Tensor, "heads order channels height width"]:
    """Undoes `_elements_first`."""
    return ops.transpose(x, (2, 1, 0, 3, 4))
