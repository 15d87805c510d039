"""Multi-head self-attention over all pixels, with one score for all poses."""

import functools

import numpy as np
from keras import ops

from keras_equiattn.ops import backend
from keras_equiattn.ops._arguments import checked
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
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
    v(z, p)`. A group that moves the elements of all arguments leaves the sum
    over them as it is, so the scores follow the pixels alone.

    Args:
        query: the queries, times the scale of the scores.
        key: the keys.
        value: the values.
        embedding: the embedding of relative positions, which is added to the
            keys. The relative position is zero at the middle of odd rows and
            columns, of which there are at least `2 height - 1` and `2 width -
            1`. None adds nothing.

    Returns:
        The result, and the weights from each pixel to all pixels, which are
        numbered row by row.

    Raises:
        ValueError: for shapes that do not fit, and for an embedding with even
            or too few rows or columns.
    """
    batch, height, width, order, heads, _ = ops.shape(query)
    pixels = height * width

    def by_head(x: Tensor) -> Tensor:
        """`(batch, heads, pixels, order * channels)`."""
        channels = x.shape[-1]
        x = ops.reshape(x, (batch, pixels, order, heads, channels))
        x = ops.transpose(x, (0, 3, 1, 2, 4))
        return ops.reshape(x, (batch, heads, pixels, order * channels))

    queries = by_head(query)
    # In half precision scores are rounded; `ops.dense` says why.
    scores = queries @ ops.swapaxes(by_head(key), -1, -2)
    if embedding is not None:
        scores = scores + _position_scores(queries, embedding, (height, width))
    weights = softmax(scores, (-1,))
    # OpenVINO's fusion of attention fails on a reshape right after the product.
    y = ops.swapaxes(weights @ by_head(value), 1, 2)
    y = ops.reshape(y, (batch, height, width, heads, order, value.shape[-1]))
    return ops.swapaxes(y, 3, 4), weights


def _position_scores(
    queries: Float[Tensor, "batch heads pixels values"],
    embedding: Float[Tensor, "order rows columns heads key_dim"],
    size: tuple[int, int],
) -> Float[Tensor, "batch heads pixels pixels"]:
    """The products of queries and embeddings of relative positions."""
    order, rows, columns, heads, _ = embedding.shape
    sizes = zip((rows, columns), size, strict=True)
    if any(n % 2 == 0 or n < 2 * seen - 1 for n, seen in sizes):
        raise ValueError(
            "`embedding` must have odd rows and columns, at least twice those "
            f"of the queries less one. Received: embedding.shape="
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
