"""Losses that do not change when image and label are turned together."""

from typing import Any

import keras
from keras import ops

from keras_equiattn import _checks
from keras_equiattn.ops._types import Tensor

__all__ = ["AngularLoss"]


@keras.saving.register_keras_serializable(package="keras_equiattn")
class AngularLoss(keras.losses.Loss):
    """How far angles are from those that they should be: `1 - cos(a - b)`.

    It is 0 for the same direction and 2 for the opposite one. With
    `signed=False` it is `1 - cos(2 a - 2 b)`, which half a turn leaves as it
    is: 0 for the same axis and 2 for one across.

    Args:
        signed: whether angles are those of vectors, not of axes.
        reduction: the reduction, see `keras.losses.Loss`.
        **kwargs: `name`, `dtype`.

    Call arguments:
        y_true: angles in radians.
        y_pred: angles in radians of the same shape, for example of
            `layers.GroupToAngle2D`.
        sample_weight: weights of the angles, one for each entry of all axes but
            the last.

    Returns:
        A number; the mean over the last axis for each entry of the others with
        `reduction=None`.

    Example:
        >>> loss = AngularLoss(signed=False)
        >>> across = keras.ops.convert_to_tensor([[0.5 * 3.14159265]])
        >>> round(float(loss(keras.ops.zeros((1, 1)), across)), 3)
        2.0

    References:
        - Mardia and Jupp, Directional Statistics, section 2.3
    """

    def __init__(
        self,
        signed: bool = True,
        reduction: str | None = "sum_over_batch_size",
        **kwargs: Any,
    ) -> None:
        super().__init__(reduction=reduction, **kwargs)
        self.signed = _checks.flag(signed, "signed")

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        y_true = ops.convert_to_tensor(y_true)
        y_pred = ops.convert_to_tensor(y_pred)
        shapes = tuple(y_true.shape), tuple(y_pred.shape)
        if not _checks.fits(*shapes):
            raise ValueError(
                "`y_true` and `y_pred` must be angles of the same shape. "
                f"Received: y_true.shape={shapes[0]}, y_pred.shape={shapes[1]}"
            )
        frequency = 1 if self.signed else 2
        # Accurate for small differences, unlike `1 - cos`.
        half = ops.sin(frequency / 2 * (y_pred - y_true))
        return ops.mean(2 * half * half, axis=-1)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "signed": self.signed}
