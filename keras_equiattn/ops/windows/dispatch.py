"""Which module computes the window form, and why.

The only place that chooses, and that holds what was tuned.
"""

from types import ModuleType

from keras_equiattn.ops import backend
from keras_equiattn.ops.windows import planes
from keras_equiattn.ops.windows import products
from keras_equiattn.ops.windows import tiles
from keras_equiattn.ops.windows import views
from keras_equiattn.ops.windows.form import Form
from keras_equiattn.ops.windows.form import Keys

# Channels of a head from which products of tiles are worth what they copy. With
# 8 (SASA 5 x 5) and 16 (ACmix 7 x 7) they move 0.53 and 0.34 of the bytes of
# `products`, and take 0.8 to 1.5 times its time; with 4 (ACmix on p4) 0.62 and
# 1.6 times (steps of 64 or 128 images of 32 x 32 with 64 channels, AMD EPYC,
# two cores, PyTorch 2.13).
TILED_CHANNELS = 8


def choose(form: Form, k: Keys, weighted: bool) -> ModuleType:
    """The module that computes derivatives of the form with these keys.

    Args:
        form: what is computed.
        k: the keys, which say where it is computed.
        weighted: whether the keys have weights.
    """
    target = backend.find_target(k)
    if target.compiler == "xla":
        return planes
    if target.compiler == "inductor":
        return views
    channels = k.shape[-1] // form.heads
    if target.compiler is None and not weighted and channels >= TILED_CHANNELS:
        return tiles
    return products
