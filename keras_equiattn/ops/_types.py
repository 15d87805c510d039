"""Types shared by the annotations of this package."""

from collections.abc import Sequence
from typing import Any
from typing import TypeAlias

# A tensor of whatever backend runs, or a symbolic `keras.KerasTensor`.
Tensor: TypeAlias = Any

# A static shape; None where a size is known only at run time.
Shape: TypeAlias = Sequence[int | None]
