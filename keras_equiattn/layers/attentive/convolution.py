"""Attentive lifting and group convolution: attention on the responses."""

from typing import Any

import keras

from keras_equiattn.layers.attentive.channel_spatial import (
    ChannelSpatialAttention,
)
from keras_equiattn.layers.convolution import BaseGroupConv2D
from keras_equiattn.ops._types import Shape
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.responses.api import attentive_group_conv
from keras_equiattn.ops.responses.api import attentive_lifting_conv
from keras_equiattn.ops.responses.api import check_chunk_size
from keras_equiattn.ops.responses.api import response_attention


class BaseAttentiveConv2D(ChannelSpatialAttention, BaseGroupConv2D):
    """The base of `AttentiveLiftingConv2D` and `AttentiveGroupConv2D`."""

    def __init__(
        self,
        filters: int,
        kernel_size: int | tuple[int, int],
        attention: str = "full",
        attention_kernel_size: int = 7,
        attention_dilation_rate: int = 1,
        reduction_ratio: int | None = None,
        channel_kernel_initializer: Any = None,
        spatial_kernel_initializer: Any = None,
        attention_regularizer: Any = None,
        chunk_size: int | str | None = "auto",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            filters,
            kernel_size,
            attention=attention,
            attention_kernel_size=attention_kernel_size,
            attention_dilation_rate=attention_dilation_rate,
            reduction_ratio=reduction_ratio,
            channel_kernel_initializer=channel_kernel_initializer,
            spatial_kernel_initializer=spatial_kernel_initializer,
            attention_regularizer=attention_regularizer,
            **kwargs,
        )
        self.chunk_size = check_chunk_size(chunk_size)

    def build(self, input_shape: Shape) -> None:
        super().build(input_shape)
        shape = self.check_shape(input_shape)
        self.add_attention_weights(shape, filters=(self.filters,))

    @property
    def attention_options(self) -> dict[str, Any]:
        return {
            "attention_dilation_rate": self.attention_dilation_rate,
            "chunk_size": self.chunk_size,
        }

    def attend_channels_last(
        self, x: Tensor, query: tuple[int, int] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        y = self.call_channels_last(x)
        if query is not None:
            query = self.check_query(query, y.shape[1:3])
        maps = response_attention(
            x,
            self.filters_of(self.kernel, self.kernel_size[0]),
            self.kernels(),
            self.group,
            filter_basis=self.filter_basis,
            strides=self.strides,
            padding=self.padding,
            dilation_rate=self.dilation_rate,
            attention_dilation_rate=self.attention_dilation_rate,
            query=query,
        )
        return y, maps

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "chunk_size": self.chunk_size}


@keras.saving.register_keras_serializable(package="keras_equiattn")
class AttentiveLiftingConv2D(BaseAttentiveConv2D):
    """Lifting convolution with attention on its responses.

    `y(x, h, o) = sum_c (1 - aX aC) f + b`, with the responses `f(x, h, c, o)
    = sum_d in(x + d, c) K_o(h^-1 d, c)` before they are summed over the input
    channels `c`. Channel attention `aC(h, c, o)` sees the mean and the
    maximum of `f` over space, spatial attention `aX(x, h, o)` those of
    `aC f` over the channels.

    Args:
        filters: number of filters; the output has `order * filters` values
            per pixel.
        kernel_size: rows and columns of the filters, an integer or a pair.
            Groups with quarter turns need square filters.
        attention: "full" (channel, then spatial), "channel" or "spatial".
        attention_kernel_size: rows and columns of the spatial attention
            filters, odd.
        attention_dilation_rate: the dilation of the spatial attention filters.
        reduction_ratio: channel attention has `max(1, channels //
            reduction_ratio)` hidden units, as in the paper. None is a ratio
            of 16 with at least 4 units: a single one is often dead from the
            start, and attention is then the same for every input.
        channel_kernel_initializer, spatial_kernel_initializer: initializers,
            which are given the shape `(fan_in, everything else)`. None is
            uniform within `1 / sqrt(fan_in)`.
        attention_regularizer: the regularizer of the attention weights.
        chunk_size: how many of the `order * filters` output channels are
            computed at a time, at most. All chunks have the same size, and
            every size gives the same result. "auto" lets one step hold 256 MiB,
            or one output channel where that takes more; where the size of the
            input is not known, it assumes 128 images of 64 x 64 pixels. None
            holds all responses, which takes `channels` times the memory of the
            output, but can be differentiated twice on every backend. A gradient
            with chunks can be differentiated again only under JAX.
        **kwargs: arguments of `LiftingConv2D`: `strides`, `padding`,
            `data_format`, `dilation_rate`, `activation`, `use_bias`,
            `kernel_initializer`, `group`, `exact`, `filter_basis` and so on.
            `filter_basis` is the basis of the spatial attention filters too.

    Call arguments:
        inputs: images.
        return_attention_maps: also return the attention as applied, as a
            dict: "channel" `(batch, h, channels, filters)` holds `1 - aC`,
            "spatial" `(batch, new_height, new_width, h, filters)`
            holds `1 - aX`, "effective" `(batch, new_height, new_width, h, 1)`
            the mean of `1 - aX aC` over all responses of a pixel. Always in
            this order of axes, and with `h` (for z2 too). No gradient passes
            through the maps.
        query: `(row, column)` of an output pixel: "effective" is then all of
            `1 - aX aC` there, `(batch, h, channels, filters)`.

    Input shape:
        "channels_last": `(batch, height, width, channels)`;
        "channels_first": `(batch, channels, height, width)`. Height and width
        may be None where the strides are 1 or with `exact="call"`.

    Output shape:
        "channels_last": `(batch, new_height, new_width, order, filters)`;
        "channels_first": `(batch, filters, new_height, new_width, order)`.

    Symmetry:
        `L_g` of the input gives `L_g` of the output (`ops.group_action`) for
        every element of the group, to rounding, on every input that the layer
        accepts with `exact=True` (see `ops.is_exact`). The maps follow: axis
        `h` is permuted by `g^-1`, space is turned. For groups that do
        not act on the grid (p8, p12, p16) this holds for the turns by 90
        degrees and the mirrors that go with them; in between the layer is
        approximate.

    Variables:
        `kernel (rows, columns, channels, filters)`, `bias (filters,)`;
        `channel_kernel_1 (channels, hidden, filters)`, `channel_kernel_2
        (hidden, channels, filters)`; `spatial_kernel (rows, columns, 2,
        filters)` for (mean, maximum).
        Steerable filters have one axis of `count` coefficients in place of
        rows and columns, with the `count` of `ops.steerable_basis(group,
        rows)`.

    Raises:
        ValueError: for bad arguments, in `__init__`; for shapes that do not
            fit or would not be exact, in `build` and in the call.

    Example:
        >>> layer = AttentiveLiftingConv2D(4, 3, "spatial", group="p4")
        >>> y, maps = layer(
        ...     keras.ops.ones((2, 12, 12, 3)), return_attention_maps=True
        ... )
        >>> tuple(y.shape), tuple(maps["spatial"].shape)
        ((2, 10, 10, 4, 4), (2, 10, 10, 4, 4))

    References:
        - [Romero et al., 2020](https://arxiv.org/abs/2002.03830), eqs. 16 to
          19. As in their code, the output keeps what attention does not take
          (`1 - aX aC`, where eq. 19 reads `aX aC`), every output channel has
          attention weights of its own, and mean and maximum share them.
          Unlike in their code, weights follow the group under p4m too (their
          channel attention shifts them cyclically, with an error of 0.4 to
          0.6), and there is no constant factor of the group's measure.
    """

    takes = "image"

    def convolve(self, x: Tensor, kernel: Tensor, **options: Any) -> Tensor:
        options = {**options, **self.attention_options}
        return attentive_lifting_conv(
            x, kernel, self.kernels(), self.group, **options
        )


@keras.saving.register_keras_serializable(package="keras_equiattn")
class AttentiveGroupConv2D(BaseAttentiveConv2D):
    """Group convolution with attention on its responses.

    `y(x, h, o) = sum_jc (1 - aX aC) f + b`, with the responses `f(x, h, j, c,
    o) = sum_d in(x + d, j, c) K_o(h^-1 d, h^-1 j, c)` before they are summed
    over input group elements `j` and input channels `c`. Channel attention
    `aC(h, j, c, o)` sees the mean and the maximum of `f` over space, spatial
    attention `aX(x, h, j, o)` those of `aC f` over the channels.

    Unless `chunk_size` is None, the responses are never all held: they are
    computed for a few channels at a time, reduced at once and computed again in
    the backward pass.

    Args:
        filters: number of filters; the output has `order * filters` values
            per pixel.
        kernel_size: rows and columns of the filters, an integer or a pair.
            Groups with quarter turns need square filters.
        attention: "full" (channel, then spatial), "channel" or "spatial".
        attention_kernel_size: rows and columns of the spatial attention
            filters, odd.
        attention_dilation_rate: the dilation of the spatial attention filters.
        reduction_ratio: channel attention has `max(1, channels //
            reduction_ratio)` hidden units, as in the paper. None is a ratio
            of 16 with at least 4 units: a single one is often dead from the
            start, and attention is then the same for every input.
        channel_kernel_initializer, spatial_kernel_initializer: initializers,
            which are given the shape `(fan_in, everything else)`. None is
            uniform within `1 / sqrt(fan_in)`.
        attention_regularizer: the regularizer of the attention weights.
        chunk_size: how many of the `order * filters` output channels are
            computed at a time, at most. All chunks have the same size, and
            every size gives the same result. "auto" lets one step hold 256 MiB,
            or one output channel where that takes more; where the size of the
            input is not known, it assumes 128 images of 64 x 64 pixels. None
            holds all responses, which takes `order * channels` times the memory
            of the output, but can be differentiated twice on every backend. A
            gradient with chunks can be differentiated again only under JAX.
        **kwargs: arguments of `GroupConv2D`: `strides`, `padding`,
            `data_format`, `dilation_rate`, `activation`, `use_bias`,
            `kernel_initializer`, `group`, `exact`, `filter_basis` and so on.
            `filter_basis` is the basis of the spatial attention filters too.

    Call arguments:
        inputs: feature maps on the group.
        return_attention_maps: also return the attention as applied, as a
            dict: "channel" `(batch, h, j, channels, filters)` holds `1 - aC`,
            "spatial" `(batch, new_height, new_width, h, j, filters)`
            holds `1 - aX`, "effective" `(batch, new_height, new_width, h, 1)`
            the mean of `1 - aX aC` over all responses of a pixel. Always in
            this order of axes, and with `h` (for z2 too). No gradient passes
            through the maps.
        query: `(row, column)` of an output pixel: "effective" is then all of
            `1 - aX aC` there, `(batch, h, j, channels, filters)`.

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
        accepts with `exact=True` (see `ops.is_exact`). The maps follow: axis
        `h` (and `j`) is permuted by `g^-1`, space is turned. For groups that do
        not act on the grid (p8, p12, p16) this holds for the turns by 90
        degrees and the mirrors that go with them; in between the layer is
        approximate.

    Variables:
        `kernel (rows, columns, order, channels, filters)`, `bias (filters,)`;
        `channel_kernel_1 (order, channels, hidden, filters)`,
        `channel_kernel_2 (order, hidden, channels, filters)`;
        `spatial_kernel (rows, columns, order, 2, filters)` for (mean,
        maximum).
        Steerable filters have one axis of `count` coefficients in place of
        rows and columns, with the `count` of `ops.steerable_basis(group,
        rows)`.

    Raises:
        ValueError: for bad arguments, in `__init__`; for shapes that do not
            fit or would not be exact, in `build` and in the call.

    Example:
        >>> layer = AttentiveGroupConv2D(4, 3, padding="same", group="p4")
        >>> tuple(layer(keras.ops.ones((2, 12, 12, 4, 3))).shape)
        (2, 12, 12, 4, 4)

    References:
        - [Romero et al., 2020](https://arxiv.org/abs/2002.03830), eqs. 16 to
          19. As in their code, the output keeps what attention does not take
          (`1 - aX aC`, where eq. 19 reads `aX aC`), every output channel has
          attention weights of its own, and mean and maximum share them.
          Unlike in their code, weights follow the group under p4m too (their
          channel attention shifts them cyclically, with an error of 0.4 to
          0.6), and there is no constant factor of the group's measure.
    """

    takes = "group"

    def convolve(self, x: Tensor, kernel: Tensor, **options: Any) -> Tensor:
        options = {**options, **self.attention_options}
        return attentive_group_conv(
            x, kernel, self.kernels(), self.group, **options
        )
