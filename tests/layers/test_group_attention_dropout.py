"""Group self-attention: dropout."""

import keras
import numpy as np
import pytest
from group_attention_helpers import case
from group_attention_helpers import LAYERS
from group_attention_helpers import random_layer
from group_attention_helpers import sample
from group_attention_helpers import SLOW
from layer_contract import as_array
from layer_contract import check_keras_contract
from layer_contract import LayerCase

from keras_equiattn.layers import GroupSelfAttention2D
from keras_equiattn.layers import LiftingSelfAttention2D
from keras_equiattn.testing import relative_difference


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
