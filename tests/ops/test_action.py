"""The group action: against NumPy, and as an action."""

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
from keras import ops

from keras_equiattn import groups
from keras_equiattn.ops import group_action

GRID = ["z2", "z2m", "p2", "p2m", "p4", "p4m"]


def random_values(*shape):
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def act(x, group, element):
    return ops.convert_to_numpy(group_action(x, group, element))


@pytest.mark.parametrize("name", GRID)
@pytest.mark.parametrize("size", [(4, 4), (5, 3)])
def test_agrees_with_numpy(name, size):
    order = groups.get(name).order
    x = random_values(2, *size, order, 3)
    for element in range(order):
        expected = np.stack([oracles.act(f, name, element) for f in x])
        np.testing.assert_array_equal(act(x, name, element), expected)
        plane = np.stack([oracles.turn(f, name, element) for f in x[..., 0, :]])
        np.testing.assert_array_equal(act(x[..., 0, :], name, element), plane)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(GRID), st.sampled_from([(2, 3), (3, 3)]), st.data())
def test_is_a_left_action(name, size, data):
    group = groups.get(name)
    g, h = (data.draw(st.integers(0, group.order - 1)) for _ in "gh")
    x = random_values(1, *size, group.order, 2)
    twice = act(act(x, group, h), group, g)
    once = act(x, group, group.product_table[g, h])
    np.testing.assert_array_equal(twice, once)
    back = act(act(x, group, g), group, group.inverse[g])
    np.testing.assert_array_equal(back, x)


def test_moves_values_by_the_definition():
    """`L_g[f](x, h) = f(g^-1 x, g^-1 h)`, pixel by pixel."""
    group = groups.get("p4m")
    x = random_values(1, 3, 3, 8, 1)
    for g in range(8):
        moved = act(x, group, g)
        back = np.rint(group.matrices[group.inverse[g]]).astype(int)
        for r, c, h in np.ndindex(3, 3, 8):
            source = back @ (r - 1, c - 1) + 1
            j = group.product_table[group.inverse[g], h]
            assert moved[0, r, c, h, 0] == x[0, source[0], source[1], j, 0]


@pytest.mark.parametrize("name", ["p8", "p12m", "p16"])
def test_interpolating_groups(name):
    """Quarter turns are exact; a half step twice is close to a step."""
    group = groups.get(name)
    r, c = np.mgrid[-12:13, -12:13]
    blob = np.exp(-((r - 3) ** 2 + (c + 2) ** 2) / 18)[None, :, :, None]
    blob = blob.astype("float32")
    quarter = group.rotations // 4
    np.testing.assert_array_equal(
        act(blob, name, quarter), np.rot90(blob, axes=(1, 2))
    )
    step = act(blob, name, 1)
    angle = 2 * np.pi / group.rotations
    row = 3 * np.cos(angle) + 2 * np.sin(angle)
    column = 3 * np.sin(angle) - 2 * np.cos(angle)
    expected = np.exp(-((r - row) ** 2 + (c - column) ** 2) / 18)
    np.testing.assert_allclose(step[0, ..., 0], expected, atol=0.03)
    if group.mirrors:
        mirrored = act(blob, name, group.rotations + 1)
        np.testing.assert_allclose(
            mirrored, act(blob[:, :, ::-1], name, 1), atol=1e-6
        )


def test_any_dtype():
    x = np.arange(8, dtype="int32").reshape(1, 2, 2, 2)
    moved = group_action(x, "p4", 1)
    assert "int32" in str(moved.dtype)


def test_errors():
    with pytest.raises(ValueError, match=r"takes images.*x.shape=\(2, 3\)"):
        group_action(np.ones((2, 3)), "p4", 0)
    with pytest.raises(ValueError, match="has 4 elements on axis 3"):
        group_action(np.ones((1, 2, 2, 3, 1)), "p4", 0)
    with pytest.raises(ValueError, match="integer from 0 to 3"):
        group_action(np.ones((1, 2, 2, 1)), "p4", 4)
    with pytest.raises(ValueError, match="interpolates and needs floating"):
        group_action(np.ones((1, 4, 4, 1), "int32"), "p8", 1)
