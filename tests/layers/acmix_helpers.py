"""Layers of ACmix with random weights, and their oracle."""

import numpy as np
from layer_contract import DTYPE
from layer_contract import LayerCase

from keras_equiattn.layers import ACmix2D

ARGUMENTS = {
    "filters": 8,
    "kernel_size": (5, 5),
    "attention_kernel_size": (3, 3),
    "num_heads": 2,
    "strides": (1, 1),
    "dilation_rate": (2, 2),
    "group": "p4m",
    "border": "mask",
    "activation": "relu",
    "use_bias": False,
    "exact": False,
    "recompute": False,
    "filter_basis": "steerable",
    "window_shape": "disc",
    "data_format": "channels_first",
}


def case(layer, group, shape, output, weights, rectangle=None, **options):
    arguments = {
        "filters": 4,
        "attention_kernel_size": 3,
        "num_heads": 2,
        "group": group,
        **options,
    }
    return LayerCase(
        layer,
        arguments,
        shape,
        output,
        weights=weights,
        group=group,
        rectangle=rectangle,
        reach=1,
    )


def random_layer(seed=0, channels=3, size=(None, None), **arguments):
    """Built, with every weight drawn anew."""
    arguments = {"attention_kernel_size": 3, "dtype": DTYPE, **arguments}
    layer = ACmix2D(data_format="channels_last", **arguments)
    layer.build((None, *size, layer.group.order, channels))
    rng = np.random.default_rng(seed)
    for variable in layer.weights:
        variable.assign(0.7 * rng.normal(size=variable.shape))
    return layer


def sample(layer, size=(5, 5), channels=3):
    shape = (2, *size, layer.group.order, channels)
    return np.random.default_rng(1).normal(size=shape).astype(DTYPE)
