"""Attentive convolutions agree with their oracles."""

import keras
import numpy as np
import oracles
import pytest
from attentive_helpers import as_pixels
from attentive_helpers import attentive_oracle
from attentive_helpers import random_layer
from attentive_helpers import weights_of
from layer_contract import as_array
from layer_contract import call_of
from layer_contract import FLOAT64_BACKENDS
from layer_contract import gradients

from keras_equiattn.layers import AttentiveGroupConv2D
from keras_equiattn.layers import AttentiveLiftingConv2D
from keras_equiattn.layers import CoAttentiveGroupConv2D
from keras_equiattn.layers import CoAttentiveLiftingConv2D
from keras_equiattn.layers import InputAttention
from keras_equiattn.testing import relative_difference


def input_oracle(layer, x, weights):
    return oracles.input_attention(
        x,
        weights["channel_kernel_1"],
        weights["channel_kernel_2"],
        as_pixels(layer, weights["spatial_kernel"]),
        layer.group.name,
        layer.attention_dilation_rate,
    )


def co_oracle(layer, x, weights):
    y = oracles.co_attentive_conv(
        x,
        as_pixels(layer, weights["kernel"]),
        weights["attention_kernel"],
        layer.group.name,
    )
    return y + weights["bias"]


def check_oracle(layer, x, oracle, tolerance=1e-5):
    """Outputs, and gradients by central differences of the oracle."""
    weights = weights_of(layer)
    dtype = keras.backend.standardize_dtype(layer.compute_dtype)
    expected = oracle(x, weights)
    y = as_array(call_of(layer)(x.astype(dtype)))
    assert relative_difference(y, expected) < tolerance

    rng = np.random.default_rng(1)
    cotangent = rng.normal(size=expected.shape)
    names = ["x", *(v.name for v in layer.trainable_variables)]
    found = gradients(layer, x.astype(dtype), cotangent.astype(dtype))
    for name, gradient in zip(names, found, strict=True):
        values = x if name == "x" else weights[name]
        direction = rng.normal(size=values.shape)
        step = 1e-5 * direction
        ends = []
        for sign in (1, -1):
            if name == "x":
                moved = oracle(x + sign * step, weights)
            else:
                changed = {**weights, name: values + sign * step}
                moved = oracle(x, changed)
            ends.append((moved * cotangent).sum())
        np.testing.assert_allclose(
            (gradient * direction).sum(),
            (ends[0] - ends[1]) / 2e-5,
            rtol=2e-3,
            atol=2e-3 * np.abs(cotangent).mean(),
            err_msg=name,
        )


@pytest.mark.torch_first
@pytest.mark.parametrize(
    ("layer", "group", "size", "arguments"),
    [
        (AttentiveGroupConv2D, "p4m", (6, 6), {"padding": "same"}),
        pytest.param(
            AttentiveGroupConv2D,
            "p4",
            (7, 7),
            {
                "attention": "spatial",
                "dilation_rate": 2,
                "attention_dilation_rate": 2,
            },
            marks=pytest.mark.torch_first,
        ),
        pytest.param(
            AttentiveGroupConv2D,
            "z2m",
            (6, 5),
            {"attention": "channel"},
            marks=pytest.mark.torch_first,
        ),
        pytest.param(
            AttentiveLiftingConv2D,
            "p4m",
            (7, 7),
            {"strides": 2},
            marks=pytest.mark.torch_first,
        ),
        (AttentiveLiftingConv2D, "z2", (5, 6), {"chunk_size": 1}),
        # On p8 filters are steerable.
        pytest.param(
            AttentiveGroupConv2D,
            "p8",
            (4, 4),
            {},
            marks=pytest.mark.torch_first,
        ),
        pytest.param(
            AttentiveLiftingConv2D,
            "p8",
            (5, 4),
            {"attention": "spatial", "padding": "same"},
            marks=pytest.mark.torch_first,
        ),
    ],
)
def test_attention_on_responses_agrees_with_oracle(
    layer, group, size, arguments
):
    arguments = {"attention_kernel_size": 3, "reduction_ratio": 1, **arguments}
    built, x = random_layer(
        layer, (2, *size, 2), group, filters=2, kernel_size=3, **arguments
    )
    check_oracle(built, x, lambda x, w: attentive_oracle(built, x, w)[0])


@pytest.mark.skipif(
    keras.backend.backend() not in FLOAT64_BACKENDS,
    reason="float64 is off by default on this backend",
)
@pytest.mark.parametrize(
    ("layer", "arguments", "oracle"),
    [
        (InputAttention, {}, input_oracle),
        (CoAttentiveLiftingConv2D, {"filters": 2, "kernel_size": 3}, co_oracle),
        (CoAttentiveGroupConv2D, {"filters": 2, "kernel_size": 3}, co_oracle),
    ],
)
@pytest.mark.parametrize("on_group", [True, False])
def test_attention_on_inputs_in_float64(layer, arguments, oracle, on_group):
    if on_group and layer is not InputAttention:
        pytest.skip("the class determines the input")
    built, x = random_layer(
        layer, (2, 5, 5, 2), "p4m", "float64", on_group, **arguments
    )
    y = as_array(built(keras.ops.convert_to_tensor(x, "float64")))
    expected = oracle(built, x, weights_of(built))
    assert relative_difference(y, expected) < 1e-12


@pytest.mark.parametrize("chunk_size", ["auto", None])
def test_attention_on_responses_in_float64(chunk_size):
    if keras.backend.backend() not in FLOAT64_BACKENDS:
        pytest.skip("float64 is off by default on this backend")
    built, x = random_layer(
        AttentiveGroupConv2D,
        (2, 5, 5, 3),
        "p4m",
        "float64",
        filters=2,
        kernel_size=3,
        padding="same",
        chunk_size=chunk_size,
    )
    check_oracle(built, x, lambda x, w: attentive_oracle(built, x, w)[0], 1e-12)


@pytest.mark.parametrize("lifting", [True, False])
@pytest.mark.parametrize(
    ("group", "arguments"),
    [
        ("p4m", {"attention_kernel_size": 3}),
        pytest.param(
            "z2", {"attention": "channel"}, marks=pytest.mark.torch_first
        ),
        pytest.param(
            "p4",
            {"attention": "spatial", "attention_dilation_rate": 2},
            marks=pytest.mark.torch_first,
        ),
        pytest.param(
            "p8",
            {"attention": "spatial", "attention_kernel_size": 3},
            marks=pytest.mark.torch_first,
        ),
    ],
)
def test_input_attention_agrees_with_oracle(lifting, group, arguments):
    built, x = random_layer(
        InputAttention,
        (2, 6, 6, 3),
        group,
        on_group=not lifting,
        reduction_ratio=2,
        **arguments,
    )
    check_oracle(built, x, lambda x, w: input_oracle(built, x, w))


@pytest.mark.parametrize(
    "layer", [CoAttentiveLiftingConv2D, CoAttentiveGroupConv2D]
)
@pytest.mark.parametrize(
    "group",
    ["p4m", "z2", pytest.param("p8", marks=pytest.mark.torch_first)],
)
def test_co_attention_agrees_with_oracle(layer, group):
    built, x = random_layer(
        layer, (2, 5, 5, 2), group, filters=2, kernel_size=3
    )
    check_oracle(built, x, lambda x, w: co_oracle(built, x, w))
