"""Constants, elementwise operators, products, views and sums, by backend.

Each function is a plain operator in a form that the backend can run, or runs
fast: without numbers that are sent to a device, in place, or as views where
PyTorch has them.
"""

import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Shaped
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.backend.autodiff import vjp
from keras_equiattn.ops.backend.target import find_target
from keras_equiattn.ops.backend.target import is_portable
from keras_equiattn.ops.backend.target import within_torch_func
from keras_equiattn.ops.numerics import dtype_name
from keras_equiattn.ops.numerics import dtype_of_sums
from keras_equiattn.ops.numerics import in_full_precision

# Tables up to this size are kept on the device, 512 of them at most. They take
# half a gigabyte at most. The limit is a choice.
KEPT_BYTES = 2**20


def with_an_image(
    x: Shaped[Tensor, "batch ..."],
) -> Shaped[Tensor, "images ..."]:
    """The batch, with one image added if it has none.

    Some backends refuse the maximum of an empty tensor; TensorFlow refuses it
    unless the size of the batch is unknown. Its convolution of no images may
    have the wrong shape.
    """
    if x.shape[0] != 0:
        return x
    return ops.pad(x, [(0, 1)] + [(0, 0)] * (len(x.shape) - 1))


def constant(
    table: np.ndarray, like: Shaped[Tensor, "..."], dtype: Any = None
) -> Shaped[Tensor, "..."]:
    """A table as a tensor on the device of another one.

    PyTorch would copy it there in each call, so what was copied is kept, unless
    it is large. Compilers keep the constants of what they compile.

    Args:
        table: the table; it must be equal in each call.
        like: a tensor on that device.
        dtype: the dtype of the result, by name or as tensors have it; None is
            the dtype of the table.
    """
    if keras.backend.backend() != "torch":
        return ops.convert_to_tensor(table, dtype)
    import torch

    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    traced = type(like) not in (torch.Tensor, torch.nn.Parameter)
    # Tensors that are made within `torch.func.grad` belong to its level.
    traced = traced or within_torch_func()
    large = table.nbytes > KEPT_BYTES
    if traced or large or torch.compiler.is_compiling():
        # A tensor of a copy, since the table may be read-only.
        return torch.as_tensor(table.copy(), dtype=dtype, device=like.device)
    shape, kind = table.shape, table.dtype.str
    return _on_device(table.tobytes(), shape, kind, dtype, like.device)


@functools.lru_cache(maxsize=512)
def _on_device(
    data: bytes, shape: Any, kind: str, dtype: Any, device: Any
) -> Tensor:
    """A tensor of PyTorch with these numbers."""
    import torch

    table = np.frombuffer(data, kind).reshape(shape).copy()
    # Autograd refuses tensors that were made in inference mode.
    with torch.inference_mode(False):
        return torch.as_tensor(table, dtype=dtype, device=device)


def parted(
    x: Shaped[Tensor, "..."], sizes: Sequence[int], axis: int
) -> Sequence[Shaped[Tensor, "..."]]:
    """The parts of a tensor along an axis, with these sizes.

    `ops.split` would send the places to the device under PyTorch, and it cannot
    return a single part under TensorFlow.
    """
    if len(sizes) == 1:
        return [x]
    if keras.backend.backend() == "torch":
        return x.split(list(sizes), axis)
    return ops.split(x, np.cumsum(sizes)[:-1].tolist(), axis)


def filled(shape: Any, value: float, dtype: Any) -> Shaped[Tensor, "..."]:
    """`ops.full`, without a copy of the number to PyTorch's device.

    Keras sends it there, and waits for it to come back.
    """
    if keras.backend.backend() == "torch":
        return ops.empty(shape, dtype).fill_(value)
    return ops.full(shape, value, dtype)


def masked(
    x: Shaped[Tensor, "..."],
    hidden: Shaped[Tensor, "..."],
    value: float,
    owned: bool = False,
) -> Shaped[Tensor, "..."]:
    """`ops.where(hidden, value, x)`, without sending the number to the device.

    Args:
        x: a tensor.
        hidden: true where the result has the value; broadcast to `x`.
        value: a number that the dtype of `x` can represent.
        owned: whether nothing else uses `x`. Its memory is then that of the
            result, where operators run one by one.
    """
    if keras.backend.backend() == "torch" and ops.is_tensor(x):
        fill = x.masked_fill_ if owned and _in_place(x) else x.masked_fill
        return fill(hidden, value)
    return ops.where(hidden, ops.cast(value, x.dtype), x)


def remainder(x: Shaped[Tensor, "*axes"], size: Any) -> Shaped[Tensor, "*axes"]:
    """`ops.mod`, whose result has the sign of the size, see `masked`."""
    if keras.backend.backend() == "torch" and ops.is_tensor(x):
        return x % size
    return ops.mod(x, size)


def clamped(
    x: Float[Tensor, "*axes"], least: float, most: float
) -> Float[Tensor, "*axes"]:
    """`ops.clip`, see `masked`."""
    if keras.backend.backend() == "torch" and ops.is_tensor(x):
        return x.clamp(least, most)
    return ops.clip(x, least, most)


def maximum(
    x: Shaped[Tensor, "..."], y: Shaped[Tensor, "..."]
) -> Shaped[Tensor, "..."]:
    """`ops.maximum`, without rounding float64 to float32 under PyTorch."""
    if keras.backend.backend() == "torch":
        import torch

        return torch.maximum(x, y)
    return ops.maximum(x, y)


def added(
    total: Float[Tensor, "..."], x: Float[Tensor, "..."]
) -> Float[Tensor, "..."]:
    """`total + x` in the dtype of `total`, which nothing else may use.

    PyTorch then adds in place, and converts without a copy.
    """
    if _in_place(total):
        return total.add_(x)
    return total + ops.cast(x, total.dtype)


def multiplied(
    x: Float[Tensor, "..."], y: Float[Tensor, "..."]
) -> Float[Tensor, "..."]:
    """`x * y` in the dtype of `x`, which nothing else may use, see `added`.

    The product is computed in single precision at least.
    """
    if _in_place(x):
        return x.mul_(y)
    return ops.cast(in_full_precision(x) * y, x.dtype)


def exp_below(
    x: Float[Tensor, "..."], top: Float[Tensor, "..."]
) -> Float[Tensor, "..."]:
    """`exp(x - top)` in the dtype of `x`, which nothing else may use.

    It is computed in single precision at least, see `added`.
    """
    top = in_full_precision(top)
    if _in_place(x):
        # The exponential multiplies errors of a difference in half precision.
        y = x.sub_(top) if x.dtype == top.dtype else x - top
        return ops.cast(y.exp_(), x.dtype)
    return ops.cast(ops.exp(in_full_precision(x) - top), x.dtype)


def _in_place(x: Shaped[Tensor, "..."]) -> bool:
    """Whether operators run one by one, and may overwrite their operands."""
    return keras.backend.backend() == "torch" and (
        find_target(x).compiler is None
    )


def sum_at(
    parts: Sequence[Float[Tensor, "*part"]], starts: Sequence[int], axis: int
) -> Float[Tensor, "*whole"]:
    """The sum of parts that start at different places of an axis.

    It is computed in single precision at least.

    Args:
        parts: tensors of equal shape.
        starts: the place of each part; the first place is 0 and the last is the
            largest, or the other way round.
        axis: the axis, not negative.
    """
    reach = max(starts)
    if _in_place(parts[0]):
        shape = list(parts[0].shape)
        shape[axis] += reach
        total = ops.zeros(shape, dtype_of_sums(parts[0]))
        for start, part in zip(starts, parts, strict=True):
            total.narrow(axis, start, part.shape[axis]).add_(part)
        return total
    rest = [(0, 0)] * (len(parts[0].shape) - 1 - axis)
    padded = [
        ops.pad(
            in_full_precision(part),
            [*[(0, 0)] * axis, (start, reach - start), *rest],
        )
        for start, part in zip(starts, parts, strict=True)
    ]
    return sum(padded[1:], padded[0])


def add_product(
    total: Float[Tensor, "..."],
    x: Float[Tensor, "..."],
    y: Float[Tensor, "..."],
    place: tuple[int, int] = (0, 0),
    reach: tuple[int, int] = (0, 0),
) -> Float[Tensor, "..."]:
    """`total + x * y`, in place under PyTorch: nothing else may use `total`.

    Args:
        total: the tensor that the product is added to.
        x, y: the factors.
        place: where on axes 1 and 2 of the total the product starts.
        reach: by how much the total is longer along these axes.
    """
    if keras.backend.backend() == "torch":
        part = total
        for axis, (start, more) in enumerate(zip(place, reach, strict=True), 1):
            if more:
                part = part.narrow(axis, start, total.shape[axis] - more)
        part.addcmul_(x, y)
        return total
    product = ops.cast(x * y, total.dtype)
    if reach == (0, 0):
        return total + product
    around = [(n, r - n) for n, r in zip(place, reach, strict=True)]
    rest = ((0, 0),) * (len(total.shape) - 3)
    return total + ops.pad(product, ((0, 0), *around, *rest))


def rolled(
    x: Shaped[Tensor, "*axes"], shift: Sequence[int], axes: Sequence[int]
) -> Shaped[Tensor, "*axes"]:
    """`ops.roll`, made of slices for exported programs, as some lack it.

    Args:
        x: a tensor.
        shift: by how much, for each of the axes.
        axes: the axes that are rolled, none of them negative; their sizes are
            known.
    """
    if not any(shift):
        return x
    if not is_portable():
        return ops.roll(x, tuple(shift), axis=tuple(axes))
    for by, axis in zip(shift, axes, strict=True):
        before = (slice(None),) * axis
        start = -by % x.shape[axis]
        parts = x[(*before, slice(start, None))], x[(*before, slice(start))]
        x = ops.concatenate(parts, axis=axis) if start else x
    return x


def product(
    x: Float[Tensor, "slices ..."], y: Float[Tensor, "slices ..."]
) -> Float[Tensor, "slices ..."]:
    """`x * y`, of tensors with equal sizes along the first axis.

    TensorFlow's own kernels do not broadcast more than five axes, so it takes
    one slice of the first axis after the other.
    """
    if keras.backend.backend() != "tensorflow" or find_target(x, y).xla:
        return x * y
    return ops.stack([x[n] * y[n] for n in range(x.shape[0])])


def times_matrix(
    x: Float[Tensor, "*places inputs"], matrix: Float[Tensor, "inputs outputs"]
) -> Float[Tensor, "*places outputs"]:
    """`x @ matrix`, which is one product of matrices.

    PyTorch makes it one. TensorFlow without XLA would make many small ones, one
    for each row of an image: a gradient takes six times as long on maps of 8 x
    8. XLA on CPUs takes 1.3 times as long where there are several axes.
    """
    if keras.backend.backend() == "torch":
        return x @ matrix
    flat = ops.reshape(x, (-1, x.shape[-1])) @ matrix
    return ops.reshape(flat, (*ops.shape(x)[:-1], matrix.shape[-1]))


def for_products(x: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """Widens float16 to float32 on a CPU where XLA does not compile.

    There PyTorch and TensorFlow multiply matrices of float16 a hundred times as
    slowly as those of float32.
    """
    if dtype_name(x) != "float16":
        return x
    target = find_target(x)
    return x if target.device != "cpu" or target.xla else ops.cast(x, "float32")


def part_at(
    x: Shaped[Tensor, "..."], start: tuple[Any, ...], shape: Any
) -> Shaped[Tensor, "..."]:
    """`ops.slice`; under PyTorch a view, without tensors for the starts.

    Starts that are tensors cannot be exported.
    """
    if keras.backend.backend() != "torch":
        return ops.slice(x, _as_int32(start), shape)
    for axis, (first, length) in enumerate(zip(start, shape, strict=True)):
        x = x.narrow(axis, first, length)
    return x


def add_at(
    total: Shaped[Tensor, "*total"],
    start: tuple[Any, ...],
    part: Shaped[Tensor, "*part"],
) -> Shaped[Tensor, "*total"]:
    """Adds a part to some entries of a tensor, in place under PyTorch.

    Args:
        total: tensor to add to, which nothing else may use.
        start: where the part starts on each axis.
        part: the tensor that is added.
    """
    if keras.backend.backend() == "torch":
        part_at(total, start, part.shape).add_(part)
        return total
    return put_at(total, start, part_at(total, start, ops.shape(part)) + part)


def put_at(
    total: Shaped[Tensor, "*total"],
    start: tuple[Any, ...],
    part: Shaped[Tensor, "*part"],
) -> Shaped[Tensor, "*total"]:
    """`ops.slice_update`: the tensor with other entries from `start` on."""
    return ops.slice_update(total, _as_int32(start), part)


def _as_int32(start: tuple[Any, ...]) -> tuple[Any, ...]:
    """Places of one dtype, as JAX requires.

    If JAX has 64 bits enabled, Python's integers become 64 bits wide, but the
    counters of loops have 32.
    """
    if keras.backend.backend() != "jax":
        return start
    return tuple(ops.cast(n, "int32") for n in start)


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
    in_place = (
        keras.backend.backend() == "torch"
        and find_target(like).compiler is None
        # New tensors in `torch.func` may require a gradient, and cannot be
        # changed.
        and not within_torch_func()
    )
    if in_place:
        total = parts.new_zeros(like.shape)
        for n, view in enumerate(views(total)):
            view.add_(parts[..., n])
        return total

    def stacked(x: Tensor) -> Tensor:
        return ops.stack(views(x), axis=-1)

    return vjp(stacked, (like,), parts)[1][0]
