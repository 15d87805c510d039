"""What a GPU runs for one step: kernels, and the time in each of them."""

import collections
import tempfile
from collections.abc import Callable
from pathlib import Path

import keras

# By the name of a kernel: how often it runs, and for how many seconds in all.
Kernels = dict[str, tuple[int, float]]


def launched(step: Callable) -> Kernels:
    """Kernels that a step launches; copies and fills of memory are left out.

    Args:
        step: a function without arguments that waits for what it computes.
    """
    backend = keras.backend.backend()
    found = {"jax": _jax, "torch": _torch}[backend](step)
    kernels: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0.0])
    for name, seconds in found:
        if not name.lower().startswith(("memcpy", "memset")):
            kernels[name][0] += 1
            kernels[name][1] += seconds
    return {name: (int(runs), busy) for name, (runs, busy) in kernels.items()}


def _torch(step: Callable) -> list[tuple[str, float]]:
    import torch
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profile:
        step()
    return [
        (event.name, event.time_range.elapsed_us() * 1e-6)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]


def _jax(step: Callable) -> list[tuple[str, float]]:
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            step()
        (path,) = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(path))
        return [
            (event.name, event.duration_ns * 1e-9)
            for plane in profile.planes
            if plane.name.startswith("/device:GPU")
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
        ]
