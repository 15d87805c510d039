"""Projections of feature maps to images of numbers, vectors and angles."""

from typing import Any

import keras
from keras import ops

from keras_equiattn import _checks
from keras_equiattn import groups
from keras_equiattn.layers.base.group_layer import GroupLayer
from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Shape
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.group.directions import group_vectors
from keras_equiattn.ops.group.pooling import group_pool
from keras_equiattn.ops.group.pooling import MODES
from keras_equiattn.ops.group.pooling import pooling_mode
from keras_equiattn.ops.numerics import softmax


@keras.saving.register_keras_serializable(package="keras_equiattn")
class GroupProjection(GroupLayer):
    """Projects feature maps on the group to images.

    It is the last step of a network that predicts something for every pixel.
    "mean" and "max" are those of `GroupPooling`. "learned" weighs the poses of
    each pixel by attention: `y(x) = sum_h a(x, h) f(x, h)`, where `a(x, h)` is
    the softmax of `f(x, h) . w` over the poses `h`.

    Args:
        mode: "mean" (or "avg", "average"), "max" or "learned".
        kernel_initializer, kernel_regularizer, kernel_constraint: options of
            `w`.
        group: a group or its name.
        data_format: "channels_last", "channels_first" or None (what
            `keras.config.image_data_format()` says).
        **kwargs: `name`, `dtype`, `trainable`.

    Call arguments:
        inputs: feature maps on the group.

    Input shape:
        "channels_last": `(batch, height, width, order, channels)`;
        "channels_first": `(batch, channels, height, width, order)`. Height and
        width may be None. With `"z2"` also images of rank 4, which stay as they
        are.

    Output shape:
        "channels_last": `(batch, height, width, channels)`;
        "channels_first": `(batch, channels, height, width)`.

    Symmetry:
        `L_g` of the feature map gives `L_g` of the image, to rounding, on every
        size and for every element that maps the grid onto itself. With "mean"
        this holds for all other elements too.

    Variables:
        `kernel (channels,)`, for "learned" alone.

    Raises:
        ValueError: for bad arguments, in `__init__`; for shapes that do not
            fit, in `build` and in the call.

    Example:
        >>> x = keras.ops.ones((2, 32, 32, 4, 10))
        >>> tuple(GroupProjection("learned", group="p4")(x).shape)
        (2, 32, 32, 10)

    References:
        - [Cohen and Welling, 2016](https://arxiv.org/abs/1602.07576),
          section 6.3, for "max"
    """

    gives = "image"

    def __init__(
        self,
        mode: str = "mean",
        kernel_initializer: Any = "glorot_uniform",
        kernel_regularizer: Any = None,
        kernel_constraint: Any = None,
        group: str | groups.Group = "p4",
        data_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(group=group, data_format=data_format, **kwargs)
        self.mode = pooling_mode(mode, (*MODES, "learned"))
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.kernel_constraint = keras.constraints.get(kernel_constraint)

    def build(self, input_shape: Shape) -> None:
        shape = self.check_shape(input_shape)
        if self.mode == "learned":
            self.kernel = self.add_weight(
                name="kernel",
                shape=(shape[-1],),
                initializer=self.kernel_initializer,
                regularizer=self.kernel_regularizer,
                constraint=self.kernel_constraint,
            )
            self.fix_input_channels(shape[-1])
        self.built = True

    def call_channels_last(self, x: Tensor) -> Tensor:
        if self.mode != "learned":
            return group_pool(x, self.mode)
        scores = ops.sum(x * ops.convert_to_tensor(self.kernel), axis=-1)
        weights = softmax(scores, (-1,))
        return ops.sum(x * weights[..., None], axis=3)

    def output_shape_channels_last(self, shape: Shape) -> Shape:
        return (*shape[:3], shape[-1])

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "mode": self.mode,
            "kernel_initializer": keras.initializers.serialize(
                self.kernel_initializer
            ),
            "kernel_regularizer": keras.regularizers.serialize(
                self.kernel_regularizer
            ),
            "kernel_constraint": keras.constraints.serialize(
                self.kernel_constraint
            ),
        }


@keras.saving.register_keras_serializable(package="keras_equiattn")
class GroupToVector2D(GroupLayer):
    """Turns feature maps into vectors, which turn with the image.

    `v(x) = sum_h R(h) (f_1(x, h), f_2(x, h))`: the poses vote for a direction.
    `R(h)` is the matrix of `h` on `(row, column)`, and `f_1` and `f_2` are two
    channels beside each other. With `f_1 = 0` that is the sum of `f_2(h)` times
    the direction to the right, turned by `h`.

    Args:
        signed: True for vectors; False for axes, such as the direction of a
            fibre, which half a turn leaves as they are. An axis at the angle
            `a` is the vector at the angle `2 a`.
        group: a group or its name.
        data_format: "channels_last", "channels_first" or None (what
            `keras.config.image_data_format()` says).
        **kwargs: `name`, `dtype`.

    Call arguments:
        inputs: feature maps on the group.

    Input shape:
        "channels_last": `(batch, height, width, order, channels)`;
        "channels_first": `(batch, channels, height, width, order)`, with two
        channels for each vector. Height and width may be None.

    Output shape:
        "channels_last": `(batch, height, width, channels)`;
        "channels_first": `(batch, channels, height, width)`. The first of two
        channels is the component along the rows, which point down, and the
        second is the component along the columns, to the right.

    Symmetry:
        For an image turned by `g` the vectors move with their pixels and turn
        by `g` (`ops.vector_action`), to rounding, for every element of every
        group and every size. Mirrors mirror them.

    Raises:
        ValueError: for bad arguments, in `__init__`; for shapes that do not
            fit, in the call.

    Example:
        >>> x = keras.ops.ones((2, 32, 32, 4, 2))
        >>> tuple(GroupToVector2D(group="p4")(x).shape)
        (2, 32, 32, 2)

    References:
        - [Weiler and Cesa, 2019](https://arxiv.org/abs/1911.08251), section
          2.2, on fields of vectors
    """

    gives = "image"

    def __init__(
        self,
        signed: bool = True,
        group: str | groups.Group = "p4",
        data_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(group=group, data_format=data_format, **kwargs)
        self.signed = _checks.flag(signed, "signed")

    @property
    def frequency(self) -> int:
        """The multiple of the angle of an element by which a vector turns."""
        return 1 if self.signed else 2

    def call_channels_last(self, x: Tensor) -> Tensor:
        return group_vectors(x, self.group, self.frequency)

    def output_shape_channels_last(self, shape: Shape) -> Shape:
        if shape[-1] % 2:
            raise ValueError(
                f"{self._label()} takes two channels for each vector. "
                f"Received: {shape[-1]} channels"
            )
        return (*shape[:3], shape[-1])

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "signed": self.signed}


@keras.saving.register_keras_serializable(package="keras_equiattn")
class GroupToAngle2D(GroupToVector2D):
    """Turns feature maps into angles: the directions of `GroupToVector2D`.

    Args:
        signed: True for the direction of a vector; False for that of an axis,
            such as a fibre, which half a turn leaves as it is.
        group: a group or its name.
        data_format: "channels_last", "channels_first" or None (what
            `keras.config.image_data_format()` says).
        **kwargs: `name`, `dtype`.

    Call arguments:
        inputs: feature maps on the group.

    Input shape:
        "channels_last": `(batch, height, width, order, channels)`;
        "channels_first": `(batch, channels, height, width, order)`, with two
        channels for each angle. Height and width may be None.

    Output shape:
        "channels_last": `(batch, height, width, channels / 2)`;
        "channels_first": `(batch, channels / 2, height, width)`. Angles are in
        radians, counter-clockwise from the right: above `-pi` and up to `pi`,
        and for axes above `-pi / 2` and up to `pi / 2`. Where the vector is
        zero the angle is zero, and so is its gradient.

    Symmetry:
        For an image turned by an angle the angles move with their pixels and
        grow by it, up to whole turns (for axes half turns); the mirror of the
        columns takes `a` to `pi - a`. Train with `losses.AngularLoss`, which
        does not see whole turns.

    Raises:
        ValueError: for bad arguments, in `__init__`; for shapes that do not
            fit, in the call.

    Example:
        >>> x = keras.ops.ones((2, 32, 32, 4, 2))
        >>> tuple(GroupToAngle2D(group="p4")(x).shape)
        (2, 32, 32, 1)

    References:
        - [Weiler and Cesa, 2019](https://arxiv.org/abs/1911.08251), section
          2.2, on fields of vectors
    """

    def call_channels_last(self, x: Tensor) -> Tensor:
        vectors = super().call_channels_last(x)
        row, column = vectors[..., ::2], vectors[..., 1::2]
        zero = ops.logical_and(row == 0, column == 0)
        angle = ops.arctan2(-row, backend.masked(column, zero, 1.0))
        return angle / self.frequency

    def output_shape_channels_last(self, shape: Shape) -> Shape:
        *outer, channels = super().output_shape_channels_last(shape)
        return (*outer, channels // 2)
