"""Fields of directions, which turn with the image."""

import numpy as np
from keras import ops

from keras_equiattn import groups
from keras_equiattn.groups import Group
from keras_equiattn.ops import backend
from keras_equiattn.ops._arguments import checked
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Shape
from keras_equiattn.ops._types import Shaped
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.group.action import group_action


@checked()
def group_vectors(
    x: Float[Tensor, "batch height width order channels"],
    group: str | Group,
    frequency: int = 1,
) -> Float[Tensor, "batch height width channels"]:
    """Adds up the directions of the group elements, weighted by a feature map.

    `v(x) = sum_h R(h) (f_1(x, h), f_2(x, h))`, where `R(h)` is the matrix of
    `h` on `(row, column)` and `f_1` and `f_2` are two channels beside each
    other. For an image turned by `g`, the vectors move with their pixels and
    are turned by `R(g)`: see `vector_action`.

    Args:
        x: feature maps on the group, with an even number of channels.
        group: a group or its name.
        frequency: how often `R` takes the angle of a rotation: 1 for vectors, 2
            for axes, which half a turn leaves as they are.

    Returns:
        Two channels for each vector: its component along the rows, which point
        down, and along the columns, to the right.

    Raises:
        ValueError: for an odd number of channels.
    """
    group = groups.get(group)
    *size, order, channels = ops.shape(x)
    check_components(channels, tuple(x.shape))
    matrices = direction_matrices(group, frequency)
    table = backend.constant(matrices, x, x.dtype)
    pairs = ops.reshape(x, (*size, order, channels // 2, 2))
    vectors = ops.einsum("bxyhvj,hij->bxyvi", pairs, table)
    return ops.reshape(vectors, (*size, channels))


@checked()
def vector_action(
    v: Float[Tensor, "batch height width channels"],
    group: str | Group,
    element: int | np.integer,
    frequency: int = 1,
) -> Float[Tensor, "batch new_height new_width channels"]:
    """Applies one element of a group to fields of vectors.

    `L_g[v](x) = R(g) v(g^-1 x)`: the vectors move with their pixels, and turn.

    Args:
        v: two channels for each vector, see `group_vectors`.
        group: a group or its name.
        element: index of the element.
        frequency: the frequency of `group_vectors`.

    Returns:
        Fields of vectors.

    Raises:
        ValueError: for an odd number of channels, or an unknown element.
    """
    group = groups.get(group)
    check_components(v.shape[-1], tuple(v.shape))
    moved: Shaped[Tensor, ...] = group_action(v, group, element)
    matrix = direction_matrices(group, frequency)[element]
    *size, channels = ops.shape(moved)
    pairs = ops.reshape(moved, (*size, channels // 2, 2))
    turned = pairs @ backend.constant(matrix.T, pairs, pairs.dtype)
    return ops.reshape(turned, (*size, channels))


def check_components(channels: int | None, shape: Shape) -> None:
    """Raises unless the channels of a tensor of this shape are pairs."""
    if channels is not None and channels % 2:
        raise ValueError(
            "Vectors have two components, so the number of channels must be "
            f"even. Received: shape={tuple(shape)}"
        )


def direction_matrices(group: Group, frequency: int) -> np.ndarray:
    """`(order, 2, 2)`: the matrix by which each element acts on directions.

    Args:
        group: the group.
        frequency: the factor of the angle of a rotation. Angles count from the
            right, so the mirror of the columns takes `a` to `180 - a` degrees,
            and `frequency * a` to `frequency * (180 - a)`.
    """
    turn = np.arange(group.order) % group.rotations
    angle = 2 * np.pi * frequency * turn / group.rotations
    cos, sin = np.cos(angle), np.sin(angle)
    matrices = np.stack([cos, -sin, sin, cos], axis=-1).reshape(-1, 2, 2)
    rounded = np.rint(matrices)
    matrices = np.where(abs(matrices - rounded) < 1e-12, rounded, matrices)
    mirrored = np.arange(group.order) >= group.rotations
    matrices[mirrored, :, frequency % 2] *= -1
    return matrices
