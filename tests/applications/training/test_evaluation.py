"""What is measured on the test set when a run is over."""

import types

import keras
import numpy as np
import pytest

from keras_equiattn.applications.data import datasets
from keras_equiattn.applications.training import run
from keras_equiattn.layers import GroupPooling
from keras_equiattn.layers import LiftingConv2D


def data_of(images, labels, classes):
    test = datasets.ArrayDataset(datasets.Batches(images, labels, 4))
    info = types.SimpleNamespace(shape=images.shape[1:], classes=classes)
    return run.Data(info, None, None, test, "PyDataset", 4)


def images(*shape):
    return np.random.default_rng(0).integers(0, 256, shape).astype("uint8")


def network(group, shape):
    inputs = keras.Input(shape)
    if group:
        x = LiftingConv2D(4, 3, group=group, activation="relu")(inputs)
        x = keras.layers.GlobalMaxPooling2D()(GroupPooling()(x))
    else:
        x = keras.layers.Conv2D(4, 3)(inputs)
        x = keras.layers.Flatten()(x)
    return keras.Model(inputs, keras.layers.Dense(2)(x))


@pytest.mark.parametrize(
    ("group", "name", "elements"),
    [("p4", "p4", 4), ("p4m", "p4m", 8), ("p8", "p8", 4), (None, "p4", 4)],
)
def test_accuracy_of_poses(group, name, elements):
    x, y = images(10, 5, 5, 1), np.arange(10) % 2
    model = network(group, (5, 5, 1))
    found = run.accuracy_of_poses(model, data_of(x, y, 2), count=8)
    assert (found["group"], found["images"]) == (name, 8)
    assert len(found["elements"]) == len(found["accuracy"]) == elements
    expected = []
    for element in found["elements"][: 4 if group != "p8" else 1]:
        turned = np.rot90(x[:8], element % 4, (1, 2)) / np.float32(255)
        scores = model.predict_on_batch(np.ascontiguousarray(turned))
        expected.append((scores.argmax(1) == y[:8]).mean())
    np.testing.assert_allclose(found["accuracy"][: len(expected)], expected)
    if group:
        assert len(set(found["accuracy"])) == 1


def test_images_that_have_no_poses():
    x, y = images(4, 5, 6, 1), np.zeros(4, int)
    model = network(None, (5, 6, 1))
    assert run.accuracy_of_poses(model, data_of(x, y, 2)) is None


@pytest.mark.parametrize(
    ("labels", "expected"),
    [([0, 0, 1, 1], 1.0), ([1, 0, 1, 0], 0.25), ([1, 1, 1, 1], None)],
)
def test_area_under_the_curve(labels, expected):
    """The brighter an image, the likelier it is of class 1."""
    x = np.full((4, 2, 2, 1), 255, "uint8")
    x[:3] = np.array([10, 20, 30], "uint8")[:, None, None, None]
    inputs = keras.Input((2, 2, 1))
    scores = keras.layers.GlobalAveragePooling2D()(inputs)
    scores = keras.layers.Concatenate()([-scores, scores])
    model = keras.Model(inputs, scores)
    batches = run._batches(data_of(x, np.array(labels), 2).test)
    assert run._auc(model, batches) == expected
