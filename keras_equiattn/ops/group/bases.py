"""Filters that turn by any angle: the steerable basis.

A filter on the plane that is a sum of circular harmonics on rings turns without
interpolation: turned by an angle, each harmonic becomes a combination of itself
and its other phase. The error that remains comes from the grid of pixels on
which filters and images are sampled.
"""

import functools

import numpy as np

from keras_equiattn import _checks
from keras_equiattn import groups
from keras_equiattn.groups import Group
from keras_equiattn.ops.group.interpolation import positions

# The bases of filters: numbers for each pixel, or steerable filters.
FILTER_BASES = ("pixel", "steerable")
# The standard deviation of a ring, in pixels. Wider rings leave the square of
# the filter, and narrower ones fall between the pixels. Both make the errors of
# filters of 5 x 5 and 7 x 7 pixels larger, see `benchmarks/angle_choices.py`.
# For filters of 3 x 3 pixels narrower rings would be better.
RING_WIDTH = 0.45


def default_basis(group: Group) -> str:
    """The basis that filters have on a group unless a user chooses one."""
    return "pixel" if group.acts_on_grid else "steerable"


def default_share(group: Group, size: int) -> float:
    """The parameters of a filter in the default basis, for each pixel of it."""
    if default_basis(group) == "pixel":
        return 1.0
    return steerable_basis("z2", size).shape[-1] / size**2


def steerable_basis(
    group: str | Group, size: int, multiplied: bool = False
) -> np.ndarray:
    """The filters of the basis, moved by every element of a group.

    With `(r, phi)` the polar coordinates of an offset from the centre, they are
    `exp(-(r - ring)^2 / (2 width^2))` times `cos(k phi)` and `sin(k phi)`, for
    rings a pixel apart and frequencies `k` from zero to `ring + 1`, rounded
    down. The radii of the rings are 0, 1, 2, ... for odd sizes and 0.5, 1.5,
    ... for even ones. The centre has the frequency zero alone.

    A ring of radius `r` has about `2 pi r` pixels, so that frequencies above
    `pi r` alias. The highest frequency is below that on every ring but the
    centre. Attention multiplies functions of the offset with each other before
    it adds up neighbours. A product of two has the sum of their frequencies. On
    the first ring `2 (r + 1)` is above `pi r` and `2 r` is not, so the factors
    have frequencies up to `r` alone. A third factor is the exponential of the
    scores: its frequencies have no bound, but are low where scores are smooth.
    Filters of 3 x 3 pixels with frequencies up to `r` alone detect slopes, but
    cannot tell a bar from the bar at right angles to it.

    The basis is orthonormal for the identity, so that weight decay of the
    coefficients is weight decay of the filter.

    Args:
        group: a group or its name; its turns may be of any angle.
        size: rows and columns of the filters.
        multiplied: whether filters are multiplied with each other, and so have
            frequencies up to `ring` alone. Their span is part of the full one.

    Returns:
        `(order, size * size, count)`: the values of filter `c`, moved by
        element `h`, at each position. For sizes from 1 to 7, `count` is 1, 3,
        6, 8, 13, 15 and 22; with `multiplied` it is 1, 1, 4, 4, 9, 9 and 16.
        The array is read-only, since it is kept.

    Raises:
        ValueError: for a `size` that is not a positive integer, a `multiplied`
            that is not a boolean, or the name of an unknown group.
        TypeError: for a `group` that is neither a name nor a `Group`.

    Example:
        >>> steerable_basis("p8", 5).shape
        (8, 25, 13)

    References:
        - [Weiler et al., 2018](https://arxiv.org/abs/1711.07289):
          circular harmonics with Gaussian radial parts. The width of the
          rings is chosen here for the smallest errors at 45 degrees with
          filters of 5 x 5 and 7 x 7 pixels.
    """
    size = _checks.integer(size, "size")
    multiplied = _checks.flag(multiplied, "multiplied")
    return _basis(groups.get(group), size, multiplied)


@functools.lru_cache(maxsize=256)
def _basis(group: Group, size: int, multiplied: bool) -> np.ndarray:
    """`steerable_basis` of a group."""
    centred = positions(size, size) - (size - 1) / 2
    inverse = group.matrices[group.inverse]
    basis = _harmonics(centred @ inverse.transpose(0, 2, 1), size, multiplied)
    # All elements get the same combinations, which still turn into each other.
    values, vectors = np.linalg.eigh(basis[0].T @ basis[0])
    basis = basis @ (vectors / np.sqrt(values)) @ vectors.T
    basis.flags.writeable = False
    return basis


@functools.lru_cache(maxsize=256)
def steering_matrix(group: Group, size: int) -> np.ndarray:
    """`(order, positions, positions)`: each copy of a filter, by its pixels.

    A filter is first projected onto the steerable filters.
    """
    basis = steerable_basis(group, size)
    matrix = basis @ basis[0].T
    matrix.flags.writeable = False
    return matrix


def _rings(size: int) -> np.ndarray:
    """The radii of the rings: 0, 1, ..., or 0.5, 1.5, ... for even sizes."""
    return np.arange((size - 1) % 2 / 2, size / 2)


def _largest_frequency(ring: float, multiplied: bool) -> int:
    """The highest frequency of the harmonics on a ring, see `steerable_basis`.

    Args:
        ring: the radius of the ring.
        multiplied: whether another filter is multiplied with this one, so that
            their frequencies add up.
    """
    if ring == 0:
        return 0
    return int(ring if multiplied else ring + 1)


def _harmonics(offsets: np.ndarray, size: int, multiplied: bool) -> np.ndarray:
    """`(..., count)` values of the filters at offsets `(..., 2)`."""
    rows, columns = np.moveaxis(offsets, -1, 0)
    radius, angle = np.hypot(rows, columns), np.arctan2(-rows, columns)
    # The centre has no angle: only what is the same at every angle lies there.
    has_angle = radius > 1e-9
    found = []
    for ring in _rings(size):
        on_ring = np.exp(-0.5 * ((radius - ring) / RING_WIDTH) ** 2)
        found.append(on_ring)
        for k in range(1, _largest_frequency(ring, multiplied) + 1):
            wave = on_ring * has_angle
            found += [wave * np.cos(k * angle), wave * np.sin(k * angle)]
    return np.stack(found, axis=-1)
