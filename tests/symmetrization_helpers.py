"""What the tests of `symmetrize` share: a plain network, and turned images."""

import keras
import numpy as np
import oracles

SIDE = 6


def images(height=SIDE, width=SIDE, channels=2):
    shape = (3, height, width, channels)
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def plain(output="invariant", size=(SIDE, SIDE), data_format="channels_last"):
    """A network without symmetry: its filters have none."""
    shape = (*size, 2) if data_format == "channels_last" else (2, *size)
    options = {"padding": "same", "data_format": data_format}
    x = inputs = keras.Input(shape)
    x = keras.layers.Conv2D(4, (3, 2), activation="tanh", **options)(x)
    if output == "invariant":
        x = keras.layers.MaxPooling2D(2, data_format=data_format)(x)
        x = keras.layers.GlobalAveragePooling2D(data_format=data_format)(x)
        outputs = keras.layers.Dense(3)(x)
    else:
        outputs = keras.layers.Conv2D(2, 3, **options)(x)
    model = keras.Model(inputs, outputs)
    rng = np.random.default_rng(1)
    model.set_weights([rng.normal(size=w.shape) for w in model.weights])
    return model


def moved(x, group, element, output="image"):
    """`L_g` of a batch."""
    if output == "invariant":
        return x
    if output == "vector":
        return oracles.act_on_vectors(x, group, element)
    return np.stack([oracles.turn(plane, group, element) for plane in x])
