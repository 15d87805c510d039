"""Convolutions, pooling and linear maps, planar and on groups."""

import math

import numpy as np

from oracles.turns import act_on_kernel
from oracles.turns import order
from oracles.turns import relative
from oracles.turns import turn


def correlate(x, kernel, strides=1, padding="valid", dilation=1):
    """x (b, rows, columns, c), kernel (k, l, c, o), as Keras' Conv2D."""
    extent = [dilation * (k - 1) + 1 for k in kernel.shape[:2]]
    if padding == "same":
        pads = []
        for n, k in zip(x.shape[1:3], extent, strict=True):
            total = max((-(-n // strides) - 1) * strides + k - n, 0)
            pads.append((total // 2, total - total // 2))
        x = np.pad(x, [(0, 0), *pads, (0, 0)])
    rows, columns = (
        (n - k) // strides + 1
        for n, k in zip(x.shape[1:3], extent, strict=True)
    )
    y = np.zeros((len(x), rows, columns, kernel.shape[-1]))
    for r in range(rows):
        for c in range(columns):
            window = x[
                :,
                r * strides : r * strides + extent[0] : dilation,
                c * strides : c * strides + extent[1] : dilation,
            ]
            y[:, r, c] = np.einsum("bklc,klco->bo", window, kernel)
    return y


def lifting_conv(x, kernel, group, **options):
    return np.stack(
        [
            correlate(x, turn(kernel, group, h), **options)
            for h in range(order(group))
        ],
        axis=3,
    )


def group_conv(x, kernel, group, **options):
    outputs = []
    for h in range(order(group)):
        moved = act_on_kernel(kernel, group, h)
        outputs.append(
            sum(
                correlate(x[:, :, :, j], moved[:, :, j], **options)
                for j in range(order(group))
            )
        )
    return np.stack(outputs, axis=3)


def group_linear(x, kernel, bias, group):
    """x (b, y, x, order, c), kernel (order, c, d): one map for each pair."""
    count = order(group)
    y = np.stack(
        [
            sum(
                x[..., r, :] @ kernel[relative(group, p, r)]
                for r in range(count)
            )
            for p in range(count)
        ],
        axis=3,
    )
    return y if bias is None else y + bias


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


def pool(x, size, strides, mode):
    """x (b, rows, columns, ...), windows without padding."""
    rows, columns = ((n - size) // strides + 1 for n in x.shape[1:3])
    coefficients = np.array([math.comb(size - 1, n) for n in range(size)])
    weights = np.outer(coefficients, coefficients) / 4 ** (size - 1)
    reduce = {
        "max": np.max,
        "mean": np.mean,
        "binomial": lambda x, axis: np.tensordot(x, weights, (axis, (0, 1))),
    }[mode]
    return np.stack(
        [
            np.stack(
                [
                    reduce(
                        x[
                            :,
                            r * strides : r * strides + size,
                            c * strides : c * strides + size,
                        ],
                        axis=(1, 2),
                    )
                    for c in range(columns)
                ],
                axis=1,
            )
            for r in range(rows)
        ],
        axis=1,
    )


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
