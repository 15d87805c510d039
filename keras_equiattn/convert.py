"""Loads weights that the papers' own code has trained into our models."""

import math
import os
import re
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from keras_equiattn import layers
from keras_equiattn._acmix_weights import acmix_buffers
from keras_equiattn._acmix_weights import acmix_kind
from keras_equiattn._acmix_weights import acmix_parts
from keras_equiattn._acmix_weights import split_maps
from keras_equiattn._foreign_weights import assign
from keras_equiattn._foreign_weights import BATCH_NORMALIZATION
from keras_equiattn._foreign_weights import check
from keras_equiattn._foreign_weights import label
from keras_equiattn._foreign_weights import Part
from keras_equiattn._foreign_weights import read
from keras_equiattn._gsa_weights import check_buffers
from keras_equiattn._gsa_weights import EPSILON
from keras_equiattn._gsa_weights import gsa_buffers
from keras_equiattn._gsa_weights import gsa_kind
from keras_equiattn._gsa_weights import gsa_parts

__all__ = [
    "G_SELFATT_EPSILON",
    "G_SELFATT_ROT_MNIST",
    "acmix",
    "att_gconvs",
    "g_selfatt",
    "of_registered",
]

G_SELFATT_EPSILON: float = EPSILON
"""The `epsilon` of a `GSANet` that `g_selfatt` loads into: 1e-12."""

G_SELFATT_ROT_MNIST: tuple[float, float] = (0.1307, 0.3081)
"""The `normalization` of rotated MNIST in the code of `g_selfatt`."""

# What the authors call a layer of ours; other layers have the same name there.
# They count blocks from 0, and name the stages of a ResNet by their sizes.
_MODULES: tuple[tuple[str, Callable[[re.Match[str]], str]], ...] = (
    (r"conv(\d+)", lambda m: f"c{m[1]}"),
    (r"conv_out", lambda m: "c_out"),
    (
        r"block(\d+)_(bn|conv)",
        lambda m: f"block_layers.{int(m[1]) - 1}.{m[2]}",
    ),
    (
        r"transition(\d+)_(bn|conv)",
        lambda m: f"trans_layers.{int(m[1]) - 1}.{m[2]}",
    ),
    (
        r"stage([123])_block(\d+)_(bn1|bn2|conv1|conv2|shortcut)",
        lambda m: (
            f"layers_nc{64 // 2 ** int(m[1])}.{int(m[2]) - 1}."
            + {"shortcut": "fiber_map"}.get(m[3], m[3].replace("conv", "c"))
        ),
    ),
)

# Of each variable the name in their module, their axes and ours: output (o),
# input (i) and hidden (k) channels, statistics (s), group elements (h), rows
# (x) and columns (y).
_VARIABLES = {
    "kernel": ("weight", "oihxy", "xyhio"),
    "attention_kernel": ("spatial_attention.weight", "oihxy", "xyhio"),
    "spatial_kernel": ("spatial_attention.weight", "oshxy", "xyhso"),
    "channel_kernel_1": ("channel_attention.weight_fc1", "okih", "hiko"),
    "channel_kernel_2": ("channel_attention.weight_fc2", "oikh", "hkio"),
    **BATCH_NORMALIZATION,
}

# Our elements in their numbering: they turn first, we mirror first.
_ELEMENTS = {
    "z2": [0],
    "p4": [0, 1, 2, 3],
    "p4m": [0, 1, 2, 3, 6, 5, 4, 7],
}

# Their code multiplies each sum over the group by a constant, which differs
# between group convolution and attentive group convolution.
_CONSTANTS = {
    "z2": (1.0, 1.0),
    "p4": (math.pi / 2, math.pi / 2),
    "p4m": (math.pi, math.pi / 4),
}

_ATTENTIVE = (layers.AttentiveLiftingConv2D, layers.AttentiveGroupConv2D)
_CO_ATTENTIVE = (layers.CoAttentiveLiftingConv2D, layers.CoAttentiveGroupConv2D)
_CONVOLUTIONS = (
    layers.LiftingConv2D,
    layers.GroupConv2D,
    *_ATTENTIVE,
    *_CO_ATTENTIVE,
)


def of_registered(
    name: str,
) -> tuple[Callable[..., keras.Model], dict[str, Any]]:
    """What loads the authors' weights of a registered network.

    Args:
        name: of the network, see `applications.list_models`.

    Returns:
        The function of this module, and arguments that `applications.get_model`
        must be given for what it loads.

    Raises:
        ValueError: for a network whose authors' code has another format, or
            that no paper's code has.

    Example:
        >>> from keras_equiattn import convert
        >>> converter, arguments = convert.of_registered("gsanet_rotmnist_p4")
        >>> converter.__name__, arguments["epsilon"]
        ('g_selfatt', 1e-12)
    """
    if name.startswith("gsanet"):
        arguments: dict[str, Any] = {"epsilon": G_SELFATT_EPSILON}
        if name.startswith("gsanet_rotmnist"):
            arguments["normalization"] = G_SELFATT_ROT_MNIST
        return g_selfatt, arguments
    if name.startswith("acmix_swin"):
        return acmix, {}
    if name.startswith(("acmix", "resnet29", "resnet83")):
        raise ValueError(
            "Weights of the authors can be loaded into networks of attentive "
            "group convolution, group self-attention and Swin transformers. "
            f"Received: {name!r}"
        )
    return att_gconvs, {}


def att_gconvs(
    model: keras.Model, state: Mapping[str, Any] | str | os.PathLike[str]
) -> keras.Model:
    """Loads weights of Romero et al. 2020 into a model, in place.

    For the networks of "Attentive Group Equivariant Convolutional Networks",
    trained with the authors' PyTorch code. The model must have the same
    architecture: group, widths, attention. It then computes the same function,
    to rounding. The exception is `attention="full"` or `"channel"` on p4m:
    theirs is not equivariant there, ours is.

    Images must be scaled as in their training: pass `normalization` to the
    network. The authors' networks for rotated MNIST were trained on digits
    with rows and columns exchanged.

    Layers find their weights by name, as `RotMNISTCNN`, `AllCNNC`, `ResNet44`
    and `PCamDenseNet` name them: `conv3` takes those of the authors' module
    `c3`, `block1_bn` those of `block_layers.0.bn`. An `InputAttention` named
    `<layer>_attention` takes them from the same module as `<layer>`. A layer
    of another name takes the module of that name, for networks of your own.

    Args:
        model: a built model of this library's convolutions, attention layers
            and Keras' `BatchNormalization`, on z2, p4 or p4m.
        state: a mapping of the authors' names to arrays (NumPy or PyTorch), or
            the path of a file that holds one: `.npz`, or with PyTorch
            installed `.pth`, `.pt` or `.bin`. The mapping may lie under
            "state_dict" or "model", and all names may begin with "module.".

    Returns:
        The model.

    Raises:
        ValueError: for a model or file of another kind, and for weights that
            are missing, not used, or of another shape. The model is then as
            it was.
        ImportError: a PyTorch file without PyTorch.

    Example:
        >>> model = keras.Sequential([
        ...     keras.Input((28, 28, 1)),
        ...     layers.LiftingConv2D(10, 3, use_bias=False, name="conv1"),
        ... ])
        >>> state = {"c1.weight": np.ones((10, 1, 3, 3), "float32")}
        >>> float(att_gconvs(model, state).get_weights()[0].sum())
        90.0

    References:
        - [Romero et al., 2020](https://arxiv.org/abs/2002.03830) and the
          authors' code, https://github.com/dwromero/att_gconvs
    """
    parts = _model_parts(model)
    arrays = read(state)
    check(model, parts, arrays, _state_kind(arrays), _model_kind(model))
    assign(parts, arrays)
    return model


def g_selfatt(
    model: keras.Model, state: Mapping[str, Any] | str | os.PathLike[str]
) -> keras.Model:
    """Loads weights of Romero and Cordonnier 2021 into a `GSANet`, in place.

    For the networks of "Group Equivariant Stand-Alone Self-Attention for
    Vision", trained with the authors' PyTorch code. The model must have the
    same architecture, with `epsilon=G_SELFATT_EPSILON`, which is 1e-12, also
    with `norm="batch"`: the encoding of positions has it, too.

    On z2 the model computes the same function, to rounding. On other groups
    it does not: their attention on the group takes the embedding of relative
    elements where it is not equivariant, ours at `g^-1 m`, see
    `GroupSelfAttention2D`. It computes what their code does with that index
    put right.

    Images must be scaled as in their training: pass `normalization` to the
    network, for rotated MNIST `G_SELFATT_ROT_MNIST`, which is `(0.1307,
    0.3081)`. Like those of attentive group convolution, the authors' networks
    for rotated MNIST are trained on digits with rows and columns exchanged: so
    the original file holds them.
    Layers find their weights by name, as `GSANet` names them.

    The `state_dict()` of their network also says where every element sees the
    neighbours of a pixel and which elements it sees (`row_indices`,
    `col_indices`, `g_indices`, and `group.` for the group itself). These must
    be those of the group and the window of `model`. Where they are left out, as
    an `.npz` file may do, group and window are checked by shapes alone: p4 and
    p2m, or windows of two sizes, cannot be told apart. Crops show only where
    attention is to whole maps. An `activation_function` other than their
    "Swish", which is SiLU, cannot be seen at all.

    Args:
        model: a `GSANet`.
        state: a mapping or a file, see `att_gconvs`.

    Returns:
        The model.

    Raises:
        ValueError: for a model or file of another kind, for weights that are
            missing, not used, or of another shape, and for those of another
            group or window. The model is then as it was.
        ImportError: a PyTorch file without PyTorch.

    References:
        - [Romero and Cordonnier, 2021](https://arxiv.org/abs/2010.00977) and
          the authors' code, https://github.com/dwromero/g_selfatt
    """
    parts = gsa_parts(model)
    arrays = read(state)
    orders = [
        len(array)
        for key, array in arrays.items()
        if key.endswith("group_embedding.weight") and array.ndim
    ]
    looks = gsa_kind(orders[0]) if orders else None
    kind = gsa_kind(model.get_layer("lift").group.order)
    buffers = gsa_buffers(model)
    check(model, parts, arrays, looks, kind, buffers)
    check_buffers(model, buffers, arrays)
    assign(parts, arrays)
    return model


def acmix(
    model: keras.Model, state: Mapping[str, Any] | str | os.PathLike[str]
) -> keras.Model:
    """Loads weights of Pan et al. 2022 into an `ACmixSwin`, in place.

    For the Swin transformers of "On the Integration of Self-Attention and
    Convolution", trained with the authors' PyTorch code, and with
    `mixer="attention"` for those of Swin itself. The model must have the same
    architecture: depths, patches, windows, classes. It then computes the same
    function, to rounding.

    Images must be scaled as in their training: pass `normalization` to the
    network, `((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))` for ImageNet.
    Layers find their weights by name, as `ACmixSwinTiny` names them. The size
    of images may be another one if windows stay the same.

    Args:
        model: an `ACmixSwinTiny` or `ACmixSwinSmall`; without the top, the
            classifier of the file is left out.
        state: a mapping or a file, see `att_gconvs`.

    Returns:
        The model.

    Raises:
        ValueError: for a model or file of another kind, and for weights that
            are missing, not used, or of another shape. The model is then as
            it was.
        ImportError: a PyTorch file without PyTorch.

    References:
        - [Pan et al., 2022](https://arxiv.org/abs/2111.14556) and the
          authors' code, https://github.com/LeapLabTHU/ACmix
    """
    parts = acmix_parts(model)
    arrays = split_maps(read(state))
    looks = None
    if any(".attn.query." in key for key in arrays):
        looks = acmix_kind(any(".dep_conv." in key for key in arrays))
    kind = acmix_kind(any(".dep_conv." in key for key in parts))
    check(model, parts, arrays, looks, kind, acmix_buffers(model, arrays))
    assign(parts, arrays)
    return model


def _parts(layer: Any) -> list[Part]:
    """Where the variables of one layer come from."""
    if isinstance(layer, keras.layers.BatchNormalization):
        group = "z2"
    elif isinstance(layer, (*_CONVOLUTIONS, layers.InputAttention)):
        group = layer.group.name
    else:
        raise ValueError(
            f"{label(layer)} is none of the layers that these weights are "
            "for: convolutions and attention of this library, and "
            "BatchNormalization."
        )
    if group not in _CONSTANTS:
        raise ValueError(
            f"{label(layer)} must be on {_names(_CONSTANTS)}, the groups of "
            f"the authors' networks. Received: '{group}'"
        )
    parts = []
    for variable in layer.weights:
        if variable.name not in _VARIABLES:
            raise ValueError(
                f"{label(layer)} must have no '{variable.name}': the "
                "authors' networks have none."
            )
        key, theirs, ours = _VARIABLES[variable.name]
        if isinstance(layer, layers.InputAttention) and "k" in theirs:
            theirs, ours = theirs.replace("o", ""), ours.replace("o", "")
        lifting = len(variable.shape) < len(ours)
        if lifting:
            ours = ours.replace("h", "")
        if lifting or group == "z2":
            theirs = theirs.replace("h", "")
        factor = 1.0 if lifting else _factor(layer, group, variable.name)
        parts.append(
            Part(variable, key, theirs, ours, _ELEMENTS[group], factor)
        )
    return parts


def _factor(layer: Any, group: str, name: str) -> float:
    """What their code multiplies by where a group is summed over."""
    constant, attentive = _CONSTANTS[group]
    if isinstance(layer, _ATTENTIVE):
        # Their constant follows the attention, which sees responses without
        # it; ours sees those of a kernel that has it.
        factors = {
            "kernel": attentive,
            "channel_kernel_1": 1 / attentive,
            "spatial_kernel": 1 / attentive,
        }
        return factors.get(name, 1.0)
    summed = ("kernel", "attention_kernel", "spatial_kernel")
    return constant if name in summed else 1.0


def _model_parts(model: Any) -> dict[str, Part]:
    """Where all variables of a model come from, by their full names."""
    parts: dict[str, Part] = {}
    if isinstance(model, keras.Model):
        for layer in model.layers:
            module = _module(layer)
            for part in _parts(layer) if layer.weights else []:
                key = f"{module}.{part.key}"
                if key in parts:
                    raise ValueError(
                        f"{label(layer)} would take '{key}', and so would "
                        "another layer of the model: rename one."
                    )
                parts[key] = part
    if not parts:
        raise ValueError(
            f"`model` must be a built Keras model with weights. Received: "
            f"{model!r}"
        )
    return parts


def _module(layer: Any) -> str:
    """What the authors call the module that has the weights of a layer."""
    name = str(layer.name)
    if isinstance(layer, layers.InputAttention):
        name = name.removesuffix("_attention")
    for pattern, module in _MODULES:
        if match := re.fullmatch(pattern, name):
            return module(match)
    return name


def _state_kind(arrays: Mapping[str, np.ndarray]) -> str | None:
    """In words of what kind of network the weights are, if of any."""
    ranks = {key: array.ndim for key, array in arrays.items()}
    if max(ranks.values(), default=0) < 4:  # no convolution
        return None
    orders = [arrays[key].shape[2] for key, rank in ranks.items() if rank == 5]
    order = max(orders, default=1)
    names = {len(elements): name for name, elements in _ELEMENTS.items()}
    channel = [key for key in arrays if key.endswith("attention.weight_fc1")]
    spatial = [
        key for key in arrays if key.endswith("spatial_attention.weight")
    ]
    attention = None
    if channel:
        convolution = channel[0].replace("channel_attention.weight_fc1", "")
        attention = "full" if spatial else "channel"
        if ranks[channel[0]] < ranks.get(f"{convolution}weight", 5) - 1:
            attention = "input"
    elif spatial:
        shape = arrays[spatial[0]].shape
        attention = "spatial"
        if shape[:1] == (1,):
            attention = "co" if shape[-1:] == (1,) else "input"
    return _kind(names.get(order, f"a group of order {order}"), attention)


def _model_kind(model: keras.Model) -> str:
    """In words of what kind a model is."""
    group, attention = "z2", None
    for layer in model.layers:
        if isinstance(layer, layers.InputAttention):
            attention = "input"
        elif isinstance(layer, _CO_ATTENTIVE):
            attention = "co"
        elif isinstance(layer, _ATTENTIVE):
            attention = layer.attention
        if isinstance(layer, _CONVOLUTIONS):
            group = layer.group.name
    return _kind(group, attention)


def _kind(group: str, attention: str | None) -> str:
    return f"on {group} with attention={attention!r}"


def _names(names: Any) -> str:
    return " or ".join(map(repr, names))
