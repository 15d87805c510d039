"""Distributed training under PyTorch."""

import functools
import os
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from keras_equiattn.applications.training.distribution.base import Distribution
from keras_equiattn.applications.training.distribution.base import (
    is_of_collectives,
)
from keras_equiattn.applications.training.distribution.base import (
    OwnRandomNumbers,
)
from keras_equiattn.applications.training.distribution.base import (
    synchronize_batch_statistics,
)
from keras_equiattn.applications.training.distribution.base import Tensor


class TorchDistribution(Distribution):
    """`DistributedDataParallel`, in processes that torchrun has started."""

    def __init__(self) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        # Gloo between CPUs, NCCL between GPUs.
        torch.distributed.init_process_group()
        self.index = torch.distributed.get_rank()
        self.count = torch.distributed.get_world_size()

    def prepare(self, model: keras.Model, batch_statistics: str) -> None:
        import torch

        synchronized = batch_statistics == "synchronized"
        if synchronized:
            synchronize_batch_statistics(model, self._mean_of_tensor)
        # It averages gradients while later ones are still being computed.
        parallel = torch.nn.parallel.DistributedDataParallel(model)
        moving = [v.value for v in model.non_trainable_weights]

        def train_step(batch: Any) -> dict[str, Tensor]:
            # The step is Keras' own, except for the call of the network.
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
            if state is None:  # dropout that has no generator of its own
                torch.manual_seed(int(rows[self.index, 0]))
            else:
                state.assign(rows[self.index])

        return [_MeanLogs(self), OwnRandomNumbers(seed, self.count, assign)]

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
        return lost or is_of_collectives(error)


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
    """Averages the metrics of an epoch over all processes.

    All processes have seen the same number of images.
    """

    def __init__(self, distribution: Distribution) -> None:
        super().__init__()
        self._distribution = distribution

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        means = self._distribution.mean([float(x) for x in logs.values()])
        logs.update(zip(logs, means.tolist(), strict=True))
