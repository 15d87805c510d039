"""Group Squeeze-and-Excitation."""

from typing import Any

import keras

from keras_equiattn import _checks
from keras_equiattn import groups
from keras_equiattn.layers.base import linear_maps
from keras_equiattn.layers.base.attention_layer import AttentionLayer
from keras_equiattn.ops._types import Shape
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.papers.squeeze_excite import squeeze_excite


@keras.saving.register_keras_serializable(package="keras_equiattn")
class SqueezeExcite(AttentionLayer):
    """Weighs channels by what is in the whole feature map.

    `y = s x`, with `s = sigmoid(relu(m W_1 + b_1) W_2 + b_2)` from the mean
    `m` of `x` over space and group. There is one weight per channel, for all
    pixels and group elements.

    Args:
        reduction_ratio: there are `max(1, channels // reduction_ratio)` hidden
            units.
        group: a group or its name, see `keras_equiattn.groups.get`.
        kernel_initializer, bias_initializer: initializers of both kernels and
            both biases.
        kernel_regularizer, bias_regularizer: regularizers of both kernels and
            both biases.
        data_format: "channels_last", "channels_first" or None (what
            `keras.config.image_data_format()` says).
        **kwargs: `name`, `dtype`, `trainable`.

    Call arguments:
        inputs: images or feature maps on the group.
        return_attention_maps: also return the attention as applied, as a
            dict: "channel" `(batch, channels)` holds `s`.
        query: `(row, column)` of a pixel. It changes nothing, since `s` is the
            same at every position.

    Input shape:
        "channels_last": `(batch, height, width, channels)` or `(batch,
        height, width, order, channels)`; "channels_first": `(batch, channels,
        height, width)` or `(batch, channels, height, width, order)`. Height
        and width may be None.

    Output shape:
        The shape of the input.

    Symmetry:
        Equivariant under the group to rounding on every input
        (`ops.group_action`), also for groups that do not act on the grid (p8,
        p12, p16), as far as these act on the input. The map is invariant.

    Variables:
        `reduce_kernel (channels, hidden)`, `reduce_bias (hidden,)`,
        `expand_kernel (hidden, channels)`, `expand_bias (channels,)`.

    Raises:
        ValueError: for bad arguments, in `__init__`; for shapes that do not
            fit, in `build` and in the call; for a `query` outside of the image.

    Example:
        >>> x = keras.ops.ones((2, 8, 8, 4, 32))
        >>> layer = SqueezeExcite(group="p4")
        >>> y, maps = layer(x, return_attention_maps=True)
        >>> tuple(y.shape), tuple(maps["channel"].shape)
        ((2, 8, 8, 4, 32), (2, 32))

    References:
        - [Hu et al., 2018](https://arxiv.org/abs/1709.01507)
        - [Diaconu and Worrall, 2019](https://arxiv.org/abs/1911.07704), eq.
          15 and 16. The biases, which these do not show, are needed for the
          numbers of parameters in their tables.
    """

    takes = "any"

    def __init__(
        self,
        reduction_ratio: int = 16,
        group: str | groups.Group = "p4",
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        bias_regularizer: Any = None,
        data_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(group=group, data_format=data_format, **kwargs)
        self.reduction_ratio = _checks.integer(
            reduction_ratio, "reduction_ratio"
        )
        linear_maps.configure(
            self, kernel_initializer, bias_initializer, kernel_regularizer
        )
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)

    def build(self, input_shape: Shape) -> None:
        channels = int(self.check_shape(input_shape)[-1])
        hidden = max(1, channels // self.reduction_ratio)
        for name, inputs, outputs in (
            ("reduce", channels, hidden),
            ("expand", hidden, channels),
        ):
            linear_maps.add(
                self,
                name,
                (inputs, outputs),
                (outputs,),
                inputs,
                self.bias_regularizer,
            )
        self.fix_input_channels(channels)
        self.built = True

    def call_channels_last(self, x: Tensor) -> Tensor:
        return self.attend_channels_last(x)[0]

    def output_shape_channels_last(self, shape: Shape) -> Shape:
        return shape

    def attend_channels_last(
        self, x: Tensor, query: tuple[int, int] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        self.at_query(x, query)  # raises where there is no such pixel
        y, channel = squeeze_excite(
            x,
            *linear_maps.kernel_and_bias(self, "reduce"),
            *linear_maps.kernel_and_bias(self, "expand"),
        )
        return y, {"channel": channel}

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "reduction_ratio": self.reduction_ratio,
            **linear_maps.config(self),
            "bias_regularizer": keras.regularizers.serialize(
                self.bias_regularizer
            ),
        }
