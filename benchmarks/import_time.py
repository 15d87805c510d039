"""How long the import of the package takes, compared with that of Keras.

    python benchmarks/import_time.py

New processes import Keras, then the package, on each backend in turns, with
`-X importtime`. The time of the package is what its import adds once Keras is
there, applications included. Writes the medians to
`benchmarks/results/import_time-<date>.json`.
"""

import argparse
import os
import statistics
import subprocess
import sys
from typing import Any

import report_files

from keras_equiattn.applications.training import reporting

BACKENDS = ("tensorflow", "jax", "torch")
IMPORTS = "import keras, keras_equiattn, keras_equiattn.applications"


def seconds(backend: str) -> dict[str, float]:
    """Seconds of the imports in a new process, by package."""
    found = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", IMPORTS],
        env={**os.environ, "KERAS_BACKEND": backend},
        capture_output=True,
        text=True,
        check=True,
    )
    times = {"keras": 0.0, "keras_equiattn": 0.0}
    for line in found.stderr.splitlines():
        # import time: <own microseconds> | <with imports> | <indented name>
        if not line.startswith("import time:"):
            continue
        *_, cumulative, name = line.split("|")
        outermost = name.startswith(" ") and not name.startswith("  ")
        package = name.strip().split(".")[0]
        if outermost and package in times:
            times[package] += int(cumulative) / 1e6
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error(f"--repeats must be positive. Received: {options.repeats}")
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in BACKENDS}
    for name in BACKENDS:
        seconds(name)  # Python compiles what is new, and keeps it
    for _ in range(options.repeats):
        for name in BACKENDS:
            taken[name].append(seconds(name))
    results: dict[str, Any] = {
        name: {
            package: round(statistics.median(x[package] for x in runs), 3)
            for package in runs[0]
        }
        for name, runs in taken.items()
    }
    for name, medians in results.items():
        print(name, medians)
    results |= {
        "settings": vars(options),
        "versions": {
            package: version
            for name in BACKENDS
            for package, version in reporting.versions(name).items()
            if package != "backend"
        },
    }
    report_files.write("import_time", results)


if __name__ == "__main__":
    main()
