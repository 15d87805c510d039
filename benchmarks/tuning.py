"""Compares tuned constants with other values.

    KERAS_BACKEND=torch python benchmarks/tuning.py
    KERAS_BACKEND=jax python benchmarks/tuning.py
    KERAS_BACKEND=tensorflow python benchmarks/tuning.py

The constants are those of `keras_equiattn.ops` that set how much is computed at
a time. For each, steps of one layer with several values of the constant are
timed in turns, in one process. A step is the output and the gradients with
respect to weights and input. Prints the medians, as ratios to that of the value
in the package, and writes
`benchmarks/results/tuning-<backend>-<batch>-<date>.json`.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import keras
import numpy as np
import report_files
import timing
import traffic

from keras_equiattn.ops.backend import reductions
from keras_equiattn.ops.group import dispatch as group
from keras_equiattn.ops.pairs import dispatch as pairs
from keras_equiattn.ops.responses import dispatch as responses
from keras_equiattn.ops.windows import dispatch as windows


class Constant(NamedTuple):
    """A constant that is varied.

    Attributes:
        holder: the namespace that has the constant.
        name: the name of the constant in it.
        family: the family of `traffic.FAMILIES` whose layer uses it.
        values: the values that are tried, including the package's.
    """

    holder: dict[str, Any]
    name: str
    family: str
    values: tuple[int, ...]


EVERYWHERE = {
    "responses.RESPONSES": Constant(
        responses.RESPONSES, "cpu", "full_attention_p4", (2**18, 2**20, 2**22)
    ),
    "pairs.NEIGHBOURS_OF_LINE": Constant(
        vars(pairs), "NEIGHBOURS_OF_LINE", "gsa_global_p4", (2, 4, 8)
    ),
}
# Blocks of group self-attention, for all but JAX.
BLOCKS = {
    "pairs.EAGER_BLOCK": Constant(
        vars(pairs), "EAGER_BLOCK", "gsa_p4", (5 * 2**19, 5 * 2**21, 5 * 2**23)
    ),
    "pairs.EAGER_TOGETHER": Constant(
        vars(pairs), "EAGER_TOGETHER", "gsa_p4", (128, 1024)
    ),
}
# Constants of what XLA compiles for a CPU under JAX and TensorFlow.
XLA = {
    "windows.NEIGHBOURS_OF_SUM": Constant(
        vars(windows), "NEIGHBOURS_OF_SUM", "sasa", (1, 5, 10)
    ),
    "windows.CHANNELS_OF_SUM": Constant(
        vars(windows), "CHANNELS_OF_SUM", "acmix", (4, 8, 16)
    ),
    "responses.COLUMNS": Constant(
        vars(responses), "COLUMNS", "spatial_attention_p4", (16, 32, 64)
    ),
    "reductions.SHORT": Constant(vars(reductions), "SHORT", "sasa", (16, 32)),
}
CONSTANTS = {
    "torch": {
        "windows.TILE_SETUP_ROWS": Constant(
            vars(windows), "TILE_SETUP_ROWS", "acmix", (1, 4, 16)
        ),
        "windows.CACHE": Constant(
            vars(windows), "CACHE", "asc", (2**20, 2**22, 2**24)
        ),
        **BLOCKS,
        **EVERYWHERE,
    },
    "tensorflow": {**XLA, **BLOCKS, **EVERYWHERE},
    "jax": {
        **XLA,
        "pairs.COMPILED_BLOCK": Constant(
            vars(pairs),
            "COMPILED_BLOCK",
            "gsa_p4",
            (5 * 2**15, 5 * 2**17, 5 * 2**19),
        ),
        "group.VALUES_OF_STEP": Constant(
            vars(group),
            "VALUES_OF_STEP",
            "multi_head_p4m",
            (2**20, 2**21, 2**23),
        ),
        **EVERYWHERE,
    },
}


def with_value(
    constant: Constant, value: int, step: Callable[[], Any]
) -> Callable[[], Any]:
    """A step that runs, and is compiled, with this value."""
    is_new = True

    def run() -> Any:
        nonlocal is_new
        if is_new:
            forget_functions()
        is_new = False
        before = constant.holder[constant.name]
        constant.holder[constant.name] = value
        try:
            return step()
        finally:
            constant.holder[constant.name] = before

    return run


def forget_functions() -> None:
    """Forgets the functions that operators keep for each set of shapes.

    JAX would not trace them again, and so would not see another value. What
    Inductor has compiled stays, so PyTorch runs without it here.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("keras_equiattn.ops"):
            for found in vars(module).values():
                if hasattr(found, "cache_clear"):
                    found.cache_clear()


def measure(constant: Constant, batch: int, repeats: int) -> dict[str, Any]:
    """Seconds of a step with each of the values."""
    make, shape = traffic.FAMILIES[constant.family]
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(batch, *shape))
    layer = make()
    steps = {
        # A step of its own for each, since it is compiled once.
        str(value): with_value(
            constant, value, timing.training_step(layer, x.astype("float32"))
        )
        for value in constant.values
    }
    seconds = timing.alternate(steps, repeats, warm_up=1)
    return {
        "family": constant.family,
        "value": constant.holder[constant.name],
        "seconds": {
            value: round(statistics.median(taken), 3)
            for value, taken in seconds.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    backend = keras.backend.backend()
    if backend not in CONSTANTS:
        parser.error(f"KERAS_BACKEND must be one of {sorted(CONSTANTS)}")
    constants = CONSTANTS[backend]
    parser.add_argument(
        "--constants", nargs="+", choices=constants, default=constants
    )
    options = parser.parse_args()
    if options.batch < 1 or options.repeats < 1:
        parser.error(
            "--batch and --repeats must be positive. Received: "
            f"--batch {options.batch} --repeats {options.repeats}"
        )
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    results: dict[str, Any] = {}
    for name in options.constants:
        found = measure(constants[name], options.batch, options.repeats)
        own = found["seconds"][str(found["value"])]
        ratios = {n: round(s / own, 2) for n, s in found["seconds"].items()}
        print(name, found["family"], f"{own} s", ratios, flush=True)
        results[name] = found
    results |= {
        "settings": {**vars(options), "constants": list(options.constants)},
    }
    report_files.write(f"tuning-{backend}-{options.batch}", results)


if __name__ == "__main__":
    main()
