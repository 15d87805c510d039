"""Numerics that are the same on every backend.

The module has conversions between precisions; sums, means, softmaxes and layer
normalisation in single precision at least; and the arithmetic of sizes that may
be known only at run time.
"""

import math
from typing import Any

import keras
from keras import ops

from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Shaped
from keras_equiattn.ops._types import Tensor

# A masked score: far below every other, and finite in float32.
MASKED = -1e30


def in_full_precision(x: Shaped[Tensor, "*axes"]) -> Shaped[Tensor, "*axes"]:
    """Half precision as float32, the rest as it is."""
    return ops.cast(x, dtype_of_sums(x))


def is_half(x: Shaped[Tensor, "..."]) -> bool:
    """Whether these are numbers of half precision."""
    return dtype_name(x) in ("float16", "bfloat16")


def dtype_of_sums(x: Shaped[Tensor, "..."]) -> str:
    """The dtype in which to add up numbers like `x`: float32 at least."""
    dtype = dtype_name(x)
    return "float32" if is_half(x) or dtype == "bool" else dtype


def dtype_name(x: Shaped[Tensor, "..."]) -> str:
    """The name of the dtype of a tensor of any shape."""
    return str(keras.backend.standardize_dtype(x.dtype))


def of_one_dtype(
    tensors: tuple[Float[Tensor, "..."] | None, ...],
) -> tuple[Any, ...]:
    """The tensors in one dtype: float32 at least where theirs differ."""
    dtypes = {dtype_name(x) for x in tensors if x is not None}
    if len(dtypes) == 1:
        return tensors
    dtype = "float64" if "float64" in dtypes else "float32"
    return tuple(None if x is None else ops.cast(x, dtype) for x in tensors)


def lowest_score(x: Float[Tensor, "..."]) -> float:
    """The score that masks a neighbour, finite in the dtype of `x`."""
    dtype = dtype_name(x)
    return -6e4 if dtype == "float16" else MASKED


def mean(
    x: Float[Tensor, "..."],
    axis: int | tuple[int, ...],
    dtype: str | None = None,
) -> Float[Tensor, "..."]:
    """The mean, summed in float32 for half precision, in float64 for float64.

    This is not `ops.mean`, which rounds float64 to float32 under PyTorch.

    Args:
        x: any tensor.
        axis: the axis or axes to average over.
        dtype: the dtype of the mean; None is that of `x`.
    """
    axes = (axis,) if isinstance(axis, int) else axis
    sizes = [ops.shape(x)[each] for each in axes]
    total = divided(sum_in_full_precision(x, axes), *sizes)
    return ops.cast(total, dtype or x.dtype)


def divided(x: Float[Tensor, "*axes"], *sizes: Any) -> Float[Tensor, "*axes"]:
    """`x` over the product of sizes, which may be known only at run time.

    Sizes that are known stay numbers, which need not be sent to a device.
    """
    if all(isinstance(size, int) for size in sizes):
        return x / math.prod(sizes)
    return x / ops.cast(ops.prod(ops.stack(sizes)), x.dtype)


def part_size(length: int, most: int) -> int:
    """The size of parts, for the fewest parts of at most `most` entries.

    All parts have this size but the last, which may be somewhat smaller.
    """
    return -(-length // -(-length // most))


def item_size(x: Shaped[Tensor, "..."]) -> int:
    """The bytes of a floating point number of a tensor."""
    return 2 if is_half(x) else {"float64": 8}.get(dtype_name(x), 4)


def larger(size: Any, other: Any) -> Any:
    """The larger of two sizes, which may be known only at run time."""
    if isinstance(size, int) and isinstance(other, int):
        return max(size, other)
    return ops.maximum(size, other)


def smaller(size: Any, other: Any) -> Any:
    """The smaller of two sizes, which may be known only at run time."""
    if isinstance(size, int) and isinstance(other, int):
        return min(size, other)
    return ops.minimum(size, other)


def sum_in_full_precision(
    x: Float[Tensor, "..."], axes: tuple[int, ...]
) -> Float[Tensor, "..."]:
    """The sum over some axes, in float32 for half precision."""
    if keras.backend.backend() == "torch" and ops.is_tensor(x):
        # PyTorch does this without a copy of `x` in float32; compilers do the
        # same with a cast. An empty tensor turns the name of the dtype into
        # PyTorch's dtype.
        dtype = ops.zeros((0,), dtype_of_sums(x)).dtype
        return x.sum(axes, dtype=dtype)
    return ops.sum(in_full_precision(x), axis=axes)


def sums_of_blocks(
    x: Float[Tensor, "..."], blocks: int, axis: int
) -> Float[Tensor, "..."]:
    """Splits an axis into equal parts, and sums each of them.

    The axis then has one entry for each part.
    """
    shape = list(ops.shape(x))
    length = shape[axis] // blocks if blocks > 1 else shape[axis]
    shape[axis : axis + 1] = [blocks, length]
    return ops.sum(ops.reshape(x, shape), axis=axis + 1)


def moments(
    x: Float[Tensor, "..."], axis: tuple[int, ...]
) -> tuple[Float[Tensor, "*kept"], Float[Tensor, "*kept"]]:
    """Mean and variance, see `mean`."""
    middle = mean(x, axis)
    spread = x - ops.expand_dims(middle, axis)
    return middle, mean(spread * spread, axis)


def layer_norm(
    x: Float[Tensor, "*outer channels"],
    scale: Float[Tensor, " channels"],
    shift: Float[Tensor, " channels"],
    epsilon: float,
) -> Float[Tensor, "*outer channels"]:
    """Channels to mean 0 and variance 1, then scaled and shifted."""
    dtype = dtype_name(x)
    x = in_full_precision(x)
    x = x - mean(x, axis=-1)[..., None]
    variance = mean(ops.square(x), axis=-1)[..., None]
    x = ops.cast(x * ops.rsqrt(variance + epsilon), dtype)
    return x * scale + shift


def softmax(
    x: Float[Tensor, "*axes"], axes: tuple[int, ...]
) -> Float[Tensor, "*axes"]:
    """The softmax over one axis or several, in float32 for half precision.

    The result has the dtype of `x`. TensorFlow's own softmax accepts tensors of
    at most five axes.
    """
    if 0 in tuple(x.shape):  # some backends refuse it
        return x
    # Keras warns of a softmax over one number, as for a query with one key.
    has_kernel = len(axes) == 1 and x.shape[axes[0]] != 1
    if keras.backend.backend() == "torch" and has_kernel:
        # PyTorch's kernel computes in float32 without a copy in float32.
        return ops.softmax(x, axis=axes[0])
    scores = in_full_precision(x)
    top = ops.stop_gradient(ops.max(scores, axis=axes, keepdims=True))
    # Exponentials are computed twice, which costs less than storing them.
    total = ops.sum(ops.exp(scores - top), axis=axes, keepdims=True)
    return ops.cast(ops.exp(scores - (top + ops.log(total))), x.dtype)
