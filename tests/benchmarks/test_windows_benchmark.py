"""The benchmark compares what it says it compares."""

import argparse
from pathlib import Path

import pytest
from layer_contract import as_array

from keras_equiattn.testing import relative_difference


@pytest.fixture
def windows(monkeypatch):
    folder = Path(__file__).parents[2] / "benchmarks"
    monkeypatch.syspath_prepend(folder)
    import windows

    return windows


@pytest.mark.parametrize("kind", ["asc", "sasa"])
def test_both_forms_agree(kind, windows):
    options = argparse.Namespace(
        batch=2, size=5, width=8, heads=2, kernel_size=3
    )
    tensors = windows.arrays(kind, options)
    first, second = (
        as_array(windows.MAKERS[form](kind, options)(*tensors))
        for form in windows.FORMS
    )
    assert relative_difference(first, second) < 1e-5
