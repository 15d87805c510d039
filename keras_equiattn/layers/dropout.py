"""Dropout that treats all poses of a channel alike."""

from typing import Any

import keras

from keras_equiattn import _checks
from keras_equiattn.layers.base.group_layer import as_floats
from keras_equiattn.layers.base.group_layer import check_feature_map
from keras_equiattn.ops._types import Shape
from keras_equiattn.ops._types import Tensor


@keras.saving.register_keras_serializable(package="keras_equiattn")
class GroupDropout(keras.layers.Dropout):
    """Drops values of a feature map in all poses at once.

    Keras' `Dropout` drops each pose by itself, so that the remaining poses of a
    pixel say more about the draw than about the image.

    Args:
        rate: the share of values that is dropped, at least 0 and below 1.
        data_format: "channels_last", "channels_first" or None (what
            `keras.config.image_data_format()` says).
        seed: an integer, or None for a seed of Keras.
        **kwargs: `name`, `dtype`.

    Call arguments:
        inputs: feature maps on any group.
        training: whether values are dropped.

    Input shape:
        "channels_last": `(batch, height, width, order, channels)`;
        "channels_first": `(batch, channels, height, width, order)`.

    Output shape:
        The shape of the input.

    Symmetry:
        Equivariant to the bit in inference. In training the same values are
        dropped in all poses, so a permutation of the poses alone permutes
        those of the output; different pixels are drawn independently.

    Raises:
        ValueError: for bad arguments, in `__init__`; for inputs that are no
            feature maps, when they are first seen.

    Example:
        >>> x = keras.ops.ones((2, 8, 8, 4, 10))
        >>> tuple(GroupDropout(0.5)(x, training=True).shape)
        (2, 8, 8, 4, 10)

    References:
        - [Srivastava et al., 2014](https://jmlr.org/papers/v15/srivastava14a.html)
    """

    def __init__(
        self,
        rate: float,
        data_format: str | None = None,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.data_format = _checks.data_format(data_format)
        axis = 4 if self.data_format == "channels_first" else 3
        shape = tuple(1 if n == axis else None for n in range(5))
        super().__init__(
            _checks.rate(rate, "rate"),
            noise_shape=shape,
            seed=_checks.seed(seed),
            **kwargs,
        )

    def call(self, inputs: Tensor, training: bool = False) -> Tensor:
        check_feature_map(self, inputs.shape)
        # Keras leaves integers as they are.
        return super().call(as_floats(inputs, self.compute_dtype), training)

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        check_feature_map(self, input_shape)
        return super().compute_output_shape(input_shape)

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        own = {"data_format": self.data_format}
        return own | {n: v for n, v in config.items() if n != "noise_shape"}
