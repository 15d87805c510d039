"""How a linear map on a group is computed, and why.

The basis, the steps of a loop over feature maps and the form of a transform are
chosen here, and the constants of the choice stand here with what was measured.
"""

import keras

from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.numerics import is_half
from keras_equiattn.ops.numerics import part_size

# The number of values per pixel from which on a training step by blocks takes
# less time on a CPU than one by a matrix. This holds for each of p2m, p4, p4m,
# p8, p8m and p16 in single precision, except for p4 under JAX with 192 values,
# see benchmarks/results/pointwise-<backend>-<date>.json.
# Other groups and double precision were not measured and take blocks as well,
# half precision was not measured and takes the matrix. With 128 values PyTorch
# would take 0.7 to 0.8 times as long for a map by itself, but ResNet29 on p4,
# most of whose maps have at most as many, gains nothing from it
# (resnet29-torch-2026-11-29.json). The forward pass alone takes less time as
# well, except that it takes up to 1.5 times as long under JAX with fewer than
# 384 values, and up to 1.15 times as long under TensorFlow with 384. On a GPU a
# step took 2.3 to 2.8 times as long with 512 values
# (pointwise-torch-gpu-2026-11-26.json).
FEWEST_VALUES = {"jax": 192, "tensorflow": 384, "torch": 192}
# Values of a feature map that one step takes on a CPU: 8 MiB. With half and
# four times as many, multi-head attention takes 0.97 and 1.09 times as long
# under JAX (benchmarks/results/tuning-jax-128-2026-11-27.json, measured before
# the loop took all images as one tall image).
VALUES_OF_STEP = 2**21


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


def by_blocks(
    x: Float[Tensor, "batch height width order channels"],
    filters: int,
    basis: str | None,
) -> bool:
    """Whether a linear map is computed by blocks, see `group_linear`.

    Args:
        x, filters: see `linear_basis`.
        basis: "regular", "irreps", or None for what takes less time.
    """
    basis = basis or linear_basis(x, filters)
    return basis == "irreps" and x.shape[-2] > 1


def convolution_basis(
    x: Float[Tensor, "batch height width order channels"], filters: int
) -> str:
    """The same as `linear_basis`, for convolutions with filters of one pixel.

    TensorFlow cannot differentiate the gradient of blocks, but it can
    differentiate that of a convolution.
    """
    if keras.backend.backend() == "tensorflow":
        return "regular"
    return linear_basis(x, filters)


def loops_over_rows(x: Float[Tensor, "batch height width _ _"]) -> bool:
    """Whether linear maps take some rows of feature maps, or sums, at a time.

    XLA on CPUs gets a loop. What lies between a transform and a product then
    stays in the cache, and XLA cannot make the transforms of the loop part of
    what comes before or after it, which it would compute again for each term of
    a sum. On several devices there is no loop, since each of its steps would
    add up gradients over all of them.
    """
    if not backend.find_target(x).xla_on_cpu or backend.may_be_sharded():
        return False
    return all(isinstance(n, int) for n in x.shape[1:3])


def rows_of_step(
    x: Float[Tensor, "batch height width _ _"], values: int
) -> int | None:
    """How many rows of each image a step of the loop takes; None for no loop.

    There are at least two steps, and a smaller one after them if some rows are
    left.

    Args:
        x: feature maps, or their sums.
        values: values per pixel of the widest tensor that is read or written.
    """
    batch, height, width = x.shape[:3]
    if height < 2:
        return None
    # A number of images that is not known counts as one.
    row = width * values * (batch if isinstance(batch, int) else 1)
    most = max(VALUES_OF_STEP // max(row, 1), 1)
    most = min(most, height // 2)
    divisor = max(n for n in range(1, most + 1) if height % n == 0)
    # Without a divisor near the limit, some rows are left for a smaller step.
    return divisor if 2 * divisor > most else part_size(height, most)


def written_as_additions(x: Float[Tensor, "..."]) -> bool:
    """Whether a transform is written as additions of group elements.

    Operators that run one by one would read the elements again and again, so
    without a compiler it is one product with a matrix.
    """
    return backend.find_target(x).fuses
