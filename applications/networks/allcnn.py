"""The all-convolutional network All-CNN-C for CIFAR."""

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

# The paper's channels of the first three convolutions; all others but the last
# have twice as many. Other groups get `group_width` of the planar one.
WIDTHS = {"z2": 96, "p4": 48, "p4m": 32}

KERNEL_SIZES = (3, 3, 3, 3, 3, 3, 3, 1, 1)
HALVING = (3, 6)  # convolutions that are followed by pooling and dropout
INPUT_DROPOUT = 0.2
DROPOUT = 0.5
SCALE = 0.035  # scale of the kernels at the start, see `Network`


@register(
    variants(
        "allcnnc_{}",
        "z2 p4 p4_full p4_channel p4_spatial p4_input p4m p4m_input",
    ),
    convert.att_gconvs,
)
def AllCNNC(
    group: str | groups.Group = "p4",
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
    """All-CNN-C, for any group, with attention or not.

    The network has dropout 0.2 on the image, seven 3 x 3 convolutions with zero
    padding and two 1 x 1 convolutions, each with batch normalisation and ReLU,
    the last one included, and the mean over space and group. Max pooling of 2 x
    2 pixels follows the third and the sixth convolution, and dropout 0.5
    follows their ReLU. There is no bias.

    Trainable parameters:

    | attention | z2, 96 filters | p4, 48 filters | p4m, 32 filters |
    |---|---|---|---|
    | None | 1,370,996 | 1,370,372 | 1,219,252 |
    | `"input"` | | 1,400,120 | 1,249,192 |
    | `"full"` | | 3,642,388 | |
    | `"channel"` | | 3,407,972 | |
    | `"spatial"` | | 1,604,788 | |

    Layers are called `input_dropout`, `conv1`, `bn1`, `relu1`, ..., `conv3`,
    `pool3`, `bn3`, `relu3`, `dropout3`, ..., `conv9`, `bn9`, `relu9`,
    `global_mean`, `predictions`. Input attention comes before a convolution
    as `<its name>_attention`.

    Args:
        group: a group or its name.
        attention: the attention of every convolution. None, "full", "channel"
            or "spatial" (on the responses, `AttentiveGroupConv2D`), "input"
            (`InputAttention`) or "co" (`CoAttentiveGroupConv2D`). The paper has
            results for None and "input"; "full" needs far more memory and time.
        filters: channels of the first three convolutions; the next five have
            twice as many. None is the paper's: 96 for z2, 48 for p4, 32 for
            p4m, 96 / sqrt(order) for other groups on the grid, and 96 / sqrt(2
            order / 3) for those with steerable filters (p8, p12, p16 and their
            mirrored forms).
        input_shape: `(height, width, channels)`. Unless downsampling is
            strided, height and width must be divisible by 4; z2 accepts any
            size from 4 on, and z2m any height from 4 on.
        classes: number of classes.
        classifier_activation: None returns logits, which are never negative.
        normalization: `(mean, std)` of images in [0, 1], numbers or one per
            channel; the network first computes `(x - mean) / std`. None is the
            identity.
        downsampling: None is "antialiased" for groups with turns between the
            quarter turns (p8, p12, p16 and their mirrored forms), and "exact"
            for all others. "exact" pools after the third and the sixth
            convolution. "antialiased" pads one mirrored pixel (a layer `<name
            of the pooling>_pad`) and takes binomial means of 4 x 4 pixels
            instead. "strided" gives these convolutions strides of 2, as
            All-CNN-C was published: on 32 x 32 pixels this is the approximate
            network of the paper's appendix C, and on sizes such as 33 x 33 it
            is exact again.
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
        - [Springenberg et al., 2014](https://arxiv.org/abs/1412.6806)
        - [Cohen and Welling, 2016](https://arxiv.org/abs/1602.07576),
          section 8.2
        - [Romero et al., 2020](https://arxiv.org/abs/2002.03830), appendix B.
          Attention reduces channels by 16, but not those of the image, as only
          their code shows. Their code for "full" attention does not run, and
          that for "spatial" has strides besides pooling; the parameters are the
          same. Kernels start as in their code: uniform within `0.035 /
          sqrt(channels k^2)`, a fan-in without the order; in z2 normal with
          standard deviation 0.05. Where strides replace pooling, Keras pads an
          even size on one side, PyTorch on both.
    """
    group = groups.get(group)
    if filters is None:
        filters = convolution.default_width(WIDTHS, group)
    network = Network(
        "AllCNNC",
        group=group,
        attention=attention,
        filters=filters,
        input_shape=input_shape,
        classes=classes,
        classifier_activation=classifier_activation,
        normalization=normalization,
        downsampling=downsampling,
        weights=weights,
        planar=lambda: keras.initializers.RandomNormal(stddev=0.05),
        scale=SCALE,
        windows=_windows,
    )

    inputs, x = network.start()
    x = keras.layers.Dropout(INPUT_DROPOUT, name="input_dropout")(x)
    for index, kernel_size in enumerate(KERNEL_SIZES, 1):
        width = network.filters if index <= 3 else 2 * network.filters
        if index == len(KERNEL_SIZES):
            width = network.classes
        options: dict[str, Any] = {
            "settings": convolution.AttentionSettings(
                reduction_ratio=1 if index == 1 else 16, scale=SCALE
            ),
            "padding": "same",
            "name": f"conv{index}",
        }
        if index in HALVING:
            x = network.halving_convolution(
                x, width, kernel_size, pool=f"pool{index}", **options
            )
        else:
            x = network.convolution(x, width, kernel_size, **options)
        x = convolution.batch_norm_activation(x, f"{{}}{index}")
        if index in HALVING:
            x = keras.layers.Dropout(DROPOUT, name=f"dropout{index}")(x)
    x = ends.global_mean(x)
    name = name or f"allcnnc_{group.name}{network.suffix}"
    return network.finish(inputs, x, name)


def _windows(exact: bool) -> list[Window]:
    windows = []
    for index, kernel_size in enumerate(KERNEL_SIZES, 1):
        halves = index in HALVING
        strides = 2 if halves and not exact else 1
        windows.append(Window(kernel_size, strides, "same"))
        if halves and exact:
            windows.append(Window(2, 2))
    return windows
