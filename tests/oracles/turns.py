"""How elements of a group act: on planes, feature maps, kernels and offsets."""

import math

import numpy as np


def order(group):
    rotations = {"z2": 1, "z2m": 1}.get(group) or int(group.strip("pm"))
    return rotations * (2 if group.endswith("m") else 1)


def split(group, element):
    """(turns, mirrored, number of rotations) of an element."""
    rotations = order(group) // (2 if group.endswith("m") else 1)
    mirrored, turns = divmod(element, rotations)
    return turns, mirrored, rotations


def relative(group, h, j):
    """The element `h^-1 j`."""
    a, s, rotations = split(group, h)
    b, t, _ = split(group, j)
    turns = (a - b if s else b - a) % rotations
    return (s ^ t) * rotations + turns


def turn(plane, group, element):
    """`L_h` of an array whose first two axes are rows and columns."""
    turns, mirrored, rotations = split(group, element)
    if turns * 4 % rotations:
        return steer(plane, 2 * math.pi * turns / rotations, bool(mirrored))
    if mirrored:
        plane = plane[:, ::-1]
    return np.rot90(plane, turns * 4 // rotations, axes=(0, 1))


def steer(plane, angle, mirrored=False):
    """A sum of circular harmonics, mirrored, then turned by any angle."""
    size = plane.shape[0]
    flat = plane.reshape(size * size, -1)
    parts = np.linalg.lstsq(harmonics(size), flat, rcond=None)[0]
    return (harmonics(size, angle, mirrored) @ parts).reshape(plane.shape)


def harmonics(size, angle=0.0, mirrored=False, multiplied=False):
    """`(size * size, count)`: circular harmonics on rings, moved.

    Mirrored, left and right are exchanged. Those that are multiplied have no
    frequency above the number of the ring.
    """
    half = (size - 1) / 2
    found = []
    for ring in np.arange(half % 1, half + 1):
        largest = math.floor(ring + (0 if multiplied else 1)) if ring else 0
        for frequency in range(largest + 1):
            for phase in (0, math.pi / 2) if frequency else (0,):
                values = []
                for row in np.arange(-half, half + 1):
                    for column in np.arange(-half, half + 1):
                        # Back to where the value comes from.
                        x = math.cos(angle) * column - math.sin(angle) * row
                        y = -math.sin(angle) * column - math.cos(angle) * row
                        x = -x if mirrored else x
                        values.append(_harmonic(ring, frequency, phase, -y, x))
                found.append(values)
    return np.array(found).T


def _harmonic(ring, frequency, phase, row, column):
    """One harmonic at one offset, row and column from the centre."""
    radius = math.hypot(row, column)
    height = math.exp(-((radius - ring) ** 2) / (2 * 0.45**2))
    if not frequency:
        return height
    if not radius:
        return 0.0
    angle = math.atan2(-row, column)
    return height * math.cos(frequency * angle - phase)


def act(x, group, element):
    """`L_g` of one feature map (rows, columns, order, channels)."""
    moved = turn(x, group, element)
    return np.stack(
        [moved[:, :, relative(group, element, j)] for j in range(x.shape[2])],
        axis=2,
    )


def act_on_kernel(kernel, group, h):
    """`L_h` of a kernel (rows, columns, order, in, out)."""
    moved = turn(kernel, group, h)
    return np.stack(
        [moved[:, :, relative(group, h, j)] for j in range(order(group))],
        axis=2,
    )


def offset_matrix(group, element):
    """Its matrix for offsets (row, column); the transpose is the inverse."""
    turns, mirrored, rotations = split(group, element)
    angle = 2 * np.pi * turns / rotations
    rotation = [
        [np.cos(angle), -np.sin(angle)],
        [np.sin(angle), np.cos(angle)],
    ]
    return np.array(rotation) @ np.diag([1, -1 if mirrored else 1])
