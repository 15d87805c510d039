"""Files in NumPy's .npz format, which need no other package."""

import functools
import json
import os
import tempfile
import zipfile
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


def read(path: Path, part: str) -> Arrays:
    """Returns a part of a file, which is kept in memory.

    Args:
        path: The file.
        part: "train", "validation" or "test".
    """
    return _arrays(path, path.stat().st_mtime_ns, part)


@functools.lru_cache(maxsize=4)
def _arrays(path: Path, changed: int, part: str) -> Arrays:
    del changed  # the time tells a rewritten file from the one in the cache
    with np.load(path, allow_pickle=False) as file:
        return (
            read_only(file[f"{part}_images"]),
            read_only(file[f"{part}_labels"].astype("int32")),
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
        ValueError: The file is something else.
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
        return DatasetInfo(**fields)
    except (
        AttributeError,
        EOFError,
        KeyError,
        TypeError,
        ValueError,
        zipfile.BadZipFile,
    ) as error:
        raise ValueError(
            f"{path} is not a dataset of this library. Write one with: "
            f"{COMMAND} export NAME OUT.npz"
        ) from error


def metadata(facts: DatasetInfo) -> NDArray[Any]:
    """Returns the entry `metadata` of a file, which `info` reads."""
    return np.array(json.dumps({"format": FORMAT, **asdict(facts)}))
