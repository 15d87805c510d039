"""Training in half precision, beside that of a plain network."""

import keras
import numpy as np
import pytest

from keras_equiattn import layers
from keras_equiattn.applications.data import datasets

MIXERS = {
    "plain": lambda: keras.layers.Conv2D(16, 3, padding="same"),
    "sasa": lambda: layers.StandAloneSelfAttention2D(16, 5, 2, group="z2"),
    "asc": lambda: layers.AffineSelfConv2D(16, 5, 2, group="z2"),
    "acmix": lambda: layers.ACmix2D(16, attention_kernel_size=5, num_heads=2),
}


def losses(name, policy, seed, steps=40):
    """Of a small network on digits, in steps of 32 images."""
    keras.utils.set_random_seed(seed)
    keras.config.set_dtype_policy(policy)
    model = keras.Sequential(
        [
            keras.layers.Conv2D(16, 3, strides=2, padding="same"),
            keras.layers.BatchNormalization(),
            MIXERS[name](),
            keras.layers.BatchNormalization(),
            keras.layers.Activation("relu"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(10, dtype="float32"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss, jit_compile=False)
    images, labels = arrays()
    found = []
    for step in range(steps):
        part = slice(32 * step, 32 * step + 32)
        model.reset_metrics()  # or losses are means of all steps so far
        found.append(float(model.train_on_batch(images[part], labels[part])))
    return np.array(found)


def arrays():
    """The first digits, upright."""
    pieces = datasets.load_pydataset("digits")
    pairs = [pieces[n][:2] for n in range(len(pieces))]
    images, labels = (np.concatenate(x) for x in zip(*pairs, strict=True))
    repeats = -(-40 * 32 // len(images))
    return np.tile(images, (repeats, 1, 1, 1)), np.tile(labels, repeats)


@pytest.mark.slow
@pytest.mark.every_backend
def test_losses_agree_with_float32_as_those_of_a_plain_network():
    """Layers with attention have three to four linear maps for one of its.

    A single run says little: its difference depends on the first weights.
    """
    differences = {
        name: np.mean(
            [
                np.abs(
                    losses(name, "mixed_bfloat16", seed)
                    - losses(name, "float32", seed)
                )
                for seed in range(3)
            ]
        )
        for name in MIXERS
    }
    plain = differences.pop("plain")
    assert 0 < plain < 0.1
    assert max(differences.values()) < 2 * plain, differences
