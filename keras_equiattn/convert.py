"""Loads weights that the papers' own code has trained into our models."""

import dataclasses
import math
import os
import pickle
import re
import zipfile
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_equiattn import layers

__all__ = ["att_gconvs", "g_selfatt"]

_TORCH_FILES = (".pth", ".pt", ".bin")

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
    "gamma": ("weight", "i", "i"),
    "beta": ("bias", "i", "i"),
    "moving_mean": ("running_mean", "i", "i"),
    "moving_variance": ("running_var", "i", "i"),
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

# What the authors of group self-attention call the layers of a block.
_GSA_BLOCK = {
    "norm1": "attention.0",
    "attention": "attention.2",
    "norm2": "attention.3",
    "dense1": "mlp.0",
    "norm3": "mlp.1",
    "dense2": "mlp.3",
    "norm4": "mlp.4",
    "shortcut": "shortcut.0",
}

# As `_VARIABLES`, of attention, without the axes of size one at the end of
# theirs: heads (n), of which they have the channels (k) side by side, and
# hidden units (m) and the coordinate (c) of the encodings.
_GSA_ATTENTION: dict[str, tuple[str, Sequence[str], str]] = {
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
_GSA_OTHERS: dict[type, dict[str, tuple[str, Sequence[str], str]]] = {
    keras.layers.Dense: {
        "kernel": ("weight", "oi", "io"),
        "bias": ("bias", "o", "o"),
    },
    keras.layers.GroupNormalization: {
        "gamma": ("layer_norm.weight", "i", "i"),
        "beta": ("layer_norm.bias", "i", "i"),
    },
    keras.layers.BatchNormalization: {
        name: _VARIABLES[name]
        for name in ("gamma", "beta", "moving_mean", "moving_variance")
    },
}

_ATTENTIVE = (layers.AttentiveLiftingConv2D, layers.AttentiveGroupConv2D)
_CO_ATTENTIVE = (layers.CoAttentiveLiftingConv2D, layers.CoAttentiveGroupConv2D)
_GSA_LAYERS = (layers.LiftingSelfAttention2D, layers.GroupSelfAttention2D)
_CONVOLUTIONS = (
    layers.LiftingConv2D,
    layers.GroupConv2D,
    *_ATTENTIVE,
    *_CO_ATTENTIVE,
)


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
    arrays = _read(state)
    _check(model, parts, arrays, _state_kind(arrays), _model_kind(model))
    _assign(parts, arrays)
    return model


def g_selfatt(
    model: keras.Model, state: Mapping[str, Any] | str | os.PathLike[str]
) -> keras.Model:
    """Loads weights of Romero and Cordonnier 2021 into a `GSANet`, in place.

    For the networks of "Group Equivariant Stand-Alone Self-Attention for
    Vision", trained with the authors' PyTorch code. The model must have the
    same architecture, with `epsilon=1e-12`. With BatchNorm it then computes
    the same but for the encoding of positions, for which this is.

    On z2 the model computes the same function, to rounding. On other groups
    it does not: their attention on the group takes the embedding of relative
    elements where it is not equivariant, ours at `g^-1 m`, see
    `GroupSelfAttention2D`. It computes what their code does with that index
    put right.

    Images must be scaled as in their training: pass `normalization` to the
    network. Layers find their weights by name, as `GSANet` names them.

    Args:
        model: a `GSANet`.
        state: a mapping or a file, see `att_gconvs`.

    Returns:
        The model.

    Raises:
        ValueError: for a model or file of another kind, and for weights that
            are missing, not used, or of another shape. The model is then as
            it was.
        ImportError: a PyTorch file without PyTorch.

    References:
        - [Romero and Cordonnier, 2021](https://arxiv.org/abs/2010.00977) and
          the authors' code, https://github.com/dwromero/g_selfatt
    """
    parts = _gsa_parts(model)
    arrays = _read(state)
    orders = [
        len(array)
        for key, array in arrays.items()
        if key.endswith("group_embedding.weight") and array.ndim
    ]
    looks = _gsa_kind(orders[0]) if orders else None
    kind = _gsa_kind(model.get_layer("lift").group.order)
    _check(model, parts, arrays, looks, kind)
    _assign(parts, arrays)
    return model


@dataclasses.dataclass(frozen=True)
class _Part:
    """Where a variable comes from.

    Attributes:
        variable: of our layer.
        key: name in their module.
        theirs: axes, each by its letter, or by those of several axes of ours
            that it holds one after the other; none for an axis of size one.
        ours: axes; there may be a group axis of size one beside.
        elements: our group elements in their numbering.
        factor: what their code multiplies by and ours does not.
    """

    variable: Any
    key: str
    theirs: Sequence[str]
    ours: str
    elements: Sequence[int]
    factor: float

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of their array."""
        return tuple(
            math.prod(self._sizes[letter] for letter in axis)
            for axis in self.theirs
        )

    def convert(self, array: Any) -> np.ndarray:
        """The value of the variable."""
        theirs = "".join(self.theirs)
        value = np.asarray(array, "float64")
        value = value.reshape([self._sizes[axis] for axis in theirs])
        axes = [axis for axis in self.ours if axis in theirs]
        value = value.transpose([theirs.index(axis) for axis in axes])
        if "h" in axes:
            value = value.take(self.elements, axis=axes.index("h"))
        return self.factor * value.reshape(self.variable.shape)

    @property
    def _sizes(self) -> dict[str, int]:
        return {
            axis: int(size)
            for axis, size in zip(self.ours, self.variable.shape, strict=True)
        }


def _parts(layer: Any) -> list[_Part]:
    """Where the variables of one layer come from."""
    if isinstance(layer, keras.layers.BatchNormalization):
        group = "z2"
    elif isinstance(layer, (*_CONVOLUTIONS, layers.InputAttention)):
        group = layer.group.name
    else:
        raise ValueError(
            f"{_label(layer)} is none of the layers that these weights are "
            "for: convolutions and attention of this library, and "
            "BatchNormalization."
        )
    if group not in _CONSTANTS:
        raise ValueError(
            f"{_label(layer)} must be on {_names(_CONSTANTS)}, the groups of "
            f"the authors' networks. Received: '{group}'"
        )
    parts = []
    for variable in layer.weights:
        if variable.name not in _VARIABLES:
            raise ValueError(
                f"{_label(layer)} must have no '{variable.name}': the "
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
            _Part(variable, key, theirs, ours, _ELEMENTS[group], factor)
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


def _model_parts(model: Any) -> dict[str, _Part]:
    """Where all variables of a model come from, by their full names."""
    parts: dict[str, _Part] = {}
    if isinstance(model, keras.Model):
        for layer in model.layers:
            module = _module(layer)
            for part in _parts(layer) if layer.weights else []:
                key = f"{module}.{part.key}"
                if key in parts:
                    raise ValueError(
                        f"{_label(layer)} would take '{key}', and so would "
                        "another layer of the model: rename one."
                    )
                parts[key] = part
    if not parts:
        raise ValueError(
            f"`model` must be a built Keras model with weights. Received: "
            f"{model!r}"
        )
    return parts


def _gsa_parts(model: Any) -> dict[str, _Part]:
    """Where all variables of a `GSANet` come from, by their full names."""
    named = isinstance(model, keras.Model) and {x.name for x in model.layers}
    if not named or not {"lift", "logits"} <= named:
        raise ValueError(
            "`model` must be a `GSANet`, whose layers have the names that it "
            f"gives them. Received: {model!r}"
        )
    modules = _gsa_modules(named)
    parts = {}
    for layer in model.layers:
        for variable in layer.weights:
            found = _gsa_variables(layer).get(variable.name)
            if layer.name not in modules or found is None:
                raise ValueError(
                    f"{_label(layer)} has '{variable.name}', which no layer "
                    "of this name has in a `GSANet`."
                )
            key, theirs, ours = found
            if "weight" in key and len(theirs) == 2 and "h" not in theirs:
                theirs = (*theirs, *_ones(layer, variable.name) * [""])
            elements = layer.group.inverse.tolist() if "h" in ours else ()
            parts[f"{modules[layer.name]}.{key}"] = _Part(
                variable, key, theirs, ours, elements, 1.0
            )
    return parts


def _gsa_modules(names: set[str]) -> dict[str, str]:
    """What the authors call the modules of the layers of a `GSANet`."""
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
                for name, module in _GSA_BLOCK.items()
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


def _gsa_variables(layer: Any) -> dict[str, tuple[str, Sequence[str], str]]:
    if isinstance(layer, _GSA_LAYERS):
        return _GSA_ATTENTION
    return next(
        (
            found
            for kind, found in _GSA_OTHERS.items()
            if isinstance(layer, kind)
        ),
        {},
    )


def _ones(layer: Any, name: str) -> int:
    """Axes of size one at the end of their kernels of 1 x 1 convolutions."""
    if name.startswith(("row", "column")):
        return 2
    lifting = isinstance(layer, layers.LiftingSelfAttention2D)
    return 2 if lifting and name != "output_kernel" else 3


def _gsa_kind(order: int) -> str:
    return f"on a group of order {order}"


def _module(layer: Any) -> str:
    """What the authors call the module that has the weights of a layer."""
    name = str(layer.name)
    if isinstance(layer, layers.InputAttention):
        name = name.removesuffix("_attention")
    for pattern, module in _MODULES:
        if match := re.fullmatch(pattern, name):
            return module(match)
    return name


def _read(state: Any) -> dict[str, np.ndarray]:
    """The arrays of a mapping or file, by name."""
    if isinstance(state, str | os.PathLike):
        state = _read_file(Path(state))
    if not isinstance(state, Mapping):
        raise ValueError(
            "`state` must be a mapping of names to arrays, or the path of a "
            f".npz, .pth, .pt or .bin file. Received: {type(state).__name__}"
        )
    for wrapper in ("state_dict", "model"):
        if isinstance(state.get(wrapper), Mapping):
            state = state[wrapper]
            break
    # What torch.nn.DataParallel puts before every name.
    prefix = "module."
    if not all(str(key).startswith(prefix) for key in state):
        prefix = ""
    arrays = {}
    for key, value in state.items():
        if hasattr(value, "detach"):
            value = value.detach().cpu().double().numpy()
        try:
            array = np.asarray(value)
            numeric = array.dtype.kind in "iuf"
        except ValueError:  # lists of lists of several lengths
            numeric = False
        if not numeric:
            raise ValueError(
                "`state` must hold arrays of numbers under all its names. "
                f"Received: {key!r}: {type(value).__name__}"
            )
        arrays[str(key).removeprefix(prefix)] = array
    return arrays


def _read_file(path: Path) -> Any:
    suffix = path.suffix.lower()
    if suffix not in (".npz", *_TORCH_FILES) or not path.is_file():
        raise ValueError(
            "`state` must be the path of a .npz, .pth, .pt or .bin file that "
            f"exists. Received: {str(path)!r}"
        )
    if suffix != ".npz":
        try:
            import torch
        except ImportError:
            raise ImportError(
                f"{path.name} is a file of PyTorch, which is not installed: "
                "pip install torch, or save its arrays as .npz where it is."
            ) from None
    try:
        if suffix != ".npz":
            return torch.load(path, map_location="cpu", weights_only=True)
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (
        AttributeError,
        EOFError,
        RuntimeError,
        TypeError,
        ValueError,
        pickle.UnpicklingError,
        zipfile.BadZipFile,
    ) as error:
        raise ValueError(
            f"{path} is not a file of arrays by name. Of a PyTorch model save "
            "its `state_dict()`: other Python objects are not loaded."
        ) from error


def _check(
    model: keras.Model,
    parts: Mapping[str, _Part],
    arrays: Mapping[str, np.ndarray],
    looks: str | None,
    kind: str,
) -> None:
    """Raises unless names and shapes are those that the model takes.

    The message says what kind of network the arrays are of, if that is known
    and not what the model is.
    """
    counters = {
        key.removesuffix("running_mean") + "num_batches_tracked"
        for key in parts
        if key.endswith(".running_mean")
    }
    missing = [key for key in parts if key not in arrays]
    unused = [k for k in arrays if k not in parts and k not in counters]
    other = [
        f"{key} is {arrays[key].shape}, must be {part.shape}"
        for key, part in parts.items()
        if key in arrays and arrays[key].shape != part.shape
    ]
    if not (missing or unused or other):
        return
    message = f"`state` does not fit '{model.name}'"
    if looks not in (None, kind):
        message += f": it looks {looks}, the model is {kind}"
    for title, found in (
        ("Missing", missing),
        ("Not used by the model", unused),
        ("Of another shape", other),
    ):
        if found:
            message += f". {title}: {_first(found)}"
    raise ValueError(message)


def _assign(
    parts: Mapping[str, _Part], arrays: Mapping[str, np.ndarray]
) -> None:
    """Converts all before it changes anything."""
    values = [part.convert(arrays[key]) for key, part in parts.items()]
    for part, value in zip(parts.values(), values, strict=True):
        part.variable.assign(value)


def _first(found: Sequence[str], limit: int = 5) -> str:
    """The first few of many, and how many they are."""
    text = ", ".join(found[:limit])
    if len(found) > limit:
        text += f", ... ({len(found)} in all)"
    return text


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


def _label(layer: Any) -> str:
    return f"{type(layer).__name__} '{layer.name}'"


def _names(names: Any) -> str:
    return " or ".join(map(repr, names))
