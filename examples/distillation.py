r"""Makes a plain network equivariant, and distils it into a small fast one.

    python examples/distillation.py

Trains a plain network on the upright digits of scikit-learn, and then treats it
as a given network that is not trained any more. `symmetrize` makes it invariant
to quarter turns: by the mean over all four poses, or by a learned choice of one
pose. The choice costs less, and is better here: the plain network has never
seen digits on their side. So the network with the choice is the teacher of a
small network of layers that are equivariant by themselves. For comparison, the
same small network is trained by the labels alone, and by the teacher alone.

The script prints the accuracy of all of them on upright digits and on digits in
all four poses, the number of their weights, and the time of a prediction as a
multiple of that of the plain network. It takes about two minutes on two cores,
and writes `results.json` to `--out`.
"""

import argparse
import datetime
import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
from rich.console import Console
from rich.table import Table

from keras_equiattn import layers
from keras_equiattn import symmetrize
from keras_equiattn.applications import get_model
from keras_equiattn.applications import training
from keras_equiattn.applications.data import datasets
from keras_equiattn.applications.training import reporting
from keras_equiattn.testing import equivariance_error

DATA = "digits_upright"
GROUP = "p4"
# The plain network, and filters of the three layers of the student.
PLAIN, PLAIN_FILTERS = "rotmnist_z2cnn", 32
STUDENT_FILTERS = (8, 12, 16)
BATCH = 32
RATES = {"plain": 2e-3, "choice of a pose": 5e-3, "student": 1e-2}
# For the softmax of both networks, so that small probabilities count.
TEMPERATURE = 3.0

Arrays = tuple[np.ndarray, np.ndarray]


def digits(split: str, count: int | None = None) -> Arrays:
    """Upright digits of a split and their labels; at most `count` of them."""
    data = datasets.load_pydataset(DATA, split, batch_size=BATCH)
    images, labels = zip(*(data[n] for n in range(len(data))), strict=True)
    return np.concatenate(images)[:count], np.concatenate(labels)[:count]


def student() -> keras.Model:
    """Three group convolutions on half of the resolution."""
    mean, std = datasets.info(DATA).normalization
    inputs = keras.Input((28, 28, 1))
    x = keras.layers.Normalization(mean=mean, variance=np.square(std))(inputs)
    x = layers.SpatialPooling2D(2, mode="mean", group=GROUP)(x)
    first, *others = STUDENT_FILTERS
    options = {"padding": "same", "use_bias": False, "group": GROUP}
    x = activated(layers.LiftingConv2D(first, 5, **options)(x))
    x = layers.SpatialPooling2D(2, group=GROUP)(x)
    for filters in others:
        x = activated(layers.GroupConv2D(filters, 3, **options)(x))
    x = keras.layers.GlobalAveragePooling3D()(x)
    return keras.Model(inputs, keras.layers.Dense(10)(x), name="student")


def activated(x: Any) -> Any:
    """Applies batch normalisation and ReLU."""
    # With few batches, moving statistics need a momentum as low as 0.9.
    x = keras.layers.BatchNormalization(momentum=0.9)(x)
    return keras.layers.ReLU()(x)


class Progress(keras.callbacks.Callback):
    """One progress bar for all epochs."""

    def __init__(self, title: str, epochs: int) -> None:
        super().__init__()
        self.title, self.epochs = title, epochs

    def on_train_begin(self, logs: Any = None) -> None:
        print(self.title)
        self.bar = keras.utils.Progbar(
            self.epochs, stateful_metrics=["loss"], unit_name="epoch"
        )

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        # A distiller has its sum of losses under a name of its own.
        loss = logs.get("total_loss", logs["loss"])
        self.bar.update(epoch + 1, [("loss", loss)])


def fitted(
    model: keras.Model, data: Arrays, epochs: int, rate: float, title: str
) -> None:
    """Trains a model, or a distiller, with a progress bar."""
    images, labels = data
    steps = -(-len(images) // BATCH) * epochs
    model.compile(
        keras.optimizers.Adam(
            keras.optimizers.schedules.CosineDecay(rate, steps)
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.fit(
        images,
        labels,
        batch_size=BATCH,
        epochs=epochs,
        callbacks=[Progress(title, epochs)],
        verbose=0,
    )


def distilled(
    teacher: keras.Model,
    data: Arrays,
    epochs: int,
    share_of_labels: float,
    title: str,
) -> keras.Model:
    """A student that learns from a teacher, and from labels if asked for.

    Args:
        teacher: the network whose logits the student imitates.
        data: images, and labels.
        epochs: of training.
        share_of_labels: weight of the labels' loss against the teacher's, from
            0 to 1.
        title: of the progress bar.
    """
    learns = student()
    distiller = keras.distillation.Distiller(
        teacher,
        learns,
        keras.distillation.LogitsDistillation(
            temperature=TEMPERATURE,
            # An object: by its name, Keras 3.15 takes the divergence of the
            # logits themselves, as if they were probabilities.
            loss=keras.losses.KLDivergence(),
        ),
        student_loss_weight=share_of_labels,
    )
    fitted(distiller, data, epochs, RATES["student"], title)
    return learns


def networks(
    data: Arrays, epochs: int, choice_epochs: int, seed: int
) -> dict[str, keras.Model]:
    """Everything that the table compares, trained."""
    keras.utils.set_random_seed(seed)
    plain = get_model(
        PLAIN,
        filters=PLAIN_FILTERS,
        normalization=datasets.info(DATA).normalization,
    )
    title = "A plain network on upright digits"
    fitted(plain, data, epochs, RATES["plain"], title)
    plain.trainable = False

    chosen = symmetrize(plain, GROUP, average="canonical")
    title = "The choice of a pose, before the plain network"
    fitted(chosen, data, choice_epochs, RATES["choice of a pose"], title)

    alone = student()
    title = "A student without a teacher"
    fitted(alone, data, epochs, RATES["student"], title)
    return {
        "plain": plain,
        "mean of logits": symmetrize(plain, GROUP),
        "mean of probabilities": symmetrize(
            plain, GROUP, average="probabilities"
        ),
        "chosen pose": chosen,
        "student, labels alone": alone,
        "student, labels and teacher": distilled(
            chosen, data, epochs, 0.5, "A student with labels and a teacher"
        ),
        "student, teacher alone": distilled(
            chosen, data, epochs, 0.0, "A student with a teacher alone"
        ),
    }


def measured(model: keras.Model, data: Arrays) -> dict[str, float]:
    """Accuracies, weights, and how exact the model is under turns."""
    images, labels = data
    found = []
    for quarters in range(4):
        turned = np.rot90(images, quarters, (1, 2))
        classes = model.predict(turned, batch_size=100, verbose=0).argmax(-1)
        found.append(float(np.mean(classes == labels)))
    return {
        "upright_accuracy": found[0],
        "accuracy_in_all_poses": float(np.mean(found)),
        "weights": sum(np.prod(w.shape).item() for w in model.weights),
        "equivariance_error": float(
            max(equivariance_error(model, GROUP, images[:8]))
        ),
    }


def times(
    models: dict[str, keras.Model], images: np.ndarray, repeats: int
) -> dict[str, float]:
    """Seconds of a prediction for all images as one batch.

    The models take turns, so that other load on the machine affects all of
    them; the medians are returned.
    """
    found: dict[str, list[float]] = {name: [] for name in models}
    for model in models.values():
        model.predict_on_batch(images)  # compiles
    bar = keras.utils.Progbar(repeats, unit_name="round")
    print("Time of a prediction")
    for number in range(repeats):
        for name, model in models.items():
            start = time.perf_counter()
            model.predict_on_batch(images)
            found[name].append(time.perf_counter() - start)
        bar.update(number + 1)
    return {name: statistics.median(each) for name, each in found.items()}


def summary(runs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """For each network the mean of every number over the runs."""
    return {
        name: {
            key: statistics.mean(run["networks"][name][key] for run in runs)
            for key in numbers
        }
        for name, numbers in runs[0]["networks"].items()
    }


def table(means: dict[str, dict[str, float]]) -> Table:
    """What was measured, a row for each network."""
    found = Table(title="Digits, trained upright")
    found.add_column("network")
    for title in ("upright", "all poses", "weights", "time"):
        found.add_column(title, justify="right")
    for name, numbers in means.items():
        found.add_row(
            name,
            f"{numbers['upright_accuracy']:.1%}",
            f"{numbers['accuracy_in_all_poses']:.1%}",
            f"{numbers['weights']:,.0f}",
            f"{numbers['relative_time']:.2f}",
        )
    return found


def require_distillation(module: Any = keras) -> None:
    """Ends with a message where Keras cannot distil."""
    if not hasattr(module, "distillation"):
        raise SystemExit(
            f"Keras {module.__version__} has no `keras.distillation`, which "
            "this example needs. Install Keras 3.14 or newer."
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add: Callable[..., Any] = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[0])
    add("--epochs", type=int, default=12)
    add("--choice-epochs", type=int, default=8, help="of the choice of a pose")
    add("--images", type=int, help="training digits; all of them by default")
    add("--repeats", type=int, default=30, help="of each measured time")
    add("--out", type=Path, default=Path("runs/distillation"))
    options = parser.parse_args(arguments)
    require_distillation()
    options.out.mkdir(parents=True, exist_ok=True)

    data, tested = digits("train", options.images), digits("test")
    runs = []
    for seed in options.seeds:
        models = networks(data, options.epochs, options.choice_epochs, seed)
        found = {
            name: measured(model, tested) for name, model in models.items()
        }
        seconds = times(models, tested[0][:100], options.repeats)
        for name, numbers in found.items():
            numbers["seconds_of_100_images"] = seconds[name]
            numbers["relative_time"] = seconds[name] / seconds["plain"]
        runs.append({"seed": seed, "networks": found})
    means = summary(runs)
    results = {
        "command": "python examples/distillation.py "
        f"--seeds {' '.join(map(str, options.seeds))} "
        f"--epochs {options.epochs} --choice-epochs {options.choice_epochs} "
        f"--repeats {options.repeats}"
        + (f" --images {options.images}" if options.images else ""),
        "date": f"{datetime.date.today()}",
        "hardware": reporting.hardware(),
        "versions": reporting.versions(),
        "data": {
            "name": DATA,
            "training_digits": len(data[0]),
            "test_digits": len(tested[0]),
        },
        "settings": {
            "group": GROUP,
            "batch": BATCH,
            "learning_rates": RATES,
            "temperature": TEMPERATURE,
        },
        "means": means,
        "runs": runs,
    }
    training.write_json(options.out / "results.json", results)
    Console().print(table(means))
    print(
        "Times are multiples of that of the plain network, for a prediction of "
        f"100 digits.\nAll numbers are in {options.out}/results.json."
    )


if __name__ == "__main__":
    main()
