"""Which calls of a network give the same bits in every pose.

A turn moves values to other places, and so changes the order of the terms of a
sum over places or group elements: sums of floats then differ by rounding. And a
function such as the sigmoid is computed in one way where processors work on
sixteen numbers at once, and in another for the numbers that are left over.
`quantize` makes sums of whole numbers out of the sums that it knows, and tables
out of such functions. Other calls are exact only if they are known to compute
every value alone, by arithmetic, or to move values.
"""

import math
from collections.abc import Sequence
from typing import Any

import keras

from keras_equiattn.deployment.integers import EXACT
from keras_equiattn.deployment.integers import INTEGER_LAYERS
from keras_equiattn.deployment.integers import Levels
from keras_equiattn.deployment.integers import limits
from keras_equiattn.deployment.integers import Scaling
from keras_equiattn.graphs import arguments
from keras_equiattn.graphs import MERGING
from keras_equiattn.graphs import POINTWISE
from keras_equiattn.graphs import producer

# Sums without weights, by the axes that they sum over.
POOLING = (keras.layers.AveragePooling2D, keras.layers.AveragePooling3D)
GLOBAL_POOLING = (
    keras.layers.GlobalAveragePooling2D,
    keras.layers.GlobalAveragePooling3D,
)
# Sums without weights in `keras.ops`, by the names of their classes.
OPERATIONS = ("Mean", "Sum")
# Layers that move values, compute each alone, or take the largest.
EXACT_LAYERS = (
    *(kind for kind in POINTWISE if kind is not keras.layers.ELU),
    *MERGING,
    Levels,
    Scaling,
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
# Layers after which the last axis is that of channels if it was before.
KEEPING_CHANNELS = (
    *POINTWISE,
    *MERGING,
    *POOLING,
    Scaling,
    keras.layers.Activation,
    keras.layers.BatchNormalization,
    keras.layers.Dropout,
    keras.layers.MaxPooling2D,
    keras.layers.MaxPooling3D,
    keras.layers.Softmax,
    keras.layers.UpSampling2D,
    keras.layers.ZeroPadding2D,
)
# Exact operations of `keras.ops`, by the names of their classes.
EXACT_OPERATIONS = frozenset(
    """
    Abs Absolute Add Amax Amin BroadcastTo Cast Ceil Clip Concatenate Copy
    DepthToSpace Divide DivideNoNan Equal ExpandDims Floor FloorDivide
    Greater GreaterEqual HardShrink HardSigmoid HardSilu HardTanh LeakyRelu
    Less LessEqual LogicalAnd LogicalNot LogicalOr Max MaxPool Maximum Min
    Minimum Mod Moveaxis Multiply Negative NotEqual OnesLike Pad Ravel
    Reciprocal Relu Relu6 Repeat Reshape Round Sign SoftShrink Softsign
    SpaceToDepth Sqrt Square Squeeze Stack StopGradient Subtract Swapaxes
    Threshold Tile Transpose TrueDivide Where ZerosLike
    """.split()  # noqa: SIM905
)
# Functions of one value that are more than arithmetic: those of `keras.ops`, by
# the names of their classes, and those of `keras.activations`.
CURVED_OPERATIONS = frozenset(
    """
    Arccos Arccosh Arcsin Arcsinh Arctan Arctanh Cbrt Celu Cos Cosh Elu Erf
    Erfc Exp Exp2 Expm1 Gelu Log Log10 Log1p Log2 LogSigmoid Power Rsqrt
    Selu Sigmoid Silu Sin Sinh Softplus Tan Tanh TanhShrink
    """.split()  # noqa: SIM905
)
CURVED_ACTIVATIONS = frozenset(
    """
    celu elu exponential gelu log_sigmoid mish selu sigmoid silu softplus tanh
    tanh_shrink
    """.split()  # noqa: SIM905
)
# Functions of `keras.activations` that look at several values.
NOT_POINTWISE = ("glu", "log_softmax", "softmax", "sparse_softmax", "sparsemax")
# Operations that pick entries: exact if they leave the axes of places and of
# group elements alone. Otherwise the sums of what they pick would be in another
# order.
PICKING = frozenset({"GetItem", "Slice", "Split", "Take", "TakeAlongAxis"})


def becomes_whole(node: Any) -> bool:
    """Whether `quantize` makes a sum of whole numbers out of a call."""
    operation = node.operation
    if getattr(operation, "data_format", None) == "channels_first":
        return False
    if type(operation) in INTEGER_LAYERS:
        activation = operation.activation
        return _fits(operation) and (
            is_exact_activation(activation) or is_curved_activation(activation)
        )
    if type(operation) is keras.layers.UpSampling2D:
        # The weights of the four terms have powers of two as denominators if
        # the sizes are powers of two.
        return operation.interpolation == "bilinear" and all(
            size & (size - 1) == 0 for size in operation.size
        )
    return 0 < _terms(node) * limits(signed=False)[1] <= EXACT


def is_curved(node: Any) -> bool:
    """Whether a call is a function of each value that `quantize` tabulates."""
    operation = node.operation
    if len(node.input_tensors) != 1:
        return False
    if isinstance(operation, keras.layers.Activation):
        return is_curved_activation(operation.activation)
    kind = type(operation)
    if isinstance(operation, keras.layers.Layer):
        return kind is keras.layers.ELU
    args, kwargs = arguments(node, node.input_tensors)
    others = keras.tree.flatten([args, kwargs])
    # The exponents of an array differ from channel to channel.
    is_of_one_value = sum(hasattr(x, "shape") for x in others) == 1
    return kind.__name__ in CURVED_OPERATIONS and is_of_one_value


def is_exact(node: Any) -> bool:
    """Whether a call gives the same bits in every pose, if its inputs do."""
    operation = node.operation
    kind = type(operation)
    if kind.__name__ == "Softmax":
        return _is_along_channels(operation.axis, node.input_tensors[0])
    if not isinstance(operation, keras.layers.Layer):
        if kind.__name__ in PICKING:
            return _picks_channels(node)
        return kind.__name__ in EXACT_OPERATIONS
    if kind is keras.layers.Activation:
        return is_exact_activation(operation.activation) and (
            is_pointwise(operation.activation)
            or _is_along_channels(-1, node.input_tensors[0])
        )
    if kind is keras.layers.UpSampling2D:
        return operation.interpolation == "nearest"
    return kind in EXACT_LAYERS


def uses_batch_statistics(node: Any) -> bool:
    """Whether a call asks for what a layer does in training."""
    args, kwargs = arguments(node, node.input_tensors)
    return True in (*args[1:], kwargs.get("training"))


def is_pointwise(activation: Any) -> bool:
    """Whether it is known that an activation acts on each value alone."""
    name = _name_in_keras(activation)
    return name not in ("", *NOT_POINTWISE)


def is_curved_activation(activation: Any) -> bool:
    """Whether an activation is a function of one value that is tabulated."""
    return _name_in_keras(activation) in CURVED_ACTIVATIONS


def is_exact_activation(activation: Any) -> bool:
    """Whether an activation is known to give the same bits in every pose."""
    name = _name_in_keras(activation)
    # `glu` contains a sigmoid, and `log_softmax` a logarithm.
    return name not in ("", "glu", "log_softmax", *CURVED_ACTIVATIONS)


def _fits(layer: Any) -> bool:
    """Whether the sums of a linear layer are below 2^24, with small weights."""
    terms = math.prod(layer.kernel.shape)
    terms //= layer.kernel.shape[INTEGER_LAYERS[type(layer)].output_axis]
    return terms * limits(signed=False)[1] < 2 * EXACT - 2


def _picks_channels(node: Any) -> bool:
    """Whether an operation leaves places and group elements as they are."""
    before, after = node.input_tensors[0].shape, node.outputs[0].shape
    if len(before) != len(after):
        return False
    if hasattr(node.operation, "axis"):
        return node.operation.axis in (-1, len(before) - 1)
    return len(before) < 5 or before[3] == after[3]


def _is_along_channels(axis: Any, tensor: Any) -> bool:
    """Whether an axis is the last one, and known to be that of channels."""
    axes = [axis] if isinstance(axis, int) else list(axis)
    if any(a not in (-1, len(tensor.shape) - 1) for a in axes):
        return False
    while True:
        node = producer(tensor)
        kind = type(node.operation)
        if node.is_input or kind in (*INTEGER_LAYERS, *GLOBAL_POOLING):
            return True
        before = node.input_tensors[0]
        # How `plain` gives a map its axis of group elements back.
        is_unfolded = (
            kind is keras.layers.Reshape
            and len(before.shape) == 4
            and len(tensor.shape) == 5
        )
        if not is_unfolded and kind not in KEEPING_CHANNELS:
            return False
        tensor = before


def _name_in_keras(activation: Any) -> str:
    """The name of an activation of Keras; "" for any other function."""
    name = getattr(activation, "__name__", "")
    return name if getattr(keras.activations, name, None) is activation else ""


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
