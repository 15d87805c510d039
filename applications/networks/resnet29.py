"""ResNets with 29 and 83 layers for CIFAR, with convolution or attention."""

import dataclasses
from pathlib import Path
from typing import Any

import keras

from keras_equiattn import _checks
from keras_equiattn import groups
from keras_equiattn import layers
from keras_equiattn.applications.networks.common import convolution
from keras_equiattn.applications.networks.common import ends
from keras_equiattn.applications.networks.common.network import Network
from keras_equiattn.applications.networks.common.sizes import Window
from keras_equiattn.applications.registry import register
from keras_equiattn.applications.registry import Variants

# The widths of the planar network; other groups get these over sqrt(order).
WIDTHS = (16, 32, 64)
EXPANSION = 4  # output channels of a block over its width
BLOCKS = {"ResNet29": 3, "ResNet83": 9}  # in each stage
WINDOW = 5  # rows and columns that attention sees
SQUEEZE_RATIO = 16  # reduction ratio in the planar network

# The values of the argument `mixer` other than "conv".
ATTENTION = {
    "sasa": layers.StandAloneSelfAttention2D,
    "simple_asc": layers.SimpleAffineSelfConv2D,
    "asc": layers.AffineSelfConv2D,
    "acmix": layers.ACmix2D,
}
MIXERS = ("conv", *ATTENTION)
HEADS = {"acmix": 4}  # as in the paper; the other mixers have 8

# The registered variants of both networks: "group[_mixer][_se]".
VARIANTS = (
    *("z2", "z2_se", "z2_sasa", "z2_simple_asc", "z2_asc", "z2_asc_se"),
    *("p4", "p4_se", "p4_sasa", "p4_simple_asc", "p4_asc", "p4_asc_se"),
    *("p4m", "p4m_asc", "z2_acmix", "p4_acmix", "p4m_acmix"),
)


def _variants(name: str) -> Variants:
    found = {}
    for variant in VARIANTS:
        group, *mixer = variant.removesuffix("_se").split("_")
        found[f"{name}_{variant}"] = {
            "group": group,
            "mixer": "_".join(mixer) or "conv",
            "squeeze_excite": variant.endswith("_se"),
        }
    return found


@register(_variants("resnet29"))
def ResNet29(
    group: str | groups.Group = "z2",
    mixer: str = "conv",
    squeeze_excite: bool = False,
    input_shape: tuple[int, int, int] = (32, 32, 3),
    classes: int = 10,
    classifier_activation: str | None = None,
    normalization: ends.Statistics | None = None,
    downsampling: str | None = None,
    weights: str | Path | None = None,
    name: str | None = None,
    num_heads: int | None = None,
    filters: int | None = None,
) -> keras.Model:
    """The bottleneck network with 29 layers, for any group.

    The network has a 3 x 3 convolution with batch normalisation and ReLU, three
    stages of three blocks, the mean over space and group, and a dense layer to
    the classes. A block is a 1 x 1 convolution to its width, the mixer, and a 1
    x 1 convolution to four times its width, each with batch normalisation, and
    ReLU after the first two. Squeeze-and-Excitation follows if asked for. The
    result is added to the shortcut, and a last ReLU follows. The first block of
    each stage has a 1 x 1 convolution with batch normalisation as its shortcut,
    and that of the second and third stage halves the size. Convolutions have no
    bias.

    The mixer is a 3 x 3 convolution, or attention over 5 x 5 pixels with
    border "zeros": what lies outside of the image takes part in the softmax. Or
    it is both in one ("acmix"), with border "reflect". With attention the last
    batch normalisation of each block starts with gains of zero: blocks start
    as their shortcuts.

    Trainable parameters for 10 classes, SE with Squeeze-and-Excitation; those
    of z2m and p4m, and of p4 with "sasa", "simple_asc" or "asc" and SE, are
    not in the paper, nor is "acmix":

    | mixer | z2 | p4 | z2m | p4m |
    |---|---|---|---|---|
    | `"conv"` | 313,114 | 309,138 | 309,785 | 313,280 |
    | `"conv"` and SE | 346,798 | 342,234 | 341,999 | 346,928 |
    | `"sasa"` | 235,162 | 269,274 | 231,578 | 293,146 |
    | `"simple_asc"` | 217,354 | 217,410 | 231,410 | 220,034 |
    | `"asc"` | 267,754 | 271,842 | 285,938 | 282,146 |
    | `"asc"` and SE | 301,438 | 304,938 | 322,346 | 316,658 |
    | `"acmix"` | 245,812 | 227,598 | 236,216 | 239,158 |
    | `"acmix"` and SE | 279,496 | 260,694 | 269,168 | 275,206 |

    Layers are called `conv1`, `bn1`, `relu1`, then `stage1_block1_conv1`,
    `..._bn1`, `..._relu1`, `..._conv2` or `..._attention`, `..._bn2`,
    `..._relu2`, `..._conv3`, `..._bn3`, `..._se`, `..._add`, `..._relu3`, and
    so on to `stage3_block3_relu3`. First blocks also have `..._shortcut` and
    `..._shortcut_bn`, and where they halve the size `..._pool` and
    `..._shortcut_pool`. At the end come `global_mean`, `logits` and
    `predictions`.

    Args:
        group: a group or its name.
        mixer: the layer that mixes pixels in a block. "conv" is a convolution,
            "sasa" `StandAloneSelfAttention2D`, "simple_asc"
            `SimpleAffineSelfConv2D`, "asc" `AffineSelfConv2D`, "acmix"
            `ACmix2D`. The paper has "conv" and "asc" on z2 and p4, "sasa" and
            "simple_asc" on z2.
        squeeze_excite: whether blocks have `SqueezeExcite`: a hidden unit for
            each `16 / order` channels.
        input_shape: `(height, width, channels)`. Unless downsampling is
            strided, height and width must be divisible by 4; z2 accepts any
            size from 4 on, and z2m any height from 4 on. Attention with strided
            downsampling needs both to be divisible by 4.
        classes: number of classes.
        classifier_activation: None returns logits.
        normalization: `(mean, std)` of images in [0, 1], numbers or one per
            channel; the network first computes `(x - mean) / std`. None is the
            identity.
        downsampling: None is "antialiased" for groups with turns between the
            quarter turns (p8, p12, p16 and their mirrored forms), and "exact"
            for all others. "exact" halves by 2 x 2 mean pooling, after the
            mixer and before the convolution of the shortcut. "antialiased"
            pads one mirrored pixel (a layer `<name of the pooling>_pad`) and
            takes binomial means of 4 x 4 pixels instead. "strided" is the
            paper's: strides of 2 in the 3 x 3 convolution and in the shortcut,
            and mean pooling after attention. On 32 x 32 pixels it is only
            approximately equivariant.
        weights: None (random) or the path of a weights file.
        name: name of the model.
        num_heads: the heads of the attention; None is 8, with "acmix" 4.
        filters: width of the blocks of the first stage, and of the first
            convolution; the other stages have twice and four times as many.
            None is 16, 32, 64 over sqrt(order), rounded; with attention,
            rounded to the nearest positive multiple of `num_heads` ("sasa": of
            `2 num_heads`). This gives the paper's 16, 32, 64 for z2 and 8, 16,
            32 for p4, and with 8 heads 8, 8, 24 for p4m.

    Returns:
        A functional `keras.Model` from images to logits `(batch, classes)`.

    Symmetry:
        Unless downsampling is strided, the logits do not change when the group
        acts on the image: up to rounding for groups on the grid, and for other
        groups only under their 90-degree subgroup.

    Raises:
        ValueError: for bad arguments, before anything is built.

    References:
        - [He et al., 2016](https://arxiv.org/abs/1512.03385)
        - [Diaconu and Worrall, 2019](https://arxiv.org/abs/1911.07704),
          section 5 and appendix C. There is no code; biases and shortcuts are
          those that give the numbers of parameters in their tables, of which
          309,138 is printed as 310k. The paper leaves open where batch
          normalisation and ReLU stand (here after attention and pooling), the
          shortcuts of networks with attention (here as in the others), and the
          border. Kernels start as in He et al., with the order in the fan-in.
    """
    return _network(
        "ResNet29",
        _Blocks(groups.get(group), mixer, squeeze_excite, num_heads, filters),
        input_shape=input_shape,
        classes=classes,
        classifier_activation=classifier_activation,
        normalization=normalization,
        downsampling=downsampling,
        weights=weights,
        name=name,
    )


@register(_variants("resnet83"))
def ResNet83(
    group: str | groups.Group = "z2",
    mixer: str = "conv",
    squeeze_excite: bool = False,
    input_shape: tuple[int, int, int] = (32, 32, 3),
    classes: int = 10,
    classifier_activation: str | None = None,
    normalization: ends.Statistics | None = None,
    downsampling: str | None = None,
    weights: str | Path | None = None,
    name: str | None = None,
    num_heads: int | None = None,
    filters: int | None = None,
) -> keras.Model:
    """The bottleneck network with 83 layers: nine blocks in each stage.

    Otherwise it is `ResNet29`.

    Trainable parameters for 10 classes of the networks that are registered, SE
    with Squeeze-and-Excitation:

    | mixer | z2 | p4 | p4m |
    |---|---|---|---|
    | `"conv"` | 869,530 | 861,522 | 875,936 |
    | `"conv"` and SE | 970,582 | 960,810 | |
    | `"sasa"` | 635,674 | 719,322 | |
    | `"simple_asc"` | 582,250 | 586,338 | |
    | `"asc"` | 733,450 | 749,634 | 801,410 |
    | `"asc"` and SE | 834,502 | 848,922 | |
    | `"acmix"` | 667,624 | 616,902 | 652,966 |

    Layers are called as in `ResNet29`, up to `stage3_block9_relu3`.

    Args:
        group, mixer, squeeze_excite: see `ResNet29`.
        input_shape, classes, classifier_activation: see `ResNet29`.
        normalization, downsampling, weights, name: see `ResNet29`.
        num_heads, filters: see `ResNet29`.

    Returns:
        A functional `keras.Model` from images to logits `(batch, classes)`.

    Symmetry:
        See `ResNet29`.

    Raises:
        ValueError: for bad arguments, before anything is built.

    References:
        - [Diaconu and Worrall, 2019](https://arxiv.org/abs/1911.07704),
          appendix C, see `ResNet29`. The paper prints no numbers of parameters
          for this network.
    """
    return _network(
        "ResNet83",
        _Blocks(groups.get(group), mixer, squeeze_excite, num_heads, filters),
        input_shape=input_shape,
        classes=classes,
        classifier_activation=classifier_activation,
        normalization=normalization,
        downsampling=downsampling,
        weights=weights,
        name=name,
    )


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """The settings of the blocks of a network; see `ResNet29`."""

    group: groups.Group
    mixer: str
    squeeze_excite: bool
    num_heads: Any  # a number after the check
    filters: int | None

    def __post_init__(self) -> None:
        _checks.choice(self.mixer, "mixer", MIXERS)
        _checks.flag(self.squeeze_excite, "squeeze_excite")
        if self.num_heads is None:
            object.__setattr__(self, "num_heads", HEADS.get(self.mixer, 8))
        _checks.integer(self.num_heads, "num_heads")
        if self.filters is None:
            return
        if _checks.integer(self.filters, "filters") % self._multiple:
            heads = "2 * num_heads" if self.mixer == "sasa" else "num_heads"
            raise ValueError(
                f"filters={self.filters} is not divisible by "
                f"{heads}={self._multiple}."
            )

    @property
    def attends(self) -> bool:
        return self.mixer in ATTENTION

    @property
    def widths(self) -> tuple[int, ...]:
        if self.filters is not None:
            return tuple(self.filters * factor for factor in (1, 2, 4))
        return tuple(
            # Half of the parameters are in kernels of one pixel, which have as
            # many on every group.
            convolution.group_width(width, self.group, 1, self._multiple)
            for width in WIDTHS
        )

    @property
    def suffix(self) -> str:
        """The end of the name of the model, after the group."""
        mixer = f"_{self.mixer}" if self.attends else ""
        return mixer + ("_se" if self.squeeze_excite else "")

    @property
    def _multiple(self) -> int:
        factors = {"conv": 0, "sasa": 2}
        return max(1, factors.get(self.mixer, 1) * self.num_heads)


def _network(
    kind: str,
    blocks: _Blocks,
    name: str | None,
    **arguments: Any,
) -> keras.Model:
    group, widths = blocks.group, blocks.widths
    network = Network(
        kind,
        group=group,
        attention=None,
        filters=widths[0],
        planar=ends.he_normal,
        windows=_windows,
        **arguments,
    )
    rows, columns, _ = network.input_shape
    if blocks.attends and not network.exact and (rows % 4 or columns % 4):
        raise ValueError(
            f"`input_shape` of {kind} with mixer='{blocks.mixer}' and "
            "downsampling='strided' must have a size divisible by 4: on other "
            "sizes, pooled and strided maps differ in size. "
            f"Received: {network.input_shape}"
        )
    inputs, x = network.start()
    x = _convolution(network, x, widths[0], 3, name="conv1")
    x = convolution.batch_norm_activation(x, "{}1")
    for stage, width in enumerate(widths, 1):
        for index in range(1, BLOCKS[kind] + 1):
            x = _block(
                network,
                blocks,
                x,
                width,
                first=index == 1,
                halves=index == 1 and stage > 1,
                name=f"stage{stage}_block{index}",
            )
    x = ends.logits(ends.global_mean(x), network.classes)
    if name is None:
        name = f"{kind.lower()}_{group.name}{blocks.suffix}"
        name += network.downsampling_suffix
    return network.finish(inputs, x, name)


def _block(
    network: Network,
    blocks: _Blocks,
    x: Any,
    width: int,
    first: bool,
    halves: bool,
    name: str,
) -> Any:
    """A bottleneck; the first of a stage changes the number of channels."""
    y = _convolution(network, x, width, 1, name=f"{name}_conv1")
    y = convolution.batch_norm_activation(y, f"{name}_{{}}1")
    strided = halves and not network.exact
    if blocks.attends:
        if blocks.mixer == "acmix":
            options = {"attention_kernel_size": WINDOW}
        else:
            options = {
                "kernel_size": WINDOW,
                "kernel_initializer": ends.he_normal(),
            }
        y = ATTENTION[blocks.mixer](
            width,
            num_heads=blocks.num_heads,
            group=blocks.group,
            data_format="channels_last",
            name=f"{name}_attention",
            **options,
        )(y)
    else:
        y = _convolution(
            network, y, width, 3, strided=strided, name=f"{name}_conv2"
        )
    if halves and (blocks.attends or network.exact):
        y = network.pool(y, f"{name}_pool", "mean")
    y = convolution.batch_norm_activation(y, f"{name}_{{}}2")
    outputs = EXPANSION * width
    y = _convolution(network, y, outputs, 1, name=f"{name}_conv3")
    y = convolution.batch_norm(
        y,
        f"{name}_bn3",
        # With zeros the block starts as its shortcut.
        gamma_initializer="zeros" if blocks.attends else "ones",
    )
    if blocks.squeeze_excite:
        y = layers.SqueezeExcite(
            max(1, round(SQUEEZE_RATIO / blocks.group.order)),
            group=blocks.group,
            kernel_initializer=ends.he_normal(),
            data_format="channels_last",
            name=f"{name}_se",
        )(y)
    if first:
        if halves and network.exact:
            # Before the convolution, with which the mean commutes.
            x = network.pool(x, f"{name}_shortcut_pool", "mean")
        x = _convolution(
            network, x, outputs, 1, strided=strided, name=f"{name}_shortcut"
        )
        x = convolution.batch_norm(x, f"{name}_shortcut_bn")
    x = keras.layers.Add(name=f"{name}_add")([x, y])
    return keras.layers.ReLU(name=f"{name}_relu3")(x)


def _convolution(
    network: Network,
    x: Any,
    filters: int,
    kernel_size: int,
    *,
    strided: bool = False,
    name: str,
) -> Any:
    """A convolution without bias; the order is in the fan-in."""
    return convolution.group_convolution(
        x,
        filters,
        kernel_size,
        group=network.group,
        attention=None,
        settings=convolution.AttentionSettings(),
        kernel_initializer=network.planar(),
        padding="same",
        strides=2 if strided else 1,
        exact=not strided,
        name=name,
    )


def _windows(exact: bool) -> list[Window]:
    if exact:
        return [Window(3, 1, "same"), *2 * [Window(2, 2)]]
    # Shortcuts with their windows of 1 fit where these do.
    return 2 * [Window(3, 2, "same")]
