"""Orbits of kernels."""

import numpy as np
import oracles
import pytest
from keras import ops

from keras_equiattn import groups
from keras_equiattn.ops import kernel_orbit

GRID = ["z2", "z2m", "p2", "p2m", "p4", "p4m"]


def orbit(kernel, group, **options):
    return ops.convert_to_numpy(kernel_orbit(kernel, group, **options))


def kernels(rows, columns, *rest):
    values = np.random.default_rng(0).normal(size=(rows, columns, *rest))
    return values.astype("float32")


@pytest.mark.parametrize("name", GRID)
@pytest.mark.parametrize("size", [2, 3])
def test_planar_orbit(name, size):
    kernel = kernels(size, size, 2, 3)
    expected = [
        oracles.turn(kernel, name, h) for h in range(oracles.order(name))
    ]
    actual = orbit(kernel, name, group_axis=False)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("name", GRID)
def test_group_orbit(name):
    order = oracles.order(name)
    kernel = kernels(3, 3, order, 2, 3)
    expected = [oracles.act_on_kernel(kernel, name, h) for h in range(order)]
    actual = orbit(kernel, name, group_axis=True)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("name", ["z2m", "p2", "p2m"])
def test_rectangular_kernels_where_no_quarter_turn(name):
    kernel = kernels(2, 5, 1)
    expected = [
        oracles.turn(kernel, name, h) for h in range(oracles.order(name))
    ]
    actual = orbit(kernel, name, group_axis=False)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("name", ["p8", "p8m", "p12", "p16m"])
@pytest.mark.parametrize("size", [3, 4, 5])
def test_interpolated_orbit_is_exact_on_the_grid_subgroup(name, size):
    """`L_g (L_h K) = L_gh K` for every g on the grid and every h."""
    group = groups.get(name)
    kernel = kernels(size, size, 2)
    copies = orbit(kernel, name, group_axis=False)
    subgroup = groups.get("p4m" if group.mirrors else "p4")
    for index, g in enumerate(group.grid_elements):
        for h in range(group.order):
            expected = copies[group.product_table[g, h]]
            actual = oracles.turn(copies[h], subgroup.name, index)
            np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_interpolation_reads_between_pixels():
    """45 degrees: the value above the centre comes from the upper right."""
    kernel = np.arange(9.0).reshape(3, 3, 1)
    turned = orbit(kernel, "p8", group_axis=False)[1]
    t = np.sqrt(0.5)
    weights = np.outer([t, 1 - t], [1 - t, t])  # rows 0, 1; columns 1, 2
    expected = (weights * kernel[:2, 1:, 0]).sum()
    np.testing.assert_allclose(turned[0, 1, 0], expected, rtol=1e-6)


def test_disc_mask():
    kernel = np.ones((5, 5, 1))
    masked = orbit(kernel, "p8", group_axis=False)
    full = orbit(kernel, "p8", group_axis=False, mask=None)
    assert full[0, 0, 0] == 1
    for size in (3, 4, 5):
        kernel = np.ones((size, size, 1))
        kept = orbit(kernel, "p8", group_axis=False)[0, :, :, 0]
        offsets = np.indices((size, size)) - (size - 1) / 2
        np.testing.assert_allclose(kept, np.hypot(*offsets) <= size / 2)
    # Without the mask, turned corners leave the frame.
    sums = masked.sum(axis=(1, 2, 3))
    assert np.ptp(sums) < np.ptp(full.sum(axis=(1, 2, 3)))
    with pytest.raises(ValueError, match=r"'disc' or None.*'square'"):
        kernel_orbit(kernel, "p8", group_axis=False, mask="square")


def test_errors(unchecked):
    with pytest.raises(ValueError, match=r"square kernel.*\(3, 5, 1\)"):
        kernel_orbit(kernels(3, 5, 1), "p4", group_axis=False)
    with pytest.raises(ValueError, match=r"4 elements on axis 2.*\(3, 3, 8"):
        kernel_orbit(kernels(3, 3, 8, 1), "p4", group_axis=True)
    with pytest.raises(ValueError, match=r"columns, order, ...\).*\(3, 3\)"):
        kernel_orbit(kernels(3, 3), "p4", group_axis=True)
    with pytest.raises(ValueError, match=r"\(rows, columns, ...\).*\(3,\)"):
        kernel_orbit(np.ones(3), "p4", group_axis=False)


def test_integers_are_moved_and_not_added():
    kernel = np.arange(9, dtype="int32").reshape(3, 3)
    moved = orbit(kernel, "p4", group_axis=False)
    np.testing.assert_array_equal(moved[1], np.rot90(kernel))
    for group, basis in (("p8", "pixel"), ("p4", "steerable")):
        with pytest.raises(ValueError, match=f"'{basis}'.*dtype=int32"):
            kernel_orbit(kernel, group, group_axis=False, filter_basis=basis)
