"""What the networks share: argument checks, widths, input and output ends."""

import dataclasses
import math
import os
from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_equiattn import _checks
from keras_equiattn.groups import Group

WEIGHTS_FOLDER = Path(__file__).parent / "weights"
Statistics = tuple[float | Sequence[float], float | Sequence[float]]


@dataclasses.dataclass(frozen=True)
class ShippedWeights:
    """Trained weights in the package, and the input scaling they expect."""

    file: str
    normalization: Statistics
    input_shape: tuple[int, int, int]
    classes: int

    @property
    def path(self) -> Path:
        return WEIGHTS_FOLDER / self.file


def group_width(planar_width: int, group: Group, multiple: int = 1) -> int:
    """Channels per group element that keep the number of parameters.

    The planar width over `sqrt(order)`, rounded to the nearest multiple, at
    least one multiple.
    """
    width = planar_width / math.sqrt(group.order)
    return max(1, round(width / multiple)) * multiple


def check_image_shape(input_shape: Any) -> tuple[int, int, int]:
    """An image shape `(height, width, channels)` of positive integers."""
    try:
        height, width, channels = (
            _checks.integer(n, "input_shape") for n in input_shape
        )
    except (TypeError, ValueError):
        raise ValueError(
            "`input_shape` must be (height, width, channels), positive "
            f"integers. Received: {input_shape!r}"
        ) from None
    return height, width, channels


def check_normalization(
    normalization: Statistics | None, channels: int
) -> tuple[list[float], list[float]] | None:
    """Mean and standard deviation per channel as two lists, or None."""
    if normalization is None:
        return None
    try:
        mean, std = (
            np.broadcast_to(np.asarray(part, "float64"), (channels,)).tolist()
            for part in normalization
        )
    except (TypeError, ValueError):
        mean, std = [np.nan], [np.nan]
    if not np.isfinite([*mean, *std]).all() or min(std) <= 0:
        raise ValueError(
            "`normalization` must be (mean, std), numbers or one number per "
            f"channel ({channels}), std positive. Received: {normalization!r}"
        )
    return mean, std


def normalize(
    x: Any, statistics: tuple[list[float], list[float]] | None
) -> Any:
    """`(x - mean) / std` as a layer, or x itself."""
    if statistics is None:
        return x
    mean, std = statistics
    return keras.layers.Normalization(
        axis=-1, mean=mean, variance=[s * s for s in std], name="normalization"
    )(x)


def predictions(x: Any, activation: str | None) -> Any:
    """The last layer; half precision ends before it."""
    half = keras.config.dtype_policy().compute_dtype in ("float16", "bfloat16")
    return keras.layers.Activation(
        activation, dtype="float32" if half else None, name="predictions"
    )(x)


def load_weights(
    model: keras.Model,
    weights: str | Path | None,
    shipped: Mapping[str, ShippedWeights],
) -> None:
    """Loads shipped weights by name, or a file by path."""
    if weights is None:
        return
    path = shipped[str(weights)].path if weights in shipped else weights
    model.load_weights(path)


def check_weights(
    weights: str | Path | None,
    shipped: Mapping[str, ShippedWeights],
    network: str,
    input_shape: tuple[int, int, int],
    classes: int,
) -> ShippedWeights | None:
    """Finds out what `weights` means before a network is built.

    Args:
        weights: None, the name of shipped weights or a path.
        shipped: what is shipped for this network, by name.
        network: what to call the network in messages.
        input_shape: image shape asked for.
        classes: number of classes asked for.

    Returns:
        The shipped weights that were named, or None.
    """
    if weights is None:
        return None
    if weights in shipped:
        found = shipped[str(weights)]
        if (found.input_shape, found.classes) != (input_shape, classes):
            raise ValueError(
                f"weights={str(weights)!r} were trained with "
                f"input_shape={found.input_shape}, classes={found.classes}. "
                f"Received: input_shape={input_shape}, classes={classes}"
            )
        return found
    is_path = isinstance(weights, (str, os.PathLike))
    endings = (".weights.h5", ".keras")
    if (
        not is_path
        or not os.fspath(weights).endswith(endings)
        or not Path(weights).is_file()
    ):
        names = ", ".join(map(repr, shipped)) or "none for this network"
        raise ValueError(
            f"`weights` of {network} must be None, the name of shipped "
            f"weights ({names}) or the path of a .weights.h5 or .keras file "
            f"that exists. Received: {weights!r}"
        )
    return None
