"""Relative positions: offsets, what a group does to them, and an encoder."""

from typing import Any

import numpy as np
from keras import ops

from keras_equiattn import groups
from keras_equiattn.groups import Group
from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.numerics import divided
from keras_equiattn.ops.numerics import larger
from keras_equiattn.ops.numerics import layer_norm

# Numbers nearer to zero than this are rounding errors. In float32 rounding
# errors are below 2e-7, and all other offsets that a group sees are far larger,
# up to images of 500 pixels a side.
ROUNDED = 1e-6


def window_offsets(size: int) -> np.ndarray:
    """`(size, size, 2)`: offsets of a window, at most 1 in rows and columns.

    Args:
        size: rows and columns of the window, odd.
    """
    reach = size // 2
    offsets = np.moveaxis(np.indices((size, size)), 0, -1) - reach
    return offsets / max(reach, 1)


def image_offsets(height: Any, width: Any, dtype: str) -> Tensor:
    """`(2 height - 1, 2 width - 1, 2)`: offsets of the pixels of an image.

    Both axes have the same unit, so that a turned image has turned offsets: the
    longer side reaches 1.

    Args:
        height, width: the size of the image; tensors where known only at run
            time.
        dtype: the dtype of the offsets.
    """
    rows = ops.arange(2 * height - 1, dtype="int32") - (height - 1)
    columns = ops.arange(2 * width - 1, dtype="int32") - (width - 1)
    longer = larger(larger(height, width) - 1, 1)
    offsets = ops.stack(ops.meshgrid(rows, columns, indexing="ij"), axis=-1)
    return divided(ops.cast(offsets, dtype), longer)


def seen_offsets(
    offsets: Float[Tensor, "*shape 2"], group: str | Group
) -> Float[Tensor, "*shape order 2"]:
    """Offsets as each group element sees them: `h^-1 o`.

    On the diagonals, where p8 sees zero, products may round to a number of
    either sign, which an encoding with a tiny epsilon would amplify. The
    offsets have a largest component of about 1.
    """
    group = groups.get(group)
    inverses = group.matrices[group.inverse]
    matrices = backend.constant(inverses, offsets, offsets.dtype)
    seen = ops.einsum("hij,...j->...hi", matrices, offsets)
    return ops.where(ops.abs(seen) < ROUNDED, ops.zeros_like(seen), seen)


def encode(
    coordinate: Float[Tensor, "*shape"],
    first: tuple[Float[Tensor, "1 hidden"], Float[Tensor, " hidden"]],
    norm: tuple[Float[Tensor, " hidden"], Float[Tensor, " hidden"]],
    second: tuple[Float[Tensor, "hidden channels"], Float[Tensor, " channels"]],
    epsilon: float,
) -> Float[Tensor, "*shape channels"]:
    """A small network of one coordinate.

    Dense, layer normalisation, SiLU, dense.

    Args:
        coordinate: row or column of offsets.
        first: kernel `(1, hidden)` and bias `(hidden,)`.
        norm: scale and shift `(hidden,)`.
        second: kernel `(hidden, channels)` and bias `(channels,)`.
        epsilon: added to the variance of the hidden units.
    """
    x = coordinate[..., None] * first[0][0] + first[1]
    x = layer_norm(x, *norm, epsilon)
    return ops.silu(x) @ second[0] + second[1]
