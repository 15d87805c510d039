"""Pooling over space, with checked exactness, and over the group."""

from typing import Any

import keras
from keras import ops

from keras_equiattn import _checks
from keras_equiattn import groups
from keras_equiattn.layers.base.group_layer import as_floats
from keras_equiattn.layers.base.group_layer import check_feature_map
from keras_equiattn.layers.base.group_layer import GroupLayer
from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Shape
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.geometry import output_size
from keras_equiattn.ops.group.pooling import group_pool
from keras_equiattn.ops.group.pooling import pooling_mode
from keras_equiattn.ops.group.pooling import SPATIAL_MODES
from keras_equiattn.ops.group.pooling import spatial_pool
from keras_equiattn.ops.numerics import mean


@keras.saving.register_keras_serializable(package="keras_equiattn")
class SpatialPooling2D(GroupLayer):
    """Maximum or mean over windows in space, for every group element alone.

    `y(x, h) = max_d f(s x + d, h)`, or a mean. Keras' own pooling layers do the
    same, but also accept sizes on which rows and columns remain at one side, so
    that pooling is not equivariant.

    Args:
        pool_size: an integer or a pair.
        strides: an integer or a pair; None is the pool size.
        mode: "max" or "mean"; "avg" and "average" are the mean too.
            "binomial" is a mean with binomial coefficients as weights, a
            low-pass filter against aliasing. Choose a window of twice the
            strides: over 2 x 2 pixels it is the mean itself. After
            `SpatialPadding2D(1, mode="reflect")`, a window of 4 with strides of
            2 halves every even size.
        group: the group whose exactness is checked, also for images.
        exact: refuse sizes on which the layer would not be exactly
            equivariant. False accepts them; "call" accepts sizes that are
            unknown at build, and refuses inexact ones when the layer is called.
        data_format: "channels_last", "channels_first" or None (what
            `keras.config.image_data_format()` says).
        **kwargs: `name`, `dtype`.

    Call arguments:
        inputs: images or feature maps on the group.

    Input shape:
        "channels_last": `(batch, height, width, channels)` or
        `(batch, height, width, order, channels)`;
        "channels_first": `(batch, channels, height, width)` or
        `(batch, channels, height, width, order)`. Height and width may be
        None where the strides are 1 or with `exact="call"`.

    Output shape:
        The shape of the input, with new height and width. There is no padding.

    Symmetry:
        Equivariant under the group to rounding ("max": to the bit) on every
        size accepted with `exact=True`: (size - pool size) must be divisible
        by the strides, see `ops.is_exact`. Under turns between the quarter
        turns (p8, p12, p16) it is approximate. On smooth feature maps a
        binomial window of twice the strides has a smaller error than a mean
        over windows as large as the strides, and a much smaller one than their
        maximum.

    Raises:
        ValueError: for bad arguments, in `__init__`; for shapes that do not
            fit or would not be exact, when they are first seen.

    Example:
        >>> x = keras.ops.ones((2, 24, 24, 4, 10))
        >>> tuple(SpatialPooling2D(2, group="p4")(x).shape)
        (2, 12, 12, 4, 10)

    References:
        - [Romero et al., 2020](https://arxiv.org/abs/2002.03830), appendix C
        - [Zhang, 2019](https://arxiv.org/abs/1904.11486): binomial filters
          before strides
    """

    takes = "any"

    def __init__(
        self,
        pool_size: int | tuple[int, int],
        strides: int | tuple[int, int] | None = None,
        mode: str = "max",
        group: str | groups.Group = "p4",
        exact: bool | str = True,
        data_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(group=group, data_format=data_format, **kwargs)
        self.pool_size = _checks.pair(pool_size, "pool_size")
        if strides is None:
            strides = self.pool_size
        self.strides = _checks.pair(strides, "strides")
        self.mode = pooling_mode(mode, SPATIAL_MODES)
        self.exact = _checks.exactness(exact, "exact")
        window = {"window": self.pool_size, "strides": self.strides}
        unequal = len({*self.pool_size}) > 1 or len({*self.strides}) > 1
        if self.group.quarter_turns and unequal:
            self.require_exact((None, None), **window)

    def build(self, input_shape: Shape) -> None:
        self.output_shape_channels_last(self.check_shape(input_shape))
        self.built = True

    def call_channels_last(self, x: Tensor) -> Tensor:
        return spatial_pool(x, self.pool_size, self.strides, self.mode)

    def output_shape_channels_last(self, shape: Shape) -> Shape:
        size = shape[1:3]
        outputs = [
            output_size(n, k, s)
            for n, k, s in zip(size, self.pool_size, self.strides, strict=True)
        ]
        if any(n is not None and n < 1 for n in outputs):
            raise ValueError(
                f"{self._label()}: a window of {self.pool_size} does not fit "
                f"an input of size {tuple(size)}."
            )
        self.require_exact(size, window=self.pool_size, strides=self.strides)
        return (shape[0], *outputs, *shape[3:])

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "pool_size": self.pool_size,
            "strides": self.strides,
            "mode": self.mode,
            "exact": self.exact,
        }


@keras.saving.register_keras_serializable(package="keras_equiattn")
class GlobalSpatialPooling2D(GroupLayer):
    """Maximum or mean over all pixels, for every group element alone.

    `y(h) = max_x f(x, h)`, or the mean. The poses stay separate, so that later
    layers can tell them apart; `GlobalAveragePooling3D` of Keras merges them
    too.

    Args:
        mode: "mean" or "max"; "avg" and "average" are the mean too.
        group: a group or its name.
        data_format: "channels_last", "channels_first" or None (what
            `keras.config.image_data_format()` says).
        **kwargs: `name`, `dtype`.

    Call arguments:
        inputs: images or feature maps on the group.

    Input shape:
        "channels_last": `(batch, height, width, channels)` or
        `(batch, height, width, order, channels)`;
        "channels_first": `(batch, channels, height, width)` or
        `(batch, channels, height, width, order)`. Height and width may be
        None.

    Output shape:
        The shape of the input, with height and width 1.

    Symmetry:
        `L_g` of the feature map permutes the poses of the output, to rounding,
        for every element of every group that acts on the grid, and every size.

    Raises:
        ValueError: for bad arguments, in `__init__`; for shapes that do not
            fit, in `build` and in the call.

    Example:
        >>> x = keras.ops.ones((2, 24, 24, 4, 10))
        >>> tuple(GlobalSpatialPooling2D(group="p4")(x).shape)
        (2, 1, 1, 4, 10)

    References:
        - Keras' `GlobalAveragePooling2D` and `GlobalMaxPooling2D`
    """

    takes = "any"

    def __init__(
        self,
        mode: str = "mean",
        group: str | groups.Group = "p4",
        data_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(group=group, data_format=data_format, **kwargs)
        self.mode = pooling_mode(mode)

    def build(self, input_shape: Shape) -> None:
        self.check_shape(input_shape)
        self.built = True

    def call_channels_last(self, x: Tensor) -> Tensor:
        # Some backends refuse the maximum of an empty batch. The mean has the
        # same shape.
        is_max = self.mode == "max" and x.shape[0] != 0
        y = ops.max(x, (1, 2)) if is_max else mean(x, (1, 2))
        return y[:, None, None]

    def output_shape_channels_last(self, shape: Shape) -> Shape:
        return (shape[0], 1, 1, *shape[3:])

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "mode": self.mode}


@keras.saving.register_keras_serializable(package="keras_equiattn")
class GroupPooling(keras.layers.Layer):
    """Maximum or mean over the group axis: from feature maps to images.

    `y(x) = max_h f(x, h)`, or the mean.

    Args:
        mode: "max" or "mean"; "avg" and "average" are the mean too.
        data_format: "channels_last", "channels_first" or None (what
            `keras.config.image_data_format()` says).
        **kwargs: `name`, `dtype`.

    Call arguments:
        inputs: feature maps on any group.

    Input shape:
        "channels_last": `(batch, height, width, order, channels)`;
        "channels_first": `(batch, channels, height, width, order)`.

    Output shape:
        "channels_last": `(batch, height, width, channels)`;
        "channels_first": `(batch, channels, height, width)`.

    Symmetry:
        `L_g` of the feature map gives `L_g` of the image on every size, "max"
        to the bit and "mean" to rounding, for every element that maps the grid
        onto itself. With "mean" this holds for all other elements too. On a
        1 x 1 map the output is invariant.

    Raises:
        ValueError: for bad arguments, in `__init__`; for inputs that are no
            feature maps, when they are first seen.

    Example:
        >>> tuple(GroupPooling()(keras.ops.ones((2, 1, 1, 4, 10))).shape)
        (2, 1, 1, 10)

    References:
        - [Cohen and Welling, 2016](https://arxiv.org/abs/1602.07576),
          section 6.3
    """

    def __init__(
        self, mode: str = "max", data_format: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.mode = pooling_mode(mode)
        self.data_format = _checks.data_format(data_format)
        backend.remember(self)

    def build(self, input_shape: Shape) -> None:
        self.compute_output_shape(input_shape)
        self.built = True

    def call(self, inputs: Tensor) -> Tensor:
        if backend.is_in_dynamo():
            return backend.in_one_piece(self, "pooled", inputs)
        return self.pooled(inputs)

    def pooled(self, inputs: Tensor) -> Tensor:
        """The maximum or the mean over the group."""
        self.compute_output_shape(inputs.shape)
        x = as_floats(inputs, self.compute_dtype)
        return group_pool(x, self.mode, self._group_axis)

    def compute_output_shape(self, input_shape: Shape) -> tuple[Any, ...]:
        check_feature_map(self, input_shape)
        shape = list(input_shape)
        del shape[self._group_axis]
        return tuple(shape)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "mode": self.mode,
            "data_format": self.data_format,
        }

    @property
    def _group_axis(self) -> int:
        return 4 if self.data_format == "channels_first" else 3
