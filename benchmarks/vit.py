"""Training steps of vision transformers on groups, and of a plain one.

    KERAS_BACKEND=jax python benchmarks/vit.py

Each step gives the logits and the gradients of images and weights. Networks
take turns in one process, in the mode that Keras compiles in by default on a
CPU. The plain network is made of Keras' own layers, with learned positions: a
vision transformer of the same width, depth and heads. Patches of 4 x 4 pixels
of images of 32 x 32 are 64 tokens.

Writes `benchmarks/results/vit-<backend>-<date>.json`, on a GPU
`vit-<backend>-gpu-<date>.json`. With memory in huge pages it is
`vit-<backend>-huge_pages-<date>.json`:

    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 KERAS_BACKEND=jax \\
        python benchmarks/vit.py
"""

import argparse
import itertools
import json
import statistics

import keras
import numpy as np
import report_files
import timing

from keras_equiattn.applications import GroupViT
from keras_equiattn.ops.group.linear import BASES


class Positions(keras.layers.Layer):
    """Adds a learned vector to each token."""

    def build(self, input_shape):
        self.positions = self.add_weight(shape=input_shape[1:])

    def call(self, x):
        return x + self.positions


def plain(width: int, depth: int, num_heads: int, size: int) -> keras.Model:
    """The vision transformer of Keras' own layers."""
    norm = keras.layers.LayerNormalization
    inputs = keras.Input((size, size, 3))
    x = keras.layers.Conv2D(width, 4, 4)(inputs)
    x = keras.layers.Reshape((-1, width))(x)
    x = Positions()(x)
    for _ in range(depth):
        y = norm(epsilon=1e-6)(x)
        y = keras.layers.MultiHeadAttention(num_heads, width // num_heads)(y, y)
        x = keras.layers.Add()([x, y])
        y = norm(epsilon=1e-6)(x)
        y = keras.layers.Dense(4 * width, "gelu")(y)
        x = keras.layers.Add()([x, keras.layers.Dense(width)(y)])
    x = keras.layers.GlobalAveragePooling1D()(norm(epsilon=1e-6)(x))
    return keras.Model(inputs, keras.layers.Dense(10)(x))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--groups", nargs="+", default=["p4", "p4m"])
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--num-heads", type=int, default=6)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=16)
    options = parser.parse_args()
    shape = (options.batch, options.size, options.size, 3)
    x = np.random.default_rng(0).normal(size=shape).astype("float32")
    design = options.width, options.depth, options.num_heads
    models = {"plain": plain(*design, options.size)}
    for group, basis in itertools.product(options.groups, BASES):
        width, depth, heads = design
        models[f"{group}, {basis}"] = GroupViT(
            group,
            4,
            depth,
            width,
            heads,
            basis,
            input_shape=shape[1:],
            classes=10,
        )
    steps = {
        name: timing.training_step(model, x) for name, model in models.items()
    }
    seconds = timing.alternate(steps, options.repeats, warm_up=3)
    rows = []
    for name, found in seconds.items():
        ratios = [a / b for a, b in zip(seconds["plain"], found, strict=True)]
        rows.append(
            {
                "network": name,
                "parameters": models[name].count_params(),
                "seconds_median": statistics.median(found),
                "times_faster": statistics.median(seconds["plain"])
                / statistics.median(found),
                "times_faster_quartiles": statistics.quantiles(ratios, n=4),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    results = {
        "benchmark": "vit.py",
        "settings": vars(options),
        "rows": rows,
    }
    report_files.write(f"vit-{timing.place()}", results)


if __name__ == "__main__":
    main()
