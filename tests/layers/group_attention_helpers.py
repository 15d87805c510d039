"""Layers of group self-attention with random weights, and their oracle."""

import numpy as np
import oracles
import pytest
from layer_contract import as_array
from layer_contract import DTYPE
from layer_contract import LayerCase
from layer_contract import weights_of

from keras_equiattn import groups
from keras_equiattn.layers import GroupSelfAttention2D
from keras_equiattn.layers import LiftingSelfAttention2D

LAYERS = (LiftingSelfAttention2D, GroupSelfAttention2D)


SLOW = (pytest.mark.slow, pytest.mark.every_backend)


def case(layer, group, size, window, heads, rectangle=None, **options):
    lifting = layer is LiftingSelfAttention2D
    order = groups.get(group).order
    shape = (2, *size, *(() if lifting else (order,)), 3)
    return LayerCase(
        layer,
        {
            "filters": 4,
            "key_dim": 2 if lifting else 4,
            "num_heads": heads,
            "kernel_size": window,
            "group": group,
            **options,
        },
        shape,
        (*shape[:3], order, 4),
        weights=20 if lifting else 21,
        group=group,
        rectangle=rectangle,
        reach=None if window is None else window // 2,
        no_shift="attention is to the whole image",
    )


def random_layer(layer, group="p4", window=3, channels=3, **arguments):
    """A built layer, whose weights are always the same random numbers.

    `seed` goes to the layer, as all other arguments do.
    """
    arguments = {
        **{"filters": 4, "key_dim": 5, "num_heads": 2, "dtype": DTYPE},
        **arguments,
    }
    made = layer(
        kernel_size=window,
        group=group,
        data_format="channels_last",
        **arguments,
    )
    made.build((None, None, None, *order_of(made), channels))
    rng = np.random.default_rng(0)
    for variable in made.weights:
        variable.assign(0.7 * rng.normal(size=variable.shape))
    return made


def order_of(layer):
    return (layer.group.order,) if layer.takes == "group" else ()


def sample(layer, size, batch=2, channels=3, seed=1, dtype=DTYPE):
    shape = (batch, *size, *order_of(layer), channels)
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def strengthen(layer, factor):
    for variable in (layer.query_kernel, layer.key_kernel):
        variable.assign(factor * as_array(variable))


def oracle(layer, x, **options):
    return oracles.group_self_attention(
        x.astype("float64"),
        weights_of(layer),
        layer.group.name,
        layer.kernel_size,
        layer.epsilon,
        shape=layer.window_shape,
        scale=layer._scale,
        **options,
    )


def tolerance():
    return 1e-12 if DTYPE == "float64" else 1e-5
