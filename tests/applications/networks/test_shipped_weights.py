"""The weights that come with the package."""

import re

import numpy as np
import pytest
from dataset_helpers import needs
from layer_contract import as_array
from layer_contract import call_of
from layer_contract import GOLDEN

from keras_equiattn import applications
from keras_equiattn.applications import presets
from keras_equiattn.applications import RotMNISTCNN
from keras_equiattn.applications.data import datasets
from keras_equiattn.applications.networks import rotmnist
from keras_equiattn.applications.networks.common import ends
from keras_equiattn.testing import relative_difference

SHIPPED = pytest.mark.parametrize("name", presets.list_presets())


@pytest.mark.once
@pytest.mark.parametrize(
    "shipped",
    [
        weights
        for networks in rotmnist.SHIPPED.values()
        for by_name in networks.values()
        for weights in by_name.values()
    ],
    ids=lambda weights: weights.preset,
)
def test_shipped_weights_expect_the_images_of_their_dataset(shipped):
    assert shipped.path.is_file()
    info = datasets.info("rot_mnist")
    channels = info.shape[-1]
    assert ends.check_normalization(
        shipped.normalization, channels
    ) == ends.check_normalization(info.normalization, channels)
    assert (shipped.input_shape, shipped.classes) == (info.shape, info.classes)


@SHIPPED
@pytest.mark.every_backend
def test_shipped_weights_give_the_same_logits_everywhere(name, request):
    """Committed logits of one backend, within 1e-4 of their size."""
    model = applications.get_model(name, weights="rot_mnist")
    values = GOLDEN / f"{name}-rot_mnist.npz"
    if request.config.getoption("--update-golden"):
        images, labels = next(
            iter(datasets.load_pydataset("digits", "test", 16))
        )
        logits = as_array(model(images))
        np.savez_compressed(values, images=images, labels=labels, y=logits)
    with np.load(values) as arrays:
        logits = as_array(call_of(model)(arrays["images"]))
        assert relative_difference(logits, arrays["y"]) < 1e-4
        # Digits of another collection, scanned at a quarter of the size.
        assert (logits.argmax(-1) == arrays["labels"]).mean() > 0.6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"classes": 3}, "trained with.*classes=10.*Received.*classes=3"),
        ({"input_shape": (28, 28, 3)}, r"trained with input_shape=\(28, 28, 1"),
        ({"filters": 11}, r"none for these arguments.*list_presets\(\)"),
        ({"group": "z2"}, "none for these arguments"),
        ({"attention": "channel"}, "none for these arguments"),
        ({"weights": [1]}, r"the name of shipped.*Received: \[1\]"),
        ({"downsampling": "strided"}, "none for these arguments"),
        ({"kernel_size": 5}, "none for these arguments"),
        ({"kernel_size": 7}, "none for these arguments"),
        ({"activation": "silu"}, "none for these arguments"),
        ({"group": "p16"}, "`applications.from_preset` builds"),
        ({"group": "p8", "activation": "relu"}, "none for these arguments"),
        ({"group": "p8", "downsampling": "exact"}, "none for these arguments"),
        (
            {"attention": "input", "dropout_after_attention": True},
            "none for these arguments",
        ),
    ],
)
def test_shipped_weights_fit_what_they_were_trained_for(arguments, message):
    with pytest.raises(ValueError, match=message):
        RotMNISTCNN(**{"weights": "rot_mnist", **arguments})


@needs("rot_mnist")
@SHIPPED
def test_shipped_weights_on_all_test_digits(name):
    """The error on the model card, on 50,000 digits."""
    card = presets.SHIPPED / name / presets.CARD
    (error,) = re.findall(r"\| test error \| ([\d.]+) %", card.read_text())
    model = applications.get_model(name, weights="rot_mnist")
    test = datasets.load_pydataset("rot_mnist", "test", 500)
    assert sum(len(labels) for _, labels in test) == 50_000
    right = sum(
        (model.predict_on_batch(images).argmax(-1) == labels).sum()
        for images, labels in test
    )
    np.testing.assert_allclose(100 - right / 500, float(error), atol=0.01)
