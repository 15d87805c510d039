"""The public measures of equivariance."""

import types
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import ops

from keras_equiattn import groups
from keras_equiattn import testing
from keras_equiattn.layers import GroupConv2D
from keras_equiattn.layers import GroupPooling
from keras_equiattn.layers import LiftingConv2D
from keras_equiattn.testing import assert_equivariant
from keras_equiattn.testing import equivariance_error


def network(group="p4"):
    return keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            LiftingConv2D(4, 3, group=group, data_format="channels_last"),
            GroupConv2D(3, 4, group=group, data_format="channels_last"),
            GroupPooling(data_format="channels_last"),
            keras.layers.Flatten(),
        ]
    )


@pytest.mark.torch_first
def test_one_error_per_element():
    errors = equivariance_error(network("p4m"), "p4m", (2, 6, 6, 2))
    assert errors.shape == (8,)
    assert errors[0] == 0
    assert (errors < 1e-5).all()
    errors = equivariance_error(network("p4"), "p4m", (2, 6, 6, 2))
    assert (errors[:4] < 1e-5).all()
    assert (errors[4:] > 1e-2).all()
    chosen = equivariance_error(
        network("p4"), "p4m", (2, 6, 6, 2), elements=[5, 1]
    )
    assert chosen[0] > 1e-2 > chosen[1]


def test_relative_error_is_what_it_says():
    """An image plus a ramp: the ramp is what a half turn changes, twice."""
    ramp = np.arange(-1.0, 2.0, dtype="float32")[None, :, None, None]

    def add_ramp(x):
        x = ops.convert_to_tensor(x)
        return x * 0 + 10 + ops.convert_to_tensor(ramp)

    x = np.ones((1, 3, 3, 1), "float32")
    errors = equivariance_error(add_ramp, "p2", x)
    np.testing.assert_allclose(errors, [0, 2 / 11], rtol=1e-6)


def test_takes_samples_dtypes_and_layouts():
    layer = LiftingConv2D(3, 3, group="p4", data_format="channels_first")
    assert_equivariant(layer, "p4", (2, 2, 6, 5), data_format="channels_first")
    x = np.random.default_rng(0).normal(size=(2, 6, 6, 2)).astype("float32")
    assert_equivariant(network(), groups.get("p4"), x)
    first = equivariance_error(network(), "p4", (2, 6, 6, 2), seed=1)
    assert first.shape == (4,)


def test_takes_nested_outputs():
    layer = LiftingConv2D(3, 3, group="p4", data_format="channels_last")

    def both(x):
        y = layer(x)
        return {"map": y, "more": [ops.max(y, axis=(1, 2, 3)), y * 2]}

    assert_equivariant(both, "p4", (2, 6, 6, 2))

    def broken(x):
        y = layer(x)
        return {"map": y, "more": [y[:, 0, 0, 0]]}

    assert equivariance_error(broken, "p4", (2, 6, 6, 2)).max() > 1e-2


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: x * 0 + 1.0, "does not vary over the batch axis"),
        (lambda x: x + x[:1] * 0 + x[0, 0, 0, 0], "Not equivariant"),
        (
            lambda x: ops.mean(x, axis=(1, 2), keepdims=True) + x * 0,
            "does not vary over the height axis",
        ),
        (lambda x: ops.ones((2, 5)), "does not vary over the batch axis"),
    ],
)
def test_says_when_it_would_say_nothing(function, words):
    x = np.random.default_rng(0).normal(size=(2, 4, 4, 1)).astype("float32")
    with pytest.raises(AssertionError, match=words):
        assert_equivariant(
            lambda x: function(ops.convert_to_tensor(x)), "p4", x
        )


def test_symmetric_outputs_discern_nothing():
    """Averaged over the group, an image looks the same from all sides."""

    def average(x):
        turns = [
            ops.rot90(ops.convert_to_tensor(x), k, (1, 2)) for k in range(4)
        ]
        return sum(turns)

    with pytest.raises(AssertionError, match="does not tell element"):
        assert_equivariant(average, "p4", (2, 4, 4, 1))


def test_hint_for_elements_between_the_quarter_turns():
    def weighted(x):  # by its row
        rows = np.arange(1, 6, dtype="float32").reshape(5, 1, 1, 1)
        return ops.convert_to_tensor(x) * ops.convert_to_tensor(rows)

    x = (2, 5, 5, 8, 1)
    for element, hint in ((1, True), (2, False)):
        with pytest.raises(AssertionError) as raised:
            assert_equivariant(weighted, "p8", x, elements=[element])
        assert ("elements=group.grid_elements" in str(raised.value)) == hint


def test_errors():
    with pytest.raises(ValueError, match="Shapes differ at output, element 1"):
        equivariance_error(lambda x: x[:, 1:], "p4", (2, 5, 5, 1))
    with pytest.raises(ValueError, match="not finite"):
        equivariance_error(lambda x: x * np.nan, "p4", (2, 4, 4, 1))
    with pytest.raises(ValueError, match="integer from 0 to 3"):
        equivariance_error(network(), "p4", (2, 6, 6, 2), elements=[4])
    with pytest.raises(ValueError, match="has 4 elements on axis 3"):
        equivariance_error(lambda x: x, "p4", (2, 6, 6, 8, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sample": (1, 6, 6, 2)}, r"two images or more.*\(1, 6, 6, 2\)"),
        ({"elements": [0]}, "more than the identity"),
        ({"elements": []}, "one element or more"),
        ({"data_format": "channel_first"}, "`data_format` must be.*'channel_f"),
        ({"sample": (None, 6, 6, 2)}, "without unknown sizes.*None"),
        ({"sample": (2, 6, 6)}, "of rank 4"),
        ({"sample": np.ones((2, 6))}, r"of rank 4.*\(2, 6\)"),
        ({"group": "p3"}, "Unknown group"),
    ],
)
def test_bad_arguments(arguments, message):
    given = {"group": "p4", "sample": (2, 6, 6, 2), **arguments}
    with pytest.raises(ValueError, match=message):
        assert_equivariant(network(), **given)


def test_shapes_of_any_integers():
    shape = tuple(np.array([2, 6, 6, 2]))
    assert equivariance_error(network(), "p4", shape).max() < 1e-5


@pytest.mark.once
def test_asserts_also_where_python_skips_assertions():
    path = testing.__file__
    code = compile(Path(path).read_text(), path, "exec", optimize=1)
    optimised = types.ModuleType("optimised")
    exec(code, vars(optimised))
    with pytest.raises(AssertionError, match="Not equivariant under 'p4'"):
        optimised.assert_equivariant(
            keras.layers.Conv2D(3, 3), "p4", (2, 9, 9, 3)
        )
    exec(compile("assert False", path, "exec", optimize=1))  # skipped
