"""Dropout of group self-attention."""

import keras
import numpy as np
import pytest
from keras import ops
from pairs_helpers import arguments
from pairs_helpers import FLOAT64
from pairs_helpers import random
from pairs_helpers import SLOW
from pairs_helpers import value_and_gradients

from keras_equiattn.ops.pairs.api import group_self_attention
from keras_equiattn.testing import relative_difference

pytestmark = pytest.mark.torch_first


SEED = np.array([3, 5], "int32")


def with_dropout(arrays, local, seed=SEED, shape="square"):
    def function(*arrays):
        return group_self_attention(
            *arrays,
            local=local,
            dropout=0.4,
            seed=ops.convert_to_tensor(seed),
            window_shape=shape,
        )

    cotangent = np.ones((*arrays[0].shape[:3], arrays[3].shape[2], 2, 5))
    return value_and_gradients(function, arrays, cotangent)


@pytest.mark.slow
@pytest.mark.every_backend
@pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="Inductor is PyTorch's."
)
@pytest.mark.parametrize("window", [3, None])
def test_compiled_bodies_drop_the_same(window, monkeypatch):
    """Four key, query and output elements, so that all scores have the same
    shape; also where a body before another was not compiled."""
    from keras_equiattn.ops.backend import inductor
    from keras_equiattn.ops.pairs import blocks
    from keras_equiattn.ops.pairs import fused

    arrays = arguments(window, (3, 3), 4, 4)
    local = window is not None
    expected = with_dropout(arrays, local)
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    monkeypatch.setattr(inductor, "PATIENCE", 0)
    bodies = "add_exponentials", "add_values", "add_means", "add_gradients"
    for failing in (None, "add_means"):
        for function in (
            blocks._attention,
            *(getattr(fused, name).programs for name in bodies),
        ):
            function.cache_clear()
        with monkeypatch.context() as patch:
            if failing is not None:
                patch.setattr(inductor, "_compile", _all_but(failing))
            value, gradients = with_dropout(arrays, local)
        pairs = zip(
            [value, *gradients], [expected[0], *expected[1]], strict=True
        )
        for actual, wanted in pairs:
            assert relative_difference(actual, wanted) < 1e-12


def _all_but(name):
    """A compiler that fails for one body."""
    from keras_equiattn.ops.backend import inductor

    before = inductor._compile

    def compile(function, *arguments):
        if function.func.__name__ == name:
            raise RuntimeError("not this one")
        return before(function, *arguments)

    return compile


@pytest.mark.parametrize(
    ("window", "elements", "shape"),
    [
        (3, 2, "square"),
        pytest.param(None, 1, "square", marks=SLOW),
        pytest.param(3, 1, "disc", marks=SLOW),
        pytest.param(None, 2, "square", marks=SLOW),
    ],
)
def test_gradients_drop_what_the_value_dropped(window, elements, shape):
    """Along random directions, by differences."""
    arrays = arguments(window, (2, 3), elements, 2)
    local = window is not None
    step = 1e-5 if FLOAT64 else 1e-2
    _, gradients = with_dropout(arrays, local, shape=shape)
    for index, gradient in enumerate(gradients):
        direction = random(*arrays[index].shape, seed=8)
        ends = []
        for sign in (1, -1):
            moved = list(arrays)
            moved[index] = arrays[index] + sign * step * direction
            ends.append(with_dropout(moved, local, shape=shape)[0].sum())
        numeric = (ends[0] - ends[1]) / (2 * step)
        along = (gradient * direction).sum()
        scale = max(abs(numeric), 1)
        assert abs(along - numeric) < (1e-7 if FLOAT64 else 2e-2) * scale


@pytest.mark.parametrize("local", [True, False])
def test_dropout_follows_the_seed(local):
    arrays = arguments(3 if local else None, (2, 3), 2, 2)
    for array in arrays[:3]:
        array[1] = array[0]
    first, again, other = (
        with_dropout(arrays, local, seed)[0]
        for seed in (SEED, SEED, SEED + np.array([0, 1], "int32"))
    )
    np.testing.assert_array_equal(first, again)
    assert relative_difference(first, other) > 1e-2
    assert relative_difference(first[0], first[1]) > 1e-2  # a mask per image
