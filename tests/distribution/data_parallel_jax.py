"""One step of each family under `DataParallel`: its collectives, its loss."""

import math
import re
import sys

import jax
import keras
import numpy as np
from families import build
from families import FAMILIES
from families import images
from families import loss

FORBIDDEN = (
    "all-gather",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "reduce-scatter",
)

# A weight that all neighbours share gets a gradient in each step of the loop
# over them, a few numbers each.
SUMS_IN_LOOPS = "lifting", "gsa", "gsa_global", "acmix_patchwise"

# Largest error of a gradient, in units of its largest number.
LIMIT = 1e-5


def count(line):
    """How many numbers an instruction adds up over the devices."""
    shapes = re.findall(r"\w+\[([\d,]*)\]", line.split(" all-reduce(")[0])
    sizes = [[int(n) for n in shape.split(",") if n] for shape in shapes]
    return sum(map(math.prod, sizes))


def check(name, distribution):
    """Compares a step on all devices with that on one."""
    layer, x = build(name), images(name)

    def step(weights, x):
        def of(weights):
            y, _ = layer.stateless_call(
                weights, [v.value for v in layer.non_trainable_variables], x
            )
            return loss(y)

        return jax.value_and_grad(of)(weights)

    weights = [np.asarray(v.value) for v in layer.trainable_variables]
    values = [v.value for v in layer.trainable_variables]
    layout = distribution.get_data_layout(x.shape)
    counts = []
    for batch in (np.concatenate([x, x]), x):
        shared = keras.distribution.distribute_tensor(batch, layout)
        compiled = jax.jit(step).lower(values, shared).compile()
        lines = compiled.as_text().splitlines()
        found = [s for s in lines if any(f" {k}" in s for k in FORBIDDEN)]
        assert not found, (name, found[:3])
        sums = [line for line in lines if " all-reduce(" in line]
        if name not in SUMS_IN_LOOPS:
            assert not any("while/body" in line for line in sums), (name, sums)
        counts.append(sum(map(count, sums)))
    # Only gradients are added up: a larger batch adds up as many numbers.
    assert counts[0] == counts[1] > 1, (name, counts)
    loss_alone, alone = jax.jit(step)(weights, x)
    loss_shared, together = compiled(values, shared)
    np.testing.assert_allclose(loss_shared, loss_alone, 1e-5, err_msg=name)
    largest = max(float(abs(one).max()) for one in alone)
    for variable, one, other in zip(
        layer.trainable_variables, alone, together, strict=True
    ):
        one, other = np.asarray(one), np.asarray(other)
        # Some gradients are zero, and hold the rounding errors of larger ones.
        scale = max(abs(one).max(), 1e-3 * largest)
        error = abs(one - other).max() / scale
        assert error < LIMIT, (name, variable.path, error)


def main(names):
    devices = keras.distribution.list_devices()
    assert len(devices) == 4, devices
    distribution = keras.distribution.DataParallel(devices=devices)
    keras.distribution.set_distribution(distribution)
    for name in names or FAMILIES:
        check(name, distribution)
        print("checked", name, flush=True)


main(sys.argv[1:])
