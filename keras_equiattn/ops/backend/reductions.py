"""Reductions that a compiler makes in one pass over what they are made of."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.backend.target import in_xla


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

    count, dtype = len(terms), terms[0].dtype
    scalars = [tf.TensorSpec([], dtype)] * (2 * count)

    @tf.function(autograph=False)
    def add(*pairs: Tensor) -> list[Tensor]:
        return [
            x + y for x, y in zip(pairs[:count], pairs[count:], strict=True)
        ]

    sums = tf.raw_ops.XlaVariadicReduceV2(
        inputs=list(terms),
        init_values=[tf.zeros([], dtype)] * count,
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

    shape = [1] * len(x.shape)
    shape[axis] = -1
    index = tf.reshape(tf.range(tf.shape(x)[axis]), shape)
    kinds = [x.dtype, x.dtype, tf.int32]

    @tf.function(autograph=False)
    def combine(*pairs: Tensor) -> Any:
        return _with_index(pairs[:3], pairs[3:], tf.where)

    reduced = tf.raw_ops.XlaVariadicReduceV2(
        inputs=[x, x, tf.broadcast_to(index, tf.shape(x))],
        init_values=[
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
