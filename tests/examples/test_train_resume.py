"""``examples/train.py --resume``: a kill loses nothing."""

import contextlib
import csv
import dataclasses
import errno
import os
import shutil
import signal
import subprocess

import keras
import numpy as np
import pytest
from sweeps import swept
from training_run import arguments
from training_run import assert_same_run
from training_run import KILL_ITSELF
from training_run import log_of
from training_run import results_of
from training_run import subprocess_command
from training_run import weights_of

from keras_equiattn.applications import training
from keras_equiattn.applications.data import datasets
from keras_equiattn.applications.training import callbacks
from keras_equiattn.applications.training import recipes
from keras_equiattn.applications.training import reporting


def test_complete_run_is_left_alone(train, whole_run, npz, capsys):
    before = (whole_run / "results.json").read_bytes()
    train.main(arguments(npz, whole_run, "--resume"))
    assert "is complete" in capsys.readouterr().out
    assert (whole_run / "results.json").read_bytes() == before


def test_kill_9_and_resume_lose_nothing(whole_run, train, npz, tmp_path):
    out = tmp_path / "run"
    process = subprocess.run(
        subprocess_command(arguments(npz, out), KILL_ITSELF),
        # One thread, like the tests: sums depend on how they are split.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert process.returncode == -signal.SIGKILL
    assert not (out / "results.json").exists()
    assert callbacks.EpochBackup(out / "backup").completed == 1
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


def with_accuracies(monkeypatch, accuracies):
    """Makes each epoch end with a validation accuracy of its own."""
    original = callbacks.EpochLog.on_epoch_end

    def on_epoch_end(self, epoch, logs=None):
        logs["val_accuracy"] = accuracies[epoch]
        original(self, epoch, logs)

    monkeypatch.setattr(callbacks.EpochLog, "on_epoch_end", on_epoch_end)


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


@pytest.mark.once
def test_kills_at_the_seams_lose_nothing(train, whole_run, npz, tmp_path):
    out = tmp_path / "run"
    for owner, name, condition in SEAMS:
        with pytest.MonkeyPatch.context() as patch:
            kill_when(patch, owner, name, condition)
            with pytest.raises(Kill):
                train.main(arguments(npz, out, "--resume"))
    train.main(arguments(npz, out, "--resume"))
    assert_same_run(out, whole_run)


@pytest.mark.once
def test_kill_does_not_forget_a_plateau(train, npz, tmp_path, monkeypatch):
    """The accuracy stays the same from the second epoch on."""
    with_accuracies(monkeypatch, [0.1, 0.5, 0.5, 0.5])
    more = ("--plateau-patience=0", "--resume", "--no-test")
    whole, out = tmp_path / "whole", tmp_path / "run"
    train.main(arguments(npz, whole, *more))
    rates = [row["learning_rate"] for row in log_of(whole)]
    assert rates == [0.001, 0.001, 0.001, 0.0005]
    for owner, name, condition in (
        # The rate has dropped, but the backup does not have it.
        (callbacks.EpochBackup, "on_epoch_end", lambda *args: args[1] == 2),
        SEAMS[-1],
    ):
        with pytest.MonkeyPatch.context() as patch:
            kill_when(patch, owner, name, condition)
            with pytest.raises(Kill):
                train.main(arguments(npz, out, *more))
    train.main(arguments(npz, out, *more))
    assert_same_run(out, whole)


def test_plateau_lowers_the_rate_as_pytorch_does(tmp_path):
    torch = pytest.importorskip("torch")
    values = [0.5, 0.6, 0.6, 0.55, 0.6, 0.6, 0.61, 0.6, 0.6, 0.6, 0.6, 0.6]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, mode="max", factor=0.5, patience=2
    )
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1))
    plateau = callbacks.Plateau(
        callbacks.EpochLog(tmp_path / "log.csv"), 0.1, patience=2, factor=0.5
    )
    plateau.set_model(model)
    plateau.on_train_begin()
    for epoch, value in enumerate(values):
        theirs.step(value)
        plateau.on_epoch_end(epoch, {"val_accuracy": value})
        rate = keras.ops.convert_to_numpy(model.optimizer.learning_rate)
        assert float(rate) == pytest.approx(optimizer.param_groups[0]["lr"])
    assert float(rate) == pytest.approx(0.025)


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


@pytest.mark.slow
def test_both_pipelines_train_alike(train, tmp_path):
    """Digits by name, killed and resumed, and from a file in one go."""
    exported = datasets.export("digits", tmp_path / "digits.npz")

    def command(dataset, out):
        options = {"epochs": 3, "padding": 2, "verbose": 0}
        options |= {"model": "tiny", "dataset": dataset, "out": out}
        return [f"--{name}={value}" for name, value in options.items()]

    by_name, by_file = tmp_path / "name", tmp_path / "file"
    train.main(command(exported, by_file))
    with pytest.MonkeyPatch.context() as patch:
        kill_when(patch, *SEAMS[1])
        with pytest.raises(Kill):
            train.main(command("digits", by_name))
    train.main([*command("digits", by_name), "--resume"])
    assert_same_run(by_name, by_file)
    assert results_of(by_name)["pipeline"] == "tf.data"
    assert results_of(by_file)["pipeline"] == "PyDataset"


def damage(path):
    """Flips a bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def stopped_run(train, npz, out, after=3):
    """A run that was killed when its backups were those of two epochs."""
    with pytest.MonkeyPatch.context() as patch:
        kill_when(
            patch,
            callbacks.Checkpoints,
            "on_epoch_end",
            lambda self, epoch, logs: epoch + 1 == after,
        )
        with pytest.raises(Kill):
            train.main(arguments(npz, out))
    assert callbacks.EpochBackup(out / "backup").epochs == [after, after - 1]


DAMAGES = {
    "flipped bit": damage,
    "empty file": lambda path: path.write_bytes(b""),
    "truncated file": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "lost file": lambda path: path.unlink(),
}


@pytest.mark.once
@pytest.mark.parametrize(
    "kind",
    [
        "flipped bit",
        *(pytest.param(k, marks=pytest.mark.sweep) for k in list(DAMAGES)[1:]),
    ],
)
def test_damaged_backup_is_left_out(
    kind, train, whole_run, npz, tmp_path, capsys
):
    out = tmp_path / "run"
    stopped_run(train, npz, out)
    files = sorted((out / "backup" / "epoch-00003").iterdir())
    names = {path.name for path in files}
    assert {"best.keras", "latest.weights.h5", "random_states.npz"} < names
    for path in files:
        if kind != "flipped bit" or path.name == "latest.weights.h5":
            DAMAGES[kind](path)
    train.main(arguments(npz, out, "--resume"))
    said = capsys.readouterr().out
    assert "The backup of epoch 3 is damaged." in said
    assert "Resuming after epoch 2 of 4." in said
    assert_same_run(out, whole_run)


@pytest.mark.once
@pytest.mark.sweep
def test_every_file_of_a_backup_is_checked(train, npz, tmp_path, monkeypatch):
    """Also if the best epoch was the first, and is in both backups."""
    with_accuracies(monkeypatch, [0.5, 0.1, 0.1, 0.1])
    out = tmp_path / "run"
    stopped_run(train, npz, out)
    damage(out / "best.keras")
    backup = callbacks.EpochBackup(out / "backup")
    for path in sorted((out / "backup" / "epoch-00003").iterdir()):
        before = path.read_bytes()
        damage(path)
        assert backup.completed == 2, path.name
        path.write_bytes(before)
        assert backup.completed == 3


@pytest.mark.once
def test_best_network_goes_back_with_the_backup(
    train, npz, tmp_path, monkeypatch
):
    """The best epoch is lost with its backup, and is worse when repeated."""
    accuracies = [0.5, 0.6, 0.9, 0.1]
    with_accuracies(monkeypatch, accuracies)
    two, out = tmp_path / "two", tmp_path / "run"
    train.main(arguments(npz, two, epochs=2))
    with pytest.MonkeyPatch.context() as patch:
        kill_when(
            patch,
            callbacks.EpochLog,
            "on_epoch_begin",
            lambda self, epoch, logs: epoch == 3,
        )
        with pytest.raises(Kill):
            train.main(arguments(npz, out))
    damage(out / "backup" / "epoch-00003" / "latest.weights.h5")
    accuracies[2] = 0.1
    train.main(arguments(npz, out, "--resume"))
    assert results_of(out)["best"]["epoch"] == 2
    found = weights_of(out / "best.keras")
    expected = weights_of(two / "last.keras")
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.once
@pytest.mark.parametrize("more", [(), ("--resume",)])
def test_two_runs_in_one_folder(more, train, npz, tmp_path):
    out = tmp_path / "run"
    options = training.TrainOptions(model="tiny", out=out)
    with training.claimed_out(options):
        with pytest.raises(SystemExit, match="Another process trains in"):
            train.main(arguments(npz, out, *more))
        assert not list(out.iterdir())


@pytest.mark.once
def test_all_backups_are_damaged(train, npz, tmp_path, capsys):
    out = tmp_path / "run"
    stopped_run(train, npz, out)
    for folder in (out / "backup").iterdir():
        damage(folder / "latest.weights.h5")
    log = (out / "log.csv").read_bytes()
    with pytest.raises(SystemExit, match=r"All backups .* --weights .*last"):
        train.main(arguments(npz, out, "--resume"))
    assert (out / "log.csv").read_bytes() == log
    assert (out / "last.keras").exists()


@pytest.mark.once
def test_complete_run_gets_more_epochs(train, whole_run, npz, tmp_path):
    out = tmp_path / "run"
    train.main(arguments(npz, out, epochs=2))
    assert callbacks.EpochBackup(out / "backup").epochs == [2]
    train.main(arguments(npz, out, "--resume", epochs=4))
    assert_same_run(out, whole_run)
    assert (out / "results-2-epochs.json").exists()
    train.main(arguments(npz, out, "--resume", epochs=4))


@pytest.mark.once
@pytest.mark.sweep
def test_complete_run_without_a_backup(train, npz, tmp_path):
    out = tmp_path / "run"
    train.main(arguments(npz, out, epochs=1))
    shutil.rmtree(out / "backup")
    results = (out / "results.json").read_bytes()
    with pytest.raises(SystemExit, match="no backup to go on from"):
        train.main(arguments(npz, out, "--resume", epochs=2))
    assert (out / "results.json").read_bytes() == results


@pytest.mark.once
@pytest.mark.sweep
def test_cosine_has_its_number_of_epochs(train, npz, tmp_path, monkeypatch):
    recipe = recipes._RECIPES["tiny"]
    cosine = dataclasses.replace(recipe, cosine=True, milestones=())
    monkeypatch.setitem(recipes._RECIPES, "tiny", cosine)
    out = tmp_path / "run"
    train.main(arguments(npz, out, epochs=1))
    with pytest.raises(SystemExit, match="started with epochs=1"):
        train.main(arguments(npz, out, "--resume", epochs=2))


@pytest.mark.once
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (np, "savez"),
        pytest.param(callbacks.Checkpoints, "_write", marks=pytest.mark.sweep),
    ],
)
def test_full_disk(owner, name, train, whole_run, npz, tmp_path, monkeypatch):
    """As on a full disk, the third write fails; later ones work."""
    out = tmp_path / "run"
    original = getattr(owner, name)
    calls = []

    def write(*args, **options):
        calls.append(args)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*args, **options)

    monkeypatch.setattr(owner, name, write)
    with pytest.raises(SystemExit, match=r"No space left.*--resume goes on"):
        train.main(arguments(npz, out))
    train.main(arguments(npz, out, "--resume"))
    assert_same_run(out, whole_run)


@pytest.mark.once
def test_interrupt(train, npz, tmp_path, monkeypatch, capsys):
    def interrupt(self, epoch, logs=None):
        if epoch == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(callbacks.EpochLog, "on_epoch_begin", interrupt)
    with pytest.raises(SystemExit) as stop:
        train.main(arguments(npz, tmp_path / "run"))
    assert stop.value.code == 130
    said = capsys.readouterr().err
    assert "completed 1 epochs: --resume goes on" in said


@pytest.mark.slow
@pytest.mark.every_backend
@pytest.mark.parametrize("seed", range(2))
def test_kills_at_random_lose_nothing(seed, whole_run, train, npz, tmp_path):
    """Killed after random times, until a run is complete by itself."""
    rng = np.random.default_rng(seed)
    out = tmp_path / "run"
    command = subprocess_command(arguments(npz, out, "--resume"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    completed = 0
    for _ in range(30):
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(rng.uniform(5, 40))
        if process.poll() == 0:
            break
        assert process.poll() is None, process.returncode
        process.kill()
        process.wait()
        before, completed = (
            completed,
            callbacks.EpochBackup(out / "backup").completed,
        )
        assert completed >= before
    train.main(arguments(npz, out, "--resume"))
    assert_same_run(out, whole_run)


@pytest.mark.once
@pytest.mark.parametrize(
    "content",
    swept(
        (None, "", "epoch,loss\n1", "epoch,loss\none,two\n", "loss\n1\n"), None
    ),
)
def test_damaged_log_is_named(train, npz, tmp_path, content):
    out = tmp_path / "run"
    train.main(arguments(npz, out, epochs=1))
    log = out / "log.csv"
    log.unlink()
    if content is not None:
        log.write_text(content)
    with pytest.raises(SystemExit, match=r"log.csv is damaged, and the run"):
        train.main(arguments(npz, out, "--resume", epochs=2))


@pytest.mark.once
def test_damaged_log_of_steps_is_named(train, npz, tmp_path):
    out = tmp_path / "run"
    steps = ("--log-steps", "1")
    train.main(arguments(npz, out, *steps, epochs=1))
    log = (out / "steps.csv").read_text()
    (out / "steps.csv").write_text(log[: log.rindex(",")])
    (out / "backup" / "epoch-old").mkdir()  # not one of ours
    with pytest.raises(SystemExit, match=r"steps.csv is damaged.*cut off"):
        train.main(arguments(npz, out, *steps, "--resume", epochs=2))


@pytest.mark.once
def test_results_stay_where_more_epochs_cannot_begin(train, npz, tmp_path):
    out = tmp_path / "run"
    train.main(arguments(npz, out, epochs=1))
    npz = npz.rename(npz.with_suffix(".moved.npz"))
    try:
        before = (out / "results.json").read_bytes()
        moved = npz.with_name("few.npz")
        with pytest.raises(SystemExit):
            train.main(arguments(moved, out, "--resume", epochs=2))
        assert (out / "results.json").read_bytes() == before
    finally:
        npz.rename(npz.with_name("few.npz"))
