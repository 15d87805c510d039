"""Filters of layers: numbers for each pixel, or for each steerable filter."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_equiattn import _checks
from keras_equiattn.layers.base.group_layer import GroupLayer
from keras_equiattn.layers.base.initializers import fresh
from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Shape
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.group.bases import default_basis
from keras_equiattn.ops.group.bases import FILTER_BASES
from keras_equiattn.ops.group.bases import steerable_basis


class FilterLayer(GroupLayer):
    """Base of layers with weights that are functions of the offset.

    With the basis "pixel" such a weight is a variable `(rows, columns, ...)`.
    With "steerable" it is `(count, ...)`, the coefficients of the filters of
    `ops.steerable_basis`. They start as the projections of a weight of pixels,
    times the factor that gives the filters the variance of the pixels, unless
    `add_filters` gets `keeps_variance=False`. Axes before rows and columns stay
    before `count`.

    Args:
        filter_basis: "pixel", "steerable" or None, which is "pixel" for groups
            that act on the grid, and "steerable" for others.
        **kwargs: arguments of `GroupLayer`.
    """

    # Whether filters are multiplied with each other, as `steerable_basis` asks.
    multiplies_filters = False

    def __init__(self, filter_basis: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if filter_basis is None:
            filter_basis = default_basis(self.group)
        self.filter_basis = _checks.choice(
            filter_basis, "filter_basis", FILTER_BASES
        )

    def check_filters(self, name: str, size: tuple[int, int]) -> None:
        """Raises if steerable filters of this size are not square."""
        if self.filter_basis == "steerable" and size[0] != size[1]:
            raise ValueError(
                "Steerable filters must be square. Received: "
                f"{name}={size}, filter_basis='steerable'"
            )

    def add_filters(
        self,
        name: str,
        shape: Shape,
        initializer: Any,
        axis: int = 0,
        keeps_variance: bool = True,
        **options: Any,
    ) -> Any:
        if self.filter_basis == "steerable":
            basis = self._basis(shape[axis])
            initializer = _coefficients(
                initializer, shape, axis, basis, keeps_variance
            )
            shape = (*shape[:axis], basis.shape[1], *shape[axis + 2 :])
        return super().add_filters(name, shape, initializer, **options)

    def filters_of(self, weight: Any, size: int, axis: int = 0) -> Tensor:
        weight = super().filters_of(weight, size, axis)
        if self.filter_basis == "pixel":
            return weight
        basis = backend.constant(self._basis(size), weight, weight.dtype)
        outer, rest = (
            tuple(weight.shape[:axis]),
            tuple(weight.shape[axis + 1 :]),
        )
        pixels = basis @ ops.reshape(weight, (*outer, weight.shape[axis], -1))
        return ops.reshape(pixels, (*outer, size, size, *rest))

    def _basis(self, size: int) -> np.ndarray:
        """`(size * size, count)`: the steerable filters as they are."""
        return steerable_basis("z2", size, self.multiplies_filters)[0]

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "filter_basis": self.filter_basis}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        # Before there was a choice, all filters were of pixels.
        return super().from_config({"filter_basis": "pixel", **config})


def _coefficients(
    initializer: Any,
    shape: Shape,
    axis: int,
    basis: np.ndarray,
    keeps_variance: bool,
) -> Callable[..., Tensor]:
    """An initializer of coefficients, from one of pixels.

    Pixels are projected on the steerable filters, which leaves out some of
    their variance. With `keeps_variance` a factor puts it back: the filters
    give as large values as those of pixels would.
    """
    factor = 1.0
    if keeps_variance:
        factor = np.sqrt(basis.shape[0] / basis.shape[1])
    if initializer is None:
        initializer = keras.initializers.GlorotUniform()
    initializer = fresh(keras.initializers.get(initializer))

    def initialize(shape_of_weight: Shape, dtype: Any = None) -> Tensor:
        values = ops.convert_to_tensor(initializer(shape, dtype=dtype), dtype)
        values = ops.reshape(values, (*shape[:axis], len(basis), -1))
        projection = ops.convert_to_tensor(factor * basis.T, dtype)
        return ops.reshape(projection @ values, shape_of_weight)

    return initialize
