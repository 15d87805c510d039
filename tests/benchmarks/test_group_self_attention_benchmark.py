"""What the benchmark compares is what it says."""

from pathlib import Path

import numpy as np
import pytest
from layer_contract import as_array

from keras_equiattn.testing import relative_difference


@pytest.fixture
def benchmark(monkeypatch):
    folder = Path(__file__).parents[2] / "benchmarks"
    monkeypatch.syspath_prepend(folder)
    import group_self_attention

    return group_self_attention


@pytest.mark.torch_first
def test_both_forms_agree(benchmark):
    x = np.random.default_rng(0).random((1, 28, 28, 1)).astype("float32")
    first, second = (
        as_array(benchmark.network("p4", 3, form)(x))
        for form in benchmark.FORMS
    )
    assert relative_difference(first, second) < 1e-5


@pytest.mark.torch_first
def test_parts_of_a_tile(benchmark, monkeypatch):
    """The pieces of the forward pass make up the whole."""
    monkeypatch.setattr(benchmark, "DROPOUT", 0.0)
    parts, pairs = benchmark.parts_of_a_tile(3, 3, heads=2, channels=4)
    assert pairs == 9 * 4**2 * 2 * 3 * 5
    found = {name: part(*tensors) for name, (part, tensors) in parts.items()}
    output, _ = found["all of the forward pass"]
    sums = as_array(found["weighted sums"])
    assert relative_difference(sums, as_array(output)) < 1e-5
    weights = as_array(found["pair weights"])
    assert weights.size == pairs
    np.testing.assert_allclose(weights.sum(axis=(0, 1)), 4, rtol=1e-5)
    _, positions = found["all of the backward pass"]
    assert all(np.abs(as_array(x)).max() > 0 for x in positions)


@pytest.mark.once
def test_the_smooth_image_turns(benchmark):
    still = benchmark.smooth(23, 0.0)
    turned = benchmark.smooth(23, np.pi / 2)
    np.testing.assert_allclose(turned, np.rot90(still, axes=(1, 2)), atol=1e-5)
    assert np.abs(turned - still).max() > 0.1


@pytest.mark.once
def test_a_turn_moves_a_small_window_less_than_the_group_does(benchmark):
    """Attention to one pixel sees no positions: nothing changes."""
    p8 = benchmark.groups.get("p8")
    image, turned = (benchmark.smooth(9, angle) for angle in (0.0, np.pi / 4))
    error, _ = benchmark.at_45_degrees(p8, 1, image, turned, 0)
    assert error < 1e-5
    error, spread = benchmark.at_45_degrees(p8, 3, image, turned, 0)
    assert 1e-3 < error < spread
