"""Group axioms, exhaustively and at random, and names."""

import copy
import pickle

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_equiattn import groups

pytestmark = pytest.mark.once
NAMES = groups.names()
GRID = ["z2", "z2m", "p2", "p2m", "p4", "p4m"]


def test_names():
    assert set(GRID) <= set(NAMES)
    assert {"p8", "p8m", "p12", "p12m", "p16", "p16m"} <= set(NAMES)
    assert [n for n in NAMES if groups.get(n).acts_on_grid] == GRID


@pytest.mark.parametrize("name", NAMES)
def test_axioms(name):
    group = groups.get(name)
    order, table = group.order, group.product_table
    elements = np.arange(order)
    assert order == len(group.matrices) == oracles.order(name)
    np.testing.assert_array_equal(table[0], elements)
    np.testing.assert_array_equal(table[:, 0], elements)
    np.testing.assert_array_equal(table[elements, group.inverse], 0)
    np.testing.assert_array_equal(table[group.inverse, elements], 0)
    for g in elements:  # every row and column is a permutation
        assert set(table[g]) == set(table[:, g]) == set(elements)
    left = table[table[:, :, None], elements]
    right = table[elements[:, None, None], table]
    np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("name", NAMES)
def test_matrices_represent_the_group(name):
    group = groups.get(name)
    products = np.einsum("gij,hjk->ghik", group.matrices, group.matrices)
    np.testing.assert_allclose(
        products, group.matrices[group.product_table], atol=1e-12
    )
    distinct = np.unique(np.round(group.matrices, 9), axis=0)
    assert len(distinct) == group.order


@pytest.mark.parametrize("name", NAMES)
def test_elements_are_rotations_then_mirrored_rotations(name):
    group = groups.get(name)
    for element in range(group.order):
        mirrored, h = divmod(element, group.rotations)
        angle = 2 * np.pi * h / group.rotations
        cos, sin = np.cos(angle), np.sin(angle)
        matrix = np.array([[cos, -sin], [sin, cos]])
        if mirrored:
            matrix = matrix @ np.diag([1, -1])
        np.testing.assert_allclose(group.matrices[element], matrix, atol=1e-12)


def test_quarter_turn_is_that_of_numpy():
    """The offset of a pixel moves as `np.rot90` moves the pixel."""
    image = np.zeros((5, 5))
    image[0, 1] = 1  # offset (-2, -1)
    (moved,) = np.argwhere(np.rot90(image)) - 2
    np.testing.assert_array_equal(
        groups.get("p4").matrices[1] @ (-2, -1), moved
    )


@given(st.sampled_from(NAMES), st.data())
def test_random_words(name, data):
    """A word in the group is the product of its matrices."""
    group = groups.get(name)
    word = data.draw(
        st.lists(st.integers(0, group.order - 1), min_size=1, max_size=8)
    )
    element, matrix = 0, np.eye(2)
    for letter in word:
        element = group.product_table[element, letter]
        matrix = matrix @ group.matrices[letter]
    np.testing.assert_allclose(group.matrices[element], matrix, atol=1e-9)
    inverse = group.matrices[group.inverse[element]]
    np.testing.assert_allclose(inverse @ matrix, np.eye(2), atol=1e-9)


@given(st.sampled_from(NAMES), st.data())
def test_relative_is_inverse_times(name, data):
    group = groups.get(name)
    g, h = (data.draw(st.integers(0, group.order - 1)) for _ in "gh")
    assert group.relative(g)[h] == oracles.relative(name, g, h)
    assert group.product_table[g, group.relative(g)[h]] == h


@pytest.mark.parametrize("name", NAMES)
def test_grid_elements(name):
    group = groups.get(name)
    on_grid = [
        element
        for element in range(group.order)
        if np.allclose(group.matrices[element] % 1, 0, atol=1e-9)
    ]
    assert group.grid_elements.tolist() == on_grid
    assert group.acts_on_grid == (len(on_grid) == group.order)


def test_get():
    p4 = groups.get("p4")
    assert groups.get(p4) is p4
    assert groups.get(" P4 ") is p4
    assert p4 == groups.get("p4")
    assert p4 != groups.get("p4m")
    assert p4 != "p4"
    assert copy.deepcopy(p4) is p4
    assert pickle.loads(pickle.dumps(p4)) is p4
    assert repr(p4) == "Group('p4', order=4)"


@pytest.mark.parametrize(
    ("alias", "name"),
    [("C4", "p4"), ("d4", "p4m"), ("c8", "p8"), ("D1", "z2m"), ("c1", "z2")],
)
def test_other_names(alias, name):
    assert groups.get(alias) is groups.get(name)
    assert groups.get(alias).name == name


def test_tables_are_read_only():
    with pytest.raises(ValueError, match="read-only"):
        groups.get("p4").product_table[0, 0] = 1
    with pytest.raises(AttributeError):
        groups.get("p4").name = "p8"


@pytest.mark.parametrize("name", ["p3", "p6m", "c3", "", "p1"])
def test_unknown_names_list_what_exists(name):
    with pytest.raises(ValueError, match="The groups are: z2, z2m, p2") as info:
        groups.get(name)
    assert "p16m" in str(info.value)


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(ValueError, match="Did you mean 'p4m'"):
        groups.get("p4mm")


@pytest.mark.parametrize("value", [4, None, ("p4",)])
def test_wrong_types(value):
    with pytest.raises(TypeError, match="by name or as a `Group`"):
        groups.get(value)


@pytest.mark.parametrize("element", [-1, 4, 1.0, True, "1"])
def test_check_element(element):
    with pytest.raises(ValueError, match="integer from 0 to 3"):
        groups.get("p4").check_element(element)
