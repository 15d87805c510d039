"""Depthwise convolution written out in terms against the backend's own."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_equiattn.ops.responses import depthwise
from keras_equiattn.testing import relative_difference

CASES = pytest.mark.parametrize(
    ("size", "window", "rate"),
    [
        ((5, 6), (3, 3), 1),
        ((6, 4), (3, 5), 2),
        ((4, 5), (2, 4), 1),  # even: one zero more behind
        ((2, 37), (3, 3), 1),  # two tiles of columns, the last not full
    ],
)


def numbers(*shape):
    values = np.random.default_rng(sum(shape)).normal(size=shape)
    return ops.convert_to_tensor(values, "float32")


def shifted(x, kernel, rate):
    """Sum over positions of the window, in NumPy."""
    x, kernel = (keras.ops.convert_to_numpy(a) for a in (x, kernel))
    reach = [rate * (n - 1) for n in kernel.shape[:2]]
    pads = [(n // 2, n - n // 2) for n in reach]
    padded = np.pad(x, ((0, 0), *pads, (0, 0), (0, 0)))
    y = np.zeros((*x.shape[:3], x.shape[-1]))
    for u in range(kernel.shape[0]):
        for v in range(kernel.shape[1]):
            seen = padded[:, u * rate :, v * rate :]
            seen = seen[:, : x.shape[1], : x.shape[2]]
            y += (seen * kernel[u, v]).sum(3)
    return y


@CASES
@pytest.mark.parametrize("columns", [32, None])
def test_sum(size, window, rate, columns):
    x, kernel = numbers(2, *size, 2, 3), numbers(*window, 2, 3)
    y = depthwise.depthwise_sum(x, kernel, rate, columns)
    y = keras.ops.convert_to_numpy(y)
    assert relative_difference(y, shifted(x, kernel, rate)) < 1e-6


@CASES
@pytest.mark.parametrize("columns", [32, None])
def test_gradients(size, window, rate, columns):
    """The sum is linear in both arguments: `<d, f(a)> = <f'(d), a>`."""
    x, kernel = numbers(2, *size, 2, 3), numbers(*window, 2, 3)
    upstream = numbers(2, *size, 3)
    of_x, parts = depthwise.depthwise_gradients(
        x, kernel, upstream, rate, columns, blocks=2
    )
    assert len(parts) == (2 if columns else 1)
    of_kernel = ops.sum(parts, axis=0)
    assert tuple(of_x.shape) == tuple(x.shape)
    assert tuple(of_kernel.shape) == tuple(kernel.shape)
    d = keras.ops.convert_to_numpy(upstream)
    other, moved = numbers(3, *size, 2, 3)[1:], numbers(2, *window, 2, 3)[1]
    for gradient, argument, y in (
        (of_x, other, shifted(other, kernel, rate)),
        (of_kernel, moved, shifted(x, moved, rate)),
    ):
        found = float(ops.sum(gradient * argument))
        assert found == pytest.approx((d * y).sum(), rel=1e-4, abs=1e-3)
