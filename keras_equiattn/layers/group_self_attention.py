"""Lifting and group self-attention."""

import math
from typing import Any

import keras
from keras import ops

from keras_equiattn import _checks
from keras_equiattn import groups
from keras_equiattn.layers.base import linear_maps
from keras_equiattn.layers.base.attention_layer import WindowLayer
from keras_equiattn.layers.base.initializers import fresh
from keras_equiattn.layers.position_encoding import RelativePositionEncoding
from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Shape
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.geometry import Window
from keras_equiattn.ops.pairs.api import group_attention_weights
from keras_equiattn.ops.pairs.api import group_self_attention
from keras_equiattn.ops.papers.position_encoding import image_offsets
from keras_equiattn.ops.papers.position_encoding import window_offsets


class BaseGroupSelfAttention2D(WindowLayer):
    """The base of `LiftingSelfAttention2D` and `GroupSelfAttention2D`.

    Subclasses say how many channels of the queries are for positions.
    """

    # The least channels of a key: `_encoded` gives one to rows and one to
    # columns.
    least_key_dim = 2

    def __init__(
        self,
        filters: int,
        key_dim: int,
        num_heads: int,
        kernel_size: int | None = 5,
        group: str | groups.Group = "p4",
        attention_dropout: float = 0.0,
        epsilon: float = 1e-3,
        recompute: bool = True,
        kernel_initializer: Any = "he_normal",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        seed: int | None = None,
        scale: float | None = None,
        window_shape: str | None = None,
        data_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        if kernel_size is None and window_shape is None:
            window_shape = "square"  # there is no window
        super().__init__(
            window_shape=window_shape,
            group=group,
            data_format=data_format,
            **kwargs,
        )
        self.filters = _checks.integer(filters, "filters")
        self.key_dim = _checks.integer(key_dim, "key_dim", self.least_key_dim)
        self.num_heads = _checks.integer(num_heads, "num_heads")
        self.kernel_size = _checks.window_size(kernel_size, "kernel_size")
        if self.kernel_size is None and self.window_shape == "disc":
            raise ValueError(
                "A disc needs a window. Received: window_shape='disc', "
                "kernel_size=None"
            )
        self.attention_dropout = _checks.rate(
            attention_dropout, "attention_dropout"
        )
        self.scale = _checks.optional_scale(scale, "scale")
        self.recompute = _checks.flag(recompute, "recompute")
        linear_maps.configure(
            self, kernel_initializer, bias_initializer, kernel_regularizer
        )
        self.seed = _checks.seed(seed)
        self.positions = RelativePositionEncoding(
            self._encoded,
            group=self.group,
            epsilon=epsilon,
            kernel_initializer=self.kernel_initializer,
            bias_initializer=self.bias_initializer,
            dtype=self.dtype_policy,
            name="positions",
        )
        self.epsilon = self.positions.epsilon
        if self.attention_dropout:
            self.seed_generator = keras.random.SeedGenerator(self.seed)

    @property
    def _encoded(self) -> int:
        """The number of channels of the queries that are for the row."""
        raise NotImplementedError(f"{type(self).__name__}._encoded")

    @property
    def window(self) -> Window | None:
        """The window that a pixel sees; None for the whole image."""
        if self.kernel_size is None:
            return None
        size = self.kernel_size, self.kernel_size
        return Window(size, border="mask", shape=self.window_shape)

    def build(self, input_shape: Shape) -> None:
        shape = self.check_shape(input_shape)
        channels = int(shape[-1] or 0)
        heads = (self.num_heads, self.key_dim)
        for name in ("query", "key", "value"):
            linear_maps.add(self, name, (channels, *heads), heads, channels)
        linear_maps.add(
            self,
            "output",
            (*heads, self.filters),
            (self.filters,),
            math.prod(heads),
        )
        self.positions.build((None, None, 2))
        self.group_embedding = self._add_group_embedding()
        self._scale = self.scale or self._default_scale(channels)
        self.fix_input_channels(channels)
        self.built = True

    def _default_scale(self, channels: int) -> float:
        """The factor of the scores, for an input with so many channels."""
        if self.window_shape == "square":
            return 1 / math.sqrt(channels)
        # He's initialisation makes queries and keys with a variance of two.
        return 1 / (4 * math.sqrt(self.key_dim))

    def _add_group_embedding(self) -> Any:
        """The weight that embeds relative elements; None for none."""
        return None

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
        x = self._feature_map(x)
        return self._output(x, self._scored(x), training)

    def attend_channels_last(
        self,
        x: Tensor,
        query: tuple[int, int] | None = None,
        training: bool | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        x = self._feature_map(x)
        height, width = x.shape[1:3]
        if height is None or width is None:
            raise ValueError(
                f"{self._label()} needs a height and width that are known "
                "before run time for `return_attention_maps=True`. "
                f"Received: shape {tuple(x.shape)}"
            )
        if query is not None:
            query = self.check_query(query, (height, width))
        scored = self._scored(x)
        weights = group_attention_weights(
            *scored,
            local=self.kernel_size is not None,
            window_shape=self.window_shape,
            pixel=query,
        )
        seen = (self.kernel_size,) * 2 if self.kernel_size else (height, width)
        pixels = () if query else (height, width)
        batch, _, *axes, _ = ops.shape(weights)
        weights = ops.reshape(weights, (batch, *pixels, *axes, *seen))
        y = self._output(x, scored, training)
        return y, {"window" if self.kernel_size else "image": weights}

    def _scored(
        self, x: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The tensors that scores are made of: queries, keys and encodings."""
        return (*self._queries_and_keys(x), *self._encodings(x))

    def _output(
        self,
        x: Tensor,
        scored: tuple[Tensor, Tensor, Tensor, Tensor | None],
        training: bool | None,
    ) -> Tensor:
        query, keys, encoding, embedding = scored
        seed = None
        if training and self.attention_dropout:
            seed = backend.next_seed(self.seed_generator)
        y = group_self_attention(
            query,
            keys,
            self._linear(x, "value"),
            encoding,
            embedding,
            local=self.kernel_size is not None,
            window_shape=self.window_shape,
            dropout=self.attention_dropout if training else 0.0,
            seed=seed,
            recompute=self.recompute,
        )
        kernel, bias = linear_maps.kernel_and_bias(self, "output")
        channels = self.num_heads * self.key_dim
        y = ops.reshape(y, (*ops.shape(y)[:4], channels))
        matrix = ops.reshape(kernel, (channels, self.filters))
        return backend.times_matrix(y, matrix) + bias

    def output_shape_channels_last(self, shape: Shape) -> Shape:
        return (*shape[:3], self.group.order, self.filters)

    def _feature_map(self, x: Tensor) -> Tensor:
        """An image as a feature map of order one."""
        return ops.expand_dims(x, axis=3) if len(x.shape) == 4 else x

    def _queries_and_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._linear(x, "query") * self._scale, self._linear(x, "key")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        """`(..., heads, key_dim)`."""
        kernel, bias = linear_maps.kernel_and_bias(self, name)
        channels, *heads = kernel.shape
        y = backend.times_matrix(x, ops.reshape(kernel, (channels, -1)))
        return ops.reshape(y, (*ops.shape(y)[:-1], *heads)) + bias

    def _encodings(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The encoding of all distinct offsets, and of relative elements."""
        dtype = self.positions.compute_dtype
        if self.kernel_size is None:
            height, width = ops.shape(x)[1:3]
            offsets = image_offsets(height, width, dtype)
        else:
            window = window_offsets(self.kernel_size)
            offsets = backend.constant(window, x, dtype)
        embedding = self.group_embedding
        if embedding is not None:
            relative = backend.constant(self.group.relative_table, x)
            embedding = ops.take(
                ops.convert_to_tensor(embedding), relative, axis=0
            )
        return self.positions(offsets), embedding

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "filters": self.filters,
            "key_dim": self.key_dim,
            "num_heads": self.num_heads,
            "kernel_size": self.kernel_size,
            "attention_dropout": self.attention_dropout,
            "epsilon": self.epsilon,
            "scale": self.scale,
            "recompute": self.recompute,
            **linear_maps.config(self),
            "seed": self.seed,
        }


@keras.saving.register_keras_serializable(package="keras_equiattn")
class LiftingSelfAttention2D(BaseGroupSelfAttention2D):
    """Self-attention from images to feature maps on a group.

    With linear maps `Q`, `K`, `V` of the image, for every pixel `i`, group
    element `v` and head::

        S(v, i, o) = scale <Q(i), K(i + o) + e(v^-1 o)>
        y(i, v) = sum_o softmax_o(S(v, i, o)) V(i + o)

    followed by a linear map of all heads. `e` is a `RelativePositionEncoding`:
    half of the channels of a head (rounded down) encode the row of the offset,
    and as many encode its column. All that differs between the group elements
    is how they see positions.

    Args:
        filters: channels of the output.
        key_dim: channels of queries, keys and values in each head, at least
            2.
        num_heads: number of heads.
        kernel_size: rows and columns of the window, odd; None for the whole
            image. Offsets are divided by `kernel_size // 2`, or by the longer
            side of the image less one, along both axes.
        group: a group or its name, see `keras_equiattn.groups.get`.
        attention_dropout: rate at which weights are dropped in training:
            those of an offset, for all output elements together. It is rounded
            to a multiple of 1 / 65536. Which ones are dropped depends on the
            seed, the batch size, the backend, the compiler and the device. The
            forward and the backward pass drop the same ones.
        epsilon: the epsilon of the encoding, see `RelativePositionEncoding`.
        recompute: the backward pass computes attention anew, in blocks. False
            computes and keeps the weights of all elements at once, can be
            differentiated twice on every backend, and needs a known height
            and width, as attention maps do.
        kernel_initializer: the initializer of the linear maps and the encoding.
        bias_initializer: the initializer of their biases.
        kernel_regularizer: the regularizer of the kernels of the linear maps.
        seed: the seed of the dropout.
        scale: the factor of the scores. None is `1 / sqrt(channels)`, with the
            channels of the input, for squares; and `1 / (4 sqrt(key_dim))` for
            discs, with which scores start with a standard deviation of about a
            half.
        window_shape: "square" or "disc", which covers the same part of the
            image after a turn by any angle, see `ops.Window`. None is "square"
            for groups that act on the grid, and "disc" for others. Without a
            window there is only "square".
        data_format: "channels_last", "channels_first" or None (what
            `keras.config.image_data_format()` says).
        **kwargs: `name`, `dtype`, `trainable`.

    Call arguments:
        inputs: images.
        training: whether weights are dropped.
        return_attention_maps: also return the weights without dropout, as a
            dict: "window" (or "image", for the whole image) `(batch, height,
            width, order, heads, 1, rows, columns)` adds up to one over rows
            and columns, those of the window or of the image.
        query: `(row, column)` of a pixel: the map is then that of this pixel
            alone, `(batch, order, heads, 1, rows, columns)`. On large images
            the whole map takes much memory.

    Input shape:
        "channels_last": `(batch, height, width, channels)`;
        "channels_first": `(batch, channels, height, width)`. Height and width
        may be None.

    Output shape:
        "channels_last": `(batch, height, width, order, filters)`;
        "channels_first": `(batch, filters, height, width, order)`.

    Symmetry:
        `L_g` of the input gives `L_g` of the output (`ops.group_action`) for
        every element of the group, to rounding, on every input. Maps go with
        it: pixels and windows are turned, elements permuted. For groups that
        do not act on the grid (p8, p12, p16) this holds for the turns by 90
        degrees and the mirrors that go with them; turns in between are
        approximate. On smooth images, turned by 45 degrees, new layers on
        p8 with windows of 3, 5 and 7 pixels were off by 0.021 of their largest
        output or less, on average over three draws of the weights, and by
        up to 0.558 with square windows and the scale of the paper. Both the
        disc and the smaller scale of the scores contribute to this. The sharper
        attention becomes in training, the larger the error.

    Variables:
        `query_kernel`, `key_kernel`, `value_kernel (channels, heads,
        key_dim)`, `query_bias`, `key_bias`, `value_bias (heads, key_dim)`;
        `output_kernel (heads, key_dim, filters)`, `output_bias (filters,)`;
        the variables of `positions`, a `RelativePositionEncoding`.

    Raises:
        ValueError: for bad arguments, in `__init__`; for shapes that do not
            fit, in `build`; in the call, for a `query` outside of the image or
            without `return_attention_maps=True`, and with maps or
            `recompute=False` for a height or width known only at run time.
        TypeError: for a `group` that is neither a name nor a `Group`.

    Example:
        >>> layer = LiftingSelfAttention2D(8, 4, num_heads=2, kernel_size=3)
        >>> tuple(layer(keras.ops.ones((2, 6, 6, 3))).shape)
        (2, 6, 6, 4, 8)

    References:
        - [Romero and Cordonnier, 2021](https://arxiv.org/abs/2010.00977),
          section 5. As in the authors' code the scores in squares are divided
          by the root of the channels of the input, not of a head. They use
          square windows on every group. Their group axis is ours with every
          element inverted, and their dropout draws each `(v, i, o)`
          independently.
    """

    takes = "image"

    @property
    def _encoded(self) -> int:
        return self.key_dim // 2


@keras.saving.register_keras_serializable(package="keras_equiattn")
class GroupSelfAttention2D(BaseGroupSelfAttention2D):
    """Self-attention on feature maps on a group.

    With linear maps `Q`, `K`, `V` of the input, for every pixel `i`, output
    element `v`, query element `g`, key element `m` and head::

        S(v, g, m, i, o) = scale (<Q(i, g), K(i + o, m)>
                                  + <Q'(i, g), e(v^-1 o)>
                                  + <Q''(i, g), E(g^-1 m)>)
        y(i, v) = sum_g sum_(m, o) softmax_(m, o)(S) V(i + o, m)

    followed by a linear map of all heads. The softmax is over offsets and key
    elements together. `e` is a `RelativePositionEncoding`, `E` an embedding of
    the relative element; a third of the channels of a head (rounded down) is
    for the row, a third for the column and the rest for the embedding.

    Args:
        filters: channels of the output.
        key_dim: channels of queries, keys and values in each head, at least
            3.
        num_heads: number of heads.
        kernel_size: rows and columns of the window, odd; None for the whole
            image. Offsets are divided by `kernel_size // 2`, or by the longer
            side of the image less one, along both axes.
        group: a group or its name, see `keras_equiattn.groups.get`.
        attention_dropout: rate at which weights are dropped in training:
            those of a query element, key element and offset, for all output
            elements together. It is rounded to a multiple of 1 / 65536. Which
            ones are dropped depends on the seed, the batch size, the backend,
            the compiler and the device. The forward and the backward pass drop
            the same ones.
        epsilon: the epsilon of the encoding, see `RelativePositionEncoding`.
        recompute: the backward pass computes attention anew, in blocks. False
            computes and keeps the weights of all elements at once, can be
            differentiated twice on every backend, and needs a known height
            and width, as attention maps do.
        kernel_initializer: the initializer of the linear maps and the encoding.
        bias_initializer: the initializer of their biases.
        kernel_regularizer: the regularizer of the kernels of the linear maps.
        embedding_initializer: the initializer of the embedding of relative
            elements; None is the standard normal distribution.
        seed: the seed of the dropout.
        scale: the factor of the scores. None is `1 / sqrt(channels)`, with the
            channels of the input, for squares; and `1 / (4 sqrt(key_dim))` for
            discs, with which scores start with a standard deviation of about a
            half.
        window_shape: "square" or "disc", which covers the same part of the
            image after a turn by any angle, see `ops.Window`. None is "square"
            for groups that act on the grid, and "disc" for others. Without a
            window there is only "square".
        data_format: "channels_last", "channels_first" or None (what
            `keras.config.image_data_format()` says).
        **kwargs: `name`, `dtype`, `trainable`.

    Call arguments:
        inputs: feature maps on the group; with "z2" also images.
        training: whether weights are dropped.
        return_attention_maps: also return the weights of the values, without
            dropout, as a dict: "window" (or "image", for the whole image)
            `(batch, height, width, order, heads, key_order, rows, columns)`,
            added up over the query elements: they add up to the order of the
            group over key elements, rows and columns, those of the window or
            of the image.
        query: `(row, column)` of a pixel: the map is then that of this pixel
            alone, `(batch, order, heads, key_order, rows, columns)`. The whole
            map takes much memory.

    Input shape:
        "channels_last": `(batch, height, width, order, channels)`;
        "channels_first": `(batch, channels, height, width, order)`. With "z2"
        also images of rank 4, which give rank 4. Height and width may be None.

    Output shape:
        The shape of the input, with `filters` channels.

    Symmetry:
        `L_g` of the input gives `L_g` of the output (`ops.group_action`) for
        every element of the group, to rounding, on every input. Maps go with
        it: pixels and windows are turned, elements permuted. For groups that
        do not act on the grid (p8, p12, p16) this holds for the turns by 90
        degrees and the mirrors that go with them; turns in between are
        approximate. On smooth feature maps, turned by 45 degrees, new layers on
        p8 with windows of 3, 5 and 7 pixels were off by 0.007 of their largest
        output or less, on average over three draws of the weights, and by
        up to 0.317 with square windows and the scale of the paper. Both the
        disc and the smaller scale of the scores contribute to this. The sharper
        attention becomes in training, the larger the error.

    Variables:
        `query_kernel`, `key_kernel`, `value_kernel (channels, heads,
        key_dim)`, `query_bias`, `key_bias`, `value_bias (heads, key_dim)`;
        `output_kernel (heads, key_dim, filters)`, `output_bias (filters,)`;
        `group_embedding (order, key_dim - 2 * (key_dim // 3))`; the variables
        of `positions`, a `RelativePositionEncoding`.

    Raises:
        ValueError: for bad arguments, in `__init__`; for shapes that do not
            fit, in `build`; in the call, for a `query` outside of the image or
            without `return_attention_maps=True`, and with maps or
            `recompute=False` for a height or width known only at run time.
        TypeError: for a `group` that is neither a name nor a `Group`.

    Example:
        >>> layer = GroupSelfAttention2D(8, 4, num_heads=2, kernel_size=3)
        >>> tuple(layer(keras.ops.ones((2, 6, 6, 4, 3))).shape)
        (2, 6, 6, 4, 8)

    References:
        - [Romero and Cordonnier, 2021](https://arxiv.org/abs/2010.00977),
          section 5. The authors' code takes the embedding at an element that
          depends on `v` and is not equivariant; with `g^-1 m` it is. Their
          group axis and embedding are ours with every element inverted, and
          their dropout draws each `(v, g, m, i, o)` independently. As in their
          code, the scores in squares are divided by the root of the channels of
          the input. They use square windows on every group.
    """

    takes = "group"
    lifted_by = "LiftingSelfAttention2D"
    least_key_dim = 3

    def __init__(
        self,
        filters: int,
        key_dim: int,
        num_heads: int,
        kernel_size: int | None = 5,
        group: str | groups.Group = "p4",
        attention_dropout: float = 0.0,
        epsilon: float = 1e-3,
        recompute: bool = True,
        kernel_initializer: Any = "he_normal",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        embedding_initializer: Any = None,
        seed: int | None = None,
        scale: float | None = None,
        window_shape: str | None = None,
        data_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            filters=filters,
            key_dim=key_dim,
            num_heads=num_heads,
            kernel_size=kernel_size,
            group=group,
            attention_dropout=attention_dropout,
            epsilon=epsilon,
            recompute=recompute,
            kernel_initializer=kernel_initializer,
            bias_initializer=bias_initializer,
            kernel_regularizer=kernel_regularizer,
            seed=seed,
            scale=scale,
            window_shape=window_shape,
            data_format=data_format,
            **kwargs,
        )
        if embedding_initializer is None:
            embedding_initializer = keras.initializers.RandomNormal(stddev=1.0)
        self.embedding_initializer = keras.initializers.get(
            embedding_initializer
        )

    @property
    def _encoded(self) -> int:
        return self.key_dim // 3

    def _add_group_embedding(self) -> Any:
        return self.add_weight(
            name="group_embedding",
            shape=(self.group.order, self.key_dim - 2 * self._encoded),
            initializer=fresh(self.embedding_initializer),
        )

    def get_config(self) -> dict[str, Any]:
        initializer = keras.initializers.serialize(self.embedding_initializer)
        return {**super().get_config(), "embedding_initializer": initializer}
