"""Self-attention networks (SAN) with ACmix, and the plain ones."""

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

WIDTHS = (64, 256, 512, 1024, 2048)
REDUCTION = 4  # channels of a stage over those of its mixers
SHARE = 8  # channels that share their attention weights
BLOCKS = {
    10: (2, 1, 2, 4, 1),
    15: (3, 2, 3, 5, 2),
    19: (3, 3, 4, 6, 3),
}
WINDOWS = (3, 7, 7, 7, 7)  # rows and columns that attention sees
MIXERS = ("acmix", "attention")


@register(imagenet.with_plain("acmix_san10", "attention"))
def ACmixSAN10(
    include_top: bool = True,
    weights: str | Path | None = None,
    input_shape: tuple[int | None, int | None, int] = (224, 224, 3),
    pooling: str | None = None,
    classes: int = 1000,
    classifier_activation: str | None = None,
    name: str | None = None,
    mixer: str = "acmix",
    stem: str = "imagenet",
    normalization: ends.Statistics | None = None,
    features_only: bool = False,
) -> keras.Model:
    """SAN10 with `PatchwiseACmix2D` in place of its patchwise attention.

    The stages have 2, 1, 2, 4 and 1 blocks; all else is as in `ACmixSAN19`.
    With 1000 classes the network has 11,994,612 trainable parameters (12.1 M in
    the paper), and 11,841,124 with `mixer="attention"`. It takes 5.72 G
    multiply-adds, and 0.12 G more in each call to compose kernels. With a
    grouped convolution it would take 1.89 G (1.9 G in the paper), and
    `mixer="attention"` takes 1.79 G.

    Args:
        include_top, weights, input_shape, pooling: see `ACmixSAN19`.
        classes, classifier_activation, name: see `ACmixSAN19`.
        mixer, stem: see `ACmixSAN19`.
        normalization, features_only: see `ACmixSAN19`.

    Returns:
        See `ACmixSAN19`.

    Raises:
        ValueError: for bad arguments, before anything is built.

    References:
        - [Pan et al., 2022](https://arxiv.org/abs/2111.14556), see
          `ACmixSAN19`.
    """
    design = _Design(mixer, stem)
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
    return _network(10, design, frame)


@register(imagenet.with_plain("acmix_san15", "attention"))
def ACmixSAN15(
    include_top: bool = True,
    weights: str | Path | None = None,
    input_shape: tuple[int | None, int | None, int] = (224, 224, 3),
    pooling: str | None = None,
    classes: int = 1000,
    classifier_activation: str | None = None,
    name: str | None = None,
    mixer: str = "acmix",
    stem: str = "imagenet",
    normalization: ends.Statistics | None = None,
    features_only: bool = False,
) -> keras.Model:
    """SAN15 with `PatchwiseACmix2D` in place of its patchwise attention.

    The stages have 3, 2, 3, 5 and 2 blocks; all else is as in `ACmixSAN19`.
    With 1000 classes the network has 16,414,134 trainable parameters (16.6 M in
    the paper), and 16,181,310 with `mixer="attention"`. It takes 8.37 G
    multiply-adds, and 0.20 G more in each call to compose kernels. With a
    grouped convolution it would take 2.63 G (2.7 G in the paper), and
    `mixer="attention"` takes 2.48 G.

    Args:
        include_top, weights, input_shape, pooling: see `ACmixSAN19`.
        classes, classifier_activation, name: see `ACmixSAN19`.
        mixer, stem: see `ACmixSAN19`.
        normalization, features_only: see `ACmixSAN19`.

    Returns:
        See `ACmixSAN19`.

    Raises:
        ValueError: for bad arguments, before anything is built.

    References:
        - [Pan et al., 2022](https://arxiv.org/abs/2111.14556), see
          `ACmixSAN19`.
    """
    design = _Design(mixer, stem)
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
    return _network(15, design, frame)


@register(imagenet.with_plain("acmix_san19", "attention"))
def ACmixSAN19(
    include_top: bool = True,
    weights: str | Path | None = None,
    input_shape: tuple[int | None, int | None, int] = (224, 224, 3),
    pooling: str | None = None,
    classes: int = 1000,
    classifier_activation: str | None = None,
    name: str | None = None,
    mixer: str = "acmix",
    stem: str = "imagenet",
    normalization: ends.Statistics | None = None,
    features_only: bool = False,
) -> keras.Model:
    """SAN19 with `PatchwiseACmix2D` in place of its patchwise attention.

    The network is a 1 x 1 convolution to 64 channels, five stages of 3, 3, 4, 6
    and 3 blocks with 64, 256, 512, 1024 and 2048 channels, the mean over space
    and a dense layer to the classes. A stage begins with a 2 x 2 pooling and a
    1 x 1 convolution. A block adds `expand(relu(bn(mixer(relu(bn(x))))))` to
    `x`, with a quarter of the channels in the mixer, whose windows have 3 rows
    and columns in the first stage and 7 later. There are 20,829,278 trainable
    parameters for 1000 classes, with `mixer="attention"` 20,518,470.

    On an image of 224 x 224 pixels it takes 10.88 G multiply-adds, and 0.27 G
    in each call, whatever the number of images, to compose the kernels: the
    convolution path runs as one dense convolution. With the grouped convolution
    of the paper it takes 3.32 G (the paper has 3.4 G), with `mixer="attention"`
    3.13 G.

    Layers are called `conv1`, `bn1`, `relu1`, then `stage1_pool`,
    `stage1_conv`, `stage1_block1_bn1`, `..._relu1`, `..._mixer`, `..._bn2`,
    `..._relu2`, `..._expand`, `..._add`, and so on, and `stage1_bn`,
    `stage1_relu`. At the end come `global_mean`, `logits` and `predictions`, or
    without the top `global_mean` or `global_max`.

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
        mixer: "acmix", or "attention" for the plain network.
        stem: "imagenet", or "cifar" for small images: no pooling in the first
            two stages.
        normalization: `(mean, std)` of images in [0, 1], numbers or one per
            channel; the network first computes `(x - mean) / std`. None is the
            identity.
        features_only: whether the model returns the feature maps of the five
            stages, for heads for detection and segmentation. This needs
            `include_top=False`.

    Returns:
        A functional `keras.Model` from images to logits `(batch, classes)`,
        to features, or to a list of the maps of all stages, which are smaller
        than the image by 2, 4, 8, 16 and 32, with the stem "cifar" by 1, 1, 2,
        4 and 8, rounded up.

    Raises:
        ValueError: for bad arguments, before anything is built.

    References:
        - [Zhao et al., 2020](https://arxiv.org/abs/2004.13621), the patchwise
          networks, and the authors' code, https://github.com/hszhao/SAN, which
          has the numbers of parameters of `mixer="attention"`.
        - [Pan et al., 2022](https://arxiv.org/abs/2111.14556), appendix C.
          They published no code for it, and the exact form is ours, see
          `PatchwiseACmix2D`. They publish 12.1, 16.6 and 21.2 million
          parameters for the three networks, 1 to 2 % more than these have.
    """
    design = _Design(mixer, stem)
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
    return _network(19, design, frame)


@dataclasses.dataclass(frozen=True)
class _Design:
    """The settings of a network; see `ACmixSAN19`."""

    mixer: str
    stem: str

    def __post_init__(self) -> None:
        _checks.choice(self.mixer, "mixer", MIXERS)
        _checks.choice(self.stem, "stem", imagenet.STEMS)

    @property
    def first_pool(self) -> int:
        """The first stage that begins with a pooling."""
        return 1 if self.stem == "imagenet" else 3


def _network(depth: int, design: _Design, frame: imagenet.Frame) -> keras.Model:
    stages = functools.partial(_stages, design, BLOCKS[depth])
    return frame.build(imagenet.title(f"SAN{depth}", design.mixer), stages)


def _stages(
    design: _Design, depths: tuple[int, ...], x: Any
) -> tuple[list[Any], None]:
    x = _convolution(x, WIDTHS[0], "conv1", use_bias=False)
    x = imagenet.batch_norm(x, "bn1", "relu1")
    features = []
    for number, (width, count, window) in enumerate(
        zip(WIDTHS, depths, WINDOWS, strict=True), 1
    ):
        stage = f"stage{number}"
        if number >= design.first_pool:
            x = keras.layers.MaxPooling2D(
                2,
                padding="same",  # odd sizes keep their last row
                data_format="channels_last",
                name=f"{stage}_pool",
            )(x)
        x = _convolution(x, width, f"{stage}_conv", use_bias=False)
        for index in range(1, count + 1):
            x = _block(x, design.mixer, window, f"{stage}_block{index}")
        x = imagenet.batch_norm(x, f"{stage}_bn", f"{stage}_relu")
        features.append(x)
    return features, None


def _block(x: Any, mixer: str, window: int, name: str) -> Any:
    width = x.shape[-1]
    y = imagenet.batch_norm(x, f"{name}_bn1", f"{name}_relu1")
    y = layers.PatchwiseACmix2D(
        width // REDUCTION,
        attention_kernel_size=window,
        share=SHARE,
        paths=imagenet.paths(mixer),
        data_format="channels_last",
        name=f"{name}_mixer",
    )(y)
    y = imagenet.batch_norm(y, f"{name}_bn2", f"{name}_relu2")
    y = _convolution(y, width, f"{name}_expand", use_bias=True)
    return keras.layers.Add(name=f"{name}_add")([x, y])


def _convolution(x: Any, filters: int, name: str, use_bias: bool) -> Any:
    """A 1 x 1 convolution, initialised as in PyTorch."""
    return keras.layers.Conv2D(
        filters,
        1,
        use_bias=use_bias,
        kernel_initializer=keras.initializers.VarianceScaling(
            1 / 3, "fan_in", "uniform"
        ),
        data_format="channels_last",
        name=name,
    )(x)
