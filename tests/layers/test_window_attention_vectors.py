"""Attention over windows: numbers of the authors' code, and special cases."""

import numpy as np
import oracles
import pytest
from keras import ops
from layer_contract import as_array
from layer_contract import DTYPE
from layer_contract import gradients
from layer_contract import weights_of
from vectors import load_vectors
from window_attention_helpers import random_layer
from window_attention_helpers import tolerance

from keras_equiattn.layers import AffineSelfConv2D
from keras_equiattn.layers import SimpleAffineSelfConv2D
from keras_equiattn.ops.geometry import Window
from keras_equiattn.ops.group.linear import group_linear
from keras_equiattn.ops.papers.affine import relative_positions
from keras_equiattn.ops.windows.api import window_attention
from keras_equiattn.testing import relative_difference

SLOW = (pytest.mark.slow, pytest.mark.every_backend)


NAMES = {
    "WQ": "query_kernel",
    "WK": "key_kernel",
    "WV": "value_kernel",
    "bQ": "query_bias",
    "bK": "key_bias",
    "bV": "value_bias",
    "psiQ": "query_psi",
    "betaQ": "query_beta",
    "psiK": "key_psi",
    "betaK": "key_beta",
    "psiV": "value_psi",
    "betaV": "value_beta",
    "W": "input_kernel",
    "b": "input_bias",
    "psi": "psi",
    "beta": "beta",
    "WO": "output_kernel",
}


def batch(x):
    """`([order,] rows, columns, c)` with a batch, the group axis fourth."""
    x = np.moveaxis(x, 0, 2) if x.ndim == 4 else x[:, :, None]
    return x[None].astype(DTYPE)


@pytest.mark.torch_first
@pytest.mark.parametrize(
    "name",
    [
        "asc_mask_7x6_c4to8_k5_h4",
        "p4_asc_zeros_6x6_c3to4_k3_h2",
        "p4_simple_asc_zeros_6x6_c4_k3_h2",
        *(
            pytest.param(name, marks=SLOW)
            for name in (
                "asc_zeros_5x5_c6_k3_h1",
                "asc_zeros_7x6_c4to8_k5_h4",
                "simple_asc_zeros_7x6_c4to8_k5_h4",
            )
        ),
    ],
)
def test_vectors_with_gradients(name):
    v = load_vectors(name)
    cls = SimpleAffineSelfConv2D if "simple" in name else AffineSelfConv2D
    window = v["w_psi" if "simple" in name else "w_psiK"].shape[-2]
    x, cotangent, expected = map(batch, (v["x"], v["cotangent"], v["y"]))
    layer = cls(
        expected.shape[-1],
        window,
        int(v["heads"]),
        group="p4" if x.shape[3] == 4 else "z2",
        border=str(v["border"]),
        scale=float(v["scale"]),
        data_format="channels_last",
        dtype=DTYPE,
    )
    layer.build(x.shape)
    ours = {variable.name: variable for variable in layer.weights}
    expected_gradients = {}
    for theirs, own in NAMES.items():
        if f"w_{theirs}" in v:
            shape = ours[own].shape
            ours[own].assign(v[f"w_{theirs}"].reshape(shape))
            expected_gradients[own] = v[f"g_{theirs}"].reshape(shape)
    assert set(expected_gradients) == set(ours)
    limit = 1e-10 if DTYPE == "float64" else 1e-5
    assert relative_difference(as_array(layer(x)), expected) < limit
    of_x, *found = gradients(layer, x, cotangent)
    assert relative_difference(of_x, batch(v["gx"])) < limit
    for variable, gradient in zip(
        layer.trainable_variables, found, strict=True
    ):
        wanted = expected_gradients[variable.name]
        assert relative_difference(gradient, wanted) < limit, variable.name


@pytest.mark.torch_first
def test_vectors_of_relative_positions():
    v = load_vectors("sasa_zeros_7x6_c8_k5_h4")
    query, keys, values = (batch(v[name]) for name in "QKV")
    heads = int(v["heads"])
    embeddings = (
        ops.convert_to_tensor(v[name], DTYPE)
        for name in ("w_rowemb", "w_colemb")
    )
    y, _ = window_attention(
        ops.convert_to_tensor(float(v["scale"]) * query),
        ops.convert_to_tensor(keys),
        ops.convert_to_tensor(values),
        Window((5, 5)),
        heads,
        relative_positions(*embeddings, heads, "z2"),
    )
    limit = 1e-10 if DTYPE == "float64" else 1e-5
    assert relative_difference(as_array(y), batch(v["y"])) < limit


@pytest.mark.torch_first
def test_vectors_of_the_linear_map():
    v = load_vectors("p4_group_linear_5x4_6to5")
    y = group_linear(
        ops.convert_to_tensor(batch(v["x"])),
        ops.convert_to_tensor(v["w_W"], DTYPE),
        ops.convert_to_tensor(v["w_b"], DTYPE),
        "p4",
    )
    assert relative_difference(as_array(y), batch(v["y"])) < tolerance()


@pytest.mark.torch_first
def test_psi_of_one_is_self_attention():
    layer = random_layer(
        SimpleAffineSelfConv2D, filters=6, num_heads=2, group="z2"
    )
    layer.psi.assign(np.ones(layer.psi.shape))
    layer.beta.assign(np.zeros(layer.beta.shape))
    x = np.random.default_rng(1).normal(size=(2, 5, 6, 1, 3)).astype(DTYPE)
    w = weights_of(layer)
    f = x[..., 0, :] @ w["input_kernel"][0] + w["input_bias"]
    padded = np.pad(f, [(0, 0), (1, 1), (1, 1), (0, 0)])
    near = np.stack(
        [padded[:, i : i + 5, j : j + 6] for i in range(3) for j in range(3)]
    )
    heads = near.reshape(9, 2, 5, 6, 2, 3)
    scores = (f.reshape(2, 5, 6, 2, 3) * heads).sum(-1) / 3
    weights = np.exp(scores) / np.exp(scores).sum(0)
    y = (weights[..., None] * heads).sum(0).reshape(2, 5, 6, 6)
    expected = (y @ w["output_kernel"][0])[:, :, :, None]
    assert relative_difference(as_array(layer(x)), expected) < tolerance()


@pytest.mark.torch_first
@pytest.mark.parametrize("group", ["z2", "p4m"])
def test_constant_scores_are_a_depthwise_convolution(group):
    layer = random_layer(AffineSelfConv2D, filters=4, num_heads=2, group=group)
    for variable in (layer.query_psi, layer.query_beta, layer.value_beta):
        variable.assign(np.zeros(variable.shape))
    order = layer.group.order
    x = np.random.default_rng(1).normal(size=(2, 6, 6, order, 3))
    w = weights_of(layer)
    values = oracles.group_linear(x, w["value_kernel"], w["value_bias"], group)
    # Depthwise on the group: a full kernel that is diagonal in the channels.
    kernel = np.einsum("rijc,cd->ijrcd", w["value_psi"], np.eye(4))
    y = oracles.group_conv(values, kernel, group, padding="same") / 9
    expected = oracles.group_linear(y, w["output_kernel"], None, group)
    actual = as_array(layer(x.astype(DTYPE)))
    assert relative_difference(actual, expected) < tolerance()


@pytest.mark.torch_first
def test_border_mask_looks_inside_only():
    layer = random_layer(
        AffineSelfConv2D, filters=4, num_heads=2, border="mask"
    )
    x = np.ones((1, 4, 4, 3), DTYPE)
    _, maps = layer(x, return_attention_maps=True)
    window = as_array(maps["window"])
    assert not window[:, 0, :, :, :, 0].any()
    assert (window[:, 1:-1, 1:-1] > 0).all()
    np.testing.assert_allclose(window.sum((-1, -2)), 1, rtol=1e-5)
