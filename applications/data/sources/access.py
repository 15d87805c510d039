"""Datasets by name: which source each comes from."""

import os
from pathlib import Path
from typing import Protocol

from keras_equiattn import _checks
from keras_equiattn.applications.data.sources import digits
from keras_equiattn.applications.data.sources import folders
from keras_equiattn.applications.data.sources import npz
from keras_equiattn.applications.data.sources import rot_mnist
from keras_equiattn.applications.data.sources import tfds
from keras_equiattn.applications.data.sources.catalogue import Arrays
from keras_equiattn.applications.data.sources.catalogue import DatasetInfo
from keras_equiattn.applications.data.sources.catalogue import INFOS


class Source(Protocol):
    """The methods that every source of datasets by name has."""

    def prepare(self, name: str, data_dir: Path) -> str:
        """Puts a dataset on disk, and says where it is."""

    def state(self, name: str, data_dir: Path) -> str:
        """Says in a few words whether a dataset is on disk."""


class ArraySource(Source, Protocol):
    """A source that reads its datasets into memory."""

    def read(self, name: str, data_dir: Path, part: str) -> Arrays:
        """Returns the images and labels of a part of a dataset."""


# All other datasets come from tensorflow_datasets, or are folders of images.
_ARRAYS: dict[str, ArraySource] = {
    "digits": digits,
    "digits_upright": digits,
    "rot_mnist": rot_mnist,
}


def resolve(name: str | os.PathLike[str]) -> DatasetInfo | Path:
    """Returns the facts about a dataset, or the path if the name is one.

    A name that no dataset has is the path of an .npz file or of a folder of
    images if it ends in .npz, is a folder, or has more than one part.

    Raises:
        ValueError: There is no such dataset.
    """
    if not isinstance(name, str | os.PathLike):
        raise ValueError(
            "`name` must be a dataset's name or the path of an .npz file or "
            f"of a folder of images. Received: {name!r}"
        )
    text = os.fspath(name)
    path = Path(text).expanduser()
    if text not in INFOS and (
        path.suffix == ".npz" or len(path.parts) > 1 or path.is_dir()
    ):
        return path.absolute()
    also = ", or the path of an .npz file or of a folder of images"
    return INFOS[_checks.known_name(text, "dataset", INFOS, also)]


def prepare(name: str, data_dir: Path) -> str:
    """Puts a dataset on disk and builds its caches.

    Args:
        name: Name of the dataset.
        data_dir: Folder that receives it.

    Returns:
        A sentence for the user.
    """
    return _source(name).prepare(name, data_dir)


def state(name: str, data_dir: Path) -> str:
    """Says in a few words whether a dataset is on disk."""
    return _source(name).state(name, data_dir)


def read_arrays(
    source: DatasetInfo | Path, data_dir: Path, part: str
) -> Arrays:
    """Reads one part of a dataset that is not a folder of images.

    Args:
        source: The result of `resolve`.
        data_dir: Folder of the prepared datasets. The embedded digits and .npz
            files do not use it.
        part: `"train"` (the whole training pool), `"validation"` (of a
            dataset that has its own) or `"test"`.

    Returns:
        Read-only images of shape `(n, height, width, channels)` and int32
        labels of shape `(n,)`.

    Raises:
        DatasetNotPreparedError: The data is not on disk.
        ImportError: An optional package is missing.
    """
    if isinstance(source, Path):
        return npz.read(source, part, npz.info(source))
    arrays = _ARRAYS.get(source.name, tfds)
    return arrays.read(source.name, data_dir, part)


def _source(name: str) -> Source:
    if folders.is_folder(INFOS[name]):
        return folders
    return _ARRAYS.get(name, tfds)
