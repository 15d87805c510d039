"""What networks start and end with: images, classifiers, weights."""

import dataclasses
import os
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_equiattn import _checks
from keras_equiattn.ops._types import Shape

# What networks for ImageNet can end with instead of a classifier.
POOLING = (None, "avg", "max")

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


# Shipped weights by (group, attention, filters), then by name.
Shipped = Mapping[tuple[str, str | None, int], Mapping[str, ShippedWeights]]


def he_normal() -> keras.initializers.Initializer:
    """Normal with variance `2 / fan-in`."""
    return keras.initializers.VarianceScaling(
        2.0, mode="fan_in", distribution="untruncated_normal"
    )


def global_mean(x: Any) -> Any:
    """The mean over space and group: `(batch, channels)`, invariant."""
    return keras.layers.GlobalAveragePooling3D(
        data_format="channels_last", dtype=end_dtype(), name="global_mean"
    )(x)


def logits(x: Any, classes: int, use_bias: bool = True) -> Any:
    """A dense layer to the classes."""
    return keras.layers.Dense(
        classes,
        use_bias=use_bias,
        kernel_initializer=he_normal(),
        dtype=end_dtype(),
        name="logits",
    )(x)


@dataclasses.dataclass(frozen=True)
class End:
    """What networks for ImageNet end with, as those of `keras.applications`.

    Attributes:
        include_top: whether there is a classifier.
        pooling: without it: None for none, "avg" or "max" over space.
        classes: number of classes.
        classifier_activation: of the classifier; None for logits.
        features_only: whether the maps of all stages are returned instead.
    """

    include_top: bool
    pooling: str | None
    classes: int
    classifier_activation: str | None
    features_only: bool

    def __post_init__(self) -> None:
        _checks.flag(self.include_top, "include_top")
        _checks.choice(self.pooling, "pooling", POOLING)
        _checks.integer(self.classes, "classes")
        check_activation(self.classifier_activation)
        _checks.flag(self.features_only, "features_only")
        if self.features_only and (self.include_top or self.pooling):
            raise ValueError(
                "`features_only` returns feature maps, without classifier and "
                "pooling. Received: features_only=True, "
                f"include_top={self.include_top}, pooling={self.pooling!r}"
            )

    def __call__(self, features: Sequence[Any], summary: Any = None) -> Any:
        """The outputs.

        Args:
            features: maps of the stages.
            summary: what the classifier takes; None for the mean over space
                of the last map.
        """
        if self.features_only:
            return list(features)
        *_, x = features
        if self.include_top:
            x = self._pooled(x, "mean") if summary is None else summary
            x = logits(x, self.classes)
            return predictions(x, self.classifier_activation)
        if self.pooling is None:
            return x
        return self._pooled(x, "max" if self.pooling == "max" else "mean")

    def _pooled(self, x: Any, kind: str) -> Any:
        layer = {
            "mean": keras.layers.GlobalAveragePooling2D,
            "max": keras.layers.GlobalMaxPooling2D,
        }[kind]
        return layer(
            data_format="channels_last",
            dtype=end_dtype(),
            name=f"global_{kind}",
        )(x)


def imagenet_network(
    title: str,
    stages: Callable[[Any], Any],
    end: End,
    weights: str | Path | None,
    input_shape: Shape,
    normalization: Statistics | None,
    name: str | None,
) -> keras.Model:
    """A network with the arguments of those of `keras.applications`.

    Args:
        title: what to call it in messages and, in lower case, by default.
        stages: from normalised images to the feature maps of the stages, and
            what else an `End` takes, as a tuple.
        end: what the network ends with.
        weights: None or the path of a weights file.
        input_shape: `(height, width, channels)`; height and width may be
            None.
        normalization: see `check_normalization`.
        name: of the model; None for the title.
    """
    shape = check_image_shape(input_shape, any_size=True)
    check_weights(weights, {}, title, shape, end.classes)
    statistics = check_normalization(normalization, shape[-1])
    inputs = keras.Input(shape, name="image")
    outputs = end(*stages(normalize(inputs, statistics)))
    model = keras.Model(inputs, outputs, name=name or title.lower())
    load_weights(model, weights, {})
    return model


def check_image_shape(input_shape: Any, any_size: bool = False) -> Any:
    """An image shape `(height, width, channels)` of positive integers.

    Args:
        input_shape: the shape asked for.
        any_size: whether height and width may be None.
    """
    try:
        *size, channels = input_shape
        height, width = (
            n if any_size and n is None else _checks.integer(n, "input_shape")
            for n in size
        )
        return height, width, _checks.integer(channels, "input_shape")
    except (TypeError, ValueError):
        unknown = "; height and width may be None" if any_size else ""
        raise ValueError(
            "`input_shape` must be (height, width, channels), positive "
            f"integers{unknown}. Received: {input_shape!r}"
        ) from None


def check_activation(activation: Any) -> None:
    """Raises unless Keras knows the activation of a classifier."""
    try:
        keras.activations.get(activation)
    except (TypeError, ValueError):
        raise ValueError(
            "`classifier_activation` must be None or an activation of Keras, "
            f"as 'softmax'. Received: {activation!r}"
        ) from None


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
    return keras.layers.Activation(
        activation, dtype=end_dtype(), name="predictions"
    )(x)


def end_dtype() -> str | None:
    """Of the layers at the end: float32 instead of half precision."""
    half = keras.config.dtype_policy().compute_dtype in ("float16", "bfloat16")
    return "float32" if half else None


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
    input_shape: Shape,
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
