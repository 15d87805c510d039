"""Linear maps on a group, pixel by pixel.

Such a map is a matrix over group elements and channels. In the basis of the
irreducible representations it falls into blocks (`irreps`), which multiply
less. A change of basis is some additions (`fourier`).
"""

import functools
from collections.abc import Sequence

import numpy as np
from keras import ops

from keras_equiattn import _checks
from keras_equiattn import groups
from keras_equiattn.groups import Group
from keras_equiattn.ops import backend
from keras_equiattn.ops._arguments import checked
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.group import fourier
from keras_equiattn.ops.group.irreps import blocks
from keras_equiattn.ops.group.irreps import waves

# How a linear map is computed: as one matrix, or as blocks.
BASES = ("regular", "irreps")


@checked()
def group_linear(
    x: Float[Tensor, "batch height width elements channels"],
    kernel: Float[Tensor, "elements channels filters"],
    bias: Float[Tensor, " filters"] | None,
    group: str | Group,
    basis: str = "regular",
) -> Float[Tensor, "batch height width elements filters"]:
    """A linear map on the group, pixel by pixel: a 1 x 1 group convolution.

    `y(x, p) = sum_r f(x, r) W(p^-1 r) + b`.

    Args:
        x: feature maps on the group.
        kernel: the map.
        bias: added for every group element; None for none.
        group: a group or its name.
        basis: how it is computed, with equal results but for rounding:
            "regular" multiplies with one matrix over group elements and
            channels, "irreps" with the blocks of this matrix in the basis of
            the irreducible representations.

    Returns:
        Feature maps on the group.

    Raises:
        ValueError: for shapes that do not fit.
    """
    group = groups.get(group)
    _checks.choice(basis, "basis", BASES)
    order = kernel.shape[0]
    if order != group.order:
        raise ValueError(
            f"A linear map on '{group.name}' has a kernel ({group.order}, "
            "channels, filters) and takes (batch, height, width, "
            f"{group.order}, channels). Received: "
            f"kernel.shape={tuple(kernel.shape)}, x.shape={tuple(x.shape)}"
        )
    if basis == "irreps":
        sums = linear_on_waves(to_waves(x, group), kernel, group)
        y = from_waves(sums, group)
    else:
        y = _regular(x, kernel, group)
    return y if bias is None else y + bias


def _regular(
    x: Float[Tensor, "*places order channels"],
    kernel: Float[Tensor, "order channels filters"],
    group: Group,
) -> Float[Tensor, "*places order filters"]:
    """A linear map as one matrix over group elements and channels."""
    order, channels, filters = kernel.shape
    relative = backend.constant(group.relative_table, kernel)
    copies = ops.take(kernel, relative, axis=0)  # (p, r, c, d)
    folded = ops.reshape(
        ops.transpose(copies, (1, 2, 0, 3)), (order * channels, order * filters)
    )
    places = ops.shape(x)[:-2]
    y = ops.reshape(x, (*places, order * channels)) @ folded
    return ops.reshape(y, (*places, order, filters))


def to_waves(
    x: Float[Tensor, "*places order channels"], group: Group
) -> Float[Tensor, "*places order channels"]:
    """Sums of feature maps along waves over the group, see `irreps.waves`."""
    return _transformed(x, fourier.transform(group, waves(group)))


def from_waves(
    x: Float[Tensor, "*places order channels"], group: Group
) -> Float[Tensor, "*places order channels"]:
    """Feature maps of sums along waves, times the `scale` of their blocks."""
    steps = fourier.transform(group, waves(group))
    return _transformed(x, fourier.transposed(steps))


def linear_on_waves(
    x: Float[Tensor, "*places order channels"],
    kernel: Float[Tensor, "order channels filters"],
    group: Group,
    scaled: bool = True,
) -> Float[Tensor, "*places order filters"]:
    """A linear map from sums along waves to sums along waves.

    Args:
        x: the sums.
        kernel: the map, as `group_linear` has it.
        group: the group.
        scaled: whether the result is times the `scale` of its blocks, as
            `from_waves` takes it.
    """
    order, channels, filters = kernel.shape
    mixing = backend.constant(_mixing(group, scaled), kernel, kernel.dtype)
    flat = ops.reshape(kernel, (order, channels * filters))
    entries = ops.reshape(mixing @ flat, (-1, channels, filters))
    places = tuple(ops.shape(x)[:-2])
    found, entry = [], 0
    for block in blocks(group):
        size, rows = block.size, block.rows
        matrix = entries[entry : entry + size**2]
        entry += size**2
        matrix = ops.reshape(
            ops.transpose(
                ops.reshape(matrix, (size, size, channels, filters)),
                (0, 2, 1, 3),
            ),
            (size * channels, size * filters),
        )
        last = block.first + rows * size
        of_block = ops.reshape(
            x[..., block.first : last, :], (*places, rows, size * channels)
        )
        found.append(
            ops.reshape(of_block @ matrix, (*places, rows * size, filters))
        )
    return ops.concatenate(found, axis=-2)


@functools.cache
def _mixing(group: Group, scaled: bool) -> np.ndarray:
    """`(entries, order)`: the matrices of all blocks, of the kernel."""
    return np.concatenate(
        [
            (block.scale if scaled else 1)
            * block.mixing.reshape(-1, group.order)
            for block in blocks(group)
        ]
    )


def _transformed(
    x: Float[Tensor, "*places order channels"], steps: Sequence[np.ndarray]
) -> Float[Tensor, "*places order channels"]:
    """The product of sparse matrices and the elements of feature maps."""
    if backend.find_target(x).fuses:
        slices = [x[..., n, :] for n in range(x.shape[-2])]
        return ops.stack(fourier.apply(steps, slices), axis=-2)
    # Operators that run one by one would read the slices again and again.
    matrix = functools.reduce(lambda done, step: step @ done, steps)
    return backend.constant(matrix, x, x.dtype) @ x
