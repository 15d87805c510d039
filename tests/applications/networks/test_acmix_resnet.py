"""Residual networks with ACmix for images of the size of ImageNet."""

import functools

import keras
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
from network_helpers import share_weights
from network_helpers import unmoved_by_a_step
from network_helpers import weights_below
from sweeps import swept

from keras_equiattn import layers
from keras_equiattn.applications import ACmixResNet26
from keras_equiattn.applications.networks import acmix_resnet
from keras_equiattn.applications.networks.common import imagenet
from keras_equiattn.testing import relative_difference

SMALL = {"stem": "cifar", "input_shape": (9, 10, 3), "classes": 3}


@pytest.fixture
def small(monkeypatch):
    """Narrow, one block a stage, and a window that compiles faster."""
    monkeypatch.setattr(acmix_resnet, "WIDTHS", (4, 4, 8, 8))
    monkeypatch.setattr(acmix_resnet, "WINDOW", 3)
    monkeypatch.setattr(acmix_resnet, "BLOCKS", {26: (1, 1, 1, 1)})


@pytest.mark.parametrize("mixer", ["acmix", "conv"])
def test_one_step_of_fit(mixer, small):
    model = ACmixResNet26(mixer=mixer, **SMALL)
    still = unmoved_by_a_step(model, images((2, 9, 10, 3)), np.array([0, 2]))
    assert all(path.endswith("position_bias") for path in still), still


def resnet(x, model, depths, mixer, stem):
    """The logits and the maps of the stages, in NumPy."""
    w = {v.path: as_array(v).astype("float64") for v in model.weights}

    def convolution(x, name, strides=1):
        kernel = w[f"{name}/kernel"]
        around = (kernel.shape[0] // 2,) * 2
        x = np.pad(x, [(0, 0), around, around, (0, 0)])
        return oracles.correlate(x, kernel, strides)

    def norm(x, name):
        own = weights_below(w, name)
        x = (x - own["moving_mean"]) / np.sqrt(own["moving_variance"] + 1e-5)
        return x * own["gamma"] + own["beta"]

    def mix(x, name, strides):
        if mixer == "conv":
            return convolution(x, f"{name}_conv2", strides)
        own = weights_below(w, f"{name}_acmix")
        attention, convolved, _ = oracles.acmix(
            x[:, :, :, None], own, "z2", 4, (3, 3), strides
        )
        y = own["attention_rate"] * attention
        return (y + own["convolution_rate"] * convolved)[:, :, :, 0]

    def block(x, name, strides, first):
        y = np.maximum(norm(convolution(x, f"{name}_conv1"), f"{name}_bn1"), 0)
        y = np.maximum(norm(mix(y, name, strides), f"{name}_bn2"), 0)
        y = norm(convolution(y, f"{name}_conv3"), f"{name}_bn3")
        if first:
            x = convolution(x, f"{name}_shortcut", strides)
            x = norm(x, f"{name}_shortcut_bn")
        return np.maximum(x + y, 0)

    x = convolution(x, "conv1", 2 if stem == "imagenet" else 1)
    x = np.maximum(norm(x, "bn1"), 0)
    if stem == "imagenet":
        height, width = x.shape[1:3]
        x = np.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)])
        x = np.max(
            [
                x[:, i : i + height : 2, j : j + width : 2]
                for i, j in np.ndindex(3, 3)
            ],
            axis=0,
        )
    maps = []
    for stage, depth in enumerate(depths, 1):
        for index in range(1, depth + 1):
            strides = 2 if stage > 1 and index == 1 else 1
            x = block(x, f"stage{stage}_block{index}", strides, index == 1)
        maps.append(x)
    return x.mean((1, 2)) @ w["logits/kernel"] + w["logits/bias"], maps


@pytest.mark.parametrize(
    ("mixer", "stem", "size"),
    [("acmix", "cifar", (9, 10)), ("conv", "imagenet", (38, 35))],
)
def test_network_step_by_step(mixer, stem, size, small, monkeypatch):
    depths = (2, 1, 2, 1)
    monkeypatch.setattr(acmix_resnet, "BLOCKS", {26: depths})
    options = {"mixer": mixer, "stem": stem, "input_shape": (*size, 3)}
    model = ACmixResNet26(classes=3, **options)
    draw(model)
    x = images((2, *size, 3))
    logits, maps = resnet(x.astype("float64"), model, depths, mixer, stem)
    levels = ACmixResNet26(False, features_only=True, **options)
    assert_agrees(model, levels, x, logits, maps)


def test_normalization_and_pooling(small):
    options = {"include_top": False, "stem": "cifar", "input_shape": (9, 10, 3)}
    statistics = ((0.1, 0.2, 0.3), (0.5, 1.0, 2.0))
    plain = ACmixResNet26(**options)
    draw(plain)
    x = images((2, 9, 10, 3))
    maps = plain.predict((x - statistics[0]) / statistics[1], verbose=0)
    assert relative_difference(maps, plain.predict(x, verbose=0)) > 1e-2
    for pooling, expected in (
        (None, maps),
        ("avg", maps.mean((1, 2))),
        ("max", maps.max((1, 2))),
    ):
        model = ACmixResNet26(
            normalization=statistics, pooling=pooling, **options
        )
        share_weights(plain, model)
        found = model.predict(x, verbose=0)
        assert relative_difference(found, expected) < 1e-5


def test_weights_of_a_classifier(small, tmp_path):
    assert_weights_of_a_classifier_load(ACmixResNet26, tmp_path, **SMALL)


@pytest.mark.once
def test_windows_and_heads(monkeypatch):
    monkeypatch.setattr(acmix_resnet, "WIDTHS", (4, 4, 8, 8))
    model = ACmixResNet26(num_heads=2, input_shape=(32, 32, 3))
    mixers = [x for x in model.layers if x.name.endswith("_acmix")]
    assert len(mixers) == 1 + 2 + 4 + 1
    for mixer in mixers:
        assert mixer.attention_kernel_size == (7, 7)
        assert mixer.kernel_size == (3, 3)
        assert mixer.num_heads == 2


def test_weights_files(small, tmp_path):
    build = functools.partial(ACmixResNet26, **SMALL)
    assert_files_load(build, build(), images((2, 9, 10, 3)), tmp_path)


def test_half_precision(small):
    build = functools.partial(ACmixResNet26, **SMALL)
    assert_half_precision(build, images((2, 9, 10, 3)), "stage1_block1_acmix")


def test_folded_as_in_the_guide(small):
    model = ACmixResNet26(normalization=(0.5, 0.2), **SMALL)
    rng = np.random.default_rng(0)
    for variable in model.weights:
        variable.assign(variable + 0.1 * rng.uniform(size=variable.shape))

    def fold(layer):
        if isinstance(layer, layers.ACmix2D):
            return layer.folded()
        return layer.from_config(layer.get_config())

    folded = keras.models.clone_model(model, clone_function=fold)
    for layer in model.layers:
        if layer.weights and not isinstance(layer, layers.ACmix2D):
            folded.get_layer(layer.name).set_weights(layer.get_weights())
    kinds = [type(layer) for layer in folded.layers]
    assert kinds.count(layers.FoldedACmix2D) == 4
    assert layers.ACmix2D not in kinds
    x = images((2, 9, 10, 3))
    expected = model.predict(x, verbose=0)
    assert relative_difference(expected[:1], expected[1:]) > 1e-2
    found = folded.predict(x, verbose=0)
    assert relative_difference(found, expected) < 1e-5


@pytest.mark.once
def test_shift_kernels_survive(small):
    model = ACmixResNet26(**SMALL)
    shift = as_array(model.get_layer("stage2_block1_acmix").shift_kernel)
    expected = np.eye(9).reshape(3, 3, 9, 1)
    np.testing.assert_array_equal(shift, np.tile(expected, (1, 1, 1, 4)))


@pytest.mark.once
@pytest.mark.parametrize(
    ("stem", "scales"), [("imagenet", (4, 8, 16, 32)), ("cifar", (1, 2, 4, 8))]
)
def test_ends(stem, scales, small):
    options = {"stem": stem, "input_shape": (65, 96, 3)}
    maps = ACmixResNet26(False, features_only=True, **options).outputs
    expected = [
        (None, -(-65 // n), -(-96 // n), 4 * width)
        for n, width in zip(scales, (4, 4, 8, 8), strict=True)
    ]
    assert [x.shape for x in maps] == expected
    assert ACmixResNet26(False, **options).output_shape == expected[-1]
    for pooling in ("avg", "max"):
        model = ACmixResNet26(False, pooling=pooling, **options)
        assert model.output_shape == (None, 32)
    model = ACmixResNet26(classifier_activation="softmax", **options)
    assert model.output_shape == (None, 1000)
    y = as_array(model(images((1, 65, 96, 3))))
    np.testing.assert_allclose(y.sum(), 1, rtol=1e-5)


@pytest.mark.parametrize("stem", swept(imagenet.STEMS, imagenet.STEMS[0]))
def test_images_of_any_size(stem, small):
    def build(input_shape):
        return ACmixResNet26(
            False, input_shape=input_shape, stem=stem, features_only=True
        )

    assert_any_size(build)


@pytest.mark.once
@pytest.mark.parametrize("pooling", [None, "avg", "max"])
def test_ends_for_any_size(pooling, small):
    assert_ends_for_any_size(ACmixResNet26, pooling, 32)


@pytest.mark.once
def test_names(small):
    assert ACmixResNet26().name == "acmixresnet26"
    assert ACmixResNet26(mixer="conv").name == "resnet26"


@pytest.mark.once
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mixer": "asc"}, "`mixer` must be 'acmix' or 'conv'"),
        ({"stem": "small"}, "`stem` must be 'imagenet' or 'cifar'"),
        ({"num_heads": 6}, "`num_heads` must divide 64.*Received: 6"),
        (
            {"classifier_activation": "no"},
            "`classifier_activation` must be .* Received: 'no'",
        ),
        ({"pooling": "mean"}, "`pooling` must be None or 'avg' or 'max'"),
        ({"features_only": True}, r"features_only=True, include_top=True"),
        ({"weights": "imagenet"}, "`weights` of ACmixResNet26 must be None"),
        ({"input_shape": (32, 32)}, "`input_shape` must be"),
        ({"input_shape": (32, None, None)}, "height and width may be None"),
        ({"input_shape": None}, "`input_shape` must be.*Received: None"),
        ({"classes": 0}, "`classes` must be a positive integer.*0"),
        ({"classes": None}, "`classes` must be a positive integer.*None"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        ACmixResNet26(**arguments)
