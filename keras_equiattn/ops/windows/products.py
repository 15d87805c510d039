"""The window form without a compiler: few passes, and matrix products.

Each neighbour takes one pass over the pixels, and one product with a small
matrix that holds the weights and adds up the channels of each head. A CPU takes
a few images at a time, so that the next pass finds in the cache what this one
wrote. Sizes may be unknown. `ops.windows.form` says what `derivatives`
computes.
"""

import math
from collections.abc import Callable
from typing import Any
from typing import TypeAlias

import numpy as np
from keras import ops

from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.numerics import dtype_of_sums
from keras_equiattn.ops.numerics import in_full_precision
from keras_equiattn.ops.windows import dispatch
from keras_equiattn.ops.windows.form import Biases
from keras_equiattn.ops.windows.form import Form
from keras_equiattn.ops.windows.form import Keys
from keras_equiattn.ops.windows.form import Maps
from keras_equiattn.ops.windows.form import NeighbourWeights
from keras_equiattn.ops.windows.form import Queries

# Queries with their elements first; products of queries and keys, and matrices
# that add up their channels, both with "all" channels of all key elements.
Rows: TypeAlias = Float[Tensor, "batch elements height width channels"]
Products: TypeAlias = Float[Tensor, "batch elements pixels all"]
Matrix: TypeAlias = Float[Tensor, "elements heads all"]

# Where the images lie in the derivatives that are not summed over them.
IMAGES = {"a": 1, "x": 0, "k": 1}


def derivatives(
    form: Form,
    wanted: str,
    a: NeighbourWeights | None,
    x: Queries | None,
    k: Keys,
    w: Maps | None,
    bias: Biases | None,
) -> tuple[Tensor, ...]:
    """Derivatives of the form, those with respect to what is wanted."""
    matrices = _matrices(form, k, w)
    of_weights = w is not None and "k" in wanted

    def images(a: Tensor, x: Tensor, k: Keys) -> tuple[Tensor, ...]:
        """The wanted derivatives for some images.

        One neighbour comes after the other. Derivatives with respect to queries
        and keys add up in place.
        """
        size = ops.shape(x)[1:3] if a is None else ops.shape(a)[4:]
        queries: Any = None if x is None else ops.moveaxis(x, 3, 1)
        found = {}
        if "x" in wanted:
            shape = (*ops.shape(a)[1:3], *size, k.shape[5])
            found["x"] = ops.zeros(shape, dtype_of_sums(k))
        of_a, of_w = [], []
        dtype = dtype_of_sums(k)
        frames = range(form.frames) if "k" in wanted else ()
        of_k = [ops.zeros_like(k[n], dtype) for n in frames]
        for n, place in enumerate(form.neighbours):
            seen = k[place.frame][:, None, *place.seen(size)]
            if "a" in wanted or of_weights:
                products = _products(queries, seen)
            if "a" in wanted:
                of_a.append(matrices[n] @ _transposed(products))
            if of_weights:
                of_w.append(_correlation(a[n], products))
            if a is not None:
                weights = _on_channels(a[n], matrices[n], seen)
            for r in range(seen.shape[4] if "x" in wanted else 0):
                pair = weights[..., r, :], seen[..., r, :]
                found["x"] = backend.add_product(found["x"], *pair)
            for p in range(queries.shape[1] if "k" in wanted else 0):
                pair = weights[:, p], queries[:, p, :, :, None]
                of_k[place.frame] = backend.add_product(
                    of_k[place.frame], *pair, place[1:], form.reach
                )
        if "a" in wanted:
            planes = ops.stack(of_a)
            shape = (*ops.shape(planes)[:4], *size)
            found["a"] = ops.reshape(planes, shape)
        if "x" in wanted:
            found["x"] = ops.moveaxis(found["x"], 1, 3)
        if "k" in wanted:
            found["k"] = ops.stack(of_k)
        if w is not None and "k" in wanted:
            count, order, elements, channels = w.shape
            shape = (count, order, form.heads, elements, channels)
            of_heads = ops.reshape(ops.stack(of_w), shape)
            found["w"] = _own_head(form, of_heads)
        return with_bias(form, found, a, x, bias)

    order = 1 if w is None else w.shape[1]
    numbers = (order, *k.shape[2:])
    size = None if None in numbers else math.prod(numbers)
    return over_images(images, wanted, a, x, k, size)


def _products(
    x: Rows,
    seen: Float[Tensor, "batch 1 height width key_elements channels"],
) -> Products:
    """Queries times what they see."""
    products = x[..., None, :] * seen
    batch, order, height, width, elements, channels = ops.shape(products)
    return ops.reshape(
        products, (batch, order, height * width, elements * channels)
    )


def _on_channels(
    a: Float[Tensor, "batch elements heads height width"],
    matrix: Float[Tensor, "some_elements heads all"],
    seen: Float[Tensor, "batch 1 height width key_elements channels"],
) -> Float[Tensor, "batch elements height width key_elements channels"]:
    """Weights of the heads, for every channel of every key element."""
    batch, order, heads, height, width = ops.shape(a)
    a = ops.reshape(a, (batch, order, heads, height * width))
    return ops.reshape(
        _transposed(a) @ matrix, (batch, order, height, width, *seen.shape[4:])
    )


def _correlation(
    a: Float[Tensor, "batch elements heads height width"], products: Products
) -> Matrix:
    """Products with weights of the heads, summed over images and pixels."""
    batch, order, heads, height, width = ops.shape(a)
    a = ops.reshape(a, (batch, order, heads, height * width))
    return ops.sum(in_full_precision(a @ products), axis=0)


def with_bias(
    form: Form,
    found: dict[str, Float[Tensor, "..."]],
    a: NeighbourWeights | None,
    x: Queries | None,
    bias: Biases | None,
) -> tuple[Tensor, ...]:
    """Adds the bias to derivatives, and its own derivative to those of keys.

    Args:
        form: the sum that is computed.
        found: the derivatives without a bias, by name.
        a, x, bias: arguments of the form.

    Returns:
        The derivatives in the order of the arguments of the form.
    """
    if bias is not None:
        count, (order, channels) = len(form.neighbours), bias.shape[1:]
        heads: Any = _by_head(a)
        queries: Any = _by_element(x)
        if "a" in found:
            more = _bias_matrix(form, bias) @ _transposed(queries)
            batch, *_, height, width = ops.shape(found["a"])[1:]
            shape = (batch, order, count, form.heads, height, width)
            more = ops.moveaxis(ops.reshape(more, shape), 2, 0)
            found["a"] = found["a"] + more
        if "x" in found:
            more = _transposed(heads) @ _bias_matrix(form, bias)
            batch, height, width = ops.shape(found["x"])[:3]
            rows = ops.reshape(more, (batch, order, height, width, channels))
            more = ops.moveaxis(rows, 1, 3)
            found["x"] = found["x"] + ops.cast(more, found["x"].dtype)
        if "k" in found:
            more = ops.sum(in_full_precision(heads @ queries), axis=0)
            more = ops.reshape(more, (order, count, form.heads, channels))
            found["bias"] = _own_head(form, ops.swapaxes(more, 0, 1))
    names = ("a", "x", "k", "w", "bias")
    return tuple(found[name] for name in names if name in found)


def _by_head(
    a: NeighbourWeights | None,
) -> Float[Tensor, "batch elements neighbours_and_heads pixels"] | None:
    """Weights with neighbours and heads along one axis, if there are any."""
    if a is None:
        return None
    count, batch, order, heads, height, width = ops.shape(a)
    a = ops.moveaxis(a, 0, 2)
    return ops.reshape(a, (batch, order, count * heads, height * width))


def _by_element(
    x: Queries | None,
) -> Float[Tensor, "batch elements pixels channels"] | None:
    """Queries of all pixels along one axis, for each element, if any."""
    if x is None:
        return None
    batch, height, width, order, channels = ops.shape(x)
    x = ops.moveaxis(x, 3, 1)
    return ops.reshape(x, (batch, order, height * width, channels))


def _own_head(
    form: Form, w: Float[Tensor, "neighbours elements heads *key_elements all"]
) -> Float[Tensor, "neighbours elements *key_elements all"]:
    """Selects, for each channel, the head that the channel belongs to."""
    own = _own_channels(form, w)
    between = (1,) * (len(w.shape) - 4)
    own = ops.reshape(own, (form.heads, *between, own.shape[1]))
    return ops.sum(w * own, axis=2)


def _own_channels(
    form: Form, like: Float[Tensor, "*outer all"]
) -> Float[Tensor, "heads all"]:
    """One where the channel is of the head, and else zero."""
    channels = like.shape[-1]
    own = np.repeat(np.eye(form.heads), channels // form.heads, axis=1)
    return backend.constant(own, like, like.dtype)


def _matrices(form: Form, k: Keys, w: Maps | None) -> list[Matrix]:
    """For each neighbour a matrix that adds up the channels of each head."""
    if w is None:
        return [_own_channels(form, k)[None]] * len(form.neighbours)
    count, order, elements, channels = w.shape
    w = w[:, :, None] * _own_channels(form, w)[:, None]
    w = ops.reshape(w, (count, order, form.heads, elements * channels))
    return [w[n] for n in range(count)]


def _bias_matrix(
    form: Form, bias: Biases
) -> Float[Tensor, "elements neighbours_and_heads channels"]:
    """A matrix that adds up biases over the channels of each head."""
    bias = ops.moveaxis(bias[:, :, None] * _own_channels(form, bias), 0, 1)
    order, count, heads, channels = bias.shape
    return ops.reshape(bias, (order, count * heads, channels))


def _transposed(
    x: Float[Tensor, "*outer rows columns"],
) -> Float[Tensor, "*outer columns rows"]:
    """Matrices with their last two axes swapped."""
    return ops.swapaxes(x, -1, -2)


def over_images(
    function: Callable[..., tuple[Tensor, ...]],
    wanted: str,
    a: NeighbourWeights | None,
    x: Queries | None,
    k: Keys,
    size: int | None,
) -> tuple[Tensor, ...]:
    """A function of some images at a time, on a CPU without a compiler.

    Args:
        function: from `a`, `x` and `k` of some images to derivatives.
        wanted: names of derivatives, see `ops.windows.form`; those that follow
            the named ones have no images, and are added up.
        a, x, k: arguments of the form, for all images.
        size: how many numbers the function builds at once for an image. None
            means that this is unknown; all images are then taken together.
    """
    images = k.shape[1]
    together = dispatch.images_together(k, size)
    if images is None or together is None or images <= together:
        return function(a, x, k)
    parts = []
    for first in range(0, images, together):
        some = slice(first, first + together)
        parts.append(
            function(
                None if a is None else a[:, some],
                None if x is None else x[some],
                k[:, some],
            )
        )
    pieces = list(zip(*parts, strict=True))
    return (
        *(
            ops.concatenate(piece, axis=IMAGES[name])
            for name, piece in zip(wanted, pieces, strict=False)
        ),
        *(sum(piece) for piece in pieces[len(wanted) :]),
    )
