"""Filters of layers: numbers for each pixel, or for each steerable filter."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_equiattn import _checks
from keras_equiattn import groups
from keras_equiattn.layers.base.group_layer import GroupLayer
from keras_equiattn.layers.base.initializers import fresh
from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Shape
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.group.bases import FILTER_BASES
from keras_equiattn.ops.group.bases import steerable_basis


class FilterLayer(GroupLayer):
    """Base of layers with weights that are functions of the offset.

    With the basis "pixel" such a weight is a variable `(rows, columns, ...)`.
    With "steerable" it is `(count, ...)`, the coefficients of the filters of
    `ops.steerable_basis`, which start as those of a weight of pixels would.

    Args:
        filter_basis: "pixel", "steerable" or None, which is "pixel" for groups
            that act on the grid, and "steerable" for others.
        **kwargs: of `GroupLayer`.
    """

    def __init__(self, filter_basis: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if filter_basis is None:
            on_grid = self.group.acts_on_grid
            filter_basis = "pixel" if on_grid else "steerable"
        self.filter_basis = _checks.choice(
            filter_basis, "filter_basis", FILTER_BASES
        )

    def add_filters(
        self, name: str, shape: Shape, initializer: Any, **options: Any
    ) -> Any:
        """A new weight that is a function of the offset.

        Args:
            name: of the variable.
            shape: `(rows, columns, ...)`.
            initializer: what a weight of this shape starts as.
            **options: of `add_weight`.
        """
        if self.filter_basis == "steerable":
            rows, columns = shape[:2]
            if rows != columns:
                raise ValueError(
                    f"{self._label()} has steerable filters, which must be "
                    f"square. Received: {rows} rows and {columns} columns"
                )
            initializer = _coefficients(initializer, shape)
            shape = (_basis(rows).shape[1], *shape[2:])
        return self.add_weight(
            name=name, shape=shape, initializer=initializer, **options
        )

    def filters_of(self, weight: Any, size: int) -> Tensor:
        """The values `(rows, columns, ...)` of a weight of `add_filters`.

        Args:
            weight: the variable.
            size: rows and columns.
        """
        weight = ops.convert_to_tensor(weight)
        if self.filter_basis == "pixel":
            return weight
        basis = backend.constant(_basis(size), weight, weight.dtype)
        rest = tuple(weight.shape[1:])
        pixels = basis @ ops.reshape(weight, (weight.shape[0], -1))
        return ops.reshape(pixels, (size, size, *rest))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "filter_basis": self.filter_basis}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        # Before there was a choice, all filters were of pixels.
        return super().from_config({"filter_basis": "pixel", **config})


def _basis(size: int) -> np.ndarray:
    """`(size * size, count)`: the steerable filters as they are."""
    return steerable_basis(groups.get("z2"), size)[0]


def _coefficients(initializer: Any, shape: Shape) -> Callable[..., Tensor]:
    """An initialiser of coefficients, from one of pixels.

    Pixels are projected on the steerable filters, which leaves out some of
    their variance. A factor puts it back: the filters give as large values as
    those of pixels would.
    """
    basis = _basis(shape[0])
    factor = np.sqrt(basis.shape[0] / basis.shape[1])
    if initializer is None:
        initializer = keras.initializers.GlorotUniform()
    initializer = fresh(keras.initializers.get(initializer))

    def initialize(shape_of_weight: Shape, dtype: Any = None) -> Tensor:
        values = ops.convert_to_tensor(initializer(shape, dtype=dtype), dtype)
        values = ops.reshape(values, (len(basis), -1))
        projection = ops.convert_to_tensor(factor * basis.T, dtype)
        return ops.reshape(projection @ values, shape_of_weight)

    return initialize
