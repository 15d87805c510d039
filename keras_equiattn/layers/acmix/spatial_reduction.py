"""ACmix in transformers that attend to a reduced image."""

from typing import Any

import keras
from keras import ops

from keras_equiattn import _checks
from keras_equiattn.layers.acmix.transformer import TransformerACmix
from keras_equiattn.layers.acmix.two_paths import MAPS
from keras_equiattn.layers.base import linear_maps
from keras_equiattn.layers.base.group_layer import as_floats
from keras_equiattn.layers.base.initializers import fresh
from keras_equiattn.ops._types import Shape
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.dense import dense_attention
from keras_equiattn.ops.dense import enlarge_space
from keras_equiattn.ops.dense import reduce_space
from keras_equiattn.ops.numerics import layer_norm

# The epsilon of the norm of the reduced image: PyTorch's default, which the
# authors use.
EPSILON = 1e-5


@keras.saving.register_keras_serializable(package="keras_equiattn")
class SpatialReductionACmix2D(TransformerACmix):
    """ACmix with attention to a reduced image, for pyramid transformers (PVT).

    Each `reduction` of rows and columns becomes one pixel `z` of a smaller
    image, by a convolution with strides and a layer normalisation `n`. With
    linear maps `q` of the image and `k`, `v` of the small one, for every pixel
    `x` and every head::

        r(z) = n(sum_d f(reduction z + d) R(d) + b)
        s(x, z) = <q(f(x)), k(r(z))> / sqrt(size)
        attention(x) = (sum_z softmax_z(s(x, z)) v(r(z))) W + b

    and the layer returns `attention_rate * attention + convolution_rate *
    convolution`, with the path of convolution of `ACmix2D`, where the mixing
    has a bias. It sees queries, keys and values side by side: each pixel has
    the keys and values of the pixel `z` that it is part of. Its output does
    not go through `W`. With `reduction=1` there is no convolution with strides
    and no norm, and all pixels attend to all.

    Tokens, such as the one that a classifier reads, take part in attention:
    they see all pixels of the small image and each other, and pixels see them.
    They are not pixels, so the path of convolution ignores them, and their
    output is `attention_rate * attention` alone.

    The weights of attention are held in full: for each image and head, `height
    * width` times the number of pixels of the small image. In a PVT for 224 x
    224 pixels that is 3136 x 49 in the first stage.

    Args:
        filters: channels of the output and of queries, keys and values;
            divisible by `num_heads`.
        num_heads: number of heads, contiguous blocks of the channels.
        reduction: rows and columns that become one pixel of keys and values,
            an integer or a pair. Where they do not divide the image, the last
            ones reach beyond it and see zeros there.
        kernel_size: rows and columns of the convolution, odd, an integer or a
            pair.
        paths, rates, shift_kernels, kernel_groups: see `ACmix2D`. With
            `paths="attention"` the layer is the attention of PVT.
        attention_dropout: rate at which attention weights are dropped.
        dropout: the rate of a dropout on the output.
        kernel_initializer: the initializer of linear maps; None is the normal
            distribution with standard deviation 0.02, truncated at two standard
            deviations.
        mixing_initializer: the initializer of the mixing, of the reduction, and
            of shift kernels that are "random"; None is uniform within one over
            the square root of the inputs.
        bias_initializer: the initializer of the biases.
        kernel_regularizer: the regularizer of the kernels of queries, keys,
            values, output and reduction.
        data_format: "channels_last", "channels_first" or None (what
            `keras.config.image_data_format()` says).
        **kwargs: `name`, `dtype`, `trainable`.

    Call arguments:
        inputs: images.
        training: whether there is dropout.
        return_attention_maps: also return the weights without dropout, as a
            dict: "image" `(batch, height, width, 1, heads, 1, rows, columns)`
            is the weight that each pixel gives to the pixels of the small
            image. With tokens, "tokens" `(batch, count, heads, rows, columns)`
            is the weight that each token gives to them. The weights add up to
            one over the last two axes; with tokens, they add up to one minus
            the weight that the tokens receive.
        query: `(row, column)` of a pixel: "image" then has the map of this
            pixel alone, `(batch, 1, heads, 1, rows, columns)`.
        tokens: `(batch, count, channels)`, or None for none. With tokens the
            output is a pair: images, and tokens `(batch, count, filters)`.

    Input shape:
        "channels_last": `(batch, height, width, channels)`;
        "channels_first": `(batch, channels, height, width)`. Height and width
        may be None.

    Output shape:
        The shape of the input, with `filters` channels.

    Symmetry:
        Where the reduction divides the size of the image, an image that is
        rolled by multiples of the reduction gives the rolled output, as far as
        the convolution does not see the border: attention has no positions.

    Variables:
        `query_kernel`, `key_kernel`, `value_kernel (1, channels, filters)`,
        `query_bias`, `key_bias`, `value_bias (filters,)`; with a reduction
        `reduction_kernel (rows, columns, channels, channels)`,
        `reduction_bias`, `reduction_gamma`, `reduction_beta (channels,)`, the
        last two of the norm; `output_kernel (filters, filters)`, `output_bias
        (filters,)`; `mixing_kernel (3 num_heads, kernel pixels)`, `mixing_bias
        (kernel pixels,)`, `shift_kernel`, `attention_rate`, `convolution_rate`
        as in `ACmix2D`.

    Raises:
        ValueError: for bad arguments, in `__init__`; for shapes that do not
            fit, in `build` and in the call; for tokens without a path of
            attention.

    Example:
        >>> layer = SpatialReductionACmix2D(12, num_heads=3, reduction=4)
        >>> tuple(layer(keras.ops.ones((2, 8, 8, 12))).shape)
        (2, 8, 8, 12)
        >>> layer = SpatialReductionACmix2D(12, num_heads=3, reduction=1)
        >>> x, token = keras.ops.ones((2, 8, 8, 12)), keras.ops.ones((2, 1, 12))
        >>> y, token = layer(x, tokens=token)
        >>> tuple(token.shape)
        (2, 1, 12)

    References:
        - [Wang et al., 2021](https://arxiv.org/abs/2102.12122), section 3.3,
          and the authors' code, https://github.com/whai362/PVT
        - [Pan et al., 2022](https://arxiv.org/abs/2111.14556). Neither the
          paper nor its authors' code says how queries of all pixels meet keys
          and values of the small image in the path of convolution. That keys
          and values are repeated is our reading, which comes close to the
          published cost; so are the treatment of tokens, and that the
          convolution bypasses the last linear map, as in `WindowACmix2D`.
    """

    def __init__(
        self,
        filters: int,
        num_heads: int,
        reduction: int | tuple[int, int] = 2,
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
        self.reduction = _checks.pair(reduction, "reduction")

    @property
    def reduces(self) -> bool:
        return max(self.reduction) > 1

    def build(self, input_shape: Shape) -> None:
        shape = self.check_shape(input_shape)
        channels = int(shape[-1] or 0)
        self.add_linear_maps(channels)
        if self.reduces:
            self.reduction_kernel = self.add_weight(
                name="reduction_kernel",
                shape=(*self.reduction, channels, channels),
                initializer=fresh(self.mixing_initializer),
                regularizer=self.kernel_regularizer,
            )
            for name, start in (
                ("bias", fresh(self.bias_initializer)),
                ("gamma", "ones"),
                ("beta", "zeros"),
            ):
                weight = self.add_weight(
                    name=f"reduction_{name}",
                    shape=(channels,),
                    initializer=start,
                )
                setattr(self, f"reduction_{name}", weight)
        if self.attends:
            self.add_output()
        self.finish_build(shape)

    def call(
        self,
        inputs: Tensor,
        return_attention_maps: bool = False,
        query: tuple[int, int] | None = None,
        training: bool | None = None,
        tokens: Tensor | None = None,
    ) -> Any:
        if tokens is not None:
            self._check_tokens(tokens, inputs)
            tokens = as_floats(tokens, self.compute_dtype)
        found = self.call_or_attend(
            inputs,
            return_attention_maps,
            query,
            training=training,
            tokens=tokens,
        )
        if tokens is None or not return_attention_maps:
            return found
        y, of_tokens, maps = found
        return (y, of_tokens), maps

    def compute_output_spec(
        self, inputs: Any, *arguments: Any, **options: Any
    ) -> Any:
        if options.get("tokens") is None:
            return super().compute_output_spec(inputs, *arguments, **options)
        # Not from `compute_output_shape`: that knows nothing of the tokens.
        return self.traced_output_spec(inputs, *arguments, **options)

    def call_channels_last(
        self,
        x: Tensor,
        training: bool | None = None,
        tokens: Tensor | None = None,
    ) -> Any:
        y, of_tokens, _ = self._mixed(x, tokens, training)
        return y if tokens is None else (y, of_tokens)

    def attend_channels_last(
        self,
        x: Tensor,
        query: tuple[int, int] | None = None,
        training: bool | None = None,
        tokens: Tensor | None = None,
    ) -> Any:
        self.require_attention()
        y, of_tokens, weights = self._mixed(x, tokens, training)
        height, width = ops.shape(x)[1:3]
        down, along = (
            -(-n // r)
            for n, r in zip((height, width), self.reduction, strict=True)
        )
        # The weights of tokens are left out.
        weights = weights[..., : down * along]
        weights = ops.transpose(weights, (0, 2, 1, 3))
        batch, _, heads, _ = ops.shape(weights)
        image = ops.reshape(
            weights[:, : height * width],
            (batch, height, width, 1, heads, 1, down, along),
        )
        image = self.at_query(image, query)
        if tokens is None:
            return y, {"image": image}
        rest = ops.reshape(
            weights[:, height * width :],
            (batch, tokens.shape[1], heads, down, along),
        )
        return y, of_tokens, {"image": image, "tokens": rest}

    def output_shape_channels_last(self, shape: Shape) -> Shape:
        return (*shape[:-1], self.filters)

    def linear_map_seen(self, name: str) -> tuple[Tensor, Tensor | None]:
        # The convolution sees the channels of the image, then those of the
        # reduced one.
        kernel, bias = super().linear_map_seen(name)
        if not self.reduces:
            return kernel, bias
        channels = kernel.shape[1]
        others = (0, channels) if name == "query" else (channels, 0)
        return ops.pad(kernel, [(0, 0), others, (0, 0)]), bias

    def _mixed(
        self, x: Tensor, tokens: Tensor | None, training: bool | None
    ) -> tuple[Tensor, Any, Any]:
        """The output, that of tokens, and the weights of attention."""
        reduced = self._reduced(x) if self.reduces else x
        attention = of_tokens = weights = None
        if self.attends:
            attention, of_tokens, weights = self._attend(
                x, reduced, tokens, training
            )
        y = self.join_paths(self._side_by_side(x, reduced), attention)
        y = self.drop(y, training=training)
        if tokens is not None:
            of_tokens = self.sum_of_paths(of_tokens, None)
            of_tokens = self.drop(of_tokens, training=training)
        return y, of_tokens, weights

    def _reduced(self, x: Tensor) -> Tensor:
        kernel, bias, gamma, beta = (
            ops.convert_to_tensor(getattr(self, f"reduction_{name}"))
            for name in ("kernel", "bias", "gamma", "beta")
        )
        y = reduce_space(ops.squeeze(x, axis=3), kernel, bias)
        y = layer_norm(y, gamma, beta, EPSILON)
        return ops.expand_dims(y, axis=3)

    def _attend(
        self,
        x: Tensor,
        reduced: Tensor,
        tokens: Tensor | None,
        training: bool | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The path of attention, of pixels and of tokens, and its weights."""
        sources = (x, reduced, reduced)
        query, keys, values = (
            ops.squeeze(
                linear_maps.on_group(self, name, _in_a_row(f, tokens)),
                axis=(2, 3),
            )
            for f, name in zip(sources, MAPS, strict=True)
        )
        y, weights = dense_attention(
            query * self.scale,
            keys,
            values,
            self.num_heads,
            dropout=lambda weights: self.drop_weights(
                weights, training=training
            ),
        )
        y = self.output_map(y)
        batch, height, width, *_ = ops.shape(x)
        image = ops.reshape(
            y[:, : height * width], (batch, height, width, 1, self.filters)
        )
        return image, y[:, height * width :], weights

    def _side_by_side(self, x: Tensor, reduced: Tensor) -> Tensor:
        """The input of the convolution: the image, and its reduced image."""
        if not self.reduces or not self.convolves:
            return x
        nearest = enlarge_space(
            ops.squeeze(reduced, axis=3), self.reduction, ops.shape(x)[1:3]
        )
        return ops.concatenate([x, ops.expand_dims(nearest, axis=3)], axis=-1)

    def _check_tokens(self, tokens: Tensor, images: Tensor) -> None:
        shape = tuple(tokens.shape)
        channels = self.query_kernel.shape[1]
        if len(shape) != 3 or shape[-1] != channels:
            raise ValueError(
                f"{self._label()} takes tokens (batch, count, {channels}), of "
                "as many channels as the images have. "
                f"Received: tokens.shape={shape}"
            )
        if not _checks.fits(shape[:1], tuple(images.shape)[:1]):
            raise ValueError(
                f"{self._label()} takes tokens for as many images as it gets. "
                f"Received: tokens.shape={shape}, "
                f"inputs.shape={tuple(images.shape)}"
            )
        if not self.attends:
            raise ValueError(
                f"{self._label()} has no path of attention, and only that path "
                "takes tokens. Received: "
                f"paths='{self.paths}', tokens.shape={shape}"
            )

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "reduction": self.reduction}


def _in_a_row(x: Tensor, tokens: Tensor | None) -> Tensor:
    """`(batch, pixels + tokens, 1, 1, channels)`."""
    batch, height, width, _, channels = ops.shape(x)
    x = ops.reshape(x, (batch, height * width, 1, 1, channels))
    if tokens is None:
        return x
    return ops.concatenate([x, tokens[:, :, None, None]], axis=1)
