"""Pooling of feature maps over space or over the group."""

from typing import Any

from keras import ops

from keras_equiattn import _checks
from keras_equiattn.ops import backend
from keras_equiattn.ops._arguments import checked
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.group.convolution import fold_channels
from keras_equiattn.ops.group.convolution import unfold_channels
from keras_equiattn.ops.numerics import mean

MODES = ("max", "mean")
# The names of the mean in other libraries.
ALIASES = {"avg": "mean", "average": "mean"}


def pooling_mode(mode: str) -> str:
    """The mode of pooling that this name stands for, one of `MODES`."""
    name = ALIASES.get(mode, mode) if isinstance(mode, str) else mode
    return str(_checks.choice(name, "mode", MODES))


@checked()
def spatial_pool(
    x: Float[Tensor, "batch height width order channels"],
    pool_size: int | tuple[int, int],
    strides: int | tuple[int, int],
    mode: str = "max",
) -> Float[Tensor, "batch new_height new_width order channels"]:
    """Maximum or mean over windows in space, without padding."""
    pool_size = _checks.pair(pool_size, "pool_size")
    strides = _checks.pair(strides, "strides")
    pools: Any = {"max": ops.max_pool, "mean": ops.average_pool}
    pool = pools[pooling_mode(mode)]
    for n, k in zip(tuple(x.shape)[1:3], pool_size, strict=True):
        if isinstance(n, int) and k > n:
            raise ValueError(
                "The window of pooling must fit into the image. Received: "
                f"pool_size={pool_size}, x.shape={tuple(x.shape)}"
            )
    pooled = pool(
        fold_channels(x),
        pool_size,
        strides,
        padding="valid",
        data_format="channels_last",
    )
    return unfold_channels(pooled, x.shape[3])


@checked()
def group_pool(
    x: Float[Tensor, "a b c d e"], mode: str = "max", axis: int = 3
) -> Float[Tensor, "p q r s"]:
    """Maximum or mean over the group axis of feature maps."""
    _checks.choice(axis, "axis", (3, 4))
    if x.shape[axis] == 0:
        raise ValueError(
            "The group axis must have a size of at least one. "
            f"Received: x.shape={tuple(x.shape)}, axis={axis}"
        )
    # Some backends refuse the maximum of no numbers. The mean has its shape.
    if pooling_mode(mode) == "max" and 0 not in tuple(x.shape):
        return backend.largest(x, axis)
    return mean(x, axis)
