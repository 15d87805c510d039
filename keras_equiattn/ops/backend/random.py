"""Random numbers that are the same whenever they are drawn again."""

import math
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.backend.target import in_xla


def dropout_factors(shape: Any, rate: float, seed: Any, dtype: Any) -> Tensor:
    """Zeros with the probability `rate`, else the inverse of what is kept.

    The same for the same seed, which `keras.random` does not take as a tensor.
    Each takes 16 random bits: rates are rounded to multiples of `1 / 65536`.

    Args:
        shape: of the result.
        rate: probability of a zero, less than one.
        seed: two whole numbers as a tensor.
        dtype: of the result.
    """
    dropped = min(round(rate * 2**16), 2**16 - 1)
    kept = 1.0 - dropped / 2**16
    known = all(isinstance(n, int) for n in shape)
    count = math.prod(shape) if known else ops.prod(shape)
    if keras.backend.backend() == "torch":
        keep = _random_int16_torch(count, seed) >= dropped - 2**15
    else:
        words = _random_words((count + 1) // 2, seed)
        bits = ops.stack(
            [ops.bitwise_and(words, 0xFFFF), ops.right_shift(words, 16)]
        )
        keep = ops.reshape(bits, (-1,))[:count] >= dropped
    return ops.cast(ops.reshape(keep, shape), dtype) / kept


def _random_words(count: Any, seed: Any) -> Tensor:
    """As many random integers of 32 bits, under JAX and TensorFlow."""
    if keras.backend.backend() == "jax":
        import jax
        from jax.extend.random import threefry_2x32

        # As `jax.random.bits`, which drops every second number that it draws.
        counter = jax.numpy.arange(count, dtype="uint32")
        return threefry_2x32(ops.cast(seed, "uint32"), counter)
    import tensorflow as tf

    return tf.random.stateless_uniform(
        [count],
        tf.cast(seed, "int32"),
        minval=None,
        maxval=None,
        dtype="uint32",
        # XLA is slow at Philox on CPUs, and alone knows the other one.
        alg="threefry" if in_xla() else "auto_select",
    )


def _random_int16_torch(count: int, seed: Any) -> Tensor:
    """As many random integers of 16 bits with a sign."""
    import torch

    # Mixed: on a CPU the generator looks at half of the bits alone.
    mixed = np.random.SeedSequence([int(n) for n in seed])
    generator = torch.Generator(seed.device)
    generator.manual_seed(int(mixed.generate_state(1, "uint64")[0]))
    # A CPU draws one number after the other: four times as fast as each alone.
    words = torch.empty(
        math.ceil(count / 4), dtype=torch.int64, device=seed.device
    )
    words.random_(-(2**63), None, generator=generator)
    return words.view(torch.int16)[:count]
