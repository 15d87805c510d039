"""Keras callbacks of a training run that survives being killed.

They act at the end of an epoch in the order log, plateau, backup, checkpoints.
If the run is killed between two of them, resuming repairs its files: the log is
cut to the epochs of the backup, and the checkpoints are written again.
"""

import csv
import json
import os
import pathlib
import shutil
import time
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_equiattn._files import checksum
from keras_equiattn._files import write_json

Row = dict[str, float]
CHECKSUMS = "checksums.json"


class EpochBackup(keras.callbacks.Callback):
    """Keeps the state after the last completed epochs, and restores it.

    The state is that of `keras.callbacks.BackupAndRestore` (weights,
    optimiser, epoch), which writes in place and leaves out the states of
    random generators. Here each epoch gets a folder of its own that only
    takes its final name once it is complete, so that a kill during the
    writing costs nothing, and the states of dropout are kept with it.

    The backups of the last two epochs are kept, with checksums: where a disk
    has damaged one, the one before takes its place.

    Args:
        directory: Folder of the backups.
        files: Files that are restored with the state, such as the network of
            the best epoch so far: each backup has copies of them.
    """

    def __init__(
        self, directory: pathlib.Path, files: Sequence[pathlib.Path] = ()
    ) -> None:
        super().__init__()
        self.directory = directory
        self.files = files
        self._expected: int | None = None

    @property
    def completed(self) -> int:
        """Number of epochs completed before the newest whole backup, or 0."""
        return next(filter(self._is_whole, self.epochs), 0)

    @property
    def epochs(self) -> list[int]:
        """Numbers of completed epochs that have a backup, the newest first."""
        paths = self.directory.glob("epoch-*")
        numbers = [path.name.partition("-")[2] for path in paths]
        return sorted((int(n) for n in numbers if n.isdecimal()), reverse=True)

    def on_train_begin(self, logs: Any = None) -> None:
        """Restores the newest whole backup, where there is one."""
        self._expected = self.completed
        if not self._expected:
            return
        folder = self._folder(self._expected)
        backup = keras.callbacks.BackupAndRestore(str(folder))
        backup.set_model(self.model)
        backup.on_train_begin()
        with np.load(folder / "random_states.npz") as states:
            set_random_states(self.model, dict(states))
        for path in self.files:
            if (folder / path.name).exists():
                partial = path.with_name(f"partial.{path.name}")
                shutil.copy2(folder / path.name, partial)
                os.replace(partial, path)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Makes sure that training goes on where the backup ends."""
        if self._expected is not None and epoch != self._expected:
            raise RuntimeError(
                f"The backup holds {self._expected} epochs, but training "
                f"goes on with epoch {epoch + 1}."
            )
        self._expected = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Writes a backup, and removes all but the one before."""
        partial = self.directory / "partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        backup = keras.callbacks.BackupAndRestore(str(partial))
        backup.set_model(self.model)
        backup.on_epoch_end(epoch)
        states: dict[str, Any] = random_states(self.model)
        np.savez(partial / "random_states.npz", **states)
        for path in self.files:
            if path.exists():
                shutil.copy2(path, partial)
        write_json(partial / CHECKSUMS, _checksums(partial))
        completed = epoch + 1
        # A run that fell back to an earlier epoch replaces the damaged one.
        shutil.rmtree(self._folder(completed), ignore_errors=True)
        os.replace(partial, self._folder(completed))
        self._keep({completed, completed - 1})

    def keep_last(self) -> None:
        """Removes all but the newest whole backup."""
        self._keep({self.completed})

    def _keep(self, epochs: set[int]) -> None:
        for epoch in set(self.epochs) - epochs:
            shutil.rmtree(self._folder(epoch))

    def _is_whole(self, completed: int) -> bool:
        """Whether all files of a backup are there and have their checksums."""
        folder = self._folder(completed)
        try:
            expected = json.loads((folder / CHECKSUMS).read_text())
            return bool(expected == _checksums(folder))
        except (OSError, ValueError):
            return False

    def _folder(self, completed: int) -> pathlib.Path:
        return self.directory / f"epoch-{completed:05d}"


def _checksums(folder: pathlib.Path) -> dict[str, str]:
    """The SHA-256 of each file in a folder except that of the checksums."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != CHECKSUMS:
            found[path.relative_to(folder).as_posix()] = checksum(path)
    return found


def random_states(model: keras.Model) -> dict[str, np.ndarray]:
    """States of the random generators that training draws from, by name."""
    states = {
        f"seed_{index}": keras.ops.convert_to_numpy(variable)
        for index, variable in enumerate(seed_variables(model))
    }
    if keras.backend.backend() == "torch":
        # Keras' dropout layers draw from PyTorch's own generators.
        import torch

        states["torch"] = torch.get_rng_state().numpy()
        for index, state in enumerate(torch.cuda.get_rng_state_all()):
            states[f"cuda_{index}"] = state.numpy()
    return states


def set_random_states(
    model: keras.Model, states: dict[str, np.ndarray]
) -> None:
    """Sets what `random_states` returned."""
    for index, variable in enumerate(seed_variables(model)):
        variable.assign(states[f"seed_{index}"])
    if keras.backend.backend() == "torch":
        import torch

        torch.set_rng_state(torch.from_numpy(states["torch"]))
        for index in range(torch.cuda.device_count()):
            if f"cuda_{index}" in states:
                state = torch.from_numpy(states[f"cuda_{index}"])
                torch.cuda.set_rng_state(state, index)


def seed_variables(model: keras.Model) -> list[Any]:
    """States of random generators, which Keras does not save with a model."""
    others = {id(v) for v in model.weights + model.metrics_variables}
    return [v for v in model.non_trainable_variables if id(v) not in others]


class EpochLog(keras.callbacks.Callback):
    """CSV file with one row per epoch, the first epoch being 1.

    Beside the metrics a row holds the learning rate at the start of the
    epoch, its seconds, and the seconds of the whole run so far.

    Args:
        path: The file.
        completed: Epochs of the run that is resumed. Later rows are removed.
    """

    def __init__(self, path: pathlib.Path, completed: int = 0) -> None:
        super().__init__()
        self.path = path
        self.rows = [row for row in read_log(path) if row["epoch"] <= completed]
        if [row["epoch"] for row in self.rows] != list(range(1, completed + 1)):
            raise ValueError(
                f"{path} lacks rows of the {completed} completed epochs."
            )
        self._run_start = time.monotonic()
        if self.rows:
            self._run_start -= self.rows[-1]["wall_time"]
        self._epoch_start = self._rate = 0.0

    @property
    def wall_time(self) -> float:
        """Seconds of the run so far, those of resumed parts included."""
        return time.monotonic() - self._run_start

    @property
    def seconds_per_epoch(self) -> float:
        """Median seconds of an epoch: compilation does not count."""
        return float(np.median([row["seconds"] for row in self.rows]))

    @property
    def best(self) -> Row | None:
        """The row of the best validation accuracy, then of the lowest loss."""
        rows = [row for row in self.rows if "val_accuracy" in row]

        def key(row: Row) -> tuple[float, float]:
            loss = row["val_loss"]  # NaN compares with nothing
            return row["val_accuracy"], -np.inf if np.isnan(loss) else -loss

        return max(rows, key=key, default=None)

    def on_train_begin(self, logs: Any = None) -> None:
        """Writes the rows of the completed epochs anew."""
        _write_rows(self.path, self.rows)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Starts the clock."""
        self._epoch_start = time.monotonic()
        rate = self.model.optimizer.learning_rate
        # 0.001 rather than its float32 neighbour.
        self._rate = float(f"{float(keras.ops.convert_to_numpy(rate)):.7g}")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds the row of this epoch."""
        metrics = {name: float(value) for name, value in (logs or {}).items()}
        self.rows.append(
            {"epoch": epoch + 1}
            | metrics
            | {
                "learning_rate": self._rate,
                "seconds": time.monotonic() - self._epoch_start,
                "wall_time": self.wall_time,
            }
        )
        _write_rows(self.path, self.rows)


class StepLog(keras.callbacks.Callback):
    """CSV file with one row for every so many steps, for long epochs.

    A row holds the means of the training metrics over these steps. Its
    "epoch" is a fraction: 0.5 is in the middle of the first epoch.

    Args:
        path: The file.
        every: Number of steps of a row. Steps at the end of an epoch that do
            not fill a row are not logged.
        completed: Epochs of the run that is resumed. Later rows are removed.

    Attributes:
        steps: Number of steps in an epoch; None for what Keras says.
    """

    def __init__(
        self, path: pathlib.Path, every: int, completed: int = 0
    ) -> None:
        super().__init__()
        self.path = path
        self.every = every
        self.steps: int | None = None
        self.rows = [row for row in read_log(path) if row["epoch"] <= completed]
        self._epoch = 0
        self._before: Row = {}

    def on_train_begin(self, logs: Any = None) -> None:
        """Writes the rows of the completed epochs anew."""
        _write_rows(self.path, self.rows)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Starts the sums anew, as Keras does with its metrics."""
        self._epoch = epoch
        self._before = {}

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Adds a row, where one is complete."""
        step = batch + 1
        if step % self.every:
            return
        # Keras gives means over the epoch so far.
        sums = {name: step * float(x) for name, x in (logs or {}).items()}
        row = {
            "epoch": self._epoch + step / (self.steps or self.params["steps"])
        }
        for name, total in sums.items():
            row[name] = (total - self._before.get(name, 0.0)) / self.every
        self._before = sums
        self.rows.append(row)
        _write_rows(self.path, self.rows)


def read_log(path: pathlib.Path) -> list[Row]:
    """Rows of a file of `EpochLog` or `StepLog`; none where it is missing.

    Raises:
        ValueError: The file is damaged.
    """
    if not path.exists():
        return []
    with path.open(newline="") as file:
        names, *rows = [row for row in csv.reader(file) if row] or [["epoch"]]
    short = [row for row in rows if len(row) != len(names)]
    if short or "epoch" not in names:
        raise ValueError("a row is cut off" if short else "no column 'epoch'")
    return [
        {
            name: int(value) if value.isdecimal() else float(value)
            for name, value in zip(names, row, strict=True)
        }
        for row in rows
    ]


def _write_rows(path: pathlib.Path, rows: list[Row]) -> None:
    """Replaces a file at once, so that it is always complete."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", newline="") as file:
        if rows:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    os.replace(partial, path)


class Plateau(keras.callbacks.ReduceLROnPlateau):
    """Lowers the learning rate when the validation accuracy stops improving.

    It is lowered after `patience + 1` epochs in a row that were not better by
    1e-4 than the best one before, as in PyTorch. Its state is rebuilt from the
    log, so that a resumed run continues as if it had not stopped.

    Args:
        log: The run's log, which comes before in the list of callbacks.
        learning_rate: Rate at the start of the run.
        patience: Epochs that may pass without a better one.
        factor: The factor by which the rate is multiplied.
    """

    def __init__(
        self, log: EpochLog, learning_rate: float, patience: int, factor: float
    ) -> None:
        super().__init__(
            monitor="val_accuracy",
            factor=factor,
            patience=patience + 1,  # Keras counts the epoch that lowers it
            mode="max",
            min_delta=1e-4,
        )
        self.log = log
        self.learning_rate = learning_rate

    def on_train_begin(self, logs: Any = None) -> None:
        """Replays the completed epochs of the log."""
        super().on_train_begin(logs)
        self.model.optimizer.learning_rate = self.learning_rate
        for row in self.log.rows:
            self.on_epoch_end(int(row["epoch"]) - 1, dict(row))


class Checkpoints(keras.callbacks.Callback):
    """Saves the model of the last and of the best validation epoch.

    Args:
        directory: Folder for `last.keras` and `best.keras`.
        log: The run's log, which comes before in the list of callbacks and
            says which epoch is the best. Without validation metrics no
            `best.keras` is written.
    """

    def __init__(self, directory: pathlib.Path, log: EpochLog) -> None:
        super().__init__()
        self.directory = directory
        self.log = log

    def on_train_begin(self, logs: Any = None) -> None:
        """Writes again what a kill may have prevented."""
        self._save()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Writes what this epoch changed."""
        self._save()

    def _save(self) -> None:
        if not self.log.rows:
            return
        self._write("last.keras")
        if self.log.best is self.log.rows[-1]:
            self._write("best.keras")

    def _write(self, name: str) -> None:
        partial = self.directory / f"partial.{name}"
        self.model.save(partial)
        os.replace(partial, self.directory / name)
