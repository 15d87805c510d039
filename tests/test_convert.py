"""Weights of other people's code in our layers and networks."""

import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from layer_contract import as_array
from layer_contract import FLOAT64_BACKENDS
from vectors import load_vectors

from keras_equiattn import applications
from keras_equiattn import convert
from keras_equiattn import layers
from keras_equiattn.testing import equivariance_error
from keras_equiattn.testing import relative_difference

DTYPES = {"float32": 1e-5, "float64": 1e-10}
if keras.backend.backend() not in FLOAT64_BACKENDS:
    del DTYPES["float64"]

# Their p4m elements in the order of ours, as the README of the vectors says.
ELEMENTS = {"p4": [0, 1, 2, 3], "p4m": [0, 1, 2, 3, 6, 5, 4, 7]}

CASES = [
    *("conv_lift_p4", "conv_group_p4", "conv_lift_p4m", "conv_group_p4m"),
    *("full_att_lift_p4", "full_att_group_p4"),
    *("ch_att_lift_p4", "ch_att_group_p4"),
    *("sp_att_lift_p4", "sp_att_group_p4"),
    *("f_att_lift_p4", "f_att_group_p4"),
    *("f_att_lift_p4m", "f_att_group_p4m", "f_att_lift_dil4_p4"),
    *("f_ch_att_lift_p4", "f_ch_att_group_p4"),
    *("f_sp_att_lift_p4", "f_sp_att_group_p4"),
    *("rh_lift_p4", "rh_group_p4"),
]


def vector_layers(name, dtype):
    """Our layers for one case of the vectors, one after the other."""
    operator, kind = (
        name.removesuffix("_p4")
        .removesuffix("_p4m")
        .split("_lift" if "_lift" in name else "_group")
    )
    lifting = "_lift" in name
    options = {"group": name.split("_")[-1], "dtype": dtype}
    attention = {
        "reduction_ratio": 1 if lifting else 2,
        "attention_dilation_rate": 4 if kind == "_dil4" else 1,
        "attention": {
            "ch_att": "channel",
            "f_ch_att": "channel",
            "sp_att": "spatial",
            "f_sp_att": "spatial",
        }.get(operator, "full"),
    }
    before = []
    if operator in ("conv", "f_att", "f_ch_att", "f_sp_att"):
        if operator != "conv":
            before = [layers.InputAttention(**options, **attention)]
        layer = layers.LiftingConv2D if lifting else layers.GroupConv2D
    elif operator == "rh":
        layer = (
            layers.CoAttentiveLiftingConv2D
            if lifting
            else layers.CoAttentiveGroupConv2D
        )
    else:
        layer = (
            layers.AttentiveLiftingConv2D
            if lifting
            else layers.AttentiveGroupConv2D
        )
        options |= attention
    return [*before, layer(5, 3, use_bias=False, **options)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_layers_agree_with_the_authors(name, dtype):
    vectors = load_vectors(name)
    elements = ELEMENTS[name.split("_")[-1]]
    arrays = {
        key.removeprefix("w."): value
        for key, value in vectors.items()
        if key.startswith("w.")
    }
    y = vectors["x"].astype(dtype)
    y = (
        y.transpose(0, 2, 3, 1)
        if y.ndim == 4
        else y.transpose(0, 3, 4, 2, 1)[..., elements, :]
    )
    for layer in vector_layers(name, dtype):
        layer.build(y.shape)
        weights = convert._layer_weights(layer, arrays)
        assert set(weights) == {v.name for v in layer.weights}
        layer.set_weights([weights[v.name] for v in layer.weights])
        y = layer(y)
    expected = vectors["y_float64"].transpose(0, 3, 4, 2, 1)[..., elements, :]
    assert relative_difference(as_array(y), expected) < DTYPES[dtype]


def checkpoint(name):
    """Folder of the authors' trained weights, where the machine has them."""
    root = Path(__file__).resolve().parents[2]
    folder = root / "shared/vectors/att_gconvs/checkpoints" / name
    if not folder.is_dir():
        pytest.skip("the authors' checkpoints are not on this machine")
    return folder


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("z2cnn", "rotmnist_z2cnn"),
        ("p4cnn", "rotmnist_p4cnn"),
        ("f_att_p4cnn", "rotmnist_p4cnn_input"),
    ],
)
def test_trained_networks_agree_with_the_authors(folder, name, dtype):
    folder = checkpoint(folder)
    keras.config.set_dtype_policy(dtype)
    model = applications.get_model(name)
    assert convert.att_gconvs(model, folder / "weights.npz") is model
    with np.load(folder / "io.npz") as file:
        vectors = dict(file)
    # Theirs is in float32: its own rounding is in what float32 compares with.
    tolerance = {"float32": 1e-4, "float64": 1e-10}[dtype]
    expected = vectors[{"float64": "logits_float64"}.get(dtype, "logits")]
    x = vectors["x"].transpose(0, 2, 3, 1).astype(dtype)
    logits = as_array(model(x))
    assert relative_difference(logits, expected) < tolerance
    turned = as_array(model(np.rot90(x, axes=(1, 2)).copy()))
    assert relative_difference(turned, vectors["logits_rot90"]) < 1e-4
    layer_names = ["conv1", "conv2", "conv7"]
    inside = keras.Model(
        model.inputs, [model.get_layer(n).output for n in layer_names]
    )
    for y, key in zip(inside(x), ("act_c1", "act_c2", "act_c7"), strict=True):
        theirs = vectors[key]
        if theirs.ndim == 4:  # z2 has no group axis there
            theirs = theirs[:, :, None]
        theirs = theirs.transpose(0, 3, 4, 2, 1)
        assert relative_difference(as_array(y), theirs) < 1e-4


def test_trained_network_with_full_attention():
    folder = checkpoint("att_p4cnn")
    images = np.random.default_rng(0).normal(size=(2, 28, 28, 1))
    images = images.astype("float32")
    outputs = []
    for chunk_size in ("auto", None):
        model = applications.get_model("rotmnist_p4cnn_full")
        for layer in model.layers:
            if hasattr(layer, "chunk_size"):
                layer.chunk_size = chunk_size
        convert.att_gconvs(model, folder / "weights.npz")
        outputs.append(as_array(model(images)))
    assert np.isfinite(outputs[0]).all()
    assert relative_difference(*outputs) < 1e-5
    assert equivariance_error(model, "p4", images, elements=[1]).max() < 1e-4
    assert relative_difference(outputs[0][:1], outputs[0][1:]) > 1e-2
