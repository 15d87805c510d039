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
from keras_equiattn.ops.windows.form import NeighbourWeights
from keras_equiattn.ops.windows.form import Queries
from keras_equiattn.ops.windows.form import Scales

# Queries with their elements first; products of queries and keys, and matrices
# that add up their channels, both with "all" channels of all key elements.
Rows: TypeAlias = Float[Tensor, "batch elements height width channels"]
Products: TypeAlias = Float[Tensor, "batch elements pixels all"]
Matrix: TypeAlias = Float[Tensor, "elements heads all"]

# The axis of the images in derivatives that have one.
IMAGES = {"weights": 1, "queries": 0, "keys": 1}


def derivatives(
    form: Form,
    wanted: tuple[str, ...],
    weights: NeighbourWeights | None,
    queries: Queries | None,
    keys: Keys,
    scale: Scales | None,
    bias: Biases | None,
) -> tuple[Tensor, ...]:
    """Derivatives of the form, those with respect to what is wanted."""
    matrices = _matrices(form, keys, scale)
    scaled = scale is not None and "keys" in wanted

    def images(
        weights: Tensor, queries: Tensor, keys: Keys
    ) -> tuple[Tensor, ...]:
        """The wanted derivatives for some images.

        One neighbour comes after the other. Derivatives with respect to queries
        and keys add up in place.
        """
        size = (
            ops.shape(queries)[1:3]
            if weights is None
            else ops.shape(weights)[4:]
        )
        rows: Any = None if queries is None else ops.moveaxis(queries, 3, 1)
        found = {}
        if "queries" in wanted:
            shape = (*ops.shape(weights)[1:3], *size, keys.shape[5])
            found["queries"] = ops.zeros(shape, dtype_of_sums(keys))
        of_weights, of_scale = [], []
        dtype = dtype_of_sums(keys)
        frames = range(form.frames) if "keys" in wanted else ()
        of_keys = [ops.zeros_like(keys[n], dtype) for n in frames]
        for n, place in enumerate(form.neighbours):
            seen = keys[place.frame][:, None, *place.seen(size)]
            if "weights" in wanted or scaled:
                products = _products(rows, seen)
            if "weights" in wanted:
                of_weights.append(matrices[n] @ _transposed(products))
            if scaled:
                of_scale.append(_correlation(weights[n], products))
            if weights is not None:
                on_channels = _on_channels(weights[n], matrices[n], seen)
            for r in range(seen.shape[4] if "queries" in wanted else 0):
                pair = on_channels[..., r, :], seen[..., r, :]
                found["queries"] = backend.add_product(found["queries"], *pair)
            for p in range(rows.shape[1] if "keys" in wanted else 0):
                pair = on_channels[:, p], rows[:, p, :, :, None]
                of_keys[place.frame] = backend.add_product(
                    of_keys[place.frame], *pair, place[1:], form.reach
                )
        if "weights" in wanted:
            planes = ops.stack(of_weights)
            shape = (*ops.shape(planes)[:4], *size)
            found["weights"] = ops.reshape(planes, shape)
        if "queries" in wanted:
            found["queries"] = ops.moveaxis(found["queries"], 1, 3)
        if "keys" in wanted:
            found["keys"] = ops.stack(of_keys)
        if scale is not None and "keys" in wanted:
            count, order, elements, channels = scale.shape
            shape = (count, order, form.heads, elements, channels)
            of_heads = ops.reshape(ops.stack(of_scale), shape)
            found["scale"] = _own_head(form, of_heads)
        return with_bias(form, found, weights, queries, bias)

    order = 1 if scale is None else scale.shape[1]
    numbers = (order, *keys.shape[2:])
    size = None if None in numbers else math.prod(numbers)
    return over_images(images, wanted, weights, queries, keys, size)


def _products(
    queries: Rows,
    seen: Float[Tensor, "batch 1 height width key_elements channels"],
) -> Products:
    """Queries times what they see."""
    products = queries[..., None, :] * seen
    batch, order, height, width, elements, channels = ops.shape(products)
    return ops.reshape(
        products, (batch, order, height * width, elements * channels)
    )


def _on_channels(
    weights: Float[Tensor, "batch elements heads height width"],
    matrix: Float[Tensor, "some_elements heads all"],
    seen: Float[Tensor, "batch 1 height width key_elements channels"],
) -> Float[Tensor, "batch elements height width key_elements channels"]:
    """Weights of the heads, for every channel of every key element."""
    batch, order, heads, height, width = ops.shape(weights)
    weights = ops.reshape(weights, (batch, order, heads, height * width))
    return ops.reshape(
        _transposed(weights) @ matrix,
        (batch, order, height, width, *seen.shape[4:]),
    )


def _correlation(
    weights: Float[Tensor, "batch elements heads height width"],
    products: Products,
) -> Matrix:
    """Products with weights of the heads, summed over images and pixels."""
    batch, order, heads, height, width = ops.shape(weights)
    weights = ops.reshape(weights, (batch, order, heads, height * width))
    return ops.sum(in_full_precision(weights @ products), axis=0)


def with_bias(
    form: Form,
    found: dict[str, Float[Tensor, "..."]],
    weights: NeighbourWeights | None,
    queries: Queries | None,
    bias: Biases | None,
) -> tuple[Tensor, ...]:
    """Adds the bias to derivatives, and its own derivative to those of keys.

    Args:
        form: the sum that is computed.
        found: the derivatives without a bias, by name.
        weights, queries, bias: arguments of the form.

    Returns:
        The derivatives in the order of the arguments of the form.
    """
    if bias is not None:
        count, (order, channels) = len(form.neighbours), bias.shape[1:]
        by_head: Any = _by_head(weights)
        by_element: Any = _by_element(queries)
        if "weights" in found:
            more = _bias_matrix(form, bias) @ _transposed(by_element)
            batch, *_, height, width = ops.shape(found["weights"])[1:]
            shape = (batch, order, count, form.heads, height, width)
            more = ops.moveaxis(ops.reshape(more, shape), 2, 0)
            found["weights"] = found["weights"] + more
        if "queries" in found:
            more = _transposed(by_head) @ _bias_matrix(form, bias)
            batch, height, width = ops.shape(found["queries"])[:3]
            rows = ops.reshape(more, (batch, order, height, width, channels))
            more = ops.moveaxis(rows, 1, 3)
            found["queries"] = found["queries"] + ops.cast(
                more, found["queries"].dtype
            )
        if "keys" in found:
            more = ops.sum(in_full_precision(by_head @ by_element), axis=0)
            more = ops.reshape(more, (order, count, form.heads, channels))
            found["bias"] = _own_head(form, ops.swapaxes(more, 0, 1))
    names = ("weights", "queries", "keys", "scale", "bias")
    return tuple(found[name] for name in names if name in found)


def _by_head(
    weights: NeighbourWeights | None,
) -> Float[Tensor, "batch elements neighbours_and_heads pixels"] | None:
    """Weights with neighbours and heads along one axis, if there are any."""
    if weights is None:
        return None
    count, batch, order, heads, height, width = ops.shape(weights)
    weights = ops.moveaxis(weights, 0, 2)
    return ops.reshape(weights, (batch, order, count * heads, height * width))


def _by_element(
    queries: Queries | None,
) -> Float[Tensor, "batch elements pixels channels"] | None:
    """Queries of all pixels along one axis, for each element, if any."""
    if queries is None:
        return None
    batch, height, width, order, channels = ops.shape(queries)
    queries = ops.moveaxis(queries, 3, 1)
    return ops.reshape(queries, (batch, order, height * width, channels))


def _own_head(
    form: Form, x: Float[Tensor, "neighbours elements heads *key_elements all"]
) -> Float[Tensor, "neighbours elements *key_elements all"]:
    """Selects, for each channel, the head that the channel belongs to."""
    own = _own_channels(form, x)
    between = (1,) * (len(x.shape) - 4)
    own = ops.reshape(own, (form.heads, *between, own.shape[1]))
    return ops.sum(x * own, axis=2)


def _own_channels(
    form: Form, like: Float[Tensor, "*outer all"]
) -> Float[Tensor, "heads all"]:
    """A matrix that is one where a channel belongs to a head, or else zero."""
    channels = like.shape[-1]
    own = np.repeat(np.eye(form.heads), channels // form.heads, axis=1)
    return backend.constant(own, like, like.dtype)


def _matrices(form: Form, keys: Keys, scale: Scales | None) -> list[Matrix]:
    """For each neighbour a matrix that adds up the channels of each head."""
    if scale is None:
        return [_own_channels(form, keys)[None]] * len(form.neighbours)
    count, order, elements, channels = scale.shape
    scale = scale[:, :, None] * _own_channels(form, scale)[:, None]
    scale = ops.reshape(scale, (count, order, form.heads, elements * channels))
    return [scale[n] for n in range(count)]


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
    wanted: tuple[str, ...],
    weights: NeighbourWeights | None,
    queries: Queries | None,
    keys: Keys,
    size: int | None,
) -> tuple[Tensor, ...]:
    """A function of some images at a time, on a CPU without a compiler.

    Args:
        function: from weights, queries and keys of some images to
            derivatives.
        wanted: names of derivatives, see `ops.windows.form`; further results
            have no axis of images, and are added up.
        weights, queries, keys: arguments of the form, for all images.
        size: how many numbers the function builds at once for an image. None
            means that this is unknown; all images are then taken together.
    """
    images = keys.shape[1]
    together = dispatch.images_together(keys, size)
    if images is None or together is None or images <= together:
        return function(weights, queries, keys)
    parts = []
    for first in range(0, images, together):
        some = slice(first, first + together)
        parts.append(
            function(
                None if weights is None else weights[:, some],
                None if queries is None else queries[some],
                keys[:, some],
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
