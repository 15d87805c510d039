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
from keras_equiattn import layers
from keras_equiattn.ops.group import dispatch

# One layer of each family with a gradient of its own. JAX needs no setting.
FAST = () if keras.backend.backend() == "jax" else ("asc",)
NAMES = [
    pytest.param(name, marks=[] if name in FAST else pytest.mark.torch_first)
    for name in FAMILIES
]


@pytest.fixture(autouse=True)
def as_before():
    yield
    config.enable_recompute()


@pytest.fixture
def float64():
    """Float64 for all layers, which JAX must be told to have."""
    keras.config.set_dtype_policy("float64")
    if keras.backend.backend() == "jax":
        import jax

        jax.config.update("jax_enable_x64", True)
    yield
    if keras.backend.backend() == "jax":
        jax.config.update("jax_enable_x64", False)


def curvature(model, x, direction):
    """The second derivative of the sum of squares, from three values."""
    step = 1e-3
    values = [
        np.sum(as_array(model(x + n * step * direction)).astype(float) ** 2)
        for n in (-1, 0, 1)
    ]
    return (values[0] - 2 * values[1] + values[2]) / step**2


@pytest.mark.parametrize("name", NAMES)
def test_models_can_be_differentiated_twice(name, tmp_path, float64):
    """Also one that comes from a file and knows nothing of the setting."""
    inputs = keras.Input(FAMILIES[name][1])
    keras.Model(inputs, build(name)(inputs)).save(tmp_path / "model.keras")
    model = keras.models.load_model(tmp_path / "model.keras")
    x = images(name, 2).astype("float64")
    direction = np.random.default_rng(2).normal(size=x.shape)
    before = as_array(model(x))
    config.disable_recompute()
    assert not config.is_recompute_enabled()
    np.testing.assert_allclose(as_array(model(x)), before, 1e-4, 1e-5)
    found = second_derivative(model, x, direction)
    expected = curvature(model, x, direction)
    np.testing.assert_allclose(found, expected, rtol=1e-3)


@pytest.mark.parametrize(
    "layer",
    [
        layers.StandAloneSelfAttention2D,
        *(
            pytest.param(layer, marks=pytest.mark.torch_first)
            for layer in (
                layers.SimpleAffineSelfConv2D,
                layers.AffineSelfConv2D,
                layers.ACmix2D,
            )
        ),
    ],
)
def test_linear_maps_without_recomputation(layer, monkeypatch, float64):
    """Those of many values are not computed by blocks."""
    fewest = dict.fromkeys(dispatch.FEWEST_VALUES, 1)
    monkeypatch.setattr(dispatch, "FEWEST_VALUES", fewest)
    made = layer(2, num_heads=1, group="p4", recompute=False)
    rng = np.random.default_rng(0)
    x, direction = rng.normal(size=(2, 1, 5, 5, 4, 2))
    made.build(x.shape)
    found = second_derivative(made, x, direction)
    expected = curvature(made, x, direction)
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_refusal_names_the_setting():
    if keras.backend.backend() == "jax":
        pytest.skip("JAX differentiates these gradients.")
    x = images("asc", 2)
    with pytest.raises(
        (NotImplementedError, LookupError), match="disable_recompute"
    ):
        second_derivative(build("asc"), x, x)
