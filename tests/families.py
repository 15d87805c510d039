"""One small layer of each family, and the loss that the tests compare."""

import keras
import numpy as np

from keras_equiattn import layers

SIDE = 4
# For each family, what makes the layer, and the shape of its input without the
# batch.
FAMILIES = {
    "sasa": (
        lambda: layers.StandAloneSelfAttention2D(
            4, kernel_size=3, num_heads=2, group="p2"
        ),
        (SIDE, SIDE, 2, 2),
    ),
    "asc": (
        lambda: layers.AffineSelfConv2D(
            4, kernel_size=3, num_heads=2, group="p2"
        ),
        (SIDE, SIDE, 2, 2),
    ),
    "squeeze": (
        lambda: layers.SqueezeExcite(group="p2", reduction_ratio=1),
        (SIDE, SIDE, 2, 2),
    ),
    "full": (
        lambda: layers.AttentiveGroupConv2D(
            2, 3, group="p2", attention_kernel_size=3, reduction_ratio=1
        ),
        (SIDE, SIDE, 2, 3),
    ),
    "input": (
        lambda: layers.InputAttention(group="p2", attention_kernel_size=3),
        (SIDE, SIDE, 2, 2),
    ),
    "lifting": (
        lambda: layers.LiftingSelfAttention2D(2, 2, 1, 3, "p2"),
        (SIDE, SIDE, 2),
    ),
    "gsa": (
        lambda: layers.GroupSelfAttention2D(2, 3, 1, 3, "p2"),
        (SIDE, SIDE, 2, 2),
    ),
    "gsa_global": (
        lambda: layers.GroupSelfAttention2D(2, 3, 1, None, "p2"),
        (SIDE, SIDE, 2, 2),
    ),
    "dense": (
        lambda: layers.GroupDense(2, "p2", "irreps", input_activation="gelu"),
        (SIDE, SIDE, 2, 2),
    ),
    "multi_head": (
        lambda: layers.GroupMultiHeadAttention2D(1, "p2", "irreps"),
        (SIDE, SIDE, 2, 2),
    ),
    "acmix": (
        lambda: layers.ACmix2D(
            4, num_heads=2, attention_kernel_size=3, group="p2"
        ),
        (SIDE, SIDE, 2, 2),
    ),
    "acmix_window": (
        lambda: layers.WindowACmix2D(4, 2, window_size=2),
        (SIDE, SIDE, 4),
    ),
    "acmix_patchwise": (
        lambda: layers.PatchwiseACmix2D(
            4, attention_kernel_size=3, share=2, key_filters=2
        ),
        (SIDE, SIDE, 4),
    ),
    "acmix_reduction": (
        lambda: layers.SpatialReductionACmix2D(4, 2),
        (SIDE, SIDE, 4),
    ),
}


def build(name):
    """The layer, with weights that are the same in every process."""
    make, shape = FAMILIES[name]
    layer = make()
    layer.build((None, *shape))
    rng = np.random.default_rng(0)
    for variable in layer.trainable_variables:
        variable.assign(rng.normal(size=variable.shape) / 2)
    return layer


def images(name, batch=8):
    """The same images in every process."""
    shape = (batch, *FAMILIES[name][1])
    return np.random.default_rng(1).normal(size=shape).astype("float32")


def loss_of_images(y):
    """A number for each image."""
    axes = tuple(range(1, len(y.shape)))
    return keras.ops.sum(keras.ops.square(y), axis=axes)


def loss(y):
    """The mean over the images."""
    return keras.ops.mean(loss_of_images(y))
