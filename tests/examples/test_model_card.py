"""Weights of a run are published with what made them."""

import json
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from layer_contract import as_array

from keras_equiattn.applications import from_preset

pytestmark = pytest.mark.once


@pytest.fixture
def model_card(monkeypatch):
    folder = Path(__file__).parents[2] / "examples"
    monkeypatch.syspath_prepend(folder)
    import model_card

    return model_card


def write_run(folder, seed, error, changes=(), **options):
    folder.mkdir()
    inputs = keras.Input((2,))
    network = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    network.set_weights([np.full((2, 1), seed + 1.0), np.zeros(1)])
    network.save(folder / "last.keras")
    run = {
        "model": "net",
        "group": "p4",
        "parameters": 1234,
        "command": ["examples/train.py", f"--seed={seed}"],
        "options": {
            "seed": seed,
            "out": str(folder),
            "train_on_all": True,
            **options,
        },
        "recipe": {
            "optimizer": "adam",
            "learning_rate": 0.001,
            "weight_decay": 1e-4,
            "kernel_factors": [["last/kernel", 1.5708]],
            "milestones": [80],
            "factor": 0.1,
            "batch_size": 128,
            "source": "a paper",
        },
        "dataset": {
            "name": "data",
            "shape": [28, 28, 1],
            "classes": 10,
            "mean": [0.1],
            "std": [0.3],
        },
        "hardware": {
            "processor": "abacus",
            "cores": 2,
            "memory_gib": 0.5,
            "device": "CPU",
        },
        "versions": {"python": "3.11"},
        "epochs": 100,
        "validation": None,
        "test": {"error_percent": error},
        "equivariance": {"group": "p4", "error": 1e-7},
        **dict(changes),
    }
    (folder / "results.json").write_text(json.dumps(run))
    return str(folder)


def test_card(model_card, tmp_path, monkeypatch):
    first = write_run(tmp_path / "a", 0, 2.0)
    second = write_run(tmp_path / "b", 1, 3.0, resume=True, verbose=2)
    target = tmp_path / "weights" / "net-data"
    monkeypatch.setattr(
        sys, "argv", ["model_card.py", first, str(target), "--seeds", second]
    )
    model_card.main()
    published = from_preset(target)
    np.testing.assert_array_equal(as_array(published.layers[1].kernel), 1.0)
    card = (target / "README.md").read_text()
    for part in (
        "# net-data",
        "1,234 parameters",
        "2.000 %; over seeds 0, 1: 2.500 ± 0.707 %",
        "times 0.1 after epoch 80",
        "kernel factors | `last/kernel` 1.571 |",
        "data, all training images",
        "python examples/train.py --seed=0",
        "abacus, cores: 2, memory: 0.5 GiB, device: CPU",
    ):
        assert part in card


def test_runs_must_differ_in_the_seed_alone(model_card, tmp_path):
    first = write_run(tmp_path / "a", 0, 2.0)
    second = write_run(tmp_path / "b", 1, 3.0, epochs=3)
    runs = [model_card.results_of(Path(run)) for run in (first, second)]
    with pytest.raises(SystemExit, match="differ in more than the seed"):
        model_card.card("name", runs[0], runs[1:])
    # A run of an older version had no kernel factors.
    older = write_run(tmp_path / "c", 1, 3.0)
    older = model_card.results_of(Path(older))
    del older["recipe"]["kernel_factors"]
    with pytest.raises(SystemExit, match="differ in more than the seed"):
        model_card.card("name", runs[0], [older])
    assert "| kernel factors | none |" in model_card.card("name", older, [])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"test": None}, r"b was not tested \(--no-test\)"),
        ({"equivariance": {"group": "p4", "error": None}}, "b diverged"),
    ],
)
def test_runs_without_a_test_error(model_card, tmp_path, changes, message):
    first = write_run(tmp_path / "a", 0, 2.0)
    second = write_run(tmp_path / "b", 1, 3.0, changes)
    runs = [model_card.results_of(Path(run)) for run in (first, second)]
    for run, others in ((runs[1], []), (runs[0], runs[1:])):
        with pytest.raises(SystemExit, match=message):
            model_card.card("name", run, others)
