"""Convolutions on a group as convolutions of folded channels."""

from typing import Any

import keras
import numpy as np
from keras import ops

from keras_equiattn import layers
from keras_equiattn.deployment.exactness import is_pointwise
from keras_equiattn.deployment.feature_maps import FeatureMap
from keras_equiattn.deployment.rewriting import PlainRewriting
from keras_equiattn.deployment.rewriting import rewrites
from keras_equiattn.groups import Group
from keras_equiattn.ops.group.kernels import kernel_orbit


@rewrites(layers.LiftingConv2D)
def lifting(layer: Any, x: Any, to: PlainRewriting) -> Any:
    return _convolution(layer, x, lifting_kernel(layer, kernel_of(layer)), to)


@rewrites(layers.GroupConv2D)
def group(layer: Any, x: Any, to: PlainRewriting) -> Any:
    x = to.feature_map(x).image
    return _convolution(layer, x, group_kernel(layer, kernel_of(layer)), to)


@rewrites(layers.CoAttentiveLiftingConv2D)
def co_attentive_lifting(layer: Any, x: Any, to: PlainRewriting) -> Any:
    kernel = ops.convert_to_numpy(layer.attention_kernel)
    scores = to.negative(to.dense(x, kernel[0, 0]))
    x = to.product(x, to.activation(scores, "sigmoid"))
    return lifting(layer, x, to)


@rewrites(layers.CoAttentiveGroupConv2D)
def co_attentive_group(layer: Any, x: Any, to: PlainRewriting) -> Any:
    x = to.feature_map(x)
    kernel = group_kernel(layer, layer.attention_kernel)[0, 0]
    scores = to.negative(to.dense(x.image, kernel))
    attention = to.folded(to.activation(scores, "sigmoid"), x.order)
    return group(layer, to.product(x.map, attention.map), to)


@rewrites(layers.GroupConv2DTranspose)
def transposed(layer: Any, x: Any, to: PlainRewriting) -> Any:
    # Transposed convolutions of Keras have the inputs last.
    kernel = np.swapaxes(group_kernel(layer, kernel_of(layer)), 2, 3)
    image = to.feature_map(x).image
    return _convolution(
        layer, image, kernel, to, keras.layers.Conv2DTranspose, kernel.shape[2]
    )


@rewrites(layers.GroupDepthwiseConv2D)
def depthwise(layer: Any, x: Any, to: PlainRewriting) -> Any:
    y = _depthwise(layer, x, to, layer.bias)
    return _activated(layer, y, to)


@rewrites(layers.GroupSeparableConv2D)
def separable(layer: Any, x: Any, to: PlainRewriting) -> Any:
    y = _depthwise(layer, x, to, None)
    named = to.named("pointwise")
    y = _pointwise(layer, y, layer.pointwise_kernel, to, named)
    return _activated(layer, y, to)


@rewrites(layers.GroupDense)
def dense(layer: Any, x: Any, to: PlainRewriting) -> Any:
    x = to.feature_map(x)
    if layer.input_activation is not None:
        image = to.activation(x.image, layer.input_activation)
        x = to.folded(image, x.order)
    y = _pointwise(layer, x, layer.kernel, to, to.named())
    return _activated(layer, y, to)


def kernel_of(layer: Any) -> Any:
    """The values `(rows, columns, ...)` of the kernel of a convolution."""
    return layer.filters_of(layer.kernel, layer.kernel_size[0])


def lifting_kernel(layer: Any, kernel: Any) -> np.ndarray:
    """`(rows, columns, channels, order * filters)` of a kernel on the plane."""
    orbit = _orbit(layer, kernel, group_axis=False)
    order, rows, columns, channels, filters = orbit.shape
    folded = np.transpose(orbit, (1, 2, 3, 0, 4))
    return folded.reshape(rows, columns, channels, order * filters)


def group_kernel(layer: Any, kernel: Any) -> np.ndarray:
    """`(rows, columns, order * channels, order * filters)` on the group."""
    orbit = _orbit(layer, kernel, group_axis=True)
    order, rows, columns, _, channels, filters = orbit.shape
    folded = np.transpose(orbit, (1, 2, 3, 4, 0, 5))
    return folded.reshape(rows, columns, order * channels, order * filters)


def _orbit(layer: Any, kernel: Any, *, group_axis: bool) -> np.ndarray:
    return ops.convert_to_numpy(
        kernel_orbit(
            kernel,
            layer.group,
            group_axis=group_axis,
            filter_basis=layer.filter_basis,
        )
    )


def _convolution(
    layer: Any,
    image: Any,
    kernel: np.ndarray,
    to: PlainRewriting,
    kind: type = keras.layers.Conv2D,
    filters: int | None = None,
) -> FeatureMap:
    """A convolution of Keras with the options of one on the group.

    Args:
        layer: the convolution on the group.
        image: the input of the new convolution, folded.
        kernel: the kernel of the new convolution.
        to: the rewriting.
        kind: the class of the new convolution.
        filters: the filters of the new convolution; None is the last axis of
            the kernel.
    """
    at_once = is_pointwise(layer.activation)
    new = kind(
        filters or kernel.shape[-1],
        layer.kernel_size,
        strides=layer.strides,
        padding=layer.padding,
        dilation_rate=layer.dilation_rate,
        activation=layer.activation if at_once else None,
        use_bias=layer.use_bias,
        data_format="channels_last",
        **to.named(),
    )
    weights = [kernel, *_bias(layer.bias, layer.group)]
    y = to.apply(new, image, weights=weights)
    y = to.folded(y, layer.group.order)
    return y if at_once else _activated(layer, y, to)


def _pointwise(
    layer: Any,
    x: FeatureMap,
    kernel: Any,
    to: PlainRewriting,
    named: dict[str, Any],
) -> FeatureMap:
    """A linear map of each pixel as a convolution, with the bias of a layer."""
    of_one_pixel = ops.convert_to_tensor(kernel)[None, None]
    orbit = kernel_orbit(of_one_pixel, layer.group, group_axis=True)
    order, *_, channels, filters = orbit.shape
    folded = np.moveaxis(ops.convert_to_numpy(orbit)[:, 0, 0], 0, 2)
    folded = folded.reshape(1, 1, order * channels, order * filters)
    new = keras.layers.Conv2D(
        order * filters,
        1,
        use_bias=layer.use_bias,
        data_format="channels_last",
        **named,
    )
    weights = [folded, *_bias(layer.bias, layer.group)]
    return to.folded(to.apply(new, x.image, weights=weights), x.order)


def _depthwise(layer: Any, x: Any, to: PlainRewriting, bias: Any) -> FeatureMap:
    """A convolution of blocks: the group elements of each channel."""
    x = to.feature_map(x)
    order, channels = x.order, x.channels
    multiplier = layer.depth_multiplier
    kernel = np.concatenate(
        [
            group_kernel(layer, part)
            for part in np.split(
                ops.convert_to_numpy(kernel_of(layer)), channels, axis=3
            )
        ],
        axis=-1,
    )
    new = keras.layers.Conv2D(
        kernel.shape[-1],
        layer.kernel_size,
        strides=layer.strides,
        padding=layer.padding,
        dilation_rate=layer.dilation_rate,
        groups=channels,
        use_bias=bias is not None,
        data_format="channels_last",
        **to.named(),
    )
    weights = [kernel]
    if bias is not None:
        each = np.reshape(ops.convert_to_numpy(bias), (channels, 1, multiplier))
        weights.append(np.repeat(each, order, axis=1).ravel())
    # The elements of one channel are moved next to each other, and back later.
    places: Any = np.arange(order * channels).reshape(order, channels)
    image = ops.take(x.image, places.T.ravel().tolist(), axis=-1)
    y = to.apply(new, image, weights=weights)
    places = np.arange(kernel.shape[-1]).reshape(channels, order, multiplier)
    back = np.swapaxes(places, 0, 1).ravel().tolist()
    return to.folded(ops.take(y, back, axis=-1), order)


def _activated(layer: Any, y: FeatureMap, to: PlainRewriting) -> Any:
    """Applies the activation of a layer."""
    if layer.activation is keras.activations.linear:
        return y
    new = keras.layers.Activation(layer.activation, **to.named("activation"))
    if is_pointwise(layer.activation):
        return to.folded(to.apply(new, y.image), y.order)
    return to.feature_map(to.apply(new, y.map))


def _bias(bias: Any, group: Group) -> list[np.ndarray]:
    """The bias for every group element, in a list that is empty for none."""
    if bias is None:
        return []
    return [np.tile(ops.convert_to_numpy(bias), group.order)]
