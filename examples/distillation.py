r"""Teaches an equivariant network what the mean over all poses knows.

    python examples/distillation.py

A plain network learns handwritten digits at all angles. `symmetrize` makes it
exactly invariant under quarter turns: by the mean over four poses, which takes
four times as many multiplications, or by a small network that chooses one pose.
The mean then teaches a student (`keras.distillation`): the equivariant network
of the same topology that takes as many multiplications as the plain network,
and is exactly invariant by itself. The same student also learns without a
teacher.

It takes about two minutes on two cores, needs no download, and writes
`distillation-<backend>-<date>.json` to `--results`.
"""

import argparse
import datetime
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
from rich.console import Console
from rich.table import Table

from keras_equiattn import equivariant
from keras_equiattn import symmetrize
from keras_equiattn.applications import training
from keras_equiattn.applications.data import datasets
from keras_equiattn.applications.training import reporting

ROOT = Path(__file__).parents[1]
GROUP = "p4"
BATCH = 32
LEARNING_RATE = 2e-3
WIDTHS = (32, 64, 64)
TEMPERATURE = 2.0


def plain_network(name: str) -> keras.Model:
    """Three convolutions, with pooling between them."""
    inputs = x = keras.Input((28, 28, 1))
    for number, filters in enumerate(WIDTHS):
        x = keras.layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = keras.layers.BatchNormalization(momentum=0.9)(x)
        x = keras.layers.ReLU()(x)
        if number < len(WIDTHS) - 1:
            x = keras.layers.MaxPooling2D(2)(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(10)(x), name=name)


def digits(split: str) -> tuple[np.ndarray, np.ndarray]:
    """All digits of a split, each at four angles, and their labels."""
    data = datasets.load_pydataset("digits", split, batch_size=100)
    pairs = [data[n] for n in range(len(data))]
    images, labels = map(np.concatenate, zip(*pairs, strict=True))
    return images, labels


class Progress(keras.callbacks.Callback):
    """One progress bar for all epochs."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def on_train_begin(self, logs: Any = None) -> None:
        print(f"Training {self.name}")
        self.bar = keras.utils.Progbar(self.params["epochs"], unit_name="epoch")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.bar.update(epoch + 1, [("loss", logs["loss"])])


def fit(model: keras.Model, name: str, epochs: int) -> None:
    """Trains a model on digits, with labels."""
    images, labels = digits("train")
    steps = epochs * -(-len(images) // BATCH)
    schedule = keras.optimizers.schedules.CosineDecay(LEARNING_RATE, steps)
    model.compile(
        keras.optimizers.Adam(schedule),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.fit(
        images, labels, BATCH, epochs, callbacks=[Progress(name)], verbose=0
    )


def student() -> keras.Model:
    """The equivariant network with as many multiply-adds as the plain one."""
    keras.utils.set_random_seed(1)
    return equivariant(plain_network("student"), GROUP, "compute")


def models(epochs: int) -> dict[str, keras.Model]:
    """All networks that are compared, by their names in the table."""
    keras.utils.set_random_seed(0)
    plain = plain_network("plain")
    fit(plain, "the plain network", epochs)
    mean = symmetrize(plain, GROUP)
    # The choice is trained alone, on images that have no up.
    frozen = keras.models.clone_model(plain)
    frozen.set_weights(plain.get_weights())
    frozen.trainable = False
    canonical = symmetrize(
        frozen, GROUP, average="canonical", upright_weight=0.0
    )
    fit(canonical, "the choice of a pose", max(1, epochs // 4))
    alone = student()
    fit(alone, "the student without a teacher", epochs)
    taught = student()
    distiller = keras.distillation.Distiller(
        mean,
        taught,
        keras.distillation.LogitsDistillation(
            TEMPERATURE,
            # Its default, the name of this loss, is a function of
            # probabilities that Keras 3.15 gives the logits.
            loss=keras.losses.KLDivergence(),
        ),
        student_loss_weight=0.3,
    )
    fit(distiller, "the student with a teacher", epochs)
    return {
        "plain": plain,
        "plain, mean over four poses": mean,
        "plain, one pose that is chosen": canonical,
        "student without a teacher": alone,
        "student with a teacher": taught,
    }


def measured(
    found: dict[str, keras.Model], rounds: int
) -> dict[str, dict[str, float]]:
    """Accuracy, predictions that change with the pose, and time.

    Times are medians of several rounds in which all networks predict the same
    images in turn, relative to the first network.
    """
    images, labels = digits("test")
    poses = [
        np.ascontiguousarray(np.rot90(images, turns, (1, 2)))
        for turns in range(4)
    ]
    rows = {}
    for name, model in found.items():
        classes = np.stack(
            [model.predict(pose, 200, verbose=0).argmax(-1) for pose in poses]
        )
        rows[name] = {
            # Also those that do not train any more.
            "parameters": model.count_params(),
            "accuracy": float(np.mean(classes == labels)),
            "changed": float(np.mean((classes != classes[0]).any(axis=0))),
        }
    times: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(rounds):
        for name, model in found.items():
            start = time.perf_counter()
            model.predict(images, 200, verbose=0)
            times[name].append(time.perf_counter() - start)
    medians = {name: float(np.median(values)) for name, values in times.items()}
    first = next(iter(medians.values()))
    for name, row in rows.items():
        row["relative_time"] = medians[name] / first
    return rows


def table(rows: dict[str, dict[str, float]]) -> Table:
    """What is printed at the end."""
    found = Table(title="Test digits in four poses")
    found.add_column("network")
    for title in ("parameters", "accuracy", "changed", "time"):
        found.add_column(title, justify="right")
    for name, row in rows.items():
        found.add_row(
            name,
            f"{row['parameters']:,}",
            f"{row['accuracy']:.1%}",
            f"{row['changed']:.1%}",
            f"{row['relative_time']:.2f}",
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--epochs", type=int, default=12)
    add("--rounds", type=int, default=9, help="of the measurement of time")
    add("--results", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    rows = measured(models(options.epochs), options.rounds)
    backend, today = keras.backend.backend(), datetime.date.today()
    file = options.results / f"distillation-{backend}-{today}.json"
    training.write_json(
        file,
        {
            **reporting.measured_by(
                "python examples/distillation.py "
                f"--epochs {options.epochs} --rounds {options.rounds}"
            ),
            "settings": {
                "group": GROUP,
                "widths": WIDTHS,
                "temperature": TEMPERATURE,
                "batch": BATCH,
                "learning_rate": LEARNING_RATE,
                "seeds": [0, 1],
            },
            "rows": rows,
        },
    )
    print(file)
    Console(width=100).print(table(rows))


if __name__ == "__main__":
    main()
