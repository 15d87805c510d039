"""Weights that a network starts from: shipped ones, and files."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

import keras

from keras_equiattn.applications import presets
from keras_equiattn.applications.networks.common.ends import Statistics
from keras_equiattn.ops._types import Shape


@dataclasses.dataclass(frozen=True)
class ShippedWeights:
    """Trained weights in the package, and what they were trained with.

    Attributes:
        preset: name of the preset, see `applications.presets`.
        normalization: `(mean, std)` of the images, see `ends.normalize`.
        input_shape: `(height, width, channels)` of the images.
        classes: number of classes.
    """

    preset: str
    normalization: Statistics
    input_shape: tuple[int, int, int]
    classes: int

    @property
    def path(self) -> Path:
        """The file of the weights, whose checksum is verified."""
        return presets.shipped_weights(self.preset)


# Shipped weights by (group, attention, filters, downsampling), then by name.
Shipped = Mapping[
    tuple[str, str | None, int, str], Mapping[str, ShippedWeights]
]


def load_weights(
    model: keras.Model,
    weights: str | Path | None,
    shipped: Mapping[str, ShippedWeights],
) -> None:
    """Loads shipped weights by name, or a file by path, or nothing."""
    if weights is None:
        return
    path = shipped[str(weights)].path if weights in shipped else weights
    model.load_weights(path)


def check_weights(
    weights: str | Path | None,
    shipped: Mapping[str, ShippedWeights],
    network: str,
    input_shape: Shape,
    classes: int,
) -> ShippedWeights | None:
    """Finds out what `weights` means before a network is built.

    Args:
        weights: None, the name of shipped weights or a path.
        shipped: the weights that are shipped for this network, by name.
        network: the name of the network in messages.
        input_shape: image shape asked for, `(height, width, channels)`.
        classes: number of classes asked for.

    Returns:
        The shipped weights, if `weights` is the name of some; else None.

    Raises:
        ValueError: if `weights` is none of these, or if shipped weights were
            trained with another image shape or number of classes.
    """
    if weights is None:
        return None
    is_path = isinstance(weights, (str, os.PathLike))
    if is_path and weights in shipped:
        found = shipped[str(weights)]
        if (found.input_shape, found.classes) != (input_shape, classes):
            raise ValueError(
                f"weights={str(weights)!r} were trained with "
                f"input_shape={found.input_shape}, classes={found.classes}. "
                f"Received: input_shape={input_shape}, classes={classes}"
            )
        return found
    endings = (".weights.h5", ".keras")
    if (
        not is_path
        or not os.fspath(weights).endswith(endings)
        or not Path(weights).is_file()
    ):
        names = ", ".join(map(repr, shipped)) or (
            "none for these arguments; `applications.from_preset` builds the "
            "networks of `applications.list_presets()` with their weights"
        )
        raise ValueError(
            f"`weights` of {network} must be None, the name of shipped "
            f"weights ({names}) or the path of a .weights.h5 or .keras file "
            f"that exists. Received: {weights!r}"
        )
    return None
