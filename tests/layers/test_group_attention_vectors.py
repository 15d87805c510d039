"""Group self-attention: numbers of the authors' code, and its index."""

import numpy as np
import oracles
import pytest
from group_attention_helpers import LAYERS
from group_attention_helpers import oracle
from group_attention_helpers import random_layer
from group_attention_helpers import sample
from group_attention_helpers import SLOW
from group_attention_helpers import strengthen
from group_attention_helpers import tolerance
from layer_contract import as_array
from layer_contract import call_of
from layer_contract import DTYPE
from layer_contract import gradients
from vectors import load_vectors

from keras_equiattn.layers import GroupSelfAttention2D
from keras_equiattn.testing import assert_equivariant
from keras_equiattn.testing import equivariance_error
from keras_equiattn.testing import relative_difference


def theirs(v, gradient=False):
    """Their weights, or gradients of them, by our names and in our axes."""
    heads = int(v["heads"])
    start = "grad/" if gradient else "param/"

    def get(name):
        return v[start + name]

    found = {}
    for name in ("query", "key", "value"):
        kernel, bias = get(f"{name}.weight"), get(f"{name}.bias")
        kernel = kernel.reshape(-1, heads, kernel.shape[1])
        found[f"{name}_kernel"] = kernel.transpose(2, 1, 0)
        found[f"{name}_bias"] = bias.reshape(-1, heads).T
    kernel = get("wout.weight")
    kernel = kernel.reshape(len(kernel), -1, heads)
    found["output_kernel"] = kernel.transpose(2, 1, 0)
    found["output_bias"] = get("wout.bias")
    for own, name in (("row", "row"), ("column", "col")):
        name = f"{name}_embedding"
        second = get(f"{name}.3.weight")
        found |= {
            f"{own}_kernel_1": get(f"{name}.0.weight").reshape(1, -1),
            f"{own}_bias_1": get(f"{name}.0.bias"),
            f"{own}_gamma": get(f"{name}.1.layer_norm.weight"),
            f"{own}_beta": get(f"{name}.1.layer_norm.bias"),
            f"{own}_kernel_2": second.reshape(len(second), -1).T,
            f"{own}_bias_2": get(f"{name}.3.bias"),
        }
    if f"{start}group_embedding.weight" in v:
        inverse = {1: [0], 2: [0, 1], 4: [0, 3, 2, 1]}
        embedding = get("group_embedding.weight")
        found["group_embedding"] = embedding[inverse[len(embedding)]]
    return found


def ours(x):
    """Channels last; the group axis inverted."""
    if x.ndim == 4:
        return np.ascontiguousarray(np.moveaxis(x, 1, -1)).astype(DTYPE)
    x = np.moveaxis(x, (1, 2), (-1, -2))
    if x.shape[3] == 4:
        x = x[:, :, :, [0, 3, 2, 1]]
    return np.ascontiguousarray(x).astype(DTYPE)


VECTORS = {
    f"gsa_{kind}_{scope}_{group}": (
        layer,
        {"mz2": "z2m"}.get(group, group),
    )
    for kind, layer in zip(("lift", "group"), LAYERS, strict=True)
    for scope, group in (
        *(("local", "z2"), ("local", "mz2"), ("local", "p4")),
        ("global", "p4"),
    )
}


# On z2m every element is its own inverse: only p4 tells `h` from `h^-1`.
FAST_VECTORS = {
    "gsa_lift_local_mz2": (),
    "gsa_group_local_mz2": (),
    "gsa_lift_local_p4": pytest.mark.torch_first,
    "gsa_group_local_p4": pytest.mark.torch_first,
}


def layer_of(name):
    """The layer of a file, with the weights in it; and the file."""
    v = load_vectors(name)
    cls, group = VECTORS[name]
    weights = theirs(v)
    heads, key_dim, filters = weights["output_kernel"].shape
    layer = cls(
        filters,
        key_dim,
        heads,
        int(v["kernel_size"]) if "kernel_size" in v else None,
        group,
        epsilon=1e-12,
        data_format="channels_last",
        dtype=DTYPE,
    )
    layer.build(ours(v["x"]).shape)
    variables = {variable.name: variable for variable in layer.weights}
    assert set(variables) == set(weights)
    for key, values in weights.items():
        variables[key].assign(values)
    return layer, v


@pytest.mark.torch_first
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=FAST_VECTORS.get(name, SLOW))
        for name in VECTORS
    ],
)
def test_vectors_with_gradients(name):
    layer, v = layer_of(name)
    x, cotangent, expected = map(ours, (v["x"], v["cotangent"], v["y"]))
    limit = 1e-10 if DTYPE == "float64" else 1e-4
    assert relative_difference(as_array(call_of(layer)(x)), expected) < limit
    of_x, *found = gradients(layer, x, cotangent)
    assert relative_difference(of_x, ours(v["grad_x"])) < limit
    wanted = theirs(v, gradient=True)
    for variable, gradient in zip(
        layer.trainable_variables, found, strict=True
    ):
        # Some are zero, since the softmax does not see them.
        expected = wanted[variable.name]
        scale = max(np.abs(expected).max(), 1)
        difference = np.abs(gradient - expected).max() / scale
        assert difference < limit, variable.name


def authors_index(group):
    """What the authors' code embeds: `g^-1 m` with `v` in between."""

    def embedded(v, g, m):
        return oracles.relative(group, oracles.relative(group, v, g), m)

    return embedded


@pytest.mark.once
@pytest.mark.parametrize("name", ["gsa_group_local_mz2", "gsa_group_global_p4"])
def test_the_authors_index_is_that_of_their_code(name):
    layer, v = layer_of(name)
    x, expected = ours(v["x"]), ours(v["y_official"])
    group = layer.group.name
    y, _ = oracle(layer, x, embedded=authors_index(group))
    assert relative_difference(y, expected) < 1e-6
    y, _ = oracle(layer, x)
    assert relative_difference(y, expected) > 1e-2
    assert relative_difference(y, ours(v["y"])) < 1e-6


@pytest.mark.torch_first
@pytest.mark.parametrize("group", ["z2m", "p4"])
def test_the_authors_index_is_not_equivariant(group):
    """The test that our index passes detects theirs."""
    layer = random_layer(GroupSelfAttention2D, group)
    strengthen(layer, 6)
    x = sample(layer, (4, 4), dtype="float64")

    def wrong(x):
        index = authors_index(group)
        return oracle(layer, as_array(x), embedded=index)[0]

    assert equivariance_error(wrong, group, x).max() > 1e-2
    right = equivariance_error(
        lambda x: oracle(layer, as_array(x))[0], group, x
    )
    # JAX acts in float32.
    assert right.max() < (1e-12 if DTYPE == "float64" else 1e-6)
    assert_equivariant(layer, group, x.astype(DTYPE), rtol=tolerance())
