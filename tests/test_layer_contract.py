"""The contract is tested by mutation: every planted fault must be caught."""

import dataclasses
import inspect

import keras
import layer_contract
import numpy as np
import pytest
from layer_contract import LayerCase
from layers.test_convolution import TestGroupConv2D

from keras_equiattn.layers import GroupConv2D
from keras_equiattn.layers import InputAttention
from keras_equiattn.ops.group.convolution import group_conv


def case_of(layer):
    return LayerCase(
        layer,
        {
            "filters": 3,
            "kernel_size": 3,
            "activation": "tanh",
            "group": "p4",
        },
        (2, 6, 6, 4, 2),
        (2, 4, 4, 4, 3),
        weights=2,
        group="p4",
        rectangle=(7, 5),
    )


@keras.saving.register_keras_serializable(package="tests")
class Sound(GroupConv2D):
    """No fault at all."""


@keras.saving.register_keras_serializable(package="tests")
class WrongPermutation(GroupConv2D):
    """Adds a copy of the output whose group axis is permuted wrongly."""

    def convolve(self, x, kernel, **options):
        kernel = keras.ops.convert_to_tensor(kernel)
        y = group_conv(x, kernel, self.group, **options)
        other = keras.ops.take(y, np.array([0, 2, 1, 3]), axis=3)
        return y + 0.1 * other


@keras.saving.register_keras_serializable(package="tests")
class ForgetsTheGroup(GroupConv2D):
    """Equivariant, but constant over pixels and group elements."""

    def convolve(self, x, kernel, **options):
        y = group_conv(x, kernel, self.group, **options)
        return y * 0 + keras.ops.mean(y, axis=(1, 2, 3), keepdims=True)


@keras.saving.register_keras_serializable(package="tests")
class MissingKey(GroupConv2D):
    def get_config(self):
        config = super().get_config()
        del config["activation"]
        return config


@keras.saving.register_keras_serializable(package="tests")
class WrongValue(GroupConv2D):
    def get_config(self):
        return {**super().get_config(), "activation": "relu"}


@keras.saving.register_keras_serializable(package="tests")
class StaticBatch(GroupConv2D):
    def call(self, inputs):
        y = super().call(inputs)
        if not hasattr(self, "count"):
            self.count = inputs.shape[0]
        if self.count is None:
            return y
        return keras.ops.reshape(y, (self.count, *y.shape[1:]))


@keras.saving.register_keras_serializable(package="tests")
class IgnoresDataFormat(GroupConv2D):
    _channels_first = False


@keras.saving.register_keras_serializable(package="tests")
class DependsOnPosition(GroupConv2D):
    def call(self, inputs):
        y = super().call(inputs)
        rows = keras.ops.arange(y.shape[1], dtype=y.dtype)
        return y + keras.ops.reshape(rows, (1, -1, 1, 1, 1))


@keras.saving.register_keras_serializable(package="tests")
class Float32Leak(GroupConv2D):
    def call(self, inputs):
        return keras.ops.cast(super().call(inputs), "float32")


@keras.saving.register_keras_serializable(package="tests")
class StaticSize(GroupConv2D):
    def call(self, inputs):
        y = super().call(inputs)
        return keras.ops.reshape(y, (-1, 4, 4, 4, 3))


@keras.saving.register_keras_serializable(package="tests")
class InventsAnImage(GroupConv2D):
    def call(self, inputs):
        y = super().call(inputs)
        return y if inputs.shape[0] else keras.ops.zeros((1, *y.shape[1:]))


@keras.saving.register_keras_serializable(package="tests")
class ScalesIntegers(GroupConv2D):
    def call(self, inputs):
        if "int" in keras.backend.standardize_dtype(inputs.dtype):
            inputs = keras.ops.cast(inputs, "float32") / 255
        return super().call(inputs)


@keras.saving.register_keras_serializable(package="tests")
class NotSaved(GroupConv2D):
    def save_own_variables(self, store):
        store["0"] = np.zeros(self.kernel.shape)
        store["1"] = np.zeros(self.bias.shape)


@keras.saving.register_keras_serializable(package="tests")
class Attends(InputAttention):
    """No fault either."""


@keras.saving.register_keras_serializable(package="tests")
class ForgetsSavedQuery(InputAttention):
    """A file holds the position as a list."""

    def attend_channels_last(self, x, query=None):
        query = (0, 0) if isinstance(query, list) else query
        return super().attend_channels_last(x, query)


# What catches which fault, and with which words.
FAULTS = (
    ("equivariance", WrongPermutation, "Not equivariant under 'p4'"),
    ("equivariance", ForgetsTheGroup, "does not vary over the height axis"),
    ("equivariance", DependsOnPosition, "Not equivariant under 'p4'"),
    ("translation", DependsOnPosition, "< 1e-05"),
    ("config", MissingKey, "get_config lacks .'activation'."),
    ("config", WrongValue, "`activation` was tanh, after a config round trip"),
    ("dynamic_batch", StaticBatch, "(?i)shape"),
    ("integers", ScalesIntegers, "< 1e-06"),
    ("empty_batch", InventsAnImage, r"\(1, 4, 4, 4, 3\) == \(0, 4"),
    ("data_formats", IgnoresDataFormat, "The group axis has size 6"),
    ("dtype_policy", Float32Leak, "'float32' == 'bfloat16'"),
    ("unknown_size", StaticSize, "(?i)shape"),
    ("file_round_trip", NotSaved, "Arrays are not equal"),
    (
        "file_round_trip_with_a_query",
        ForgetsSavedQuery,
        "relative_difference",
    ),
    ("golden", WrongPermutation, "< 1e-05"),
)


def run(check, layer, folder):
    """Runs one check of the contract on a layer."""
    function = getattr(layer_contract, f"check_{check}")
    case = case_of(layer)
    if check == "file_round_trip_with_a_query":
        layer = Attends if layer is Sound else layer
        shape = (2, 5, 6, 4, 2)
        attending = LayerCase(layer, {"group": "p4"}, shape, shape, 3, "p4")
        return function(attending, folder)
    if check == "config":
        return function(layer, TestGroupConv2D.arguments)
    if check == "integers":
        return function(case, "uint8")
    if check == "dtype_policy":
        return function(case, "bfloat16")
    if check == "file_round_trip":
        return function(case, folder)
    if check == "golden":  # the file is found by the name of the class
        committed = TestGroupConv2D.cases[0]
        disguised = type("GroupConv2D", (layer,), {})
        return function(dataclasses.replace(committed, layer=disguised))
    return function(case)


@pytest.mark.torch_first
@pytest.mark.parametrize("check", sorted({check for check, _, _ in FAULTS}))
def test_sound_layer_passes(check, tmp_path):
    run(check, Sound, tmp_path)


@pytest.mark.torch_first
@pytest.mark.parametrize(("check", "layer", "words"), FAULTS)
def test_fault_is_caught(check, layer, words, tmp_path):
    # Backends have errors of their own for shapes that do not fit.
    error = Exception if "shape" in words else (AssertionError, ValueError)
    with pytest.raises(error, match=words):
        run(check, layer, tmp_path)


def test_keras_own_contract_sees_a_wrong_count():
    layer_contract.check_keras_contract(case_of(Sound))
    with pytest.raises(AssertionError):
        layer_contract.check_keras_contract(
            dataclasses.replace(case_of(Sound), weights=3)
        )


@pytest.mark.once
def test_every_check_has_a_fault():
    checks = {
        name.removeprefix("check_")
        for name, _ in inspect.getmembers(layer_contract, inspect.isfunction)
        if name.startswith("check_")
    }
    others = {
        "keras_contract",
        "unknown_size_is_refused",
        "empty_images_are_refused",
    }
    assert checks == {check for check, _, _ in FAULTS} | others
