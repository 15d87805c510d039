"""Convolutions of images and feature maps, with attention or without."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import keras

from keras_equiattn import layers
from keras_equiattn.groups import Group
from keras_equiattn.ops.group.bases import default_share

# The values of the argument `attention` of a network.
ATTENTION = (None, "full", "channel", "spatial", "input", "co")
# The scale of kernels in residual and dense networks: it keeps the variance
# where a ReLU follows.
HE_SCALE = math.sqrt(2)


def group_width(
    planar_width: int, group: Group, kernel_size: int = 3, multiple: int = 1
) -> int:
    """Returns the channels that keep the number of parameters on a group.

    This is the width of the planar network over `sqrt(order)`. Steerable
    filters, which groups like p8 have, have fewer parameters than pixels, 6 in
    place of 9 for 3 x 3. There the width is larger by the root of 9 / 6.

    Args:
        planar_width: the width of the planar network.
        group: the group.
        kernel_size: rows and columns of the kernels that have most parameters.
        multiple: the result is the nearest multiple of this number, and at
            least this number.
    """
    share = default_share(group, kernel_size)
    width = planar_width / math.sqrt(group.order * share)
    return max(1, round(width / multiple)) * multiple


def default_width(widths: Mapping[str, int], group: Group) -> int:
    """Returns the width that a paper has for a group.

    Args:
        widths: the widths in the paper by the name of the group. Other groups
            get `group_width` of the width for `z2`.
        group: the group.
    """
    return widths.get(group.name) or group_width(widths["z2"], group)


@dataclasses.dataclass(frozen=True)
class AttentionSettings:
    """How the attention of one layer is built, where there is any.

    Attributes:
        reduction_ratio: input channels per hidden unit of channel attention.
        kernel_size: rows and columns of the kernel of spatial attention.
        dilation_rate: dilation of the same kernel.
        scale: half-width of the uniform distribution from which the spatial
            kernels start, times `sqrt(channels) * kernel_size`.
    """

    reduction_ratio: int = 16
    kernel_size: int = 7
    dilation_rate: int = 1
    scale: float = 1.0


def two_units(x: Any, first: bool = False, **options: Any) -> AttentionSettings:
    """Returns the settings of attention in residual and dense networks.

    Channel attention has two hidden units; in the first layer it has as many
    hidden units as channels.

    Args:
        x: the input of the layer; channels are its last axis.
        first: whether the layer is the first one.
        **options: other fields of `AttentionSettings`.
    """
    ratio = 1 if first else max(1, x.shape[-1] // 2)
    return AttentionSettings(ratio, scale=HE_SCALE, **options)


def group_convolution(
    x: Any,
    filters: int,
    kernel_size: int,
    *,
    group: Group,
    attention: str | None,
    settings: AttentionSettings,
    name: str,
    after_attention: keras.layers.Layer | None = None,
    **options: Any,
) -> Any:
    """Applies a convolution without bias, with attention or without.

    Input attention is a layer of its own, called `<name>_attention`.

    Args:
        x: images `(batch, height, width, channels)`, which are lifted to the
            group, or a feature map `(batch, height, width, order, channels)`.
        filters: channels of the result.
        kernel_size: rows and columns of the kernel.
        group: the group.
        attention: one of `ATTENTION`.
        settings: the settings of the attention.
        name: name of the layer.
        after_attention: a layer between input attention and the convolution,
            or None. Only input attention accepts one.
        **options: more arguments of the convolution.

    Returns:
        A feature map `(batch, height, width, order, filters)`.
    """
    assert after_attention is None or attention == "input"
    lifting = len(x.shape) == 4
    channels = x.shape[-1]
    layer: Any
    options = {
        "group": group,
        "use_bias": False,
        "data_format": "channels_last",
        "name": name,
        **options,
    }
    if attention is None or attention == "input":
        if attention == "input":
            factor = 1.0 if lifting else haar(group)
            x = layers.InputAttention(
                data_format="channels_last",
                group=group,
                name=f"{name}_attention",
                **_attention_arguments(settings, factor),
            )(x)
            if after_attention is not None:
                x = after_attention(x)
        layer = layers.LiftingConv2D if lifting else layers.GroupConv2D
        return layer(filters, kernel_size, **options)(x)
    if attention == "co":
        layer = (
            layers.CoAttentiveLiftingConv2D
            if lifting
            else layers.CoAttentiveGroupConv2D
        )
        bound = settings.scale / math.sqrt(channels)
        if not lifting:
            bound *= haar(group)
        return layer(
            filters,
            kernel_size,
            attention_initializer=uniform(bound),
            **options,
        )(x)
    layer = (
        layers.AttentiveLiftingConv2D
        if lifting
        else layers.AttentiveGroupConv2D
    )
    arguments = _attention_arguments(settings)
    hidden = max(1, channels // settings.reduction_ratio)
    order = 1 if lifting else group.order
    arguments["channel_kernel_initializer"] = uniform(
        1 / math.sqrt(hidden * channels * order)
    )
    return layer(
        filters, kernel_size, attention=attention, **arguments, **options
    )(x)


def haar(group: Group) -> float:
    """Returns the factor of sums over the group in the authors' code.

    Here the factor is part of the kernels. Where nothing rescales a kernel
    later, the kernel starts with it: pi / 2 for p4 and pi for p4m, as in their
    code, and at most pi for other groups.
    """
    if group.order == 1:
        return 1.0
    copies = group.order // group.rotations
    return math.pi * min(1.0, 2 * copies / group.rotations)


def uniform(bound: float) -> keras.initializers.Initializer:
    """Returns an initialiser that is uniform in `[-bound, bound]`."""
    return keras.initializers.RandomUniform(-bound, bound)


def _attention_arguments(
    settings: AttentionSettings, factor: float = 1.0
) -> dict[str, Any]:
    # The spatial filter sees two channels: a mean and a maximum.
    bound = settings.scale / (math.sqrt(2) * settings.kernel_size)
    return {
        "reduction_ratio": settings.reduction_ratio,
        "attention_kernel_size": settings.kernel_size,
        "attention_dilation_rate": settings.dilation_rate,
        "spatial_kernel_initializer": uniform(factor * bound),
    }


def batch_norm(x: Any, name: str, **options: Any) -> Any:
    """Applies batch normalisation with the constants of group networks."""
    return keras.layers.BatchNormalization(
        momentum=0.9, epsilon=2e-5, name=name, **options
    )(x)


def batch_norm_activation(x: Any, names: str, activation: str = "relu") -> Any:
    """Applies batch normalisation and an activation.

    Args:
        x: images or feature maps; channels are the last axis.
        names: the pattern of the names of the layers: `"block1_{}"` gives
            `block1_bn` and `block1_relu`.
        activation: the name of the function, which replaces `relu` in the name
            of its layer.
    """
    x = batch_norm(x, names.format("bn"))
    name = names.format(activation)
    if activation == "relu":
        return keras.layers.ReLU(name=name)(x)
    return keras.layers.Activation(activation, name=name)(x)
