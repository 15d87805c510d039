"""Scores, weighted sums and attention, with gradients of their own.

The backward pass of attention keeps the arguments, the result and the weights
of the neighbours: it needs no second softmax. It cuts the keys and values into
frames anew. No function here builds all neighbours with all their channels.

`DERIVATIVE` and `ATTENTION` are pairs of functions: the first computes the
forward pass, and the second the backward pass. Both take their tensors as one
sequence, in which None stands for a tensor that is not given. A `Source` is
three tensors of it: the image that keys or values come from, and the weights
and the bias of its affine map.
"""

import functools
import math
from collections.abc import Callable
from typing import Any
from typing import NamedTuple

from keras import ops

from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.geometry import Window
from keras_equiattn.ops.numerics import in_full_precision
from keras_equiattn.ops.windows import dispatch
from keras_equiattn.ops.windows import planes
from keras_equiattn.ops.windows import products
from keras_equiattn.ops.windows import tiles
from keras_equiattn.ops.windows import views
from keras_equiattn.ops.windows.form import Form
from keras_equiattn.ops.windows.form import NeighbourWeights
from keras_equiattn.ops.windows.form import Queries
from keras_equiattn.ops.windows.form import Source

MODULES = {
    "planes": planes,
    "products": products,
    "tiles": tiles,
    "views": views,
}


class Side(NamedTuple):
    """How neighbours are seen, as keys or as values.

    Attributes:
        window: where they lie.
        heads: blocks of channels.
    """

    window: Window
    heads: int

    def derivative(
        self, wanted: str, other: NeighbourWeights | Queries, source: Source
    ) -> NeighbourWeights | Queries:
        """Scores of queries, or weighted sums.

        Args:
            wanted: what the form is differentiated with respect to: "weights"
                for scores, "queries" for weighted sums.
            other: the queries, or the weights.
            source: the image that is seen, and its affine map.
        """
        if wanted == "weights":
            return self._derivatives((wanted,), None, other, source)[0]
        return self._derivatives((wanted,), other, None, source)[0]

    def gradients(
        self,
        wanted: str,
        d: NeighbourWeights | Queries,
        other: NeighbourWeights | Queries,
        source: Source,
    ) -> tuple[Tensor, ...]:
        """Gradients of `derivative` with respect to `other` and the source.

        Args:
            wanted, other, source: see `derivative`.
            d: the gradient with respect to its result.
        """
        if wanted == "weights":
            found = self._derivatives(("queries", "keys"), d, other, source)
        else:
            found = self._derivatives(("weights", "keys"), other, d, source)
        arguments = [x for x in (other, *source) if x is not None]
        of_other, of_image, *rest = (
            ops.cast(gradient, x.dtype)
            for gradient, x in zip(found, arguments, strict=True)
        )
        # Up to here the gradient has the layout of `Window.frames`.
        size = tuple(ops.shape(source[0])[1:3])
        return of_other, self.window.image_of(of_image, size), *rest

    def mean_gradient(
        self, d: Queries, y: Queries
    ) -> Float[Tensor, "batch elements heads height width"]:
        """The mean gradient of the weights, from that of the sums.

        Args:
            d: the gradient with respect to the sums.
            y: the sums.
        """
        batch, height, width, elements, channels = ops.shape(y)
        size = channels // self.heads
        both = in_full_precision(d) * in_full_precision(y)
        both = ops.reshape(
            both, (batch, height, width, elements, self.heads, size)
        )
        return ops.transpose(ops.sum(both, axis=-1), (0, 3, 4, 1, 2))

    def own(
        self, weights: NeighbourWeights
    ) -> Float[Tensor, "neighbours batch more fewer height width"]:
        """The weights, reshaped to the elements and heads of this side.

        Without weights of the neighbours, elements and heads are heads of one
        element.
        """
        count, batch, elements, heads, height, width = ops.shape(weights)
        elements = elements * heads // self.heads
        return ops.reshape(
            weights, (count, batch, elements, self.heads, height, width)
        )

    def _derivatives(
        self,
        wanted: tuple[str, ...],
        weights: NeighbourWeights | None,
        queries: Queries | None,
        source: Source,
    ) -> tuple[Tensor, ...]:
        """Derivatives of the form, with all tensors in the dtype of the keys.

        The gradient of the keys has the layout of `Window.frames`.
        """
        image, scale, bias = source
        weights, queries = (
            None if t is None else ops.cast(t, image.dtype)
            for t in (weights, queries)
        )
        keys = self.window.frames(image)
        frames = math.prod(self.window.strides)
        form = Form(self.window.neighbours, self.heads, frames)
        module = MODULES[dispatch.choose(form, keys, scale is not None)]
        return module.derivatives(
            form, wanted, weights, queries, keys, scale, bias
        )


@backend.compiled_part()
def _derivative(tensors: Any, *, side: Side, wanted: str) -> Any:
    """Returns `Side.derivative`; the backward pass needs nothing of it."""
    other, *source = tensors
    return side.derivative(wanted, other, tuple(source)), ()


@backend.compiled_part()
def _derivative_gradients(
    tensors: Any,
    kept: tuple[()],
    d: NeighbourWeights | Queries,
    *,
    side: Side,
    wanted: str,
) -> tuple[Tensor, ...]:
    """Gradients of `_derivative` with respect to the tensors that are given."""
    other, *source = tensors
    return side.gradients(wanted, d, other, tuple(source))


def _parts(tensors: Any) -> tuple[Queries, Source, Source, Tensor | None]:
    """A query, what it sees as keys and as values, and a mask."""
    query, *keys_and_values, mask = tensors
    return query, tuple(keys_and_values[:3]), tuple(keys_and_values[3:]), mask


@backend.compiled_part()
def _attention(
    tensors: Any, *, of_keys: Side, of_values: Side, return_weights: bool
) -> Any:
    """The sums, and the weights if asked for. Both are kept in any case.

    `tensors` are the query, the sources of keys and values, and a mask
    `(neighbours, 1, 1, 1, height, width)` that is added to the scores, whose
    last axes have size one where it is the same for all pixels. The weights are
    not returned unless asked for, since their gradient costs time even where it
    is zero.
    """
    query, keys, values, mask = _parts(tensors)
    found = of_keys.derivative("weights", query, keys)
    if mask is not None:
        found = in_full_precision(found) + mask
    weights = backend.softmax_in_one_reduction(found, axis=0)
    kept = ops.cast(weights, values[0].dtype)
    y = of_values.derivative("queries", of_values.own(kept), values)
    y = ops.cast(y, values[0].dtype)
    if return_weights:
        return (y, in_full_precision(weights)), (y, kept)
    return y, (y, kept)


@backend.compiled_part()
def _attention_gradients(
    tensors: Any,
    kept: tuple[Queries, NeighbourWeights],
    d: Any,
    *,
    of_keys: Side,
    of_values: Side,
    return_weights: bool,
) -> tuple[Tensor, ...]:
    """Gradients of `_attention` with respect to the tensors that are given."""
    query, keys, values, mask = _parts(tensors)
    y, weights = kept
    d, upstream = d if return_weights else (d, None)
    d = ops.zeros_like(y) if d is None else d
    d_weights, *d_values = of_values.gradients(
        "queries", d, of_values.own(weights), values
    )
    d_weights = ops.reshape(d_weights, ops.shape(weights))
    if upstream is not None:
        d_weights = in_full_precision(d_weights) + upstream

    def mean() -> Tensor:
        """The mean of the gradient of the weights, weighted by them."""
        # It is computed from the sums, which have a number for each channel:
        # the weights have one for each neighbour.
        found = of_values.mean_gradient(d, y)
        found = ops.reshape(found, ops.shape(weights)[1:])
        if upstream is None:
            return found
        both = in_full_precision(weights) * upstream
        return found + ops.sum(both, axis=0)

    d_scores = backend.softmax_gradient(d_weights, weights, mean)
    d_query, *d_keys = of_keys.gradients("weights", d_scores, query, keys)
    of_mask = () if mask is None else (ops.zeros_like(mask),)
    return (d_query, *d_keys, *d_values, *of_mask)


DERIVATIVE = _derivative, _derivative_gradients
ATTENTION = _attention, _attention_gradients


@functools.lru_cache(maxsize=512)
def differentiable(
    functions: tuple[Callable[..., Any], Callable[..., Any]],
    recompute: bool,
    shapes: tuple[Any, ...],
    **options: Any,
) -> Callable[..., Any]:
    """`DERIVATIVE` or `ATTENTION` as a function of tensors or None.

    It is made once for each set of shapes: TensorFlow would run a function that
    it has compiled for unknown sizes where they are known, too.

    Args:
        functions: one of the two pairs.
        recompute: whether it has the gradient of the pair, or the backend's.
        shapes: for each tensor its shape and dtype, or None where the tensor
            is None.
        **options: options of the two functions.
    """
    forward, backward = functions

    def with_none(tensors: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        left = iter(tensors)
        return tuple(None if x is None else next(left) for x in shapes)

    def run(*tensors: Tensor) -> Any:
        return forward(with_none(tensors), **options)

    def run_back(tensors: tuple[Tensor, ...], kept: Any, d: Any) -> Any:
        return backward(with_none(tensors), kept, d, **options)

    if not recompute:
        return lambda *all: forward(all, **options)[0]
    found = backend.custom_vjp(run, run_back, "`recompute=False`")
    return lambda *all: found(*(x for x in all if x is not None))
