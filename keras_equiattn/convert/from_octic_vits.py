"""Where the weights of octic vision transformers go in an `OcticViT`."""

import re
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_equiattn.convert.reading import label
from keras_equiattn.convert.reading import Part

SIGNS = ("A1", "A2", "B1", "B2")
# What the parts of their modules are called that are put together to one array.
_SIGNS = f"{{{','.join(SIGNS)}}}"
_LIFT = "patch_embed.lift8"
_KERNELS = (*SIGNS, "E_left", "E_right")

_MODULES = {
    "embedding": "",
    "invariants_dense": "invariant_proj.",
    "norm": "norm.",
    "logits": "head.",
}
_BLOCK = {
    "norm1": "norm1.",
    "attention": "attn.",
    "norm2": "norm2.",
    "dense1": "mlp.fc1.",
    "dense2": "mlp.fc2.",
}

# Of each variable, by the end of its path, the name in their module, their axes
# and ours: input (i) and output (o) channels, signs (s), rows (x) and columns
# (y), heads (n).
_Found = tuple[str, Sequence[str], str]
_DENSE: dict[str, _Found] = {
    "kernel": ("weight", "oi", "io"),
    "bias": ("bias", "o", "o"),
}
_OCTIC_DENSE: dict[str, _Found] = {
    "kernel_signs": (f"lin_{_SIGNS}.weight", "soi", "sio"),
    "kernel_vectors": ("lin_E.weight", "oi", "io"),
    "bias": ("lin_A1.bias", "o", "o"),
}
_FACTORS: dict[str, _Found] = {
    "gamma_signs": (f"alpha_{_SIGNS}", "si", "si"),
    "gamma_vectors": ("alpha_E", "i", "i"),
}
_MAPS = {"query": "query.", "key": "key.", "value": "value."}


def _within(
    maps: Mapping[str, str], of: dict[str, _Found]
) -> dict[str, _Found]:
    """The variables of maps within a layer."""
    return {
        f"{ours}/{variable}": (theirs + key, axes, letters)
        for ours, theirs in maps.items()
        for variable, (key, axes, letters) in of.items()
    }


_ATTENTION: dict[str, _Found] = {
    **_within(
        _MAPS,
        {
            "kernel": ("weight", ("no", "i"), "ino"),
            "bias": ("bias", ("no",), "no"),
        },
    ),
    "attention_output/kernel": ("proj.weight", ("o", "ni"), "nio"),
    "attention_output/bias": ("proj.bias", "o", "o"),
}
_VARIABLES: dict[str, dict[str, _Found]] = {
    "OcticEmbedding": {
        "positions": ("pos_embed", "xyi", "xyi"),
        "class_token": ("cls_token", "i", "i"),
    },
    "LiftingConv2D": {
        "kernel": ("kernel", "oixy", "xyio"),
        "bias": ("bias", "o", "o"),
    },
    "OcticNormalization": {
        **{
            name: (f"scaling.{key}", axes, ours)
            for name, (key, axes, ours) in _FACTORS.items()
        },
        "beta": ("scaling.beta", "i", "i"),
    },
    "OcticAttention": _within({**_MAPS, "projection": "proj."}, _OCTIC_DENSE),
    "OcticDense": _OCTIC_DENSE,
    "OcticScale": _FACTORS,
    "LayerNormalization": {
        "gamma": ("weight", "i", "i"),
        "beta": ("bias", "i", "i"),
    },
    "MultiHeadAttention": _ATTENTION,
    "Dense": _DENSE,
    "ChannelScale": {"gamma": ("gamma", "i", "i")},
}


def octic_parts(model: Any) -> dict[str, Part]:
    """Where all variables of an `OcticViT` come from, see `octic_arrays`."""
    named = isinstance(model, keras.Model) and {x.name for x in model.layers}
    if not named or not {"patches", "embedding", "block1_scale1"} <= named:
        raise ValueError(
            "`model` must be an `OcticViT`, whose layers have the names that "
            f"it gives them. Received: {model!r}"
        )
    parts = {}
    for layer in model.layers:
        module = _module(layer.name)
        known = _VARIABLES.get(type(layer).__name__, {})
        for variable in layer.weights:
            within = variable.path.split("/")
            found = known.get("/".join(within[-2:])) or known.get(within[-1])
            if module is None or found is None:
                raise ValueError(
                    f"{label(layer)} has '{variable.name}', which no layer "
                    "of this name has in an `OcticViT`."
                )
            key, theirs, ours = found
            parts[module + key] = Part(variable, key, theirs, ours, (), 1.0)
    return parts


def octic_arrays(
    model: Any, arrays: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Their arrays, in the form in which our variables take them.

    Queries, keys and values come by themselves, and the four maps of signs
    together. The kernel of patches and the positions are functions of pixels:
    what the identity of the group takes of theirs, which are the parts of each
    representation. What takes no part in an `OcticViT` is left out: the token
    of masked patches of DINOv2, parts of the class token that are zero, and the
    classifier where the model has none.

    Raises:
        ValueError: if the class token is not the same in every pose.
    """
    found = {
        # LayerScale is a module in DINOv2, a parameter in DeiT III.
        re.sub(
            r"\.(gamma_|ls)([12])(\.gamma)?$",
            r".scale\2.gamma",
            re.sub(r"\.(gamma_|ls)([12])\.alpha", r".scale\2.alpha", name),
        ): array
        for name, array in arrays.items()
        if not name.startswith("mask_token.")
    }
    for name in [name for name in found if ".qkv." in name]:
        array = found[name]
        if array.ndim and len(array) % 3 == 0:
            del found[name]
            for own, part in zip(
                _MAPS.values(), np.split(array, 3), strict=True
            ):
                found[name.replace("qkv.", own)] = part
    _merge(
        found,
        [f"{_LIFT}.conv_{name}.weight" for name in _KERNELS],
        f"{_LIFT}.kernel",
        lambda parts: _of_identity(parts, 0.5 / np.sqrt(2), 0.5),
    )
    for name in [name for name in found if re.search(r"_A1(\.weight)?$", name)]:
        _merge(
            found,
            [name.replace("_A1", f"_{sign}") for sign in SIGNS],
            name.replace("_A1", f"_{_SIGNS}"),
            np.stack,
        )
    if f"{_LIFT}.conv_A1.bias" in found:
        bias = found.pop(f"{_LIFT}.conv_A1.bias")
        found[f"{_LIFT}.bias"] = bias / np.sqrt(8)
    _merge(
        found,
        [f"pos_embed.{number}" for number in range(len(_KERNELS))],
        "pos_embed",
        lambda parts: np.moveaxis(
            _of_identity([np.moveaxis(part, -1, 0) for part in parts], 1, 1),
            0,
            -1,
        ),
    )
    for name in [name for name in found if name.startswith("cls_token.")]:
        token = found.pop(name)
        if name == "cls_token.0":
            found["cls_token"] = token.reshape(-1)
        elif token.any():
            raise ValueError(
                "A class token must be the same in every pose, so that only "
                f"'cls_token.0' may be there. Received: {name!r} with values "
                f"up to {np.abs(token).max():.3g}"
            )
    if not any(layer.name == "logits" for layer in model.layers):
        found = {k: v for k, v in found.items() if not k.startswith("head.")}
    return found


def octic_kind(invariant: bool) -> str:
    """What messages say of a network."""
    return "invariant" if invariant else "hybrid"


def _module(name: str) -> str | None:
    """What comes before the names of the variables of our layer."""
    if name == "patches":
        return f"{_LIFT}."
    match = re.fullmatch(r"block(\d+)_(\w+)", name)
    if match is None:
        return _MODULES.get(name)
    part = match[2]
    if part in ("scale1", "scale2"):
        return f"blocks.{int(match[1]) - 1}.{part}."
    return (
        f"blocks.{int(match[1]) - 1}.{_BLOCK[part]}" if part in _BLOCK else None
    )


def _merge(
    arrays: dict[str, np.ndarray],
    names: Sequence[str],
    merged: str,
    merge: Any,
) -> None:
    """Puts one array in place of several, unless some are missing or odd."""
    parts = [arrays[name] for name in names if name in arrays]
    shapes = {part.shape for part in parts}
    if len(parts) == len(names) and len(shapes) == 1:
        value = merge(parts)
        for name in names:
            del arrays[name]
        arrays[merged] = value


def _of_identity(
    parts: Sequence[np.ndarray], signs: float, vectors: float
) -> np.ndarray:
    """What the identity of the group sees of six quarters `(..., n, n)`.

    Each sum over the group has an image `(..., 2 n, 2 n)`, which the quarter
    generates by turning, mirroring and changing signs. Those of a sign are
    `turned` by a quarter with a sign, and mirrored with another one. Those of
    the first component of a vector keep their sign from top to bottom, and
    change it from left to right; the second one is the first, turned.
    """
    total: Any = 0
    for part, turned, mirrored in zip(
        parts, (1, 1, -1, -1), (1, -1, 1, -1), strict=False
    ):
        turns = [np.rot90(part, k, (-2, -1)) * turned**k for k in range(4)]
        image = np.block([[turns[0], turns[3]], [turns[1], turns[2]]])
        total = total + signs * (image + mirrored * image[..., ::-1])
    for part, second in zip(parts[4:], (1, -1), strict=True):
        half = np.concatenate([part, part[..., ::-1, :]], -2)
        image = np.concatenate([half, -half[..., ::-1]], -1)
        total = total + vectors * (
            image + second * np.rot90(image, 1, (-2, -1))
        )
    return total / np.sqrt(8)
