"""A linear map of the values of each pixel."""

from typing import Any

import keras

from keras_equiattn import _checks
from keras_equiattn import groups
from keras_equiattn.layers.base import linear_maps
from keras_equiattn.layers.base.group_layer import GroupLayer
from keras_equiattn.ops._types import Shape
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.group.linear import BASES
from keras_equiattn.ops.group.linear import ELEMENTWISE_ACTIVATIONS
from keras_equiattn.ops.group.linear import group_linear


@keras.saving.register_keras_serializable(package="keras_equiattn")
class GroupDense(GroupLayer):
    """A linear map of all values of a pixel, the same for every pixel.

    `y(x, p) = sum_r f(x, r) W(p^-1 r) + b`, where `f` is the input after
    `input_activation`, if there is one. The map is a group convolution with
    filters of one pixel, and the counterpart of `Dense` on images.

    In the basis of the irreducible representations the map falls into blocks,
    which take fewer multiplications: by a factor of 2.67 on p4, 4.57 on p8,
    5.33 on p4m and 9.14 on p8m. Changing to this basis and back takes
    additions, whose time matters where there are few channels.

    Args:
        filters: number of filters; the output has `order * filters` values
            per pixel.
        group: a group or its name, see `keras_equiattn.groups.get`.
        basis: how the map is computed, which changes the results by rounding
            alone: "regular" as one matrix, "irreps" in blocks. None chooses
            what takes less time, see `ops.group_linear`.
        activation: applied to the output; None is the identity.
        input_activation: applied to the input first, value by value: "elu",
            "gelu", "leaky_relu", "relu", "sigmoid", "silu" or "tanh"; None is
            the identity. In blocks it takes less memory than a separate layer,
            see `ops.group_linear`.
        use_bias: whether to add a bias, one value per filter.
        kernel_initializer: the initializer of the kernel; one that scales with
            the fan-in sees `order * channels`.
        bias_initializer: the initializer of the bias.
        kernel_regularizer: the regularizer of the kernel.
        data_format: "channels_last", "channels_first" or None (what
            `keras.config.image_data_format()` says).
        **kwargs: `name`, `dtype`, `trainable`.

    Call arguments:
        inputs: feature maps on the group.

    Input shape:
        "channels_last": `(batch, height, width, order, channels)`;
        "channels_first": `(batch, channels, height, width, order)`. Height and
        width may be None. With `"z2"` also images of rank 4, which give rank 4.

    Output shape:
        The shape of the input, with `filters` channels.

    Symmetry:
        `L_g` of the input gives `L_g` of the output (`ops.group_action`) for
        every element of the group, to rounding, also for groups that do not
        act on the grid (p8, p12, p16), as far as these act on the input.

    Variables:
        `kernel (order, channels, filters)`, `bias (filters,)`.

    Raises:
        ValueError: for bad arguments, in `__init__`; for shapes that do not
            fit, in `build` and in the call.

    Example:
        >>> layer = GroupDense(6, group="p4m", basis="irreps")
        >>> tuple(layer(keras.ops.ones((2, 5, 5, 8, 3))).shape)
        (2, 5, 5, 8, 6)

    References:
        - [Cohen and Welling, 2016](https://arxiv.org/abs/1602.07576), eq. 11,
          for one pixel
        - [Nordström et al., 2025](https://arxiv.org/abs/2505.15441), for the
          blocks of p4m
    """

    takes = "group"

    def __init__(
        self,
        filters: int,
        group: str | groups.Group = "p4",
        basis: str | None = None,
        activation: Any = None,
        input_activation: str | None = None,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        data_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(group=group, data_format=data_format, **kwargs)
        self.filters = _checks.integer(filters, "filters")
        self.basis = _checks.choice(basis, "basis", (None, *BASES))
        self.activation = keras.activations.get(activation)
        self.input_activation = _checks.choice(
            input_activation,
            "input_activation",
            (None, *ELEMENTWISE_ACTIVATIONS),
        )
        self.use_bias = _checks.flag(use_bias, "use_bias")
        linear_maps.configure(
            self, kernel_initializer, bias_initializer, kernel_regularizer
        )

    def build(self, input_shape: Shape) -> None:
        channels = int(self.check_shape(input_shape)[-1])
        linear_maps.add_on_group(
            self, "", channels, self.filters, self.use_bias
        )
        self.fix_input_channels(channels)
        self.built = True

    def call_channels_last(self, x: Tensor) -> Tensor:
        kernel, bias = linear_maps.kernel_and_bias(self, "")
        y = group_linear(
            x, kernel, bias, self.group, self.basis, self.input_activation
        )
        return self.activation(y)

    def output_shape_channels_last(self, shape: Shape) -> Shape:
        return (*shape[:-1], self.filters)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "filters": self.filters,
            "basis": self.basis,
            "activation": keras.activations.serialize(self.activation),
            "input_activation": self.input_activation,
            "use_bias": self.use_bias,
            **linear_maps.config(self),
        }
