"""Weights that other code has trained: read, matched by name, assigned."""

import argparse
import dataclasses
import math
import os
import pathlib
import pickle
import zipfile
from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

_TORCH_FILES = (".pth", ".pt", ".bin")

# For each variable the name in a PyTorch module, its axes and ours.
BATCH_NORMALIZATION = {
    "gamma": ("weight", "i", "i"),
    "beta": ("bias", "i", "i"),
    "moving_mean": ("running_mean", "i", "i"),
    "moving_variance": ("running_var", "i", "i"),
}


@dataclasses.dataclass(frozen=True)
class Part:
    """Where a variable comes from.

    Attributes:
        variable: the variable of our layer.
        key: the name in their module.
        theirs: for each axis of their tensor the letter of our axis. An axis
            that joins several of our axes has the letters of all of them, and
            an axis of size one has none.
        ours: the letters of our axes. Our variable may have a group axis of
            size one in addition.
        elements: our group elements in their numbering.
        factor: a factor that their code has and ours does not have; the array
            is multiplied by it.
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
        """The value of the variable.

        Raises:
            ValueError: if a weight is NaN or infinite.
        """
        theirs = "".join(self.theirs)
        value = np.asarray(array, "float64")
        wrong = int((~np.isfinite(value)).sum())
        if wrong:
            raise ValueError(
                f"`state` must hold finite weights. Received: {self.key!r} "
                f"with {wrong} values that are NaN or infinite"
            )
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


def read(state: Any) -> dict[str, np.ndarray]:
    """The arrays of a mapping or file, by name."""
    if isinstance(state, str | os.PathLike):
        state = _read_file(Path(state))
    if not isinstance(state, Mapping):
        raise ValueError(
            "`state` must be a mapping of names to arrays, or the path of a "
            f".npz, .pth, .pt or .bin file. Received: {type(state).__name__}"
        )
    for wrapper in ("state_dict", "model", "teacher"):
        if isinstance(state.get(wrapper), Mapping):
            state = state[wrapper]
            break
    prefix = _common_prefix([str(key) for key in state])
    arrays = {}
    for key, value in state.items():
        try:
            if hasattr(value, "detach"):
                value = value.detach().cpu()
                # NumPy has no bfloat16.
                value = (value if value.itemsize > 2 else value.float()).numpy()
            array = np.asarray(value)
            numeric = array.dtype.kind in "iuf"
        # Sparse, quantised and meta tensors; lists of lists of several lengths.
        except (NotImplementedError, RuntimeError, TypeError, ValueError):
            numeric = False
        if not numeric:
            raise ValueError(
                "`state` must hold arrays of numbers under all its names. "
                f"Received: {key!r}: {type(value).__name__}"
            )
        arrays[str(key).removeprefix(prefix)] = array
    return arrays


def _common_prefix(names: Sequence[str]) -> str:
    """The prefix that wrappers of PyTorch put before every name."""
    prefix = ""
    for _ in names:
        for wrapper in ("module.", "_orig_mod."):
            if all(name.startswith(prefix + wrapper) for name in names):
                prefix += wrapper
                break
        else:
            break
    return prefix


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
            # A checkpoint may also hold the options of a training script.
            options = [argparse.Namespace, pathlib.PosixPath]
            with torch.serialization.safe_globals(options):
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
            f"{path} is not a file of arrays by name. For a PyTorch model, "
            "save its `state_dict()`: other Python objects are not loaded."
        ) from error


def check(
    model: keras.Model,
    parts: Mapping[str, Part],
    arrays: Mapping[str, np.ndarray],
    looks: str | None,
    kind: str,
    buffers: Collection[str] = (),
) -> None:
    """Raises unless names and shapes are those that the model takes.

    The message says what kind of network the arrays are of, if that is known
    and not what the model is. `buffers` may be there beside the weights.
    """
    counters = {
        key.removesuffix("running_mean") + "num_batches_tracked"
        for key in parts
        if key.endswith(".running_mean")
    }
    known = {*parts, *counters, *buffers}
    missing = [key for key in parts if key not in arrays]
    unused = [key for key in arrays if key not in known]
    other = [
        f"{key} is {arrays[key].shape}, must be {part.shape}"
        for key, part in parts.items()
        if key in arrays and arrays[key].shape != part.shape
    ]
    if not (missing or unused or other):
        return
    message = f"`state` does not fit '{model.name}'"
    if looks not in (None, kind):
        message += f": it seems to be {looks}, and the model is {kind}"
    for title, found in (
        ("Missing", missing),
        ("Not used by the model", unused),
        ("Of another shape", other),
    ):
        if found:
            message += f". {title}: {_first(found)}"
    raise ValueError(message)


def assign(parts: Mapping[str, Part], arrays: Mapping[str, np.ndarray]) -> None:
    """Assigns all variables, after every array has been converted."""
    values = [
        # Rounded at once: a copy in double precision would be twice as large.
        part.convert(arrays[key]).astype(
            "float64" if part.variable.dtype == "float64" else "float32"
        )
        for key, part in parts.items()
    ]
    for part, value in zip(parts.values(), values, strict=True):
        part.variable.assign(value)


def _first(found: Sequence[str], limit: int = 5) -> str:
    """The first few of many, and how many they are."""
    text = ", ".join(found[:limit])
    if len(found) > limit:
        text += f", ... ({len(found)} in all)"
    return text


def label(layer: Any) -> str:
    return f"{type(layer).__name__} '{layer.name}'"


def unexpected(layer: Any, variable: Any, network: str) -> ValueError:
    """The error for a variable that no layer of this name should have."""
    return ValueError(
        f"{label(layer)} has '{variable.name}', which no layer of this name "
        f"has in `{network}`."
    )
