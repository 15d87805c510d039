"""Self-attention networks with ACmix."""

import functools

import numpy as np
import oracles
import pytest
from layer_contract import as_array
from network_helpers import assert_agrees
from network_helpers import assert_any_size
from network_helpers import assert_ends_for_any_size
from network_helpers import assert_files_load
from network_helpers import assert_half_precision
from network_helpers import assert_weights_of_a_classifier_load
from network_helpers import draw
from network_helpers import images
from network_helpers import unmoved_by_a_step
from network_helpers import weights_below

from keras_equiattn.applications import ACmixSAN10
from keras_equiattn.applications.networks import acmix_san
from keras_equiattn.applications.networks.common import imagenet

WIDTHS = (16, 16, 16, 32, 32)
SMALL = {"stem": "cifar", "input_shape": (9, 10, 3), "classes": 3}


@pytest.fixture
def small(monkeypatch):
    """Narrow, two blocks, and windows that compile faster."""
    monkeypatch.setattr(acmix_san, "WIDTHS", WIDTHS)
    monkeypatch.setattr(acmix_san, "WINDOWS", (3,) * 5)
    monkeypatch.setattr(acmix_san, "SHARE", 2)
    monkeypatch.setattr(acmix_san, "BLOCKS", {10: (1, 0, 0, 1, 0)})


@pytest.mark.parametrize(
    "mixer",
    ["acmix", "attention"],
)
def test_one_step_of_fit(mixer, small):
    model = ACmixSAN10(mixer=mixer, **SMALL)
    still = unmoved_by_a_step(model, images((2, 9, 10, 3)), np.array([0, 2]))
    # Batch statistics remove a bias that is added before them. The convolution
    # path sees the biases of queries and keys without batch statistics.
    names = ["expand/bias"]
    if mixer == "attention":
        names += ["mixer/query_bias", "mixer/key_bias"]
    without_gradient = {
        f"stage{stage}_block1_{name}" for stage in (1, 4) for name in names
    }
    assert set(still) <= without_gradient


def san(x, model, depths, stem):
    """The logits and the maps of the stages, in NumPy."""
    w = {v.path: as_array(v).astype("float64") for v in model.weights}

    def convolution(x, name):
        return x @ w[f"{name}/kernel"][0, 0] + w.get(f"{name}/bias", 0)

    def norm_relu(x, name):
        own = weights_below(w, name)
        x = (x - own["moving_mean"]) / np.sqrt(own["moving_variance"] + 1e-5)
        return np.maximum(x * own["gamma"] + own["beta"], 0)

    def block(x, name):
        own = weights_below(w, f"{name}_mixer")
        attention, convolved, *_ = oracles.patchwise_acmix(
            norm_relu(x, f"{name}_bn1"), own, 2, (3, 3), training=False
        )
        y = own["attention_rate"] * attention
        y = y + own["convolution_rate"] * convolved
        return x + convolution(norm_relu(y, f"{name}_bn2"), f"{name}_expand")

    x = norm_relu(convolution(x, "conv1"), "bn1")
    maps = []
    for stage, depth in enumerate(depths, 1):
        if stage > 2 or stem == "imagenet":
            # Odd sizes keep their last row.
            beyond = [(0, n % 2) for n in x.shape[1:3]]
            x = np.pad(x, [(0, 0), *beyond, (0, 0)], constant_values=-np.inf)
            x = np.max([x[:, i::2, j::2] for i, j in np.ndindex(2, 2)], axis=0)
        x = convolution(x, f"stage{stage}_conv")
        for index in range(1, depth + 1):
            x = block(x, f"stage{stage}_block{index}")
        x = norm_relu(x, f"stage{stage}_bn")
        maps.append(x)
    return x.mean((1, 2)) @ w["logits/kernel"] + w["logits/bias"], maps


@pytest.mark.parametrize(
    ("stem", "size"), [("cifar", (6, 5)), ("imagenet", (11, 14))]
)
def test_network_step_by_step(stem, size, small, monkeypatch):
    depths = (1, 0, 2, 1, 0)
    monkeypatch.setattr(acmix_san, "BLOCKS", {10: depths})
    options = {"stem": stem, "input_shape": (*size, 3)}
    model = ACmixSAN10(classes=3, **options)
    draw(model)
    x = images((2, *size, 3))
    logits, maps = san(x.astype("float64"), model, depths, stem)
    levels = ACmixSAN10(False, features_only=True, **options)
    assert_agrees(model, levels, x, logits, maps)


def test_weights_files(small, tmp_path):
    build = functools.partial(ACmixSAN10, **SMALL)
    assert_files_load(build, build(), images((2, 9, 10, 3)), tmp_path)


def test_half_precision(small):
    build = functools.partial(ACmixSAN10, **SMALL)
    assert_half_precision(build, images((2, 9, 10, 3)), "stage1_block1_mixer")


def test_weights_of_a_classifier(small, tmp_path):
    assert_weights_of_a_classifier_load(ACmixSAN10, tmp_path, **SMALL)


@pytest.mark.once
@pytest.mark.parametrize(
    ("stem", "scales"),
    [("imagenet", (2, 4, 8, 16, 32)), ("cifar", (1, 1, 2, 4, 8))],
)
def test_ends(stem, scales, small):
    options = {"stem": stem, "input_shape": (65, 96, 3)}
    maps = ACmixSAN10(False, features_only=True, **options).outputs
    expected = [
        (None, -(-65 // n), -(-96 // n), width)
        for n, width in zip(scales, WIDTHS, strict=True)
    ]
    assert [x.shape for x in maps] == expected
    assert ACmixSAN10(False, **options).output_shape == expected[-1]
    for pooling in ("avg", "max"):
        model = ACmixSAN10(False, pooling=pooling, **options)
        assert model.output_shape == (None, WIDTHS[-1])
    model = ACmixSAN10(classifier_activation="softmax", **options)
    assert model.output_shape == (None, 1000)
    y = as_array(model(images((1, 65, 96, 3))))
    np.testing.assert_allclose(y.sum(), 1, rtol=1e-5)


@pytest.mark.parametrize("stem", imagenet.STEMS)
def test_images_of_any_size(stem, small):
    def build(input_shape):
        return ACmixSAN10(
            False, input_shape=input_shape, stem=stem, features_only=True
        )

    assert_any_size(build)


@pytest.mark.once
@pytest.mark.parametrize("pooling", [None, "avg", "max"])
def test_ends_for_any_size(pooling, small):
    assert_ends_for_any_size(ACmixSAN10, pooling, WIDTHS[-1])


@pytest.mark.once
def test_names_and_mixers(small):
    assert ACmixSAN10().name == "acmixsan10"
    assert ACmixSAN10(mixer="attention").name == "san10"
    mixer = ACmixSAN10().get_layer("stage4_block1_mixer")
    assert (mixer.filters, mixer.key_filters, mixer.paths) == (8, 2, "both")
    plain = ACmixSAN10(mixer="attention").get_layer("stage4_block1_mixer")
    assert plain.paths == "attention"


@pytest.mark.once
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mixer": "conv"}, "`mixer` must be 'acmix' or 'attention'"),
        ({"stem": "small"}, "`stem` must be 'imagenet' or 'cifar'"),
        ({"pooling": "mean"}, "`pooling` must be None or 'avg' or 'max'"),
        ({"features_only": True}, r"features_only=True, include_top=True"),
        ({"weights": "imagenet"}, "`weights` of ACmixSAN10 must be None"),
        ({"input_shape": (32, 32)}, "`input_shape` must be"),
        ({"input_shape": (32, None, None)}, "height and width may be None"),
        ({"input_shape": None}, "`input_shape` must be.*Received: None"),
        ({"classes": 0}, "`classes` must be a positive integer.*0"),
        ({"classes": None}, "`classes` must be a positive integer.*None"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        ACmixSAN10(**arguments)
