"""What `examples/train.py` trains with: options, their checks, the set-up."""

import contextlib
import dataclasses
import importlib
import json
import math
import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any
from typing import Literal
from typing import TypeAlias

import keras
import numpy as np

from keras_equiattn import _checks
from keras_equiattn import applications
from keras_equiattn import groups
from keras_equiattn import testing
from keras_equiattn.applications import _sources
from keras_equiattn.applications import datasets
from keras_equiattn.applications import recipes
from keras_equiattn.applications import reporting

# Metrics on a split; None for those that are not finite.
Summary: TypeAlias = dict[str, float | None]

DTYPE_POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")
IMAGENET_NORMALIZATION = _sources.IMAGENET_NORMALIZATION

# What makes a run, beside its recipe; a resumed run has the same.
_FIXED = ("model", "seed", "train_on_all", "dtype_policy", "weights")


class OptionsError(ValueError):
    """An option that cannot be, told before any data is loaded."""


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """Trains a network; what is left out is taken from its recipe.

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
        milestones: Completed epochs at which the learning rate drops, to a
            tenth unless the recipe says otherwise. In place of a plateau or
            a cosine.
        plateau_patience: Epochs that may pass without a better validation
            accuracy before the learning rate drops, to half unless the recipe
            says otherwise. In place of milestones; refused where the recipe
            has a warm-up or a cosine.
        padding: Zero padding for random crops, 0 for none.
        flip: Whether images are mirrored at random.
        resized_crop: Whether images are random crops of several sizes; of a
            folder of images, in place of padding.
        label_smoothing: How much of the target the other classes share.
        validation_size: Training examples that are held out.
        seed: Seed of the initial weights, the order of the data and dropout.
        train_on_all: Train on the validation examples too. There are no
            validation metrics and no best epoch then.
        test: Evaluate on the test set at the end. Choices between settings
            are made without.
        evaluation_size: Validate and test on the first so many examples
            alone, a multiple of the batch size, where all take too long.
        log_steps: Also log the mean of every so many steps, in `steps.csv`,
            and draw it.
        dtype_policy: Keras' dtype policy.
        weights: Weights to start from, as the network takes them.
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
    milestones: tuple[int, ...] | None = None
    plateau_patience: int | None = None
    padding: int | None = None
    flip: bool | None = None
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
    resume: bool = False
    verbose: Literal[0, 1, 2] = 1

    def as_dict(self) -> dict[str, Any]:
        """The options as JSON holds them; a default `data_dir` is None."""
        options = dataclasses.asdict(self)
        for name, value in options.items():
            if isinstance(value, pathlib.PurePath):
                options[name] = os.fspath(value)
        default = _sources.resolve_data_dir(None)
        if _sources.resolve_data_dir(self.data_dir) == default:
            options["data_dir"] = None
        return options


def resolve(options: TrainOptions) -> recipes.Recipe:
    """Checks the options and fills them in: the protocol of this run.

    Raises:
        OptionsError: If an option cannot be; no data is loaded before.
    """
    given: dict[str, Any] = {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(recipes.Recipe)
        if getattr(options, field.name, None) is not None
    }
    try:
        _checks.known_name(options.model, "model", applications.list_models())
        _checks.choice(options.dtype_policy, "dtype_policy", DTYPE_POLICIES)
        _checks.choice(options.verbose, "verbose", (0, 1, 2))
        if _checks.integer(options.seed, "seed", 0) >= 2**32:
            raise ValueError(
                f"`seed` must be less than 2**32. Received: {options.seed}"
            )
        recipe = recipes.get_recipe(options.model)
        if options.dataset not in (None, recipe.dataset):
            # The number held out of the recipe's dataset says nothing here.
            given.setdefault("validation_size", None)
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


def _check_evaluation_size(
    options: TrainOptions, recipe: recipes.Recipe
) -> None:
    if options.evaluation_size is None:
        return
    size = _checks.integer(options.evaluation_size, "evaluation_size")
    if size % recipe.batch_size:
        raise ValueError(
            "`evaluation_size` must be a multiple of the batch size, "
            f"{recipe.batch_size}. Received: {size}"
        )


def evaluation_steps(
    options: TrainOptions, recipe: recipes.Recipe, data: Any
) -> int | None:
    """How many batches of a split are evaluated; None for all."""
    if options.evaluation_size is None or data is None:
        return None
    return min(options.evaluation_size // recipe.batch_size, len(data))


def check_out(options: TrainOptions, recipe: recipes.Recipe) -> None:
    """Checks that the folder of the run is free, or to be resumed.

    Raises:
        OptionsError: If the folder holds a run already, or one with other
            options than those of the run to resume.
    """
    path = options.out / "options.json"
    try:
        if options.out.exists() and not options.out.is_dir():
            raise OptionsError(f"{options.out} is no folder.")
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
        # A run of an earlier version had the defaults of what came later.
        started = _recipe_defaults() | dict(json.loads(text))
    except (TypeError, ValueError):
        raise OptionsError(
            f"{path} is damaged: the run cannot be resumed. Choose another "
            "--out, or remove the folder."
        ) from None
    for name, value in _identity(options, recipe).items():
        if started.get(name) != value:
            raise OptionsError(
                f"The run in {options.out} was started with "
                f"{name}={started.get(name)!r}, not with {name}={value!r}."
            )


@contextlib.contextmanager
def claimed_out(options: TrainOptions) -> Iterator[None]:
    """Makes the folder of the run and sees whether it can be written to.

    What it made and is still empty goes away again if the block fails.

    Raises:
        OptionsError: If there can be no such folder, or nothing in it.
    """
    made: list[pathlib.Path] = []
    try:
        try:
            folders = (options.out, *options.out.parents)
            made = [folder for folder in folders if not folder.exists()]
            options.out.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=options.out):
                pass
        except OSError as error:
            raise OptionsError(f"--out cannot be used: {error}") from None
        yield
    except BaseException:
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def open_out(options: TrainOptions, recipe: recipes.Recipe) -> None:
    """Writes down in the folder of the run what it is."""
    write_json(options.out / "options.json", _identity(options, recipe))


def _identity(options: TrainOptions, recipe: recipes.Recipe) -> dict[str, Any]:
    """What must be the same when a run is resumed, as JSON gives it back."""
    own = {name: getattr(options, name) for name in _FIXED}
    protocol = dataclasses.asdict(recipe)
    del protocol["source"]
    identity = {**own, **protocol, "backend": keras.backend.backend()}
    return json.loads(json.dumps(identity))


def _recipe_defaults() -> dict[str, Any]:
    return {
        field.name: field.default
        for field in dataclasses.fields(recipes.Recipe)
        if field.default is not dataclasses.MISSING
    }


def write_json(path: pathlib.Path, content: Any) -> None:
    """Writes a JSON file that is complete at any time."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
    os.replace(partial, path)


@dataclasses.dataclass(frozen=True)
class Data:
    """The splits of a run, as `fit` and `evaluate` take them."""

    info: datasets.DatasetInfo
    train: Any
    validation: Any
    test: Any
    pipeline: Literal["tf.data", "PyDataset"]

    def images(self, count: int) -> np.ndarray:
        """The first images of a split that is not shuffled, if there is one."""
        split = next(
            data
            for data in (self.test, self.validation, self.train)
            if data is not None
        )
        if self.pipeline == "PyDataset":
            images = split[0][0]
        else:
            images = next(iter(split))[0]
        return np.asarray(images)[:count]


def load_data(
    options: TrainOptions, recipe: recipes.Recipe, initial_epoch: int
) -> Data:
    """Opens the splits: by `tf.data`, or as PyDatasets for .npz files.

    Without TensorFlow the PyDatasets serve the datasets by name too.

    Raises:
        OptionsError: If the dataset is not prepared, has too few examples, or
            needs a package that is not installed.
    """
    named = not recipe.dataset.endswith(".npz")
    with_tensorflow = named and _has_tensorflow()
    load = datasets.load if with_tensorflow else datasets.load_pydataset
    augment = None
    if recipe.padding or recipe.flip or recipe.resized_crop:
        augment = datasets.Augmentation(
            recipe.padding, recipe.flip, recipe.resized_crop
        )

    def split(name: str, **kwargs: Any) -> Any:
        return load(
            recipe.dataset,
            name,
            recipe.batch_size,
            seed=options.seed,
            data_dir=options.data_dir,
            validation_size=recipe.validation_size,
            **kwargs,
        )

    train = "train+validation" if options.train_on_all else "train"
    try:
        return Data(
            datasets.info(recipe.dataset),
            split(train, augment=augment, initial_epoch=initial_epoch),
            None if options.train_on_all else split("validation"),
            split("test") if options.test else None,
            "tf.data" if with_tensorflow else "PyDataset",
        )
    except (FileNotFoundError, ImportError, ValueError) as error:
        raise OptionsError(str(error)) from None


def _has_tensorflow() -> bool:
    try:
        importlib.import_module("tensorflow")
    except ImportError:
        return False
    return True


def build_model(options: TrainOptions, recipe: recipes.Recipe) -> keras.Model:
    """The network for the dataset, its seed set before.

    Raises:
        OptionsError: If the network cannot take the dataset or the weights.
    """
    keras.config.set_dtype_policy(options.dtype_policy)
    keras.utils.set_random_seed(options.seed)
    try:
        info = datasets.info(recipe.dataset)
        overrides: dict[str, Any] = {}
        if recipe.normalization == "dataset":
            overrides["normalization"] = info.normalization
        elif recipe.normalization == "imagenet":
            overrides["normalization"] = IMAGENET_NORMALIZATION
        if options.weights is not None:
            overrides["weights"] = options.weights
        return applications.get_model(
            options.model,
            input_shape=tuple(info.shape),
            classes=info.classes,
            **overrides,
        )
    except ValueError as error:
        raise OptionsError(str(error)) from None


def compile_model(
    model: keras.Model, recipe: recipes.Recipe, steps_per_epoch: int
) -> None:
    """Compiles with the recipe's optimiser and loss."""
    model.compile(
        optimizer=recipes.make_optimizer(recipe, steps_per_epoch),
        loss=recipes.make_loss(recipe),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
    )


def save_weights(model: keras.Model, path: pathlib.Path) -> None:
    """Saves the weights alone; Keras adds those of an optimiser."""
    bare = type(model).from_config(model.get_config())
    bare.set_weights(model.get_weights())
    bare.save_weights(path)


def equivariance(model: keras.Model, data: Data) -> dict[str, Any]:
    """How much the output depends on the pose of images of the dataset.

    Of the group's elements those are tried that map the pixel grid onto
    itself. A network without symmetry is measured under quarter turns.

    Returns:
        The group, and the largest relative error over its elements: None
        where outputs are not finite.
    """
    group = groups.get(reporting.group_of(model))
    if group.order == 1:
        group = groups.get("p4")
    finite = True

    def outputs(images: Any) -> Any:
        nonlocal finite
        logits = model(images)
        values = keras.ops.convert_to_numpy(logits)
        finite = finite and bool(np.isfinite(values).all())
        return logits

    error = None
    try:
        errors = testing.equivariance_error(
            outputs,
            group,
            data.images(16),
            elements=group.grid_elements.tolist(),
        )
        error = _finite(errors.max())
    except ValueError:
        if finite:
            raise
    return {"group": group.name, "error": error}


def evaluate_test(
    model: keras.Model,
    data: Data,
    options: TrainOptions,
    recipe: recipes.Recipe,
) -> Summary | None:
    """Metrics on the test set; None where it is left alone."""
    if data.test is None:
        return None
    metrics = model.evaluate(
        data.test,
        verbose=options.verbose,
        steps=evaluation_steps(options, recipe, data.test),
        return_dict=True,
    )
    return _summary(metrics["loss"], metrics["accuracy"])


def validation_metrics(row: dict[str, float]) -> Summary | None:
    """Validation metrics of one row of the log; None where it has none."""
    if "val_loss" not in row:
        return None
    return _summary(row["val_loss"], row["val_accuracy"])


def _summary(loss: float, accuracy: float) -> Summary:
    return {
        "loss": _finite(loss),
        "accuracy": _finite(accuracy),
        "error_percent": _finite(round(100 * (1 - float(accuracy)), 4)),
    }


def _finite(value: float) -> float | None:
    """The number, or None, as JSON knows no NaN."""
    return float(value) if math.isfinite(value) else None
