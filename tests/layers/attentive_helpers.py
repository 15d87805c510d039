"""Attentive convolutions with random weights, and their oracles."""

import numpy as np
import oracles
import pytest
from layer_contract import as_array

from keras_equiattn import groups
from keras_equiattn.layers import AttentiveGroupConv2D
from keras_equiattn.layers import CoAttentiveGroupConv2D
from keras_equiattn.ops import steerable_basis

SLOW = (pytest.mark.slow, pytest.mark.every_backend)


def random_layer(
    layer, shape, group, dtype="float32", on_group=False, **arguments
):
    """A built layer and an input; scores that saturate no sigmoid."""
    rng = np.random.default_rng(0)
    built = layer(group=group, dtype=dtype, **arguments)
    if layer in (AttentiveGroupConv2D, CoAttentiveGroupConv2D) or on_group:
        shape = (*shape[:3], groups.get(group).order, shape[-1])
    built.build(shape)
    for variable in built.weights:
        scale = 0.2 if variable.name == "spatial_kernel" else 0.7
        variable.assign(scale * rng.normal(size=variable.shape))
    return built, rng.normal(size=shape)


def weights_of(layer):
    names = (
        "kernel",
        "channel_kernel_1",
        "channel_kernel_2",
        "spatial_kernel",
        "attention_kernel",
        "bias",
    )
    arrays = {v.name: as_array(v.value) for v in layer.weights}
    arrays = {name: a.astype("float64") for name, a in arrays.items()}
    return {name: arrays.get(name) for name in names}


def as_pixels(layer, weight):
    """A weight as pixels; coefficients are of filters of 3 x 3 pixels."""
    if weight is None or layer.filter_basis == "pixel":
        return weight
    pixels = np.tensordot(steerable_basis("z2", 3)[0], weight, axes=1)
    return pixels.reshape(3, 3, *weight.shape[1:])


def attentive_oracle(layer, x, weights):
    y, channel, spatial = oracles.attentive_conv(
        x,
        as_pixels(layer, weights["kernel"]),
        weights["channel_kernel_1"],
        weights["channel_kernel_2"],
        as_pixels(layer, weights["spatial_kernel"]),
        layer.group.name,
        attention_dilation=layer.attention_dilation_rate,
        strides=layer.strides[0],
        padding=layer.padding,
        dilation=layer.dilation_rate[0],
    )
    return y + weights["bias"], channel, spatial
