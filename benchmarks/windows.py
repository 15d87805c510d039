"""Attention over windows: time and memory.

    KERAS_BACKEND=torch python benchmarks/windows.py time
    KERAS_BACKEND=jax python benchmarks/windows.py memory

"ours" are the window primitives (scores, softmax, weighted sums) as the layers
use them; "unfold" copies the neighbours of all pixels side by side, and leaves
the gradient to the backend. "asc" has affine maps of keys and values, "sasa"
relative positions; the linear maps before and after are left out. "Conv2D" is
Keras' 3 x 3 convolution of the same width.

`time` alternates training steps (outputs and all gradients) in one process, in
the mode that Keras compiles in by default. `memory` (JAX) gets the size of the
temporaries of such a step from the compiler, `profile` (JAX) times the parts of
a step, each compiled by itself. Writes
`benchmarks/results/windows-<what>-<backend>-<date>.json`.
"""

import argparse
import functools
import itertools
import json
import statistics
from collections.abc import Callable

import keras
import numpy as np
import report_files
import timing
from keras import ops

from keras_equiattn.ops import AffineMap
from keras_equiattn.ops import Window
from keras_equiattn.ops import window_attention
from keras_equiattn.ops import window_softmax
from keras_equiattn.ops.windows import planes
from keras_equiattn.ops.windows.form import Form

KINDS = ("asc", "sasa")
FORMS = ("ours", "unfold")


def arrays(kind: str, options: argparse.Namespace) -> list[np.ndarray]:
    """Query, keys, values, and what the kind adds to them."""
    rng = np.random.default_rng(0)
    size, width, k = options.size, options.width, options.kernel_size
    shape = (options.batch, size, size, 1, width)
    shapes = [shape, shape, shape]
    if kind == "asc":
        shapes += [(k, k, 1, 1, width), (k, k, 1, width)] * 2
    else:
        shapes += [(k, k, 1, width)]
    found = [rng.normal(size=shape).astype("float32") for shape in shapes]
    found[0] *= options.heads / width
    return found


def ours(kind: str, options: argparse.Namespace) -> Callable:
    window = Window((options.kernel_size,) * 2)

    def function(query, keys, values, *rest):
        maps = [AffineMap(*rest[:2]), AffineMap(*rest[2:])]
        if kind == "sasa":
            maps = [AffineMap(None, *rest)]
        return window_attention(
            query, keys, values, window, options.heads, *maps
        )[0]

    return function


def unfold(kind: str, options: argparse.Namespace) -> Callable:
    size, k = options.size, options.kernel_size
    heads = (options.heads, options.width // options.heads)

    def neighbours(x):
        pads = ((0, 0), (k // 2, k // 2), (k // 2, k // 2), (0, 0))
        x = ops.pad(x[:, :, :, 0], pads)
        places = itertools.product(range(k), range(k))
        return ops.stack([x[:, i : i + size, j : j + size] for i, j in places])

    def flat(w):
        return ops.reshape(w, (k * k, 1, 1, 1, options.width))

    def function(query, keys, values, *rest):
        keys, values = neighbours(keys), neighbours(values)
        if kind == "asc":
            psi, beta, value_psi, value_beta = map(flat, rest)
            keys, values = keys * psi + beta, values * value_psi + value_beta
        else:
            keys = keys + flat(rest[0])
        keys, values, query = (
            ops.reshape(x, (*x.shape[:-1], *heads))
            for x in (keys, values, query[:, :, :, 0])
        )
        scores = ops.sum(query * keys, axis=-1)
        scores = scores - ops.max(scores, axis=0)
        weights = ops.exp(scores)
        weights = weights / ops.sum(weights, axis=0)
        y = ops.sum(weights[..., None] * values, axis=0)
        return ops.reshape(y, (*y.shape[:3], 1, options.width))

    return function


MAKERS = {"ours": ours, "unfold": unfold}


def step(kind: str, form: str, options: argparse.Namespace) -> Callable:
    tensors = [ops.convert_to_tensor(a) for a in arrays(kind, options)]
    return timing.gradient_step(MAKERS[form](kind, options), tensors)


def with_kernel(options: argparse.Namespace, k: int) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(options), "kernel_size": k})


def time(options: argparse.Namespace) -> dict:
    """Ratios to a convolution of the same width."""
    x = arrays("sasa", options)[0][:, :, :, 0]
    conv = keras.layers.Conv2D(
        options.width, 3, padding="same", data_format="channels_last"
    )
    steps = {"Conv2D": timing.training_step(conv, x)}
    for kind in KINDS:
        for k in (5, 7):
            name = f"{kind} {k} x {k}"
            steps[name] = step(kind, "ours", with_kernel(options, k))
        steps[f"{kind} 5 x 5, unfold"] = step(kind, "unfold", options)
    seconds = timing.alternate(steps, options.repeats, warm_up=3)
    median = {name: statistics.median(s) for name, s in seconds.items()}
    return {
        "benchmark": "training steps of attention over windows over one of "
        "Conv2D, in turns in one process: ratios of medians",
        "ratio": {
            name: round(value / median["Conv2D"], 2)
            for name, value in median.items()
        },
        "7 x 7 over 5 x 5": {
            kind: round(median[f"{kind} 7 x 7"] / median[f"{kind} 5 x 5"], 2)
            for kind in KINDS
        },
        "seconds_median": {name: round(v, 5) for name, v in median.items()},
    }


def memory(options: argparse.Namespace) -> dict:
    """Temporaries of compiled steps, in MiB."""
    import jax

    found: dict[str, dict[str, float]] = {}
    for kind, form in itertools.product(KINDS, FORMS):
        function = MAKERS[form](kind, options)
        shapes = [
            jax.ShapeDtypeStruct(a.shape, a.dtype)
            for a in arrays(kind, options)
        ]

        def loss(*tensors, function=function):
            return (function(*tensors) ** 2).sum()

        gradients = jax.jit(jax.grad(loss, argnums=range(len(shapes))))
        analysis = gradients.lower(*shapes).compile().memory_analysis()
        mib = analysis.temp_size_in_bytes / 2**20
        found.setdefault(kind, {})[form] = round(mib, 1)
    for row in found.values():
        row["ours / unfold"] = round(row["ours"] / row["unfold"], 3)
    return {
        "benchmark": "temporaries of a training step by XLA, MiB",
        "mib": found,
    }


def profile(options: argparse.Namespace) -> dict:
    """Milliseconds of the parts of a step, for two sizes of the window."""
    import jax

    found: dict[str, dict[str, float]] = {}
    for k in (5, 7):
        window = Window((k, k))
        form = Form(window.neighbours, options.heads)
        x, y, *_ = (
            ops.convert_to_tensor(a)
            for a in arrays("asc", with_kernel(options, k))
        )
        keys = window.frames(y)
        rng = np.random.default_rng(1)
        pixels = (options.batch, 1, options.heads, *x.shape[1:3])
        weights, scale, bias = (
            ops.convert_to_tensor(rng.normal(size=shape).astype("float32"))
            for shape in (
                (k * k, *pixels),
                (k * k, 1, 1, options.width),
                (k * k, 1, options.width),
            )
        )
        parts = {
            "scores": (planes.scores, (x, keys, scale, bias)),
            "softmax": (lambda _, x: window_softmax(x), (weights,)),
            "weighted sums": (planes.sums, (weights, keys, scale, bias)),
            "gradient of the keys": (planes.spread, (weights, x, scale)),
            "gradients of psi and beta": (
                planes.affine_gradients,
                (weights, x, keys, scale, bias),
            ),
        }
        steps = {}
        for name, (function, tensors) in parts.items():
            part = jax.jit(functools.partial(function, form))
            steps[name] = functools.partial(
                lambda part, tensors: jax.block_until_ready(part(*tensors)),
                part,
                tensors,
            )
        for name, seconds in timing.alternate(steps, options.repeats).items():
            row = found.setdefault(name, {})
            row[f"{k} x {k}"] = round(1000 * statistics.median(seconds), 2)
    for row in found.values():
        row["7 x 7 over 5 x 5"] = round(row["7 x 7"] / row["5 x 5"], 2)
    return {
        "benchmark": "parts of a training step, each compiled by itself, "
        "milliseconds; a step has the softmax once and its gradient, the rest "
        "twice",
        "ms": found,
    }


MEASURES = {
    "time": time,
    "memory": memory,
    "profile": profile,
}
# The options that they use.
SETTINGS = ("width", "size", "heads", "batch", "kernel_size", "repeats")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=tuple(MEASURES))
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--kernel-size", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    backend = keras.backend.backend()
    if options.what in ("memory", "profile") and backend != "jax":
        parser.error(f"{options.what} needs KERAS_BACKEND=jax")
    results = {
        **MEASURES[options.what](options),
        "settings": {
            name: getattr(options, name) for name in ("what", *SETTINGS)
        },
    }
    print(json.dumps(results, indent=2))
    report_files.write(f"windows-{options.what}-{backend}", results)


if __name__ == "__main__":
    main()
