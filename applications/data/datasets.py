"""Datasets by name, for every Keras backend.

`load` returns a `tf.data.Dataset` and `load_pydataset` a
`keras.utils.PyDataset` of the same batches: float32 images in [0, 1] (or
normalised) and int32 labels. They agree bit for bit, with two exceptions:
images that are read from JPEG files may differ by one or two levels of 255, and
`pcam` comes in another order. The order and the augmentation of epoch `e`
depend only on the seed and on `e`, so that a resumed run sees the same batches
as one that was not interrupted. Give `fit` an `EpochCounter`, which tells the
dataset the epoch.

`digits` (scikit-learn's real digits, each at four angles drawn uniformly) and
`digits_upright` (the same, not rotated) come with scikit-learn. Their splits
share no digit, but may share writers. The others are prepared once:
`rot_mnist`, `cifar10`, `cifar100` and `pcam`. Rotated MNIST is read from the
files `mnist_all_rotation_normalized_float_*.amat` of 2007 if the data directory
has them; otherwise it is built from MNIST. All of these can be exported to one
.npz file, which trains without TensorFlow:

    python -m keras_equiattn.applications.data list
    python -m keras_equiattn.applications.data prepare rot_mnist
    python -m keras_equiattn.applications.data export rot_mnist out.npz

`imagenet_folder` is ImageNet in the folder of this name in the data directory,
as `train/<class>/*.JPEG` and `val/<class>/*.JPEG`. The path of any such folder
is a dataset too. `load` reads it with `tf.data`, and `load_pydataset` with
grain; only a few images are in memory. The labels of ImageNet's own test images
are not public, so "validation" and "test" are both `val`: an epoch or a setting
that is chosen on one has been chosen on the other.

`load` also reads `pcam` from disk; there the order of the images also depends
on `tf.random.set_seed`.
"""

import os
from pathlib import Path
from typing import Any

from keras_equiattn.applications.data import splits
from keras_equiattn.applications.data.augmentation import Augmentation
from keras_equiattn.applications.data.batches import ArrayDataset
from keras_equiattn.applications.data.batches import Batches
from keras_equiattn.applications.data.batches import StreamDataset
from keras_equiattn.applications.data.epochs import Clock
from keras_equiattn.applications.data.epochs import EpochCounter
from keras_equiattn.applications.data.epochs import iterate
from keras_equiattn.applications.data.epochs import Shard
from keras_equiattn.applications.data.normalization import PerChannel
from keras_equiattn.applications.data.prefetching import prefetched
from keras_equiattn.applications.data.sources import access
from keras_equiattn.applications.data.sources import folders
from keras_equiattn.applications.data.sources import npz
from keras_equiattn.applications.data.sources.catalogue import DatasetInfo
from keras_equiattn.applications.data.sources.catalogue import (
    DatasetNotPreparedError,
)
from keras_equiattn.applications.data.sources.catalogue import INFOS
from keras_equiattn.applications.data.sources.catalogue import resolve_data_dir
from keras_equiattn.applications.data.sources.optional import import_tensorflow
from keras_equiattn.applications.data.splits import info
from keras_equiattn.applications.data.splits import Name

__all__ = [
    "ArrayDataset",
    "Augmentation",
    "Batches",
    "DatasetInfo",
    "DatasetNotPreparedError",
    "EpochCounter",
    "Shard",
    "StreamDataset",
    "export",
    "info",
    "list_datasets",
    "load",
    "load_pydataset",
    "prepare",
]


def list_datasets() -> list[str]:
    """Returns the names of the datasets."""
    return list(INFOS)


def load(
    name: Name,
    split: str = "train",
    batch_size: int = 128,
    augment: bool | Augmentation | None = None,
    seed: int = 0,
    data_dir: str | os.PathLike[str] | None = None,
    *,
    validation_size: int | None = None,
    normalization: tuple[PerChannel, PerChannel] | None = None,
    initial_epoch: int = 0,
    shard: Shard | None = None,
) -> Any:
    """Loads a dataset as `tf.data`, for models of any Keras backend.

    Each iteration over the result is one epoch, and the next iteration is the
    next epoch; the first is `initial_epoch`. An iteration that stops before the
    last batch does not count. Use `EpochCounter` in `fit`.

    Args:
        name: Name of a dataset (see `list_datasets`), or path of an .npz file
            that `export` wrote, or of a folder of images.
        split: `"train"`, `"validation"`, `"test"` or `"train+validation"`, the
            whole training pool. The training splits are shuffled. A folder of
            images has no "train+validation", and "validation" and "test" are
            the same.
        batch_size: Images per batch; the last batch may have fewer.
        augment: None, True for `Augmentation()`, or an `Augmentation`. Only the
            training splits can be augmented.
        seed: Seed of the order and of the augmentation. The splits do not
            depend on it.
        data_dir: Folder of the prepared datasets. None means the environment
            variable `TFDS_DATA_DIR` where it is set, else
            `~/tensorflow_datasets`.
        validation_size: Images cut from the end of the training pool for
            validation; None takes the dataset's default.
        normalization: None for images in [0, 1], or `(mean, std)`, such as
            `info(name).normalization`.
        initial_epoch: The epoch with which iterating starts.
        shard: The part of every batch that one of several processes reads; None
            for all of it.

    Returns:
        A `tf.data.Dataset` of float32 images, `(b, height, width, channels)`,
        and int32 labels, `(b,)`, with a known number of batches.

    Raises:
        ValueError: An argument has the wrong type or value.
        DatasetNotPreparedError: The data is not on disk.
        ImportError: An optional package is missing.
    """
    tf = import_tensorflow(
        ", or use load_pydataset, which reads .npz files without it."
    )
    batches = splits.open_split(
        name=name,
        split=split,
        batch_size=batch_size,
        augment=augment,
        seed=seed,
        data_dir=data_dir,
        validation_size=validation_size,
        normalization=normalization,
        initial_epoch=initial_epoch,
        shard=shard,
        reader="tf.data",
    )
    clock = Clock(initial_epoch)
    dataset = tf.data.Dataset.from_generator(
        lambda: iterate(batches, clock),
        output_signature=(
            tf.TensorSpec((None, *batches.shape), "float32"),
            tf.TensorSpec((None,), "int32"),
        ),
    )
    dataset = dataset.apply(
        tf.data.experimental.assert_cardinality(len(batches))
    )
    dataset = prefetched(dataset)
    dataset.clock = clock
    return dataset


def load_pydataset(
    name: Name,
    split: str = "train",
    batch_size: int = 128,
    augment: bool | Augmentation | None = None,
    seed: int = 0,
    data_dir: str | os.PathLike[str] | None = None,
    *,
    validation_size: int | None = None,
    normalization: tuple[PerChannel, PerChannel] | None = None,
    initial_epoch: int = 0,
    shard: Shard | None = None,
) -> ArrayDataset | StreamDataset:
    """Loads a dataset as `keras.utils.PyDataset`: the batches of `load`.

    The embedded digits, .npz files and a rotated MNIST that was built before
    need no TensorFlow, and the whole split is held in memory. Folders of images
    need grain, and stay on disk.

    Args:
        name, split, batch_size, augment, seed: See `load`.
        data_dir, validation_size, normalization: See `load`.
        initial_epoch, shard: See `load`.

    Returns:
        A dataset of float32 images, `(b, height, width, channels)`, and int32
        labels, `(b,)`.

    Raises:
        ValueError: An argument has the wrong type or value.
        DatasetNotPreparedError: The data is not on disk.
        ImportError: An optional package is missing.
    """
    batches = splits.open_split(
        name=name,
        split=split,
        batch_size=batch_size,
        augment=augment,
        seed=seed,
        data_dir=data_dir,
        validation_size=validation_size,
        normalization=normalization,
        initial_epoch=initial_epoch,
        shard=shard,
        reader="grain",
    )
    if isinstance(batches, Batches):
        return ArrayDataset(batches)
    return StreamDataset(batches)


def export(
    name: Name,
    path: str | os.PathLike[str],
    data_dir: str | os.PathLike[str] | None = None,
    *,
    force: bool = False,
) -> Path:
    """Writes a dataset into one .npz file, which needs no TensorFlow.

    The file has `train_images` and `train_labels` (the training pool in source
    order), `validation_images` and `validation_labels` when the dataset has
    its own validation split, `test_images`, `test_labels`, and `metadata`, the
    dataset's facts as JSON.

    Args:
        name: Name of a dataset.
        path: The file to write; it must end in `.npz`.
        data_dir: Folder of the prepared datasets.
        force: Whether an existing file is overwritten.

    Returns:
        The absolute path of the file.

    Raises:
        ValueError: An argument has the wrong value.
        FileExistsError: The file exists and `force` is not set.
        FileNotFoundError: The file's folder does not exist.
        DatasetNotPreparedError: The data is not on disk.
    """
    source = access.resolve(name)
    if folders.is_folder(source):
        raise ValueError(
            "`name` must not be a folder of images, which is read as it is. "
            f"Received: '{name}'"
        )
    if isinstance(source, Path):
        raise ValueError(
            f"`name` must be a dataset's name. Received: {str(name)!r}"
        )
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"`path` must be a path. Received: {path!r}")
    target = Path(path).expanduser().absolute()
    if target.suffix != ".npz":
        raise ValueError(f"`path` must end in .npz. Received: {str(path)!r}")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"The folder {target.parent} does not exist.")
    if target.exists() and not force:
        raise FileExistsError(
            f"{target} exists. Overwrite it with --force (force=True)."
        )
    folder = resolve_data_dir(data_dir)
    arrays = {"metadata": npz.metadata(source)}
    parts = ["train", "test"]
    if source.validation_size is None:
        parts.insert(1, "validation")
    for part in parts:
        images, labels = access.read_arrays(source, folder, part)
        arrays[f"{part}_images"] = images
        arrays[f"{part}_labels"] = labels
    size = sum(array.nbytes for array in arrays.values())
    # Compressing photographs by the gigabyte costs far more than it saves.
    npz.save(target, arrays, compress=size < splits.MEMORY_LIMIT)
    return target


def prepare(name: str, data_dir: str | os.PathLike[str] | None = None) -> str:
    """Downloads a dataset with tensorflow_datasets, and builds its cache.

    This is the only function that uses the network. A folder of images is
    checked, not downloaded.

    Args:
        name: Name of a dataset.
        data_dir: Folder that receives the data.

    Returns:
        A sentence that says where the data is.

    Raises:
        ValueError: There is no such dataset.
        ImportError: An optional package is missing.
        RuntimeError: The download failed.
        DatasetNotPreparedError: A folder of images is missing or does not have
            the expected classes.
    """
    source = access.resolve(name)
    if isinstance(source, Path):
        raise ValueError(
            f"`name` must be a dataset's name. Received: {str(name)!r}"
        )
    return access.prepare(source.name, resolve_data_dir(data_dir))
