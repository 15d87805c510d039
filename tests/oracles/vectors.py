"""Vectors at pixels, and what a turn makes of them."""

import numpy as np

from oracles.turns import order
from oracles.turns import split


def vector_matrix(group, element, frequency=1):
    """What an element does to `(row, column)`, found from angles alone."""
    turns, mirrored, rotations = split(group, element)
    columns = []
    for row, column in ((1.0, 0.0), (0.0, 1.0)):
        angle = np.arctan2(-row, column)  # of frequency times the direction
        if mirrored:
            angle = frequency * np.pi - angle
        angle += frequency * 2 * np.pi * turns / rotations
        columns.append((-np.sin(angle), np.cos(angle)))
    return np.stack(columns, axis=1)


def vectors(x, group, frequency=1):
    """The sum of x (b, rows, columns, h, 2 v) over h, each turned by h."""
    y = np.zeros((*x.shape[:3], x.shape[-1]))
    for h in range(order(group)):
        for v in range(0, x.shape[-1], 2):
            pair = x[:, :, :, h, v : v + 2]
            y[..., v : v + 2] += pair @ vector_matrix(group, h, frequency).T
    return y


def act_on_vectors(v, group, element, frequency=1):
    """`L_g` of fields of vectors (b, rows, columns, 2 v)."""
    turns, mirrored, rotations = split(group, element)
    moved = v[:, :, ::-1] if mirrored else v
    moved = np.rot90(moved, turns * 4 // rotations, axes=(1, 2))
    pairs = moved.reshape(*moved.shape[:3], -1, 2)
    return (pairs @ vector_matrix(group, element, frequency).T).reshape(
        moved.shape
    )
