"""Group self-attention: contract, oracle, vectors, dropout, limits, maps."""

import keras
import numpy as np
import oracles
import pytest
from keras import ops
from layer_contract import as_array
from layer_contract import check_keras_contract
from layer_contract import gradients
from layer_contract import LayerCase
from layer_contract import LayerContract
from layer_contract import second_derivative
from vectors import load_vectors

from keras_equiattn import groups
from keras_equiattn.layers import GroupPooling
from keras_equiattn.layers import GroupSelfAttention2D
from keras_equiattn.layers import LiftingSelfAttention2D
from keras_equiattn.layers import RelativePositionEncoding
from keras_equiattn.testing import assert_equivariant
from keras_equiattn.testing import equivariance_error
from keras_equiattn.testing import relative_difference

LAYERS = (LiftingSelfAttention2D, GroupSelfAttention2D)
DTYPE = "float64" if keras.backend.backend() != "jax" else "float32"
SLOW = (pytest.mark.slow, pytest.mark.every_backend)

ARGUMENTS = {
    "filters": 5,
    "key_dim": 4,
    "num_heads": 2,
    "kernel_size": None,
    "group": "p4m",
    "attention_dropout": 0.1,
    "epsilon": 1e-12,
    "recompute": False,
    "kernel_initializer": keras.initializers.HeNormal(seed=1),
    "bias_initializer": keras.initializers.Constant(0.5),
    "kernel_regularizer": keras.regularizers.L2(0.01),
    "seed": 7,
    "data_format": "channels_first",
}


def case(layer, group, size, window, heads, rectangle=None, **options):
    lifting = layer is LiftingSelfAttention2D
    order = groups.get(group).order
    shape = (2, *size, *(() if lifting else (order,)), 3)
    return LayerCase(
        layer,
        {
            "filters": 4,
            "key_dim": 2 if lifting else 4,
            "num_heads": heads,
            "kernel_size": window,
            "group": group,
            **options,
        },
        shape,
        (*shape[:3], order, 4),
        weights=20 if lifting else 21,
        group=group,
        rectangle=rectangle,
        reach=None if window is None else window // 2,
        no_shift="attention is to the whole image",
    )


class TestLiftingSelfAttention2D(LayerContract):
    layer = LiftingSelfAttention2D
    cases = (case(layer, "p4", (5, 5), 3, 2),)
    arguments = (ARGUMENTS,)


class TestGroupSelfAttention2D(LayerContract):
    layer = GroupSelfAttention2D
    cases = (
        case(layer, "p4", (4, 4), 3, 2, rectangle=(4, 5)),
        case(layer, "z2m", (4, 3), None, 1),
    )
    arguments = (
        {
            **ARGUMENTS,
            "embedding_initializer": keras.initializers.RandomUniform(seed=3),
        },
    )


@pytest.mark.slow
@pytest.mark.every_backend
@pytest.mark.sweep
class TestEveryGroupSelfAttention(LayerContract):
    """The same on all groups, windows, heads, even and odd sizes."""

    # Of each class by itself, above.
    test_golden_weights = None
    test_config_holds_every_argument_with_its_value = None

    cases = tuple(
        case(layer, group, size, window, heads, rectangle)
        for group, size, window, heads, rectangle, layers in (
            ("z2", (5, 6), 3, 1, None, LAYERS),
            ("z2", (4, 4), None, 2, (3, 5), LAYERS),
            ("z2m", (6, 5), 3, 2, (5, 6), LAYERS),
            ("z2m", (4, 5), None, 1, (3, 3), LAYERS),
            ("p4", (5, 5), 3, 2, (4, 6), LAYERS[:1]),
            ("p4", (4, 4), None, 2, (5, 3), LAYERS),
            ("p4", (5, 5), None, 1, None, LAYERS[1:]),
            ("p4m", (6, 6), 3, 1, (5, 4), LAYERS),
            ("p4m", (4, 4), None, 2, None, LAYERS[:1]),
            ("p4m", (3, 3), None, 1, (2, 3), LAYERS[1:]),
            ("p8", (4, 4), 3, 2, None, LAYERS),
            ("p8", (3, 3), None, 1, None, LAYERS[:1]),
        )
        for layer in layers
    )
    layer = GroupSelfAttention2D
    arguments = (ARGUMENTS,)


def random_layer(layer, group="p4", window=3, channels=3, **arguments):
    """Built, with every weight drawn anew, always the same numbers.

    `seed` is of the layer, as all other arguments.
    """
    arguments = {
        **{"filters": 4, "key_dim": 5, "num_heads": 2, "dtype": DTYPE},
        **arguments,
    }
    made = layer(
        kernel_size=window,
        group=group,
        data_format="channels_last",
        **arguments,
    )
    made.build((None, None, None, *order_of(made), channels))
    rng = np.random.default_rng(0)
    for variable in made.weights:
        variable.assign(0.7 * rng.normal(size=variable.shape))
    return made


def order_of(layer):
    return (layer.group.order,) if layer.takes == "group" else ()


def sample(layer, size, batch=2, channels=3, seed=1, dtype=DTYPE):
    shape = (batch, *size, *order_of(layer), channels)
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def weights_of(layer):
    return {v.name: as_array(v).astype("float64") for v in layer.weights}


def strengthen(layer, factor):
    for variable in (layer.query_kernel, layer.key_kernel):
        variable.assign(factor * as_array(variable))


def oracle(layer, x, **options):
    return oracles.group_self_attention(
        x.astype("float64"),
        weights_of(layer),
        layer.group.name,
        layer.kernel_size,
        layer.epsilon,
        **options,
    )


def tolerance():
    return 1e-12 if DTYPE == "float64" else 1e-5


# --- Numbers ----------------------------------------------------------------


@pytest.mark.torch_first
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    ("group", "window", "size"),
    [
        ("p4m", 3, (4, 3)),
        ("p8", 3, (3, 4)),
        ("z2m", None, (3, 4)),
        pytest.param("p4m", None, (3, 4), marks=SLOW),
        pytest.param("p8", None, (4, 3), marks=SLOW),
        pytest.param("z2m", 5, (4, 3), marks=SLOW),
    ],
)
def test_oracle(layer, group, window, size):
    made = random_layer(layer, group, window)
    x = sample(made, size)
    y, maps = made(x, return_attention_maps=True)
    expected, expected_maps = oracle(made, x)
    assert relative_difference(as_array(y), expected) < tolerance()
    actual = as_array(maps["window" if window else "image"])
    assert relative_difference(actual, expected_maps) < tolerance()


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
    assert relative_difference(as_array(layer(x)), expected) < limit
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
    """The test that ours passes would have found it."""
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


@pytest.mark.torch_first
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    ("group", "window", "size", "dtype"),
    [
        ("p4m", 3, (4, 4), "float32"),
        ("p4m", 3, (5, 4), "float32"),
        ("p4", None, (4, 4), "float32"),
        ("z2m", None, (4, 4), "float32"),
        ("p8", 3, (4, 4), "float32"),
        ("p8m", 3, (4, 4), "float32"),
        ("p12", 3, (4, 4), "float32"),
        ("p16", 3, (4, 4), "float32"),
        ("p4", None, (4, 4), "float64"),
        pytest.param("p4m", 3, (4, 4), "float64", marks=SLOW),
        pytest.param("p4m", None, (4, 4), "float32", marks=SLOW),
        pytest.param("p4m", None, (4, 4), "float64", marks=SLOW),
        pytest.param("p8", 3, (4, 4), "float64", marks=SLOW),
        pytest.param("p12", 3, (4, 4), "float64", marks=SLOW),
        pytest.param("p16", 3, (4, 4), "float64", marks=SLOW),
        pytest.param("p8m", 3, (4, 4), "float64", marks=SLOW),
        pytest.param("z2m", None, (4, 4), "float64", marks=SLOW),
    ],
)
def test_strong_weights_stay_exact(layer, group, window, size, dtype):
    if dtype == "float64" and DTYPE != "float64":
        pytest.skip("float64 is off by default on this backend")
    made = random_layer(layer, group, window, dtype=dtype)
    strengthen(made, 6)
    assert_equivariant(
        made,
        group,
        sample(made, size, dtype=dtype),
        rtol=1e-5 if dtype == "float32" else 1e-12,
        elements=made.group.grid_elements,
    )


@pytest.mark.torch_first
@pytest.mark.parametrize("group", ["p8", "p16"])
@pytest.mark.parametrize("window", [7, None])
def test_epsilon_of_the_authors_stays_exact(group, window):
    """It leaves of coordinates the sign alone, also of those that are zero."""
    layer = LiftingSelfAttention2D(4, 4, 2, window, group, epsilon=1e-12)
    layer.build((1, 6, 6, 3))
    assert_equivariant(
        layer,
        group,
        sample(layer, (6, 6), dtype="float32"),
        rtol=1e-5,
        elements=layer.group.grid_elements,
    )


@pytest.mark.torch_first
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("window", [3, None])
def test_large_scores_agree_with_the_plain_form(layer, window):
    made = [
        random_layer(layer, window=window, recompute=recompute)
        for recompute in (True, False)
    ]
    x = sample(made[0], (4, 4))
    for one in made:
        strengthen(one, 10)
    y, expected = (as_array(one(x)) for one in made)
    limit = 1e-9 if DTYPE == "float64" else 1e-2
    assert relative_difference(y, expected) < limit
    for one in made:  # far beyond what an exponential holds
        strengthen(one, 10)
    assert np.isfinite(as_array(made[0](x))).all()
    of_x, *found = gradients(made[0], x, np.ones_like(y))
    assert all(np.isfinite(gradient).all() for gradient in (of_x, *found))


@pytest.mark.torch_first
def test_large_scores_stay_finite_in_half_precision():
    layer = GroupSelfAttention2D(4, 3, 1, 3, "p4", dtype="float16")
    x = 30 * sample(layer, (4, 4), dtype="float16")
    assert np.isfinite(as_array(layer(x))).all()


@pytest.mark.torch_first
@pytest.mark.parametrize(
    ("layer", "window"),
    [
        (LiftingSelfAttention2D, None),
        (GroupSelfAttention2D, 3),
        pytest.param(LiftingSelfAttention2D, 3, marks=SLOW),
        pytest.param(GroupSelfAttention2D, None, marks=SLOW),
    ],
)
def test_recomputation_changes_nothing(layer, window):
    made = [
        random_layer(layer, window=window, recompute=recompute)
        for recompute in (True, False)
    ]
    x = sample(made[0], (3, 4))
    y, expected = (as_array(one(x)) for one in made)
    assert relative_difference(y, expected) < tolerance()
    cotangent = np.random.default_rng(2).normal(size=y.shape).astype(DTYPE)
    found, wanted = (gradients(one, x, cotangent) for one in made)
    names = ["x", *(v.name for v in made[0].trainable_variables)]
    for name, gradient, other in zip(names, found, wanted, strict=True):
        scale = max(np.abs(other).max(), 1)
        limit = 10 * tolerance() * scale
        assert np.abs(gradient - other).max() < limit, name


def test_weights_of_one_kind_start_differently():
    layer = GroupSelfAttention2D(6, 6, 2)
    layer.build((None, 6, 6, 4, 12))
    w = weights_of(layer)
    for first, second in (
        ("query_kernel", "key_kernel"),
        ("key_kernel", "value_kernel"),
        ("row_kernel_1", "column_kernel_1"),
        ("row_kernel_2", "column_kernel_2"),
    ):
        values = np.stack([w[first].ravel(), w[second].ravel()])
        assert abs(np.corrcoef(values)[0, 1]) < 0.6
    # Of the fan-in of a linear map: channels, or those of all heads.
    wide = GroupSelfAttention2D(64, 32, 4)
    wide.build((None, 6, 6, 4, 50))
    w = weights_of(wide)
    assert np.isclose(w["query_kernel"].std(), (2 / 50) ** 0.5, rtol=0.1)
    assert np.isclose(w["output_kernel"].std(), (2 / 128) ** 0.5, rtol=0.1)


@pytest.mark.torch_first
@pytest.mark.parametrize("group", ["z2", "p4"])
def test_a_window_larger_than_the_image(group):
    layer = random_layer(GroupSelfAttention2D, group, window=7)
    x = sample(layer, (2, 3))
    expected, _ = oracle(layer, x)
    assert relative_difference(as_array(layer(x)), expected) < tolerance()


@pytest.mark.torch_first
def test_a_window_of_one_pixel():
    for layer in LAYERS:
        made = random_layer(layer, "z2m", window=1)
        x = sample(made, (2, 3))
        expected, _ = oracle(made, x)
        assert relative_difference(as_array(made(x)), expected) < tolerance()


@pytest.mark.torch_first
def test_images_on_the_group_of_translations():
    layer = random_layer(GroupSelfAttention2D, "z2")
    x = sample(layer, (4, 5))
    expected = as_array(layer(x))[:, :, :, 0]
    flat = as_array(layer(x[:, :, :, 0]))
    assert relative_difference(flat, expected) < 1e-6


@pytest.mark.torch_first
@pytest.mark.parametrize("window", [3, None])
def test_trains_at_sizes_known_only_at_run_time(window):
    inputs = keras.Input((None, None, 2))
    x = LiftingSelfAttention2D(3, 2, 1, window, attention_dropout=0.2)(inputs)
    x = GroupSelfAttention2D(3, 3, 2, window, attention_dropout=0.2)(x)
    x = keras.layers.GlobalAveragePooling2D()(GroupPooling()(x))
    model = keras.Model(inputs, keras.layers.Dense(2)(x))
    model.compile("sgd", "mse")
    start = [as_array(v) for v in model.trainable_variables]
    rng = np.random.default_rng(0)
    for size in ((4, 3), (5, 5)):
        images = rng.normal(size=(2, *size, 2)).astype("float32")
        model.fit(images, rng.normal(size=(2, 2)), verbose=0)
    for before, variable in zip(start, model.trainable_variables, strict=True):
        after = as_array(variable)
        assert np.isfinite(after).all(), variable.path
        # The softmax does not see the bias of the keys.
        blind = variable.name == "key_bias"
        assert blind or (after != before).any(), variable.path


@pytest.mark.torch_first
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(("window", "shape"), [(3, (3, 3)), (None, (7, 9))])
@pytest.mark.parametrize("recompute", [True, False])
def test_distinct_offsets_are_encoded_once(
    layer, window, shape, recompute, monkeypatch
):
    """Not those of all pairs of pixels, nor again for every block."""
    given = []
    call = RelativePositionEncoding.call

    def recorded(self, inputs):
        given.append(tuple(inputs.shape))
        return call(self, inputs)

    monkeypatch.setattr(RelativePositionEncoding, "call", recorded)
    made = random_layer(layer, window=window, recompute=recompute)
    x = sample(made, (4, 5))
    y = as_array(made(x))
    assert given == [(*shape, 2)]
    gradients(made, x, np.ones_like(y))
    made(x, return_attention_maps=True)
    assert given == 3 * [(*shape, 2)]


@pytest.mark.torch_first
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("window", [3, None])
@pytest.mark.parametrize("recompute", [True, False])
def test_empty_batches(layer, window, recompute):
    made = random_layer(layer, window=window, recompute=recompute)
    x, some = sample(made, (3, 4), batch=0), sample(made, (3, 4), batch=2)
    y, maps = made(x, return_attention_maps=True)
    assert tuple(y.shape) == (0, 3, 4, 4, 4)
    _, expected = made(some, return_attention_maps=True)
    for name, one in expected.items():
        assert tuple(maps[name].shape) == (0, *one.shape[1:])
    of_x, *found = gradients(made, x, np.ones(tuple(y.shape), DTYPE))
    assert of_x.shape == x.shape
    assert not any(gradient.any() for gradient in found)
    # Also where the size of the batch is known only at run time.
    inputs = keras.Input(x.shape[1:], dtype=DTYPE)
    model = keras.Model(inputs, made(inputs))
    assert model.predict_on_batch(x).shape == y.shape


def test_offsets_of_images_turn():
    """The unit is that of the longer side, or a rectangle would not turn."""
    layer = random_layer(LiftingSelfAttention2D, "p4", None)
    assert_equivariant(layer, "p4", sample(layer, (3, 5)), rtol=tolerance())


def test_regularizer_is_of_the_linear_maps():
    layer = GroupSelfAttention2D(
        4, 3, 1, 3, kernel_regularizer=keras.regularizers.L2(0.5)
    )
    layer.build((None, 4, 4, 4, 3))
    w = weights_of(layer)
    expected = 0.5 * sum(
        (w[f"{name}_kernel"] ** 2).sum()
        for name in ("query", "key", "value", "output")
    )
    total = float(ops.convert_to_numpy(sum(layer.losses)))
    assert np.isclose(total, expected, rtol=1e-5)


# --- Dropout ----------------------------------------------------------------


@pytest.mark.torch_first
@pytest.mark.parametrize("layer", LAYERS)
def test_keras_own_contract_with_dropout(layer):
    made = case(layer, "p4", (4, 4), 3, 2, attention_dropout=0.2)
    check_keras_contract(
        LayerCase(**{**vars(made), "seed_generators": 1}),
    )


@pytest.mark.torch_first
@pytest.mark.parametrize(
    ("layer", "window"),
    [
        (LiftingSelfAttention2D, None),
        (GroupSelfAttention2D, 3),
        pytest.param(LiftingSelfAttention2D, 3, marks=SLOW),
        pytest.param(GroupSelfAttention2D, None, marks=SLOW),
    ],
)
def test_dropout(layer, window):
    made = random_layer(
        layer, "z2m", window, attention_dropout=0.3, num_heads=1, seed=3
    )
    x = np.repeat(sample(made, (3, 2), batch=1), 100, axis=0)
    still = as_array(made(x))
    np.testing.assert_array_equal(still, as_array(made(x, training=False)))
    first, second = (as_array(made(x, training=True)) for _ in range(2))
    assert relative_difference(first, second) > 1e-2
    assert relative_difference(first[:1], first[1:2]) > 1e-2
    # The output is linear in the weights that are dropped.
    drawn = np.concatenate([first, second])
    error = drawn.std(axis=0) / np.sqrt(len(drawn))
    away = np.abs(drawn.mean(axis=0) - still[0]) / error
    assert away.max() < 5
    # 0.8 where they are independent; outputs have dropped weights in common.
    assert away.mean() < 2


@pytest.mark.torch_first
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("window", [3, None])
@pytest.mark.parametrize("recompute", [True, False])
def test_dropout_spares_no_output_element(layer, window, recompute):
    """Weights are dropped for all output elements together."""
    layer = random_layer(
        layer,
        window=window,
        attention_dropout=0.5,
        recompute=recompute,
    )
    for name in ("row_kernel_2", "column_kernel_2"):
        variable = getattr(layer.positions, name)
        variable.assign(np.zeros(variable.shape))
    # Without positions output elements differ by nothing else.
    y = as_array(layer(sample(layer, (3, 3)), training=True))
    expected = np.broadcast_to(y[:, :, :, :1], y.shape)
    assert relative_difference(y, expected) < 1e-5
    assert relative_difference(y, as_array(layer(sample(layer, (3, 3))))) > 1e-2


@pytest.mark.torch_first
@pytest.mark.parametrize("layer", LAYERS)
def test_seed_of_dropout(layer):
    def outputs(seed):
        keras.utils.set_random_seed(0)
        options = {"attention_dropout": 0.4, "filters": 4, "key_dim": 3}
        made = layer(num_heads=1, kernel_size=3, seed=seed, **options)
        x = sample(made, (4, 4), dtype="float32")
        made.build(x.shape)
        return [as_array(made(x, training=True)) for _ in range(2)]

    first, again, other = outputs(5), outputs(5), outputs(6)
    np.testing.assert_array_equal(first, again)
    assert relative_difference(first[0], other[0]) > 1e-2
    assert relative_difference(first[0], first[1]) > 1e-2
    for one, same in zip(first, outputs(np.int64(5)), strict=True):
        np.testing.assert_array_equal(one, same)


# --- Derivatives of derivatives ---------------------------------------------


@pytest.mark.torch_first
@pytest.mark.parametrize(
    ("layer", "window"),
    [
        (GroupSelfAttention2D, 3),
        pytest.param(GroupSelfAttention2D, None, marks=SLOW),
        pytest.param(LiftingSelfAttention2D, 3, marks=SLOW),
        pytest.param(LiftingSelfAttention2D, None, marks=SLOW),
    ],
)
def test_second_derivatives_without_recomputation(layer, window):
    """Of the sum of squares with respect to the input, along a direction."""
    made = random_layer(layer, "z2m", window, 2, num_heads=1, recompute=False)
    x = sample(made, (3, 3), 1, 2)
    direction = sample(made, (3, 3), 1, 2, seed=2)

    def slope(x):
        cotangent = 2 * as_array(made(x))
        return (gradients(made, x, cotangent)[0] * direction).sum()

    step = 1e-3 if DTYPE == "float64" else 1e-2
    expected = (slope(x + step * direction) - slope(x - step * direction)) / (
        2 * step
    )
    actual = second_derivative(made, x, direction)
    assert abs(actual - expected) < 1e-2 * abs(expected)


@pytest.mark.torch_first
@pytest.mark.parametrize("window", [3, None])
def test_second_derivatives_are_right_or_refused(window):
    layers = [
        random_layer(
            GroupSelfAttention2D, "z2m", window, 2, recompute=recompute
        )
        for recompute in (True, False)
    ]
    x = sample(layers[0], (3, 3), 1, 2)
    if keras.backend.backend() == "jax":
        first, second = (second_derivative(layer, x, x) for layer in layers)
        assert abs(first - second) < 1e-3 * abs(second)
        return
    with pytest.raises(Exception, match="recompute=False"):
        second_derivative(layers[0], x, x)


# --- Maps -------------------------------------------------------------------


@pytest.mark.torch_first
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(("window", "name"), [(3, "window"), (None, "image")])
def test_maps_add_up(layer, window, name):
    made = random_layer(layer, "p4", window)
    x = sample(made, (3, 4))
    y, maps = made(x, return_attention_maps=True)
    assert set(maps) == {name}
    key_order = (*order_of(made), 1)[0]
    seen = (3, 3) if window else (3, 4)
    weights = as_array(maps[name])
    assert weights.shape == (2, 3, 4, 4, 2, key_order, *seen)
    assert (weights >= 0).all()
    sums = weights.sum((-1, -2, -3))
    np.testing.assert_allclose(sums, key_order, rtol=1e-5)
    if window:  # nothing outside of the image
        assert not weights[:, 0, ..., 0, :].any()
        assert not weights[:, :, -1, ..., -1].any()
    assert relative_difference(as_array(made(x)), as_array(y)) < 1e-6


def moved_maps(maps, group, g):
    """`L_g` of maps: pixels, elements, key elements and what they see."""
    batch, *_, key_order, rows, columns = maps.shape
    order = maps.shape[3]
    folded = maps.reshape(*maps.shape[:4], -1)
    folded = np.stack([oracles.act(one, group, g) for one in folded])
    shape = (batch, *folded.shape[1:3], *maps.shape[3:])
    seen = folded.reshape(-1, key_order, rows, columns).transpose(2, 3, 1, 0)
    if key_order == order:
        seen = oracles.act(seen, group, g)
    else:
        seen = oracles.turn(seen, group, g)
    shape = (*shape[:-2], *seen.shape[:2])
    return seen.transpose(3, 2, 0, 1).reshape(shape)


@pytest.mark.torch_first
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    ("group", "window", "size"),
    [("p4m", 3, (3, 3)), ("p4", None, (3, 4)), ("p8", 3, (3, 4))],
)
def test_maps_turn_with_the_image(layer, group, window, size):
    made = random_layer(layer, group, window)
    x = sample(made, size)

    def maps(x):
        _, found = made(np.ascontiguousarray(x), return_attention_maps=True)
        return as_array(found["window" if window else "image"])

    still = maps(x)
    act = oracles.turn if x.ndim == 4 else oracles.act
    for g in made.group.grid_elements:
        moved = maps(np.stack([act(one, group, g) for one in x]))
        expected = moved_maps(still, group, g)
        assert relative_difference(moved, expected) < 1e-5
        if g and moved.shape == still.shape:
            assert relative_difference(moved, still) > 1e-2


@pytest.mark.torch_first
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(("window", "name"), [(3, "window"), (None, "image")])
def test_map_of_one_pixel(layer, window, name):
    made = random_layer(layer, "z2m", window)
    x = sample(made, (4, 3))
    y, whole = made(x, return_attention_maps=True)
    again, one = made(x, return_attention_maps=True, query=(3, 1))
    expected = as_array(whole[name])[:, 3, 1]
    assert relative_difference(as_array(one[name]), expected) < tolerance()
    np.testing.assert_array_equal(as_array(again), as_array(y))
    for query in ((4, 0), (0, -1), (1,), 2):
        with pytest.raises(ValueError, match=r"within the output.*\(4, 3\)"):
            made(x, return_attention_maps=True, query=query)
    with pytest.raises(ValueError, match="needs `return_attention_maps=True`"):
        made(x, query=(0, 0))


@pytest.mark.torch_first
def test_maps_have_no_dropout():
    layer = random_layer(GroupSelfAttention2D, "z2m", attention_dropout=0.5)
    x = sample(layer, (3, 3))
    _, still = layer(x, return_attention_maps=True)
    y, drawn = layer(x, training=True, return_attention_maps=True)
    np.testing.assert_array_equal(
        as_array(drawn["window"]), as_array(still["window"])
    )
    assert relative_difference(as_array(y), as_array(layer(x))) > 1e-2


@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow",
    reason="the other backends know sizes whenever they compute",
)
def test_maps_need_a_known_size():
    layer = LiftingSelfAttention2D(4, 2, 1)
    with pytest.raises(ValueError, match="height and width that are known"):
        layer(keras.Input((None, 4, 3)), return_attention_maps=True)


# --- Errors -----------------------------------------------------------------


@pytest.mark.once
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"filters": 0}, "`filters`.*0"),
        ({"key_dim": 1}, "`key_dim`.*at least .*1"),
        ({"num_heads": -1}, "`num_heads`.*-1"),
        ({"kernel_size": 4}, "`kernel_size` must be an odd.*or None.*4"),
        ({"kernel_size": 0}, "`kernel_size`.*0"),
        ({"kernel_size": (3, 3)}, r"`kernel_size`.*\(3, 3\)"),
        ({"attention_dropout": 1}, "`attention_dropout`.*below 1.*1"),
        ({"attention_dropout": -0.1}, "`attention_dropout`.*-0.1"),
        ({"epsilon": 0}, "`epsilon`.*positive.*0"),
        ({"recompute": 1}, "`recompute`.*1"),
        ({"group": "p5"}, "p5"),
        ({"data_format": "last"}, "`data_format`.*last"),
    ],
)
def test_bad_arguments(layer, arguments, message):
    good = {"filters": 4, "key_dim": 4, "num_heads": 2}
    with pytest.raises(ValueError, match=message):
        layer(**{**good, **arguments})


@pytest.mark.once
def test_channels_of_a_head_are_shared_out():
    LiftingSelfAttention2D(4, 2, 1)
    with pytest.raises(ValueError, match=r"`key_dim`.*at least 3.*2"):
        GroupSelfAttention2D(4, 2, 1)


@pytest.mark.once
def test_bad_shapes():
    lift = LiftingSelfAttention2D(4, 2, 1)
    with pytest.raises(ValueError, match="takes images"):
        lift.build((None, 6, 6, 4, 3))
    layer = GroupSelfAttention2D(4, 3, 1)
    with pytest.raises(ValueError, match=r"group axis.*8.*'p4'.*4"):
        layer.build((None, 6, 6, 8, 3))
    with pytest.raises(ValueError, match="feature maps on 'p4'"):
        layer.build((None, 6, 6, 3))
    with pytest.raises(ValueError, match="known number of channels"):
        layer.build((None, 6, 6, 4, None))


@pytest.mark.once
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
@pytest.mark.parametrize("shape", [(), (3,), (3, 3), (3, 3, 3)])
def test_too_few_axes_of_a_layer_that_is_built(layer, data_format, shape):
    made = layer(4, 3, 1, data_format=data_format)
    made.build((None, 4, 4, 4, *order_of(made)))
    with pytest.raises(ValueError, match=r"expected min_ndim=4") as error:
        made(np.zeros(shape, "float32"))
    assert str(shape) in str(error.value)


@pytest.mark.every_backend
@pytest.mark.torch_first
@pytest.mark.parametrize("window", [3, None])
def test_counts_in_double_precision_where_keras_is_told_to(window):
    """Sizes are then integers of 64 bits under TensorFlow, or are not."""
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    try:
        layer = LiftingSelfAttention2D(4, 3, 2, window)
        y = as_array(layer(np.ones((2, 4, 3, 3))))
    finally:
        keras.config.set_floatx(before)
    assert y.shape == (2, 4, 3, 4, 4)
    assert np.isfinite(y).all()
