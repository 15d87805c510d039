"""OpenVINO predicts what the other backends do, from the same files.

Models are saved and evaluated here; one new process for each test loads them
all under OpenVINO, which Keras uses for inference alone.
"""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import keras
import layer_cases
import numpy as np
import pytest
from layer_contract import as_array
from layer_contract import init_arguments

from keras_equiattn import applications
from keras_equiattn import layers
from keras_equiattn.testing import relative_difference

pytestmark = pytest.mark.once

LIMIT = 1e-4

# Keras says nothing of precision when it compiles a model for `predict`, and
# OpenVINO then takes bfloat16 where the processor has it.
PREDICT = """
import functools
import sys

import openvino

openvino.compile_model = functools.partial(
    openvino.compile_model, config={"INFERENCE_PRECISION_HINT": "f32"}
)

import keras
import numpy as np

import keras_equiattn.applications

assert keras.backend.backend() == "openvino"
for path in sys.argv[1:]:
    model = keras.saving.load_model(f"{path}.keras")
    # More images than before: the size of the batch is not known.
    x = np.load(f"{path}-x.npy")
    y = keras.tree.flatten(model.predict(np.concatenate([x, x]), verbose=0))
    np.savez(f"{path}-openvino.npz", *[part[: len(x)] for part in y])
"""

# What only a backend with gradients does.
REFUSED = """
import warnings

import keras
import numpy as np
from keras import ops

from keras_equiattn.layers import GroupConv2D, GroupSelfAttention2D
from keras_equiattn.ops import backend
from keras_equiattn.ops.geometry import reflected

warnings.simplefilter("error")


def error(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except NotImplementedError as found:
        return str(found)
    raise AssertionError("nothing was raised")


x = np.ones((1, 4, 4, 4, 2), "float32")
model = keras.Sequential([GroupConv2D(2, 3, group="p4")])
model.compile("sgd", "mse")
y = model.predict(x, verbose=0)
assert "openvino" in error(model.fit, x, y)
assert "openvino" in error(model.train_on_batch, x, y)

three = ops.ones(3)
gradient = error(backend.vjp, ops.square, (three,), three)
assert "'openvino' backend, which only predicts" in gradient
assert "KERAS_BACKEND" in gradient

layer = GroupSelfAttention2D(
    2, num_heads=1, key_dim=4, kernel_size=3, attention_dropout=0.5
)
assert layer(x).shape == (1, 4, 4, 4, 2)
assert "Random numbers for dropout" in error(layer, x, training=True)

# The forward pass is all that is left of a function with its own gradient.
double = backend.custom_vjp(lambda x: (2 * x, x), None, "recompute=False")
assert list(ops.convert_to_numpy(double(three))) == [2, 2, 2]
constant = backend.without_gradient(lambda x: 3 * x)
assert list(ops.convert_to_numpy(constant(three))) == [3, 3, 3]

# Its remainders have the sign of what is divided, those of others do not.
mirrored = reflected(ops.arange(-1, 4, dtype="int32"), 3)
assert list(ops.convert_to_numpy(mirrored)) == [1, 0, 1, 2, 1]
"""


@pytest.fixture(scope="module")
def cases():
    """By name, what the tests of the layers run on."""
    return layer_cases.all_cases()


@pytest.fixture(scope="module")
def first_cases():
    """The first case of each layer, by its name."""
    return layer_cases.first_cases()


def run_under_openvino(code, *arguments, folder=None):
    process = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "KERAS_BACKEND": "openvino"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr


def assert_predicted(models, folder):
    """OpenVINO gives each output of each model, to the limit.

    Args:
        models: by name, pairs of a model and its input.
        folder: where they are saved.
    """
    expected, paths = {}, []
    for name, (model, x) in models.items():
        path = folder / name
        model.save(f"{path}.keras")
        np.save(f"{path}-x.npy", x)
        y = model.predict(x, verbose=0)
        expected[path] = [as_array(part) for part in keras.tree.flatten(y)]
        paths.append(path)
    run_under_openvino(PREDICT, *paths)
    errors = {}
    for path in paths:
        with np.load(f"{path}-openvino.npz") as arrays:
            found = [arrays[name] for name in arrays.files]
        errors[path.name] = [
            relative_difference(theirs, ours)
            for theirs, ours in zip(found, expected[path], strict=True)
        ]
    wrong = {
        name: values
        for name, values in errors.items()
        # Not a number is wrong, too.
        if not all(error < LIMIT for error in values)
    }
    assert not wrong


def with_layer(case, size=(), **changes):
    """A model of the layer alone, and its input.

    Args:
        case: a `LayerCase`.
        size: height and width of the model, if not those of the case.
        **changes: of the arguments of the layer.
    """
    layer = case.make(**{"data_format": "channels_last", **changes})
    x = case.sample()
    if getattr(layer, "data_format", None) == "channels_first":
        x = np.ascontiguousarray(np.moveaxis(x, -1, 1))
    inputs = keras.Input((*size, *x.shape[1 + len(size) :]))
    return keras.Model(inputs, layer(inputs)), x


def with_maps(case, **options):
    """A model that returns the output of the layer and its maps."""
    layer = case.make(data_format="channels_last")
    inputs = keras.Input(case.input_shape[1:])
    y, maps = layer(inputs, return_attention_maps=True, **options)
    return keras.Model(inputs, [y, *maps.values()]), case.sample()


def takes(case, name):
    return name in inspect.signature(case.layer.call).parameters


def test_some_public_layers(first_cases, tmp_path):
    assert set(first_cases) == set(layers.__all__)
    some = ("AttentiveGroupConv2D", "AffineSelfConv2D", "GroupPooling")
    models = {name: with_layer(first_cases[name]) for name in some}
    assert_predicted(models, tmp_path)


def test_training_is_refused():
    run_under_openvino(REFUSED)


@pytest.mark.slow
def test_every_case(cases, tmp_path):
    models = {name: with_layer(case) for name, case in cases.items()}
    assert_predicted(models, tmp_path)


@pytest.mark.slow
def test_attention_maps(first_cases, tmp_path):
    models = {}
    for name, case in first_cases.items():
        if takes(case, "return_attention_maps"):
            models[name] = with_maps(case)
        if takes(case, "query"):
            models[f"{name}-query"] = with_maps(case, query=(1, 0))
    assert_predicted(models, tmp_path)


@pytest.mark.slow
def test_channels_first_and_unknown_size(first_cases, tmp_path):
    models = {}
    for name, case in first_cases.items():
        if case.layer is layers.RelativePositionEncoding:
            continue
        first = with_layer(case, data_format="channels_first")
        models[f"{name}-first"] = first
        if case.unknown_size:
            models[f"{name}-unknown"] = with_layer(case, (None, None))
    assert_predicted(models, tmp_path)


@pytest.mark.slow
def test_layers_that_hold_everything(first_cases, tmp_path):
    """Without the forms that compute again what they did not keep."""
    held = {"recompute": False, "chunk_size": None}
    models = {}
    for name, case in first_cases.items():
        taken = init_arguments(case.layer)
        changes = {key: value for key, value in held.items() if key in taken}
        if changes:
            models[name] = with_layer(case, **changes)
    assert_predicted(models, tmp_path)


@pytest.mark.slow
def test_networks(tmp_path):
    x = np.random.default_rng(0).uniform(size=(2, 28, 28, 1))
    models = {
        name: (model, x.astype("float32"))
        for name, model in {
            "shipped": applications.get_model(
                "rotmnist_p4cnn", weights="rot_mnist"
            ),
            "input": applications.get_model(
                "rotmnist_p4cnn_input", weights="rot_mnist"
            ),
            "full": applications.get_model("rotmnist_p4cnn_full"),
            "self": applications.get_model("gsanet_rotmnist_p4"),
        }.items()
    }
    assert_predicted(models, tmp_path)


@pytest.mark.slow
def test_guide(tmp_path):
    """The script of the guide, which sets the precision itself."""
    page = Path(__file__).parents[1] / "docs" / "guide" / "openvino.md"
    (script,) = re.findall(r"^```py\n(.*?)^```", page.read_text(), re.M | re.S)
    model = applications.get_model("rotmnist_p4cnn", weights="rot_mnist")
    (tmp_path / "runs" / "digits").mkdir(parents=True)
    model.save(tmp_path / "runs" / "digits" / "last.keras")
    x = np.random.default_rng(0).uniform(size=(2, 28, 28, 1))
    np.save(tmp_path / "images.npy", x.astype("float32"))
    run_under_openvino(script, folder=tmp_path)
    found = np.load(tmp_path / "logits.npy")
    expected = model.predict(x.astype("float32"), verbose=0)
    assert relative_difference(found, expected) < LIMIT
