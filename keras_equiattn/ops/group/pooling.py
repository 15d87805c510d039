"""Pooling of feature maps over space or over the group."""

from typing import Any
from typing import TypeAlias

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
SPATIAL_MODES = (*MODES, "binomial")
# The names of the mean in other libraries.
ALIASES = {"avg": "mean", "average": "mean"}

# Windows and strides.
Passes: TypeAlias = list[tuple[tuple[int, int], tuple[int, int]]]


def pooling_mode(mode: str, modes: tuple[str, ...] = MODES) -> str:
    """The mode of pooling that this name stands for, one of `modes`."""
    name = ALIASES.get(mode, mode) if isinstance(mode, str) else mode
    return str(_checks.choice(name, "mode", modes))


def pooling_passes(
    pool_size: tuple[int, int], strides: tuple[int, int], mode: str
) -> Passes:
    """The windows and strides of the poolings, one after the other.

    Binomial pooling is a sequence of means over two pixels: `k - 1` of them
    have the binomial coefficients as weights of a window of `k` pixels. The
    last one takes the strides. Other modes are one pooling.
    """
    if mode != "binomial":
        return [(pool_size, strides)]
    rows, columns = pool_size
    *means, last = (
        (2 if n < rows else 1, 2 if n < columns else 1)
        for n in range(1, max(rows, columns, 2))
    )
    return [*((window, (1, 1)) for window in means), (last, strides)]


@checked()
def spatial_pool(
    x: Float[Tensor, "batch height width order channels"],
    pool_size: int | tuple[int, int],
    strides: int | tuple[int, int],
    mode: str = "max",
) -> Float[Tensor, "batch new_height new_width order channels"]:
    """Maximum or mean over windows in space, without padding.

    "binomial" is a mean whose weights are binomial coefficients along both
    axes. It takes as many passes over the feature map as the window has pixels
    along an axis, less one.

    Args:
        x: feature maps on any group.
        pool_size, strides: integers or pairs.
        mode: "max", "mean" (or "avg", "average") or "binomial".

    Returns:
        Feature maps with a pixel for each window.

    Raises:
        ValueError: for a window larger than the image, and an unknown mode.
    """
    pool_size = _checks.pair(pool_size, "pool_size")
    strides = _checks.pair(strides, "strides")
    mode = pooling_mode(mode, SPATIAL_MODES)
    pool: Any = ops.max_pool if mode == "max" else ops.average_pool
    for n, k in zip(tuple(x.shape)[1:3], pool_size, strict=True):
        if isinstance(n, int) and k > n:
            raise ValueError(
                "The window of pooling must fit into the image. Received: "
                f"pool_size={pool_size}, x.shape={tuple(x.shape)}"
            )
    pooled = fold_channels(x)
    for window, of_window in pooling_passes(pool_size, strides, mode):
        pooled = pool(
            pooled,
            window,
            of_window,
            padding="valid",
            data_format="channels_last",
        )
    return unfold_channels(pooled, x.shape[3])


@checked()
def group_pool(
    x: Float[Tensor, "a b c d e"], mode: str = "max", axis: int = 3
) -> Float[Tensor, "p q r s"]:
    """Maximum or mean over the group axis of feature maps.

    Args:
        x: feature maps on any group, with channels last or first.
        mode: "max" or "mean" (or "avg", "average").
        axis: the group axis: 3 with channels last, 4 with channels first.

    Returns:
        Images, without the group axis.

    Raises:
        ValueError: for an unknown mode or axis, and an empty group axis.
    """
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
