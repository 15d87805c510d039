"""The loss of recipes that smooth labels."""

from typing import Any

import keras
from keras import ops

from keras_equiattn import _checks
from keras_equiattn.applications.training.optimizers import PACKAGE


@keras.saving.register_keras_serializable(package=PACKAGE)
class SmoothedCrossentropy(keras.losses.Loss):
    """Cross-entropy of logits with integer labels, smoothed.

    The target gives `1 - smoothing` to the label and shares `smoothing` among
    the other classes. Keras' own smoothing shares it among all classes, the
    label too.

    Args:
        smoothing: The part of a target that the label does not get, in [0, 1).
        **kwargs: Arguments of `keras.losses.Loss`.
    """

    def __init__(self, smoothing: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.smoothing = check_smoothing(smoothing, "smoothing")

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Losses of the examples."""
        of_label = keras.losses.sparse_categorical_crossentropy(
            y_true, y_pred, from_logits=True
        )
        of_all = -ops.sum(ops.log_softmax(y_pred, axis=-1), axis=-1)
        others = y_pred.shape[-1] - 1
        if not others:
            raise ValueError(
                "Labels of one class cannot be smoothed. Received: logits of "
                f"shape {tuple(y_pred.shape)}"
            )
        other = self.smoothing / others
        return (1 - self.smoothing) * of_label + other * (of_all - of_label)

    def get_config(self) -> dict[str, Any]:
        """Configuration, `smoothing` included."""
        return {**super().get_config(), "smoothing": self.smoothing}


def check_smoothing(value: Any, name: str) -> float:
    """How much of a target the label does not get."""
    return _checks.number(
        value, name, "a number in [0, 1)", lambda number: 0 <= number < 1
    )
