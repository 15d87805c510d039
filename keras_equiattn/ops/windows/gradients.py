"""Scores, softmax, sums and all three of them, with gradients of their own.

The backward pass of attention keeps the arguments and the weights of the
neighbours; it computes nothing of the forward pass anew, and nothing here has
neighbours with all their channels. Each function is made once for each set of
shapes: TensorFlow would run one that it has compiled for unknown sizes where
they are known, too, and Inductor compiles for known sizes.
"""

import functools
from collections.abc import Callable
from typing import Any
from typing import NamedTuple

from keras import ops

from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.numerics import softmax
from keras_equiattn.ops.windows import dispatch
from keras_equiattn.ops.windows.form import Form

ALTERNATIVE = "recompute=False"


class Side(NamedTuple):
    """How neighbours are seen: as keys, or as values.

    Attributes:
        form: what is summed over.
        weighted: whether the neighbours have weights.
        biased: whether the neighbours have a bias.
    """

    form: Form
    weighted: bool
    biased: bool

    @property
    def count(self) -> int:
        """How many tensors say what is seen."""
        return 1 + self.weighted + self.biased

    def named(
        self, tensors: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Neighbours, weights and bias; None for what there is not."""
        left = iter(tensors)
        seen = next(left)
        weight = next(left) if self.weighted else None
        return seen, weight, next(left) if self.biased else None

    def scores(self, query: Tensor, *seen: Tensor) -> Tensor:
        """Scores of the neighbours, see `ops.windows.form`."""
        k, w, bias = self.named(seen)
        how = dispatch.choose(self.form, query, k, self.weighted)
        return how.scores(self.form, query, k, w, bias)

    def sums(self, weights: Tensor, *seen: Tensor) -> Tensor:
        """Weighted sums of the neighbours."""
        k, w, bias = self.named(seen)
        how = dispatch.choose(self.form, weights[0], k, self.weighted)
        return how.weighted_sums(self.form, weights, k, w, bias)

    def score_gradients(
        self, d: Tensor, query: Tensor, *seen: Tensor
    ) -> tuple[Tensor, ...]:
        """Gradients of the scores: of the query, and of what is seen."""
        k, w, bias = self.named(seen)
        how = dispatch.choose(self.form, query, k, self.weighted)
        return how.score_gradients(self.form, d, query, k, w, bias)

    def sum_gradients(
        self, d: Tensor, weights: Tensor, *seen: Tensor
    ) -> tuple[Tensor, ...]:
        """Gradients of the sums: of the weights, and of what is seen."""
        k, w, bias = self.named(seen)
        how = dispatch.choose(self.form, weights[0], k, self.weighted)
        return how.sum_gradients(self.form, d, weights, k, w, bias)


@functools.lru_cache(maxsize=512)
def scores(side: Side, recompute: bool, shapes: Any) -> Callable[..., Tensor]:
    """Scores of two to four tensors, as a differentiable function."""

    def backward(
        tensors: tuple[Tensor, ...], _: Any, d: Tensor
    ) -> tuple[Tensor, ...]:
        return side.score_gradients(d, *tensors)

    return _differentiable(side.scores, backward, recompute)


@functools.lru_cache(maxsize=512)
def sums(side: Side, recompute: bool, shapes: Any) -> Callable[..., Tensor]:
    """Weighted sums of two to four tensors, as a differentiable function."""

    def backward(
        tensors: tuple[Tensor, ...], _: Any, d: Tensor
    ) -> tuple[Tensor, ...]:
        return side.sum_gradients(d, *tensors)

    return _differentiable(side.sums, backward, recompute)


def _differentiable(
    function: Callable[..., Tensor],
    backward: Callable[..., Any],
    recompute: bool,
) -> Callable[..., Tensor]:
    if not recompute:
        return function
    return backend.custom_vjp(
        lambda *tensors: (function(*tensors), ()),
        backward,
        ALTERNATIVE,
        inductor=True,
    )


@functools.lru_cache(maxsize=512)
def attention(
    of_keys: Side,
    of_values: Side,
    masked: bool,
    recompute: bool,
    shapes: Any,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Attention as a differentiable function: the sums, and the weights.

    Of the query, what is seen as keys, what is seen as values, and with
    `masked` `(neighbours, 1, 1, 1, height, width)`, which is added to the
    scores.
    """

    def parts(tensors: tuple[Tensor, ...]) -> tuple[Any, Any, Any]:
        middle = of_keys.count
        end = middle + of_values.count
        return tensors[:middle], tensors[middle:end], tensors[end:]

    def forward(query: Tensor, *rest: Tensor) -> Any:
        keys, values, mask = parts(rest)
        found = of_keys.scores(query, *keys)
        if masked:
            found = found + mask[0]
        weights = softmax(found, (0,))
        y = of_values.sums(_seen_by(of_values, weights), *values)
        return (y, weights), weights

    def backward(
        tensors: tuple[Tensor, ...],
        weights: Tensor,
        d: tuple[Tensor | None, Tensor | None],
    ) -> tuple[Tensor, ...]:
        query, *rest = tensors
        keys, values, mask = parts(tuple(rest))
        d_weights, *d_values = of_values.sum_gradients(
            d[0], _seen_by(of_values, weights), *values
        )
        d_weights = ops.reshape(d_weights, ops.shape(weights))
        if d[1] is not None:
            d_weights = d_weights + d[1]
        mean = ops.sum(weights * d_weights, axis=0)
        d_scores = weights * (d_weights - mean)
        d_query, *d_keys = of_keys.score_gradients(d_scores, query, *keys)
        return (d_query, *d_keys, *d_values, *map(ops.zeros_like, mask))

    if not recompute:
        return lambda *tensors: forward(*tensors)[0]
    return backend.custom_vjp(forward, backward, ALTERNATIVE, inductor=True)


def _seen_by(
    side: Side,
    weights: Float[Tensor, "neighbours batch elements heads height width"],
) -> Float[Tensor, "neighbours batch more fewer height width"]:
    """Weights with the heads of the other side.

    Without weights of the neighbours elements and heads are all heads.
    """
    count, batch, elements, heads, height, width = ops.shape(weights)
    elements = elements * heads // side.form.heads
    return ops.reshape(
        weights, (count, batch, elements, side.form.heads, height, width)
    )
