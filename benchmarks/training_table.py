"""Prints the table of trained networks from the results of their runs.

    python benchmarks/training_table.py benchmarks/results/training/*.json

Takes `results.json` files of `examples/train.py`. Runs that differ in nothing
but the seed make one row: mean and standard deviation of the test error.
"""

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path

from keras_equiattn.applications import reporting


def rows(paths: list[Path]) -> list[list[str]]:
    """One row per set of runs that differ in the seed alone."""
    runs = defaultdict(list)
    for path in paths:
        run = json.loads(path.read_text())
        runs[reporting.settings_key(run)].append(run)
    return [row(same) for _, same in sorted(runs.items())]


def row(runs: list[dict]) -> list[str]:
    run = runs[0]
    seeds = sorted(run["options"]["seed"] for run in runs)
    errors = [run["test"]["error_percent"] for run in runs if run["test"]]
    test = "not tested"
    if None in errors:
        test = "not finite"
    elif errors:
        test = f"{statistics.mean(errors):.3f}"
    if len(errors) > 1 and None not in errors:
        test += f" ± {statistics.stdev(errors):.3f}"
    symmetry = [run["equivariance"]["error"] for run in runs]
    return [
        run["model"],
        run["dataset"]["name"],
        f"{run['parameters']:,}",
        str(run["epochs"]),
        ", ".join(map(str, seeds)),
        reporting.number(run["validation"]["error_percent"], ".3f")
        if run["validation"]
        else "trained on",
        test,
        reporting.number(None if None in symmetry else max(symmetry), ".1e"),
    ]


HEADER = [
    "model",
    "data",
    "parameters",
    "epochs",
    "seeds",
    "validation error %",
    "test error %",
    "equivariance error",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="+", type=Path)
    options = parser.parse_args()
    table = [HEADER, ["---"] * len(HEADER), *rows(options.results)]
    print("\n".join(f"| {' | '.join(cells)} |" for cells in table))


if __name__ == "__main__":
    main()
