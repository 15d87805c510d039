"""Steerable filters: what they are, how they turn, and what a grid costs."""

import inspect
import math

import numpy as np
import oracles
import pytest
from keras import ops
from scipy import ndimage
from scipy import signal

from keras_equiattn import groups
from keras_equiattn.ops import kernel_orbit
from keras_equiattn.ops.group.bases import steerable_basis
from keras_equiattn.ops.group.bases import steering_matrix

NAMES = ["z2m", "p4", "p8", "p12m", "p16"]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("multiplied", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_each_element_turns_the_same_filters(name, multiplied, size):
    """The basis is one combination of the harmonics, whatever the element."""
    group = groups.get(name)
    basis = steerable_basis(group, size, multiplied)
    plain = oracles.harmonics(size, multiplied=multiplied)
    combination = np.linalg.lstsq(plain, basis[0], rcond=None)[0]
    np.testing.assert_allclose(
        basis[0].T @ basis[0], np.eye(plain.shape[1]), atol=1e-12
    )
    for element in range(group.order):
        flip, step = divmod(element, group.rotations)
        angle = 2 * math.pi * step / group.rotations
        moved = oracles.harmonics(size, angle, bool(flip), multiplied)
        np.testing.assert_allclose(
            basis[element], moved @ combination, atol=1e-12
        )


def test_names_and_errors():
    by_name = steerable_basis("p8", 3)
    np.testing.assert_array_equal(by_name, steerable_basis(groups.get("p8"), 3))
    assert not by_name.flags.writeable
    with pytest.raises(ValueError, match=r"`size` must be a positive.*0"):
        steerable_basis("p8", 0)
    with pytest.raises(ValueError, match=r"`multiplied` must be.*3"):
        inspect.unwrap(steerable_basis)("p8", 3, 3)


def test_numbers_of_filters():
    sizes = {
        1: (1, 1),
        2: (3, 1),
        3: (6, 4),
        4: (8, 4),
        5: (13, 9),
        6: (15, 9),
        7: (22, 16),
    }
    for size, counts in sizes.items():
        for multiplied, count in zip((False, True), counts, strict=True):
            basis = steerable_basis("p8", size, multiplied)
            assert basis.shape[2] == count


@pytest.mark.parametrize("size", [3, 5, 6])
def test_filters_that_are_multiplied_are_among_the_others(size):
    """So `kernel_orbit`, which knows all of them, turns these as well."""
    few = steerable_basis("p8", size, multiplied=True)
    turned = steering_matrix(groups.get("p8"), size) @ few[0]
    np.testing.assert_allclose(turned, few, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [3, 4, 5])
def test_turns_follow_each_other_exactly(name, size):
    """`L_g L_h = L_gh` for every angle, which interpolation does not give."""
    group = groups.get(name)
    matrix = steering_matrix(group, size)
    for g in range(group.order):
        for h in range(group.order):
            expected = matrix[group.product_table[g, h]]
            np.testing.assert_allclose(
                matrix[g] @ matrix[h], expected, atol=1e-12
            )


@pytest.mark.parametrize("name", ["z2m", "p2m", "p4", "p4m"])
def test_the_grid_is_turned_by_moving_values(name):
    group = groups.get(name)
    rng = np.random.default_rng(0)
    basis = steerable_basis(group, 5)
    filters = basis @ rng.normal(size=basis.shape[2])
    filters = filters.reshape(group.order, 5, 5)
    for h in range(group.order):
        expected = oracles.turn(filters[0], name, h)
        np.testing.assert_allclose(filters[h], expected, atol=1e-12)


@pytest.mark.parametrize("on_group", [False, True])
def test_orbit(on_group):
    """A kernel is projected, and each part of it turned by a formula."""
    group = groups.get("p8m")
    rng = np.random.default_rng(0)
    shape = (5, 5, *((16,) if on_group else ()), 2)
    kernel = rng.normal(size=shape)
    found = ops.convert_to_numpy(
        kernel_orbit(
            ops.convert_to_tensor(kernel, "float32"),
            group,
            group_axis=on_group,
            filter_basis="steerable",
        )
    )
    flat = kernel.reshape(25, -1, 2)
    coefficients = np.linalg.lstsq(
        oracles.harmonics(5), flat.reshape(25, -1), rcond=None
    )[0].reshape(-1, *flat.shape[1:])
    for h in range(group.order):
        flip, step = divmod(h, 8)
        moved = oracles.harmonics(5, 2 * math.pi * step / 8, bool(flip))
        from_element = coefficients
        if on_group:
            from_element = coefficients[:, group.relative_table[h]]
        expected = np.tensordot(moved, from_element, 1).reshape(shape)
        np.testing.assert_allclose(found[h], expected, atol=1e-5)


def smooth_image(rng, size=65):
    """Blurred noise that fades towards the border."""
    noise = ndimage.gaussian_filter(rng.normal(size=(size, size)), 2)
    radius = np.hypot(*(np.indices((size, size)) - size // 2))
    return noise * np.exp(-((radius / 16) ** 4))


# Means over random filters; pixels that are interpolated give 0.15 to 0.6.
@pytest.mark.parametrize(("size", "most"), [(3, 0.05), (5, 0.03), (7, 0.04)])
def test_an_eighth_turn_of_smooth_images(size, most):
    rng = np.random.default_rng(0)
    basis = steerable_basis(groups.get("p8"), size)
    errors = []
    for _ in range(20):
        coefficients = rng.normal(size=basis.shape[2])
        kernel, turned = (basis[:2] @ coefficients).reshape(2, size, size)
        image = smooth_image(rng)
        inner = (slice(16, -16),) * 2
        expected = signal.correlate2d(image, kernel, "same")
        expected = ndimage.rotate(expected, 45, reshape=False, order=5)[inner]
        moved = ndimage.rotate(image, 45, reshape=False, order=5)
        found = signal.correlate2d(moved, turned, "same")[inner]
        errors.append(abs(found - expected).max() / abs(expected).max())
    assert np.mean(errors) < most
    assert np.mean(errors) > 1e-3  # the grid leaves an error


def test_errors():
    kernel = np.ones((3, 5, 1))
    with pytest.raises(ValueError, match=r"must be square.*\(3, 5, 1\)"):
        kernel_orbit(kernel, "z2m", group_axis=False, filter_basis="steerable")
    with pytest.raises(ValueError, match="'pixel' or 'steerable'"):
        kernel_orbit(kernel, "z2m", group_axis=False, filter_basis="fourier")
