"""The steps of a training run: data, network, training set-up, evaluation."""

import contextlib
import dataclasses
import importlib
import itertools
import math
from collections.abc import Iterator
from typing import Any
from typing import Literal
from typing import TypeAlias

import keras
import numpy as np
from keras import ops

from keras_equiattn import groups
from keras_equiattn import testing
from keras_equiattn.applications import registry
from keras_equiattn.applications.data import datasets
from keras_equiattn.applications.data.sources.catalogue import (
    IMAGENET_NORMALIZATION,
)
from keras_equiattn.applications.training import reporting
from keras_equiattn.applications.training.options import evaluation_steps
from keras_equiattn.applications.training.options import OptionsError
from keras_equiattn.applications.training.options import TrainOptions
from keras_equiattn.applications.training.recipe import make_loss
from keras_equiattn.applications.training.recipe import make_optimizer
from keras_equiattn.applications.training.recipe import Recipe
from keras_equiattn.ops.group.action import group_action

# Metrics on a split; None for those that are not finite.
Summary: TypeAlias = dict[str, float | None]


@dataclasses.dataclass(frozen=True)
class Data:
    """The splits of a run, as `fit` and `evaluate` take them.

    One device tests the network, in batches of `test_batch_size`; the other
    splits may be divided among several devices.
    """

    info: datasets.DatasetInfo
    train: Any
    validation: Any
    test: Any
    pipeline: Literal["tf.data", "PyDataset"]
    test_batch_size: int

    def images(self, count: int) -> np.ndarray:
        """The first images of a split that is not shuffled, if there is one."""
        split = next(
            data
            for data in (self.test, self.validation, self.train)
            if data is not None
        )
        images = next(iter(split))[0]
        return np.asarray(images)[:count]

    @contextlib.contextmanager
    def own_errors(self) -> Iterator[None]:
        """Raises original errors of files in place of the errors of tf.data."""
        try:
            yield
        except OSError:
            raise
        except Exception as error:
            for split in (self.train, self.validation, self.test):
                failed = getattr(getattr(split, "clock", None), "failed", None)
                if failed is not None:
                    raise failed from error
            raise


def load_data(
    options: TrainOptions,
    recipe: Recipe,
    initial_epoch: int,
    shard: datasets.Shard | None = None,
) -> Data:
    """Opens the splits: by `tf.data`, or as PyDatasets for .npz files.

    Where TensorFlow is not installed, all datasets are PyDatasets; if
    TensorFlow trains on several devices, all are `tf.data`. The network is
    trained and validated on the shard, and tested on the whole test set.

    Raises:
        OptionsError: If the dataset is not prepared, has too few examples, or
            needs a package that is not installed.
    """
    named = not recipe.dataset.endswith(".npz")
    on_tensorflow = keras.backend.backend() == "tensorflow"
    if shard is not None and on_tensorflow:
        with_tensorflow = True
    else:
        with_tensorflow = named and _has_tensorflow()
    load = datasets.load if with_tensorflow else datasets.load_pydataset
    augment = None
    if recipe.padding or recipe.flip or recipe.resized_crop or recipe.turn:
        augment = datasets.Augmentation(
            recipe.padding, recipe.flip, recipe.resized_crop, recipe.turn
        )

    devices = 1 if shard is None else shard.all_devices
    test_batch_size = max(recipe.batch_size // devices, 1)

    def split(name: str, **kwargs: Any) -> Any:
        return load(
            recipe.dataset,
            name,
            test_batch_size if name == "test" else recipe.batch_size,
            seed=options.seed,
            data_dir=options.data_dir,
            validation_size=recipe.validation_size,
            **kwargs,
        )

    train = "train+validation" if options.train_on_all else "train"
    try:
        return Data(
            datasets.info(recipe.dataset),
            split(
                train,
                augment=augment,
                initial_epoch=initial_epoch,
                shard=shard,
            ),
            None if options.train_on_all else split("validation", shard=shard),
            split("test") if options.test else None,
            "tf.data" if with_tensorflow else "PyDataset",
            test_batch_size,
        )
    except (FileNotFoundError, ImportError, ValueError) as error:
        raise OptionsError(str(error)) from None


def _has_tensorflow() -> bool:
    try:
        importlib.import_module("tensorflow")
    except ImportError:
        return False
    return True


def build_model(options: TrainOptions, recipe: Recipe) -> keras.Model:
    """Sets the seed, and builds the network for the dataset.

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
        return registry.get_model(
            options.model,
            input_shape=tuple(info.shape),
            classes=info.classes,
            **overrides,
        )
    except ValueError as error:
        raise OptionsError(str(error)) from None


def compile_model(
    model: keras.Model, recipe: Recipe, steps_per_epoch: int
) -> None:
    """Compiles with the recipe's optimiser and loss."""
    model.compile(
        optimizer=make_optimizer(recipe, steps_per_epoch),
        loss=make_loss(recipe),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
    )


def _group_of_poses(model: keras.Model) -> groups.Group:
    """The group of a network; quarter turns for one without symmetry."""
    group = groups.get(reporting.group_of(model))
    return groups.get("p4") if group.order == 1 else group


def equivariance(model: keras.Model, data: Data) -> dict[str, Any]:
    """How much the output depends on the pose of images of the dataset.

    All elements of the group that map the pixel grid onto itself are tried. A
    network without symmetry is measured under quarter turns.

    Returns:
        The group, and the largest relative error over its elements: None
        where outputs are not finite.
    """
    group = _group_of_poses(model)
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
) -> Summary | None:
    """Metrics on the test set; None if it is not used."""
    if data.test is None:
        return None
    steps = evaluation_steps(options, data.test_batch_size, data.test)
    metrics = model.evaluate(
        data.test, verbose=options.verbose, steps=steps, return_dict=True
    )
    summary = _summary(metrics["loss"], metrics["accuracy"])
    if data.info.classes == 2:
        summary["auc"] = _auc(model, _batches(data.test, steps))
    return summary


def accuracy_of_poses(
    model: keras.Model, data: Data, count: int = 2000
) -> dict[str, Any] | None:
    """The accuracy on the first test images, in every pose.

    Poses are those of the network's group that map the pixel grid onto itself.
    A network without symmetry is tested in quarter turns.

    Args:
        model: the network.
        data: the splits.
        count: the number of images, at most; whole batches are taken.

    Returns:
        The group, the number of images, and an accuracy for each of
        `group.grid_elements`; None if the test set is not used, or images are
        not square.
    """
    height, width, _ = data.info.shape
    if data.test is None or height != width:
        return None
    group = _group_of_poses(model)
    right = np.zeros(len(group.grid_elements))
    seen = 0
    for images, labels in _batches(data.test):
        for n, element in enumerate(group.grid_elements):
            turned = group_action(images, group, element)
            scores = model.predict_on_batch(turned)
            right[n] += (np.argmax(scores, axis=-1) == labels).sum()
        seen += len(labels)
        if seen >= count:
            break
    return {
        "group": group.name,
        "elements": group.grid_elements.tolist(),
        "images": seen,
        "accuracy": (right / seen).tolist(),
    }


def _batches(split: Any, steps: int | None = None) -> Iterator[Any]:
    """Images as tensors and labels as arrays, once through a split."""
    for images, labels in itertools.islice(split, steps):
        images = np.asarray(images)
        yield ops.convert_to_tensor(images), np.asarray(labels)


def _auc(model: keras.Model, batches: Iterator[Any]) -> float | None:
    """The area under the ROC curve of two classes; None if it is undefined."""
    from sklearn.metrics import roc_auc_score

    margins, labels = [], []
    for images, of_images in batches:
        scores = model.predict_on_batch(images)
        margins.append(scores[:, 1] - scores[:, 0])
        labels.append(of_images)
    margin, label = np.concatenate(margins), np.concatenate(labels)
    if not np.isfinite(margin).all() or len(np.unique(label)) < 2:
        return None
    return float(roc_auc_score(label, margin))


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
