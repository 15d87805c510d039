"""Attention on the input of a convolution: alpha_F and alpha_RH."""

from typing import Any

import keras

from keras_equiattn import groups
from keras_equiattn.layers.attentive.channel_spatial import (
    ChannelSpatialAttention,
)
from keras_equiattn.layers.base.attention_layer import AttentionLayer
from keras_equiattn.layers.convolution import BaseGroupConv2D
from keras_equiattn.ops._types import Shape
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.group.convolution import group_conv
from keras_equiattn.ops.group.convolution import lifting_conv
from keras_equiattn.ops.papers.input_attention import co_attention
from keras_equiattn.ops.papers.input_attention import input_attention


@keras.saving.register_keras_serializable(package="keras_equiattn")
class InputAttention(ChannelSpatialAttention):
    """Weighs the input of a convolution by channel, and by pixel.

    `y = (1 - aX aC) x`: channel attention `aC(h, c)` sees the mean and the
    maximum of `x` over space, through a two-layer perceptron that is a
    convolution on the group; spatial attention `aX(x, h)` those of `aC x`
    over the channels, through a group convolution to one channel. It costs
    little compared with the convolution that follows it::

        x = GroupConv2D(16, 3, group="p4")(InputAttention("p4")(x))

    On images the perceptron is an ordinary one, and the spatial scores are
    the maximum of a lifting convolution over the group.

    Args:
        group: a group or its name, see `keras_equiattn.groups.get`.
        attention: "full" (channel, then spatial), "channel" or "spatial".
        attention_kernel_size: rows and columns of the spatial attention
            filter, odd.
        attention_dilation_rate: the dilation of the spatial attention filter.
        reduction_ratio: channel attention has `max(1, channels //
            reduction_ratio)` hidden units, as in the paper. None is a ratio
            of 16 with at least 4 units: a single one is often dead from the
            start, and attention is then the same for every input.
        channel_kernel_initializer, spatial_kernel_initializer: initializers,
            which are given the shape `(fan_in, everything else)`. None is
            uniform within `1 / sqrt(fan_in)`.
        attention_regularizer: the regularizer of all weights.
        data_format: "channels_last", "channels_first" or None (what
            `keras.config.image_data_format()` says).
        filter_basis: the basis of the filters: "pixel" has a number for each
            pixel, and interpolates where a turn does not map pixels to pixels;
            "steerable" has coefficients of filters that turn by any angle, see
            `ops.steerable_basis`. Initializers then draw pixels, whose
            projections on these filters are scaled to keep the variance. None
            is "pixel" for groups that act on the grid, and "steerable" for
            others.
        **kwargs: `name`, `dtype`, `trainable`.

    Call arguments:
        inputs: images or feature maps on the group.
        return_attention_maps: also return the attention as applied, as a
            dict: "channel" `(batch[, h], channels)` holds `1 - aC`, "spatial"
            `(batch, height, width[, h])` holds `1 - aX`, "effective" `(batch,
            height, width[, h], channels)` holds `1 - aX aC`, by which the
            input is multiplied; `h` for feature maps. With "channels_first"
            the axes of the maps are the same.
        query: `(row, column)` of a pixel: "effective" then has the map of this
            pixel alone, `(batch[, h], channels)`.

    Input shape:
        "channels_last": `(batch, height, width, channels)` or `(batch,
        height, width, order, channels)`; "channels_first": `(batch, channels,
        height, width)` or `(batch, channels, height, width, order)`. Height
        and width may be None.

    Output shape:
        The shape of the input.

    Symmetry:
        Equivariant under the group to rounding on every input
        (`ops.group_action`), and so are the maps. For groups that do not act
        on the grid (p8, p12, p16) this holds for the turns by 90 degrees and
        the mirrors that go with them; in between the layer is approximate.

    Variables:
        `channel_kernel_1 ([order,] channels, hidden)`, `channel_kernel_2
        ([order,] hidden, channels)`; `spatial_kernel (rows, columns,
        [order,] 2, 1)` for (mean, maximum); with `order` for feature maps.
        Steerable filters have one axis of `count` coefficients in place of
        rows and columns, with the `count` of `ops.steerable_basis(group,
        rows)`.

    Raises:
        ValueError: for bad arguments, in `__init__`; for shapes that do not
            fit, in `build` and in the call.

    Example:
        >>> x = keras.ops.ones((2, 8, 8, 4, 6))
        >>> y, maps = InputAttention("p4")(x, return_attention_maps=True)
        >>> tuple(y.shape), tuple(maps["spatial"].shape)
        ((2, 8, 8, 4, 6), (2, 8, 8, 4))

    References:
        - [Romero et al., 2020](https://arxiv.org/abs/2002.03830), eq. 20,
          where it is called alpha_F. As in their code, `1 - aX aC` is
          applied, with spatial statistics of `aC x`. Their code multiplies the
          spatial scores by a constant, the measure of the group; here it is
          part of the kernel.
    """

    takes = "any"

    def __init__(
        self,
        group: str | groups.Group = "p4",
        attention: str = "full",
        attention_kernel_size: int = 7,
        attention_dilation_rate: int = 1,
        reduction_ratio: int | None = None,
        channel_kernel_initializer: Any = None,
        spatial_kernel_initializer: Any = None,
        attention_regularizer: Any = None,
        data_format: str | None = None,
        filter_basis: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            filter_basis=filter_basis,
            group=group,
            attention=attention,
            attention_kernel_size=attention_kernel_size,
            attention_dilation_rate=attention_dilation_rate,
            reduction_ratio=reduction_ratio,
            channel_kernel_initializer=channel_kernel_initializer,
            spatial_kernel_initializer=spatial_kernel_initializer,
            attention_regularizer=attention_regularizer,
            data_format=data_format,
            **kwargs,
        )

    def build(self, input_shape: Shape) -> None:
        shape = self.check_shape(input_shape)
        self.add_attention_weights(shape)
        self.fix_input_channels(shape[-1])
        self.built = True

    def call_channels_last(self, x: Tensor) -> Tensor:
        return self._attend(x)[0]

    def output_shape_channels_last(self, shape: Shape) -> Shape:
        return shape

    def attend_channels_last(
        self, x: Tensor, query: tuple[int, int] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        y, maps = self._attend(x)
        maps["effective"] = self.at_query(maps["effective"], query)
        return y, maps

    def _attend(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        first, second, spatial = self.kernels()
        channel = None if first is None else (first, second)
        return input_attention(
            x,
            channel,
            spatial,
            self.group,
            self.attention_dilation_rate,
            self.filter_basis,
        )

    def _planar(self, shape: Shape) -> bool:
        return False  # the operation itself lifts images


class BaseCoAttentiveConv2D(AttentionLayer, BaseGroupConv2D):
    """The base of `CoAttentiveLiftingConv2D` and `CoAttentiveGroupConv2D`."""

    def __init__(
        self,
        filters: int,
        kernel_size: int | tuple[int, int],
        attention_initializer: Any = "glorot_uniform",
        attention_regularizer: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(filters, kernel_size, **kwargs)
        self.attention_initializer = keras.initializers.get(
            attention_initializer
        )
        self.attention_regularizer = keras.regularizers.get(
            attention_regularizer
        )

    def build(self, input_shape: Shape) -> None:
        super().build(input_shape)
        self.attention_kernel = self.add_weight(
            name="attention_kernel",
            shape=(1, 1, *self.check_shape(input_shape)[3:], 1),
            initializer=self.attention_initializer,
            regularizer=self.attention_regularizer,
        )

    def spatial_attention(self, x: Tensor) -> Tensor:
        """Attention as applied: `1 - a`, `(batch, height, width[, order])`."""
        kernel = keras.ops.convert_to_tensor(self.attention_kernel)
        return co_attention(x, kernel, self.group)

    def convolve(self, x: Tensor, kernel: Tensor, **options: Any) -> Tensor:
        attended = x * self.spatial_attention(x)[..., None]
        convolve = lifting_conv if self.takes == "image" else group_conv
        return convolve(attended, kernel, self.group, **options)

    def attend_channels_last(
        self, x: Tensor, query: tuple[int, int] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        spatial = self.spatial_attention(x)
        effective = self.at_query(spatial[..., None], query)
        maps = {"spatial": spatial, "effective": effective}
        return self.call_channels_last(x), maps

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "attention_initializer": keras.initializers.serialize(
                self.attention_initializer
            ),
            "attention_regularizer": keras.regularizers.serialize(
                self.attention_regularizer
            ),
        }


@keras.saving.register_keras_serializable(package="keras_equiattn")
class CoAttentiveLiftingConv2D(BaseCoAttentiveConv2D):
    """Lifting convolution of images whose pixels are weighted first.

    `y = conv((1 - a) x) + b`, where `a(x)` comes from all channels
    of the pixel by a 1 x 1 convolution and a sigmoid. It is the
    baseline of the paper: it sees no neighbourhood and no statistics.

    Args:
        filters: number of filters; the output has `order * filters` values
            per pixel.
        kernel_size: rows and columns of the filters, an integer or a pair.
            Groups with quarter turns need square filters.
        attention_initializer, attention_regularizer: the initializer and the
            regularizer of the attention weights.
        **kwargs: arguments of `LiftingConv2D`: `strides`, `padding`,
            `data_format`, `dilation_rate`, `activation`, `use_bias`,
            `kernel_initializer`, `group`, `exact`, `filter_basis` and so on.

    Call arguments:
        inputs: images.
        return_attention_maps: also return the attention as applied, as a
            dict: "spatial" `(batch, height, width)` holds `1 - a`,
            "effective" the same with a last axis of 1.
        query: `(row, column)` of an input pixel: "effective" then has the
            factor of this pixel alone.

    Input shape:
        "channels_last": `(batch, height, width, channels)`;
        "channels_first": `(batch, channels, height, width)`. Height
        and width may be None where the strides are 1 or with `exact="call"`.

    Output shape:
        "channels_last": `(batch, new_height, new_width, order, filters)`;
        "channels_first": `(batch, filters, new_height, new_width, order)`.

    Symmetry:
        `L_g` of the input gives `L_g` of output and maps for every element of
        the group, to rounding, on every input that the layer accepts with
        `exact=True` (see `ops.is_exact`). For groups that do not act on the
        grid (p8, p12, p16) this holds for the turns by 90 degrees and the
        mirrors that go with them; in between the layer is approximate.

    Variables:
        `kernel (rows, columns, channels, filters)`, `bias (filters,)`;
        `attention_kernel (1, 1, channels, 1)`.
        Steerable filters have one axis of `count` coefficients in place of
        rows and columns, with the `count` of `ops.steerable_basis(group,
        rows)`.

    Raises:
        ValueError: for bad arguments, in `__init__`; for shapes that do not
            fit or would not be exact, in `build` and in the call.

    Example:
        >>> layer = CoAttentiveLiftingConv2D(4, 3, group="p4")
        >>> tuple(layer(keras.ops.ones((2, 8, 8, 3))).shape)
        (2, 6, 6, 4, 4)

    References:
        - The baseline of [Romero et al.,
          2020](https://arxiv.org/abs/2002.03830), table 1, where it is called
          alpha_RH, as in their code, after [Romero and Hoogendoorn,
          2020](https://arxiv.org/abs/1911.07849): a sigmoid per pixel here, a
          softmax over the group there.
    """

    takes = "image"


@keras.saving.register_keras_serializable(package="keras_equiattn")
class CoAttentiveGroupConv2D(BaseCoAttentiveConv2D):
    """Group convolution of feature maps whose pixels are weighted first.

    `y = conv((1 - a) x) + b`, where `a(x, h)` comes from all channels
    of the pixel at all group elements by a 1 x 1 convolution and a sigmoid. It
    is the baseline of the paper: it sees no neighbourhood and no statistics.

    Args:
        filters: number of filters; the output has `order * filters` values
            per pixel.
        kernel_size: rows and columns of the filters, an integer or a pair.
            Groups with quarter turns need square filters.
        attention_initializer, attention_regularizer: the initializer and the
            regularizer of the attention weights.
        **kwargs: arguments of `GroupConv2D`: `strides`, `padding`,
            `data_format`, `dilation_rate`, `activation`, `use_bias`,
            `kernel_initializer`, `group`, `exact`, `filter_basis` and so on.

    Call arguments:
        inputs: feature maps on the group.
        return_attention_maps: also return the attention as applied, as a
            dict: "spatial" `(batch, height, width, h)` holds `1 - a`,
            "effective" the same with a last axis of 1.
        query: `(row, column)` of an input pixel: "effective" then has the
            factor of this pixel alone.

    Input shape:
        "channels_last": `(batch, height, width, order, channels)`;
        "channels_first": `(batch, channels, height, width, order)`. Height
        and width may be None where the strides are 1 or with `exact="call"`.
        With `"z2"` also images of rank 4, which give rank 4.

    Output shape:
        "channels_last": `(batch, new_height, new_width, order, filters)`;
        "channels_first": `(batch, filters, new_height, new_width, order)`.

    Symmetry:
        `L_g` of the input gives `L_g` of output and maps for every element of
        the group, to rounding, on every input that the layer accepts with
        `exact=True` (see `ops.is_exact`). For groups that do not act on the
        grid (p8, p12, p16) this holds for the turns by 90 degrees and the
        mirrors that go with them; in between the layer is approximate.

    Variables:
        `kernel (rows, columns, order, channels, filters)`, `bias (filters,)`;
        `attention_kernel (1, 1, order, channels, 1)`.
        Steerable filters have one axis of `count` coefficients in place of
        rows and columns, with the `count` of `ops.steerable_basis(group,
        rows)`.

    Raises:
        ValueError: for bad arguments, in `__init__`; for shapes that do not
            fit or would not be exact, in `build` and in the call.

    Example:
        >>> layer = CoAttentiveGroupConv2D(4, 3, group="p4")
        >>> tuple(layer(keras.ops.ones((2, 8, 8, 4, 3))).shape)
        (2, 6, 6, 4, 4)

    References:
        - The baseline of [Romero et al.,
          2020](https://arxiv.org/abs/2002.03830), table 1, where it is called
          alpha_RH, as in their code, after [Romero and Hoogendoorn,
          2020](https://arxiv.org/abs/1911.07849): a sigmoid per pixel here, a
          softmax over the group there.
    """

    takes = "group"
