"""What the transformers share: blocks, patches, dense layers."""

from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_equiattn.applications import ends

# What `mixer` of a transformer can be.
MIXERS = ("acmix", "attention")


def known_shape(
    title: str, input_shape: Any, reason: str
) -> tuple[int, int, int]:
    """The image shape of a network that takes images of one size alone.

    Args:
        title: what to call the network in messages.
        input_shape: the shape asked for.
        reason: why no other size goes.
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
    """`x + mix(norm(x))`, then `x + mlp(norm(x))`.

    Args:
        x: images or sequences.
        mix: the mixer.
        expansion: channels within the MLP over those outside.
        epsilon: of the norms.
        drop_path: rate at which mixer and MLP are left out for an image.
        name: what names of the layers begin with.
    """
    y = mix(norm(x, epsilon, f"{name}_norm1"))
    y = _drop_path(y, drop_path, f"{name}_path1")
    x = keras.layers.Add(name=f"{name}_add1")([x, y])
    y = norm(x, epsilon, f"{name}_norm2")
    y = dense(y, expansion * x.shape[-1], f"{name}_dense1")
    y = keras.layers.Activation(_gelu, name=f"{name}_gelu")(y)
    y = dense(y, x.shape[-1], f"{name}_dense2")
    y = _drop_path(y, drop_path, f"{name}_path2")
    return keras.layers.Add(name=f"{name}_add2")([x, y])


def patches(x: Any, channels: int, size: int, name: str) -> Any:
    """Each `size x size` pixels to one, by a linear map."""
    return keras.layers.Conv2D(
        channels, size, size, data_format="channels_last", name=name
    )(x)


def norm(x: Any, epsilon: float, name: str) -> Any:
    """Layer normalisation."""
    return keras.layers.LayerNormalization(epsilon=epsilon, name=name)(x)


def dense(x: Any, units: int, name: str, use_bias: bool = True) -> Any:
    """A linear map, started small."""
    return keras.layers.Dense(
        units,
        use_bias=use_bias,
        kernel_initializer=small_normal(),
        name=name,
    )(x)


def small_normal() -> keras.initializers.Initializer:
    """Normal with deviation 0.02, truncated at two deviations."""
    return keras.initializers.TruncatedNormal(stddev=0.02)


@keras.saving.register_keras_serializable(package="keras_equiattn")
def _gelu(x: Any) -> Any:
    """Exact, not the approximation by a hyperbolic tangent."""
    return ops.gelu(x, approximate=False)


def _drop_path(x: Any, rate: float, name: str) -> Any:
    """Leaves out whole images of a batch."""
    if not rate:
        return x
    shape = (None, *[1] * (len(x.shape) - 1))
    return keras.layers.Dropout(rate, noise_shape=shape, name=name)(x)
