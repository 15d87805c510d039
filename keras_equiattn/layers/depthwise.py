"""Group convolutions that leave channels apart."""

from typing import Any

import keras

from keras_equiattn import _checks
from keras_equiattn.layers.convolution import BaseGroupConv2D
from keras_equiattn.ops._types import Shape
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.group import dispatch
from keras_equiattn.ops.group.convolution import group_depthwise_conv
from keras_equiattn.ops.group.linear import group_linear


@keras.saving.register_keras_serializable(package="keras_equiattn")
class GroupDepthwiseConv2D(BaseGroupConv2D):
    """Group convolution of every channel with filters of its own.

    `y(x, h, c, m) = sum_j sum_d f(x + d, j, c) K(h^-1 d, h^-1 j, c, m) + b`. It
    mixes pixels and group elements, and leaves channels apart.

    Args:
        kernel_size: rows and columns of the filters, an integer or a pair.
            Groups with quarter turns need square filters.
        depth_multiplier: number of filters for each channel.
        **kwargs: all other arguments of `GroupConv2D` but `filters`. As in
            Keras, initializers that scale with the fan-in count all channels.

    Call arguments:
        inputs: feature maps on the group.

    Input shape:
        "channels_last": `(batch, height, width, order, channels)`;
        "channels_first": `(batch, channels, height, width, order)`. Height and
        width may be None where the strides are 1 or with `exact="call"`. With
        `"z2"` also images of rank 4, which give rank 4.

    Output shape:
        "channels_last": `(batch, new_height, new_width, order, channels *
        depth_multiplier)`; "channels_first": `(batch, channels *
        depth_multiplier, new_height, new_width, order)`. The outputs of one
        channel are adjacent.

    Symmetry:
        See `GroupConv2D`.

    Variables:
        `kernel (rows, columns, order, channels, depth_multiplier)`,
        `bias (channels * depth_multiplier,)`.
        Steerable filters have one axis of `count` coefficients in place of
        rows and columns, with the `count` of `ops.steerable_basis(group,
        rows)`.

    Raises:
        ValueError: for bad arguments, in `__init__`; for shapes that do not
            fit or would not be exact, in `build` and in the call.

    Example:
        >>> x = keras.ops.ones((2, 9, 9, 4, 3))
        >>> tuple(GroupDepthwiseConv2D(3, depth_multiplier=2)(x).shape)
        (2, 7, 7, 4, 6)

    References:
        - [Cohen and Welling, 2016](https://arxiv.org/abs/1602.07576), eq. 11,
          for one channel at a time
    """

    takes = "group"

    def __init__(
        self,
        kernel_size: int | tuple[int, int],
        *,
        depth_multiplier: int = 1,
        **kwargs: Any,
    ) -> None:
        multiplier = _checks.integer(depth_multiplier, "depth_multiplier")
        super().__init__(multiplier, kernel_size, **kwargs)
        self.depth_multiplier = multiplier

    def kernel_shape(self, shape: Shape) -> Shape:
        return (*self.kernel_size, *shape[3:], self.depth_multiplier)

    def output_filters(self, shape: Shape) -> int:
        return int(shape[-1] * self.depth_multiplier)

    def convolve(self, x: Tensor, kernel: Tensor, **options: Any) -> Tensor:
        return group_depthwise_conv(x, kernel, self.group, **options)

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        return {"depth_multiplier": config.pop("filters"), **config}


@keras.saving.register_keras_serializable(package="keras_equiattn")
class GroupSeparableConv2D(BaseGroupConv2D):
    """A group convolution of each channel, then a linear map on the group.

    `y = W (K f) + b`: `K` as in `GroupDepthwiseConv2D`, without a bias, and `W`
    a group convolution with filters of one pixel. With many channels, JAX and
    PyTorch compute `W` by blocks, see `ops.group_conv`.

    Args:
        filters: number of filters; the output has `order * filters` values
            per pixel.
        kernel_size: rows and columns of the filters of each channel, an
            integer or a pair. Groups with quarter turns need square filters.
        depth_multiplier: number of filters for each channel.
        pointwise_initializer, pointwise_regularizer, pointwise_constraint:
            options of the linear map; those named `kernel_...` are options of
            the filters.
        **kwargs: all other arguments of `GroupConv2D`.

    Call arguments:
        inputs: feature maps on the group.

    Input shape:
        "channels_last": `(batch, height, width, order, channels)`;
        "channels_first": `(batch, channels, height, width, order)`. Height and
        width may be None where the strides are 1 or with `exact="call"`. With
        `"z2"` also images of rank 4, which give rank 4.

    Output shape:
        "channels_last": `(batch, new_height, new_width, order, filters)`;
        "channels_first": `(batch, filters, new_height, new_width, order)`.

    Symmetry:
        See `GroupConv2D`.

    Variables:
        `kernel (rows, columns, order, channels, depth_multiplier)`,
        `bias (filters,)`,
        `pointwise_kernel (order, channels * depth_multiplier, filters)`.
        Steerable filters have one axis of `count` coefficients in place of
        rows and columns, with the `count` of `ops.steerable_basis(group,
        rows)`.

    Raises:
        ValueError: for bad arguments, in `__init__`; for shapes that do not
            fit or would not be exact, in `build` and in the call.

    Example:
        >>> x = keras.ops.ones((2, 9, 9, 4, 3))
        >>> tuple(GroupSeparableConv2D(5, 3, group="p4")(x).shape)
        (2, 7, 7, 4, 5)

    References:
        - [Cohen and Welling, 2016](https://arxiv.org/abs/1602.07576), eq. 11
    """

    takes = "group"

    def __init__(
        self,
        filters: int,
        kernel_size: int | tuple[int, int],
        *,
        depth_multiplier: int = 1,
        pointwise_initializer: Any = "glorot_uniform",
        pointwise_regularizer: Any = None,
        pointwise_constraint: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(filters, kernel_size, **kwargs)
        self.depth_multiplier = _checks.integer(
            depth_multiplier, "depth_multiplier"
        )
        self.pointwise_initializer = keras.initializers.get(
            pointwise_initializer
        )
        self.pointwise_regularizer = keras.regularizers.get(
            pointwise_regularizer
        )
        self.pointwise_constraint = keras.constraints.get(pointwise_constraint)

    def build(self, input_shape: Shape) -> None:
        super().build(input_shape)
        channels = self.check_shape(input_shape)[-1] * self.depth_multiplier
        self.pointwise_kernel = self.add_weight(
            name="pointwise_kernel",
            shape=(self.group.order, channels, self.filters),
            initializer=self.pointwise_initializer,
            regularizer=self.pointwise_regularizer,
            constraint=self.pointwise_constraint,
        )

    def kernel_shape(self, shape: Shape) -> Shape:
        return (*self.kernel_size, *shape[3:], self.depth_multiplier)

    def convolve(self, x: Tensor, kernel: Tensor, **options: Any) -> Tensor:
        y = group_depthwise_conv(x, kernel, self.group, **options)
        pointwise = keras.ops.convert_to_tensor(self.pointwise_kernel)
        basis = dispatch.convolution_basis(y, self.filters)
        return group_linear(y, pointwise, None, self.group, basis)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "depth_multiplier": self.depth_multiplier,
            "pointwise_initializer": keras.initializers.serialize(
                self.pointwise_initializer
            ),
            "pointwise_regularizer": keras.regularizers.serialize(
                self.pointwise_regularizer
            ),
            "pointwise_constraint": keras.constraints.serialize(
                self.pointwise_constraint
            ),
        }
