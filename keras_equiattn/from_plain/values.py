"""How layers that act on single values or along the channels are converted.

A converter is asked only where one of the tensors has pixels: feature maps on
the group have rank 5, images that were not lifted yet have rank 4.
"""

import math
from typing import Any

import keras
import numpy as np

from keras_equiattn import layers
from keras_equiattn.from_plain.conversion import Conversion
from keras_equiattn.from_plain.conversion import OF_LOGITS
from keras_equiattn.from_plain.conversion import register_conversion
from keras_equiattn.graphs import MERGING
from keras_equiattn.graphs import POINTWISE


@register_conversion(
    *POINTWISE,
    keras.layers.ActivityRegularization,
    keras.layers.Rescaling,
    "StochasticDepth",  # a layer of keras.applications.ConvNeXt
)
def pointwise(layer: Any, x: Any, to: Conversion) -> Any:
    if getattr(layer, "noise_shape", None) is not None:
        to.refuse(
            f"it has noise_shape={layer.noise_shape}, which `Dropout` alone "
            "may have here."
        )
    return to.like(layer, x)


@register_conversion(
    *MERGING,
    "CustomScaleLayer",  # a layer of keras.applications.InceptionResNetV2
)
def merging(layer: Any, *inputs: Any, to: Conversion) -> Any:
    inputs = of_one_rank(inputs, to)
    # One channel is broadcast to any number, but only where the plain layer has
    # one.
    channels = {
        x.shape[-1]
        for x, plain in zip(inputs, to.input_shapes, strict=True)
        if plain[-1] != 1
    }
    if len(channels) > 1:
        to.refuse(
            f"its inputs would have {sorted(channels)} channels. With "
            "`width='channels'` all layers keep theirs."
        )
    return to.like(layer, *inputs)


@register_conversion(keras.layers.Concatenate)
def concatenate(layer: Any, *inputs: Any, to: Conversion) -> Any:
    if layer.axis not in (-1, len(to.output_shape) - 1):
        to.refuse(
            f"it joins tensors along axis {layer.axis}. Join them along the "
            "channels, the last axis."
        )
    return to.like(layer, *of_one_rank(inputs, to), axis=-1)


def of_one_rank(inputs: tuple[Any, ...], to: Conversion) -> tuple[Any, ...]:
    """The tensors as feature maps, if one of them is."""
    if all(len(x.shape) != 5 for x in inputs):
        return inputs
    return tuple(to.lifted(x) for x in inputs)


@register_conversion(keras.layers.Softmax)
def softmax(layer: Any, x: Any, to: Conversion) -> Any:
    of_channels(layer, to)
    return to.like(layer, to.merged_poses(x) if to.is_last else x, axis=-1)


@register_conversion(keras.layers.Activation)
def activation(layer: Any, x: Any, to: Conversion) -> Any:
    if to.is_last and getattr(layer.activation, "__name__", "") in OF_LOGITS:
        x = to.merged_poses(x)
    return to.like(layer, x)


@register_conversion(keras.layers.PReLU)
def prelu(layer: Any, x: Any, to: Conversion) -> Any:
    axes = set(layer.shared_axes or ())
    if len(to.output_shape) == 4 and not {1, 2} <= axes:
        to.refuse(
            "it has a slope for each pixel. Share them with "
            "`shared_axes=[1, 2]`."
        )
    more = {3} if len(x.shape) == 5 else set()
    channels = {len(x.shape) - 1} if len(to.output_shape) - 1 in axes else set()
    axes = {axis for axis in axes if axis < 3} | more | channels
    shape = tuple(
        1 if axis in axes else n for axis, n in enumerate(x.shape) if axis
    )
    weights = None
    if to.inflate:
        weights = [np.reshape(slopes, shape) for slopes in layer.get_weights()]
    config = {**layer.get_config(), "shared_axes": sorted(axes)}
    new = keras.layers.PReLU.from_config({**config, "name": to.name()})
    return to.apply(new, x, weights=weights)


@register_conversion(keras.layers.Dropout)
def dropout(layer: Any, x: Any, to: Conversion) -> Any:
    config = layer.get_config()
    shape = config.get("noise_shape")
    if len(x.shape) != 5:
        return to.like(layer, x)
    if shape is not None:
        # One draw serves all poses.
        pixels = tuple(shape[1:-1]) or (1, 1)
        shape = (shape[0], *pixels, 1, shape[-1])
        return to.like(layer, x, noise_shape=shape)
    new = layers.GroupDropout(
        layer.rate,
        seed=config.get("seed"),
        data_format="channels_last",
        **to.named(),
    )
    return to.apply(new, x)


@register_conversion(keras.layers.SpatialDropout2D)
def spatial_dropout(layer: Any, x: Any, to: Conversion) -> Any:
    to.require_channels_last()
    if len(x.shape) != 5:
        return to.like(layer, x)
    new = keras.layers.Dropout(
        layer.rate,
        noise_shape=(None, 1, 1, 1, None),
        seed=layer.get_config().get("seed"),
        **to.named(),
    )
    return to.apply(new, x)


@register_conversion(
    keras.layers.BatchNormalization,
    keras.layers.LayerNormalization,
    keras.layers.UnitNormalization,
)
def normalization_of_channels(layer: Any, x: Any, to: Conversion) -> Any:
    of_channels(layer, to)
    return to.like(layer, x, axis=-1)


@register_conversion(keras.layers.Normalization)
def normalization_of_inputs(layer: Any, x: Any, to: Conversion) -> Any:
    of_channels(layer, to)
    new = keras.layers.Normalization.from_config(
        {**layer.get_config(), "name": to.name(), "axis": -1}
    )
    weights = layer.get_weights()
    return to.apply(new, x, weights=weights)


@register_conversion(keras.layers.GroupNormalization)
def group_normalization(layer: Any, x: Any, to: Conversion) -> Any:
    of_channels(layer, to)
    if to.inflate and len(x.shape) == 5:
        to.refuse(
            "its statistics would be those of all poses together, and the "
            "inflated network would not compute what the plain one does. Take "
            "`LayerNormalization` over the channels or `BatchNormalization`."
        )
    channels = x.shape[-1]
    count = channels if layer.groups == -1 else layer.groups
    count = channels if layer.groups == to.input_shapes[0][-1] else count
    common = math.gcd(count, channels)
    if common != count:
        to.note(
            f"The number of its groups of channels is {common}, not {count}."
        )
    return to.like(layer, x, axis=-1, groups=common)


@register_conversion("LayerScale")  # a layer of keras.applications.ConvNeXt
def layer_scale(layer: Any, x: Any, to: Conversion) -> Any:
    return to.like(layer, x, projection_dim=x.shape[-1])


# Functions of `keras.ops` that act on every value alone, and may be given
# numbers in place of tensors. Their classes are not exported.
@register_conversion(
    "Abs",
    "Absolute",
    "Add",
    "Cast",
    "Clip",
    "Divide",
    "Elu",
    "Exp",
    "Gelu",
    "HardSigmoid",
    "HardSilu",
    "LeakyRelu",
    "Log",
    "Log1p",
    "Maximum",
    "Minimum",
    "Multiply",
    "Negative",
    "Power",
    "Relu",
    "Relu6",
    "Selu",
    "Sigmoid",
    "Silu",
    "Softplus",
    "Sqrt",
    "Square",
    "Subtract",
    "Tanh",
    "TrueDivide",
)
def operation(function: Any, *inputs: Any, to: Conversion) -> Any:
    args, kwargs = to.arguments(of_one_rank(inputs, to))
    for value in keras.tree.flatten((args, kwargs)):
        if len(getattr(value, "shape", ())) and not isinstance(
            value, keras.KerasTensor
        ):
            to.refuse(
                f"it takes a constant of the shape {tuple(value.shape)}. Use "
                "a number, or a layer that has the constant."
            )
    return to.recorded(function, function(*args, **kwargs))


def of_channels(layer: Any, to: Conversion) -> None:
    """Refuses a layer that acts along any axis other than the channels."""
    axis = getattr(layer, "axis", -1)
    axes = [axis] if isinstance(axis, int) else list(axis)
    rank = len(to.output_shape)
    if [n % rank for n in axes] != [rank - 1]:
        to.refuse(
            f"it acts along the axes {tuple(axes)} of a tensor of rank {rank}. "
            "Let it act along the channels, axis=-1."
        )
