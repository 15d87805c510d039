"""What the benchmarks time: whole steps, in turns, and where they run."""

import importlib
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import ops
from layer_contract import as_array

from keras_equiattn.testing import relative_difference

pytestmark = pytest.mark.skipif(
    keras.backend.backend() == "openvino", reason="OpenVINO has no gradients"
)


@pytest.fixture
def timing(monkeypatch):
    folder = Path(__file__).parents[2] / "benchmarks"
    monkeypatch.syspath_prepend(folder)
    return importlib.import_module("timing")


def test_a_step_returns_the_output_and_all_gradients(timing):
    rng = np.random.default_rng(0)
    x, kernel = (
        rng.normal(size=shape).astype("float32") for shape in ((3, 4), (4, 5))
    )
    step = timing.gradient_step(
        lambda x, kernel: ops.tanh(x @ kernel),
        [ops.convert_to_tensor(x), ops.convert_to_tensor(kernel)],
    )
    y, *gradients = keras.tree.flatten(step())
    expected = np.tanh(x @ kernel)
    upstream = np.random.default_rng(1).normal(size=expected.shape)
    of_product = upstream * (1 - expected**2)
    pairs = (
        (y, expected),
        (gradients[0], of_product @ kernel.T),
        (gradients[1], x.T @ of_product),
    )
    assert len(gradients) == 2
    for found, right in pairs:
        assert relative_difference(as_array(found), right) < 1e-5


def test_the_place_names_the_file(timing, monkeypatch):
    hardware = {"cores": 2}
    monkeypatch.setattr(timing.reporting, "hardware", lambda: hardware)
    monkeypatch.setattr(timing.reporting, "device", lambda: "CPU")
    backend = keras.backend.backend()
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert timing.place() == backend
    monkeypatch.setenv("GLIBC_TUNABLES", f"a=b:{timing.HUGE_PAGES}")
    assert timing.place() == f"{backend}-huge_pages"
    hardware["cores"] = 1
    assert timing.place() == f"{backend}-one_core-huge_pages"
    monkeypatch.delenv("GLIBC_TUNABLES")
    assert timing.place() == f"{backend}-one_core"
    monkeypatch.setattr(timing.reporting, "device", lambda: "GPU")
    assert timing.place() == f"{backend}-gpu"


def test_steps_take_turns(timing):
    calls = []
    steps = {name: lambda n=name: calls.append(n) for name in ("a", "b")}
    seconds = timing.alternate(steps, repeats=2, warm_up=1)
    assert calls == ["a", "b"] * 3
    assert {name: len(found) for name, found in seconds.items()} == {
        "a": 2,
        "b": 2,
    }
