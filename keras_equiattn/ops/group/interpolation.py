"""Bilinear resampling of a small grid as a constant table; NumPy only."""

import numpy as np


def rotation_table(
    height: int, width: int, angle: float
) -> tuple[np.ndarray, np.ndarray]:
    """Where a grid rotated about its centre reads from.

    Value `p` of the rotated grid is the sum over `i < 4` of
    `weights[i, p] * values[indices[i, p]]`; values outside the grid are zero.

    Args:
        height, width: size of the grid, row-major when flattened.
        angle: radians, counter-clockwise on the screen.

    Returns:
        `indices (4, height * width)` int32, `weights (4, height * width)`
        float64.
    """
    centre = (np.array([height, width]) - 1) / 2
    offset = positions(height, width) - centre
    cos, sin = np.cos(angle), np.sin(angle)
    backwards = np.array([[cos, sin], [-sin, cos]])
    source = offset @ backwards.T + centre
    # A source within rounding of a pixel is that pixel.
    nearest = np.rint(source)
    source = np.where(np.abs(source - nearest) < 1e-9, nearest, source)
    low = np.floor(source).astype(int)
    fraction = source - low
    indices, weights = [], []
    for step in ((0, 0), (0, 1), (1, 0), (1, 1)):
        corner = low + step
        weight = np.prod(np.where(step, fraction, 1 - fraction), axis=-1)
        inside = ((corner >= 0) & (corner < [height, width])).all(axis=-1)
        row, column = np.clip(corner, 0, [height - 1, width - 1]).T
        indices.append(row * width + column)
        weights.append(np.where(inside, weight, 0.0))
    return np.array(indices, np.int32), np.array(weights)


def positions(height: int, width: int) -> np.ndarray:
    """All `(row, column)` of a grid, `(height * width, 2)`, row-major."""
    return np.argwhere(np.ones((height, width)))


def quarter_and_rest(step: int, rotations: int) -> tuple[int, float]:
    """Splits `step` of `360 / rotations` degrees into quarter turns and rest.

    Returns:
        The number of quarter turns and the remaining angle in radians, below
        a quarter turn. `rotations` must be a multiple of 4.
    """
    quarters, rest = divmod(step, rotations // 4)
    return quarters, 2 * np.pi * rest / rotations
