"""Seconds of training steps, on one image."""

from argparse import Namespace
from pathlib import Path


def test_a_layer_is_timed_beside_a_convolution(monkeypatch):
    """Medians, and their ratio, of steps that run but take given times."""
    folder = Path(__file__).parents[2] / "benchmarks"
    monkeypatch.syspath_prepend(folder)
    import step_time

    def alternate(steps, repeats, warm_up, untimed):
        for step in steps.values():
            step()
        assert repeats == 3
        return {"layer": [0.5, 0.3, 9.0], "convolution": [0.1, 0.2, 0.4]}

    monkeypatch.setattr(step_time, "WARM_UP", 1)
    monkeypatch.setattr(step_time.timing, "alternate", alternate)
    options = Namespace(batch=1, repeats=3, size=7, width=16)
    found = step_time.measure("sasa", options)
    assert set(found) == {"seconds", "convolution", "ratio", "compilation"}
    assert found["seconds"] == 0.5
    assert found["convolution"] == 0.2
    assert found["ratio"] == 2.5
