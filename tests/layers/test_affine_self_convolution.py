"""Attention over windows: contract, oracle, vectors, limits, maps."""

import inspect

import keras
import numpy as np
import oracles
import pytest
from keras import ops
from layer_contract import as_array
from layer_contract import FLOAT64_BACKENDS
from layer_contract import gradients
from layer_contract import LayerCase
from layer_contract import LayerContract
from layer_contract import second_derivative
from vectors import load_vectors

from keras_equiattn import groups
from keras_equiattn.layers import AffineSelfConv2D
from keras_equiattn.layers import SimpleAffineSelfConv2D
from keras_equiattn.layers import StandAloneSelfAttention2D
from keras_equiattn.ops import group_action
from keras_equiattn.ops.geometry import Window
from keras_equiattn.ops.group.linear import group_linear
from keras_equiattn.ops.papers.affine import affine_map
from keras_equiattn.ops.papers.affine import relative_positions
from keras_equiattn.ops.windows.api import window_attention
from keras_equiattn.testing import assert_equivariant
from keras_equiattn.testing import relative_difference

LAYERS = (AffineSelfConv2D, SimpleAffineSelfConv2D, StandAloneSelfAttention2D)
DTYPE = "float64" if keras.backend.backend() != "jax" else "float32"
SLOW = (pytest.mark.slow, pytest.mark.every_backend)

ARGUMENTS = {
    "filters": 8,
    "kernel_size": (3, 3),
    "num_heads": 2,
    "group": "p4m",
    "border": "mask",
    "scale": 0.3,
    "dilation_rate": (2, 2),
    "recompute": False,
    "kernel_initializer": keras.initializers.HeNormal(seed=1),
    "bias_initializer": keras.initializers.Constant(0.5),
    "window_initializer": keras.initializers.RandomNormal(stddev=0.5, seed=2),
    "kernel_regularizer": keras.regularizers.L2(0.01),
    "window_regularizer": keras.regularizers.L1(0.02),
    "data_format": "channels_first",
}
WEIGHTS = {
    AffineSelfConv2D: 13,
    SimpleAffineSelfConv2D: 5,
    StandAloneSelfAttention2D: 9,
}


def case(layer, group, size, heads, border, rectangle=None, **options):
    """Filters of one channel per head, or two where positions are halved."""
    order = groups.get(group).order
    halves = 2 if layer is StandAloneSelfAttention2D else 1
    filters = 2 * halves if heads == 1 else heads * halves
    arguments = {"kernel_size": 3, **options}
    if group == "z2" and rectangle is None:
        shape = (2, *size, 3)
    else:
        shape = (2, *size, order, 3)
    return LayerCase(
        layer,
        {
            "filters": filters,
            "num_heads": heads,
            "group": group,
            "border": border,
            **arguments,
        },
        shape,
        (*shape[:-1], filters),
        weights=WEIGHTS[layer],
        group=group,
        rectangle=rectangle,
        reach=1,
    )


class TestAffineSelfConv2D(LayerContract):
    layer = AffineSelfConv2D
    cases = (
        case(AffineSelfConv2D, "p4", (5, 5), 1, "mask", rectangle=(4, 6)),
        case(AffineSelfConv2D, "p4m", (6, 6), 8, "zeros"),
        case(AffineSelfConv2D, "z2m", (5, 6), 1, "zeros", kernel_size=(1, 3)),
    )
    arguments = (ARGUMENTS,)


class TestSimpleAffineSelfConv2D(LayerContract):
    layer = SimpleAffineSelfConv2D
    cases = (case(SimpleAffineSelfConv2D, "p4", (6, 6), 2, "zeros"),)
    arguments = (ARGUMENTS,)


class TestStandAloneSelfAttention2D(LayerContract):
    layer = StandAloneSelfAttention2D
    cases = (
        case(StandAloneSelfAttention2D, "p4m", (5, 5), 1, "mask"),
        case(StandAloneSelfAttention2D, "z2", (6, 5), 2, "zeros"),
    )
    arguments = (ARGUMENTS,)


@pytest.mark.slow
@pytest.mark.every_backend
@pytest.mark.sweep
class TestEveryWindowAttention(LayerContract):
    """The same on all groups, borders, heads, even and odd sizes."""

    # Of each class by itself, above.
    test_golden_weights = None
    test_config_holds_every_argument_with_its_value = None

    cases = tuple(
        case(layer, group, size, heads, border, rectangle)
        for group, size, heads, border, rectangle, layers in (
            ("z2", (5, 6), 1, "mask", None, LAYERS[:2]),
            ("z2", (6, 6), 8, "zeros", (5, 7), LAYERS),
            ("z2m", (6, 5), 8, "mask", (5, 6), LAYERS),
            ("p4", (6, 6), 8, "zeros", (7, 5), LAYERS[::2]),
            ("p4", (5, 5), 1, "reflect", (4, 6), LAYERS[:2]),
            ("p4m", (6, 6), 1, "zeros", (5, 4), LAYERS[::2]),
            ("p4m", (5, 5), 8, "mask", None, LAYERS[:2]),
            ("p8", (6, 6), 1, "zeros", None, LAYERS[:1]),
        )
        for layer in layers
    )
    layer = AffineSelfConv2D
    arguments = (ARGUMENTS,)


def random_layer(layer, channels=3, seed=0, **arguments):
    """Built, with every weight drawn anew."""
    arguments = {"kernel_size": 3, "dtype": DTYPE, **arguments}
    made = layer(data_format="channels_last", **arguments)
    made.build((None, None, None, made.group.order, channels))
    rng = np.random.default_rng(seed)
    for variable in made.weights:
        variable.assign(0.7 * rng.normal(size=variable.shape))
    return made


def weights_of(layer):
    return {v.name: as_array(v).astype("float64") for v in layer.weights}


def oracle(layer, x):
    """Output and weights by loops over the group and the window."""
    w, group = weights_of(layer), layer.group.name
    scale = layer.scale or layer.num_heads / layer.filters

    def linear(name):
        return oracles.group_linear(
            x, w[f"{name}_kernel"], w[f"{name}_bias"], group
        )

    if isinstance(layer, SimpleAffineSelfConv2D):
        keys = values = linear("input")
        of_keys = of_values = w["psi"], w["beta"]
        middle = tuple(n // 2 for n in layer.kernel_size)
        query = oracles.affine_query(
            keys, w["psi"][:, middle[0], middle[1]], w["beta"][middle], group
        )
    else:
        query, keys, values = map(linear, ("query", "key", "value"))
        if isinstance(layer, AffineSelfConv2D):
            query = oracles.affine_query(
                query, w["query_psi"], w["query_beta"], group
            )
            of_keys = w["key_psi"], w["key_beta"]
            of_values = w["value_psi"], w["value_beta"]
        else:
            rows, columns = w["row_embedding"], w["column_embedding"]
            half = rows.shape[1] // layer.num_heads
            beta = np.zeros((*layer.kernel_size, layer.filters))
            for c in range(layer.filters):
                head, place = divmod(c, 2 * half)
                if place < half:
                    beta[:, :, c] = rows[:, None, head * half + place]
                else:
                    beta[:, :, c] = columns[:, head * half + place - half]
            of_keys, of_values = (None, beta), (None, 0 * beta)
    y, maps = oracles.affine_attention(
        query,
        keys,
        values,
        of_keys,
        of_values,
        group,
        layer.num_heads,
        scale,
        layer.border,
    )
    return oracles.group_linear(y, w["output_kernel"], None, group), maps


@pytest.mark.torch_first
def test_weights_of_one_kind_start_differently():
    layer = AffineSelfConv2D(8, 3, num_heads=2, group="p4")
    layer.build((None, 6, 6, 4, 8))
    w = weights_of(layer)
    for first, second in (
        ("query_kernel", "key_kernel"),
        ("value_kernel", "output_kernel"),
        ("key_psi", "value_psi"),
        ("key_beta", "value_beta"),
    ):
        values = np.stack([w[first].ravel(), w[second].ravel()])
        assert abs(np.corrcoef(values)[0, 1]) < 0.5


def tolerance():
    return 1e-12 if DTYPE == "float64" else 1e-5


@pytest.mark.torch_first
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    ("group", "border", "heads"),
    [("p4m", "zeros", 2), ("p4", "mask", 1), ("z2m", "reflect", 4)],
)
def test_oracle(layer, group, border, heads):
    made = random_layer(
        layer, filters=8, num_heads=heads, group=group, border=border
    )
    order = made.group.order
    x = np.random.default_rng(1).normal(size=(2, 5, 5, order, 3))
    y, maps = made(x.astype(DTYPE), return_attention_maps=True)
    expected, expected_maps = oracle(made, x)
    assert relative_difference(as_array(y), expected) < tolerance()
    actual = as_array(maps["window"])
    assert actual.shape == (2, 5, 5, order, heads, 3, 3)
    assert relative_difference(actual, expected_maps) < tolerance()


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


@pytest.mark.torch_first
@pytest.mark.parametrize("layer", LAYERS)
def test_maps_turn_with_the_image(layer):
    made = random_layer(layer, filters=8, num_heads=2, group="p4m")
    x = np.random.default_rng(1).normal(size=(1, 5, 5, 8, 3)).astype(DTYPE)

    def maps(x):
        _, found = made(x, return_attention_maps=True)
        return as_array(found["window"])

    still = maps(x)
    for g in range(8):
        moved = maps(group_action(ops.convert_to_tensor(x), "p4m", g))
        # Pixels and elements, then the window of each.
        folded = still.reshape(1, 5, 5, 8, -1)
        folded = as_array(
            group_action(ops.convert_to_tensor(folded), "p4m", g)
        ).reshape(-1, 3, 3)
        windows = folded.transpose(1, 2, 0)
        expected = oracles.turn(windows, "p4m", g).transpose(2, 0, 1)
        expected = expected.reshape(still.shape)
        assert relative_difference(moved, expected) < 1e-5
        if g:
            assert relative_difference(moved, still) > 1e-2


@pytest.mark.torch_first
def test_map_of_one_pixel():
    layer = random_layer(AffineSelfConv2D, filters=4, num_heads=2, group="p4")
    x = np.random.default_rng(1).normal(size=(2, 5, 4, 4, 3)).astype(DTYPE)
    y, whole = layer(x, return_attention_maps=True)
    again, one = layer(x, return_attention_maps=True, query=(3, 1))
    assert one["window"].shape == (2, 4, 2, 3, 3)
    np.testing.assert_array_equal(
        as_array(one["window"]), as_array(whole["window"])[:, 3, 1]
    )
    np.testing.assert_array_equal(as_array(again), as_array(y))
    with pytest.raises(ValueError, match=r"within the output.*\(5, 4\)"):
        layer(x, return_attention_maps=True, query=(5, 0))


@pytest.mark.torch_first
def test_shared_code_of_images_and_feature_maps():
    layer = random_layer(AffineSelfConv2D, filters=4, num_heads=2)
    x = np.random.default_rng(1).normal(size=(2, 5, 4, 3)).astype(DTYPE)
    flat = as_array(layer(x))
    np.testing.assert_array_equal(
        flat, as_array(layer(x[:, :, :, None]))[:, :, :, 0]
    )


@pytest.mark.torch_first
@pytest.mark.skipif(
    keras.backend.backend() not in FLOAT64_BACKENDS,
    reason="float64 is off by default on this backend",
)
def test_strong_weights_stay_exact():
    layer = random_layer(AffineSelfConv2D, filters=4, num_heads=2, group="p4m")
    for variable in (layer.query_kernel, layer.key_kernel):
        variable.assign(6 * as_array(variable))
    x = np.random.default_rng(1).normal(size=(2, 6, 6, 8, 3))
    assert_equivariant(layer, "p4m", x, rtol=1e-12)


@pytest.mark.torch_first
def test_large_scores_stay_finite_in_half_precision():
    layer = AffineSelfConv2D(
        8, 3, 1, group="p4", dtype="float16", scale=100.0, border="mask"
    )
    x = 10 * np.random.default_rng(1).normal(size=(2, 5, 5, 4, 3))
    assert np.isfinite(as_array(layer(x.astype("float16")))).all()


@pytest.mark.slow
@pytest.mark.every_backend
def test_second_derivatives_without_recomputation():
    """Of the sum of squares with respect to the input, along a direction."""
    x = np.random.default_rng(1).normal(size=(1, 4, 4, 1, 2)).astype(DTYPE)
    direction = np.random.default_rng(2).normal(size=x.shape).astype(DTYPE)
    layer = random_layer(
        AffineSelfConv2D, 2, filters=2, num_heads=1, recompute=False
    )

    def slope(x):
        cotangent = 2 * as_array(layer(x))
        return (gradients(layer, x, cotangent)[0] * direction).sum()

    step = 1e-3 if DTYPE == "float64" else 1e-2
    expected = (slope(x + step * direction) - slope(x - step * direction)) / (
        2 * step
    )
    actual = second_derivative(layer, x, direction)
    assert abs(actual - expected) < 1e-2 * abs(expected)


@pytest.mark.torch_first
def test_second_derivatives_are_right_or_refused():
    x = np.random.default_rng(1).normal(size=(1, 4, 4, 1, 2)).astype(DTYPE)
    layers = [
        random_layer(
            AffineSelfConv2D, 2, filters=2, num_heads=1, recompute=recompute
        )
        for recompute in (True, False)
    ]
    if keras.backend.backend() == "jax":
        first, second = (second_derivative(layer, x, x) for layer in layers)
        assert abs(first - second) < 1e-3 * abs(second)
        return
    with pytest.raises(Exception, match="recompute=False"):
        second_derivative(layers[0], x, x)


@pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="Transforms of PyTorch."
)
def test_gradients_by_torch_func():
    """One is that of autograd; one within another is refused."""
    import torch

    layer = random_layer(AffineSelfConv2D, 2, filters=2, num_heads=1)
    x = np.random.default_rng(1).normal(size=(1, 4, 4, 1, 2)).astype(DTYPE)

    def loss(x):
        return (layer(x) ** 2).sum()

    found = torch.func.grad(loss)(torch.tensor(x))
    expected = gradients(layer, x, 2 * as_array(layer(x)))[0]
    np.testing.assert_allclose(as_array(found), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(NotImplementedError, match="recompute=False"):
        torch.func.grad(lambda x: torch.func.grad(loss)(x).sum())(
            torch.tensor(x)
        )


@pytest.mark.torch_first
def test_many_offsets_and_a_window_larger_than_the_image():
    layer = random_layer(
        StandAloneSelfAttention2D,
        filters=4,
        num_heads=2,
        kernel_size=11,
        border="mask",
        group="p4",
    )
    x = np.random.default_rng(1).normal(size=(2, 4, 4, 4, 3))
    expected, _ = oracle(layer, x)
    actual = as_array(layer(x.astype(DTYPE)))
    assert relative_difference(actual, expected) < tolerance()


@pytest.mark.torch_first
def test_many_offsets_on_images_of_any_size():
    layer = random_layer(
        StandAloneSelfAttention2D,
        filters=4,
        num_heads=2,
        kernel_size=11,
        dtype="float32",
    )
    model = keras.Sequential([keras.Input((None, None, 3)), layer])
    for size in ((5, 6), (4, 7)):
        x = np.random.default_rng(1).normal(size=(2, *size, 1, 3))
        expected, _ = oracle(layer, x)
        y = model.predict(x[:, :, :, 0].astype("float32"), verbose=0)
        assert relative_difference(y, expected[:, :, :, 0]) < 1e-5


@pytest.mark.torch_first
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("layer", LAYERS)
def test_one_pixel_is_weighed_with_one(layer, recompute):
    """Gradients of queries and keys are zero up to rounding, not missing."""
    made = random_layer(
        layer,
        filters=4,
        num_heads=2,
        kernel_size=1,
        group="p4",
        recompute=recompute,
    )
    x = np.random.default_rng(1).normal(size=(2, 3, 4, 4, 3))
    expected, _ = oracle(made, x)
    x = x.astype(DTYPE)
    assert relative_difference(as_array(made(x)), expected) < tolerance()
    _, *found = gradients(made, x, np.ones((2, 3, 4, 4, 4), DTYPE))
    for variable, gradient in zip(made.trainable_variables, found, strict=True):
        of_scores = variable.name.startswith(("query", "key", "row", "column"))
        assert (abs(gradient).max() > tolerance()) != of_scores, variable.name


@pytest.mark.torch_first
def test_dilation():
    layer = random_layer(
        AffineSelfConv2D, filters=4, num_heads=2, group="p4", dilation_rate=2
    )
    x = np.random.default_rng(1).normal(size=(2, 7, 7, 4, 3)).astype(DTYPE)
    # A pixel sees nothing that lies at an odd distance.
    changed = x.copy()
    changed[:, 2, 3] += 1
    same = np.isclose(as_array(layer(x)), as_array(layer(changed)))
    touched = ~same.all(axis=(0, 3, 4))
    rows, columns = np.nonzero(touched)
    assert set(rows) == {0, 2, 4}
    assert set(columns) == {1, 3, 5}


@pytest.mark.torch_first
def test_affine_map_refuses_what_does_not_turn():
    psi, beta = np.zeros((4, 3, 5, 2)), np.zeros((3, 5, 2))
    with pytest.raises(ValueError, match="square"):
        affine_map(psi, beta, "p4")


@pytest.mark.torch_first
@pytest.mark.parametrize(
    ("psi", "beta", "message"),
    [
        ((8, 3, 3, 2), (3, 3, 2), r"`psi`.*4 elements of 'p4'.*\(8, 3, 3, 2"),
        ((4, 3, 3), (3, 3), r"`psi`.*\(order, .* axis 0.*\(4, 3, 3\)"),
        ((4, 3, 3, 2), (5, 5, 2), r"`beta`.*\(5, 5, 2\), psi.shape=\(4, 3, 3"),
        ((4, 3, 3, 2), (3, 3, 4), r"`beta`.*\(3, 3, 4\), psi.shape=\(4, 3, 3"),
        ((4, 3, 3, 2), (3, 3), r"`beta`.*\(3, 3\), psi.shape=\(4, 3, 3, 2\)"),
    ],
)
def test_affine_map_refuses_what_does_not_fit(psi, beta, message):
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(affine_map)(np.zeros(psi), np.zeros(beta), "p4")


@pytest.mark.torch_first
@pytest.mark.parametrize(
    ("rows", "columns", "heads", "message"),
    [
        ((3, 4), (3, 6), 2, r"`rows` and `columns`.*\(3, 4\), .*\(3, 6\)"),
        ((3,), (3,), 1, r"`rows` and `columns`.*\(3,\), .*\(3,\)"),
        ((3, 4), (3, 4), 3, r"divisible by num_heads=3.*\(3, 4\)"),
        ((3, 4), (3, 4), 0, "`num_heads`.*0"),
    ],
)
def test_relative_positions_refuse_what_does_not_fit(
    rows, columns, heads, message
):
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(relative_positions)(
            np.zeros(rows), np.zeros(columns), heads, "z2"
        )


@pytest.mark.torch_first
@pytest.mark.parametrize(
    ("layer", "arguments", "message"),
    [
        (AffineSelfConv2D, {"filters": 10}, r"filters=10.*num_heads=8"),
        (
            StandAloneSelfAttention2D,
            {"filters": 8},
            r"filters=8.*2 \* num_heads=8",
        ),
        (AffineSelfConv2D, {"filters": 0}, r"`filters`.*0"),
        (AffineSelfConv2D, {"num_heads": -1}, r"`num_heads`.*-1"),
        (AffineSelfConv2D, {"kernel_size": 4}, r"`kernel_size`.*odd.*4"),
        (
            AffineSelfConv2D,
            {"kernel_size": (3, 5), "group": "p4"},
            r"'p4'.*square.*\(3, 5\)",
        ),
        (
            AffineSelfConv2D,
            {"dilation_rate": (1, 2), "group": "p4"},
            r"square.*dilation_rate=\(1, 2\)",
        ),
        (AffineSelfConv2D, {"border": "wrap"}, r"`border`.*'mask'.*'wrap'"),
        (AffineSelfConv2D, {"scale": 0}, r"`scale`.*positive.*0"),
        (AffineSelfConv2D, {"recompute": 1}, r"`recompute`.*1"),
    ],
)
def test_bad_arguments(layer, arguments, message):
    with pytest.raises(ValueError, match=message):
        layer(**{"filters": 16, **arguments})


@pytest.mark.torch_first
def test_bad_shapes():
    layer = AffineSelfConv2D(8, group="p4")
    with pytest.raises(ValueError, match=r"group axis.*8.*'p4'.*4"):
        layer.build((None, 6, 6, 8, 3))
    with pytest.raises(ValueError, match="feature maps on 'p4'"):
        layer.build((None, 6, 6, 3))
    for shape in ((None, 4, 4, 0), (None, 4, 4, None)):
        with pytest.raises(ValueError, match=rf"channels.*{shape[-1]}\)"):
            AffineSelfConv2D(8).build(shape)


@pytest.mark.torch_first
def test_linear_map_refuses_what_does_not_fit():
    x, kernel = np.zeros((1, 5, 5, 2, 3)), np.zeros((2, 3, 2))
    with pytest.raises(ValueError, match=r"\(4, channels, .*\(2, 3, 2\)"):
        group_linear(x, kernel, None, "p4")
