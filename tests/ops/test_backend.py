"""Loops over groups of slices against a loop over slices."""

import numpy as np
import pytest
from keras import ops

from keras_equiattn.ops import backend
from keras_equiattn.testing import relative_difference


@pytest.mark.parametrize(
    ("length", "size", "groups"),
    [
        (6, 3, {3}),
        (5, 2, {2, 1}),
        (11, 2, {2, 1}),
        (7, 3, {3, 1}),
        (9, 8, {5, 4}),  # not 8 and 1
        (4, 9, {4}),
    ],
)
def test_scan_groups(length, size, groups):
    """Every slice once, in order, in groups that are not larger than asked."""
    rng = np.random.default_rng(length)
    x, y = rng.normal(size=(2, length, 3)).astype("float32")
    seen = set()

    def step(carry, pieces):
        x, y = pieces
        seen.add(x.shape[0])
        outputs = []
        for i in range(x.shape[0]):
            carry = carry / 2 + x[i] * y[i]
            outputs.append(carry)
        return carry, (ops.stack(outputs), 2 * x)

    tensors = tuple(map(ops.convert_to_tensor, (x, y)))
    carry, outputs = backend.scan_groups(
        step, tensors[0][0], tensors, size, tensors
    )
    expected = [x[0]]
    for product in x * y:
        expected.append(expected[-1] / 2 + product)
    assert seen == groups
    for found, wanted in (
        (carry, expected[-1]),
        (outputs[0], np.array(expected[1:])),
        (outputs[1], 2 * x),
    ):
        assert relative_difference(ops.convert_to_numpy(found), wanted) < 1e-6
