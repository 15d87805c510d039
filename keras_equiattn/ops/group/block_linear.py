"""Linear maps on a group in the basis of the irreducible representations.

There the matrix of a linear map falls into blocks (`irreps`), which multiply
less than the whole. A change of basis is some additions (`fourier`).
"""

import functools
import math
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import numpy as np
from keras import ops

from keras_equiattn import config
from keras_equiattn.groups import Group
from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.group import dispatch
from keras_equiattn.ops.group import fourier
from keras_equiattn.ops.group.irreps import blocks
from keras_equiattn.ops.group.irreps import waves
from keras_equiattn.ops.numerics import dtype_of_sums
from keras_equiattn.ops.numerics import in_full_precision
from keras_equiattn.ops.numerics import is_half
from keras_equiattn.ops.numerics import sum_in_full_precision

# A feature map in the basis: for each block `(..., rows, size * channels)`, the
# sums along its waves. The last axis is mixed, by a matrix for each block.
Sums = list[Float[Tensor, "batch height width _ _"]]
Matrices = list[Float[Tensor, "_ _"]]


def block_linear(
    x: Float[Tensor, "batch height width order channels"],
    kernel: Float[Tensor, "order channels filters"],
    bias: Float[Tensor, " filters"] | None,
    group: Group,
) -> Float[Tensor, "batch height width order filters"]:
    """`ops.group_linear`, by blocks."""
    tensors = (x, kernel) if bias is None else (x, kernel, bias)
    if not config.is_recompute_enabled():
        return _mapped(*tensors, group=group)
    return _function(group, backend.signature(tensors))(*tensors)


def _mapped(
    x: Float[Tensor, "batch height width order channels"],
    kernel: Float[Tensor, "order channels filters"],
    *bias: Float[Tensor, " filters"],
    group: Group,
    matrices: Matrices | None = None,
) -> Float[Tensor, "batch height width order filters"]:
    """The linear map of feature maps, or of some of their rows."""
    if matrices is None:
        matrices = _matrices(kernel, group)
    first, *others = _products(to_sums(x, group=group), matrices)
    # The bias is added to the wave without turns, and so to each element.
    first = sum([_constant(x, group) * b for b in bias], first)
    return from_sums([first, *others], group=group)


@functools.lru_cache(maxsize=512)
def _function(group: Group, signature: Any) -> Callable[..., Tensor]:
    """The linear map of `x`, `kernel` and maybe `bias`.

    It has a gradient of its own, which transforms `x` once more, so that only
    the arguments are kept.
    """

    def forward(x: Tensor, kernel: Tensor, *bias: Tensor) -> tuple[Tensor, Any]:
        """The result. Nothing but the arguments is kept."""
        matrices = _matrices(kernel, group)

        def step(_: Any, x: Tensor) -> tuple[Any, Tensor]:
            y = _mapped(x, kernel, *bias, group=group, matrices=matrices)
            return (), y

        return _in_steps(step, (), kernel.shape[-1], x)[1], ()

    def backward(
        arguments: tuple[Tensor, ...], _: Any, upstream: Tensor
    ) -> tuple[Tensor, ...]:
        """The gradients, with those of the blocks added up over the steps."""
        x, kernel, *bias = arguments
        matrices = _matrices(kernel, group)
        transposed = [ops.transpose(matrix) for matrix in matrices]
        totals = [
            ops.zeros(total.shape, dtype_of_sums(total))
            for total in (*matrices, *bias)
        ]

        def step(totals: Any, x: Tensor, upstream: Tensor) -> Any:
            """Adds the gradients of blocks and bias over some rows.

            Returns the totals, and the gradient of these rows.
            """
            sums, of_y = (to_sums(z, group=group) for z in (x, upstream))
            found = [_outer(a, b) for a, b in zip(sums, of_y, strict=True)]
            if bias:
                of_bias = sum_in_full_precision(of_y[0], (0, 1, 2, 3))
                found.append(_constant(x, group) * of_bias)
            totals = [
                total + ops.cast(more, total.dtype)
                for total, more in zip(totals, found, strict=True)
            ]
            products = _products(of_y, transposed)
            return totals, from_sums(products, group=group)

        totals, dx = _in_steps(step, totals, kernel.shape[1], x, upstream)
        of_bias = [ops.cast(totals.pop(), b.dtype) for b in bias]
        return dx, _of_kernel(totals, kernel, group), *of_bias

    return backend.custom_vjp(
        forward, backward, "`basis='regular'` or `recompute=False`"
    )


def _in_steps(
    step: Callable[..., Any],
    totals: Any,
    channels: int,
    *images: Float[Tensor, "batch height width order _"],
) -> tuple[Any, Float[Tensor, "batch height width order {channels}"]]:
    """Applies a function to feature maps, or to some rows of all at a time.

    Args:
        step: takes totals and rows of the images, returns the next totals and
            rows of the result.
        totals: a nest of tensors.
        channels: the channels of the result.
        *images: feature maps of the same size.

    Returns:
        The last totals, and the result.
    """
    first = images[0]
    together = dispatch.rows_of_step(*images, channels=channels)
    if together is None:
        return step(totals, *images)
    batch, height = ops.shape(first)[0], first.shape[1]
    whole, left = divmod(height, together)

    def some_rows(carry: Any, at: Any, rows: int = together) -> Any:
        """Puts the rows of one step into the result."""
        result, totals = carry
        start = (0, at * together, 0, 0, 0)
        parts = [
            backend.part_at(x, start, (batch, rows, *x.shape[2:]))
            for x in images
        ]
        totals, found = step(totals, *parts)
        return (backend.put_at(result, start, found), totals), ()

    shape = (*ops.shape(first)[:-1], channels)
    carry = ops.zeros(shape, first.dtype), totals
    carry, _ = backend.scan(some_rows, carry, backend.steps(whole))
    if left:
        carry, _ = some_rows(carry, whole, left)
    result, totals = carry
    return totals, result


@backend.compiled_part()
def to_sums(
    x: Float[Tensor, "batch height width order channels"], *, group: Group
) -> Sums:
    """The sums of feature maps along waves over the group.

    In half precision, whose range is small, they are multiplied by the square
    root of the scale of their blocks.
    """
    batch, height, width, _, channels = ops.shape(x)
    steps = _transform(group, is_half(x))
    found = blocks(group)
    shapes = [
        (batch, height, width, block.rows, block.size * channels)
        for block in found
    ]
    if dispatch.written_as_additions(x):
        elements = [in_full_precision(x[..., n, :]) for n in range(group.order)]
        sums = [ops.cast(y, x.dtype) for y in fourier.apply(steps, elements)]
        parts = [sums[b.first : b.first + b.rows * b.size] for b in found]
        return [
            ops.reshape(ops.concatenate(part, axis=-1), shape)
            for part, shape in zip(parts, shapes, strict=True)
        ]
    sums = backend.constant(_product(steps), x, x.dtype) @ x
    return [
        ops.reshape(sums[..., b.first : b.first + b.rows * b.size, :], shape)
        for b, shape in zip(found, shapes, strict=True)
    ]


@backend.compiled_part()
def from_sums(
    sums: Sums, *, group: Group
) -> Float[Tensor, "batch height width order channels"]:
    """The transpose of `to_sums`.

    It leads back from sums that are multiplied with the scale of their blocks,
    which in half precision happens in both of them.
    """
    batch, height, width, _, _ = ops.shape(sums[0])
    steps = _transform(group, is_half(sums[0]))
    parts = []
    for x, block in zip(sums, blocks(group), strict=True):
        of_block = block.rows * block.size, x.shape[-1] // block.size
        parts.append(ops.reshape(x, (batch, height, width, *of_block)))
    if dispatch.written_as_additions(sums[0]):
        elements = [
            in_full_precision(part[..., n, :])
            for part in parts
            for n in range(part.shape[3])
        ]
        found = fourier.apply(fourier.transposed(steps), elements)
        found = [ops.cast(y, sums[0].dtype) for y in found]
        return ops.stack(found, axis=-2)
    joined = ops.concatenate(parts, axis=-2)
    return backend.constant(_product(steps).T, joined, joined.dtype) @ joined


def _constant(like: Float[Tensor, "..."], group: Group) -> float:
    """The value of the first wave that `from_sums` turns into ones."""
    return math.sqrt(group.order) if is_half(like) else 1.0


def _products(sums: Sums, matrices: Matrices) -> Sums:
    """Each block times its matrix."""
    pairs = zip(sums, matrices, strict=True)
    return [backend.times_matrix(x, matrix) for x, matrix in pairs]


def _outer(
    x: Float[Tensor, "*places inputs"], y: Float[Tensor, "*places outputs"]
) -> Float[Tensor, "inputs outputs"]:
    """The sum of the outer products at all places."""
    places = math.prod(ops.shape(x)[:-1])
    flat_x, flat_y = (ops.reshape(z, (places, z.shape[-1])) for z in (x, y))
    return ops.transpose(flat_x) @ flat_y


def _matrices(
    kernel: Float[Tensor, "order channels filters"], group: Group
) -> Matrices:
    """The matrices of the blocks, times their scale in full precision."""
    order, channels, filters = kernel.shape
    flat = in_full_precision(ops.reshape(kernel, (order, channels * filters)))
    mixing = _mixing(group, is_half(kernel))
    entries = backend.constant(mixing, flat, flat.dtype) @ flat
    entries = ops.cast(entries, kernel.dtype)
    found, first = [], 0
    for block in blocks(group):
        size = block.size
        part = ops.reshape(
            entries[first : first + size**2], (size, size, channels, filters)
        )
        first += size**2
        part = ops.transpose(part, (0, 2, 1, 3))
        found.append(ops.reshape(part, (size * channels, size * filters)))
    return found


def _of_kernel(
    gradients: Matrices,
    kernel: Float[Tensor, "order channels filters"],
    group: Group,
) -> Float[Tensor, "order channels filters"]:
    """The gradient of the kernel, from those of its `_matrices`."""
    _, channels, filters = kernel.shape
    entries = []
    for gradient, block in zip(gradients, blocks(group), strict=True):
        size = block.size
        part = ops.reshape(gradient, (size, channels, size, filters))
        part = ops.transpose(part, (0, 2, 1, 3))
        entries.append(ops.reshape(part, (size**2, channels * filters)))
    joined = ops.concatenate(entries)
    mixing = _mixing(group, is_half(kernel)).T
    found = backend.constant(mixing, joined, joined.dtype) @ joined
    found = ops.reshape(found, kernel.shape)
    return ops.cast(found, kernel.dtype)


@functools.cache
def _mixing(group: Group, half: bool) -> np.ndarray:
    """`(entries, order)`: the matrices of all blocks, of the kernel."""
    return np.concatenate(
        [
            (1 if half else block.scale) * block.mixing.reshape(-1, group.order)
            for block in blocks(group)
        ]
    )


@functools.cache
def _transform(group: Group, half: bool) -> tuple[np.ndarray, ...]:
    """The steps of the transform, see `to_sums`."""
    steps = fourier.transform(group, waves(group))
    if not half:
        return steps
    scales = [np.full(b.rows * b.size, b.scale) for b in blocks(group)]
    roots = np.sqrt(np.concatenate(scales))
    return (*steps[:-1], roots[:, None] * steps[-1])


def _product(steps: Sequence[np.ndarray]) -> np.ndarray:
    """The matrix of a transform."""
    return functools.reduce(lambda done, step: step @ done, steps)
