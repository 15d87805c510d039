"""Swin transformers with ACmix."""

import functools

import keras
import numpy as np
import pytest
from layer_contract import as_array
from layers.test_window_acmix import assign
from network_helpers import assert_another_process_loads
from network_helpers import assert_files_load
from network_helpers import assert_weights_of_a_classifier_load
from network_helpers import images
from network_helpers import unmoved_by_a_step
from test_from_acmix import DTYPE
from test_from_acmix import LIMIT
from vectors import load_vectors

from keras_equiattn.applications import ACmixSwinTiny
from keras_equiattn.applications.networks import acmix_swin
from keras_equiattn.applications.networks.common import transformers
from keras_equiattn.testing import relative_difference
from keras_equiattn.visualization import attention_maps
from keras_equiattn.visualization import pixel_attention

SMALL = {
    "input_shape": (16, 16, 3),
    "patch_size": 1,
    "window_size": 4,
    "classes": 3,
}


@pytest.fixture
def small(monkeypatch):
    """Narrow, and with few blocks."""
    monkeypatch.setattr(acmix_swin, "DIM", 12)
    monkeypatch.setattr(acmix_swin, "DEPTHS", {"Tiny": (2, 1, 1, 1)})


@pytest.mark.parametrize(
    "mixer",
    ["acmix", "attention"],
)
def test_one_step_of_fit(mixer, small):
    model = ACmixSwinTiny(mixer=mixer, **SMALL)
    x = np.random.default_rng(0).normal(size=(4, 16, 16, 3))
    still = unmoved_by_a_step(model, x, np.array([0, 2, 1, 1]))
    # A softmax ignores what is added to all scores of a query. In the last
    # stage the mixed maps start with the same bias for all channels of a pixel,
    # which layer normalisation removes.
    without_gradient = {
        "attention": {
            f"{layer.name}/key_bias"
            for layer in model.layers
            if layer.name.endswith("_mixer")
        },
        "acmix": {"stage4_block1_mixer/mixing_bias"},
    }
    assert set(still) <= without_gradient[mixer]


@pytest.mark.sweep
def test_file_in_another_process(small, tmp_path):
    x = images((2, 16, 16, 3))
    assert_another_process_loads(ACmixSwinTiny(**SMALL), x, tmp_path)


def test_weights_files(small, tmp_path):
    build = functools.partial(ACmixSwinTiny, **SMALL)
    assert_files_load(build, build(), images((2, 16, 16, 3)), tmp_path)


def test_weights_of_a_classifier(small, tmp_path):
    assert_weights_of_a_classifier_load(ACmixSwinTiny, tmp_path, **SMALL)


@pytest.mark.parametrize("shape", [(2, 3, 4), (5, 4)])
@pytest.mark.parametrize("path", ["mixer", "dense"])
def test_drop_path_leaves_out_what_is_added_to_an_image(path, shape):
    """All of it is dropped, or kept and divided by the rate of keeping."""
    inputs = keras.Input(shape)
    mix = keras.layers.Dense(4, kernel_initializer="he_normal", name="mix")
    model = keras.Model(
        inputs, transformers.block(inputs, mix, 2, 1e-5, 0.25, "block")
    )
    dense = model.get_layer("block_dense2")
    dense.kernel.assign(50 * dense.kernel)
    alone = dense if path == "mixer" else mix
    alone.kernel.assign(0 * alone.kernel)
    x = np.random.default_rng(0).normal(size=(200, *shape)).astype("float32")
    added = as_array(model(x)) - x
    kept = (as_array(model(x, training=True)) - x) / (added / 0.75)
    kept = kept.reshape(200, -1)
    assert np.ptp(kept, axis=1).max() < 1e-2
    kept = kept.mean(1)
    np.testing.assert_allclose(kept, np.round(kept), rtol=0, atol=1e-2)
    assert 0.6 < kept.mean() < 0.9


def test_levels_are_what_stages_end_with(small):
    model = ACmixSwinTiny(
        False, features_only=True, **{**SMALL, "classes": 1000}
    )
    for variable in model.weights:  # weights are small, and so are changes
        if len(variable.shape) > 1:
            variable.assign(20 * variable)
    ends = ["stage1_block2_add2", "stage2_block1_add2", "stage3_block1_add2"]
    outputs = [model.get_layer(name).output for name in (*ends, "norm")]
    reference = keras.Model(model.input, outputs)
    x = images((2, 16, 16, 3))
    for found, expected in zip(
        model.predict(x, verbose=0),
        reference.predict(x, verbose=0),
        strict=True,
    ):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.once
@pytest.mark.parametrize("size", [(16, 32), (32, 16)])
def test_windows_of_maps_with_one_along_a_side(size, small, monkeypatch):
    """Such windows are not shifted along either side."""
    monkeypatch.setattr(acmix_swin, "DEPTHS", {"Tiny": (2, 2, 2, 2)})
    model = ACmixSwinTiny(**{**SMALL, "input_shape": (*size, 3)})
    mixers = [x for x in model.layers if x.name.endswith("_mixer")]
    shifted = [layer.shift for layer in mixers[1::2]]
    assert shifted == [(2, 2), (2, 2), (0, 0), (0, 0)]
    assert {layer.shift for layer in mixers[::2]} == {(0, 0)}
    windows = [layer.window_size for layer in mixers[1::2]]
    assert windows == [(4, 4), (4, 4), (4, 4), (2, 2)]


@pytest.mark.parametrize("shift", [0, 2])
def test_block_of_the_authors(shift):
    keras.config.set_dtype_policy(DTYPE)
    v = load_vectors(f"acmix_swin_12_8x8_w4_h3_shift{shift}")
    stage = acmix_swin._Stage((8, 8), 12, 3, 4, shift)
    inputs = keras.Input((8, 8, 12), dtype=DTYPE)
    model = keras.Model(
        inputs, acmix_swin._block(inputs, stage, "acmix", shift, 0.0, "block")
    )
    weights = {
        "block_norm1": [v["w/norm1.weight"], v["w/norm1.bias"]],
        "block_norm2": [v["w/norm2.weight"], v["w/norm2.bias"]],
        "block_dense1": [v["w/mlp.fc1.weight"].T, v["w/mlp.fc1.bias"]],
        "block_dense2": [v["w/mlp.fc2.weight"].T, v["w/mlp.fc2.bias"]],
    }
    for name, values in weights.items():
        model.get_layer(name).set_weights(values)
    mixer = model.get_layer("block_mixer")
    values = assign(mixer, v, "w/attn.")
    for variable in mixer.weights:
        variable.assign(values[variable.name])
    y = as_array(model(v["x_block"].reshape(-1, 8, 8, 12)))
    expected = v["y_block"].reshape(-1, 8, 8, 12)
    assert relative_difference(y, expected) < LIMIT


@pytest.mark.once
def test_patches_merge_as_those_of_the_authors():
    x = np.arange(4 * 4 * 2.0).reshape(1, 4, 4, 2).astype("float32")
    y = as_array(acmix_swin.PatchMerging()(x))
    quarters = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
    np.testing.assert_array_equal(y, np.concatenate(quarters, axis=-1))
    assert as_array(acmix_swin.PatchMerging()(x[:0])).shape == (0, 2, 2, 8)


def test_attention_maps(small):
    """Of each stage, whose pixels are twice as wide as those before."""
    model = ACmixSwinTiny(**SMALL)
    x = images((1, 16, 16, 3))
    maps = attention_maps(model, x)
    for stage in (1, 2, 3, 4):
        name = f"stage{stage}_block1_mixer"
        size = 16 // 2 ** (stage - 1)
        wanted = maps[name]["image"]
        assert wanted.shape[1:3] == wanted.shape[-2:] == (size, size)
        # The whole image is covered, up to its corners.
        for at in ((9, 14), (0, 15), (15, 15)):
            row, column = (n // 2 ** (stage - 1) for n in at)
            seen = pixel_attention(model, x[0], at, name)
            np.testing.assert_allclose(
                seen, wanted[0, row, column], rtol=1e-5, atol=1e-7
            )


@pytest.mark.once
def test_ends_and_windows(small):
    maps = ACmixSwinTiny(
        False, features_only=True, input_shape=(224, 224, 3)
    ).outputs
    expected = [(None, 56 // n, 56 // n, 12 * n) for n in (1, 2, 4, 8)]
    assert [x.shape for x in maps] == expected
    model = ACmixSwinTiny(**SMALL)
    mixers = [x for x in model.layers if x.name.endswith("_mixer")]
    assert [x.window_size for x in mixers] == [(4, 4)] * 4 + [(2, 2)]
    assert [x.shift for x in mixers] == [(0, 0), (2, 2)] + [(0, 0)] * 3
    rates = [x.rate for x in model.layers if x.name.endswith("_path2")]
    np.testing.assert_allclose(rates, [0.05, 0.1, 0.15, 0.2])


@pytest.mark.once
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mixer": "conv"}, "`mixer` must be 'acmix' or 'attention'"),
        ({"input_shape": (225, 224, 3)}, r"multiples of 224.*\(225, 224, 3\)"),
        ({"input_shape": (32, 32, 3)}, r"windows of 7 fill.*\(32, 32, 3\)"),
        ({"input_shape": (96, 96, 3)}, r"windows of 7 fill.*\(96, 96, 3\)"),
        (
            {"input_shape": (None, 224, 3)},
            r"known height and width: windows fill.*\(None, 224, 3\)",
        ),
        ({"drop_path": 1}, "`drop_path` must be a number from 0 to below 1"),
        ({"patch_size": 0}, "`patch_size` must be a positive integer"),
        ({"features_only": True}, "features_only=True"),
    ],
)
def test_bad_arguments(arguments, message, small):
    with pytest.raises(ValueError, match=message):
        ACmixSwinTiny(**arguments)
