"""How equivariant an exported network is, in the program that will run it."""

import dataclasses
import functools
import os
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_equiattn import _checks
from keras_equiattn import groups
from keras_equiattn._files import checksum
from keras_equiattn._files import write_json
from keras_equiattn.deployment.runtimes import format_at
from keras_equiattn.deployment.runtimes import load_exported
from keras_equiattn.deployment.runtimes import Network
from keras_equiattn.deployment.runtimes import RUNTIMES
from keras_equiattn.ops.group.action import group_action
from keras_equiattn.testing import equivariance_error

# An image counts as moved if it changes by more than this share of its largest
# value.
MOVED = 1e-3


@dataclasses.dataclass(frozen=True)
class CertifiedFile:
    """The measurements on one file.

    Attributes:
        path: the path of the file or folder.
        format: its format, see `keras_equiattn.export`.
        runtime: name and version of the package that ran it.
        bytes: size of the file, with its weights.
        sha256: checksum of the same, in hexadecimal.
        errors: for each element that was tried, the relative error of the
            result; 0 says that all bits agree.
    """

    path: str
    format: str
    runtime: str
    bytes: int
    sha256: str
    errors: tuple[float, ...]

    @property
    def is_exact(self) -> bool:
        """Whether results agree to the last bit for every element."""
        return not any(self.errors)


@dataclasses.dataclass(frozen=True)
class Certificate:
    """The measurements of `certificate`; `print` shows a table in Markdown.

    Attributes:
        group: name of the group.
        elements: indices of the elements that were tried.
        images: shape of the images.
        files: one entry for each file.
    """

    group: str
    elements: tuple[int, ...]
    images: tuple[int, ...]
    files: tuple[CertifiedFile, ...]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes all of it to a file in JSON.

        Args:
            path: the path of the file.
        """
        content = dataclasses.asdict(self)
        for entry, file in zip(content["files"], self.files, strict=True):
            entry["is_exact"] = file.is_exact
        write_json(Path(_checks.path(path, "path")), content)

    def __str__(self) -> str:
        names = [_name(groups.get(self.group), n) for n in self.elements]
        rows = [["file", "runtime", "kB", *names]]
        for file in self.files:
            errors = ["exact" if e == 0 else f"{e:.0e}" for e in file.errors]
            size = f"{file.bytes / 1000:.0f}"
            rows.append([Path(file.path).name, file.runtime, size, *errors])
        rows.insert(1, ["---"] * len(rows[0]))
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def certificate(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    group: str | groups.Group,
    images: Any,
    outputs: str = "images",
) -> Certificate:
    """Runs exported networks in their own runtimes, on images in all poses.

    Each file is opened by `load_exported`, so that no Keras layer takes part.
    For every element of the group, the result for the moved images is compared
    with the moved result.

    Args:
        path: a file that `export` has written, or several, to compare formats.
            The networks must have one input.
        group: a group or its name. For groups that do not act on the grid, the
            elements that do are tried.
        images: `(batch, height, width, channels)`, images that the network will
            see. Each element must change at least one of them.
        outputs: the kind of outputs of rank 4, see
            `testing.equivariance_error`.

    Returns:
        The errors of every element and every file.

    Raises:
        FileNotFoundError, ImportError: see `load_exported`.
        ValueError: for no file or one that is damaged, a group without an
            element that moves the grid, images of another rank or that look
            the same in another pose, and a result that is not finite.

    Example:
        >>> inputs = keras.Input((9, 9, 1))
        >>> x = LiftingConv2D(4, 3, group="p4", activation="relu")(inputs)
        >>> outputs = keras.layers.GlobalAveragePooling3D()(x)
        >>> images = np.random.default_rng(0).uniform(size=(8, 9, 9, 1))
        >>> images = images.astype("float32")
        >>> small = quantize(keras.Model(inputs, outputs), images)
        >>> export(small, "small.pt2")
        >>> certificate("small.pt2", "p4", images).files[0].is_exact
        True
    """
    group = groups.get(group)
    paths = _checked_paths(path)
    elements = tuple(int(n) for n in group.grid_elements)
    images = _checked_images(images, group, elements)
    files = []
    for each in paths:
        run = load_exported(each)
        errors = equivariance_error(
            functools.partial(_run, run),
            group,
            images,
            elements=elements,
            outputs=outputs,
        )
        files.append(_certified(os.fspath(each), errors))
    return Certificate(group.name, elements, images.shape, tuple(files))


def _checked_paths(paths: Any) -> list[str]:
    """One path or more, as a list."""
    several = isinstance(paths, list | tuple)
    if several and not paths:
        raise ValueError("`path` must be a file, or several. Received: path=[]")
    return [_checks.path(p, "path") for p in (paths if several else [paths])]


def _checked_images(
    images: Any, group: groups.Group, elements: Sequence[int]
) -> np.ndarray:
    """The images, after a check that they would reveal an error in any pose."""
    try:
        images = np.asarray(images) + np.float32(0)
    except (TypeError, ValueError):
        raise ValueError(
            "`images` must be an array of numbers. Received: "
            f"{type(images).__name__}"
        ) from None
    if images.ndim != 4 or not len(images):
        raise ValueError(
            "`images` must be an array (batch, height, width, channels). "
            f"Received: an array of the shape {images.shape}"
        )
    if not np.isfinite(images).all():
        raise ValueError(
            "`images` must be finite. Received: an array with "
            f"{np.count_nonzero(~np.isfinite(images))} values that are not"
        )
    if len(elements) < 2:
        raise ValueError(
            "`group` must have an element that moves images on the grid. "
            f"Received: group='{group.name}'"
        )
    enough = MOVED * np.abs(images).max()
    for element in elements[1:]:
        moved = keras.ops.convert_to_numpy(group_action(images, group, element))
        if moved.shape != images.shape:
            raise ValueError(
                f"`images` must be square for group='{group.name}'. Received: "
                f"an array of the shape {images.shape}"
            )
        change = np.abs(moved - images).max()
        if change <= enough:
            raise ValueError(
                "`images` must look different in every pose, or nothing is "
                "tested. Received: images of the shape "
                f"{images.shape} that do not change under the element "
                f"{_name(group, element)}"
            )
    return images


def _run(run: Network, x: Any) -> list[np.ndarray]:
    """The results of an exported network for a tensor."""
    return run(keras.ops.convert_to_numpy(x))


def _certified(path: str, errors: np.ndarray) -> CertifiedFile:
    """The entry of a file with these errors."""
    format = format_at(path)
    files = _files(path)
    return CertifiedFile(
        path=path,
        format=format,
        runtime=_runtime(format),
        bytes=sum(file.stat().st_size for file in files),
        sha256=checksum(*files),
        errors=tuple(map(float, errors)),
    )


def _files(path: str) -> list[Path]:
    """A file, or all files that belong to a network, by name."""
    first = Path(path)
    if first.is_dir():
        return sorted(p for p in first.rglob("*") if p.is_file())
    weights = first.with_suffix(".bin")
    has_weights = first.suffix == ".xml" and weights.exists()
    return [first, weights] if has_weights else [first]


def _runtime(format: str) -> str:
    """Name and version of the package that runs a format."""
    packages = RUNTIMES[format].packages
    for package in packages:
        try:
            return f"{package} {metadata.version(package)}"
        except metadata.PackageNotFoundError:
            continue
    return packages[0]


def _name(group: groups.Group, element: int) -> str:
    """An element in words, such as "mirrored, 90°"."""
    flip, step = divmod(element, group.rotations)
    turn = f"{360 * step / group.rotations:g}°"
    return f"mirrored, {turn}" if flip else turn
