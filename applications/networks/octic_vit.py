"""Octic vision transformers, whose published weights can be loaded."""

import dataclasses
from collections.abc import Callable
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from keras_equiattn import _checks
from keras_equiattn import convert
from keras_equiattn import layers
from keras_equiattn.applications.networks import octic_blocks as octic
from keras_equiattn.applications.networks.common import ends
from keras_equiattn.applications.networks.common import pretrained
from keras_equiattn.applications.networks.common import transformers
from keras_equiattn.applications.registry import register

HEADS = ("hybrid", "invariant")
# The authors' networks that were trained as in DeiT III.
SIZES: Mapping[str, Mapping[str, int]] = {
    "large": {"patch_size": 16, "width": 1024, "depth": 24},
    "huge": {"patch_size": 14, "width": 1280, "depth": 32},
}
EPSILON = 1e-6  # for the layer norms of plain blocks, and for the last one


@register(
    {
        f"octic_vit_{size}_{head}": {"head": head, **settings}
        for size, settings in SIZES.items()
        for head in HEADS
    },
    convert.octic_vits,
)
def OcticViT(
    include_top: bool = True,
    weights: str | Path | None = None,
    input_shape: tuple[int, int, int] = (224, 224, 3),
    classes: int = 1000,
    classifier_activation: str | None = None,
    name: str | None = None,
    patch_size: int = 16,
    width: int = 1024,
    depth: int = 24,
    num_heads: int = 16,
    head: str = "hybrid",
    invariants: str = "power_spectrum",
    octic_depth: int | None = None,
    mlp_ratio: int = 4,
    layer_scale: float = 1e-4,
    drop_path: float = 0.0,
    normalization: ends.Statistics | None = None,
) -> keras.Model:
    """The octic vision transformer of Nordström et al.

    A lifting convolution on p4m makes tokens of the patches of an image;
    learned positions are added, and a class token is put in front. The first
    half of the blocks is equivariant, and computes in the basis of the
    irreducible representations throughout. Then the tokens become plain ones,
    and the second half is that of a plain vision transformer with LayerScale.
    The classifier takes the class token.

    `convert.octic_vits` loads weights in the format of the authors, who have
    published some that were trained on ImageNet. Their networks are:

    | theirs | patch_size | width | depth |
    |---|---|---|---|
    | DeiT III and DINOv2, ViT-L/16 | 16 | 1024 | 24 |
    | DeiT III, ViT-H/14 | 14 | 1280 | 32 |
    | DINOv2, ViT-H/16 | 16 | 1280 | 32 |

    All have 16 heads, and are hybrid or invariant; those of DINOv2 have
    `include_top=False`. Their code for invariant networks computes the "power
    spectrum" of the tokens; the numbers of parameters that they state, 175 M
    and 362 M with DeiT III, are those of the "polynomial" invariants of the
    same code. The shape of `invariant_proj.weight` in a file tells which it
    has: 6 or 32 times an eighth of the width.

    `GroupViT` is the transformer for other groups, other sizes of images and
    networks of your own. Import `keras_equiattn.applications` before you load a
    saved network of this kind.

    Layers are called `image`, `normalization` (where there is one), `patches`,
    `embedding`, `block1_norm1`, `..._attention`, `..._scale1`, `..._path1`
    (with `drop_path`), `..._add1`, `..._norm2`, `..._dense1`, `..._gelu`,
    `..._dense2`, `..._scale2`, `..._path2`, `..._add2`, and so on. Between the
    halves comes `channels`, or `invariants` and `invariants_dense`. At the end
    come `norm`, `first_token`, `class_token`, and with the top `logits` and
    `predictions`.

    Args:
        include_top: whether the classifier is there.
        weights: None (random) or the path of a weights file.
        input_shape: `(size, size, channels)`, where `size` must be divisible by
            `patch_size`.
        classes: number of classes.
        classifier_activation: None returns logits.
        name: name of the model.
        patch_size: rows and columns of a patch.
        width: values per patch, divisible by eight times `num_heads`.
        depth: number of blocks.
        num_heads: heads of the attention.
        head: "hybrid", in which the second half takes the values of all poses,
            or "invariant", in which it takes invariants of them.
        invariants: for `head="invariant"` alone: "power_spectrum" for absolute
            values and lengths, 6 numbers per channel, or "polynomial" for 32
            products, which also keep the signs of A2, B1, B2 and the vectors
            relative to each other.
        octic_depth: how many blocks are equivariant, from 1 to `depth`; None
            is half of them.
        mlp_ratio: values between the two linear maps of a block over those of
            its input.
        layer_scale: the initial value of the factors of LayerScale.
        drop_path: rate of stochastic depth, at which attention and linear maps
            are dropped for an image in training. It is the same in all blocks.
        normalization: `(mean, std)` of images in [0, 1], numbers or one per
            channel; the network first computes `(x - mean) / std`. None is the
            identity.

    Returns:
        A functional `keras.Model` from images to logits `(batch, classes)`, or
        without the top to the class token `(batch, width)`.

    Symmetry:
        With the head "invariant", logits do not change, up to rounding, when
        images are turned by quarter turns or mirrored. A hybrid is not
        invariant.

    Raises:
        ValueError: for bad arguments, before anything is built.

    References:
        - [Nordström et al., 2025](https://arxiv.org/abs/2505.15441) and the
          authors' code, https://github.com/davnords/octic-vits
    """
    _checks.flag(include_top, "include_top")
    _checks.integer(classes, "classes")
    ends.check_activation(classifier_activation)
    patch_size = _checks.integer(patch_size, "patch_size")
    shape = ends.check_image_shape(input_shape)
    if shape[0] != shape[1] or shape[0] % patch_size:
        raise ValueError(
            "`input_shape` must be (size, size, channels), with a size that is "
            f"divisible by `patch_size`. Received: input_shape={input_shape}, "
            f"patch_size={patch_size}"
        )
    num_heads = _checks.integer(num_heads, "num_heads")
    width = _checks.integer(width, "width")
    order = octic.GROUP.order
    if width % (order * num_heads):
        raise ValueError(
            "`width` must be divisible by eight times `num_heads`. Received: "
            f"width={width}, num_heads={num_heads}"
        )
    depth = _checks.integer(depth, "depth")
    _checks.choice(head, "head", HEADS)
    _checks.choice(invariants, "invariants", tuple(octic.INVARIANTS))
    if octic_depth is None:
        octic_depth = max(depth // 2, 1)
    octic_depth = _checks.integer(octic_depth, "octic_depth")
    if octic_depth > depth:
        raise ValueError(
            "`octic_depth` must be at most `depth`. Received: "
            f"octic_depth={octic_depth}, depth={depth}"
        )
    mlp_ratio = _checks.integer(mlp_ratio, "mlp_ratio")
    _checks.number(
        layer_scale, "layer_scale", "a number from 0 on", lambda n: n >= 0
    )
    drop_path = _checks.rate(drop_path, "drop_path")
    title = "OcticViT"
    pretrained.check_weights(weights, {}, title, shape, classes)
    statistics = ends.check_normalization(normalization, shape[-1])

    inputs = keras.Input(shape, name="image")
    x = layers.LiftingConv2D(
        width // order,
        patch_size,
        strides=patch_size,
        group=octic.GROUP,
        data_format="channels_last",
        name="patches",
    )(ends.normalize(inputs, statistics))
    x = octic.OcticEmbedding(name="embedding")(x)
    for block in range(1, depth + 1):
        parts = _OCTIC if block <= octic_depth else _PLAIN
        design = _Design(parts, num_heads, mlp_ratio, layer_scale, drop_path)
        x = design.block(x, f"block{block}")
        if block == octic_depth:
            x = _plain(x, head, invariants, width)
    x = transformers.norm(x, EPSILON, "norm")
    x = keras.layers.Cropping1D((0, x.shape[1] - 1), name="first_token")(x)
    x = keras.layers.Reshape((width,), name="class_token")(x)
    if include_top:
        x = ends.logits(x, classes)
        x = ends.predictions(x, classifier_activation)
    model = keras.Model(inputs, x, name=name or f"octic_vit_{head}")
    pretrained.load_weights(model, weights, {})
    return model


@dataclasses.dataclass(frozen=True)
class _Parts:
    """The functions that make the layers of a block; each takes a name, too."""

    norm: Callable[..., Any]
    attention: Callable[..., Any]
    dense: Callable[..., Any]
    gelu: Callable[..., Any]
    scale: Callable[..., Any]


def _attention(num_heads: int, name: str) -> Callable[[Any], Any]:
    def attend(x: Any) -> Any:
        return keras.layers.MultiHeadAttention(
            num_heads,
            x.shape[-1] // num_heads,
            kernel_initializer=transformers.small_normal(),
            name=name,
        )(x, x)

    return attend


_OCTIC = _Parts(
    norm=octic.OcticNormalization,
    attention=octic.OcticAttention,
    dense=octic.OcticDense,
    gelu=octic.OcticActivation,
    scale=octic.OcticScale,
)
_PLAIN = _Parts(
    norm=lambda name: keras.layers.LayerNormalization(
        epsilon=EPSILON, name=name
    ),
    attention=_attention,
    dense=lambda units, name: keras.layers.Dense(
        units, kernel_initializer=transformers.small_normal(), name=name
    ),
    gelu=lambda name: keras.layers.Activation("gelu", name=name),
    scale=octic.ChannelScale,
)


@dataclasses.dataclass(frozen=True)
class _Design:
    """The settings of a block."""

    parts: _Parts
    num_heads: int
    mlp_ratio: int
    layer_scale: float
    drop_path: float

    def block(self, x: Any, name: str) -> Any:
        """Attention, then two linear maps; each part is added to its input."""
        parts, channels = self.parts, x.shape[-1]
        y = parts.norm(name=f"{name}_norm1")(x)
        y = parts.attention(self.num_heads, name=f"{name}_attention")(y)
        x = self._added(x, y, name, 1)
        y = parts.norm(name=f"{name}_norm2")(x)
        y = parts.dense(self.mlp_ratio * channels, name=f"{name}_dense1")(y)
        y = parts.gelu(name=f"{name}_gelu")(y)
        y = parts.dense(channels, name=f"{name}_dense2")(y)
        return self._added(x, y, name, 2)

    def _added(self, x: Any, y: Any, name: str, number: int) -> Any:
        y = self.parts.scale(self.layer_scale, name=f"{name}_scale{number}")(y)
        y = transformers.stochastic_depth(
            y, self.drop_path, f"{name}_path{number}"
        )
        return keras.layers.Add(name=f"{name}_add{number}")([x, y])


def _plain(x: Any, head: str, invariants: str, width: int) -> Any:
    """Converts tokens in the octic basis to `(batch, tokens, width)`."""
    if head == "hybrid":
        return octic.OcticChannels(name="channels")(x)
    x = octic.OcticInvariants(invariants, name="invariants")(x)
    return transformers.dense(x, width, "invariants_dense")
