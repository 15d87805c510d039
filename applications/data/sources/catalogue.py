"""The facts about all datasets, and where they are stored."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Arrays: TypeAlias = tuple[NDArray[Any], NDArray[np.int32]]

COMMAND = "python -m keras_equiattn.applications.data"
# Mean and standard deviation of the pixels of ImageNet in [0, 1], in RGB.
IMAGENET_NORMALIZATION = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class DatasetNotPreparedError(FileNotFoundError):
    """The data is not on disk; the message says how to put it there."""


@dataclass(frozen=True)
class DatasetInfo:
    """Facts about a dataset that a model or a recipe needs.

    Attributes:
        name: Name of the dataset.
        shape: Shape of one image, `(height, width, channels)`.
        classes: Number of classes.
        mean: Mean of the training pixels in [0, 1], one per channel.
        std: Standard deviation of the same pixels, one per channel.
        validation_size: Default number of validation images, cut from the end
            of the training pool; None when the dataset has its own
            validation split.
        views: Images made of each source image. They are neighbours in the
            pool, so a validation size that is a multiple of `views` shares no
            source image with the training split.
    """

    name: str
    shape: tuple[int, int, int]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    validation_size: int | None
    views: int = 1

    @property
    def normalization(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """`(mean, std)`, as `load` takes it."""
        return self.mean, self.std


INFOS = {
    info.name: info
    for info in (
        DatasetInfo(
            "digits", (28, 28, 1), 10, (0.1565,), (0.2880,), 800, views=4
        ),
        DatasetInfo(
            "digits_upright", (28, 28, 1), 10, (0.1565,), (0.2952,), 200
        ),
        DatasetInfo("rot_mnist", (28, 28, 1), 10, (0.1309,), (0.2901,), 2000),
        DatasetInfo(
            "cifar10",
            (32, 32, 3),
            10,
            (0.4914, 0.4822, 0.4465),
            (0.2470, 0.2435, 0.2616),
            5000,
        ),
        DatasetInfo(
            "cifar100",
            (32, 32, 3),
            100,
            (0.5071, 0.4865, 0.4409),
            (0.2673, 0.2564, 0.2762),
            5000,
        ),
        DatasetInfo(
            "pcam",
            (96, 96, 3),
            2,
            (0.701, 0.538, 0.692),
            (0.235, 0.277, 0.213),
            None,
        ),
        DatasetInfo(
            "imagenet_folder",
            (224, 224, 3),
            1000,
            *IMAGENET_NORMALIZATION,
            None,
        ),
    )
}


def resolve_data_dir(data_dir: str | os.PathLike[str] | None) -> Path:
    """Returns the folder of the prepared datasets.

    Args:
        data_dir: The folder. None means the environment variable
            `TFDS_DATA_DIR` where it is set, else `~/tensorflow_datasets`.

    Raises:
        ValueError: `data_dir` is neither a path nor None.
    """
    if data_dir is None:
        data_dir = os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    elif not isinstance(data_dir, str | os.PathLike):
        raise ValueError(
            f"`data_dir` must be a path or None. Received: {data_dir!r}"
        )
    return Path(data_dir).expanduser().absolute()


def not_prepared(name: str, data_dir: Path) -> DatasetNotPreparedError:
    """Returns the error for a dataset that is not in `data_dir`."""
    option = ""
    if data_dir != resolve_data_dir(None):
        option = f" --data-dir {data_dir}"
    return DatasetNotPreparedError(
        f"Dataset {name!r} is not prepared in {data_dir}. Prepare it once "
        f"with: {COMMAND} prepare {name}{option}"
    )
