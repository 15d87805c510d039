"""The benchmark compares what it says it compares."""

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
