"""A small equivariant network that says in which pose an image is."""

from typing import Any

import keras

from keras_equiattn import groups
from keras_equiattn import layers
from keras_equiattn.ops._types import Shape

# Images are pooled until no side is longer.
LONGEST = 24
FILTERS = (8, 16)


def canonicalizer_network(
    input_shape: Shape,
    group: str | groups.Group = "p4",
    data_format: str = "channels_last",
    dtype: Any = None,
) -> keras.Model:
    """Builds a network that returns a score for each pose.

    Means over windows of pixels bring the image down to at most 24 pixels on
    each side. A lifting convolution with 8 filters and two group convolutions
    with 16 and 1 filters follow, with pooling between them. The score of a pose
    is the mean over all pixels. Features are normalised for each image, so the
    choice does not depend on the contrast.

    Args:
        input_shape: height, width and channels in the order of `data_format`.
            An image of unknown size is not brought down.
        group: a group that acts on the grid, or its name.
        data_format: "channels_last" or "channels_first".
        dtype: the dtype policy of the layers.

    Returns:
        A functional model from images to scores `(batch, order)`.
    """
    group = groups.get(group)
    first = data_format == "channels_first"
    options = {"data_format": data_format, "dtype": dtype}
    convolution = {"padding": "same", "group": group, **options}
    height, width = input_shape[1:] if first else input_shape[:2]

    def pooled(x: Any, height: Any, width: Any) -> tuple[Any, Any, Any]:
        """Halves the resolution, and returns the new size with the image."""
        row_window, row_stride, rows = _halving(height)
        column_window, column_stride, columns = _halving(width)
        pool = layers.SpatialPooling2D(
            (row_window, column_window),
            (row_stride, column_stride),
            "mean",
            group,
            **options,
        )
        return pool(x), rows, columns

    def activated(x: Any) -> Any:
        axis = 1 if first else -1
        x = keras.layers.GroupNormalization(1, axis=axis, dtype=dtype)(x)
        return keras.layers.ReLU(dtype=dtype)(x)

    inputs = keras.Input(tuple(input_shape))
    x: Any = inputs
    while max(height or 0, width or 0) > LONGEST:
        x, height, width = pooled(x, height, width)
    x = layers.LiftingConv2D(FILTERS[0], 5, use_bias=False, **convolution)(x)
    x, height, width = pooled(activated(x), height, width)
    x = layers.GroupConv2D(FILTERS[1], 3, use_bias=False, **convolution)(x)
    x, height, width = pooled(activated(x), height, width)
    # A bias would be the same for all poses.
    x = layers.GroupConv2D(1, 3, use_bias=False, **convolution)(x)
    x = keras.layers.Reshape((-1, group.order), dtype=dtype)(x)
    x = keras.layers.GlobalAveragePooling1D("channels_last", dtype=dtype)(x)
    return keras.Model(inputs, x, name="canonicalizer")


def _halving(size: int | None) -> tuple[int, int, int | None]:
    """Window, stride and new size along an axis, for which pooling is exact.

    An axis that is short or of unknown size stays as it is.
    """
    if size is None or size < 4:
        return 1, 1, size
    return 2 + size % 2, 2, size // 2
