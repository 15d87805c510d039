"""Types shared by the annotations of this package."""

from collections.abc import Sequence
from typing import Any
from typing import TypeAlias

# Shapes and dtypes in annotations. jaxtyping, which is pure Python, is imported
# only here.
from jaxtyping import Float as Float
from jaxtyping import Shaped as Shaped

# A tensor of whatever backend runs, or a symbolic `keras.KerasTensor`.
Tensor: TypeAlias = Any

# A static shape of integers; None where a size is known only at run time, or a
# symbol where JAX exports a function.
Shape: TypeAlias = Sequence[Any]
