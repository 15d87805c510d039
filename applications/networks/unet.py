"""A U-Net on a group: scores or directions for every pixel."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from keras_equiattn import _checks
from keras_equiattn import groups
from keras_equiattn import layers
from keras_equiattn.applications.networks.common import convolution
from keras_equiattn.applications.networks.common import ends
from keras_equiattn.applications.networks.common.network import Network
from keras_equiattn.applications.registry import register

PLANAR_WIDTH = 16
WINDOW = 5  # rows and columns that attention sees
HEADS = 4
MIXERS: Mapping[str, Any] = {
    "conv": None,
    "asc": layers.AffineSelfConv2D,
    "acmix": layers.ACmix2D,
}
OUTPUTS = ("scores", "vectors", "axes")


@register({f"unet_{group}": {"group": group} for group in ("z2", "p4", "p4m")})
@register({"unet_p4_input": {"group": "p4", "attention": "input"}})
@register(
    {
        f"unet_p4_{mixer}": {"group": "p4", "mixer": mixer}
        for mixer in ("asc", "acmix")
    }
)
def GroupUNet(
    group: str | groups.Group = "p4",
    depth: int = 3,
    width: int | None = None,
    attention: str | None = None,
    mixer: str = "conv",
    outputs: str = "scores",
    input_shape: tuple[int, int, int] = (32, 32, 1),
    classes: int = 2,
    classifier_activation: str | None = None,
    normalization: ends.Statistics | None = None,
    weights: str | Path | None = None,
    name: str | None = None,
) -> keras.Model:
    """A U-Net for any group: from images to scores or vectors of each pixel.

    The way down has `depth` blocks of two 3 x 3 convolutions, each with batch
    normalisation and ReLU, and 2 x 2 max pooling after each block. The first
    block has `width` channels, and the number doubles after each pooling. On
    the way up, each level is upsampled to twice the size, convolved to half the
    channels, and concatenated with the output of the block of the same size.
    The last feature map is projected to an image.

    Layers are called `down1_conv1`, `down1_bn1`, `down1_relu1`, ...,
    `down1_pool`, ..., `middle_conv1`, ..., `up1_upsampling`, `up1_conv0`,
    `up1_join`, ..., `features_conv1`, `projection`, `logits`, `predictions`. In
    `up1`, the resolution is that of `down1`.

    Args:
        group: a group or its name. "z2" is the plain U-Net.
        depth: how many times the size is halved.
        width: channels of the first block for each element of the group. None
            is 16 for z2, 16 / sqrt(order) for other groups on the grid and 16 /
            sqrt(2 order / 3) for those with steerable filters (p8, p12, p16 and
            their mirrored forms), which gives about as many parameters; with a
            `mixer` other than "conv", the nearest multiple of 4.
        attention: the attention of every 3 x 3 convolution. None, "full",
            "channel" or "spatial" (on the responses, `AttentiveGroupConv2D`),
            "input" (`InputAttention`) or "co" (`CoAttentiveGroupConv2D`).
        mixer: the second layer of each block: "conv", or attention over windows
            of 5 x 5 pixels with 4 heads, "asc" (`AffineSelfConv2D`) or "acmix"
            (`ACmix2D`).
        outputs: "scores": numbers for each pixel, such as logits of classes;
            "vectors": vectors for each pixel, which turn with the image;
            "axes": the same for directions without a sign, see
            `GroupToVector2D`.
        input_shape: `(height, width, channels)`; height and width must be
            divisible by `2 ** depth`.
        classes: the number of scores, or of vectors.
        classifier_activation: the activation of scores; None returns logits.
        normalization: `(mean, std)` of images in [0, 1], numbers or one per
            channel; the network first computes `(x - mean) / std`. None is the
            identity.
        weights: None (random) or the path of a weights file.
        name: name of the model.

    Returns:
        A functional `keras.Model` from images to `(batch, height, width,
        classes)`, or `(batch, height, width, 2 classes)` for vectors: the
        component along the row axis, which points down, then that along the
        column axis.

    Symmetry:
        Scores and vectors move with their pixels when the group acts on the
        image, and vectors turn as well: up to rounding for groups on the grid,
        and for other groups only under their 90-degree subgroup. Under other
        turns max pooling and upsampling, which repeats pixels, are far off.

    Raises:
        ValueError: for bad arguments, before anything is built.

    References:
        - [Ronneberger et al., 2015](https://arxiv.org/abs/1505.04597). Here
          convolutions are padded, so that outputs have the size of the image,
          and upsampling repeats pixels, without a transposed convolution.
        - [Winkens et al., 2018](https://arxiv.org/abs/1807.00583), on p4m
    """
    group = groups.get(group)
    _checks.integer(depth, "depth")
    _checks.choice(mixer, "mixer", MIXERS)
    _checks.choice(outputs, "outputs", OUTPUTS)
    multiple = 1 if mixer == "conv" else HEADS
    if width is None:
        width = convolution.group_width(PLANAR_WIDTH, group, multiple=multiple)
    elif _checks.integer(width, "width") % multiple:
        raise ValueError(
            f"width={width} is not divisible by the {HEADS} heads of "
            f"mixer='{mixer}'."
        )
    if outputs != "scores" and classifier_activation is not None:
        raise ValueError(
            f"outputs='{outputs}' takes no `classifier_activation`: its values "
            f"would not turn with the image. Received: {classifier_activation}"
        )
    network = Network(
        "GroupUNet",
        group=group,
        attention=attention,
        filters=width,
        input_shape=input_shape,
        classes=classes,
        classifier_activation=classifier_activation,
        normalization=normalization,
        downsampling="exact",
        weights=weights,
        planar=ends.he_normal,
    )
    if any(n % 2**depth for n in network.input_shape[:2]):
        raise ValueError(
            f"`input_shape` of GroupUNet with depth={depth} must have a height "
            f"and width divisible by {2**depth}. "
            f"Received: {network.input_shape}"
        )

    inputs, x = network.start()
    skips = []
    for level in range(1, depth + 1):
        x = _block(network, x, width * 2 ** (level - 1), mixer, f"down{level}")
        skips.append(x)
        x = network.pool(x, f"down{level}_pool")
    x = _block(network, x, width * 2**depth, mixer, "middle")
    for level in range(depth, 0, -1):
        filters = width * 2 ** (level - 1)
        x = layers.SpatialUpSampling2D(
            2,
            group=group,
            data_format="channels_last",
            name=f"up{level}_upsampling",
        )(x)
        x = _convolution(network, x, filters, f"up{level}", 0)
        join = keras.layers.Concatenate(name=f"up{level}_join")
        x = join([skips[level - 1], x])
        x = _block(network, x, filters, mixer, f"up{level}")
    x = _images(network, x, outputs)
    if name is None:
        suffix = network.suffix + ("" if mixer == "conv" else f"_{mixer}")
        name = f"unet_{group.name}{suffix}"
    return network.finish(inputs, x, name)


def _block(
    network: Network, x: Any, filters: int, mixer: str, name: str
) -> Any:
    """Two convolutions, or one and attention over windows."""
    x = _convolution(network, x, filters, name, 1)
    if mixer == "conv":
        return _convolution(network, x, filters, name, 2)
    size = "attention_kernel_size" if mixer == "acmix" else "kernel_size"
    x = MIXERS[mixer](
        filters,
        num_heads=HEADS,
        group=network.group,
        data_format="channels_last",
        name=f"{name}_attention",
        **{size: WINDOW},
    )(x)
    return convolution.batch_norm_activation(x, f"{name}_{{}}2")


def _convolution(
    network: Network,
    x: Any,
    filters: int,
    name: str,
    number: int,
    size: int = 3,
) -> Any:
    """A convolution with zero padding, batch normalisation and ReLU."""
    x = convolution.group_convolution(
        x,
        filters,
        size,
        group=network.group,
        attention=network.attention,
        settings=convolution.two_units(x, first=len(x.shape) == 4),
        kernel_initializer=ends.he_normal(),
        padding="same",
        name=f"{name}_conv{number}",
    )
    return convolution.batch_norm_activation(x, f"{name}_{{}}{number}")


def _images(network: Network, x: Any, outputs: str) -> Any:
    """The feature map as an image of scores, or of vectors."""
    options: dict[str, Any] = {
        "group": network.group,
        "data_format": "channels_last",
        "dtype": ends.end_dtype(),
        "name": "projection",
    }
    if outputs == "scores":
        # More channels first, as the mean over the poses discards much of them.
        x = _convolution(network, x, 4 * network.filters, "features", 1, size=1)
        x = layers.GroupProjection("mean", **options)(x)
        return ends.logits(x, network.classes)
    x = layers.GroupConv2D(
        2 * network.classes,
        1,
        use_bias=False,  # the poses of a constant cancel each other
        kernel_initializer=ends.he_normal(),
        **{**options, "name": "votes"},
    )(x)
    return layers.GroupToVector2D(signed=outputs == "vectors", **options)(x)
