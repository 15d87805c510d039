"""Independent NumPy forms of what makes feature maps larger, and of vectors."""

import numpy as np
from oracles import act_on_kernel
from oracles import correlate
from oracles import order
from oracles import split


def group_depthwise_conv(x, kernel, group, **options):
    """x (b, rows, columns, h, c), kernel (k, l, h, c, multiplier)."""
    channels = []
    for c in range(x.shape[-1]):
        of_poses = []
        for h in range(order(group)):
            moved = act_on_kernel(kernel, group, h)[..., c, :]
            of_poses.append(
                sum(
                    correlate(
                        x[:, :, :, j, c : c + 1],
                        moved[:, :, j, None],
                        **options,
                    )
                    for j in range(order(group))
                )
            )
        channels.append(np.stack(of_poses, axis=3))
    return np.concatenate(channels, axis=-1)


def group_conv_transpose(x, kernel, group, strides=(1, 1), padding="valid"):
    """Paints one transformed filter after the other."""
    batch, height, width, _, _ = x.shape
    rows, columns = kernel.shape[:2]
    size = (
        (height - 1) * strides[0] + max(rows, strides[0]),
        (width - 1) * strides[1] + max(columns, strides[1]),
    )
    y = np.zeros((batch, *size, order(group), kernel.shape[-1]))
    for h in range(order(group)):
        moved = act_on_kernel(kernel, group, h)
        for r in range(height):
            for c in range(width):
                top, left = r * strides[0], c * strides[1]
                y[:, top : top + rows, left : left + columns, h] += np.einsum(
                    "bjc,kljco->bklo", x[:, r, c], moved
                )
    if padding == "same":
        top, left = (
            (n - s) // 2 for n, s in zip((rows, columns), strides, strict=True)
        )
        y = y[:, top : top + height * strides[0]]
        y = y[:, :, left : left + width * strides[1]]
    return y


def upsample(x, factors, interpolation):
    """Each axis by the positions of its new pixels in the old ones."""
    for axis, factor in zip((1, 2), factors, strict=True):
        n = x.shape[axis]
        place = (np.arange(n * factor) + 0.5) / factor - 0.5
        if interpolation == "nearest":
            x = np.take(x, np.rint(place).clip(0, n - 1).astype(int), axis)
            continue
        place = place.clip(0, n - 1)
        low = np.floor(place).astype(int)
        high = np.minimum(low + 1, n - 1)
        shape = [1] * x.ndim
        shape[axis] = -1
        weight = (place - low).reshape(shape)
        x = (
            np.take(x, low, axis) * (1 - weight)
            + np.take(x, high, axis) * weight
        )
    return x


def matrix(group, element, frequency=1):
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
    """x (b, rows, columns, h, 2 v)."""
    y = np.zeros((*x.shape[:3], x.shape[-1]))
    for h in range(order(group)):
        for v in range(0, x.shape[-1], 2):
            pair = x[:, :, :, h, v : v + 2]
            y[..., v : v + 2] += pair @ matrix(group, h, frequency).T
    return y


def act_on_vectors(v, group, element, frequency=1):
    """`L_g` of fields of vectors (b, rows, columns, 2 v)."""
    turns, mirrored, rotations = split(group, element)
    moved = v[:, :, ::-1] if mirrored else v
    moved = np.rot90(moved, turns * 4 // rotations, axes=(1, 2))
    pairs = moved.reshape(*moved.shape[:3], -1, 2)
    return (pairs @ matrix(group, element, frequency).T).reshape(moved.shape)
