"""A batch on several devices stays where it is, under JAX."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.once

PROGRAM = """
import re

import jax
import keras
import numpy as np

from keras_equiattn import layers

mesh = jax.sharding.Mesh(np.array(jax.devices()), ("batch",))
split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch"))
whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
assert mesh.size == 4
keras.utils.set_random_seed(0)
inputs = keras.Input((3, 3, 2))
maps = [
    layers.LiftingSelfAttention2D(2, 2, 1, window, "z2m")(inputs)
    for window in (3, None)
]
y = keras.layers.Add()(
    [
        layers.GroupSelfAttention2D(2, 3, 1, window, "z2m")(x)
        for window, x in zip((3, None), maps)
    ]
)
model = keras.Model(inputs, y)
x = np.random.default_rng(0).normal(size=(4, 3, 3, 2)).astype("float32")


def loss(weights, x):
    y, _ = model.stateless_call(weights, [], x)
    return (y**2).mean()


step = jax.value_and_grad(loss, (0, 1))
weights = [v.value for v in model.trainable_variables]
for layer in model.layers:
    layer.recompute = False
expected = jax.jit(step)(weights, x)
for layer in model.layers:
    layer.recompute = True
spread = (
    [jax.device_put(w, whole) for w in weights],
    jax.device_put(x, split),
)
# Another function: JAX would take the first one again.
program = jax.jit(lambda *a: step(*a), out_shardings=(whole, (whole, split)))
compiled = program.lower(*spread).compile()
used = set(
    re.findall(
        r"all-gather|all-to-all|collective-permute|reduce-scatter|all-reduce",
        compiled.as_text(),
    )
)
assert used == {"all-reduce"}, used
found = jax.tree.leaves(compiled(*spread))
expected = jax.tree.leaves(expected)
largest = max(np.abs(one).max() for one in expected)
for one, two in zip(expected, found, strict=True):
    np.testing.assert_allclose(one, two, rtol=0, atol=1e-4 * largest)
print("passed")
"""


def test_group_self_attention_gathers_nothing():
    """Of the devices of a batch only sums of gradients are exchanged."""
    environment = {
        **os.environ,
        "KERAS_BACKEND": "jax",
        "JAX_PLATFORMS": "cpu",
        # What is looked at is found before the code of the machine.
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4 "
        "--xla_backend_optimization_level=0 "
        "--xla_llvm_disable_expensive_passes=true",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.endswith("passed\n"), done.stderr[-2000:]
