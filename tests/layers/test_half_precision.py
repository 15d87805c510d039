"""Training in half precision, beside that of a plain network."""

import functools

import keras
import numpy as np
import pytest

from keras_equiattn import layers
from keras_equiattn.applications.data import datasets

MIXERS = {
    # As many linear maps as attention has for queries, keys, values and output.
    "plain": lambda: keras.Sequential(
        [keras.layers.Conv2D(16, 3, padding="same") for _ in range(4)]
    ),
    "sasa": lambda: layers.StandAloneSelfAttention2D(16, 5, 2, group="z2"),
    "asc": lambda: layers.AffineSelfConv2D(16, 5, 2, group="z2"),
    "acmix": lambda: layers.ACmix2D(16, attention_kernel_size=5, num_heads=2),
    "full attention": lambda: layers.AttentiveGroupConv2D(
        4, 3, group="p4", padding="same"
    ),
    "gsa": lambda: layers.GroupSelfAttention2D(4, 4, 2, 5, "p4"),
}
ON_A_GROUP = ("full attention", "gsa")
SEEDS = 3
STEPS = 12


def network(name):
    """A small network for 28 x 28 pixels, with one such layer."""
    mixer = [MIXERS[name]()]
    if name in ON_A_GROUP:
        shapes = (7, 7, 4, 4), (7, 7, 16)
        before, after = (keras.layers.Reshape(shape) for shape in shapes)
        mixer = [before, *mixer, after]
    model = keras.Sequential(
        [
            keras.layers.Conv2D(16, 5, strides=4, padding="same"),
            keras.layers.BatchNormalization(),
            *mixer,
            keras.layers.BatchNormalization(),
            keras.layers.Activation("relu"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(10, dtype="float32"),
        ]
    )
    model.build((None, 28, 28, 1))
    return model


@functools.cache
def losses(name, policy):
    """`(seed, step)`: the losses of steps with 32 digits each."""
    keras.config.set_dtype_policy(policy)
    model = network(name)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Keras leaves out steps whose gradients overflow in float16, which one of
    # these does with the usual scale of 2**15.
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(1e-3), initial_scale=2**10
    )
    # One model for all seeds: it is compiled once.
    model.compile(optimizer, loss)
    model.optimizer.build(model.trainable_variables)
    # Copies: PyTorch trains in place, and JAX deletes what it has trained.
    beginning = [np.array(v.numpy()) for v in model.optimizer.variables]
    images, labels = arrays()
    found = np.zeros((SEEDS, STEPS))
    for seed in range(SEEDS):
        keras.utils.set_random_seed(seed)
        model.set_weights(network(name).get_weights())
        for variable, value in zip(
            model.optimizer.variables, beginning, strict=True
        ):
            variable.assign(value)
        for step in range(STEPS):
            part = slice(32 * step, 32 * step + 32)
            model.reset_metrics()  # or losses are means of all steps so far
            found[seed, step] = model.train_on_batch(images[part], labels[part])
    return found


def arrays():
    """Training digits at four angles, repeated to suffice for all steps."""
    pieces = datasets.load_pydataset("digits")
    pairs = [pieces[n][:2] for n in range(len(pieces))]
    images, labels = (np.concatenate(x) for x in zip(*pairs, strict=True))
    repeats = -(-STEPS * 32 // len(images))
    return np.tile(images, (repeats, 1, 1, 1)), np.tile(labels, repeats)


@pytest.mark.slow
@pytest.mark.every_backend
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_losses_agree_with_float32_as_those_of_a_plain_network(policy):
    """The plain network has as many linear maps, which all round.

    A single run says little: its difference depends on the first weights. After
    many steps it says nothing, since training amplifies whatever differs.
    """
    differences = {
        name: np.abs(losses(name, policy) - losses(name, "float32")).mean()
        for name in MIXERS
    }
    plain = differences.pop("plain")
    assert 0 < plain < 0.1
    assert max(differences.values()) < 2 * plain, differences
