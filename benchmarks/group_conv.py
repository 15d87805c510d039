"""Cost of a group convolution over that of a plain one of the same width.

    KERAS_BACKEND=jax python benchmarks/group_conv.py
    KERAS_BACKEND=jax taskset -c 0 python benchmarks/group_conv.py

The width of a group convolution is its channels times the order of the group.
Training steps (outputs, gradients of input and weights) alternate in one
process, in the mode that Keras compiles in by default on a CPU. Writes
`benchmarks/results/group_conv-<backend>-<date>.json`, on a GPU
`group_conv-<backend>-gpu-<date>.json`, on one core
`group_conv-<backend>-one_core-<date>.json`.
"""

import argparse
import json
import statistics

import keras
import numpy as np
import report_files
import timing

from keras_equiattn import groups
from keras_equiattn.layers import GroupConv2D


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", nargs="+", default=["p4", "p8"])
    parser.add_argument(
        "--width", type=int, default=64, help="channels times the order"
    )
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=60)
    options = parser.parse_args()

    shape = (options.batch, options.size, options.size)
    x = np.random.default_rng(0).normal(size=(*shape, options.width))
    x = x.astype("float32")
    common = {"padding": "same", "data_format": "channels_last"}
    plain = keras.layers.Conv2D(options.width, 3, **common)
    steps = {"Conv2D": timing.training_step(plain, x)}
    for name in options.groups:
        order = groups.get(name).order
        channels, rest = divmod(options.width, order)
        if rest:
            parser.error(f"--width must be a multiple of {order}")
        layer = GroupConv2D(channels, 3, group=name, **common)
        steps[name] = timing.training_step(
            layer, x.reshape(*shape, order, channels)
        )
    seconds = timing.alternate(steps, options.repeats)
    median = {name: statistics.median(s) for name, s in seconds.items()}
    results = {
        "benchmark": "one training step of GroupConv2D over one of Conv2D",
        "settings": vars(options),
        "seconds_median": median,
        "ratio_of_medians": {
            name: median[name] / median["Conv2D"] for name in options.groups
        },
        "ratio_quartiles": {
            name: statistics.quantiles(
                [
                    ours / theirs
                    for ours, theirs in zip(
                        seconds[name], seconds["Conv2D"], strict=True
                    )
                ],
                n=4,
            )
            for name in options.groups
        },
    }
    print(json.dumps(results, indent=2))
    report_files.write(f"group_conv-{timing.place()}", results)


if __name__ == "__main__":
    main()
