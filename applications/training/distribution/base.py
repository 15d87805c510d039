"""The base of training on several devices, for any backend."""

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any
from typing import TypeAlias

import keras
import numpy as np
from keras import ops
from numpy.typing import NDArray

from keras_equiattn.applications.data import datasets
from keras_equiattn.applications.training import callbacks
from keras_equiattn.applications.training.options import OptionsError
from keras_equiattn.graphs import layers_within
from keras_equiattn.layers.acmix import patchwise

Tensor: TypeAlias = Any


class ProcessLostError(RuntimeError):
    """Another process of the run has ended."""


class Distribution:
    """Training on one device; other distributions override its methods.

    Attributes:
        index: number of this process. The first one keeps the files of a run.
        count: number of processes.
        devices: number of devices of each process.
        has_left: whether this process no longer works with others.
    """

    index, count, devices = 0, 1, 1
    has_left = False

    @property
    def is_alone(self) -> bool:
        """Whether no other process waits for this one."""
        return self.count == 1 or self.has_left

    @property
    def shard(self) -> datasets.Shard | None:
        """The part of each batch that this process reads."""
        if self.count * self.devices == 1:
            return None
        return datasets.Shard(self.index, self.count, self.devices)

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which a network is built, compiled and trained."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Recognises errors that only mean that another process has ended.

        Raises:
            ProcessLostError: In place of such an error.
        """
        try:
            yield
        except (OptionsError, OSError):
            raise
        except Exception as error:
            if not self._tells_of_others(error):
                raise
            first_line = str(error).strip().partition("\n")[0]
            raise ProcessLostError(
                f"another process of the run has ended ({first_line})"
            ) from error

    def prepare(self, model: keras.Model, batch_statistics: str) -> None:
        """Makes a compiled network train on all devices.

        Args:
            model: the network.
            batch_statistics: `"synchronized"` if batch normalisation takes its
                statistics over the batch of all devices, or `"per_device"`.
        """

    def data(self, split: Any) -> Any:
        """A split as `fit` takes it."""
        return split

    def callbacks(self, seed: int) -> list[keras.callbacks.Callback]:
        """Callbacks that come before all others."""
        return []

    def mean(self, numbers: Any) -> np.ndarray:
        """The mean of an array of numbers over all processes."""
        return np.asarray(numbers, "float64")

    def agree(self, number: int) -> int:
        """The number that the first process has."""
        own = number if self.index == 0 else 0
        return round(float(self.mean([own])[0]) * self.count)

    def leave(self) -> None:
        """Ends the work with other processes, once all have called this."""
        self._part()
        self.has_left = True

    def _part(self) -> None:
        """Ends the work with other processes, where the backend has to."""

    def _tells_of_others(self, error: Exception) -> bool:
        """Whether an error means that another process has ended."""
        return False


def is_of_collectives(error: Exception) -> bool:
    """Whether the library through which processes communicate has failed."""
    text = str(error).lower()
    is_named = "gloo" in text or "nccl" in text
    # JAX has errors of Gloo that are ValueErrors.
    return is_named and isinstance(error, RuntimeError | ValueError)


class OwnRandomNumbers(keras.callbacks.Callback):
    """Gives each device random numbers of its own, anew for each epoch.

    Args:
        seed: The seed of the run.
        devices: The number of all devices.
        assign: Sets a generator's state from one row for each device.
    """

    def __init__(
        self,
        seed: int,
        devices: int,
        assign: Callable[[Any, NDArray[np.int64]], None],
    ) -> None:
        super().__init__()
        self._seed, self._devices, self._assign = seed, devices, assign

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        rng = np.random.default_rng((self._seed, epoch))
        for state in [None, *callbacks.seed_variables(self.model)]:
            self._assign(state, rng.integers(2**31, size=(self._devices, 2)))


def synchronize_batch_statistics(
    model: keras.Model, mean_of_devices: Callable[[Tensor], Tensor]
) -> None:
    """Lets batch normalisation see the batch of all devices.

    Keras' own `synchronized=True` is for TensorFlow alone, and files that have
    it cannot be read by other backends.
    """

    def combined(moments: Callable[..., Any]) -> Callable[..., Any]:
        def of_all(*args: Any) -> tuple[Tensor, Tensor]:
            mean, variance = moments(*args)
            total = mean_of_devices(mean)
            # All devices have the same number of images.
            spread = variance + ops.square(mean - total)
            return total, mean_of_devices(spread)

        return of_all

    kinds = keras.layers.BatchNormalization, patchwise.BatchNorm
    normalizing: list[Any] = [
        layer for layer in layers_within(model) if isinstance(layer, kinds)
    ]
    for layer in normalizing:
        layer._moments = combined(layer._moments)
