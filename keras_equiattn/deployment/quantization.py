"""Networks whose sums are sums of whole numbers."""

import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_equiattn import _checks
from keras_equiattn.deployment.exactness import becomes_whole
from keras_equiattn.deployment.exactness import is_curved
from keras_equiattn.deployment.exactness import is_curved_activation
from keras_equiattn.deployment.exactness import is_exact
from keras_equiattn.deployment.exactness import uses_batch_statistics
from keras_equiattn.deployment.folding import factor_and_offset
from keras_equiattn.deployment.integers import INTEGER_LAYERS
from keras_equiattn.deployment.integers import integer_weights
from keras_equiattn.deployment.integers import IntegerLayer
from keras_equiattn.deployment.integers import Levels
from keras_equiattn.deployment.integers import limits
from keras_equiattn.deployment.integers import Scaling
from keras_equiattn.deployment.integers import Table
from keras_equiattn.deployment.network import plain
from keras_equiattn.graphs import input_names
from keras_equiattn.graphs import nodes
from keras_equiattn.graphs import require_float32
from keras_equiattn.graphs import require_graph
from keras_equiattn.graphs import Rewriting
from keras_equiattn.graphs import with_calls

BATCH = 32
# The bits of the levels of tabulated functions. They may be more than 8, since
# these levels are not summed.
TABLE_BITS = 10


def quantize(
    model: keras.Model,
    calibration: Any,
    weight_bits: int = 8,
    name: str | None = None,
) -> keras.Model:
    """Makes a network with weights and activations of 8 bits.

    The network is that of `keras_equiattn.plain` with batch normalization
    folded into its convolutions. The input of a convolution, a dense layer or a
    mean is rounded to 256 levels, the weights to whole numbers of 8 bits, and
    every sum of products is a whole number below 2^24. Such sums do not depend
    on the order of their terms, as sums of floats do. Functions such as the
    sigmoid become tables of 1,024 values. So a network on a group of quarter
    turns and mirror images, such as `"p4"` and `"p4m"`, gives the turned image
    exactly the turned result, to the last bit; `certificate` measures it on a
    file.

    A layer or an operation whose sums are not known to be of whole numbers is
    named in a warning: attention, for example, `DepthwiseConv2D`, layers of
    other libraries, and sums of more values than float32 holds exactly, 65,793
    without weights and 131,585 with them. Where the size of images is not
    known, means over all of an image are taken to be small enough. A layer
    whose sums leave less than 6 of 8 bits to a weight is named as well.

    Levels are the same for a whole feature map, and the scale of a weight is
    that of the largest one of its output channel: both are shared by all
    elements of the group.

    `export` writes ONNX files that compute with integers of 8 bits; the other
    formats hold the same whole numbers in float32.

    Args:
        model: a functional or Sequential model that is built, and trained.
        calibration: images that the network will see, as `model.predict` takes
            them: an array, or a list or a dictionary of several. A hundred are
            enough.
            They say how large activations get; larger activations are later
            clipped. Pass the images of some batches of a dataset.
        weight_bits: bits of a weight, 2 to 8. With 7, processors without
            instructions for dot products of 8 bits, which saturate at 16 bits,
            compute exactly as well.
        name: the name of the new network; None is the name of the model.

    Returns:
        A functional model, which cannot be trained.

    Symmetry:
        The symmetry of the model. It is exact where the group acts on the grid
        and no layer is named in a warning.

    Raises:
        ValueError: for bad arguments, such as a model without a graph or one
            that does not compute in float32, and for calibration images that
            are missing or not finite.

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
    require_graph(model)
    require_float32(model)
    network = _plain(model, name)
    images = _checked(network, calibration)
    sums = [node for node in _calls(network) if becomes_whole(node)]
    tables = [node for node in _calls(network) if is_curved(node)]
    ranges = _ranges(network, [*sums, *tables], images)
    to = _Quantization(network, ranges, bits)

    def call(node: Any, taken: list[Any]) -> list[Any]:
        to.begin(node)
        if node in sums:
            return [to.sum_of_levels(*taken)]
        return [to.table(*taken)] if node in tables else to.call(taken)

    small = with_calls(network, call)
    if to.coarse:
        warnings.warn(
            f"The sums of these layers have so many terms that weights of less "
            f"than {bits - 2} bits keep them exact; compare the accuracy: "
            f"{', '.join(dict.fromkeys(to.coarse))}",
            stacklevel=2,
        )
    return small


class _Quantization(Rewriting):
    """Makes layers on whole numbers in place of linear layers.

    Args:
        network: a network of Keras' own layers.
        ranges: least and largest value of the tensors that are summed, by the
            identity of the tensor.
        bits: the bits of a weight.

    Attributes:
        coarse: names and classes of layers whose weights have fewer bits, so
            that their sums stay exact.
    """

    def __init__(
        self,
        network: keras.Model,
        ranges: dict[int, tuple[float, float]],
        bits: int,
    ) -> None:
        super().__init__([x.name for x in network.inputs])
        self.bits = bits
        self.coarse: list[str] = []
        self._ranges = ranges
        self._made: dict[tuple[int, int], Levels] = {}

    def sum_of_levels(self, x: Any) -> Any:
        """A sum of whole numbers in place of one of floats."""
        layer = self._levels()
        kind = INTEGER_LAYERS.get(type(self.source))
        if kind is not None:
            return self._integer(kind, layer, layer(x))
        (y,) = self.call([layer(x)])
        name = self.name("of_levels")
        return keras.layers.Rescaling(layer.step, name=name)(y)

    def table(self, x: Any) -> Any:
        """A table of the function at the levels of its input, in its place."""
        layer = self._levels(TABLE_BITS)
        least, most = layer.limits
        name = self._new_name("table")
        table = Table(least, most - least + 1, name=name)
        y = table(layer(x))
        levels = np.arange(least, most + 1, dtype="float32")
        (values,) = self.call([ops.convert_to_tensor(levels * layer.step)])
        values = ops.convert_to_numpy(values)
        is_finite = np.isfinite(values)
        if not is_finite.any():
            raise ValueError(
                f"'{self.source.name}' has no finite value between "
                f"{levels[0] * layer.step:g} and {levels[-1] * layer.step:g}, "
                "where its inputs lie for `calibration`"
            )
        # The logarithm of zero, for example: that of the next level will do.
        values = np.interp(levels, levels[is_finite], values[is_finite])
        table.set_weights([values[:, None]])
        return y

    def _levels(self, bits: int = 8) -> Levels:
        """The layer that makes levels of the input: one for all its uses."""
        tensor = self.node.input_tensors[0]
        key = id(tensor), bits
        if key not in self._made:
            least, most = self._ranges[id(tensor)]
            signed = least < 0
            most = max(most, -least)
            step = (most or 1.0) / limits(signed, bits)[1]
            name = self._new_name("levels")
            self._made[key] = Levels(step, signed, bits, name=name)
        return self._made[key]

    def _integer(self, kind: type[IntegerLayer], levels: Levels, x: Any) -> Any:
        """The result of the layer of whole numbers that stands for a layer."""
        source = self.source
        layer = kind(source.get_config(), name=self._new_name())
        y = layer(x)
        kernel = ops.convert_to_numpy(source.kernel)
        bias = np.zeros(kernel.shape[kind.output_axis])
        if source.bias is not None:
            bias = ops.convert_to_numpy(source.bias)
        weights = integer_weights(
            kernel,
            bias,
            axis=kind.output_axis,
            step=levels.step,
            largest=max(map(abs, levels.limits)),
            bits=self.bits,
        )
        if np.abs(weights[0]).max() < 2 ** (self.bits - 3) and kernel.any():
            self.coarse.append(f"'{source.name}' ({type(source).__name__})")
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
    network = _with_known_functions(network)
    floats = [
        f"'{node.operation.name}' ({type(node.operation).__name__})"
        for node in _calls(network)
        if not (becomes_whole(node) or is_curved(node) or is_exact(node))
    ]
    if floats:
        warnings.warn(
            "These layers compute with floats, in an order that may depend on "
            "the pose, and are equivariant to rounding only: "
            f"{', '.join(dict.fromkeys(floats))}",
            stacklevel=3,
        )
    return network


def _with_known_functions(network: keras.Model) -> keras.Model:
    """The network, rewritten to compute alike in every pose where it can.

    Activations that become tables are layers of their own, and batch
    normalizations that could not be folded multiply and add constants.
    """
    to = Rewriting([layer.name for layer in network.layers])

    def call(node: Any, taken: list[Any]) -> list[Any]:
        to.begin(node)
        source = node.operation
        kind = type(source)
        is_normalization = kind is keras.layers.BatchNormalization
        if is_normalization and not uses_batch_statistics(node):
            return [_scaled(source, taken[0], to)]
        if kind in INTEGER_LAYERS and is_curved_activation(source.activation):
            return [_activated(source, taken[0], to)]
        return to.call(taken)

    return with_calls(network, call)


def _scaled(source: Any, x: Any, to: Rewriting) -> Any:
    """Applies a batch normalization as a layer of factors and offsets."""
    layer, is_new = to.shared(Scaling(source.axis, name=to.name("scaling")))
    y = layer(x)
    if is_new:
        values = factor_and_offset(source)
        layer.set_weights([v.reshape(layer.factor.shape) for v in values])
    return y


def _activated(source: Any, x: Any, to: Rewriting) -> Any:
    """Applies a linear layer, and its activation as a layer of its own."""
    config = {**source.get_config(), "activation": None}
    layer, is_new = to.shared(type(source).from_config(config))
    y = layer(x)
    if is_new:
        layer.set_weights(source.get_weights())
    name = to.name("activation")
    after = keras.layers.Activation(source.activation, name=name)
    return to.shared(after)[0](y)


def _calls(network: keras.Model) -> list[Any]:
    """All calls of layers and operations, in their order."""
    return [node for node in nodes(network) if not node.is_input]


def _checked(network: keras.Model, calibration: Any) -> list[np.ndarray]:
    """The calibration images, an array for each input."""
    shapes = [tuple(x.shape) for x in network.inputs]
    if isinstance(calibration, dict):
        names = input_names(network)
        if set(calibration) != set(names):
            raise ValueError(
                f"`calibration` must have images for {names}. Received: a "
                f"dictionary with {list(calibration)}"
            )
        calibration = [calibration[name] for name in names]
    try:
        # Arrays of NumPy and tensors of a backend, but no text and no dataset.
        arrays = [
            ops.convert_to_numpy(x).astype("float32")
            for x in keras.tree.flatten(calibration)
        ]
    except (AttributeError, TypeError, ValueError):
        raise ValueError(
            "`calibration` must be an array of images, or one for each input "
            "of the model: of a dataset, pass the images of some batches. "
            f"Received: {calibration!r}"
        ) from None
    fit = len(arrays) == len(shapes) and all(
        x.ndim == len(shape)
        and all(
            n in (None, m) for n, m in zip(shape[1:], x.shape[1:], strict=True)
        )
        for x, shape in zip(arrays, shapes, strict=True)
    )
    counts = {len(x) for x in arrays if x.ndim}
    if not fit or len(counts) != 1 or 0 in counts:
        raise ValueError(
            "`calibration` must be images for each input of the model, equally "
            f"many and of the shapes {shapes}. Received: arrays of the shapes "
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
