"""Which module computes the window form, and why.

The only place that chooses, and that holds what was tuned.
"""

from types import ModuleType

from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.windows import planes
from keras_equiattn.ops.windows import products
from keras_equiattn.ops.windows import tiles
from keras_equiattn.ops.windows import views
from keras_equiattn.ops.windows.form import Form

# Channels of a head from which products of tiles are worth what they copy.
TILED_CHANNELS = 8


def choose(form: Form, x: Tensor, k: Tensor, weighted: bool) -> ModuleType:
    """The module for these tensors.

    Args:
        form: what is computed.
        x: queries, or a tensor of the same first axes.
        k: keys.
        weighted: whether the keys have weights.
    """
    target = backend.find_target(x, k)
    if target.compiler == "xla":
        return planes
    if target.compiler == "inductor":
        return views
    channels = k.shape[-1] // form.heads
    if target.compiler is None and not weighted and channels >= TILED_CHANNELS:
        return tiles
    return products
