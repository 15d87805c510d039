"""Group self-attention: strong weights, large scores, derivatives."""

import keras
import numpy as np
import pytest
from group_attention_helpers import LAYERS
from group_attention_helpers import random_layer
from group_attention_helpers import sample
from group_attention_helpers import SLOW
from group_attention_helpers import strengthen
from group_attention_helpers import tolerance
from layer_contract import as_array
from layer_contract import DTYPE
from layer_contract import gradients
from layer_contract import second_derivative
from sweeps import swept

from keras_equiattn.layers import GroupSelfAttention2D
from keras_equiattn.layers import LiftingSelfAttention2D
from keras_equiattn.testing import assert_equivariant
from keras_equiattn.testing import relative_difference


@pytest.mark.torch_first
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    ("group", "window", "size", "dtype"),
    [
        ("p4m", 3, (4, 4), "float32"),
        pytest.param("p4m", 3, (5, 4), "float32", marks=SLOW),
        pytest.param("p4", None, (4, 4), "float32", marks=SLOW),
        pytest.param("z2m", None, (4, 4), "float32", marks=SLOW),
        pytest.param("p8", 3, (4, 4), "float32", marks=SLOW),
        pytest.param("p8m", 3, (4, 4), "float32", marks=SLOW),
        pytest.param("p12", 3, (4, 4), "float32", marks=SLOW),
        ("p16", 3, (4, 4), "float32"),
        ("p4", None, (4, 4), "float64"),
        pytest.param("p4m", 3, (4, 4), "float64", marks=SLOW),
        pytest.param("p4m", None, (4, 4), "float32", marks=SLOW),
        pytest.param("p4m", None, (4, 4), "float64", marks=SLOW),
        pytest.param("p8", 3, (4, 4), "float64", marks=SLOW),
        pytest.param("p12", 3, (4, 4), "float64", marks=SLOW),
        pytest.param("p16", 3, (4, 4), "float64", marks=SLOW),
        pytest.param("p8m", 3, (4, 4), "float64", marks=SLOW),
        pytest.param("z2m", None, (4, 4), "float64", marks=SLOW),
    ],
)
def test_strong_weights_stay_exact(layer, group, window, size, dtype):
    if dtype == "float64" and DTYPE != "float64":
        pytest.skip("float64 is off by default on this backend")
    made = random_layer(layer, group, window, dtype=dtype)
    strengthen(made, 6)
    assert_equivariant(
        made,
        group,
        sample(made, size, dtype=dtype),
        rtol=1e-5 if dtype == "float32" else 1e-12,
        elements=made.group.grid_elements,
    )


@pytest.mark.torch_first
@pytest.mark.parametrize("group", ["p8", "p16"])
@pytest.mark.parametrize("window", swept((7, None), 7))
def test_epsilon_of_the_authors_stays_exact(group, window):
    """It leaves only the sign of coordinates, even of those that are zero."""
    layer = LiftingSelfAttention2D(4, 4, 2, window, group, epsilon=1e-12)
    layer.build((1, 6, 6, 3))
    assert_equivariant(
        layer,
        group,
        sample(layer, (6, 6), dtype="float32"),
        rtol=1e-5,
        elements=layer.group.grid_elements,
    )


@pytest.mark.torch_first
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("window", [3, None])
def test_large_scores_agree_with_the_plain_form(layer, window):
    made = [
        random_layer(layer, window=window, recompute=recompute)
        for recompute in (True, False)
    ]
    x = sample(made[0], (4, 4))
    for one in made:
        strengthen(one, 10)
    y, expected = (as_array(one(x)) for one in made)
    limit = 1e-9 if DTYPE == "float64" else 1e-2
    assert relative_difference(y, expected) < limit
    for one in made:  # far beyond what an exponential holds
        strengthen(one, 10)
    assert np.isfinite(as_array(made[0](x))).all()
    of_x, *found = gradients(made[0], x, np.ones_like(y))
    assert all(np.isfinite(gradient).all() for gradient in (of_x, *found))


@pytest.mark.torch_first
def test_large_scores_stay_finite_in_half_precision():
    layer = GroupSelfAttention2D(4, 3, 1, 3, "p4", dtype="float16")
    x = 30 * sample(layer, (4, 4), dtype="float16")
    assert np.isfinite(as_array(layer(x))).all()


@pytest.mark.torch_first
@pytest.mark.parametrize(
    ("layer", "window"),
    [
        (LiftingSelfAttention2D, None),
        (GroupSelfAttention2D, 3),
        pytest.param(LiftingSelfAttention2D, 3, marks=SLOW),
        pytest.param(GroupSelfAttention2D, None, marks=SLOW),
    ],
)
def test_recomputation_changes_nothing(layer, window):
    made = [
        random_layer(layer, window=window, recompute=recompute)
        for recompute in (True, False)
    ]
    x = sample(made[0], (3, 4))
    y, expected = (as_array(one(x)) for one in made)
    assert relative_difference(y, expected) < tolerance()
    cotangent = np.random.default_rng(2).normal(size=y.shape).astype(DTYPE)
    found, wanted = (gradients(one, x, cotangent) for one in made)
    names = ["x", *(v.name for v in made[0].trainable_variables)]
    for name, gradient, other in zip(names, found, wanted, strict=True):
        scale = max(np.abs(other).max(), 1)
        limit = 10 * tolerance() * scale
        assert np.abs(gradient - other).max() < limit, name


@pytest.mark.torch_first
@pytest.mark.parametrize(
    ("layer", "window"),
    [
        (GroupSelfAttention2D, 3),
        pytest.param(GroupSelfAttention2D, None, marks=SLOW),
        pytest.param(LiftingSelfAttention2D, 3, marks=SLOW),
        pytest.param(LiftingSelfAttention2D, None, marks=SLOW),
    ],
)
def test_second_derivatives_without_recomputation(layer, window):
    """Of the sum of squares with respect to the input, along a direction."""
    made = random_layer(layer, "z2m", window, 2, num_heads=1, recompute=False)
    x = sample(made, (3, 3), 1, 2)
    direction = sample(made, (3, 3), 1, 2, seed=2)

    def slope(x):
        cotangent = 2 * as_array(made(x))
        return (gradients(made, x, cotangent)[0] * direction).sum()

    step = 1e-3 if DTYPE == "float64" else 1e-2
    expected = (slope(x + step * direction) - slope(x - step * direction)) / (
        2 * step
    )
    actual = second_derivative(made, x, direction)
    assert abs(actual - expected) < 1e-2 * abs(expected)


@pytest.mark.torch_first
@pytest.mark.parametrize("window", [3, None])
def test_second_derivatives_are_right_or_refused(window):
    layers = [
        random_layer(
            GroupSelfAttention2D, "z2m", window, 2, recompute=recompute
        )
        for recompute in (True, False)
    ]
    x = sample(layers[0], (3, 3), 1, 2)
    if keras.backend.backend() == "jax":
        first, second = (second_derivative(layer, x, x) for layer in layers)
        assert abs(first - second) < 1e-3 * abs(second)
        return
    with pytest.raises(Exception, match="recompute=False"):
        second_derivative(layers[0], x, x)


@pytest.mark.every_backend
@pytest.mark.torch_first
@pytest.mark.parametrize("window", [3, None])
def test_counts_in_double_precision_where_keras_is_told_to(window):
    """Under TensorFlow, sizes may then be integers of 64 bits."""
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    try:
        layer = LiftingSelfAttention2D(4, 3, 2, window)
        y = as_array(layer(np.ones((2, 4, 3, 3))))
    finally:
        keras.config.set_floatx(before)
    assert y.shape == (2, 4, 3, 4, 4)
    assert np.isfinite(y).all()
