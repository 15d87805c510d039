"""Layers of Keras that act on values or channels, on folded feature maps."""

from typing import Any

import keras
import numpy as np

from keras_equiattn.deployment.exactness import is_pointwise
from keras_equiattn.deployment.feature_maps import FeatureMap
from keras_equiattn.deployment.rewriting import PlainRewriting
from keras_equiattn.deployment.rewriting import rewrites
from keras_equiattn.graphs import MERGING
from keras_equiattn.graphs import POINTWISE


@rewrites(*POINTWISE, keras.layers.Dropout)
def pointwise(layer: Any, x: Any, to: PlainRewriting) -> Any:
    if getattr(layer, "noise_shape", None) is not None:
        return to.copy([x])
    return _on_folded(to, x)


@rewrites(keras.layers.Activation)
def activation(layer: Any, x: Any, to: PlainRewriting) -> Any:
    if not is_pointwise(layer.activation):
        return to.copy([x])
    return _on_folded(to, x)


@rewrites(*MERGING)
def merging(layer: Any, *inputs: Any, to: PlainRewriting) -> Any:
    return _on_folded(to, *inputs)


@rewrites(keras.layers.BatchNormalization)
def batch_normalization(layer: Any, x: Any, to: PlainRewriting) -> Any:
    """Every group element has its own copy of the numbers of a channel."""
    is_map = isinstance(x, FeatureMap)
    if not is_map or layer.axis not in (-1, 4) or to.has_options:
        return to.copy([x])
    config = {
        name: value
        for name, value in layer.get_config().items()
        if name in ("momentum", "epsilon", "center", "scale", "dtype")
    }
    new = keras.layers.BatchNormalization(name=to.name(), **config)
    weights = [np.tile(weight, x.order) for weight in layer.get_weights()]
    return to.folded(to.apply(new, x.image, weights=weights), x.order)


def _on_folded(to: PlainRewriting, *inputs: Any) -> Any:
    """Calls a copy of the layer on folded feature maps, if all are alike."""
    maps = [x for x in inputs if isinstance(x, FeatureMap)]
    alike = len({(x.order, x.channels) for x in maps}) == 1
    if len(maps) < len(inputs) or not alike or to.has_options:
        return to.copy(inputs)
    if not any(x.is_folded for x in maps):
        return to.copy(inputs)
    (y,) = to.copied([x.image for x in maps])
    return to.folded(y, maps[0].order)
