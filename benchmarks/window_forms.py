"""Compares the forms of attention over windows that need no compiler.

    KERAS_BACKEND=torch python benchmarks/window_forms.py

Where nothing compiles, PyTorch computes attention over windows in one of two
forms, `tiles` and `products`, see `keras_equiattn.ops.windows.dispatch`. A
third one, `views`, is what Inductor compiles; here it runs operator by
operator, for as many images at a time as in the other forms. A step is the
output of a layer, with its linear maps, and the gradients with respect to
weights and input. The steps of all forms are timed in turns, in one process;
"moved" is what a step moves by the count of `traffic.py`, in units of the
input. Writes `benchmarks/results/window_forms-torch-<batch>-<date>.json`.
"""

import argparse
import math
import os
import statistics
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import report_files
import timing
import traffic

from keras_equiattn.ops.windows import dispatch
from keras_equiattn.ops.windows import gradients
from keras_equiattn.ops.windows import products
from keras_equiattn.ops.windows import views

# `tiles` has no affine maps, and needs heads of at least 8 channels.
FORMS = {
    "sasa": ("tiles", "products", "views"),
    "acmix": ("tiles", "products", "views"),
    "asc": ("products", "views"),
    "acmix_p4": ("products", "views"),
    "asc_p4": ("products", "views"),
}


def eager_views(form, wanted, weights, queries, keys, scale, bias):
    """`views.derivatives` of as many images at a time as fit into a cache."""
    height, width = (
        n - reach for n, reach in zip(keys.shape[2:4], form.reach, strict=True)
    )
    pairs = 1 if scale is None else scale.shape[1] * scale.shape[2]
    size = len(form.neighbours) * height * width * keys.shape[-1] * pairs

    def some(weights, queries, keys):
        return views.derivatives(
            form, wanted, weights, queries, keys, scale, bias
        )

    return products.over_images(some, wanted, weights, queries, keys, size)


def in_form(name: str, step: Callable[[], Any]) -> Callable[[], Any]:
    """A step whose attention over windows is computed in this form."""

    def run() -> Any:
        choose = dispatch.choose
        dispatch.choose = lambda form, keys, weighted: name
        try:
            return step()
        finally:
            dispatch.choose = choose

    return run


def measure(family: str, batch: int, repeats: int) -> dict[str, Any]:
    """Seconds and traffic of a step of this family in each form."""
    make, shape = traffic.FAMILIES[family]
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(batch, *shape))
    x = x.astype("float32")
    layer = make()
    step = timing.training_step(layer, x)
    forms = {name: in_form(name, step) for name in FORMS[family]}
    seconds = timing.alternate(forms, repeats, warm_up=1)
    unit = 4 * math.prod(shape) * 8
    few = keras.ops.convert_to_tensor(x[:8])
    results = {}
    for name, taken in seconds.items():
        counted = in_form(name, lambda: traffic._torch(layer, few))()
        results[name] = {
            "seconds": round(statistics.median(taken), 3),
            "moved": round(counted["bytes"] / unit, 1),
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--families", nargs="+", choices=FORMS, default=FORMS)
    options = parser.parse_args()
    if keras.backend.backend() != "torch":
        parser.error("this benchmark needs KERAS_BACKEND=torch")
    if options.batch < 8 or options.repeats < 1:
        parser.error(
            "--batch must be at least 8 and --repeats positive. Received: "
            f"--batch {options.batch} --repeats {options.repeats}"
        )
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    gradients.MODULES["views"] = SimpleNamespace(derivatives=eager_views)
    results = {}
    for family in options.families:
        results[family] = measure(family, options.batch, options.repeats)
        print(family, results[family], flush=True)
    results |= {
        "settings": {**vars(options), "families": list(options.families)},
    }
    report_files.write(f"window_forms-torch-{options.batch}", results)


if __name__ == "__main__":
    main()
