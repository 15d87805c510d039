"""Weights of octic vision transformers, against the authors' numbers."""

import argparse

import keras
import numpy as np
import pytest
from layer_contract import as_array
from vectors import load_vectors

from keras_equiattn import convert
from keras_equiattn.applications import OcticViT
from keras_equiattn.testing import relative_difference

# The networks of the vectors, and our arguments for them.
NETWORKS = {
    "deit_hybrid": {},
    "deit_invariant": {"head": "invariant"},
    "deit_polynomial": {"head": "invariant", "invariants": "polynomial"},
    "dinov2_hybrid": {"include_top": False},
}


def network(name="deit_hybrid", **options):
    return OcticViT(
        **{
            "input_shape": (24, 24, 3),
            "patch_size": 4,
            "width": 32,
            "depth": 2,
            "num_heads": 2,
            "classes": 5,
            **NETWORKS[name],
            **options,
        }
    )


def vectors(name="deit_hybrid"):
    """Weights by the authors' names, images, and the authors' outputs."""
    found = load_vectors(f"octic_{name}_24x24_w32_h2")
    state = {
        key.removeprefix("state."): value
        for key, value in found.items()
        if key.startswith("state.")
    }
    return state, found["images"], found["outputs"]


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_the_authors(name):
    state, images, outputs = vectors(name)
    model = convert.octic_vits(network(name), state)
    assert relative_difference(as_array(model(images)), outputs) < 1e-5


@pytest.mark.once
@pytest.mark.parametrize("name", ["deit_hybrid", "dinov2_hybrid"])
def test_files_of_the_authors(name, tmp_path):
    """As their training scripts write them, compiled or not."""
    import torch

    state, images, outputs = vectors(name)
    state = {key: torch.from_numpy(value) for key, value in state.items()}
    path = tmp_path / "checkpoint.pth"
    if name == "deit_hybrid":
        state = {f"module._orig_mod.{key}": x for key, x in state.items()}
        options = argparse.Namespace(output_dir=tmp_path, epochs=400)
        other = {key: 0 * x for key, x in state.items()}
        file = {"model": state, "epoch": 3, "args": options, "model_ema": other}
    else:
        state = {f"backbone.{key}": x for key, x in state.items()}
        heads = ("dino_head.mlp.0.weight", "ibot_head.mlp.0.weight")
        file = {"teacher": state | dict.fromkeys(heads, torch.ones(2, 2))}
    torch.save(file, path)
    model = convert.octic_vits(network(name), path)
    assert relative_difference(as_array(model(images)), outputs) < 1e-5


@pytest.mark.once
def test_without_classifier():
    state, images, outputs = vectors()
    model = network(include_top=False)
    convert.octic_vits(model, state)
    token = as_array(model(images))
    logits = token @ state["head.weight"].T + state["head.bias"]
    assert relative_difference(logits, outputs) < 1e-5


@pytest.mark.once
def test_all_or_nothing():
    model = network()
    before = model.get_weights()
    state, *_ = vectors()
    invariant, *_ = vectors("deit_invariant")
    kernel = "patch_embed.lift8.conv_B1.weight"
    map_of_one = "blocks.0.attn.qkv.lin_B2.weight"
    for wrong, message in (
        (
            invariant,
            "invariant with the power spectrum, and the model is hybrid",
        ),
        ({"patch_embed.proj.weight": np.ones(1)}, "it seems to be plain"),
        ({**state, "register_tokens.0": np.ones(1)}, "no register tokens"),
        (
            {**state, "cls_token.4": np.ones((1, 1, 2, 8))},
            "same in every pose.*'cls_token.4' with 16 other values",
        ),
        ({k: v for k, v in state.items() if k != kernel}, f"no {kernel}"),
        (
            {k: v for k, v in state.items() if k != map_of_one},
            f"no {map_of_one}",
        ),
        ({**state, kernel: np.ones((4, 3, 3, 3))}, r"\(4, 3, 3, 3\)"),
        ({**state, "odd": np.zeros(1)}, "Not used by the model: odd"),
        ({**state, "head.bias": np.zeros(7)}, r"\(7,\), must be \(5,\)"),
        (
            {**state, "norm.bias": np.full(32, np.nan)},
            "'bias' with 32 values",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            convert.octic_vits(model, wrong)
    for value, old in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, old)


@pytest.mark.once
def test_other_models():
    for other in (keras.Sequential([keras.layers.Dense(1)]), 3):
        with pytest.raises(ValueError, match="`model` must be an `OcticViT`"):
            convert.octic_vits(other, {})
