"""Datasets that tensorflow_datasets has prepared on disk."""

import functools
from pathlib import Path
from typing import Any

from keras_equiattn.applications.data.sources.catalogue import Arrays
from keras_equiattn.applications.data.sources.catalogue import not_prepared
from keras_equiattn.applications.data.sources.optional import import_tensorflow
from keras_equiattn.applications.data.sources.optional import optional_import
from keras_equiattn.applications.data.sources.pixels import read_only

# The names of our datasets in tensorflow_datasets.
NAMES = {
    "rot_mnist": "mnist",
    "cifar10": "cifar10",
    "cifar100": "cifar100",
    "pcam": "patch_camelyon",
}


@functools.lru_cache(maxsize=4)
def read(name: str, data_dir: Path, part: str) -> Arrays:
    """Returns a split of a prepared dataset, which is kept in memory."""
    images, labels = load(name, data_dir, part)
    return read_only(images), read_only(labels)


def prepare(name: str, data_dir: Path) -> str:
    """Downloads and prepares a dataset, unless it is on disk already."""
    if folder(name, data_dir) is None:
        download(name, data_dir)
    return f"{name} is ready: {folder(name, data_dir)}"


def state(name: str, data_dir: Path) -> str:
    """Says whether the dataset is on disk."""
    return "prepared" if folder(name, data_dir) else "not prepared"


def folder(name: str, data_dir: Path) -> Path | None:
    """Returns the folder of the newest prepared version; None without one."""
    versions = []
    for file in (data_dir / NAMES[name]).glob("*/dataset_info.json"):
        numbers = file.parent.name.split(".")
        # A preparation under way has a longer name.
        if all(number.isdecimal() for number in numbers):
            versions.append(([int(number) for number in numbers], file.parent))
    return max(versions)[1] if versions else None


def builder(name: str, data_dir: Path) -> Any:
    """Opens a prepared dataset from its folder, without the network.

    Raises:
        DatasetNotPreparedError: The dataset is not on disk.
        ImportError: TensorFlow or tensorflow_datasets is missing.
    """
    path = folder(name, data_dir)
    if path is None:
        raise not_prepared(name, data_dir)
    import_tensorflow()
    tfds = optional_import("tensorflow_datasets", "datasets")
    return tfds.builder_from_directory(str(path))


def load(name: str, data_dir: Path, part: str) -> Arrays:
    """Reads a whole split of a prepared dataset into memory."""
    opened = builder(name, data_dir)
    tfds = optional_import("tensorflow_datasets", "datasets")
    images, labels = tfds.as_numpy(
        opened.as_dataset(
            split=part, batch_size=-1, shuffle_files=False, as_supervised=True
        )
    )
    return images, labels.astype("int32")


def download(name: str, data_dir: Path) -> None:
    """Downloads and prepares a dataset with tensorflow_datasets.

    Raises:
        ImportError: TensorFlow or tensorflow_datasets is missing.
        RuntimeError: tensorflow_datasets failed, for whatever reason.
    """
    import_tensorflow()
    tfds = optional_import("tensorflow_datasets", "datasets")
    try:
        tfds.builder(NAMES[name], data_dir=str(data_dir)).download_and_prepare()
    except Exception as error:
        # The command line prints any of these errors in one line.
        raise RuntimeError(
            f"tensorflow_datasets could not prepare {NAMES[name]!r} in "
            f"{data_dir}: {error}"
        ) from error
