"""Multi-head self-attention over all pixels, as in transformers."""

import math
from typing import Any

import keras
from keras import ops

from keras_equiattn import _checks
from keras_equiattn import groups
from keras_equiattn.layers.base import linear_maps
from keras_equiattn.layers.base.attention_layer import AttentionLayer
from keras_equiattn.layers.base.filters import FilterLayer
from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Shape
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.group.bases import steerable_basis
from keras_equiattn.ops.group.kernels import kernel_orbit
from keras_equiattn.ops.group.linear import BASES
from keras_equiattn.ops.multi_head import multi_head_attention_on_group


@keras.saving.register_keras_serializable(package="keras_equiattn")
class GroupMultiHeadAttention2D(AttentionLayer, FilterLayer):
    """Self-attention of each pixel to all pixels, with one score for all poses.

    With queries `q`, keys `k` and values `v`, linear maps on the group of the
    input (`GroupDense`), and an embedding `e` of the relative position, for
    each head::

        s(x, z) = scale sum_p <q(x, p), k(z, p) + e(p^-1 (z - x))>
        y(x, p) = sum_z softmax_z(s(x, z)) v(z, p)

    followed by a linear map on the group. The scale is one over the root of the
    number of values of a head, `order` times its channels. It is the attention
    of vision transformers with the poses among the channels. Scores do not
    depend on how the image is turned, as the sum is over all poses, and the
    group acts on the relative positions.

    Args:
        num_heads: number of heads, contiguous blocks of the channels.
        group: a group or its name, see `keras_equiattn.groups.get`.
        basis: how the linear maps are computed, which changes the results by
            rounding alone: "regular" as one matrix, "irreps" in the blocks of
            the irreducible representations, which take fewer multiplications.
            None chooses what takes less time, see `ops.group_linear`.
        use_positions: whether scores depend on relative positions.
        kernel_initializer: the initializer of the linear maps; one that scales
            with the fan-in sees `order * channels`.
        bias_initializer: the initializer of their biases.
        embedding_initializer: the initializer of the embedding.
        kernel_regularizer: the regularizer of the kernels of the linear maps.
        filter_basis: the basis of the embedding: "pixel" has a number for each
            offset, which is interpolated where a turn does not map offsets to
            offsets; "steerable" has coefficients of filters that turn by any
            angle, see `ops.steerable_basis`. Initializers then draw a number
            for each offset, and the projections on these filters are scaled to
            keep the variance. None is "pixel" for groups that act on the grid,
            and "steerable" for others. On groups that do not act on the grid,
            and with "steerable", embeddings vanish beyond a disc: pixels that
            are farther apart than the side of the image have no position.
        data_format: "channels_last", "channels_first" or None (what
            `keras.config.image_data_format()` says).
        **kwargs: `name`, `dtype`, `trainable`.

    Memory:
        Scores take `heads` times the square of the number of pixels for each
        image. With positions, the embeddings of all pairs of pixels take the
        square of the number of pixels times the values of a pixel, once for all
        images. The steerable filters of an image of `size` x `size` pixels are
        a constant of about `4 order size^4` numbers: 5 MB for 14 x 14 pixels on
        p8, and 140 MB for 32 x 32. A table with the same numbers in double
        precision is kept as well. Its computation takes six times the memory of
        the constant for a moment. With filters of pixels on such groups the
        constant has `16 order size^4` numbers.

    Call arguments:
        inputs: feature maps on the group.
        return_attention_maps: also return the attention as applied, as a dict:
            "image" `(batch, height, width, heads, height, width)` holds the
            weights of each pixel, which add up to one.
        query: `(row, column)` of a pixel: "image" is then its map alone,
            `(batch, heads, height, width)`.

    Input shape:
        "channels_last": `(batch, height, width, order, channels)`;
        "channels_first": `(batch, channels, height, width, order)`. With
        positions, height and width must be known, and neither may be larger
        than the larger of those that the layer was built with. With `"z2"` also
        images of rank 4, which give rank 4.

    Output shape:
        The shape of the input.

    Symmetry:
        `L_g` of the input gives `L_g` of the output (`ops.group_action`) for
        every element of the group, to rounding, on every input. The map of a
        pixel turns with the image. For groups that do not act on the grid (p8,
        p12, p16) this holds for the turns by 90 degrees and the mirrors that
        go with them; in between the layer is approximate.

    Variables:
        `query_kernel`, `key_kernel`, `value_kernel` and `output_kernel`
        `(order, channels, channels)`, each with a bias `(channels,)`;
        `embedding (2 size - 1, 2 size - 1, channels)`, with the `size` of the
        larger side that the layer was built with. Steerable embeddings have one
        axis of `count` coefficients in place of rows and columns, with the
        `count` of `ops.steerable_basis(group, 2 size - 1)`. Without positions
        there is no `embedding`.

    Raises:
        ValueError: for bad arguments, in `__init__`; for shapes that do not
            fit, in `build` and in the call.

    Example:
        >>> layer = GroupMultiHeadAttention2D(num_heads=2, group="p4m")
        >>> tuple(layer(keras.ops.ones((2, 6, 6, 8, 4))).shape)
        (2, 6, 6, 8, 4)

    References:
        - [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762), with
          relative positions as in [Shaw et al.,
          2018](https://arxiv.org/abs/1803.02155)
        - [Nordström et al., 2025](https://arxiv.org/abs/2505.15441) have scores
          that add up the poses, and another encoding of positions
    """

    takes = "group"

    def __init__(
        self,
        num_heads: int,
        group: str | groups.Group = "p4",
        basis: str | None = None,
        use_positions: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        embedding_initializer: Any = "uniform",
        kernel_regularizer: Any = None,
        filter_basis: str | None = None,
        data_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            filter_basis=filter_basis,
            group=group,
            data_format=data_format,
            **kwargs,
        )
        self.num_heads = _checks.integer(num_heads, "num_heads")
        self.basis = _checks.choice(basis, "basis", (None, *BASES))
        self.use_positions = _checks.flag(use_positions, "use_positions")
        linear_maps.configure(
            self, kernel_initializer, bias_initializer, kernel_regularizer
        )
        self.embedding_initializer = keras.initializers.get(
            embedding_initializer
        )

    def build(self, input_shape: Shape) -> None:
        shape = self.check_shape(input_shape)
        channels = int(shape[-1])
        if channels % self.num_heads:
            raise ValueError(
                "The channels must be divisible by `num_heads`. Received: "
                f"channels={channels}, num_heads={self.num_heads}"
            )
        for name in ("query", "key", "value", "output"):
            linear_maps.add_on_group(self, name, channels, channels)
        self.embedding = None
        if self.use_positions:
            self._largest = max(self._known_size(shape))
            rows = 2 * self._largest - 1
            self.embedding = self.add_filters(
                "embedding",
                (rows, rows, channels),
                self.embedding_initializer,
            )
        self.fix_input_channels(channels)
        self.built = True

    def call_channels_last(self, x: Tensor) -> Tensor:
        return self._attend(x)[0]

    def attend_channels_last(
        self, x: Tensor, query: tuple[int, int] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        y, weights = self._attend(x)
        batch, height, width = ops.shape(x)[:3]
        # From each pixel, then to each pixel.
        weights = ops.transpose(weights, (0, 2, 1, 3))
        image = ops.reshape(
            weights, (batch, height, width, self.num_heads, height, width)
        )
        return y, {"image": self.at_query(image, query)}

    def _attend(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and the weights from each pixel to all pixels."""
        # One product for the three maps.
        maps: list[Any] = [
            linear_maps.kernel_and_bias(self, name)
            for name in ("query", "key", "value")
        ]
        values = self.group.order * x.shape[-1] // self.num_heads
        maps[0] = [part / math.sqrt(values) for part in maps[0]]
        kernel, bias = (
            ops.concatenate(parts, axis=-1) for parts in zip(*maps, strict=True)
        )
        return multi_head_attention_on_group(
            x,
            (kernel, bias),
            linear_maps.kernel_and_bias(self, "output"),
            self._embedded(),
            self.num_heads,
            self.group,
            self.basis,
        )

    def _embedded(self) -> Tensor | None:
        """The embedding as each element sees it, by heads."""
        if self.embedding is None:
            return None
        weight = ops.convert_to_tensor(self.embedding)
        rows = 2 * self._largest - 1
        if self.filter_basis == "pixel":
            orbit = kernel_orbit(weight, self.group, group_axis=False)
        else:
            # Not by `kernel_orbit`, whose matrix has the square of the offsets.
            basis = steerable_basis(self.group, rows)
            basis = backend.constant(basis, weight, weight.dtype)
            orbit = ops.einsum("hpc,cd->hpd", basis, weight)
        shape = (self.group.order, rows, rows, self.num_heads, -1)
        return ops.reshape(orbit, shape)

    def _known_size(self, shape: Shape) -> tuple[int, int]:
        height, width = shape[1:3]
        if height is None or width is None:
            raise ValueError(
                f"{self._label()} takes no height or width that is known only "
                "at run time, unless `use_positions=False`. Received: shape "
                f"{tuple(shape)}"
            )
        return int(height), int(width)

    def output_shape_channels_last(self, shape: Shape) -> Shape:
        if self.embedding is None:
            return shape
        if max(self._known_size(shape)) > self._largest:
            raise ValueError(
                f"{self._label()} has positions for images of up to "
                f"{self._largest} pixels a side, with which it was built. "
                f"Received: shape {tuple(shape)}"
            )
        return shape

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "num_heads": self.num_heads,
            "basis": self.basis,
            "use_positions": self.use_positions,
            **linear_maps.config(self),
            "embedding_initializer": keras.initializers.serialize(
                self.embedding_initializer
            ),
        }
