"""Views and sums in place, where PyTorch has them."""

import functools
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.backend.autodiff import vjp
from keras_equiattn.ops.backend.target import find_target
from keras_equiattn.ops.numerics import dtype_of_sums


def with_an_image(x: Tensor) -> Tensor:
    """An empty batch with one image.

    Not all backends take a maximum of none; TensorFlow does where the size of
    the batch is not known. Its convolution of none may have the wrong shape.
    """
    if x.shape[0] != 0:
        return x
    return ops.pad(x, [(0, 1)] + [(0, 0)] * (len(x.shape) - 1))


def constant(table: np.ndarray, like: Tensor, dtype: Any = None) -> Tensor:
    """A table as a tensor on the device of another one.

    PyTorch would copy it there in each call, so it keeps what it has copied.
    Compilers keep the constants of what they compile.

    Args:
        table: small, the same in each call.
        like: a tensor on that device.
        dtype: of the result, as tensors have it; None for that of the table.
    """
    if keras.backend.backend() != "torch":
        return ops.convert_to_tensor(table, dtype)
    import torch

    traced = type(like) not in (torch.Tensor, torch.nn.Parameter)
    if traced or torch.compiler.is_compiling():
        return torch.as_tensor(table, dtype=dtype, device=like.device)
    shape, kind = table.shape, table.dtype.str
    return _on_device(table.tobytes(), shape, kind, dtype, like.device)


@functools.lru_cache(maxsize=512)
def _on_device(
    data: bytes, shape: Any, kind: str, dtype: Any, device: Any
) -> Tensor:
    """A tensor of PyTorch with these numbers."""
    import torch

    table = np.frombuffer(data, kind).reshape(shape).copy()
    # Gradients take no tensors that were made in inference mode.
    with torch.inference_mode(False):
        return torch.as_tensor(table, dtype=dtype, device=device)


def maximum(x: Tensor, y: Tensor) -> Tensor:
    """`ops.maximum`, which takes float64 through float32 under PyTorch."""
    if keras.backend.backend() == "torch":
        import torch

        return torch.maximum(x, y)
    return ops.maximum(x, y)


def update(name: str, x: Tensor, *others: Tensor) -> Tensor:
    """`ops.<name>(x, *others)`, in place under PyTorch: `x` must be ours alone.

    It then has the shape of the result, and no need for other memory.
    """
    if keras.backend.backend() == "torch":
        return getattr(x, f"{name}_")(*others)
    return getattr(ops, name)(x, *others)


def add_product(total: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """`total + x * y`, in place under PyTorch: `total` must be ours alone."""
    if keras.backend.backend() == "torch":
        return total.addcmul_(x, y)
    return total + ops.cast(x * y, total.dtype)


def product(x: Tensor, y: Tensor) -> Tensor:
    """`x * y`, of tensors with equal sizes along the first axis.

    TensorFlow's own kernels do not broadcast more than five axes, so it takes
    one slice of the first axis after the other.
    """
    if keras.backend.backend() != "tensorflow" or find_target(x, y).xla:
        return x * y
    return ops.stack([x[n] * y[n] for n in range(x.shape[0])])


def part_at(x: Tensor, start: tuple[Any, ...], shape: Any) -> Tensor:
    """`ops.slice`, under PyTorch in the memory of `x` and without tensors.

    Starts that are tensors cannot be exported.
    """
    if keras.backend.backend() != "torch":
        return ops.slice(x, _as_int32(start), shape)
    for axis, (first, length) in enumerate(zip(start, shape, strict=True)):
        x = x.narrow(axis, first, length)
    return x


def add_at(total: Tensor, start: tuple[Any, ...], part: Tensor) -> Tensor:
    """Adds a part to what lies there, in place under PyTorch.

    Args:
        total: tensor to add to, ours alone.
        start: where the part starts on each axis.
        part: what to add.
    """
    if keras.backend.backend() == "torch":
        part_at(total, start, part.shape).add_(part)
        return total
    return put_at(total, start, part_at(total, start, ops.shape(part)) + part)


def put_at(total: Tensor, start: tuple[Any, ...], part: Tensor) -> Tensor:
    """`ops.slice_update`: the tensor with other entries from `start` on."""
    return ops.slice_update(total, _as_int32(start), part)


def _as_int32(start: tuple[Any, ...]) -> tuple[Any, ...]:
    """Places of one dtype, which JAX asks for: with 64 bits, integers have 64,
    but those of loops 32.
    """
    if keras.backend.backend() != "jax":
        return start
    return tuple(ops.cast(n, "int32") for n in start)


def add_product_at(
    total: Tensor,
    place: tuple[int, int],
    room: tuple[int, int],
    x: Tensor,
    y: Tensor,
) -> Tensor:
    """`add_product` to a part of axes 1 and 2.

    Args:
        total: tensor to add to, ours alone.
        place: where the part starts.
        room: by how much the whole is larger than the part.
        x, y: the factors.
    """
    if keras.backend.backend() == "torch":
        part = total
        for axis, (start, extra) in enumerate(zip(place, room, strict=True), 1):
            part = part.narrow(axis, start, total.shape[axis] - extra)
        part.addcmul_(x, y)
        return total
    around = [(n, extra - n) for n, extra in zip(place, room, strict=True)]
    rest = ((0, 0),) * (len(total.shape) - 3)
    product = ops.cast(x * y, total.dtype)
    return total + ops.pad(product, ((0, 0), *around, *rest))


def strided(
    x: Tensor, start: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> Tensor:
    """Entries of vectors, `start + i * strides` at each index `i`.

    Args:
        x: `(vectors, entries)`.
        start: the first entry.
        shape: of what each vector becomes.
        strides: entries from one to the next along its axes.

    Returns:
        `(vectors, *shape)`, under PyTorch in the memory of `x`.
    """
    if keras.backend.backend() == "torch":
        x = x.contiguous()
        outer = x.shape[0], x.shape[1]
        return x.as_strided(
            (outer[0], *shape),
            (outer[1], *strides),
            x.storage_offset() + start,
        )
    return ops.take(x, _entries(start, shape, strides), axis=1)


def at_strides(
    x: Tensor, start: int, size: int, strides: tuple[int, ...]
) -> Tensor:
    """Vectors of `size` entries: undoes `strided`, with zeros between.

    No two entries may fall on the same place.
    """
    shape = tuple(x.shape[1:])
    if keras.backend.backend() == "torch":
        found = x.new_zeros((x.shape[0], size))
        found.as_strided(tuple(x.shape), (size, *strides), start).copy_(x)
        return found
    count = math.prod(shape)
    places = np.full(size, count)
    places[_entries(start, shape, strides).ravel()] = np.arange(count)
    x = ops.pad(ops.reshape(x, (-1, count)), ((0, 0), (0, 1)))
    return ops.take(x, places, axis=1)


def _entries(
    start: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> np.ndarray:
    return start + np.tensordot(strides, np.indices(shape), 1)


def overlapping(x: Tensor, axis: int, size: int, step: int) -> Tensor:
    """Pieces of an axis, each `step` after the last, along two new ones.

    Args:
        x: the tensor.
        axis: the axis, which becomes `(pieces, size)`.
        size: of a piece.
        step: from one piece to the next.

    Returns:
        The pieces, under PyTorch in the memory of `x`.
    """
    if keras.backend.backend() == "torch":
        return x.unfold(axis, size, step).movedim(-1, axis + 1)
    starts = ops.arange(0, ops.shape(x)[axis] - size + 1, step)
    return ops.take(x, starts[:, None] + ops.arange(size), axis=axis)


def overlap_add(x: Tensor, axis: int, step: int) -> Tensor:
    """The transpose of `overlapping`: adds pieces up where they overlap.

    Args:
        x: pieces along `axis`, each along the next axis.
        axis: of the pieces.
        step: from one piece to the next.

    Returns:
        The sum, which may have zeros at the end.
    """
    if x.shape[axis] == 1:
        return ops.squeeze(x, axis)
    sizes = tuple(ops.shape(x))
    count, size = sizes[axis : axis + 2]
    parts = -(-size // step)
    before = (slice(None),) * axis
    outer, inner = sizes[:axis], sizes[axis + 2 :]
    shape = (*outer, count + parts - 1, step, *inner)
    total = ops.zeros(shape, dtype_of_sums(x))
    for n in range(parts):
        part = x[(*before, slice(None), slice(n * step, (n + 1) * step))]
        length = part.shape[axis + 1]
        if keras.backend.backend() == "torch":
            total[(*before, slice(n, n + count), slice(length))].add_(part)
        else:
            around = [(0, 0)] * len(shape)
            around[axis : axis + 2] = [(n, parts - 1 - n), (0, step - length)]
            total = total + ops.pad(part, around)
    return ops.reshape(total, (*outer, (count + parts - 1) * step, *inner))


def sum_of_views(
    views: Callable[[Tensor], list[Tensor]],
    parts: Float[Tensor, "*view count"],
    like: Float[Tensor, "*whole"],
) -> Float[Tensor, "*whole"]:
    """The transpose of `views`: adds each part where a view comes from.

    Args:
        views: slices of a tensor.
        parts: one for each of them, along the last axis.
        like: a tensor of the shape of the sum.
    """
    one_by_one = find_target(like).compiler is None
    if keras.backend.backend() == "torch" and one_by_one:
        total = parts.new_zeros(like.shape)
        for n, view in enumerate(views(total)):
            view.add_(parts[..., n])
        return total

    def stacked(x: Tensor) -> Tensor:
        return ops.stack(views(x), axis=-1)

    return vjp(stacked, (like,), parts)[1][0]


def laid_out(x: Tensor) -> Tensor:
    """The same, in PyTorch's memory as its axes say, also under Inductor.

    Left alone, Inductor would load it from where it comes from each time it is
    used, in the order in which it lies there: far apart. A view with given
    strides is what it takes as it is.
    """
    if keras.backend.backend() != "torch":
        return x
    x = x.contiguous()
    return x.as_strided(x.shape, x.stride())


def windows_of(
    x: Tensor,
    start: tuple[int, int],
    count: tuple[int, int],
    step: tuple[int, int],
    size: tuple[int, int],
) -> Tensor:
    """What windows see of the last two axes, as two axes before them.

    Entry `(..., i, j, m, n)` is entry `(..., start + (i, j) * step + (m, n))`.

    Args:
        x: `(..., rows, columns)`.
        start: where the first window begins.
        count: how many windows there are along both axes.
        step: from one to the next.
        size: of a window.

    Returns:
        `(..., *count, *size)`, under PyTorch a view.
    """
    x = ops.expand_dims(x, (-4, -3))
    x = ops.broadcast_to(x, (*x.shape[:-4], *count, *x.shape[-2:]))
    return own_windows_of(x, start, step, size)


def own_windows_of(
    x: Tensor,
    start: tuple[int, int],
    step: tuple[int, int],
    size: tuple[int, int],
) -> Tensor:
    """What each window sees of an image of its own.

    Entry `(..., i, j, m, n)` is entry `(..., i, j, start + (i, j) * step + (m,
    n))`.

    Args:
        x: `(..., *count, rows, columns)`.
        start, step, size: see `windows_of`.

    Returns:
        `(..., *count, *size)`, under PyTorch a view.
    """
    if keras.backend.backend() == "torch":
        *outer, i, j, down, along = x.stride()
        return x.as_strided(
            (*x.shape[:-2], *size),
            (*outer, i + step[0] * down, j + step[1] * along, down, along),
            x.storage_offset() + start[0] * down + start[1] * along,
        )
    rows = [
        [
            x[
                ...,
                i,
                j,
                start[0] + i * step[0] : start[0] + i * step[0] + size[0],
                start[1] + j * step[1] : start[1] + j * step[1] + size[1],
            ]
            for j in range(x.shape[-3])
        ]
        for i in range(x.shape[-4])
    ]
    axis = len(x.shape) - 4
    return ops.stack([ops.stack(row, axis) for row in rows], axis)
