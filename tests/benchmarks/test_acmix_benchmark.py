"""The benchmark compares what it says it compares."""

from pathlib import Path

import keras
import numpy as np
import pytest


@pytest.fixture
def folder(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture
def acmix(folder):
    import acmix

    return acmix


@pytest.fixture
def counts(folder):
    import acmix_counts

    return acmix_counts


@pytest.mark.parametrize("part", ["convolved_maps", "attend_to"])
def test_forms_differ_in_cost_alone(part, acmix, monkeypatch):
    acmix.check_same(8, 5)
    own = getattr(acmix.UnfoldedACmix2D, part)

    def other(layer, *maps):
        return keras.tree.map_structure(lambda y: 2 * y, own(layer, *maps))

    monkeypatch.setattr(acmix.UnfoldedACmix2D, part, other)
    with pytest.raises(AssertionError):
        acmix.check_same(8, 5)


@pytest.mark.once
def test_stages_are_all_of_the_layer(counts):
    found = counts.stages([64])["stages"]["64 channels"]
    parameters = found["parameters"]
    # The paper's 3 * in * out, and in total the count of the authors' code.
    assert parameters["projection"] == 3 * (64 * 64 + 64)
    assert parameters["projection"] + parameters["aggregation"] == 17_822
    second = found["aggregation"]
    parts = ("attention", "mixing", "shift kernels")
    total = sum(second[part] for part in parts)
    assert found["multiply-adds"]["aggregation"] == total
    both = second["mixing"] + second["shift kernels"]
    assert second["mixing and shift kernels in one, grouped"] == both
    assert np.isclose(
        found["multiply-adds"]["share of aggregation"],
        total / (total + 3 * 64 * 64),
        atol=1e-3,
    )


@pytest.mark.once
@pytest.mark.parametrize(
    ("network", "mixer", "expected"),
    [
        # As Swin's own code counts, with and without ACmix, norms included.
        pytest.param("ACmixSwinTiny", "acmix", 4.649, marks=pytest.mark.sweep),
        pytest.param(
            *("ACmixSwinTiny", "attention", 4.494), marks=pytest.mark.sweep
        ),
        # Counted from the authors' code, with position terms.
        ("ACmixResNet26", "acmix", 2.217),
        pytest.param("ACmixResNet38", "acmix", 2.859, marks=pytest.mark.sweep),
        pytest.param("ACmixResNet50", "acmix", 3.502, marks=pytest.mark.sweep),
        # Rounded to one decimal place in the papers.
        pytest.param("ACmixSAN10", "acmix", 1.9, marks=pytest.mark.sweep),
        pytest.param("ACmixPVTTiny", "acmix", 2.0, marks=pytest.mark.sweep),
        pytest.param("ACmixPVTTiny", "attention", 1.9, marks=pytest.mark.sweep),
    ],
)
def test_multiply_adds_of_networks(network, mixer, expected, counts):
    model = getattr(counts.applications, network)(mixer=mixer)
    found = counts.of_network(model)
    limit = 0.05 if expected == round(expected, 1) else 0.006
    assert abs(found["grouped"] / 1e9 - expected) < limit
    if mixer == "attention":
        assert found["dense"] == found["grouped"]
        assert found["kernels"] == 0
    else:
        assert found["dense"] > 1.3 * found["grouped"]
