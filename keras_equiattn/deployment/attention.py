"""Attention that layers of Keras can compute without much memory."""

from typing import Any

import keras
from keras import ops

from keras_equiattn import layers
from keras_equiattn.deployment.convolutions import group_kernel
from keras_equiattn.deployment.convolutions import lifting_kernel
from keras_equiattn.deployment.feature_maps import FeatureMap
from keras_equiattn.deployment.rewriting import PlainRewriting
from keras_equiattn.deployment.rewriting import rewrites


@rewrites(layers.SqueezeExcite)
def squeeze_excite(layer: Any, x: Any, to: PlainRewriting) -> Any:
    is_map = isinstance(x, FeatureMap)
    tensor = x.map if is_map else x
    pool = (
        keras.layers.GlobalAveragePooling3D
        if is_map
        else keras.layers.GlobalAveragePooling2D
    )
    y = to.apply(pool(data_format="channels_last", **to.named("mean")), tensor)
    for part, activation in (("reduce", "relu"), ("expand", "sigmoid")):
        kernel = getattr(layer, f"{part}_kernel")
        bias = getattr(layer, f"{part}_bias")
        dense = keras.layers.Dense(
            kernel.shape[-1], activation=activation, **to.named(part)
        )
        y = to.apply(dense, y, weights=[kernel, bias])
    ones = (1,) * (len(tensor.shape) - 2)
    y = to.product(tensor, to.reshaped(y, (*ones, tensor.shape[-1])))
    return to.feature_map(y) if is_map else y


@rewrites(layers.InputAttention)
def input_attention(layer: Any, x: Any, to: PlainRewriting) -> Any:
    """`(1 - aX aC) x`, with `1 - aX aC = (1 - aC) + aC (1 - aX)`."""
    is_map = isinstance(x, FeatureMap)
    image = x.image if is_map else x
    attended, effective = image, None
    if layer.channel_kernel_1 is not None:
        scores = _channel_scores(layer, image, is_map, to)
        channel = to.activation(scores, "sigmoid")
        effective = to.activation(to.negative(scores), "sigmoid")
        attended = to.product(image, channel)
    if layer.spatial_kernel is not None:
        if is_map:
            attended = to.folded(attended, x.order).map
        scores = _spatial_scores(layer, attended, to)
        spatial = to.activation(to.negative(scores), "sigmoid")
        if is_map:
            # The attention of an element goes to all of its channels.
            spatial = ops.repeat(spatial, x.channels, axis=-1)
        if effective is not None:
            effective = to.sum(effective, to.product(channel, spatial))
        else:
            effective = spatial
    y = to.product(image, effective)
    return to.folded(y, x.order) if is_map else y


def _channel_scores(
    layer: Any, image: Any, is_map: bool, to: PlainRewriting
) -> Any:
    """`(batch, 1, 1, order * channels)`: a perceptron of two statistics."""
    first, second = (
        group_kernel(layer, kernel[None, None])[0, 0]
        if is_map
        else ops.convert_to_numpy(kernel)
        for kernel in (layer.channel_kernel_1, layer.channel_kernel_2)
    )
    hidden = []
    for name, pool in (
        ("mean", keras.layers.GlobalAveragePooling2D),
        ("max", keras.layers.GlobalMaxPooling2D),
    ):
        statistic = to.apply(
            pool(data_format="channels_last", keepdims=True, **to.named(name)),
            image,
        )
        hidden.append(to.dense(statistic, first, "relu"))
    # The second layer is linear, so that one serves the sum of both.
    return to.dense(to.sum(*hidden), second)


def _spatial_scores(layer: Any, x: Any, to: PlainRewriting) -> Any:
    """`(batch, height, width, order or 1)`: a convolution of two statistics."""
    statistics = ops.stack([ops.mean(x, axis=-1), ops.max(x, axis=-1)], axis=-1)
    is_map = len(x.shape) == 5
    if is_map:
        statistics = to.feature_map(statistics).image
    kernel = (group_kernel if is_map else lifting_kernel)(
        layer, layer.kernels().spatial
    )
    convolution = keras.layers.Conv2D(
        kernel.shape[-1],
        kernel.shape[:2],
        padding="same",
        dilation_rate=layer.attention_dilation_rate,
        use_bias=False,
        data_format="channels_last",
        **to.named("spatial"),
    )
    scores = to.apply(convolution, statistics, weights=[kernel])
    # Images are lifted: the largest score of all group elements counts.
    return scores if is_map else ops.max(scores, axis=-1, keepdims=True)
