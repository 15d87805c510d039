"""Which epoch of the data comes next, and the PyDataset that serves it."""

import threading
from collections.abc import Iterator
from typing import Any

import keras

from keras_equiattn.applications._batches import Batch
from keras_equiattn.applications._batches import Batches
from keras_equiattn.applications._batches import FolderBatches
from keras_equiattn.applications._batches import StreamedBatches


class Clock:
    """Says which epoch the next iteration over a dataset is.

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


def iterate(
    batches: Batches | FolderBatches | StreamedBatches, clock: Clock
) -> Iterator[Batch]:
    """Yields the epoch that the clock shows, and counts it."""
    epoch, token = clock.begin()
    last = len(batches) - 1
    for index, batch in enumerate(batches.epoch(epoch)):
        # Keras does not ask for more after the last one.
        if index == last:
            clock.finish(token)
        yield batch


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
        """Keras starts to iterate."""
        with self._lock:
            self._position = 0
            self._token = self.clock.begin()[1]

    def on_epoch_end(self) -> None:
        """Keras stops to iterate, perhaps after a first look."""
        with self._lock:
            if self._position == len(self):
                self.clock.finish(self._token)
            self._position = None


class EpochCounter(keras.callbacks.Callback):
    """Tells datasets which epoch `fit` is in.

    With it, epoch `e` of `fit` always sees epoch `e` of the data: also with
    `initial_epoch`, after `keras.callbacks.BackupAndRestore` resumed a run,
    and when Keras looked at the data before the first epoch.

    Args:
        *datasets: What `load` and `load_pydataset` returned for training.
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
