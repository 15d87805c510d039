"""Batches for Keras that need no TensorFlow: arrays in memory, and streams."""

import threading
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from keras_equiattn.applications.data.augmentation import Augmentation
from keras_equiattn.applications.data.augmentation import Plan
from keras_equiattn.applications.data.epochs import Batch
from keras_equiattn.applications.data.epochs import Clock
from keras_equiattn.applications.data.epochs import Epochs
from keras_equiattn.applications.data.epochs import iterate
from keras_equiattn.applications.data.epochs import Shard
from keras_equiattn.applications.data.normalization import PerChannel
from keras_equiattn.applications.data.normalization import to_float


class Batches(Epochs):
    """Batches of arrays in memory, reproducible epoch by epoch.

    Args:
        images: uint8 in 0..255 or float32 in [0, 1], of shape
            `(n, height, width, channels)`.
        labels: Integers of shape `(n,)`.
        batch_size: Images per batch; the last batch may have fewer.
        shuffle: Whether each epoch has its own order.
        augment: None, True for `Augmentation()`, or an `Augmentation`.
        seed: Seed of the order and of the augmentation.
        normalization: None for images in [0, 1], or `(mean, std)` of pixels
            in [0, 1], each a number or one per channel.
        initial_epoch: The epoch with which iterating starts.
        shard: The part of every batch that is read; None for all of it.

    Raises:
        ValueError: An argument has the wrong type, value or shape.
    """

    def __init__(
        self,
        images: NDArray[Any],
        labels: NDArray[Any],
        batch_size: int = 128,
        *,
        shuffle: bool = False,
        augment: bool | Augmentation | None = None,
        seed: int = 0,
        normalization: tuple[PerChannel, PerChannel] | None = None,
        initial_epoch: int = 0,
        shard: Shard | None = None,
    ) -> None:
        if (
            not isinstance(images, np.ndarray)
            or images.ndim != 4
            or images.dtype not in (np.uint8, np.float32)
            or not images.size
        ):
            raise ValueError(
                "`images` must be a NumPy array of uint8 or float32 and shape "
                "(n, height, width, channels), n > 0. Received: "
                f"{_describe(images)}"
            )
        if (
            not isinstance(labels, np.ndarray)
            or labels.shape != images.shape[:1]
            or labels.dtype.kind not in "iu"
        ):
            raise ValueError(
                f"`labels` must be a NumPy array of {len(images)} integers. "
                f"Received: {_describe(labels)}"
            )
        super().__init__(
            len(images),
            images.shape[1:],
            batch_size,
            shuffle=shuffle,
            augment=augment,
            seed=seed,
            normalization=normalization,
            initial_epoch=initial_epoch,
            shard=shard,
        )
        self.images = images
        self.labels = labels.astype("int32", copy=False)
        self._plan: tuple[int, Plan] | None = None

    def batch(self, epoch: int, index: int) -> Batch:
        """Returns one batch of an epoch.

        Args:
            epoch: Number of the epoch, from 0.
            index: Number of the batch in it.

        Returns:
            float32 images of shape `(b, height, width, channels)` and int32
            labels of shape `(b,)`.

        Raises:
            IndexError: The epoch has no such batch.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"There is no batch {index} of {len(self)}.")
        plan = self._epoch_plan(epoch)
        rows = self.rows(index)
        images = plan.apply(self.images[plan.order[rows]], rows.start)
        labels = self.labels[plan.order[rows]]
        return to_float(images, self.normalization), labels

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Yields the batches of one epoch, as `batch` returns them."""
        for index in range(len(self)):
            yield self.batch(epoch, index)

    def _epoch_plan(self, epoch: int) -> Plan:
        cached = self._plan
        if cached is None or cached[0] != epoch:
            plan = Plan(
                self.count, self.seed, epoch, self.shuffle, self.augment
            )
            cached = self._plan = epoch, plan
        return cached[1]


def _describe(value: object) -> str:
    """Says in a few words what an array or another object is."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} of shape {value.shape}"
    return type(value).__name__


class ArrayDataset(keras.utils.PyDataset):
    """`Batches` as a `keras.utils.PyDataset`, which needs no TensorFlow.

    Args:
        batches: The batches; `fit` starts with their `initial_epoch`.
    """

    def __init__(self, batches: Batches) -> None:
        super().__init__()
        self.batches = batches
        self.clock = Clock(batches.initial_epoch)
        self._token: object = None
        self._position: int | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        return len(self.batches)

    def __getitem__(self, index: int) -> Batch:
        """Returns batch `index` of the current epoch.

        `fit` visits the indices in an order of its own unless it gets
        `shuffle=False`. The batches are shuffled already, so within an epoch
        of `fit` they come in their order, whatever the index.
        """
        with self._lock:
            if self._position is not None and self._position < len(self):
                index = self._position
                self._position += 1
        return self.batches.batch(self.clock.epoch, index)

    def __iter__(self) -> Iterator[Batch]:
        """Yields the next epoch, as iterating over `load`'s result does."""
        return iterate(self.batches, self.clock)

    def on_epoch_begin(self) -> None:
        """Notes that Keras starts to iterate."""
        with self._lock:
            self._position = 0
            self._token = self.clock.begin()[1]

    def on_epoch_end(self) -> None:
        """Notes that Keras stops iterating, perhaps after a first look."""
        with self._lock:
            if self._position == len(self):
                self.clock.finish(self._token)
            self._position = None


class StreamDataset(keras.utils.PyDataset):
    """Batches that can only be read in their order, as a `PyDataset`.

    Args:
        batches: The batches; `fit` starts with their `initial_epoch`.
    """

    def __init__(self, batches: Epochs) -> None:
        super().__init__()
        self.batches = batches
        self.clock = Clock(batches.initial_epoch)
        self._iterator: Iterator[Batch] | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        return len(self.batches)

    def __getitem__(self, index: int) -> Batch:
        """Returns the next batch of the current epoch, whatever the index."""
        with self._lock:
            if self._iterator is None:
                self._iterator = iter(self)
            return next(self._iterator)

    def __iter__(self) -> Iterator[Batch]:
        """Yields the next epoch, as iterating over `load`'s result does."""
        return iterate(self.batches, self.clock)

    def on_epoch_begin(self) -> None:
        """Prepares to read an epoch from its start."""
        with self._lock:
            self._iterator = None

    def on_epoch_end(self) -> None:
        """Stops reading, since Keras may have taken only a first look."""
        self.on_epoch_begin()
