"""Layers and networks with arguments and inputs that nobody thought of.

A layer works, and is then what it says it is, or it raises a `ValueError` or a
`TypeError` that names what is wrong. Operations have the same in
tests/ops/test_arguments.py.

`make fuzz` writes what came out to benchmarks/results.
"""

import inspect
import json
import warnings

import hypothesis
import keras
import numpy as np
import pytest
from fuzzing import EXAMPLES
from fuzzing import MARKS
from fuzzing import settings
from hypothesis import strategies as st
from layer_cases import first_cases
from layer_contract import as_array
from layer_contract import init_arguments

from keras_equiattn import groups
from keras_equiattn import layers
from keras_equiattn.applications import registry
from keras_equiattn.testing import equivariance_error

pytestmark = MARKS

# Arguments of Keras' own base class, which checks them.
OF_KERAS = {"name", "dtype", "trainable", "kwargs", "autocast"}
VALUES = st.one_of(
    st.integers(-2, 9),
    st.sampled_from([2**31, 2**63, 0.5, -1.0, 2.0, float("nan"), 1e308]),
    st.booleans(),
    st.none(),
    st.sampled_from(groups.names()),
    st.sampled_from(["same", "valid", "mean", "max", "relu", "call", "", "x"]),
    st.sampled_from(["binomial", "antialiased", "strided"]),
    st.tuples(st.integers(-1, 5), st.integers(-1, 5)),
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from([b"bytes", {}, object(), np.ones(2), ("a", "b"), Ellipsis]),
)


def like(value, name):
    """Values in place of one, most of which the layer accepts."""
    if name == "group":
        return st.sampled_from(groups.names())
    if name == "padding":
        return st.sampled_from(["same", "valid"])
    if isinstance(value, bool):
        return st.booleans()
    if isinstance(value, int):
        return st.integers(1, 6)
    if isinstance(value, float):
        return st.floats(0, 0.9)
    if isinstance(value, tuple):
        return st.tuples(*[st.integers(1, 4)] * len(value))
    return st.just(value)


@st.composite
def calls(draw, case):
    """Arguments of a layer, and the shape of its input.

    Up to three arguments are changed, and up to two axes.
    """
    parameters = inspect.signature(case.layer.__init__).parameters
    known = sorted(set(init_arguments(case.layer)) - OF_KERAS)
    changed = draw(st.lists(st.sampled_from(known), max_size=3, unique=True))
    arguments = dict(case.arguments)
    for name in changed:
        value = arguments.get(
            name, getattr(parameters.get(name), "default", None)
        )
        is_wild = draw(st.integers(0, 5)) == 0
        arguments[name] = draw(VALUES if is_wild else like(value, name))
    shape = list(case.input_shape)
    kind = draw(st.sampled_from(["same", "same", "same", "axes", "rank"]))
    if kind == "axes":
        for axis in draw(st.lists(st.integers(0, len(shape) - 1), max_size=2)):
            shape[axis] = draw(st.integers(0, 9))
    elif kind == "rank":
        shape = draw(st.lists(st.integers(1, 5), max_size=6))
    return arguments, changed, tuple(shape), kind


@pytest.fixture(scope="module")
def cases():
    found = first_cases()
    assert set(found) == set(layers.__all__)
    return found


@pytest.mark.parametrize("name", layers.__all__)
def test_layers_work_or_say_what_is_wrong(name, cases, fuzz_counts):
    case, counts = cases[name], fuzz_counts["layers"][name]

    @settings(EXAMPLES)
    @hypothesis.given(calls(case))
    def check(call):
        arguments, changed, shape, kind = call
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                layer, x, y = called(case, arguments, shape)
            except (TypeError, ValueError) as error:
                if not names_what_is_wrong(error, changed, kind):
                    pytest.fail(f"It says nothing of what is wrong: {error}")
                counts["refused"] += 1
                return
            check_result(layer, x, y)
            counts["worked"] += 1
            if check_equivariance(layer, x):
                counts["exact"] += 1

    check()


# One network of each kind, those that build fastest.
NETWORKS = (
    "acmix_pvt_tiny",
    "acmix_resnet26",
    "acmix_san10",
    "acmix_swin_tiny",
    "allcnnc_z2",
    "gsanet_rotmnist_z2",
    "pcam_densenet_z2",
    "resnet29_z2",
    "resnet44_z2",
    "rotmnist_z2cnn",
    "unet_p4_asc",
)


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_are_built_or_say_what_is_wrong(name, fuzz_counts):
    """They are not run: their layers are."""
    constructor, usual, *_ = registry._MODELS[name]
    known = sorted(
        {*inspect.signature(constructor).parameters} - {"name", "options"}
    )
    counts = fuzz_counts["networks"][name]

    @settings(EXAMPLES // 12)
    @hypothesis.given(
        st.dictionaries(st.sampled_from(known), VALUES, min_size=1, max_size=2)
    )
    def check(changed):
        try:
            model = constructor(**{**usual, **changed})
        except (TypeError, ValueError) as error:
            if not names_what_is_wrong(error, list(changed), "same"):
                pytest.fail(f"{changed}: It says nothing: {error}")
            counts["refused"] += 1
            return
        assert model.inputs[0].shape[0] is None
        counts["worked"] += 1

    check()


def called(case, arguments, shape):
    """The layer, an input and what the layer makes of it."""
    layer = case.layer(**arguments)
    if getattr(layer, "data_format", None) == "channels_first":
        shape = (*shape[:1], *shape[-1:], *shape[1:-1]) if shape else shape
    x = np.random.default_rng(0).normal(size=shape).astype("float32")
    y = layer(keras.ops.convert_to_tensor(x))
    return layer, x, y


def names_what_is_wrong(error, changed, kind):
    """Whether a message has an argument, or speaks of the input."""
    words = [*changed, "Received", "argument"]
    # Keras says "regularizer identifier", for example, or "Unknown `config`".
    kinds = {name.rpartition("_")[2] for name in changed}
    words += kinds
    if kinds & {"initializer", "regularizer", "constraint"}:
        words.append("config")
    if kind != "same":
        words += ["shape", "input", "axes", "ndim", "rank"]
    return any(word in str(error) for word in words)


def check_result(layer, x, y):
    """The shape is what was announced, and the numbers are finite."""
    announced = layer.compute_output_shape(x.shape)
    for part, shape in zip(
        keras.tree.flatten(y),
        [announced] if not isinstance(announced, dict) else announced.values(),
        strict=True,
    ):
        assert tuple(part.shape) == tuple(shape)
        assert np.isfinite(as_array(part)).all()
    config = layer.get_config()
    again = type(layer).from_config(config)
    assert json.dumps(again.get_config(), default=repr) == json.dumps(
        config, default=repr
    )


def check_equivariance(layer, x):
    """Tests equivariance to rounding, and returns whether it was possible.

    It is not tried for layers that say that they are not exact, for groups of
    one element, or where a turned image has a size that is refused.
    """
    group = getattr(layer, "group", None)
    if group is None or group.order == 1 or not x.size or not layer.weights:
        return False
    is_of_images = hasattr(layer, "data_format")
    if not is_of_images or getattr(layer, "exact", True) is False:
        return False
    element = int(group.grid_elements[-1])
    outputs = getattr(layer, "kind", "images")
    try:
        (error,) = equivariance_error(
            layer,
            group,
            x,
            elements=[element],
            data_format=layer.data_format,
            outputs=outputs if outputs in ("vectors", "axes") else "images",
        )
    except ValueError:
        # The size of the turned image, which differs from that of the image.
        if x.shape[1] == x.shape[2]:
            raise
        return False
    assert error < 1e-4
    return True
