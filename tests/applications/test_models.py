"""Every registered network: parameters, symmetry, training, files, errors."""

import re

import keras
import numpy as np
import pytest
from dataset_helpers import needs
from layer_contract import as_array
from layer_contract import GOLDEN

from keras_equiattn import applications
from keras_equiattn import groups
from keras_equiattn.applications import building
from keras_equiattn.applications import datasets
from keras_equiattn.applications import rotmnist
from keras_equiattn.applications import RotMNISTCNN
from keras_equiattn.testing import equivariance_error
from keras_equiattn.testing import relative_difference

PARAMETERS = {
    "rotmnist_z2cnn": 21_620,
    "rotmnist_p4cnn": 24_610,
    "rotmnist_p4cnn_big11": 29_051,
    "rotmnist_p4cnn_big15": 50_415,
    "rotmnist_p4cnn_big19": 77_539,
    "rotmnist_p4mcnn": 26_747,  # not in the papers
    "rotmnist_p8cnn": 26_747,  # not in the papers
}
GROUPS = {name: name.split("_")[1].removesuffix("cnn") for name in PARAMETERS}


def randomize(model):
    """Batch statistics and gains away from zero and one."""
    rng = np.random.default_rng(0)
    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            shape = layer.gamma.shape
            layer.set_weights(
                [
                    rng.uniform(0.5, 1.5, shape),
                    rng.uniform(-0.3, 0.3, shape),
                    rng.uniform(-0.3, 0.3, shape),
                    rng.uniform(0.5, 1.5, shape),
                ]
            )


@pytest.mark.once
def test_registry_is_complete():
    assert applications.list_models() == sorted(PARAMETERS)


@pytest.mark.once
@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name):
    model = applications.get_model(name)
    count = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    assert count == PARAMETERS[name]
    assert model.name == name
    assert model.output_shape == (None, 10)


@pytest.mark.parametrize("name", ["rotmnist_p4cnn", "rotmnist_p4mcnn"])
def test_invariance_at_full_size(name):
    model = applications.get_model(name, normalization=(0.13, 0.29))
    randomize(model)
    shape = (2, 28, 28, 1)
    assert equivariance_error(model, GROUPS[name], shape).max() < 1e-4
    # With batch statistics too; dropout would tell the turns apart.
    for layer in model.layers:
        if isinstance(layer, keras.layers.Dropout):
            layer.rate = 0.0
    errors = equivariance_error(
        lambda x: model(x, training=True), GROUPS[name], shape, elements=[1]
    )
    assert errors.max() < 1e-4
    y = as_array(model(np.random.default_rng(0).normal(size=shape)))
    assert relative_difference(y[:1], y[1:]) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("name", PARAMETERS)
def test_invariance_of_all(name):
    model = applications.get_model(name)
    randomize(model)
    group = groups.get(GROUPS[name])
    errors = equivariance_error(
        model, group, (2, 28, 28, 1), elements=group.grid_elements
    )
    assert errors.max() < 1e-4
    other = equivariance_error(model, "p4m", (2, 28, 28, 1))
    assert (other.max() > 1e-2) == (group.name != "p4m")


def test_one_step_of_fit_and_files(tmp_path):
    model = applications.get_model(
        "rotmnist_p4cnn", filters=2, classes=3, normalization=(0.1, 0.3)
    )
    model.compile(
        "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(4, 28, 28, 1)).astype("float32")
    before = as_array(model.get_layer("conv2").kernel).copy()
    history = model.fit(x, np.array([0, 1, 2, 0]), verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    assert np.abs(as_array(model.get_layer("conv2").kernel) - before).max() > 0

    expected = model.predict(x, verbose=0)
    model.save(tmp_path / "m.keras")
    revived = keras.saving.load_model(tmp_path / "m.keras", safe_mode=True)
    np.testing.assert_array_equal(revived.predict(x, verbose=0), expected)
    model.save_weights(tmp_path / "m.weights.h5")
    again = applications.get_model(
        "rotmnist_p4cnn",
        filters=2,
        classes=3,
        normalization=(0.1, 0.3),
        weights=tmp_path / "m.weights.h5",
    )
    np.testing.assert_array_equal(again.predict(x, verbose=0), expected)


def test_mixed_precision_returns_float32():
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = RotMNISTCNN(filters=2, classifier_activation="softmax")
    y = model(np.zeros((1, 28, 28, 1), "float32"))
    assert keras.backend.standardize_dtype(y.dtype) == "float32"
    assert model.get_layer("conv1").compute_dtype == "bfloat16"
    np.testing.assert_allclose(as_array(y).sum(), 1, rtol=1e-5)


def test_float64_is_kept():
    keras.config.set_dtype_policy("float64")
    assert RotMNISTCNN(filters=2).output.dtype == "float64"


@pytest.mark.once
def test_shipped_weights_expect_the_images_of_their_dataset():
    (shipped,) = rotmnist.SHIPPED["p4", 10].values()
    info = datasets.info("rot_mnist")
    channels = info.shape[-1]
    assert building.check_normalization(
        shipped.normalization, channels
    ) == building.check_normalization(info.normalization, channels)
    assert (shipped.input_shape, shipped.classes) == (info.shape, info.classes)


def test_normalization_is_the_first_layer():
    x = np.random.default_rng(0).uniform(size=(2, 28, 28, 3))
    x = x.astype("float32")
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    shape = (28, 28, 3)
    model = RotMNISTCNN("p4", None, 2, shape, normalization=(mean, std))
    plain = RotMNISTCNN("p4", None, 2, shape)
    plain.set_weights(model.get_weights())
    expected = as_array(plain((x - np.array(mean)) / np.array(std)))
    assert relative_difference(as_array(model(x)), expected) < 1e-5


@pytest.mark.once
@pytest.mark.parametrize(
    ("group", "width"),
    [("z2", 20), ("p4", 10), ("p4m", 7), ("p8", 7), ("p16m", 4), ("p2", 14)],
)
def test_group_width(group, width):
    assert building.group_width(20, groups.get(group)) == width
    assert building.group_width(1, groups.get(group), 3) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"group": "p3"}, "Unknown group 'p3'"),
        ({"attention": "full"}, r"`attention` must be None.*'full'"),
        ({"filters": 0}, "`filters` must be a positive integer.*0"),
        ({"classes": 1.5}, "`classes` must be a positive integer.*1.5"),
        ({"input_shape": (28, 28)}, r"must be \(height, width, channels\)"),
        ({"input_shape": (32, 32, 1)}, r"must be \(28, 28, channels\).*32"),
        ({"normalization": (0.1, 0.0)}, "`normalization` must be"),
        ({"normalization": ((0, 0), (1, 1))}, r"channel \(1\)"),
        ({"normalization": 3}, "`normalization` must be"),
        ({"input_shape": 28}, r"must be \(height, width, channels\).*28"),
        ({"input_shape": (28, 28, True)}, "positive integers.*True"),
        ({"normalization": ((0,), (1, 2))}, "`normalization` must be"),
        ({"weights": "imagenet"}, r"name of shipped weights \('rot_mnist'\)"),
        ({"weights": __file__}, r"a .weights.h5 or .keras file"),
        ({"weights": 3}, "`weights` of RotMNISTCNN must be.*3"),
        ({"classifier_activation": "no"}, "no"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        RotMNISTCNN(**arguments)


def test_unknown_name():
    with pytest.raises(ValueError, match="Did you mean 'rotmnist_p4cnn'"):
        applications.get_model("rotmnist_p4_cnn")
    with pytest.raises(ValueError, match="The models are: rotmnist_p4cnn,"):
        applications.get_model("resnet50")


def test_does_not_depend_on_the_configured_data_format():
    x = np.random.default_rng(0).uniform(size=(2, 28, 28, 1))
    model = RotMNISTCNN(filters=2)
    expected = as_array(model(x))
    keras.config.set_image_data_format("channels_first")
    other = RotMNISTCNN(filters=2)
    other.set_weights(model.get_weights())
    assert relative_difference(as_array(other(x)), expected) < 1e-6


def test_shipped_weights_give_the_same_logits_everywhere(request):
    """Committed logits of one backend, within 1e-4 of their size."""
    model = applications.get_model("rotmnist_p4cnn", weights="rot_mnist")
    values = GOLDEN / "rotmnist_p4cnn-rot_mnist.npz"
    if request.config.getoption("--update-golden"):
        images, labels = next(
            iter(datasets.load_pydataset("digits", "test", 16))
        )
        logits = as_array(model(images))
        np.savez_compressed(values, images=images, labels=labels, y=logits)
    with np.load(values) as arrays:
        logits = as_array(model(arrays["images"]))
        assert relative_difference(logits, arrays["y"]) < 1e-4
        # Digits of another collection, scanned at a quarter of the size.
        assert (logits.argmax(-1) == arrays["labels"]).mean() > 0.6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"classes": 3}, "trained with.*classes=10.*Received.*classes=3"),
        ({"input_shape": (28, 28, 3)}, r"trained with input_shape=\(28, 28, 1"),
        ({"filters": 11}, "none for this network"),
        ({"group": "z2"}, "none for this network"),
    ],
)
def test_shipped_weights_fit_what_they_were_trained_for(arguments, message):
    with pytest.raises(ValueError, match=message):
        RotMNISTCNN(**{"weights": "rot_mnist", **arguments})


@needs("rot_mnist")
def test_shipped_weights_on_all_test_digits():
    """The error on the model card, on 50,000 digits."""
    card = building.WEIGHTS_FOLDER / "rotmnist_p4cnn-rot_mnist.md"
    (error,) = re.findall(r"\| test error \| ([\d.]+) %", card.read_text())
    model = applications.get_model("rotmnist_p4cnn", weights="rot_mnist")
    test = datasets.load_pydataset("rot_mnist", "test", 500)
    assert sum(len(labels) for _, labels in test) == 50_000
    right = sum(
        (model.predict_on_batch(images).argmax(-1) == labels).sum()
        for images, labels in test
    )
    np.testing.assert_allclose(100 - right / 500, float(error), atol=0.01)
