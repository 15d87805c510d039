"""The window form without a compiler: few passes, and matrix products.

For each neighbour one pass over the pixels, and one product with a small matrix
that holds the weights and adds up the channels of each head. A few images at a
time, so that the next pass finds in the cache what this one wrote. Sizes may be
unknown. `ops.window_form` says what the functions compute.
"""

import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from jaxtyping import Float
from keras import ops

from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.window_form import Form
from keras_equiattn.ops.window_form import Neighbour

# Bytes that one pass writes: about what a core keeps at hand.
CACHE = 2**22


def scores(
    form: Form, x: Tensor, k: Tensor, w: Tensor | None, bias: Tensor | None
) -> Tensor:
    """The derivative of the form with respect to `a`."""
    matrices, fixed = _matrices(form, k, w), _bias_matrix(form, bias)
    size = ops.shape(x)[1:3]

    def images(x: Tensor, k: Tensor) -> tuple[Tensor]:
        x = ops.moveaxis(x, 3, 1)
        of_a = [
            matrix @ _turned(_products(x, _window(k, place, size)))
            for matrix, place in zip(matrices, form.neighbours, strict=True)
        ]
        return (_planes(of_a, x, fixed),)

    return _over_images(images, [(x, 0), (k, 1)], (1,), _size(x.shape[3], k))[0]


def weighted_sums(
    form: Form, a: Tensor, k: Tensor, w: Tensor | None, bias: Tensor | None
) -> Tensor:
    """The derivative of the form with respect to `x`."""
    matrices, fixed = _matrices(form, k, w), _bias_matrix(form, bias)
    size = ops.shape(a)[4:]

    def images(a: Tensor, k: Tensor) -> tuple[Tensor]:
        of_x = _bias_sums(a, k, fixed)
        for n, place in enumerate(form.neighbours):
            weights = _spread(a[n], matrices[n], k)
            of_x = _add_to_queries(of_x, weights, _window(k, place, size))
        return (ops.moveaxis(of_x, 1, 3),)

    return _over_images(images, [(a, 1), (k, 1)], (0,), _size(a.shape[2], k))[0]


def score_gradients(
    form: Form,
    d: Tensor,
    x: Tensor,
    k: Tensor,
    w: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, ...]:
    """Gradients of `sum(scores * d)`: of x, k, and w and bias if given."""
    matrices, fixed = _matrices(form, k, w), _bias_matrix(form, bias)
    size = ops.shape(x)[1:3]

    def images(d: Tensor, x: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        x = ops.moveaxis(x, 3, 1)
        of_x = _bias_sums(d, k, fixed)
        of_k = [ops.zeros_like(k[n]) for n in range(form.frames)]
        of_w = []
        for n, place in enumerate(form.neighbours):
            seen = _window(k, place, size)
            weights = _spread(d[n], matrices[n], k)
            of_x = _add_to_queries(of_x, weights, seen)
            _add_to_keys(of_k, form, place, weights, x)
            if w is not None:
                of_w.append(_correlation(d[n], _products(x, seen)))
        return (
            ops.moveaxis(of_x, 1, 3),
            ops.stack(of_k),
            *([ops.stack(of_w)] if w is not None else []),
            *([_bias_correlation(d, x)] if bias is not None else []),
        )

    tensors = [(d, 1), (x, 0), (k, 1)]
    of_x, of_k, *rest = _over_images(images, tensors, (0, 1), _size(x.shape[3], k))
    return of_x, of_k, *_of_weights(form, rest, w, bias)


def sum_gradients(
    form: Form,
    d: Tensor,
    a: Tensor,
    k: Tensor,
    w: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, ...]:
    """Gradients of `sum(weighted_sums * d)`: of a, k, w and bias."""
    matrices, fixed = _matrices(form, k, w), _bias_matrix(form, bias)
    size = ops.shape(d)[1:3]

    def images(a: Tensor, d: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        d = ops.moveaxis(d, 3, 1)
        of_k = [ops.zeros_like(k[n]) for n in range(form.frames)]
        of_a, of_w = [], []
        for n, place in enumerate(form.neighbours):
            products = _products(d, _window(k, place, size))
            of_a.append(matrices[n] @ _turned(products))
            _add_to_keys(of_k, form, place, _spread(a[n], matrices[n], k), d)
            if w is not None:
                of_w.append(_correlation(a[n], products))
        return (
            _planes(of_a, d, fixed),
            ops.stack(of_k),
            *([ops.stack(of_w)] if w is not None else []),
            *([_bias_correlation(a, d)] if bias is not None else []),
        )

    tensors = [(a, 1), (d, 0), (k, 1)]
    of_a, of_k, *rest = _over_images(images, tensors, (1, 1), _size(d.shape[3], k))
    return of_a, of_k, *_of_weights(form, rest, w, bias)


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


def _spread(a: Tensor, matrix: Tensor, k: Tensor) -> Tensor:
    """Weights of the heads, for every channel of every key element."""
    batch, order, heads, height, width = ops.shape(a)
    a = ops.reshape(a, (batch, order, heads, height * width))
    return ops.reshape(
        _turned(a) @ matrix, (batch, order, height, width, *k.shape[4:])
    )


def _correlation(a: Tensor, products: Tensor) -> Tensor:
    """`(query elements, heads, key elements * channels)`, over the pixels."""
    a = ops.reshape(a, (*ops.shape(a)[:3], -1))
    return ops.sum(a @ products, axis=0)


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


def _planes(
    of_a: list[Tensor], x: Tensor, fixed: Tensor | None
) -> Tensor:
    """Neighbours joined, rows and columns apart, and what the bias adds."""
    batch, order, height, width, _ = ops.shape(x)
    planes = ops.stack(of_a)
    if fixed is not None:
        count, _, _, heads, pixels = ops.shape(planes)
        x = ops.reshape(x, (batch, order, pixels, -1))
        more = ops.reshape(
            fixed @ _turned(x), (batch, order, count, heads, pixels)
        )
        planes = planes + ops.moveaxis(more, 2, 0)
    return ops.reshape(planes, (*ops.shape(planes)[:4], height, width))


def _bias_sums(a: Tensor, k: Tensor, fixed: Tensor | None) -> Tensor:
    """What the bias adds to `(batch, query elements, height, width, ...)`."""
    _, batch, order, _, height, width = ops.shape(a)
    shape = (batch, order, height, width, k.shape[5])
    if fixed is None:
        return ops.zeros(shape, k.dtype)
    return ops.reshape(_turned(_by_head(a)) @ fixed, shape)


def _bias_correlation(a: Tensor, x: Tensor) -> Tensor:
    """`(query elements, neighbours * heads, channels)`, over the pixels."""
    batch, order, *_, channels = ops.shape(x)
    x = ops.reshape(x, (batch, order, -1, channels))
    return ops.sum(_by_head(a) @ x, axis=0)


def _by_head(a: Tensor) -> Tensor:
    """`(batch, query elements, neighbours * heads, pixels)`."""
    count, batch, order, heads, height, width = ops.shape(a)
    a = ops.moveaxis(a, 0, 2)
    return ops.reshape(a, (batch, order, count * heads, height * width))


def _of_weights(
    form: Form,
    found: list[Tensor],
    w: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, ...]:
    """Gradients of w and bias in their shapes: of each channel its head."""
    shapes = []
    count = len(form.neighbours)
    if w is not None:
        shapes.append((count, w.shape[1], form.heads, *w.shape[2:]))
    if bias is not None:
        order, channels = bias.shape[1:]
        shapes.append((order, count, form.heads, channels))
    gradients = []
    for tensor, shape in zip(found, shapes, strict=True):
        tensor = ops.reshape(tensor, shape)
        own = _own_channels(form, tensor)
        between = (1,) * (len(shape) - 4)
        own = ops.reshape(own, (form.heads, *between, own.shape[1]))
        gradients.append(ops.sum(tensor * own, axis=2))
    if bias is not None:
        gradients[-1] = ops.swapaxes(gradients[-1], 0, 1)
    return tuple(gradients)


def _own_channels(form: Form, like: Tensor) -> Tensor:
    """`(heads, channels)`: one where the channel is of the head."""
    channels = like.shape[-1]
    own = np.repeat(np.eye(form.heads), channels // form.heads, axis=1)
    return ops.convert_to_tensor(own, keras.backend.standardize_dtype(like.dtype))


def _matrices(form: Form, like: Tensor, w: Tensor | None) -> list[Tensor]:
    """For each neighbour `(query elements, heads, key elements * channels)`."""
    if w is None:
        return [_own_channels(form, like)[None]] * len(form.neighbours)
    count, order, elements, channels = w.shape
    w = w[:, :, None] * _own_channels(form, w)[:, None]
    w = ops.reshape(w, (count, order, form.heads, elements * channels))
    return [w[n] for n in range(count)]


def _bias_matrix(form: Form, bias: Tensor | None) -> Tensor | None:
    """`(query elements, neighbours * heads, channels)`."""
    if bias is None:
        return None
    bias = ops.moveaxis(bias[:, :, None] * _own_channels(form, bias), 0, 1)
    order, count, heads, channels = bias.shape
    return ops.reshape(bias, (order, count * heads, channels))


def _turned(x: Tensor) -> Tensor:
    return ops.swapaxes(x, -1, -2)


def _size(order: int, k: Tensor) -> int | None:
    """Images whose products fit the cache; None where that is unknown."""
    numbers = (order, *k.shape[2:])
    if None in numbers:
        return None
    item = {"float64": 8}.get(keras.backend.standardize_dtype(k.dtype), 4)
    return max(1, CACHE // (item * math.prod(numbers)))


def _over_images(
    function: Callable[..., tuple[Tensor, ...]],
    tensors: list[tuple[Tensor, int]],
    joined: tuple[int, ...],
    size: int | None,
) -> tuple[Tensor, ...]:
    """The function on `size` images at a time.

    Args:
        function: of the tensors.
        tensors: all images, each with the axis they lie along.
        joined: axes along which the first results are joined; the others are
            added up.
        size: images at a time, None for all.
    """
    first, axis = tensors[0]
    images = first.shape[axis]
    if backend.compiles() or images is None or size is None or images <= size:
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
