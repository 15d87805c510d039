"""The window form without a compiler: few passes, and matrix products.

For each neighbour one pass over the pixels, and one product with a small matrix
that holds the weights and adds up the channels of each head. On a CPU a few
images at a time, so that the next pass finds in the cache what this one wrote.
Sizes may be unknown. `ops.windows.form` says what the functions compute.
"""

import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.numerics import dtype_of_sums
from keras_equiattn.ops.numerics import in_full_precision
from keras_equiattn.ops.windows.form import Form
from keras_equiattn.ops.windows.form import Neighbour

# Bytes that one pass writes: about what a core keeps at hand.
CACHE = 2**22


def scores(
    form: Form, x: Tensor, k: Tensor, w: Tensor | None, bias: Tensor | None
) -> Tensor:
    """The derivative of the form with respect to `a`."""
    matrices = _matrices(form, k, w)
    size = ops.shape(x)[1:3]

    def images(x: Tensor, k: Tensor) -> tuple[Tensor]:
        queries = ops.moveaxis(x, 3, 1)
        of_a = [
            matrix @ _transposed(_products(queries, _window(k, place, size)))
            for matrix, place in zip(matrices, form.neighbours, strict=True)
        ]
        return (with_bias_scores(form, _stacked(of_a, size), x, bias),)

    return over_images(images, [(x, 0), (k, 1)], (1,), _size(x.shape[3], k))[0]


def weighted_sums(
    form: Form, a: Tensor, k: Tensor, w: Tensor | None, bias: Tensor | None
) -> Tensor:
    """The derivative of the form with respect to `x`."""
    matrices = _matrices(form, k, w)
    size = ops.shape(a)[4:]

    def images(a: Tensor, k: Tensor) -> tuple[Tensor]:
        of_x = _nothing(a, k)
        for n, place in enumerate(form.neighbours):
            weights = _on_channels(a[n], matrices[n], k)
            of_x = _add_to_queries(of_x, weights, _window(k, place, size))
        of_x = ops.moveaxis(of_x, 1, 3)
        return (with_bias_sums(form, of_x, a, bias),)

    return over_images(images, [(a, 1), (k, 1)], (0,), _size(a.shape[2], k))[0]


def score_gradients(
    form: Form,
    d: Tensor,
    x: Tensor,
    k: Tensor,
    w: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, ...]:
    """Gradients of `sum(scores * d)`: of x, k, and w and bias if given."""
    matrices = _matrices(form, k, w)
    size = ops.shape(x)[1:3]

    def images(d: Tensor, x: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        queries = ops.moveaxis(x, 3, 1)
        of_x = _nothing(d, k)
        of_k = _no_keys(form, k)
        of_w = []
        for n, place in enumerate(form.neighbours):
            seen = _window(k, place, size)
            weights = _on_channels(d[n], matrices[n], k)
            of_x = _add_to_queries(of_x, weights, seen)
            _add_to_keys(of_k, form, place, weights, queries)
            if w is not None:
                of_w.append(_correlation(d[n], _products(queries, seen)))
        of_x = ops.moveaxis(of_x, 1, 3)
        return (
            with_bias_sums(form, of_x, d, bias),
            ops.stack(of_k),
            *_weight_gradient(form, of_w, w),
            *bias_gradient(form, d, x, bias),
        )

    tensors = [(d, 1), (x, 0), (k, 1)]
    return over_images(images, tensors, (0, 1), _size(x.shape[3], k))


def sum_gradients(
    form: Form,
    d: Tensor,
    a: Tensor,
    k: Tensor,
    w: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, ...]:
    """Gradients of `sum(weighted_sums * d)`: of a, k, w and bias."""
    matrices = _matrices(form, k, w)
    size = ops.shape(d)[1:3]

    def images(a: Tensor, d: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        cotangent = ops.moveaxis(d, 3, 1)
        of_k = _no_keys(form, k)
        of_a, of_w = [], []
        for n, place in enumerate(form.neighbours):
            products = _products(cotangent, _window(k, place, size))
            of_a.append(matrices[n] @ _transposed(products))
            weights = _on_channels(a[n], matrices[n], k)
            _add_to_keys(of_k, form, place, weights, cotangent)
            if w is not None:
                of_w.append(_correlation(a[n], products))
        return (
            with_bias_scores(form, _stacked(of_a, size), d, bias),
            ops.stack(of_k),
            *_weight_gradient(form, of_w, w),
            *bias_gradient(form, a, d, bias),
        )

    tensors = [(a, 1), (d, 0), (k, 1)]
    return over_images(images, tensors, (1, 1), _size(d.shape[3], k))


def _window(k: Tensor, place: Neighbour, size: tuple[Any, Any]) -> Tensor:
    """What is seen at this place from every pixel."""
    height, width = size
    rows = slice(place.row, place.row + height)
    columns = slice(place.column, place.column + width)
    return k[place.frame][:, None, rows, columns]


def _products(x: Tensor, seen: Tensor) -> Tensor:
    """`(batch, query elements, pixels, key elements * channels)`."""
    products = x[..., None, :] * seen
    batch, order, height, width, elements, channels = ops.shape(products)
    return ops.reshape(
        products, (batch, order, height * width, elements * channels)
    )


def _on_channels(a: Tensor, matrix: Tensor, k: Tensor) -> Tensor:
    """Weights of the heads, for every channel of every key element."""
    batch, order, heads, height, width = ops.shape(a)
    a = ops.reshape(a, (batch, order, heads, height * width))
    return ops.reshape(
        _transposed(a) @ matrix, (batch, order, height, width, *k.shape[4:])
    )


def _correlation(a: Tensor, products: Tensor) -> Tensor:
    """`(query elements, heads, key elements * channels)`, over the pixels."""
    batch, order, heads, height, width = ops.shape(a)
    a = ops.reshape(a, (batch, order, heads, height * width))
    return ops.sum(in_full_precision(a @ products), axis=0)


def _add_to_queries(total: Tensor, weights: Tensor, seen: Tensor) -> Tensor:
    for r in range(seen.shape[4]):
        total = backend.add_product(total, weights[..., r, :], seen[..., r, :])
    return total


def _add_to_keys(
    totals: list[Tensor],
    form: Form,
    place: Neighbour,
    weights: Tensor,
    x: Tensor,
) -> None:
    for p in range(x.shape[1]):
        totals[place.frame] = backend.add_product_at(
            totals[place.frame],
            (place.row, place.column),
            form.reach,
            weights[:, p],
            x[:, p, :, :, None],
        )


def _stacked(of_a: list[Tensor], size: tuple[Any, Any]) -> Tensor:
    """Neighbours along the first axis, and rows and columns apart."""
    planes = ops.stack(of_a)
    return ops.reshape(planes, (*ops.shape(planes)[:4], *size))


def _nothing(a: Tensor, k: Tensor) -> Tensor:
    """Zeros `(batch, query elements, height, width, channels)`."""
    _, batch, order, _, height, width = ops.shape(a)
    shape = batch, order, height, width, k.shape[5]
    return ops.zeros(shape, dtype_of_sums(k))


def _no_keys(form: Form, k: Tensor) -> list[Tensor]:
    """Zeros like each frame of the keys."""
    dtype = dtype_of_sums(k)
    return [ops.zeros_like(k[n], dtype) for n in range(form.frames)]


def _weight_gradient(
    form: Form, of_w: list[Tensor], w: Tensor | None
) -> tuple[Tensor, ...]:
    """The derivative with respect to the weights, if there are any."""
    if w is None:
        return ()
    count, order, elements, channels = w.shape
    shape = (count, order, form.heads, elements, channels)
    return (_own_head(form, ops.reshape(ops.stack(of_w), shape)),)


def with_bias_scores(
    form: Form, a: Tensor, x: Tensor, bias: Tensor | None
) -> Tensor:
    """What the bias adds to the scores of queries, and the scores."""
    if bias is None:
        return a
    x = ops.moveaxis(x, 3, 1)
    batch, order, height, width, channels = ops.shape(x)
    x = ops.reshape(x, (batch, order, height * width, channels))
    more = _bias_matrix(form, bias) @ _transposed(x)
    shape = (batch, order, len(form.neighbours), form.heads, height, width)
    return a + ops.moveaxis(ops.reshape(more, shape), 2, 0)


def with_bias_sums(
    form: Form, y: Tensor, a: Tensor, bias: Tensor | None
) -> Tensor:
    """What the bias adds to the weighted sums, and the sums."""
    if bias is None:
        return y
    more = _transposed(_by_head(a)) @ _bias_matrix(form, bias)
    batch, height, width, order, channels = ops.shape(y)
    more = ops.reshape(more, (batch, order, height, width, channels))
    return y + ops.cast(ops.moveaxis(more, 1, 3), y.dtype)


def bias_gradient(
    form: Form, a: Tensor, x: Tensor, bias: Tensor | None
) -> tuple[Tensor, ...]:
    """The derivative with respect to the bias, if there is one."""
    if bias is None:
        return ()
    x = ops.moveaxis(x, 3, 1)
    batch, order, height, width, channels = ops.shape(x)
    x = ops.reshape(x, (batch, order, height * width, channels))
    found = ops.sum(in_full_precision(_by_head(a) @ x), axis=0)
    shape = (order, len(form.neighbours), form.heads, channels)
    found = ops.swapaxes(ops.reshape(found, shape), 0, 1)
    return (_own_head(form, found),)


def _by_head(a: Tensor) -> Tensor:
    """`(batch, query elements, neighbours * heads, pixels)`."""
    count, batch, order, heads, height, width = ops.shape(a)
    a = ops.moveaxis(a, 0, 2)
    return ops.reshape(a, (batch, order, count * heads, height * width))


def _own_head(form: Form, w: Tensor) -> Tensor:
    """Of the heads on axis 2 the one that each channel belongs to."""
    own = _own_channels(form, w)
    between = (1,) * (len(w.shape) - 4)
    own = ops.reshape(own, (form.heads, *between, own.shape[1]))
    return ops.sum(w * own, axis=2)


def _own_channels(form: Form, like: Tensor) -> Tensor:
    """`(heads, channels)`: one where the channel is of the head."""
    channels = like.shape[-1]
    own = np.repeat(np.eye(form.heads), channels // form.heads, axis=1)
    return ops.convert_to_tensor(
        own, keras.backend.standardize_dtype(like.dtype)
    )


def _matrices(form: Form, like: Tensor, w: Tensor | None) -> list[Tensor]:
    """For each neighbour `(query elements, heads, key elements * channels)`."""
    if w is None:
        return [_own_channels(form, like)[None]] * len(form.neighbours)
    count, order, elements, channels = w.shape
    w = w[:, :, None] * _own_channels(form, w)[:, None]
    w = ops.reshape(w, (count, order, form.heads, elements * channels))
    return [w[n] for n in range(count)]


def _bias_matrix(form: Form, bias: Tensor) -> Tensor:
    """`(query elements, neighbours * heads, channels)`."""
    bias = ops.moveaxis(bias[:, :, None] * _own_channels(form, bias), 0, 1)
    order, count, heads, channels = bias.shape
    return ops.reshape(bias, (order, count * heads, channels))


def _transposed(x: Tensor) -> Tensor:
    return ops.swapaxes(x, -1, -2)


def _size(order: int, k: Tensor) -> int | None:
    """Images whose products fit the cache; None where that is unknown."""
    numbers = (order, *k.shape[2:])
    if None in numbers:
        return None
    item = {"float64": 8}.get(keras.backend.standardize_dtype(k.dtype), 4)
    return max(1, CACHE // (item * math.prod(numbers)))


def over_images(
    function: Callable[..., tuple[Tensor, ...]],
    tensors: list[tuple[Tensor, int]],
    joined: tuple[int, ...],
    size: int | None,
) -> tuple[Tensor, ...]:
    """The function on `size` images at a time, on a CPU without a compiler.

    Args:
        function: of the tensors.
        tensors: all images, each with the axis they lie along.
        joined: axes along which the first results are joined; the others are
            added up.
        size: images at a time, None for all.
    """
    first, axis = tensors[0]
    images = first.shape[axis]
    cached = backend.find_target(first).eager_on_cpu
    if not cached or images is None or size is None or images <= size:
        return function(*(x for x, _ in tensors))
    parts = [
        function(
            *(
                x[(slice(None),) * axis + (slice(start, start + size),)]
                for x, axis in tensors
            )
        )
        for start in range(0, images, size)
    ]
    results = list(zip(*parts, strict=True))
    return (
        *(
            ops.concatenate(pieces, axis=axis)
            for pieces, axis in zip(results, joined, strict=False)
        ),
        *(sum(pieces) for pieces in results[len(joined) :]),
    )
