"""Rates of the paths of ACmix, as numbers and as a picture."""

import keras
import numpy as np
import pytest

from keras_equiattn import layers
from keras_equiattn.visualization import path_rates
from keras_equiattn.visualization import plot_path_rates

pytestmark = pytest.mark.once


def network():
    """Two layers with rates, one of them in a model of its own, and others."""
    inner = keras.Sequential(
        [
            keras.Input((4, 4, 4)),
            layers.WindowACmix2D(4, 2, 2, name="windows"),
            layers.ACmix2D(4, 3, 3, 2, rates="fixed", name="fixed"),
        ],
        name="inner",
    )
    inputs = keras.Input((4, 4, 3))
    x = layers.ACmix2D(4, 3, 3, 2, name="mix")(inputs)
    x = layers.ACmix2D(4, 3, 3, 2, paths="attention", name="one")(x)
    model = keras.Model(inputs, inner(x), name="outer")
    model.get_layer("mix").attention_rate.assign(-2.0)
    inner.get_layer("windows").convolution_rate.assign(0.25)
    return model


def test_rates():
    assert path_rates(network()) == {
        "mix": (-2.0, 0.5),
        "inner/windows": (0.5, 0.25),
    }


def test_rates_in_wrappers():
    inputs = keras.Input((2, 4, 4, 3))
    mix = layers.ACmix2D(4, 3, 3, 2, name="mix")
    x = keras.layers.TimeDistributed(mix, name="each")(inputs)
    image = keras.Input((4, 4, 4))
    inner = keras.Model(
        image, layers.ACmix2D(4, 3, 3, 2, name="last")(image), name="inner"
    )
    x = keras.layers.TimeDistributed(inner, name="all")(x)
    mix.attention_rate.assign(3.0)
    assert path_rates(keras.Model(inputs, x)) == {
        "each/mix": (3.0, 0.5),
        "all/inner/last": (0.5, 0.5),
    }


def test_picture():
    figure = plot_path_rates(network())
    (panel,) = figure.axes
    attention, convolution = panel.lines
    np.testing.assert_array_equal(attention.get_ydata(), [2, 0.5])
    np.testing.assert_array_equal(convolution.get_ydata(), [0.5, 0.25])
    names = [label.get_text() for label in panel.get_xticklabels()]
    assert names == ["mix", "inner/windows"]
    assert panel.get_title() == "outer"


def test_no_rates():
    model = keras.Sequential(
        [keras.Input((4, 4, 3)), layers.ACmix2D(4, 3, 3, 2, rates="fixed")],
        name="plain",
    )
    with pytest.raises(ValueError, match=r"'plain' has no learned rates"):
        plot_path_rates(model)
