"""The 44-layer residual network for CIFAR."""

from pathlib import Path
from typing import Any

import keras

from keras_equiattn import convert
from keras_equiattn import groups
from keras_equiattn.applications.networks.common import convolution
from keras_equiattn.applications.networks.common import ends
from keras_equiattn.applications.networks.common.convolution import two_units
from keras_equiattn.applications.networks.common.network import Network
from keras_equiattn.applications.networks.common.network import variants
from keras_equiattn.applications.networks.common.sizes import Window
from keras_equiattn.applications.registry import register
from keras_equiattn.layers import SpatialPooling2D

# The paper's channels of the three stages; other groups get `group_width` of
# the planar ones.
WIDTHS = {"z2": (32, 64, 128), "p4m": (11, 23, 45)}
BLOCKS = 7  # in each stage


@register(variants("resnet44_{}", "z2 p4m p4m_input"), convert.att_gconvs)
def ResNet44(
    group: str | groups.Group = "p4m",
    attention: str | None = None,
    filters: int | None = None,
    input_shape: tuple[int, int, int] = (32, 32, 3),
    classes: int = 10,
    classifier_activation: str | None = None,
    normalization: ends.Statistics | None = None,
    downsampling: str | None = None,
    weights: str | Path | None = None,
    name: str | None = None,
) -> keras.Model:
    """The residual network with 44 convolutions, for any group.

    The network has a 3 x 3 convolution, three stages of seven blocks, batch
    normalisation, ReLU, the mean over space, a 1 x 1 convolution to the classes
    and the mean over the group. A block adds to its input two 3 x 3
    convolutions with zero padding, each after batch normalisation and ReLU. The
    first block of the second and third stage changes the width: its first
    convolution is followed by 2 x 2 max pooling, and so is the 1 x 1
    convolution of its shortcut. There is no bias and no dropout.

    Trainable parameters:

    | attention | z2, filters 32, 64, 128 | p4m, filters 11, 23, 45 |
    |---|---|---|
    | None | 2,636,064 | 2,621,683 |
    | `"input"` | | 2,693,911 |

    Layers are called `conv1`, `stage1_block1_bn1`, `..._relu1`, `..._conv1`,
    `..._bn2`, `..._relu2`, `..._conv2`, `..._add`, and so on to
    `stage3_block7_add`; in `stage2_block1` and `stage3_block1` there are also
    `..._pool1`, `..._shortcut` and `..._shortcut_pool`. At the end come
    `bn_out`, `relu_out`, `pool_out`, `conv_out`, `global_mean` and
    `predictions`. Input attention comes before a convolution as
    `<its name>_attention`.

    Args:
        group: a group or its name.
        attention: the attention of every convolution, shortcuts included. None,
            "full", "channel" or "spatial" (on the responses,
            `AttentiveGroupConv2D`), "input" (`InputAttention`) or "co"
            (`CoAttentiveGroupConv2D`). The paper has None and "input"; the
            others use the settings of "input".
        filters: channels of the first stage; the next two have twice and four
            times as many. None is the paper's: 32, 64, 128 for z2 and
            11, 23, 45 for p4m; each of the planar widths over sqrt(order) for
            other groups on the grid, and over sqrt(2 order / 3) for those with
            steerable filters (p8, p12, p16 and their mirrored forms).
        input_shape: `(height, width, channels)`. Unless downsampling is
            strided, height and width must be divisible by 4; z2 accepts any
            size from 4 on, and z2m any height from 4 on.
        classes: number of classes.
        classifier_activation: None returns logits.
        normalization: `(mean, std)` of images in [0, 1], numbers or one per
            channel; the network first computes `(x - mean) / std`. None is the
            identity.
        downsampling: None is "antialiased" for groups with turns between the
            quarter turns (p8, p12, p16 and their mirrored forms), and "exact"
            for all others. "exact" pools after convolutions. "antialiased"
            pads one mirrored pixel (a layer `<name of the pooling>_pad`) and
            takes binomial means of 4 x 4 pixels instead. "strided" gives these
            convolutions, shortcuts included, strides of 2, as residual networks
            were published: on 32 x 32 pixels this is the approximate network of
            the paper's appendix C, and on sizes such as 33 x 33 it is exact
            again.
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
        - [He et al., 2016](https://arxiv.org/abs/1603.05027)
        - [Cohen and Welling, 2016](https://arxiv.org/abs/1602.07576),
          section 8.2
        - [Romero et al., 2020](https://arxiv.org/abs/2002.03830), appendix B.
          Attention is that of their code: two hidden units, as many as
          channels in the first layer (the paper reduces by 16). Kernels start
          as in their code: uniform within `sqrt(2 / (channels k^2))`, a fan-in
          without the order, and where it matters times the constant by which
          their code multiplies sums over the group; in z2 normal with the
          variance `2 / fan-in`. Where strides replace pooling, Keras pads an
          even size on one side, PyTorch on both.
    """
    group = groups.get(group)
    if filters is None:
        widths = WIDTHS.get(group.name) or tuple(
            convolution.group_width(planar, group) for planar in WIDTHS["z2"]
        )
    network = Network(
        "ResNet44",
        group=group,
        attention=attention,
        filters=widths[0] if filters is None else filters,
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
    if filters is not None:
        widths = tuple(network.filters * factor for factor in (1, 2, 4))

    inputs, x = network.start()
    x = network.convolution(
        x,
        widths[0],
        3,
        two_units(x, first=True),
        padding="same",
        name="conv1",
    )
    for stage, width in enumerate(widths, 1):
        for block in range(1, BLOCKS + 1):
            x = _block(
                network,
                x,
                width,
                halves=stage > 1 and block == 1,
                name=f"stage{stage}_block{block}",
            )
    x = convolution.batch_norm_activation(x, "{}_out")
    size = tuple(x.shape[1:3])
    x = SpatialPooling2D(
        size,
        mode="mean",
        group=group,
        exact=size[0] == size[1],  # only a square window is exact
        data_format="channels_last",
        name="pool_out",
    )(x)
    x = network.convolution(
        x,
        network.classes,
        1,
        two_units(x),
        rescaled=False,
        name="conv_out",
    )
    x = ends.global_mean(x)
    name = name or f"resnet44_{group.name}{network.suffix}"
    return network.finish(inputs, x, name)


def _block(
    network: Network, x: Any, width: int, halves: bool, name: str
) -> Any:
    """Two convolutions added to a shortcut.

    The sum keeps the scales of its terms, so the convolutions right before it
    start with the authors' constant.
    """
    y = convolution.batch_norm_activation(x, f"{name}_{{}}1")
    if halves:
        y = network.halving_convolution(
            y,
            width,
            3,
            two_units(y),
            padding="same",
            name=f"{name}_conv1",
            pool=f"{name}_pool1",
        )
        x = network.halving_convolution(
            x,
            width,
            1,
            two_units(x),
            rescaled=False,
            name=f"{name}_shortcut",
            pool=f"{name}_shortcut_pool",
        )
    else:
        y = network.convolution(
            y,
            width,
            3,
            two_units(y),
            padding="same",
            name=f"{name}_conv1",
        )
    y = convolution.batch_norm_activation(y, f"{name}_{{}}2")
    y = network.convolution(
        y,
        width,
        3,
        two_units(y),
        rescaled=False,
        padding="same",
        name=f"{name}_conv2",
    )
    return keras.layers.Add(name=f"{name}_add")([x, y])


def _windows(exact: bool) -> list[Window]:
    if exact:
        return [Window(3, 1, "same"), *2 * [Window(2, 2)]]
    # Shortcuts with their windows of 1 fit, and are exact, where these do.
    return 2 * [Window(3, 2, "same")]
