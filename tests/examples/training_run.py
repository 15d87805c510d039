"""What the tests of ``examples/train.py`` share: a tiny network, tiny runs."""

import contextlib
import dataclasses
import importlib.util
import json
import pathlib
import sys

import keras
import numpy as np
import pytest

from keras_equiattn.applications import registry
from keras_equiattn.applications.training import callbacks
from keras_equiattn.applications.training import recipes
from keras_equiattn.layers import GroupPooling
from keras_equiattn.layers import LiftingConv2D

SCRIPT = pathlib.Path(__file__).parents[2] / "examples" / "train.py"
EPOCHS = 4
# What the folder of a complete run holds.
FILES = [
    "backup",
    "best.keras",
    "curves.png",
    "last.keras",
    "last.weights.h5",
    "log.csv",
    "options.json",
    "results.json",
]


# The process kills itself after the second batch of the second epoch.
KILL_ITSELF = """
import os
import signal
from keras_equiattn.applications.training import callbacks

class Backup(callbacks.EpochBackup):
    def on_epoch_begin(self, epoch, logs=None):
        super().on_epoch_begin(epoch, logs)
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == (1, 1):
            os.kill(os.getpid(), signal.SIGKILL)

callbacks.EpochBackup = Backup
"""


def load_script():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("train", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tiny_network(
    input_shape, classes, normalization, weights=None, name="tiny", dropout=0.3
):
    """An invariant network that compiles at once."""
    mean, std = normalization
    layers = [
        keras.Input(input_shape),
        keras.layers.Normalization(mean=mean, variance=np.square(std).tolist()),
        keras.layers.AveragePooling2D(4),
        LiftingConv2D(4, 3, group="p4"),
        keras.layers.BatchNormalization(),
        keras.layers.ReLU(),
        keras.layers.Dropout(dropout),
        GroupPooling(),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(classes, dtype="float32"),
    ]
    model = keras.Sequential(layers, name=name)
    if weights is not None:
        model.load_weights(weights)
    return model


@contextlib.contextmanager
def tiny_registered():
    """Registers the tiny network, and the same without random numbers.

    The latter is trained by SGD: Adam divides the gradient of a bias before
    batch normalisation, which is zero but for rounding, by its own size.
    """
    adam = dataclasses.replace(
        recipes.get_recipe("rotmnist_p4cnn"), kernel_factors=()
    )
    sgd = dataclasses.replace(
        adam, optimizer="sgd", momentum=0.9, learning_rate=0.05
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, dropout, recipe in (
            ("tiny", 0.3, adam),
            ("tiny_without_dropout", 0.0, sgd),
        ):
            network = registry._Registered(
                tiny_network, {"dropout": dropout}, None, {}
            )
            patch.setitem(registry._MODELS, name, network)
            patch.setitem(recipes._RECIPES, name, recipe)
        yield


def subprocess_command(arguments, setup="") -> list[str]:
    """Command line of a process that runs the script with "tiny" registered.

    It checks types as pytest does: the checker draws from Python's random
    numbers, on which the initial weights depend.
    """
    lines = [
        "import sys",
        "import jaxtyping",
        "jaxtyping.install_import_hook('keras_equiattn.ops', "
        "'beartype.beartype')",
        setup,
        f"sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})",
        "import training_run",
        "with training_run.tiny_registered():",
        "    training_run.load_script().main()",
    ]
    return [sys.executable, "-c", "\n".join(lines), *arguments]


def arguments(npz, out, *more, epochs=EPOCHS) -> list[str]:
    """A run on the few digits: four batches per epoch."""
    return [
        "--model=tiny",
        f"--dataset={npz}",
        f"--out={out}",
        f"--epochs={epochs}",
        "--batch-size=8",
        "--validation-size=16",
        "--padding=2",
        "--flip=True",
        "--verbose=0",
        *more,
    ]


def log_of(out) -> list[dict[str, float]]:
    """The log without what depends on the clock."""
    rows = callbacks.read_log(out / "log.csv")
    return [
        {k: v for k, v in row.items() if k not in ("seconds", "wall_time")}
        for row in rows
    ]


def weights_of(path) -> list[np.ndarray]:
    """All numbers in a model file, the state of the optimiser included."""
    model = keras.saving.load_model(path)
    return [
        keras.ops.convert_to_numpy(v)
        for v in [*model.weights, *model.optimizer.variables]
    ]


def results_of(out) -> dict:
    return json.loads((out / "results.json").read_text())


def assert_same_run(out, reference):
    assert log_of(out) == log_of(reference)
    for name in ("last.keras", "best.keras"):
        found, expected = weights_of(out / name), weights_of(reference / name)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a, b)
    for key in ("epochs", "validation", "test", "best", "equivariance"):
        assert results_of(out)[key] == results_of(reference)[key]
