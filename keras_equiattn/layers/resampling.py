"""Larger feature maps: every pixel divided, or rows and columns added."""

from typing import Any

import keras

from keras_equiattn import _checks
from keras_equiattn import groups
from keras_equiattn.layers.base.group_layer import GroupLayer
from keras_equiattn.ops._types import Shape
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.group.resampling import check_padding
from keras_equiattn.ops.group.resampling import INTERPOLATIONS
from keras_equiattn.ops.group.resampling import PADDINGS
from keras_equiattn.ops.group.resampling import spatial_pad
from keras_equiattn.ops.group.resampling import spatial_upsample


@keras.saving.register_keras_serializable(package="keras_equiattn")
class SpatialUpSampling2D(GroupLayer):
    """Divides every pixel into several, for every group element alone.

    The counterpart of `SpatialPooling2D` on the way back to a large image.

    Args:
        size: rows and columns that a pixel becomes, an integer or a pair.
        interpolation: "nearest" repeats the value of the pixel; "bilinear"
            mixes it with its neighbours. Beyond the border the outermost pixels
            are repeated.
        group: the group under which the layer is equivariant, also on images.
        data_format: "channels_last", "channels_first" or None (what
            `keras.config.image_data_format()` says).
        **kwargs: `name`, `dtype`.

    Call arguments:
        inputs: images or feature maps on the group.

    Input shape:
        "channels_last": `(batch, height, width, channels)` or
        `(batch, height, width, order, channels)`;
        "channels_first": `(batch, channels, height, width)` or
        `(batch, channels, height, width, order)`. Height and width may be None.

    Output shape:
        The shape of the input, with `size` times the height and width.

    Symmetry:
        Equivariant under the group on every size, "nearest" to the bit and
        "bilinear" to rounding. For groups that do not act on the grid (p8, p12,
        p16) this holds for the turns by 90 degrees and the mirrors that go with
        them; in between the layer is approximate.

    Raises:
        ValueError: for bad arguments, such as a size that is not the same along
            both axes although the group holds quarter turns.

    Example:
        >>> x = keras.ops.ones((2, 12, 12, 4, 10))
        >>> tuple(SpatialUpSampling2D(2, group="p4")(x).shape)
        (2, 24, 24, 4, 10)

    References:
        - Keras' `UpSampling2D`
    """

    takes = "any"

    def __init__(
        self,
        size: int | tuple[int, int] = 2,
        interpolation: str = "nearest",
        group: str | groups.Group = "p4",
        data_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(group=group, data_format=data_format, **kwargs)
        self.size = _checks.pair(size, "size")
        self.interpolation = _checks.choice(
            interpolation, "interpolation", INTERPOLATIONS
        )
        _require_square(self.group, "size", self.size)

    def call_channels_last(self, x: Tensor) -> Tensor:
        return spatial_upsample(x, self.size, self.interpolation)

    def output_shape_channels_last(self, shape: Shape) -> Shape:
        larger = [
            None if n is None else n * factor
            for n, factor in zip(shape[1:3], self.size, strict=True)
        ]
        return (shape[0], *larger, *shape[3:])

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "size": self.size,
            "interpolation": self.interpolation,
        }


@keras.saving.register_keras_serializable(package="keras_equiattn")
class SpatialPadding2D(GroupLayer):
    """Adds rows and columns, the same number at opposite sides.

    Keras' `ZeroPadding2D` can also add them at one side alone, which is not
    equivariant under mirrors and turns.

    Args:
        padding: how many rows are added above and below, and columns at the
            left and at the right, an integer or a pair.
        mode: "zeros"; "reflect": the image continues as its mirror image,
            without repeating the outermost pixels; "wrap": it continues with
            the pixels of the opposite side.
        group: the group under which the layer is equivariant, also on images.
        data_format: "channels_last", "channels_first" or None (what
            `keras.config.image_data_format()` says).
        **kwargs: `name`, `dtype`.

    Call arguments:
        inputs: images or feature maps on the group.

    Input shape:
        "channels_last": `(batch, height, width, channels)` or
        `(batch, height, width, order, channels)`;
        "channels_first": `(batch, channels, height, width)` or
        `(batch, channels, height, width, order)`. Height and width may be None.

    Output shape:
        The shape of the input, with `2 * padding` more rows and columns.

    Symmetry:
        Equivariant under the group to the bit, on every size. For groups that
        do not act on the grid (p8, p12, p16) this holds for the turns by 90
        degrees and the mirrors that go with them; in between the layer is
        approximate.

    Raises:
        ValueError: for bad arguments, such as a padding that is not the same
            along both axes although the group holds quarter turns; for images
            that are too small for "reflect" or "wrap".

    Example:
        >>> x = keras.ops.ones((2, 12, 12, 4, 10))
        >>> tuple(SpatialPadding2D(1, mode="reflect", group="p4")(x).shape)
        (2, 14, 14, 4, 10)

    References:
        - Keras' `ZeroPadding2D`
    """

    takes = "any"

    def __init__(
        self,
        padding: int | tuple[int, int] = 1,
        mode: str = "zeros",
        group: str | groups.Group = "p4",
        data_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(group=group, data_format=data_format, **kwargs)
        self.padding = _checks.pair(padding, "padding")
        self.mode = _checks.choice(mode, "mode", PADDINGS)
        _require_square(self.group, "padding", self.padding)

    def call_channels_last(self, x: Tensor) -> Tensor:
        return spatial_pad(x, self.padding, self.mode)

    def output_shape_channels_last(self, shape: Shape) -> Shape:
        check_padding(shape[1:3], self.padding, self.mode)
        larger = [
            None if n is None else n + 2 * count
            for n, count in zip(shape[1:3], self.padding, strict=True)
        ]
        return (shape[0], *larger, *shape[3:])

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "padding": self.padding,
            "mode": self.mode,
        }


def _require_square(
    group: groups.Group, name: str, pair: tuple[int, int]
) -> None:
    """Raises where a pair differs along axes that the group exchanges."""
    if group.quarter_turns and pair[0] != pair[1]:
        raise ValueError(
            f"Group '{group.name}' holds quarter turns, which need the same "
            f"`{name}` along both axes. Received: {name}={pair}"
        )
