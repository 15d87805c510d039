"""Group self-attention: attention maps."""

import keras
import numpy as np
import oracles
import pytest
from group_attention_helpers import LAYERS
from group_attention_helpers import order_of
from group_attention_helpers import random_layer
from group_attention_helpers import sample
from group_attention_helpers import tolerance
from layer_contract import as_array

from keras_equiattn.layers import LiftingSelfAttention2D
from keras_equiattn.testing import relative_difference


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
    [
        ("p4m", 3, (3, 3)),
        pytest.param("p4", None, (3, 4), marks=pytest.mark.sweep),
        pytest.param("p8", 3, (3, 4), marks=pytest.mark.sweep),
    ],
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


@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow",
    reason="the other backends know sizes whenever they compute",
)
def test_maps_need_a_known_size():
    layer = LiftingSelfAttention2D(4, 2, 1)
    with pytest.raises(ValueError, match="height and width that are known"):
        layer(keras.Input((None, 4, 3)), return_attention_maps=True)
