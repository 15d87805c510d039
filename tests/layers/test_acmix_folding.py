"""ACmix folded into one convolution and attention."""

import keras
import numpy as np
import pytest
from acmix_helpers import ARGUMENTS
from acmix_helpers import case
from acmix_helpers import random_layer
from acmix_helpers import sample
from layer_contract import as_array
from layer_contract import DTYPE
from layer_contract import LayerContract
from layer_contract import LIMIT

from keras_equiattn.layers import FoldedACmix2D
from keras_equiattn.testing import assert_equivariant
from keras_equiattn.testing import relative_difference


class TestFoldedACmix2D(LayerContract):
    layer = FoldedACmix2D
    cases = (
        case(FoldedACmix2D, "p4", (2, 6, 6, 4, 3), (2, 6, 6, 4, 4), 10, (5, 7)),
    )
    arguments = (
        {**ARGUMENTS, "strides": (2, 2), "dilation_rate": (1, 1)},
        {**ARGUMENTS, "paths": "attention"},
    )


@pytest.mark.torch_first
@pytest.mark.parametrize(
    "options",
    [
        {"paths": "attention"},
        {"paths": "convolution"},
        {"rates": "fixed"},
        {"shift_kernels": "fixed", "use_bias": False},
        {"activation": "relu"},
    ],
)
def test_folded_layers_are_equal(options, tmp_path):
    layer = random_layer(filters=8, group="p4", name="mix", **options)
    x = sample(layer)
    expected = as_array(layer(x))
    folded = layer.folded()
    assert isinstance(folded, FoldedACmix2D)
    assert folded.name == "mix"
    assert relative_difference(as_array(folded(x)), expected) < LIMIT
    assert_equivariant(
        folded, "p4", x, rtol=1e-12 if DTYPE == "float64" else 1e-5
    )
    model = keras.Sequential([keras.Input(x.shape[1:], dtype=DTYPE), folded])
    model.save(tmp_path / "folded.keras")
    revived = keras.saving.load_model(tmp_path / "folded.keras")
    y = revived.predict(x, verbose=0)  # on PyTorch in float32
    assert relative_difference(y, expected) < 1e-6


def test_folding_leaves_the_layer_as_it_was():
    """Also after predictions, which may donate the buffers of weights."""
    layer = random_layer(filters=4, num_heads=2, dtype="float32")
    x = sample(layer, (3, 4)).astype("float32")
    plain, folded = (
        keras.Sequential([keras.Input(x.shape[1:]), each])
        for each in (layer, layer.folded())
    )
    expected = plain.predict(x, verbose=0)
    y = folded.predict(x, verbose=0)
    assert relative_difference(y, expected) < 1e-5
    np.testing.assert_array_equal(plain.predict(x, verbose=0), expected)


@pytest.mark.torch_first
def test_another_element_is_not_the_symmetry():
    layer = random_layer(filters=8, group="p4")
    x = sample(layer)
    turned = as_array(layer(np.rot90(x, axes=(1, 2)).copy()))  # axis not moved
    expected = np.rot90(as_array(layer(x)), axes=(1, 2))
    assert relative_difference(turned, expected) > 1e-2
