"""The benchmark of tuned constants."""

import pytest
import traffic
import tuning

from keras_equiattn import layers

pytestmark = pytest.mark.once


@pytest.fixture
def small(monkeypatch):
    """A family whose layer compiles at once."""
    monkeypatch.setitem(
        traffic.FAMILIES,
        "asc",
        (
            lambda: layers.AffineSelfConv2D(
                2, kernel_size=3, num_heads=1, group="z2"
            ),
            (3, 3, 2),
        ),
    )


def test_every_value_is_timed_and_none_stays(small):
    holder = {"SIZE": 2}
    seen = []

    class Recorded(dict):
        def __setitem__(self, name, value):
            seen.append(value)
            super().__setitem__(name, value)

    constant = tuning.Constant(Recorded(holder), "SIZE", "asc", (1, 2, 4))
    found = tuning.measure(constant, batch=1, repeats=1)
    assert list(found["seconds"]) == ["1", "2", "4"]
    assert found["value"] == constant.holder["SIZE"] == 2
    assert {1, 4} < set(seen)


@pytest.mark.parametrize("backend", tuning.CONSTANTS)
def test_values_contain_that_of_the_package(backend):
    for constant in tuning.CONSTANTS[backend].values():
        assert constant.holder[constant.name] in constant.values
        assert constant.family in traffic.FAMILIES


def test_a_step_that_fails_leaves_no_value():
    holder = {"SIZE": 2}
    constant = tuning.Constant(holder, "SIZE", "asc", (1,))

    def fail():
        raise OSError

    with pytest.raises(OSError):
        tuning.with_value(constant, 1, fail)()
    assert holder == {"SIZE": 2}
