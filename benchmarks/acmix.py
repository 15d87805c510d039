"""ACmix: time beside a convolution, memory, and what its two stages cost.

    KERAS_BACKEND=torch python benchmarks/acmix.py time
    KERAS_BACKEND=jax python benchmarks/acmix.py memory
    KERAS_BACKEND=torch python benchmarks/acmix.py stages
    KERAS_BACKEND=torch python benchmarks/acmix.py networks
    KERAS_BACKEND=torch python benchmarks/acmix.py profile
    KERAS_BACKEND=torch python benchmarks/acmix.py folding

"ACmix2D" is the layer as it is; "attention" and "convolution" have only one of
its paths. "unfold" is close to the authors' code: it copies the neighbours of
all pixels side by side (positions are subtracted from the keys before, in their
code after), computes the mixed maps and their grouped convolution, and leaves
the gradient to the backend. "unfold_dense" is the same with the convolution
path of the layer. "Conv2D" is Keras' 3 x 3 convolution of the same width. Forms
with both paths are checked to be equal. `--forms` chooses some; by default
`time` leaves out "unfold" under TensorFlow and JAX, where its grouped
convolution is very slow.

`time` alternates training steps (outputs and all gradients) in one process, in
the mode that Keras compiles in by default. Each form runs twice in its turn and
the second run counts, since the first has to allocate memory that the form
before it has freed. `memory` (JAX) gets the size of the temporaries of such a
step from the compiler. `stages` counts the parameters of the layers and their
multiply-adds for each pixel. `networks` counts them for the networks of all
papers on an image of 224 x 224 pixels, and for the plain networks, which have
3 x 3 convolutions or attention instead ("plain"). "dense" is the form that
runs, "kernels" is the cost of composing the dense kernels, once for all images,
and "grouped" is the paper's form. `profile` times training steps of the parts
of the layer, each by itself, in turns in one process: they need not add up to
the layer, which a compiler sees as a whole. `folding` times inference of the
layer and of what `folded()` returns, in turns. On one core (`taskset -c 0
python ...`) the file names of `time`, `profile` and `folding` contain
"one_core". Writes `benchmarks/results/acmix-<what>-<backend>-<date>.json`.
"""

import argparse
import functools
import itertools
import json
import math
import statistics
from collections.abc import Callable
from collections.abc import Sequence

import acmix_counts
import keras
import numpy as np
import report_files
import timing
from keras import ops

from keras_equiattn import groups
from keras_equiattn import layers
from keras_equiattn.applications.training import reporting
from keras_equiattn.layers.acmix.two_paths import MAPS
from keras_equiattn.layers.base import linear_maps
from keras_equiattn.ops.geometry import Window
from keras_equiattn.ops.group.linear import group_linear
from keras_equiattn.ops.papers.acmix import Convolution
from keras_equiattn.ops.papers.acmix import convolve
from keras_equiattn.ops.papers.acmix import image_coordinates
from keras_equiattn.ops.papers.acmix import joint_convolution
from keras_equiattn.ops.papers.acmix import position_keys
from keras_equiattn.ops.papers.acmix import split_maps
from keras_equiattn.ops.windows.api import window_scores
from keras_equiattn.ops.windows.api import window_softmax
from keras_equiattn.ops.windows.api import window_sum

# Channels, and rows and columns of the image.
SIZES = ((64, 32), (256, 14), (512, 7))


class UnfoldedDenseACmix2D(layers.ACmix2D):
    """Attention that copies the neighbours of all pixels side by side."""

    def _attend(self, x, return_weights):
        maps = [linear_maps.on_group(self, name, x) for name in MAPS]
        return self.attend_to(*maps)

    def attend_to(self, query, keys, values):
        size = self.filters // self.num_heads
        batch, height, width = query.shape[:3]
        heads = (batch, height, width, self.num_heads, size)
        query = ops.reshape(query, heads) * size**-0.5
        positions = position_keys(
            image_coordinates(height, width, self.compute_dtype),
            ops.convert_to_tensor(self.position_kernel),
            ops.convert_to_tensor(self.position_bias),
            "z2",
        )
        keys = ops.reshape(keys, heads) - positions
        keys, values = (
            self._neighbours(x) for x in (keys, ops.reshape(values, heads))
        )
        scores = ops.sum(query * keys, axis=-1)
        weights = ops.softmax(scores, axis=0)
        y = ops.sum(weights[..., None] * values, axis=0)
        return ops.reshape(y, (*y.shape[:3], 1, self.filters)), weights

    def _neighbours(self, x):
        rows, columns = self.attention_kernel_size
        height, width, *rest = x.shape[1:]
        around = [(n // 2, n // 2) for n in (rows, columns)]
        x = ops.reshape(x, (*x.shape[:3], -1))  # PyTorch pads up to rank 4
        x = ops.pad(x, [(0, 0), *around, (0, 0)], mode="reflect")
        x = ops.reshape(x, (*x.shape[:3], *rest))
        places = itertools.product(range(rows), range(columns))
        return ops.stack(
            [x[:, i : i + height, j : j + width] for i, j in places]
        )


class UnfoldedACmix2D(UnfoldedDenseACmix2D):
    """The same, with a grouped convolution of the mixed maps."""

    def _both_paths(self, x, return_weights=True):
        maps = [linear_maps.on_group(self, name, x) for name in MAPS]
        attention, weights = self.attend_to(*maps)
        return self.sum_of_paths(attention, self.convolved_maps(maps)), weights

    def convolved_maps(self, maps):
        size = self.filters // self.num_heads
        count = self.mixing_kernel.shape[0]
        maps = ops.concatenate([x[:, :, :, 0] for x in maps], axis=-1)
        maps = ops.reshape(maps, (*maps.shape[:3], count, size))
        mixed = ops.matmul(
            ops.swapaxes(maps, -1, -2),
            ops.convert_to_tensor(self.mixing_kernel),
        )
        mixed = ops.reshape(mixed, (*mixed.shape[:3], -1))
        shift = ops.convert_to_tensor(self.shift_kernel)
        return ops.conv(mixed, shift, padding="same")[:, :, :, None]


FORMS = {
    "ACmix2D": layers.ACmix2D,
    "attention": functools.partial(layers.ACmix2D, paths="attention"),
    "convolution": functools.partial(layers.ACmix2D, paths="convolution"),
    "unfold": UnfoldedACmix2D,
    "unfold_dense": UnfoldedDenseACmix2D,
    "Conv2D": functools.partial(
        keras.layers.Conv2D, kernel_size=3, padding="same"
    ),
}
SAME = ("ACmix2D", "unfold", "unfold_dense")
# TensorFlow and JAX take very long for the grouped convolution of "unfold".
SLOW = (("time", "tensorflow"), ("time", "jax"))


def image(width: int, size: int, batch: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.normal(size=(batch, size, size, width)).astype("float32")


def make(form: str, width: int, x: np.ndarray) -> keras.layers.Layer:
    """A built layer; those of one kind have the same weights."""
    layer = FORMS[form](width, data_format="channels_last")
    layer.build(x.shape)
    rng = np.random.default_rng(1)
    for variable in layer.weights:
        scale = math.prod(variable.shape[:-1]) ** -0.5
        variable.assign(scale * rng.normal(size=variable.shape))
    return layer


def check_same(
    width: int, size: int, forms: Sequence[str] = tuple(FORMS)
) -> None:
    """Checks that the forms compute the same."""
    x = image(width, size, 1)
    same = [form for form in SAME if form in forms]
    first, *others = (
        ops.convert_to_numpy(make(form, width, x)(x))
        for form in same or SAME[:1]
    )
    for other in others:
        np.testing.assert_allclose(other, first, rtol=0, atol=1e-4)


def time(options: argparse.Namespace) -> dict:
    """Ratios to a convolution of the same width."""
    found = {}
    for width, size in SIZES:
        check_same(width, size, options.forms)
        x = image(width, size, options.batch)
        steps = {
            form: timing.training_step(make(form, width, x), x)
            for form in dict.fromkeys((*options.forms, "Conv2D"))
        }
        seconds = timing.alternate(steps, options.repeats, 3, untimed=1)
        median = {form: statistics.median(s) for form, s in seconds.items()}
        found[f"{width} channels, {size} x {size}"] = {
            "ratio": {
                form: round(value / median["Conv2D"], 2)
                for form, value in median.items()
            },
            "seconds_median": {
                form: round(value, 5) for form, value in median.items()
            },
        }
    return {
        "benchmark": "training steps of forms and paths of ACmix over one of "
        "Conv2D, in turns in one process: ratios of medians",
        "sizes": found,
    }


def memory(options: argparse.Namespace) -> dict:
    """Temporaries of compiled steps, in MiB."""
    import jax

    found = {}
    for width, size in SIZES:
        check_same(width, size, options.forms)
        x = image(width, size, options.batch)
        row = {}
        for form in options.forms:
            layer = make(form, width, x)
            values = [variable.value for variable in layer.trainable_variables]

            def loss(x, *values, layer=layer):
                return (layer.stateless_call(values, [], x)[0] ** 2).sum()

            count = range(1 + len(values))
            step = jax.jit(jax.grad(loss, argnums=count))
            analysis = step.lower(x, *values).compile().memory_analysis()
            row[form] = round(analysis.temp_size_in_bytes / 2**20, 1)
        if {"ACmix2D", "unfold"} <= set(row):
            row["ACmix2D / unfold"] = round(row["ACmix2D"] / row["unfold"], 3)
        found[f"{width} channels, {size} x {size}"] = row
    return {
        "benchmark": "temporaries of a training step by XLA, MiB",
        "mib": found,
    }


def profile(options: argparse.Namespace) -> dict:
    """Milliseconds of the parts of a training step."""
    found = {}
    for width, size in SIZES:
        x = image(width, size, options.batch)
        steps = {
            name: timing.gradient_step(function, tensors)
            for name, (function, tensors) in parts(width, x).items()
        }
        steps["ACmix2D"] = timing.training_step(make("ACmix2D", width, x), x)
        steps["Conv2D"] = timing.training_step(make("Conv2D", width, x), x)
        seconds = timing.alternate(steps, options.repeats, warm_up=3)
        median = {name: statistics.median(s) for name, s in seconds.items()}
        found[f"{width} channels, {size} x {size}"] = {
            "ms": {name: round(1000 * s, 2) for name, s in median.items()},
            "over Conv2D": {
                name: round(s / median["Conv2D"], 2)
                for name, s in median.items()
            },
        }
    return {
        "benchmark": "training steps of the parts of ACmix2D, each by itself, "
        "in turns in one process: medians",
        "sizes": found,
    }


def folding(options: argparse.Namespace) -> dict:
    """Milliseconds of inference of layers and of their folded forms."""
    found = {}
    for width, size in SIZES:
        for batch in dict.fromkeys((1, options.batch)):
            x = image(width, size, batch)
            layer = make("ACmix2D", width, x)
            folded = layer.folded()
            y, expected = (
                ops.convert_to_numpy(made(x)) for made in (folded, layer)
            )
            np.testing.assert_allclose(y, expected, rtol=0, atol=1e-4)
            steps = {
                "layer": timing.inference_step(layer, x),
                "folded": timing.inference_step(folded, x),
            }
            seconds = timing.alternate(steps, options.repeats, warm_up=3)
            ms = {
                name: 1000 * statistics.median(each)
                for name, each in seconds.items()
            }
            found[f"{width} channels, {size} x {size}, batch {batch}"] = {
                "ms": {name: round(value, 2) for name, value in ms.items()},
                "folded / layer": round(ms["folded"] / ms["layer"], 2),
            }
    return {
        "benchmark": "inference of ACmix2D and of its folded form, in turns "
        "in one process: medians",
        "sizes": found,
    }


def parts(width: int, x: np.ndarray) -> dict[str, tuple[Callable, list]]:
    """The parts of the layer, each as a function and its arguments."""
    layer = make("ACmix2D", width, x)
    plane = groups.get("z2")
    maps = [ops.convert_to_tensor(x[:, :, :, None] / n) for n in (1, 2, 3)]
    kernels = [
        ops.convert_to_tensor(getattr(layer, f"{name}_{kind}"))
        for name in MAPS
        for kind in ("kernel", "bias")
    ]
    mixing, shift, position, bias = (
        ops.convert_to_tensor(weight)
        for weight in (
            layer.mixing_kernel,
            layer.shift_kernel,
            layer.position_kernel,
            layer.position_bias,
        )
    )
    heads, window = layer.num_heads, layer.window
    per_head = width // heads
    query, keys, values = maps
    # Zeros around the image cost little: the border is timed by itself.
    inner = Window(window.size)
    scores = ops.convert_to_numpy(window_scores(query, keys, inner, heads))

    def linear(x, *kernels):
        pairs = zip(kernels[::2], kernels[1::2], strict=True)
        found = [group_linear(x, *pair, plane) for pair in pairs]
        return ops.concatenate(found, axis=-1)

    def positions(keys, kernel, bias):
        coordinates = image_coordinates(*keys.shape[1:3], "float32")
        found = position_keys(coordinates, kernel, bias, plane)
        return keys - ops.tile(found, (1, 1, 1, heads))

    def composed(mixing, shift, *kernels):
        joint = joint_convolution(
            ops.concatenate([split_maps(k, per_head) for k in kernels[::2]]),
            ops.concatenate(
                [ops.reshape(b, (heads, per_head)) for b in kernels[1::2]]
            ),
            mixing,
            shift,
            heads,
        )
        return joint.kernel + joint.bias[:, :, None, None]

    def dense(x, kernel, bias):
        joint = Convolution(kernel, bias)
        return convolve(x, joint, plane, (1, 1), (1, 1))

    joint = layer.convolution()
    found = {
        "linear maps": (linear, [maps[0], *kernels]),
        "positions": (positions, [keys, position, bias]),
        "border of keys and values": (
            lambda k, v: window.frames(k) + window.frames(v),
            [keys, values],
        ),
        "scores": (
            lambda q, k: window_scores(q, k, inner, heads),
            [query, keys],
        ),
        "softmax": (window_softmax, [ops.convert_to_tensor(scores)]),
        "weighted sums": (
            lambda a, v: window_sum(a, v, inner),
            [ops.convert_to_tensor(scores), values],
        ),
        "kernel put together": (composed, [mixing, shift, *kernels]),
        "convolution": (dense, [maps[0], joint.kernel, joint.bias]),
    }
    # Each step needs leaf tensors of its own.
    return {
        name: (function, [ops.copy(tensor) for tensor in tensors])
        for name, (function, tensors) in found.items()
    }


def stages(options: argparse.Namespace) -> dict:
    return acmix_counts.stages([width for width, _ in SIZES])


def networks(options: argparse.Namespace) -> dict:
    return acmix_counts.networks()


MEASURES = {
    "time": time,
    "memory": memory,
    "stages": stages,
    "networks": networks,
    "profile": profile,
    "folding": folding,
}
TIMES = ("time", "profile", "folding")
# The options that each of them uses.
SETTINGS = {
    "time": ("forms", "batch", "repeats"),
    "memory": ("forms", "batch"),
    "stages": (),
    "networks": (),
    "profile": ("batch", "repeats"),
    "folding": ("batch", "repeats"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=tuple(MEASURES))
    parser.add_argument(
        "--forms", nargs="+", choices=tuple(FORMS), default=None
    )
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    backend = keras.backend.backend()
    if options.forms is None:
        slow = (options.what, backend) in SLOW
        options.forms = [f for f in FORMS if f != "unfold" or not slow]
    if options.what == "memory" and backend != "jax":
        parser.error("memory needs KERAS_BACKEND=jax")
    hardware = reporting.hardware()
    results = {
        **MEASURES[options.what](options),
        "settings": {
            name: getattr(options, name) for name in SETTINGS[options.what]
        },
    }
    print(json.dumps(results, indent=2))
    what = options.what
    if what in TIMES and hardware["cores"] == 1:
        what = f"{what}-one_core"
    report_files.write(f"acmix-{what}-{backend}", results)


if __name__ == "__main__":
    main()
