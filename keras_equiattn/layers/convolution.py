"""Lifting and group convolutions, and their transpose."""

from typing import Any

import keras

from keras_equiattn import _checks
from keras_equiattn import groups
from keras_equiattn.layers.base.filters import FilterLayer
from keras_equiattn.ops._types import Shape
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.exactness import is_exact
from keras_equiattn.ops.geometry import effective_window
from keras_equiattn.ops.geometry import output_size
from keras_equiattn.ops.group.convolution import group_conv
from keras_equiattn.ops.group.convolution import group_conv_transpose
from keras_equiattn.ops.group.convolution import lifting_conv


class BaseGroupConv2D(FilterLayer):
    """Base of `LiftingConv2D`, `GroupConv2D` and others: convolutions.

    Subclasses set `takes`, the inputs that they take, and write `convolve`.
    They override what differs for them: the shape of their kernel, the size of
    the output, or which sizes are exact.
    """

    def __init__(
        self,
        filters: int,
        kernel_size: int | tuple[int, int],
        strides: int | tuple[int, int] = (1, 1),
        padding: str = "valid",
        data_format: str | None = None,
        dilation_rate: int | tuple[int, int] = (1, 1),
        activation: Any = None,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        bias_regularizer: Any = None,
        activity_regularizer: Any = None,
        kernel_constraint: Any = None,
        bias_constraint: Any = None,
        group: str | groups.Group = "p4",
        exact: bool | str = True,
        filter_basis: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            filter_basis=filter_basis,
            group=group,
            data_format=data_format,
            activity_regularizer=activity_regularizer,
            **kwargs,
        )
        self.filters = _checks.integer(filters, "filters")
        self.kernel_size = _checks.pair(kernel_size, "kernel_size")
        self.strides = _checks.pair(strides, "strides")
        self.dilation_rate = _checks.pair(dilation_rate, "dilation_rate")
        self.padding = _checks.choice(padding, "padding", ("valid", "same"))
        _checks.strides_or_dilation(self.strides, self.dilation_rate)
        if (
            self.group.quarter_turns
            and self.kernel_size[0] != self.kernel_size[1]
        ):
            raise ValueError(
                f"Group '{self.group.name}' holds quarter turns, which need a "
                f"square kernel. Received: kernel_size={kernel_size}"
            )
        self.check_filters("kernel_size", self.kernel_size)
        self.activation = keras.activations.get(activation)
        self.use_bias = _checks.flag(use_bias, "use_bias")
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)
        self.kernel_constraint = keras.constraints.get(kernel_constraint)
        self.bias_constraint = keras.constraints.get(bias_constraint)
        self.exact = _checks.exactness(exact, "exact")
        if self._never_or_always_exact:
            self.require_exact((None, None), **self._window)

    def build(self, input_shape: Shape) -> None:
        shape = self.check_shape(input_shape)
        self.output_shape_channels_last(shape)
        self.kernel = self.add_filters(
            "kernel",
            self.kernel_shape(shape),
            self.kernel_initializer,
            regularizer=self.kernel_regularizer,
            constraint=self.kernel_constraint,
        )
        self.bias = None
        if self.use_bias:
            # One value per filter, the same for every group element.
            self.bias = self.add_weight(
                name="bias",
                shape=(self.output_filters(shape),),
                initializer=self.bias_initializer,
                regularizer=self.bias_regularizer,
                constraint=self.bias_constraint,
            )
        self.fix_input_channels(shape[-1])
        self.built = True

    def kernel_shape(self, shape: Shape) -> Shape:
        """The shape of the kernel for inputs of this shape, channels last.

        It covers all axes but height and width. On the group a fan-in counted
        over its leading axes thus includes the input order.
        """
        return (*self.kernel_size, *shape[3:], self.filters)

    def output_filters(self, shape: Shape) -> int:
        """The channels of the output for inputs of this shape."""
        return int(self.filters)

    def convolve(self, x: Tensor, kernel: Tensor, **options: Any) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__}.convolve")

    def call_channels_last(self, x: Tensor) -> Tensor:
        y = self.convolve(
            x,
            self.filters_of(self.kernel, self.kernel_size[0]),
            filter_basis=self.filter_basis,
            strides=self.strides,
            padding=self.padding,
            dilation_rate=self.dilation_rate,
        )
        if self.bias is not None:
            y = y + keras.ops.convert_to_tensor(self.bias)
        return self.activation(y)

    def output_shape_channels_last(self, shape: Shape) -> Shape:
        outputs = self.output_size(shape[1:3])
        filters = self.output_filters(shape)
        return (shape[0], *outputs, self.group.order, filters)

    def output_size(self, size: Shape) -> Shape:
        """Height and width of the output; raises where they are not exact."""
        outputs = []
        for n, k, s, d in zip(
            size,
            self.kernel_size,
            self.strides,
            self.dilation_rate,
            strict=True,
        ):
            outputs.append(output_size(n, k, s, d, self.padding))
            if outputs[-1] is not None and outputs[-1] < 1:
                raise ValueError(
                    f"{self._label()}: a kernel that covers "
                    f"{effective_window(k, d)} pixels does not fit an input "
                    f"of size {tuple(size)} with padding 'valid'. Received: "
                    f"kernel_size={self.kernel_size}, "
                    f"dilation_rate={self.dilation_rate}"
                )
        self.require_exact(size, **self._window)
        return tuple(outputs)

    @property
    def _window(self) -> dict[str, Any]:
        return {
            "window": self.kernel_size,
            "strides": self.strides,
            "dilation": self.dilation_rate,
            "padding": self.padding,
        }

    @property
    def _never_or_always_exact(self) -> bool:
        """Whether exactness can be told before the size is known."""
        axes = (self.strides, self.dilation_rate)
        unequal = any(first != second for first, second in axes)
        return max(self.strides) == 1 or (self.group.quarter_turns and unequal)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "filters": self.filters,
            "kernel_size": self.kernel_size,
            "strides": self.strides,
            "padding": self.padding,
            "dilation_rate": self.dilation_rate,
            "activation": keras.activations.serialize(self.activation),
            "use_bias": self.use_bias,
            "kernel_initializer": keras.initializers.serialize(
                self.kernel_initializer
            ),
            "bias_initializer": keras.initializers.serialize(
                self.bias_initializer
            ),
            "kernel_regularizer": keras.regularizers.serialize(
                self.kernel_regularizer
            ),
            "bias_regularizer": keras.regularizers.serialize(
                self.bias_regularizer
            ),
            "activity_regularizer": keras.regularizers.serialize(
                self.activity_regularizer
            ),
            "kernel_constraint": keras.constraints.serialize(
                self.kernel_constraint
            ),
            "bias_constraint": keras.constraints.serialize(
                self.bias_constraint
            ),
            "exact": self.exact,
        }


@keras.saving.register_keras_serializable(package="keras_equiattn")
class LiftingConv2D(BaseGroupConv2D):
    """Convolution from images to feature maps on a group.

    `y(x, h) = sum_d f(x + d) K(h^-1 d) + b`: every filter is applied in all
    its rotated (and mirrored) copies, one for each element `h` of the group.
    It is the first layer of an equivariant network.

    Args:
        filters: number of filters; the output has `order * filters` values
            per pixel.
        kernel_size: rows and columns of the filters, an integer or a pair.
            Groups with quarter turns need square filters.
        strides: an integer or a pair.
        padding: "valid" or "same" (zeros).
        data_format: "channels_last", "channels_first" or None (what
            `keras.config.image_data_format()` says).
        dilation_rate: an integer or a pair.
        activation: applied to the output; None is the identity.
        use_bias: whether to add a bias, one value per filter.
        kernel_initializer, bias_initializer: initializers. Those that scale
            with the fan-in see `rows * columns * channels`.
        kernel_regularizer, bias_regularizer, activity_regularizer:
            regularizers.
        kernel_constraint, bias_constraint: constraints.
        group: a group or its name, see `keras_equiattn.groups.get`.
        exact: refuse sizes on which the layer would not be exactly
            equivariant. False accepts them; "call" accepts sizes that are
            unknown at build, and refuses inexact ones when the layer is called.
        filter_basis: the basis of the filters: "pixel" has a number for each
            pixel, and interpolates where a turn does not map pixels to pixels;
            "steerable" has coefficients of filters that turn by any angle, see
            `ops.steerable_basis`, and needs square filters. Initializers then
            draw pixels, whose projections on these filters are scaled to keep
            the variance. Regularizers and constraints see the coefficients,
            whose norm is that of the filter. None is "pixel" for groups that
            act on the grid, and "steerable" for others.
        **kwargs: `name`, `dtype`, `trainable`.

    Call arguments:
        inputs: images.

    Input shape:
        "channels_last": `(batch, height, width, channels)`;
        "channels_first": `(batch, channels, height, width)`. Height and width
        may be None where the strides are 1 or with `exact="call"`.

    Output shape:
        "channels_last": `(batch, new_height, new_width, order, filters)`;
        "channels_first": `(batch, filters, new_height, new_width, order)`.
        Rank 5 also for `"z2"`, with order 1.

    Symmetry:
        `L_g` of the input gives `L_g` of the output (`ops.group_action`) for
        every element of the group, to rounding, on every input that the layer
        accepts with `exact=True` (see `ops.is_exact`). For groups that do not
        act on the grid (p8, p12, p16) this holds for the turns by 90 degrees
        and the mirrors that go with them; in between the layer is
        approximate: the guide to groups has the errors of both bases.

    Variables:
        `kernel (rows, columns, channels, filters)`, `bias (filters,)`.
        Steerable filters have one axis of `count` coefficients in place of
        rows and columns, with the `count` of `ops.steerable_basis(group,
        rows)`.

    Raises:
        ValueError: for bad arguments, in `__init__`; for shapes that do not
            fit or would not be exact, in `build` and in the call.

    Example:
        >>> layer = LiftingConv2D(8, 3, padding="same", group="p4m")
        >>> tuple(layer(keras.ops.ones((2, 28, 28, 1))).shape)
        (2, 28, 28, 8, 8)

    References:
        - [Cohen and Welling, 2016](https://arxiv.org/abs/1602.07576), eq. 10
        - [Romero et al., 2020](https://arxiv.org/abs/2002.03830), eq. 5. Their
          code multiplies group convolutions by a constant, the area of a group
          element; here it is part of the kernel.
    """

    takes = "image"

    def convolve(self, x: Tensor, kernel: Tensor, **options: Any) -> Tensor:
        return lifting_conv(x, kernel, self.group, **options)


@keras.saving.register_keras_serializable(package="keras_equiattn")
class GroupConv2D(BaseGroupConv2D):
    """Convolution from feature maps on a group to feature maps on it.

    `y(x, h) = sum_j sum_d f(x + d, j) K(h^-1 d, h^-1 j) + b`: the filters are
    functions on the group, transformed in space and permuted along the group
    axis for each output element `h`. It is one ordinary convolution with
    `order` times the channels, and costs as much.

    Args:
        filters: number of filters; the output has `order * filters` values
            per pixel.
        kernel_size: rows and columns of the filters, an integer or a pair.
            Groups with quarter turns need square filters. With filters of one
            pixel and many channels, JAX and PyTorch compute by blocks, see
            `ops.group_conv`. These have no derivative in forward mode, such as
            `jax.jvp`, unless `config.disable_recompute` was called.
        strides: an integer or a pair.
        padding: "valid" or "same" (zeros).
        data_format: "channels_last", "channels_first" or None (what
            `keras.config.image_data_format()` says).
        dilation_rate: an integer or a pair.
        activation: applied to the output; None is the identity.
        use_bias: whether to add a bias, one value per filter.
        kernel_initializer, bias_initializer: initializers. Those that scale
            with the fan-in see `rows * columns * order * channels`.
        kernel_regularizer, bias_regularizer, activity_regularizer:
            regularizers.
        kernel_constraint, bias_constraint: constraints.
        group: a group or its name, see `keras_equiattn.groups.get`.
        exact: refuse sizes on which the layer would not be exactly
            equivariant. False accepts them; "call" accepts sizes that are
            unknown at build, and refuses inexact ones when the layer is called.
        filter_basis: the basis of the filters: "pixel" has a number for each
            pixel, and interpolates where a turn does not map pixels to pixels;
            "steerable" has coefficients of filters that turn by any angle, see
            `ops.steerable_basis`, and needs square filters. Initializers then
            draw pixels, whose projections on these filters are scaled to keep
            the variance. Regularizers and constraints see the coefficients,
            whose norm is that of the filter. None is "pixel" for groups that
            act on the grid, and "steerable" for others.
        **kwargs: `name`, `dtype`, `trainable`.

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
        `L_g` of the input gives `L_g` of the output (`ops.group_action`) for
        every element of the group, to rounding, on every input that the layer
        accepts with `exact=True` (see `ops.is_exact`). For groups that do not
        act on the grid (p8, p12, p16) this holds for the turns by 90 degrees
        and the mirrors that go with them; in between the layer is
        approximate: the guide to groups has the errors of both bases.

    Variables:
        `kernel (rows, columns, order, channels, filters)`, `bias (filters,)`.
        Steerable filters have one axis of `count` coefficients in place of
        rows and columns, with the `count` of `ops.steerable_basis(group,
        rows)`.

    Raises:
        ValueError: for bad arguments, in `__init__`; for shapes that do not
            fit or would not be exact, in `build` and in the call.

    Example:
        >>> x = LiftingConv2D(8, 3, group="p4")(keras.ops.ones((2, 28, 28, 1)))
        >>> tuple(GroupConv2D(16, 3, group="p4")(x).shape)
        (2, 24, 24, 4, 16)

    References:
        - [Cohen and Welling, 2016](https://arxiv.org/abs/1602.07576), eq. 11
        - [Romero et al., 2020](https://arxiv.org/abs/2002.03830), eq. 7. Their
          code multiplies group convolutions by a constant, the area of a group
          element; here it is part of the kernel.
    """

    takes = "group"

    def convolve(self, x: Tensor, kernel: Tensor, **options: Any) -> Tensor:
        return group_conv(x, kernel, self.group, **options)


@keras.saving.register_keras_serializable(package="keras_equiattn")
class GroupConv2DTranspose(BaseGroupConv2D):
    """Transposed group convolution: every pixel adds multiples of the filters.

    `y(x, h) = sum_j sum_d f(x', j) K(h^-1 d, h^-1 j) + b` over all pixels `x'`
    and offsets `d` with `strides * x' + d = x`. It makes feature maps larger,
    as `Conv2DTranspose` of Keras does images.

    Args:
        filters: number of filters; the output has `order * filters` values
            per pixel.
        kernel_size: rows and columns of the filters, an integer or a pair.
            Groups with quarter turns need square filters.
        strides: the distance in the output between the filters that two
            neighbouring pixels of the input add, an integer or a pair.
        padding: "valid" keeps the whole output; "same" crops it to `strides`
            times the size of the input.
        data_format: "channels_last", "channels_first" or None (what
            `keras.config.image_data_format()` says).
        dilation_rate: must be 1.
        activation: applied to the output; None is the identity.
        use_bias: whether to add a bias, one value per filter.
        kernel_initializer, bias_initializer: initializers. Those that scale
            with the fan-in see `rows * columns * order * channels`.
        kernel_regularizer, bias_regularizer, activity_regularizer:
            regularizers.
        kernel_constraint, bias_constraint: constraints.
        group: a group or its name, see `keras_equiattn.groups.get`.
        exact: refuse filters and strides with which the layer would not be
            exactly equivariant. False accepts them; "call" is the same as True,
            since the size of the input does not matter.
        filter_basis: the basis of the filters: "pixel" has a number for each
            pixel, and interpolates where a turn does not map pixels to pixels;
            "steerable" has coefficients of filters that turn by any angle, see
            `ops.steerable_basis`, and needs square filters. Initializers then
            draw pixels, whose projections on these filters are scaled to keep
            the variance. Regularizers and constraints see the coefficients,
            whose norm is that of the filter. None is "pixel" for groups that
            act on the grid, and "steerable" for others.
        **kwargs: `name`, `dtype`, `trainable`.

    Call arguments:
        inputs: feature maps on the group.

    Input shape:
        "channels_last": `(batch, height, width, order, channels)`;
        "channels_first": `(batch, channels, height, width, order)`. Height and
        width may be None. With `"z2"` also images of rank 4, which give rank 4.

    Output shape:
        "channels_last": `(batch, new_height, new_width, order, filters)`;
        "channels_first": `(batch, filters, new_height, new_width, order)`,
        with `new_height = strides * height` for "same" and `strides * (height -
        1) + kernel_size` for "valid", if the filters are no smaller than the
        strides.

    Symmetry:
        `L_g` of the input gives `L_g` of the output (`ops.group_action`) for
        every element of the group, to rounding, with `exact=True`: filters no
        smaller than the strides, and for "same" larger by an even number. For
        groups that do not act on the grid (p8, p12, p16) this holds for the
        turns by 90 degrees and the mirrors that go with them.
        With strides above 1 the layer is far off under their other turns,
        whatever the `filter_basis`, since neighbours in the output come from
        different weights of a filter. Use `SpatialUpSampling2D` with bilinear
        interpolation and then `GroupConv2D` there.

    Variables:
        `kernel (rows, columns, order, channels, filters)`, `bias (filters,)`.
        Steerable filters have one axis of `count` coefficients in place of
        rows and columns, with the `count` of `ops.steerable_basis(group,
        rows)`.

    Raises:
        ValueError: for bad arguments and for what would not be exact, in
            `__init__`; for shapes that do not fit, in `build` and in the call.

    Example:
        >>> x = keras.ops.ones((2, 7, 7, 4, 3))
        >>> layer = GroupConv2DTranspose(5, 4, strides=2, padding="same")
        >>> tuple(layer(x).shape)
        (2, 14, 14, 4, 5)

    References:
        - [Cohen and Welling, 2016](https://arxiv.org/abs/1602.07576), eq. 11,
          of which it is the transpose
    """

    takes = "group"

    def __init__(
        self, filters: int, kernel_size: int | tuple[int, int], **kwargs: Any
    ) -> None:
        super().__init__(filters, kernel_size, **kwargs)
        if self.dilation_rate != (1, 1):
            raise ValueError(
                "`dilation_rate` must be 1: not all backends dilate transposed "
                f"convolutions. Received: dilation_rate={self.dilation_rate}"
            )
        # The layer is equivariant if the convolution that it transposes is.
        # That is the same for every size of the input.
        twice = self._painted((2, 2))
        if self.exact and not is_exact(self.group, twice, **self._window):
            rule = "no smaller than the strides"
            if self.padding == "same":
                rule = "as large as the strides, or larger by an even number"
            raise ValueError(
                f"{self._label()} would not be exactly equivariant under "
                f"'{self.group.name}'. With padding '{self.padding}' filters "
                f"must be {rule}; quarter turns need equal ones along both "
                f"axes. Received: kernel_size={self.kernel_size}, "
                f"strides={self.strides}. Or pass `exact=False` to accept an "
                "approximate layer."
            )

    def convolve(self, x: Tensor, kernel: Tensor, **options: Any) -> Tensor:
        return group_conv_transpose(
            x,
            kernel,
            self.group,
            self.strides,
            self.padding,
            self.filter_basis,
        )

    def output_size(self, size: Shape) -> Shape:
        return self._painted(size)

    def _painted(self, size: Shape) -> Shape:
        """Height and width of the output, None where they are unknown."""
        more = [
            max(k - s, 0) if self.padding == "valid" else 0
            for k, s in zip(self.kernel_size, self.strides, strict=True)
        ]
        return tuple(
            None if n is None else n * s + m
            for n, s, m in zip(size, self.strides, more, strict=True)
        )

    @property
    def _never_or_always_exact(self) -> bool:
        return False  # it has a rule of its own
