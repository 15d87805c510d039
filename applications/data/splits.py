"""Opens one split of a dataset, after all arguments are checked."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from typing import TypeAlias

import numpy as np

from keras_equiattn import _checks
from keras_equiattn.applications.data.augmentation import Augmentation
from keras_equiattn.applications.data.augmentation import check_augment
from keras_equiattn.applications.data.batches import Batches
from keras_equiattn.applications.data.epochs import Epochs
from keras_equiattn.applications.data.epochs import Shard
from keras_equiattn.applications.data.images import FolderBatches
from keras_equiattn.applications.data.images import Reader
from keras_equiattn.applications.data.normalization import check_normalization
from keras_equiattn.applications.data.normalization import PerChannel
from keras_equiattn.applications.data.sources import access
from keras_equiattn.applications.data.sources import folders
from keras_equiattn.applications.data.sources import npz
from keras_equiattn.applications.data.sources import tfds
from keras_equiattn.applications.data.sources.catalogue import Arrays
from keras_equiattn.applications.data.sources.catalogue import DatasetInfo
from keras_equiattn.applications.data.sources.catalogue import resolve_data_dir
from keras_equiattn.applications.data.streams import StreamedBatches

Name: TypeAlias = str | os.PathLike[str]

SPLITS = ("train", "validation", "test", "train+validation")
TRAINING_SPLITS = ("train", "train+validation")
# Larger datasets, in bytes, are streamed from disk, not held in memory.
MEMORY_LIMIT = 2 * 10**9


def info(name: Name) -> DatasetInfo:
    """Returns the facts about a dataset.

    Args:
        name: Name of a dataset, or path of an .npz file that `export` wrote
            or of a folder of images, whose classes are counted.

    Raises:
        ValueError: There is no such dataset.
        DatasetNotPreparedError: There is no such file or folder.
    """
    source = access.resolve(name)
    if not isinstance(source, Path):
        return source
    if folders.is_folder(source):
        return folders.folder_info(source)
    return npz.info(source)


def open_split(
    *,
    name: Name,
    split: str,
    batch_size: int,
    augment: bool | Augmentation | None,
    seed: int,
    data_dir: str | os.PathLike[str] | None,
    validation_size: int | None,
    normalization: tuple[PerChannel, PerChannel] | None,
    initial_epoch: int,
    shard: Shard | None,
    reader: Reader,
) -> Epochs:
    """Checks every argument, and then reads one split of a dataset.

    Args:
        name, split, batch_size, augment, seed: See `datasets.load`.
        data_dir, validation_size, normalization: See `datasets.load`.
        initial_epoch, shard: See `datasets.load`.
        reader: The reader of images that stay on disk. Only `"tf.data"` reads
            large datasets of tensorflow_datasets from disk; `"grain"` loads
            them into memory.

    Raises:
        ValueError: An argument has the wrong type or value.
        DatasetNotPreparedError: The data is not on disk.
        ImportError: An optional package is missing.
    """
    source = access.resolve(name)
    of_images = folders.is_folder(source)
    _checks.choice(split, "split", SPLITS)
    if of_images and split not in folders.FOLDERS:
        raise ValueError(
            "`split` of a folder of images must be 'train', 'validation' or "
            "'test': validation images are also the test images, and are not "
            "trained on. "
            f"Received: {split!r}"
        )
    _checks.integer(batch_size, "batch_size")
    facts = info(name)
    augment = check_augment(augment, of_images, facts.shape)
    training = split in TRAINING_SPLITS
    if augment is not None and not training:
        raise ValueError(
            "`augment` must be None, except for the training splits. Received: "
            f"augment={augment!r}, split={split!r}"
        )
    _checks.integer(seed, "seed", 0)
    _checks.integer(initial_epoch, "initial_epoch", 0)
    folder = resolve_data_dir(data_dir)
    check_normalization(normalization, facts.shape[2])
    size = _check_validation_size(validation_size, facts)

    options: dict[str, Any] = {
        "shuffle": training,
        "augment": augment,
        "seed": seed,
        "normalization": normalization,
        "initial_epoch": initial_epoch,
        "shard": shard,
    }
    if of_images:
        images_of = folders.image_folder(source, folder)
        return FolderBatches(
            images_of / folders.FOLDERS[split], batch_size, reader, **options
        )
    if facts.validation_size is not None:
        images, labels = _cut(source, facts.name, folder, split, size)
        return Batches(images, labels, batch_size, **options)
    parts = split.split("+")
    if reader == "tf.data" and _too_large(source, folder, parts):
        return StreamedBatches(facts.name, folder, parts, batch_size, **options)
    pieces = [access.read_arrays(source, folder, part) for part in parts]
    images, labels = pieces[0]
    if len(pieces) > 1:
        images = np.concatenate([piece[0] for piece in pieces])
        labels = np.concatenate([piece[1] for piece in pieces])
    return Batches(images, labels, batch_size, **options)


def _cut(
    source: DatasetInfo | Path, name: str, folder: Path, split: str, size: int
) -> Arrays:
    """Reads a split; the validation split is cut from the training pool."""
    part = "test" if split == "test" else "train"
    images, labels = access.read_arrays(source, folder, part)
    if part == "train" and size >= len(images):
        raise ValueError(
            "`validation_size` must be less than the "
            f"{len(images)} images of the training pool of "
            f"{name!r}. Received: {size}"
        )
    cut = len(images) - size
    if split == "train":
        return images[:cut], labels[:cut]
    if split == "validation":
        return images[cut:], labels[cut:]
    return images, labels


def _too_large(
    source: DatasetInfo | Path, data_dir: Path, parts: Sequence[str]
) -> bool:
    """Returns whether parts of a dataset should be streamed."""
    if isinstance(source, Path):
        return False
    splits = tfds.builder(source.name, data_dir).info.splits
    count = sum(splits[part].num_examples for part in parts)
    return bool(count * np.prod(source.shape) >= MEMORY_LIMIT)


def _check_validation_size(size: int | None, facts: DatasetInfo) -> int:
    """Returns the number of images to cut from the training pool."""
    if facts.validation_size is None:
        if size is not None:
            raise ValueError(
                f"`validation_size` must be None: {facts.name!r} has its own "
                f"validation split. Received: {size!r}"
            )
        return 0
    if size is None:
        return facts.validation_size
    size = _checks.integer(size, "validation_size")
    if size % facts.views:
        raise ValueError(
            f"`validation_size` must be a multiple of {facts.views}: "
            f"{facts.name!r} has {facts.views} images of each source image, "
            f"which belong in one split. Received: {size}"
        )
    return size
