"""The scaling of pixels that a network sees."""

from collections.abc import Sequence
from typing import Any
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

PerChannel: TypeAlias = float | Sequence[float]
Statistics: TypeAlias = tuple[NDArray[np.float32], NDArray[np.float32]]


def to_float(
    images: NDArray[Any],
    normalization: Statistics | None,
) -> NDArray[np.float32]:
    """Converts images to float32 and normalises them.

    Args:
        images: `(b, height, width, channels)`, uint8 in 0..255 or float32 in
            [0, 1].
        normalization: Mean and standard deviation per channel, or None.

    Returns:
        float32 images of the same shape, in [0, 1] or normalised.
    """
    if images.dtype == np.uint8:
        images = images.astype("float32") / np.float32(255)
    if normalization is not None:
        # Whole images at a time, as NumPy is slow along an axis of length 3.
        mean, std = (
            np.tile(part, images.shape[1] * images.shape[2])
            for part in normalization
        )
        images = ((images.reshape(len(images), -1) - mean) / std).reshape(
            images.shape
        )
    return images


def check_normalization(
    normalization: tuple[PerChannel, PerChannel] | None, channels: int
) -> Statistics | None:
    """Returns mean and std as float32 arrays of shape `(channels,)`.

    Raises:
        ValueError: A number is not finite, a std is not positive, or there are
            not as many numbers as channels.
    """
    if normalization is None:
        return None
    try:
        mean, std = (
            np.broadcast_to(np.asarray(part, "float32"), (channels,))
            for part in normalization
        )
    except (TypeError, ValueError) as error:
        raise ValueError(
            "`normalization` must be None or (mean, std), each a number or "
            f"{channels} of them. Received: {normalization!r}"
        ) from error
    if not np.isfinite(mean).all() or not (np.isfinite(std) & (std > 0)).all():
        raise ValueError(
            "`normalization` must have finite means and positive, finite "
            f"stds. Received: {normalization!r}"
        )
    return mean, std
