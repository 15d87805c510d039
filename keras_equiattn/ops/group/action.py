"""The action of a group on images and on feature maps: `L_g` of the papers."""

import keras
import numpy as np
from keras import ops

from keras_equiattn import groups
from keras_equiattn.groups import Group
from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Shaped
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.group.interpolation import quarter_and_rest
from keras_equiattn.ops.group.interpolation import rotation_table


def group_action(
    x: Shaped[Tensor, "..."], group: str | Group, element: int | np.integer
) -> Shaped[Tensor, "..."]:
    """Applies one element of a group to a batch of images or feature maps.

    `L_g[f](x) = f(g^-1 x)` on an image, `L_g[f](x, h) = f(g^-1 x, g^-1 h)` on
    a feature map, about the centre. An operator `F` is equivariant when
    `F(L_g x) = L_g F(x)`.

    Elements that map the grid onto itself move values and compute nothing;
    on a rectangle quarter turns exchange height and width. The others
    interpolate bilinearly with zeros outside, within the frame of the image,
    and need a size that is known before the call.

    Args:
        x: images `(batch, height, width, channels)` or feature maps
            `(batch, height, width, order, channels)`.
        group: a group or its name.
        element: index of the element.

    Returns:
        A tensor of the same rank and dtype.

    Raises:
        ValueError: for another rank or order, and for elements that
            interpolate if the size is unknown or the values are integers.
    """
    group = groups.get(group)
    element = group.check_element(element)
    x = ops.convert_to_tensor(x)
    rank = len(x.shape)
    if rank not in (4, 5):
        raise ValueError(
            "`group_action` takes images (batch, height, width, channels) or "
            "feature maps (batch, height, width, order, channels). "
            f"Received: x.shape={tuple(x.shape)}"
        )
    if rank == 5:
        if x.shape[3] != group.order:
            raise ValueError(
                f"A feature map on '{group.name}' has {group.order} elements "
                f"on axis 3. Received: x.shape={tuple(x.shape)}"
            )
        moved = group.relative(element).astype("int32")
        x = ops.take(x, backend.constant(moved, x), axis=3)
    matrix = group.matrices[element]
    if element not in group.grid_elements:
        if not keras.backend.is_float_dtype(
            keras.backend.standardize_dtype(x.dtype)
        ):
            raise ValueError(
                f"Element {element} of '{group.name}' interpolates and needs "
                f"floating point values. Received: x.dtype={x.dtype}"
            )
        flip, step = divmod(element, group.rotations)
        quarters, angle = quarter_and_rest(step, group.rotations)
        if flip:
            x = ops.flip(x, axis=2)
        x = _rotate(x, angle)
        matrix = groups.get("p4").matrices[quarters]
    return _move(x, matrix)


def _move(
    x: Shaped[Tensor, "batch height width *rest"], matrix: np.ndarray
) -> Shaped[Tensor, "batch new_height new_width *rest"]:
    """A signed permutation of rows and columns, for any size."""
    if matrix[0, 0] == 0:  # new rows run along old columns
        others = range(3, len(x.shape))
        x = ops.transpose(x, (0, 2, 1, *others))
    axes = [axis + 1 for axis in (0, 1) if matrix[axis].sum() < 0]
    return ops.flip(x, axis=axes) if axes else x


def _rotate(
    x: Float[Tensor, "batch height width *rest"], angle: float
) -> Float[Tensor, "batch height width *rest"]:
    """Bilinear rotation about the centre, zeros outside."""
    height, width = x.shape[1:3]
    if height is None or width is None:
        raise ValueError(
            "An element that does not act on the grid needs a known height "
            f"and width. Received: x.shape={tuple(x.shape)}"
        )
    indices, weights = rotation_table(height, width, angle)
    rest = tuple(x.shape[3:])
    flat = ops.reshape(x, (-1, height * width, int(np.prod(rest))))
    total = 0.0
    for index, weight in zip(indices, weights, strict=True):
        weight = backend.constant(weight[:, None], x, x.dtype)
        index = backend.constant(index, x)
        total = total + weight * ops.take(flat, index, axis=1)
    return ops.reshape(total, (-1, height, width, *rest))
