"""What tests of group self-attention share: arrays, and both of its forms."""

import keras
import numpy as np
import pytest
from keras import ops
from layer_contract import as_array

from keras_equiattn.ops.pairs.api import group_self_attention
from keras_equiattn.ops.pairs.api import plain_attention
from keras_equiattn.testing import relative_difference

BACKEND = keras.backend.backend()
FLOAT64 = BACKEND != "jax"
DTYPE, RTOL = ("float64", 1e-12) if FLOAT64 else ("float32", 2e-5)
SLOW = (pytest.mark.slow, pytest.mark.every_backend)


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def arguments(window, size, elements, order, heads=2, channels=5, encoded=2):
    """Query, keys, values, encoding and, but for lifting, embedding.

    Lifting has one query and key element; all channels meet positions.
    """
    shape = (2, *size, elements, heads, channels)
    seen = (window, window) if window else tuple(2 * n - 1 for n in size)
    lifting = elements == 1
    encoded = channels if lifting else encoded
    arrays = [random(*shape, seed=seed) for seed in range(3)]
    arrays.append(random(*seen, order, encoded, seed=3))
    if not lifting:
        rest = channels - encoded
        arrays.append(random(elements, elements, rest, seed=4))
    return arrays


def value_and_gradients(function, arrays, cotangent):
    """The value, and gradients of `sum(value * cotangent)`."""
    tensors = [ops.convert_to_tensor(a, DTYPE) for a in arrays]
    cotangent = ops.convert_to_tensor(cotangent, DTYPE)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(tensors)
            value = function(*tensors)
        gradients = tape.gradient(value, tensors, cotangent)
    elif BACKEND == "jax":
        import jax

        @jax.jit
        def both(cotangent, *tensors):
            value, pull_back = jax.vjp(function, *tensors)
            return value, pull_back(cotangent)

        value, gradients = both(cotangent, *tensors)
    else:
        import torch

        tensors = [t.requires_grad_() for t in tensors]
        value = function(*tensors)
        gradients = torch.autograd.grad(value, tensors, cotangent)
        value = value.detach()
    return as_array(value), [as_array(g) for g in gradients]


def check(arrays, local, rtol=RTOL, compiled=False, shape="square"):
    """Both forms agree, in the value and all gradients."""
    options = {"local": local, "window_shape": shape}

    def in_blocks(*arrays):
        return group_self_attention(*arrays, **options)

    if compiled and BACKEND == "tensorflow":
        import tensorflow as tf

        in_blocks = tf.function(in_blocks)

    def plain(*arrays):
        return plain_attention(*arrays, **options)

    batch, height, width, _, heads, channels = arrays[0].shape
    order = arrays[3].shape[2]
    cotangent = random(batch, height, width, order, heads, channels, seed=6)
    value, gradients = value_and_gradients(in_blocks, arrays, cotangent)
    expected, wanted = value_and_gradients(plain, arrays, cotangent)
    assert value.shape == cotangent.shape
    assert relative_difference(value, expected) < rtol
    names = ("query", "keys", "values", "encoding", "embedding")
    for name, gradient, other in zip(names, gradients, wanted, strict=False):
        # A softmax over one place has no gradient.
        scale = max(np.abs(other).max(), 1)
        assert np.abs(gradient - other).max() < 10 * rtol * scale, name
