"""Where the weights of a Swin transformer with ACmix go in an `ACmixSwin`."""

import re
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_equiattn import layers
from keras_equiattn.convert.reading import label
from keras_equiattn.convert.reading import Part
from keras_equiattn.convert.reading import unexpected
from keras_equiattn.ops.dense import relative_places

# The authors' names for our layers. They count stages and blocks from 0, and
# merge patches at the end of a stage.
_MODULES = {
    "patches": "patch_embed.proj",
    "patches_norm": "patch_embed.norm",
    "norm": "norm",
    "logits": "head",
}
_BLOCK = {
    "norm1": "norm1",
    "mixer": "attn",
    "norm2": "norm2",
    "dense1": "mlp.fc1",
    "dense2": "mlp.fc2",
}
_MERGE = {"norm": "downsample.norm", "dense": "downsample.reduction"}

# For each variable the name in their module, their axes and ours: input (i) and
# output (o) channels, rows (x) and columns (y), also of offsets, shifts (t),
# maps (m) and heads (n); without axes of size one.
_MIXER: dict[str, tuple[str, Sequence[str], str]] = {
    **{
        f"{name}_{part}": (f"{name}.{key}", axes, ours)
        for name in ("query", "key", "value")
        for part, key, axes, ours in (
            ("kernel", "weight", "oi", "1io"),
            ("bias", "bias", "o", "o"),
        )
    },
    "position_bias": ("relative_position_bias_table", ("xy", "n"), "xyn"),
    "output_kernel": ("proj.weight", "oi", "io"),
    "output_bias": ("proj.bias", "o", "o"),
    "mixing_kernel": ("fc.weight", ("t", "m", "", ""), "mt"),
    "mixing_bias": ("fc.bias", "t", "t"),
    "shift_kernel": ("dep_conv.weight", "otxy", "xyto"),
    "attention_rate": ("rate1", ("",), ""),
    "convolution_rate": ("rate2", ("",), ""),
}
_OTHERS: dict[type, dict[str, tuple[str, Sequence[str], str]]] = {
    keras.layers.Conv2D: {
        "kernel": ("weight", "oixy", "xyio"),
        "bias": ("bias", "o", "o"),
    },
    keras.layers.Dense: {
        "kernel": ("weight", "oi", "io"),
        "bias": ("bias", "o", "o"),
    },
    keras.layers.LayerNormalization: {
        "gamma": ("weight", "i", "i"),
        "beta": ("bias", "i", "i"),
    },
    layers.WindowACmix2D: _MIXER,
}


def acmix_parts(model: Any) -> dict[str, Part]:
    """Where all variables of an `ACmixSwin` come from, by their full names.

    Queries, keys and values have weights of their own, see `split_maps`.
    """
    named = isinstance(model, keras.Model) and {x.name for x in model.layers}
    if not named or not {"patches", "stage1_block1_mixer"} <= named:
        raise ValueError(
            "`model` must be an `ACmixSwinTiny` or `ACmixSwinSmall`, whose "
            f"layers have the names that it gives them. Received: {model!r}"
        )
    parts = {}
    for layer in model.layers:
        module = _module(layer.name)
        for variable in layer.weights:
            found = _variables(layer).get(variable.name)
            if module is None or found is None:
                raise unexpected(layer, variable, "ACmixSwin")
            key, theirs, ours = found
            parts[f"{module}.{key}"] = Part(
                variable, key, theirs, ours, (), 1.0
            )
    return parts


def split_maps(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the arrays with queries, keys and values split up."""
    found = {}
    for name, array in arrays.items():
        match = re.fullmatch(r"(.*attn\.)qkv(\.weight|\.bias)", name)
        if match is None or not array.ndim or len(array) % 3:
            found[name] = array
            continue
        for own, part in zip(
            ("query", "key", "value"), np.split(array, 3), strict=True
        ):
            found[f"{match[1]}{own}{match[2]}"] = part
    return found


def acmix_buffers(
    model: keras.Model, arrays: Mapping[str, np.ndarray]
) -> list[str]:
    """The names of arrays that may be there beside the weights of the model.

    These are the mask of shifted windows, which depends on the size of images,
    the indices of relative positions, and the classifier if the model has none.

    Raises:
        ValueError: if the indices are those of another window.
    """
    found = []
    for layer in model.layers:
        if isinstance(layer, layers.WindowACmix2D):
            module = str(_module(layer.name))
            key = f"{module}.relative_position_index"
            expected = relative_places(layer.window_size)
            if not np.array_equal(arrays.get(key, expected), expected):
                raise ValueError(
                    f"`state` does not fit '{model.name}': {key} is not that "
                    f"of windows of {layer.window_size}, which {label(layer)} "
                    "has."
                )
            block = module.removesuffix("attn")
            found += [key, f"{block}attn_mask"]
    if "logits" not in {layer.name for layer in model.layers}:
        found += ["head.weight", "head.bias"]
    return found


def acmix_kind(mixed: bool) -> str:
    return "with ACmix" if mixed else "without ACmix"


def _module(name: str) -> str | None:
    """The authors' name for one of our layers; None if they have none."""
    match = re.fullmatch(r"stage(\d+)_(block(\d+)|merge)_(\w+)", name)
    if match is None:
        return _MODULES.get(name)
    stage = int(match[1]) - 1
    if match[3] is None:
        module = _MERGE.get(match[4])
        return module and f"layers.{stage - 1}.{module}"
    module = _BLOCK.get(match[4])
    return module and f"layers.{stage}.blocks.{int(match[3]) - 1}.{module}"


def _variables(layer: Any) -> dict[str, tuple[str, Sequence[str], str]]:
    return next(
        (found for kind, found in _OTHERS.items() if isinstance(layer, kind)),
        {},
    )
