"""Networks of the papers, by constructor or by name."""

from collections.abc import Callable
from typing import Any

import keras

from keras_equiattn import _checks
from keras_equiattn.applications.rotmnist import RotMNISTCNN

__all__ = ["RotMNISTCNN", "get_model", "list_models"]

_MODELS: dict[str, tuple[Callable[..., keras.Model], dict[str, Any]]] = {
    "rotmnist_z2cnn": (RotMNISTCNN, {"group": "z2"}),
    "rotmnist_p4cnn": (RotMNISTCNN, {"group": "p4"}),
    "rotmnist_p4cnn_big11": (RotMNISTCNN, {"group": "p4", "filters": 11}),
    "rotmnist_p4cnn_big15": (RotMNISTCNN, {"group": "p4", "filters": 15}),
    "rotmnist_p4cnn_big19": (RotMNISTCNN, {"group": "p4", "filters": 19}),
    "rotmnist_p4cnn_full": (
        RotMNISTCNN,
        {"group": "p4", "attention": "full"},
    ),
    "rotmnist_p4cnn_channel": (
        RotMNISTCNN,
        {"group": "p4", "attention": "channel"},
    ),
    "rotmnist_p4cnn_spatial": (
        RotMNISTCNN,
        {"group": "p4", "attention": "spatial"},
    ),
    "rotmnist_p4cnn_input": (
        RotMNISTCNN,
        {"group": "p4", "attention": "input"},
    ),
    "rotmnist_p4cnn_co": (RotMNISTCNN, {"group": "p4", "attention": "co"}),
    "rotmnist_p4mcnn": (RotMNISTCNN, {"group": "p4m"}),
    "rotmnist_p8cnn": (RotMNISTCNN, {"group": "p8"}),
}


def list_models() -> list[str]:
    """Names that `get_model` takes."""
    return sorted(_MODELS)


def get_model(name: str, **overrides: Any) -> keras.Model:
    """Builds a registered network.

    Args:
        name: one of `list_models()`.
        **overrides: arguments of its constructor, in place of the registered
            ones: `classes`, `input_shape`, `normalization`, `weights`, ...

    Returns:
        A functional `keras.Model`.

    Raises:
        ValueError: for an unknown name, or from the constructor.
    """
    _checks.known_name(name, "model", list_models())
    constructor, arguments = _MODELS[name]
    return constructor(**{"name": name, **arguments, **overrides})
