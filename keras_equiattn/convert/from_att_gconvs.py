"""Weights of the code of Romero et al. 2020, att_gconvs, in our layers."""

import math
import re
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from keras_equiattn import layers
from keras_equiattn.convert.reading import BATCH_NORMALIZATION
from keras_equiattn.convert.reading import label
from keras_equiattn.convert.reading import Part

# The authors' names for our layers; other layers have the same name there. They
# count blocks from 0, and name the stages of a ResNet by their sizes.
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

# For each variable the name in their module, their axes and ours: output (o),
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
    """The factor of their code where it sums over a group."""
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


def att_gconvs_parts(model: Any) -> dict[str, Part]:
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
    """The authors' name for the module that has the weights of a layer."""
    name = str(layer.name)
    if isinstance(layer, layers.InputAttention):
        name = name.removesuffix("_attention")
    for pattern, module in _MODULES:
        if match := re.fullmatch(pattern, name):
            return module(match)
    return name


def state_kind(arrays: Mapping[str, np.ndarray]) -> str | None:
    """The kind of network that the weights fit, in words; None if unknown."""
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


def model_kind(model: keras.Model) -> str:
    """The kind of network that a model is, in words."""
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
