"""Pyramid vision transformers (PVT) with ACmix, and the plain ones."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
from keras import ops

from keras_equiattn import layers
from keras_equiattn.applications.networks.common import ends
from keras_equiattn.applications.networks.common import imagenet
from keras_equiattn.applications.networks.common import transformers
from keras_equiattn.applications.registry import register

DIMS = (64, 128, 320, 512)
HEADS = (1, 2, 5, 8)
EXPANSIONS = (8, 8, 4, 4)  # hidden over input channels of the MLP
REDUCTIONS = (8, 4, 2, 1)
DEPTHS = {"Tiny": (2, 2, 2, 2), "Small": (3, 4, 6, 3)}
EPSILON = 1e-6
EPSILON_OF_PATCHES = 1e-5


@register(imagenet.with_plain("acmix_pvt_tiny", "attention"))
def ACmixPVTTiny(
    include_top: bool = True,
    weights: str | Path | None = None,
    input_shape: tuple[int, int, int] = (224, 224, 3),
    pooling: str | None = None,
    classes: int = 1000,
    classifier_activation: str | None = None,
    name: str | None = None,
    mixer: str = "acmix",
    patch_size: int = 4,
    drop_path: float = 0.1,
    normalization: ends.Statistics | None = None,
    features_only: bool = False,
) -> keras.Model:
    """PVT-Tiny with `SpatialReductionACmix2D` in place of its attention.

    Four stages of 2 blocks with 64, 128, 320 and 512 channels and 1, 2, 5 and
    8 heads. Each begins with a patch embedding, of 4 x 4 pixels in the first
    stage and of 2 x 2 in the others, and adds a learned position embedding.
    Keys and values come from maps that are reduced by 8, 4, 2 and 1. A block is
    `x + mixer(norm(x))`, then `x + mlp(norm(x))`. The last stage has a class
    token, which takes part in attention and passes through the MLPs; the
    classifier reads only this token. The network has 13,396,128 trainable
    parameters for 1000 classes, with `mixer="attention"` 13,229,288.

    The convolution path of the last block does not reach the class token. The
    logits therefore do not depend on this path or its weights `mixing_kernel`,
    `mixing_bias`, `shift_kernel` and `convolution_rate`; feature maps do.

    Layers are called `stage1_patches`, `stage1_patches_norm`,
    `stage1_positions`, then `stage1_block1_norm1`, `..._mixer`, `..._path1`,
    `..._add1`, `..._norm2`, `..._dense1`, `..._gelu`, `..._dense2`,
    `..._path2`, `..._add2`, and so on. In stage 4 `stage4_pixels` flattens the
    map to a sequence and `stage4_class_token` puts the class token in front of
    it; in each block `stage4_block1_image_pixels`, `..._image` and `..._token`
    come before the mixer, `..._pixels` and `..._joined` after it. At the end
    come `norm`, and `class_token`, `class_vector`, `logits` and `predictions`,
    or without the top `features_pixels`, `features`, and `global_mean` or
    `global_max`.

    Args:
        include_top: whether the classifier is there.
        weights: None (random) or the path of a weights file.
        input_shape: `(height, width, channels)`. Height and width must be
            multiples of `8 * patch_size`, and may not be None.
        pooling: without the top: None returns feature maps, "avg" and "max"
            their mean or maximum over space.
        classes: number of classes.
        classifier_activation: None returns logits.
        name: name of the model.
        mixer: "acmix", or "attention" for the plain network.
        patch_size: rows and columns of the first patches; 1 or 2 for images of
            32 pixels.
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
        - [Wang et al., 2021](https://arxiv.org/abs/2102.12122), table 1, and
          the authors' code, https://github.com/whai362/PVT
        - [Pan et al., 2022](https://arxiv.org/abs/2111.14556). No code of this
          network was published, and how the paths meet is our reading, see
          `SpatialReductionACmix2D`. The authors give 13 and 25 M parameters and
          2.0 and 3.9 G multiplications for Tiny and Small. In our reading these
          are 13.4 and 24.8 M and, with the convolution path as they write it,
          2.0 and 4.0 G. With one dense convolution in each layer, as it runs
          here, the networks take 3.8 and 7.9 G for an image of 224 x 224
          pixels, and 0.18 and 0.35 G more in each call to compose the kernels.
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
    return _network("Tiny", design, frame)


@register(imagenet.with_plain("acmix_pvt_small", "attention"))
def ACmixPVTSmall(
    include_top: bool = True,
    weights: str | Path | None = None,
    input_shape: tuple[int, int, int] = (224, 224, 3),
    pooling: str | None = None,
    classes: int = 1000,
    classifier_activation: str | None = None,
    name: str | None = None,
    mixer: str = "acmix",
    patch_size: int = 4,
    drop_path: float = 0.1,
    normalization: ends.Statistics | None = None,
    features_only: bool = False,
) -> keras.Model:
    """PVT-Small with `SpatialReductionACmix2D` in place of its attention.

    The stages have 3, 4, 6 and 3 blocks; all else is as in `ACmixPVTTiny`. With
    1000 classes the network has 24,824,755 trainable parameters, and 24,485,864
    with `mixer="attention"`.

    Args:
        include_top, weights, input_shape, pooling: see `ACmixPVTTiny`.
        classes, classifier_activation, name, mixer: see `ACmixPVTTiny`.
        patch_size, drop_path: see `ACmixPVTTiny`.
        normalization, features_only: see `ACmixPVTTiny`.

    Returns:
        See `ACmixPVTTiny`.

    Raises:
        ValueError: for bad arguments, before anything is built.

    References:
        - [Pan et al., 2022](https://arxiv.org/abs/2111.14556), see
          `ACmixPVTTiny`.
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
    return _network("Small", design, frame)


@dataclasses.dataclass(frozen=True)
class _Stage:
    """The settings of the blocks of a stage."""

    name: str
    dim: int
    heads: int
    expansion: int
    reduction: int


def _network(
    kind: str, design: transformers.Design, frame: imagenet.Frame
) -> keras.Model:
    title = imagenet.title(f"PVT{kind}", design.mixer)
    shape = transformers.known_shape(
        title,
        frame.input_shape,
        "it learns a position embedding for each place",
    )
    patch = design.patch_size
    _check_patches(title, shape, patch)

    def stages(x: Any) -> tuple[list[Any], Any]:
        rates = design.rates(DEPTHS[kind])
        features = []
        for number, depth in enumerate(DEPTHS[kind]):
            stage = _Stage(
                f"stage{number + 1}",
                DIMS[number],
                HEADS[number],
                EXPANSIONS[number],
                REDUCTIONS[number],
            )
            x = _patches(x, stage, 2 if number else patch)
            size = x.shape[1:3]
            last = number == len(DIMS) - 1
            if last:
                x = _with_class_token(x, stage)
            x = _Positions(name=f"{stage.name}_positions")(x)
            for index in range(depth):
                block = f"{stage.name}_block{index + 1}"
                mix = _mixer(stage, design.mixer, size if last else None, block)
                x = transformers.block(
                    x, mix, stage.expansion, EPSILON, next(rates), block
                )
            if not last:
                features.append(x)
        x = transformers.norm(x, EPSILON, "norm")
        token = _token(x, "class_token")
        token = keras.layers.Flatten(name="class_vector")(token)
        return [*features, _image(x, size, "features")], token

    return frame.build(title, stages)


def _check_patches(title: str, shape: tuple[int, int, int], patch: int) -> None:
    whole = patch * 2 ** (len(DIMS) - 1)
    if shape[0] % whole or shape[1] % whole:
        raise ValueError(
            f"`input_shape` of {title} must have a height and width that are "
            f"multiples of {whole}, so that patches fill all stages. "
            f"Received: {shape}, patch_size={patch}"
        )


def _patches(x: Any, stage: _Stage, size: int) -> Any:
    name = f"{stage.name}_patches"
    x = transformers.patches(x, stage.dim, size, name)
    return transformers.norm(x, EPSILON_OF_PATCHES, f"{name}_norm")


def _mixer(
    stage: _Stage, mixer: str, size: tuple[int, int] | None, name: str
) -> Callable[[Any], Any]:
    """The mixer of maps, or of a class token and pixels of a known size."""
    layer = layers.SpatialReductionACmix2D(
        stage.dim,
        stage.heads,
        stage.reduction,
        paths=imagenet.paths(mixer),
        data_format="channels_last",
        name=f"{name}_mixer",
    )
    if size is None:
        return layer

    def mix(x: Any) -> Any:
        image, token = layer(
            _image(x, size, f"{name}_image"),
            tokens=_token(x, f"{name}_token"),
        )
        image = _in_a_row(image, f"{name}_pixels")
        joined = keras.layers.Concatenate(axis=1, name=f"{name}_joined")
        return joined([token, image])

    return mix


def _with_class_token(x: Any, stage: _Stage) -> Any:
    x = _in_a_row(x, f"{stage.name}_pixels")
    return _ClassToken(name=f"{stage.name}_class_token")(x)


def _in_a_row(x: Any, name: str) -> Any:
    return keras.layers.Reshape((-1, x.shape[-1]), name=name)(x)


def _image(x: Any, size: tuple[int, int], name: str) -> Any:
    """The pixels after the class token, as an image again."""
    x = keras.layers.Cropping1D((1, 0), name=f"{name}_pixels")(x)
    return keras.layers.Reshape((*size, x.shape[-1]), name=name)(x)


def _token(x: Any, name: str) -> Any:
    """The class token, in front of the pixels."""
    pixels = x.shape[1] - 1
    return keras.layers.Cropping1D((0, pixels), name=name)(x)


@keras.saving.register_keras_serializable(package="keras_equiattn")
class _Positions(keras.layers.Layer):
    """Adds a learned embedding to each position of an image or a sequence."""

    def build(self, input_shape: Any) -> None:
        self.embedding = self.add_weight(
            name="embedding",
            shape=tuple(input_shape[1:]),
            initializer=transformers.small_normal(),
        )

    def call(self, inputs: Any) -> Any:
        return inputs + ops.convert_to_tensor(self.embedding)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape


@keras.saving.register_keras_serializable(package="keras_equiattn")
class _ClassToken(keras.layers.Layer):
    """Puts a learned token in front of a sequence."""

    def build(self, input_shape: Any) -> None:
        self.token = self.add_weight(
            name="token",
            shape=(1, input_shape[-1]),
            initializer=transformers.small_normal(),
        )

    def call(self, inputs: Any) -> Any:
        token = ops.convert_to_tensor(self.token)[None]
        tokens = ops.repeat(token, ops.shape(inputs)[0], axis=0)
        return ops.concatenate([tokens, inputs], axis=1)

    def compute_output_shape(self, input_shape: Any) -> Any:
        batch, count, channels = input_shape
        return (batch, count + 1, channels)
