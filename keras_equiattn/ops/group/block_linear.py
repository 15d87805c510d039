"""Linear maps on a group in the basis of the irreducible representations.

There the matrix of a linear map falls into blocks (`irreps`), which take fewer
multiplications than the whole. A change of basis takes some additions
(`fourier`).
"""

import functools
import math
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import numpy as np
from keras import activations
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
Sums = Sequence[Float[Tensor, "batch height width _ _"]]
# Sums, or a feature map alone.
Images = Sequence[Float[Tensor, "batch height width _ _"]]
Matrices = list[Float[Tensor, "_ _"]]

# The arguments with which the gradient can be differentiated everywhere.
ADVICE = "`basis='regular'` or `recompute=False`"


class Form(NamedTuple):
    """What a linear map takes and gives.

    Attributes:
        group: the group.
        takes_sums: whether it takes the sums of a feature map in place of it.
        gives_sums: whether it gives the sums of a feature map in place of it.
        activation: the name of a function in `keras.activations` that is
            applied first to the feature map that it takes, value by value;
            None is the identity, and the only choice for sums.
    """

    group: Group
    takes_sums: bool = False
    gives_sums: bool = False
    activation: str | None = None


def block_linear(
    x: Float[Tensor, "batch height width order channels"],
    kernel: Float[Tensor, "order channels filters"],
    bias: Float[Tensor, " filters"] | None,
    group: Group,
    activation: str | None = None,
) -> Float[Tensor, "batch height width order filters"]:
    """`ops.group_linear`, by blocks."""
    form = Form(group, activation=activation)
    (y,) = _applied(form, (x,), kernel, bias)
    return y


def linear_to_sums(
    x: Float[Tensor, "batch height width order channels"],
    kernel: Float[Tensor, "order channels filters"],
    bias: Float[Tensor, " filters"] | None,
    group: Group,
) -> Sums:
    """The sums of the result of a linear map along waves of unit norm."""
    return _applied(Form(group, gives_sums=True), (x,), kernel, bias)


def linear_from_sums(
    sums: Sums,
    kernel: Float[Tensor, "order channels filters"],
    bias: Float[Tensor, " filters"] | None,
    group: Group,
) -> Float[Tensor, "batch height width order filters"]:
    """A linear map of the feature map that has these sums.

    They are sums along waves of unit norm.
    """
    (y,) = _applied(Form(group, takes_sums=True), tuple(sums), kernel, bias)
    return y


def _applied(
    form: Form, inputs: Images, kernel: Tensor, bias: Tensor | None
) -> Images:
    """The linear map of a feature map, or of its sums."""
    bias_or_none = () if bias is None else (bias,)
    if not config.is_recompute_enabled():
        inputs, form = _activated_first(form, inputs)
        return _mapped(form, inputs, _matrices(kernel, form), bias_or_none)
    tensors = (*inputs, kernel, *bias_or_none)
    found = _function(form, backend.signature(tensors))(*tensors)
    return found if form.gives_sums else (found,)


def _mapped(
    form: Form, inputs: Images, matrices: Matrices, bias: Sequence[Tensor]
) -> Images:
    """The linear map, with the matrices of its blocks and maybe a bias."""
    group = form.group
    inputs = _activated(form, inputs)
    sums = inputs if form.takes_sums else to_sums(*inputs, group=group)
    first, *others = _products(sums, matrices)
    # The bias is added to the constant wave, and so to each element.
    for b in bias:
        first = first + _constant(first, form) * b
    found = (first, *others)
    return found if form.gives_sums else (from_sums(found, group=group),)


@functools.lru_cache(maxsize=512)
def _function(form: Form, signature: Any) -> Callable[..., Any]:
    """The linear map of inputs, a kernel and maybe a bias.

    It returns sums, or a single feature map. Its custom gradient transforms
    feature maps once more, so that only the arguments are kept, as they are
    before the activation.
    """

    def forward(*arguments: Tensor) -> tuple[Any, Any]:
        inputs, kernel, bias = _unpacked(form, arguments)
        matrices = _matrices(kernel, form)

        def step(_: Any, inputs: Images) -> tuple[Any, Images]:
            return (), _mapped(form, inputs, matrices, bias)

        shapes = _shapes(form.group, form.gives_sums, kernel.shape[2])
        _, found = _in_steps(step, (), kernel, inputs, shapes)
        return (found if form.gives_sums else found[0]), ()

    def backward(
        arguments: tuple[Tensor, ...], _: Any, upstream: Any
    ) -> tuple[Tensor, ...]:
        return _gradients(form, arguments, _filled(form, arguments, upstream))

    def differentiable(
        arguments: tuple[Tensor, ...], upstream: Any
    ) -> tuple[Tensor, ...]:
        activated, linear = _activated_first(form, arguments)
        tensors = (*activated, *_filled(form, arguments, upstream))
        function = _gradient_function(linear, backend.signature(tensors))
        of_first, *others = function(*tensors)
        if form.activation is not None:
            _, (of_first,) = backend.vjp(
                activations.get(form.activation),
                arguments[:1],
                of_first,
                differentiable=True,
            )
        return of_first, *others

    return backend.custom_vjp(forward, backward, ADVICE, differentiable)


@functools.lru_cache(maxsize=512)
def _gradient_function(form: Form, signature: Any) -> Callable[..., Any]:
    """The gradient of a linear map, from its arguments and upstream gradients.

    It is linear in each of them, so that its own gradient is made of linear
    maps and gradients of linear maps. PyTorch calls it where a gradient will be
    differentiated.
    """
    count = _count(form.group, form.gives_sums)

    def forward(*tensors: Tensor) -> tuple[Any, Any]:
        return _gradients(form, tensors[:-count], tensors[-count:]), ()

    def differentiable(
        tensors: tuple[Tensor, ...], of_gradients: tuple[Tensor | None, ...]
    ) -> tuple[Tensor, ...]:
        arguments, upstream = tensors[:-count], tensors[-count:]
        inputs, kernel, bias = _unpacked(form, arguments)
        of_inputs, of_kernel, of_bias = _unpacked(
            form,
            tuple(
                ops.zeros_like(x) if d is None else d
                for x, d in zip(arguments, of_gradients, strict=True)
            ),
        )

        def mapped(*arguments: Tensor) -> Images:
            found = _function(form, backend.signature(arguments))(*arguments)
            return found if form.gives_sums else (found,)

        def pulled_back(inputs: Images, kernel: Tensor) -> tuple[Tensor, ...]:
            tensors = (*inputs, kernel, *upstream)
            function = _gradient_function(form, backend.signature(tensors))
            return function(*tensors)

        of_upstream = [
            x + y
            for x, y in zip(
                mapped(*inputs, of_kernel, *of_bias),
                mapped(*of_inputs, kernel),
                strict=True,
            )
        ]
        return (
            *pulled_back(inputs, of_kernel)[:-1],
            pulled_back(of_inputs, kernel)[-1],
            *map(ops.zeros_like, bias),
            *of_upstream,
        )

    def backward(
        tensors: tuple[Tensor, ...], _: Any, of_gradients: Any
    ) -> tuple[Tensor, ...]:
        return differentiable(tensors, of_gradients)

    return backend.custom_vjp(forward, backward, ADVICE, differentiable)


def _filled(form: Form, arguments: tuple[Tensor, ...], upstream: Any) -> Images:
    """The upstream gradients, with zeros where PyTorch has None."""
    if not form.gives_sums:
        return (upstream,)
    inputs, kernel, _ = _unpacked(form, arguments)
    size = ops.shape(inputs[0])[:3]
    shapes = _shapes(form.group, True, kernel.shape[2])
    return tuple(
        ops.zeros((*size, *shape), kernel.dtype) if d is None else d
        for d, shape in zip(upstream, shapes, strict=True)
    )


def _unpacked(
    form: Form, arguments: tuple[Tensor, ...]
) -> tuple[Images, Tensor, tuple[Tensor, ...]]:
    """The inputs, the kernel, and the bias if there is one."""
    count = _count(form.group, form.takes_sums)
    kernel, *bias = arguments[count:]
    return arguments[:count], kernel, tuple(bias)


def _count(group: Group, are_sums: bool) -> int:
    """How many tensors sums are, or a feature map."""
    return len(blocks(group)) if are_sums else 1


def _gradients(
    form: Form, arguments: tuple[Tensor, ...], upstream: Images
) -> tuple[Tensor, ...]:
    """The gradients, with those of the blocks added up over the steps."""
    group = form.group
    inputs, kernel, bias = _unpacked(form, arguments)
    matrices = _matrices(kernel, form)
    transposed = [ops.transpose(matrix) for matrix in matrices]
    totals = [
        ops.zeros(total.shape, dtype_of_sums(total))
        for total in (*matrices, *bias)
    ]

    def step(totals: Any, images: Images) -> Any:
        """Adds the gradients of blocks and bias over some rows.

        Returns the totals, and the gradient of these rows.
        """
        x, of_y = images[: len(inputs)], images[len(inputs) :]
        if not form.gives_sums:
            of_y = to_sums(*of_y, group=group)
        of_x = _products(of_y, transposed)
        if not form.takes_sums:
            of_x = (from_sums(of_x, group=group),)
            x, of_x = _activated_and_gradient(form, x, of_x)
            x = to_sums(*x, group=group)
        found = [_outer(a, b) for a, b in zip(x, of_y, strict=True)]
        if bias:
            of_bias = sum_in_full_precision(of_y[0], (0, 1, 2, 3))
            found.append(_constant(of_y[0], form) * of_bias)
        totals = [
            total + ops.cast(more, total.dtype)
            for total, more in zip(totals, found, strict=True)
        ]
        return totals, of_x

    shapes = _shapes(group, form.takes_sums, kernel.shape[1])
    images = (*inputs, *upstream)
    totals, of_inputs = _in_steps(step, totals, kernel, images, shapes)
    of_bias = [ops.cast(totals.pop(), b.dtype) for b in bias]
    return *of_inputs, _of_kernel(totals, kernel, form), *of_bias


def _activated_first(
    form: Form, arguments: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], Form]:
    """Arguments after the activation, and the form of what is left to do."""
    first, *others = arguments
    first = activations.get(form.activation)(first)
    return (first, *others), form._replace(activation=None)


def _activated(form: Form, inputs: Images) -> Images:
    """The inputs after the activation."""
    if form.activation is None:
        return inputs
    (x,) = inputs
    function = activations.get(form.activation)
    if not dispatch.loops_over_rows(x):
        return (function(x),)
    # XLA would compute the activation anew for each sum that takes it, unless
    # it comes from a loop of its own. The order of the group is even here, so
    # that there are two halves.
    halves = backend.one_by_one(function, ops.reshape(x, (2, -1)))
    return (ops.reshape(halves, ops.shape(x)),)


def _activated_and_gradient(
    form: Form, inputs: Images, upstream: Images
) -> tuple[Images, Images]:
    """The inputs after the activation, and the gradient of those before it."""
    if form.activation is None:
        return inputs, upstream
    function = activations.get(form.activation)
    y, of_inputs = backend.vjp(function, tuple(inputs), *upstream)
    if dispatch.loops_over_rows(y):
        return _activated(form, inputs), of_inputs
    return (y,), of_inputs


def _shapes(
    group: Group, are_sums: bool, channels: int
) -> list[tuple[int, int]]:
    """The last two axes of sums, or of a feature map."""
    if not are_sums:
        return [(group.order, channels)]
    return [(block.rows, block.size * channels) for block in blocks(group)]


def _in_steps(
    step: Callable[..., Any],
    totals: Any,
    kernel: Float[Tensor, "order channels filters"],
    images: Sequence[Float[Tensor, "batch height width _ _"]],
    shapes: Sequence[tuple[int, int]],
) -> tuple[Any, Sequence[Float[Tensor, "batch height width _ _"]]]:
    """Applies a function to images, or to some rows of all at a time.

    Args:
        step: takes totals and rows of the images, returns the next totals and
            rows of the results.
        totals: a nest of tensors.
        kernel: the kernel of the linear map.
        images: feature maps or their sums, of the same height and width.
        shapes: the last two axes of the results.

    Returns:
        The last totals, and the results.
    """
    first = images[0]
    if not dispatch.loops_over_rows(first):
        return step(totals, images)
    batch, height, width = ops.shape(first)[:3]
    if isinstance(batch, int) and batch > 1:
        # One tall image has the same rows, and some of them are one piece of
        # memory.
        tall = [
            ops.reshape(x, (1, batch * height, *x.shape[2:])) for x in images
        ]
        totals, found = _in_steps(step, totals, kernel, tall, shapes)
        size = batch, height, width
        return totals, tuple(
            ops.reshape(y, (*size, *shape))
            for y, shape in zip(found, shapes, strict=True)
        )
    order, channels, filters = kernel.shape
    together = dispatch.rows_of_step(first, order * max(channels, filters))
    if together is None:
        return step(totals, images)
    whole, left = divmod(height, together)

    def some_rows(carry: Any, at: Any, rows: int = together) -> Any:
        """Puts the rows of one step into the results."""
        results, totals = carry
        start = (0, at * together, 0, 0, 0)
        parts = tuple(
            backend.part_at(x, start, (batch, rows, *x.shape[2:]))
            for x in images
        )
        totals, found = step(totals, parts)
        results = tuple(
            backend.put_at(result, start, part)
            for result, part in zip(results, found, strict=True)
        )
        return (results, totals), ()

    results = tuple(
        ops.zeros((batch, height, width, *shape), first.dtype)
        for shape in shapes
    )
    carry = results, totals
    carry, _ = backend.scan(some_rows, carry, backend.steps(whole))
    if left:
        carry, _ = some_rows(carry, whole, left)
    results, totals = carry
    return totals, results


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

    It leads back to a feature map from sums that are multiplied by the scale of
    their blocks. In half precision, both functions multiply by its square root.
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


def _constant(like: Float[Tensor, "..."], form: Form) -> float:
    """The coefficient of the first wave where all elements are one."""
    has_length_one = form.gives_sums or is_half(like)
    return math.sqrt(form.group.order) if has_length_one else 1.0


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
    kernel: Float[Tensor, "order channels filters"], form: Form
) -> Matrices:
    """The matrices of the blocks, with the factors of `_mixing`."""
    order, channels, filters = kernel.shape
    flat = in_full_precision(ops.reshape(kernel, (order, channels * filters)))
    mixing = _mixing(form, is_half(kernel))
    entries = backend.constant(mixing, flat, flat.dtype) @ flat
    entries = ops.cast(entries, kernel.dtype)
    found, first = [], 0
    for block in blocks(form.group):
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
    form: Form,
) -> Float[Tensor, "order channels filters"]:
    """The gradient of the kernel, from those of its `_matrices`."""
    _, channels, filters = kernel.shape
    entries = []
    of_blocks = zip(gradients, blocks(form.group), strict=True)
    for gradient, block in of_blocks:
        size = block.size
        part = ops.reshape(gradient, (size, channels, size, filters))
        part = ops.transpose(part, (0, 2, 1, 3))
        entries.append(ops.reshape(part, (size**2, channels * filters)))
    joined = ops.concatenate(entries)
    mixing = _mixing(form, is_half(kernel)).T
    found = backend.constant(mixing, joined, joined.dtype) @ joined
    found = ops.reshape(found, kernel.shape)
    return ops.cast(found, kernel.dtype)


@functools.lru_cache(maxsize=256)
def _mixing(form: Form, half: bool) -> np.ndarray:
    """`(entries, order)`: from a kernel to the entries of all its matrices.

    In full precision, transforms leave out the scale of their blocks. So the
    matrices are multiplied by this scale where both ends are feature maps, and
    by its square root where one end is sums along waves of unit norm.
    """
    left_out = 0 if half else 2 - form.takes_sums - form.gives_sums
    return np.concatenate(
        [
            block.scale ** (left_out / 2)
            * block.mixing.reshape(-1, form.group.order)
            for block in blocks(form.group)
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
