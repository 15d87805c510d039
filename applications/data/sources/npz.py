"""Files in NumPy's .npz format, which need no other package."""

import functools
import json
import os
import tempfile
import zipfile
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keras_equiattn.applications.data.sources.catalogue import Arrays
from keras_equiattn.applications.data.sources.catalogue import COMMAND
from keras_equiattn.applications.data.sources.catalogue import DatasetInfo
from keras_equiattn.applications.data.sources.catalogue import (
    DatasetNotPreparedError,
)
from keras_equiattn.applications.data.sources.pixels import read_only

FORMAT = "keras-equiattn dataset 1"
MOST_CLASSES = 2**20
# Errors of `np.load` and `zipfile` for files that are damaged.
DAMAGED = (
    EOFError,
    NotImplementedError,
    OSError,
    RuntimeError,
    ValueError,
    zipfile.BadZipFile,
    zlib.error,
)


def read(path: Path, part: str, facts: DatasetInfo) -> Arrays:
    """Returns a part of a file, which is kept in memory.

    Args:
        path: The file.
        part: "train", "validation" or "test".
        facts: The facts that the images and labels must agree with.

    Raises:
        ValueError: The part is missing or damaged, or its images or labels are
            not what the facts say.
    """
    return _arrays(path, path.stat().st_mtime_ns, part, facts)


@functools.lru_cache(maxsize=4)
def _arrays(path: Path, changed: int, part: str, facts: DatasetInfo) -> Arrays:
    del changed  # the time tells a rewritten file from the one in the cache
    names = f"{part}_images", f"{part}_labels"
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = [name for name in names if name not in file.files]
            if missing:
                raise ValueError(
                    f"it has no {missing[0]}, but {', '.join(file.files)}"
                )
            images, labels = (file[name] for name in names)
    except DAMAGED as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    _check(path, names, images, labels, facts)
    return read_only(images), read_only(labels.astype("int32"))


def _check(
    path: Path,
    names: tuple[str, str],
    images: NDArray[Any],
    labels: NDArray[Any],
    facts: DatasetInfo,
) -> None:
    """Raises unless images and labels are what a network can be trained on."""
    if images.shape[1:] != tuple(facts.shape) or not len(images):
        raise ValueError(
            f"{names[0]} of {path} must be images of the shape "
            f"{tuple(facts.shape)}. Received: an array of the shape "
            f"{images.shape}"
        )
    if images.dtype not in (np.uint8, np.float32):
        raise ValueError(
            f"{names[0]} of {path} must be uint8 or float32. Received: "
            f"{images.dtype}"
        )
    if images.dtype == np.float32 and not np.isfinite(images).all():
        count = int((~np.isfinite(images)).sum())
        raise ValueError(
            f"{names[0]} of {path} must be finite. Received: {count} values "
            "that are NaN or infinite"
        )
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
        raise ValueError(
            f"{names[1]} of {path} must be {len(images)} integers. Received: "
            f"{labels.dtype} of the shape {labels.shape}"
        )
    least, most = int(labels.min()), int(labels.max())
    if least < 0 or most >= facts.classes:
        raise ValueError(
            f"{names[1]} of {path} must be from 0 to {facts.classes - 1}, for "
            f"its {facts.classes} classes. Received: labels from {least} to "
            f"{most}"
        )


def save(
    path: Path, arrays: dict[str, NDArray[Any]], compress: bool = True
) -> None:
    """Writes arrays to a file, which appears only once it is complete.

    Args:
        path: The file.
        arrays: The arrays by their names in the file.
        compress: Whether the file is compressed.
    """
    handle, temporary = tempfile.mkstemp(".npz", ".partial_", path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            save = np.savez_compressed if compress else np.savez
            save(file, **arrays)  # type: ignore[arg-type]
        # mkstemp's files are private; a dataset need not be.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def info(path: Path) -> DatasetInfo:
    """Returns the facts about a dataset that `export` wrote into a file.

    Raises:
        DatasetNotPreparedError: There is no such file.
        ValueError: The file is not a dataset in this format.
    """
    if not path.is_file():
        raise DatasetNotPreparedError(
            f"{path} does not exist. Write it once with: {COMMAND} export "
            f"NAME {path}"
        )
    try:
        with np.load(path, allow_pickle=False) as file:
            entry = json.loads(str(file["metadata"]))
        if entry.pop("format") != FORMAT:
            raise ValueError("another format")
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in entry.items()
        }
        facts = DatasetInfo(**fields)
        if not 0 < facts.classes <= MOST_CLASSES:
            raise ValueError(f"{facts.classes} classes")
        return facts
    except (*DAMAGED, AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a dataset of this library ({error}). Write one "
            f"with: {COMMAND} export NAME OUT.npz"
        ) from error


def metadata(facts: DatasetInfo) -> NDArray[Any]:
    """Returns the entry `metadata` of a file, which `info` reads."""
    return np.array(json.dumps({"format": FORMAT, **asdict(facts)}))
