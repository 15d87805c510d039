"""Time of a training step of every family, over that of a convolution.

    KERAS_BACKEND=jax python benchmarks/step_time.py
    KERAS_BACKEND=tensorflow python benchmarks/step_time.py
    KERAS_BACKEND=torch python benchmarks/step_time.py
    KERAS_BACKEND=torch python benchmarks/step_time.py --eager

A step is the output of a layer, with its linear maps, and the gradients with
respect to weights and input, for a batch of a usual size. The families are
those of `traffic.py`. Each is timed in turns, in one process, with Keras' 3 x 3
`Conv2D` on the same image, whose channels are those of all group elements
together. "seconds" is the median of a step, and "ratio" divides it by that of
the convolution. "compilation" is the time of the slowest warm-up step, which
waits for the compiler, less the median. With `--eager` PyTorch runs without
Inductor. `--size` and `--width` choose another image, such as those of the
later stages of a ResNet, which are narrow and have many channels; by default
the families are then those that a ResNet is made of. Writes
`benchmarks/results/step_time-<backend>-<batch>-<date>.json`, with the image in
the name if it is not the usual one.

On a GPU the name of the file holds "gpu" and the dtype. "kernels" says how many
kernels a step launches there, "busy" for how many seconds they run, and
"longest" which of them run for the longest time: seconds, runs, name. What is
compiled comes from the caches of earlier runs, so there is no "compilation".
Matrix products and convolutions in float32 may round to TF32, as backends
decide.
"""

import argparse
import math
import os
import statistics
import time
from typing import Any

import gpu_kernels
import keras
import numpy as np
import report_files
import timing
import traffic

from keras_equiattn.applications.training import reporting

# Warm-up steps: PyTorch compiles a function after some calls.
WARM_UP = 6
# Kernels of a GPU that a result lists: those that run for the longest time.
LONGEST = 8
USUAL = (32, 64)  # size and channels of the image
# Families that are timed on other images.
MIXERS = ("sasa", "asc", "acmix", "group_conv_p4", "asc_p4", "acmix_p4")


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step of this family and of a convolution."""
    make, shape = traffic.families(options.size, options.width)[name]
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(options.batch, *shape))
    x = x.astype("float32")
    folded = x.reshape(*x.shape[:3], math.prod(shape[2:]))
    convolution = keras.layers.Conv2D(folded.shape[-1], 3, padding="same")
    steps = {
        "layer": timing.training_step(make(), x),
        "convolution": timing.training_step(convolution, folded),
    }
    slowest = 0.0
    for _ in range(WARM_UP):
        steps["convolution"]()
        start = time.perf_counter()
        steps["layer"]()
        slowest = max(slowest, time.perf_counter() - start)
    seconds = timing.alternate(steps, options.repeats, warm_up=0, untimed=1)
    median = {key: statistics.median(found) for key, found in seconds.items()}
    result = {
        "seconds": round(median["layer"], 6),
        "convolution": round(median["convolution"], 6),
        "ratio": round(median["layer"] / median["convolution"], 2),
    }
    if reporting.device() == "CPU":
        result["compilation"] = round(slowest - median["layer"], 1)
    else:
        found = gpu_kernels.launched(steps["layer"])
        result["kernels"] = sum(runs for runs, _ in found.values())
        result["busy"] = round(sum(busy for _, busy in found.values()), 6)
        result["longest"] = [
            [round(busy, 6), runs, kernel]
            for kernel, (runs, busy) in sorted(
                found.items(), key=lambda item: -item[1][1]
            )
        ][:LONGEST]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--dtype", default="float32")
    names = [name for name in traffic.FAMILIES if name != "conv2d"]
    parser.add_argument("--size", type=int, default=USUAL[0])
    parser.add_argument("--width", type=int, default=USUAL[1])
    parser.add_argument("--families", nargs="+", choices=names)
    options = parser.parse_args()
    usual = (options.size, options.width) == USUAL
    if options.families is None:
        options.families = names if usual else MIXERS
    backend = keras.backend.backend()
    if options.eager and backend != "torch":
        parser.error("--eager needs KERAS_BACKEND=torch")
    if min(options.batch, options.repeats) < 1:
        parser.error(
            "--batch and --repeats must be positive. Received: "
            f"--batch {options.batch} --repeats {options.repeats}"
        )
    if options.eager:
        os.environ["TORCH_COMPILE_DISABLE"] = "1"
    how = timing.place() + "-eager" * options.eager
    on_gpu = reporting.device() != "CPU"
    if on_gpu and backend == "tensorflow":
        parser.error("on a GPU this needs KERAS_BACKEND=jax or torch")
    if on_gpu or options.dtype != "float32":
        how = f"{how}-{options.dtype}"
    if not usual:
        how = f"{how}-{options.size}x{options.width}"
    keras.config.set_dtype_policy(options.dtype)
    results = {}
    for name in options.families:
        results[name] = measure(name, options)
        print(name, results[name], flush=True)
        # A run that is stopped leaves what it has measured.
        report_files.write(
            f"step_time-{how}-{options.batch}",
            results | {"settings": vars(options)},
        )


if __name__ == "__main__":
    main()
