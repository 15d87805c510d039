"""The options of a run of `examples/train.py`, and its folder."""

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any
from typing import Literal

import keras

from keras_equiattn import _checks
from keras_equiattn._files import write_json
from keras_equiattn.applications import registry
from keras_equiattn.applications.data import datasets
from keras_equiattn.applications.data.sources.catalogue import resolve_data_dir
from keras_equiattn.applications.training import recipes
from keras_equiattn.applications.training.callbacks import EpochBackup
from keras_equiattn.applications.training.callbacks import EpochLog
from keras_equiattn.applications.training.callbacks import StepLog
from keras_equiattn.applications.training.recipe import Recipe

DTYPE_POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")

# Options that define a run besides its recipe, and are fixed when it resumes.
_FIXED = (
    "model",
    "seed",
    "train_on_all",
    "dtype_policy",
    "weights",
    "batch_statistics",
)


class OptionsError(ValueError):
    """An option that is not accepted, reported before data is loaded."""


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """Trains a network; options that are not given come from its recipe.

    Args:
        model: Name of the network.
        out: Folder of the run.
        dataset: Name of the dataset, or the path of an .npz file or of a
            folder of images.
        data_dir: Folder where the datasets lie.
        epochs: Number of epochs.
        batch_size: Examples per update.
        learning_rate: Learning rate before any milestone.
        weight_decay: Weight decay; coupled, but for AdamW.
        use_kernel_factors: Whether kernels learn with the factors that the
            recipe gives them.
        milestones: Completed epochs at which the learning rate drops, to a
            tenth unless the recipe says otherwise. They replace a plateau or a
            cosine.
        plateau_patience: Epochs that may pass without a better validation
            accuracy before the learning rate drops, to half unless the recipe
            says otherwise. It replaces milestones, and is refused where the
            recipe has a warm-up or a cosine.
        padding: Zero padding for random crops, 0 for none.
        flip: Whether images are mirrored at random.
        turn: Whether images are turned by random multiples of 90 degrees.
        resized_crop: Whether images are random crops of several sizes. This
            needs a folder of images, and a padding of 0.
        label_smoothing: How much of the target the other classes share.
        validation_size: Training examples that are held out.
        seed: Seed of the initial weights, the order of the data and dropout.
        train_on_all: Train on the validation examples too. There are no
            validation metrics and no best epoch then.
        test: Evaluate on the test set at the end. Use `--no-test` while you
            choose between settings.
        evaluation_size: Validate and test on this many examples only, a
            multiple of the batch size, where a whole split takes too long.
        log_steps: Also log means over this many steps, in `steps.csv`, and draw
            them.
        dtype_policy: Keras' dtype policy.
        weights: Weights to start from, as the network takes them.
        distribute: Train on all devices, and with other processes where there
            are any; see `training.distribution`. `batch_size` is that of all.
        batch_statistics: Whether batch normalisation takes the statistics of
            the batch of all devices, or of each device's own part.
        resume: Go on with the run in `out`, or start it where there is none.
        verbose: Keras' progress bar: 1 bar, 2 line per epoch, 0 silent.
    """

    model: str
    out: pathlib.Path
    dataset: str | None = None
    data_dir: pathlib.Path | None = None
    epochs: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    weight_decay: float | None = None
    use_kernel_factors: bool = True
    milestones: tuple[int, ...] | None = None
    plateau_patience: int | None = None
    padding: int | None = None
    flip: bool | None = None
    turn: bool | None = None
    resized_crop: bool | None = None
    label_smoothing: float | None = None
    validation_size: int | None = None
    seed: int = 0
    train_on_all: bool = False
    test: bool = True
    evaluation_size: int | None = None
    log_steps: int | None = None
    dtype_policy: Literal["float32", "mixed_bfloat16", "mixed_float16"] = (
        "float32"
    )
    weights: str | None = None
    distribute: bool = False
    batch_statistics: Literal["synchronized", "per_device"] = "synchronized"
    resume: bool = False
    verbose: Literal[0, 1, 2] = 1

    def as_dict(self) -> dict[str, Any]:
        """The options as JSON holds them; a default `data_dir` is None."""
        options = dataclasses.asdict(self)
        for name, value in options.items():
            if isinstance(value, pathlib.PurePath):
                options[name] = os.fspath(value)
        default = resolve_data_dir(None)
        if resolve_data_dir(self.data_dir) == default:
            options["data_dir"] = None
        return options


def resolve(options: TrainOptions) -> Recipe:
    """Checks the options and fills them in: the protocol of this run.

    Raises:
        OptionsError: If an option is not accepted; no data is loaded before.
    """
    given: dict[str, Any] = {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(Recipe)
        if getattr(options, field.name, None) is not None
    }
    try:
        registry.check_name(options.model)
        _checks.choice(options.dtype_policy, "dtype_policy", DTYPE_POLICIES)
        _checks.choice(options.verbose, "verbose", (0, 1, 2))
        if _checks.integer(options.seed, "seed", 0) >= 2**32:
            raise ValueError(
                f"`seed` must be less than 2**32. Received: {options.seed}"
            )
        recipe = recipes.get_recipe(options.model)
        if options.dataset not in (None, recipe.dataset):
            # The recipe's validation size is meant for its own dataset.
            given.setdefault("validation_size", None)
        if not options.use_kernel_factors:
            given["kernel_factors"] = ()
        if options.milestones is not None:
            given.setdefault("plateau_patience", None)
            given.setdefault("cosine", False)
            given.setdefault("warmup_start", 0.0)
        elif options.plateau_patience is not None:
            given["milestones"] = ()
        recipe = dataclasses.replace(recipe, **given)
        if options.log_steps is not None:
            _checks.integer(options.log_steps, "log_steps")
        _check_evaluation_size(options, recipe)
        if recipe.plateau_patience is not None and options.train_on_all:
            raise ValueError(
                "--train-on-all leaves no validation accuracy to lower the "
                f"learning rate by (plateau_patience={recipe.plateau_patience}"
                "): give --milestones instead."
            )
        datasets.info(recipe.dataset)
    except (datasets.DatasetNotPreparedError, ValueError) as error:
        raise OptionsError(str(error)) from None
    return recipe


def _check_evaluation_size(options: TrainOptions, recipe: Recipe) -> None:
    if options.evaluation_size is None:
        return
    size = _checks.integer(options.evaluation_size, "evaluation_size")
    if size % recipe.batch_size:
        raise ValueError(
            "`evaluation_size` must be a multiple of the batch size, "
            f"{recipe.batch_size}. Received: {size}"
        )


def evaluation_steps(
    options: TrainOptions, batch_size: int, data: Any
) -> int | None:
    """How many batches of a split are evaluated; None for all."""
    if options.evaluation_size is None or data is None:
        return None
    return min(options.evaluation_size // batch_size, len(data))


def check_out(options: TrainOptions, recipe: Recipe) -> None:
    """Checks that the folder is free, or holds the run to resume.

    Raises:
        OptionsError: If the folder holds a run already, or one with other
            options than those of the run to resume.
    """
    path = options.out / "options.json"
    try:
        if not path.exists():
            return
        text = path.read_text()
    except OSError as error:
        raise OptionsError(f"--out cannot be used: {error}") from None
    if not options.resume:
        raise OptionsError(
            f"{options.out} holds a run already: go on with it by --resume, "
            "or choose another --out."
        )
    try:
        # A run of an earlier version had the defaults of later options.
        started = _defaults() | dict(json.loads(text))
    except (TypeError, ValueError):
        raise OptionsError(
            f"{path} is damaged: the run cannot be resumed. Choose another "
            "--out, or remove the folder."
        ) from None
    for name, value in _identity(options, recipe).items():
        before = started.get(name)
        if name == "epochs" and _can_grow(before, value, recipe):
            continue
        if before != value:
            message = (
                f"The run in {options.out} was started with "
                f"{name}={before!r}, not with {name}={value!r}."
            )
            if name == "kernel_factors" and not before:
                message += " Resume it with --no-use-kernel-factors."
            raise OptionsError(message)


def _can_grow(before: Any, epochs: int, recipe: Recipe) -> bool:
    """Whether a run may have more epochs than those it was started with.

    A cosine spreads the learning rate over all epochs: more of them would be
    another run.
    """
    return isinstance(before, int) and epochs > before and not recipe.cosine


def is_complete(options: TrainOptions, recipe: Recipe) -> bool:
    """Whether the run has all its epochs, and was reported.

    A run that gets more epochs is not complete.

    Raises:
        OptionsError: If the results are damaged, or there is no backup from
            which the run could get more epochs.
    """
    path = options.out / "results.json"
    if not path.exists():
        return False
    try:
        epochs = int(json.loads(path.read_text())["epochs"])
    except (KeyError, TypeError, ValueError):
        raise OptionsError(
            f"{path} is damaged. Remove it: --resume writes it again."
        ) from None
    if epochs >= recipe.epochs:
        return True
    if not EpochBackup(options.out / "backup").completed:
        raise OptionsError(
            f"The run in {options.out} is complete after {epochs} epochs, and "
            "has no backup to go on from. Start another one with --weights "
            f"{options.out / 'last.keras'}"
        )
    return False


def completed_epochs(options: TrainOptions, backup: EpochBackup) -> int:
    """The number of epochs after which a run is resumed.

    Prints a line if a damaged backup is skipped.

    Raises:
        OptionsError: If all backups or the log are damaged: starting anew
            would delete what the run has logged.
    """
    completed = backup.completed
    damaged = [epoch for epoch in backup.epochs if epoch > completed]
    if damaged and not completed:
        raise OptionsError(
            f"All backups in {backup.directory} are damaged, and the run "
            "cannot go on. Start another one in a new folder, with --weights "
            f"{options.out / 'last.keras'}"
        )
    if damaged:
        print(f"The backup of epoch {damaged[0]} is damaged.")
    path = options.out / "log.csv"
    try:
        EpochLog(path, completed)
        if options.log_steps is not None:
            path = options.out / "steps.csv"
            StepLog(path, options.log_steps, completed)
    except (KeyError, ValueError) as error:
        raise OptionsError(
            f"{path} is damaged, and the run cannot go on ({error}). Start "
            "another one in a new folder, with --weights "
            f"{options.out / 'last.keras'}"
        ) from None
    return completed


@contextlib.contextmanager
def claimed_out(options: TrainOptions) -> Iterator[None]:
    """Makes the folder of the run, and keeps other runs out of it.

    If the block fails, folders that were made and are still empty are removed.

    Raises:
        OptionsError: If the folder cannot be made, nothing can be written to
            it, or another process trains in it.
    """
    folders = (options.out, *options.out.parents)
    made: list[pathlib.Path] = []
    with contextlib.ExitStack() as stack:
        try:
            if options.out.exists() and not options.out.is_dir():
                raise OptionsError(f"{options.out} is no folder.")
            made = [folder for folder in folders if not folder.exists()]
            options.out.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=options.out):
                pass
            stack.enter_context(_locked(options.out))
        except BlockingIOError:
            raise OptionsError(
                f"Another process trains in {options.out}: wait until it ends, "
                "or choose another --out."
            ) from None
        except OSError as error:
            _remove_empty(made)
            raise OptionsError(f"--out cannot be used: {error}") from None
        try:
            yield
        except BaseException:
            _remove_empty(made)
            raise


def _remove_empty(folders: list[pathlib.Path]) -> None:
    """Removes those of the folders, innermost first, that hold nothing."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[None]:
    """Holds the lock of a folder, at most until the process ends.

    Windows and some network file systems have no such locks; there the folder
    is not locked.

    Raises:
        BlockingIOError: If another process holds it.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            pass
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def folder_of_process(
    options: TrainOptions, index: int, completed: int
) -> Iterator[TrainOptions]:
    """The options with the folder in which a process keeps its files.

    The first process uses the folder of the run. The others use a temporary
    copy of its log and backup, since all processes do the same work: on some
    backends all must take part when one saves a network.

    Raises:
        OptionsError: If another process does not see the folder of the run.
    """
    if index == 0:
        yield options
        return
    with tempfile.TemporaryDirectory() as own:
        out = pathlib.Path(own)
        for name in ("log.csv", "steps.csv") if completed else ():
            with contextlib.suppress(FileNotFoundError):
                shutil.copy(options.out / name, out)
        with contextlib.suppress(FileNotFoundError):
            shutil.copytree(options.out / "backup", out / "backup")
        if EpochBackup(out / "backup").completed != completed:
            raise OptionsError(
                f"Process {index} does not see the {completed} epochs that "
                f"the first process has completed in {options.out}: --out must "
                "be a folder that all processes share."
            )
        yield dataclasses.replace(options, out=out, verbose=0)


def open_out(options: TrainOptions, recipe: Recipe) -> None:
    """Writes the settings of the run to its folder.

    The earlier results of a run that gets more epochs are kept under another
    name.
    """
    path = options.out / "results.json"
    if path.exists():
        epochs = json.loads(path.read_text())["epochs"]
        path.rename(options.out / f"results-{epochs}-epochs.json")
    write_json(options.out / "options.json", _identity(options, recipe))


def _identity(options: TrainOptions, recipe: Recipe) -> dict[str, Any]:
    """The settings that a resumed run must share, as JSON gives them back."""
    own = {name: getattr(options, name) for name in _FIXED}
    protocol = dataclasses.asdict(recipe)
    del protocol["source"]
    identity = {**own, **protocol, "backend": keras.backend.backend()}
    return json.loads(json.dumps(identity))


def _defaults() -> dict[str, Any]:
    """The defaults of recipes and options, as far as they are not None."""
    defaults = {
        field.name: field.default
        for of in (Recipe, TrainOptions)
        for field in dataclasses.fields(of)
        if field.default not in (dataclasses.MISSING, None)
    }
    return json.loads(json.dumps(defaults))
