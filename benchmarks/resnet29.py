"""Time of a training step of ResNet29 on p4 over that of the planar one.

    KERAS_BACKEND=jax python benchmarks/resnet29.py

The planar network has four times the channels of the one on p4, and so the same
number of values per pixel in every layer. Each step gives the logits and the
gradients of images and weights; networks take turns in one process, in the mode
that Keras compiles in by default on a CPU. A third network is that on p4 where
linear maps take blocks from 128 values per pixel on, in place of the numbers of
`keras_equiattn.ops.group.dispatch.FEWEST_VALUES`.

Writes `benchmarks/results/resnet29-<backend>-<date>.json`, on a GPU
`resnet29-<backend>-gpu-<date>.json`.
"""

import argparse
import json
import statistics
from collections.abc import Callable

import numpy as np
import report_files
import timing

from keras_equiattn.applications import ResNet29
from keras_equiattn.ops.group import dispatch

MIXERS = ("conv", "asc")
FILTERS = 8  # of the network on p4, for each element: the paper's
# Most pointwise maps of the network on p4 have 128 values per pixel or fewer on
# one side.
FEWER_VALUES = dict.fromkeys(dispatch.FEWEST_VALUES, 128)


def with_more_blocks(step: Callable[[], None]) -> Callable[[], None]:
    """The step, where linear maps take blocks from fewer values on.

    Under TensorFlow and JAX this has an effect when the step is traced.
    """

    def run() -> None:
        defaults = dict(dispatch.FEWEST_VALUES)
        dispatch.FEWEST_VALUES.update(FEWER_VALUES)
        try:
            step()
        finally:
            dispatch.FEWEST_VALUES.update(defaults)

    return run


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
        steps["p4, more blocks"] = with_more_blocks(
            timing.training_step(models["p4"], x)
        )
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
                "ratio_of_medians_with_more_blocks": statistics.median(
                    seconds["p4, more blocks"]
                )
                / statistics.median(seconds["p4"]),
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
