"""Distributed training under TensorFlow."""

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from keras_equiattn.applications.training.distribution.base import Distribution
from keras_equiattn.applications.training.distribution.base import (
    OwnRandomNumbers,
)
from keras_equiattn.applications.training.distribution.base import (
    synchronize_batch_statistics,
)
from keras_equiattn.applications.training.distribution.base import Tensor


class TensorFlowDistribution(Distribution):
    """`tf.distribute`, with one worker or several."""

    def __init__(self) -> None:
        import tensorflow as tf

        if "TF_CONFIG" in os.environ:
            self._strategy = tf.distribute.MultiWorkerMirroredStrategy()
            resolver = self._strategy.cluster_resolver
            self.index = _index_in_cluster(resolver)
            self.count = len(
                resolver.cluster_spec().as_dict().get("worker", ())
            )
            self.count += "chief" in resolver.cluster_spec().as_dict()
        else:
            gpus = tf.config.list_logical_devices("GPU")
            devices = gpus or tf.config.list_logical_devices("CPU")
            # Between CPUs of one process, collectives end with a mismatch of
            # shapes for group self-attention (TensorFlow 2.21).
            self._strategy = tf.distribute.MirroredStrategy(
                [device.name for device in devices],
                None if gpus else tf.distribute.ReductionToOneDevice(),
            )
        self.devices = len(self._strategy.extended.worker_devices)

    def prepare(self, model: keras.Model, batch_statistics: str) -> None:
        import tensorflow as tf

        def mean(x: Tensor) -> Tensor:
            context = tf.distribute.get_replica_context()
            if context is None or context.num_replicas_in_sync == 1:
                return x
            # The copy is on the device of the replica; a variable need not be.
            return context.all_reduce("mean", tf.identity(x))

        if batch_statistics == "synchronized":
            synchronize_batch_statistics(model, mean)
        else:
            model.train_step = _with_mean_of_moving(model, mean)
        if self.count == 1:
            return
        # Keras 3.15 does two things that only work with one worker: it takes
        # the mean of a batch to build a network, though it is built already,
        # and the mean of metrics over their first axis, which they do not have.
        model._distribute_strategy = None
        for name in ("train_step", "test_step"):
            setattr(model, name, _with_first_axis(getattr(model, name)))

    def data(self, split: Any) -> Any:
        if self.count == 1 or split is None:
            return split
        # One batch for each device.
        parts = split if self.devices == 1 else split.flat_map(self._divide)
        return self._strategy.distribute_datasets_from_function(lambda _: parts)

    def callbacks(self, seed: int) -> list[keras.callbacks.Callback]:
        import tensorflow as tf

        def assign(state: Any, rows: NDArray[np.int64]) -> None:
            def of_replica() -> None:
                context = tf.distribute.get_replica_context()
                row = tf.gather(rows, context.replica_id_in_sync_group)
                state.assign(tf.cast(row, state.dtype))

            if state is not None:
                self._strategy.run(of_replica)

        devices = self.count * self.devices
        return [OwnRandomNumbers(seed, devices, assign)]

    def _divide(self, images: Tensor, labels: Tensor) -> Any:
        import tensorflow as tf

        parts = [
            tf.reshape(x, [self.devices, -1, *x.shape[1:]])
            for x in (images, labels)
        ]
        return tf.data.Dataset.from_tensor_slices(tuple(parts))

    def mean(self, numbers: Any) -> np.ndarray:
        import tensorflow as tf

        def of_replica() -> Tensor:
            x = tf.constant(np.asarray(numbers), "float64")
            return tf.distribute.get_replica_context().all_reduce("mean", x)

        found = self._strategy.run(tf.function(of_replica))
        return self._strategy.experimental_local_results(found)[0].numpy()

    def _part(self) -> None:
        self.mean([0.0])  # which waits for all
        if self.count > 1:
            # Another process may still have to fetch the last mean from here.
            time.sleep(1)

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        return self._strategy.scope()

    def _tells_of_others(self, error: Exception) -> bool:
        import tensorflow as tf

        lost = (
            tf.errors.UnavailableError,
            tf.errors.AbortedError,
            tf.errors.CancelledError,
            tf.errors.DeadlineExceededError,
        )
        return self.count > 1 and isinstance(error, lost)


def _index_in_cluster(resolver: Any) -> int:
    """The number of a process, where the chief is the first."""
    index = int(resolver.task_id)
    has_chief = "chief" in resolver.cluster_spec().as_dict()
    return index + (has_chief and resolver.task_type == "worker")


def _with_mean_of_moving(
    model: keras.Model, mean_of_devices: Callable[[Tensor], Tensor]
) -> Callable[[Any], dict[str, Tensor]]:
    """A training step that then averages moving statistics over devices."""
    step = model.train_step

    def wrapped(batch: Any) -> dict[str, Tensor]:
        metrics = step(batch)
        for variable in model.non_trainable_weights:
            value = keras.ops.convert_to_tensor(variable)
            variable.assign(mean_of_devices(value))
        return metrics

    return wrapped


def _with_first_axis(
    step: Callable[[Any], dict[str, Tensor]],
) -> Callable[[Any], dict[str, Tensor]]:
    """A step whose metrics have an axis of length one."""

    def wrapped(batch: Any) -> dict[str, Tensor]:
        return {name: x[None] for name, x in step(batch).items()}

    return wrapped
