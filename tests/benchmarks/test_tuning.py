"""The benchmark of tuned constants."""

from pathlib import Path

import numpy as np
import pytest

from keras_equiattn import layers
from keras_equiattn.ops.group import block_linear

pytestmark = pytest.mark.once


@pytest.fixture
def tuning(monkeypatch):
    """The benchmark, with a layer that takes no time."""
    folder = Path(__file__).parents[2] / "benchmarks"
    monkeypatch.syspath_prepend(folder)
    import traffic
    import tuning

    def make():
        return layers.AffineSelfConv2D(
            2, kernel_size=3, num_heads=1, group="z2"
        )

    monkeypatch.setitem(traffic.FAMILIES, "asc", (make, (3, 3, 2)))
    return tuning


def test_every_value_is_timed_and_none_stays(tuning):
    seen = []

    class Recorded(dict):
        def __setitem__(self, name, value):
            seen.append(value)
            super().__setitem__(name, value)

    constant = tuning.Constant(Recorded(SIZE=2), "SIZE", "asc", (1, 2, 4))
    found = tuning.measure(constant, batch=1, repeats=1)
    assert list(found["seconds"]) == ["1", "2", "4"]
    assert found["value"] == constant.holder["SIZE"] == 2
    assert {1, 4} < set(seen)


def test_another_value_is_another_program(tuning):
    """Its step does not run the program that another step has cached."""
    constant = tuning.Constant({"SIZE": 1}, "SIZE", "asc", (1, 2))
    kept = []
    for value in constant.values:
        layer = layers.GroupDense(4, basis="irreps")
        step = tuning.timing.training_step(layer, np.ones((1, 4, 4, 4, 3)))
        run = tuning.with_value(constant, value, step)
        for _ in range(2):
            run()
        kept.append(block_linear._function.cache_info())
    assert [info.misses for info in kept] == [1, 1]


def test_values_contain_that_of_the_package(tuning):
    for constants in tuning.CONSTANTS.values():
        for constant in constants.values():
            assert constant.holder[constant.name] in constant.values


def test_a_step_that_fails_leaves_no_value(tuning):
    constant = tuning.Constant({"SIZE": 2}, "SIZE", "asc", (1,))

    def fail():
        raise OSError("no memory")

    with pytest.raises(OSError, match="no memory"):
        tuning.with_value(constant, 1, fail)()
    assert constant.holder == {"SIZE": 2}
