"""ACmix in transformers whose attention is within windows."""

from typing import Any

import keras
from keras import ops

from keras_equiattn import _checks
from keras_equiattn.layers.acmix.transformer import TransformerACmix
from keras_equiattn.layers.acmix.two_paths import MAPS
from keras_equiattn.layers.base import linear_maps
from keras_equiattn.layers.base.initializers import fresh
from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Shape
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.dense import in_whole_image
from keras_equiattn.ops.dense import neighbours_in_image
from keras_equiattn.ops.dense import partitioned_attention
from keras_equiattn.ops.dense import relative_places


@keras.saving.register_keras_serializable(package="keras_equiattn")
class WindowACmix2D(TransformerACmix):
    """ACmix with attention in windows that do not overlap, for Swin.

    With linear maps `q`, `k`, `v` of the image, for every pixel `x`, every
    pixel `y` in its window and every head::

        s(x, y) = <q(x), k(y)> / sqrt(size) + position_bias(x - y)
        attention(x) = (sum_y softmax_y(s(x, y)) v(y)) W + b

    and the layer returns `attention_rate * attention + convolution_rate *
    convolution`, with the path of convolution of `ACmix2D`, where the mixing
    has a bias. With a shift the image is rolled up and to the left first, and
    back in the end. Windows then hold pixels from both sides of the seam, which
    do not attend to each other. The convolution goes across the seam, as that
    of the authors does, and sees zeros beyond the border of the rolled image.

    Args:
        filters: channels of the output and of queries, keys and values;
            divisible by `num_heads`.
        num_heads: number of heads, contiguous blocks of the channels.
        window_size: rows and columns of the windows, which must divide those
            of the image, an integer or a pair.
        shift: by how many rows and columns windows are moved, less than their
            size, an integer from 0 on or a pair.
        kernel_size: rows and columns of the convolution, odd, an integer or a
            pair.
        paths, rates, shift_kernels, kernel_groups: see `ACmix2D`. With
            `paths="attention"` the layer is the attention of Swin.
        attention_dropout: rate at which attention weights are dropped.
        dropout: the rate of a dropout on the output.
        kernel_initializer: the initializer of linear maps and position biases;
            None is the normal distribution with standard deviation 0.02,
            truncated at two standard deviations.
        mixing_initializer: the initializer of the mixing, and of shift kernels
            that are "random"; None is uniform within one over the square root
            of the inputs.
        bias_initializer: the initializer of the biases.
        kernel_regularizer: the regularizer of the kernels of queries, keys,
            values and output.
        data_format: "channels_last", "channels_first" or None (what
            `keras.config.image_data_format()` says).
        **kwargs: `name`, `dtype`, `trainable`.

    Call arguments:
        inputs: images.
        training: whether there is dropout.
        return_attention_maps: also return the weights without dropout, as a
            dict: "image" `(batch, height, width, 1, heads, 1, height, width)`
            adds up to one over the last two axes, the pixels of the image. It
            is large.
        query: `(row, column)` of a pixel: the map is then that of this pixel
            alone, `(batch, 1, heads, 1, height, width)`.

    Input shape:
        "channels_last": `(batch, height, width, channels)`;
        "channels_first": `(batch, channels, height, width)`.

    Output shape:
        The shape of the input, with `filters` channels.

    Symmetry:
        The layer has no symmetry, not even under translations, which move
        pixels to other windows. Without a shift, an image that is rolled by
        whole windows gives the rolled output, as far as the convolution does
        not see the border.

    Variables:
        `query_kernel`, `key_kernel`, `value_kernel (1, channels, filters)`,
        `query_bias`, `key_bias`, `value_bias (filters,)`; `position_bias (2
        rows - 1, 2 columns - 1, heads)` of the offsets, `output_kernel
        (filters, filters)`, `output_bias (filters,)`; `mixing_kernel (3
        num_heads, kernel pixels)`, `mixing_bias (kernel pixels,)`,
        `shift_kernel`, `attention_rate`, `convolution_rate` as in `ACmix2D`.

    Raises:
        ValueError: for bad arguments, in `__init__`; for images that windows
            do not fill, in `build` and in the call.

    Example:
        >>> layer = WindowACmix2D(12, num_heads=3, window_size=4, shift=2)
        >>> tuple(layer(keras.ops.ones((2, 8, 8, 12))).shape)
        (2, 8, 8, 12)

    References:
        - [Liu et al., 2021](https://arxiv.org/abs/2103.14030)
        - [Pan et al., 2022](https://arxiv.org/abs/2111.14556), and the
          authors' code, https://github.com/LeapLabTHU/ACmix. The bias of
          the mixing starts at zero here, and uniform within one over the
          square root of the inputs there.
    """

    def __init__(
        self,
        filters: int,
        num_heads: int,
        window_size: int | tuple[int, int] = 7,
        shift: int | tuple[int, int] = 0,
        kernel_size: int | tuple[int, int] = 3,
        paths: str = "both",
        rates: str = "learned",
        shift_kernels: str = "learned",
        kernel_groups: int | None = None,
        attention_dropout: float = 0.0,
        dropout: float = 0.0,
        kernel_initializer: Any = None,
        mixing_initializer: Any = None,
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        data_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            filters=filters,
            num_heads=num_heads,
            kernel_size=kernel_size,
            paths=paths,
            rates=rates,
            shift_kernels=shift_kernels,
            kernel_groups=kernel_groups,
            attention_dropout=attention_dropout,
            dropout=dropout,
            kernel_initializer=kernel_initializer,
            mixing_initializer=mixing_initializer,
            bias_initializer=bias_initializer,
            kernel_regularizer=kernel_regularizer,
            data_format=data_format,
            **kwargs,
        )
        self.window_size = _checks.pair(window_size, "window_size")
        self.shift = _shift(shift, self.window_size)

    def build(self, input_shape: Shape) -> None:
        shape = self.check_shape(input_shape)
        self.add_linear_maps(int(shape[-1] or 0))
        if self.attends:
            rows, columns = self.window_size
            self.position_bias = self.add_weight(
                name="position_bias",
                shape=(2 * rows - 1, 2 * columns - 1, self.num_heads),
                initializer=fresh(self.kernel_initializer),
            )
            self.add_output()
        self.finish_build(shape)

    def call(
        self,
        inputs: Tensor,
        return_attention_maps: bool = False,
        query: tuple[int, int] | None = None,
        training: bool | None = None,
    ) -> Any:
        return self.call_or_attend(
            inputs, return_attention_maps, query, training=training
        )

    def call_channels_last(
        self, x: Tensor, training: bool | None = None
    ) -> Tensor:
        return self._mixed(x, training)[0]

    def attend_channels_last(
        self,
        x: Tensor,
        query: tuple[int, int] | None = None,
        training: bool | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        self.require_attention()
        y, weights = self._mixed(x, training)
        weights = in_whole_image(weights, self.window_size, self.shift)
        weights = weights[:, :, :, None, :, None]
        return y, {"image": self.at_query(weights, query)}

    def check_shape(self, input_shape: Shape) -> tuple[Any, ...]:
        # Checked here, so that the message has the shape that was passed.
        shape = super().check_shape(input_shape)
        if any(
            n is None or n % w
            for n, w in zip(shape[1:3], self.window_size, strict=True)
        ):
            raise ValueError(
                f"{self._label()} needs a height and width that are multiples "
                f"of window_size={self.window_size}, and not known only at "
                f"run time. Received: input_shape={tuple(input_shape)}"
            )
        return shape

    def output_shape_channels_last(self, shape: Shape) -> Shape:
        return (*shape[:-1], self.filters)

    def _mixed(self, x: Tensor, training: bool | None) -> tuple[Tensor, Any]:
        """The output, and the weights of attention."""
        x = backend.rolled(x, [-n for n in self.shift], (1, 2))
        attention, weights = None, None
        if self.attends:
            attention, weights = self._attend(x, training)
        y = self.join_paths(x, attention)
        y = backend.rolled(y, self.shift, (1, 2))
        return self.drop(y, training=training), weights

    def _attend(
        self, x: Tensor, training: bool | None
    ) -> tuple[Tensor, Tensor]:
        query, keys, values = (
            ops.squeeze(linear_maps.on_group(self, name, x), axis=3)
            for name in MAPS
        )
        bias = ops.reshape(
            ops.convert_to_tensor(self.position_bias), (-1, self.num_heads)
        )
        places = backend.constant(relative_places(self.window_size), bias)
        bias = ops.take(bias, places, axis=0)
        seen = None
        if any(self.shift):
            seen = neighbours_in_image(
                tuple(x.shape[1:3]), self.window_size, self.shift
            )
        y, weights = partitioned_attention(
            query * self.scale,
            keys,
            values,
            self.window_size,
            self.num_heads,
            ops.transpose(bias, (2, 0, 1)),
            seen,
            lambda weights: self.drop_weights(weights, training=training),
        )
        return ops.expand_dims(self.output_map(y), axis=3), weights

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "window_size": self.window_size,
            "shift": self.shift,
        }


def _shift(value: Any, window: tuple[int, int]) -> tuple[int, int]:
    """One number or two, each from zero to below the size of the window."""
    pair = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    try:
        rows, columns = (_checks.integer(n, "shift", 0) for n in pair)
    except ValueError:
        rows = columns = max(window)
    if rows >= window[0] or columns >= window[1]:
        raise ValueError(
            "`shift` must be an integer or a pair, from 0 to below "
            f"window_size={window}. Received: {value!r}"
        )
    return rows, columns
