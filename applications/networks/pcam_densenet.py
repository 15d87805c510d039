"""The DenseNet for patches of histopathology slides (PCam)."""

from pathlib import Path
from typing import Any

import keras

from keras_equiattn import convert
from keras_equiattn import groups
from keras_equiattn.applications.networks.common import convolution
from keras_equiattn.applications.networks.common import ends
from keras_equiattn.applications.networks.common.network import Network
from keras_equiattn.applications.networks.common.network import variants
from keras_equiattn.applications.networks.common.sizes import Window
from keras_equiattn.applications.registry import register

# The paper's channels of the first convolution and of every block; other groups
# get `group_width` of the planar one.
WIDTHS = {"z2": 26, "p4": 13, "p4m": 9}

# Kernel size and dilation of spatial attention, which decrease with the maps.
FIRST_ATTENTION = (7, 4)
BLOCK_ATTENTION = ((7, 4), (7, 4), (7, 3), (7, 2), (5, 1))
TRANSITION_ATTENTION = ((7, 4), (7, 4), (7, 3), (7, 1))
LAST_ATTENTION = (3, 1)


@register(
    variants("pcam_densenet_{}", "z2 p4 p4_input p4m p4m_input"),
    convert.att_gconvs,
)
def PCamDenseNet(
    group: str | groups.Group = "p4",
    attention: str | None = None,
    filters: int | None = None,
    input_shape: tuple[int, int, int] = (96, 96, 3),
    classes: int = 2,
    classifier_activation: str | None = None,
    normalization: ends.Statistics | None = None,
    downsampling: str | None = None,
    weights: str | Path | None = None,
    name: str | None = None,
) -> keras.Model:
    """The DenseNet for PatchCamelyon, for any group, with attention or not.

    The network has a 3 x 3 convolution, five dense blocks of one 3 x 3
    convolution each, with transitions between them, and a 1 x 1 convolution to
    the classes, whose means over space and group are the logits. It has no
    padding, no bias and no dropout. A block is batch normalisation, ReLU and
    convolution; its `filters` new channels come before those of its input,
    which lose a pixel at each border. A transition is batch normalisation,
    ReLU, a 1 x 1 convolution that keeps the number of channels, and 2 x 2 mean
    pooling.

    Trainable parameters:

    | attention | z2, 26 filters | p4, 13 filters | p4m, 9 filters |
    |---|---|---|---|
    | None | 130,598 | 129,649 | 124,209 |
    | `"input"` | | 140,453 | 141,221 |

    Layers are called `conv1`, `block1_bn`, `block1_relu`, `block1_conv`,
    `block1_crop`, `block1_concat`, `transition1_bn`, `transition1_relu`,
    `transition1_conv`, `transition1_pool`, ..., `block5_concat`, `bn_out`,
    `relu_out`, `conv_out`, `global_mean`, `predictions`. Input attention
    comes before a convolution as `<its name>_attention`.

    Args:
        group: a group or its name.
        attention: the attention of every convolution. None, "full", "channel"
            or "spatial" (on the responses, `AttentiveGroupConv2D`), "input"
            (`InputAttention`) or "co" (`CoAttentiveGroupConv2D`). The paper has
            None and "input"; the others use the settings of "input".
        filters: channels of the first convolution, and new ones of each
            block. None is the paper's: 26 for z2, 13 for p4, 9 for p4m,
            26 / sqrt(order) for other groups on the grid, and 26 / sqrt(2 order
            / 3) for those with steerable filters (p8, p12, p16 and their
            mirrored forms).
        input_shape: `(height, width, channels)`. Unless downsampling is
            strided, height and width must be divisible by 16 and at least 80;
            z2 accepts any size that fits, and z2m any height that fits.
        classes: number of classes.
        classifier_activation: None returns logits.
        normalization: `(mean, std)` of images in [0, 1], numbers or one per
            channel; the network first computes `(x - mean) / std`. None is the
            identity.
        downsampling: None is "antialiased" for groups with turns between the
            quarter turns (p8, p12, p16 and their mirrored forms), and "exact"
            for all others. "exact" pools in the transitions. "antialiased"
            pads one mirrored pixel (a layer `<name of the pooling>_pad`) and
            takes binomial means of 4 x 4 pixels instead. "strided" gives the
            convolutions of the transitions strides of 2; this form is ours, and
            only approximately equivariant.
        weights: None (random) or the path of a weights file.
        name: name of the model.

    Returns:
        A functional `keras.Model` from images to logits `(batch, classes)`.

    Symmetry:
        Unless downsampling is strided, the logits do not change when the group
        acts on the image: up to rounding for groups on the grid, and for other
        groups only under their 90-degree subgroup.

    Raises:
        ValueError: for bad arguments, before anything is built.

    References:
        - [Veeling et al., 2018](https://arxiv.org/abs/1806.03962)
        - [Romero et al., 2020](https://arxiv.org/abs/2002.03830), appendix
          B. Attention is that of their code: two hidden units, as many as
          channels in the first layer (the paper reduces by 16); spatial
          kernels of 7, in the last block of 5 and at the end of 3, with
          dilation rates from 4 down to 1 (the paper has 7, not dilated).
          Kernels start as in their code: uniform within `sqrt(2 / (channels
          k^2))`, a fan-in without the order; in z2 normal with the variance `2
          / fan-in`.
    """
    group = groups.get(group)
    if filters is None:
        filters = convolution.default_width(WIDTHS, group)
    network = Network(
        "PCamDenseNet",
        group=group,
        attention=attention,
        filters=filters,
        input_shape=input_shape,
        classes=classes,
        classifier_activation=classifier_activation,
        normalization=normalization,
        downsampling=downsampling,
        weights=weights,
        planar=ends.he_normal,
        scale=convolution.HE_SCALE,
        windows=_windows,
    )
    width = network.filters

    inputs, x = network.start()
    settings = _attention(x, FIRST_ATTENTION, first=True)
    x = network.convolution(x, width, 3, settings, name="conv1")
    for index, attended in enumerate(BLOCK_ATTENTION):
        if index:
            x = _transition(
                network,
                x,
                f"transition{index}",
                TRANSITION_ATTENTION[index - 1],
            )
        x = _block(network, x, f"block{index + 1}", attended)
    x = convolution.batch_norm_activation(x, "{}_out")
    settings = _attention(x, LAST_ATTENTION)
    x = network.convolution(
        x, network.classes, 1, settings, rescaled=False, name="conv_out"
    )
    x = ends.global_mean(x)
    name = name or f"pcam_densenet_{group.name}{network.suffix}"
    return network.finish(inputs, x, name)


def _block(
    network: Network, x: Any, name: str, attended: tuple[int, int]
) -> Any:
    """Adds the channels of one convolution without padding."""
    y = convolution.batch_norm_activation(x, name + "_{}")
    y = network.convolution(
        y, network.filters, 3, _attention(y, attended), name=f"{name}_conv"
    )
    x = keras.layers.Cropping3D(
        (1, 1, 0), data_format="channels_last", name=f"{name}_crop"
    )(x)
    return keras.layers.Concatenate(name=f"{name}_concat")([y, x])


def _transition(
    network: Network, x: Any, name: str, attended: tuple[int, int]
) -> Any:
    """Halves the size."""
    x = convolution.batch_norm_activation(x, name + "_{}")
    return network.halving_convolution(
        x,
        x.shape[-1],
        1,
        _attention(x, attended),
        name=f"{name}_conv",
        pool=f"{name}_pool",
        mode="mean",
    )


def _attention(
    x: Any, attended: tuple[int, int], first: bool = False
) -> convolution.AttentionSettings:
    """Returns the settings of a layer with this kernel size and dilation."""
    kernel_size, dilation_rate = attended
    return convolution.two_units(
        x, first, kernel_size=kernel_size, dilation_rate=dilation_rate
    )


def _windows(exact: bool) -> list[Window]:
    halving = [Window(1), Window(2, 2)] if exact else [Window(1, 2)]
    windows = [Window(3)]
    for index in range(len(BLOCK_ATTENTION)):
        windows += [*(halving if index else []), Window(3)]
    return windows
