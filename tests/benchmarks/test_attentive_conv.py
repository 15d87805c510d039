"""The forms that the benchmark compares compute the same."""

from pathlib import Path

import numpy as np
import pytest
from layer_contract import as_array

from keras_equiattn import layers
from keras_equiattn.testing import relative_difference


@pytest.mark.parametrize("attention", ["full", "channel", "spatial"])
@pytest.mark.parametrize(
    "layer", [layers.AttentiveLiftingConv2D, layers.AttentiveGroupConv2D]
)
def test_all_forms_agree(layer, attention, monkeypatch):
    folder = Path(__file__).parents[2] / "benchmarks"
    monkeypatch.syspath_prepend(folder)
    import attentive_conv

    lifting = layer is layers.AttentiveLiftingConv2D
    x = np.random.default_rng(0).normal(
        size=(2, 6, 6, *(4,) * (not lifting), 1)
    )
    outputs = []
    template = layer(2, 3, attention, group="p4")
    weights = None
    for form in attentive_conv.FORMS:
        copy = attentive_conv.in_form(template, form)
        copy.build(x.shape)
        weights = weights or copy.get_weights()
        copy.set_weights(weights)
        outputs.append(as_array(copy(x.astype("float32"))))
    for output in outputs[1:]:
        assert relative_difference(output, outputs[0]) < 1e-5
