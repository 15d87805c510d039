"""Sums that a compiler makes in one pass over what they are made of."""

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.backend.target import in_xla


def sums_together(terms: Sequence[Tensor], axis: int) -> list[Tensor]:
    """The sums of several tensors of one shape along the same axis.

    XLA gets one reduction of all of them. It computes the terms within that
    reduction, so they take no memory, reads what they share once, and never
    computes the sums anew for each of their uses, as it does with sums that
    are written out.

    A reduction of one tensor alone goes to a library on CPUs, which wants it
    in memory: that one is written out.

    Args:
        terms: the tensors.
        axis: a short axis, not negative.
    """
    if not in_xla():
        return [ops.sum(x, axis=axis) for x in terms]
    if len(terms) == 1:
        before = (slice(None),) * axis
        slices = [terms[0][(*before, n)] for n in range(terms[0].shape[axis])]
        return [sum(slices[1:], slices[0])]
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
    from tensorflow.compiler.tf2xla.ops import gen_xla_ops

    count, dtype = len(terms), terms[0].dtype
    scalars = [tf.TensorSpec([], dtype)] * (2 * count)

    @tf.function(autograph=False)
    def add(*pairs: Tensor) -> list[Tensor]:
        return [
            x + y for x, y in zip(pairs[:count], pairs[count:], strict=True)
        ]

    sums = gen_xla_ops.xla_variadic_reduce_v2(
        inputs=list(terms),
        init_values=[tf.zeros([], dtype)] * count,
        dimensions_to_reduce=[axis],
        reducer=add.get_concrete_function(*scalars),
    )
    return list(sums)
