"""ACmix: attention and convolution from the same linear maps."""

from typing import Any

import keras
from keras import ops

from keras_equiattn import _checks
from keras_equiattn import groups
from keras_equiattn.layers.acmix.two_paths import MAPS
from keras_equiattn.layers.acmix.two_paths import times
from keras_equiattn.layers.acmix.two_paths import TwoPaths
from keras_equiattn.layers.base import linear_maps
from keras_equiattn.layers.base.attention_layer import WindowLayer
from keras_equiattn.layers.base.filters import FilterLayer
from keras_equiattn.layers.base.initializers import fresh
from keras_equiattn.layers.base.initializers import uniform_by_fan_in
from keras_equiattn.ops._types import Shape
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.papers.acmix import Convolution
from keras_equiattn.ops.papers.acmix import image_coordinates
from keras_equiattn.ops.papers.acmix import position_keys
from keras_equiattn.ops.papers.acmix import queries_at
from keras_equiattn.ops.windows.api import window_attention

BORDERS = ("reflect", "mask")


class BaseACmix2D(TwoPaths, WindowLayer, FilterLayer):
    """The base of `ACmix2D` and `FoldedACmix2D`; see there."""

    def __init__(
        self,
        filters: int,
        kernel_size: int | tuple[int, int] = 3,
        attention_kernel_size: int | tuple[int, int] = 7,
        num_heads: int = 4,
        strides: int | tuple[int, int] = 1,
        dilation_rate: int | tuple[int, int] = 1,
        group: str | groups.Group = "z2",
        paths: str = "both",
        border: str = "reflect",
        activation: Any = None,
        use_bias: bool = True,
        exact: bool | str = True,
        recompute: bool = True,
        filter_basis: str | None = None,
        window_shape: str | None = None,
        data_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            paths=paths,
            filter_basis=filter_basis,
            window_shape=window_shape,
            group=group,
            data_format=data_format,
            **kwargs,
        )
        self.filters = _checks.integer(filters, "filters")
        self.num_heads = _checks.integer(num_heads, "num_heads")
        self.border = _checks.choice(border, "border", BORDERS)
        self.set_windows(
            kernel_size, attention_kernel_size, strides, dilation_rate, border
        )
        self.check_filters("kernel_size", self.kernel_size)
        _checks.divisible(self.filters, self.num_heads, "num_heads")
        self.activation = keras.activations.get(activation)
        self.use_bias = _checks.flag(use_bias, "use_bias")
        self.exact = _checks.exactness(exact, "exact")
        self.recompute = _checks.flag(recompute, "recompute")
        unequal = self.strides[0] != self.strides[1]
        if self.group.quarter_turns and unequal:
            self._require_exact((None, None))  # no size would be exact

    def add_positions(self) -> None:
        """Creates the map of the coordinates, for a head."""
        size = self.filters // self.num_heads
        self.position_kernel = self.add_weight(
            name="position_kernel",
            shape=(2, size),
            initializer=fresh(self.kernel_initializer),
        )
        self.position_bias = self.add_weight(
            name="position_bias",
            shape=(size,),
            initializer=fresh(self.bias_initializer),
        )

    def finish_build(self, shape: Shape) -> None:
        self.output_shape_channels_last(shape)
        self.fix_input_channels(shape[-1])
        self.built = True

    def call_channels_last(self, x: Tensor) -> Tensor:
        return self.activation(self._both_paths(x, return_weights=False)[0])

    def attend_channels_last(
        self, x: Tensor, query: tuple[int, int] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        self.require_attention()
        y, weights = self._both_paths(x)
        maps = {"window": self.window_map(weights, self.window, query)}
        return self.activation(y), maps

    def output_shape_channels_last(self, shape: Shape) -> Shape:
        size = tuple(shape[1:3])
        self._require_exact(size)
        rows, columns = self.window.output_size(size)
        return (shape[0], rows, columns, self.group.order, self.filters)

    def _require_exact(self, size: Shape) -> None:
        # The windows sit on the first pixel and on each that strides meet.
        self.require_exact(size, window=1, strides=self.strides)

    def _both_paths(
        self, x: Tensor, return_weights: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """The sum of both paths, and the weights of attention."""
        attention = weights = None
        if self.attends:
            attention, weights = self._attend(x, return_weights)
        return self.join_paths(x, attention), weights

    def _attend(
        self, x: Tensor, return_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The path of attention, and its weights if asked for."""
        query = linear_maps.on_group(self, "query", queries_at(x, self.window))
        keys, values = (
            linear_maps.on_group(self, name, x) for name in ("key", "value")
        )
        size = self.filters // self.num_heads
        height, width = ops.shape(keys)[1:3]
        coordinates = image_coordinates(height, width, self.compute_dtype)
        positions = position_keys(
            coordinates,
            ops.convert_to_tensor(self.position_kernel),
            ops.convert_to_tensor(self.position_bias),
            self.group,
        )
        positions = ops.tile(positions, (1, 1, 1, self.num_heads))
        return window_attention(
            query * size**-0.5,
            ops.cast(ops.cast(keys, positions.dtype) - positions, keys.dtype),
            values,
            self.window,
            self.num_heads,
            recompute=self.recompute,
            return_weights=return_weights,
        )

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "filters": self.filters,
            "kernel_size": self.kernel_size,
            "attention_kernel_size": self.attention_kernel_size,
            "num_heads": self.num_heads,
            "strides": self.strides,
            "dilation_rate": self.dilation_rate,
            "border": self.border,
            "activation": keras.activations.serialize(self.activation),
            "use_bias": self.use_bias,
            "exact": self.exact,
            "recompute": self.recompute,
        }


@keras.saving.register_keras_serializable(package="keras_equiattn")
class ACmix2D(BaseACmix2D):
    """Self-attention and convolution from the same linear maps: ACmix.

    With linear maps `q`, `k`, `v` of the input (mixing channels and group
    elements) and a linear map `P` of the coordinates of a pixel, which go from
    -1 to 1, for every pixel `x`, group element `h` and head::

        s(h, x, d) = <q(x, h), k(x + d, h) + P(h^-1 x) - P(h^-1 (x + d))>
        attention(x, h) = sum_d softmax_d(s(h, x, d) / sqrt(size)) v(x + d, h)

    with `size = filters / num_heads`. For each channel `c` of a head the
    `3 num_heads` values `f(m, c)` of queries, keys and values in all heads
    are mixed to `rows * columns` maps, each shifted by a kernel of its own::

        F(x, h, c, t) = sum_m mixing(m, t) f(x, h, m, c)
        convolution(x, h, c N + j) =
            sum_d sum_t shift(h^-1 d, t, c N + j) F(x + d, h, c, t)

    and the layer returns `attention_rate * attention + convolution_rate *
    convolution`. The shift kernels start as those that pick the neighbour `t`:
    then the second path is what a convolution is, a sum of shifted 1 x 1
    convolutions. Steerable ones start as their projections on the steerable
    filters, and are these where they are fixed.

    On a group each element takes its own queries, keys and values. It sees the
    coordinates and the shift kernels turned with it, `P(h^-1 .)` and
    `shift(h^-1 .)`; the linear maps are convolutions on the group. The first
    path is equivariant because `P` is linear: the term `P(h^-1 x) - P(h^-1 (x +
    d))` depends on `h^-1 d` alone, divided by the size along each axis, which
    turns with the image. The second is a group convolution: the shift kernels
    of element `h` act on `f(., h)` as the correlation with the kernel `K(d, r)
    = sum_m k_m(d) W_m(r)` on the group, with the kernels `k` of mixing and
    shifts and `W` of the linear maps.

    All of the second path is linear, so the layer computes it as that one
    convolution, whose kernel it puts together from its weights in each call.

    Args:
        filters: channels of the output and of queries, keys and values;
            divisible by `num_heads`.
        kernel_size: rows and columns of the convolution, odd, an integer or a
            pair. Groups with quarter turns need square windows.
        attention_kernel_size: rows and columns that attention sees, likewise.
        num_heads: number of heads, contiguous blocks of the channels.
        strides: an integer or a pair: both paths look around every pixel at a
            multiple of the strides, from the first on. Groups with quarter
            turns need equal ones, unless `exact=False`.
        dilation_rate: distance of adjacent neighbours in both paths, an
            integer or a pair. Not above 1 together with strides above 1.
        group: a group or its name, see `keras_equiattn.groups.get`. "z2" is the
            layer of the paper, on images.
        paths: "both", "attention" or "convolution". A path alone has no rate.
        rates: "learned": both start at one half; "fixed": both are one.
        shift_kernels: "learned": they start as shifts; "fixed": they are shifts
            and not weights; "random": `mixing_initializer` draws them.
        kernel_groups: how many kernels a channel of a head has, a divisor of
            `num_heads`; None is `num_heads`. With fewer, output `c N + j`
            takes the kernel `j mod kernel_groups`.
        border: how neighbours outside of the image count in attention.
            "reflect": the mirror image lies there; "mask": the softmax leaves
            them out. The convolution sees zeros for the linear maps there.
        activation: applied to the output; None is the identity.
        use_bias: whether queries, keys and values have biases.
        kernel_initializer: the initializer of the kernels of queries, keys,
            values and positions; None is uniform within one over the square
            root of the fan-in, which for the first three is `order * channels`.
        mixing_initializer: the initializer of the mixing, and of shift kernels
            that are "random"; None is uniform within one over the square root
            of the inputs.
        bias_initializer: the initializer of the biases.
        kernel_regularizer: the regularizer of the kernels of queries, keys and
            values.
        exact: refuse sizes on which strides would not be exactly equivariant.
            False accepts them; "call" accepts sizes that are unknown at build,
            and refuses inexact ones when the layer is called.
        recompute: the forward pass keeps queries, keys, values, attention
            weights and the result for the backward pass, but no neighbours
            with their channels. False keeps more, and can be differentiated
            twice on every backend.
        filter_basis: the basis of the shift kernels: "pixel" has a number for
            each offset, which is interpolated for turns by less than 90
            degrees; "steerable" has coefficients of filters that turn by any
            angle, see `ops.steerable_basis`, and needs a square `kernel_size`.
            None is "pixel" for groups that act on the grid, and "steerable" for
            others.
        window_shape: the shape of the window of attention: "square", or "disc",
            which covers the same part of the image after a turn by any angle,
            see `ops.Window`. None is "square" for groups that act on the grid,
            and "disc" for others.
        data_format: "channels_last", "channels_first" or None (what
            `keras.config.image_data_format()` says).
        **kwargs: `name`, `dtype`, `trainable`.

    Call arguments:
        inputs: feature maps on the group; with "z2" also images.
        return_attention_maps: also return the weights of the neighbours, as a
            dict: "window" `(batch, new_height, new_width, order, heads, rows,
            columns)` adds up to one over the window, whose first row is
            above the pixel. With images `order` is 1; with "channels_first"
            the axes are the same.
        query: `(row, column)` of a pixel of the output: "window" then has the
            map of this pixel alone, `(batch, order, heads, rows, columns)`.

    Input shape:
        "channels_last": `(batch, height, width, order, channels)`;
        "channels_first": `(batch, channels, height, width, order)`. With
        "z2" also images of rank 4, which give rank 4. Height and width may be
        None; with strides above 1 only on "z2", with `exact="call"` or with
        `exact=False`.

    Output shape:
        The shape of the input, with `filters` channels and, with strides,
        `ceil(height / strides)` rows; columns likewise.

    Symmetry:
        `L_g` of the input gives `L_g` of the output (`ops.group_action`) for
        every element of the group, to rounding, on every input that the layer
        accepts with `exact=True`. For groups that do not act on the grid (p8,
        p12, p16) this holds for the turns by 90 degrees and the mirrors that
        go with them; turns in between are approximate. On smooth feature maps,
        turned by 45 degrees, new layers on p8 with windows of 3, 5 and 7 pixels
        were off by 0.038 of their largest output or less, on average over three
        draws of the weights, and by 0.395 with pixel kernels and square
        windows. Under translations the layer is equivariant on images of one
        size, farther from the border than the windows reach: positions are
        relative to the size.

    Variables:
        `query_kernel`, `key_kernel`, `value_kernel (order, channels,
        filters)`, `query_bias`, `key_bias`, `value_bias (filters,)`;
        `position_kernel (2, size)` (of columns, then rows), `position_bias
        (size,)`, which no output depends on; `mixing_kernel (3 num_heads,
        rows * columns)`, `shift_kernel (rows, columns, rows * columns, size *
        kernel_groups)`, `attention_rate ()`, `convolution_rate ()`. With
        steerable filters `shift_kernel (count, rows * columns, size *
        kernel_groups)`, with the `count` of `ops.steerable_basis(group, rows)`.

    Raises:
        ValueError: for bad arguments, in `__init__`, such as filters that are
            not divisible by `num_heads`, or strides and dilation rates that
            are both above 1; for shapes that do not fit or would not be exact,
            in `build` and in the call.

    Example:
        >>> layer = ACmix2D(16, group="p4")
        >>> tuple(layer(keras.ops.ones((2, 9, 9, 4, 3))).shape)
        (2, 9, 9, 4, 16)

    References:
        - [Pan et al., 2022](https://arxiv.org/abs/2111.14556), eqs. 7 to 17,
          and the authors' code, https://github.com/LeapLabTHU/ACmix. Their code
          takes no odd sizes with strides, no dilation and no other convolution
          than 3 x 3; these are our extensions, and so are groups other than
          "z2", the border "mask" and `kernel_groups` below `num_heads`. Biases
          start at zero here, and uniform within one over the square root of the
          fan-in there.
    """

    def __init__(
        self,
        filters: int,
        kernel_size: int | tuple[int, int] = 3,
        attention_kernel_size: int | tuple[int, int] = 7,
        num_heads: int = 4,
        strides: int | tuple[int, int] = 1,
        dilation_rate: int | tuple[int, int] = 1,
        group: str | groups.Group = "z2",
        paths: str = "both",
        rates: str = "learned",
        shift_kernels: str = "learned",
        kernel_groups: int | None = None,
        border: str = "reflect",
        activation: Any = None,
        use_bias: bool = True,
        kernel_initializer: Any = None,
        mixing_initializer: Any = None,
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        exact: bool | str = True,
        recompute: bool = True,
        filter_basis: str | None = None,
        window_shape: str | None = None,
        data_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            filters=filters,
            kernel_size=kernel_size,
            attention_kernel_size=attention_kernel_size,
            num_heads=num_heads,
            strides=strides,
            dilation_rate=dilation_rate,
            group=group,
            paths=paths,
            border=border,
            activation=activation,
            use_bias=use_bias,
            exact=exact,
            recompute=recompute,
            filter_basis=filter_basis,
            window_shape=window_shape,
            data_format=data_format,
            **kwargs,
        )
        self.hold_convolution_path(
            size=self.filters // self.num_heads,
            maps=len(MAPS) * self.num_heads,
            outputs=self.num_heads,
            rates=rates,
            shift_kernels=shift_kernels,
            kernel_groups=kernel_groups,
            mixing_initializer=mixing_initializer,
        )
        linear_maps.configure(
            self,
            kernel_initializer or uniform_by_fan_in(),
            bias_initializer,
            kernel_regularizer,
        )

    def build(self, input_shape: Shape) -> None:
        shape = self.check_shape(input_shape)
        self.add_linear_maps(int(shape[-1] or 0), self.use_bias)
        if self.attends:
            self.add_positions()
        self.convolution_path.build(self)
        self._built_for = tuple(input_shape)
        self.finish_build(shape)

    def folded(self) -> "FoldedACmix2D":
        """An equal layer in which the path of convolution is one convolution.

        This saves putting the kernel together in each call. The rates are
        folded in, too.

        Returns:
            A `FoldedACmix2D` of the same name, built.

        Raises:
            ValueError: if this layer is not built.
        """
        if not self.built:
            raise ValueError(
                f"{self._label()} has no weights to fold before it is built."
            )
        config = BaseACmix2D.get_config(self)
        layer = FoldedACmix2D.from_config(config)
        layer.build(self._built_for)
        rate, rate_of_convolution = self.rates_of_paths()
        for variable in layer.weights:
            if hasattr(self, variable.name):
                # JAX would share the memory, which predictions donate.
                variable.assign(ops.copy(getattr(self, variable.name)))
        if self.attends and rate is not None:
            # Attention is linear in the values, whose weights add up to one.
            for variable in (layer.value_kernel, layer.value_bias):
                if variable is not None:
                    variable.assign(variable * rate)
        if self.convolves:
            kernel, bias = self.convolution()
            layer.kernel.assign(times(kernel, rate_of_convolution))
            if bias is not None:
                layer.bias_kernel.assign(times(bias, rate_of_convolution))
        return layer

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            **self.convolution_path.get_config(),
            **linear_maps.config(self),
        }


@keras.saving.register_keras_serializable(package="keras_equiattn")
class FoldedACmix2D(BaseACmix2D):
    """`ACmix2D` whose path of convolution is one convolution: for inference.

    `ACmix2D.folded` returns this layer, which computes::

        attention(x) + sum_d K(d) x(x + d) + sum_d inside(x + d) b(d)

    with a kernel `K` on the group, and with `b`, the sums of the biases of the
    linear maps, wherever `x + d` is a pixel of the image. Rates are folded in.

    Args:
        filters, kernel_size, attention_kernel_size, num_heads: see `ACmix2D`.
        strides, dilation_rate, group, paths, border: see `ACmix2D`.
        activation, use_bias, exact, recompute: see `ACmix2D`.
        filter_basis, window_shape, data_format: see `ACmix2D`.
        **kwargs: `name`, `dtype`, `trainable`.

    Call arguments:
        inputs, return_attention_maps, query: see `ACmix2D`.

    Input shape:
        See `ACmix2D`.

    Output shape:
        See `ACmix2D`.

    Symmetry:
        See `ACmix2D`.

    Variables:
        With attention `query_kernel`, `key_kernel`, `value_kernel (order,
        channels, filters)`, `query_bias`, `key_bias`, `value_bias (filters,)`,
        `position_kernel (2, size)`, `position_bias (size,)`. With convolution
        `kernel (rows, columns, order, channels, filters)`, `bias_kernel (rows,
        columns, filters)`.

    Raises:
        ValueError: see `ACmix2D`.

    Example:
        >>> layer = ACmix2D(8)
        >>> y = layer(keras.ops.ones((1, 5, 5, 3)))
        >>> folded = layer.folded()
        >>> tuple(folded.kernel.shape), tuple(folded.bias_kernel.shape)
        ((3, 3, 1, 3, 8), (3, 3, 8))

    References:
        - [Pan et al., 2022](https://arxiv.org/abs/2111.14556); the form is
          ours.
    """

    kernel_initializer: Any = keras.initializers.Zeros()
    bias_initializer: Any = keras.initializers.Zeros()
    kernel_regularizer: Any = None

    def build(self, input_shape: Shape) -> None:
        shape = self.check_shape(input_shape)
        channels = int(shape[-1] or 0)
        if self.attends:
            self.add_linear_maps(channels, self.use_bias)
            self.add_positions()
        self.bias_kernel = None
        if self.convolves:
            size = self.kernel_size
            self.kernel = self.add_weight(
                name="kernel",
                shape=(*size, self.group.order, channels, self.filters),
                initializer="zeros",
            )
            if self.use_bias:
                self.bias_kernel = self.add_weight(
                    name="bias_kernel",
                    shape=(*size, self.filters),
                    initializer="zeros",
                )
        self.finish_build(shape)

    def convolution(self) -> Convolution:
        bias = self.bias_kernel
        return Convolution(
            ops.convert_to_tensor(self.kernel),
            None if bias is None else ops.convert_to_tensor(bias),
        )
