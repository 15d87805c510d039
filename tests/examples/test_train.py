"""``examples/train.py``: what a run does and leaves behind."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
from training_run import arguments
from training_run import EPOCHS
from training_run import FILES
from training_run import log_of
from training_run import results_of
from training_run import SCRIPT
from training_run import subprocess_command

from keras_equiattn import applications
from keras_equiattn.applications import registry
from keras_equiattn.applications import training
from keras_equiattn.applications.data import datasets
from keras_equiattn.applications.data.sources import catalogue
from keras_equiattn.applications.training import callbacks
from keras_equiattn.applications.training import reporting


@pytest.mark.every_backend
def test_run_leaves_a_record(whole_run, npz):
    assert sorted(path.name for path in whole_run.iterdir()) == FILES
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
    poses = results["poses"]
    assert (poses["group"], poses["elements"]) == ("p4", [0, 1, 2, 3])
    accuracy = results["test"]["accuracy"]
    assert poses["accuracy"] == pytest.approx(4 * [accuracy])
    assert "auc" not in results["test"]
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


def test_steps_of_long_epochs(train, npz, tmp_path):
    """Steps have a log of their own; evaluation takes the first batch."""
    out = tmp_path / "run"
    more = ("--log-steps=2", "--evaluation-size=8")
    train.main(arguments(npz, out, *more, epochs=2))
    epochs, steps = (
        callbacks.read_log(out / name) for name in ("log.csv", "steps.csv")
    )
    assert [row["epoch"] for row in steps] == [0.5, 1.0, 1.5, 2.0]
    for name in ("loss", "accuracy"):
        values = np.array([row[name] for row in steps])
        expected = [row[name] for row in epochs]
        means = values.reshape(2, 2).mean(axis=1)
        np.testing.assert_allclose(means, expected, rtol=1e-5)
    assert len({row["loss"] for row in steps}) == 4
    last = keras.saving.load_model(out / "last.keras")
    results = results_of(out)
    for split, size in (("test", None), ("validation", 16)):
        images, labels = datasets.load_pydataset(
            npz, split, 8, validation_size=size
        )[0]
        found = last.evaluate(images, labels, verbose=0, return_dict=True)
        assert results[split]["loss"] == pytest.approx(found["loss"], rel=1e-5)


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
    assert (
        "tiny: 98 parameters, group p4, "
        f"backend {keras.backend.backend()}, device CPU"
    ) in lines
    assert lines[-1].startswith("tiny: 1 epochs, equivariance error")


@pytest.mark.sweep
@pytest.mark.once
def test_folder_of_images(train, tmp_path, capsys):
    """Crops of several sizes and smoothed labels, from the command line."""
    pytest.importorskip("tensorflow")
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (2, 60, 90, 3), "uint8")
    for part in ("train", "val"):
        for name, array in zip("ab", pixels, strict=True):
            folder = tmp_path / "images" / part / name
            folder.mkdir(parents=True)
            image.fromarray(array).save(folder / "0.png")
    command = [
        "--model=tiny",
        f"--dataset={tmp_path / 'images'}",
        f"--out={tmp_path / 'run'}",
        "--epochs=1",
        "--flip=True",
        "--verbose=0",
    ]
    options = ("--resized-crop=True", "--label-smoothing=0.1")
    with pytest.raises(SystemExit, match="are also the test images"):
        train.main([*command, "--train-on-all"])
    train.main([*command, *options])
    results = results_of(tmp_path / "run")
    assert results["pipeline"] == "tf.data"
    assert results["dataset"]["name"] == "images"
    assert results["dataset"]["classes"] == 2
    assert results["recipe"]["resized_crop"] is True
    # The best epoch was read from its file, with its loss.
    assert results["best"]["test"] == results["test"]
    assert 0 <= results["test"].pop("auc") <= 1
    assert results["test"] == results["validation"]
    model = keras.saving.load_model(tmp_path / "run" / "last.keras")
    assert model.loss.smoothing == 0.1


@pytest.mark.parametrize("content", [b"text", b"\x89PNG\r\n\x1a\n cut off"])
def test_broken_image_is_named(train, tmp_path, content):
    pytest.importorskip("tensorflow")
    image = pytest.importorskip("PIL.Image")
    for part in ("train", "val"):
        for name in "ab":
            folder = tmp_path / "images" / part / name
            folder.mkdir(parents=True)
            image.new("RGB", (60, 90)).save(folder / "0.png")
    broken = tmp_path / "images" / "train" / "b" / "1.png"
    broken.write_bytes(content)
    command = [
        "--model=tiny",
        f"--dataset={tmp_path / 'images'}",
        f"--out={tmp_path / 'run'}",
        "--epochs=1",
        "--verbose=0",
    ]
    with pytest.raises(SystemExit, match=f"The image {broken} cannot be read"):
        train.main(command)


def test_diverged_run_is_reported(train, npz, tmp_path, capfd):
    out = tmp_path / "run"
    command = arguments(npz, out, "--learning-rate=1e30", epochs=1)
    train.main(command)
    told = capfd.readouterr().out
    assert "The run diverged: its loss or its outputs are not finite." in told
    assert "equivariance error not finite (p4)" in told

    def no_number(text):
        pytest.fail(f"{text} is not JSON")

    text = (out / "results.json").read_text()
    results = json.loads(text, parse_constant=no_number)
    assert results["equivariance"] == {"group": "p4", "error": None}
    for split in (results["validation"], results["test"]):
        assert split["loss"] is None
        assert 0 <= split["error_percent"] <= 100
    train.main([*command, "--resume"])
    assert "is complete" in capfd.readouterr().out


@pytest.mark.once
def test_only_outputs_that_are_not_finite_make_no_error(monkeypatch):
    images = np.ones((2, 8, 8, 1), "float32")
    dataset = training.Data(None, None, None, [(images, None)], "PyDataset", 4)
    inputs = keras.Input((8, 8, 1))
    shapes = iter([(2, 3), (2, 4)])
    model = lambda x: keras.ops.ones(next(shapes))  # noqa: E731
    monkeypatch.setattr(reporting, "group_of", lambda model: "z2")
    with pytest.raises(ValueError, match="Shapes differ"):
        training.equivariance(model, dataset)
    outputs = keras.layers.Flatten()(inputs) / 0.0
    found = training.equivariance(keras.Model(inputs, outputs), dataset)
    assert found == {"group": "p4", "error": None}


@pytest.mark.parametrize(
    "policy",
    [
        "mixed_bfloat16",
        pytest.param(
            "mixed_float16",
            marks=[pytest.mark.slow, pytest.mark.every_backend],
        ),
    ],
)
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


@pytest.mark.sweep
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


@pytest.mark.once
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, {"normalization": datasets.info("rot_mnist").normalization}),
        (
            {"normalization": "imagenet"},
            {"normalization": catalogue.IMAGENET_NORMALIZATION},
        ),
        ({"normalization": None}, {}),
    ],
)
def test_recipe_reaches_the_network(monkeypatch, change, expected):
    taken = {}
    monkeypatch.setattr(
        registry, "get_model", lambda name, **kwargs: taken.update(kwargs)
    )
    info = datasets.info("rot_mnist")
    options = training.TrainOptions("rotmnist_p4cnn", pathlib.Path("run"))
    recipe = dataclasses.replace(training.resolve(options), **change)
    training.build_model(options, recipe)
    rest = {"input_shape": info.shape, "classes": info.classes}
    assert taken == {**rest, **expected}
