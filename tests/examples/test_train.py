"""``examples/train.py``: runs, resumed runs, and what it refuses."""

import contextlib
import csv
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
    assert results["recipe"]["batch_size"] == 8
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
    """Stands for a kill: nothing in the script catches it."""


def kill_when(patch, owner, name, condition):
    """Makes `owner.name` raise `Kill` instead, when `condition` holds."""
    original = getattr(owner, name)

    def stand_in(*args):
        if condition(*args):
            raise Kill
        return original(*args)

    patch.setattr(owner, name, stand_in)


# Where a kill leaves files that do not agree, in the order of a run.
SEAMS = [
    # The log has a row that the backup has not.
    (callbacks.EpochBackup, "on_epoch_end", lambda self, epoch, logs: True),
    # The second backup is written, but not in its place.
    (os, "replace", lambda source, target: target.name == "epoch-00002"),
    # The checkpoints are an epoch behind.
    (callbacks.Checkpoints, "on_epoch_end", lambda self, epoch, logs: True),
    # Training is over, the report is not written.
    (reporting, "plot_curves", lambda *args: True),
]


def test_kills_at_the_seams_lose_nothing(train, whole_run, npz, tmp_path):
    out = tmp_path / "run"
    for owner, name, condition in SEAMS:
        with pytest.MonkeyPatch.context() as patch:
            kill_when(patch, owner, name, condition)
            with pytest.raises(Kill):
                train.main(arguments(npz, out, "--resume"))
    train.main(arguments(npz, out, "--resume"))
    assert_same_run(out, whole_run)


def test_best_checkpoint_is_written_after_a_kill(tmp_path):
    """The last completed epoch is the best, but not saved as such."""
    rows = [
        {"epoch": 1, "val_accuracy": 0.8, "val_loss": 1.0, "wall_time": 1.0},
        {"epoch": 2, "val_accuracy": 0.9, "val_loss": 1.0, "wall_time": 2.0},
        {"epoch": 3, "val_accuracy": 0.9, "val_loss": 2.0, "wall_time": 3.0},
    ]
    with (tmp_path / "log.csv").open("w") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    for completed, expected in ((3, {"last"}), (2, {"last", "best"})):
        log = callbacks.EpochLog(tmp_path / "log.csv", completed)
        assert log.best == rows[1]
        assert log.wall_time > completed
        checkpoints = callbacks.Checkpoints(tmp_path, log)
        checkpoints.set_model(model)
        checkpoints.on_train_begin()
        found = {path.stem for path in tmp_path.glob("*.keras")}
        assert found == expected
    with pytest.raises(ValueError, match="lacks rows of the 4 completed"):
        callbacks.EpochLog(tmp_path / "log.csv", 4)


def test_train_on_all_selects_nothing(train, npz, tmp_path, capfd):
    out = tmp_path / "run"
    train.main(arguments(npz, out, "--train-on-all", "--no-test", epochs=1))
    assert not (out / "best.keras").exists()
    results = results_of(out)
    for key in ("validation", "test", "best"):
        assert results[key] is None
    (row,) = log_of(out)
    assert set(row) == {"epoch", "loss", "accuracy", "learning_rate"}
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == (
        "tiny: 98 parameters, group p4, "
        f"backend {keras.backend.backend()}, device CPU"
    )
    assert lines[-1].startswith("tiny: 1 epochs, equivariance error")


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(train, npz, tmp_path, policy):
    out = tmp_path / "run"
    train.main(
        arguments(npz, out, f"--dtype-policy={policy}", "--no-test", epochs=1)
    )
    results = results_of(out)
    assert results["options"]["dtype_policy"] == policy
    assert np.isfinite(results["validation"]["loss"])
    model = keras.saving.load_model(out / "last.keras")
    assert {layer.compute_dtype for layer in model.layers} == {
        policy.removeprefix("mixed_"),
        "float32",
    }
    assert {v.dtype for v in model.weights} == {"float32"}
    scaled = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert scaled == (policy == "mixed_float16")


# As if it were not installed; a None in sys.modules would misguide Keras.
BLOCK_TENSORFLOW = """
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "tensorflow":
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Block())
"""


@pytest.mark.once
def test_npz_trains_without_tensorflow(npz, tmp_path):
    """On JAX, TensorFlow's import being blocked."""
    out = tmp_path / "run"
    subprocess.run(
        subprocess_command(arguments(npz, out, epochs=1), BLOCK_TENSORFLOW),
        env={**os.environ, "KERAS_BACKEND": "jax"},
        check=True,
    )
    results = results_of(out)
    assert results["pipeline"] == "PyDataset"
    assert results["epochs"] == 1
    assert results["versions"]["backend"] == "jax"
    assert "tensorflow" not in results["versions"]


@pytest.mark.slow
def test_both_pipelines_train_alike(train, tmp_path):
    """The digits by name come by tf.data, those of the file do not."""
    exported = datasets.export("digits", tmp_path / "digits.npz")
    outs = {}
    for dataset in ("digits", str(exported)):
        out = outs[dataset] = tmp_path / f"run{len(outs)}"
        train.main(
            [
                "--model=tiny",
                f"--dataset={dataset}",
                f"--out={out}",
                "--epochs=2",
                "--padding=2",
                "--verbose=0",
            ]
        )
    by_name, by_file = (results_of(out) for out in outs.values())
    assert by_name["pipeline"] == "tf.data"
    assert by_file["pipeline"] == "PyDataset"
    for key in ("validation", "test", "dataset"):
        assert by_name[key] == by_file[key]


@pytest.mark.slow
def test_command_line_on_a_real_network(npz, tmp_path):
    """The command of the documentation, on a few images."""
    command = [sys.executable, str(SCRIPT), *arguments(npz, "run", epochs=1)]
    command = [arg for arg in command if not arg.startswith("--verbose")]
    command.append("--model=rotmnist_p4cnn")
    process = subprocess.run(
        command, cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert "rotmnist_p4cnn: 24,610 parameters, group p4" in process.stdout
    assert "4/4" in process.stdout  # Keras' progress bar
    results = results_of(tmp_path / "run")
    assert results["equivariance"]["error"] < 1e-4
    assert results["options"]["out"] == "run"


@pytest.fixture
def no_data(monkeypatch):
    """Loading any data is a failure."""

    def fail(*args, **kwargs):
        pytest.fail("Data was loaded before the options were checked.")

    for name in ("load", "load_pydataset"):
        monkeypatch.setattr(datasets, name, fail)


def refusal(train, command, capsys) -> str:
    """What the script says before it gives up."""
    with pytest.raises(SystemExit) as error:
        train.main(command)
    assert error.value.code not in (None, 0)
    told = capsys.readouterr()
    return f"{error.value.code} {told.out} {told.err}"


@pytest.mark.once
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--model=tinny", "Unknown model 'tinny'. Did you mean 'tiny'?"),
        ("--dataset=digit", "Unknown dataset 'digit'. Did you mean 'digits'?"),
        ("--dataset=none.npz", "none.npz does not exist"),
        ("--epochs=0", "`epochs` must be >= 1. Received: epochs=0"),
        ("--epochs=two", "two"),
        ("--batch-size=0", "`batch_size` must be >= 1"),
        ("--learning-rate=-1", "`learning_rate` must be > 0"),
        ("--weight-decay=-1", "`weight_decay` must be >= 0"),
        ("--padding=-1", "`padding` must be >= 0"),
        ("--validation-size=0", "`validation_size` must be None or >= 1"),
        ("--seed=-1", "`seed` must be in [0, 2**32). Received: seed=-1"),
        ("--dtype-policy=float8", "float8"),
        ("--nonsense=1", "nonsense"),
    ],
)
def test_bad_options_fail_early(
    train, npz, tmp_path, capsys, no_data, more, message
):
    out = tmp_path / "run"
    assert message in refusal(train, arguments(npz, out, more), capsys)
    assert not out.exists()


@pytest.mark.once
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--dataset=cifar10", "`input_shape` must be (28, 28, channels)"),
        ("--weights=none.h5", "Received: 'none.h5'"),
    ],
)
def test_what_the_network_refuses_fails_early(
    train, tmp_path, capsys, no_data, more, message
):
    out = tmp_path / "run"
    command = ["--model=rotmnist_p4cnn", f"--out={out}", more]
    assert message in refusal(train, command, capsys)
    assert not out.exists()


@pytest.mark.once
def test_dataset_that_is_not_prepared(train, tmp_path, capsys):
    command = [
        "--model=rotmnist_p4cnn",
        f"--data-dir={tmp_path}",
        f"--out={tmp_path / 'run'}",
    ]
    told = refusal(train, command, capsys)
    assert "'rot_mnist' is not prepared" in told
    assert not (tmp_path / "run").exists()


@pytest.mark.once
def test_dataset_with_too_few_images(train, npz, tmp_path, capsys):
    command = arguments(npz, tmp_path / "run", "--validation-size=48")
    told = refusal(train, command, capsys)
    assert "must be less than the 48 images" in told
    assert not (tmp_path / "run").exists()


@pytest.mark.once
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), "holds a run already: go on with it by --resume"),
        (("--resume", "--seed=1"), "started with seed=0, not with seed=1"),
        (("--resume", "--epochs=5"), "started with epochs=4, not with epochs"),
        (("--resume", "--train-on-all"), "started with train_on_all=False"),
    ],
)
def test_folder_with_another_run(
    train, whole_run, npz, capsys, no_data, more, message
):
    told = refusal(train, arguments(npz, whole_run, *more), capsys)
    assert message in told


@pytest.mark.once
def test_backend_of_a_resumed_run_is_the_same(
    train, whole_run, npz, capsys, no_data, monkeypatch
):
    monkeypatch.setattr(keras.backend, "backend", lambda: "other")
    told = refusal(train, arguments(npz, whole_run, "--resume"), capsys)
    assert "not with backend='other'" in told


@pytest.mark.once
def test_folder_that_is_a_file(train, npz, tmp_path, capsys, no_data):
    (tmp_path / "run").write_text("")
    told = refusal(train, arguments(npz, tmp_path / "run"), capsys)
    assert "is no folder" in told
