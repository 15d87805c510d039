"""Pooling, padding, upsampling and projections in layers of Keras."""

from typing import Any

import keras
import numpy as np
from keras import ops

from keras_equiattn import layers
from keras_equiattn.deployment.feature_maps import FeatureMap
from keras_equiattn.deployment.rewriting import PlainRewriting
from keras_equiattn.deployment.rewriting import rewrites
from keras_equiattn.ops.group.directions import direction_matrices
from keras_equiattn.ops.group.pooling import pooling_passes

POOLING = {
    "max": keras.layers.MaxPooling2D,
    "mean": keras.layers.AveragePooling2D,
}
GLOBAL_POOLING = {
    "max": keras.layers.GlobalMaxPooling2D,
    "mean": keras.layers.GlobalAveragePooling2D,
}


@rewrites(layers.SpatialPooling2D)
def pooling(layer: Any, x: Any, to: PlainRewriting) -> Any:
    *means, last = pooling_passes(layer.pool_size, layer.strides, layer.mode)
    kind = POOLING["max" if layer.mode == "max" else "mean"]
    for index, window in enumerate(means, start=1):
        named = to.named(f"mean{index}")
        x = _on_image(
            kind(*window, data_format="channels_last", **named), x, to
        )
    new = kind(*last, data_format="channels_last", **to.named())
    return _on_image(new, x, to)


@rewrites(layers.GlobalSpatialPooling2D)
def global_pooling(layer: Any, x: Any, to: PlainRewriting) -> Any:
    new = GLOBAL_POOLING[layer.mode](
        data_format="channels_last", keepdims=True, **to.named()
    )
    return _on_image(new, x, to)


@rewrites(layers.SpatialUpSampling2D)
def upsampling(layer: Any, x: Any, to: PlainRewriting) -> Any:
    new = keras.layers.UpSampling2D(
        layer.size,
        data_format="channels_last",
        interpolation=layer.interpolation,
        **to.named(),
    )
    return _on_image(new, x, to)


@rewrites(layers.SpatialPadding2D)
def padding(layer: Any, x: Any, to: PlainRewriting) -> Any:
    if layer.mode == "zeros":
        new = keras.layers.ZeroPadding2D(
            layer.padding, data_format="channels_last", **to.named()
        )
        return _on_image(new, x, to)
    image = x.image if isinstance(x, FeatureMap) else x
    if None in image.shape[1:3]:
        return to.copy([x])
    mode: Any = layer.mode
    for axis, count in enumerate(layer.padding, start=1):
        places = np.pad(np.arange(image.shape[axis]), count, mode=mode)
        image = ops.take(image, places.tolist(), axis=axis)
    return to.folded(image, x.order) if isinstance(x, FeatureMap) else image


@rewrites(layers.GroupPooling)
def group_pooling(layer: Any, x: Any, to: PlainRewriting) -> Any:
    pool = ops.max if layer.mode == "max" else ops.mean
    return pool(to.feature_map(x).map, axis=3)


@rewrites(layers.GroupProjection)
def projection(layer: Any, x: Any, to: PlainRewriting) -> Any:
    x = to.feature_map(x)
    if layer.mode != "learned" or x.order == 1:
        return group_pooling(layer, x, to)
    scores = to.dense(x.map, ops.convert_to_numpy(layer.kernel)[:, None])
    weights = keras.layers.Softmax(axis=3, **to.named("weights"))
    return ops.sum(to.product(x.map, to.apply(weights, scores)), axis=3)


@rewrites(layers.GroupToVector2D)
def vectors(layer: Any, x: Any, to: PlainRewriting) -> Any:
    return _votes(layer, x, to, by_component=False)


@rewrites(layers.GroupToAngle2D)
def angles(layer: Any, x: Any, to: PlainRewriting) -> Any:
    both = _votes(layer, x, to, by_component=True)
    row, column = ops.split(both, 2, axis=-1)
    return ops.arctan2(-row, column) / float(layer.frequency)


@rewrites(layers.GroupDropout)
def dropout(layer: Any, x: Any, to: PlainRewriting) -> Any:
    new = keras.layers.Dropout(
        layer.rate, noise_shape=(None, None, None, 1, None), **to.named()
    )
    return to.feature_map(to.apply(new, to.feature_map(x).map))


def _on_image(layer: keras.layers.Layer, x: Any, to: PlainRewriting) -> Any:
    """Calls a layer on an image, or on a folded feature map."""
    if not isinstance(x, FeatureMap):
        return to.apply(layer, x)
    return to.folded(to.apply(layer, x.image), x.order)


def _votes(layer: Any, x: Any, to: PlainRewriting, by_component: bool) -> Any:
    """The sum of the directions of the group elements, a linear map.

    Args:
        layer: the layer of the directions.
        x: the feature map.
        to: the rewriting.
        by_component: whether all components along the rows come first.
    """
    x = to.feature_map(x)
    count = x.channels // 2
    matrices = direction_matrices(layer.group, layer.frequency)
    # From component j of vector u at element h to component i of vector v.
    kernel = np.einsum("hij,uv->hujvi", matrices, np.eye(count))
    if by_component:
        kernel = np.moveaxis(kernel, 4, 3)
    size = x.order * x.channels
    return to.dense(x.image, kernel.reshape(size, x.channels))
