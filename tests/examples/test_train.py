"""``examples/train.py``: runs, resumed runs, and what it refuses."""

import contextlib
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys

import keras
import numpy as np
import pytest

from keras_equiattn import applications
from keras_equiattn.applications import callbacks
from keras_equiattn.applications import datasets
from keras_equiattn.applications import recipes
from keras_equiattn.applications import reporting
from keras_equiattn.layers import GroupPooling
from keras_equiattn.layers import LiftingConv2D

SCRIPT = pathlib.Path(__file__).parents[2] / "examples" / "train.py"
EPOCHS = 4


def load_script():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("train", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tiny_network(input_shape, classes, normalization, weights=None):
    """An invariant network that compiles at once."""
    mean, std = normalization
    layers = [
        keras.Input(input_shape),
        keras.layers.Normalization(mean=mean, variance=np.square(std).tolist()),
        keras.layers.AveragePooling2D(4),
        LiftingConv2D(4, 3, group="p4"),
        keras.layers.BatchNormalization(),
        keras.layers.ReLU(),
        keras.layers.Dropout(0.3),
        GroupPooling(),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(classes, dtype="float32"),
    ]
    model = keras.Sequential(layers, name="tiny")
    if weights is not None:
        model.load_weights(weights)
    return model


@contextlib.contextmanager
def tiny_registered():
    """Makes the tiny network known under the name "tiny"."""
    models, get_model = applications.list_models(), applications.get_model

    def with_tiny(name, **overrides):
        build = tiny_network if name == "tiny" else None
        return build(**overrides) if build else get_model(name, **overrides)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(applications, "list_models", lambda: [*models, "tiny"])
        patch.setattr(applications, "get_model", with_tiny)
        recipe = recipes.get_recipe("rotmnist_p4cnn")
        patch.setitem(recipes._RECIPES, "tiny", recipe)
        yield


@pytest.fixture(scope="session")
def train():
    with tiny_registered():
        yield load_script()


def subprocess_command(arguments, setup="") -> list[str]:
    """Command line of a process that runs the script, "tiny" known to it."""
    lines = [
        "import sys",
        setup,
        f"sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})",
        "import test_train",
        "with test_train.tiny_registered():",
        "    test_train.load_script().main()",
    ]
    return [sys.executable, "-c", "\n".join(lines), *arguments]


@pytest.fixture(scope="session")
def npz(tmp_path_factory):
    """A few of the embedded digits as an exported dataset."""
    folder = tmp_path_factory.mktemp("data")
    exported = datasets.export("digits", folder / "digits.npz")
    with np.load(exported) as file:
        few = {
            name: values if name == "metadata" else values[:48]
            for name, values in file.items()
        }
    np.savez(folder / "few.npz", **few)
    return folder / "few.npz"


def arguments(npz, out, *more, epochs=EPOCHS) -> list[str]:
    """A run on the few digits: three batches per epoch."""
    return [
        "--model=tiny",
        f"--dataset={npz}",
        f"--out={out}",
        f"--epochs={epochs}",
        "--batch-size=12",
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


@pytest.fixture(scope="session")
def whole_run(train, npz, tmp_path_factory):
    """Folder of a run that nothing interrupts."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    policy = keras.config.dtype_policy()
    train.main(arguments(npz, out))
    keras.config.set_dtype_policy(policy)
    return out


def test_run_leaves_a_record(whole_run, npz):
    assert sorted(path.name for path in whole_run.iterdir()) == [
        "best.keras",
        "curves.png",
        "last.keras",
        "last.weights.h5",
        "log.csv",
        "options.json",
        "results.json",
    ]
    rows = log_of(whole_run)
    assert [row["epoch"] for row in rows] == [1, 2, 3, 4]
    assert {row["learning_rate"] for row in rows} == {0.001}
    results = results_of(whole_run)
    assert (results["model"], results["group"]) == ("tiny", "p4")
    # Kernel and bias, gain and offset, dense kernel and bias.
    assert results["parameters"] == 3 * 3 * 4 + 4 + 4 + 4 + 4 * 10 + 10
    assert results["options"]["seed"] == 0
    assert results["recipe"]["batch_size"] == 12
    assert results["recipe"]["weight_decay"] == 1e-4
    assert results["recipe"]["flip"] is True
    assert results["dataset"]["classes"] == 10
    assert results["versions"]["backend"] == keras.backend.backend()
    assert results["versions"]["keras"] == keras.__version__
    assert results["hardware"]["cores"] >= 1
    assert results["hardware"]["device"] == "CPU"
    assert results["epochs"] == EPOCHS
    assert results["validation"]["accuracy"] == rows[-1]["val_accuracy"]
    for split in (results["test"], results["best"]["test"]):
        error = 100 * (1 - split["accuracy"])
        assert split["error_percent"] == pytest.approx(error, abs=1e-3)
    best = max(rows, key=lambda r: (r["val_accuracy"], -r["val_loss"]))
    assert results["best"]["epoch"] == best["epoch"]
    assert results["wall_time_seconds"] > results["seconds_per_epoch"] > 0
    assert results["equivariance"]["group"] == "p4"
    assert results["equivariance"]["error"] < 1e-5
    assert (whole_run / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_checkpoints_are_the_last_and_the_best_epoch(train, whole_run, npz):
    data = datasets.load_pydataset(npz, "validation", validation_size=16)
    results = results_of(whole_run)
    for name, expected in (
        ("last", results["validation"]),
        ("best", results["best"]["validation"]),
    ):
        model = keras.saving.load_model(whole_run / f"{name}.keras")
        found = model.evaluate(data, verbose=0, return_dict=True)
        assert found["accuracy"] == pytest.approx(expected["accuracy"])
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    info = datasets.info(npz)
    bare = applications.get_model(
        "tiny",
        input_shape=info.shape,
        classes=info.classes,
        normalization=info.normalization,
        weights=whole_run / "last.weights.h5",
    )
    last = keras.saving.load_model(whole_run / "last.keras")
    for a, b in zip(bare.get_weights(), last.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_complete_run_is_left_alone(train, whole_run, npz, capsys):
    before = (whole_run / "results.json").read_bytes()
    train.main(arguments(npz, whole_run, "--resume"))
    assert "is complete" in capsys.readouterr().out
    assert (whole_run / "results.json").read_bytes() == before


def killed(command, *, after) -> None:
    """Starts a process and kills it, no clean-up, once `after` exists."""
    # One thread, like the tests: sums depend on how they are split.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment) as process:
        while not after.exists():
            assert process.poll() is None, "The run ended before the kill."
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL


def test_kill_9_and_resume_lose_nothing(whole_run, train, npz, tmp_path):
    """Killed in the middle of the second epoch, by the log of the first."""
    out = tmp_path / "run"
    killed(
        subprocess_command(arguments(npz, out)),
        after=out / "backup" / "epoch-00001",
    )
    assert not (out / "results.json").exists()
    completed = callbacks.EpochBackup(out / "backup").completed
    assert 1 <= completed < EPOCHS
    train.main(arguments(npz, out, "--resume"))
    assert_same_run(out, whole_run)


class Kill(BaseException):
    """Stands for the kill: nothing in the script catches it."""


def kill_when(monkeypatch, owner, name, condition):
    """Makes `owner.name` raise `Kill` instead, when `condition` holds."""
    original = getattr(owner, name)

    def stand_in(*args, **kwargs):
        if condition(*args, **kwargs):
            raise Kill
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, stand_in)


def always(*args, **kwargs) -> bool:
    return True


def in_second_epoch(callback, epoch, logs=None) -> bool:
    return epoch == 1


def backup_is_renamed(source, target) -> bool:
    return str(target).endswith("epoch-00002")


def best_is_renamed(source, target) -> bool:
    return str(target).endswith("best.keras")


@pytest.mark.parametrize(
    ("owner", "name", "condition"),
    [
        (callbacks.EpochLog, "on_epoch_end", in_second_epoch),
        (callbacks.EpochBackup, "on_epoch_end", in_second_epoch),
        (os, "replace", backup_is_renamed),
        (callbacks.Checkpoints, "on_epoch_end", in_second_epoch),
        (os, "replace", best_is_renamed),
        (reporting, "plot_curves", always),
    ],
    ids=["log", "backup", "rename", "last", "best", "report"],
)
def test_kill_at_the_seams_loses_nothing(
    train, whole_run, npz, tmp_path, monkeypatch, owner, name, condition
):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        kill_when(patch, owner, name, condition)
        with pytest.raises(Kill):
            train.main(arguments(npz, out))
    train.main(arguments(npz, out, "--resume"))
    assert_same_run(out, whole_run)
