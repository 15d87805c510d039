"""How convolutions and linear maps are converted, and what they inflate to."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_equiattn import layers
from keras_equiattn.from_plain.conversion import Conversion
from keras_equiattn.from_plain.conversion import OF_LOGITS
from keras_equiattn.from_plain.conversion import register_conversion
from keras_equiattn.from_plain.strides import exactness
from keras_equiattn.from_plain.strides import fitting_window
from keras_equiattn.from_plain.strides import refuse_strides
from keras_equiattn.from_plain.strides import stride_one
from keras_equiattn.ops.exactness import is_exact

# Options that have the same names in Keras and in this library.
OF_CONVOLUTIONS = (
    "activation",
    "activity_regularizer",
    "bias_constraint",
    "bias_initializer",
    "bias_regularizer",
    "dilation_rate",
    "kernel_constraint",
    "kernel_initializer",
    "kernel_regularizer",
    "kernel_size",
    "padding",
    "strides",
    "trainable",
    "use_bias",
)


# Names of options in Keras' layers that have a kernel for each channel.
RENAMED = {
    "depthwise_constraint": "kernel_constraint",
    "depthwise_initializer": "kernel_initializer",
    "depthwise_regularizer": "kernel_regularizer",
}


@register_conversion(keras.layers.Dense)
def dense(layer: Any, x: Any, to: Conversion) -> Any:
    """A linear map of the channels is a convolution with one pixel."""
    if linear_at_the_end(layer, to):
        return to.like(layer, to.merged_poses(x))
    names = [n for n in OF_CONVOLUTIONS if n in layer.get_config()]
    config = {name: layer.get_config()[name] for name in names}
    return convolved(layer, x, to, layer.units, **config, kernel_size=1)


@register_conversion(keras.layers.Conv2D)
def convolution(layer: Any, x: Any, to: Conversion) -> Any:
    to.require_channels_last()
    channels = to.input_shapes[0][-1]
    if layer.groups == channels > 1:
        multiplier = layer.filters // channels
        return of_each_channel(layer, x, to, multiplier)
    if layer.groups != 1:
        to.refuse(
            f"it has groups={layer.groups} for {channels} channels. Take "
            "groups=1, or a group for each channel."
        )
    one_pixel = {*layer.kernel_size, *layer.strides} == {1}
    if one_pixel and linear_at_the_end(layer, to):
        return to.like(layer, to.merged_poses(x))
    return convolved(layer, x, to, layer.filters, **told(layer))


def convolved(
    layer: Any, x: Any, to: Conversion, filters: int, **config: Any
) -> Any:
    """A lifting or a group convolution in place of a plain one."""
    if len(x.shape) == 4:
        kind: Any = layers.LiftingConv2D
    else:
        kind = layers.GroupConv2D
        x = to.lifted(x)
    weights = inflated(layer, to, on_group=len(x.shape) == 5)

    def made(**options: Any) -> keras.layers.Layer:
        options = {**config, **options, "filters": to.filters(filters)}
        new: keras.layers.Layer = kind(**options, **to.common())
        return new

    return strided(x, to, made, weights, config)


@register_conversion(keras.layers.DepthwiseConv2D)
def depthwise(layer: Any, x: Any, to: Conversion) -> Any:
    to.require_channels_last()
    return of_each_channel(layer, x, to, layer.depth_multiplier)


def of_each_channel(layer: Any, x: Any, to: Conversion, multiplier: int) -> Any:
    """A group convolution that leaves channels apart.

    Args:
        layer: the plain convolution.
        x: the input.
        to: the conversion.
        multiplier: the number of filters for each channel.
    """
    x = to.lifted(x)
    config = {**told(layer), "depth_multiplier": multiplier}
    weights = None
    if to.inflate:
        kernel, *bias = layer.get_weights()
        kernel = np.reshape(kernel, (*kernel.shape[:2], -1, multiplier))
        weights = [at_identity(kernel, to, axis=2), *bias]

    def made(**options: Any) -> keras.layers.Layer:
        return layers.GroupDepthwiseConv2D(
            **{**config, **options}, **to.common()
        )

    return strided(x, to, made, weights, config)


@register_conversion(keras.layers.SeparableConv2D)
def separable(layer: Any, x: Any, to: Conversion) -> Any:
    to.require_channels_last()
    x = to.lifted(x)
    config = told(layer)
    config["depth_multiplier"] = layer.depth_multiplier
    for name in ("initializer", "regularizer", "constraint"):
        key = f"pointwise_{name}"
        config[key] = layer.get_config()[key]
    weights = None
    if to.inflate:
        of_pixels, of_channels_, *bias = layer.get_weights()
        weights = [
            at_identity(of_pixels, to, axis=2),
            *bias,
            at_identity(of_channels_[0, 0], to, axis=0),
        ]

    def made(**options: Any) -> keras.layers.Layer:
        options = {**config, **options, "filters": to.filters(layer.filters)}
        return layers.GroupSeparableConv2D(**options, **to.common())

    return strided(x, to, made, weights, config)


@register_conversion(keras.layers.Conv2DTranspose)
def transposed(layer: Any, x: Any, to: Conversion) -> Any:
    to.require_channels_last()
    x = to.lifted(x)
    config = {**told(layer), "filters": to.filters(layer.filters)}
    if layer.output_padding is not None:
        to.refuse(
            f"it has output_padding={layer.output_padding}. Leave it out, and "
            "crop the output."
        )
    weights = None
    if to.inflate:
        kernel, *bias = layer.get_weights()
        kernel = np.swapaxes(kernel, 2, 3)
        weights = [at_identity(kernel, to, axis=2), *bias]
    try:
        new = layers.GroupConv2DTranspose(**config, **to.common())
    except ValueError as error:
        if to.keep:
            to.note("It stays, and is not exactly equivariant.")
            config["exact"] = False
        else:
            # One more row and one more column fit the strides.
            larger = tuple(k + 1 for k in layer.kernel_size)
            if to.inflate or layer.padding != "same":
                to.refuse(str(error))
            to.note(f"Its filters have {larger} pixels, which is exact.")
            config["kernel_size"] = larger
        new = layers.GroupConv2DTranspose(**config, **to.common())
    return to.apply(new, x, weights=weights)


def strided(
    x: Any,
    to: Conversion,
    made: Callable[..., keras.layers.Layer],
    weights: list[Any] | None,
    config: dict[str, Any],
) -> Any:
    """A convolution with strides that are exact.

    Args:
        x: the input.
        to: the conversion.
        made: returns the layer with other options.
        weights: the weights of the layer, see `Conversion.apply`.
        config: the options of the layer that `made` returns.

    Returns:
        The output, of the size that the plain layer has.
    """
    size = x.shape[1:3]
    window = [
        _pair(config.get(name, 1))
        for name in ("kernel_size", "strides", "dilation_rate")
    ]
    padding = config.get("padding", "valid")
    kernel, strides, dilation = window
    exact = exactness(to, size, kernel, strides, dilation, padding)
    if exact or to.keep:
        return to.apply(made(exact=exact), x, weights=weights)
    inner = stride_one(size, kernel, dilation, padding)
    fitting = fitting_window(to, inner, strides)
    alone = is_exact(to.group, size, kernel, 1, dilation, padding)
    if to.inflate or not alone or fitting is None:
        refuse_strides(to, size, kernel, strides, dilation, padding)
    to.note(
        f"Its strides are 1, and the mean over windows of {fitting} pixels "
        f"with strides {strides} follows, which is exact on this size."
    )
    y = to.apply(made(strides=1), x, weights=weights)
    pool = layers.SpatialPooling2D(
        fitting, strides, "mean", **to.common("pool")
    )
    return to.apply(pool, y)


def linear_at_the_end(layer: Any, to: Conversion) -> bool:
    """Whether a layer with 1 x 1 filters takes the mean over the poses."""
    name = getattr(layer.activation, "__name__", "linear")
    return to.is_last and name in OF_LOGITS


def told(layer: Any) -> dict[str, Any]:
    """The options that the equivariant convolution has as well."""
    config = {RENAMED.get(k, k): v for k, v in layer.get_config().items()}
    return {name: config[name] for name in OF_CONVOLUTIONS if name in config}


def inflated(
    layer: Any, to: Conversion, on_group: bool = True
) -> list[np.ndarray] | None:
    """The weights of a convolution that computes the plain one in each pose.

    Args:
        layer: the plain convolution or linear map.
        to: the conversion.
        on_group: whether the new layer takes feature maps, or else images.

    Returns:
        Kernel and bias; None if the network is not inflated.
    """
    if not to.inflate:
        return None
    kernel, *bias = layer.get_weights()
    if kernel.ndim == 2:
        kernel = kernel[None, None]
    return [at_identity(kernel, to, axis=2) if on_group else kernel, *bias]


def at_identity(kernel: np.ndarray, to: Conversion, axis: int) -> np.ndarray:
    """The kernel on the group that is zero but at the identity.

    Args:
        kernel: a kernel of the plain layer.
        to: the conversion, which has the group.
        axis: where the axis of the group is put.
    """
    rest = [np.zeros_like(kernel)] * (to.group.order - 1)
    return np.stack([kernel, *rest], axis=axis)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)
