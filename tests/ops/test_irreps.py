"""Irreducible representations, and linear maps in their basis, in NumPy."""

import functools

import numpy as np
import pytest

from keras_equiattn import groups
from keras_equiattn.ops.group import fourier
from keras_equiattn.ops.group.irreps import blocks
from keras_equiattn.ops.group.irreps import irreps
from keras_equiattn.ops.group.irreps import regular_basis
from keras_equiattn.ops.group.irreps import waves

pytestmark = pytest.mark.once

each_group = pytest.mark.parametrize("name", groups.names())


def turning(group, element):
    """`(order, order)`: `(L_g f)(h) = f(g^-1 h)` as a matrix."""
    return np.eye(group.order)[group.relative(element)]


def transform_matrix(group):
    steps = fourier.transform(group, waves(group))
    return functools.reduce(lambda done, step: step @ done, steps)


@each_group
def test_representations(name):
    group = groups.get(name)
    for irrep in irreps(name):
        matrices = irrep.matrices
        products = matrices[:, None] @ matrices
        np.testing.assert_allclose(
            products, matrices[group.product_table], atol=1e-12
        )
        np.testing.assert_allclose(
            matrices @ matrices.transpose(0, 2, 1),
            np.broadcast_to(np.eye(irrep.dimension), matrices.shape),
            atol=1e-12,
        )
        # A quarter turn is exact.
        small = np.abs(matrices) < 1e-9
        assert (matrices[small] == 0).all()


@each_group
def test_they_are_irreducible_different_and_complete(name):
    """By their characters: Schur's orthogonality relations."""
    group = groups.get(name)
    found = irreps(name)
    characters = np.stack(
        [np.trace(irrep.matrices, axis1=1, axis2=2) for irrep in found]
    )
    # A real representation of turns that has two complex parts counts twice.
    parts = [irrep.dimension // irrep.copies for irrep in found]
    np.testing.assert_allclose(
        characters @ characters.T / group.order, np.diag(parts), atol=1e-12
    )
    assert sum(p.dimension * p.copies for p in found) == group.order


@each_group
def test_a_feature_map_turns_by_the_matrices(name):
    group = groups.get(name)
    basis = regular_basis(name)
    np.testing.assert_allclose(basis @ basis.T, np.eye(group.order), atol=1e-12)
    for element in range(group.order):
        moved = basis @ turning(group, element) @ basis.T
        expected = np.zeros_like(moved)
        first = 0
        for irrep in irreps(name):
            matrix = np.kron(irrep.matrices[element], np.eye(irrep.copies))
            last = first + len(matrix)
            expected[first:last, first:last] = matrix
            first = last
        np.testing.assert_allclose(moved, expected, atol=1e-12)


@each_group
def test_the_fast_transform_finds_the_sums_along_waves(name):
    group = groups.get(name)
    flips, turns = np.divmod(np.arange(group.order), group.rotations)
    angles = 2 * np.pi * turns / group.rotations
    of_kind = {"cos": np.cos, "sin": np.sin}
    expected = [
        wave.sign
        * of_kind[wave.kind](wave.frequency * angles)
        * (-1.0) ** (flips * wave.mirrored)
        for wave in waves(group)
    ]
    matrix = transform_matrix(group)
    np.testing.assert_allclose(matrix, expected, atol=1e-12)
    # They are the orthogonal basis, but for the lengths.
    lengths = np.linalg.norm(matrix, axis=1, keepdims=True)
    np.testing.assert_allclose(
        matrix / lengths, regular_basis(name), atol=1e-12
    )


def test_a_transform_is_additions_and_few_products():
    def cost(name):
        steps = fourier.transform(groups.get(name), waves(groups.get(name)))
        entries = np.concatenate([step[step != 0] for step in steps])
        rows = sum(len(step) for step in steps)
        return len(entries) - rows, int((np.abs(entries) != 1).sum())

    costs = {name: cost(name) for name in groups.names() if "12" not in name}
    assert costs == {
        "z2": (0, 0),
        "z2m": (2, 0),
        "p2": (2, 0),
        "p2m": (8, 0),
        "p4": (6, 0),
        "p4m": (20, 0),
        "p8": (20, 2),
        "p8m": (56, 4),
        "p16": (58, 14),
        "p16m": (148, 28),
    }


@each_group
def test_tensors_are_transformed_there_and_back(name):
    group = groups.get(name)
    x = np.random.default_rng(0).normal(size=(group.order, 2, 3))
    steps = fourier.transform(group, waves(group))
    matrix = transform_matrix(group)
    np.testing.assert_allclose(
        fourier.apply(steps, list(x)),
        np.tensordot(matrix, x, 1),
        atol=1e-12,
    )
    np.testing.assert_allclose(
        fourier.apply(fourier.transposed(steps), list(x)),
        np.tensordot(matrix.T, x, 1),
        atol=1e-12,
    )


@each_group
def test_linear_maps_fall_into_blocks(name):
    """`y(p) = sum_r x(r) W(p^-1 r)`, computed block by block."""
    group = groups.get(name)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(group.order, 2))
    kernel = rng.normal(size=(group.order, 2, 3))
    expected = np.einsum("rc,prcd->pd", x, kernel[group.relative_table])
    matrix = transform_matrix(group)
    sums, found = matrix @ x, np.zeros((group.order, 3))
    for block in blocks(group):
        weights = np.einsum("abs,scd->acbd", block.mixing, kernel)
        for row in range(block.rows):
            first = block.first + row * block.size
            part = slice(first, first + block.size)
            found[part] = block.scale * np.einsum(
                "ac,acbd->bd", sums[part], weights
            )
    np.testing.assert_allclose(matrix.T @ found, expected, atol=1e-12)


def test_how_much_less_a_linear_map_multiplies():
    def ratio(name):
        group = groups.get(name)
        products = sum(b.rows * b.size**2 for b in blocks(group))
        return round(group.order**2 / products, 2)

    names = ("z2", "p4", "p8", "p16", "p4m", "p8m", "p16m")
    assert [ratio(name) for name in names] == [
        *(1.0, 2.67, 4.57, 8.53),
        *(5.33, 9.14, 17.07),
    ]


def test_tables_are_shared_and_groups_are_checked():
    assert irreps("c4") is irreps(groups.get("p4"))
    assert not irreps("p4")[0].matrices.flags.writeable
    assert not regular_basis("p4").flags.writeable
    with pytest.raises(ValueError, match="'p5'"):
        irreps("p5")
    with pytest.raises(TypeError, match="4"):
        regular_basis(4)
