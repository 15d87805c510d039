"""Trains a plain and an equivariant network on upright digits, and turns them.

    python examples/demo.py

Both networks have about the same number of parameters and see the same 1,100
handwritten digits, none of them turned. The equivariant one treats eight
directions alike, exactly for quarter turns and approximately for the others.
The demonstration turns the test digits by all angles and compares what the two
networks read. It also draws what
a shipped network with attention attends to on a digit in four poses. It takes
about one minute on two cores, and writes to `runs/demo`:

- `accuracy.png`: the accuracy of both networks against the angle;
- `attention.png`: the attention maps;
- `results.json`: all numbers.
"""

import argparse
import math
import time
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from scipy import ndimage

from keras_equiattn.applications import get_model
from keras_equiattn.applications import training
from keras_equiattn.applications.data import datasets
from keras_equiattn.testing import equivariance_error
from keras_equiattn.visualization import plot_attention_maps

OUT = Path("runs/demo")
# Registered names, and widths that make both networks about equally large.
MODELS = {
    "plain": ("rotmnist_z2cnn", 17),
    "equivariant": ("rotmnist_p8cnn_smooth", 7),
}
ATTENTION = "rotmnist_p4cnn_input"
EPOCHS = 12
BATCH = 32
# Degrees, of the curves and of the table.
ANGLES = range(0, 361, 15)
SHOWN = (0, 30, 45, 90, 180, 270)


def trained(name: str, filters: int) -> tuple[keras.Model, float]:
    """A network after training on upright digits, and the seconds it took."""
    keras.utils.set_random_seed(0)
    data = datasets.load_pydataset("digits_upright", batch_size=BATCH)
    facts = datasets.info("digits_upright")
    model = get_model(name, filters=filters, normalization=facts.normalization)
    steps = len(data) * EPOCHS
    model.compile(
        keras.optimizers.Adam(
            keras.optimizers.schedules.CosineDecay(2e-3, steps)
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    start = time.perf_counter()
    model.fit(data, epochs=EPOCHS, callbacks=[Progress(name)], verbose=0)
    return model, time.perf_counter() - start


class Progress(keras.callbacks.Callback):
    """One progress bar for all epochs."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def on_train_begin(self, logs: Any = None) -> None:
        self.bar = keras.utils.Progbar(EPOCHS, unit_name="epoch")
        print(f"Training {self.name} on upright digits")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.bar.update(epoch + 1, [("accuracy", logs["accuracy"])])


def accuracies(model: keras.Model) -> list[float]:
    """The accuracy on the test digits, turned by each of the angles."""
    images, labels = test_digits()
    found = []
    for angle in ANGLES:
        turned = ndimage.rotate(
            images, angle, axes=(2, 1), reshape=False, order=1
        )
        classes = model.predict(turned, batch_size=256, verbose=0).argmax(-1)
        found.append(float(np.mean(classes == labels)))
    return found


def test_digits() -> tuple[np.ndarray, np.ndarray]:
    """All upright test digits, and their labels."""
    data = datasets.load_pydataset("digits_upright", "test", batch_size=BATCH)
    images, labels = zip(*(data[n] for n in range(len(data))), strict=True)
    return np.concatenate(images), np.concatenate(labels)


def measured(model: keras.Model, seconds: float) -> dict[str, Any]:
    """What the table and `results.json` say of a network."""
    by_angle = accuracies(model)
    errors = equivariance_error(model, "p4", test_digits()[0][:8])
    return {
        "parameters": sum(
            math.prod(weight.shape) for weight in model.trainable_weights
        ),
        "upright_test_accuracy": by_angle[0],
        "test_accuracy": float(np.mean(by_angle[:-1])),
        "accuracy_by_angle": dict(zip(map(str, ANGLES), by_angle, strict=True)),
        "equivariance_error": float(max(errors)),
        "wall_time_seconds": seconds,
    }


def plot(results: dict[str, dict[str, Any]]) -> Figure:
    """The accuracy of each network against the angle."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    panel = figure.subplots()
    for (name, found), mark in zip(results.items(), "os", strict=True):
        values = [100 * x for x in found["accuracy_by_angle"].values()]
        panel.plot(list(ANGLES), values, marker=mark, label=name)
    panel.set(
        xlabel="angle by which the test digits are turned, degrees",
        ylabel="accuracy, %",
        xticks=range(0, 361, 45),
        ylim=(0, 110),
        title="Both networks were trained on upright digits alone",
    )
    panel.grid(alpha=0.3)
    panel.legend(loc="upper center", ncols=2)
    return figure


def table(results: dict[str, dict[str, Any]]) -> Table:
    """The accuracy of each network at some angles."""
    found = Table(title="Accuracy on test digits turned by")
    found.add_column("network")
    found.add_column("parameters", justify="right")
    for angle in SHOWN:
        found.add_column(f"{angle}°", justify="right")
    for name, numbers in results.items():
        by_angle = (numbers["accuracy_by_angle"][str(n)] for n in SHOWN)
        found.add_row(
            name,
            f"{numbers['parameters']:,}",
            *(f"{x:.1%}" for x in by_angle),
        )
    return found


def draw_attention() -> Figure:
    """What a shipped network attends to on a test digit in four poses."""
    model = get_model(ATTENTION, weights="rot_mnist")
    images, labels = test_digits()
    image = images[np.flatnonzero(labels == 7)[0]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of maps that are the same everywhere
        # Later layers attend to the border of the image most of all.
        return plot_attention_maps(model, image, layer="conv2_attention")


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    ).parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    results = {
        title: measured(*trained(*model)) for title, model in MODELS.items()
    }
    plot(results).savefig(OUT / "accuracy.png", dpi=120)
    draw_attention().savefig(OUT / "attention.png", dpi=120)
    training.write_json(OUT / "results.json", {"models": results})
    Console().print(table(results))
    plain, equivariant = results.values()
    print(
        f"Trained on upright digits alone, the plain network reads "
        f"{plain['upright_test_accuracy']:.0%} of upright and "
        f"{plain['test_accuracy']:.0%} of turned test digits, the equivariant "
        f"one {equivariant['upright_test_accuracy']:.0%} and "
        f"{equivariant['test_accuracy']:.0%}: {OUT}/accuracy.png shows it for "
        "every angle.\n"
        f"{OUT}/attention.png shows what a trained network attends to on a "
        "digit in four poses: one row down and one panel to the right is the "
        "same map, turned.\n"
        "Next, train on your own images with examples/train.py, or read "
        "docs/guide/choosing.md to find the layers for them."
    )


if __name__ == "__main__":
    main()
