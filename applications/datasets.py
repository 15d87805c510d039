"""Datasets of the applications, for every Keras backend.

`load` gives a `tf.data.Dataset` and `load_pydataset` a `keras.utils.PyDataset`
of the same batches, bit for bit: float32 images in [0, 1] (or normalised) and
int32 labels. The order and the augmentation of epoch `e` depend on the seed
and on `e` alone, so that a resumed run sees the batches that it would have
seen; give `fit` an `EpochCounter` to make the two agree on `e`.

`digits` (scikit-learn's real digits, each at four uniform angles) and
`digits_upright` (the same, not rotated) are embedded; their splits share no
digit, but may share writers. The others are prepared once: `rot_mnist` (the
files `mnist_all_rotation_normalized_float_*.amat` of 2007 where the data
directory has them, otherwise the same built from MNIST), `cifar10`,
`cifar100` and `pcam`. All of these export to one .npz file, which trains
without TensorFlow:

    python -m keras_equiattn.applications.datasets list
    python -m keras_equiattn.applications.datasets prepare rot_mnist
    python -m keras_equiattn.applications.datasets export rot_mnist out.npz

`imagenet_folder` is ImageNet in the folder of this name of the data directory:
`train/<class>/*.JPEG` and `val/<class>/*.JPEG`. The path of any such folder is
a dataset too. Only `load` reads it, with TensorFlow. "validation" and "test"
are both its `val`, as ImageNet's own test labels are not public: choosing an
epoch or a setting by the one is choosing by the other. As of `pcam`, the order
of its images also depends on `tf.random.set_seed`.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from typing import TypeAlias

import numpy as np

from keras_equiattn import _checks
from keras_equiattn.applications import _sources
from keras_equiattn.applications._batches import Augmentation
from keras_equiattn.applications._batches import Batches
from keras_equiattn.applications._batches import check_augment
from keras_equiattn.applications._batches import check_normalization
from keras_equiattn.applications._batches import FolderBatches
from keras_equiattn.applications._batches import PerChannel
from keras_equiattn.applications._batches import StreamedBatches
from keras_equiattn.applications._epochs import ArrayDataset
from keras_equiattn.applications._epochs import Clock
from keras_equiattn.applications._epochs import EpochCounter
from keras_equiattn.applications._epochs import iterate
from keras_equiattn.applications._sources import DatasetInfo
from keras_equiattn.applications._sources import DatasetNotPreparedError

__all__ = [
    "ArrayDataset",
    "Augmentation",
    "Batches",
    "DatasetInfo",
    "DatasetNotPreparedError",
    "EpochCounter",
    "export",
    "info",
    "list_datasets",
    "load",
    "load_pydataset",
    "prepare",
]

Name: TypeAlias = str | os.PathLike[str]

SPLITS = ("train", "validation", "test", "train+validation")
TRAINING_SPLITS = ("train", "train+validation")
_ONLY_LOAD = (
    "`name` must not be a folder of images, which only `load` reads, with "
    "TensorFlow. Received: '{}'"
)


def list_datasets() -> list[str]:
    """Returns the names of the datasets."""
    return list(_sources.INFOS)


def info(name: Name) -> DatasetInfo:
    """Returns the facts about a dataset.

    Args:
        name: Name of a dataset, or path of an .npz file that `export` wrote
            or of a folder of images, whose classes are counted.
    """
    source = _sources.resolve(name)
    if not isinstance(source, Path):
        return source
    if _sources.is_folder(source):
        return _sources.folder_info(source)
    return _sources.npz_info(source)


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
) -> Any:
    """Loads a dataset as `tf.data`, for models of any Keras backend.

    Each iteration over the result is one epoch, the next one each time, from
    `initial_epoch` on. An iteration that stops before the last batch does not
    count. Use `EpochCounter` in `fit`.

    Args:
        name: Name of a dataset (see `list_datasets`), or path of an .npz file
            that `export` wrote, or of a folder of images.
        split: `"train"`, `"validation"`, `"test"` or `"train+validation"`, the
            whole training pool. The training splits are shuffled. Of a folder
            of images "validation" and "test" are the same, and there is no
            "train+validation".
        batch_size: Images per batch; the last batch may have fewer.
        augment: None, True for `Augmentation()`, or an `Augmentation`; of the
            training splits only.
        seed: Seed of the order and of the augmentation. The splits do not
            depend on it.
        data_dir: Folder of the prepared datasets; by default the environment's
            `TFDS_DATA_DIR`, else `~/tensorflow_datasets`.
        validation_size: Images cut from the end of the training pool for
            validation; by default the dataset's own.
        normalization: None for images in [0, 1], or `(mean, std)`, such as
            `info(name).normalization`.
        initial_epoch: The epoch with which iterating starts.

    Returns:
        A `tf.data.Dataset` of float32 images, `(b, height, width, channels)`,
        and int32 labels, `(b,)`, with a known number of batches.

    Raises:
        ValueError: An argument has the wrong type or value.
        DatasetNotPreparedError: The data is not on disk.
        ImportError: An optional package is missing.
    """
    tf = _sources.import_tensorflow(
        ", or use load_pydataset, which reads .npz files without it."
    )
    batches = _batches(
        name=name,
        split=split,
        batch_size=batch_size,
        augment=augment,
        seed=seed,
        data_dir=data_dir,
        validation_size=validation_size,
        normalization=normalization,
        initial_epoch=initial_epoch,
        stream=True,
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
    dataset = dataset.prefetch(tf.data.AUTOTUNE)
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
) -> ArrayDataset:
    """Loads a dataset as `keras.utils.PyDataset`: the batches of `load`.

    The embedded digits, .npz files and a rotated MNIST that was built before
    need no TensorFlow; the whole split is held in memory. Folders of images are
    too large for that: `load` reads them.

    Args:
        name: As in `load`, and so are the other arguments.
        split: See `load`.
        batch_size: See `load`.
        augment: See `load`.
        seed: See `load`.
        data_dir: See `load`.
        validation_size: See `load`.
        normalization: See `load`.
        initial_epoch: See `load`.

    Returns:
        A dataset of float32 images, `(b, height, width, channels)`, and int32
        labels, `(b,)`.

    Raises:
        ValueError: An argument has the wrong type or value.
        DatasetNotPreparedError: The data is not on disk.
        ImportError: An optional package is missing.
    """
    batches = _batches(
        name=name,
        split=split,
        batch_size=batch_size,
        augment=augment,
        seed=seed,
        data_dir=data_dir,
        validation_size=validation_size,
        normalization=normalization,
        initial_epoch=initial_epoch,
        stream=False,
    )
    assert isinstance(batches, Batches)
    return ArrayDataset(batches)


def _batches(
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
    stream: bool,
) -> Batches | FolderBatches | StreamedBatches:
    """Checks every argument, then reads one split of a dataset."""
    source = _sources.resolve(name)
    of_images = _sources.is_folder(source)
    if of_images and not stream:
        raise ValueError(_ONLY_LOAD.format(name))
    _checks.choice(split, "split", SPLITS)
    if of_images and split not in _sources.FOLDERS:
        raise ValueError(
            "`split` of a folder of images must be 'train', 'validation' or "
            "'test': what validates is what tests, and is not trained on. "
            f"Received: {split!r}"
        )
    _checks.integer(batch_size, "batch_size")
    augment = check_augment(augment, of_images)
    training = split in TRAINING_SPLITS
    if augment is not None and not training:
        raise ValueError(
            "`augment` must be None except for the training splits. Received: "
            f"augment={augment!r}, split={split!r}"
        )
    _checks.integer(seed, "seed", 0)
    _checks.integer(initial_epoch, "initial_epoch", 0)
    folder = _sources.resolve_data_dir(data_dir)
    facts = info(name)
    check_normalization(normalization, facts.shape[2])
    size = _check_validation_size(validation_size, facts)

    options: dict[str, Any] = {
        "shuffle": training,
        "augment": augment,
        "seed": seed,
        "normalization": normalization,
        "initial_epoch": initial_epoch,
    }
    if of_images:
        images_of = _sources.image_folder(source, folder)
        return FolderBatches(
            images_of / _sources.FOLDERS[split], batch_size, **options
        )
    if facts.validation_size is None:
        parts = split.split("+")
        if stream and _too_large(source, folder, parts):
            return StreamedBatches(
                facts.name, folder, parts, batch_size, **options
            )
        pieces = [_sources.read_arrays(source, folder, part) for part in parts]
        images, labels = pieces[0]
        if len(pieces) > 1:
            images = np.concatenate([piece[0] for piece in pieces])
            labels = np.concatenate([piece[1] for piece in pieces])
    else:
        part = "test" if split == "test" else "train"
        images, labels = _sources.read_arrays(source, folder, part)
        if part == "train" and size >= len(images):
            raise ValueError(
                "`validation_size` must be less than the "
                f"{len(images)} images of the training pool of "
                f"{facts.name!r}. Received: {size}"
            )
        cut = len(images) - size
        if split == "train":
            images, labels = images[:cut], labels[:cut]
        elif split == "validation":
            images, labels = images[cut:], labels[cut:]
    return Batches(images, labels, batch_size, **options)


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
    source = _sources.resolve(name)
    if _sources.is_folder(source):
        raise ValueError(_ONLY_LOAD.format(name))
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
    folder = _sources.resolve_data_dir(data_dir)
    arrays = {"metadata": _sources.npz_metadata(source)}
    parts = ["train", "test"]
    if source.validation_size is None:
        parts.insert(1, "validation")
    for part in parts:
        images, labels = _sources.read_arrays(source, folder, part)
        arrays[f"{part}_images"] = images
        arrays[f"{part}_labels"] = labels
    size = sum(array.nbytes for array in arrays.values())
    # Compressing photographs by the gigabyte costs far more than it saves.
    _sources.save_npz(target, arrays, compress=size < _sources.MEMORY_LIMIT)
    return target


def prepare(name: str, data_dir: str | os.PathLike[str] | None = None) -> str:
    """Downloads a dataset with tensorflow_datasets and builds its cache.

    This is the only function that uses the network. A folder of images is not
    downloaded, but looked at.

    Args:
        name: Name of a dataset.
        data_dir: Folder that receives the data.

    Returns:
        A sentence that says where the data is.

    Raises:
        ValueError: There is no such dataset.
        ImportError: An optional package is missing.
        RuntimeError: The download failed.
        DatasetNotPreparedError: A folder of images is not as it must be.
    """
    source = _sources.resolve(name)
    if isinstance(source, Path):
        raise ValueError(
            f"`name` must be a dataset's name. Received: {str(name)!r}"
        )
    return _sources.prepare(source.name, _sources.resolve_data_dir(data_dir))


def _too_large(
    source: DatasetInfo | Path, data_dir: Path, parts: Sequence[str]
) -> bool:
    """Whether parts of a dataset should be streamed."""
    if isinstance(source, Path):
        return False
    splits = _sources.tfds_builder(source.name, data_dir).info.splits
    count = sum(splits[part].num_examples for part in parts)
    return bool(count * np.prod(source.shape) >= _sources.MEMORY_LIMIT)


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


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments, by default those of the process.

    Returns:
        The exit status: 0, or 1 after an error that it printed.
    """
    parser = argparse.ArgumentParser(
        prog=_sources.COMMAND,
        description="Lists, prepares and exports the datasets.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    helps = {
        "list": "list the datasets and whether they are on disk",
        "prepare": "download a dataset and build its cache",
        "export": "write a dataset into one .npz file",
    }
    for command, text in helps.items():
        sub = commands.add_parser(command, help=text, description=text)
        if command != "list":
            sub.add_argument("name", help="name of the dataset")
        if command == "export":
            sub.add_argument("path", help="the .npz file to write")
            sub.add_argument(
                "--force", action="store_true", help="overwrite the file"
            )
        sub.add_argument(
            "--data-dir",
            help="folder of the prepared datasets (default: TFDS_DATA_DIR, "
            "else ~/tensorflow_datasets)",
        )
    options = parser.parse_args(argv)
    try:
        if options.command == "list":
            folder = _sources.resolve_data_dir(options.data_dir)
            for name, facts in _sources.INFOS.items():
                shape = "x".join(map(str, facts.shape))
                state = _sources.state(name, folder)
                print(f"{name:17}{shape:10}{facts.classes:4} classes  {state}")
        elif options.command == "prepare":
            print(prepare(options.name, options.data_dir))
        else:
            path = export(
                options.name,
                options.path,
                options.data_dir,
                force=options.force,
            )
            print(f"Wrote {path} ({path.stat().st_size / 1e6:.1f} MB).")
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
