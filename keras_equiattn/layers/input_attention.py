"""Attention on the input of a convolution: alpha_F and alpha_RH."""

from typing import Any

import keras

from keras_equiattn import groups
from keras_equiattn.layers.attentive_convolution import add_attention_weights
from keras_equiattn.layers.attentive_convolution import attention_config
from keras_equiattn.layers.attentive_convolution import check_attention
from keras_equiattn.layers.base import AttentionLayer
from keras_equiattn.layers.convolution import BaseGroupConv2D
from keras_equiattn.ops._types import Shape
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.convolution import group_conv
from keras_equiattn.ops.convolution import lifting_conv
from keras_equiattn.ops.input_attention import co_attention
from keras_equiattn.ops.input_attention import input_attention


@keras.saving.register_keras_serializable(package="keras_equiattn")
class InputAttention(AttentionLayer):
    """TODO"""

    takes = "any"

    def __init__(
        self,
        group: str | groups.Group = "p4",
        attention: str = "full",
        attention_kernel_size: int = 7,
        attention_dilation_rate: int = 1,
        reduction_ratio: int = 16,
        channel_kernel_initializer: Any = None,
        spatial_kernel_initializer: Any = None,
        attention_regularizer: Any = None,
        data_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(group=group, data_format=data_format, **kwargs)
        check_attention(
            self,
            attention,
            attention_kernel_size,
            attention_dilation_rate,
            reduction_ratio,
            channel_kernel_initializer,
            spatial_kernel_initializer,
            attention_regularizer,
        )

    def build(self, input_shape: Shape) -> None:
        add_attention_weights(self, self.check_shape(input_shape))
        self.built = True

    def call_channels_last(self, x: Tensor) -> Tensor:
        return self._attend(x)[0]

    def output_shape_channels_last(self, shape: Shape) -> Shape:
        return shape

    def attend_channels_last(
        self, x: Tensor, query: tuple[int, int] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        y, channel, spatial = self._attend(x)
        maps = {}
        both: Any = keras.ops.ones_like(x)
        if channel is not None:
            maps["channel"] = 1 - channel
            both = both * channel[:, None, None]
        if spatial is not None:
            maps["spatial"] = 1 - spatial
            both = both * spatial[..., None]
        maps["effective"] = 1 - both
        if query is not None:
            row, column = self.check_query(query, x.shape[1:3])
            maps["effective"] = maps["effective"][:, row, column]
        return y, maps

    def _attend(self, x: Tensor) -> Any:
        channel = spatial = None
        if self.channel_kernel_1 is not None:
            channel = (
                keras.ops.convert_to_tensor(self.channel_kernel_1),
                keras.ops.convert_to_tensor(self.channel_kernel_2),
            )
        if self.spatial_kernel is not None:
            spatial = keras.ops.convert_to_tensor(self.spatial_kernel)
        return input_attention(
            x, channel, spatial, self.group, self.attention_dilation_rate
        )

    def _planar(self, shape: Shape) -> bool:
        return False  # images are lifted in here, not feature maps

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **attention_config(self)}


class BaseCoAttentiveConv2D(AttentionLayer, BaseGroupConv2D):
    """What `CoAttentiveLiftingConv2D` and `CoAttentiveGroupConv2D` share."""

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

    def alpha(self, x: Tensor) -> Tensor:
        """`(batch, height, width[, order])`."""
        kernel = keras.ops.convert_to_tensor(self.attention_kernel)
        return co_attention(x, kernel, self.group)

    def convolve(self, x: Tensor, kernel: Tensor, **options: Any) -> Tensor:
        attended = x * (1 - self.alpha(x))[..., None]
        convolve = lifting_conv if self.takes == "image" else group_conv
        return convolve(attended, kernel, self.group, **options)

    def attend_channels_last(
        self, x: Tensor, query: tuple[int, int] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        spatial = 1 - self.alpha(x)
        effective = spatial[..., None]
        if query is not None:
            row, column = self.check_query(query, x.shape[1:3])
            effective = effective[:, row, column]
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
    """TODO"""

    takes = "image"


@keras.saving.register_keras_serializable(package="keras_equiattn")
class CoAttentiveGroupConv2D(BaseCoAttentiveConv2D):
    """TODO"""

    takes = "group"
