"""Attention over windows: derivatives, many offsets, half precision."""

import keras
import numpy as np
import pytest
from layer_contract import as_array
from layer_contract import DTYPE
from layer_contract import FLOAT64_BACKENDS
from layer_contract import gradients
from layer_contract import second_derivative
from window_attention_helpers import LAYERS
from window_attention_helpers import oracle
from window_attention_helpers import random_layer
from window_attention_helpers import tolerance

from keras_equiattn.layers import AffineSelfConv2D
from keras_equiattn.layers import StandAloneSelfAttention2D
from keras_equiattn.testing import assert_equivariant
from keras_equiattn.testing import relative_difference


@pytest.mark.torch_first
@pytest.mark.skipif(
    keras.backend.backend() not in FLOAT64_BACKENDS,
    reason="float64 is off by default on this backend",
)
def test_strong_weights_stay_exact():
    layer = random_layer(AffineSelfConv2D, filters=4, num_heads=2, group="p4m")
    for variable in (layer.query_kernel, layer.key_kernel):
        variable.assign(6 * as_array(variable))
    x = np.random.default_rng(1).normal(size=(2, 6, 6, 8, 3))
    assert_equivariant(layer, "p4m", x, rtol=1e-12)


@pytest.mark.torch_first
def test_large_scores_stay_finite_in_half_precision():
    layer = AffineSelfConv2D(
        8, 3, 1, group="p4", dtype="float16", scale=100.0, border="mask"
    )
    x = 10 * np.random.default_rng(1).normal(size=(2, 5, 5, 4, 3))
    assert np.isfinite(as_array(layer(x.astype("float16")))).all()


@pytest.mark.slow
@pytest.mark.every_backend
def test_second_derivatives_without_recomputation():
    """Of the sum of squares with respect to the input, along a direction."""
    x = np.random.default_rng(1).normal(size=(1, 4, 4, 1, 2)).astype(DTYPE)
    direction = np.random.default_rng(2).normal(size=x.shape).astype(DTYPE)
    layer = random_layer(
        AffineSelfConv2D, 2, filters=2, num_heads=1, recompute=False
    )

    def slope(x):
        cotangent = 2 * as_array(layer(x))
        return (gradients(layer, x, cotangent)[0] * direction).sum()

    step = 1e-3 if DTYPE == "float64" else 1e-2
    expected = (slope(x + step * direction) - slope(x - step * direction)) / (
        2 * step
    )
    actual = second_derivative(layer, x, direction)
    assert abs(actual - expected) < 1e-2 * abs(expected)


@pytest.mark.torch_first
def test_second_derivatives_are_right_or_refused():
    x = np.random.default_rng(1).normal(size=(1, 4, 4, 1, 2)).astype(DTYPE)
    layers = [
        random_layer(
            AffineSelfConv2D, 2, filters=2, num_heads=1, recompute=recompute
        )
        for recompute in (True, False)
    ]
    if keras.backend.backend() == "jax":
        first, second = (second_derivative(layer, x, x) for layer in layers)
        assert abs(first - second) < 1e-3 * abs(second)
        return
    with pytest.raises(Exception, match="recompute=False"):
        second_derivative(layers[0], x, x)


@pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="Transforms of PyTorch."
)
def test_gradients_by_torch_func():
    """A gradient is that of autograd; a nested one is refused."""
    import torch

    layer = random_layer(AffineSelfConv2D, 2, filters=2, num_heads=1)
    x = np.random.default_rng(1).normal(size=(1, 4, 4, 1, 2)).astype(DTYPE)

    def loss(x):
        return (layer(x) ** 2).sum()

    at = keras.ops.convert_to_tensor(x)
    found = torch.func.grad(loss)(at)
    expected = gradients(layer, x, 2 * as_array(layer(x)))[0]
    np.testing.assert_allclose(as_array(found), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(NotImplementedError, match="recompute=False"):
        torch.func.grad(lambda x: torch.func.grad(loss)(x).sum())(at)


@pytest.mark.torch_first
def test_many_offsets_and_a_window_larger_than_the_image():
    layer = random_layer(
        StandAloneSelfAttention2D,
        filters=4,
        num_heads=2,
        kernel_size=11,
        border="mask",
        group="p4",
    )
    x = np.random.default_rng(1).normal(size=(2, 4, 4, 4, 3))
    expected, _ = oracle(layer, x)
    actual = as_array(layer(x.astype(DTYPE)))
    assert relative_difference(actual, expected) < tolerance()


@pytest.mark.torch_first
def test_many_offsets_on_images_of_any_size():
    layer = random_layer(
        StandAloneSelfAttention2D,
        filters=4,
        num_heads=2,
        kernel_size=11,
        dtype="float32",
    )
    model = keras.Sequential([keras.Input((None, None, 3)), layer])
    for size in ((5, 6), (4, 7)):
        x = np.random.default_rng(1).normal(size=(2, *size, 1, 3))
        expected, _ = oracle(layer, x)
        y = model.predict(x[:, :, :, 0].astype("float32"), verbose=0)
        assert relative_difference(y, expected[:, :, :, 0]) < 1e-5


@pytest.mark.torch_first
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("layer", LAYERS)
def test_one_pixel_is_weighed_with_one(layer, recompute):
    """Gradients of queries and keys are zero up to rounding, not missing."""
    made = random_layer(
        layer,
        filters=4,
        num_heads=2,
        kernel_size=1,
        group="p4",
        recompute=recompute,
    )
    x = np.random.default_rng(1).normal(size=(2, 3, 4, 4, 3))
    expected, _ = oracle(made, x)
    x = x.astype(DTYPE)
    assert relative_difference(as_array(made(x)), expected) < tolerance()
    _, *found = gradients(made, x, np.ones((2, 3, 4, 4, 4), DTYPE))
    for variable, gradient in zip(made.trainable_variables, found, strict=True):
        of_scores = variable.name.startswith(("query", "key", "row", "column"))
        assert (abs(gradient).max() > tolerance()) != of_scores, variable.name


@pytest.mark.torch_first
def test_dilation():
    layer = random_layer(
        AffineSelfConv2D, filters=4, num_heads=2, group="p4", dilation_rate=2
    )
    x = np.random.default_rng(1).normal(size=(2, 7, 7, 4, 3)).astype(DTYPE)
    # A pixel sees nothing that lies at an odd distance.
    changed = x.copy()
    changed[:, 2, 3] += 1
    same = np.isclose(as_array(layer(x)), as_array(layer(changed)))
    touched = ~same.all(axis=(0, 3, 4))
    rows, columns = np.nonzero(touched)
    assert set(rows) == {0, 2, 4}
    assert set(columns) == {1, 3, 5}
