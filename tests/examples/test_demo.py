"""The demonstration, shortened."""

import json
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_demo(tmp_path, monkeypatch, capsys):
    folder = Path(__file__).parents[2] / "examples"
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(tmp_path)
    import demo

    monkeypatch.setattr(demo, "EPOCHS", 3)
    monkeypatch.setattr(sys, "argv", ["examples/demo.py"])
    demo.main()
    out = Path("runs/demo")
    results = json.loads((out / "results.json").read_text())
    plain, equivariant = results["models"].values()
    assert 0.8 < equivariant["parameters"] / plain["parameters"] < 1.25
    # Quarter turns change nothing but rounding.
    assert equivariant["equivariance_error"] < 1e-4
    assert plain["equivariance_error"] > 1e-2
    upright = equivariant["upright_test_accuracy"]
    for angle in ("90", "180", "270"):
        turned = equivariant["accuracy_by_angle"][angle]
        assert turned == pytest.approx(upright, abs=0.01)
    assert equivariant["test_accuracy"] > plain["test_accuracy"] > 0.05
    for picture in ("accuracy.png", "attention.png"):
        assert (out / picture).stat().st_size > 10_000
    shown = capsys.readouterr().out
    assert f"{equivariant['parameters']:,}" in shown
    assert f"{plain['test_accuracy']:.0%}" in shown
    demo.main()  # a second time in the same place works as well
