"""Reports of a training run: versions, hardware, lines, curves."""

import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import pathlib
import platform
from collections.abc import Sequence
from typing import Any

import keras

from keras_equiattn.applications.training.options import TrainOptions

_BACKENDS = {
    "tensorflow": ("tensorflow-cpu", "tensorflow"),
    "jax": ("jax", "jaxlib"),
    "torch": ("torch",),
}


def versions(backend: str | None = None) -> dict[str, str]:
    """Versions of Python, of Keras and its backend, and of this package.

    Args:
        backend: whose version is wanted; None is the one in use.
    """
    backend = backend or keras.backend.backend()
    found = {"python": platform.python_version(), "backend": backend}
    names = ("keras-equiattn", "keras", "numpy", *_BACKENDS.get(backend, ()))
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    """Processor, usable cores, memory, and the device of the backend."""
    usable = getattr(os, "sched_getaffinity", None)
    memory = None
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": _processor(),
        "cores": len(usable(0)) if usable else os.cpu_count(),
        "memory_gib": None if memory is None else round(memory / 2**30, 1),
        "device": device(),
    }


def measured_by(command: str) -> dict[str, Any]:
    """The first entries of every file of results.

    Args:
        command: the command that makes the file.

    Returns:
        The command, the date, the hardware and the versions.
    """
    return {
        "command": command,
        "date": f"{datetime.date.today()}",
        "hardware": hardware(),
        "versions": versions(),
    }


def _processor() -> str:
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def device() -> str:
    """The device that the backend computes on: a GPU's name, or "CPU"."""
    backend = keras.backend.backend()
    if backend == "torch":
        import torch

        if torch.cuda.is_available():
            return torch.cuda.get_device_name()
    elif backend == "jax":
        import jax

        if jax.default_backend() != "cpu":
            return str(jax.devices()[0].device_kind)
    elif backend == "tensorflow":
        import tensorflow as tf

        for gpu in tf.config.list_physical_devices("GPU"):
            details = tf.config.experimental.get_device_details(gpu)
            return str(details.get("device_name", "GPU"))
    return "CPU"


def count_parameters(model: keras.Model) -> int:
    """Number of trainable parameters, which is what papers count."""
    return sum(math.prod(v.shape) for v in model.trainable_weights)


def group_of(model: keras.Model) -> str:
    """Name of the group of the first layer that has one; else "z2"."""
    for layer in model.layers:
        if hasattr(layer, "group"):
            return str(layer.group.name)
    return "z2"


def model_line(model: keras.Model) -> str:
    """One line about a model: parameters, group, backend and device."""
    return (
        f"{model.name}: {count_parameters(model):,} parameters, "
        f"group {group_of(model)}, backend {keras.backend.backend()}, "
        f"device {device()}"
    )


def number(value: float | None, form: str) -> str:
    """A number of `results.json`, which has null for a non-finite one."""
    return "not finite" if value is None else format(value, form)


def diverged(results: dict[str, Any]) -> bool:
    """Whether the run ended with outputs or losses that are not finite."""
    summaries = [results[split] for split in ("validation", "test")]
    return results["equivariance"]["error"] is None or any(
        None in summary.values() for summary in summaries if summary
    )


# Options that change where and how a run is done, not what it finds. Which
# factors a run had is told by its recipe.
_INCIDENTAL = (
    "seed",
    "out",
    "resume",
    "data_dir",
    "verbose",
    "use_kernel_factors",
)


def kernel_factors(results: dict[str, Any]) -> list[list[Any]]:
    """Patterns and factors of a run; one of an older version had none."""
    found: list[list[Any]] = results["recipe"].get("kernel_factors", [])
    return found


def settings_key(results: dict[str, Any]) -> str:
    """A text that is equal for runs that differ in nothing but the seed.

    The results of an older version lack the options that came later. Such a run
    did what their defaults do, so defaults are left out.
    """
    defaults = {f.name: f.default for f in dataclasses.fields(TrainOptions)}
    settings = {
        name: value
        for name, value in results["options"].items()
        if name not in _INCIDENTAL and value != defaults.get(name)
    }
    key = [results["model"], settings, kernel_factors(results)]
    return json.dumps(key, sort_keys=True)


def result_line(results: dict[str, Any]) -> str:
    """One line about the end of a run."""
    parts = [f"{results['model']}: {results['epochs']} epochs"]
    for split in ("validation", "test"):
        if results[split] is not None:
            error = number(results[split]["error_percent"], ".2f")
            parts.append(f"{split} error {error} %")
    error = number(results["equivariance"]["error"], ".1e")
    group = results["equivariance"]["group"]
    parts.append(f"equivariance error {error} ({group})")
    parts.append(f"{results['wall_time_seconds']:.0f} s")
    return ", ".join(parts)


def plot_curves(
    rows: Sequence[dict[str, float]],
    path: pathlib.Path,
    title: str,
    steps: Sequence[dict[str, float]] = (),
) -> None:
    """Draws loss and error rate; needs matplotlib.

    Args:
        rows: the rows of all epochs.
        path: the path of the picture.
        title: the title above it.
        steps: rows for parts of epochs, whose "epoch" is a fraction.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"{path} is not drawn: matplotlib is not installed.")
        return
    # A figure by itself takes the Agg canvas and leaves pyplot alone.
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    loss, error = figure.subplots(1, 2)
    for prefix, label, of in (
        ("", "training", steps or rows),
        ("val_", "validation", rows),
    ):
        if f"{prefix}loss" not in of[0]:
            continue
        epochs = [row["epoch"] for row in of]
        marker = "o" if len(of) == 1 else None  # a single point shows no line
        values = [row[f"{prefix}loss"] for row in of]
        loss.plot(epochs, values, label=label, marker=marker)
        rates = [100 * (1 - row[f"{prefix}accuracy"]) for row in of]
        error.plot(epochs, rates, label=label, marker=marker)
    for axes, name in ((loss, "cross-entropy"), (error, "error (%)")):
        values = [
            value
            for line in axes.lines
            for value in line.get_ydata()
            if math.isfinite(value)
        ]
        # A logarithmic axis tells nothing within a factor of ten.
        if values and 0 < 10 * min(values) < max(values):
            axes.set_yscale("log")
        axes.set(xlabel="epoch", ylabel=name)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
