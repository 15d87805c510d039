"""Draws the pictures that explain the terms of this library.

    python examples/gallery.py
    python examples/gallery.py --out runs/gallery --only orbit

`orbit` shows a digit in all poses of p4m. `lifting` shows what a filter for
edges finds in a digit, and in the digit turned by a quarter, when a
`LiftingConv2D` applies it in the four poses of p4: the maps turn, and the poses
are exchanged. Writes one `<name>.png` for each picture.
"""

import argparse
from pathlib import Path

import keras
import numpy as np
from matplotlib import pyplot
from matplotlib.figure import Figure

from keras_equiattn import groups
from keras_equiattn.applications.data import datasets
from keras_equiattn.layers import LiftingConv2D
from keras_equiattn.ops import group_action
from keras_equiattn.visualization import element_name

OUT = Path(__file__).parents[1] / "docs" / "images"
# A test digit that looks different in every pose: a seven.
DIGIT = 7


def digit() -> np.ndarray:
    """`(1, height, width, 1)`: an upright test digit."""
    batches = datasets.load_pydataset("digits_upright", "test")
    images, labels = map(np.asarray, batches[0])
    return images[np.flatnonzero(labels == DIGIT)[:1]]


def turned(x: np.ndarray, group: str, element: int) -> np.ndarray:
    """The image or feature map after the action of a group element."""
    return keras.ops.convert_to_numpy(group_action(x, group, element))


def lower_edges(shape: tuple[int, ...], dtype: str) -> keras.KerasTensor:
    """A kernel that finds the lower edges of bright strokes."""
    place = np.linspace(-2, 2, 5)
    bell = np.exp(-(place**2) / 2)
    kernel = -(place * bell)[:, None] * bell
    return keras.ops.convert_to_tensor(kernel.reshape(shape), dtype)


def orbit() -> Figure:
    """A digit in all poses of p4m."""
    group = groups.get("p4m")
    figure, panels = pyplot.subplots(2, 4, figsize=(7, 3.9))
    for element, panel in enumerate(panels.ravel()):
        panel.imshow(turned(digit(), "p4m", element)[0, ..., 0], "gray_r")
        panel.set_title(f"{element}: {element_name(group, element)}", size=9)
    return finished(figure)


def lifting() -> Figure:
    """The feature map of a digit, and that of the digit turned by 90 degrees.

    The second is the first with each map turned, and moved on by one pose.
    """
    layer = LiftingConv2D(
        1,
        5,
        padding="same",
        group="p4",
        activation="relu",
        kernel_initializer=lower_edges,
    )
    rows = [digit(), turned(digit(), "p4", 1)]
    figure, panels = pyplot.subplots(2, 5, figsize=(7, 3.1))
    for image, row in zip(rows, panels, strict=True):
        maps = keras.ops.convert_to_numpy(layer(image))[0, ..., 0]
        row[0].imshow(image[0, ..., 0], "gray_r")
        row[0].set_title("image", size=9)
        for pose, panel in enumerate(row[1:]):
            panel.imshow(maps[..., pose], "viridis", vmin=0, vmax=maps.max())
            panel.set_title(f"pose {pose}", size=9)
    return finished(figure)


PICTURES = {"orbit": orbit, "lifting": lifting}


def finished(figure: Figure) -> Figure:
    """The figure without ticks, and with little space around the panels."""
    for panel in figure.axes:
        panel.set(xticks=[], yticks=[])
    figure.tight_layout()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--only", nargs="+", choices=PICTURES, default=PICTURES)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        path = options.out / f"{name}.png"
        PICTURES[name]().savefig(path, dpi=120)
        print(path)


if __name__ == "__main__":
    main()
