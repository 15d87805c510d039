"""Small operations on arrays of pixels."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from keras_equiattn.applications.data.sources.optional import optional_import


def rotate(
    images: NDArray[Any], angles: NDArray[Any], extra: str = "examples"
) -> NDArray[np.float32]:
    """Rotates images about their centres, with bilinear interpolation.

    Args:
        images: float32 images `(n, height, width)`.
        angles: Degrees `(n,)`, counter-clockwise.
        extra: The extra of this library that installs SciPy.

    Returns:
        float32 images of the same shape, with zeros in the corners.
    """
    ndimage = optional_import("scipy.ndimage", extra)
    out = np.empty(images.shape, "float32")
    for image, angle, target in zip(images, angles, out, strict=True):
        ndimage.rotate(image, angle, reshape=False, order=1, output=target)
    return out


def to_uint8(images: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Rounds pixels in [0, 1] to the nearest of 0..255."""
    return np.rint(images * 255).astype("uint8")


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """Makes an array that several datasets share read-only, and returns it."""
    array.setflags(write=False)
    return array
