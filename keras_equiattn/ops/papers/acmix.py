"""ACmix: attention over a window and convolution from the same linear maps.

With the linear maps `q`, `k`, `v` of the input, each of `filters` channels in
`heads` contiguous blocks, the `3 heads` maps of a channel `c` within its block
are mixed, and a convolution with one group for each `c` follows. All of that is
linear in the input: it is one convolution, whose kernel is put together from
the weights alone, at a cost that does not grow with the image.
"""

from typing import Any
from typing import NamedTuple

import numpy as np
from keras import ops

from keras_equiattn import _checks
from keras_equiattn import groups
from keras_equiattn.groups import Group
from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.geometry import FilterWindow
from keras_equiattn.ops.geometry import Window
from keras_equiattn.ops.group.convolution import group_conv
from keras_equiattn.ops.group.convolution import lifting_conv
from keras_equiattn.ops.numerics import divided
from keras_equiattn.ops.numerics import in_full_precision
from keras_equiattn.ops.numerics import larger


class Convolution(NamedTuple):
    """The convolution path as one convolution.

    Attributes:
        kernel: the filters.
        bias: what each pixel of the image adds, whatever its value. Pixels
            outside of the image add nothing, so that the sum is different along
            the border. None for none.
    """

    kernel: Float[Tensor, "rows columns order channels filters"]
    bias: Float[Tensor, "rows columns filters"] | None


def image_coordinates(
    height: int | Tensor, width: int | Tensor, dtype: str
) -> Float[Tensor, "height width 2"]:
    """Row and column of each pixel, from -1 to 1; 0 for a size of one.

    They are in single precision where `dtype` is half precision, which would
    give the same coordinates to several pixels of an image of 256 columns or
    more.
    """
    exact = "float64" if dtype == "float64" else "float32"
    axes = []
    for size in (height, width):
        places = ops.cast(2 * ops.arange(size) - (size - 1), exact)
        axes.append(divided(places, larger(size - 1, 1)))
    return ops.stack(ops.meshgrid(*axes, indexing="ij"), axis=-1)


def position_keys(
    coordinates: Float[Tensor, "height width 2"],
    kernel: Float[Tensor, "2 channels"],
    bias: Float[Tensor, " channels"],
    group: str | Group,
) -> Float[Tensor, "height width order channels"]:
    """The positions as keys, which are subtracted from the keys of a head.

    The score of a query at `x` against a key at `y` has the position term
    `q . (P(x) - P(y))` with a linear map `P` of the coordinates. The part at
    `x` is the same for all neighbours, and so the softmax does not depend on
    it: subtracting `P(y)` from the keys is enough. A group element sees the
    coordinates turned back, `P(h^-1 y)`.

    Args:
        coordinates: rows and columns of the pixels.
        kernel: the map: weights of the column, then those of the row, in the
            order of the authors.
        bias: the bias of the map; the softmax does not see it either.
        group: a group or its name.
    """
    group = groups.get(group)
    inverses = group.matrices[group.inverse]
    matrices = backend.constant(inverses, coordinates, coordinates.dtype)
    seen = ops.einsum("hij,xyj->xyhi", matrices, coordinates)
    kernel, bias = in_full_precision(kernel), in_full_precision(bias)
    return seen[..., 1:] * kernel[0] + seen[..., :1] * kernel[1] + bias


def shifts(rows: int, columns: int) -> np.ndarray:
    """`(rows, columns, rows * columns)`: each kernel picks one neighbour."""
    size = rows * columns
    return np.eye(size).reshape(rows, columns, size)


def split_maps(
    kernel: Float[Tensor, "order channels filters"], size: int
) -> Float[Tensor, "maps order channels {size}"]:
    """Splits a kernel into one linear map for each block of channels."""
    order, channels, filters = kernel.shape
    maps = ops.reshape(kernel, (order, channels, filters // size, size))
    return ops.transpose(maps, (2, 0, 1, 3))


def joint_convolution(
    maps: Float[Tensor, "maps order channels size"],
    biases: Float[Tensor, "maps size"] | None,
    mixing: Float[Tensor, "maps shifts"],
    shift: Float[Tensor, "rows columns shifts shifted"],
    outputs: int,
    mixing_bias: Float[Tensor, " shifts"] | None = None,
) -> Convolution:
    """The convolution path, composed into one kernel.

    With linear maps `f(m, c)` and `F(c, t) = sum_m mixing(m, t) f(m, c) +
    bias(t)`, the path is

        y(x, c N + j) = sum_d sum_t shift(d, t, c G + j mod G) F(x + d, c, t)

    for `N` outputs and `G` kernels for each channel `c`.

    Args:
        maps: the linear maps, see `group_linear`.
        biases: the biases of these maps; None for none.
        mixing: weights that make `rows * columns` maps of them.
        shift: kernels of the convolution, channel by channel.
        outputs: how many outputs there are for each channel.
        mixing_bias: the bias of the mixed maps; None for none.

    Returns:
        The kernel and the bias.
    """
    _, *inputs, size = maps.shape
    _checks.weight_size(
        (*shift.shape[:2], *inputs, size * outputs), "The joint kernel"
    )
    *outer, shifted = shift.shape
    shift = ops.reshape(shift, (*outer, size, shifted // size))
    composed = ops.einsum("mt,xytcg->xymcg", mixing, shift)
    kernel = ops.einsum("mric,xymcg->xyricg", maps, composed)
    added = []
    if biases is not None:
        added.append(ops.einsum("mc,xymcg->xycg", biases, composed))
    if mixing_bias is not None:
        added.append(ops.einsum("t,xytcg->xycg", mixing_bias, shift))
    bias = _for_all(sum(added[1:], added[0]), outputs) if added else None
    return Convolution(_for_all(kernel, outputs), bias)


def _for_all(
    kernel: Float[Tensor, "*rest size kernels"], outputs: int
) -> Float[Tensor, "*rest filters"]:
    """The kernels of a channel, repeated for all of its outputs."""
    *rest, size, count = kernel.shape
    kernel = ops.tile(kernel, (*[1] * len(rest), 1, outputs // count))
    return ops.reshape(kernel, (*rest, size * outputs))


def convolve(
    x: Float[Tensor, "batch height width order channels"],
    convolution: Convolution,
    group: str | Group,
    strides: tuple[int, int],
    dilation_rate: tuple[int, int],
    filter_basis: str,
) -> Float[Tensor, "batch new_height new_width order filters"]:
    """The convolution path, centred on the pixels that strides meet.

    Outside of the image the linear maps are zero.
    """
    kernel, bias = convolution
    window = FilterWindow(tuple(kernel.shape[:2]), (1, 1), dilation_rate)
    around = window.padding((None, None), "same")
    options: dict[str, Any] = {
        "strides": strides,
        "padding": "valid",
        "dilation_rate": dilation_rate,
        "filter_basis": filter_basis,
    }
    padded = ops.pad(x, [(0, 0), *around, (0, 0), (0, 0)])
    y = group_conv(padded, kernel, group, **options)
    if bias is None:
        return y
    inside = ops.ones((1, *ops.shape(x)[1:3], 1), dtype=x.dtype)
    inside = ops.pad(inside, [(0, 0), *around, (0, 0)])
    bias = lifting_conv(inside, bias[:, :, None], group, **options)
    return y + bias


def queries_at(
    x: Float[Tensor, "batch height width order channels"], window: Window
) -> Float[Tensor, "batch new_height new_width order channels"]:
    """The pixels at the centres of the windows."""
    down, along = window.strides
    return x[:, ::down, ::along]
