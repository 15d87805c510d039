"""Weights of Swin transformers with ACmix, against the authors' numbers.

Their checkpoints hold only blocks like those of the vectors, patch merging and
dense layers.
"""

import keras
import numpy as np
import pytest
from layer_contract import as_array
from layer_contract import DTYPE
from vectors import load_vectors

from keras_equiattn import convert
from keras_equiattn.applications import ACmixSwinTiny
from keras_equiattn.applications.networks import acmix_swin
from keras_equiattn.convert.from_acmix import acmix_parts
from keras_equiattn.ops.dense import relative_places
from keras_equiattn.testing import relative_difference

# For whole blocks: Keras' dense layers and layer normalisations compute in
# float32 on PyTorch in any case, and on TensorFlow its GELU rounds a constant.
LIMIT = {"tensorflow": 1e-8, "torch": 1e-6, "jax": 1e-5}[
    keras.backend.backend()
]

WINDOW = 4
OPTIONS = {
    "input_shape": (16, 16, 3),
    "patch_size": 2,
    "window_size": WINDOW,
    "classes": 5,
}


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    """As wide as the blocks of the vectors."""
    monkeypatch.setattr(acmix_swin, "DIM", 12)
    monkeypatch.setattr(acmix_swin, "DEPTHS", {"Tiny": (2, 1, 1, 1)})


def state_dict(model):
    """Random weights of their network of the same size, by their names."""
    rng = np.random.default_rng(0)
    state = {
        key: rng.normal(0, 0.3, part.shape)
        for key, part in acmix_parts(model).items()
    }
    for key in [key for key in state if ".attn.query." in key]:
        maps = [
            state.pop(key.replace("query", name))
            for name in ("query", "key", "value")
        ]
        state[key.replace("query", "qkv")] = np.concatenate(maps)
    for layer in model.layers:
        if layer.name.endswith("_mixer"):
            stage, block = (
                int(part[5:]) - 1 for part in layer.name.split("_")[:2]
            )
            name = f"layers.{stage}.blocks.{block}.attn.relative_position_index"
            state[name] = relative_places(layer.window_size)
    state["layers.0.blocks.1.attn_mask"] = np.zeros((4, 16, 16))
    return state


@pytest.mark.parametrize("block", [1, 2])
def test_blocks_of_the_authors(block):
    """The second block of a stage has its windows shifted."""
    keras.config.set_dtype_policy(DTYPE)
    v = load_vectors(f"acmix_swin_12_8x8_w4_h3_shift{2 * (block - 1)}")
    model = ACmixSwinTiny(**OPTIONS)
    state = state_dict(model)
    prefix = f"layers.0.blocks.{block - 1}."
    theirs = {
        prefix + key[2:]: value
        for key, value in v.items()
        if key.startswith("w/")
    }
    buffers = {f"{prefix}attn_mask", f"{prefix}attn.relative_position_index"}
    own = {key for key in state if key.startswith(prefix)}
    assert own - buffers == set(theirs)
    convert.acmix(model, {"model": state | theirs})
    first = model.get_layer(f"stage1_block{block}_norm1").input
    last = model.get_layer(f"stage1_block{block}_add2").output
    y = as_array(keras.Model(first, last)(v["x_block"].reshape(-1, 8, 8, 12)))
    expected = v["y_block"].reshape(-1, 8, 8, 12)
    assert relative_difference(y, expected) < LIMIT


@pytest.mark.once
def test_patches_merge_and_classifier():
    """What no vector covers: linear maps of patches, in their order."""
    model = ACmixSwinTiny(**OPTIONS)
    state = state_dict(model)
    convert.acmix(model, state)
    x = np.random.default_rng(1).normal(size=(2, 16, 16, 3))
    names = ["patches", "stage2_merge", "stage2_merge_norm"]
    names += ["stage2_merge_dense", "global_mean", "logits"]
    found = keras.Model(
        model.input, [model.get_layer(name).output for name in names]
    )(x.astype("float32"))
    patches, merged, normed, reduced, mean, logits = map(as_array, found)

    kernel = state["patch_embed.proj.weight"]
    cut = x.reshape(2, 8, 2, 8, 2, 3)
    expected = np.einsum("oirs,bxrysi->bxyo", kernel, cut)
    expected += state["patch_embed.proj.bias"]
    np.testing.assert_allclose(patches, expected, rtol=0, atol=1e-5)

    centred = merged - merged.mean(-1, keepdims=True)
    expected = centred / np.sqrt(merged.var(-1, keepdims=True) + 1e-5)
    expected = expected * state["layers.0.downsample.norm.weight"]
    expected = expected + state["layers.0.downsample.norm.bias"]
    np.testing.assert_allclose(normed, expected, rtol=0, atol=1e-5)
    reduction = state["layers.0.downsample.reduction.weight"]
    np.testing.assert_allclose(reduced, normed @ reduction.T, rtol=0, atol=1e-4)
    expected = mean @ state["head.weight"].T + state["head.bias"]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.once
def test_plain_networks_and_networks_without_classifier():
    plain = ACmixSwinTiny(mixer="attention", **OPTIONS)
    state = state_dict(plain)
    assert not any(".dep_conv." in key or ".rate" in key for key in state)
    convert.acmix(plain, state)
    headless = ACmixSwinTiny(False, mixer="attention", **OPTIONS)
    convert.acmix(headless, state)
    x = np.random.default_rng(1).normal(size=(2, 16, 16, 3))
    x = x.astype("float32")
    norm = keras.Model(plain.input, plain.get_layer("norm").output)
    np.testing.assert_array_equal(as_array(headless(x)), as_array(norm(x)))


@pytest.mark.once
def test_all_or_nothing():
    model = ACmixSwinTiny(**OPTIONS)
    before = model.get_weights()
    key = "layers.0.blocks.1.attn.relative_position_index"
    state = state_dict(model)
    plain = state_dict(ACmixSwinTiny(mixer="attention", **OPTIONS))
    wider = {**state, "head.bias": np.zeros(7)}
    for wrong, message in (
        (plain, "without ACmix, and the model is with ACmix. Missing"),
        (wider, r"head.bias is \(7,\), must be \(5,\)"),
        ({**state, key: state[key].T}, f"{key} is not that of windows of"),
        ({**state, "odd": np.zeros(1)}, "Not used by the model: odd"),
        (
            {k: v for k, v in state.items() if k != "head.bias"},
            "Missing: head.bias",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            convert.acmix(model, wrong)
    for value, old in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, old)


@pytest.mark.once
def test_other_models():
    for other in (keras.Sequential([keras.layers.Dense(1)]), 3):
        with pytest.raises(ValueError, match="`model` must be an `ACmixSwin"):
            convert.acmix(other, {})
