"""Folders with a sub-folder of images for each class."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from keras_equiattn.applications.data.sources.catalogue import DatasetInfo
from keras_equiattn.applications.data.sources.catalogue import (
    DatasetNotPreparedError,
)
from keras_equiattn.applications.data.sources.catalogue import INFOS

# Images are read as squares of the first side, and networks see the second.
READ_SIZE = 256
IMAGE_SIZE = 224
# The folder of each split. The labels of ImageNet's own test images are not
# public, so the validation images are also the test images.
FOLDERS = {"train": "train", "validation": "val", "test": "val"}
ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".png")
LAYOUT = "train/<class>/<image> and val/<class>/<image>, JPEG or PNG"


def prepare(name: str, data_dir: Path) -> str:
    """Checks the folder, which users have to provide."""
    return f"{name} is ready: {image_folder(INFOS[name], data_dir)}"


def state(name: str, data_dir: Path) -> str:
    """Says whether the dataset is on disk."""
    if not (data_dir / name).is_dir():
        return "not prepared"
    try:
        image_folder(INFOS[name], data_dir)
    except DatasetNotPreparedError as error:
        return f"not prepared ({error})"
    return "prepared"


def is_folder(source: DatasetInfo | Path) -> bool:
    """Returns whether a dataset is a folder of images."""
    if isinstance(source, Path):
        return source.suffix != ".npz"
    return source.name == "imagenet_folder"


def image_folder(source: DatasetInfo | Path, data_dir: Path) -> Path:
    """Returns the folder of a dataset after checking its classes.

    Args:
        source: The result of `access.resolve`.
        data_dir: Folder of the prepared datasets, unless `source` is a path.

    Raises:
        DatasetNotPreparedError: The folder is missing, or does not have the
            expected classes.
    """
    if isinstance(source, Path):
        folder_classes(source)
        return source
    folder = data_dir / source.name
    found = len(folder_classes(folder))
    if found != source.classes:
        raise DatasetNotPreparedError(
            f"{folder} must hold the {source.classes} classes of ImageNet. "
            f"Found: {found}. Give the path of a folder in place of "
            f"{source.name!r} for other classes."
        )
    return folder


def folder_classes(folder: Path) -> list[str]:
    """Returns the names of the classes, in alphabetical order.

    Raises:
        DatasetNotPreparedError: The folder has no `train` or no `val`, or these
            do not have the same classes.
    """
    found = {}
    for part in ("train", "val"):
        if not (folder / part).is_dir():
            raise DatasetNotPreparedError(
                f"{folder / part} does not exist. {folder} must hold {LAYOUT}: "
                "put the images there, nothing downloads them."
            )
        found[part] = {
            path.name
            for path in (folder / part).iterdir()
            if path.is_dir() and not path.name.startswith(".")
        }
    if found["train"] != found["val"] or not found["train"]:
        first, count = {}, {}
        for part, other in (("train", "val"), ("val", "train")):
            alone = sorted(found[part] - found[other])
            first[part] = ", ".join(alone[:3]) or "none"
            count[part] = len(alone)
        raise DatasetNotPreparedError(
            f"{folder} must hold {LAYOUT}, with the same classes in both. "
            + "; ".join(
                f"only in {part}: {count[part]} ({first[part]})"
                for part in found
            )
        )
    return sorted(found["train"])


def folder_info(folder: Path) -> DatasetInfo:
    """Returns the facts about a folder: ImageNet's, with its own classes."""
    return replace(
        INFOS["imagenet_folder"],
        name=folder.name,
        classes=len(folder_classes(folder)),
    )


def image_files(folder: Path) -> tuple[NDArray[np.bytes_], NDArray[np.int32]]:
    """Returns the path of each image in the folders of classes, and its label.

    Classes come in alphabetical order, and so do the images of each.

    Raises:
        DatasetNotPreparedError: There are no images.
    """
    classes = sorted(
        path
        for path in folder.iterdir()
        if path.is_dir() and not path.name.startswith(".")
    )
    paths: list[bytes] = []
    labels: list[int] = []
    for label, path in enumerate(classes):
        found = sorted(
            os.fsencode(os.path.join(root, name))
            for root, _, names in os.walk(path, followlinks=True)
            for name in names
            if name.lower().endswith(ENDINGS)
        )
        paths += found
        labels += len(found) * [label]
    if not paths:
        raise DatasetNotPreparedError(
            f"{folder} must hold images in its class folders, whose names end "
            f"in one of {', '.join(ENDINGS)}"
        )
    return np.array(paths), np.array(labels, "int32")
