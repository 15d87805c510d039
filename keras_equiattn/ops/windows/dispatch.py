"""Which module computes the window form, and why.

The only place that chooses, and that holds what was tuned.
"""

from types import ModuleType

from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.windows import bands
from keras_equiattn.ops.windows import planes
from keras_equiattn.ops.windows import products
from keras_equiattn.ops.windows import tiles
from keras_equiattn.ops.windows import views
from keras_equiattn.ops.windows.form import Form

# Neighbours up to which XLA gets a loop over the pixels for each.
WRITTEN_OUT = 64
# Neighbours up to which they are cheaper one by one than as matrix products.
ONE_BY_ONE = 160
# Neighbours and channels of a head from which tiles are cheaper on CPUs
# without a compiler: those of 3 x 3 are too few, and 8 channels about the same.
TILED_NEIGHBOURS = 9
TILED_CHANNELS = 16


def choose(form: Form, x: Tensor, k: Tensor, weighted: bool) -> ModuleType:
    """The module for these tensors.

    Args:
        form: what is computed.
        x: queries, or a tensor of the same first axes.
        k: keys.
        weighted: whether the keys have weights.
    """
    target = backend.find_target(x, k)
    known = None not in (*x.shape[1:], *k.shape[2:])
    xla = target.compiler == "xla"
    count = len(form.neighbours)
    if target.compiler == "inductor":
        return views
    eager = target.eager_on_cpu and not backend.compiles()
    if eager and known and not weighted and _fills_tiles(form, k.shape[-1]):
        return tiles
    if count > (WRITTEN_OUT if xla else ONE_BY_ONE) and not weighted:
        # All pairs of pixels in a row pay off where windows hold many of them.
        reach, seen = form.reach[1], k.shape[3]
        if xla or seen is None or 2 * reach >= seen - reach:
            return bands
    if xla and known and count <= WRITTEN_OUT:
        return planes
    return products


def _fills_tiles(form: Form, channels: int) -> bool:
    """Whether products of tiles have enough to do for what they copy."""
    large = len(form.neighbours) > TILED_NEIGHBOURS
    return large and channels // form.heads >= TILED_CHANNELS
