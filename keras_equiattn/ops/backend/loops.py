"""Loops that compilers see as loops, and that Python runs elsewhere."""

from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_equiattn.ops._types import Shaped
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.backend.memory import part_at
from keras_equiattn.ops.backend.memory import put_at
from keras_equiattn.ops.backend.target import find_target
from keras_equiattn.ops.backend.target import is_portable
from keras_equiattn.ops.numerics import part_size

Function = Callable[..., Any]


class OfSteps:
    """The outputs of the steps of a loop, one after the other.

    Another loop takes it in place of tensors with the steps along the first
    axis.

    Args:
        found: a nest of tensors for each step.
    """

    def __init__(self, found: list[Any]) -> None:
        self.found = found

    def __len__(self) -> int:
        return len(self.found)

    def __getitem__(self, step: int) -> Any:
        return self.found[step]


def scan(
    function: Function,
    carry: Any,
    xs: Any,
    like: Any = (),
    stacked: bool = True,
) -> Any:
    """`jax.lax.scan` over the first axis of every tensor in `xs`.

    All backends take one step at a time: the memory of a step is free before
    the next one. The loop is not differentiable under TensorFlow; it is for use
    within `custom_vjp`. `keras.ops.scan` is no substitute: under TensorFlow its
    outputs must have the shapes and dtypes of the carry, and no slice may be
    None.

    Args:
        function: takes the carry and a slice of `xs`, returns the next carry
            and an output.
        carry: a nest of tensors, or `()`.
        xs: a nest of tensors with the same first axis, and of `steps`. Entries
            of the nest may be None, except the first one; they are None in
            every slice.
        like: a nest of tensors with structure and dtypes of an output. Entries
            of an output may be None, the same ones in every step.
        stacked: False where the outputs are for another `scan` alone. Python
            then keeps them as they are, in `OfSteps`, and copies nothing.

    Returns:
        The last carry, and the outputs stacked along a new first axis.
    """
    if _by_compiler("jax"):
        import jax

        return jax.lax.scan(function, carry, xs)
    if _by_compiler("tensorflow"):
        return _scan_tensorflow(function, carry, xs, like)
    outputs = []
    first = keras.tree.flatten(xs)[0]
    count = first.shape[0] if ops.is_tensor(first) else len(first)
    for index in range(count):
        piece = keras.tree.map_structure(
            lambda x, i=index: None if x is None else x[i], xs
        )
        carry, output = function(carry, piece)
        outputs.append(output)
    if not stacked:
        return carry, OfSteps(outputs)
    return carry, keras.tree.map_structure(
        lambda *pieces: ops.stack(pieces), *outputs
    )


def steps(count: Any) -> Any:
    """The numbers of the steps, for `scan`: integers where Python loops.

    PyTorch takes a part that starts at an integer without a copy.
    """
    if _by_compiler("jax", "tensorflow"):
        return ops.arange(count, dtype="int32")
    return range(count)


def _by_compiler(*backends: str) -> bool:
    """Whether one of these backends runs, and gets a loop as a loop."""
    return keras.backend.backend() in backends and not is_portable()


def scan_groups(
    function: Function, carry: Any, xs: Any, size: int, like: Any = ()
) -> Any:
    """`scan` over slices of up to `size` along the first axis.

    The groups are of equal size but for the last, see `numerics.part_size`.
    Outputs keep that axis, and are joined along it.
    """
    length = xs[0].shape[0]
    if length <= size:
        return function(carry, xs)
    size = part_size(length, size)
    steps = length // size
    whole = steps * size
    pieces = keras.tree.map_structure(
        lambda x: ops.reshape(x[:whole], (steps, size, *ops.shape(x)[1:])), xs
    )
    carry, outputs = scan(function, carry, pieces, like)
    outputs = keras.tree.map_structure(
        lambda y: ops.reshape(y, (whole, *ops.shape(y)[2:])), outputs
    )
    if whole == length:
        return carry, outputs
    carry, last = function(
        carry, keras.tree.map_structure(lambda x: x[whole:], xs)
    )
    return carry, keras.tree.map_structure(
        lambda y, z: ops.concatenate([y, z]), outputs, last
    )


def by_parts(
    function: Function, x: Shaped[Tensor, "..."], axis: int, joined: int
) -> Shaped[Tensor, "..."]:
    """Transposes a tensor part by part where XLA compiles for a CPU.

    There XLA would fuse a transposition of the whole tensor into whatever uses
    its result, and load or store at long strides as often as the result
    is used. Elsewhere the whole tensor is transposed at once.

    Args:
        function: transposes a tensor with fewer entries along the axis.
        x: the tensor.
        axis: the axis that is cut, not negative.
        joined: where that axis is in the result.
    """
    size = x.shape[axis]
    if not find_target(x).xla_on_cpu or not isinstance(size, int) or size < 2:
        return function(x)
    count = next(n for n in range(2, size + 1) if size % n == 0)
    shape = list(ops.shape(x))
    shape[axis] = size // count

    def part(_: Any, number: Tensor) -> Any:
        start: list[Any] = [0] * len(shape)
        start[axis] = number * shape[axis]
        return (), function(part_at(x, tuple(start), shape))

    _, parts = scan(part, (), ops.arange(count, dtype="int32"), like=x)
    parts = ops.moveaxis(parts, 0, joined)
    shape = list(ops.shape(parts))
    shape[joined : joined + 2] = [size]
    return ops.reshape(parts, shape)


def one_by_one(
    function: Function,
    x: Shaped[Tensor, "steps *slice"],
    *others: Shaped[Tensor, "steps *slice"],
) -> Shaped[Tensor, "steps *slice"]:
    """Applies an elementwise function to one slice after the other.

    Where XLA does not compile for a CPU, it is applied to the whole tensor at
    once. On a CPU, XLA would fuse the function into whatever uses its
    result, and read the arguments anew for each use. The result takes the
    memory of `x`.

    Args:
        function: from a slice of each tensor to one of the same shape.
        x, *others: tensors of the same shape.
    """
    if not find_target(x, *others).xla_on_cpu:
        return function(x, *others)

    def step(x: Tensor, piece: Any) -> Any:
        number, *slices = piece
        found = function(x[number], *slices)
        start = (number, *[0] * (len(x.shape) - 1))
        return put_at(x, start, found[None]), ()

    pieces = (ops.arange(ops.shape(x)[0], dtype="int32"), *others)
    return scan(step, x, pieces)[0]


def _scan_tensorflow(function: Function, carry: Any, xs: Any, like: Any) -> Any:
    """Computes `scan` with `tf.while_loop`, which XLA compiles to one loop."""
    import tensorflow as tf

    flat = keras.tree.flatten(xs)
    length = ops.shape(flat[0])[0]

    def body(index: Any, flat_carry: Any, arrays: Any) -> Any:
        """Runs one step, and writes its outputs into the arrays."""
        piece = [None if x is None else tf.gather(x, index) for x in flat]
        next_carry, outputs = function(
            keras.tree.pack_sequence_as(carry, flat_carry),
            keras.tree.pack_sequence_as(xs, piece),
        )
        given = [y for y in keras.tree.flatten(outputs) if y is not None]
        written = [
            array.write(index, y)
            for array, y in zip(arrays, given, strict=True)
        ]
        return index + 1, keras.tree.flatten(next_carry), written

    wanted = keras.tree.flatten(like)

    _, flat_carry, arrays = tf.while_loop(
        lambda index, *_: index < length,
        body,
        (
            tf.constant(0),
            keras.tree.flatten(carry),
            [tf.TensorArray(y.dtype, length) for y in wanted if y is not None],
        ),
        parallel_iterations=1,
        maximum_iterations=length,
    )
    stacked = (array.stack() for array in arrays)
    found = [None if y is None else next(stacked) for y in wanted]
    return (
        keras.tree.pack_sequence_as(carry, flat_carry),
        keras.tree.pack_sequence_as(like, found),
    )
