"""Rewrites the graph of a network in layers of Keras, call by call."""

import warnings
from typing import Any

import keras

from keras_equiattn import _checks
from keras_equiattn.deployment.feature_maps import FeatureMap
from keras_equiattn.deployment.folding import without_batch_normalization
from keras_equiattn.deployment.rewriting import is_own
from keras_equiattn.deployment.rewriting import PlainRewriting
from keras_equiattn.deployment.rewriting import rewriter_of
from keras_equiattn.graphs import has_graph
from keras_equiattn.graphs import like_inputs
from keras_equiattn.graphs import nodes
from keras_equiattn.graphs import require_graph
from keras_equiattn.graphs import structure


def plain(
    model: keras.Model,
    fold_batch_normalization: bool = False,
    name: str | None = None,
) -> keras.Model:
    """Makes a network of Keras' own layers that computes the same.

    Group convolutions become `Conv2D` with the orbit of their kernels as
    weights, so that no orbit is computed any more; pooling, padding,
    upsampling, projections, Squeeze-and-Excitation, input attention and
    co-attention become layers of Keras too. Loading the network needs Keras
    alone. It is meant for prediction: weights of the group elements are copies,
    and training would make them differ.

    Attention whose form in layers of Keras would need many times the memory
    stays as it is: full, channel and spatial attention on convolutions,
    attention in windows, group self-attention, multi-head attention on a group
    and ACmix. A warning names the layers that stay, and loading the network
    then needs this library.

    Args:
        model: a functional or Sequential model that is built, with layers of
            this library, of Keras, or other ones. It is not changed.
        fold_batch_normalization: whether a batch normalization that directly
            follows a convolution or a dense layer goes into its weights.
        name: the name of the new network; None keeps that of the model.

    Returns:
        A functional model with the same inputs, and with outputs that are equal
        to rounding. Layers keep the names and the dtype policies of those that
        they replace.

    Symmetry:
        The symmetry of the model.

    Raises:
        ValueError: for bad arguments, such as a model without a graph.

    Example:
        >>> inputs = keras.Input((28, 28, 1))
        >>> x = LiftingConv2D(8, 3, group="p4", activation="relu")(inputs)
        >>> x = GroupConv2D(8, 3, group="p4")(x)
        >>> outputs = keras.layers.GlobalAveragePooling3D()(x)
        >>> network = plain(keras.Model(inputs, outputs))
        >>> network.layers[1].output.shape  # four elements of eight channels
        (None, 26, 26, 32)

    References:
        - [Cohen and Welling, 2016](https://arxiv.org/abs/1602.07576), section
          7, on group convolutions as planar ones
    """
    require_graph(model)
    _checks.flag(fold_batch_normalization, "fold_batch_normalization")
    to = PlainRewriting([x.name for x in model.inputs])
    inputs = like_inputs(model)
    outputs = [
        x.map if isinstance(x, FeatureMap) else x
        for x in _rewritten(model, [to.value(x) for x in inputs], to)
    ]
    packed = structure(model, inputs, outputs)
    network = keras.Model(*packed, name=name or model.name)
    if fold_batch_normalization:
        network = without_batch_normalization(network)
    if to.kept:
        kept = ", ".join(f"'{n}' ({kind})" for n, kind in to.kept.items())
        warnings.warn(
            "Layers of keras_equiattn stay in the network, which needs this "
            f"library where it is loaded: {kept}",
            stacklevel=2,
        )
    return network


def _rewritten(
    model: keras.Model, inputs: list[Any], to: PlainRewriting
) -> list[Any]:
    """The values in place of the outputs of a model."""
    values = dict(zip(map(id, model.inputs), inputs, strict=True))
    for node in nodes(model):
        if node.is_input:
            continue
        taken = [values[id(tensor)] for tensor in node.input_tensors]
        if has_graph(node.operation):
            given = _rewritten(node.operation, taken, to)
        else:
            to.begin(node)
            given = _rewritten_call(node.operation, taken, to)
        values.update(zip(map(id, node.outputs), given, strict=True))
    return [values[id(tensor)] for tensor in model.outputs]


def _rewritten_call(
    operation: Any, inputs: list[Any], to: PlainRewriting
) -> list[Any]:
    """The values in place of the outputs of a call."""
    rewriter = rewriter_of(operation)
    # Attention maps, for instance, are left to the layers themselves.
    if rewriter is None or (is_own(operation) and to.has_options):
        return to.copy(inputs)
    is_first = is_own(operation) and operation.data_format == "channels_first"
    if is_first:
        inputs = [_channels_last(x, to) for x in inputs]
    # Layers on a group take images as feature maps of order 1.
    is_planar = getattr(operation, "takes", None) == "group" and not isinstance(
        inputs[0], FeatureMap
    )
    if is_planar:
        inputs = [to.folded(x, 1) for x in inputs]
    y = rewriter(operation, *inputs, to=to)
    if is_planar and isinstance(y, FeatureMap):
        y = y.image
    if is_first:
        y = _channels_first(y, to)
    return y if isinstance(y, list) else [y]


def _channels_last(x: Any, to: PlainRewriting) -> Any:
    """An image or a feature map whose channels came first."""
    if isinstance(x, FeatureMap):
        x = keras.ops.transpose(x.map, (0, 2, 3, 4, 1))
        return to.feature_map(x)
    return keras.ops.transpose(x, (0, 2, 3, 1))


def _channels_first(y: Any, to: PlainRewriting) -> Any:
    """An image or a feature map whose channels come first again."""
    if isinstance(y, FeatureMap):
        y = keras.ops.transpose(y.map, (0, 4, 1, 2, 3))
        return to.feature_map(y)
    return keras.ops.transpose(y, (0, 3, 1, 2))
