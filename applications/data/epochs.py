"""Epochs of batches: what all of them have, and which one comes next."""

import abc
import threading
from collections.abc import Iterator
from typing import Any
from typing import TypeAlias

import keras
import numpy as np
from numpy.typing import NDArray

from keras_equiattn import _checks
from keras_equiattn.applications.data.augmentation import Augmentation
from keras_equiattn.applications.data.augmentation import check_augment
from keras_equiattn.applications.data.normalization import check_normalization
from keras_equiattn.applications.data.normalization import PerChannel

# float32 images (b, height, width, channels) and int32 labels (b,).
Batch: TypeAlias = tuple[NDArray[np.float32], NDArray[np.int32]]


class Epochs(abc.ABC):
    """Batches of images that are the same whenever an epoch is repeated.

    Args:
        count: Number of images.
        shape: Shape of one image, `(height, width, channels)`.
        batch_size: Images per batch; the last batch may have fewer.
        shuffle: Whether each epoch has its own order.
        augment: None, True for `Augmentation()`, or an `Augmentation`.
        seed: Seed of the order and of the augmentation.
        normalization: None for images in [0, 1], or `(mean, std)` of pixels
            in [0, 1], each a number or one per channel.
        initial_epoch: The epoch with which iterating starts.

    Raises:
        ValueError: An argument has the wrong type or value.
    """

    crops = False  # whether images can be crops of several sizes

    def __init__(
        self,
        count: int,
        shape: tuple[int, int, int],
        batch_size: int,
        *,
        shuffle: bool = False,
        augment: bool | Augmentation | None = None,
        seed: int = 0,
        normalization: tuple[PerChannel, PerChannel] | None = None,
        initial_epoch: int = 0,
    ) -> None:
        self.count = count
        self.shape = shape
        self.batch_size = _checks.integer(batch_size, "batch_size")
        self.shuffle = _checks.flag(shuffle, "shuffle")
        self.augment = check_augment(augment, self.crops, shape)
        self.seed = _checks.integer(seed, "seed", 0)
        self.normalization = check_normalization(normalization, shape[2])
        self.initial_epoch = _checks.integer(initial_epoch, "initial_epoch", 0)

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        return -(-self.count // self.batch_size)

    @abc.abstractmethod
    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Yields the batches of one epoch.

        Args:
            epoch: Number of the epoch, from 0.
        """


class Clock:
    """Knows which epoch the next iteration over a dataset is.

    Keras may fetch the first batches once more to build the model, so an
    iteration counts only when it reached its last batch; and tf.data may run
    an abandoned iteration on, so only the latest one counts.
    """

    def __init__(self, epoch: int) -> None:
        self._lock = threading.Lock()
        self._epoch = epoch
        self._latest: object = None

    @property
    def epoch(self) -> int:
        """The next epoch."""
        return self._epoch

    def set(self, epoch: int) -> None:
        """Makes `epoch` the next one."""
        with self._lock:
            self._epoch = epoch
            self._latest = None

    def begin(self) -> tuple[int, object]:
        """Starts an iteration: its epoch and a token for `finish`."""
        with self._lock:
            self._latest = object()
            return self._epoch, self._latest

    def finish(self, token: object) -> None:
        """Counts the iteration, unless another one began since."""
        with self._lock:
            if token is self._latest:
                self._epoch += 1
                self._latest = None


def iterate(batches: Epochs, clock: Clock) -> Iterator[Batch]:
    """Yields the batches of the epoch that the clock shows, and counts it."""
    epoch, token = clock.begin()
    last = len(batches) - 1
    for index, batch in enumerate(batches.epoch(epoch)):
        # Keras does not ask for more after the last batch.
        if index == last:
            clock.finish(token)
        yield batch


class EpochCounter(keras.callbacks.Callback):
    """Tells datasets which epoch `fit` is in.

    With it, epoch `e` of `fit` always sees epoch `e` of the data: also with
    `initial_epoch`, after `keras.callbacks.BackupAndRestore` resumed a run,
    and when Keras looked at the data before the first epoch.

    Args:
        *datasets: What `load` and `load_pydataset` returned for training.

    Raises:
        ValueError: A dataset is something else, or was transformed.
    """

    def __init__(self, *datasets: Any) -> None:
        super().__init__()
        self._clocks: list[Clock] = []
        for dataset in datasets:
            clock = getattr(dataset, "clock", None)
            if not isinstance(clock, Clock):
                raise ValueError(
                    "`datasets` must be what load or load_pydataset returned, "
                    f"before any further transformation. Received: {dataset!r}"
                )
            self._clocks.append(clock)

    def on_epoch_begin(
        self, epoch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Sets the epoch of the datasets before `fit` iterates them."""
        for clock in self._clocks:
            clock.set(epoch)
