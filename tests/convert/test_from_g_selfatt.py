"""Weights of group self-attention, against the authors' formula in NumPy.

The formula follows their convention: channels first, and a right action on the
group axis. Their code agrees with it on the groups of the vectors; on other
groups our layers are compared with the formula alone.
"""

import keras
import numpy as np
import pytest
from layer_contract import as_array
from layer_contract import FLOAT64_BACKENDS
from vectors import load_vectors

from keras_equiattn import convert
from keras_equiattn import groups
from keras_equiattn.applications import GSANet
from keras_equiattn.convert.from_g_selfatt import gsa_buffers
from keras_equiattn.convert.from_g_selfatt import gsa_parts
from keras_equiattn.testing import relative_difference

HAS_FLOAT64 = keras.backend.backend() in FLOAT64_BACKENDS
WINDOW, HEADS = 3, 2


def elements(group):
    """Matrices of their elements: mirrored first, then turned."""
    rotations = 1 if group == "mz2" else int(group.strip("pm"))
    angles = 2 * np.pi * np.arange(rotations) / rotations
    cos, sin = np.cos(angles), np.sin(angles)
    turns = np.moveaxis(np.array([[cos, -sin], [sin, cos]]), -1, 0)
    if "m" not in group:
        return turns
    return np.concatenate([turns, turns @ np.diag([1, -1])])


def relative(group):
    """The index of the element `m g^-1`, at `(g, m)`."""
    matrices = elements(group)
    products = np.einsum("mij,gkj->gmik", matrices, matrices)
    far = np.abs(products[:, :, None] - matrices).max((-1, -2))
    assert far.min(axis=2).max() < 1e-12
    return far.argmin(axis=2)


def linear(w, name, x):
    kernel = w[f"{name}.weight"]
    y = np.einsum("oc,bc...->bo...", kernel.reshape(kernel.shape[:2]), x)
    bias = w.get(f"{name}.bias", np.zeros(len(kernel)))
    return y + bias.reshape(-1, *(1,) * (x.ndim - 2))


def silu(x):
    return x / (1 + np.exp(-x))


def encoded(w, name, x):
    """A coordinate, any shape, with its encoding as a last axis."""

    def of(part):
        return w[f"{name}_embedding.{part}"]

    x = x[..., None] * of("0.weight").ravel() + of("0.bias")
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-12)
    x = silu(x * of("1.layer_norm.weight") + of("1.layer_norm.bias"))
    return x @ of("3.weight").reshape(-1, x.shape[-1]).T + of("3.bias")


def attention(w, x, group, window, heads):
    """Local attention of `(batch, channels, [order,] rows, columns)`."""
    x = x[:, :, None] if x.ndim == 4 else x
    batch, channels, _, *size = x.shape
    query, keys, values = (
        linear(w, name, x).reshape(batch, -1, heads, *x.shape[2:])
        for name in ("query", "key", "value")
    )
    order = len(elements(group))
    y = np.zeros((batch, query.shape[1], heads, order, *size))
    for i, j in np.ndindex(*size):
        offsets = np.indices((window, window)).reshape(2, -1) - window // 2
        places = offsets + np.array([[i], [j]])
        inside = (places >= 0).all(0) & (places < np.array([size]).T).all(0)
        rows, columns = places[:, inside]
        seen = elements(group) @ (offsets[:, inside] / (window // 2))
        e = np.concatenate(
            [encoded(w, "row", seen[:, 0]), encoded(w, "col", seen[:, 1])], -1
        )
        q = query[..., i, j]
        first, rest = np.split(q, [e.shape[-1]], axis=1)
        s = np.einsum("bchg,bchmn->bhgmn", q, keys[..., rows, columns])
        s = s[:, :, None]
        s = s + np.einsum("bchg,vnc->bhvgn", first, e)[:, :, :, :, None]
        if rest.size:
            embedding = w["group_embedding.weight"][relative(group)]
            of_group = np.einsum("bchg,gmc->bhgm", rest, embedding)
            s = s + of_group[:, :, None, :, :, None]
        a = np.exp(s / np.sqrt(channels))
        a = a / a.sum((-1, -2), keepdims=True)
        y[..., i, j] = np.einsum(
            "bhvgmn,bchmn->bchv", a, values[..., rows, columns]
        )
    return linear(w, "wout", y.reshape(batch, -1, order, *size))


def norm(w, name, x):
    """Layer normalisation, or batch normalisation if `w` has statistics."""
    batch = f"{name}.running_mean" in w
    start = name if batch else f"{name}.layer_norm"

    def of(part):
        return w[f"{start}.{part}"].reshape(-1, 1, 1, 1)

    if batch:
        x = (x - of("running_mean")) / np.sqrt(of("running_var") + 1e-5)
    else:
        axes = tuple(range(1, x.ndim))
        x = x - x.mean(axes, keepdims=True)
        x = x / np.sqrt((x**2).mean(axes, keepdims=True) + 1e-12)
    return x * of("weight") + of("bias")


def buffers(group):
    """The buffers of one of their modules, with a corrected group index."""
    offsets = np.indices((WINDOW, WINDOW)) - WINDOW // 2
    seen = np.einsum("vij,jxy->ivxy", elements(group), offsets / (WINDOW // 2))
    order = len(elements(group))
    return {
        "row_indices": seen[0].astype("float32"),
        "col_indices": seen[1].astype("float32"),
        "g_indices": np.broadcast_to(relative(group), 3 * (order,)),
    }


def within(w, module):
    start = f"{module}."
    return {
        k.removeprefix(start): v for k, v in w.items() if k.startswith(start)
    }


def network(w, x, group):
    """The outputs of a network of one block without crops, by our names."""

    def attend(module, x):
        return attention(within(w, module), x, group, WINDOW, HEADS)

    found = {"lift": attend("lifting_self_attention", x)}
    x = silu(norm(w, "lifting_normalization", found["lift"]))
    block = within(w, "transformer.0")
    y = found["stage1_block1_silu1"] = silu(norm(block, "attention.0", x))
    y = attend("transformer.0.attention.2", y)
    found["stage1_block1_attention"] = y
    y = silu(norm(block, "attention.3", y)) + linear(block, "shortcut.0", x)
    x = silu(norm(block, "mlp.1", linear(block, "mlp.0", y)))
    x = y + norm(block, "mlp.4", linear(block, "mlp.3", x))
    found["stage1_block1_add2"] = x
    x = linear(w, "transformer.1", x)
    found["predictions"] = x.sum((-1, -2)).max(-1)
    return found


@pytest.mark.once
@pytest.mark.parametrize("group", ["mz2", "p4"])
@pytest.mark.parametrize("kind", ["lift", "group"])
def test_the_formula_is_that_of_their_code(kind, group):
    v = load_vectors(f"gsa_{kind}_local_{group}")
    w = within(
        {k.replace("/", "."): x.astype("float64") for k, x in v.items()},
        "param",
    )
    sizes = int(v["kernel_size"]), int(v["heads"])
    y = attention(w, v["x"].astype("float64"), group, *sizes)
    assert relative_difference(y, v["y"]) < 1e-10


def network_on(group, window=WINDOW, norm="layer"):
    return GSANet(
        group,
        window,
        filters=8,
        block_sizes=(1,),
        expansion=2,
        crops=0,
        num_heads=HEADS,
        norm=norm,
        epsilon=1e-12,
        input_shape=(4, 4, 2),
        classes=3,
    )


def random_state(model):
    """Weights alone, as an .npz file may hold them."""
    rng = np.random.default_rng(0)
    state = {
        key: rng.normal(key.endswith("norm.weight"), 0.7, part.shape)
        for key, part in gsa_parts(model).items()
    }
    for key in [key for key in state if key.endswith("running_var")]:
        state[key] = np.abs(state[key]) + 0.1
    return state


@pytest.mark.parametrize(
    ("group", "norm"), [("p4m", "layer"), ("p8", "layer"), ("p4", "batch")]
)
def test_other_groups_agree_with_the_formula(group, norm):
    dtype = "float64" if HAS_FLOAT64 else "float32"
    keras.config.set_dtype_policy(dtype)
    model = network_on(group, norm=norm)
    state = random_state(model)
    held = buffers(group)
    for module in ("lifting_self_attention", "transformer.0.attention.2"):
        state |= {f"{module}.{key}": held[key] for key in held}
    del state["lifting_self_attention.g_indices"]
    if norm == "batch":
        state["transformer.0.mlp.1.num_batches_tracked"] = np.array(7)
    convert.g_selfatt(model, state)
    rng = np.random.default_rng(1)
    # The whole network takes images in float32 under every policy.
    x = rng.normal(size=(2, 2, 4, 4)).astype("float32").astype("float64")
    inverse = groups.get(group).inverse

    def ours(y):
        if y.ndim == 5:
            y = y.transpose(0, 3, 4, 2, 1)[..., inverse, :]
        elif y.ndim == 4:
            y = y.transpose(0, 2, 3, 1)
        return y.astype(dtype)

    expected = network(state, x, group)
    limit = 1e-10 if HAS_FLOAT64 else 1e-4
    for name, given in (
        ("lift", x),
        ("stage1_block1_attention", expected["stage1_block1_silu1"]),
    ):
        y = as_array(model.get_layer(name)(ours(given)))
        assert relative_difference(y, ours(expected[name])) < limit, name
    # On PyTorch Keras computes dense layers in float32 all the same.
    if keras.backend.backend() != "tensorflow":
        limit = 1e-4
    outputs = keras.Model(
        model.input, [model.get_layer(name).output for name in expected]
    )(ours(x))
    for y, (name, theirs) in zip(outputs, expected.items(), strict=True):
        assert relative_difference(as_array(y), ours(theirs)) < limit, name


# --- What tells group and window --------------------------------------------

KINDS = {
    "local_z2": ("z2", 5),
    "local_mz2": ("z2m", 5),
    "local_p4": ("p4", 5),
    "global_p4": ("p4", None),
}


@pytest.mark.once
@pytest.mark.parametrize("kind", KINDS)
def test_buffers_are_those_of_their_code(kind):
    model = GSANet(
        *KINDS[kind],
        filters=6,
        block_sizes=(1,),
        crops=0,
        num_heads=1,
        input_shape=(5, 5, 1),
    )
    found = gsa_buffers(model)
    theirs = within(
        {
            k.replace("/", "."): x
            for k, x in load_vectors("gsa_buffers").items()
        },
        kind,
    )
    names = {"group._identity", *theirs}
    lift = within(found, "lifting_self_attention")
    block = within(found, "transformer.0.attention.2")
    assert set(block) == names
    assert set(lift) == names - {"g_indices"}
    assert set(found) == {
        *(f"lifting_self_attention.{name}" for name in lift),
        *(f"transformer.0.attention.2.{name}" for name in block),
        *(name for name in names if name.startswith("group.")),
    }
    for held in (lift, block):
        for name, value in held.items():
            expected = theirs.get(name)
            if name == "group._identity":
                expected = theirs["group._elements"][0]
            if name == "g_indices":  # elsewhere theirs is not equivariant
                value, expected = value[0], expected[0]
            np.testing.assert_allclose(value, expected, atol=1e-7)


@pytest.mark.once
def test_maps_of_the_whole_image_shrink():
    model = GSANet(
        "p4",
        None,
        filters=6,
        block_sizes=(1, 1),
        crops=(1, 0),
        num_heads=1,
        input_shape=(10, 10, 1),
    )
    found = gsa_buffers(model)
    for module, size in (
        ("lifting_self_attention", 10),
        ("transformer.0.attention.2", 10),
        ("transformer.2.attention.2", 4),
    ):
        rows = found[f"{module}.row_indices"]
        assert rows.shape == (4, *4 * (size,))
        assert rows.max() == 1
        assert rows[0, 1, 0, 3, 0] == 2 / (size - 1)


@pytest.mark.once
@pytest.mark.parametrize(
    ("group", "window", "message"),
    [
        ("p2m", WINDOW, "'p2m' with kernel_size=3: .*row_indices has other v"),
        (
            "p4",
            5,
            r"kernel_size=5: .*row_indices is \(4, 3, 3\), must be \(4, 5",
        ),
        ("p4", None, r"=None: .*row_indices is \(4, 3, 3\), must be \(4, 4, 4"),
    ],
)
def test_another_group_or_window_is_refused(group, window, message):
    """Their weights have the same names and shapes."""
    model = network_on(group, window)
    state = random_state(model)
    before = model.get_weights()
    held = gsa_buffers(network_on("p4"))
    with pytest.raises(ValueError, match=f"another group or window.*{message}"):
        convert.g_selfatt(model, {**state, **held})
    assert all(map(np.array_equal, before, model.get_weights()))
    convert.g_selfatt(model, {**state, **gsa_buffers(model)})
    convert.g_selfatt(model, state)
    assert not any(map(np.array_equal, before, model.get_weights()))


@pytest.mark.once
def test_another_index_is_refused():
    model = network_on("p4")
    key = "transformer.0.attention.2.g_indices"
    index = np.array(groups.get("p4").product_table)
    state = {**random_state(model), key: np.stack(4 * [index])}
    with pytest.raises(ValueError, match=f"{key} has other values"):
        convert.g_selfatt(model, state)
