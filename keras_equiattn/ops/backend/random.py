"""Random numbers that are the same whenever they are drawn again."""

import math
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Shaped
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.backend.memory import constant
from keras_equiattn.ops.backend.target import find_target
from keras_equiattn.ops.backend.target import has_gradients
from keras_equiattn.ops.backend.target import refuse_to_train

# Constants of Steele, Lea and Flood, "Fast splittable pseudorandom number
# generators" (2014), as signed integers: the distance between two states, and
# the shifts and factors that mix a state.
STEP = 0x9E3779B97F4A7C15 - 2**64
MIXING = (30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64)


def next_seed(generator: Any) -> Shaped[Tensor, "2"]:
    """Two whole numbers from 0 to below 2**31 that differ from call to call.

    Under PyTorch the host never waits for a GPU, as it would in
    `generator.next` and `keras.random`.

    Args:
        generator: a `keras.random.SeedGenerator`.
    """
    if keras.backend.backend() == "torch":
        # A copy, since the variable changes in place.
        state = generator.state.value * 1
        step = constant(np.array([0, 1]), state, state.dtype)
        generator.state.assign(state + step)
    else:
        state = generator.next()
    return _bits(ops.cast(state, "int32"), 2**31 - 1)


def seed_as_floats(seed: Shaped[Tensor, "2"]) -> Float[Tensor, "4"]:
    """A seed as floats, which autograd accepts: its upper and lower halves.

    Args:
        seed: two whole numbers from 0 to below 2**31.
    """
    seed = ops.cast(seed, "int32")
    halves = [ops.right_shift(seed, 16), _bits(seed, 0xFFFF)]
    return ops.cast(ops.concatenate(halves), "float32")


def _bits(x: Shaped[Tensor, "*axes"], mask: int) -> Shaped[Tensor, "*axes"]:
    """Bitwise and with a mask of 32 bits."""
    return ops.bitwise_and(x, constant(np.array(mask, "int32"), x))


def prepared_seed(halves: Float[Tensor, "4"]) -> Shaped[Tensor, "..."]:
    """The seed in the form that `dropout_factors` takes.

    Under PyTorch this is one number of 64 bits, elsewhere two of 32.

    Args:
        halves: the result of `seed_as_floats`.
    """
    if keras.backend.backend() == "torch":
        places = constant(2 ** np.array([48, 16, 32, 0]), halves)
        return _mixed_torch((ops.cast(halves, "int64") * places).sum())
    halves = ops.cast(halves, "int32")
    return ops.left_shift(halves[:2], 16) + halves[2:]


def dropout_factors(
    shape: Any,
    rate: float,
    seed: Any,
    place: tuple[Any, ...],
    like: Float[Tensor, "..."],
) -> Tensor:
    """Zeros with the probability `rate`, else one over the share that is kept.

    Equal seeds and places give equal factors. Each factor takes 16 random bits:
    rates are rounded to multiples of `1 / 65536`.

    Args:
        shape: the shape of the result. Numbers are drawn independently for
            each entry of all axes but the first, so that JAX may shard any of
            these axes over several devices.
        rate: probability of a zero, less than one.
        seed: the result of `prepared_seed`.
        place: whole numbers that differ from draw to draw.
        like: a tensor of the dtype and on the device of the result.

    Raises:
        NotImplementedError: on a backend that only predicts.
    """
    if not has_gradients():
        refuse_to_train("Random numbers for dropout")
    dropped = min(round(rate * 2**16), 2**16 - 1)
    if keras.backend.backend() == "torch":
        numbers = _random_int16_torch(math.prod(shape), seed, place)
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
        Tensors whose first axes add up to at least half of the first axis of
        the shape.
    """
    if keras.backend.backend() == "jax":
        import jax
        from jax.extend.random import threefry2x32_p

        key = jax.random.wrap_key_data(
            ops.cast(seed, "uint32"), impl="threefry2x32"
        )
        for number in place:
            key = jax.random.fold_in(key, number)
        # Numbers are drawn as by `jax.random.bits`, which would make one number
        # of each pair that it draws. Here both are used.
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

    # XLA is slow at Philox on CPUs, and only XLA has threefry.
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
    count: int, seed: Shaped[Tensor, ""], place: tuple[int, ...]
) -> Shaped[Tensor, " count"]:
    """Returns `count` random signed integers of 16 bits.

    Every four of them come from one mixed state of a counter. PyTorch's own
    generators would take the seed from the host, which waits for a GPU, and
    cannot be compiled.

    Args:
        count: how many.
        seed: the result of `prepared_seed`.
        place: which states of the seed are taken.
    """
    import torch

    # The length comes first, since `SeedSequence` ignores trailing zeros.
    sequence = np.random.SeedSequence((len(place), *place))
    start = seed + int(sequence.generate_state(1, "uint64").view("int64")[0])
    states = torch.arange(math.ceil(count / 4), device=seed.device)
    states = _mixed_torch(states.mul_(STEP).add_(start))
    return states.view(torch.int16)[:count]


def _mixed_torch(x: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    """Mixes 64-bit integers in place: every bit depends on all the others."""
    for shift, factor in MIXING:
        x = x.bitwise_xor_(_shifted_torch(x, shift)).mul_(factor)
    return x.bitwise_xor_(_shifted_torch(x, 31))


def _shifted_torch(x: Shaped[Tensor, "..."], by: int) -> Shaped[Tensor, "..."]:
    """Integers shifted to the right, with zeros before them."""
    return (x >> by).bitwise_and_(2 ** (64 - by) - 1)
