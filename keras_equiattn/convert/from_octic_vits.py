"""Where the weights of octic vision transformers go in an `OcticViT`."""

import re
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_equiattn.convert.reading import Part
from keras_equiattn.convert.reading import unexpected

SIGNS = ("A1", "A2", "B1", "B2")
# The names of the parts of their modules that are joined to one array.
_SIGNS = f"{{{','.join(SIGNS)}}}"
_LIFT = "patch_embed.lift8"
_KERNELS = (*SIGNS, "E_left", "E_right")
# The token of masked patches, and the heads, with which DINOv2 is trained.
_NOT_USED = ("mask_token.", "backbone.mask_token.", "dino_head.", "ibot_head.")
# The number of invariants of a channel, which has eight values.
_INVARIANT = {
    6: "invariant with the power spectrum",
    32: "invariant with polynomials",
}

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

# The end of a variable's path leads to its name in their module, to their axes
# and to ours: input (i) and output (o) channels, signs (s), rows (x) and
# columns (y), heads (n).
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
                raise unexpected(layer, variable, "OcticViT")
            key, theirs, ours = found
            parts[module + key] = Part(variable, key, theirs, ours, (), 1.0)
    return parts


def octic_arrays(
    model: Any, arrays: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Their arrays, in the form in which our variables take them.

    Queries, keys and values become three maps, and the four maps of signs one.
    The kernel of patches and the positions become functions of pixels, which
    the group acts on. An `OcticViT` has no use for the token of masked patches
    and the heads of DINOv2, for the parts of a class token that are zero or,
    without its top, for the classifier: these are left out.

    Raises:
        ValueError: if the class token depends on the pose, if there are
            register tokens, or if one of the parts that are joined is missing.
    """
    found = {
        _renamed(name): array
        for name, array in arrays.items()
        if not name.startswith(_NOT_USED)
    }
    if any(name.startswith("register_tokens.") for name in found):
        raise ValueError(
            "An `OcticViT` has no register tokens. Received: a file with "
            "'register_tokens.0'"
        )
    _merge(
        found,
        [f"{_LIFT}.conv_{name}.weight" for name in _KERNELS],
        f"{_LIFT}.kernel",
        # In an orthonormal basis, signs are divided by sqrt(order), and entries
        # of 2 x 2 matrices by sqrt(order / 2).
        lambda parts: _of_identity(parts, 1 / np.sqrt(8), 1 / np.sqrt(4)),
    )
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
    bias = found.pop(f"{_LIFT}.conv_A1.bias", None)
    if bias is not None:
        found[f"{_LIFT}.bias"] = bias / np.sqrt(8)
    pattern = re.compile(rf"(.*_)({'|'.join(SIGNS)})(\.weight)?")
    matches = filter(None, map(pattern.fullmatch, list(found)))
    for first, last in {(match[1], match[3] or "") for match in matches}:
        names = [f"{first}{sign}{last}" for sign in SIGNS]
        _merge(found, names, f"{first}{_SIGNS}{last}", np.stack)
    for name in [name for name in found if ".qkv." in name]:
        # Maps of signs are stacked along a first axis.
        array, axis = found[name], int(_SIGNS in name)
        if array.ndim > axis and array.shape[axis] % 3 == 0:
            del found[name]
            parts = np.split(array, 3, axis)
            for own, part in zip(_MAPS.values(), parts, strict=True):
                found[name.replace("qkv.", own)] = part
    for name in [name for name in found if name.startswith("cls_token.")]:
        token = found.pop(name)
        if name == "cls_token.0":
            found["cls_token"] = token.reshape(-1)
        elif token.any():
            raise ValueError(
                "A class token must be the same in every pose, so that "
                f"'cls_token.0' alone may differ from zero. Received: {name!r} "
                f"with {np.count_nonzero(token)} other values"
            )
    if not any(layer.name == "logits" for layer in model.layers):
        found = {k: v for k, v in found.items() if not k.startswith("head.")}
    return found


def octic_looks(arrays: Mapping[str, np.ndarray]) -> str | None:
    """The kind of network that arrays are of, for messages; None if unknown."""
    if "patch_embed.proj.weight" in arrays:
        return "plain"
    if f"{_LIFT}.kernel" not in arrays:
        return None
    kernel = arrays.get("invariant_proj.weight")
    if kernel is None or kernel.ndim != 2:
        return "hybrid"
    eighths = 8 * kernel.shape[1] // max(kernel.shape[0], 1)
    return _INVARIANT.get(eighths)


def octic_kind(model: Any) -> str:
    """The kind of network that a model is, for messages."""
    for layer in model.layers:
        if layer.name == "invariants":
            return _INVARIANT[
                8
                * layer.output.shape[-1]
                // model.get_layer("invariants_dense").units
            ]
    return "hybrid"


def _module(name: str) -> str | None:
    """The beginning of the authors' names for the variables of our layer."""
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


def _renamed(name: str) -> str:
    """The name without the differences between DINOv2 and DeiT III."""
    name = name.removeprefix("backbone.")
    # LayerScale is a module in DINOv2, and a parameter in DeiT III.
    name = re.sub(r"\.(?:gamma_|ls)([12])\.alpha", r".scale\1.alpha", name)
    return re.sub(
        r"\.(?:gamma_|ls)([12])(?:\.gamma)?$", r".scale\1.gamma", name
    )


def _merge(
    arrays: dict[str, np.ndarray],
    names: Sequence[str],
    merged: str,
    merge: Callable[[list[np.ndarray]], np.ndarray],
) -> None:
    """Puts one array in place of several, unless all of them are missing."""
    missing = [name for name in names if name not in arrays]
    if len(missing) == len(names):
        return
    shapes = [arrays[name].shape for name in names if name in arrays]
    if missing or len(set(shapes)) > 1:
        found = f"no {missing[0]}" if missing else f"the shapes {shapes}"
        raise ValueError(
            f"`state` must hold arrays of one shape as {', '.join(names)}. "
            f"Received: {found}"
        )
    arrays[merged] = merge([arrays.pop(name) for name in names])


def _of_identity(
    parts: Sequence[np.ndarray], signs: float, vectors: float
) -> np.ndarray:
    """The kernel or positions of the identity, as a function of pixels.

    Their arrays are quarters `(..., n, n)` of six functions `(..., 2 n, 2 n)`,
    one for each sign and two for the first components of vectors. A function
    with a sign is its quarter, turned and mirrored, with changes of sign. That
    of a first component is even from top to bottom and odd from left to right;
    turned by 90 degrees, it is that of the second component.
    """
    total: Any = 0
    for part, turned, mirrored in zip(
        parts[:4], (1, 1, -1, -1), (1, -1, 1, -1), strict=True
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
