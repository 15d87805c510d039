"""ACmix whose attention weighs a window by all of its keys, without softmax."""

from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_equiattn import _checks
from keras_equiattn.layers.acmix.convolution_path import precise
from keras_equiattn.layers.acmix.two_paths import MAPS
from keras_equiattn.layers.acmix.two_paths import TwoPaths
from keras_equiattn.layers.base import linear_maps
from keras_equiattn.layers.base.initializers import fresh
from keras_equiattn.layers.base.initializers import uniform_by_fan_in
from keras_equiattn.layers.base.initializers import with_fan_in
from keras_equiattn.ops._types import Shape
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.numerics import moments
from keras_equiattn.ops.papers.acmix import queries_at
from keras_equiattn.ops.papers.patchwise import patch_features
from keras_equiattn.ops.papers.patchwise import patch_moments
from keras_equiattn.ops.papers.patchwise import patch_weights
from keras_equiattn.ops.papers.patchwise import shared_window_sum

# The defaults of PyTorch, for both batch normalisations.
MOMENTUM = 0.9
EPSILON = 1e-5


@keras.saving.register_keras_serializable(package="keras_equiattn")
class PatchwiseACmix2D(TwoPaths):
    """ACmix with the patchwise attention of SAN.

    With linear maps `q`, `k` (`key_filters` channels) and `v` (`filters`
    channels) of the image, for every pixel `x` and the offsets `d` of its
    window::

        h(x) = W [relu(norm(q(x))), relu(norm(k(x + d))) for all d]
        a(x, d) = A(d) relu(norm(h(x))) + b(d)
        attention(x, c) = sum_d a(x, d, c mod heads) v(x + d, c)

    with `heads = filters / share` features `h`, as many weights `a` for each
    offset, and batch normalisation of each channel of each offset. There is no
    softmax: weights are of any sign and size, and depend on the whole window.

    For each channel `c` of the queries the `2 + filters / key_filters` values
    `f(m, c)` of queries, keys and values, in blocks of `key_filters` channels,
    are mixed and shifted as in `ACmix2D`, and the layer returns
    `attention_rate * attention + convolution_rate * convolution`. Beyond the
    border attention sees the mirror image, the convolution zeros for the linear
    maps.

    The keys of a window, `rows * columns * key_filters` numbers for each pixel,
    are never built. Batch normalisation needs only sums over the image, in
    which some pixels along the border count more than once. `W` is applied to
    one row of the window at a time, and again in the backward pass.

    Args:
        filters: channels of the output and of the values, divisible by
            `share`.
        kernel_size: rows and columns of the convolution, odd, an integer or a
            pair.
        attention_kernel_size: rows and columns that attention sees, likewise.
        share: how many channels of the values share their weights.
        key_filters: channels of queries and keys, a divisor of `filters`; None
            is a quarter.
        strides: an integer or a pair: both paths look around every pixel at a
            multiple of the strides, from the first on.
        dilation_rate: distance of adjacent neighbours in both paths, an
            integer or a pair. Not above 1 together with strides above 1.
        paths, rates, shift_kernels: see `ACmix2D`. With `paths="attention"` the
            layer is the attention of SAN.
        kernel_groups: how many kernels a channel of the queries has, a divisor
            of `filters / key_filters`; None is that number.
        activation: applied to the output; None is the identity.
        use_bias: whether queries, keys and values have biases.
        kernel_initializer: the initializer of all other kernels; None is
            uniform within one over the square root of the fan-in.
        mixing_initializer: the initializer of the mixing, and of shift kernels
            that are "random"; None is uniform within one over the square root
            of the inputs.
        bias_initializer: the initializer of the biases.
        kernel_regularizer: the regularizer of the kernels of queries, keys and
            values.
        recompute: the backward pass computes the features of all windows
            anew. False keeps them, and can be differentiated twice on every
            backend.
        data_format: "channels_last", "channels_first" or None (what
            `keras.config.image_data_format()` says).
        **kwargs: `name`, `dtype`, `trainable`.

    Call arguments:
        inputs: images.
        training: whether batch normalisation takes the statistics of the batch.
        return_attention_maps: also return the weights of the neighbours, as a
            dict: "window" `(batch, new_height, new_width, 1, heads, rows,
            columns)`, whose first row is above the pixel. They do not add up to
            one. With "channels_first" the axes are the same.
        query: `(row, column)` of a pixel of the output: "window" then has the
            map of this pixel alone, `(batch, 1, heads, rows, columns)`.

    Input shape:
        "channels_last": `(batch, height, width, channels)`;
        "channels_first": `(batch, channels, height, width)`. Height and width
        may be None.

    Output shape:
        The shape of the input, with `filters` channels and, with strides,
        `ceil(height / strides)` rows; columns likewise.

    Symmetry:
        Without batch statistics, the layer is equivariant under translations,
        farther from the border than the windows reach. It is not equivariant
        under turns and mirrors: each offset has weights of its own in `W` and
        `A`.

    Variables:
        `query_kernel`, `key_kernel (1, channels, key_filters)`, `value_kernel
        (1, channels, filters)`, `query_bias`, `key_bias`, `value_bias`.
        With `seen = 1 + rows * columns` of attention, the query first:
        `reduce_kernel (seen, key_filters, heads)`, `expand_kernel (heads, rows
        * columns, heads)`, `expand_bias (rows * columns, heads)`; `gamma`,
        `beta`, `moving_mean` and `moving_variance` of `patch_norm (seen,
        key_filters)` and of `feature_norm (heads,)`. `mixing_kernel (2 +
        filters / key_filters, kernel pixels)`, `shift_kernel (rows, columns,
        kernel pixels, key_filters * kernel_groups)`, `attention_rate ()`,
        `convolution_rate ()` as in `ACmix2D`.

    Raises:
        ValueError: for bad arguments, in `__init__`, such as filters that are
            not divisible by `share`, or strides and dilation rates that are
            both above 1; for shapes that do not fit, in `build` and in the
            call.

    Example:
        >>> layer = PatchwiseACmix2D(16, attention_kernel_size=3)
        >>> tuple(layer(keras.ops.ones((2, 9, 9, 3))).shape)
        (2, 9, 9, 16)

    References:
        - [Zhao et al., 2020](https://arxiv.org/abs/2004.13621), patchwise
          self-attention with concatenation, and the authors' code,
          https://github.com/hszhao/SAN.
        - [Pan et al., 2022](https://arxiv.org/abs/2111.14556), appendix C,
          which says how values are split. They published no code for it. Three
          choices are ours: attention is patchwise, it has no positions, and
          strides and dilation act on both paths.
    """

    has_group_argument = False

    def __init__(
        self,
        filters: int,
        kernel_size: int | tuple[int, int] = 3,
        attention_kernel_size: int | tuple[int, int] = 7,
        share: int = 8,
        key_filters: int | None = None,
        strides: int | tuple[int, int] = 1,
        dilation_rate: int | tuple[int, int] = 1,
        paths: str = "both",
        rates: str = "learned",
        shift_kernels: str = "learned",
        kernel_groups: int | None = None,
        activation: Any = None,
        use_bias: bool = True,
        kernel_initializer: Any = None,
        mixing_initializer: Any = None,
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        recompute: bool = True,
        data_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            paths=paths, group="z2", data_format=data_format, **kwargs
        )
        self.filters = _checks.integer(filters, "filters")
        self.share = _checks.integer(share, "share")
        _checks.divisible(self.filters, self.share, "share")
        self.key_filters = _key_filters(key_filters, self.filters)
        self.set_windows(
            kernel_size,
            attention_kernel_size,
            strides,
            dilation_rate,
            border="reflect",
        )
        blocks = self.filters // self.key_filters  # blocks of the values
        self.hold_convolution_path(
            size=self.key_filters,
            maps=2 + blocks,
            outputs=blocks,
            rates=rates,
            shift_kernels=shift_kernels,
            kernel_groups=kernel_groups,
            mixing_initializer=mixing_initializer,
        )
        self.activation = keras.activations.get(activation)
        self.use_bias = _checks.flag(use_bias, "use_bias")
        linear_maps.configure(
            self,
            kernel_initializer or uniform_by_fan_in(),
            bias_initializer,
            kernel_regularizer,
        )
        self.recompute = _checks.flag(recompute, "recompute")
        if self.attends:
            self.patch_norm, self.feature_norm = (
                BatchNorm(name=name, dtype=self.dtype_policy)
                for name in ("patch_norm", "feature_norm")
            )

    def build(self, input_shape: Shape) -> None:
        shape = self.check_shape(input_shape)
        self.output_shape_channels_last(shape)
        widths = (self.key_filters, self.key_filters, self.filters)
        for name, width in zip(MAPS, widths, strict=True):
            channels = int(shape[-1] or 0)
            linear_maps.add_on_group(self, name, channels, width, self.use_bias)
        if self.attends:
            self._add_weights_of_windows()
        self.convolution_path.build(self)
        self.fix_input_channels(shape[-1])
        self.built = True

    def _add_weights_of_windows(self) -> None:
        neighbours = len(self.window.offsets)
        heads, size = self.filters // self.share, self.key_filters
        self.patch_norm.build((1 + neighbours, size))
        self.reduce_kernel = self.add_weight(
            name="reduce_kernel",
            shape=(1 + neighbours, size, heads),
            initializer=with_fan_in(
                self.kernel_initializer, (1 + neighbours) * size
            ),
        )
        self.feature_norm.build((heads,))
        self.expand_kernel = self.add_weight(
            name="expand_kernel",
            shape=(heads, neighbours, heads),
            initializer=with_fan_in(self.kernel_initializer, heads),
        )
        self.expand_bias = self.add_weight(
            name="expand_bias",
            shape=(neighbours, heads),
            initializer=fresh(self.bias_initializer),
        )

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
        attention = self._attend(x, training)[0] if self.attends else None
        return self.activation(self.join_paths(x, attention))

    def attend_channels_last(
        self,
        x: Tensor,
        query: tuple[int, int] | None = None,
        training: bool | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        self.require_attention()
        attention, weights = self._attend(x, training)
        maps = {"window": self.window_map(weights, self.window, query)}
        return self.activation(self.join_paths(x, attention)), maps

    def output_shape_channels_last(self, shape: Shape) -> Shape:
        rows, columns = self.window.output_size(tuple(shape[1:3]))
        return (shape[0], rows, columns, 1, self.filters)

    def _attend(
        self, x: Tensor, training: bool | None
    ) -> tuple[Tensor, Tensor]:
        """The path of attention, and its weights."""
        if x.shape[0] == 0:  # an empty batch has no statistics
            training = False
        query = linear_maps.on_group(self, "query", queries_at(x, self.window))
        keys = linear_maps.on_group(self, "key", x)
        features = patch_features(
            query,
            keys,
            *self.patch_norm.scale_and_shift(
                lambda: patch_moments(query, keys, self.window), training
            ),
            ops.convert_to_tensor(self.reduce_kernel),
            self.window,
            self.recompute,
        )
        scale, shift = self.feature_norm.scale_and_shift(
            lambda: moments(features, (0, 1, 2)), training
        )
        features = ops.relu(features * scale + shift)
        weights = patch_weights(
            ops.cast(features, self.compute_dtype),
            ops.convert_to_tensor(self.expand_kernel),
            ops.convert_to_tensor(self.expand_bias),
        )
        values = linear_maps.on_group(self, "value", x)
        y = shared_window_sum(weights, values, self.window, self.recompute)
        return y, weights

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            **self.convolution_path.get_config(),
            "filters": self.filters,
            "kernel_size": self.kernel_size,
            "attention_kernel_size": self.attention_kernel_size,
            "share": self.share,
            "key_filters": self.key_filters,
            "strides": self.strides,
            "dilation_rate": self.dilation_rate,
            "activation": keras.activations.serialize(self.activation),
            "use_bias": self.use_bias,
            **linear_maps.config(self),
            "recompute": self.recompute,
        }


class BatchNorm(keras.layers.Layer):
    """Batch normalisation by the moments that it is given.

    It does what `keras.layers.BatchNormalization` does for data that is never
    held as one tensor: it returns scale and shift, which the caller applies.
    Both are in float64 for moments in float64.
    """

    def build(self, shape: Shape) -> None:
        self.gamma, self.beta, self.moving_mean, self.moving_variance = (
            self.add_weight(
                name=name,
                shape=shape,
                initializer=start,
                trainable=not name.startswith("moving"),
                autocast=False,
            )
            for name, start in (
                ("gamma", "ones"),
                ("beta", "zeros"),
                ("moving_mean", "zeros"),
                ("moving_variance", "ones"),
            )
        )
        self.built = True

    def scale_and_shift(
        self,
        moments: Callable[[], tuple[Tensor, Tensor]],
        training: bool | None,
    ) -> tuple[Tensor, Tensor]:
        """The factor and the offset of the normalisation.

        Args:
            moments: a function that returns mean and variance of the batch.
            training: whether these are taken, and remembered.
        """
        # As in Keras, a frozen layer goes on with what it has learned.
        if training and self.trainable:
            mean, variance = self._moments(moments)
            self._remember(self.moving_mean, mean)
            self._remember(self.moving_variance, variance)
        else:
            mean, variance = (
                precise(self.moving_mean),
                precise(self.moving_variance),
            )
        scale = precise(self.gamma) / ops.sqrt(variance + EPSILON)
        return scale, precise(self.beta) - mean * scale

    def _moments(
        self, moments: Callable[[], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Mean and variance of the batch; overridden for several devices."""
        return moments()

    def _remember(self, moving: Any, statistic: Tensor) -> None:
        new = precise(moving) * MOMENTUM + statistic * (1 - MOMENTUM)
        moving.assign(ops.cast(ops.stop_gradient(new), moving.dtype))


def _key_filters(key_filters: int | None, filters: int) -> int:
    """The channels of queries and keys."""
    size = _checks.optional_integer(key_filters, "key_filters")
    size = max(1, filters // 4) if size is None else size
    if filters % size or (key_filters is None and filters % 4):
        raise ValueError(
            f"`key_filters` must divide filters={filters}; None is a quarter. "
            f"Received: key_filters={key_filters}"
        )
    return size
