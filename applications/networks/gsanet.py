"""Networks of group self-attention: rotated MNIST, CIFAR-10 and PCam."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

from keras_equiattn import _checks
from keras_equiattn import convert
from keras_equiattn import groups
from keras_equiattn import layers
from keras_equiattn.applications.networks import gsanet_blocks as parts
from keras_equiattn.applications.networks.common import ends
from keras_equiattn.applications.networks.common.network import Network
from keras_equiattn.applications.registry import register
from keras_equiattn.applications.registry import Variants

# The groups that each preset is registered with.
VARIANTS = ("z2", "p4", "p8", "p12", "p16", "z2m", "p4m", "p8m")

# The sizes of the presets, as in the authors' code except the crops of PCam.
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
    window_shape: str = "square",
    input_shape: tuple[int, int, int] = (28, 28, 1),
    classes: int = 10,
    classifier_activation: str | None = None,
    normalization: ends.Statistics | None = None,
    exact: bool = True,
    weights: str | Path | None = None,
    name: str | None = None,
) -> keras.Model:
    """A network of group self-attention, for any group.

    The network is `LiftingSelfAttention2D` with normalisation and SiLU, stages
    of blocks with 2 x 2 max pooling between the stages, a linear map without
    bias to the classes, the sum over space and the maximum over the group. A
    block is

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
    `group_mean`, `flatten` and `predictions`. Layers that would do nothing are
    left out.

    Args:
        group: a group or its name.
        kernel_size: rows and columns that attention sees, odd; None for the
            whole map.
        filters: channels after the lifting layer, at least 6.
        block_sizes: number of blocks in each stage; a stage without blocks only
            pools.
        expansion: the channels of a stage over those of the stage before, one
            factor for each stage or one for all. It is not used for a stage
            without blocks.
        crops: pixels that a block cuts off at every border, one number for each
            block or one for all.
        num_heads: the heads of the attention.
        norm: "layer" is `GroupNormalization` in one group, over space, group
            and channels together. "batch" is `BatchNormalization`.
        norm_between: whether normalisation and SiLU follow each block.
        last_pool: whether the last stage ends with pooling too.
        head: "max" or "mean" over the group.
        attention_dropout: rate at which weights of attention are dropped.
        value_dropout: rate of the dropout in blocks.
        input_dropout: rate of a dropout on the images.
        pool_dropout: rate of a dropout after each pooling.
        epsilon: the epsilon of layer normalisation and of the encoding of
            positions, see `RelativePositionEncoding`. The authors use 1e-12.
        window_shape: "square", as the authors have it, or "disc", which is
            closer to equivariant for turns by less than 90 degrees, see
            `GroupSelfAttention2D`. Attention to the whole map has no window,
            and accepts only "square".
        input_shape: `(height, width, channels)`. Unless `exact=False`, maps
            that are pooled must have an even height and width; with z2 both may
            be odd, with z2m the height.
        classes: number of classes.
        classifier_activation: None returns logits.
        normalization: `(mean, std)` of images in [0, 1], numbers or one per
            channel; the network first computes `(x - mean) / std`. None is the
            identity.
        exact: whether sizes on which pooling is not equivariant are refused.
            False accepts them; pooling then ignores the last row or column.
        weights: None (random) or the path of a weights file.
        name: name of the model.

    Returns:
        A functional `keras.Model` from images to logits `(batch, classes)`.

    Symmetry:
        On the sizes accepted with `exact=True` the logits do not change when
        the group acts on the image: up to rounding for groups on the grid, and
        for other groups only under their 90-degree subgroup.

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
    design = parts.Design(
        groups.get(group),
        kernel_size,
        window_shape,
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
    stages = parts.make_stages(
        filters, block_sizes, expansion, crops, last_pool
    )
    network = Network(
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
        windows=lambda exact: parts.windows(stages),
        choices=("exact=True", "exact=False"),
    )

    inputs, x = network.start()
    x = parts.dropout(x, design.input_dropout, "image_dropout")
    x = design.attention(x, network.filters, "lift")
    x = design.norm_silu(x, "lift_{}")
    for number, stage in enumerate(stages, 1):
        for index, crop in enumerate(stage.crops, 1):
            x = parts.block(
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
            x = parts.dropout(x, design.pool_dropout, f"stage{number}_dropout")
    x = ends.logits(x, network.classes, use_bias=False)
    x = parts.SpatialSum(dtype=ends.end_dtype(), name="logits_sum")(x)
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


def _variants(preset: str) -> Variants:
    return {f"gsanet_{preset}_{group}": {"group": group} for group in VARIANTS}


@register(
    _variants("rotmnist"),
    convert.g_selfatt,
    epsilon=convert.G_SELFATT_EPSILON,
    normalization=convert.G_SELFATT_ROT_MNIST,
)
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
        See `GSANet`.

    Raises:
        ValueError: for bad arguments, before anything is built.
        TypeError: for a `group` that is neither a name nor a `Group`.

    References:
        - [Romero and Cordonnier, 2021](https://arxiv.org/abs/2010.00977), and
          the authors' code, see `GSANet`.
    """
    return _preset("rotmnist", _ROT_MNIST, group, kernel_size, name, options)


@register(
    _variants("cifar10"),
    convert.g_selfatt,
    epsilon=convert.G_SELFATT_EPSILON,
)
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
        See `GSANet`.

    Raises:
        ValueError: for bad arguments, before anything is built.
        TypeError: for a `group` that is neither a name nor a `Group`.

    References:
        - [Romero and Cordonnier, 2021](https://arxiv.org/abs/2010.00977), and
          the authors' code, see `GSANet`.
    """
    return _preset("cifar10", _CIFAR10, group, kernel_size, name, options)


@register(
    _variants("pcam"), convert.g_selfatt, epsilon=convert.G_SELFATT_EPSILON
)
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

    Maps have 48, 24, 20, 16, 8, 4 and 2 pixels. With the crops of the authors,
    `crops=(0, 2, 1, 1)`, a map of 7 pixels is pooled, which is not equivariant:
    with them and another group than z2, give `exact=False` or images of 88 or
    104 pixels.

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
        See `GSANet`.

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
    settings: dict[str, Any],
    group: str | groups.Group,
    kernel_size: int | None,
    name: str | None,
    options: dict[str, Any],
) -> keras.Model:
    group = groups.get(group)
    name = name or f"gsanet_{kind}_{group.name}"
    if options.get("filters", 0) is None:
        options = {**options, "filters": settings["filters"]}
    return GSANet(group, kernel_size, name=name, **{**settings, **options})
