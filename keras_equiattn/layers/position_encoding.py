"""The encoding of relative positions in group self-attention."""

from typing import Any

import keras
import numpy as np
from keras import ops

from keras_equiattn import _checks
from keras_equiattn import groups
from keras_equiattn.layers.base.initializers import fresh
from keras_equiattn.ops._types import Shape
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.papers.position_encoding import encode
from keras_equiattn.ops.papers.position_encoding import seen_offsets


@keras.saving.register_keras_serializable(package="keras_equiattn")
class RelativePositionEncoding(keras.layers.Layer):
    """Encodes offsets as each element of a group sees them.

    `e(h^-1 o) = (R(row of h^-1 o), C(column of h^-1 o))` for every offset `o`
    and group element `h`, with two small networks `R` and `C` of one number:
    dense, layer normalisation, SiLU, dense.

    It works in float32 under every policy of half precision, and in float64
    under "float64".

    Args:
        channels: the channels of the encoding of a row, and of that of a
            column.
        hidden: units of the first dense layer of each network.
        group: a group or its name, see `keras_equiattn.groups.get`.
        epsilon: added to the variance in the normalisation. The default keeps
            the networks smooth. The authors have 1e-12: with biases of zero
            an encoding then depends on the sign of a coordinate alone.
        kernel_initializer: the initializer of the dense kernels.
        bias_initializer: the initializer of their biases.
        **kwargs: `name`, `dtype`, `trainable`.

    Call arguments:
        inputs: offsets.

    Input shape:
        `(..., 2)`: row and column of each offset.

    Output shape:
        `(..., order, 2 * channels)`.

    Symmetry:
        Offsets acted on by the group give the same encodings, with the
        group axis permuted: `e(h^-1 g o)` is what `g^-1 h` sees.

    Variables:
        `row_kernel_1 (1, hidden)`, `row_bias_1`, `row_gamma`, `row_beta
        (hidden,)`, `row_kernel_2 (hidden, channels)`, `row_bias_2
        (channels,)`, and the same of `column`.

    Raises:
        ValueError: for bad arguments or shapes.
        TypeError: for a `group` that is neither a name nor a `Group`.

    Example:
        >>> layer = RelativePositionEncoding(3, group="p4")
        >>> tuple(layer(keras.ops.zeros((5, 5, 2))).shape)
        (5, 5, 4, 6)

    References:
        - [Romero and Cordonnier, 2021](https://arxiv.org/abs/2010.00977),
          section 4, and the authors' code, where an element `h` is what `h^-1`
          is here.
    """

    def __init__(
        self,
        channels: int,
        hidden: int = 16,
        group: str | groups.Group = "p4",
        epsilon: float = 1e-3,
        kernel_initializer: Any = "he_normal",
        bias_initializer: Any = "zeros",
        **kwargs: Any,
    ) -> None:
        # A policy of half precision would lose the differences of offsets.
        policy = keras.dtype_policies.get(kwargs.pop("dtype", None))
        double = policy.variable_dtype == "float64"
        super().__init__(dtype="float64" if double else "float32", **kwargs)
        self.channels = _checks.integer(channels, "channels")
        self.hidden = _checks.integer(hidden, "hidden")
        self.group = groups.get(group)
        self.epsilon = _checks.number(
            epsilon,
            "epsilon",
            "a positive number that float32 tells from zero, 1.2e-38 or more",
            lambda n: n >= np.finfo("float32").tiny,
        )
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)

    def build(self, input_shape: Shape) -> None:
        _check_shape(input_shape)
        for axis in ("row", "column"):
            self._add(f"{axis}_kernel_1", (1, self.hidden))
            self._add(f"{axis}_bias_1", (self.hidden,))
            self._add(f"{axis}_gamma", (self.hidden,), "ones")
            self._add(f"{axis}_beta", (self.hidden,), "zeros")
            self._add(f"{axis}_kernel_2", (self.hidden, self.channels))
            self._add(f"{axis}_bias_2", (self.channels,))
        self.built = True

    def _add(
        self, name: str, shape: tuple[int, ...], initializer: Any = None
    ) -> None:
        _checks.weight_size(shape, f"The weight '{name}' of '{self.name}'")
        if initializer is None:
            kernel = len(shape) == 2
            initializer = fresh(
                self.kernel_initializer if kernel else self.bias_initializer
            )
        weight = self.add_weight(
            name=name, shape=shape, initializer=initializer
        )
        setattr(self, name, weight)

    def call(self, inputs: Tensor) -> Tensor:
        _check_shape(inputs.shape)
        # With integers, the matrices of the group would be rounded.
        offsets = ops.cast(inputs, self.compute_dtype)
        offsets = seen_offsets(offsets, self.group)
        encodings = []
        for index, axis in enumerate(("row", "column")):
            kernel_1, bias_1, gamma, beta, kernel_2, bias_2 = (
                ops.convert_to_tensor(getattr(self, f"{axis}_{part}"))
                for part in (
                    *("kernel_1", "bias_1", "gamma", "beta"),
                    *("kernel_2", "bias_2"),
                )
            )
            encodings.append(
                encode(
                    offsets[..., index],
                    (kernel_1, bias_1),
                    (gamma, beta),
                    (kernel_2, bias_2),
                    self.epsilon,
                )
            )
        return ops.concatenate(encodings, axis=-1)

    def compute_output_shape(self, input_shape: Shape) -> tuple[Any, ...]:
        return (*input_shape[:-1], self.group.order, 2 * self.channels)

    def get_config(self) -> dict[str, Any]:
        initializer = keras.initializers.serialize
        return {
            **super().get_config(),
            "channels": self.channels,
            "hidden": self.hidden,
            "group": self.group.name,
            "epsilon": self.epsilon,
            "kernel_initializer": initializer(self.kernel_initializer),
            "bias_initializer": initializer(self.bias_initializer),
        }


def _check_shape(input_shape: Shape) -> None:
    """Raises unless offsets have two coordinates."""
    shape = tuple(input_shape)
    if not shape or shape[-1] != 2:
        raise ValueError(
            "Offsets have a row and a column, (..., 2). "
            f"Received: input_shape={shape}"
        )
