"""Scores, softmax, sums and all three of them, with gradients of their own.

The backward pass of attention keeps the arguments and the weights of the
neighbours; it computes nothing of the forward pass anew, and nothing here has
neighbours with all their channels. Each function is made once for each set of
shapes: TensorFlow would run one that it has compiled for unknown sizes where
they are known, too, and Inductor compiles for known sizes.
"""

import functools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any
from typing import NamedTuple

from keras import ops

from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.geometry import Window
from keras_equiattn.ops.numerics import in_full_precision
from keras_equiattn.ops.windows import dispatch
from keras_equiattn.ops.windows.form import Form

ALTERNATIVE = "recompute=False"


class Side(NamedTuple):
    """How neighbours are seen: as keys, or as values.

    Attributes:
        window: where they lie.
        heads: blocks of channels.
        weighted: whether the neighbours have weights.
        biased: whether the neighbours have a bias.
    """

    window: Window
    heads: int
    weighted: bool
    biased: bool

    @property
    def form(self) -> Form:
        """What is summed over."""
        frames = math.prod(self.window.strides)
        return Form(self.window.neighbours, self.heads, frames)

    @property
    def tensors(self) -> int:
        """How many tensors say what is seen."""
        return 1 + self.weighted + self.biased

    def scores(self, query: Tensor, *seen: Tensor) -> Tensor:
        """Scores of the neighbours, see `ops.windows.form`."""
        how, parts = self._with(query, seen)
        return how.scores(self.form, query, *parts)

    def sums(self, weights: Tensor, *seen: Tensor) -> Tensor:
        """Weighted sums of the neighbours, in the dtype of the values."""
        how, parts = self._with(weights[0], seen)
        weights = ops.cast(weights, seen[0].dtype)
        y = how.weighted_sums(self.form, weights, *parts)
        return ops.cast(y, seen[0].dtype)

    def mean_gradient(
        self,
        d: Float[Tensor, "batch height width elements channels"],
        y: Float[Tensor, "batch height width elements channels"],
    ) -> Float[Tensor, "batch elements heads height width"]:
        """The mean gradient of the weights, from that of the sums."""
        batch, height, width, elements, channels = ops.shape(y)
        size = channels // self.heads
        both = in_full_precision(d) * in_full_precision(y)
        both = ops.reshape(
            both, (batch, height, width, elements, self.heads, size)
        )
        return ops.transpose(ops.sum(both, axis=-1), (0, 3, 4, 1, 2))

    def score_gradients(
        self, d: Tensor, query: Tensor, *seen: Tensor
    ) -> tuple[Tensor, ...]:
        """Gradients of the scores: of the query, and of what is seen."""
        how, parts = self._with(query, seen)
        d = ops.cast(d, query.dtype)
        found = how.score_gradients(self.form, d, query, *parts)
        return self._like_arguments(found, (query, *seen))

    def sum_gradients(
        self, d: Tensor, weights: Tensor, *seen: Tensor
    ) -> tuple[Tensor, ...]:
        """Gradients of the sums: of the weights, and of what is seen."""
        how, parts = self._with(weights[0], seen)
        dtype = seen[0].dtype
        d, a = ops.cast(d, dtype), ops.cast(weights, dtype)
        found = how.sum_gradients(self.form, d, a, *parts)
        return self._like_arguments(found, (weights, *seen))

    def _with(
        self, x: Tensor, seen: tuple[Tensor, ...]
    ) -> tuple[ModuleType, tuple[Tensor, Tensor | None, Tensor | None]]:
        """What computes the form, and keys, weights and bias for it."""
        left = iter(seen)
        keys = self.window.frames(next(left))
        weight = next(left) if self.weighted else None
        bias = next(left) if self.biased else None
        how = dispatch.choose(self.form, x, keys, self.weighted)
        return how, (keys, weight, bias)

    def _like_arguments(
        self, gradients: tuple[Tensor, ...], arguments: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Gradients in the dtypes of the arguments: of images, not frames."""
        found = [
            ops.cast(gradient, x.dtype)
            for gradient, x in zip(gradients, arguments, strict=True)
        ]
        size = tuple(ops.shape(arguments[1])[1:3])
        found[1] = self.window.image_of(found[1], size)
        return tuple(found)


@functools.lru_cache(maxsize=512)
def scores(side: Side, recompute: bool, shapes: Any) -> Callable[..., Tensor]:
    """Scores of two to four tensors, as a differentiable function."""

    def backward(
        tensors: tuple[Tensor, ...], _: Any, d: Tensor
    ) -> tuple[Tensor, ...]:
        return side.score_gradients(d, *tensors)

    def forward(*tensors: Tensor) -> Tensor:
        return in_full_precision(side.scores(*tensors))

    return _differentiable(forward, backward, recompute)


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
    return_weights: bool,
    recompute: bool,
    shapes: Any,
) -> Callable[..., Any]:
    """Attention as a differentiable function: the sums, and the weights if
    asked for, since their gradient costs time even where it is zero.

    Of the query, what is seen as keys, what is seen as values, and with
    `masked` `(neighbours, 1, 1, 1, height, width)`, which is added to the
    scores.
    """

    def parts(tensors: tuple[Tensor, ...]) -> tuple[Any, Any, Any]:
        middle = of_keys.tensors
        end = middle + of_values.tensors
        return tensors[:middle], tensors[middle:end], tensors[end:]

    def forward(query: Tensor, *rest: Tensor) -> Any:
        keys, values, mask = parts(rest)
        found = of_keys.scores(query, *keys)
        if masked:
            found = in_full_precision(found) + mask[0]
        weights = backend.softmax(found, axis=0)
        kept = ops.cast(weights, values[0].dtype)
        y = of_values.sums(_seen_by(of_values, kept), *values)
        if return_weights:
            return (y, in_full_precision(weights)), (y, kept)
        return y, (y, kept)

    def backward(
        tensors: tuple[Tensor, ...],
        kept: tuple[Tensor, Tensor],
        d: Any,
    ) -> tuple[Tensor, ...]:
        query, *rest = tensors
        keys, values, mask = parts(tuple(rest))
        y, weights = kept
        d, upstream = d if return_weights else (d, None)
        d = ops.zeros_like(y) if d is None else d
        d_weights, *d_values = of_values.sum_gradients(
            d, _seen_by(of_values, weights), *values
        )
        d_weights = ops.reshape(d_weights, ops.shape(weights))
        if upstream is not None:
            d_weights = in_full_precision(d_weights) + upstream

        def mean() -> Tensor:
            # From the sums: that takes a number for each channel, not for
            # each neighbour.
            found = of_values.mean_gradient(d, y)
            found = ops.reshape(found, ops.shape(weights)[1:])
            if upstream is None:
                return found
            both = in_full_precision(weights) * upstream
            return found + ops.sum(both, axis=0)

        d_scores = backend.softmax_gradient(d_weights, weights, mean)
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
    elements = elements * heads // side.heads
    return ops.reshape(
        weights, (count, batch, elements, side.heads, height, width)
    )
