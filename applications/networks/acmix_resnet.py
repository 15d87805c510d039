"""Residual networks for ImageNet with ACmix, and the plain ones."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import keras

from keras_equiattn import _checks
from keras_equiattn import layers
from keras_equiattn.applications.networks.common import ends
from keras_equiattn.applications.networks.common import imagenet
from keras_equiattn.applications.registry import register

WIDTHS = (64, 128, 256, 512)
EXPANSION = 4  # output channels of a block over its width
BLOCKS = {26: (1, 2, 4, 1), 38: (2, 3, 5, 2), 50: (3, 4, 6, 3)}
WINDOW = 7  # rows and columns that attention sees
MIXERS = ("acmix", "conv")


@register(imagenet.with_plain("acmix_resnet26", "conv"))
def ACmixResNet26(
    include_top: bool = True,
    weights: str | Path | None = None,
    input_shape: tuple[int | None, int | None, int] = (224, 224, 3),
    pooling: str | None = None,
    classes: int = 1000,
    classifier_activation: str | None = None,
    name: str | None = None,
    mixer: str = "acmix",
    stem: str = "imagenet",
    num_heads: int = 4,
    normalization: ends.Statistics | None = None,
    features_only: bool = False,
) -> keras.Model:
    """ResNet26 with `ACmix2D` in place of its 3 x 3 convolutions.

    The stages have 1, 2, 4 and 1 blocks; all else is as in `ACmixResNet50`.
    With 1000 classes the network has 10,487,816 trainable parameters, and
    13,696,552 with `mixer="conv"`. It takes 2.94 G multiply-adds, and 0.06 G
    more in each call to compose kernels. The form of the paper takes 2.22 G,
    and `mixer="conv"` takes 2.34 G.

    Args:
        include_top, weights, input_shape, pooling: see `ACmixResNet50`.
        classes, classifier_activation, name: see `ACmixResNet50`.
        mixer, stem, num_heads: see `ACmixResNet50`.
        normalization, features_only: see `ACmixResNet50`.

    Returns:
        See `ACmixResNet50`.

    Raises:
        ValueError: for bad arguments, before anything is built.

    References:
        - [Pan et al., 2022](https://arxiv.org/abs/2111.14556), table 2, see
          `ACmixResNet50`.
    """
    design = _Design(mixer, stem, num_heads)
    frame = imagenet.Frame(
        include_top,
        weights,
        input_shape,
        pooling,
        classes,
        classifier_activation,
        name,
        normalization,
        features_only,
    )
    return _network(26, design, frame)


@register(imagenet.with_plain("acmix_resnet38", "conv"))
def ACmixResNet38(
    include_top: bool = True,
    weights: str | Path | None = None,
    input_shape: tuple[int | None, int | None, int] = (224, 224, 3),
    pooling: str | None = None,
    classes: int = 1000,
    classifier_activation: str | None = None,
    name: str | None = None,
    mixer: str = "acmix",
    stem: str = "imagenet",
    num_heads: int = 4,
    normalization: ends.Statistics | None = None,
    features_only: bool = False,
) -> keras.Model:
    """ResNet38 with `ACmix2D` in place of its 3 x 3 convolutions.

    The stages have 2, 3, 5 and 2 blocks; all else is as in `ACmixResNet50`.
    With 1000 classes the network has 14,410,896 trainable parameters, and
    19,626,792 with `mixer="conv"`. It takes 4.01 G multiply-adds, and 0.10 G
    more in each call to compose kernels. The form of the paper takes 2.86 G,
    and `mixer="conv"` takes 3.22 G.

    Args:
        include_top, weights, input_shape, pooling: see `ACmixResNet50`.
        classes, classifier_activation, name: see `ACmixResNet50`.
        mixer, stem, num_heads: see `ACmixResNet50`.
        normalization, features_only: see `ACmixResNet50`.

    Returns:
        See `ACmixResNet50`.

    Raises:
        ValueError: for bad arguments, before anything is built.

    References:
        - [Pan et al., 2022](https://arxiv.org/abs/2111.14556), table 2, see
          `ACmixResNet50`.
    """
    design = _Design(mixer, stem, num_heads)
    frame = imagenet.Frame(
        include_top,
        weights,
        input_shape,
        pooling,
        classes,
        classifier_activation,
        name,
        normalization,
        features_only,
    )
    return _network(38, design, frame)


@register(imagenet.with_plain("acmix_resnet50", "conv"))
def ACmixResNet50(
    include_top: bool = True,
    weights: str | Path | None = None,
    input_shape: tuple[int | None, int | None, int] = (224, 224, 3),
    pooling: str | None = None,
    classes: int = 1000,
    classifier_activation: str | None = None,
    name: str | None = None,
    mixer: str = "acmix",
    stem: str = "imagenet",
    num_heads: int = 4,
    normalization: ends.Statistics | None = None,
    features_only: bool = False,
) -> keras.Model:
    """ResNet50 with `ACmix2D` in place of its 3 x 3 convolutions.

    The network is a 7 x 7 convolution and a 3 x 3 pooling, both with strides of
    2, four stages of 3, 4, 6 and 3 bottleneck blocks of widths 64, 128, 256 and
    512, the mean over space and a dense layer to the classes. The mixer in the
    first block of stages 2 to 4 halves the size. There are 18,333,976 trainable
    parameters for 1000 classes, with `mixer="conv"` 25,557,032.

    On an image of 224 x 224 pixels it takes 5.07 G multiply-adds, and 0.14 G in
    each call, whatever the number of images, to compose the kernels: the
    convolution path of `ACmix2D` runs as one dense convolution. With the
    grouped convolution of the paper it takes 3.50 G (the paper has 3.6 G), with
    `mixer="conv"` 4.09 G.

    Layers are called `conv1`, `bn1`, `relu1`, `pool1`, then
    `stage1_block1_conv1`, `..._bn1`, `..._relu1`, `..._acmix` or
    `..._conv2`, `..._bn2`, `..._relu2`, `..._conv3`, `..._bn3`,
    `..._shortcut`, `..._shortcut_bn`, `..._add`, `..._relu3`, and so on. At
    the end come `global_mean`, `logits` and `predictions`, or without the top
    `global_mean` or `global_max`.

    Args:
        include_top: whether the classifier is there.
        weights: None (random) or the path of a weights file.
        input_shape: `(height, width, channels)`. Height and width may be None,
            for images of any size.
        pooling: without the top: None returns feature maps, "avg" and "max"
            their mean or maximum over space.
        classes: number of classes.
        classifier_activation: None returns logits.
        name: name of the model.
        mixer: "acmix", or "conv" for the plain network.
        stem: "imagenet", or "cifar" for small images: a 3 x 3 convolution and
            no pooling.
        num_heads: the heads of the attention.
        normalization: `(mean, std)` of images in [0, 1], numbers or one per
            channel; the network first computes `(x - mean) / std`. None is the
            identity.
        features_only: whether the model returns the feature maps of the four
            stages, for heads for detection and segmentation. This needs
            `include_top=False`.

    Returns:
        A functional `keras.Model` from images to logits `(batch, classes)`,
        to features, or to a list of the maps of all stages, which are smaller
        than the image by 4, 8, 16 and 32, with the stem "cifar" by 1, 2, 4 and
        8, rounded up.

    Raises:
        ValueError: for bad arguments, before anything is built.

    References:
        - [Pan et al., 2022](https://arxiv.org/abs/2111.14556), table 2, and
          the authors' code, which has these numbers of parameters. Weights are
          initialised differently here. Their code draws the kernels of all
          convolutions with variance 2 / fan-out, also those in the mixer, and
          so overwrites the shift kernels. Here these start as shifts, and the
          rest of the mixer as in `ACmix2D`: kernels of queries, keys, values,
          positions and mixing are uniform within one over the square root of
          the fan-in. Their code draws the biases of the mixer and the kernel
          and bias of the classifier in the same way; here biases start at zero,
          and the classifier with variance 2 / fan-in. Convolutions outside of
          the mixer, rates and normalisations start the same.
    """
    design = _Design(mixer, stem, num_heads)
    frame = imagenet.Frame(
        include_top,
        weights,
        input_shape,
        pooling,
        classes,
        classifier_activation,
        name,
        normalization,
        features_only,
    )
    return _network(50, design, frame)


@dataclasses.dataclass(frozen=True)
class _Design:
    """The settings of all blocks of a network; see `ACmixResNet50`."""

    mixer: str
    stem: str
    num_heads: int

    def __post_init__(self) -> None:
        _checks.choice(self.mixer, "mixer", MIXERS)
        _checks.choice(self.stem, "stem", imagenet.STEMS)
        if any(
            width % _checks.integer(self.num_heads, "num_heads")
            for width in WIDTHS
        ):
            raise ValueError(
                f"`num_heads` must divide {WIDTHS[0]}, the width of the first "
                f"stage. Received: {self.num_heads}"
            )


def _network(depth: int, design: _Design, frame: imagenet.Frame) -> keras.Model:
    stages = functools.partial(_stages, design, BLOCKS[depth])
    title = imagenet.title(f"ResNet{depth}", design.mixer)
    return frame.build(title, stages)


def _stages(
    design: _Design, depths: tuple[int, ...], x: Any
) -> tuple[list[Any], None]:
    if design.stem == "imagenet":
        x = _convolution(x, WIDTHS[0], 7, 2, name="conv1")
    else:
        x = _convolution(x, WIDTHS[0], 3, 1, name="conv1")
    x = imagenet.batch_norm(x, "bn1", relu="relu1")
    if design.stem == "imagenet":
        x = keras.layers.ZeroPadding2D(
            1, data_format="channels_last", name="pool1_pad"
        )(x)
        x = keras.layers.MaxPooling2D(
            3, 2, data_format="channels_last", name="pool1"
        )(x)
    features = []
    for stage, (width, count) in enumerate(zip(WIDTHS, depths, strict=True), 1):
        for index in range(1, count + 1):
            strides = 2 if index == 1 and stage > 1 else 1
            block = f"stage{stage}_block{index}"
            x = _block(design, x, width, strides, index == 1, block)
        features.append(x)
    return features, None


def _block(
    design: _Design, x: Any, width: int, strides: int, first: bool, name: str
) -> Any:
    y = _convolution(x, width, 1, 1, name=f"{name}_conv1")
    y = imagenet.batch_norm(y, f"{name}_bn1", relu=f"{name}_relu1")
    if design.mixer == "acmix":
        y = layers.ACmix2D(
            width,
            attention_kernel_size=WINDOW,
            num_heads=design.num_heads,
            strides=strides,
            data_format="channels_last",
            name=f"{name}_acmix",
        )(y)
    else:
        y = _convolution(y, width, 3, strides, name=f"{name}_conv2")
    y = imagenet.batch_norm(y, f"{name}_bn2", relu=f"{name}_relu2")
    y = _convolution(y, EXPANSION * width, 1, 1, name=f"{name}_conv3")
    y = imagenet.batch_norm(y, f"{name}_bn3")
    if first:
        x = _convolution(
            x, EXPANSION * width, 1, strides, name=f"{name}_shortcut"
        )
        x = imagenet.batch_norm(x, f"{name}_shortcut_bn")
    x = keras.layers.Add(name=f"{name}_add")([x, y])
    return keras.layers.ReLU(name=f"{name}_relu3")(x)


def _convolution(
    x: Any, filters: int, kernel_size: int, strides: int, name: str
) -> Any:
    """A convolution without bias, padded evenly on both sides as in PyTorch."""
    if strides > 1 and kernel_size > 1:
        x = keras.layers.ZeroPadding2D(
            kernel_size // 2, data_format="channels_last", name=f"{name}_pad"
        )(x)
    return keras.layers.Conv2D(
        filters,
        kernel_size,
        strides,
        padding="same" if strides == 1 else "valid",
        use_bias=False,
        kernel_initializer=keras.initializers.VarianceScaling(
            2.0, "fan_out", "untruncated_normal"
        ),
        data_format="channels_last",
        name=name,
    )(x)
