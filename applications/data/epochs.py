"""Epochs of batches: the base of all readers, and the count of epochs."""

import abc
import dataclasses
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


@dataclasses.dataclass(frozen=True)
class Shard:
    """The part of every batch that one of several processes reads.

    All devices of all processes get the same number of images. If a batch, such
    as the last one of an epoch, cannot be divided evenly, its last images are
    left out.

    Attributes:
        index: Number of the process, from 0.
        count: Number of processes.
        devices: Number of devices of each process.

    Raises:
        ValueError: An argument has the wrong type or value.
    """

    index: int = 0
    count: int = 1
    devices: int = 1

    def __post_init__(self) -> None:
        _checks.integer(self.count, "count")
        _checks.integer(self.devices, "devices")
        if _checks.integer(self.index, "index", 0) >= self.count:
            raise ValueError(
                f"`index` must be less than {self.count}, the number of "
                f"processes. Received: {self.index}"
            )

    @property
    def all_devices(self) -> int:
        """Number of devices of all processes."""
        return self.count * self.devices

    def rows(self, start: int, size: int) -> slice:
        """Which images of a batch the process reads.

        Args:
            start: Position of the batch's first image in the epoch.
            size: Number of images of the batch.

        Returns:
            Positions in the epoch.
        """
        share = size // self.all_devices * self.devices
        first = start + self.index * share
        return slice(first, first + share)


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
        shard: The part of every batch that is read; None for all of it.

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
        shard: Shard | None = None,
    ) -> None:
        self.count = count
        self.shape = shape
        self.batch_size = _checks.integer(batch_size, "batch_size")
        self.shard = check_shard(shard, batch_size, count)
        self.shuffle = _checks.flag(shuffle, "shuffle")
        self.augment = check_augment(augment, self.crops, shape)
        self.seed = _checks.integer(seed, "seed", 0)
        self.normalization = check_normalization(normalization, shape[2])
        self.initial_epoch = _checks.integer(initial_epoch, "initial_epoch", 0)

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        whole, left = divmod(self.count, self.batch_size)
        return whole + (left >= self.shard.all_devices)

    def rows(self, index: int) -> slice:
        """Positions in the epoch of the images that are read of one batch."""
        start = index * self.batch_size
        size = min(self.batch_size, self.count - start)
        return self.shard.rows(start, size)

    @abc.abstractmethod
    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Yields the batches of one epoch.

        Args:
            epoch: Number of the epoch, from 0.
        """


def check_shard(shard: Shard | None, batch_size: int, count: int) -> Shard:
    """Returns the shard that an argument `shard` means.

    Args:
        shard: A shard, or None for all images.
        batch_size: Images per batch of all processes.
        count: Number of images.

    Raises:
        ValueError: `shard` has another type, `batch_size` is not a multiple of
            the devices, or a device would have no images.
    """
    if shard is None:
        return Shard()
    if not isinstance(shard, Shard):
        raise ValueError(
            f"`shard` must be None or a Shard. Received: {shard!r}"
        )
    if batch_size % shard.all_devices:
        raise ValueError(
            f"`batch_size` must be a multiple of the {shard.all_devices} "
            f"devices that share a batch. Received: {batch_size}"
        )
    if count < shard.all_devices:
        raise ValueError(
            f"Each of {shard.all_devices} devices must have an image. "
            f"Received: a split of {count} images"
        )
    return shard


class Clock:
    """Knows which epoch the next iteration over a dataset is.

    Keras may fetch the first batches once more to build the model, so an
    iteration counts only when it has reached its last batch; and tf.data may
    continue an abandoned iteration, so only the latest one counts.

    Attributes:
        failed: the error of the first file that could not be read in this
            iteration. tf.data passes on nothing but its text.
    """

    failed: OSError | None = None

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
            self.failed = None
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
    try:
        for index, batch in enumerate(batches.epoch(epoch)):
            # Keras does not ask for more after the last batch.
            if index == last:
                clock.finish(token)
            yield batch
    except OSError as error:
        clock.failed = error
        raise


class EpochCounter(keras.callbacks.Callback):
    """Tells datasets which epoch `fit` is in.

    With it, epoch `e` of `fit` always sees epoch `e` of the data: also with
    `initial_epoch`, after `keras.callbacks.BackupAndRestore` resumed a run,
    and when Keras looked at the data before the first epoch.

    Args:
        *datasets: Datasets that `load` and `load_pydataset` returned for
            training.

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
