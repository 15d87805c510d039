"""Softmaxes and means, also on tensors of another device."""

import keras
import numpy as np
import pytest
from layer_contract import as_array

from keras_equiattn.ops import numerics
from keras_equiattn.ops.dense import dense_attention


@pytest.mark.torch_first
def test_softmax_of_nothing():
    x = keras.ops.zeros((0, 3))
    assert as_array(numerics.softmax(x, (1,))).shape == (0, 3)


def test_softmax_over_several_axes():
    x = np.random.default_rng(0).normal(size=(2, 3, 4))
    found = as_array(numerics.softmax(keras.ops.convert_to_tensor(x), (0, 2)))
    expected = np.exp(x) / np.exp(x).sum((0, 2), keepdims=True)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("axis", [1, (0, 2), (0, 1, 2)])
def test_means(axis):
    x = np.random.default_rng(0).normal(size=(2, 3, 5)).astype("float32")
    found = as_array(numerics.mean(keras.ops.convert_to_tensor(x), axis))
    np.testing.assert_allclose(found, x.mean(axis), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow",
    reason="Others have no sizes that are tensors.",
)
def test_means_and_sizes_known_only_at_run_time():
    import tensorflow as tf

    x = np.random.default_rng(0).normal(size=(2, 3, 5))

    @tf.function(input_signature=[tf.TensorSpec([None, None, 5], x.dtype)])
    def found(x):
        rows, columns, _ = keras.ops.shape(x)
        sizes = (
            numerics.larger(rows, columns),
            numerics.smaller(rows, columns),
        )
        return numerics.mean(x, (0, 1)), *sizes

    mean, largest, smallest = found(x)
    np.testing.assert_allclose(mean, x.mean((0, 1)), rtol=1e-12)
    assert (int(largest), int(smallest)) == (3, 2)


@pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="Others have no such device."
)
def test_tensors_on_another_device():
    """`meta` stands for a GPU: it refuses tensors of the CPU, too."""
    import torch

    with keras.device("meta"):
        x = torch.zeros(2, 3, 4, device="meta", dtype=torch.float16)
        assert numerics.softmax(x, (1, 2)).is_meta
        bias = torch.zeros(2, 3, 3, device="meta", dtype=torch.float16)
        y, weights = dense_attention(x, x, x, 2, bias)
    assert y.is_meta
    assert weights.shape == (2, 2, 3, 3)
