"""Turns by less than 90 degrees of smooth images, with new layers."""

import keras
import numpy as np
import pytest
from layer_contract import as_array
from scipy import ndimage
from sweeps import swept

from keras_equiattn import groups
from keras_equiattn import layers

# One backend is enough: what depends on it is compared with the oracles.
pytestmark = pytest.mark.torch_first

SIZE = 33
# Options with which layers turn with the grid alone.
PIXELS = {"filter_basis": "pixel"}
SQUARES = {"window_shape": "square"}
HEADS = {"num_heads": 2}
# The initial weights and scales of p8, whatever the window.
SMALL = {
    "window_initializer": keras.initializers.RandomNormal(stddev=0.5 / 8**0.5)
}
SCALE = {"scale": 1 / (4 * 8**0.5)}
SAME = {"padding": "same"}


def convolution(layer, *sizes, **options):
    """A layer whose filters alone turn, with options that both forms have."""
    return layer, sizes, SAME | options, PIXELS, 0.06


def windowed(most, layer, *sizes, **options):
    """A layer that attends to windows, with filters."""
    return layer, sizes, HEADS | options, PIXELS | SQUARES, most


def self_attention(most, layer, *sizes):
    """A layer that attends to windows, without filters."""
    return layer, sizes, HEADS | SCALE, SQUARES, most


# Each with its sizes, the options of both forms, those of the grid, and the
# largest error that is allowed: at least 1.6 times the largest of 15 draws of
# weights under the three backends.
LAYERS = {
    "lifting_conv": convolution(layers.LiftingConv2D, 8, 5),
    "group_conv": convolution(layers.GroupConv2D, 8, 5),
    "depthwise_conv": convolution(layers.GroupDepthwiseConv2D, 5),
    "separable_conv": convolution(layers.GroupSeparableConv2D, 8, 5),
    "attentive_lifting_conv": convolution(
        layers.AttentiveLiftingConv2D, 8, 5, attention_kernel_size=5
    ),
    "attentive_group_conv": convolution(
        layers.AttentiveGroupConv2D, 3, 5, attention_kernel_size=5
    ),
    "co_attentive_lifting_conv": convolution(
        layers.CoAttentiveLiftingConv2D, 8, 5
    ),
    "co_attentive_group_conv": convolution(layers.CoAttentiveGroupConv2D, 8, 5),
    "input_attention": (
        layers.InputAttention,
        (),
        {"attention_kernel_size": 5},
        PIXELS,
        0.01,
    ),
    "sasa": windowed(0.08, layers.StandAloneSelfAttention2D, 8, 5),
    "simple_asc": windowed(0.08, layers.SimpleAffineSelfConv2D, 8, 5, **SMALL),
    "asc": windowed(0.1, layers.AffineSelfConv2D, 8, 5, **SMALL),
    "acmix": windowed(0.05, layers.ACmix2D, 8, 3, 5),
    "lifting": self_attention(0.03, layers.LiftingSelfAttention2D, 8, 8),
    "group": self_attention(0.005, layers.GroupSelfAttention2D, 8, 8),
}


def smooth(rest):
    """Blurred noise `(1, SIZE, SIZE, ...)` that fades towards the border."""
    noise = np.random.default_rng(0).normal(size=(SIZE, SIZE, *rest))
    noise = ndimage.gaussian_filter(noise, 2, axes=(0, 1))
    radius = np.hypot(*(np.indices((SIZE, SIZE)) - SIZE // 2))
    fading = np.exp(-((radius / 10) ** 6))
    x = noise / noise.std() * fading.reshape(SIZE, SIZE, *[1] * len(rest))
    return x[None]


def first_turn(x, group):
    """`L_g` of images or feature maps by splines; `g` is element 1."""
    angle = 360 / group.rotations
    x = ndimage.rotate(x, angle, axes=(2, 1), reshape=False, order=5)
    return x[:, :, :, group.relative_table[1]] if x.ndim == 5 else x


def error(layer, x):
    """The largest difference over the largest output, within a disc."""
    group = layer.group
    y, moved = (
        as_array(layer(each.astype("float32")))
        for each in (x, first_turn(x, group))
    )
    inside = np.hypot(*(np.indices((SIZE, SIZE)) - SIZE // 2)) < 8
    difference = np.abs(first_turn(y, group) - moved)[:, inside].max()
    return difference / np.abs(y)[:, inside].max()


@pytest.mark.parametrize(
    "name", swept(LAYERS, "group_conv", "attentive_group_conv", "asc", "group")
)
def test_an_eighth_turn(name):
    layer, sizes, same, grid, most = LAYERS[name]
    x = smooth((1,) if "lifting" in name else (8, 3))
    found = []
    for options in ({}, grid):
        keras.utils.set_random_seed(0)
        made = layer(*sizes, group="p8", **same, **options)
        found.append(error(made, x))
    # The grid of pixels leaves an error, which is larger with the options of
    # the grid. By how much depends on the weights that a backend draws.
    assert 1e-4 < found[0] < most
    assert found[0] < 0.8 * found[1]


@pytest.mark.parametrize("group", ["p16", "p12m"])
def test_filters_of_three_pixels_on_other_groups(group):
    group = groups.get(group)
    x = smooth((group.order, 2))
    keras.utils.set_random_seed(0)
    layer = layers.GroupConv2D(4, 3, padding="same", group=group)
    assert 1e-4 < error(layer, x) < 0.05


@pytest.mark.slow
def test_attention_to_all_pixels():
    keras.utils.set_random_seed(0)
    layer = layers.GroupMultiHeadAttention2D(2, "p8")
    assert 1e-4 < error(layer, smooth((8, 4))) < 0.005
