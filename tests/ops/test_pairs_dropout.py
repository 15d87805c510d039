"""Dropout of group self-attention."""

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


@pytest.mark.parametrize(
    ("window", "elements", "shape"),
    [
        (3, 2, "square"),
        (None, 1, "square"),
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
    assert relative_difference(first[0], first[1]) > 1e-2  # of each image
