"""The handwritten digits that come with scikit-learn."""

import functools
from pathlib import Path

import numpy as np

from keras_equiattn.applications.data.sources import pixels
from keras_equiattn.applications.data.sources.catalogue import Arrays
from keras_equiattn.applications.data.sources.catalogue import INFOS
from keras_equiattn.applications.data.sources.optional import optional_import


def read(name: str, data_dir: Path, part: str) -> Arrays:
    """Returns "train", the whole training pool, or "test"."""
    train, test = digits_arrays(name == "digits")
    return train if part == "train" else test


def prepare(name: str, data_dir: Path) -> str:
    """Says that there is nothing to do."""
    return f"{name} is embedded: nothing to prepare."


def state(name: str, data_dir: Path) -> str:
    """Says whether the dataset is on disk."""
    return "embedded"


@functools.lru_cache(maxsize=2)
def digits_arrays(rotated: bool) -> tuple[Arrays, Arrays]:
    """Builds images of 28 x 28 pixels from scikit-learn's 1797 digits.

    The digits of 8 x 8 pixels are enlarged to 20 x 20 by cubic splines and
    centred. A fixed permutation puts 1300 digits into the training pool and
    497 into the test split. scikit-learn does not say who wrote which digit,
    so the splits may share writers.

    Args:
        rotated: Whether every digit appears at four uniform angles, one after
            the other, instead of once and upright.

    Returns:
        `((train_images, train_labels), (test_images, test_labels))`, uint8
        images of shape `(n, 28, 28, 1)`.
    """
    ndimage = optional_import("scipy.ndimage", "examples")
    sklearn_datasets = optional_import("sklearn.datasets", "examples")
    source, labels = sklearn_datasets.load_digits(return_X_y=True)
    source = source.reshape(-1, 8, 8).astype("float32") / 16
    images = np.zeros((len(source), 28, 28), "float32")
    images[:, 4:24, 4:24] = ndimage.zoom(
        source, (1, 2.5, 2.5), order=3, mode="grid-constant", grid_mode=True
    )
    np.clip(images, 0, 1, out=images)
    rng = np.random.default_rng(1797)
    order = rng.permutation(len(images))
    if rotated:
        order = np.repeat(order, INFOS["digits"].views)
        images = pixels.rotate(images[order], rng.uniform(0, 360, len(order)))
    else:
        images = images[order]
    labels = labels[order].astype("int32")
    pool = 1300 * len(order) // len(source)
    values = pixels.to_uint8(images)[..., None]
    return (
        (pixels.read_only(values[:pool]), pixels.read_only(labels[:pool])),
        (pixels.read_only(values[pool:]), pixels.read_only(labels[pool:])),
    )
