"""Swin transformers with ACmix, and the plain ones."""

import dataclasses
from pathlib import Path
from typing import Any

import keras
from keras import ops

from keras_equiattn import _checks
from keras_equiattn import convert
from keras_equiattn import layers
from keras_equiattn.applications.networks.common import ends
from keras_equiattn.applications.networks.common import imagenet
from keras_equiattn.applications.networks.common import transformers
from keras_equiattn.applications.registry import register

HEADS = (3, 6, 12, 24)
DIM = 96  # channels of the first stage
DEPTHS = {"Tiny": (2, 2, 6, 2), "Small": (2, 2, 18, 2)}
EXPANSION = 4  # hidden over input channels of the MLP
EPSILON = 1e-5


# Images of 32 pixels, with patches and windows that fill them.
@register(
    imagenet.with_plain(
        "acmix_swin_tiny_cifar10",
        "attention",
        input_shape=(32, 32, 3),
        classes=10,
        patch_size=2,
        window_size=4,
    ),
    convert.acmix,
)
@register(imagenet.with_plain("acmix_swin_tiny", "attention"), convert.acmix)
def ACmixSwinTiny(
    include_top: bool = True,
    weights: str | Path | None = None,
    input_shape: tuple[int, int, int] = (224, 224, 3),
    pooling: str | None = None,
    classes: int = 1000,
    classifier_activation: str | None = None,
    name: str | None = None,
    mixer: str = "acmix",
    patch_size: int = 4,
    window_size: int = 7,
    drop_path: float = 0.2,
    normalization: ends.Statistics | None = None,
    features_only: bool = False,
) -> keras.Model:
    """Swin-T with `WindowACmix2D` in place of its attention.

    The network has patches of 4 x 4 pixels with 96 channels, and four stages of
    2, 2, 6 and 2 blocks with 3, 6, 12 and 24 heads; between the stages, 2 x 2
    patches are merged into one with twice as many channels. A block is `x +
    mixer(norm(x))`, then `x + mlp(norm(x))`; the windows of every other mixer
    are shifted by half their size. There are 28,649,908 trainable parameters
    for 1000 classes, with `mixer="attention"` 28,288,354.

    On an image of 224 x 224 pixels it takes 7.61 G multiply-adds, and 1.08 G in
    each call, whatever the number of images, to compose the kernels: the
    convolution path runs as one dense convolution. In the paper's form, with a
    grouped convolution, it takes 4.65 G, with `mixer="attention"` 4.49 G.

    Layers are called `patches`, `patches_norm`, then `stage1_block1_norm1`,
    `..._mixer`, `..._path1`, `..._add1`, `..._norm2`, `..._dense1`,
    `..._gelu`, `..._dense2`, `..._path2`, `..._add2`, and so on; between the
    stages `stage2_merge`, `stage2_merge_norm` and `stage2_merge_dense`. At the
    end come `norm`, `global_mean`, `logits` and `predictions`, or without the
    top `norm`, and `global_mean` or `global_max`.

    Args:
        include_top: whether the classifier is there.
        weights: None (random) or the path of a weights file.
        input_shape: `(height, width, channels)`. Windows must fill the map of
            each stage, as they do if height and width are multiples of `8 *
            patch_size * window_size`. Where the shorter side of a map is not
            larger than the window, windows have that side, and are not shifted.
            Height and width may not be None.
        pooling: without the top: None returns feature maps, "avg" and "max"
            their mean or maximum over space.
        classes: number of classes.
        classifier_activation: None returns logits.
        name: name of the model.
        mixer: "acmix", or "attention" for the plain network.
        patch_size: rows and columns of a patch; 2 for images of 32 pixels,
            with `window_size=4`.
        window_size: rows and columns of the windows.
        drop_path: rate of stochastic depth, at which the mixer and the MLP of
            the last block are dropped for an image in training. It grows
            linearly from 0 in the first block.
        normalization: `(mean, std)` of images in [0, 1], numbers or one per
            channel; the network first computes `(x - mean) / std`. None is the
            identity.
        features_only: whether the model returns the feature maps of the four
            stages, for heads for detection and segmentation. This needs
            `include_top=False`.

    Returns:
        A functional `keras.Model` from images to logits `(batch, classes)`,
        to features, or to a list of the maps of all stages, which are smaller
        than the image by 1, 2, 4 and 8 times the patch size.

    Raises:
        ValueError: for bad arguments, before anything is built.

    References:
        - [Liu et al., 2021](https://arxiv.org/abs/2103.14030)
        - [Pan et al., 2022](https://arxiv.org/abs/2111.14556), table 4, and
          the authors' code.
    """
    design = transformers.Design(mixer, patch_size, drop_path)
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
    return _network("Tiny", design, window_size, frame)


@register(imagenet.with_plain("acmix_swin_small", "attention"), convert.acmix)
def ACmixSwinSmall(
    include_top: bool = True,
    weights: str | Path | None = None,
    input_shape: tuple[int, int, int] = (224, 224, 3),
    pooling: str | None = None,
    classes: int = 1000,
    classifier_activation: str | None = None,
    name: str | None = None,
    mixer: str = "acmix",
    patch_size: int = 4,
    window_size: int = 7,
    drop_path: float = 0.3,
    normalization: ends.Statistics | None = None,
    features_only: bool = False,
) -> keras.Model:
    """Swin-S with `WindowACmix2D` in place of its attention.

    The stages have 2, 2, 18 and 2 blocks; all else is as in `ACmixSwinTiny`.
    With 1000 classes the network has 50,345,080 trainable parameters, and
    49,606,258 with `mixer="attention"`. It takes 14.98 G multiply-adds, and
    1.67 G more in each call to compose kernels. The form of the paper takes
    8.99 G, and `mixer="attention"` takes 8.74 G.

    Args:
        include_top, weights, input_shape, pooling: see `ACmixSwinTiny`.
        classes, classifier_activation, name, mixer: see `ACmixSwinTiny`.
        patch_size, window_size, drop_path: see `ACmixSwinTiny`.
        normalization, features_only: see `ACmixSwinTiny`.

    Returns:
        See `ACmixSwinTiny`.

    Raises:
        ValueError: for bad arguments, before anything is built.

    References:
        - [Pan et al., 2022](https://arxiv.org/abs/2111.14556), table 4, see
          `ACmixSwinTiny`.
    """
    design = transformers.Design(mixer, patch_size, drop_path)
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
    return _network("Small", design, window_size, frame)


@dataclasses.dataclass(frozen=True)
class _Stage:
    """Size, channels and windows of the blocks of a stage."""

    size: tuple[int, int]
    dim: int
    heads: int
    window: int
    shift: int


def _network(
    kind: str,
    design: transformers.Design,
    window_size: int,
    frame: imagenet.Frame,
) -> keras.Model:
    title = imagenet.title(f"Swin{kind}", design.mixer)
    shape = transformers.known_shape(
        title, frame.input_shape, "windows fill the maps of all stages"
    )
    patch = design.patch_size
    window = _checks.integer(window_size, "window_size")
    settings = _stages(title, shape, patch, window)

    def stages(x: Any) -> tuple[list[Any], None]:
        x = transformers.patches(x, settings[0].dim, patch, "patches")
        x = transformers.norm(x, EPSILON, "patches_norm")
        rates = design.rates(DEPTHS[kind])
        features = []
        for number, (stage, depth) in enumerate(
            zip(settings, DEPTHS[kind], strict=True), 1
        ):
            if number > 1:
                x = _merge(x, f"stage{number}_merge")
            for index in range(depth):
                x = _block(
                    x,
                    stage,
                    design.mixer,
                    stage.shift if index % 2 else 0,
                    next(rates),
                    f"stage{number}_block{index + 1}",
                )
            features.append(x)
        features[-1] = transformers.norm(x, EPSILON, "norm")
        return features, None

    return frame.build(title, stages)


def _stages(
    title: str, shape: tuple[int, int, int], patch: int, window: int
) -> list[_Stage]:
    stages = []
    for number, heads in enumerate(HEADS):
        scale = patch * 2**number
        size = shape[0] // scale, shape[1] // scale
        side = min(*size, window)
        fits = all(n % scale == 0 for n in shape[:2])
        if not fits or any(n % side for n in size):
            whole = window * patch * 2 ** (len(HEADS) - 1)
            raise ValueError(
                f"`input_shape` of {title} must be such that windows of "
                f"{window} fill the maps of all stages, as on multiples of "
                f"{whole}. Received: {shape}, patch_size={patch}, "
                f"window_size={window}"
            )
        shift = window // 2 if min(size) > window else 0
        stages.append(_Stage(size, DIM * 2**number, heads, side, shift))
    return stages


def _block(
    x: Any, stage: _Stage, mixer: str, shift: int, drop_path: float, name: str
) -> Any:
    mix = layers.WindowACmix2D(
        stage.dim,
        stage.heads,
        stage.window,
        shift,
        paths=imagenet.paths(mixer),
        data_format="channels_last",
        name=f"{name}_mixer",
    )
    return transformers.block(x, mix, EXPANSION, EPSILON, drop_path, name)


def _merge(x: Any, name: str) -> Any:
    channels = x.shape[-1]
    x = PatchMerging(name=name)(x)
    x = transformers.norm(x, EPSILON, f"{name}_norm")
    return transformers.dense(x, 2 * channels, f"{name}_dense", use_bias=False)


@keras.saving.register_keras_serializable(package="keras_equiattn")
class PatchMerging(keras.layers.Layer):
    """Concatenates the channels of every 2 x 2 pixels.

    Rows are the faster index, as in the authors' code: the four pixels come
    as (0, 0), (1, 0), (0, 1), (1, 1).

    Input shape: `(batch, height, width, channels)`, known and even sizes.

    Output shape: `(batch, height / 2, width / 2, 4 * channels)`.

    Symmetry: none but translations by two pixels.

    References:
        Liu et al. (2021), Swin Transformer, arXiv:2103.14030, section 3.1.
    """

    # Pictures of attention scale pixels of the output by these strides.
    strides = (2, 2)

    def call(self, inputs: Any) -> Any:
        _, height, width, channels = inputs.shape
        size = (-1, height // 2, 2, width // 2, 2, channels)
        x = ops.transpose(ops.reshape(inputs, size), (0, 1, 3, 4, 2, 5))
        return ops.reshape(x, (-1, height // 2, width // 2, 4 * channels))

    def compute_output_shape(
        self, input_shape: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        batch, height, width, channels = input_shape
        return (batch, height // 2, width // 2, 4 * channels)
