"""What the tests of networks share."""

import os
import subprocess
import sys

import keras
import numpy as np
from layer_contract import as_array

from keras_equiattn.applications.training import reporting
from keras_equiattn.testing import equivariance_error
from keras_equiattn.testing import relative_difference


def randomize(model):
    """Draws batch statistics, gains and kernels; attention becomes large.

    The variance is about the same in all layers. With the initial weights,
    scales depend on batch statistics, without which images would not matter to
    All-CNN.
    """
    rng = np.random.default_rng(0)
    # The last convolution of a residual block.
    bottleneck = any(x.name.endswith("_conv3") for x in model.layers)
    last = "_conv3" if bottleneck else "_conv2"
    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            shape = layer.gamma.shape
            layer.set_weights(
                [
                    # Above one on average, since attention takes some away.
                    rng.uniform(0.8, 1.8, shape),
                    rng.uniform(-0.3, 0.3, shape),
                    rng.uniform(-0.3, 0.3, shape),
                    rng.uniform(0.5, 1.5, shape),
                ]
            )
            continue
        # The branches of residual networks must stay small, or 27 blocks of
        # attention magnify the rounding of the first.
        gain = 0.02 if layer.name.endswith(last) else 1.0
        for variable in layer.trainable_variables:
            deviation = gain * np.sqrt(2 / np.prod(variable.shape[:-1]))
            variable.assign(rng.normal(0, deviation, variable.shape))


def draw(model, small=()):
    """Draws all weights so that no scale grows and every layer matters.

    Weights whose name is in `small` have a standard deviation of 0.2.
    """
    rng = np.random.default_rng(0)
    for variable in model.weights:
        values = rng.normal(size=variable.shape)
        if variable.name in small:
            values *= 0.2
        elif variable.name.endswith("variance"):
            values = rng.uniform(0.2, 1.0, variable.shape)
        elif "gamma" in variable.name or "rate" in variable.name:
            values = 1 + 0.2 * values
        elif len(variable.shape) > 1:
            values /= np.sqrt(np.prod(variable.shape[:-1]))
        variable.assign(values)


def share_weights(source, *models):
    """Copies the weights of `source` to models, by their paths."""
    found = {variable.path: variable for variable in source.weights}
    for model in models:
        for variable in model.weights:
            # A copy: under JAX, predictions may donate the buffers of weights.
            variable.assign(as_array(found[variable.path]))


def weights_below(weights, name):
    """The weights of a layer, by their names in it."""
    return {
        path.removeprefix(f"{name}/"): value
        for path, value in weights.items()
        if path.startswith(f"{name}/")
    }


def images(shape):
    """Random images of large patches, whose global means differ."""
    batch, height, width, channels = shape
    patch = -(-max(height, width) // 4)
    values = np.random.default_rng(1).normal(size=(batch, 4, 4, channels))
    values *= np.arange(1, batch + 1)[:, None, None, None]  # contrast
    values = values.repeat(patch, axis=1).repeat(patch, axis=2)
    return values[:, :height, :width].astype("float32")


def invariance_error(model, group=None, elements=None):
    """Worst relative change of the logits; one compilation per model."""
    return equivariance_error(
        lambda x: model.predict_on_batch(as_array(x)),
        group or reporting.group_of(model),
        images((2, *model.input_shape[1:])),
        elements=elements,
    ).max()


def assert_images_matter(model):
    y = model.predict_on_batch(images((2, *model.input_shape[1:])))
    assert relative_difference(y[:1], y[1:]) > 1e-2


# All that a program which loads a network has to import.
LOADING = """
import sys

import keras
import numpy as np

import keras_equiattn.applications

folder = sys.argv[1]
model = keras.saving.load_model(f"{folder}/model.keras")
np.save(f"{folder}/y.npy", model.predict(np.load(f"{folder}/x.npy")))
"""


def assert_another_process_loads(model, x, folder):
    """A file of the model holds all that a new process needs."""
    model.save(folder / "model.keras")
    np.save(folder / "x.npy", x)
    environment = {**os.environ, "KERAS_BACKEND": keras.backend.backend()}
    process = subprocess.run(
        [sys.executable, "-c", LOADING, folder],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert process.returncode == 0, process.stderr
    found = np.load(folder / "y.npy")
    expected = model.predict(x, verbose=0)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def unmoved_by_a_step(model, x, labels):
    """Paths of the weights that a step of training leaves as they were.

    Rounding also moves some weights that no output depends on.
    """
    # A large rate: a small step of a gain of one is lost in its rounding.
    model.compile(
        keras.optimizers.SGD(1.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    before = [as_array(v).copy() for v in model.weights]
    assert np.isfinite(model.train_on_batch(x, labels))
    return [
        variable.path
        for variable, start in zip(model.weights, before, strict=True)
        if np.array_equal(as_array(variable), start)
    ]


def assert_any_size(build):
    """A network for images of any size agrees with one for each size.

    Args:
        build: takes `input_shape`, returns a network with maps as outputs.
    """
    model = build((None, None, 3))
    for level in model.outputs:
        assert level.shape[1:3] == (None, None)
    for size in ((33, 40), (17, 16)):
        known = build((*size, 3))
        known.set_weights(model.get_weights())
        x = images((2, *size, 3))
        expected = known.predict(x, verbose=0)
        found = model.predict(x, verbose=0)
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def assert_ends_for_any_size(network, pooling, width):
    """Output shapes without the top, with pooling or not, and with it."""
    options = {"input_shape": (None, None, 3), "pooling": pooling}
    space = () if pooling else (None, None)
    model = network(include_top=False, **options)
    assert model.output_shape == (None, *space, width)
    model = network(input_shape=(None, None, 3), classes=3)
    assert model.output_shape == (None, 3)


def assert_agrees(model, levels, x, logits, maps):
    """A network and its levels give what an oracle does.

    Args:
        model: the network with its top.
        levels: the same with `features_only=True`; gets the weights.
        x: images whose logits differ.
        logits: the output of the oracle.
        maps: the feature maps of the oracle, one for each level.
    """
    found = model.predict(x, verbose=0)
    assert relative_difference(found[:1], found[1:]) > 1e-2
    assert relative_difference(found, logits) < 1e-4
    share_weights(model, levels)
    for level, expected in zip(levels.predict(x, verbose=0), maps, strict=True):
        assert level.shape == expected.shape
        assert relative_difference(level, expected) < 1e-4


def assert_weights_of_a_classifier_load(network, folder, **options):
    """They load without the classifier, and into the network of levels.

    Args:
        network: takes the arguments of the networks for ImageNet.
        folder: where the file goes.
        **options: for all three networks; `classes` for the classifier.
    """
    classes = options.pop("classes", 1000)
    model = network(classes=classes, **options)
    draw(model)
    path = folder / "classifier.weights.h5"
    model.save_weights(path)
    expected = {variable.path: as_array(variable) for variable in model.weights}
    top = {"logits/kernel", "logits/bias"}
    for ends in ({}, {"features_only": True}):
        other = network(False, weights=path, **ends, **options)
        found = {v.path: as_array(v) for v in other.weights}
        assert set(found) == set(expected) - top
        for name, values in found.items():
            np.testing.assert_array_equal(values, expected[name], name)


def assert_files_load(build, model, x, folder):
    """The outputs survive both kinds of files.

    Args:
        build: takes `weights`, and builds the same network.
        model: the network.
        x: images.
        folder: where the files go.
    """
    expected = model.predict(x, verbose=0)
    path = folder / "model.weights.h5"
    model.save_weights(path)
    model.save(folder / "model.keras")
    for other in (
        build(weights=path),
        keras.saving.load_model(folder / "model.keras", safe_mode=True),
    ):
        np.testing.assert_array_equal(other.predict(x, verbose=0), expected)


def assert_half_precision(build, x, mixer):
    """Layers compute in half precision, and logits are float32."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = build()
    assert model.get_layer(mixer).compute_dtype == "bfloat16"
    y = model.predict(x, verbose=0)
    assert y.dtype == "float32"
    assert np.isfinite(y).all()
