"""Group self-attention, one block at a time.

A block is some rows of all images, in some of the heads: its size is chosen
by what a step of the loop holds. All images of a batch are in every block, so
a batch that lies on several devices stays where it is. The backward pass keeps
queries, keys, values and one number for all neighbours of a pixel, and
computes each block anew.
"""

import functools
import math
from collections.abc import Callable
from typing import Any
from typing import NamedTuple

from keras import ops

from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.numerics import dtype_of_sums
from keras_equiattn.ops.numerics import in_full_precision
from keras_equiattn.ops.pairs import fused
from keras_equiattn.ops.pairs.dispatch import Blocks
from keras_equiattn.ops.pairs.fused import Block
from keras_equiattn.ops.pairs.fused import Embedding
from keras_equiattn.ops.pairs.lines import Keys
from keras_equiattn.ops.pairs.lines import Lines
from keras_equiattn.ops.pairs.lines import Offsets
from keras_equiattn.ops.pairs.lines import Place
from keras_equiattn.ops.pairs.lines import Queries


class Settings(NamedTuple):
    """The settings that all blocks share and that are not tensors.

    Attributes:
        size: rows and columns of the windows; None for the whole image.
        disc: whether windows are discs.
        blocks: how attention is cut.
        height: the height of the images; None if it is known only at run time.
            The queries may have more rows, which fill the last block.
        rate: the rate of dropout; zero for none.
        embedded: whether there is an embedding of relative elements.
    """

    size: int | None
    disc: bool
    blocks: Blocks
    height: int | None
    rate: float
    embedded: bool


class Shared(NamedTuple):
    """What all blocks of some heads have in common, see `Block`."""

    settings: Settings
    offsets: Offsets
    embedding: Embedding | None
    seed: Any

    def block(
        self, query: Queries, keys: Keys, values: Keys, head: Any, number: Any
    ) -> Block:
        """Returns block `number` of step `head` of the loop over heads."""
        size, disc, blocks, height, rate, _ = self.settings
        if height is None:
            height = ops.shape(keys)[2] - (0 if size is None else size - 1)
        dropout = None
        if self.seed is not None:
            dropout = functools.partial(
                _dropout_factors, rate, self.seed, (head, number), query
            )
        rows, width = ops.shape(query)[2:4]
        place = Place(number * rows, rows, (height, width))
        return Block(
            Lines(size, disc, blocks.neighbours),
            place,
            query,
            keys,
            values,
            self.offsets,
            self.embedding,
            dropout,
        )


def attend_in_blocks(
    settings: Settings,
    query: Float[Tensor, "batch height width query_order heads channels"],
    keys: Float[Tensor, "batch height width key_order heads channels"],
    values: Float[Tensor, "batch height width key_order heads channels"],
    encoding: Float[Tensor, "rows columns order encoded"],
    embedding: Float[Tensor, "query_order key_order embedded"] | None,
    seed: Float[Tensor, "4"] | None,
) -> Float[Tensor, "batch height width order heads channels"]:
    """`ops.group_self_attention`, see there."""
    batch, height = ops.shape(query)[:2]
    heads, rows, neighbours = settings.blocks
    missing = 0 if rows in (None, 1) else -height % rows
    lines = Lines(settings.size, settings.disc, neighbours)
    offsets = lines.of_offsets(encoding)
    if missing:
        query = _padded(query, 1, (0, missing))
    if settings.size is not None:
        reach = settings.size // 2
        keys, values = (
            _padded(_padded(x, 1, (reach, reach + missing)), 2, (reach, reach))
            for x in (keys, values)
        )
    elif missing:
        offsets = _padded(offsets, 2, (0, missing))
    tensors = (
        *(_by_heads(x, heads) for x in (query, keys, values)),
        offsets,
        *(x for x in (embedding, seed) if x is not None),
    )
    y = _attention(settings, backend.signature(tensors))(*tensors)
    return _as_images(y, batch, heads)[:, :height]


def _padded(
    x: Float[Tensor, "..."], axis: int, width: tuple[Any, Any]
) -> Float[Tensor, "..."]:
    """Zeros before and after the entries of an axis."""
    shape = list(ops.shape(x))
    # Not all programs pad tensors of six axes.
    rest = math.prod(shape[axis + 1 :])
    x = ops.reshape(x, (*shape[: axis + 1], rest))
    x = ops.pad(x, [*[(0, 0)] * axis, width, (0, 0)])
    shape[axis] = shape[axis] + sum(width)
    return ops.reshape(x, shape)


def _by_heads(
    x: Float[Tensor, "batch height width order all_heads channels"], heads: int
) -> Float[Tensor, "steps channels order height width images"]:
    """Cuts a tensor into the parts that the steps of the loop over heads take.

    `images` are the heads of a step of every image, image by image. They come
    last, since compilers vectorise along the last axis.
    """
    batch, height, width, order, count, channels = ops.shape(x)
    shape = (batch, height, width, order, count // heads, heads, channels)
    x = ops.transpose(ops.reshape(x, shape), (4, 6, 3, 1, 2, 0, 5))
    return ops.reshape(
        x, (count // heads, channels, order, height, width, batch * heads)
    )


def _as_images(
    x: Float[Tensor, "steps channels order height width images"],
    batch: Any,
    heads: int,
) -> Float[Tensor, "batch height width order all_heads channels"]:
    """Undoes `_by_heads`.

    The size of the batch is an argument: if it were computed from the number
    of images and heads, OpenVINO would know neither it nor the other sizes.
    """
    steps, channels, order, height, width, _ = ops.shape(x)
    shape = (steps, channels, order, height, width, batch, heads)
    x = ops.transpose(ops.reshape(x, shape), (5, 3, 4, 2, 0, 6, 1))
    return ops.reshape(
        x, (batch, height, width, order, steps * heads, channels)
    )


@functools.lru_cache(maxsize=512)
def _attention(settings: Settings, shapes: Any) -> Callable[..., Tensor]:
    """Attention of all blocks, as a differentiable function.

    There is one function for each set of shapes and dtypes: some compilers take
    no others.
    """
    return backend.custom_vjp(
        functools.partial(_forward, settings),
        functools.partial(_backward, settings),
        "`recompute=False`",
    )


def _forward(settings: Settings, *tensors: Float[Tensor, "..."]) -> Any:
    """The output by heads, and the logarithms that `_backward` takes."""
    shared = _shared(settings, *tensors[2:])
    heads = backend.steps(ops.shape(tensors[0])[0])
    like = tensors[2], in_full_precision(tensors[0])
    step = functools.partial(_attend, shared)
    return backend.scan(step, (), (*tensors[:3], heads), like=like)[1]


def _attend(shared: Shared, _: Any, piece: Any) -> Any:
    """The output and logarithms of the heads of a step, for `scan`."""
    query, keys, values, head = piece

    def of_block(_: Any, piece: Any) -> Any:
        """The output and logarithms of one block."""
        query, number = piece
        y, logs = fused.attend(shared.block(query, keys, values, head, number))
        return (), (ops.cast(y, values.dtype), logs)

    pieces = _in_blocks(shared, query), _numbers(shared, query)
    like = values, in_full_precision(query)
    y, logs = backend.scan(of_block, (), pieces, like=like)[1]
    return (), (_joined(y), logs)


def _backward(
    settings: Settings,
    tensors: tuple[Float[Tensor, "..."], ...],
    logs: Float[Tensor, "steps blocks order query_order rows width images"],
    upstream: Float[Tensor, "steps channels order height width images"],
) -> tuple[Float[Tensor, "..."], ...]:
    """Gradients of all tensors that `_forward` takes."""
    shared = _shared(settings, *tensors[2:])
    start = tuple(
        () if x is None else ops.zeros(ops.shape(x), dtype_of_sums(x))
        for x in (shared.offsets, shared.embedding)
    )
    heads = backend.steps(ops.shape(tensors[0])[0])
    pieces = *tensors[:3], heads, logs, upstream
    step = functools.partial(_gradients, shared)
    totals, found = backend.scan(step, start, pieces, like=tensors[:3])
    found = [*found, *totals[: 1 + settings.embedded]]
    found = [ops.cast(d, x.dtype) for d, x in zip(found, tensors, strict=False)]
    return *found, *(ops.zeros_like(x) for x in tensors[len(found) :])


def _gradients(shared: Shared, totals: Any, piece: Any) -> Any:
    """Gradients of the heads of a step, for `scan`.

    Args:
        shared: what all steps have in common.
        totals: gradients of offsets and embedding, to be added to.
        piece: query, keys and values, the number of the step, the logarithms
            and the gradient of the output.
    """
    query, keys, values, head, logs, upstream = piece

    def of_block(totals: Any, piece: Any) -> Any:
        """Adds the gradients of one block, and returns that of its queries."""
        query, number, upstream, logs = piece
        *totals, d_embedding = totals
        block = shared.block(query, keys, values, head, number)
        d_query, totals, found = fused.gradients(
            block, logs, upstream, tuple(totals)
        )
        if found is not None:
            d_embedding = d_embedding + found
        return (*totals, d_embedding), d_query

    start = (ops.zeros(ops.shape(x), logs.dtype) for x in (keys, values))
    pieces = (
        _in_blocks(shared, query),
        _numbers(shared, query),
        _in_blocks(shared, upstream),
        logs,
    )
    (d_keys, d_values, *totals), d_query = backend.scan(
        of_block, (*start, *totals), pieces, like=logs
    )
    found = zip(
        (_joined(d_query), d_keys, d_values), (query, keys, values), strict=True
    )
    return tuple(totals), tuple(ops.cast(d, x.dtype) for d, x in found)


def _shared(
    settings: Settings,
    values: Float[Tensor, "..."],
    *rest: Float[Tensor, "..."],
) -> Shared:
    """Makes what all blocks share from the tensors after the values.

    Factors of the queries get the dtype of the values.
    """
    seed = backend.prepared_seed(rest[-1]) if settings.rate else None
    offsets, *others = (
        ops.cast(x, values.dtype) for x in rest[: 1 + settings.embedded]
    )
    embedding = others[0] if settings.embedded else None
    return Shared(settings, offsets, embedding, seed)


def _dropout_factors(
    rate: float,
    seed: Any,
    place: tuple[Any, Any],
    like: Float[Tensor, "..."],
    shape: Any,
    line: Any,
) -> Tensor:
    """Draws the factors for scores of a line of a block."""
    like = in_full_precision(like)
    return backend.dropout_factors(shape, rate, seed, (*place, line), like)


def _in_blocks(
    shared: Shared, x: Float[Tensor, "channels order height width images"]
) -> Float[Tensor, "blocks channels order rows width images"]:
    """The rows of each block."""
    *outer, height, width, images = ops.shape(x)
    rows = shared.settings.blocks.rows or height
    x = ops.reshape(x, (*outer, height // rows, rows, width, images))
    return ops.moveaxis(x, 2, 0)


def _numbers(
    shared: Shared, query: Float[Tensor, "channels order height width images"]
) -> Any:
    """The numbers of the blocks, for `scan`."""
    height = ops.shape(query)[2]
    return backend.steps(height // (shared.settings.blocks.rows or height))


def _joined(
    x: Float[Tensor, "blocks channels order rows width images"],
) -> Float[Tensor, "channels order height width images"]:
    """Undoes `_in_blocks`."""
    count, channels, order, rows, width, images = ops.shape(x)
    x = ops.moveaxis(x, 0, 2)
    return ops.reshape(x, (channels, order, count * rows, width, images))
