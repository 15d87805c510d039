"""Time and memory of GSA-Nets.

    KERAS_BACKEND=torch python benchmarks/group_self_attention.py time
    KERAS_BACKEND=jax python benchmarks/group_self_attention.py memory

"ours" is the rot-MNIST network as it is, "cubic" the same network with
`recompute=False` in its layers: attention for all triples of group elements
(output, query, key) at once, with the gradient left to the backend.

`time` alternates training steps (`train_on_batch`) of both in one process. Each
form runs twice in its turn and the second run counts, since the first has to
allocate memory that the other form has freed. On one core (`taskset -c 0 python
...`) its file name contains "one_core". `memory` (JAX) gets the size of the
temporaries of a gradient step from the compiler. Both have dropouts of 0.1
active. Writes
`benchmarks/results/group_self_attention-<what>-<backend>-<date>.json`.
"""

import argparse
import json
import statistics
from collections.abc import Callable

import keras
import numpy as np
import report_files
import timing

from keras_equiattn.applications import GSANetRotMNIST
from keras_equiattn.applications.training import reporting
from keras_equiattn.layers import GroupSelfAttention2D
from keras_equiattn.layers import LiftingSelfAttention2D

FORMS = ("ours", "cubic")
# Group, rows and columns of the window (None: all), batch and form.
MEMORY = (
    ("p4", 5, 8, "ours"),
    ("p4", 7, 8, "ours"),
    ("p4", 9, 8, "ours"),
    ("p4", 11, 8, "ours"),
    ("p8", 5, 8, "ours"),
    ("p4m", 5, 8, "ours"),
    ("p4", None, 1, "ours"),
    ("p4", 5, 8, "cubic"),
    ("p8", 5, 8, "cubic"),
)
DROPOUT = 0.1


def network(group: str, kernel_size: int | None, form: str) -> keras.Model:
    keras.utils.set_random_seed(0)
    model = GSANetRotMNIST(group, kernel_size)
    for layer in model.layers:
        if isinstance(layer, (LiftingSelfAttention2D, GroupSelfAttention2D)):
            layer.recompute = form == "ours"
    return model


def time(options: argparse.Namespace) -> dict:
    """Seconds of a training step, in turns."""
    steps = {
        form: training(options.group, options.kernel_size, form, options)
        for form in FORMS
    }
    seconds = timing.alternate(steps, options.repeats, warm_up=1, untimed=1)
    medians = {form: statistics.median(each) for form, each in seconds.items()}
    return {
        "benchmark": "training step of the rot-MNIST network, seconds (median)",
        "seconds": {form: round(n, 3) for form, n in medians.items()},
        "cubic / ours": round(medians["cubic"] / medians["ours"], 2),
    }


def training(
    group: str, kernel_size: int, form: str, options: argparse.Namespace
) -> Callable:
    model = network(group, kernel_size, form)
    model.compile(
        "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    rng = np.random.default_rng(0)
    x = rng.random((options.batch, 28, 28, 1)).astype("float32")
    y = rng.integers(0, 10, options.batch)
    return lambda: model.train_on_batch(x, y)


def memory(options: argparse.Namespace) -> dict:
    """Temporaries of compiled training steps, in GiB."""
    rows = []
    for group, kernel_size, batch, form in MEMORY:
        gib = temporaries(network(group, kernel_size, form), batch)
        rows.append(
            {
                "group": group,
                "kernel_size": kernel_size,
                "batch": batch,
                "form": form,
                "gib": round(gib, 3),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return {
        "benchmark": "temporaries of a gradient step of the rot-MNIST network "
        "by XLA, GiB",
        "rows": rows,
    }


def temporaries(model: keras.Model, batch: int) -> float:
    import jax

    def loss(trainable, others, x):
        logits, others = model.stateless_call(
            trainable, others, x, training=True
        )
        return (logits**2).sum(), others

    values, others = (
        [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
        )
    )
    x = jax.ShapeDtypeStruct((batch, 28, 28, 1), "float32")
    step = jax.jit(jax.grad(loss, has_aux=True))
    analysis = step.lower(values, others, x).compile().memory_analysis()
    return analysis.temp_size_in_bytes / 2**30


MEASURES = {
    "time": time,
    "memory": memory,
}
# The options that each of them uses.
SETTINGS = {
    "time": ("group", "kernel_size", "batch", "repeats"),
    "memory": (),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=tuple(MEASURES))
    parser.add_argument("--group", default="p4")
    parser.add_argument("--kernel-size", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    name = keras.backend.backend()
    used = {name: getattr(options, name) for name in SETTINGS[options.what]}
    if options.what == "memory" and name != "jax":
        parser.error("memory needs KERAS_BACKEND=jax")
    hardware = reporting.hardware()
    results = {
        **MEASURES[options.what](options),
        "settings": used,
    }
    print(json.dumps(results, indent=2))
    what = options.what
    if what == "time" and hardware["cores"] == 1:
        what = f"{what}-one_core"
    report_files.write(f"group_self_attention-{what}-{name}", results)


if __name__ == "__main__":
    main()
