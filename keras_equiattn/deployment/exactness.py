"""Which calls of a network give the same bits in every pose.

A turn moves values to other places, and so changes the order of the terms of a
sum over places or group elements: sums of floats then differ by rounding.
`quantize` makes sums of whole numbers out of those that it knows. Other calls
are exact only if they are known to compute every value alone, or to move
values.
"""

import math
from collections.abc import Sequence
from typing import Any

import keras

from keras_equiattn.deployment.integers import EXACT
from keras_equiattn.deployment.integers import INTEGER_LAYERS
from keras_equiattn.deployment.integers import Levels
from keras_equiattn.deployment.integers import UNSIGNED
from keras_equiattn.graphs import arguments
from keras_equiattn.graphs import MERGING
from keras_equiattn.graphs import POINTWISE

# Sums without weights, by the axes that they sum over.
POOLING = (keras.layers.AveragePooling2D, keras.layers.AveragePooling3D)
GLOBAL_POOLING = (
    keras.layers.GlobalAveragePooling2D,
    keras.layers.GlobalAveragePooling3D,
)
# The same, of `keras.ops`, by the names of their classes.
OPERATIONS = ("Mean", "Sum")
# Layers that move values, compute each alone, or take the largest.
EXACT_LAYERS = (
    *POINTWISE,
    *MERGING,
    Levels,
    keras.layers.BatchNormalization,
    keras.layers.Concatenate,
    keras.layers.Cropping2D,
    keras.layers.Cropping3D,
    keras.layers.Dropout,
    keras.layers.Flatten,
    keras.layers.GlobalMaxPooling2D,
    keras.layers.GlobalMaxPooling3D,
    keras.layers.MaxPooling2D,
    keras.layers.MaxPooling3D,
    keras.layers.Normalization,
    keras.layers.PReLU,
    keras.layers.Permute,
    keras.layers.RepeatVector,
    keras.layers.Rescaling,
    keras.layers.Reshape,
    keras.layers.SpatialDropout2D,
    keras.layers.SpatialDropout3D,
    keras.layers.UpSampling3D,
    keras.layers.ZeroPadding2D,
    keras.layers.ZeroPadding3D,
)
# Operations of `keras.ops` of the same kind, by the names of their classes.
EXACT_OPERATIONS = frozenset(
    """
    Abs Absolute Add Amax Amin Arctan Arctan2 BroadcastTo Cast Ceil Celu
    Clip Concatenate Copy Cos DepthToSpace Divide DivideNoNan Elu Equal Erf
    Exp ExpandDims Expm1 Flip Floor FloorDivide Gelu GetItem Greater
    GreaterEqual HardShrink HardSigmoid HardSilu HardTanh LeakyRelu Less
    LessEqual Log Log1p LogSigmoid LogicalAnd LogicalNot LogicalOr Max
    MaxPool Maximum Min Minimum Mod Moveaxis Multiply Negative NotEqual
    OnesLike Pad Power Ravel Reciprocal Relu Relu6 Repeat Reshape Roll Rot90
    Round Rsqrt Selu Sigmoid Sign Silu Sin Sinh Slice Softplus Softsign
    SpaceToDepth Split Sqrt Square Squeeze Stack StopGradient Subtract
    Swapaxes Take TakeAlongAxis Tan Tanh Threshold Tile Transpose TrueDivide
    Unstack Where ZerosLike
    """.split()  # noqa: SIM905
)
# Exact along the channels, whose order no turn changes.
SOFTMAXES = ("LogSoftmax", "Softmax")


def becomes_whole(node: Any) -> bool:
    """Whether `quantize` makes a sum of whole numbers out of a call."""
    operation = node.operation
    if getattr(operation, "data_format", None) == "channels_first":
        return False
    if type(operation) in INTEGER_LAYERS:
        return _is_of_keras(operation.activation)
    if type(operation) is keras.layers.UpSampling2D:
        # The weights of the four terms are fractions with these denominators.
        return operation.interpolation == "bilinear" and all(
            size & (size - 1) == 0 for size in operation.size
        )
    return 0 < _terms(node) * UNSIGNED[1] <= EXACT


def is_exact(node: Any) -> bool:
    """Whether a call gives the same bits in every pose, if its inputs do."""
    operation = node.operation
    kind = type(operation)
    if kind.__name__ in SOFTMAXES:
        axes = operation.axis
        axes = [axes] if isinstance(axes, int) else list(axes)
        last = len(node.input_tensors[0].shape) - 1
        return all(axis in (-1, last) for axis in axes)
    if not isinstance(operation, keras.layers.Layer):
        return kind.__name__ in EXACT_OPERATIONS
    if kind is keras.layers.Activation:
        return _is_of_keras(operation.activation)
    if kind is keras.layers.UpSampling2D:
        return operation.interpolation == "nearest"
    if kind is keras.layers.BatchNormalization:
        return not uses_batch_statistics(node)
    return kind in EXACT_LAYERS


def uses_batch_statistics(node: Any) -> bool:
    """Whether a layer is called as in training whenever the network runs."""
    args, kwargs = arguments(node, node.input_tensors)
    return True in (*args[1:], kwargs.get("training"))


def _is_of_keras(activation: Any) -> bool:
    """Whether it is known not to look at several places."""
    name = getattr(activation, "__name__", "")
    return getattr(keras.activations, name, None) is activation


def _terms(node: Any) -> int:
    """How many terms a sum without weights has; 0 for another call.

    Sizes that are not known count as one.
    """
    operation = node.operation
    if type(operation) in POOLING:
        return math.prod(operation.pool_size)
    shape = node.input_tensors[0].shape
    if type(operation) in GLOBAL_POOLING:
        return _size(shape, range(1, len(shape) - 1))
    is_layer = isinstance(operation, keras.layers.Layer)
    if is_layer or type(operation).__name__ not in OPERATIONS:
        return 0
    axes = operation.axis
    if axes is None:
        axes = range(len(shape))
    return _size(shape, [axes] if isinstance(axes, int) else list(axes))


def _size(shape: Sequence[int | None], axes: Sequence[int]) -> int:
    return math.prod(shape[axis] or 1 for axis in axes)
