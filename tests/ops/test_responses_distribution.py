"""Attention on responses with the images of a batch on several devices."""

import os
import subprocess
import sys

import keras
import pytest

DEVICES = 4
PROGRAM = """
import jax
import keras
import numpy as np
from keras_equiattn.layers import AttentiveGroupConv2D

devices = keras.distribution.list_devices()
assert len(devices) == 4, devices
rng = np.random.default_rng(0)
x = rng.normal(size=(8, 6, 6, 2, 5)).astype("float32")
for attention in ("full", "channel", "spatial"):
    layer = AttentiveGroupConv2D(
        3, 3, attention, group="p2", attention_kernel_size=3, reduction_ratio=1
    )
    layer.build(x.shape)
    values = [v.value for v in layer.trainable_variables]

    def loss(values, x):
        y, _ = layer.stateless_call(values, [], x)
        return (y**2).mean()

    step = jax.value_and_grad(loss, argnums=(0, 1))
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("batch",))
    spec = jax.sharding.PartitionSpec
    whole = jax.sharding.NamedSharding(mesh, spec())
    parts = jax.sharding.NamedSharding(mesh, spec("batch"))
    sharded = jax.jit(
        step,
        in_shardings=(whole, parts),
        out_shardings=(whole, (whole, parts)),
    )
    sharded = sharded.lower(values, x).compile()
    text = sharded.as_text()
    one = jax.tree.leaves(jax.jit(step)(values, x))
    many = jax.tree.leaves(sharded(values, jax.device_put(x, parts)))
    error = max(
        np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(a).max()
        for a, b in zip(one, many)
    )
    assert error < 1e-5, (attention, error)
    kinds = "all-gather", "all-to-all", "collective", "reduce-scatter"
    lines = text.splitlines()
    found = [line for line in lines if any(kind in line for kind in kinds)]
    assert not found, (attention, found)
    sums = [line for line in lines if " all-reduce(" in line]
    # One after all loops.
    assert len(sums) == 1 and "while/body" not in sums[0], (attention, sums)
print("checked", len(values))
"""


@pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="only JAX shares a batch like this"
)
def test_nothing_but_sums_of_gradients_moves_between_devices():
    environment = {
        **os.environ,
        "KERAS_BACKEND": "jax",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "checked" in done.stdout
