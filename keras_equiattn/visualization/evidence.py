"""Where the features that speak for a class are."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_equiattn import _checks
from keras_equiattn.graphs import nodes
from keras_equiattn.ops import backend
from keras_equiattn.visualization.sites import Site

Change = Callable[[Any], Any]


def evidence(
    model: keras.Model, images: np.ndarray, chain: list[Site], class_index: int
) -> np.ndarray:
    """How much the features at each position speak for a class.

    The score of the class, less the mean score of all classes, is
    differentiated with respect to the output of a layer. The product of output
    and gradient says how much this difference would grow, to first order, if
    that value were scaled up. It is added up over channels and poses.

    Args:
        model: see `attention_maps`; its last axis is over classes.
        images: a batch.
        chain: the layer, see `borders.inside`.
        class_index: the index of the class.

    Returns:
        `(batch, height, width)`, of the output of the layer.
    """
    classes = model.outputs[0].shape[-1]
    class_index = _checks.integer(class_index, "class_index", 0)
    if class_index >= classes:
        raise ValueError(
            f"`class_index` must be from 0 to {classes - 1}: '{model.name}' "
            f"has {classes} classes. Received: {class_index}"
        )
    x = ops.convert_to_tensor(images, model.inputs[0].dtype)
    kept = []

    def keep(y: Any) -> Any:
        kept.append(y)
        return y

    scores = _run(model, x, chain, keep)
    (features,) = kept
    chosen = ops.one_hot(class_index, classes, dtype=scores.dtype)
    if classes > 1:  # a softmax does not see what all scores have in common
        chosen = chosen - 1 / classes
    _, (gradient,) = backend.vjp(
        lambda y: _run(model, x, chain, lambda _: y),
        (features,),
        ops.broadcast_to(chosen, ops.shape(scores)),
    )
    product = ops.cast(features * gradient, "float32")
    if chain[-1].operation.data_format == "channels_first":
        product = ops.moveaxis(product, 1, -1)
    axes = tuple(range(3, len(product.shape)))
    return np.asarray(ops.convert_to_numpy(ops.sum(product, axis=axes)))


def _run(model: Any, x: Any, chain: list[Site], change: Change) -> Any:
    """The output of a model when the output of one of its layers is changed."""
    site, *inner = chain
    values = {id(model.inputs[0]): x}
    for node in nodes(model):
        if node.is_input:
            continue
        arguments, keywords = node.arguments.fill_in(values)
        is_site = node.outputs[0] is site.outputs[0]
        if is_site and inner:
            result = _run(node.operation, arguments[0], inner, change)
        else:
            result = node.operation(*arguments, **keywords)
            if is_site:
                result = change(result)
        results = keras.tree.flatten(result)
        values |= {
            id(tensor): value
            for tensor, value in zip(node.outputs, results, strict=True)
        }
    return values[id(model.outputs[0])]
