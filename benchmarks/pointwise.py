"""Cost of a linear map on a group, in two bases, beside a plain dense layer.

    KERAS_BACKEND=jax python benchmarks/pointwise.py

One training step each (the output, gradients of input and kernel), alternating
in one process. The dense layer has as many values per pixel, "regular" is one
matrix over group elements and channels, and "irreps" are its blocks in the
basis of the irreducible representations.

Writes `benchmarks/results/pointwise-<backend>-<date>.json`, on a GPU
`pointwise-<backend>-gpu-<date>.json`.
"""

import argparse
import itertools
import json
import statistics

import numpy as np
import report_files
import timing
from keras import ops

from keras_equiattn import groups
from keras_equiattn.ops import group_linear
from keras_equiattn.ops.group.linear import BASES


def tensors(*shapes: tuple[int, ...]) -> list:
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape).astype("float32") for shape in shapes]
    return [ops.convert_to_tensor(array) for array in arrays]


def dense_step(options: argparse.Namespace, width: int):
    # A list of pixels, not an image: the fastest form on each backend.
    shape = (options.batch * options.size**2, width)
    return timing.gradient_step(
        lambda x, kernel: x @ kernel, tensors(shape, (width, width))
    )


def group_step(options: argparse.Namespace, width: int, name: str, basis: str):
    order = groups.get(name).order
    channels = width // order
    shape = (options.batch, options.size, options.size, order, channels)
    return timing.gradient_step(
        lambda x, kernel: group_linear(x, kernel, None, name, basis),
        tensors(shape, (order, channels, channels)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--groups", nargs="+", default=["p4", "p4m", "p8"])
    parser.add_argument(
        "--widths", nargs="+", type=int, default=[64, 128, 192, 256, 384, 512]
    )
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=12)
    options = parser.parse_args()
    rows = []
    for width in options.widths:
        steps = {"dense": dense_step(options, width)}
        for name, basis in itertools.product(options.groups, BASES):
            steps[f"{name}, {basis}"] = group_step(options, width, name, basis)
        seconds = timing.alternate(steps, options.repeats, warm_up=2)
        dense = seconds.pop("dense")
        for name, found in seconds.items():
            group, basis = name.split(", ")
            ratios = [a / b for a, b in zip(found, dense, strict=True)]
            rows.append(
                {
                    "group": group,
                    "basis": basis,
                    "width": width,
                    "seconds_median": statistics.median(found),
                    "ratio_of_medians": statistics.median(found)
                    / statistics.median(dense),
                    "ratio_quartiles": statistics.quantiles(ratios, n=4),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    results = {
        "benchmark": "pointwise.py",
        "settings": vars(options),
        "rows": rows,
    }
    report_files.write(f"pointwise-{timing.place()}", results)


if __name__ == "__main__":
    main()
