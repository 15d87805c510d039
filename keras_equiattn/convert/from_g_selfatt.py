"""Where the weights of the authors of group self-attention go in a `GSANet`."""

import re
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_equiattn import groups
from keras_equiattn import layers
from keras_equiattn.convert.reading import BATCH_NORMALIZATION
from keras_equiattn.convert.reading import label
from keras_equiattn.convert.reading import Part
from keras_equiattn.convert.reading import unexpected
from keras_equiattn.ops.papers.position_encoding import window_offsets

# The number that they add to variances.
EPSILON = 1e-12

# Positions seen in different groups differ by more than this, and rounding
# errors are smaller.
TOLERANCE = 1e-2

# The names that the authors of group self-attention give the layers of a block.
_BLOCK = {
    "norm1": "attention.0",
    "attention": "attention.2",
    "norm2": "attention.3",
    "dense1": "mlp.0",
    "norm3": "mlp.1",
    "dense2": "mlp.3",
    "norm4": "mlp.4",
    "shortcut": "shortcut.0",
}

# For each variable the name in their module, their axes and ours: output (o)
# and input (i) channels, group elements (h), heads (n) and their channels (k),
# which share an axis in their code, hidden units (m) and the coordinate (c) of
# the encodings. The axes of size one at the end of their shapes are left out.
_ATTENTION: dict[str, tuple[str, Sequence[str], str]] = {
    **{
        f"{name}_{part}": value
        for name in ("query", "key", "value")
        for part, value in (
            ("kernel", (f"{name}.weight", ("kn", "i"), "ink")),
            ("bias", (f"{name}.bias", ("kn",), "nk")),
        )
    },
    "output_kernel": ("wout.weight", ("o", "kn"), "nko"),
    "output_bias": ("wout.bias", "o", "o"),
    "group_embedding": ("group_embedding.weight", "hk", "hk"),
    **{
        f"{ours}_{part}": (f"{theirs}_embedding.{key}", axes, axes[::-1])
        for ours, theirs in (("row", "row"), ("column", "col"))
        for part, key, axes in (
            ("kernel_1", "0.weight", "mc"),
            ("bias_1", "0.bias", "m"),
            ("gamma", "1.layer_norm.weight", "m"),
            ("beta", "1.layer_norm.bias", "m"),
            ("kernel_2", "3.weight", "km"),
            ("bias_2", "3.bias", "k"),
        )
    },
}
_OTHERS: dict[type, dict[str, tuple[str, Sequence[str], str]]] = {
    keras.layers.Dense: {
        "kernel": ("weight", "oi", "io"),
        "bias": ("bias", "o", "o"),
    },
    keras.layers.GroupNormalization: {
        "gamma": ("layer_norm.weight", "i", "i"),
        "beta": ("layer_norm.bias", "i", "i"),
    },
    keras.layers.BatchNormalization: {**BATCH_NORMALIZATION},
}

_LAYERS = (layers.LiftingSelfAttention2D, layers.GroupSelfAttention2D)


def gsa_parts(model: Any) -> dict[str, Part]:
    """Where all variables of a `GSANet` come from, by their full names."""
    named = isinstance(model, keras.Model) and {x.name for x in model.layers}
    if not named or not {"lift", "logits"} <= named:
        raise ValueError(
            "`model` must be a `GSANet`, whose layers have the names that it "
            f"gives them. Received: {model!r}"
        )
    modules = _modules(named)
    parts = {}
    for layer in model.layers:
        _check_epsilon(layer)
        _check_windows(layer)
        for variable in layer.weights:
            found = _variables(layer).get(variable.name)
            if layer.name not in modules or found is None:
                raise unexpected(layer, variable, "GSANet")
            key, theirs, ours = found
            if "weight" in key and len(theirs) == 2 and "h" not in theirs:
                theirs = (*theirs, *_ones(layer, variable.name) * [""])
            elements = layer.group.inverse.tolist() if "h" in ours else ()
            parts[f"{modules[layer.name]}.{key}"] = Part(
                variable, key, theirs, ours, elements, 1.0
            )
    return parts


def gsa_buffers(model: Any) -> dict[str, np.ndarray]:
    """The arrays that their modules hold beside weights, by full names.

    The arrays say for which group and which window a module is, in the authors'
    convention: an element itself, not its inverse, acts on the position and the
    pose that it sees. NaN stands for any value.
    """
    modules = _modules({layer.name for layer in model.layers})
    buffers: dict[str, np.ndarray] = {}
    for layer in model.layers:
        if isinstance(layer, _LAYERS):
            module = modules[layer.name]
            of_group = _buffers_of_group(layer.group)
            found = {**_buffers(layer), **of_group}
            buffers |= {f"{module}.{key}": found[key] for key in found}
            buffers |= of_group
    return buffers


def check_buffers(
    model: Any,
    buffers: Mapping[str, np.ndarray],
    arrays: Mapping[str, np.ndarray],
) -> None:
    """Raises if the arrays hold buffers that differ from those of the model."""
    for key, expected in buffers.items():
        array = arrays.get(key, expected)
        differs = ""
        if array.shape != expected.shape:
            differs = f"is {array.shape}, must be {expected.shape}"
        elif np.nanmax(np.abs(array - expected)) > TOLERANCE:
            differs = "has other values"
        if differs:
            lift = model.get_layer("lift")
            raise ValueError(
                "`state` is of another group or window than "
                f"'{model.name}', which is on '{lift.group.name}' with "
                f"kernel_size={lift.kernel_size}: {key} {differs}"
            )


def _buffers(layer: Any) -> dict[str, np.ndarray]:
    group = layer.group
    if layer.kernel_size is not None:
        offsets = window_offsets(layer.kernel_size)
    else:
        size = layer.input.shape[1:3]
        pixels = np.moveaxis(np.indices(size), 0, -1)
        offsets = pixels - pixels[:, :, None, None]
        offsets = offsets / max(max(size) - 1, 1)
    rows, columns = np.einsum("vij,...j->iv...", group.matrices, offsets)
    found = {"row_indices": rows, "col_indices": columns}
    if isinstance(layer, layers.GroupSelfAttention2D):
        # For other elements than the identity, theirs is the index that we
        # correct.
        indices = np.full(3 * (group.order,), np.nan)
        indices[0] = _buffers_of_group(group)["group._relative_positions"]
        found["g_indices"] = indices
    return found


def _buffers_of_group(group: groups.Group) -> dict[str, np.ndarray]:
    mirrored, turns = np.divmod(np.arange(group.order), group.rotations)
    elements = 2 * np.pi * turns[:, None] / group.rotations
    if group.mirrors:
        elements = np.column_stack([elements, 1 - 2 * mirrored])
    return {
        "group._identity": elements[0],
        "group._elements": elements,
        # The element m g^-1 for each g and m.
        "group._relative_positions": group.product_table[:, group.inverse].T,
    }


def _check_epsilon(layer: Any) -> None:
    """Checks that a layer has the epsilon of the authors' code.

    Batch normalisation needs no check: both codes have PyTorch's default.
    """
    epsilon = getattr(layer, "epsilon", EPSILON)
    batch = isinstance(layer, keras.layers.BatchNormalization)
    if epsilon != EPSILON and not batch:
        raise ValueError(
            f"The authors' weights are for a network with epsilon={EPSILON}. "
            f"Received: {label(layer)} with epsilon={epsilon}"
        )


def _check_windows(layer: Any) -> None:
    """Checks that a layer attends to squares, as the authors' code does."""
    shape = getattr(layer, "window_shape", "square")
    if shape != "square":
        raise ValueError(
            "The authors' weights are for a network with "
            f"window_shape='square'. Received: {label(layer)} with "
            f"window_shape='{shape}'"
        )


def _modules(names: set[str]) -> dict[str, str]:
    """The authors' names for the modules of the layers of a `GSANet`."""
    modules = {
        "lift": "lifting_self_attention",
        "lift_norm": "lifting_normalization",
    }
    found = [re.match(r"stage(\d+)_", name) for name in names]
    stages = max((int(match[1]) for match in found if match), default=0)
    index = 0
    for stage in range(1, stages + 1):
        block = 1
        while f"stage{stage}_block{block}_attention" in names:
            prefix = f"stage{stage}_block{block}_"
            modules |= {
                prefix + name: f"transformer.{index}.{module}"
                for name, module in _BLOCK.items()
            }
            if f"{prefix}norm5" in names:
                index += 1
                modules[f"{prefix}norm5"] = f"transformer.{index}"
                index += 1  # the activation
            index += 1
            block += 1
        for layer in ("pool", "dropout"):
            index += f"stage{stage}_{layer}" in names
    return {**modules, "logits": f"transformer.{index}"}


def _variables(layer: Any) -> dict[str, tuple[str, Sequence[str], str]]:
    if isinstance(layer, _LAYERS):
        return _ATTENTION
    return next(
        (found for kind, found in _OTHERS.items() if isinstance(layer, kind)),
        {},
    )


def _ones(layer: Any, name: str) -> int:
    """The number of axes of size one at the end of their 1 x 1 kernels."""
    if name.startswith(("row", "column")):
        return 2
    lifting = isinstance(layer, layers.LiftingSelfAttention2D)
    return 2 if lifting and name != "output_kernel" else 3


def gsa_kind(order: int) -> str:
    return f"on a group of order {order}"
