"""Attention of all pixels to each other: contract, oracle, positions."""

import keras
import numpy as np
import oracles
import pytest
from keras import ops
from layer_contract import as_array
from layer_contract import DTYPE
from layer_contract import LayerCase
from layer_contract import LayerContract
from layer_contract import LIMIT
from layer_contract import weights_of

from keras_equiattn import groups
from keras_equiattn.layers import GroupMultiHeadAttention2D
from keras_equiattn.ops import backend
from keras_equiattn.ops import kernel_orbit
from keras_equiattn.ops import multi_head_attention
from keras_equiattn.ops.multi_head import multi_head_attention_on_group
from keras_equiattn.testing import equivariance_error
from keras_equiattn.testing import relative_difference

NO_SHIFT = "pixels at the border see the pixels that a shift brings in"


class TestGroupMultiHeadAttention2D(LayerContract):
    layer = GroupMultiHeadAttention2D
    cases = (
        LayerCase(
            GroupMultiHeadAttention2D,
            {"num_heads": 2, "group": "p4m", "basis": "irreps"},
            (2, 4, 4, 8, 4),
            (2, 4, 4, 8, 4),
            weights=9,
            group="p4m",
            rectangle=(4, 3),
            reach=None,
            no_shift=NO_SHIFT,
            unknown_size=False,
        ),
        LayerCase(
            GroupMultiHeadAttention2D,
            {"num_heads": 1, "group": "p4", "use_positions": False},
            (2, 3, 3, 4, 2),
            (2, 3, 3, 4, 2),
            weights=8,
            group="p4",
            rectangle=(5, 2),
            reach=None,
            no_shift=NO_SHIFT,
        ),
        LayerCase(
            GroupMultiHeadAttention2D,
            {"num_heads": 2, "group": "z2", "basis": "irreps"},
            (2, 3, 4, 4),
            (2, 3, 4, 4),
            weights=9,
            group="z2",
            reach=None,
            no_shift=NO_SHIFT,
            unknown_size=False,
        ),
    )
    arguments = (
        {
            "num_heads": 2,
            "group": "p4m",
            "basis": "irreps",
            "use_positions": False,
            "kernel_initializer": keras.initializers.HeNormal(seed=1),
            "bias_initializer": keras.initializers.Constant(0.5),
            "embedding_initializer": keras.initializers.Constant(0.1),
            "kernel_regularizer": keras.regularizers.L2(0.01),
            "filter_basis": "steerable",
            "data_format": "channels_first",
        },
    )


def random_layer(group, shape, **options):
    layer = GroupMultiHeadAttention2D(2, group, dtype=DTYPE, **options)
    layer.build(shape)
    rng = np.random.default_rng(0)
    layer.set_weights([rng.normal(size=v.shape) for v in layer.weights])
    return layer, rng.normal(size=shape).astype(DTYPE)


@pytest.mark.parametrize("basis", ["regular", "irreps"])
@pytest.mark.parametrize("group", ["z2m", "p4", "p4m"])
def test_agrees_with_oracle(group, basis):
    shape = (2, 3, 4, groups.get(group).order, 4)
    layer, x = random_layer(group, shape, basis=basis)
    y, maps = layer(x, return_attention_maps=True)
    expected, weights = oracles.multi_head_attention(
        np.float64(x), weights_of(layer), group, 2
    )
    assert relative_difference(as_array(y), expected) < LIMIT
    assert list(maps) == ["image"]
    assert relative_difference(as_array(maps["image"]), weights) < LIMIT


@pytest.mark.parametrize("group", ["p4", "p4m"])
def test_gradients_of_both_bases_agree(group):
    """With respect to the input, all linear maps and the embedding."""
    group = groups.get(group)
    order, rng = group.order, np.random.default_rng(0)
    shapes = (2, 3, 4, order, 4), (order, 4, 12), (12,), (order, 4, 4), (4,)
    tensors = tuple(
        ops.convert_to_tensor(rng.normal(size=shape).astype(DTYPE))
        for shape in (*shapes, (order, 7, 7, 2, 2))
    )
    upstream = ops.convert_to_tensor(rng.normal(size=shapes[0]).astype(DTYPE))

    def gradients(basis):
        def function(x, kernel, bias, last_kernel, last_bias, embedding):
            maps = (kernel, bias), (last_kernel, last_bias)
            return multi_head_attention_on_group(
                x, *maps, embedding, 2, group, basis
            )[0]

        return backend.vjp(function, tensors, upstream)[1]

    pairs = zip(gradients("regular"), gradients("irreps"), strict=True)
    for regular, irreps in pairs:
        found = as_array(irreps), as_array(regular)
        assert relative_difference(*found) < LIMIT


@pytest.mark.parametrize(
    "group", ["p8", pytest.param("p12m", marks=pytest.mark.torch_first)]
)
def test_groups_that_do_not_act_on_the_grid(group):
    """Both bases agree, and quarter turns and mirrors are exact."""
    group = groups.get(group)
    shape = (1, 3, 3, group.order, 2)
    layers = [
        random_layer(group, shape, basis=basis)[0]
        for basis in ("regular", "irreps")
    ]
    x = ops.convert_to_tensor(random_layer(group, shape)[1])
    assert relative_difference(*(as_array(f(x)) for f in layers)) < LIMIT
    errors = equivariance_error(
        layers[1], group, shape, elements=group.grid_elements
    )
    assert errors.max() < 1e-5


def test_steerable_positions_turn_as_filters_do():
    layer, _ = random_layer("p8", (1, 3, 3, 8, 2))
    orbit = kernel_orbit(
        layer.filters_of(layer.embedding, 5),
        "p8",
        group_axis=False,
        filter_basis="steerable",
    )
    found, expected = as_array(layer._embedded()), as_array(orbit)
    found = found.reshape(expected.shape)
    assert relative_difference(found, expected) < LIMIT


def test_the_map_of_one_pixel():
    layer, x = random_layer("p4", (2, 3, 3, 4, 4))
    whole = layer(x, return_attention_maps=True)[1]["image"]
    one = layer(x, return_attention_maps=True, query=(1, 2))[1]["image"]
    np.testing.assert_array_equal(as_array(one), as_array(whole)[:, 1, 2])
    np.testing.assert_allclose(
        as_array(ops.sum(whole, axis=(-2, -1))), 1, rtol=1e-5
    )


def test_positions_matter_and_fit_smaller_images():
    layer, x = random_layer("p4", (1, 4, 4, 4, 4))
    # Shuffled pixels give shuffled results only without positions.
    there = x[:, ::-1, ::-1].copy()
    moved, still = (as_array(layer(a)) for a in (there, x))
    assert relative_difference(moved, still[:, ::-1, ::-1]) > 1e-2
    without, _ = random_layer("p4", (1, 4, 4, 4, 4), use_positions=False)
    moved, still = (as_array(without(a)) for a in (there, x))
    assert relative_difference(moved, still[:, ::-1, ::-1]) < LIMIT

    small, _ = random_layer("p4", (1, 3, 3, 4, 4))
    weights = layer.get_weights()
    weights[-1] = weights[-1][1:-1, 1:-1]
    small.set_weights(weights)
    part = x[:, :3, :3].copy()
    outputs = (as_array(which(part)) for which in (layer, small))
    assert relative_difference(*outputs) < LIMIT


def test_errors():
    layer = GroupMultiHeadAttention2D(3, "p4")
    with pytest.raises(ValueError, match=r"divisible by `num_heads`.*=4.*=3"):
        layer.build((None, 4, 4, 4, 4))
    layer = GroupMultiHeadAttention2D(2, "p4")
    with pytest.raises(ValueError, match="known only at run time"):
        layer.build((None, None, 4, 4, 4))
    layer.build((None, 4, 4, 4, 4))
    with pytest.raises(ValueError, match="up to 4 pixels a side"):
        layer.compute_output_shape((None, 4, 5, 4, 4))
    with pytest.raises(ValueError, match="up to 4 pixels a side"):
        layer(np.zeros((1, 5, 4, 4, 4), "float32"))
    with pytest.raises(ValueError, match=r"`query`"):
        layer(
            np.zeros((1, 4, 4, 4, 4), "float32"),
            return_attention_maps=True,
            query=(4, 0),
        )


@pytest.mark.parametrize("shape", [(8, 8), (5, 7)])
def test_tables_that_do_not_fit(shape):
    """Tables of even sizes, and tables that leave out offsets."""
    x = ops.ones((1, 4, 4, 4, 1, 2))
    embedding = ops.ones((4, *shape, 1, 2))
    with pytest.raises(ValueError, match=r"`embedding` must have odd.*4 x 4"):
        multi_head_attention(x, x, x, embedding)


@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="others know all sizes"
)
def test_positions_need_a_known_size():
    import tensorflow as tf

    @tf.function(input_signature=[tf.TensorSpec((1, None, 4, 4, 1, 2))])
    def attention(x):
        return multi_head_attention(x, x, x, ops.ones((4, 7, 7, 1, 2)))

    with pytest.raises(ValueError, match="known only at run time"):
        attention(ops.ones((1, 4, 4, 4, 1, 2)))
