"""Time of a training step of ResNet29 on p4 over that of the planar one.

    KERAS_BACKEND=jax python benchmarks/resnet29.py

The planar network has four times the channels of the one on p4, and so the same
number of values per pixel in every layer. Each step gives the logits and the
gradients of images and weights; networks take turns in one process, in the mode
that Keras compiles in by default on a CPU.

Writes `benchmarks/results/resnet29-<backend>-<date>.json`, on a GPU
`resnet29-<backend>-gpu-<date>.json`.
"""

import argparse
import json
import statistics

import numpy as np
import report_files
import timing

from keras_equiattn.applications import ResNet29

MIXERS = ("conv", "asc")
FILTERS = 8  # of the network on p4, for each element: the paper's


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    shape = (options.batch, options.size, options.size, 3)
    x = np.random.default_rng(0).normal(size=shape).astype("float32")
    rows = []
    for mixer in MIXERS:
        models = {
            group: ResNet29(
                group, mixer, filters=filters, input_shape=shape[1:]
            )
            for group, filters in (("z2", 4 * FILTERS), ("p4", FILTERS))
        }
        steps = {
            group: timing.training_step(model, x)
            for group, model in models.items()
        }
        seconds = timing.alternate(steps, options.repeats, warm_up=3)
        ratios = [
            a / b for a, b in zip(seconds["p4"], seconds["z2"], strict=True)
        ]
        rows.append(
            {
                "mixer": mixer,
                "parameters": {
                    group: model.count_params()
                    for group, model in models.items()
                },
                "seconds_median": {
                    group: statistics.median(found)
                    for group, found in seconds.items()
                },
                "ratio_of_medians": statistics.median(seconds["p4"])
                / statistics.median(seconds["z2"]),
                "ratio_quartiles": statistics.quantiles(ratios, n=4),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    results = {
        "benchmark": "resnet29.py",
        "settings": vars(options),
        "rows": rows,
    }
    report_files.write(f"resnet29-{timing.place()}", results)


if __name__ == "__main__":
    main()
