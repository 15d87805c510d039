"""Depthwise convolution of a few statistics, as matrix products.

XLA's depthwise convolution on CPUs runs at a hundredth of the speed of its
matrix products. A row of the output is the product of the rows it sees with a
banded matrix; that is several times the arithmetic and many times faster.
"""

import functools
import math

import numpy as np
from jaxtyping import Float
from keras import ops

from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Tensor

# Columns of the output per product. Wider ones multiply more zeros.
TILE = 24


def depthwise_sum(
    x: Float[Tensor, "batch height width statistics channels"],
    kernel: Float[Tensor, "rows columns statistics channels"],
    dilation_rate: int = 1,
) -> Float[Tensor, "batch height width channels"]:
    """Correlates every channel with its filter, summed over the statistics.

    Zeros outside, stride 1.
    """
    if backend.slow_depthwise() and None not in x.shape[1:3]:
        return depthwise_banded(x, kernel, dilation_rate)
    return depthwise_native(x, kernel, dilation_rate)


def depthwise_native(
    x: Tensor, kernel: Tensor, dilation_rate: int = 1
) -> Tensor:
    """The backend's own depthwise convolution."""
    statistics, channels = kernel.shape[2:]
    size = ops.shape(x)[:3]
    y = ops.depthwise_conv(
        ops.reshape(x, (*size, statistics * channels)),
        ops.reshape(kernel, (*kernel.shape[:2], statistics * channels, 1)),
        padding="same",
        data_format="channels_last",
        dilation_rate=dilation_rate,
    )
    return ops.sum(ops.reshape(y, (*size, statistics, channels)), axis=3)


def depthwise_banded(
    x: Tensor, kernel: Tensor, dilation_rate: int = 1
) -> Tensor:
    """The same by one product per row of the filter."""
    rows, columns, statistics, channels = kernel.shape
    height, width = x.shape[1:3]
    tiles = math.ceil(width / TILE)
    tile = math.ceil(width / tiles)
    before, after = (
        dilation_rate * (rows - 1) // 2,
        dilation_rate * (columns - 1) // 2,
    )
    halo = tile + 2 * after
    # (channels, height, batch, statistics, width): channels are products of
    # their own, the other axes run through one of them.
    x = ops.transpose(x, (4, 1, 0, 3, 2))
    extra = tiles * tile - width
    x = ops.pad(
        x, ((0, 0), (before, before), (0, 0), (0, 0), (after, after + extra))
    )
    if tiles > 1:
        x = ops.stack(
            [x[..., i * tile : i * tile + halo] for i in range(tiles)], axis=3
        )
    band = _band(columns, dilation_rate, tile)
    band = ops.convert_to_tensor(band, dtype=kernel.dtype)
    matrices = ops.reshape(
        ops.einsum("uvsn,vpq->unspq", kernel, band),
        (rows, channels, statistics * halo, tile),
    )
    total = 0.0
    for u in range(rows):
        seen = x[:, u * dilation_rate : u * dilation_rate + height]
        seen = ops.reshape(seen, (channels, -1, statistics * halo))
        total = total + seen @ matrices[u]
    y = ops.reshape(total, (channels, height, -1, tiles * tile))
    return ops.transpose(y[..., :width], (2, 1, 3, 0))


@functools.lru_cache(maxsize=64)
def _band(columns: int, dilation_rate: int, tile: int) -> np.ndarray:
    """`(columns, halo, tile)`: 1 where output q sees input p through v."""
    halo = tile + dilation_rate * (columns - 1)
    p, q = np.arange(halo)[:, None], np.arange(tile)
    v = np.arange(columns)[:, None, None]
    return (p == q + v * dilation_rate).astype("float32")
