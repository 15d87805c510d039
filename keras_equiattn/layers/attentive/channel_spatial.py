"""The base of attention in two steps: over channels, then over space."""

import math
from collections.abc import Callable
from typing import Any

import keras

from keras_equiattn import _checks
from keras_equiattn.layers.base.attention_layer import AttentionLayer
from keras_equiattn.layers.base.filters import FilterLayer
from keras_equiattn.layers.base.initializers import uniform_by_fan_in
from keras_equiattn.layers.base.initializers import with_fan_in
from keras_equiattn.ops._types import Shape
from keras_equiattn.ops.responses.api import AttentionKernels

ATTENTION = ("full", "channel", "spatial")
# The ratio and the least hidden units of channel attention where the caller
# does not choose. A single unit behind a ReLU is dead for about half of all
# initial weights, and then learns nothing.
RATIO = 16
HIDDEN_UNITS = 4


class ChannelSpatialAttention(AttentionLayer, FilterLayer):
    """Base of layers with channel attention, spatial attention or both.

    Among the bases of a class it comes before that of a convolution, if there
    is one, which takes the other arguments.

    Args:
        *args: arguments of the next base.
        attention: "full" (channel, then spatial), "channel" or "spatial".
        attention_kernel_size: rows and columns of the spatial filters, odd.
        attention_dilation_rate: the dilation of the spatial filters.
        reduction_ratio: channel attention has `max(1, channels //
            reduction_ratio)` hidden units; None is a ratio of `RATIO` with at
            least `HIDDEN_UNITS`.
        channel_kernel_initializer, spatial_kernel_initializer: initializers,
            which are given the shape `(fan_in, everything else)`. None is
            uniform within `1 / sqrt(fan_in)`.
        attention_regularizer: the regularizer of the attention weights.
        **kwargs: arguments of the next base.
    """

    def __init__(
        self,
        *args: Any,
        attention: str,
        attention_kernel_size: int,
        attention_dilation_rate: int,
        reduction_ratio: int | None,
        channel_kernel_initializer: Any,
        spatial_kernel_initializer: Any,
        attention_regularizer: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.attention = _checks.choice(attention, "attention", ATTENTION)
        size = _checks.integer(attention_kernel_size, "attention_kernel_size")
        if size % 2 == 0:
            raise ValueError(
                "`attention_kernel_size` must be odd: an even window has no "
                f"centre to turn about. Received: {attention_kernel_size!r}"
            )
        self.attention_kernel_size = size
        self.attention_dilation_rate = _checks.integer(
            attention_dilation_rate, "attention_dilation_rate"
        )
        self.reduction_ratio = _checks.optional_integer(
            reduction_ratio, "reduction_ratio"
        )
        self.channel_kernel_initializer = keras.initializers.get(
            channel_kernel_initializer or uniform_by_fan_in()
        )
        self.spatial_kernel_initializer = keras.initializers.get(
            spatial_kernel_initializer or uniform_by_fan_in()
        )
        self.attention_regularizer = keras.regularizers.get(
            attention_regularizer
        )

    def add_attention_weights(
        self, shape: Shape, filters: tuple[int, ...] = ()
    ) -> None:
        """Creates the attention weights for inputs `(b, x, y, [order,] c)`.

        With `filters` every output channel has weights of its own, and they
        act on each input group element alone; without, they sum over the
        group.
        """
        order, channels = tuple(shape[3:-1]), int(shape[-1] or 0)
        hidden = self._hidden_units(channels)
        summed = 1 if filters else math.prod(int(n or 1) for n in order)
        size = self.attention_kernel_size

        def add(
            create: Callable[..., Any],
            name: str,
            *inner: Any,
            fan_in: int,
            initializer: Any,
        ) -> Any:
            return create(
                name=name,
                shape=inner,
                initializer=with_fan_in(initializer, fan_in),
                regularizer=self.attention_regularizer,
            )

        self.channel_kernel_1 = self.channel_kernel_2 = None
        self.spatial_kernel = None
        if self.attention != "spatial":
            self.channel_kernel_1 = add(
                self.add_weight,
                "channel_kernel_1",
                *(*order, channels, hidden, *filters),
                fan_in=summed * channels,
                initializer=self.channel_kernel_initializer,
            )
            self.channel_kernel_2 = add(
                self.add_weight,
                "channel_kernel_2",
                *(*order, hidden, channels, *filters),
                fan_in=summed * hidden,
                initializer=self.channel_kernel_initializer,
            )
        if self.attention != "channel":
            self.spatial_kernel = add(
                self.add_filters,
                "spatial_kernel",
                *(size, size, *order, 2, *(filters or (1,))),
                fan_in=summed * 2 * size**2,
                initializer=self.spatial_kernel_initializer,
            )

    def _hidden_units(self, channels: int) -> int:
        if self.reduction_ratio is None:
            return max(HIDDEN_UNITS, channels // RATIO)
        return max(1, channels // self.reduction_ratio)

    def kernels(self) -> AttentionKernels:
        """The weights of the attention as the operations take them."""
        spatial = self.spatial_kernel
        if spatial is not None:
            spatial = self.filters_of(spatial, self.attention_kernel_size)
        return AttentionKernels(
            self.channel_kernel_1, self.channel_kernel_2, spatial
        ).map(keras.ops.convert_to_tensor)

    def get_config(self) -> dict[str, Any]:
        serialize = keras.initializers.serialize
        return {
            **super().get_config(),
            "attention": self.attention,
            "attention_kernel_size": self.attention_kernel_size,
            "attention_dilation_rate": self.attention_dilation_rate,
            "reduction_ratio": self.reduction_ratio,
            "channel_kernel_initializer": serialize(
                self.channel_kernel_initializer
            ),
            "spatial_kernel_initializer": serialize(
                self.spatial_kernel_initializer
            ),
            "attention_regularizer": keras.regularizers.serialize(
                self.attention_regularizer
            ),
        }
