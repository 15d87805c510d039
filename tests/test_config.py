"""Settings of all layers."""

import keras
import numpy as np
import pytest
from families import build
from families import FAMILIES
from families import images
from layer_contract import as_array
from layer_contract import second_derivative

from keras_equiattn import config

# One layer of each family with a gradient of its own, but for the first.
NAMES = [
    pytest.param(name, marks=[] if name == "asc" else pytest.mark.torch_first)
    for name in FAMILIES
]


@pytest.fixture(autouse=True)
def as_before():
    yield
    config.enable_recompute()


def curvature(model, x, direction):
    """The second derivative of the sum of squares, from three values."""
    step = 1e-3 if x.dtype == np.float64 else 3e-2
    values = [
        np.sum(as_array(model(x + n * step * direction)).astype(float) ** 2)
        for n in (-1, 0, 1)
    ]
    return (values[0] - 2 * values[1] + values[2]) / step**2


@pytest.mark.skipif(
    keras.backend.backend() == "jax",
    reason="JAX differentiates the gradients of the layers as they are.",
)
@pytest.mark.parametrize("name", NAMES)
def test_models_can_be_differentiated_twice(name, tmp_path):
    """Also one that comes from a file and knows nothing of the setting."""
    double = keras.backend.backend() != "jax"
    if double:
        keras.config.set_dtype_policy("float64")
    inputs = keras.Input(FAMILIES[name][1])
    keras.Model(inputs, build(name)(inputs)).save(tmp_path / "model.keras")
    model = keras.models.load_model(tmp_path / "model.keras")
    x = images(name, 2).astype("float64" if double else "float32")
    direction = np.random.default_rng(2).normal(size=x.shape).astype(x.dtype)
    before = as_array(model(x))
    config.disable_recompute()
    assert not config.is_recompute_enabled()
    np.testing.assert_allclose(as_array(model(x)), before, 1e-4, 1e-5)
    found = second_derivative(model, x, direction)
    expected = curvature(model, x, direction)
    np.testing.assert_allclose(found, expected, rtol=1e-3 if double else 5e-2)


def test_refusal_names_the_setting():
    if keras.backend.backend() == "jax":
        pytest.skip("JAX differentiates these gradients.")
    x = images("asc", 2)
    with pytest.raises(
        (NotImplementedError, LookupError), match="disable_recompute"
    ):
        second_derivative(build("asc"), x, x)
