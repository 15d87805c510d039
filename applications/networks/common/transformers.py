"""The parts of all transformers: arguments, blocks, patches, dense layers."""

import dataclasses
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_equiattn import _checks
from keras_equiattn.applications.networks.common import ends

# The values of the argument `mixer` of a transformer.
MIXERS = ("acmix", "attention")


@dataclasses.dataclass(frozen=True)
class Design:
    """The settings of transformers of all kinds.

    Attributes:
        mixer: one of `MIXERS`.
        patch_size: rows and columns of a patch, in pixels.
        drop_path: rate of stochastic depth, at which the mixer and the MLP of
            the last block are dropped for an image in training.

    Raises:
        ValueError: if an argument has a value that is not accepted.
    """

    mixer: str
    patch_size: int
    drop_path: float

    def __post_init__(self) -> None:
        _checks.choice(self.mixer, "mixer", MIXERS)
        _checks.integer(self.patch_size, "patch_size")
        _checks.rate(self.drop_path, "drop_path")

    def rates(self, depths: Sequence[int]) -> Iterator[float]:
        """Yields the `drop_path` of each block, which grows linearly from 0.

        Args:
            depths: number of blocks in each stage.
        """
        yield from np.linspace(0, self.drop_path, sum(depths)).tolist()


def known_shape(
    title: str, input_shape: Any, reason: str
) -> tuple[int, int, int]:
    """Returns the image shape of a network for images of one known size.

    Args:
        title: the name of the network in messages.
        input_shape: the shape asked for, `(height, width, channels)`.
        reason: why the size must be known.

    Raises:
        ValueError: if it is no such shape, or height or width is None.
    """
    shape = ends.check_image_shape(input_shape, any_size=True)
    if None in shape:
        raise ValueError(
            f"`input_shape` of {title} must have a known height and width: "
            f"{reason}. Received: {input_shape!r}"
        )
    return shape


def block(
    x: Any,
    mix: Callable[[Any], Any],
    expansion: int,
    epsilon: float,
    drop_path: float,
    name: str,
) -> Any:
    """Computes `x = x + mix(norm(x))`, and then `x + mlp(norm(x))`.

    Args:
        x: images `(batch, height, width, channels)` or sequences `(batch,
            length, channels)`.
        mix: the mixer.
        expansion: hidden channels of the MLP over its input channels.
        epsilon: epsilon of the layer normalisations.
        drop_path: rate at which mixer and MLP are dropped for an image.
        name: the beginning of the names of the layers.
    """
    y = mix(norm(x, epsilon, f"{name}_norm1"))
    y = stochastic_depth(y, drop_path, f"{name}_path1")
    x = keras.layers.Add(name=f"{name}_add1")([x, y])
    y = norm(x, epsilon, f"{name}_norm2")
    y = dense(y, expansion * x.shape[-1], f"{name}_dense1")
    y = keras.layers.Activation(_gelu, name=f"{name}_gelu")(y)
    y = dense(y, x.shape[-1], f"{name}_dense2")
    y = stochastic_depth(y, drop_path, f"{name}_path2")
    return keras.layers.Add(name=f"{name}_add2")([x, y])


def patches(x: Any, channels: int, size: int, name: str) -> Any:
    """Maps each patch of `size x size` pixels to one pixel, linearly."""
    return keras.layers.Conv2D(
        channels, size, size, data_format="channels_last", name=name
    )(x)


def norm(x: Any, epsilon: float, name: str) -> Any:
    """Applies layer normalisation to the channels, the last axis."""
    return keras.layers.LayerNormalization(epsilon=epsilon, name=name)(x)


def dense(x: Any, units: int, name: str, use_bias: bool = True) -> Any:
    """Applies a linear map of the channels, initialised by `small_normal`."""
    return keras.layers.Dense(
        units,
        use_bias=use_bias,
        kernel_initializer=small_normal(),
        name=name,
    )(x)


def small_normal() -> keras.initializers.Initializer:
    """Returns a normal initialiser with deviation 0.02, truncated at 0.04."""
    return keras.initializers.TruncatedNormal(stddev=0.02)


@keras.saving.register_keras_serializable(package="keras_equiattn")
def _gelu(x: Any) -> Any:
    """The exact GELU, not its approximation by a hyperbolic tangent."""
    return ops.gelu(x, approximate=False)


def stochastic_depth(x: Any, rate: float, name: str) -> Any:
    """Sets whole images of a batch to zero, at random, in training.

    Args:
        x: `(batch, ...)`.
        rate: how likely an image is set to zero. With 0 there is no layer.
        name: name of the layer.
    """
    if not rate:
        return x
    shape = (None, *[1] * (len(x.shape) - 1))
    return keras.layers.Dropout(rate, noise_shape=shape, name=name)(x)
