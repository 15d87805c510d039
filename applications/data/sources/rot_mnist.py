"""Rotated MNIST: the text files of 2007, or the same built from MNIST."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keras_equiattn.applications.data.sources import npz
from keras_equiattn.applications.data.sources import pixels
from keras_equiattn.applications.data.sources import tfds
from keras_equiattn.applications.data.sources.catalogue import Arrays
from keras_equiattn.applications.data.sources.catalogue import (
    DatasetNotPreparedError,
)
from keras_equiattn.applications.data.sources.catalogue import INFOS
from keras_equiattn.applications.data.sources.catalogue import not_prepared

AMAT_FILES = {
    "train": "mnist_all_rotation_normalized_float_train_valid.amat",
    "test": "mnist_all_rotation_normalized_float_test.amat",
}
SIZES = {"train": 12_000, "test": 50_000}


def read(name: str, data_dir: Path, part: str) -> Arrays:
    """Returns "train", the whole training pool, or "test"."""
    return npz.read(cache(data_dir), part, INFOS["rot_mnist"])


def prepare(name: str, data_dir: Path) -> str:
    """Downloads MNIST where the files of 2007 are missing; builds the cache."""
    if _found(data_dir) == "not prepared":
        tfds.download(name, data_dir)
    return f"{name} is ready: {cache(data_dir)}"


def state(name: str, data_dir: Path) -> str:
    """Says whether the dataset is on disk, and what it is made from."""
    try:
        return _found(data_dir)
    except DatasetNotPreparedError as error:
        return f"not prepared ({error})"


def find_amat(data_dir: Path) -> dict[str, Path] | None:
    """Returns the paths of the two files of 2007; None if there is neither.

    Raises:
        DatasetNotPreparedError: There is only one of them.
    """
    for folder in (
        data_dir,
        data_dir / "rot_mnist",
        data_dir / "mnist_rotation_new",
        data_dir / "rot_mnist" / "mnist_rotation_new",
    ):
        paths = {part: folder / file for part, file in AMAT_FILES.items()}
        missing = [path for path in paths.values() if not path.is_file()]
        if not missing:
            return paths
        if len(missing) < len(paths):
            raise DatasetNotPreparedError(
                f"Rotated MNIST in {folder} is incomplete: {missing[0].name} "
                "is missing. Add it, or remove the other .amat file."
            )
    return None


def read_amat(path: Path, rows: int | None = None) -> Arrays:
    """Reads a rotated MNIST text file.

    Each row holds 784 pixels in [0, 1], column by column, and the label.

    Args:
        path: The `.amat` file.
        rows: Number of rows it must have; None takes any.

    Returns:
        float32 images of shape `(n, 28, 28, 1)` and int32 labels.

    Raises:
        ValueError: The file holds something else.
    """
    table = np.loadtxt(path, dtype="float32", ndmin=2)
    if table.shape[1] != 785 or (rows is not None and len(table) != rows):
        raise ValueError(
            f"{path} must hold {rows or 'n'} rows of 784 pixels and a label. "
            f"Received: an array of shape {table.shape}"
        )
    images, labels = table[:, :-1], table[:, -1]
    if images.min() < 0 or images.max() > 1:
        raise ValueError(f"{path} must hold pixels in [0, 1].")
    if not np.isin(labels, np.arange(10)).all():
        raise ValueError(f"{path} must hold labels in 0..9.")
    upright = images.reshape(-1, 28, 28).transpose(0, 2, 1)
    return np.ascontiguousarray(upright)[..., None], labels.astype("int32")


def build(
    train: Arrays, test: Arrays, sizes: dict[str, int]
) -> dict[str, NDArray[Any]]:
    """Builds rotated MNIST from the upright digits of MNIST.

    The training pool is drawn from MNIST's training digits; the test split is
    every MNIST test digit and other training digits, so that no digit is in
    both.

    Args:
        train: MNIST's training images and labels.
        test: MNIST's test images and labels.
        sizes: Number of images of `"train"` and of `"test"`.

    Returns:
        uint8 images, int32 labels, and the row of each image in MNIST, training
        digits first (`train_source`, `test_source`).
    """
    images = np.concatenate([train[0], test[0]])[..., 0]
    labels = np.concatenate([train[1], test[1]])
    rng = np.random.default_rng(2007)
    order = rng.permutation(len(train[0])).astype("int32")
    extra = sizes["test"] - len(test[0])
    source = {
        "train": order[: sizes["train"]],
        "test": np.concatenate(
            [
                np.arange(len(train[0]), len(images), dtype="int32"),
                order[sizes["train"] : sizes["train"] + extra],
            ]
        ),
    }
    arrays: dict[str, NDArray[Any]] = {}
    for part, rows in source.items():
        upright = images[rows].astype("float32") / 255
        rotated = pixels.rotate(
            upright, rng.uniform(0, 360, len(rows)), "datasets"
        )
        arrays[f"{part}_images"] = pixels.to_uint8(rotated)[..., None]
        arrays[f"{part}_labels"] = labels[rows]
        arrays[f"{part}_source"] = rows
    return arrays


def cache(data_dir: Path) -> Path:
    """Returns the file of the cached arrays, which is written on first use.

    The files of 2007 are preferred, and their cache holds float32 pixels. The
    cache that is built from MNIST holds uint8 pixels.

    Raises:
        DatasetNotPreparedError: There are neither these files nor MNIST.
    """
    folder = data_dir / "rot_mnist"
    original = folder / "rot_mnist_2007.npz"
    built = folder / "rot_mnist_built.npz"
    if original.is_file():
        return original
    amat = find_amat(data_dir)
    arrays: dict[str, NDArray[Any]] = {}
    if amat is not None:
        for part, file in amat.items():
            images, labels = read_amat(file, SIZES[part])
            arrays[f"{part}_images"] = images
            arrays[f"{part}_labels"] = labels
    elif built.is_file():
        return built
    elif tfds.folder("rot_mnist", data_dir) is None:
        raise not_prepared("rot_mnist", data_dir)
    else:
        arrays = build(
            tfds.load("rot_mnist", data_dir, "train"),
            tfds.load("rot_mnist", data_dir, "test"),
            SIZES,
        )
    path = built if amat is None else original
    folder.mkdir(parents=True, exist_ok=True)
    npz.save(path, arrays)
    return path


def _found(data_dir: Path) -> str:
    """Says what `cache` would be made from."""
    folder = data_dir / "rot_mnist"
    if (folder / "rot_mnist_2007.npz").is_file() or find_amat(data_dir):
        return "prepared (files of 2007)"
    if (folder / "rot_mnist_built.npz").is_file():
        return "prepared (built from MNIST)"
    if tfds.folder("rot_mnist", data_dir):
        return "prepared (to be built from MNIST)"
    return "not prepared"
