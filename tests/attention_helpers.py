"""What the tests of attention maps share."""

import keras
import numpy as np

from keras_equiattn import layers


def randomize(model):
    """Sets weights and batch statistics, the same on every backend."""
    rng = np.random.default_rng(1)
    for variable in model.weights:
        shape = tuple(variable.shape)
        if variable.name in ("gamma", "moving_variance"):
            variable.assign(rng.uniform(0.5, 1.5, shape))
        elif variable.name in ("beta", "moving_mean"):
            variable.assign(rng.uniform(-0.2, 0.6, shape))
        elif variable.dtype == "float32":  # no seeds
            bound = np.sqrt(6 / np.prod(shape[:-1]))
            if "spatial" in variable.name:  # sigmoids far from one half
                bound *= 4
            variable.assign(rng.uniform(-bound, bound, shape))
    return model


def images(count=1, shape=(28, 28, 1)):
    return np.random.default_rng(0).uniform(size=(count, *shape))


def small_layers():
    """Attentive layers with random weights, by name, for (8, 8, 2) images."""
    lift = layers.CoAttentiveLiftingConv2D(3, 3, group="p4", name="lift")
    inner = layers.InputAttention(group="p4", name="inner")
    conv = layers.CoAttentiveGroupConv2D(2, 3, group="p4", name="conv")
    return lift, inner, conv


def small_network():
    lift, inner, conv = small_layers()
    inputs = keras.Input((8, 8, 2))
    x = keras.layers.BatchNormalization(name="bn")(inputs)
    x = keras.layers.Dropout(0.5, name="dropout")(lift(x))
    x = conv(inner(x))
    x = keras.layers.GlobalAveragePooling3D(name="pool")(x)
    return randomize(keras.Model(inputs, x, name="small"))
