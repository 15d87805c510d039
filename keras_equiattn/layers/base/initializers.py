"""Wrappers for what the initializers of Keras cannot do alone."""

import math
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_equiattn.ops._types import Shape
from keras_equiattn.ops._types import Tensor


def fresh(initializer: Any) -> Any:
    """A copy that draws values of its own.

    An initializer repeats its values when it is used again. A copy draws new
    ones, unless the initializer has a seed.
    """
    if isinstance(initializer, keras.initializers.Initializer):
        return initializer.clone()
    return initializer


def with_fan_in(initializer: Any, fan_in: int) -> Callable[..., Tensor]:
    """An initializer that is given the shape `(fan_in, everything else)`.

    Keras reads the fan-in off the shape of a variable, which is wrong where
    weights of several independent maps share one variable.
    """

    # None is what Keras' layers take for their default.
    if initializer is None:
        initializer = keras.initializers.GlorotUniform()
    initializer = fresh(initializer)

    def initialize(shape: Shape, dtype: str | None = None) -> Tensor:
        size = math.prod(int(n) for n in shape if n is not None)
        values = initializer((fan_in, size // fan_in), dtype=dtype)
        # A function of the user's may return an array of another dtype.
        values = ops.convert_to_tensor(values, dtype)
        return ops.reshape(values, tuple(shape))

    return initialize


def uniform_by_fan_in() -> keras.initializers.Initializer:
    """Uniform within one over the square root of the fan-in."""
    return keras.initializers.VarianceScaling(1 / 3, "fan_in", "uniform")
