"""The environment variables that tell a process who the others are."""

import json
import os
from collections.abc import Sequence
from typing import Any

import keras

from keras_equiattn.applications.training.options import OptionsError

# The variables that tell a process who the others are, on each backend.
VARIABLES = {
    "torch": ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "jax": (
        "KERAS_DISTRIBUTION_JOB_ADDRESSES",
        "KERAS_DISTRIBUTION_NUM_PROCESSES",
        "KERAS_DISTRIBUTION_PROCESS_ID",
    ),
    "tensorflow": ("TF_CONFIG",),
}


def variables(index: int, addresses: Sequence[str]) -> dict[str, str]:
    """The environment variables of one process, for the backend in use.

    Args:
        index: number of the process.
        addresses: "host:port" of each process.
    """
    host, _, port = addresses[0].rpartition(":")
    cluster = {
        "cluster": {"worker": list(addresses)},
        "task": {"type": "worker", "index": index},
    }
    count = len(addresses)
    values: dict[str, tuple[Any, ...]] = {
        "torch": (index, count, host, port),
        "jax": (addresses[0], count, index),
        "tensorflow": (json.dumps(cluster),),
    }
    backend = keras.backend.backend()
    pairs = zip(VARIABLES[backend], values[backend], strict=True)
    return {name: str(value) for name, value in pairs}


def check_variables(backend: str, distribute: bool) -> None:
    """Refuses variables that contradict the option, or each other."""
    if backend not in VARIABLES:
        if distribute:
            raise OptionsError(
                "--distribute needs the backend 'tensorflow', 'jax' or "
                f"'torch'. Received: {backend!r}"
            )
        return
    names = VARIABLES[backend]
    given = [name for name in names if name in os.environ]
    if not distribute:
        # Each process would take itself for the only one.
        if given and _count_processes(backend) != 1:
            raise OptionsError(
                f"{' and '.join(given)} say that there are several processes: "
                "give --distribute, or unset these variables."
            )
        return
    size = os.environ.get("WORLD_SIZE", "1")
    if backend != "torch" and not given and size != "1":
        raise OptionsError(
            "torchrun starts the processes of PyTorch. Under this backend "
            f"{' and '.join(names)} must tell them apart. Received: "
            f"KERAS_BACKEND={backend}, WORLD_SIZE={size!r}"
        )
    missing = [name for name in names if name not in given]
    if backend == "torch" and missing:
        raise OptionsError(
            "Under PyTorch --distribute needs torchrun, for example: torchrun "
            "--nproc-per-node 2 examples/train.py --distribute. Missing: "
            f"{', '.join(missing)}"
        )
    if given and missing:
        raise OptionsError(
            f"{' and '.join(given)} need {' and '.join(missing)}, too."
        )
    if given and _count_processes(backend) is None:
        found = {name: os.environ[name] for name in given}
        raise OptionsError(
            "The variables of the processes cannot be read. Received: "
            f"{', '.join(f'{n}={v!r}' for n, v in found.items())}"
        )


def _count_processes(backend: str) -> int | None:
    """How many processes the variables name; None if they name no number."""
    try:
        if backend == "tensorflow":
            cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]
            return sum(map(len, cluster.values()))
        return int(os.environ[VARIABLES[backend][1]])
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
