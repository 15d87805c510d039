"""Cost of a network on a group at equal compute and at equal parameters.

    KERAS_BACKEND=tensorflow python benchmarks/widths.py

The network is four 3 x 3 convolutions, plain and on p4 and p4m. Dividing the
plain width by the order of the group keeps the compute; dividing it by the
square root of the order keeps the number of parameters. Training steps
(outputs, gradients of input and weights) alternate in one process. Writes
`benchmarks/results/widths-<backend>-<date>.json`.
"""

import argparse
import json
import math
import statistics

import keras
import numpy as np
import report_files
import timing

from keras_equiattn import groups
from keras_equiattn import layers


def network(group: groups.Group, filters: int, size: int) -> keras.Model:
    """Four convolutions with ReLU, from images to feature maps."""
    inputs = keras.Input((size, size, 3))
    options = {"padding": "same", "activation": "relu", "group": group}
    x = layers.LiftingConv2D(filters, 3, **options)(inputs)
    for _ in range(3):
        x = layers.GroupConv2D(filters, 3, **options)(x)
    return keras.Model(inputs, x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()

    shape = (options.batch, options.size, options.size, 3)
    x = np.random.default_rng(0).normal(size=shape).astype("float32")
    steps, rows = {}, {}
    for name in ("z2", "p4", "p4m"):
        group = groups.get(name)
        for equal, divisor in (
            ("compute", group.order),
            ("parameters", math.sqrt(group.order)),
        ):
            filters = round(options.width / divisor)
            model = network(group, filters, options.size)
            key = f"{name}, {filters} filters"
            rows[key] = {"equal": equal, "parameters": model.count_params()}
            steps[key] = timing.training_step(model, x)
    seconds = timing.alternate(steps, options.repeats)
    plain = seconds[f"z2, {options.width} filters"]
    for key, row in rows.items():
        ratios = [a / b for a, b in zip(seconds[key], plain, strict=True)]
        row["seconds_median"] = statistics.median(seconds[key])
        row["median_of_ratios"] = statistics.median(ratios)
        row["ratio_quartiles"] = statistics.quantiles(ratios, n=4)
    results = {
        "benchmark": "one training step of four convolutions",
        "settings": vars(options),
        "networks": rows,
    }
    print(json.dumps(results, indent=2))
    report_files.write(f"widths-{keras.backend.backend()}", results)


if __name__ == "__main__":
    main()
