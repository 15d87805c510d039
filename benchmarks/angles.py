"""How equivariant are groups that do not act on the grid?

    KERAS_BACKEND=torch python benchmarks/angles.py --draws 3

Each layer, with filters of pixels and with steerable filters, on images and on
feature maps that are turned by every element of the group. Inputs and outputs
are turned with splines of degree 5, so that little of the error is that of
turning them; what is left of the input is "identity", the error of a layer that
changes nothing there and back. Errors are the largest difference over the
largest output, within a disc that no border reaches; the mean over draws of the
weights, which start as those of a new layer.

Images are blurred noise with a standard deviation of two pixels ("smooth"), and
photographs of CIFAR-10 in shades of grey ("CIFAR-10"; prepare it first), both
darkened towards the border.

Writes `benchmarks/results/angles-<date>.json`.
"""

import argparse
import datetime
import json
from pathlib import Path

import keras
import numpy as np
from scipy import ndimage

from keras_equiattn import groups
from keras_equiattn import layers
from keras_equiattn.applications.data import datasets
from keras_equiattn.applications.training import reporting
from keras_equiattn.ops import group_action

RESULTS = Path(__file__).parent / "results"
SIZE = 49
CHANNELS = 4
# Radius of the disc that is compared.
DISC = 14


def lifting(**options):
    return layers.LiftingConv2D(CHANNELS, padding="same", **options)


def group_convolution(**options):
    return layers.GroupConv2D(CHANNELS, padding="same", **options)


def depthwise(**options):
    return layers.GroupDepthwiseConv2D(padding="same", **options)


def input_attention(kernel_size, **options):
    return layers.InputAttention(attention_kernel_size=kernel_size, **options)


# How a layer is made, and whether it takes images.
LAYERS = {
    "LiftingConv2D": (lifting, True),
    "GroupConv2D": (group_convolution, False),
    "GroupDepthwiseConv2D": (depthwise, False),
    "InputAttention": (input_attention, False),
}


def window() -> np.ndarray:
    """`(SIZE, SIZE)`: one in the middle, and zero where corners are."""
    radius = np.hypot(*(np.indices((SIZE, SIZE)) - SIZE // 2))
    return np.exp(-((radius / 16) ** 6))


def images(kind: str, count: int, seed: int) -> np.ndarray:
    """`(count, SIZE, SIZE)`, with mean zero before they are darkened."""
    if kind == "smooth":
        noise = np.random.default_rng(seed).normal(size=(count, SIZE, SIZE))
        found = ndimage.gaussian_filter(noise, (0, 2, 2))
    else:
        batches = datasets.load_pydataset("cifar10", "test", count)
        photographs = np.asarray(batches[seed][0]).mean(axis=-1)
        pad = SIZE - photographs.shape[1]
        pads = (pad // 2, pad - pad // 2)
        found = np.pad(photographs, ((0, 0), pads, pads), "reflect")
        found = found - found.mean(axis=(1, 2), keepdims=True)
    return found / found.std() * window()


def turned(x: np.ndarray, group: groups.Group, element: int) -> np.ndarray:
    """`L_g x` of images or feature maps on a group, by splines."""
    flip, step = divmod(element, group.rotations)
    y = x[:, :, ::-1] if flip else x
    angle = 360 * step / group.rotations
    if step:
        y = ndimage.rotate(y, angle, axes=(2, 1), reshape=False, order=5)
    if x.ndim == 5:
        # Element h of the result is g^-1 h of what is turned.
        y = y[:, :, :, group.relative_table[element]]
    return y


def check_direction(group: groups.Group) -> None:
    """Raises unless `turned` turns as the library does."""
    x = np.random.default_rng(0).normal(size=(1, 9, 9, group.order, 1))
    for element in group.grid_elements:
        expected = keras.ops.convert_to_numpy(group_action(x, group, element))
        np.testing.assert_allclose(
            turned(x, group, element), expected, atol=1e-6
        )


def errors(function, x: np.ndarray, group: groups.Group) -> np.ndarray:
    """The error of each element."""
    inside = np.hypot(*(np.indices((SIZE, SIZE)) - SIZE // 2)) < DISC
    found = []
    y = function(x)
    for element in range(group.order):
        expected = turned(y, group, element)
        actual = function(turned(x, group, element))
        difference = np.abs(actual - expected)[:, inside].max()
        found.append(difference / np.abs(y)[:, inside].max())
    return np.array(found)


def measure(name, group, basis, size, kind, draws):
    """Mean error of each element over several layers and images."""
    make, takes_images = LAYERS[name]
    group = groups.get(group)
    check_direction(group)
    rest = (1,) if takes_images else (group.order, CHANNELS)
    found, of_input = [], []
    for seed in range(draws):
        keras.utils.set_random_seed(seed)
        count = int(np.prod(rest))
        x = images(kind, count, seed)
        x = np.moveaxis(x, 0, -1).reshape(1, SIZE, SIZE, *rest)
        layer = make(kernel_size=size, group=group, filter_basis=basis)

        def function(x, layer=layer):
            y = layer(keras.ops.convert_to_tensor(x, "float32"))
            return keras.ops.convert_to_numpy(y).astype("float64")

        found.append(errors(function, x, group))
        there = turned(x, group, 1)
        back = turned(there, group, int(group.inverse[1]))
        of_input.append(np.abs(back - x).max() / np.abs(x).max())
    return {
        "layer": name,
        "group": group.name,
        "basis": basis,
        "kernel_size": size,
        "images": kind,
        "angles": [
            360 * (n % group.rotations) / group.rotations
            for n in range(group.order)
        ],
        "errors": np.mean(found, axis=0).tolist(),
        "identity": float(np.mean(of_input)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--layers", nargs="+", choices=LAYERS, default=list(LAYERS)
    )
    parser.add_argument("--groups", nargs="+", default=["p8"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[3, 5, 7])
    parser.add_argument("--draws", type=int, default=10)
    options = parser.parse_args()
    rows = []
    for name in options.layers:
        for group in options.groups:
            for size in options.sizes:
                for basis in ("pixel", "steerable"):
                    for kind in ("smooth", "CIFAR-10"):
                        row = measure(
                            name, group, basis, size, kind, options.draws
                        )
                        rows.append(row)
                        print(
                            f"{name} {group} {size} {basis} {kind}: "
                            f"{max(row['errors']):.3f}, identity "
                            f"{row['identity']:.3f}",
                            flush=True,
                        )
    results = {
        "benchmark": "angles.py",
        "settings": vars(options),
        "rows": rows,
        "hardware": reporting.hardware(),
        "versions": reporting.versions(),
    }
    date = datetime.date.today().isoformat()
    path = RESULTS / f"angles-{date}.json"
    path.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
