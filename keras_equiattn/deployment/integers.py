"""Layers that compute with small whole numbers, which floats hold exactly.

A sum of floats depends on the order of its terms, and a turned image has
another order, so layers are equivariant only to rounding. A sum of whole
numbers below 2^24 does not depend on that order. These layers take levels,
whole numbers of 8 bits, and have weights of 8 bits; every sum of their products
is exact in float32, on every backend and in every file that `export` writes.
"""

from typing import Any

import keras
import numpy as np
from keras import ops

from keras_equiattn import _checks
from keras_equiattn.ops._types import Shape
from keras_equiattn.ops._types import Tensor

PACKAGE = "keras_equiattn"
# Whole numbers up to here are exact in float32, in sums of any order too.
EXACT = 2**24


def limits(signed: bool, bits: int = 8) -> tuple[int, int]:
    """The least and the largest level."""
    half = 2 ** (bits - 1)
    return (-half, half - 1) if signed else (0, 2 * half - 1)


@keras.saving.register_keras_serializable(PACKAGE)
class Levels(keras.layers.Layer):
    """Rounds to multiples of a step, and returns which multiple it is.

    Args:
        step: the distance of two levels.
        signed: whether there are levels below zero: with 8 bits they go from
            -128 to 127, or from 0 to 255. What lies beyond becomes the nearest
            level.
        bits: the bits of a level.
        **kwargs: arguments of `keras.layers.Layer`.

    Input shape:
        Any.

    Output shape:
        The shape of the input; the values are whole numbers in float32.
    """

    def __init__(
        self, step: float, signed: bool, bits: int = 8, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.step = _checks.number(
            step, "step", "a positive number", lambda n: n > 0
        )
        self.signed = _checks.flag(signed, "signed")
        self.bits = _checks.integer(bits, "bits", 2)

    @property
    def limits(self) -> tuple[int, int]:
        """The least and the largest level."""
        return limits(self.signed, self.bits)

    def call(self, inputs: Tensor) -> Tensor:
        return ops.clip(ops.round(inputs / self.step), *self.limits)

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "step": self.step,
            "signed": self.signed,
            "bits": self.bits,
        }


@keras.saving.register_keras_serializable(PACKAGE)
class Table(keras.layers.Layer):
    """A function of levels, stored as a table of its values.

    Args:
        least: the least level.
        size: how many levels there are.
        **kwargs: arguments of `keras.layers.Layer`.

    Input shape:
        Any.

    Output shape:
        The shape of the input.
    """

    def __init__(self, least: int, size: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.least = int(least)
        self.size = _checks.integer(size, "size")

    def build(self, input_shape: Shape) -> None:
        self.values = self.add_weight(
            shape=(self.size, 1),
            initializer="zeros",
            trainable=False,
            name="values",
        )

    def call(self, inputs: Tensor) -> Tensor:
        places = ops.cast(inputs - self.least, "int32")
        # An embedding, which every runtime knows.
        return ops.squeeze(ops.take(self.values, places, axis=0), axis=-1)

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "least": self.least, "size": self.size}


@keras.saving.register_keras_serializable(PACKAGE)
class Scaling(keras.layers.Layer):
    """`factor * x + offset` with numbers for each channel.

    A batch normalization computes its factor from the variance when it runs,
    and not all programs do that the same way for all group elements.

    Args:
        axis: the axis of the channels.
        **kwargs: arguments of `keras.layers.Layer`.

    Input shape:
        Any.

    Output shape:
        The shape of the input.
    """

    def __init__(self, axis: int = -1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.axis = int(axis)

    def build(self, input_shape: Shape) -> None:
        shape = [1] * len(input_shape)
        shape[self.axis] = input_shape[self.axis]
        self.factor = self.add_weight(
            shape=shape, initializer="ones", trainable=False, name="factor"
        )
        self.offset = self.add_weight(
            shape=shape, initializer="zeros", trainable=False, name="offset"
        )

    def call(self, inputs: Tensor) -> Tensor:
        return inputs * self.factor + self.offset

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "axis": self.axis}


class IntegerLayer(keras.layers.Layer):
    """A linear layer of Keras with weights of 8 bits, on levels.

    The result is `activation(scale * (kernel . levels + bias))`: sum and bias
    are whole numbers, and there is a scale for each output channel.

    Args:
        layer: the configuration of the layer of Keras that it stands for.
        **kwargs: arguments of `keras.layers.Layer`.
    """

    kind: type[keras.layers.Layer]
    output_axis: int

    def __init__(self, layer: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.layer = dict(layer)
        # It is never built, and only says how the weights are used.
        self._plain = self.kind.from_config(self.layer)
        self.activation = self._plain.activation

    def build(self, input_shape: Shape) -> None:
        shape = self.kernel_shape(input_shape)
        channels = shape[self.output_axis]
        self.kernel = self.add_weight(
            shape=shape,
            initializer="zeros",
            dtype="int8",
            trainable=False,
            autocast=False,
            name="kernel",
        )
        self.bias = self.add_weight(
            shape=(channels,),
            initializer="zeros",
            dtype="int32",
            trainable=False,
            autocast=False,
            name="bias",
        )
        self.scale = self.add_weight(
            shape=(channels,), initializer="ones", trainable=False, name="scale"
        )

    def kernel_shape(self, input_shape: Shape) -> Shape:
        """The shape of the kernel of the layer that it stands for."""
        raise NotImplementedError(f"{type(self).__name__}.kernel_shape")

    def product(self, levels: Tensor, kernel: Tensor) -> Tensor:
        """The sums of products of whole numbers."""
        raise NotImplementedError(f"{type(self).__name__}.product")

    def call(self, inputs: Tensor) -> Tensor:
        kernel = ops.cast(self.kernel, "float32")
        y = self.product(inputs, kernel) + ops.cast(self.bias, "float32")
        # It changes no whole number, but without it programs would multiply
        # the scale into the kernel, whose numbers would not be whole any more.
        return self.activation(ops.round(y) * self.scale)

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        return self._plain.compute_output_shape(input_shape)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "layer": self.layer}


@keras.saving.register_keras_serializable(PACKAGE)
class IntegerConv2D(IntegerLayer):
    """`keras.layers.Conv2D` with weights of 8 bits, see `IntegerLayer`.

    Input shape:
        `(batch, height, width, channels)`, levels.

    Output shape:
        `(batch, new_height, new_width, filters)`.
    """

    kind = keras.layers.Conv2D
    output_axis = 3

    def kernel_shape(self, input_shape: Shape) -> Shape:
        layer = self._plain
        channels = input_shape[-1] // layer.groups
        return (*layer.kernel_size, channels, layer.filters)

    def product(self, levels: Tensor, kernel: Tensor) -> Tensor:
        layer = self._plain
        return ops.conv(
            levels,
            kernel,
            strides=layer.strides,
            padding=layer.padding,
            data_format="channels_last",
            dilation_rate=layer.dilation_rate,
        )


@keras.saving.register_keras_serializable(PACKAGE)
class IntegerConv2DTranspose(IntegerLayer):
    """`keras.layers.Conv2DTranspose` with weights of 8 bits, see
    `IntegerLayer`.

    Input shape:
        `(batch, height, width, channels)`, levels.

    Output shape:
        `(batch, new_height, new_width, filters)`.
    """

    kind = keras.layers.Conv2DTranspose
    output_axis = 2

    def kernel_shape(self, input_shape: Shape) -> Shape:
        layer = self._plain
        return (*layer.kernel_size, layer.filters, input_shape[-1])

    def product(self, levels: Tensor, kernel: Tensor) -> Tensor:
        layer = self._plain
        return ops.conv_transpose(
            levels,
            kernel,
            strides=layer.strides,
            padding=layer.padding,
            output_padding=layer.output_padding,
            data_format="channels_last",
            dilation_rate=layer.dilation_rate,
        )


@keras.saving.register_keras_serializable(PACKAGE)
class IntegerDense(IntegerLayer):
    """`keras.layers.Dense` with weights of 8 bits, see `IntegerLayer`.

    Input shape:
        `(batch, ..., channels)`, levels.

    Output shape:
        `(batch, ..., units)`.
    """

    kind = keras.layers.Dense
    output_axis = 1

    def kernel_shape(self, input_shape: Shape) -> Shape:
        return (input_shape[-1], self._plain.units)

    def product(self, levels: Tensor, kernel: Tensor) -> Tensor:
        return ops.matmul(levels, kernel)


INTEGER_LAYERS = {
    layer.kind: layer
    for layer in (IntegerConv2D, IntegerConv2DTranspose, IntegerDense)
}


def integer_weights(
    kernel: np.ndarray,
    bias: np.ndarray,
    axis: int,
    step: float,
    largest: int,
    bits: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Whole numbers for a kernel and a bias, and their scales.

    Each output channel has its own scale: the smallest for which its weights
    fit into the bits, and no sum of products can reach 2^24.

    Args:
        kernel, bias: the weights of the linear layer.
        axis: the axis of the outputs in the kernel.
        step: the step of the levels that the layer takes.
        largest: the largest absolute level.
        bits: the bits of the weights.

    Returns:
        The kernel in int8, the bias in int32 and the factor of each channel,
        in float32.

    Raises:
        ValueError: if a sum has too many terms.
    """
    rows = np.moveaxis(kernel, axis, -1).astype("float64")
    rows = rows.reshape(-1, kernel.shape[axis])
    most = 2 ** (bits - 1) - 1
    # Rounding changes each weight by half a unit at most, and the bias too.
    room = EXACT - largest * len(rows) / 2 - 1
    if room <= 0:
        raise ValueError(
            f"A sum of {len(rows)} products of 8 bits does not fit into the 24 "
            "bits that float32 holds exactly"
        )
    # Symmetric kernels have the same numbers in another order: sorted, they
    # have the same sum, and so the same scale.
    total = np.sort(abs(rows), axis=0).sum(axis=0)
    scale = np.maximum(
        abs(rows).max(axis=0) / most,
        (largest * total + abs(bias) / step) / room,
    )
    scale = np.where(scale > 0, scale, 1.0)
    shape = [1] * kernel.ndim
    shape[axis] = -1
    whole = np.clip(np.rint(kernel / scale.reshape(shape)), -most, most)
    offset = np.rint(bias / (scale * step))
    return (
        whole.astype("int8"),
        offset.astype("int32"),
        (scale * step).astype("float32"),
    )
