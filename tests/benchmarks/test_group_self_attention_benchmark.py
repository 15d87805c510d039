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


def test_both_forms_agree(benchmark):
    x = np.random.default_rng(0).random((1, 28, 28, 1)).astype("float32")
    first, second = (
        as_array(benchmark.network("p4", 3, form)(x))
        for form in benchmark.FORMS
    )
    assert relative_difference(first, second) < 1e-5


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
