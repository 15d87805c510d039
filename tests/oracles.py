"""Independent NumPy forms, slow and literal: loops over the group.

They use nothing of the package: turns are `np.rot90`, mirrors are reversed
columns, products of elements are arithmetic on (turns, mirrored).
"""

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
    if mirrored:
        plane = plane[:, ::-1]
    return np.rot90(plane, turns * 4 // rotations, axes=(0, 1))


def act(x, group, element):
    """`L_g` of one feature map (rows, columns, order, channels)."""
    moved = turn(x, group, element)
    return np.stack(
        [moved[:, :, relative(group, element, j)] for j in range(x.shape[2])],
        axis=2,
    )


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


def act_on_kernel(kernel, group, h):
    """`L_h` of a kernel (rows, columns, order, in, out)."""
    moved = turn(kernel, group, h)
    return np.stack(
        [moved[:, :, relative(group, h, j)] for j in range(order(group))],
        axis=2,
    )


def pool(x, size, strides, mode):
    """x (b, rows, columns, ...), windows without padding."""
    rows, columns = ((n - size) // strides + 1 for n in x.shape[1:3])
    reduce = {"max": np.max, "mean": np.mean}[mode]
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
