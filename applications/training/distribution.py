"""Training on several devices, in one process or in several.

Every process builds the same network and reads its own part of each batch. The
gradients are averaged over all devices, so that a run is that of one device
with the same batch size. How processes are started is up to the backend:

* PyTorch: `torchrun`, one process for each device;
* JAX: `keras.distribution`, by the variables
  `KERAS_DISTRIBUTION_JOB_ADDRESSES`, `KERAS_DISTRIBUTION_NUM_PROCESSES` and
  `KERAS_DISTRIBUTION_PROCESS_ID`;
* TensorFlow: `tf.distribute`, by the variable `TF_CONFIG`.

Under JAX and TensorFlow one process serves all devices of its machine, and
without these variables there is only one.
"""

import contextlib
import functools
import json
import os
import time
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import TypeAlias

import keras
import numpy as np
from keras import ops
from numpy.typing import NDArray

from keras_equiattn.applications.data import datasets
from keras_equiattn.applications.training import callbacks
from keras_equiattn.applications.training.options import OptionsError
from keras_equiattn.applications.training.options import TrainOptions
from keras_equiattn.graphs import layers_within
from keras_equiattn.layers.acmix import patchwise

Tensor: TypeAlias = Any


class ProcessLostError(RuntimeError):
    """Another process of the run has ended."""


class Distribution:
    """One device: what other distributions change, they override.

    Attributes:
        index: number of this process. The first one keeps the files of a run.
        count: number of processes.
        devices: number of devices of each process.
        has_left: whether this process works with no other any more.
    """

    index, count, devices = 0, 1, 1
    has_left = False

    @property
    def is_alone(self) -> bool:
        """Whether no other process waits for this one."""
        return self.count == 1 or self.has_left

    @property
    def shard(self) -> datasets.Shard | None:
        """What this process reads of each batch."""
        if self.count * self.devices == 1:
            return None
        return datasets.Shard(self.index, self.count, self.devices)

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Within it a network is built, compiled and trained."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Tells where an error only means that another process has ended.

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
            batch_statistics: whether batch normalisation takes them over the
                batch of all devices, `"synchronized"`, or `"per_device"`.
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
        """Ends the work with other processes, after all have come here."""
        self._part()
        self.has_left = True

    def _part(self) -> None:
        """What the backend does where processes part."""

    def _tells_of_others(self, error: Exception) -> bool:
        """Whether an error means that another process has ended."""
        return False


def start(options: TrainOptions) -> Distribution:
    """Joins the other processes, before the backend computes anything.

    Raises:
        OptionsError: If an option cannot be, or the process was not started
            as the backend wants it, or the others cannot be reached.
    """
    backend = keras.backend.backend()
    statistics = options.batch_statistics
    _check_variables(backend, options.distribute)
    if not options.distribute:
        if statistics != "synchronized":
            raise OptionsError(
                f"--batch-statistics {statistics} needs --distribute: there "
                "is only one device without."
            )
        return Distribution()
    if backend == "jax" and statistics != "synchronized":
        raise OptionsError(
            "Under JAX batch statistics are those of all devices: "
            "--batch-statistics must be 'synchronized'. Received: "
            f"{statistics!r}"
        )
    if backend == "tensorflow" and options.dtype_policy == "mixed_float16":
        # Keras looks for infinite gradients before they are summed, and each
        # device would decide for itself whether to make the step.
        raise OptionsError(
            "Under TensorFlow --distribute needs the dtype policy 'float32' "
            f"or 'mixed_bfloat16'. Received: {options.dtype_policy!r}"
        )
    kinds = {"tensorflow": _TensorFlow, "jax": _Jax, "torch": _Torch}
    try:
        distribution = kinds[backend]()
        same = distribution.mean([distribution.devices])
    except Exception as error:
        raise OptionsError(
            "--distribute cannot join the processes that "
            f"{' and '.join(VARIABLES[backend])} name: {error}"
        ) from error
    if same[0] != distribution.devices:
        raise OptionsError(
            "All processes must have as many devices. Process "
            f"{distribution.index} has {distribution.devices}, and the mean is "
            f"{same[0]:g}."
        )
    return distribution


# What tells a process who the others are, on each backend.
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


def _check_variables(backend: str, distribute: bool) -> None:
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


class _Torch(Distribution):
    """`DistributedDataParallel`, in processes that torchrun has started."""

    def __init__(self) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        # Gloo between processors, NCCL between GPUs.
        torch.distributed.init_process_group()
        self.index = torch.distributed.get_rank()
        self.count = torch.distributed.get_world_size()

    def prepare(self, model: keras.Model, batch_statistics: str) -> None:
        import torch

        synchronized = batch_statistics == "synchronized"
        if synchronized:
            _synchronize_batch_statistics(model, self._mean_of_tensor)
        # Its hooks average the gradients while others are still computed.
        parallel = torch.nn.parallel.DistributedDataParallel(model)
        moving = [v.value for v in model.non_trainable_weights]

        def train_step(batch: Any) -> dict[str, Tensor]:
            # As Keras' own step, but for the call of the network.
            x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
            model.zero_grad()
            outputs = parallel(x, training=True)
            loss = model.compute_loss(x, y, outputs, weight, training=True)
            model._loss_tracker.update_state(loss, sample_weight=len(x))
            model.optimizer.scale_loss(loss).backward()
            weights = model.trainable_weights
            with torch.no_grad():
                gradients = [w.value.grad for w in weights]
                model.optimizer.apply(gradients, weights)
                if not synchronized:
                    for value in moving:
                        value.copy_(self._mean_of_tensor(value))
            return model.compute_metrics(x, y, outputs, weight)

        model.train_step = train_step

    def _mean_of_tensor(self, x: Tensor) -> Tensor:
        return _torch_sum(x) / self.count

    def callbacks(self, seed: int) -> list[keras.callbacks.Callback]:
        import torch

        def assign(state: Any, rows: NDArray[np.int64]) -> None:
            if state is None:  # what dropout without a generator draws from
                torch.manual_seed(int(rows[self.index, 0]))
            else:
                state.assign(rows[self.index])

        return [_MeanLogs(self), _OwnRandomNumbers(seed, self.count, assign)]

    def mean(self, numbers: Any) -> np.ndarray:
        import torch

        x = torch.as_tensor(np.asarray(numbers, "float64"), device="cpu")
        torch.distributed.all_reduce(x)
        return (x / self.count).numpy()

    def _part(self) -> None:
        import torch

        torch.distributed.barrier()
        torch.distributed.destroy_process_group()

    def _tells_of_others(self, error: Exception) -> bool:
        import torch

        lost = isinstance(error, torch.distributed.DistError)
        return lost or _is_of_collectives(error)


def _is_of_collectives(error: Exception) -> bool:
    """Whether the library that processes speak with has failed."""
    text = str(error).lower()
    is_named = "gloo" in text or "nccl" in text
    # JAX has errors of Gloo that are ValueErrors.
    return is_named and isinstance(error, RuntimeError | ValueError)


def _torch_sum(x: Tensor) -> Tensor:
    """The sum over all processes, through which gradients flow."""
    return _sum_function().apply(x)


@functools.cache
def _sum_function() -> Any:
    import torch

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: Tensor) -> Tensor:
            total = x.clone(memory_format=torch.contiguous_format)
            torch.distributed.all_reduce(total)
            return total

        @staticmethod
        def backward(_: Any, gradient: Tensor) -> Tensor:
            return Sum.forward(None, gradient)

    return Sum


class _MeanLogs(keras.callbacks.Callback):
    """Makes the metrics of an epoch those of all processes.

    All of them have seen as many images.
    """

    def __init__(self, distribution: Distribution) -> None:
        super().__init__()
        self._distribution = distribution

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        means = self._distribution.mean([float(x) for x in logs.values()])
        logs.update(zip(logs, means.tolist(), strict=True))


class _OwnRandomNumbers(keras.callbacks.Callback):
    """Gives each device random numbers of its own, anew for each epoch.

    Args:
        seed: of the run.
        devices: number of all devices.
        assign: sets a generator's state from one row for each device.
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


class _Jax(Distribution):
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

        # It waits for all.
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
        return (lost and is_of_jax) or _is_of_collectives(error)


class _TensorFlow(Distribution):
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
            # The copy is on the device of the replica, as a variable is not.
            return context.all_reduce("mean", tf.identity(x))

        if batch_statistics == "synchronized":
            _synchronize_batch_statistics(model, mean)
        else:
            model.train_step = _with_mean_of_moving(model, mean)
        if self.count == 1:
            return
        # Two things that Keras 3.15 does work with one worker alone: it takes
        # the mean of a batch to build a network, which is built already, and
        # the mean of metrics over their first axis, which they do not have.
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
        return [_OwnRandomNumbers(seed, devices, assign)]

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
            # Another one may still have to fetch the last mean from here.
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
    """The number of a process, of which the chief is the first."""
    index = int(resolver.task_id)
    has_chief = "chief" in resolver.cluster_spec().as_dict()
    return index + (has_chief and resolver.task_type == "worker")


def _with_mean_of_moving(
    model: keras.Model, mean_of_devices: Callable[[Tensor], Tensor]
) -> Callable[[Any], dict[str, Tensor]]:
    """A step of TensorFlow after which moving averages are those of all."""
    step = model.train_step

    def wrapped(batch: Any) -> dict[str, Tensor]:
        metrics = step(batch)
        for variable in model.non_trainable_weights:
            value = ops.convert_to_tensor(variable)
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


def _synchronize_batch_statistics(
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
            # All devices have as many images.
            spread = variance + ops.square(mean - total)
            return total, mean_of_devices(spread)

        return of_all

    kinds = keras.layers.BatchNormalization, patchwise.BatchNorm
    normalizing: list[Any] = [
        layer for layer in layers_within(model) if isinstance(layer, kinds)
    ]
    for layer in normalizing:
        layer._moments = combined(layer._moments)
