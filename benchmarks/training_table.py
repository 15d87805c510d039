"""Prints the table of trained networks from the results of their runs.

    python benchmarks/training_table.py benchmarks/results/training/*.json

Takes `results.json` files of `examples/train.py`. Runs that differ in nothing
but the seed make one row: mean and standard deviation of the test error.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from report_files import with_deviation

from keras_equiattn.applications.training import reporting


def grouped(runs: Iterable[dict]) -> list[list[dict]]:
    """Sets of runs that differ in the seed alone."""
    same = defaultdict(list)
    for run in runs:
        same[reporting.settings_key(run)].append(run)
    return [runs for _, runs in sorted(same.items())]


def test_error(runs: list[dict]) -> str:
    """Mean and standard deviation over the seeds, in %."""
    errors = [run["test"]["error_percent"] for run in runs if run["test"]]
    if not errors:
        return "not tested"
    if None in errors:
        return "not finite"
    return with_deviation(errors, ".3f")


def symmetry_error(runs: list[dict]) -> str:
    """The largest equivariance error of the seeds."""
    errors = [run["equivariance"]["error"] for run in runs]
    return reporting.number(None if None in errors else max(errors), ".1e")


def kernel_factor(run: dict) -> str:
    """The largest factor with which kernels learn, see `recipes.Recipe`."""
    factors = [factor for _, factor in reporting.kernel_factors(run)]
    return f"{max(factors):.3f}" if factors else ""


def row(runs: list[dict]) -> list[str]:
    """The row of runs that differ in the seed alone."""
    run = runs[0]
    return [
        run["model"],
        run["dataset"]["name"],
        f"{run['parameters']:,}",
        str(run["epochs"]),
        ", ".join(
            str(seed) for seed in sorted(r["options"]["seed"] for r in runs)
        ),
        kernel_factor(run),
        reporting.number(run["validation"]["error_percent"], ".3f")
        if run["validation"]
        else "trained on",
        test_error(runs),
        symmetry_error(runs),
    ]


HEADER = [
    "model",
    "data",
    "parameters",
    "epochs",
    "seeds",
    "kernel factor",
    "validation error %",
    "test error %",
    "equivariance error",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="+", type=Path)
    options = parser.parse_args()
    runs = (json.loads(path.read_text()) for path in options.results)
    table = [HEADER, ["---"] * len(HEADER), *map(row, grouped(runs))]
    print("\n".join(f"| {' | '.join(cells)} |" for cells in table))


if __name__ == "__main__":
    main()
