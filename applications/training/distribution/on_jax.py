"""Distributed training under JAX."""

import contextlib
import os
from typing import Any

import keras
import numpy as np

from keras_equiattn.applications.training.distribution.base import Distribution
from keras_equiattn.applications.training.distribution.base import (
    is_of_collectives,
)
from keras_equiattn.applications.training.distribution.environment import (
    VARIABLES,
)


class JaxDistribution(Distribution):
    """`keras.distribution.DataParallel` over the devices of all processes."""

    def __init__(self) -> None:
        import jax

        if VARIABLES["jax"][0] in os.environ:
            keras.distribution.initialize()
        self._parallel = keras.distribution.DataParallel(
            auto_shard_dataset=False
        )
        self.index = jax.process_index()
        self.count = jax.process_count()
        self.devices = jax.local_device_count()

    def mean(self, numbers: Any) -> np.ndarray:
        from jax.experimental import multihost_utils

        found = multihost_utils.process_allgather(
            np.asarray(numbers, "float32")
        )
        return np.reshape(found, (self.count, -1)).mean(0, dtype="float64")

    def _part(self) -> None:
        import jax

        # The shutdown waits for all processes.
        if self.count > 1:
            jax.distributed.shutdown()  # type: ignore[no-untyped-call]

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        return self._parallel.scope()

    def _tells_of_others(self, error: Exception) -> bool:
        import jax

        if self.count == 1:
            return False
        lost = str(error).startswith(("UNAVAILABLE", "ABORTED", "DEADLINE"))
        is_of_jax = isinstance(error, jax.errors.JaxRuntimeError)
        return (lost and is_of_jax) or is_of_collectives(error)
