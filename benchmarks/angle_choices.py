r"""Which width of the rings, and of the edge of discs, turns best?

    TORCH_COMPILE_DISABLE=1 KERAS_BACKEND=torch python \
        benchmarks/angle_choices.py

Steerable filters have rings of the width `RING_WIDTH`, and windows that are
discs have an edge of the width `DISC_EDGE`. This script replaces these
constants by other values and measures layers on p8, with the weights that they
start with, on smooth images: the largest error under 45 degrees, as
`benchmarks/angles.py` defines it, as a mean over draws. Nothing may be
compiled, since what is compiled keeps the constants that it has seen.

Writes `benchmarks/results/angle_choices-<date>.json` after each measurement.
"""

import argparse
import os

import angles
import keras
import report_files

from keras_equiattn.ops import geometry
from keras_equiattn.ops.group import bases

GROUP = "p8"
SIZES = (3, 5, 7)
# Each constant, the values to compare, and the layers that depend on it.
CHOICES = {
    "rings": (
        (bases, "RING_WIDTH"),
        (0.35, 0.4, 0.45, 0.5, 0.6),
        ("LiftingConv2D", "GroupConv2D", "AttentiveGroupConv2D"),
    ),
    "edge of discs": (
        (geometry, "DISC_EDGE"),
        (1.0, 1.5, 2.0, 2.5, 3.0),
        ("StandAloneSelfAttention2D", "AffineSelfConv2D", "ACmix2D"),
    ),
}


def forget() -> None:
    """Drops what has been computed from the constants."""
    bases._basis.cache_clear()
    bases.steering_matrix.cache_clear()
    angles.function_of.cache_clear()


def errors(place: tuple, value: float, name: str, draws: int) -> list[float]:
    """The error of a layer for each size, with a constant replaced."""
    usual = getattr(*place)
    try:
        setattr(*place, value)
        forget()
        found = [
            angles.measure(name, GROUP, "steerable", size, "smooth", draws)
            for size in SIZES
        ]
    finally:
        setattr(*place, usual)
        forget()
    return [max(row["errors"]) for row in found]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=3)
    draws = parser.parse_args().draws
    compiles = os.environ.get("TORCH_COMPILE_DISABLE") != "1"
    if keras.backend.backend() != "torch" or compiles:
        raise SystemExit(
            "What is compiled keeps the constants. Set KERAS_BACKEND=torch and "
            "TORCH_COMPILE_DISABLE=1."
        )
    settings = {"group": GROUP, "sizes": list(SIZES), "draws": draws}
    rows = []
    results = {
        "benchmark": "angle_choices.py",
        "settings": settings,
        "rows": rows,
    }
    for choice, (place, values, names) in CHOICES.items():
        usual = getattr(*place)
        for value in values:
            for name in names:
                row = {
                    "choice": choice,
                    "value": value,
                    "chosen": value == usual,
                    "layer": name,
                    "errors": errors(place, value, name, draws),
                }
                rows.append(row)
                report_files.write("angle_choices", results)
                print(row, flush=True)


if __name__ == "__main__":
    main()
