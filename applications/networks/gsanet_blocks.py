"""The parts of `GSANet`: its layers, its blocks, its stages."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_equiattn import _checks
from keras_equiattn import groups
from keras_equiattn import layers
from keras_equiattn.applications.networks.common import ends
from keras_equiattn.applications.networks.common import sizes
from keras_equiattn.ops.geometry import WINDOW_SHAPES
from keras_equiattn.ops.group.pooling import MODES

# PyTorch's default, which the authors use.
BATCH_NORM_EPSILON = 1e-5
NORMS = ("layer", "batch")


# Saved models know it by this name.
@keras.saving.register_keras_serializable("keras_equiattn", "_SpatialSum")
class SpatialSum(keras.layers.Layer):
    """Sums over space. It is a layer, so that the sum has a name."""

    def call(self, inputs: Any) -> Any:
        return ops.sum(inputs, axis=(1, 2), keepdims=True)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return (input_shape[0], 1, 1, *input_shape[3:])


@dataclasses.dataclass(frozen=True)
class Design:
    """The settings of all blocks. The fields are arguments of `GSANet`."""

    group: groups.Group
    kernel_size: int | None
    window_shape: str
    num_heads: int
    norm: str
    norm_between: bool
    head: str
    attention_dropout: float
    value_dropout: float
    input_dropout: float
    pool_dropout: float
    epsilon: float

    def __post_init__(self) -> None:
        _checks.window_size(self.kernel_size, "kernel_size")
        known = WINDOW_SHAPES if self.kernel_size else ("square",)
        _checks.choice(self.window_shape, "window_shape", known)
        _checks.integer(self.num_heads, "num_heads")
        _checks.choice(self.norm, "norm", NORMS)
        _checks.flag(self.norm_between, "norm_between")
        _checks.choice(self.head, "head", MODES)
        for name in ("attention", "value", "input", "pool"):
            name = f"{name}_dropout"
            _checks.rate(getattr(self, name), name)
        _checks.number(
            self.epsilon, "epsilon", "a positive number", lambda n: n > 0
        )

    def attention(self, x: Any, filters: int, name: str) -> Any:
        """Applies self-attention to images or feature maps."""
        lifting = len(x.shape) == 4
        layer = (
            layers.LiftingSelfAttention2D
            if lifting
            else layers.GroupSelfAttention2D
        )
        return layer(
            filters,
            filters // 2,
            self.num_heads,
            self.kernel_size,
            group=self.group,
            attention_dropout=self.attention_dropout,
            epsilon=self.epsilon,
            window_shape=self.window_shape,
            kernel_initializer=ends.he_normal(),
            data_format="channels_last",
            name=name,
        )(x)

    def normalize(self, x: Any, name: str) -> Any:
        """Normalises feature maps."""
        if self.norm == "batch":
            return keras.layers.BatchNormalization(
                momentum=0.9, epsilon=BATCH_NORM_EPSILON, name=name
            )(x)
        return keras.layers.GroupNormalization(
            groups=1, epsilon=self.epsilon, name=name
        )(x)

    def norm_silu(self, x: Any, names: str) -> Any:
        """Applies normalisation and SiLU.

        Args:
            x: feature maps.
            names: the pattern of the names of the layers: `"lift_{}"` gives
                `lift_norm` and `lift_silu`.
        """
        x = self.normalize(x, names.format("norm"))
        return keras.layers.Activation("silu", name=names.format("silu"))(x)


def block(design: Design, x: Any, width: int, crop: int, name: str) -> Any:
    """Applies attention, then two dense layers, each added to its input.

    Args:
        design: the settings of the blocks.
        x: feature maps `(batch, height, width, order, channels)`.
        width: channels of the result.
        crop: pixels that the block cuts off at every border.
        name: the beginning of the names of the layers.
    """
    y = design.norm_silu(x, f"{name}_{{}}1")
    y = design.attention(y, width, f"{name}_attention")
    y = design.norm_silu(y, f"{name}_{{}}2")
    y = dropout(y, design.value_dropout, f"{name}_dropout")
    y = _crop(y, crop, f"{name}_crop")
    shortcut = _crop(x, crop, f"{name}_shortcut_crop")
    if x.shape[-1] != width:
        shortcut = _dense(shortcut, width, f"{name}_shortcut")
    x = keras.layers.Add(name=f"{name}_add1")([y, shortcut])

    y = _dense(x, width // 2, f"{name}_dense1")
    y = design.norm_silu(y, f"{name}_{{}}3")
    y = _dense(y, width, f"{name}_dense2")
    y = design.normalize(y, f"{name}_norm4")
    x = keras.layers.Add(name=f"{name}_add2")([y, x])
    return design.norm_silu(x, f"{name}_{{}}5") if design.norm_between else x


def _dense(x: Any, width: int, name: str) -> Any:
    return keras.layers.Dense(
        width, kernel_initializer=ends.he_normal(), name=name
    )(x)


def dropout(x: Any, rate: float, name: str) -> Any:
    """Applies dropout, if the rate is not 0."""
    return keras.layers.Dropout(rate, name=name)(x) if rate else x


def _crop(x: Any, crop: int, name: str) -> Any:
    if not crop:
        return x
    return keras.layers.Cropping3D(
        (crop, crop, 0), data_format="channels_last", name=name
    )(x)


@dataclasses.dataclass(frozen=True)
class Stage:
    """Blocks of one width.

    Attributes:
        width: channels.
        crops: pixels that each block cuts off at every border.
        pools: whether 2 x 2 pooling follows.
    """

    width: int
    crops: tuple[int, ...]
    pools: bool


def make_stages(
    filters: int,
    block_sizes: Sequence[int],
    expansion: int | Sequence[int],
    crops: int | Sequence[int],
    last_pool: bool,
) -> list[Stage]:
    """Checks the arguments of `GSANet` that stages are made of."""
    # Keys have half as many channels, of which attention needs at least three.
    width = _checks.integer(filters, "filters", 6)
    sizes = _block_sizes(block_sizes)
    factors = _integers(expansion, "expansion", len(sizes), "stage", 1)
    cropped = iter(_integers(crops, "crops", sum(sizes), "block", 0))
    _checks.flag(last_pool, "last_pool")
    stages = []
    for index, (size, factor) in enumerate(zip(sizes, factors, strict=True), 1):
        if size:
            width *= factor
        pools = last_pool or index < len(sizes)
        stages.append(
            Stage(width, tuple(next(cropped) for _ in range(size)), pools)
        )
    return stages


def _block_sizes(value: Any) -> tuple[int, ...]:
    try:
        found = tuple(_checks.integer(n, "block_sizes", 0) for n in value)
    except (TypeError, ValueError):
        found = ()
    if not found:
        raise ValueError(
            "`block_sizes` must be non-negative integers, one for each stage. "
            f"Received: {value!r}"
        )
    return found


def _integers(
    value: Any, name: str, length: int, each: str, least: int
) -> tuple[int, ...]:
    """Returns `length` integers, from a sequence of them or from one."""
    found: tuple[int, ...] | None = None
    try:
        several = isinstance(value, Sequence) or np.ndim(value)
        values = value if several else length * [value]
        found = tuple(_checks.integer(n, name, least) for n in values)
    except ValueError:
        pass
    if found is None or len(found) != length:
        kind = "positive" if least else "non-negative"
        raise ValueError(
            f"`{name}` must be a {kind} integer or {length} of them, one for "
            f"each {each} of `block_sizes`. Received: {value!r}"
        )
    return found


def windows(stages: Sequence[Stage]) -> list[sizes.Window]:
    """Returns the windows that feature maps go through."""
    found = []
    for stage in stages:
        # Such a window without padding cuts off `crop` pixels at every border.
        found += [sizes.Window(2 * crop + 1) for crop in stage.crops]
        found += [sizes.Window(2, 2)] if stage.pools else []
    return found
