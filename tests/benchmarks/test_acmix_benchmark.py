"""What the benchmark compares is what it says."""

from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def acmix(monkeypatch):
    folder = Path(__file__).parents[2] / "benchmarks"
    monkeypatch.syspath_prepend(folder)
    import acmix

    return acmix


@pytest.mark.torch_first
def test_forms_differ_in_cost_alone(acmix, monkeypatch):
    acmix.check_same(8, 5)
    linear = acmix.UnfoldedACmix2D._linear

    def without_keys(layer, x, name):
        return linear(layer, x, "query" if name == "key" else name)

    monkeypatch.setattr(acmix.UnfoldedACmix2D, "_linear", without_keys)
    with pytest.raises(AssertionError):
        acmix.check_same(8, 5)


@pytest.mark.once
def test_stages_are_all_of_the_layer(acmix):
    found = acmix.stages(None)["stages"]["64 channels"]
    parameters = found["parameters"]
    # The paper's 3 in out and, in all, the number of the authors' code.
    assert parameters["projection"] == 3 * (64 * 64 + 64)
    assert parameters["projection"] + parameters["aggregation"] == 17_822
    counts = found["aggregation"]
    parts = ("attention", "mixing", "shift kernels")
    total = sum(counts[part] for part in parts)
    assert found["multiply-adds"]["aggregation"] == total
    both = counts["mixing"] + counts["shift kernels"]
    assert counts["mixing and shift kernels in one, grouped"] == both
    assert np.isclose(
        found["multiply-adds"]["share of aggregation"],
        total / (total + 3 * 64 * 64),
        atol=1e-3,
    )
