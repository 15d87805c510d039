"""Settings of all layers, in addition to those of `keras.config`.

Most layers with attention have custom gradients, which recompute what would
take memory to keep. Under TensorFlow and PyTorch such a gradient cannot be
differentiated. Disable these gradients to take second derivatives of a whole
model, even of one that was loaded from a file::

    >>> import keras_equiattn
    >>> keras_equiattn.config.disable_recompute()
    >>> keras_equiattn.config.is_recompute_enabled()
    False
    >>> keras_equiattn.config.enable_recompute()

As with `keras.config`, a change does not reach functions that are compiled
already, such as that of `fit`.
"""

_recompute = True


def disable_recompute() -> None:
    """Leaves gradients to the backend, which can differentiate them again.

    Every layer then acts as with `recompute=False` and `chunk_size=None`,
    except that linear maps by blocks stay in blocks. Its result is the same to
    rounding, and it holds more in memory.
    """
    global _recompute
    _recompute = False


def enable_recompute() -> None:
    """Undoes `disable_recompute`: layers act as their arguments say."""
    global _recompute
    _recompute = True


def is_recompute_enabled() -> bool:
    """Whether layers may compute again what they did not keep."""
    return _recompute
