"""Draws the pictures of the gallery and of the glossary.

    TORCH_COMPILE_DISABLE=1 KERAS_BACKEND=torch python examples/gallery.py
    python examples/gallery.py --out runs/gallery --only orbit

One picture for each family of layers, `<name>.png`:

- `orbit` and `lifting` explain group convolution: a digit in all poses of p4m,
  and what a filter for edges finds in a digit and in the turned digit.
- `irreps` shows matrices of linear maps, and the blocks that they fall into.
- `report` shows after which layer a network stops being equivariant.
- `attentive` shows what a shipped network attends to on digits of all classes,
  and which places speak for the class that it predicts.
- `affine`, `stand_alone`, `acmix` and `group_self_attention` show what one
  pixel attends to. Each trains a small network on handwritten digits first,
  which takes a minute or two on two cores. Eager PyTorch, as above, is the
  fastest for so little training, since nothing is compiled.
"""

import argparse
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
from matplotlib import pyplot
from matplotlib.figure import Figure
from PIL import Image

from keras_equiattn import equivariance_report
from keras_equiattn import groups
from keras_equiattn import layers
from keras_equiattn import ops
from keras_equiattn import visualization
from keras_equiattn.applications import get_model
from keras_equiattn.applications.data import datasets
from keras_equiattn.ops import group_action
from keras_equiattn.visualization import element_name

OUT = Path(__file__).parents[1] / "docs" / "images"
# A test digit that looks different in every pose: a seven.
DIGIT = 7
# Row and column of the pixel whose attention is drawn, on its stroke.
PIXEL = (13, 15)
EPOCHS = 10


def digit(label: int = DIGIT) -> np.ndarray:
    """`(1, height, width, 1)`: the first upright test digit of a class."""
    batches = datasets.load_pydataset("digits_upright", "test")
    images, labels = map(np.asarray, batches[0])
    return images[np.flatnonzero(labels == label)[:1]]


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
    layer = layers.LiftingConv2D(
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


def irreps() -> Figure:
    """Matrices of linear maps on two groups, over poses and over waves."""
    figure, panels = pyplot.subplots(1, 4, figsize=(8, 2.4))
    rng, channels = np.random.default_rng(0), 3
    for name, pair in zip(("p4", "p4m"), panels.reshape(2, 2), strict=True):
        group = groups.get(name)
        kernel = rng.normal(size=(group.order, channels, channels))
        maps = kernel[group.relative_table]
        values = group.order * channels
        matrix = maps.transpose(1, 2, 0, 3).reshape(values, values)
        waves = np.kron(ops.regular_basis(name), np.eye(channels))
        over_waves = waves @ matrix @ waves.T
        for panel, shown, what in zip(
            pair, (matrix, over_waves), ("poses", "waves"), strict=True
        ):
            panel.imshow(np.abs(shown), "viridis")
            panel.set_title(f"{name}, {what}", size=9)
    return finished(figure)


def attentive() -> Figure:
    """Evidence for the right class, and attention, on a digit of each class."""
    model = get_model("rotmnist_p4cnn_input", weights="rot_mnist")
    images = np.concatenate([digit(label) for label in range(10)])
    # Digits are zero at the border, as the padding is, so it may be kept.
    options = {"layer": "conv2_attention", "border": "keep"}
    attention = visualization.attention_overlays(model, images, **options)
    evidence = [
        visualization.attention_overlays(
            model, images[[label]], class_index=label, **options
        )[0]
        for label in range(10)
    ]
    rows = [images[..., 0], attention, np.stack(evidence)]
    names = ["digit", "attention", "evidence"]
    figure, panels = pyplot.subplots(3, 10, figsize=(9, 2.9))
    for row, name, line in zip(rows, names, panels, strict=True):
        line[0].set_ylabel(name, size=9)
        high = np.nanmax(np.abs(row))
        colors = {
            "digit": {"cmap": "gray_r"},
            "attention": {"cmap": "viridis", "vmin": np.nanmin(row)},
            "evidence": {"cmap": "RdBu_r", "vmin": -high},
        }[name]
        for values, panel in zip(row, line, strict=True):
            panel.imshow(values, vmax=high, **colors)
    return finished(figure)


def affine() -> Figure:
    """What a pixel attends to in an affine self-convolution."""
    return window_of(
        layers.AffineSelfConv2D(8, 5, num_heads=2, group="p4", name="affine")
    )


def stand_alone() -> Figure:
    """What a pixel attends to in stand-alone self-attention."""
    return window_of(
        layers.StandAloneSelfAttention2D(
            8, 5, num_heads=2, group="p4", name="stand_alone"
        )
    )


def acmix() -> Figure:
    """What a pixel attends to in the path of attention of ACmix."""
    return window_of(
        layers.ACmix2D(
            8, num_heads=2, attention_kernel_size=5, group="p4", name="acmix"
        )
    )


def group_self_attention() -> Figure:
    """What a pixel attends to in group self-attention."""
    return window_of(
        layers.GroupSelfAttention2D(
            8,
            key_dim=6,
            num_heads=2,
            kernel_size=5,
            group="p4",
            name="group_self_attention",
        ),
        pool_size=4,
    )


def window_of(layer: keras.Layer, pool_size: int = 2) -> Figure:
    """The window of a pixel in a layer of a network trained on digits.

    Args:
        layer: the layer; its input has 28 / `pool_size` pixels a side.
        pool_size: the size of the pooling before the layer.
    """
    keras.utils.set_random_seed(0)
    inputs = keras.Input((28, 28, 1))
    x: Any = layers.LiftingConv2D(8, 3, padding="same", group="p4")(inputs)
    x = keras.layers.ReLU()(keras.layers.BatchNormalization(momentum=0.9)(x))
    x = layers.SpatialPooling2D(pool_size, group="p4")(x)
    x = keras.layers.ReLU()(
        keras.layers.BatchNormalization(momentum=0.9)(layer(x))
    )
    if pool_size == 2:
        x = layers.SpatialPooling2D(2, group="p4")(x)
    x = layers.GroupConv2D(16, 3, activation="relu", group="p4")(x)
    x = keras.layers.GlobalMaxPooling3D()(x)
    model = keras.Model(inputs, keras.layers.Dense(10)(x), name="digits")
    model.compile(
        keras.optimizers.Adam(3e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    batches = datasets.load_pydataset("digits_upright", batch_size=64)
    model.fit(batches, epochs=EPOCHS, verbose=0)
    test = datasets.load_pydataset("digits_upright", "test")
    found = model.evaluate(test, verbose=0, return_dict=True)
    print(f"{layer.name}: test accuracy {found['accuracy']:.1%}")
    return visualization.plot_window_attention(
        model, digit(), PIXEL, layer.name, elements=[0, 1]
    )


def report() -> Figure:
    """Where a network stops being equivariant: pooling by 2 of 29 pixels."""
    network = keras.Sequential(
        [
            keras.Input((29, 29, 1)),
            layers.LiftingConv2D(
                8, 3, padding="same", activation="relu", name="lift"
            ),
            keras.layers.MaxPooling3D((2, 2, 1), name="halve"),
            layers.GroupConv2D(8, 3, activation="relu", name="conv"),
            keras.layers.GlobalAveragePooling3D(name="pool"),
            keras.layers.Dense(10, name="head"),
        ]
    )
    found = equivariance_report(network, "p4", (2, 29, 29, 1))
    return visualization.plot_equivariance_report(found)


PICTURES: dict[str, Callable[[], Figure]] = {
    "orbit": orbit,
    "lifting": lifting,
    "irreps": irreps,
    "report": report,
    "attentive": attentive,
    "affine": affine,
    "stand_alone": stand_alone,
    "acmix": acmix,
    "group_self_attention": group_self_attention,
}


def finished(figure: Figure) -> Figure:
    """The figure without ticks, and with little space around the panels."""
    for panel in figure.axes:
        panel.set(xticks=[], yticks=[])
    figure.tight_layout()
    return figure


def write(figure: Figure, path: Path) -> None:
    """Writes a PNG of 256 colours, a third of the size."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=110)
    picture = Image.open(buffer).convert("RGB")
    picture.quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=5).save(
        path, optimize=True
    )


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
        write(PICTURES[name](), path)
        print(path)


if __name__ == "__main__":
    main()
