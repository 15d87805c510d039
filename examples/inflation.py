r"""Takes a trained plain network, and makes it equivariant.

    python examples/inflation.py --data-dir DIR

Trains a plain network on the upright images of CIFAR-10, and tests it on images
as they are and on images in the three other poses of `p4`. Then it compares
three ways to handle the turned ones:

- average the plain network over four poses of each image (`symmetrize`);
- inflate it (`equivariant(..., inflate=True)`), which gives the same numbers,
  and train the inflated network, in which the poses interact;
- train the equivariant network of the same topology from scratch, with as many
  parameters as the plain one, for as many epochs.

Training sees no turned image. The table is printed, and written with all
numbers to `inflation-<backend>-<images>-<date>.json` in `--results`, and the
picture to `--pictures`.
"""

import argparse
import datetime
import math
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from keras_equiattn import conversion_summary
from keras_equiattn import equivariant
from keras_equiattn import symmetrize
from keras_equiattn.applications import training
from keras_equiattn.applications.data import datasets
from keras_equiattn.applications.training import reporting

ROOT = Path(__file__).parents[1]
GROUP = "p4"
BATCH = 64
LEARNING_RATE = 2e-3
FINE_TUNING_RATE = 5e-4
WIDTHS = (24, 32, 48)


def plain_network() -> keras.Model:
    """Three convolutions, with pooling between them."""
    inputs = x = keras.Input((32, 32, 3))
    for number, filters in enumerate(WIDTHS):
        x = keras.layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = keras.layers.BatchNormalization(momentum=0.9)(x)
        x = keras.layers.ReLU()(x)
        if number < len(WIDTHS) - 1:
            x = keras.layers.MaxPooling2D(2)(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(10)(x), name="plain")


def images_of(
    split: str, count: int, data_dir: Path | None
) -> tuple[np.ndarray, np.ndarray]:
    """The first images of a split, scaled to [-2, 2], and their labels."""
    batches = datasets.load("cifar10", split, 100, data_dir=data_dir)
    pairs = [
        (np.asarray(x), np.asarray(y))
        for x, y in batches.take(math.ceil(count / 100))
    ]
    images, labels = map(np.concatenate, zip(*pairs, strict=True))
    return 4 * images[:count] - 2, labels[:count]


def fit(
    model: keras.Model,
    images: np.ndarray,
    labels: np.ndarray,
    epochs: int,
    rate: float,
) -> float:
    """Trains a network; returns how many seconds that took."""
    steps = epochs * math.ceil(len(images) / BATCH)
    schedule = keras.optimizers.schedules.CosineDecay(rate, steps)
    model.compile(
        keras.optimizers.Adam(schedule),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    start = time.perf_counter()
    model.fit(images, labels, BATCH, epochs, verbose=2)
    return time.perf_counter() - start


def measured(
    model: keras.Model, images: np.ndarray, labels: np.ndarray
) -> dict[str, float]:
    """Accuracy on images as they are, and on those in the three other poses.

    `changed` is the share of images that are put in another class in at least
    one of the other poses.
    """
    poses = [np.rot90(images, turns, (1, 2)) for turns in range(4)]
    classes = np.stack(
        [
            model.predict(pose, batch_size=200, verbose=0).argmax(-1)
            for pose in map(np.ascontiguousarray, poses)
        ]
    )
    return {
        "upright": float(np.mean(classes[0] == labels)),
        "turned": float(np.mean(classes[1:] == labels)),
        "changed": float(np.mean((classes != classes[0]).any(axis=0))),
    }


def compared(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Trains and measures everything; a row for each network."""
    images, labels = images_of(
        "train+validation", options.images, options.data_dir
    )
    test = images_of("test", options.test_images, options.data_dir)
    rows: list[dict[str, Any]] = []

    def add(name: str, model: keras.Model, epochs: int, seconds: float) -> None:
        """Adds the row of a network."""
        rows.append(
            {
                "network": name,
                "parameters": reporting.count_parameters(model),
                "epochs": epochs,
                "training_seconds": seconds,
                **measured(model, *test),
            }
        )
        print(rows[-1], flush=True)

    keras.utils.set_random_seed(options.seed)
    plain = plain_network()
    seconds = fit(plain, images, labels, options.epochs, LEARNING_RATE)
    add("plain", plain, options.epochs, seconds)
    average = symmetrize(plain, GROUP)
    add("plain, mean over four poses", average, options.epochs, seconds)
    inflated = equivariant(plain, GROUP, inflate=True)
    add("inflated", inflated, options.epochs, seconds)
    more = options.more_epochs
    longer = keras.models.clone_model(plain)
    longer.set_weights(plain.get_weights())
    both = options.epochs + more
    of_longer = fit(longer, images, labels, more, FINE_TUNING_RATE)
    add("plain, trained on", longer, both, seconds + of_longer)
    average = symmetrize(longer, GROUP)
    name = "plain, trained on, mean over four poses"
    add(name, average, both, seconds + of_longer)
    of_more = fit(inflated, images, labels, more, FINE_TUNING_RATE)
    add("inflated, trained on", inflated, both, seconds + of_more)
    scratch = equivariant(plain, GROUP, "parameters")
    of_scratch = fit(scratch, images, labels, both, LEARNING_RATE)
    add("equivariant from scratch", scratch, both, of_scratch)
    return rows


def costs() -> dict[str, tuple[int | None, int | None]]:
    """Multiply-adds for one image, of the plain and of the new networks."""
    plain = plain_network()
    return {
        width: conversion_summary(plain, GROUP, width).multiply_adds
        for width in ("parameters", "compute", "channels")
    }


def table(rows: list[dict[str, Any]]) -> Table:
    """What is printed at the end."""
    found = Table(title="Accuracy on test images of CIFAR-10")
    found.add_column("network")
    for title in ("parameters", "epochs", "upright", "turned", "changed"):
        found.add_column(title, justify="right")
    for row in rows:
        found.add_row(
            row["network"],
            f"{row['parameters']:,}",
            str(row["epochs"]),
            *(f"{row[key]:.1%}" for key in ("upright", "turned", "changed")),
        )
    return found


def plot(rows: list[dict[str, Any]]) -> Figure:
    """Accuracy of each network, on images as they are and turned."""
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    panel = figure.subplots()
    places = np.arange(len(rows))[::-1]
    for key, shift, color in (("upright", 0.2, "C0"), ("turned", -0.2, "C1")):
        values = [100 * row[key] for row in rows]
        bars = panel.barh(places + shift, values, 0.38, color=color, label=key)
        panel.bar_label(bars, fmt="%.1f", padding=2, fontsize=8)
    panel.set_yticks(places, [row["network"] for row in rows])
    panel.set(xlabel="accuracy on test images, %", xlim=(0, 100))
    panel.legend(loc="lower right")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--data-dir", type=Path, help="folder of the prepared datasets")
    add("--images", type=int, default=20_000, help="to train on")
    add("--test-images", type=int, default=10_000)
    add("--epochs", type=int, default=12, help="of the plain network")
    add("--more-epochs", type=int, default=2, help="of the inflated network")
    add("--seed", type=int, default=0)
    add("--results", type=Path, default=ROOT / "benchmarks" / "results")
    add("--pictures", type=Path, default=ROOT / "docs" / "images")
    options = parser.parse_args()
    for folder in (options.results, options.pictures):
        folder.mkdir(parents=True, exist_ok=True)
    rows = compared(options)
    backend, today = keras.backend.backend(), datetime.date.today()
    file = (
        options.results / f"inflation-{backend}-{options.images}-{today}.json"
    )
    training.write_json(
        file,
        {
            **reporting.measured_by(
                "python examples/inflation.py "
                f"--images {options.images} "
                f"--test-images {options.test_images} "
                f"--epochs {options.epochs} "
                f"--more-epochs {options.more_epochs} "
                f"--seed {options.seed}"
            ),
            "settings": {
                "group": GROUP,
                "batch": BATCH,
                "learning_rate": LEARNING_RATE,
                "fine_tuning_rate": FINE_TUNING_RATE,
                "widths": WIDTHS,
            },
            "multiply_adds": costs(),
            "rows": rows,
        },
    )
    picture = options.pictures / "inflation.png"
    plot(rows).savefig(picture, dpi=90)
    print(file, picture, sep="\n")
    Console(width=100).print(table(rows))


if __name__ == "__main__":
    main()
