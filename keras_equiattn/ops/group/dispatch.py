"""The basis in which a linear map on a group is computed, and why.

The basis is chosen here, and the constants of the choice stand here with what
was measured. `block_linear` has one constant of its own, and also asks for the
compiler, for the steps of its loop and for single transforms.
"""

import keras

from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.numerics import is_half

# From how many values per pixel on a training step by blocks takes less time on
# a CPU than one by a matrix, for p4, p4m and p8, see
# benchmarks/results/pointwise-<backend>-2026-11-26.json. On a GPU it took twice
# as long with 512 values (pointwise-torch-gpu-2026-11-26.json).
FEWEST_VALUES = {"jax": 192, "tensorflow": 384, "torch": 192}


def linear_basis(
    x: Float[Tensor, "batch height width order channels"], filters: int
) -> str:
    """The basis in which a linear map takes less time, see `group_linear`.

    Args:
        x: the feature maps.
        filters: channels of the result, for each group element.
    """
    target = backend.find_target(x)
    if not backend.has_gradients() or target.device != "cpu" or is_half(x):
        return "regular"
    order, channels = x.shape[-2:]
    fewest = FEWEST_VALUES[keras.backend.backend()]
    # Groups of two elements were not measured.
    pays = order >= 4 and order * min(channels, filters) >= fewest
    return "irreps" if pays else "regular"
