"""Packages that only some functions need."""

import contextlib
import importlib
from types import ModuleType
from typing import Any

import keras


def optional_import(module: str, extra: str, hint: str = "") -> ModuleType:
    """Imports an optional package, or says how to install it.

    Args:
        module: Name of the module.
        extra: The extra of this library that installs it.
        hint: The end of the message of the error.

    Raises:
        ImportError: The module cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(
            f"{package} is needed here and cannot be imported. Install it "
            f'with: pip install "keras-equiattn[{extra}]"{hint}'
        ) from error


def import_tensorflow(hint: str = "") -> Any:
    """Imports TensorFlow, which under another backend only feeds data."""
    tf = optional_import("tensorflow", "tensorflow", hint)
    if keras.backend.backend() != "tensorflow":
        # It must not claim the GPU's memory; this fails once TensorFlow runs.
        with contextlib.suppress(RuntimeError):
            tf.config.set_visible_devices([], "GPU")
    return tf
