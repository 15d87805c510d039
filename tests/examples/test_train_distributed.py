"""``examples/train.py --distribute``: several devices, several processes."""

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys

import keras
import numpy as np
import pytest
from training_run import arguments
from training_run import FILES
from training_run import KILL_ITSELF
from training_run import log_of
from training_run import results_of
from training_run import subprocess_command
from training_run import weights_of

from keras_equiattn.applications import training
from keras_equiattn.applications.data import datasets
from keras_equiattn.applications.training import callbacks
from keras_equiattn.applications.training import distribution
from keras_equiattn.applications.training.distribution.environment import (
    check_variables,
)
from keras_equiattn.applications.training.distribution.environment import (
    VARIABLES,
)

BACKEND = keras.backend.backend()
EPOCHS = 2
# Starting two processes takes as long as many tests.
SWEEP = (pytest.mark.slow, pytest.mark.every_backend)


def command(npz, out, *more, epochs=EPOCHS):
    """A run whose batches two devices can share, without dropout."""
    run = arguments(npz, out, *more, epochs=epochs)
    return ["--model=tiny_without_dropout", *run[1:]]


def free_ports(count):
    """Ports of the loopback that nobody uses."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in found]


@dataclasses.dataclass
class Done:
    """How a process ended."""

    returncode: int
    output: str


def run_two(run, *setups):
    """Runs two processes with `--distribute`, after lines of their own."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    started = []
    for index in range(2):
        setup = setups[index] if setups else ""
        started.append(
            subprocess.Popen(
                subprocess_command([*run, "--distribute"], setup),
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "XLA_FLAGS": "",
                    **distribution.variables(index, addresses),
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    done = []
    for process in started:
        try:
            output, _ = process.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        done.append(Done(process.returncode, output))
    return done


def run_one(line, **environment):
    """Runs a command line that must succeed."""
    done = subprocess.run(
        line,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def assert_succeeded(done):
    for process in done:
        assert process.returncode == 0, process.output[-3000:]


def assert_tells_of_others(output):
    """The process says why it ends, in a line and without a traceback."""
    message = "train.py: error: another process of the run has ended ("
    assert message in output, output[-3000:]
    assert "Traceback" not in output, output[-3000:]


def assert_close_logs(found, expected, rtol=1e-5):
    assert len(found) == len(expected) == EPOCHS
    for row, other in zip(found, expected, strict=True):
        assert row.keys() == other.keys()
        for name, value in row.items():
            np.testing.assert_allclose(value, other[name], rtol, err_msg=name)


@pytest.fixture(scope="module")
def alone(train, npz, tmp_path_factory):
    """Folder of the run of one device."""
    out = tmp_path_factory.mktemp("runs") / "alone"
    train.main(command(npz, out))
    return out


@pytest.fixture(scope="module")
def together(npz, tmp_path_factory):
    """Folder of the run of two processes, and what they printed."""
    out = tmp_path_factory.mktemp("runs") / "together"
    done = run_two(command(npz, out))
    assert_succeeded(done)
    return out, done


@pytest.mark.slow
@pytest.mark.every_backend
class TestTwoProcesses:
    def test_losses_are_those_of_one_process(self, alone, together):
        """Batch statistics are synchronised, and metrics are of all images."""
        out, _ = together
        assert_close_logs(log_of(out), log_of(alone))
        pairs = zip(
            weights_of(out / "last.keras"),
            weights_of(alone / "last.keras"),
            strict=True,
        )
        for found, expected in pairs:
            np.testing.assert_allclose(found, expected, 1e-4, 1e-5)

    def test_first_process_reports(self, together):
        out, (first, second) = together
        results, printed = results_of(out), first.output
        assert results["options"]["distribute"] is True
        assert results["test"]["accuracy"] > 0
        assert results["equivariance"]["error"] < 1e-5
        assert "test error" in printed
        assert "error" not in second.output.replace("errors", "")
        assert sorted(path.name for path in out.iterdir()) == FILES

    @pytest.mark.parametrize("lost", [0, 1])
    def test_killed_process_ends_the_run_and_resume_goes_on(
        self, train, npz, together, tmp_path, lost
    ):
        out, run = tmp_path / "run", command(npz, tmp_path / "run")
        setups = ["", ""]
        setups[lost] = KILL_ITSELF
        done = run_two(run, *setups)
        assert done[lost].returncode == -signal.SIGKILL
        other = done[1 - lost]
        assert other.returncode not in (0, None)
        # Where the first process is lost, JAX may end the other one itself.
        if other.returncode == 1:
            assert_tells_of_others(other.output)
            completed = (
                f"The run in {out} has completed 1 epochs: --resume goes"
            )
            assert completed in other.output
        else:
            assert (BACKEND, lost) == ("jax", 0), other.output[-3000:]
        assert callbacks.EpochBackup(out / "backup").completed == 1
        # One process can go on with what two have begun.
        train.main([*run, "--resume"])
        assert_close_logs(log_of(out), log_of(together[0]))

    def test_refusal_ends_all_processes(self, npz, together):
        out, _ = together
        before = (out / "results.json").read_bytes()
        first, second = run_two(command(npz, out))
        assert (first.returncode, second.returncode) == (1, 1)
        assert f"{out} holds a run already" in first.output
        assert "The first process has refused" in second.output
        for process in (first, second):
            assert "Traceback" not in process.output
        first, second = run_two(command(npz, out, "--resume"))
        assert_succeeded([first, second])
        assert f"The run in {out} is complete." in first.output
        assert (out / "results.json").read_bytes() == before

    def test_terminated_process_says_what_is_left(self, npz, tmp_path):
        out = tmp_path / "run"
        setup = KILL_ITSELF.replace("SIGKILL", "SIGTERM")
        first, second = run_two(command(npz, out), setup, "")
        assert first.returncode == 130, first.output[-3000:]
        assert f"Interrupted. The run in {out} has completed 1 epochs" in (
            first.output
        )
        assert second.returncode == 1
        assert_tells_of_others(second.output)

    def test_random_numbers_of_each_process(self, npz, tmp_path):
        """Dropout that Keras seeds draws other masks in each process."""
        seeds = tmp_path / "seeds"
        seeds.mkdir()
        run = command(npz, tmp_path / "run", "--log-steps=2", "--train-on-all")
        run[0] = "--model=tiny"
        assert_succeeded(run_two(run, *2 * [WRITE_SEEDS.format(seeds)]))
        states = [np.load(path) for path in sorted(seeds.iterdir())]
        assert len(states) == 2
        # JAX draws one mask for the batch of all devices.
        assert np.array_equal(*states) == (BACKEND == "jax")
        assert "best.keras" not in [
            p.name for p in (tmp_path / "run").iterdir()
        ]
        rows = callbacks.read_log(tmp_path / "run" / "steps.csv")
        assert rows[-1]["epoch"] <= EPOCHS

    def test_statistics_of_each_device(self, npz, alone, tmp_path):
        out = tmp_path / "run"
        run = command(npz, out, "--batch-statistics=per_device")
        done = run_two(run)
        if BACKEND == "jax":
            for process in done:
                assert process.returncode == 1
                assert "must be 'synchronized'" in process.output
            return
        assert_succeeded(done)
        row, other = log_of(out)[0], log_of(alone)[0]
        assert row["loss"] != pytest.approx(other["loss"], rel=1e-4)
        assert row["loss"] == pytest.approx(other["loss"], rel=0.3)
        # Moving averages are the same in both processes, and in the file.
        last = keras.saving.load_model(out / "last.keras")
        validation = datasets.load_pydataset(
            npz, "validation", 8, validation_size=16
        )
        loss, _ = last.evaluate(validation, verbose=0)
        assert log_of(out)[-1]["val_loss"] == pytest.approx(loss, rel=1e-5)


# Each process writes the states of its generators, and PyTorch's own.
WRITE_SEEDS = """
import os
import numpy as np
from keras_equiattn.applications.training import callbacks

class Backup(callbacks.EpochBackup):
    def on_epoch_begin(self, epoch, logs=None):
        super().on_epoch_begin(epoch, logs)
        states = callbacks.random_states(self.model).values()
        states = [np.ravel(state).astype("int64") for state in states]
        np.save(f"{}/{{os.getpid()}}.npy", np.concatenate(states))

callbacks.EpochBackup = Backup
"""

TWO_CPUS = """
import tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
two = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(cpu, two)
"""


@pytest.mark.slow
@pytest.mark.every_backend
@pytest.mark.skipif(
    BACKEND == "torch", reason="PyTorch has a process for each device."
)
def test_two_devices_of_one_process(npz, alone, tmp_path):
    out = tmp_path / "run"
    setup = TWO_CPUS if BACKEND == "tensorflow" else ""
    run_one(
        subprocess_command([*command(npz, out), "--distribute"], setup),
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
    )
    assert_close_logs(log_of(out), log_of(alone))


@pytest.mark.slow
@pytest.mark.every_backend
@pytest.mark.skipif(BACKEND != "torch", reason="torchrun is PyTorch's.")
def test_torchrun(npz, alone, tmp_path):
    """The command of the documentation."""
    program = tmp_path / "program.py"
    program.write_text(subprocess_command([])[-1])
    out = tmp_path / "run"
    run_one(
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nproc-per-node", "2", "--master-port", str(free_ports(1)[0])),
            *(str(program), *command(npz, out), "--distribute"),
        ],
        OMP_NUM_THREADS="1",
    )
    assert_close_logs(log_of(out), log_of(alone))


@pytest.mark.skipif(BACKEND == "torch", reason="torchrun is PyTorch's.")
def test_torchrun_for_another_backend(monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    for name in VARIABLES[BACKEND]:
        monkeypatch.delenv(name, raising=False)
    message = f"torchrun starts .*{BACKEND}, WORLD_SIZE='2'"
    with pytest.raises(training.OptionsError, match=message):
        check_variables(BACKEND, True)


@pytest.mark.once
class TestOptions:
    @pytest.mark.skipif(BACKEND != "torch", reason="Variables of PyTorch.")
    @pytest.mark.parametrize(
        ("variables", "more", "message"),
        [
            ({}, ["--distribute"], "needs torchrun, .* Missing: RANK, WORLD_"),
            ({"RANK": "0"}, ["--distribute"], "Missing: WORLD_SIZE, MASTER_AD"),
            (
                {"WORLD_SIZE": "2"},
                [],
                "WORLD_SIZE say that there are several .* give --distribute",
            ),
            (
                distribution.variables(0, ["here:1", "there:2"])
                | {"WORLD_SIZE": "two"},
                ["--distribute"],
                "cannot be read.* WORLD_SIZE='two'",
            ),
            (
                distribution.variables(0, ["here:nowhere"]),
                ["--distribute"],
                "cannot join the processes that RANK and WORLD_SIZE",
            ),
        ],
    )
    def test_processes_that_cannot_be(
        self, train, npz, tmp_path, monkeypatch, variables, more, message
    ):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit, match=message):
            train.main(command(npz, tmp_path / "run", *more))
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize(
        ("backend", "variables", "distribute", "message"),
        [
            (
                "jax",
                {"KERAS_DISTRIBUTION_JOB_ADDRESSES": "here:1"},
                True,
                "need KERAS_DISTRIBUTION_NUM_PROCESSES and",
            ),
            (
                "jax",
                {"KERAS_DISTRIBUTION_NUM_PROCESSES": "2"},
                False,
                "say that there are several processes",
            ),
            ("tensorflow", {"TF_CONFIG": "worker"}, True, "'worker'"),
            ("openvino", {}, True, "Received: 'openvino'"),
        ],
    )
    def test_variables_of_other_backends(
        self, monkeypatch, backend, variables, distribute, message
    ):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(training.OptionsError, match=message):
            check_variables(backend, distribute)

    def test_statistics_need_devices(self, train, npz, tmp_path):
        more = "--batch-statistics=per_device"
        with pytest.raises(SystemExit, match="needs --distribute"):
            train.main(command(npz, tmp_path / "run", more))

    def test_processes_share_the_folder(self, tmp_path):
        options = training.TrainOptions("tiny", tmp_path / "run")
        with (
            pytest.raises(
                training.OptionsError, match=r"Process 1 .* 3 epochs"
            ),
            training.folder_of_process(options, 1, 3),
        ):
            pass

    def test_other_processes_write_elsewhere(self, tmp_path):
        options = training.TrainOptions("tiny", tmp_path)
        with training.folder_of_process(options, 0, 0) as own:
            assert own is options
        with training.folder_of_process(options, 1, 0) as own:
            assert own.out != tmp_path
            assert own.out.is_dir()
            assert own.verbose == 0
        assert not own.out.exists()
