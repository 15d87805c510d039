"""Short runs turn images by quarter turns, and keep earlier results."""

import json
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def benchmark(monkeypatch):
    folder = Path(__file__).parents[2] / "benchmarks"
    monkeypatch.syspath_prepend(folder)
    import short_runs

    return short_runs


@pytest.mark.once
def test_each_image_has_a_quarter_turn_of_its_own(benchmark):
    x = np.random.default_rng(1).random((40, 4, 4, 3))
    y = benchmark.turned(x, seed=0)
    turns = [
        [np.array_equal(np.rot90(image, k), turned) for k in range(4)].index(
            True
        )
        for image, turned in zip(x, y, strict=True)
    ]
    assert set(turns) == {0, 1, 2, 3}
    np.testing.assert_array_equal(benchmark.turned(x, seed=0), y)
    assert not np.array_equal(benchmark.turned(x, seed=1), y)


SETTINGS = {"batch": 32, "learning_rate": 0.1}
RUNS = [{"model": "first", "seconds": 1}, {"model": "second", "seconds": 2}]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "runs.json"
    path.write_text(json.dumps({"runs": RUNS, "settings": SETTINGS}))
    return path


@pytest.mark.once
def test_a_result_replaces_that_of_its_network_alone(benchmark, path):
    result = {"model": "first", "seconds": 3}
    assert benchmark.others(path, SETTINGS, result) == RUNS[1:]
    assert benchmark.others(path, SETTINGS, {"model": "third"}) == RUNS
    missing = path.with_name("missing.json")
    assert benchmark.others(missing, SETTINGS, result) == []


@pytest.mark.once
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({**SETTINGS, "learning_rate": 0.2}, "learning_rate=0.1. .*rate=0.2"),
        ({**SETTINGS, "seed": 0}, "seed=None. Received: seed=0"),
        ({"batch": 32}, "learning_rate=0.1. Received: learning_rate=None"),
    ],
)
def test_results_of_other_settings_stay(benchmark, path, settings, message):
    with pytest.raises(SystemExit, match=message):
        benchmark.runs(path, settings)
    with pytest.raises(SystemExit, match=message):
        benchmark.others(path, settings, RUNS[0])


@pytest.mark.once
def test_other_settings_are_refused_before_anything_is_loaded(
    benchmark, monkeypatch, tmp_path
):
    def load(*_):
        raise AssertionError("images were loaded")

    monkeypatch.setattr(benchmark, "RESULTS", tmp_path)
    monkeypatch.setattr(benchmark, "images", load)
    arguments = ["short_runs.py", "--models", "resnet29_z2"]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(AssertionError, match="images were loaded"):
        benchmark.main()
    backend = benchmark.keras.backend.backend()
    date = benchmark.datetime.date.today().isoformat()
    name = f"short_runs-cifar10-{backend}-float32-10000x4x128-{date}.json"
    (tmp_path / name).write_text(json.dumps({"runs": [], "settings": {}}))
    with pytest.raises(SystemExit, match="other settings"):
        benchmark.main()
