"""The authors' networks of group self-attention: outputs and weights."""

import keras
import numpy as np
import pytest
from gsanet_helpers import TINY
from layer_contract import as_array
from vectors import load_vectors

from keras_equiattn import convert
from keras_equiattn import groups
from keras_equiattn import layers
from keras_equiattn.applications import GSANet
from keras_equiattn.applications import GSANetCIFAR10
from keras_equiattn.applications import GSANetPCam
from keras_equiattn.applications import GSANetRotMNIST
from keras_equiattn.applications.networks import gsanet_blocks
from keras_equiattn.convert.from_g_selfatt import gsa_parts
from keras_equiattn.testing import relative_difference


def load_vector_network(dtype, **options):
    """The authors' network of the vectors, its inputs and outputs."""
    keras.config.set_dtype_policy(dtype)
    arrays = load_vectors("gsa_net_p4")
    model = GSANet(
        "p4",
        3,
        filters=12,
        block_sizes=(1, 2),
        expansion=(1, 2),
        crops=(1, 0, 1),
        num_heads=3,
        norm_between=True,
        epsilon=1e-12,
        input_shape=(14, 14, 2),
        classes=4,
        **options,
    )
    state = {
        key.removeprefix("w."): value
        for key, value in arrays.items()
        if key.startswith("w.")
    }
    return model, state, arrays


@pytest.mark.once
def test_agrees_with_the_authors():
    # On PyTorch Keras computes dense layers in float32 all the same.
    double = keras.backend.backend() == "tensorflow"
    model, state, arrays = load_vector_network(
        "float64" if double else "float32"
    )
    assert convert.g_selfatt(model, state) is model
    inverse = groups.get("p4").inverse
    expected = {
        key.removeprefix("y."): value
        for key, value in arrays.items()
        if key.startswith("y.")
    }
    assert len(expected) == 11
    outputs = keras.Model(
        model.input, [model.get_layer(name).output for name in expected]
    )(arrays["x"].transpose(0, 2, 3, 1).astype(model.input.dtype))
    for y, theirs in zip(outputs, expected.values(), strict=True):
        if theirs.ndim == 5:
            theirs = theirs.transpose(0, 3, 4, 2, 1)[..., inverse, :]
        # The vectors of most layers hold the first image alone.
        error = relative_difference(as_array(y)[: len(theirs)], theirs)
        assert error < (1e-10 if double else 1e-4)
    # Their code itself is not equivariant.
    error = relative_difference(as_array(outputs[-1]), arrays["y_theirs"])
    assert 1e-3 < error < 0.1


@pytest.mark.once
@pytest.mark.parametrize(
    ("network", "blocks", "norms", "last"),
    [
        (GSANetRotMNIST, (0, 1, 3, 4, 5), (), 6),
        (
            GSANetCIFAR10,
            (0, 3, 8, 11, 16, 19),
            (1, 4, 9, 12, 17, 20),
            22,
        ),
        (GSANetPCam, (1, 5, 8, 12), (2, 6, 9, 13), 16),
    ],
)
@pytest.mark.parametrize("norm", gsanet_blocks.NORMS)
def test_names_of_the_authors(network, blocks, norms, last, norm):
    """The places of blocks in their list, which counts pooling and dropout."""
    found = gsa_parts(network("p4", norm=norm, epsilon=1e-12))
    modules = {}
    for key in found:
        module, *rest = key.split(".")
        if module == "transformer":
            modules.setdefault(int(rest[0]), set()).add(rest[1])
    assert set(modules) == {*blocks, *norms, last}
    for index in blocks:
        assert modules[index] - {"shortcut"} == {"attention", "mlp"}
    end = "weight" if norm == "batch" else "layer_norm"
    assert all(end in modules[index] for index in norms)
    assert modules[last] == {"weight"}
    moving = [key for key in found if key.endswith("running_mean")]
    count = 1 + 4 * len(blocks) + len(norms)
    assert len(moving) == (count if norm == "batch" else 0)


@pytest.mark.once
def test_what_does_not_fit_is_named_and_nothing_is_loaded():
    model, state, _ = load_vector_network("float32")
    before = model.get_weights()
    missing = "transformer.4.shortcut.0.weight"
    state[f"{missing}s"] = state.pop(missing)
    key = "transformer.0.attention.2.query.weight"
    state[key] = state[key][:, :6]
    with pytest.raises(ValueError, match="does not fit 'gsanet_p4'") as error:
        convert.g_selfatt(model, state)
    message = str(error.value)
    assert f"Missing: {missing}." in message
    assert f"Not used by the model: {missing}s." in message
    assert f"{key} is (18, 6, 1, 1, 1), must be (18, 12, 1, 1, 1)" in message
    assert "seems to be" not in message
    assert all(map(np.array_equal, before, model.get_weights()))
    other = GSANet("p4m", **TINY, epsilon=1e-12)
    message = "on a group of order 4, and the model is on a group of order 8"
    with pytest.raises(ValueError, match=message):
        convert.g_selfatt(other, state)


@pytest.mark.once
def test_another_epsilon_is_refused():
    message = "with epsilon=1e-12.*LiftingSelf.* with epsilon=0.001"
    with pytest.raises(ValueError, match=message):
        convert.g_selfatt(GSANet("p4", **TINY), {})


@pytest.mark.once
def test_discs_are_refused():
    message = "window_shape='square'.*LiftingSelf.* with window_shape='disc'"
    options = {**TINY, "window_shape": "disc", "epsilon": 1e-12}
    with pytest.raises(ValueError, match=message):
        convert.g_selfatt(GSANet("p4", **options), {})


@pytest.mark.once
def test_models_that_are_no_gsanet():
    with pytest.raises(ValueError, match=r"must be a `GSANet`.*'p4'"):
        convert.g_selfatt("p4", {})
    x = inputs = keras.Input((6, 6, 2))
    x = layers.LiftingSelfAttention2D(6, 3, 2, 3, epsilon=1e-12, name="lift")(x)
    model = keras.Model(inputs, keras.layers.Dense(2, name="mine")(x))
    with pytest.raises(ValueError, match="must be a `GSANet`"):
        convert.g_selfatt(model, {})
    x = keras.layers.Dense(2, name="mine")(x)
    model = keras.Model(inputs, keras.layers.Dense(2, name="logits")(x))
    with pytest.raises(ValueError, match="Dense 'mine' has 'kernel'"):
        convert.g_selfatt(model, {})
