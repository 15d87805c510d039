"""Attention over windows: contract, oracle, exactness, maps."""

import keras
import numpy as np
import oracles
import pytest
from keras import ops
from layer_contract import as_array
from layer_contract import call_of
from layer_contract import DTYPE
from layer_contract import gradients
from layer_contract import LayerCase
from layer_contract import LayerContract
from layer_contract import weights_of
from window_attention_helpers import LAYERS
from window_attention_helpers import oracle
from window_attention_helpers import random_layer
from window_attention_helpers import tolerance

from keras_equiattn import groups
from keras_equiattn.layers import AffineSelfConv2D
from keras_equiattn.layers import SimpleAffineSelfConv2D
from keras_equiattn.layers import StandAloneSelfAttention2D
from keras_equiattn.ops import group_action
from keras_equiattn.ops import steerable_basis
from keras_equiattn.testing import relative_difference

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
    "filter_basis": "steerable",
    "window_shape": "disc",
    "data_format": "channels_first",
}


WEIGHTS = {
    AffineSelfConv2D: 13,
    SimpleAffineSelfConv2D: 5,
    StandAloneSelfAttention2D: 9,
}


def case(layer, group, size, heads, border, rectangle=None, **options):
    """A case with few filters, or twice as many if positions are halved."""
    order = groups.get(group).order
    halves = 2 if layer is StandAloneSelfAttention2D else 1
    filters = 2 * halves if heads == 1 else heads * halves
    arguments = {"kernel_size": 3, **options}
    weights = WEIGHTS[layer]
    if layer is StandAloneSelfAttention2D and group == "p8":
        weights -= 1  # one embedding of both rows and columns
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
        weights=weights,
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


@pytest.mark.sweep
class TestEveryWindowAttention(LayerContract):
    """The same on all groups, borders, heads, even and odd sizes."""

    # Tested above, for each class by itself.
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
            ("p8", (6, 6), 1, "zeros", None, LAYERS),
        )
        for layer in layers
    )
    layer = AffineSelfConv2D
    arguments = (ARGUMENTS,)


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


@pytest.mark.parametrize(
    "dtype",
    [pytest.param("float16", marks=pytest.mark.torch_first), "mixed_bfloat16"],
)
def test_half_precision_by_hand_and_compiled(dtype):
    layer = SimpleAffineSelfConv2D(4, 3, num_heads=2, group="p4", dtype=dtype)
    x = np.random.default_rng(0).normal(size=(1, 5, 5, 4, 2))
    x = ops.cast(x, layer.compute_dtype)
    by_hand, call = layer(x), call_of(layer)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        call = tf.function(layer)
    pair = (as_array(ops.cast(y, "float32")) for y in (call(x), by_hand))
    assert relative_difference(*pair) < 0.05


@pytest.mark.parametrize(
    "group", ["p4", pytest.param("p4m", marks=pytest.mark.torch_first)]
)
def test_one_image_is_one_of_many(group):
    """Values and gradients, compiled: JAX 0.10 gets one form wrong."""
    layer = SimpleAffineSelfConv2D(16, 3, num_heads=2, group=group)
    shape = (2, 8, 6, groups.get(group).order, 4)
    layer.build(shape)
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape).astype("float32")
    cotangent = rng.normal(size=(*shape[:-1], 16)).astype("float32")
    cotangent[1] = 0
    call = call_of(layer)
    outputs = as_array(call(x))[:1], as_array(call(x[:1]))
    assert relative_difference(*outputs) < 1e-5
    both = gradients(layer, x, cotangent)
    both[0] = both[0][:1]
    alone = gradients(layer, x[:1], cotangent[:1])
    for one, other in zip(alone, both, strict=True):
        assert relative_difference(one, other) < 1e-4


@pytest.mark.torch_first
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    ("group", "border", "heads", "options"),
    [
        ("p4m", "zeros", 2, {}),
        ("p4", "mask", 1, {}),
        ("z2m", "reflect", 4, {}),
        ("p8", "zeros", 2, {}),
        ("p4", "mask", 2, {"window_shape": "disc"}),
        ("p2m", "reflect", 2, {"filter_basis": "steerable"}),
    ],
)
def test_oracle(layer, group, border, heads, options):
    made = random_layer(
        layer,
        filters=8,
        num_heads=heads,
        group=group,
        border=border,
        **options,
    )
    order = made.group.order
    x = np.random.default_rng(1).normal(size=(2, 5, 5, order, 3))
    y, maps = made(x.astype(DTYPE), return_attention_maps=True)
    expected, expected_maps = oracle(made, x)
    assert relative_difference(as_array(y), expected) < tolerance()
    actual = as_array(maps["window"])
    assert actual.shape == (2, 5, 5, order, heads, 3, 3)
    assert relative_difference(actual, expected_maps) < tolerance()


@pytest.mark.parametrize("layer", LAYERS)
def test_what_windows_are_made_of(layer):
    for name in groups.names():
        group = groups.get(name)
        made = layer(8, 3, num_heads=2, group=name)
        found = made.filter_basis, made.window_shape, made.window.shape
        if group.acts_on_grid:
            assert found == ("pixel", "square", "square")
        else:
            assert found == ("steerable", "disc", "disc")
    # Older files lack both entries.
    config = layer(8, 3, num_heads=2, group="p8").get_config()
    del config["filter_basis"], config["window_shape"]
    made = layer.from_config(config)
    assert (made.filter_basis, made.window_shape) == ("pixel", "square")


@pytest.mark.parametrize("layer", LAYERS[:2])
@pytest.mark.parametrize("basis", ["pixel", "steerable"])
def test_weights_of_the_window_start_small_where_they_turn(layer, basis):
    made = layer(64, 5, num_heads=2, group="p4", filter_basis=basis)
    made.build((None, 6, 6, 4, 3))
    expected = 1.0 if basis == "pixel" else 0.25
    for name in weights_of(made):
        if name.endswith(("psi", "beta")) and "query" not in name:
            axis = int(name.endswith("psi"))
            values = made.filters_of(getattr(made, name), 5, axis)
            spread = as_array(values).std()
            assert spread == pytest.approx(expected, rel=0.1), name


@pytest.mark.torch_first
def test_coefficients_of_the_window():
    """They weight the basis filters, for each element and channel."""
    layer = random_layer(AffineSelfConv2D, filters=4, num_heads=2, group="p8")
    basis = steerable_basis("p8", 3, multiplied=True)[0]
    w = weights_of(layer)
    assert w["key_psi"].shape == (8, 4, 4)
    psi = layer.filters_of(layer.key_psi, 3, axis=1)
    expected = np.einsum("pn,rnc->rpc", basis, w["key_psi"])
    expected = expected.reshape(8, 3, 3, 4)
    assert relative_difference(as_array(psi), expected) < tolerance()
    beta = layer.filters_of(layer.key_beta, 3)
    expected = (basis @ w["key_beta"]).reshape(3, 3, 4)
    assert relative_difference(as_array(beta), expected) < tolerance()
    # Nothing is halved.
    assert StandAloneSelfAttention2D(3, 3, num_heads=3, group="p8").filters == 3
    with pytest.raises(ValueError, match=r"square.*kernel_size=\(3, 5\)"):
        AffineSelfConv2D(4, (3, 5), num_heads=2, filter_basis="steerable")


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
