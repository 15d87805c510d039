"""Networks of group self-attention: rotated MNIST, CIFAR-10 and PCam."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_equiattn import _checks
from keras_equiattn import groups
from keras_equiattn import layers
from keras_equiattn.applications import _sizes
from keras_equiattn.applications import building
from keras_equiattn.applications import ends
from keras_equiattn.ops.group.pooling import MODES

# PyTorch's default, which is what the authors have.
BATCH_NORM_EPSILON = 1e-5
NORMS = ("layer", "batch")

# What is registered of each network.
VARIANTS = ("z2", "p4", "p8", "p12", "p16", "z2m", "p4m", "p8m")

# The sizes of the presets, as in the authors' code but for the crops of PCam.
_ROT_MNIST: dict[str, Any] = {
    "filters": 20,
    "block_sizes": (2, 3),
    "crops": (2, 0, 2, 1, 1),
    "input_shape": (28, 28, 1),
    "classes": 10,
}
_CIFAR10: dict[str, Any] = {
    "filters": 96,
    "block_sizes": (2, 2, 2),
    "expansion": (1, 2, 1),
    "crops": 0,
    "norm_between": True,
    "input_dropout": 0.2,
    "pool_dropout": 0.3,
    "input_shape": (32, 32, 3),
    "classes": 10,
}
_PCAM: dict[str, Any] = {
    "filters": 12,
    "block_sizes": (0, 1, 2, 1),
    "expansion": (1, 2, 2, 2),
    "crops": (0, 2, 2, 2),
    "norm_between": True,
    "last_pool": True,
    "input_shape": (96, 96, 3),
    "classes": 2,
}


def GSANet(
    group: str | groups.Group = "p4",
    kernel_size: int | None = 5,
    filters: int = 20,
    block_sizes: Sequence[int] = (2, 3),
    expansion: int | Sequence[int] = 1,
    crops: int | Sequence[int] = (2, 0, 2, 1, 1),
    num_heads: int = 9,
    norm: str = "layer",
    norm_between: bool = False,
    last_pool: bool = False,
    head: str = "max",
    attention_dropout: float = 0.1,
    value_dropout: float = 0.1,
    input_dropout: float = 0.0,
    pool_dropout: float = 0.0,
    epsilon: float = 1e-3,
    input_shape: tuple[int, int, int] = (28, 28, 1),
    classes: int = 10,
    classifier_activation: str | None = None,
    normalization: ends.Statistics | None = None,
    exact: bool = True,
    weights: str | Path | None = None,
    name: str | None = None,
) -> keras.Model:
    """A network of group self-attention, for any group.

    `LiftingSelfAttention2D` with normalisation and SiLU, then stages of blocks
    with 2 x 2 max pooling between them, a linear map without bias to the
    classes, the sum over space and the maximum over the group. A block is

        o = crop(dropout(act(norm(attention(act(norm(x))))))) + crop(shortcut)
        y = o + norm(dense(act(norm(dense(o)))))

    with `GroupSelfAttention2D`, SiLU as activation and half as many channels
    between the two dense layers. The shortcut is `x`, through a dense layer
    where the number of channels changes. Keys of a head have half as many
    channels as the output. The defaults are those of `GSANetRotMNIST`.

    Layers are called `image_dropout`, `lift`, `lift_norm`, `lift_silu`, then
    `stage1_block1_norm1`, `..._silu1`, `..._attention`, `..._norm2`,
    `..._silu2`, `..._dropout`, `..._crop`, `..._shortcut_crop`,
    `..._shortcut`, `..._add1`, `..._dense1`, `..._norm3`, `..._silu3`,
    `..._dense2`, `..._norm4`, `..._add2`, and with `norm_between`
    `..._norm5`, `..._silu5`; after a stage `stage1_pool` and
    `stage1_dropout`. At the end come `logits`, `logits_sum`, `group_max` or
    `group_mean`, `flatten` and `predictions`. What does nothing is left out.

    Args:
        group: a group or its name.
        kernel_size: rows and columns that attention sees, odd; None for the
            whole map.
        filters: channels behind the lifting layer, at least 6.
        block_sizes: number of blocks in each stage; a stage of none only
            pools.
        expansion: of each stage, or of all: its channels over those of the
            stage before. Of a stage of none it is not used.
        crops: pixels that each block, or all, cut off at every border.
        num_heads: of the attention.
        norm: "layer" is `GroupNormalization` in one group, over space, group
            and channels together. "batch" is `BatchNormalization`.
        norm_between: whether normalisation and SiLU follow each block.
        last_pool: whether the last stage ends with pooling too.
        head: "max" or "mean" over the group.
        attention_dropout: rate at which weights of attention are dropped.
        value_dropout: rate of the dropout in blocks.
        input_dropout: rate of a dropout on the images.
        pool_dropout: rate of a dropout after each pooling.
        epsilon: of layer normalisation and of the encoding of positions, see
            `RelativePositionEncoding`. The authors have 1e-12.
        input_shape: `(height, width, channels)`. Unless `exact=False` what is
            pooled must have an even height and width; with z2 it may be odd,
            with z2m its height.
        classes: number of classes.
        classifier_activation: None returns logits.
        normalization: `(mean, std)` of images in [0, 1], numbers or one per
            channel: the network subtracts and divides first. None is the
            identity.
        exact: refuse sizes on which pooling is not equivariant. False accepts
            them; a row and a column are then left over at one side.
        weights: None (random) or the path of a weights file.
        name: name of the model.

    Returns:
        A functional `keras.Model` from images to logits `(batch, classes)`.

    Symmetry:
        On the sizes accepted with `exact=True` the logits do not change when
        the image is acted on by the group; to rounding for groups on the grid,
        for the others under their 90-degree subgroup.

    Raises:
        ValueError: for bad arguments, before anything is built.
        TypeError: for a `group` that is neither a name nor a `Group`.

    References:
        - [Romero and Cordonnier, 2021](https://arxiv.org/abs/2010.00977), and
          the authors' code, https://github.com/dwromero/g_selfatt. There the
          attention on the group is not equivariant, see
          `GroupSelfAttention2D`, and epsilon is 1e-12. Kernels start normal
          with the variance `2 / fan-in`, the default of their class; their
          training script has `1 / fan-in` unless told otherwise.
    """
    design = _Design(
        groups.get(group),
        kernel_size,
        num_heads,
        norm,
        norm_between,
        head,
        attention_dropout,
        value_dropout,
        input_dropout,
        pool_dropout,
        epsilon,
    )
    stages = _stages(filters, block_sizes, expansion, crops, last_pool)
    network = building.Network(
        "GSANet",
        group=design.group,
        attention=None,
        filters=filters,
        input_shape=input_shape,
        classes=classes,
        classifier_activation=classifier_activation,
        normalization=normalization,
        downsampling="exact" if _checks.flag(exact, "exact") else "strided",
        weights=weights,
        planar=ends.he_normal,
        windows=lambda exact: _windows(stages),
        choices=("exact=True", "exact=False"),
    )

    inputs, x = network.start()
    x = _dropout(x, design.input_dropout, "image_dropout")
    x = design.attention(x, network.filters, "lift")
    x = design.norm_silu(x, "lift_{}")
    for number, stage in enumerate(stages, 1):
        for index, crop in enumerate(stage.crops, 1):
            x = _block(
                design, x, stage.width, crop, f"stage{number}_block{index}"
            )
        if stage.pools:
            x = layers.SpatialPooling2D(
                2,
                group=design.group,
                exact=network.exact,
                data_format="channels_last",
                name=f"stage{number}_pool",
            )(x)
            x = _dropout(x, design.pool_dropout, f"stage{number}_dropout")
    x = ends.logits(x, network.classes, use_bias=False)
    x = _SpatialSum(dtype=ends.end_dtype(), name="logits_sum")(x)
    x = layers.GroupPooling(
        design.head,
        data_format="channels_last",
        dtype=ends.end_dtype(),
        name=f"group_{design.head}",
    )(x)
    x = keras.layers.Flatten(
        data_format="channels_last", dtype=ends.end_dtype(), name="flatten"
    )(x)
    return network.finish(inputs, x, name or f"gsanet_{design.group.name}")


def GSANetRotMNIST(
    group: str | groups.Group = "p4",
    kernel_size: int | None = 5,
    *,
    name: str | None = None,
    **options: Any,
) -> keras.Model:
    """The `GSANet` for rotated MNIST: two blocks, pooling, three blocks.

    It has 20 channels. Crops take maps from 28 pixels to 24, pooling to 12,
    crops to 8, 6 and 4. Trainable parameters, which do not depend on the kernel
    size:

    | z2 | p4 | p8 | p12 | p16 | z2m | p4m | p8m |
    |---|---|---|---|---|---|---|---|
    | 44,368 | 44,428 | 44,508 | 44,588 | 44,668 | 44,388 | 44,508 | 44,668 |

    Args:
        group: a group or its name.
        kernel_size: rows and columns that attention sees, odd; None for the
            whole map.
        name: name of the model.
        **options: other arguments of `GSANet`; `filters=None` is the paper's
            width, which is the same for all groups.

    Returns:
        A functional `keras.Model` from images `(batch, 28, 28, 1)` to logits
        `(batch, 10)`.

    Symmetry:
        As that of `GSANet`.

    Raises:
        ValueError: for bad arguments, before anything is built.
        TypeError: for a `group` that is neither a name nor a `Group`.

    References:
        - [Romero and Cordonnier, 2021](https://arxiv.org/abs/2010.00977), and
          the authors' code, see `GSANet`.
    """
    return _preset("rotmnist", _ROT_MNIST, group, kernel_size, name, options)


def GSANetCIFAR10(
    group: str | groups.Group = "z2m",
    kernel_size: int | None = 5,
    *,
    name: str | None = None,
    **options: Any,
) -> keras.Model:
    """The `GSANet` for CIFAR-10: three stages of two blocks.

    It has 96 channels, 192 from the second stage on, no crops, normalisation
    between blocks, and dropout on images and after pooling. Trainable
    parameters:

    | z2 | p4 | p8 | p12 |
    |---|---|---|---|
    | 3,001,648 | 3,002,128 | 3,002,768 | 3,003,408 |

    | p16 | z2m | p4m | p8m |
    |---|---|---|---|
    | 3,004,048 | 3,001,808 | 3,002,768 | 3,004,048 |

    Args:
        group: a group or its name.
        kernel_size: rows and columns that attention sees, odd; None for the
            whole map.
        name: name of the model.
        **options: other arguments of `GSANet`; `filters=None` is the paper's
            width, which is the same for all groups.

    Returns:
        A functional `keras.Model` from images `(batch, 32, 32, 3)` to logits
        `(batch, 10)`.

    Symmetry:
        As that of `GSANet`.

    Raises:
        ValueError: for bad arguments, before anything is built.
        TypeError: for a `group` that is neither a name nor a `Group`.

    References:
        - [Romero and Cordonnier, 2021](https://arxiv.org/abs/2010.00977), and
          the authors' code, see `GSANet`.
    """
    return _preset("cifar10", _CIFAR10, group, kernel_size, name, options)


def GSANetPCam(
    group: str | groups.Group = "p4",
    kernel_size: int | None = 5,
    *,
    name: str | None = None,
    **options: Any,
) -> keras.Model:
    """The `GSANet` for PatchCamelyon: four stages of 0, 1, 2 and 1 blocks.

    It has 12 channels, 24, 48 and 96 from the second stage on, normalisation
    between blocks, and pooling after every stage. Trainable parameters:

    | z2 | p4 | p8 | p12 |
    |---|---|---|---|
    | 206,926 | 207,034 | 207,178 | 207,322 |

    | p16 | z2m | p4m | p8m |
    |---|---|---|---|
    | 207,466 | 206,962 | 207,178 | 207,466 |

    Maps have 48, 24, 20, 16, 8, 4 and 2 pixels. The crops of the authors,
    `crops=(0, 2, 1, 1)`, pool a map of 7 pixels, which is not equivariant:
    with them and another group than z2, give `exact=False` or
    images of 88 or 104 pixels.

    Args:
        group: a group or its name.
        kernel_size: rows and columns that attention sees, odd; None for the
            whole map.
        name: name of the model.
        **options: other arguments of `GSANet`; `filters=None` is the paper's
            width, which is the same for all groups.

    Returns:
        A functional `keras.Model` from images `(batch, 96, 96, 3)` to logits
        `(batch, 2)`.

    Symmetry:
        As that of `GSANet`.

    Raises:
        ValueError: for bad arguments, before anything is built.
        TypeError: for a `group` that is neither a name nor a `Group`.

    References:
        - [Romero and Cordonnier, 2021](https://arxiv.org/abs/2010.00977), and
          the authors' code, see `GSANet`. The crops are ours.
    """
    return _preset("pcam", _PCAM, group, kernel_size, name, options)


def _preset(
    kind: str,
    sizes: dict[str, Any],
    group: str | groups.Group,
    kernel_size: int | None,
    name: str | None,
    options: dict[str, Any],
) -> keras.Model:
    group = groups.get(group)
    name = name or f"gsanet_{kind}_{group.name}"
    if options.get("filters", 0) is None:
        options = {**options, "filters": sizes["filters"]}
    return GSANet(group, kernel_size, name=name, **{**sizes, **options})


@keras.saving.register_keras_serializable(package="keras_equiattn")
class _SpatialSum(keras.layers.Layer):
    """The sum over space: a layer, so that it has a name of its own."""

    def call(self, inputs: Any) -> Any:
        return ops.sum(inputs, axis=(1, 2), keepdims=True)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return (input_shape[0], 1, 1, *input_shape[3:])


@dataclasses.dataclass(frozen=True)
class _Design:
    """What all blocks are made of; see `GSANet`."""

    group: groups.Group
    kernel_size: int | None
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
        """Self-attention of images or feature maps."""
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
            kernel_initializer=ends.he_normal(),
            data_format="channels_last",
            name=name,
        )(x)

    def normalize(self, x: Any, name: str) -> Any:
        """Normalisation of feature maps."""
        if self.norm == "batch":
            return keras.layers.BatchNormalization(
                momentum=0.9, epsilon=BATCH_NORM_EPSILON, name=name
            )(x)
        return keras.layers.GroupNormalization(
            groups=1, epsilon=self.epsilon, name=name
        )(x)

    def norm_silu(self, x: Any, names: str) -> Any:
        """Normalisation and SiLU; "lift_{}" names them "lift_norm", ..."""
        x = self.normalize(x, names.format("norm"))
        return keras.layers.Activation("silu", name=names.format("silu"))(x)


def _block(design: _Design, x: Any, width: int, crop: int, name: str) -> Any:
    """Attention, then two dense layers, each added to its input."""
    y = design.norm_silu(x, f"{name}_{{}}1")
    y = design.attention(y, width, f"{name}_attention")
    y = design.norm_silu(y, f"{name}_{{}}2")
    y = _dropout(y, design.value_dropout, f"{name}_dropout")
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


def _dropout(x: Any, rate: float, name: str) -> Any:
    return keras.layers.Dropout(rate, name=name)(x) if rate else x


def _crop(x: Any, crop: int, name: str) -> Any:
    if not crop:
        return x
    return keras.layers.Cropping3D(
        (crop, crop, 0), data_format="channels_last", name=name
    )(x)


@dataclasses.dataclass(frozen=True)
class _Stage:
    """Blocks of one width, by how much they crop."""

    width: int
    crops: tuple[int, ...]
    pools: bool


def _stages(
    filters: int,
    block_sizes: Sequence[int],
    expansion: int | Sequence[int],
    crops: int | Sequence[int],
    last_pool: bool,
) -> list[_Stage]:
    # A third of the channels of a key, half of these, is at least one.
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
            _Stage(width, tuple(next(cropped) for _ in range(size)), pools)
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
    """Integers, or one for all."""
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


def _windows(stages: Sequence[_Stage]) -> list[_sizes.Window]:
    windows = []
    for stage in stages:
        # Of windows without padding as much is lost at the borders.
        windows += [_sizes.Window(2 * crop + 1) for crop in stage.crops]
        windows += [_sizes.Window(2, 2)] if stage.pools else []
    return windows
