"""Multi-head self-attention over all pixels, with one score for all poses."""

import functools
from collections.abc import Sequence

import numpy as np
from keras import ops

from keras_equiattn.groups import Group
from keras_equiattn.ops import backend
from keras_equiattn.ops._arguments import checked
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.group import dispatch
from keras_equiattn.ops.group.block_linear import linear_from_sums
from keras_equiattn.ops.group.block_linear import linear_to_sums
from keras_equiattn.ops.group.irreps import blocks
from keras_equiattn.ops.group.irreps import regular_basis
from keras_equiattn.ops.group.linear import group_linear
from keras_equiattn.ops.numerics import softmax


@checked()
def multi_head_attention(
    query: Float[Tensor, "batch height width order heads key_dim"],
    key: Float[Tensor, "batch height width order heads key_dim"],
    value: Float[Tensor, "batch height width order heads value_dim"],
    embedding: Float[Tensor, "order rows columns heads key_dim"] | None = None,
) -> tuple[
    Float[Tensor, "batch height width order heads value_dim"],
    Float[Tensor, "batch heads pixels pixels"],
]:
    """Each pixel adds up the values of all pixels, weighted by their keys.

    With scores `s(x, z) = sum_p <q(x, p), k(z, p) + e(p, z - x)>` for each head
    and `w(x, z)` their softmax over the pixels `z`: `y(x, p) = sum_z w(x, z)
    v(z, p)`. A score is a sum over the group elements. It stays the same when
    a group permutes them in all arguments, so scores only follow the pixels.

    Args:
        query: the queries, times the scale of the scores.
        key: the keys.
        value: the values.
        embedding: the embedding of relative positions, which is added to the
            keys. It has an odd number of rows, at least `2 height - 1`, and of
            columns, at least `2 width - 1`; the relative position zero is at
            their middle. None adds nothing.

    Returns:
        The result, and the weights from each pixel to all pixels, which are
        numbered row by row.

    Raises:
        ValueError: for shapes that do not fit, for an embedding with even or
            too few rows or columns, and for an embedding where the height or
            width is known only at run time.
    """
    batch, height, width, order = ops.shape(query)[:4]
    pixels = height * width
    queries, keys, values = (
        _merged(_by_head(ops.reshape(x, (batch, pixels, *ops.shape(x)[3:]))))
        for x in (query, key, value)
    )
    y, weights = _attended(queries, keys, values, embedding, (height, width))
    (y,) = _by_pixel(y, ((order, 1),), (height, width))
    return ops.reshape(y, ops.shape(value)), weights


def multi_head_attention_on_group(
    x: Float[Tensor, "batch height width order channels"],
    inner: tuple[Tensor, Tensor],
    outer: tuple[Tensor, Tensor],
    embedding: Float[Tensor, "order rows columns heads key_dim"] | None,
    num_heads: int,
    group: Group,
    basis: str | None,
) -> tuple[
    Float[Tensor, "batch height width order channels"],
    Float[Tensor, "batch heads pixels pixels"],
]:
    """`multi_head_attention` between linear maps of a feature map.

    A score is a sum of products over the group elements, and so also a sum of
    products over waves of unit norm. In the basis of the irreducible
    representations nothing is transformed back before the last linear map.

    Args:
        x: the feature map.
        inner: kernel and bias of the linear map to queries, keys and values,
            which lie beside each other. The scale of the scores is part of the
            map to the queries.
        outer: kernel and bias of the linear map of the result.
        embedding: the embedding of relative positions, or None.
        num_heads: number of heads.
        group: the group.
        basis: the basis of the linear maps, see `group_linear`.

    Returns:
        A feature map, and the weights from each pixel to all pixels.
    """
    order, channels = x.shape[-2:]
    size = ops.shape(x)[1:3]
    in_waves = dispatch.by_blocks(x, channels, basis)
    basis = "irreps" if in_waves else "regular"
    layout = [(order, 1)]
    if in_waves:
        layout = [(block.rows, block.size) for block in blocks(group)]
        parts = linear_to_sums(x, *inner, group)
        if embedding is not None:
            waves = backend.constant(
                regular_basis(group), embedding, embedding.dtype
            )
            flat = ops.reshape(embedding, (order, -1))
            embedding = ops.reshape(waves @ flat, embedding.shape)
    else:
        parts = [group_linear(x, *inner, group, basis)]
    queries, keys, values = _three_by_head(parts, num_heads, channels)
    y, weights = _attended(queries, keys, values, embedding, size)
    parts = _by_pixel(y, layout, size)
    if in_waves:
        return linear_from_sums(parts, *outer, group), weights
    return group_linear(parts[0], *outer, group, basis), weights


def _three_by_head(
    parts: Sequence[Float[Tensor, "batch height width _ _"]],
    heads: int,
    channels: int,
) -> list[Float[Tensor, "batch heads pixels values"]]:
    """Queries, keys and values by head.

    Args:
        parts: the three beside each other, as one feature map or as its sums.
        heads: number of heads.
        channels: the channels of each of the three.
    """
    split = 3, heads, channels // heads
    of_parts = []
    for part in parts:
        batch, height, width, rows, values = ops.shape(part)
        waves = rows * values // (3 * channels)
        maps = ops.reshape(part, (batch, height * width, waves, *split))
        maps = ops.split(maps, 3, axis=3)
        of_parts.append([_by_head(ops.squeeze(x, 3)) for x in maps])
    return [
        _merged(ops.concatenate(found, axis=3))
        for found in zip(*of_parts, strict=True)
    ]


def _by_head(
    x: Float[Tensor, "batch pixels waves heads channels"],
) -> Float[Tensor, "batch heads pixels waves channels"]:
    """What each head has of a feature map."""
    return ops.transpose(x, (0, 3, 1, 2, 4))


def _merged(x: Float[Tensor, "*outer _ _"]) -> Float[Tensor, "*outer _"]:
    """One axis in place of the last two."""
    *outer, rows, columns = ops.shape(x)
    return ops.reshape(x, (*outer, rows * columns))


def _by_pixel(
    x: Float[Tensor, "batch heads pixels values"],
    layout: Sequence[tuple[int, int]],
    size: tuple[int | Tensor, int | Tensor],
) -> list[Float[Tensor, "batch height width _ _"]]:
    """Joins the values of all heads to a feature map, or to its sums.

    Args:
        x: the values of each head.
        layout: how many rows and columns of elements, or of waves, the last two
            axes of each result hold.
        size: height and width of the images.
    """
    batch, heads, _, values = ops.shape(x)
    sizes = [rows * columns for rows, columns in layout]
    channels = values // sum(sizes)
    # OpenVINO's fusion of attention fails on a reshape right after the product.
    x = ops.swapaxes(x, 1, 2)
    x = ops.reshape(x, (batch, *size, heads, sum(sizes), channels))
    parts = backend.parted(ops.swapaxes(x, 3, 4), sizes, 3)
    return [
        ops.reshape(part, (batch, *size, rows, columns * heads * channels))
        for part, (rows, columns) in zip(parts, layout, strict=True)
    ]


def _attended(
    queries: Float[Tensor, "batch heads pixels values"],
    keys: Float[Tensor, "batch heads pixels values"],
    values: Float[Tensor, "batch heads pixels more_values"],
    embedding: Float[Tensor, "order rows columns heads key_dim"] | None,
    size: tuple[int | Tensor, int | Tensor],
) -> tuple[
    Float[Tensor, "batch heads pixels more_values"],
    Float[Tensor, "batch heads pixels pixels"],
]:
    """`multi_head_attention`, head by head."""
    # In half precision scores are rounded; `ops.dense` says why.
    scores = queries @ ops.swapaxes(keys, -1, -2)
    if embedding is not None:
        scores = scores + _position_scores(queries, embedding, size)
    weights = softmax(scores, (-1,))
    return weights @ values, weights


def _position_scores(
    queries: Float[Tensor, "batch heads pixels values"],
    embedding: Float[Tensor, "order rows columns heads key_dim"],
    size: tuple[int | Tensor, int | Tensor],
) -> Float[Tensor, "batch heads pixels pixels"]:
    """The products of queries and embeddings of relative positions."""
    order, rows, columns, heads, _ = embedding.shape
    if not all(isinstance(n, int) for n in size):
        raise ValueError(
            "With `embedding`, `multi_head_attention` takes no height or width "
            f"that is known only at run time. Received: height={size[0]}, "
            f"width={size[1]}"
        )
    sizes = zip((rows, columns), size, strict=True)
    if any(n % 2 == 0 or n < 2 * seen - 1 for n, seen in sizes):
        raise ValueError(
            "`embedding` must have odd numbers of rows and columns, at least "
            f"`2 n - 1` for `n` of the queries. Received: embedding.shape="
            f"{tuple(embedding.shape)} for {size[0]} x {size[1]} pixels"
        )
    flat = ops.reshape(embedding, (order, rows * columns, heads, -1))
    by_place = ops.transpose(flat, (1, 2, 0, 3))
    by_place = ops.reshape(by_place, (rows * columns, heads, -1))
    places = _places(size, (rows, columns))
    # Each pixel is multiplied with the embeddings that it meets.
    met = ops.take(by_place, backend.constant(places, embedding), axis=0)
    met = ops.transpose(met, (0, 2, 3, 1))  # (pixel, heads, values, pixels)
    by_pixel = ops.transpose(queries, (2, 1, 0, 3)) @ met
    return ops.transpose(by_pixel, (2, 1, 0, 3))


@functools.lru_cache(maxsize=64)
def _places(size: tuple[int, int], table: tuple[int, int]) -> np.ndarray:
    """`(pixels, pixels)`: where the table has the offset of two pixels."""
    rows, columns = (
        np.arange(n) - np.arange(n)[:, None] + m // 2
        for n, m in zip(size, table, strict=True)
    )
    places = rows[:, None, :, None] * table[1] + columns[None, :, None, :]
    pixels = size[0] * size[1]
    return places.reshape(pixels, pixels).astype(np.int32)
