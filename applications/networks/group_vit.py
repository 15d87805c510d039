"""Vision transformers on a group."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from keras_equiattn import _checks
from keras_equiattn import groups
from keras_equiattn import layers
from keras_equiattn.applications.networks.common import ends
from keras_equiattn.applications.networks.common.network import Network
from keras_equiattn.applications.registry import register
from keras_equiattn.applications.registry import Variants
from keras_equiattn.groups import Group
from keras_equiattn.ops.group.linear import BASES

HEADS = ("invariant", "hybrid")
EPSILON = 1e-6  # epsilon of layer normalisation, as vision transformers have it
# The standard deviation with which weights start.
SPREAD = 0.02
# Width, depth and heads of vision transformers, and other arguments that differ
# from the defaults: those of DeiT, and small ones for small images.
SIZES: Mapping[str, Mapping[str, Any]] = {
    "tiny": {"width": 192, "depth": 12, "num_heads": 3},
    "small": {"width": 384, "depth": 12, "num_heads": 6},
    "base": {"width": 768, "depth": 12, "num_heads": 12},
    "cifar10": {
        "width": 192,
        "depth": 6,
        "num_heads": 3,
        "patch_size": 4,
        "input_shape": (32, 32, 3),
        "classes": 10,
    },
    "pcam": {
        "width": 192,
        "depth": 6,
        "num_heads": 3,
        "patch_size": 8,
        "input_shape": (96, 96, 3),
        "classes": 2,
    },
}


def _variants() -> Variants:
    """The DeiT sizes on z2, p4m and as hybrids; small ones on z2, p4, p4m."""
    found = {}
    for size, settings in SIZES.items():
        small = "input_shape" in settings
        for group in ("z2", "p4", "p4m") if small else ("z2", "p4m"):
            found[f"vit_{size}_{group}"] = {"group": group, **settings}
        if not small:
            found[f"vit_{size}_p4m_hybrid"] = {
                "group": "p4m",
                "head": "hybrid",
                **settings,
            }
    return found


@register(_variants())
def GroupViT(
    group: str | groups.Group = "p4m",
    patch_size: int = 16,
    depth: int = 12,
    width: int = 192,
    num_heads: int = 3,
    basis: str | None = None,
    head: str = "invariant",
    mlp_ratio: int = 4,
    dropout: float = 0.0,
    input_shape: tuple[int, int, int] = (224, 224, 3),
    classes: int = 1000,
    classifier_activation: str | None = None,
    normalization: ends.Statistics | None = None,
    weights: str | Path | None = None,
    name: str | None = None,
) -> keras.Model:
    """The vision transformer, for any group.

    A lifting convolution makes a feature map of patches of the image. Each
    block adds to it the attention of all patches to each other
    (`GroupMultiHeadAttention2D`), and then two linear maps (`GroupDense`) with
    GELU in between, which is the input activation of the second one. Layer
    normalisation over poses and channels, without weights, comes before both.
    At the end come layer normalisation, the mean over patches and poses, and a
    dense layer.

    With the same width, which is the number of values per patch, the linear
    maps have `order` times fewer weights than those of a plain transformer. In
    the basis of the irreducible representations they also multiply less: 2.67
    times on p4, 5.33 times on p4m.

    Layers are called `image`, `normalization` (where there is one), `patches`,
    `block1_norm1`, `..._attention`, `..._add1`, `..._norm2`, `..._dense1`,
    `..._dense2`, `..._add2`, and so on, with dropout `..._dropout1` and
    `..._dropout2` before the additions, and `poses_to_channels` in the middle
    of a hybrid. At the end come `norm`, `global_mean`, `logits` and
    `predictions`.

    Args:
        group: a group or its name.
        patch_size: rows and columns of a patch.
        depth: number of blocks.
        width: values per patch, divisible by the order of the group times
            `num_heads`.
        num_heads: heads of the attention.
        basis: how linear maps are computed, which changes the results only by
            rounding: "irreps" in blocks, "regular" as one matrix, None in the
            faster of the two ways, see `ops.group_linear`. With blocks,
            gradients cannot be differentiated again under TensorFlow, unless
            `config.disable_recompute` was called.
        head: "invariant", or "hybrid", in which the poses of the first half of
            the blocks become the channels of a plain second half: such a
            network is not invariant.
        mlp_ratio: values between the two linear maps of a block over those of
            its input.
        dropout: rate at which results of attention and of linear maps are
            dropped.
        input_shape: `(height, width, channels)`; height and width must be
            divisible by `patch_size`.
        classes: number of classes.
        classifier_activation: None returns logits.
        normalization: `(mean, std)` of images in [0, 1], numbers or one per
            channel; the network first computes `(x - mean) / std`. None is the
            identity.
        weights: None (random) or the path of a weights file.
        name: name of the model.

    Returns:
        A functional `keras.Model` from images to logits `(batch, classes)`.

    Symmetry:
        With the head "invariant" the logits do not change when the group acts
        on the image: up to rounding for groups on the grid, and for other
        groups only under their 90-degree subgroup.

    Raises:
        ValueError: for bad arguments, before anything is built.

    References:
        - [Dosovitskiy et al., 2021](https://arxiv.org/abs/2010.11929), with the
          sizes of [Touvron et al., 2021](https://arxiv.org/abs/2012.12877)
        - [Nordström et al., 2025](https://arxiv.org/abs/2505.15441), for p4m
          and for the hybrid. Their patches have learned positions, ours
          relative ones, which work for every group and every image size.
    """
    group = groups.get(group)
    patch_size = _checks.integer(patch_size, "patch_size")
    depth = _checks.integer(depth, "depth")
    width = _checks.integer(width, "width")
    num_heads = _checks.integer(num_heads, "num_heads")
    if width % (group.order * num_heads):
        raise ValueError(
            "`width` must be divisible by the order of the group times "
            f"`num_heads`, {group.order} times {num_heads}. Received: {width}"
        )
    _checks.choice(basis, "basis", (None, *BASES))
    _checks.choice(head, "head", HEADS)
    if head == "hybrid" and depth == 1:
        raise ValueError(
            "A hybrid needs two blocks, one of them on the group. Received: "
            "head='hybrid', depth=1"
        )
    height, columns, _ = ends.check_image_shape(input_shape)
    if height % patch_size or columns % patch_size:
        raise ValueError(
            "`input_shape` must have a height and width that are divisible by "
            f"`patch_size`. Received: input_shape={input_shape}, "
            f"patch_size={patch_size}"
        )
    network = Network(
        "GroupViT",
        group=group,
        attention=None,
        filters=width // group.order,
        input_shape=input_shape,
        classes=classes,
        classifier_activation=classifier_activation,
        normalization=normalization,
        downsampling="exact",
        weights=weights,
        planar=_spread,
    )
    mlp_ratio = _checks.integer(mlp_ratio, "mlp_ratio")
    dropout = _checks.rate(dropout, "dropout")

    inputs, x = network.start()
    x = layers.LiftingConv2D(
        network.filters,
        patch_size,
        strides=patch_size,
        group=group,
        kernel_initializer=_spread(),
        data_format="channels_last",
        name="patches",
    )(x)
    for block in range(1, depth + 1):
        if head == "hybrid" and block == depth // 2 + 1:
            # A feature map of order one, with the poses among its channels.
            shape = (*x.shape[1:3], 1, width)
            x = keras.layers.Reshape(shape, name="poses_to_channels")(x)
            group, basis = groups.get("z2"), "regular"
        x = _block(
            x, group, num_heads, basis, mlp_ratio, dropout, f"block{block}"
        )
    x = _normalized(x, "norm")
    x = ends.logits(ends.global_mean(x), network.classes)
    if name is None:
        suffix = "" if head == "invariant" else f"_{head}"
        name = f"vit_{network.group.name}{suffix}"
    return network.finish(inputs, x, name)


def _block(
    x: Any,
    group: Group,
    num_heads: int,
    basis: str | None,
    mlp_ratio: int,
    dropout: float,
    name: str,
) -> Any:
    """Attention, then two linear maps; each part is added to its input."""
    channels = x.shape[-1]
    options: dict[str, Any] = {
        "group": group,
        "basis": basis,
        "data_format": "channels_last",
    }

    def added(y: Any, number: int) -> Any:
        if dropout:
            drop = keras.layers.Dropout(dropout, name=f"{name}_dropout{number}")
            y = drop(y)
        return keras.layers.Add(name=f"{name}_add{number}")([x, y])

    y = layers.GroupMultiHeadAttention2D(
        num_heads,
        kernel_initializer=_spread(),
        embedding_initializer=_spread(),
        name=f"{name}_attention",
        **options,
    )(_normalized(x, f"{name}_norm1"))
    x = added(y, 1)
    y = layers.GroupDense(
        mlp_ratio * channels,
        kernel_initializer=_spread(),
        name=f"{name}_dense1",
        **options,
    )(_normalized(x, f"{name}_norm2"))
    y = layers.GroupDense(
        channels,
        input_activation="gelu",
        kernel_initializer=_spread(),
        name=f"{name}_dense2",
        **options,
    )(y)
    return added(y, 2)


def _normalized(x: Any, name: str) -> Any:
    """Layer normalisation over poses and channels.

    A weight for each of them would tell the poses apart; one for each channel
    can be part of the linear map that follows.
    """
    return keras.layers.LayerNormalization(
        axis=(-2, -1), epsilon=EPSILON, center=False, scale=False, name=name
    )(x)


def _spread() -> keras.initializers.Initializer:
    return keras.initializers.TruncatedNormal(stddev=SPREAD)
