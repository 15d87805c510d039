"""Pyramid vision transformers with ACmix."""

import functools
import math

import keras
import numpy as np
import oracles
import pytest
from layer_contract import as_array
from network_helpers import assert_agrees
from network_helpers import assert_another_process_loads
from network_helpers import assert_files_load
from network_helpers import assert_half_precision
from network_helpers import assert_weights_of_a_classifier_load
from network_helpers import draw
from network_helpers import images
from network_helpers import weights_below

from keras_equiattn.applications import ACmixPVTTiny
from keras_equiattn.applications.networks import acmix_pvt
from keras_equiattn.visualization import attention_maps
from keras_equiattn.visualization import pixel_attention

SMALL = {"input_shape": (16, 24, 3), "patch_size": 1, "classes": 3}


@pytest.fixture
def small(monkeypatch):
    """Narrow, and with few blocks."""
    monkeypatch.setattr(acmix_pvt, "DIMS", (4, 4, 10, 16))
    monkeypatch.setattr(acmix_pvt, "DEPTHS", {"Tiny": (2, 1, 1, 2)})


@pytest.mark.parametrize(
    "mixer",
    ["acmix", "attention"],
)
def test_one_step_of_fit(mixer, small):
    model = ACmixPVTTiny(mixer=mixer, **SMALL)
    model.compile(
        keras.optimizers.SGD(100.0),  # weights are small, and so are gradients
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    before = [as_array(v).copy() for v in model.trainable_variables]
    x = np.random.default_rng(0).normal(size=(4, 16, 24, 3))
    loss = model.train_on_batch(x, np.array([0, 2, 1, 1]))
    assert np.isfinite(loss)
    still = {
        variable.path
        for variable, start in zip(
            model.trainable_variables, before, strict=True
        )
        if np.array_equal(as_array(variable), start)
    }
    # The class token does not depend on the last convolution, nor a softmax on
    # the keys' bias, which rounding may move.
    blocks = [x.name for x in model.layers if x.name.endswith("_mixer")]
    expected = set()
    if mixer == "acmix":
        blocks = blocks[-1:]
        expected = {
            f"{blocks[0]}/{name}"
            for name in (
                *("mixing_kernel", "mixing_bias", "shift_kernel"),
                "convolution_rate",
            )
        }
    assert still - {f"{block}/key_bias" for block in blocks} == expected


def pvt(x, model, depths):
    """The logits and the maps of the stages, in NumPy."""
    w = {v.path: as_array(v).astype("float64") for v in model.weights}

    def norm(x, name, epsilon=1e-6):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)
        return x * w[f"{name}/gamma"] + w[f"{name}/beta"]

    def dense(x, name):
        return x @ w[f"{name}/kernel"] + w[f"{name}/bias"]

    def mix(x, tokens, name, stage):
        own = weights_below(w, name)
        attention, convolution, of_tokens, _ = oracles.spatial_reduction_acmix(
            x,
            own,
            (1, 2, 5, 8)[stage],
            ((8, 4, 2, 1)[stage],) * 2,
            tokens,
        )
        rate = own["attention_rate"]
        image = rate * attention + own["convolution_rate"] * convolution
        return image, rate * of_tokens

    def mlp(x, name):
        y = dense(norm(x, f"{name}_norm2"), f"{name}_dense1")
        y = y * (1 + np.vectorize(math.erf)(y / 2**0.5)) / 2
        return x + dense(y, f"{name}_dense2")

    maps = []
    for stage, depth in enumerate(depths):
        name = f"stage{stage + 1}"
        kernel = w[f"{name}_patches/kernel"]
        size = kernel.shape[0]
        batch, height, width, channels = x.shape
        down, along = height // size, width // size
        x = x.reshape(batch, down, size, along, size, channels)
        x = np.einsum("zaibjc,ijcd->zabd", x, kernel)
        x = norm(
            x + w[f"{name}_patches/bias"], f"{name}_patches_norm", epsilon=1e-5
        )
        positions = w[f"{name}_positions/embedding"]
        token = np.zeros((batch, 0, x.shape[-1]))
        if stage == 3:
            token = w["stage4_class_token/token"] + positions[:1]
            token = np.tile(token, (batch, 1, 1))
            positions = positions[1:].reshape(x.shape[1:])
        x = x + positions
        for index in range(depth):
            block = f"{name}_block{index + 1}"
            found = mix(
                norm(x, f"{block}_norm1"),
                norm(token, f"{block}_norm1"),
                f"{block}_mixer",
                stage,
            )
            x, token = (
                mlp(before + after, block) if before.size else before
                for before, after in zip((x, token), found, strict=True)
            )
        maps.append(x)
    maps[-1] = norm(x, "norm")
    return dense(norm(token, "norm")[:, 0], "logits"), maps


def test_network_step_by_step(small):
    model = ACmixPVTTiny(**SMALL)
    # Or embeddings are all that matters.
    draw(model, small=("embedding", "token"))
    x = images((2, 16, 24, 3))
    expected, maps = pvt(x.astype("float64"), model, (2, 1, 1, 2))
    levels = ACmixPVTTiny(False, features_only=True, **SMALL)
    assert_agrees(model, levels, x, expected, maps)


@pytest.mark.slow
@pytest.mark.every_backend
def test_file_in_another_process(small, tmp_path):
    x = images((2, 16, 24, 3))
    assert_another_process_loads(ACmixPVTTiny(**SMALL), x, tmp_path)


def test_weights_files(small, tmp_path):
    build = functools.partial(ACmixPVTTiny, **SMALL)
    assert_files_load(build, build(), images((2, 16, 24, 3)), tmp_path)


def test_weights_of_a_classifier(small, tmp_path):
    assert_weights_of_a_classifier_load(ACmixPVTTiny, tmp_path, **SMALL)


def test_attention_maps(small):
    model = ACmixPVTTiny(**SMALL)
    x = images((2, 16, 24, 3))
    with pytest.warns(UserWarning, match="'stage1_block2_mixer' is uniform"):
        maps = attention_maps(model, x)
    assert len(maps) == 6
    first = maps["stage1_block1_mixer"]
    assert list(first) == ["image"]
    assert first["image"].shape == (2, 16, 24, 1, 1, 1, 2, 3)
    last = maps["stage4_block1_mixer"]
    assert last["image"].shape == (2, 2, 3, 1, 8, 1, 2, 3)
    assert last["tokens"].shape == (2, 1, 8, 2, 3)
    np.testing.assert_allclose(first["image"].sum((-1, -2)), 1, rtol=1e-5)
    rest = 1 - last["tokens"].sum((-1, -2))  # what the token gives to itself
    assert (rest > 0.01).all()
    seen = pixel_attention(model, x[0], (3, 9), "stage4_block2_mixer")
    wanted = maps["stage4_block2_mixer"]["image"][0, 0, 1]
    np.testing.assert_allclose(seen, wanted, rtol=1e-5)


def test_half_precision(small):
    build = functools.partial(ACmixPVTTiny, **SMALL)
    assert_half_precision(build, images((2, 16, 24, 3)), "stage1_block1_mixer")


@pytest.mark.once
def test_ends_and_stages(small):
    options = {"input_shape": (64, 32, 3), "include_top": False}
    maps = ACmixPVTTiny(features_only=True, **options).outputs
    expected = [
        (None, 16 // n, 8 // n, dim)
        for n, dim in zip((1, 2, 4, 8), (4, 4, 10, 16), strict=True)
    ]
    assert [x.shape for x in maps] == expected
    assert ACmixPVTTiny(**options).output_shape == expected[-1]
    for pooling in ("avg", "max"):
        model = ACmixPVTTiny(pooling=pooling, **options)
        assert model.output_shape == (None, 16)
    model = ACmixPVTTiny(classifier_activation="softmax", **SMALL)
    assert model.name == "acmixpvttiny"
    assert model.output_shape == (None, 3)
    assert ACmixPVTTiny(mixer="attention", **SMALL).name == "pvttiny"
    mixers = [x for x in model.layers if x.name.endswith("_mixer")]
    assert [x.reduction[0] for x in mixers] == [8, 8, 4, 2, 1, 1]
    assert [x.num_heads for x in mixers] == [1, 1, 2, 5, 8, 8]
    wide = [x.units for x in model.layers if x.name.endswith("_dense1")]
    assert wide == [32, 32, 32, 40, 64, 64]
    rates = [x.rate for x in model.layers if x.name.endswith("_path2")]
    np.testing.assert_allclose(rates, [0.02, 0.04, 0.06, 0.08, 0.1])


@pytest.mark.once
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mixer": "conv"}, "`mixer` must be 'acmix' or 'attention'"),
        ({"input_shape": (225, 224, 3)}, r"multiples of 32.*\(225, 224, 3\)"),
        ({"input_shape": (32, 16, 3)}, r"`input_shape` of.*\(32, 16, 3\)"),
        (
            {"input_shape": (None, None, 3)},
            r"known height and width.*position.*\(None, None, 3\)",
        ),
        ({"drop_path": 1}, "`drop_path` must be a number from 0 to below 1"),
        ({"patch_size": 0}, "`patch_size` must be a positive integer"),
        ({"features_only": True}, "features_only=True"),
        ({"weights": "imagenet"}, "none for these arguments.*'imagenet'"),
        ({"normalization": (0, 0)}, r"positive std. Received: \(0, 0\)"),
    ],
)
def test_bad_arguments(arguments, message, small):
    with pytest.raises(ValueError, match=message):
        ACmixPVTTiny(**arguments)
