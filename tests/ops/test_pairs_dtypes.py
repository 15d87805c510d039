"""Group self-attention in half precision, and on tensors of several dtypes."""

import keras
import numpy as np
import oracles
import pytest
from keras import ops
from layer_contract import as_array

from keras_equiattn.ops.pairs import api as module
from keras_equiattn.ops.pairs.api import group_self_attention

pytestmark = pytest.mark.torch_first


def test_lines_outside_of_the_image_in_float16():
    """Scores so far below zero that with the mask they would be infinite."""
    query = np.full((1, 3, 3, 1, 1, 2), 80.0)
    query[..., 0] = 0  # what meets the offsets
    keys = np.random.default_rng(0).normal(size=query.shape)
    embedding = np.full((1, 1, 1), -80.0)
    given = (
        ops.cast(x, "float16")
        for x in (query, 0 * keys, keys, np.zeros((3, 3, 1, 1)), embedding)
    )
    y = as_array(group_self_attention(*given)).astype("float64")
    # Attention is uniform, so what lies in the corner sees the mean of four.
    expected = keys[0, :2, :2].mean((0, 1))
    np.testing.assert_allclose(y[0, 0, 0], expected, atol=2e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_discs(dtype):
    """Their weights are small beside scores of ten."""
    query = np.full((1, 7, 7, 1, 1, 2), 10.0)
    query[..., 0] = 0  # what meets the offsets
    keys = np.ones(query.shape)
    values = np.random.default_rng(0).normal(size=query.shape)
    encoding = np.zeros((7, 7, 1, 1))
    given = (ops.cast(x, dtype) for x in (query, keys, values, encoding))
    y = as_array(
        ops.cast(group_self_attention(*given, window_shape="disc"), "float32")
    )
    weights = oracles.window_weights(7, 7, "disc")[..., None, None, None]
    expected = (weights * values[0]).sum((0, 1)) / weights.sum()
    np.testing.assert_allclose(y[0, 3, 3], expected, atol=5e-3)


def test_half_precision_stays_half(monkeypatch):
    """Beside an encoding in float32, as mixed precision has it."""
    seen = []

    def attend(_, query, keys, values, *rest):
        seen.extend(x.dtype for x in (query, keys, values))
        return values

    monkeypatch.setattr(module, "attend_in_blocks", attend)
    x = ops.zeros((1, 4, 4, 2, 1, 3), "bfloat16")
    group_self_attention(x, x, x, ops.zeros((3, 3, 2, 3)))
    assert [keras.backend.standardize_dtype(d) for d in seen] == [
        "bfloat16"
    ] * 3


@pytest.mark.parametrize("half", ["query", "keys"])
def test_tensors_of_several_dtypes(half):
    rng = np.random.default_rng(0)
    shape = (1, 4, 4, 2, 1, 3)
    x, k = rng.normal(size=(2, *shape)).astype("float16")
    encoding = rng.normal(size=(3, 3, 2, 3)).astype("float32")
    expected = group_self_attention(
        *(ops.cast(a, "float32") for a in (x, k, k)),
        ops.convert_to_tensor(encoding),
    )
    dtypes = {"query": "float32", "keys": "float32"} | {half: "float16"}
    found = group_self_attention(
        ops.cast(x, dtypes["query"]),
        *(ops.cast(k, dtypes["keys"]) for _ in range(2)),
        ops.convert_to_tensor(encoding),
    )
    assert keras.backend.standardize_dtype(found.dtype) == dtypes["query"]
    np.testing.assert_allclose(
        as_array(found), as_array(expected), rtol=2e-3, atol=2e-3
    )
