"""The orbit of a kernel: all its rotated and mirrored copies.

A kernel is transformed by lookup in a constant table, never by flips and
rotations at run time: one gather exports to every format, has a cheap gradient
and never becomes state. Groups that do not act on the grid add one product
with a small constant matrix.
"""

import functools
import math

import keras
import numpy as np
from keras import ops

from keras_equiattn import _checks
from keras_equiattn import groups
from keras_equiattn.groups import Group
from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Shaped
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.group.bases import FILTER_BASES
from keras_equiattn.ops.group.bases import steering_matrix
from keras_equiattn.ops.group.interpolation import positions
from keras_equiattn.ops.group.interpolation import quarter_and_rest
from keras_equiattn.ops.group.interpolation import rotation_table
from keras_equiattn.ops.numerics import dtype_name


def kernel_orbit(
    kernel: Shaped[Tensor, "rows columns *rest"],
    group: str | Group,
    *,
    group_axis: bool,
    filter_basis: str = "pixel",
    mask: str | None = "disc",
) -> Shaped[Tensor, "order rows columns *rest"]:
    """All transformed copies of a kernel: `L_h K` for every element `h`.

    `L_h K(d) = K(h^-1 d)` for a kernel on the plane and
    `L_h K(d, j) = K(h^-1 d, h^-1 j)` for a kernel on the group, whose axis 2
    is the group. Elements that act on the grid move values by a constant
    index table. How the others turn a kernel depends on what it is made of.

    With the basis "pixel" they move values by quarter turns after a bilinear
    interpolation of the remaining angle below 90 degrees, with zeros outside
    the support: exact on the 90-degree subgroup, approximate between. With
    "steerable" the kernel is first projected on the filters of
    `steerable_basis`, which turn by every angle without interpolation.

    Args:
        kernel: `(rows, columns, ...)`, or `(rows, columns, order, ...)` with
            `group_axis=True`. Groups with quarter turns need a square one.
        group: a group or its name.
        group_axis: whether axis 2 of the kernel is the group axis.
        filter_basis: "pixel" or "steerable".
        mask: where pixels are interpolated, "disc" sets everything outside the
            largest disc within the support to zero, so that no corner is
            turned out of sight; None keeps all. It has no effect elsewhere.

    Returns:
        The copies, stacked along a new first axis.

    Raises:
        ValueError: for a kernel with too few axes; for one that is not square
            although the group holds quarter turns or the basis is steerable, or
            whose group axis is missing or has another size; for integers,
            unless they are moved by a table alone; for an unknown basis or
            mask.
    """
    group = groups.get(group)
    kernel = ops.convert_to_tensor(kernel)
    if len(kernel.shape) < 2 + group_axis:
        order = ", order" if group_axis else ""
        raise ValueError(
            f"`kernel` must have the axes (rows, columns{order}, ...). "
            f"Received: kernel.shape={tuple(kernel.shape)}"
        )
    # Traced by TorchScript, sizes are tensors.
    rows, columns = map(int, kernel.shape[:2])
    if group.quarter_turns and rows != columns:
        raise ValueError(
            f"Group '{group.name}' holds quarter turns, which need a square "
            f"kernel. Received: kernel.shape={tuple(kernel.shape)}"
        )
    if group_axis and kernel.shape[2] != group.order:
        raise ValueError(
            f"A kernel on '{group.name}' has {group.order} elements on axis "
            f"2. Received: kernel.shape={tuple(kernel.shape)}"
        )
    in_order = group.order if group_axis else 1
    rest = tuple(kernel.shape[3:] if group_axis else kernel.shape[2:])
    size = math.prod(map(int, rest))
    _checks.choice(filter_basis, "filter_basis", FILTER_BASES)
    _checks.choice(mask, "mask", ("disc", None))
    if filter_basis == "steerable" and rows != columns:
        raise ValueError(
            "Steerable kernels must be square. Received: "
            f"kernel.shape={tuple(kernel.shape)}"
        )
    if group.acts_on_grid and filter_basis == "pixel":
        table = _index_table(group, rows, columns, group_axis)
        flat = ops.reshape(kernel, (rows * columns * in_order, size))
        places = backend.constant(table.ravel(), kernel)
        orbit = ops.take(flat, places, axis=0)
    else:
        if not keras.backend.is_float_dtype(dtype_name(kernel)):
            raise ValueError(
                f"Copies on '{group.name}' with filter_basis='{filter_basis}' "
                "are sums of values of the kernel, which must be floating "
                f"point numbers. Received: kernel.dtype={dtype_name(kernel)}"
            )
        if filter_basis == "steerable":
            matrix = steering_matrix(group, rows)
        else:
            matrix = _interpolation_matrix(group, rows, columns, mask)
        flat = ops.reshape(kernel, (rows * columns, in_order, size))
        relative = _relative(group, group_axis).ravel()
        moved = ops.take(flat, backend.constant(relative, kernel), axis=1)
        moved = ops.reshape(
            moved, (rows * columns, group.order, in_order, size)
        )
        matrix = backend.constant(matrix, kernel, kernel.dtype)
        orbit = ops.einsum("hqp,phji->hqji", matrix, moved)
    axes = (in_order,) if group_axis else ()
    return ops.reshape(orbit, (group.order, rows, columns, *axes, *rest))


@functools.lru_cache(maxsize=256)
def _index_table(
    group: Group, rows: int, columns: int, group_axis: bool
) -> np.ndarray:
    """`(order, rows * columns, order or 1)`: where copy h reads from."""
    size = np.array([rows, columns])
    # Twice the offsets from the centre: integers for every size.
    doubled = 2 * positions(rows, columns) - (size - 1)
    inverse = group.matrices[group.inverse].astype(int)
    source = (doubled @ inverse.transpose(0, 2, 1) + size - 1) // 2
    place = source[..., 0] * columns + source[..., 1]
    relative = _relative(group, group_axis)
    table = place[:, :, None] * relative.shape[1] + relative[:, None]
    table = table.astype(np.int32)
    table.flags.writeable = False
    return table


@functools.lru_cache(maxsize=256)
def _interpolation_matrix(
    group: Group, rows: int, columns: int, mask: str | None
) -> np.ndarray:
    """`(order, positions, positions)`: from a kernel to each of its copies."""
    turns = _index_table(groups.get("p4m"), rows, columns, False)[..., 0]
    identity = np.eye(rows * columns)
    matrices = []
    for element in range(group.order):
        flip, step = divmod(element, group.rotations)
        quarters, angle = quarter_and_rest(step, group.rotations)
        indices, weights = rotation_table(rows, columns, angle)
        turn = (weights[..., None] * identity[indices]).sum(axis=0)
        mirror = identity[turns[4 * flip]]  # element 4 of p4m, or none
        matrices.append(identity[turns[quarters]] @ turn @ mirror)
    matrix = np.stack(matrices)
    if mask == "disc":
        offset = positions(rows, columns) - (np.array([rows, columns]) - 1) / 2
        inside = np.hypot(*offset.T) <= rows / 2
        matrix = matrix * inside[:, None] * inside
    matrix.flags.writeable = False
    return matrix


def _relative(group: Group, group_axis: bool) -> np.ndarray:
    """`(order, order)` of `h^-1 j`, or `(order, 1)` zeros on the plane."""
    if not group_axis:
        return np.zeros((group.order, 1), np.int32)
    return group.relative_table
