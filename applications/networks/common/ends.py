"""The ends of networks: images, their scaling, classifiers."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_equiattn import _checks

# Mean and standard deviation of pixels, each a number or one per channel.
Statistics = tuple[float | Sequence[float], float | Sequence[float]]


def he_normal() -> keras.initializers.Initializer:
    """Returns an initialiser that is normal with variance `2 / fan-in`."""
    return keras.initializers.VarianceScaling(
        2.0, mode="fan_in", distribution="untruncated_normal"
    )


def global_mean(x: Any) -> Any:
    """Returns the mean over space and group, which is invariant.

    Args:
        x: a feature map `(batch, height, width, order, channels)`.

    Returns:
        `(batch, channels)`.
    """
    return keras.layers.GlobalAveragePooling3D(
        data_format="channels_last", dtype=end_dtype(), name="global_mean"
    )(x)


def logits(x: Any, classes: int, use_bias: bool = True) -> Any:
    """Applies a dense layer from the channels, the last axis, to classes."""
    return keras.layers.Dense(
        classes,
        use_bias=use_bias,
        kernel_initializer=he_normal(),
        dtype=end_dtype(),
        name="logits",
    )(x)


def predictions(x: Any, activation: str | None) -> Any:
    """Applies the last layer, in float32 under half precision."""
    return keras.layers.Activation(
        activation, dtype=end_dtype(), name="predictions"
    )(x)


def end_dtype() -> str | None:
    """Returns float32 for the last layers under half precision, else None."""
    half = keras.config.dtype_policy().compute_dtype in ("float16", "bfloat16")
    return "float32" if half else None


def check_image_shape(input_shape: Any, any_size: bool = False) -> Any:
    """Returns an image shape `(height, width, channels)`, or raises.

    Args:
        input_shape: the shape asked for.
        any_size: whether height and width may be None.

    Raises:
        ValueError: unless these are three positive integers.
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
    """Raises `ValueError` unless Keras has such an activation."""
    try:
        keras.activations.get(activation)
    except (TypeError, ValueError):
        raise ValueError(
            "`classifier_activation` must be None or an activation of Keras, "
            f"such as 'softmax'. Received: {activation!r}"
        ) from None


def check_normalization(
    normalization: Statistics | None, channels: int
) -> tuple[list[float], list[float]] | None:
    """Returns mean and standard deviation per channel, or None for None.

    Args:
        normalization: `(mean, std)`, each a number or one per channel.
        channels: number of channels of the images.

    Raises:
        ValueError: if a number is not finite, a deviation is not positive, or
            the count is wrong.
    """
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
            "`normalization` must be (mean, std), each a number or one number "
            f"per channel ({channels}), with positive std. "
            f"Received: {normalization!r}"
        )
    return mean, std


def normalize(
    x: Any, statistics: tuple[list[float], list[float]] | None
) -> Any:
    """Applies a layer that computes `(x - mean) / std`; none for None."""
    if statistics is None:
        return x
    mean, std = statistics
    return keras.layers.Normalization(
        axis=-1, mean=mean, variance=[s * s for s in std], name="normalization"
    )(x)
