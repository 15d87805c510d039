"""Reductions whose terms a compiler computes in the same pass.

XLA computes the terms of a reduction within it, so they take no memory. It
does so for several reductions at once only if they are one instruction, a
reduction of several tensors, which neither Keras nor JAX offers as a function
with a gradient.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_equiattn.ops import numerics
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Shaped
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.backend.loops import one_by_one
from keras_equiattn.ops.backend.target import find_target
from keras_equiattn.ops.numerics import dtype_name
from keras_equiattn.ops.numerics import dtype_of_sums
from keras_equiattn.ops.numerics import in_full_precision

# Below every score, masked ones too, and finite in float32.
LOWEST = -3e38
# The number of terms up to which XLA vectorises a sum on a CPU. It writes the
# loop over the terms out, and for more than 16 to 25 of them takes one number
# at a time. With 32 SASA takes 1.07 times as long under JAX, and as long under
# TensorFlow (benchmarks/results/tuning-<backend>-128-2026-11-27.json).
SHORT = 16
# The bits of an integer in which each bit marks one place along an axis.
PLACES = 32


def sums_together(
    terms: Iterable[Shaped[Tensor, "..."]], axis: int
) -> list[Float[Tensor, "..."]]:
    """The sums of several tensors of one shape along the same axis.

    They are computed in single precision at least.

    XLA gets one reduction of all of them, which reads what they share once. It
    never computes the sums anew for each of their uses, as it does with sums
    that are written out.

    Args:
        terms: the tensors; without a compiler, each is summed before the
            next one is computed.
        axis: the axis, not negative.
    """
    if keras.backend.backend() == "torch":
        import torch

        # One kernel, which does not store what it converts.
        return [
            x.sum(axis, dtype=getattr(torch, dtype_of_sums(x))) for x in terms
        ]
    terms = tuple(map(in_full_precision, terms))
    if len(terms) == 1 or not find_target().xla:
        return [ops.sum(x, axis=axis) for x in terms]

    def sums(*terms: Tensor) -> Any:
        starts = [0.0] * len(terms)
        return tuple(_reduce(terms, starts, _add, axis))

    def tangents(_: Any, *pairs: tuple[Tensor, Tensor]) -> Any:
        return tuple(ops.sum(dx, axis=axis) for _, dx in pairs)

    return list(_with_tangents(sums, tangents)(*terms))


def largest(x: Shaped[Tensor, "..."], axis: int) -> Shaped[Tensor, "..."]:
    """The maximum along an axis; equal numbers share its gradient.

    JAX compares all numbers with the maximum to find where its gradient goes.
    XLA may compute again what is compared, with other rounding, so that none is
    equal, and the gradient is infinite or not a number. Along short axes, such
    as that of a group, one reduction finds the places here.

    Args:
        x: the tensor.
        axis: the axis, not negative.
    """
    if keras.backend.backend() != "jax" or x.shape[axis] > PLACES:
        return ops.max(x, axis=axis)
    import jax

    def maximum(x: Tensor) -> Any:
        return ops.max(x, axis=axis)

    def combine(x: Tensor, places: Tensor, y: Tensor, others: Tensor) -> Any:
        either = ops.where(y > x, others, places | others)
        return ops.maximum(x, y), ops.where(x > y, places, either)

    def tangents(_: Any, pair: tuple[Tensor, Tensor]) -> Any:
        x, direction = pair
        bits = 1 << jax.lax.broadcasted_iota("uint32", x.shape, axis)
        starts = [-np.inf, 0]
        _, places = _reduce((ops.stop_gradient(x), bits), starts, combine, axis)
        is_largest = (ops.expand_dims(places, axis) & bits) > 0
        share = 1 / ops.sum(ops.cast(is_largest, x.dtype), axis)
        return share * ops.sum(ops.where(is_largest, direction, 0.0), axis)

    return _with_tangents(maximum, tangents)(x)


def einsum_in_full_precision(
    pattern: str, x: Float[Tensor, "..."], y: Float[Tensor, "..."]
) -> Float[Tensor, "..."]:
    """A product whose sums are in single precision at least, as is the result.

    The operands stay in half precision where a product can have a result of
    another dtype. Elsewhere bfloat16, which has the range of float32, loses
    digits of the result alone, unless the operators of TensorFlow run on a CPU:
    some CPUs add bfloat16 in bfloat16. There it is widened, as is float16,
    whose sums could overflow.

    Args:
        pattern: the pattern of `ops.einsum`.
        x, y: the operands.
    """
    if keras.backend.backend() == "jax":
        import jax.numpy as jnp

        return jnp.einsum(
            pattern, x, y, preferred_element_type=dtype_of_sums(x)
        )
    target = find_target(x, y)
    adds_in_bfloat16 = (
        keras.backend.backend() == "tensorflow"
        and target.device == "cpu"
        and not target.xla
    )
    if dtype_name(x) == "float16" or adds_in_bfloat16:
        x, y = in_full_precision(x), in_full_precision(y)
    return in_full_precision(ops.einsum(pattern, x, y))


def softmax_in_one_reduction(
    x: Float[Tensor, "*axes"], axis: int
) -> Float[Tensor, "*axes"]:
    """`numerics.softmax` along an axis, for which XLA reads `x` once.

    On CPUs a maximum or a sum alone goes to a library, which needs its argument
    in memory.

    Args:
        x: a tensor of finite values.
        axis: the axis, not negative.

    Returns:
        The softmax. Under PyTorch it has the dtype of `x`, elsewhere it is in
        single precision at least.
    """
    if keras.backend.backend() != "torch":
        x = in_full_precision(x)
    if not find_target(x).xla:
        return numerics.softmax(x, (axis,))

    def found(x: Tensor) -> Tensor:
        both = x, ops.ones_like(x)
        top, total = _reduce(both, [LOWEST, 0.0], _join, axis)
        return top + ops.log(total)

    def tangent(_: Any, pair: tuple[Tensor, Tensor]) -> Tensor:
        x, dx = pair
        return ops.sum(numerics.softmax(x, (axis,)) * dx, axis=axis)

    total = ops.expand_dims(_with_tangents(found, tangent)(x), axis)
    return ops.exp(x - total)


def softmax_gradient(
    d: Float[Tensor, "*axes"],
    weights: Float[Tensor, "*axes"],
    mean: Callable[[], Tensor],
) -> Float[Tensor, "*axes"]:
    """The gradient of the argument of a softmax along the first axis.

    Args:
        d: the gradient with respect to the weights.
        weights: the result of the softmax.
        mean: finds the mean of `d`, weighted by the weights.

    Returns:
        The gradient, in the dtype of `d`.
    """
    target = find_target(d)
    if keras.backend.backend() == "torch" and target.compiler is None:
        import torch

        # This kernel is private, but it reads both tensors and writes the
        # result once. Public ones need the scores, or take three passes.
        weights = weights.to(d.dtype)
        one_kernel = torch.ops.aten._softmax_backward_data
        return one_kernel(d, weights, 0, d.dtype)
    average = mean()

    def of_scores(d: Tensor, weights: Tensor) -> Tensor:
        spread = in_full_precision(d) - average
        return ops.cast(in_full_precision(weights) * spread, d.dtype)

    return one_by_one(of_scores, d, weights)


def _add(*parts: Float[Tensor, "*axes"]) -> tuple[Float[Tensor, "*axes"], ...]:
    """Adds each tensor of the first half to its counterpart in the second."""
    half = len(parts) // 2
    return tuple(x + y for x, y in zip(parts[:half], parts[half:], strict=True))


def _join(
    top: Float[Tensor, "*axes"],
    total: Float[Tensor, "*axes"],
    other_top: Float[Tensor, "*axes"],
    other_total: Float[Tensor, "*axes"],
) -> tuple[Float[Tensor, "*axes"], Float[Tensor, "*axes"]]:
    """The maximum of two parts, and the sum of exponentials relative to it."""
    both = ops.maximum(top, other_top)
    return both, (
        total * ops.exp(top - both) + other_total * ops.exp(other_top - both)
    )


def _reduce(
    operands: Sequence[Shaped[Tensor, "..."]],
    starts: Sequence[float | int],
    combine: Callable[..., Any],
    axis: int,
) -> list[Shaped[Tensor, "..."]]:
    """One reduction of several tensors of a shape along an axis, under XLA.

    Args:
        operands: the tensors.
        starts: the neutral number of each reduction.
        combine: makes one result of the results of two parts.
        axis: the axis, which is in no result.
    """
    size = operands[0].shape[axis]
    known = isinstance(size, int) and size > SHORT
    if known and find_target(*operands).xla_on_cpu:
        return _reduce_by_parts(operands, starts, combine, axis)
    if keras.backend.backend() == "jax":
        import jax

        return list(
            jax.lax.reduce(
                tuple(operands),
                tuple(
                    x.dtype.type(n)
                    for x, n in zip(operands, starts, strict=True)
                ),
                lambda x, y: combine(*x, *y),
                (axis,),
            )
        )
    import tensorflow as tf
    from tensorflow.compiler.tf2xla.python import xla

    scalars = [tf.TensorSpec([], x.dtype) for x in operands]
    reducer = tf.function(combine, autograph=False)
    return list(
        xla.variadic_reduce(
            list(operands),
            [
                tf.constant(n, x.dtype)
                for x, n in zip(operands, starts, strict=True)
            ],
            dimensions_to_reduce=[axis],
            reducer=reducer.get_concrete_function(*scalars, *scalars),
        )
    )


def _reduce_by_parts(
    operands: Sequence[Shaped[Tensor, "..."]],
    starts: Sequence[float | int],
    combine: Callable[..., Any],
    axis: int,
) -> list[Shaped[Tensor, "..."]]:
    """`_reduce`, of no more than `SHORT` terms at a time.

    Parts are of equal size if the size of the axis has a divisor from a quarter
    of `SHORT` to `SHORT`. Otherwise, as for a prime size, the last part is
    shorter.

    Args:
        operands, starts, combine, axis: see `_reduce`.
    """
    size = operands[0].shape[axis]
    inner = max(n for n in range(1, SHORT + 1) if size % n == 0)
    if inner < SHORT // 4:
        inner = size // -(-size // SHORT)
    whole = size // inner * inner
    before = (slice(None),) * axis
    shape = list(ops.shape(operands[0]))
    shape[axis : axis + 1] = [whole // inner, inner]
    cut = [ops.reshape(x[(*before, slice(whole))], shape) for x in operands]
    found = _reduce(cut, starts, combine, axis + 1)
    found = _reduce(found, starts, combine, axis)
    if whole == size:
        return found
    rest = [x[(*before, slice(whole, None))] for x in operands]
    return list(combine(*found, *_reduce(rest, starts, combine, axis)))


def _with_tangents(
    function: Callable[..., Any], tangents: Callable[..., Any]
) -> Callable[..., Any]:
    """Gives a function the derivative that JAX cannot find for it.

    Args:
        function: from tensors to a result.
        tangents: from the result and, for each of the tensors, its value and
            its tangent, to the tangent of the result.
    """
    if keras.backend.backend() != "jax":
        return function
    import jax

    differentiable = jax.custom_jvp(function)

    def rule(values: Any, directions: Any) -> Any:
        # Not `function`: the result may be differentiated once more.
        found = differentiable(*values)
        pairs = zip(values, directions, strict=True)
        return found, tangents(found, *pairs)

    differentiable.defjvp(rule)
    return differentiable
