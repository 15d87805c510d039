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
from families import FAMILIES

HERE = Path(__file__).parent
SWEEP = (pytest.mark.slow, pytest.mark.every_backend)


def run(program, names, **environment):
    """The names of the families that the program has checked."""
    done = subprocess.run(
        [sys.executable, str(HERE / program), *names],
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
    return [line.split()[1] for line in done.stdout.splitlines()]


@pytest.mark.torch_first
@pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="`DataParallel` is for JAX."
)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["asc", "gsa"], id="some"),
        pytest.param(list(FAMILIES), id="all", marks=SWEEP),
    ],
)
def test_data_parallel_step_only_sums_gradients(names):
    """No images move between devices, and loss and gradients agree."""
    checked = run(
        "data_parallel_jax.py",
        names,
        JAX_PLATFORMS="cpu",
        # Collectives are inserted before XLA generates machine code.
        XLA_FLAGS="--xla_force_host_platform_device_count=4 "
        "--xla_backend_optimization_level=0 "
        "--xla_llvm_disable_expensive_passes=true",
    )
    assert checked == names


@pytest.mark.skipif(
    keras.backend.backend() == "jax", reason="See the other test."
)
@pytest.mark.slow
@pytest.mark.every_backend
# In two programs, which take minutes each on a slow machine.
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(list(FAMILIES)[::2], id="half"),
        pytest.param(list(FAMILIES)[1::2], id="other_half"),
    ],
)
def test_replicas_have_the_losses_of_one_device(names):
    """Three steps of `MirroredStrategy` or `DistributedDataParallel`."""
    checked = run("steps.py", names)
    if keras.backend.backend() == "tensorflow":
        # The statistics of this family are those of a replica.
        names = [name for name in names if name != "acmix_patchwise"]
    assert checked == names
