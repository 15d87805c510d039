"""The table of trained networks."""

import json
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.once


def write_run(path, seed, error, symmetry=1e-7, recipe=None, **options):
    run = {
        "model": "net",
        "options": {"seed": seed, "out": str(path), "resume": False, **options},
        "recipe": recipe or {},
        "dataset": {"name": "data"},
        "parameters": 1234,
        "epochs": 7,
        "validation": None,
        "test": {"error_percent": error},
        "equivariance": {"error": symmetry},
    }
    path.write_text(json.dumps(run))
    return str(path)


@pytest.fixture
def training_table(monkeypatch):
    folder = Path(__file__).parents[2] / "benchmarks"
    monkeypatch.syspath_prepend(folder)
    import training_table

    return training_table


def test_seeds_make_one_row(training_table, tmp_path, monkeypatch, capsys):
    files = [
        write_run(tmp_path / "a.json", 0, 2.0, 0.0),
        write_run(
            tmp_path / "b.json",
            1,
            3.0,
            resume=True,
            data_dir="x",
            use_kernel_factors=False,
            # An option that the other, older run lacks, at its default.
            distribute=False,
        ),
        write_run(tmp_path / "c.json", 5, 9.0, 5e-7, milestones=[80]),
        # This run is not the first one with another seed, either.
        write_run(
            tmp_path / "d.json",
            2,
            8.0,
            recipe={"kernel_factors": [["a", 1.5707], ["b", 1.5707]]},
        ),
    ]
    monkeypatch.setattr(sys, "argv", ["training_table.py", *files])
    training_table.main()
    table = capsys.readouterr().out
    assert len(table.splitlines()) == 5
    assert "| 0, 1 |  | trained on | 2.500 ± 0.707 | 1.0e-07 |" in table
    assert "| 1,234 | 7 | 5 |  | trained on | 9.000 | 5.0e-07 |" in table
    assert "| 7 | 2 | 1.571 | trained on | 8.000 | 1.0e-07 |" in table


def test_diverged_runs_have_a_row(training_table, tmp_path):
    files = [
        write_run(tmp_path / "a.json", 0, 2.0),
        write_run(tmp_path / "b.json", 1, None, None),
    ]
    (runs,) = training_table.grouped(
        json.loads(Path(file).read_text()) for file in files
    )
    row = training_table.row(runs)
    assert row[-2:] == ["not finite", "not finite"]
