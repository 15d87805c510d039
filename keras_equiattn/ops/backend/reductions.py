"""Reductions that a compiler makes in one pass over what they are made of."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.backend.target import in_xla

# Below every score, masked ones too, and finite in float32.
LOWEST = -3e38


def sums_together(terms: Sequence[Tensor], axis: int) -> list[Tensor]:
    """The sums of several tensors of one shape along the same axis.

    XLA gets one reduction of all of them. It computes the terms within that
    reduction, so they take no memory, reads what they share once, and never
    computes the sums anew for each of their uses, as it does with sums that
    are written out.

    Args:
        terms: the tensors.
        axis: the axis, not negative.
    """
    if not in_xla() or len(terms) == 1:
        return [ops.sum(x, axis=axis) for x in terms]
    if keras.backend.backend() == "jax":
        return list(_jax_sums(tuple(terms), axis))
    return _xla_sums_tensorflow(terms, axis)


def log_sum_exp(x: Tensor, axis: int) -> Tensor:
    """The logarithm of the sum of exponentials along an axis, which stays.

    XLA gets one reduction that reads `x` once. Maximum and sum by themselves
    go to a library on CPUs, which wants each of their arguments in memory.

    Args:
        x: a tensor of finite values.
        axis: the axis, not negative.
    """
    if not in_xla():
        return ops.logsumexp(x, axis=axis, keepdims=True)
    reduce = _jax_log_sum_exp
    if keras.backend.backend() == "tensorflow":
        reduce = _tensorflow_log_sum_exp
    # In two steps, of numbers that are short enough to be vectorised.
    size = x.shape[axis]
    if isinstance(size, int):
        inner = max(
            n for n in range(1, size + 1) if n * n <= size and size % n == 0
        )
        shape = ops.shape(x)
        shape = (*shape[:axis], size // inner, inner, *shape[axis + 1 :])
        x = reduce(ops.reshape(x, shape), axis + 1) if inner > 1 else x
    return ops.expand_dims(reduce(x, axis), axis)


def _joined(
    top: Tensor, total: Tensor, other_top: Tensor, other_total: Tensor
) -> tuple[Tensor, Tensor]:
    """Maximum of both parts, and their sum of exponentials below it."""
    both = ops.maximum(top, other_top)
    return both, (
        total * ops.exp(top - both) + other_total * ops.exp(other_top - both)
    )


def _jax_log_sum_exp(x: Any, axis: int) -> Any:
    import jax

    @jax.custom_jvp
    def found(x: Any) -> Any:
        top, total = jax.lax.reduce(
            (x, jax.numpy.ones_like(x)),
            (x.dtype.type(LOWEST), x.dtype.type(0)),
            lambda part, other: _joined(*part, *other),
            (axis,),
        )
        return top + jax.numpy.log(total)

    # JAX knows no derivative of a reduction of two tensors.
    found.defjvp(
        lambda values, tangents: (
            found(*values),
            (jax.nn.softmax(values[0], axis) * tangents[0]).sum(axis),
        )
    )
    return found(x)


def _tensorflow_log_sum_exp(x: Tensor, axis: int) -> Tensor:
    import tensorflow as tf
    from tensorflow.compiler.tf2xla.python import xla

    scalars = [tf.TensorSpec([], x.dtype)] * 4
    joined = tf.function(_joined, autograph=False)
    top, total = xla.variadic_reduce(
        [x, tf.ones_like(x)],
        [tf.constant(LOWEST, x.dtype), tf.zeros([], x.dtype)],
        dimensions_to_reduce=[axis],
        reducer=joined.get_concrete_function(*scalars),
    )
    return top + tf.math.log(total)


def _jax_sums(terms: tuple[Any, ...], axis: int) -> Any:
    import jax

    @jax.custom_jvp
    def sums(*terms: Any) -> Any:
        zeros = tuple(x.dtype.type(0) for x in terms)
        return jax.lax.reduce(
            terms,
            zeros,
            lambda xs, ys: tuple(x + y for x, y in zip(xs, ys, strict=True)),
            (axis,),
        )

    # JAX knows no derivative of a reduction of several tensors.
    sums.defjvp(
        lambda terms, tangents: (
            sums(*terms),
            tuple(x.sum(axis) for x in tangents),
        )
    )
    return sums(*terms)


def _xla_sums_tensorflow(terms: Sequence[Tensor], axis: int) -> list[Tensor]:
    import tensorflow as tf
    from tensorflow.compiler.tf2xla.python import xla

    count, dtype = len(terms), terms[0].dtype
    scalars = [tf.TensorSpec([], dtype)] * (2 * count)

    @tf.function(autograph=False)
    def add(*pairs: Tensor) -> list[Tensor]:
        return [
            x + y for x, y in zip(pairs[:count], pairs[count:], strict=True)
        ]

    sums = xla.variadic_reduce(
        list(terms),
        [tf.zeros([], dtype)] * count,
        dimensions_to_reduce=[axis],
        reducer=add.get_concrete_function(*scalars),
    )
    return list(sums)


def sum_and_maximum(
    x: Tensor, axis: int, where: bool = False
) -> tuple[Tensor, ...]:
    """Sum and maximum along an axis, and where the maximum is if asked for.

    XLA gets one reduction, as in `sums_together`. Of equal maxima the first
    one counts, also for gradients.

    Args:
        x: the tensor.
        axis: the axis, not negative.
        where: whether to return the index, of dtype int32.
    """
    if in_xla() and keras.backend.backend() == "jax":
        return tuple(_jax_sum_and_maximum(x, axis)[: 2 + where])
    if in_xla() and where:
        return tuple(_xla_sum_and_maximum_tensorflow(x, axis))
    found = ops.sum(x, axis=axis), ops.max(x, axis=axis)
    if not where:
        return found
    return *found, ops.cast(ops.argmax(x, axis=axis), "int32")


def _with_index(xs: Any, ys: Any, choose: Any) -> Any:
    """Sum, maximum and its index of two parts; the first part comes before."""
    better = ys[1] > xs[1]
    return (
        xs[0] + ys[0],
        choose(better, ys[1], xs[1]),
        choose(better, ys[2], xs[2]),
    )


def _jax_sum_and_maximum(x: Any, axis: int) -> Any:
    import jax
    import jax.numpy as jnp

    @jax.custom_jvp
    def reduce(x: Any) -> Any:
        index = jax.lax.broadcasted_iota("int32", x.shape, axis)
        lowest = jnp.finfo(x.dtype).min
        starts = x.dtype.type(0), x.dtype.type(lowest), np.int32(0)
        return jax.lax.reduce(
            (x, x, index),
            starts,
            lambda xs, ys: _with_index(xs, ys, jnp.where),
            (axis,),
        )

    def tangents(primals: Any, tangents: Any) -> Any:
        (x,), (dx,) = primals, tangents
        found = reduce(x)
        index = jnp.expand_dims(found[2], axis)
        at = jnp.take_along_axis(dx, index, axis).squeeze(axis)
        none = np.zeros(found[2].shape, jax.dtypes.float0)
        return found, (dx.sum(axis), at, none)

    reduce.defjvp(tangents)
    return reduce(x)


def _xla_sum_and_maximum_tensorflow(x: Tensor, axis: int) -> list[Tensor]:
    import tensorflow as tf
    from tensorflow.compiler.tf2xla.python import xla

    shape = [1] * len(x.shape)
    shape[axis] = -1
    index = tf.reshape(tf.range(tf.shape(x)[axis]), shape)
    kinds = [x.dtype, x.dtype, tf.int32]

    @tf.function(autograph=False)
    def combine(*pairs: Tensor) -> Any:
        return _with_index(pairs[:3], pairs[3:], tf.where)

    reduced = xla.variadic_reduce(
        [x, x, tf.broadcast_to(index, tf.shape(x))],
        [
            tf.zeros([], x.dtype),
            tf.constant(x.dtype.min, x.dtype),
            tf.zeros([], tf.int32),
        ],
        dimensions_to_reduce=[axis],
        reducer=combine.get_concrete_function(
            *(tf.TensorSpec([], kind) for kind in kinds * 2)
        ),
    )
    return list(reduced)
