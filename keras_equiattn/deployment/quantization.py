"""Networks whose sums are sums of whole numbers."""

import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_equiattn import _checks
from keras_equiattn.deployment.integers import INTEGER_LAYERS
from keras_equiattn.deployment.integers import integer_weights
from keras_equiattn.deployment.integers import IntegerLayer
from keras_equiattn.deployment.integers import Levels
from keras_equiattn.deployment.integers import SIGNED
from keras_equiattn.deployment.integers import UNSIGNED
from keras_equiattn.deployment.network import plain
from keras_equiattn.deployment.rewriting import is_own
from keras_equiattn.graphs import like_inputs
from keras_equiattn.graphs import nodes
from keras_equiattn.graphs import Rewriting
from keras_equiattn.graphs import structure

# Sums without weights: of what they take, levels are made.
SUMS = (
    keras.layers.AveragePooling2D,
    keras.layers.AveragePooling3D,
    keras.layers.GlobalAveragePooling2D,
    keras.layers.GlobalAveragePooling3D,
)
# The same, of `keras.ops`, by the names of their classes.
OPERATIONS = ("Mean", "Sum")
# Operations that sum products of things that both are computed, or that do not
# have whole weights: they stay as they are.
INEXACT = (
    keras.layers.Attention,
    keras.layers.Dot,
    keras.layers.GroupNormalization,
    keras.layers.LayerNormalization,
    keras.layers.MultiHeadAttention,
    keras.layers.UnitNormalization,
)
INEXACT_OPERATIONS = (
    "Cumsum",
    "Einsum",
    "Logsumexp",
    "Matmul",
    "Norm",
    "Normalize",
    "Std",
    "Var",
)
# Exact along the channels, whose order no turn changes.
SOFTMAXES = ("LogSoftmax", "Softmax")
BATCH = 32


def quantize(
    model: keras.Model,
    calibration: Any,
    weight_bits: int = 8,
    name: str | None = None,
) -> keras.Model:
    """Makes a network with weights and activations of 8 bits.

    The network is that of `keras_equiattn.plain` with batch normalization
    folded into its convolutions. What a convolution, a dense layer or a mean
    takes is rounded to 256 levels, the weights to whole numbers of 8 bits, and
    every sum of products is a whole number below 2^24. Such sums do not depend
    on the order of their terms, as sums of floats do. So a network on a group
    of quarter turns and mirror images, such as `"p4"` and `"p4m"`, gives the
    turned image exactly the turned result, to the last bit; `certificate`
    measures it on a file.

    Levels are the same for a whole feature map, and the scale of a weight is
    that of the largest one of its output channel: both are shared by all
    elements of the group.

    `export` writes ONNX files that compute with integers of 8 bits; the other
    formats hold the same whole numbers in float32.

    Args:
        model: a functional or Sequential model that is built, and trained.
        calibration: images that the network will see, as `model.predict` takes
            them: an array, or several for several inputs. A hundred are enough.
            They say how large activations get; what is larger later is cut.
        weight_bits: bits of a weight, 2 to 8. With 7, processors without
            instructions for dot products of 8 bits, which saturate at 16 bits,
            compute exactly as well.
        name: of the new network; None is that of the model.

    Returns:
        A functional model, which cannot be trained.

    Symmetry:
        That of the model. It is exact where the group acts on the grid and no
        layer is named in a warning.

    Raises:
        ValueError: for bad arguments, such as a model without a graph, or no
            or not finite calibration images.

    Example:
        >>> inputs = keras.Input((28, 28, 1))
        >>> x = LiftingConv2D(8, 3, group="p4", activation="relu")(inputs)
        >>> outputs = keras.layers.GlobalAveragePooling3D()(x)
        >>> model = keras.Model(inputs, outputs)
        >>> images = np.random.default_rng(0).uniform(size=(100, 28, 28, 1))
        >>> small = quantize(model, images)
        >>> export(small, "small.onnx")

    References:
        - [Jacob et al., 2018](https://arxiv.org/abs/1712.05877), equations 1 to
          4, with a zero point of zero
    """
    bits = _checks.integer(weight_bits, "weight_bits", 2)
    if bits > 8:
        raise ValueError(
            f"`weight_bits` must be from 2 to 8. Received: {weight_bits!r}"
        )
    network = _plain(model, name)
    images = _checked(network, calibration)
    calls = [node for node in nodes(network) if not node.is_input]
    sums = [node for node in calls if _sums(node)]
    to = _Quantization(network, _ranges(network, sums, images), bits)
    inputs = like_inputs(network)
    values = dict(zip(map(id, network.inputs), inputs, strict=True))
    for node in calls:
        to.begin(node)
        taken = [values[id(x)] for x in node.input_tensors]
        given = to.on_levels(*taken) if node in sums else to.call(taken)
        values.update(zip(map(id, node.outputs), given, strict=True))
    outputs = [values[id(x)] for x in network.outputs]
    return keras.Model(*structure(network, inputs, outputs), name=network.name)


class _Quantization(Rewriting):
    """Makes layers on whole numbers in place of linear layers.

    Args:
        network: of Keras' own layers.
        ranges: least and largest value of the tensors that are summed, by the
            identity of the tensor.
        bits: of a weight.
    """

    def __init__(
        self,
        network: keras.Model,
        ranges: dict[int, tuple[float, float]],
        bits: int,
    ) -> None:
        super().__init__([x.name for x in network.inputs])
        self.bits = bits
        self._ranges = ranges
        self._levels: dict[int, Any] = {}

    def call(self, inputs: Sequence[Any]) -> list[Any]:
        """What the network calls, with other tensors."""
        args, kwargs = self.arguments(inputs)
        return keras.tree.flatten(self.source(*args, **kwargs))

    def on_levels(self, x: Any) -> list[Any]:
        """A sum of whole numbers in place of one of floats."""
        tensor = self.node.input_tensors[0]
        layer = self._levels_of(tensor)
        levels = layer(x)
        kind = INTEGER_LAYERS.get(type(self.source))
        if kind is not None:
            return [self._integer(kind, layer, levels)]
        (y,) = self.call([levels])
        name = self.name("of_levels")
        return [keras.layers.Rescaling(layer.step, name=name)(y)]

    def _levels_of(self, tensor: Any) -> Levels:
        """The layer that makes levels of a tensor: one for all its uses."""
        if id(tensor) not in self._levels:
            least, most = self._ranges[id(tensor)]
            signed = least < 0
            most = max(most, -least)
            step = (most or 1.0) / (SIGNED if signed else UNSIGNED)[1]
            layer = Levels(step, signed, name=self._new_name("levels"))
            self._levels[id(tensor)] = layer
        return self._levels[id(tensor)]

    def _integer(self, kind: type[IntegerLayer], levels: Levels, x: Any) -> Any:
        """The result of the layer of whole numbers that stands for a layer."""
        source = self.source
        layer = kind(source.get_config(), name=self._new_name())
        y = layer(x)
        kernel = ops.convert_to_numpy(source.kernel)
        bias = np.zeros(kernel.shape[kind.output_axis])
        if source.bias is not None:
            bias = ops.convert_to_numpy(source.bias)
        try:
            weights = integer_weights(
                kernel,
                bias,
                axis=kind.output_axis,
                step=levels.step,
                largest=max(map(abs, levels.limits)),
                bits=self.bits,
            )
        except ValueError as error:
            raise ValueError(f"{error}: layer '{source.name}'.") from None
        layer.set_weights(weights)
        return y

    def _new_name(self, suffix: str = "") -> str:
        """A name that no other layer gets."""
        name = self.name(suffix)
        self._names.add(name)
        return name


def _plain(model: keras.Model, name: str | None) -> keras.Model:
    """The plain network; a warning names what computes with floats."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network = plain(model, fold_batch_normalization=True, name=name)
    floats = [
        f"'{node.operation.name}' ({type(node.operation).__name__})"
        for node in nodes(network)
        if is_own(node.operation)
        or isinstance(node.operation, INEXACT)
        or _is_function(node.operation, INEXACT_OPERATIONS)
        or (_is_sum(node.operation) and _is_channels_first(node.operation))
        or _is_softmax_of_places(node)
    ]
    if floats:
        warnings.warn(
            "These layers sum floats, and are equivariant to rounding only: "
            f"{', '.join(floats)}",
            stacklevel=3,
        )
    return network


def _sums(node: Any) -> bool:
    """Whether a call becomes one that sums whole numbers."""
    operation = node.operation
    return _is_sum(operation) and not _is_channels_first(operation)


def _is_sum(operation: Any) -> bool:
    """Whether it sums values of several places or channels."""
    if isinstance(operation, keras.layers.UpSampling2D):
        return operation.interpolation == "bilinear"
    return (
        type(operation) in INTEGER_LAYERS
        or isinstance(operation, SUMS)
        or _is_function(operation, OPERATIONS)
    )


def _is_softmax_of_places(node: Any) -> bool:
    """Whether it is a softmax along another axis than the last."""
    operation = node.operation
    if type(operation).__name__ not in SOFTMAXES:
        return False
    axes = operation.axis
    axes = [axes] if isinstance(axes, int) else list(axes)
    return any(axis not in (-1, _rank(node) - 1) for axis in axes)


def _rank(node: Any) -> int:
    return len(node.input_tensors[0].shape)


def _is_channels_first(operation: Any) -> bool:
    """Whether it is a layer of images whose channels come first."""
    return getattr(operation, "data_format", None) == "channels_first"


def _is_function(operation: Any, names: Sequence[str]) -> bool:
    """Whether it is one of these functions of `keras.ops`."""
    is_layer = isinstance(operation, keras.layers.Layer)
    return not is_layer and type(operation).__name__ in names


def _checked(network: keras.Model, calibration: Any) -> list[np.ndarray]:
    """The calibration images, an array for each input."""
    arrays = [np.asarray(x) for x in keras.tree.flatten(calibration)]
    shapes = [tuple(x.shape) for x in network.inputs]
    fit = len(arrays) == len(shapes) and all(
        x.ndim == len(shape)
        and all(
            n in (None, m) for n, m in zip(shape[1:], x.shape[1:], strict=True)
        )
        for x, shape in zip(arrays, shapes, strict=True)
    )
    if not fit or not all(len(x) for x in arrays):
        raise ValueError(
            "`calibration` must be images for each input of the model, of the "
            f"shapes {shapes}. Received: arrays of the shapes "
            f"{[x.shape for x in arrays]}"
        )
    for x in arrays:
        if not np.isfinite(x).all():
            raise ValueError(
                "`calibration` must be finite. Received: an array of the shape "
                f"{x.shape} with {np.count_nonzero(~np.isfinite(x))} values "
                "that are not"
            )
    return arrays


def _ranges(
    network: keras.Model, sums: Sequence[Any], images: Sequence[np.ndarray]
) -> dict[int, tuple[float, float]]:
    """Least and largest value of each tensor that is summed."""
    tensors = list(
        {id(n.input_tensors[0]): n.input_tensors[0] for n in sums}.values()
    )
    if not tensors:
        return {}
    probe = keras.Model(list(network.inputs), tensors)
    found: dict[int, tuple[float, float]] = {}
    for start in range(0, len(images[0]), BATCH):
        batch = [x[start : start + BATCH] for x in images]
        values = probe.predict_on_batch(batch)
        values = values if len(tensors) > 1 else [values]
        for tensor, value in zip(
            tensors, keras.tree.flatten(values), strict=True
        ):
            if not np.isfinite(value).all():
                raise ValueError(
                    "The network must give finite values for `calibration`. "
                    "Received: a network with values that are not finite at "
                    f"'{tensor.name}'"
                )
            least, most = found.get(id(tensor), (0.0, 0.0))
            found[id(tensor)] = (
                min(least, float(np.min(value))),
                max(most, float(np.max(value))),
            )
    return found
