"""What differs between the backends and matters for speed or memory.

Everything else in this package is `keras.ops`.
"""

import contextvars
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_equiattn.ops._types import Tensor

Function = Callable[..., Any]

# Whether TensorFlow is tracing a function that it will compile with XLA.
_in_xla = contextvars.ContextVar("in_xla", default=False)


def scan(function: Function, carry: Any, xs: Any, like: Any = ()) -> Any:
    """`jax.lax.scan` over the first axis of every tensor in `xs`.

    One step at a time on every backend: what a step allocates is free before
    the next. Not differentiable under TensorFlow; for use within
    `recomputed`.

    Args:
        function: takes the carry and a slice of `xs`, returns the next carry
            and an output.
        carry: a nest of tensors, or `()`.
        xs: a nest of tensors with the same first axis, and of `steps`.
        like: a nest of tensors with structure and dtypes of an output.

    Returns:
        The last carry, and the outputs stacked along a new first axis.
    """
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        return jax.lax.scan(function, carry, xs)
    if backend == "tensorflow":
        return _scan_tensorflow(function, carry, xs, like)
    outputs = []
    for index in range(len(keras.tree.flatten(xs)[0])):
        piece = keras.tree.map_structure(lambda x, i=index: x[i], xs)
        carry, output = function(carry, piece)
        outputs.append(output)
    return carry, keras.tree.map_structure(
        lambda *pieces: ops.stack(pieces), *outputs
    )


def steps(count: Any) -> Any:
    """Numbers of as many steps, for `scan`: integers without a compiler.

    Where a part starts at an integer, PyTorch takes it without a copy.
    """
    if compiles():
        return ops.arange(count, dtype="int32")
    return range(count)


def scan_groups(
    function: Function, carry: Any, xs: Any, size: int, like: Any = ()
) -> Any:
    """`scan` over slices of up to `size` along the first axis.

    The groups are of equal size but for the last, which may be smaller.
    Outputs keep that axis, and are joined along it.
    """
    length = xs[0].shape[0]
    if length <= size:
        return function(carry, xs)
    # As many groups as `size` asks for, the last not much smaller.
    size = -(-length // -(-length // size))
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


def _scan_tensorflow(function: Function, carry: Any, xs: Any, like: Any) -> Any:
    """The same with `tf.while_loop`, which XLA compiles to one loop."""
    import tensorflow as tf

    flat = keras.tree.flatten(xs)
    length = ops.shape(flat[0])[0]

    def body(index: Any, flat_carry: Any, arrays: Any) -> Any:
        piece = [tf.gather(x, index) for x in flat]
        next_carry, outputs = function(
            keras.tree.pack_sequence_as(carry, flat_carry),
            keras.tree.pack_sequence_as(xs, piece),
        )
        written = [
            array.write(index, y)
            for array, y in zip(
                arrays, keras.tree.flatten(outputs), strict=True
            )
        ]
        return index + 1, keras.tree.flatten(next_carry), written

    _, flat_carry, arrays = tf.while_loop(
        lambda index, *_: index < length,
        body,
        (
            tf.constant(0),
            keras.tree.flatten(carry),
            [tf.TensorArray(y.dtype, length) for y in keras.tree.flatten(like)],
        ),
        parallel_iterations=1,
        maximum_iterations=length,
    )
    return (
        keras.tree.pack_sequence_as(carry, flat_carry),
        keras.tree.pack_sequence_as(like, [a.stack() for a in arrays]),
    )


def vjp(
    function: Function, arguments: tuple[Tensor, ...], cotangent: Any
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A value, and the gradients of `sum(value * cotangent)`.

    Args:
        function: from tensors to one tensor.
        arguments: of the function.
        cotangent: like its value.

    Returns:
        `function(*arguments)`, and a gradient for each of the arguments.
    """
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        value, pull_back = jax.vjp(function, *arguments)
        return value, pull_back(cotangent)
    if backend == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(arguments)
            value = function(*arguments)
        return value, tuple(tape.gradient(value, arguments, cotangent))
    import torch

    with torch.enable_grad():
        leaves = tuple(a.detach().requires_grad_() for a in arguments)
        value = function(*leaves)
    return value.detach(), torch.autograd.grad(value, leaves, cotangent)


def with_an_image(x: Tensor) -> Tensor:
    """An empty batch with one image.

    Not all backends take a maximum of none; TensorFlow does where the size of
    the batch is not known. Its convolution of none may have the wrong shape.
    """
    if x.shape[0] != 0:
        return x
    return ops.pad(x, [(0, 1)] + [(0, 0)] * (len(x.shape) - 1))


def maximum(x: Tensor, y: Tensor) -> Tensor:
    """`ops.maximum`, which takes float64 through float32 under PyTorch."""
    if keras.backend.backend() == "torch":
        import torch

        return torch.maximum(x, y)
    return ops.maximum(x, y)


def contiguous(x: Tensor) -> Tensor:
    """The same, in PyTorch's memory as its axes say.

    It multiplies matrices one by one that are not.
    """
    return x.contiguous() if keras.backend.backend() == "torch" else x


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
    return total + x * y


def part_at(x: Tensor, start: tuple[Any, ...], shape: Any) -> Tensor:
    """`ops.slice`, under PyTorch in the memory of `x` and without tensors.

    Starts that are tensors cannot be exported.
    """
    if keras.backend.backend() != "torch":
        return ops.slice(x, start, shape)
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
    before = ops.slice(total, start, ops.shape(part))
    return ops.slice_update(total, start, before + part)


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
    return total + ops.pad(x * y, ((0, 0), *around, *rest))


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
    total = ops.zeros(shape, x.dtype)
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


def recomputed(forward: Function, backward: Function, instead: str) -> Function:
    """A function with a gradient of its own, compiled where that is possible.

    Under TensorFlow it is compiled by XLA within a `tf.function`, so in
    `fit`; called eagerly it is not, since that would take seconds.

    The gradient can be differentiated once more under JAX. Under TensorFlow
    and PyTorch, which would lose what flows through the kept tensors, that is
    an error.

    Args:
        forward: from tensors to the result and what to keep for `backward`,
            a nest of tensors.
        backward: from the same tensors, what was kept and the gradient with
            respect to the result to the gradients with respect to the
            tensors.
        instead: what to pass to differentiate twice, for the error.

    Returns:
        A differentiable function from tensors to the result.
    """

    def build(compile: Function) -> Function:
        run, run_back = compile(forward), compile(backward)

        @ops.custom_gradient
        def function(*arguments: Tensor) -> Any:
            arguments = tuple(map(ops.convert_to_tensor, arguments))
            result, kept = run(*arguments)

            def gradient(*passed: Tensor, upstream: Any = None) -> Any:
                # The backends pass it in different places.
                upstream = passed[0] if upstream is None else upstream
                _refuse_second_derivative(instead)
                gradients = run_back(_as_others(arguments), kept, upstream)
                return tuple(_not_differentiable(x, instead) for x in gradients)

            return result, gradient

        return function

    return _compiled(build)


def _refuse_second_derivative(instead: str) -> None:
    """PyTorch differentiates a gradient if it is computed with gradients on."""
    if keras.backend.backend() == "torch":
        import torch

        if torch.is_grad_enabled():
            raise NotImplementedError(
                "This gradient cannot be differentiated (create_graph=True). "
                f"Pass `{instead}` to differentiate twice."
            )


def _as_others(tensors: Any) -> Any:
    """The same tensors, for XLA others.

    Or it would find that the backward pass computes what the forward pass did,
    and keep that.
    """
    if keras.backend.backend() == "jax":
        import jax

        barrier: Function = jax.lax.optimization_barrier
        return barrier(tensors)
    return tensors


def one_by_one(function: Function, x: Tensor, axes: int) -> Tensor:
    """A transposition of the last axes, for the first axes in a loop.

    Of all at once where JAX does not compile for a CPU. There XLA would take
    it for another order of the same memory, and write `x` at long strides.

    Args:
        function: takes and returns tensors with any number of axes before.
        x: the tensor.
        axes: how many of its axes come before.
    """
    if keras.backend.backend() != "jax" or not on_cpu():
        return function(x)
    outer, inner = x.shape[:axes], x.shape[axes:]
    pieces = ops.reshape(x, (math.prod(outer), *inner))
    pieces = scan(lambda _, piece: ((), function(piece)), (), pieces)[1]
    return ops.reshape(pieces, (*outer, *pieces.shape[1:]))


def _not_differentiable(x: Tensor, instead: str) -> Tensor:
    """The same, with an error where TensorFlow differentiates it."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        message = f"Pass `{instead}` to differentiate twice."
        return tf.raw_ops.PreventGradient(input=x, message=message)
    return x


def without_gradient(function: Function) -> Function:
    """The function, with no gradient passing through its results."""

    def build(compile: Function) -> Function:
        run = compile(function)
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            # Not `stop_gradient`: TensorFlow would still look inside.
            @tf.custom_gradient
            def constant(*arguments: Tensor) -> Any:
                return run(*arguments), lambda *_: [None] * len(arguments)

            return constant
        return lambda *arguments: run(*map(ops.stop_gradient, arguments))

    return _compiled(build)


def _compiled(build: Callable[[Function], Function]) -> Function:
    """What `build` makes with the compiler of the backend."""
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        return build(jax.jit)
    if backend != "tensorflow":
        return build(lambda function: function)
    import tensorflow as tf

    def with_xla(function: Function) -> Function:
        def traced(*arguments: Tensor) -> Any:
            token = _in_xla.set(True)
            try:
                return function(*arguments)
            finally:
                _in_xla.reset(token)

        return tf.function(traced, autograph=False, jit_compile=True)

    in_graph = build(with_xla)
    # A graph all the same: else the tape would hold every step.
    eager = tf.function(build(lambda function: function), autograph=False)
    # There is one for each layer and shape; TensorFlow takes them for one that
    # is traced again and again.
    eager._omit_frequent_tracing_warning = True

    def function(*arguments: Tensor) -> Any:
        return (in_graph if will_compile() else eager)(*arguments)

    return function


def compiles() -> bool:
    """Whether loops are compiled, so that short steps cost nothing extra."""
    return keras.backend.backend() != "torch"


def in_xla() -> bool:
    """Whether what runs now is compiled by XLA."""
    return keras.backend.backend() == "jax" or _in_xla.get()


def will_compile() -> bool:
    """Whether XLA compiles `recomputed` functions that are called now."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return bool(tf.inside_function())
    return keras.backend.backend() == "jax"


def on_cpu() -> bool:
    """Whether the backend takes a CPU, without an accelerator or told to."""
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        return jax.default_backend() == "cpu"
    if backend == "tensorflow":
        import tensorflow as tf

        return not tf.config.list_physical_devices("GPU")
    # What Keras takes. While shapes are found it is "meta", where only they
    # count.
    device: str = ops.convert_to_tensor(0.0).device.type
    return device in ("cpu", "meta")


def step_by_step_on_cpu() -> bool:
    """Whether a CPU runs one operator after the other, without a compiler."""
    return on_cpu() and not compiles()


def xla_on_cpu() -> bool:
    """Whether what runs now is compiled by XLA for a CPU.

    It turns a long sum of products into one loop.
    """
    return in_xla() and on_cpu()


def dropout_factors(shape: Any, rate: float, seed: Any, dtype: Any) -> Tensor:
    """Zeros with the probability `rate`, else the inverse of what is kept.

    The same for the same seed, which `keras.random` does not take as a tensor.
    Each takes 16 random bits: rates are rounded to multiples of `1 / 65536`.

    Args:
        shape: of the result.
        rate: probability of a zero, less than one.
        seed: two whole numbers as a tensor.
        dtype: of the result.
    """
    dropped = min(round(rate * 2**16), 2**16 - 1)
    kept = 1.0 - dropped / 2**16
    known = all(isinstance(n, int) for n in shape)
    count = math.prod(shape) if known else ops.prod(shape)
    if keras.backend.backend() == "torch":
        keep = _random_int16_torch(count, seed) >= dropped - 2**15
    else:
        words = _random_words((count + 1) // 2, seed)
        bits = ops.stack(
            [ops.bitwise_and(words, 0xFFFF), ops.right_shift(words, 16)]
        )
        keep = ops.reshape(bits, (-1,))[:count] >= dropped
    return ops.cast(ops.reshape(keep, shape), dtype) / kept


def _random_words(count: Any, seed: Any) -> Tensor:
    """As many random integers of 32 bits, under JAX and TensorFlow."""
    if keras.backend.backend() == "jax":
        import jax
        from jax.extend.random import threefry_2x32

        # As `jax.random.bits`, which drops every second number that it draws.
        counter = jax.numpy.arange(count, dtype="uint32")
        return threefry_2x32(ops.cast(seed, "uint32"), counter)
    import tensorflow as tf

    return tf.random.stateless_uniform(
        [count],
        tf.cast(seed, "int32"),
        minval=None,
        maxval=None,
        dtype="uint32",
        # XLA is slow at Philox on CPUs, and alone knows the other one.
        alg="threefry" if in_xla() else "auto_select",
    )


def _random_int16_torch(count: int, seed: Any) -> Tensor:
    """As many random integers of 16 bits with a sign."""
    import torch

    # Mixed: on a CPU the generator looks at half of the bits alone.
    mixed = np.random.SeedSequence([int(n) for n in seed])
    generator = torch.Generator(seed.device)
    generator.manual_seed(int(mixed.generate_state(1, "uint64")[0]))
    # A CPU draws one number after the other: four times as fast as each alone.
    words = torch.empty(
        math.ceil(count / 4), dtype=torch.int64, device=seed.device
    )
    words.random_(-(2**63), None, generator=generator)
    return words.view(torch.int16)[:count]
