"""Attentive lifting and group convolution: attention on the responses."""

from typing import Any

import keras
import numpy as np

from keras_equiattn import _checks
from keras_equiattn.layers.base import AttentionLayer
from keras_equiattn.layers.base import with_fan_in
from keras_equiattn.layers.convolution import BaseGroupConv2D
from keras_equiattn.ops._types import Shape
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.attentive_convolution import AttentionKernels
from keras_equiattn.ops.attentive_convolution import attentive_group_conv
from keras_equiattn.ops.attentive_convolution import attentive_lifting_conv
from keras_equiattn.ops.attentive_convolution import response_attention

ATTENTION = ("full", "channel", "spatial")


class BaseAttentiveConv2D(AttentionLayer, BaseGroupConv2D):
    """What `AttentiveLiftingConv2D` and `AttentiveGroupConv2D` share."""

    def __init__(
        self,
        filters: int,
        kernel_size: int | tuple[int, int],
        attention: str = "full",
        attention_kernel_size: int = 7,
        attention_dilation_rate: int = 1,
        reduction_ratio: int = 16,
        channel_kernel_initializer: Any = None,
        spatial_kernel_initializer: Any = None,
        attention_regularizer: Any = None,
        chunk_size: int | str | None = "auto",
        **kwargs: Any,
    ) -> None:
        super().__init__(filters, kernel_size, **kwargs)
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
        if chunk_size is not None and chunk_size != "auto":
            try:
                chunk_size = _checks.integer(chunk_size, "chunk_size")
            except ValueError:
                raise ValueError(
                    "`chunk_size` must be a positive integer, 'auto' or None. "
                    f"Received: {chunk_size!r}"
                ) from None
        self.chunk_size = chunk_size

    def build(self, input_shape: Shape) -> None:
        super().build(input_shape)
        shape = self.check_shape(input_shape)
        add_attention_weights(self, shape, filters=(self.filters,))

    def kernels(self) -> AttentionKernels:
        """The weights of the attention as the operation takes them."""
        return AttentionKernels(
            self.channel_kernel_1, self.channel_kernel_2, self.spatial_kernel
        ).map(keras.ops.convert_to_tensor)

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
            keras.ops.convert_to_tensor(self.kernel),
            self.kernels(),
            self.group,
            strides=self.strides,
            padding=self.padding,
            dilation_rate=self.dilation_rate,
            attention_dilation_rate=self.attention_dilation_rate,
            query=query,
        )
        return y, maps

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            **attention_config(self),
            "chunk_size": self.chunk_size,
        }


@keras.saving.register_keras_serializable(package="keras_equiattn")
class AttentiveLiftingConv2D(BaseAttentiveConv2D):
    """TODO"""

    takes = "image"

    def convolve(self, x: Tensor, kernel: Tensor, **options: Any) -> Tensor:
        options = {**options, **self.attention_options}
        return attentive_lifting_conv(
            x, kernel, self.kernels(), self.group, **options
        )


@keras.saving.register_keras_serializable(package="keras_equiattn")
class AttentiveGroupConv2D(BaseAttentiveConv2D):
    """TODO"""

    takes = "group"

    def convolve(self, x: Tensor, kernel: Tensor, **options: Any) -> Tensor:
        options = {**options, **self.attention_options}
        return attentive_group_conv(
            x, kernel, self.kernels(), self.group, **options
        )


def check_attention(
    layer: Any,
    attention: str,
    kernel_size: int,
    dilation_rate: int,
    reduction_ratio: int,
    channel_kernel_initializer: Any,
    spatial_kernel_initializer: Any,
    regularizer: Any,
) -> None:
    """Checks what the attentive layers share and stores it in the layer."""
    layer.attention = _checks.choice(attention, "attention", ATTENTION)
    size = _checks.integer(kernel_size, "attention_kernel_size")
    if size % 2 == 0:
        raise ValueError(
            "`attention_kernel_size` must be odd: an even window has no "
            f"centre to turn about. Received: {kernel_size!r}"
        )
    layer.attention_kernel_size = size
    layer.attention_dilation_rate = _checks.integer(
        dilation_rate, "attention_dilation_rate"
    )
    layer.reduction_ratio = _checks.integer(reduction_ratio, "reduction_ratio")
    layer.channel_kernel_initializer = _initializer(channel_kernel_initializer)
    layer.spatial_kernel_initializer = _initializer(spatial_kernel_initializer)
    layer.attention_regularizer = keras.regularizers.get(regularizer)


def attention_config(layer: Any) -> dict[str, Any]:
    """What `check_attention` stored, for `get_config`."""
    serialize = keras.initializers.serialize
    return {
        "attention": layer.attention,
        "attention_kernel_size": layer.attention_kernel_size,
        "attention_dilation_rate": layer.attention_dilation_rate,
        "reduction_ratio": layer.reduction_ratio,
        "channel_kernel_initializer": serialize(
            layer.channel_kernel_initializer
        ),
        "spatial_kernel_initializer": serialize(
            layer.spatial_kernel_initializer
        ),
        "attention_regularizer": keras.regularizers.serialize(
            layer.attention_regularizer
        ),
    }


def add_attention_weights(
    layer: Any, shape: Shape, filters: tuple[int, ...] = ()
) -> None:
    """Creates the attention weights for inputs `(b, x, y, [order,] c)`.

    With `filters` every output channel has weights of its own, and they act
    on each input group element alone; without, they sum over the group.
    """
    order, channels = tuple(shape[3:-1]), int(shape[-1] or 0)
    hidden = max(1, channels // layer.reduction_ratio)
    summed = 1 if filters else int(np.prod(order))
    size = layer.attention_kernel_size

    def add(name: str, *inner: Any, fan_in: int, initializer: Any) -> Any:
        return layer.add_weight(
            name=name,
            shape=inner,
            initializer=with_fan_in(initializer, fan_in),
            regularizer=layer.attention_regularizer,
        )

    layer.channel_kernel_1 = layer.channel_kernel_2 = None
    layer.spatial_kernel = None
    if layer.attention != "spatial":
        layer.channel_kernel_1 = add(
            "channel_kernel_1",
            *(*order, channels, hidden, *filters),
            fan_in=summed * channels,
            initializer=layer.channel_kernel_initializer,
        )
        layer.channel_kernel_2 = add(
            "channel_kernel_2",
            *(*order, hidden, channels, *filters),
            fan_in=summed * hidden,
            initializer=layer.channel_kernel_initializer,
        )
    if layer.attention != "channel":
        layer.spatial_kernel = add(
            "spatial_kernel",
            *(size, size, *order, 2, *(filters or (1,))),
            fan_in=summed * 2 * size**2,
            initializer=layer.spatial_kernel_initializer,
        )


def _initializer(identifier: Any) -> Any:
    if identifier is None:  # uniform within 1 / sqrt(fan-in)
        return keras.initializers.VarianceScaling(1 / 3, "fan_in", "uniform")
    return keras.initializers.get(identifier)
