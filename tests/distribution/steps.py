"""Losses of three training steps: alone, and with replicas.

    python steps.py <families>

Under TensorFlow the replicas are two logical devices of a `MirroredStrategy`,
under PyTorch two processes with `DistributedDataParallel` on the loopback.
"""

import os
import sys

import keras
import numpy as np
from families import build
from families import FAMILIES
from families import images
from families import loss
from families import loss_of_images

STEPS, RATE = 3, 1e-3
# In training this family normalises with the statistics of the batch, which
# each replica takes of its own images, as Keras' BatchNormalization does.
OF_BATCH = "acmix_patchwise"


def tensorflow_losses(name, count):
    """Losses of the whole batch, which `count` replicas share."""
    import tensorflow as tf

    devices = tf.config.list_logical_devices("CPU")[:count]
    x = images(name)
    # The default, collectives, ends on CPUs with a shape mismatch between the
    # replicas for group self-attention (TensorFlow 2.21).
    strategy = tf.distribute.MirroredStrategy(
        [d.name for d in devices],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )
    with strategy.scope():
        inputs = keras.Input(x.shape[1:])
        model = keras.Model(inputs, build(name)(inputs))
        model.compile(
            keras.optimizers.SGD(RATE), loss=lambda _, y: loss_of_images(y)
        )
    history = model.fit(
        x,
        np.zeros(len(x)),
        batch_size=len(x),
        epochs=STEPS,
        shuffle=False,
        verbose=0,
    )
    return history.history["loss"]


def torch_losses(name, count, rank=0):
    """Losses of the whole batch; each of two processes computes half."""
    import torch

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = build(name)

        def forward(self, x):
            return self.layer(x)

    model = Model()
    if count > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    x = images(name)
    size = len(x) // count
    x = torch.as_tensor(x[rank * size :][:size])
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        value = loss(model(x))
        value.backward()
        optimizer.step()
        value = value.detach()
        if count > 1:
            torch.distributed.all_reduce(value)
        found.append(float(value) / count)
    return found


def torch_process(rank, names, alone, port):
    """One of two processes: compares its losses with those of a single one."""
    import torch

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    for name, expected in zip(names, alone, strict=True):
        compare(name, expected, torch_losses(name, 2, rank))
    torch.distributed.destroy_process_group()


def compare(name, expected, found):
    """Losses must agree to rounding, and change from step to step."""
    np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=name)
    assert len(set(expected)) == STEPS, (name, expected)


def free_port():
    """A port of the loopback that nobody uses."""
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def main(names):
    names = names or list(FAMILIES)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        cpu = tf.config.list_physical_devices("CPU")[0]
        two = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(cpu, two)
        names = [name for name in names if name != OF_BATCH]
        for name in names:
            compare(
                name, tensorflow_losses(name, 1), tensorflow_losses(name, 2)
            )
    else:
        import torch

        alone = [torch_losses(name, 1) for name in names]
        arguments = (names, alone, free_port())
        torch.multiprocessing.spawn(torch_process, arguments, nprocs=2)
    for name in names:
        print("checked", name)


if __name__ == "__main__":
    main(sys.argv[1:])
