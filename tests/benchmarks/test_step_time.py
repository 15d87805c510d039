"""Seconds of training steps, on one image."""

from argparse import Namespace
from pathlib import Path

import pytest


def test_a_layer_is_timed_beside_a_convolution(monkeypatch):
    folder = Path(__file__).parents[2] / "benchmarks"
    monkeypatch.syspath_prepend(folder)
    import step_time

    monkeypatch.setattr(step_time, "WARM_UP", 1)
    options = Namespace(batch=1, repeats=1, size=7, width=16)
    found = step_time.measure("sasa", options)
    assert set(found) == {"seconds", "convolution", "ratio", "compilation"}
    assert found["seconds"] > 0
    assert found["ratio"] == pytest.approx(
        found["seconds"] / found["convolution"], rel=0.5
    )
