"""Why networks are not equivariant: broken ones, each with its cause."""

import re

import keras
import numpy as np
import pytest

from keras_equiattn import equivariance_report
from keras_equiattn import groups
from keras_equiattn import layers

SIDE = 8


class Positions(keras.layers.Layer):
    """Adds a trained image, as transformers do."""

    def build(self, shape):
        self.embedding = self.add_weight(shape=shape[1:], name="embedding")

    def call(self, inputs):
        return inputs + self.embedding


class PoseWeights(keras.layers.Layer):
    """Weighs the poses."""

    def build(self, shape):
        self.weight = self.add_weight(shape=(shape[3], 1), name="weight")

    def call(self, inputs):
        return inputs * self.weight


class Ramp(keras.layers.Layer):
    """Adds a ramp that no attribute tells of."""

    def call(self, inputs):
        ramp = np.arange(SIDE, dtype="float32")[:, None, None]
        return inputs + keras.ops.convert_to_tensor(ramp)


def network(*others, lifted=True, group="p4", size=SIDE):
    """Layers in a row, on a feature map on the group or on the image."""
    x = inputs = keras.Input((size, size, 2))
    if lifted:
        x = layers.LiftingConv2D(3, 3, padding="same", group=group)(x)
    for layer in others:
        x = layer(x)
    # A mean of what is linear would hide that pixels are not where they were.
    if len(x.shape) == 4:
        x = layers.LiftingConv2D(3, 3, group=group, name="after")(x)
    if len(x.shape) == 5:
        x = keras.layers.ReLU(name="relu")(x)
        x = keras.layers.GlobalAveragePooling3D(name="pool")(x)
    model = keras.Model(inputs, keras.layers.Dense(2, name="head")(x))
    rng = np.random.default_rng(0)
    for variable in model.trainable_variables:
        variable.assign(rng.normal(size=variable.shape))
    return model


# By name: the network, and words of the reason and of the advice.
BROKEN = {
    "plain convolution": (
        lambda: network(keras.layers.Conv2D(4, 3, name="it"), lifted=False),
        ("filters do not turn", "LiftingConv2D"),
    ),
    "convolution of volumes": (
        lambda: network(keras.layers.Conv3D(4, 3, padding="same", name="it")),
        ("filters do not turn", "GroupConv2D"),
    ),
    "transposed convolution of volumes": (
        lambda: network(
            keras.layers.Conv3DTranspose(4, (3, 3, 1), (2, 2, 1), name="it")
        ),
        ("filters do not turn", "GroupConv2DTranspose"),
    ),
    "pooling of an odd size": (
        lambda: network(
            keras.layers.MaxPooling3D((2, 2, 1), name="it"), size=7
        ),
        (r"windows of \(2, 2\) pixels .*\(7, 7\)", "another size"),
    ),
    "strides on an even size": (
        lambda: network(
            layers.GroupConv2D(4, 3, 2, padding="same", exact=False, name="it")
        ),
        (r"strides \(2, 2\) and padding 'same' .*\(8, 8\)", "another size"),
    ),
    "even window": (
        lambda: network(
            layers.GroupConv2D(4, 2, padding="same", exact=False, name="it")
        ),
        (r"windows of \(2, 2\) pixels", "another size"),
    ),
    "flatten": (
        lambda: network(layers.GroupPooling(), keras.layers.Flatten(name="it")),
        ("place of its own", "GlobalAveragePooling2D"),
    ),
    "positions": (
        lambda: network(Positions(name="it"), lifted=False),
        (r"'embedding' of shape \(8, 8, 2\) has an entry for each pixel", ""),
    ),
    "slope of each pixel": (
        lambda: network(keras.layers.PReLU(name="it")),
        ("has an entry for each pixel", "shared_axes"),
    ),
    "statistics of each pose": (
        lambda: network(keras.layers.BatchNormalization(axis=3, name="it")),
        (r"of shape \(4,\) has an entry for each pose", "over the channels"),
    ),
    "weights of each pose": (
        lambda: network(PoseWeights(name="it")),
        (r"'weight' of shape \(4, 1\) has an entry for each pose", "Share"),
    ),
    "padding at one side": (
        lambda: network(
            keras.layers.ZeroPadding2D(((0, 1), (0, 1)), name="it"),
            lifted=False,
        ),
        (r"\(\(0, 1\), \(0, 1\)\) pixels at the sides", "SpatialPadding2D"),
    ),
    "another group": (
        lambda: network(
            layers.LiftingConv2D(3, 3, group="p2", name="it"), lifted=False
        ),
        ("is of the group 'p2'", "group='p4'"),
    ),
    "a layer of one's own": (
        lambda: network(Ramp(name="it"), lifted=False),
        ("`Ramp` is not known", "equivariance_error"),
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_networks(name):
    build, (reason, advice) = BROKEN[name]
    model = build()
    report = equivariance_report(model, "p4", (2, *model.input_shape[1:]))
    assert report.culprit == "it", str(report)
    assert report.error > 1e-3
    assert re.search(reason, report.reason), report.reason
    assert re.search(advice, report.advice), report.advice
    names = [x.name for x in report.layers]
    before = report.layers[: names.index("it")]
    assert all(x.error < 1e-4 for x in before)
    assert str(report).count("<--") == 1


@pytest.mark.parametrize("group", ["p4", "p4m", "p8"])
def test_sound_networks(group):
    model = network(
        keras.layers.BatchNormalization(),
        layers.SpatialPooling2D(2, group=group),
        layers.GroupConv2D(4, 3, group=group, activation="relu"),
        group=group,
    )
    report = equivariance_report(model, group, (2, SIDE, SIDE, 2))
    assert report.culprit is None
    assert report.reason == report.advice == ""
    assert report.error < 1e-5
    assert [x.kind for x in report.layers] == [
        *("LiftingConv2D", "BatchNormalization", "SpatialPooling2D"),
        *("GroupConv2D", "ReLU", "GlobalAveragePooling3D", "Dense"),
    ]
    order = groups.get(group).order
    assert report.layers[0].shape == (None, SIDE, SIDE, order, 3)
    tried = "the elements 0, 2, 4, 6 of " if group == "p8" else ""
    assert f"is equivariant under {tried}'{group}'" in str(report)
    assert ("were not tried" in str(report)) == (group == "p8")


@pytest.mark.every_backend
def test_models_within_models():
    inner = keras.Sequential(
        [
            keras.Input((SIDE, SIDE, 4, 3)),
            keras.layers.ReLU(name="relu"),
            keras.layers.Conv3D(4, 3, name="conv"),
        ],
        name="block",
    )
    report = equivariance_report(network(inner), "p4", (2, SIDE, SIDE, 2))
    assert report.culprit == "block/conv"
    names = [x.name for x in report.layers]
    assert names.index("block/conv") < names.index("block")
    assert "GroupConv2D" in report.advice


def test_random_numbers_in_training():
    model = network(keras.layers.Dropout(0.5, name="it", seed=1))
    shape = (2, SIDE, SIDE, 2)
    assert equivariance_report(model, "p4", shape).culprit is None
    report = equivariance_report(model, "p4", shape, training=True)
    assert report.culprit == "it"
    assert "random numbers" in report.reason


def test_turned_outputs_of_another_shape():
    """Quarter turns of what is not square."""
    crop = keras.layers.Cropping2D(((1, 1), (2, 2)), name="crop")
    model = network(crop, lifted=False)
    report = equivariance_report(model, "p4", (2, SIDE, SIDE, 2))
    assert report.culprit == "crop"
    assert report.layers[0].error == float("inf")
    assert "SpatialPadding2D" in report.advice


@pytest.mark.once
def test_bad_arguments():
    model = network()
    with pytest.raises(ValueError, match="functional or Sequential"):
        equivariance_report(keras.layers.Dense(2), "p4", (2, 8, 8, 2))
    several = keras.Model([*model.inputs, keras.Input((3,))], model.outputs)
    with pytest.raises(ValueError, match="has one input"):
        equivariance_report(several, "p4", (2, 8, 8, 2))
    with pytest.raises(ValueError, match="rank 4"):
        equivariance_report(model, "p4", (2, 8))
