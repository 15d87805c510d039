"""What the tests of the datasets share."""

import keras
import numpy as np
import pytest

from keras_equiattn.applications.data import datasets
from keras_equiattn.applications.data.sources import access
from keras_equiattn.applications.data.sources import catalogue

once = pytest.mark.once
DATA_DIR = catalogue.resolve_data_dir(None)
LOADERS = {"tf.data": "load", "PyDataset": "load_pydataset"}


def needs(name):
    """Marks a test of real data, which runs where the data is."""

    def mark(test):
        state = access.state(name, DATA_DIR)
        test = pytest.mark.skipif(
            not state.startswith("prepared"), reason=f"{name} is {state}"
        )(test)
        return pytest.mark.slow(once(test))

    return mark


def get_loader(pipeline):
    """The function that loads through `pipeline`."""
    if pipeline == "tf.data":
        pytest.importorskip("tensorflow")
    return getattr(datasets, LOADERS[pipeline])


def numpy_batches(dataset):
    """One iteration over a dataset of either pipeline, as arrays."""
    return [tuple(np.asarray(part) for part in batch) for batch in dataset]


def assert_equal(actual, expected):
    """Two lists of batches are the same, bit for bit."""
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        for part, reference in zip(one, other, strict=True):
            assert part.dtype == reference.dtype
            np.testing.assert_array_equal(part, reference)


def random_arrays(count, shape=(6, 5, 2), seed=0):
    rng = np.random.default_rng(seed)
    images = rng.integers(1, 256, (count, *shape)).astype("uint8")
    return images, np.arange(count, dtype="int32")


class Spy(keras.Model):
    """Keeps every batch that `fit` trains on."""

    def train_step(self, *args):
        batch = [keras.ops.convert_to_numpy(part) for part in args[-1]]
        self.seen.append(tuple(batch))
        return super().train_step(*args)


def make_spy(shape=(28, 28, 1)):
    inputs = keras.Input(shape)
    means = keras.layers.GlobalAveragePooling2D()(inputs)
    outputs = keras.layers.Dense(10)(means)
    model = Spy(inputs, outputs)
    model.seen = []
    model.compile(
        "sgd",
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        run_eagerly=True,
    )
    return model
