"""Group self-attention of one block after the other.

A block is some rows of all images, in some of the heads: its size is chosen
by what a step of the loop holds. All images of a batch are in every block, so
a batch that lies on several devices stays where it is. The backward pass keeps
queries, keys, values and one number for all neighbours of a pixel, and
computes each block anew.
"""

import functools
from collections.abc import Callable
from typing import Any
from typing import NamedTuple

from keras import ops

from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.numerics import in_full_precision
from keras_equiattn.ops.pairs import fused
from keras_equiattn.ops.pairs.fused import Positions
from keras_equiattn.ops.pairs.lines import ImageLines
from keras_equiattn.ops.pairs.lines import Place
from keras_equiattn.ops.pairs.lines import WindowLines


class Plan(NamedTuple):
    """How attention is cut into blocks.

    Attributes:
        size: rows and columns of the windows; None for the whole image.
        image: height and width of the images; None for what is known only at
            run time.
        heads: in a block.
        rows: of a block; None for all.
        rate: of dropout; zero for none.
        embedded: whether there is an embedding of relative elements.
    """

    size: int | None
    image: tuple[int | None, int | None]
    heads: int
    rows: int | None
    rate: float
    embedded: bool


def attend_in_blocks(
    plan: Plan,
    query: Float[Tensor, "batch height width query_order heads channels"],
    keys: Float[Tensor, "batch height width key_order heads channels"],
    values: Float[Tensor, "batch height width key_order heads channels"],
    encoding: Float[Tensor, "rows columns order encoded"],
    embedding: Float[Tensor, "query_order key_order embedded"] | None,
    seed: Float[Tensor, "4"] | None,
) -> Float[Tensor, "batch height width order heads channels"]:
    """`ops.group_self_attention`, see there."""
    batch, height = ops.shape(query)[:2]
    missing = 0 if plan.rows in (None, 1) else -height % plan.rows
    reach = 0 if plan.size is None else plan.size // 2
    around = [(0, 0), (reach, reach + missing), (reach, reach)]
    rest = [(0, 0)] * 3
    if missing:
        query = ops.pad(query, [(0, 0), (0, missing), (0, 0), *rest])
    if missing or reach:
        keys = ops.pad(keys, [*around, *rest])
        values = ops.pad(values, [*around, *rest])
    if plan.size is None:
        encoding = ops.transpose(encoding, (0, 2, 3, 1))
    given = [x for x in (embedding, seed) if x is not None]
    tensors = (
        *(_by_heads(x, plan.heads) for x in (query, keys, values)),
        encoding,
        *given,
    )
    shapes = tuple((tuple(x.shape), str(x.dtype)) for x in tensors)
    y = _attention(plan, shapes)(*tensors)
    return _as_images(y, batch, plan.heads)[:, :height]


def _by_heads(
    x: Float[Tensor, "batch height width order all_heads channels"], heads: int
) -> Float[Tensor, "steps channels order height width images"]:
    """What a step of the loop over the heads takes.

    `images` are the heads of a step of every image, image by image. They come
    last: compilers make vectors of what lies beside each other.
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

    The batch is given: divided by the heads, its size would be one of which
    OpenVINO knows nothing, and which it would forget all other sizes for.
    """
    steps, channels, order, height, width, _ = ops.shape(x)
    shape = (steps, channels, order, height, width, batch, heads)
    x = ops.transpose(ops.reshape(x, shape), (5, 3, 4, 2, 0, 6, 1))
    return ops.reshape(
        x, (batch, height, width, order, steps * heads, channels)
    )


@functools.lru_cache(maxsize=512)
def _attention(plan: Plan, shapes: Any) -> Callable[..., Tensor]:
    """Attention of all blocks, as a differentiable function.

    One for each set of shapes and dtypes: some compilers take no others.
    """
    lines = ImageLines() if plan.size is None else WindowLines(plan.size)

    def forward(*tensors: Tensor) -> Any:
        positions, seed = _unpacked(plan, tensors[3:])
        height = _height(plan, tensors[0])

        def step(_: Any, piece: Any) -> Any:
            query, keys, values, head = piece

            def block(_: Any, piece: Any) -> Any:
                query, number = piece
                y, logs = fused.attend(
                    lines,
                    _place(plan, height, number),
                    query,
                    keys,
                    values,
                    positions,
                    _dropout(plan, seed, query, (head, number)),
                )
                return (), (ops.cast(y, values.dtype), logs)

            pieces = _blocks(plan, query)
            like = (values, in_full_precision(query))
            y, logs = backend.scan(block, (), pieces, like=like)[1]
            return (), (_joined(y), logs)

        heads = backend.steps(ops.shape(tensors[0])[0])
        like = (tensors[2], in_full_precision(tensors[0]))
        return backend.scan(step, (), (*tensors[:3], heads), like=like)[1]

    def backward(
        tensors: tuple[Tensor, ...], logs: Tensor, upstream: Tensor
    ) -> tuple[Tensor, ...]:
        positions, seed = _unpacked(plan, tensors[3:])
        height = _height(plan, tensors[0])
        with_embedding = positions.embedding is not None

        def step(totals: Any, piece: Any) -> Any:
            query, keys, values, head, logs, upstream = piece

            def block(totals: Any, piece: Any) -> Any:
                query, number, upstream, logs = piece
                *totals, d_embedding = totals
                d_query, totals, found = fused.gradients(
                    lines,
                    _place(plan, height, number),
                    query,
                    keys,
                    values,
                    positions,
                    _dropout(plan, seed, query, (head, number)),
                    logs,
                    upstream,
                    tuple(totals),
                )
                if with_embedding:
                    d_embedding = d_embedding + found
                return (*totals, d_embedding), d_query

            start = tuple(
                ops.zeros(ops.shape(x), logs.dtype) for x in (keys, values)
            )
            pieces = (
                *_blocks(plan, query),
                _blocks(plan, upstream)[0],
                logs,
            )
            (d_keys, d_values, *totals), d_query = backend.scan(
                block, (*start, *totals), pieces, like=logs
            )
            gradients = (_joined(d_query), d_keys, d_values)
            return tuple(totals), tuple(
                ops.cast(d, x.dtype)
                for d, x in zip(gradients, (query, keys, values), strict=True)
            )

        start = (
            ops.zeros_like(positions.encoding),
            ops.zeros_like(positions.embedding) if with_embedding else (),
        )
        heads = backend.steps(ops.shape(tensors[0])[0])
        (d_encoding, d_embedding), gradients = backend.scan(
            step,
            start,
            (*tensors[:3], heads, logs, upstream),
            like=tensors[:3],
        )
        found = [d_encoding, d_embedding] if with_embedding else [d_encoding]
        found = [
            ops.cast(d, x.dtype)
            for d, x in zip(found, tensors[3:], strict=False)
        ]
        of_seed = () if seed is None else (ops.zeros_like(tensors[-1]),)
        return (*gradients, *found, *of_seed)

    return backend.custom_vjp(
        forward,
        backward,
        "recompute=False",
    )


def _unpacked(plan: Plan, rest: Any) -> tuple[Positions, Any]:
    """Positions, and the seed if there is one."""
    encoding, *rest = rest
    embedding = in_full_precision(rest[0]) if plan.embedded else None
    seed = backend.prepared_seed(rest[-1]) if plan.rate else None
    return Positions(in_full_precision(encoding), embedding), seed


def _height(
    plan: Plan, query: Float[Tensor, "steps channels order rows columns images"]
) -> Any:
    """Of the image; the rows of queries may be more, to fill a block."""
    height = plan.image[0]
    return ops.shape(query)[3] if height is None else height


def _place(plan: Plan, height: Any, block: Any) -> Place:
    if plan.rows is None:
        return Place(0, height, height)
    return Place(block * plan.rows, plan.rows, height)


def _dropout(
    plan: Plan, seed: Any, like: Tensor, place: tuple[Any, Any]
) -> fused.Dropout:
    """Draws the factors for scores of a line of a block."""
    if seed is None:
        return None
    like = in_full_precision(like)
    return lambda shape, line: backend.dropout_factors(
        shape, plan.rate, seed, (*place, line), like
    )


def _blocks(
    plan: Plan, x: Float[Tensor, "channels order height width images"]
) -> tuple[Float[Tensor, "blocks channels order rows width images"], Tensor]:
    """The blocks of all rows, and their numbers."""
    *outer, height, width, images = ops.shape(x)
    rows = height if plan.rows is None else plan.rows
    count = height // rows
    x = ops.reshape(x, (*outer, count, rows, width, images))
    return ops.moveaxis(x, 2, 0), backend.steps(count)


def _joined(
    x: Float[Tensor, "blocks channels order rows width images"],
) -> Float[Tensor, "channels order height width images"]:
    """Undoes `_blocks`."""
    count, channels, order, rows, width, images = ops.shape(x)
    x = ops.moveaxis(x, 0, 2)
    return ops.reshape(x, (channels, order, count * rows, width, images))
