"""Random numbers that are the same whenever they are drawn again."""

import math
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Shaped
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.backend.target import find_target
from keras_equiattn.ops.backend.target import has_gradients
from keras_equiattn.ops.backend.target import refuse_to_train


def seed_as_floats(seed: Shaped[Tensor, "2"]) -> Float[Tensor, "4"]:
    """A seed as a tensor that gradients may have: its upper and lower halves.

    Args:
        seed: two whole numbers from 0 to below 2**31.
    """
    seed = ops.cast(seed, "int32")
    halves = [ops.right_shift(seed, 16), ops.bitwise_and(seed, 0xFFFF)]
    return ops.cast(ops.concatenate(halves), "float32")


def prepared_seed(halves: Float[Tensor, "4"]) -> Any:
    """The seed in the form that `dropout_factors` takes.

    Under PyTorch these are two numbers, since its generators take no tensors:
    a GPU is waited for here, once, and not whenever numbers are drawn.

    Args:
        halves: of `seed_as_floats`.
    """
    if keras.backend.backend() == "torch":
        first, second, *lower = (int(n) for n in halves.tolist())
        return first << 16 | lower[0], second << 16 | lower[1]
    halves = ops.cast(halves, "int32")
    return ops.left_shift(halves[:2], 16) + halves[2:]


def dropout_factors(
    shape: Any, rate: float, seed: Any, place: tuple[Any, ...], like: Tensor
) -> Tensor:
    """Zeros with the probability `rate`, else the inverse of what is kept.

    The same for the same seed and place. Each takes 16 random bits: rates are
    rounded to multiples of `1 / 65536`.

    Args:
        shape: of the result. Numbers are drawn for each entry of all but the
            first axis by itself, so that JAX may have any of these axes on
            several devices.
        rate: probability of a zero, less than one.
        seed: of `prepared_seed`.
        place: whole numbers, of which each draw has others.
        like: a tensor of the dtype and on the device of the result.

    Raises:
        NotImplementedError: on a backend that only predicts.
    """
    if not has_gradients():
        refuse_to_train("Random numbers for dropout")
    dropped = min(round(rate * 2**16), 2**16 - 1)
    if keras.backend.backend() == "torch":
        count = math.prod(shape)
        # A zero at the end would change nothing without the number of all.
        entropy = (len(place), *seed, *place)
        numbers = _random_int16_torch(count, entropy, like.device)
        keep = ops.reshape(numbers >= dropped - 2**15, shape)
    else:
        if not len(shape):
            return dropout_factors((1,), rate, seed, place, like)[0]
        words = _random_words(shape, seed, place)
        bits = [
            part
            for word in words
            for part in (
                ops.bitwise_and(word, 0xFFFF),
                ops.right_shift(word, 16),
            )
        ]
        keep = ops.concatenate(bits)[: shape[0]] >= dropped
    kept = 1.0 - dropped / 2**16
    return ops.cast(keep, like.dtype) / kept


def _random_words(shape: Any, seed: Any, place: tuple[Any, ...]) -> list[Any]:
    """Random integers of 32 bits, under JAX and TensorFlow.

    Returns:
        Tensors whose first axes together have half of that of the shape or
        more.
    """
    if keras.backend.backend() == "jax":
        import jax
        from jax.extend.random import threefry2x32_p

        key = jax.random.wrap_key_data(
            ops.cast(seed, "uint32"), impl="threefry2x32"
        )
        for number in place:
            key = jax.random.fold_in(key, number)
        # As `jax.random.bits`, which drops every second number that it draws.
        shape = (-(-shape[0] // 4), *shape[1:])
        counter = jax.numpy.zeros(shape, "uint32")
        step = 1
        for axis in reversed(range(len(shape))):
            numbers = jax.lax.broadcasted_iota("uint32", shape, axis)
            counter = counter + numbers * jax.numpy.uint32(step)
            step *= shape[axis]
        first, second = (
            jax.numpy.broadcast_to(word, shape)
            for word in jax.random.key_data(key)
        )
        draw: Any = threefry2x32_p.bind
        rest = jax.numpy.zeros_like(counter)
        return list(draw(first, second, counter, rest))
    import tensorflow as tf

    # XLA is slow at Philox on CPUs, and alone knows the other one.
    algorithm = "threefry" if find_target().xla else "auto_select"
    for number in place:
        seed = tf.random.experimental.stateless_fold_in(
            seed, number, alg=algorithm
        )
    return [
        tf.random.stateless_uniform(
            [(shape[0] + 1) // 2, *shape[1:]],
            seed,
            minval=None,
            maxval=None,
            dtype="uint32",
            alg=algorithm,
        )
    ]


def _random_int16_torch(
    count: int, numbers: tuple[int, ...], device: Any
) -> Tensor:
    """As many random integers of 16 bits with a sign."""
    import torch

    # Mixed: on a CPU the generator looks at half of the bits alone.
    mixed = np.random.SeedSequence(numbers)
    generator = torch.Generator(device)
    generator.manual_seed(int(mixed.generate_state(1, "uint64")[0]))
    # A CPU draws one number after the other: four times as fast as each alone.
    words = torch.empty(math.ceil(count / 4), dtype=torch.int64, device=device)
    words.random_(-(2**63), None, generator=generator)
    return words.view(torch.int16)[:count]
