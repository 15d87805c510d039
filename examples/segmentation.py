r"""Predicts for every pixel its digit, and the direction of the stroke.

    python examples/segmentation.py

Each image has up to four handwritten digits; training images are tilted by at
most ten degrees. Plain and equivariant U-Nets of about the same size learn two
tasks on them: the class of every pixel (ten digits and the background), and the
direction of the stroke at every pixel of a digit, an axis without a sign, which
turns with the image. Then the test images are turned by all angles.

It takes about 14 minutes on two cores, needs no download, and writes
`segmentation-<backend>-<date>.json` with all numbers to `--results` and the
picture to `--pictures`.
"""

import argparse
import datetime
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from scipy import ndimage

from keras_equiattn.applications import GroupUNet
from keras_equiattn.applications import training
from keras_equiattn.applications.data import datasets
from keras_equiattn.applications.training import reporting

ROOT = Path(__file__).parents[1]
# Group, and a width that makes all networks about equally large.
NETWORKS = {"plain": ("z2", 12), "p4": ("p4", 6), "p8": ("p8", 5)}
DEPTH = 2
SIDE = 32
BACKGROUND = 10
TILT = 10  # degrees, of the training images
BATCH = 32
LEARNING_RATE = 3e-3
ANGLES = range(0, 360, 15)
SHOWN = (0, 15, 45, 90, 180)
TASKS = ("classes", "directions")


def digits(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Upright digits of 16 x 16 pixels, and their labels."""
    data = datasets.load_pydataset("digits_upright", split, batch_size=100)
    pairs = [data[n] for n in range(len(data))]
    images, labels = map(np.concatenate, zip(*pairs, strict=True))
    small = ndimage.zoom(images[..., 0], (1, 16 / 28, 16 / 28), order=1)
    return small, labels


def scenes(split: str, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Images of one to four digits, and the class of every pixel.

    Returns:
        Images `(count, 32, 32, 1)` and classes `(count, 32, 32)`.
    """
    images, labels = digits(split)
    rng = np.random.default_rng(seed)
    pictures = np.zeros((count, SIDE, SIDE), "float32")
    classes = np.full((count, SIDE, SIDE), BACKGROUND, "int32")
    for picture, of_pixels in zip(pictures, classes, strict=True):
        for place in rng.permutation(4)[: rng.integers(1, 5)]:
            chosen = rng.integers(len(images))
            rows = slice(16 * (place // 2), 16 * (place // 2) + 16)
            columns = slice(16 * (place % 2), 16 * (place % 2) + 16)
            picture[rows, columns] = images[chosen]
            ink = images[chosen] > 0.4
            of_pixels[rows, columns][ink] = labels[chosen]
    return pictures[..., None], classes


def strokes(images: np.ndarray) -> np.ndarray:
    """The direction of the stroke at every pixel, as twice its angle.

    A stroke runs across the gradient of the image, whose axis is that of its
    structure tensor. An axis at the angle `a`, counter-clockwise from the
    right, is the vector at the angle `2 a`, as in
    `GroupToVector2D(signed=False)`.

    Args:
        images: `(count, height, width, 1)`.

    Returns:
        Vectors of length one, `(count, height, width, 2)`: the component along
        the row axis, which points down, then that along the column axis.
    """
    along_rows, along_columns = (
        ndimage.gaussian_filter(images[..., 0], (0, 1.0, 1.0), order)
        for order in ((0, 1, 0), (0, 0, 1))
    )
    # The square of the gradient as a complex number has twice its angle; minus
    # one turns it by the quarter turn from the gradient to the stroke.
    square = -((along_columns - 1j * along_rows) ** 2)
    smooth = [
        ndimage.gaussian_filter(part, (0, 1.0, 1.0))
        for part in (square.real, square.imag)
    ]
    length = np.maximum(np.hypot(*smooth), 1e-12)
    cosine, sine = (part / length for part in smooth)
    return np.stack([-sine, cosine], axis=-1).astype("float32")


def turned(
    images: np.ndarray, classes: np.ndarray, angle: float
) -> tuple[np.ndarray, np.ndarray]:
    """Images and classes after a turn, counter-clockwise, in degrees."""
    options: dict[str, Any] = {"axes": (2, 1), "reshape": False}
    images = ndimage.rotate(images, angle, order=1, **options)
    classes = ndimage.rotate(
        classes, angle, order=0, cval=BACKGROUND, **options
    )
    return images, classes


def tilted(
    images: np.ndarray, classes: np.ndarray, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Each image after a small turn of its own, of at most `TILT` degrees."""
    angles = np.random.default_rng(seed).uniform(-TILT, TILT, len(images))
    pairs = [
        turned(image[None], of_pixels[None], angle)
        for image, of_pixels, angle in zip(images, classes, angles, strict=True)
    ]
    all_images, all_classes = map(np.concatenate, zip(*pairs, strict=True))
    return all_images, all_classes


class Progress(keras.callbacks.Callback):
    """One progress bar for all epochs."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.bar = keras.utils.Progbar(self.params["epochs"], unit_name="epoch")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.bar.update(epoch + 1, [("loss", logs["loss"])])


def trained(
    name: str, task: str, images: np.ndarray, classes: np.ndarray, epochs: int
) -> tuple[keras.Model, float]:
    """A network after training on a task, and the seconds it took."""
    keras.utils.set_random_seed(0)
    group, width = NETWORKS[name]
    of_pixels = task == "classes"
    model = GroupUNet(
        group,
        DEPTH,
        width,
        outputs="scores" if of_pixels else "axes",
        classes=BACKGROUND + 1 if of_pixels else 1,
        input_shape=(SIDE, SIDE, 1),
    )
    steps = epochs * -(-len(images) // BATCH)
    schedule = keras.optimizers.schedules.CosineDecay(LEARNING_RATE, steps)
    if of_pixels:
        loss: Any = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        labels, weights = classes, 1 + 4.0 * (classes != BACKGROUND)
    else:
        # Not a loss of angles: those of zero vectors have no gradient.
        loss = keras.losses.MeanSquaredError()
        labels, weights = strokes(images), 1.0 * (classes != BACKGROUND)
    model.compile(keras.optimizers.Adam(schedule), loss)
    print(f"Training {name} on {task}")
    start = time.perf_counter()
    model.fit(
        images,
        labels,
        BATCH,
        epochs,
        sample_weight=weights.astype("float32"),
        callbacks=[Progress()],
        verbose=0,
    )
    return model, time.perf_counter() - start


def measured(
    model: keras.Model, task: str, images: np.ndarray, classes: np.ndarray
) -> dict[str, float]:
    """Compares the predictions of a network for images with the truth.

    For classes, the share of the pixels of digits that are right, and the mean
    over the digits of intersection over union. For directions, the mean error
    in degrees at the pixels of digits.
    """
    ink = classes != BACKGROUND
    found = model.predict(images, batch_size=100, verbose=0)
    if task == "directions":
        angles = [
            np.arctan2(-v[..., 0], v[..., 1]) for v in (found, strokes(images))
        ]
        difference = np.angle(np.exp(1j * (angles[0] - angles[1])))
        return {"degrees": float(np.degrees(abs(difference[ink]) / 2).mean())}
    found = found.argmax(-1)
    overlaps = [
        np.sum((found == n) & (classes == n))
        / max(1, np.sum((found == n) | (classes == n)))
        for n in range(BACKGROUND)
    ]
    return {
        "accuracy": float(np.mean(found[ink] == classes[ink])),
        "iou": float(np.mean(overlaps)),
    }


def compared(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Trains all networks on both tasks; what the table and the file say."""
    images, classes = tilted(*scenes("train", options.images, 0), 0)
    test = scenes("test", options.test_images, 1)
    results: dict[str, dict[str, Any]] = {}
    for name in NETWORKS:
        results[name] = {"angles": {str(angle): {} for angle in ANGLES}}
        for task in TASKS:
            model, seconds = trained(
                name, task, images, classes, options.epochs
            )
            results[name] |= {
                f"parameters, {task}": reporting.count_parameters(model),
                f"seconds, {task}": seconds,
            }
            for angle in ANGLES:
                numbers = measured(model, task, *turned(*test, angle))
                results[name]["angles"][str(angle)] |= numbers
    return results


def table(results: dict[str, dict[str, Any]]) -> Table:
    """What is printed at the end."""
    found = Table(title="Test images turned by")
    for title in ("network", "parameters", ""):
        found.add_column(title)
    for angle in SHOWN:
        found.add_column(f"{angle}°", justify="right")
    for name, numbers in results.items():
        for key, label, form in (
            ("accuracy", "accuracy of pixels", "{:.1%}"),
            ("iou", "intersection over union", "{:.1%}"),
            ("degrees", "error of direction", "{:.1f}°"),
        ):
            by_angle = [numbers["angles"][str(n)][key] for n in SHOWN]
            count = numbers["parameters, classes"]
            first = key == "accuracy"
            found.add_row(
                name if first else "",
                f"{count:,}" if first else "",
                label,
                *map(form.format, by_angle),
            )
    return found


def plot(results: dict[str, dict[str, Any]]) -> Figure:
    """Intersection over union and error of directions against the angle."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    panels = figure.subplots(1, 2)
    for panel, key, scale, label in zip(
        panels,
        ("iou", "degrees"),
        (100, 1),
        ("mean intersection over union of digits, %", "error of direction, °"),
        strict=True,
    ):
        for (name, numbers), mark in zip(results.items(), "osD", strict=True):
            values = [scale * at[key] for at in numbers["angles"].values()]
            panel.plot(list(ANGLES), values, marker=mark, ms=4, label=name)
        panel.set(
            xlabel="turn of the test images, °", ylabel=label, ylim=(0, None)
        )
        panel.set_xticks(range(0, 361, 45))
        panel.grid(alpha=0.3)
    lines = panels[0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside upper center", ncols=3)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--images", type=int, default=1000, help="to train on")
    add("--test-images", type=int, default=200)
    add("--epochs", type=int, default=15)
    add("--results", type=Path, default=ROOT / "benchmarks" / "results")
    add("--pictures", type=Path, default=ROOT / "docs" / "images")
    options = parser.parse_args()
    for folder in (options.results, options.pictures):
        folder.mkdir(parents=True, exist_ok=True)
    results = compared(options)
    backend, today = keras.backend.backend(), datetime.date.today()
    file = options.results / f"segmentation-{backend}-{today}.json"
    training.write_json(
        file,
        {
            **reporting.measured_by(
                "python examples/segmentation.py "
                f"--images {options.images} "
                f"--test-images {options.test_images} "
                f"--epochs {options.epochs}"
            ),
            "settings": {
                "networks": NETWORKS,
                "depth": DEPTH,
                "batch": BATCH,
                "tilt": TILT,
                "learning_rate": LEARNING_RATE,
                "seed": 0,
            },
            "results": results,
        },
    )
    picture = options.pictures / "segmentation.png"
    plot(results).savefig(picture, dpi=90)
    print(file, picture, sep="\n")
    Console(width=100).print(table(results))


if __name__ == "__main__":
    main()
