"""Affine self-convolution and its baselines, on any group.

Attention over a window in which keys and values go through an affine map that
depends on where in the window they lie, as a filter does:
`A_x[V](x + d) = V(x + d) psi(d) + beta(d)`, channel by channel.
"""

from keras import ops

from keras_equiattn import _checks
from keras_equiattn import groups
from keras_equiattn.groups import Group
from keras_equiattn.ops import backend
from keras_equiattn.ops._arguments import checked
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.group.kernels import kernel_orbit
from keras_equiattn.ops.numerics import in_full_precision
from keras_equiattn.ops.windows.api import AffineMap
from keras_equiattn.ops.windows.dispatch import writes_sums_out


def transformed_query(
    kernel: Float[Tensor, "order channels filters"],
    bias: Float[Tensor, " filters"],
    psi: Float[Tensor, "order filters"],
    beta: Float[Tensor, " filters"],
    group: str | Group,
) -> tuple[Float[Tensor, "order channels filters"], Float[Tensor, " filters"]]:
    """Composes a linear map and an affine map of its result into one map.

    `sum_r (sum_s f(s) W(r^-1 s) + b) psi(p^-1 r) + beta` is `sum_s f(s)
    W'(p^-1 s) + b'`.

    Args:
        kernel, bias: the linear map, see `group_linear`.
        psi, beta: the affine map at the query itself.
        group: a group or its name.

    Returns:
        `W'` and `b'`.
    """
    group = groups.get(group)
    relative = backend.constant(group.relative_table, kernel)
    copies = ops.take(kernel, relative, axis=0)  # (r, s, c, d)
    kernel = ops.sum(copies * psi[:, None, None], axis=0)
    return kernel, bias * ops.sum(psi, axis=0) + beta


@checked()
def affine_map(
    psi: Float[Tensor, "order rows columns channels"],
    beta: Float[Tensor, "rows columns channels"],
    group: str | Group,
    filter_basis: str = "pixel",
) -> AffineMap:
    """The affine maps of all group elements, `L_p psi` and `L_p beta`.

    Args:
        psi: weights of the neighbours, for each group element of the keys.
        beta: bias of the neighbours.
        group: a group or its name.
        filter_basis: how both turn, "pixel" or "steerable", see
            `kernel_orbit`.

    Returns:
        The maps, for `window_scores` and `window_sum`.

    Raises:
        ValueError: for shapes that do not fit.
    """
    group = groups.get(group)
    psi = kernel_orbit(
        ops.moveaxis(psi, 0, 2),
        group,
        group_axis=True,
        filter_basis=filter_basis,
    )
    bias = added_to_neighbours(beta, group, filter_basis).bias
    return AffineMap(ops.moveaxis(psi, 0, 2), bias)


def added_to_neighbours(
    embedding: Float[Tensor, "rows columns channels"],
    group: str | Group,
    filter_basis: str = "pixel",
) -> AffineMap:
    """An embedding of the offset, added to what is seen there: `E(p^-1 d)`.

    Args:
        embedding: the embedding of each neighbour.
        group: a group or its name.
        filter_basis: how it turns, "pixel" or "steerable", see `kernel_orbit`.
    """
    orbit = kernel_orbit(
        embedding, group, group_axis=False, filter_basis=filter_basis
    )
    return AffineMap(None, ops.moveaxis(orbit, 0, 2))


@checked()
def relative_positions(
    rows: Float[Tensor, "rows half"],
    columns: Float[Tensor, "columns half"],
    num_heads: int,
    group: str | Group,
) -> AffineMap:
    """Embeddings of the row and the column of an offset, added to the keys.

    The first half of the channels of each head depends on the row alone, the
    second on the column. At the offset `d`, group element `p` sees the
    embedding of the offset that `p` takes to `d`: `E(p^-1 d)`. On groups that
    do not act on the grid, embeddings are interpolated bilinearly, and those
    outside of the largest disc within the window are zero. The embeddings of
    `StandAloneSelfAttention2D` with steerable filters are not interpolated.

    Args:
        rows, columns: embeddings for each row and each column of the window,
            with half of the channels each.
        num_heads: number of heads, contiguous blocks of the channels.
        group: a group or its name.

    Returns:
        The embeddings that are added to the keys, for `window_scores`.

    Raises:
        ValueError: for shapes that do not fit.
    """
    num_heads = _checks.integer(num_heads, "num_heads")
    if rows.shape[1] % num_heads:
        raise ValueError(
            f"Half of the channels must be divisible by num_heads={num_heads}. "
            f"Received: rows.shape={tuple(rows.shape)}, "
            f"columns.shape={tuple(columns.shape)}"
        )
    height, width = rows.shape[0], columns.shape[0]
    size = (height, width, num_heads, rows.shape[1] // num_heads)
    halves = (
        ops.broadcast_to(ops.reshape(part, (*axes, *size[2:])), size)
        for part, axes in ((rows, (height, 1)), (columns, (1, width)))
    )
    embedding = ops.concatenate(list(halves), axis=-1)
    embedding = ops.reshape(embedding, (height, width, -1))
    return added_to_neighbours(embedding, group)


def centre_query(
    x: Float[Tensor, "batch height width key_order channels"],
    weight: Float[Tensor, "rows columns order key_order channels"],
    bias: Float[Tensor, "rows columns order channels"],
) -> Float[Tensor, "batch height width order channels"]:
    """The affine map of the centre of the window, applied to `x`."""
    at = weight.shape[0] // 2, weight.shape[1] // 2
    weight, bias = weight[at], in_full_precision(bias[at])
    if writes_sums_out(x):
        # Not a sum along an axis: XLA on CPUs (JAX 0.10) makes a library call
        # of it, which is wrong for a single image. OpenVINO computes the
        # product below wrongly.
        for element in range(weight.shape[1]):
            seen = in_full_precision(x[:, :, :, element, None])
            bias = bias + seen * in_full_precision(weight[:, element])
        return ops.cast(bias, x.dtype)
    y = backend.einsum_in_full_precision("bxyrc,prc->bxypc", x, weight)
    return ops.cast(y + bias, x.dtype)
