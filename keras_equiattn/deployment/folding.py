"""Batch normalization as part of the layer before it."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_equiattn.deployment.exactness import uses_batch_statistics
from keras_equiattn.graphs import arguments
from keras_equiattn.graphs import nodes
from keras_equiattn.graphs import with_calls

# The axis of the outputs in the kernels of the layers that normalization can
# become a part of.
OUTPUT_AXES = {
    keras.layers.Conv2D: 3,
    keras.layers.Conv2DTranspose: 2,
    keras.layers.Dense: 1,
}


def without_batch_normalization(model: keras.Model) -> keras.Model:
    """Folds batch normalizations into the linear layers before them.

    Where a batch normalization takes what a convolution or a dense layer
    returns, and nothing else does, it is a factor and an offset for every
    channel, which go into kernel and bias. Others stay.

    Args:
        model: a functional model without models in it. All layers that change
            nothing are shared with the new model.

    Returns:
        A model that predicts the same. It must not be trained.
    """
    calls = [node for node in nodes(model) if not node.is_input]
    uses = Counter(id(x) for node in calls for x in node.input_tensors)
    uses.update(map(id, model.outputs))
    times = Counter(id(node.operation) for node in calls)
    sources = {id(node.outputs[0]): node for node in calls}
    folded = {}
    for node in calls:
        layer = node.operation
        if isinstance(layer, keras.layers.BatchNormalization):
            source = sources.get(id(node.input_tensors[0]))
            is_fixed = not uses_batch_statistics(node)
            if source and is_fixed and _goes_into(layer, source, uses, times):
                folded[id(source.operation)] = layer

    def call(node: Any, taken: list[Any]) -> Sequence[Any]:
        layer = node.operation
        if layer in folded.values():
            return taken  # it is part of the layer before
        if id(layer) in folded:
            return [_with(layer, folded[id(layer)], taken[0])]
        args, kwargs = arguments(node, taken)
        return keras.tree.flatten(layer(*args, **kwargs))

    return with_calls(model, call)


def _goes_into(
    normalization: Any, source: Any, uses: Counter[int], times: Counter[int]
) -> bool:
    """Whether a normalization can be part of the layer that it follows."""
    layer = source.operation
    last = len(source.outputs[0].shape) - 1
    return (
        type(layer) in OUTPUT_AXES
        and layer.activation is keras.activations.linear
        and getattr(layer, "data_format", "channels_last") == "channels_last"
        and normalization.axis in (-1, last)
        and uses[id(source.outputs[0])] == 1
        and times[id(layer)] == times[id(normalization)] == 1
    )


def _with(layer: Any, normalization: Any, x: Any) -> Any:
    """Calls a linear layer that a normalization is part of."""
    factor, offset = factor_and_offset(normalization)
    kernel = ops.convert_to_numpy(layer.kernel)
    bias = 0.0 if layer.bias is None else ops.convert_to_numpy(layer.bias)
    bias = bias * factor + offset
    shape = [1] * kernel.ndim
    shape[OUTPUT_AXES[type(layer)]] = -1
    new = type(layer).from_config({**layer.get_config(), "use_bias": True})
    y = new(x)
    new.set_weights([kernel * factor.reshape(shape), bias])
    return y


def factor_and_offset(normalization: Any) -> tuple[np.ndarray, np.ndarray]:
    """The factor and the offset of a batch normalization for each channel."""
    mean = ops.convert_to_numpy(normalization.moving_mean)
    variance = ops.convert_to_numpy(normalization.moving_variance)
    # In double precision, so that equal variances have equal factors.
    factor = 1 / np.sqrt(variance.astype("float64") + normalization.epsilon)
    if normalization.gamma is not None:
        factor *= ops.convert_to_numpy(normalization.gamma)
    offset = -mean * factor
    if normalization.beta is not None:
        offset = offset + ops.convert_to_numpy(normalization.beta)
    return factor, offset
