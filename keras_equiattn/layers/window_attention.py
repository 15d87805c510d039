"""Stand-alone self-attention, simple affine and affine self-convolution."""

import math
from typing import Any

import keras
from keras import ops

from keras_equiattn import _checks
from keras_equiattn import groups
from keras_equiattn.layers.base import linear_maps
from keras_equiattn.layers.base.attention_layer import WindowLayer
from keras_equiattn.layers.base.filters import FilterLayer
from keras_equiattn.layers.base.group_layer import check_window
from keras_equiattn.layers.base.initializers import fresh
from keras_equiattn.ops._types import Shape
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.geometry import Window
from keras_equiattn.ops.papers.affine import added_to_neighbours
from keras_equiattn.ops.papers.affine import affine_map
from keras_equiattn.ops.papers.affine import centre_query
from keras_equiattn.ops.papers.affine import relative_positions
from keras_equiattn.ops.papers.affine import transformed_query
from keras_equiattn.ops.windows.api import AffineMap
from keras_equiattn.ops.windows.api import UNCHANGED
from keras_equiattn.ops.windows.api import window_attention


class BaseWindowAttention2D(WindowLayer, FilterLayer):
    """The base of the three layers of this module; see there.

    Subclasses create their weights in `build_maps`, and return queries, keys,
    values and affine maps in `attended`.
    """

    takes = "group"
    multiplies_filters = True

    def __init__(
        self,
        filters: int,
        kernel_size: int | tuple[int, int] = 5,
        num_heads: int = 8,
        group: str | groups.Group = "z2",
        border: str = "zeros",
        scale: float | None = None,
        dilation_rate: int | tuple[int, int] = 1,
        recompute: bool = True,
        kernel_initializer: Any = "he_normal",
        bias_initializer: Any = "zeros",
        window_initializer: Any = None,
        kernel_regularizer: Any = None,
        window_regularizer: Any = None,
        filter_basis: str | None = None,
        window_shape: str | None = None,
        data_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            filter_basis=filter_basis,
            window_shape=window_shape,
            group=group,
            data_format=data_format,
            **kwargs,
        )
        self.filters = _checks.integer(filters, "filters")
        self.kernel_size = _checks.pair(kernel_size, "kernel_size")
        self.num_heads = _checks.integer(num_heads, "num_heads")
        self.dilation_rate = _checks.pair(dilation_rate, "dilation_rate")
        check_window(
            self.group, "kernel_size", self.kernel_size, self.dilation_rate
        )
        self.check_filters("kernel_size", self.kernel_size)
        self.window = Window(
            self.kernel_size,
            (1, 1),
            self.dilation_rate,
            border,
            self.window_shape,
        )
        self.border = border
        self._check_heads()
        self.scale = _checks.optional_scale(scale, "scale")
        self.recompute = _checks.flag(recompute, "recompute")
        linear_maps.configure(
            self, kernel_initializer, bias_initializer, kernel_regularizer
        )
        if window_initializer is None:
            window_initializer = keras.initializers.RandomNormal(
                stddev=self._initial_spread()
            )
        self.window_initializer = keras.initializers.get(window_initializer)
        self.window_regularizer = keras.regularizers.get(window_regularizer)

    def _check_heads(self) -> None:
        _checks.divisible(self.filters, self.num_heads, "num_heads")

    def build(self, input_shape: Shape) -> None:
        shape = self.check_shape(input_shape)
        self.build_maps(int(shape[-1] or 0))
        linear_maps.add_on_group(
            self, "output", self.filters, self.filters, use_bias=False
        )
        self.fix_input_channels(shape[-1])
        self.built = True

    def build_maps(self, channels: int) -> None:
        raise NotImplementedError(f"{type(self).__name__}.build_maps")

    def attended(
        self, x: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, AffineMap, AffineMap]:
        """Queries, keys, values, and affine maps of keys and of values."""
        raise NotImplementedError(f"{type(self).__name__}.attended")

    def call_channels_last(self, x: Tensor) -> Tensor:
        y, _ = self._attend(x, return_weights=False)
        return linear_maps.on_group(self, "output", y)

    def attend_channels_last(
        self, x: Tensor, query: tuple[int, int] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        y, weights = self._attend(x)
        maps = {"window": self.window_map(weights, self.window, query)}
        return linear_maps.on_group(self, "output", y), maps

    def output_shape_channels_last(self, shape: Shape) -> Shape:
        return (*shape[:-1], self.filters)

    def _attend(
        self, x: Tensor, return_weights: bool = True
    ) -> tuple[Tensor, Any]:
        """Weighted sums and weights, see `window_attention`."""
        query, keys, values, of_keys, of_values = self.attended(x)
        return window_attention(
            query,
            keys,
            values,
            self.window,
            self.num_heads,
            of_keys,
            of_values,
            self.recompute,
            return_weights,
        )

    @property
    def _scale(self) -> float:
        """The factor of scores: one over the channels of a head by default."""
        return self.scale or self.num_heads / self.filters

    def _window_options(self) -> dict[str, Any]:
        """The options of a weight that belongs to the window."""
        return {
            "initializer": fresh(self.window_initializer),
            "regularizer": self.window_regularizer,
        }

    def _initial_spread(self) -> float:
        """The standard deviation that weights of the window start with."""
        return 1.0

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "filters": self.filters,
            "kernel_size": self.kernel_size,
            "num_heads": self.num_heads,
            "border": self.border,
            "scale": self.scale,
            "dilation_rate": self.dilation_rate,
            "recompute": self.recompute,
            **linear_maps.config(self),
            "window_initializer": keras.initializers.serialize(
                self.window_initializer
            ),
            "window_regularizer": keras.regularizers.serialize(
                self.window_regularizer
            ),
        }


@keras.saving.register_keras_serializable(package="keras_equiattn")
class StandAloneSelfAttention2D(BaseWindowAttention2D):
    """Self-attention over a window, with relative positions: SASA.

    With linear maps `Q`, `K`, `V` of the input (mixing channels and group
    elements), for every pixel `x`, group element `p` and head::

        s(p, x, d) = scale <Q(x, p), K(x + d, p) + E(p^-1 d)>
        y(x, p) = sum_d softmax_d(s(p, x, d)) V(x + d, p)

    followed by a linear map without bias. `E(d)` is an embedding of the row of
    the offset `d` for the first half of the channels of a head, and of its
    column for the second half; with steerable filters all channels depend on
    both. On images (group "z2") this is the layer that
    the paper compares with; on a group each element attends for itself, and
    sees the offsets turned with it.

    Args:
        filters: channels of the output and of queries, keys and values;
            divisible by `2 * num_heads`, with steerable filters by `num_heads`.
        kernel_size: rows and columns of the window, odd, an integer or a pair.
            Groups with quarter turns need a square window.
        num_heads: number of heads, contiguous blocks of the channels.
        group: a group or its name, see `keras_equiattn.groups.get`. "z2" is the
            layer of the paper, on images.
        border: how neighbours outside of the image count. "zeros": their linear
            maps are zero, and they take part in the softmax; "mask": the
            softmax leaves them out; "reflect": the mirror image lies there.
        scale: the factor of the scores; None is one over the channels of a
            head.
        dilation_rate: distance of adjacent neighbours, an integer or a pair.
        recompute: the forward pass keeps queries, keys, values, attention
            weights and the result for the backward pass, but no neighbours
            with their channels. False keeps more, and can be differentiated
            twice on every backend.
        kernel_initializer: the initializer of the linear maps; one that scales
            with the fan-in sees `order * channels`. An initializer with a seed
            gives maps of the same shape the same values.
        bias_initializer: the initializer of their biases.
        window_initializer: the initializer of the embeddings; None is the
            standard normal distribution.
        kernel_regularizer, window_regularizer: regularizers of the kernels of
            the linear maps, and of the embeddings.
        filter_basis: the basis of the embeddings: "pixel" has one for each row
            and one for each column of the window, which are interpolated for
            turns by less than 90 degrees; "steerable" has coefficients of
            filters that turn by any angle, see `ops.steerable_basis`, and needs
            a square window. Initializers then draw a number for each offset,
            and the projections on these filters are scaled to keep the
            variance. None is "pixel" for groups that act on the grid, and
            "steerable" for others.
        window_shape: "square" or "disc", which covers the same part of the
            image after a turn by any angle, see `ops.Window`. None is "square"
            for groups that act on the grid, and "disc" for others.
        data_format: "channels_last", "channels_first" or None (what
            `keras.config.image_data_format()` says).
        **kwargs: `name`, `dtype`, `trainable`.

    Call arguments:
        inputs: feature maps on the group; with "z2" also images.
        return_attention_maps: also return the weights of the neighbours, as a
            dict: "window" `(batch, height, width, order, heads, rows,
            columns)` adds up to one over the window, whose first row is
            above the pixel. With images `order` is 1; with "channels_first"
            the axes are the same.
        query: `(row, column)` of a pixel: "window" then has the map of this
            pixel alone, `(batch, order, heads, rows, columns)`.

    Input shape:
        "channels_last": `(batch, height, width, order, channels)`;
        "channels_first": `(batch, channels, height, width, order)`. With
        "z2" also images of rank 4, which give rank 4. Height and width may be
        None.

    Output shape:
        The shape of the input, with `filters` channels.

    Symmetry:
        `L_g` of the input gives `L_g` of the output (`ops.group_action`) for
        every element of the group, to rounding, on every input. The map
        "window" goes with it: pixels and windows are turned and elements
        permuted. For groups that do not act on the grid (p8, p12, p16) this
        holds for the turns by 90 degrees and the mirrors that go with them;
        turns in between are approximate. On smooth feature maps, turned by 45
        degrees, new layers on p8 with windows of 3, 5 and 7 pixels were off,
        without dilation, by 0.015 of their largest output or less, on average
        over three draws of the weights, and by up to 0.076 with pixel filters
        and square windows. The sharper attention becomes in training, the
        larger the error.

    Variables:
        `query_kernel`, `key_kernel`, `value_kernel (order, channels,
        filters)`, `query_bias`, `key_bias`, `value_bias (filters,)`;
        `row_embedding (rows, filters / 2)`, `column_embedding (columns,
        filters / 2)`; `output_kernel (order, filters, filters)`. With steerable
        filters there is one `embedding (count, filters)`, with the `count` of
        `ops.steerable_basis(group, rows, multiplied=True)`.

    Raises:
        ValueError: for bad arguments, in `__init__`, such as filters that are
            not divisible as above; for shapes that do not fit, in `build` and
            in the call.
        TypeError: for a `group` that is neither a name nor a `Group`.

    Example:
        >>> layer = StandAloneSelfAttention2D(16, 3, num_heads=4)
        >>> tuple(layer(keras.ops.ones((2, 8, 8, 3))).shape)
        (2, 8, 8, 16)

    References:
        - [Ramachandran et al., 2019](https://arxiv.org/abs/1906.05909)
        - The baseline of [Diaconu and Worrall,
          2019](https://arxiv.org/abs/1911.07704), which scales by one over
          the channels of a head. The paper has it on images alone.
    """

    def _check_heads(self) -> None:
        if self.filter_basis == "steerable":
            super()._check_heads()
        else:
            # Half of the channels of a head have embeddings of rows.
            parts = 2 * self.num_heads
            _checks.divisible(self.filters, parts, "2 * num_heads")

    def build_maps(self, channels: int) -> None:
        for name in ("query", "key", "value"):
            linear_maps.add_on_group(self, name, channels, self.filters)
        if self.filter_basis == "steerable":
            self.embedding = self.add_filters(
                "embedding",
                (*self.kernel_size, self.filters),
                **self._window_options(),
            )
            return
        for name, size in zip(("row", "column"), self.kernel_size, strict=True):
            weight = self.add_weight(
                name=f"{name}_embedding",
                shape=(size, self.filters // 2),
                **self._window_options(),
            )
            setattr(self, f"{name}_embedding", weight)

    def attended(
        self, x: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, AffineMap, AffineMap]:
        return (
            linear_maps.on_group(self, "query", x) * self._scale,
            linear_maps.on_group(self, "key", x),
            linear_maps.on_group(self, "value", x),
            self._positions(),
            UNCHANGED,
        )

    def _positions(self) -> AffineMap:
        """The affine map that adds the positions to the keys."""
        if self.filter_basis == "steerable":
            embedding = self.filters_of(self.embedding, self.kernel_size[0])
            return added_to_neighbours(embedding, self.group, self.filter_basis)
        return relative_positions(
            ops.convert_to_tensor(self.row_embedding),
            ops.convert_to_tensor(self.column_embedding),
            self.num_heads,
            self.group,
        )


class BaseAffineSelfConv2D(BaseWindowAttention2D):
    """The base of `SimpleAffineSelfConv2D` and `AffineSelfConv2D`."""

    def _initial_spread(self) -> float:
        if self.filter_basis == "pixel":
            return 1.0
        # Each neighbour adds up all elements. With scores above about one,
        # attention jumps from pixel to pixel, which no turn between the quarter
        # turns preserves.
        return 0.5 / math.sqrt(self.group.order)

    def _add_affine(self, name: str = "") -> None:
        """Creates the weights `<name>psi` and `<name>beta`."""
        shape = (*self.kernel_size, self.filters)
        for part, outer in (("psi", (self.group.order,)), ("beta", ())):
            weight = self.add_filters(
                name + part,
                (*outer, *shape),
                axis=len(outer),
                **self._window_options(),
            )
            setattr(self, name + part, weight)

    def _affine(self, name: str = "") -> AffineMap:
        """The affine map of the weights `<name>psi` and `<name>beta`."""
        size, _ = self.kernel_size
        psi, beta = (
            self.filters_of(getattr(self, name + part), size, axis)
            for part, axis in (("psi", 1), ("beta", 0))
        )
        return affine_map(psi, beta, self.group, self.filter_basis)


@keras.saving.register_keras_serializable(package="keras_equiattn")
class SimpleAffineSelfConv2D(BaseAffineSelfConv2D):
    """Affine self-convolution with one linear and one affine map.

    With one linear map `F` of the input, for every pixel `x`, group element
    `p` and head::

        A(p, x, d) = sum_r F(x + d, r) psi(p^-1 r, p^-1 d) + beta(p^-1 d)
        s(p, x, d) = scale <A(p, x, 0), A(p, x, d)>
        y(x, p) = sum_d softmax_d(s(p, x, d)) A(p, x, d)

    followed by a linear map without bias. With equal weights instead of the
    softmax it would be a depthwise convolution with the filters `psi`; with
    `psi = 1` and `beta = 0` on images it is self-attention.

    Args:
        filters: channels of the output and of queries, keys and values;
            divisible by `num_heads`.
        kernel_size: rows and columns of the window, odd, an integer or a pair.
            Groups with quarter turns need a square window.
        num_heads: number of heads, contiguous blocks of the channels.
        group: a group or its name, see `keras_equiattn.groups.get`. "z2" is the
            layer of the paper, on images.
        border: how neighbours outside of the image count. "zeros": their linear
            maps are zero, and they take part in the softmax; "mask": the
            softmax leaves them out; "reflect": the mirror image lies there.
        scale: the factor of the scores; None is one over the channels of a
            head.
        dilation_rate: distance of adjacent neighbours, an integer or a pair.
        recompute: the forward pass keeps queries, keys, values, attention
            weights and the result for the backward pass, but no neighbours
            with their channels. False keeps more, and can be differentiated
            twice on every backend.
        kernel_initializer: the initializer of the linear maps; one that scales
            with the fan-in sees `order * channels`. An initializer with a seed
            gives maps of the same shape the same values.
        bias_initializer: the initializer of their biases.
        window_initializer: the initializer of `psi` and `beta`; None is the
            standard normal distribution for the basis "pixel", and for
            "steerable" the normal distribution with the standard deviation `1 /
            (2 sqrt(order))`, with which scores start below about one.
        kernel_regularizer, window_regularizer: regularizers of the kernels of
            the linear maps, and of the affine maps.
        filter_basis: the basis of `psi` and `beta`: "pixel" has a number for
            each offset, which is interpolated for turns by less than 90
            degrees; "steerable" has coefficients of filters that turn by any
            angle, see `ops.steerable_basis`, and needs a square window.
            Initializers then draw a number for each offset, and the projections
            on these filters are scaled to keep the variance. None is "pixel"
            for groups that act on the grid, and "steerable" for others.
        window_shape: "square" or "disc", which covers the same part of the
            image after a turn by any angle, see `ops.Window`. None is "square"
            for groups that act on the grid, and "disc" for others.
        data_format: "channels_last", "channels_first" or None (what
            `keras.config.image_data_format()` says).
        **kwargs: `name`, `dtype`, `trainable`.

    Call arguments:
        inputs: feature maps on the group; with "z2" also images.
        return_attention_maps: also return the weights of the neighbours, as a
            dict: "window" `(batch, height, width, order, heads, rows,
            columns)` adds up to one over the window, whose first row is
            above the pixel. With images `order` is 1; with "channels_first"
            the axes are the same.
        query: `(row, column)` of a pixel: "window" then has the map of this
            pixel alone, `(batch, order, heads, rows, columns)`.

    Input shape:
        "channels_last": `(batch, height, width, order, channels)`;
        "channels_first": `(batch, channels, height, width, order)`. With
        "z2" also images of rank 4, which give rank 4. Height and width may be
        None.

    Output shape:
        The shape of the input, with `filters` channels.

    Symmetry:
        `L_g` of the input gives `L_g` of the output (`ops.group_action`) for
        every element of the group, to rounding, on every input. The map
        "window" goes with it: pixels and windows are turned and elements
        permuted. For groups that do not act on the grid (p8, p12, p16) this
        holds for the turns by 90 degrees and the mirrors that go with them;
        turns in between are approximate. On smooth feature maps, turned by 45
        degrees, new layers on p8 with windows of 3, 5 and 7 pixels were off,
        without dilation, by 0.026 of their largest output or less, on average
        over three draws of the weights, and by up to 0.437 with pixel filters,
        square windows and the initial weights of the paper. The sharper
        attention becomes in training, the larger the error.

    Variables:
        `input_kernel (order, channels, filters)`, `input_bias (filters,)`;
        `psi (order, rows, columns, filters)`, `beta (rows, columns,
        filters)`; `output_kernel (order, filters, filters)`. With steerable
        filters `psi (order, count, filters)` and `beta (count, filters)`, with
        the `count` of `ops.steerable_basis(group, rows, multiplied=True)`.

    Raises:
        ValueError: for bad arguments, in `__init__`, such as filters that are
            not divisible by `num_heads`; for shapes that do not fit, in `build`
            and in the call.
        TypeError: for a `group` that is neither a name nor a `Group`.

    Example:
        >>> layer = SimpleAffineSelfConv2D(8, 3, num_heads=4, group="p4")
        >>> tuple(layer(keras.ops.ones((2, 8, 8, 4, 3))).shape)
        (2, 8, 8, 4, 8)

    References:
        - [Diaconu and Worrall, 2019](https://arxiv.org/abs/1911.07704), eq. 7,
          on a group eqs. 13 and 14. `beta` is added once, not once for every
          group element (as in the proof of their eq. 24).
    """

    def build_maps(self, channels: int) -> None:
        linear_maps.add_on_group(self, "input", channels, self.filters)
        self._add_affine()

    def attended(
        self, x: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, AffineMap, AffineMap]:
        x = linear_maps.on_group(self, "input", x)
        affine = self._affine()
        query = centre_query(x, *affine) * self._scale
        return query, x, x, affine, affine


@keras.saving.register_keras_serializable(package="keras_equiattn")
class AffineSelfConv2D(BaseAffineSelfConv2D):
    """Affine self-convolution: attention whose keys and values are filtered.

    With linear maps `Q`, `K`, `V` of the input, for every pixel `x`, group
    element `p` and head::

        q(p, x) = sum_r Q(x, r) psi_Q(p^-1 r) + beta_Q
        k(p, x, d) = sum_r K(x + d, r) psi_K(p^-1 r, p^-1 d) + beta_K(p^-1 d)
        v(p, x, d) = sum_r V(x + d, r) psi_V(p^-1 r, p^-1 d) + beta_V(p^-1 d)
        y(x, p) = sum_d softmax_d(scale <q(p, x), k(p, x, d)>) v(p, x, d)

    followed by a linear map without bias. All affine maps act channel by
    channel. On images (group "z2") this is affine self-convolution, on groups
    its roto-translation form. With `psi = 1` it is self-attention with
    relative positions, with constant scores a depthwise convolution.

    Args:
        filters: channels of the output and of queries, keys and values;
            divisible by `num_heads`.
        kernel_size: rows and columns of the window, odd, an integer or a pair.
            Groups with quarter turns need a square window.
        num_heads: number of heads, contiguous blocks of the channels.
        group: a group or its name, see `keras_equiattn.groups.get`. "z2" is the
            layer of the paper, on images.
        border: how neighbours outside of the image count. "zeros": their linear
            maps are zero, and they take part in the softmax; "mask": the
            softmax leaves them out; "reflect": the mirror image lies there.
        scale: the factor of the scores; None is one over the channels of a
            head.
        dilation_rate: distance of adjacent neighbours, an integer or a pair.
        recompute: the forward pass keeps queries, keys, values, attention
            weights and the result for the backward pass, but no neighbours
            with their channels. False keeps more, and can be differentiated
            twice on every backend.
        kernel_initializer: the initializer of the linear maps; one that scales
            with the fan-in sees `order * channels`. An initializer with a seed
            gives maps of the same shape the same values.
        bias_initializer: the initializer of their biases.
        window_initializer: the initializer of all `psi` and `beta`; None is the
            standard normal distribution for the basis "pixel", and for
            "steerable" the normal distribution with the standard deviation `1 /
            (2 sqrt(order))`, with which scores start below about one.
        kernel_regularizer, window_regularizer: regularizers of the kernels of
            the linear maps, and of the affine maps.
        filter_basis: the basis of `psi` and `beta` of keys and values: "pixel"
            has a number for each offset, which is interpolated for turns by
            less than 90 degrees; "steerable" has coefficients of filters that
            turn by any angle, see `ops.steerable_basis`, and needs a square
            window. Initializers then draw a number for each offset, and the
            projections on these filters are scaled to keep the variance. None
            is "pixel" for groups that act on the grid, and "steerable" for
            others.
        window_shape: "square" or "disc", which covers the same part of the
            image after a turn by any angle, see `ops.Window`. None is "square"
            for groups that act on the grid, and "disc" for others.
        data_format: "channels_last", "channels_first" or None (what
            `keras.config.image_data_format()` says).
        **kwargs: `name`, `dtype`, `trainable`.

    Call arguments:
        inputs: feature maps on the group; with "z2" also images.
        return_attention_maps: also return the weights of the neighbours, as a
            dict: "window" `(batch, height, width, order, heads, rows,
            columns)` adds up to one over the window, whose first row is
            above the pixel. With images `order` is 1; with "channels_first"
            the axes are the same.
        query: `(row, column)` of a pixel: "window" then has the map of this
            pixel alone, `(batch, order, heads, rows, columns)`.

    Input shape:
        "channels_last": `(batch, height, width, order, channels)`;
        "channels_first": `(batch, channels, height, width, order)`. With
        "z2" also images of rank 4, which give rank 4. Height and width may be
        None.

    Output shape:
        The shape of the input, with `filters` channels.

    Symmetry:
        `L_g` of the input gives `L_g` of the output (`ops.group_action`) for
        every element of the group, to rounding, on every input. The map
        "window" goes with it: pixels and windows are turned and elements
        permuted. For groups that do not act on the grid (p8, p12, p16) this
        holds for the turns by 90 degrees and the mirrors that go with them;
        turns in between are approximate. On smooth feature maps, turned by 45
        degrees, new layers on p8 with windows of 3, 5 and 7 pixels were off,
        without dilation, by 0.077 of their largest output or less, on average
        over three draws of the weights, and by up to 0.983 with pixel filters,
        square windows and the initial weights of the paper. The sharper
        attention becomes in training, the larger the error.

    Variables:
        `query_kernel`, `key_kernel`, `value_kernel (order, channels,
        filters)`, `query_bias`, `key_bias`, `value_bias (filters,)`;
        `query_psi (order, filters)`, `query_beta (filters,)`; `key_psi`,
        `value_psi (order, rows, columns, filters)`, `key_beta`, `value_beta
        (rows, columns, filters)`; `output_kernel (order, filters, filters)`.
        With steerable filters, one axis of `count` takes the place of rows and
        columns, with the `count` of `ops.steerable_basis(group, rows,
        multiplied=True)`.

    Raises:
        ValueError: for bad arguments, in `__init__`, such as filters that are
            not divisible by `num_heads`; for shapes that do not fit, in `build`
            and in the call.
        TypeError: for a `group` that is neither a name nor a `Group`.

    Example:
        >>> layer = AffineSelfConv2D(8, 3, num_heads=4, group="p4m")
        >>> x = keras.ops.ones((2, 8, 8, 8, 3))
        >>> y, maps = layer(x, return_attention_maps=True)
        >>> tuple(y.shape), tuple(maps["window"].shape)
        ((2, 8, 8, 8, 8), (2, 8, 8, 8, 4, 3, 3))

    References:
        - [Diaconu and Worrall, 2019](https://arxiv.org/abs/1911.07704),
          eqs. 8 to 11, on a group eqs. 17 to 20. `beta` is added once, not
          once for every group element (as in the proof of their eq. 24). The
          paper says that scores are normalised by 1 / d: here d is the number
          of channels of a head. It says nothing about the border.
    """

    def build_maps(self, channels: int) -> None:
        for name in ("query", "key", "value"):
            linear_maps.add_on_group(self, name, channels, self.filters)
        for part, outer in (("psi", (self.group.order,)), ("beta", ())):
            weight = self.add_weight(
                name=f"query_{part}",
                shape=(*outer, self.filters),
                **self._window_options(),
            )
            setattr(self, f"query_{part}", weight)
        for name in ("key", "value"):
            self._add_affine(f"{name}_")

    def attended(
        self, x: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, AffineMap, AffineMap]:
        kernel, bias = transformed_query(
            *linear_maps.kernel_and_bias(self, "query"),
            ops.convert_to_tensor(self.query_psi),
            ops.convert_to_tensor(self.query_beta),
            self.group,
        )
        return (
            self._scale * linear_maps.applied(self, x, kernel, bias),
            linear_maps.on_group(self, "key", x),
            linear_maps.on_group(self, "value", x),
            self._affine("key_"),
            self._affine("value_"),
        )
