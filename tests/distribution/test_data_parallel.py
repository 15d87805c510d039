"""Batches that lie on several devices or processes, under each backend.

Each program runs in its own process, since devices are made when a backend
starts.
"""

import os
import subprocess
import sys
from pathlib import Path

import keras
import pytest

HERE = Path(__file__).parent
SOME = ["asc", "gsa"]
SWEEP = (pytest.mark.slow, pytest.mark.every_backend)
FAMILIES = pytest.mark.parametrize(
    "families",
    [
        pytest.param(SOME, id="some"),
        pytest.param([], id="all", marks=SWEEP),
    ],
)


def run(program, families, **environment):
    done = subprocess.run(
        [sys.executable, str(HERE / program), *families],
        env={
            **os.environ,
            # The package, and the helpers of the tests.
            "PYTHONPATH": f"{HERE.parents[1]}{os.pathsep}{HERE.parent}",
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr[-3000:]
    checked = [line.split()[1] for line in done.stdout.splitlines()]
    assert set(checked) >= set(families or SOME)


@pytest.mark.torch_first
@pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="`DataParallel` is for JAX."
)
@FAMILIES
def test_data_parallel_step_only_sums_gradients(families):
    """No images move between devices, and loss and gradients agree."""
    run(
        "data_parallel_jax.py",
        families,
        JAX_PLATFORMS="cpu",
        # The collectives are there before XLA writes code for the machine.
        XLA_FLAGS="--xla_force_host_platform_device_count=4 "
        "--xla_backend_optimization_level=0 "
        "--xla_llvm_disable_expensive_passes=true",
    )


@pytest.mark.skipif(
    keras.backend.backend() == "jax", reason="See the other test."
)
@pytest.mark.slow
@pytest.mark.every_backend
def test_replicas_have_the_losses_of_one_device():
    """Of three steps: `MirroredStrategy`, or `DistributedDataParallel`."""
    run("steps.py", [])
