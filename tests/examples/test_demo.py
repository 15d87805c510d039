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

    monkeypatch.setattr(demo, "EPOCHS", 2)
    monkeypatch.setattr(sys, "argv", ["examples/demo.py"])
    demo.main()
    results = json.loads(Path("runs/demo/results.json").read_text())
    z2, p4, attentive = results["models"].values()
    assert list(results["models"]) == list(demo.MODELS)
    assert z2["parameters"] == 21_620
    assert p4["parameters"] == 24_610
    assert attentive["parameters"] == 29_462
    for exact in (p4, attentive):
        assert exact["equivariance_error"] < 1e-4 < z2["equivariance_error"]
    assert p4["test_accuracy"] > z2["test_accuracy"] > 0.1
    shown = capsys.readouterr().out
    assert "24,610" in shown
    assert f"{p4['test_accuracy']:.1%}" in shown
    demo.main()  # a second time in the same place works as well
