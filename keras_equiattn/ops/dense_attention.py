"""Self-attention where everyone may see everyone: scores as one product."""

from collections.abc import Callable

import numpy as np
from keras import ops

from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.statistics import in_full_precision
from keras_equiattn.ops.statistics import MASKED
from keras_equiattn.ops.statistics import softmax


def dense_attention(
    query: Float[Tensor, "*outer queries channels"],
    keys: Float[Tensor, "*outer seen channels"],
    values: Float[Tensor, "*outer seen channels"],
    num_heads: int,
    bias: Float[Tensor, "heads queries seen"] | None = None,
    visible: np.ndarray | None = None,
    dropout: Callable[[Tensor], Tensor] = lambda weights: weights,
) -> tuple[
    Float[Tensor, "*outer queries channels"],
    Float[Tensor, "*outer heads queries seen"],
]:
    """Attention of each query to all keys; it holds all of the weights.

    Args:
        query: scaled.
        keys, values: of what is seen.
        num_heads: number of heads, contiguous blocks of channels.
        bias: added to the scores; None for none.
        visible: `(..., queries, seen)`, which keys a query sees; None for all.
        dropout: of the weights.

    Returns:
        The weighted sums, and the weights before dropout.
    """
    dtype, channels = values.dtype, values.shape[-1]
    query, keys, values = (
        _by_head(x, num_heads) for x in (query, keys, values)
    )
    scores = ops.einsum("...pnc,...qnc->...npq", query, keys)
    scores = in_full_precision(scores)
    if bias is not None:
        scores = scores + ops.cast(bias, scores.dtype)
    if visible is not None:
        of_heads = ops.convert_to_tensor(visible[..., None, :, :])
        scores = ops.where(of_heads, scores, ops.cast(MASKED, scores.dtype))
    weights = ops.cast(softmax(scores, (-1,)), dtype)
    y = ops.einsum("...npq,...qnc->...pnc", dropout(weights), values)
    return ops.reshape(y, (*ops.shape(y)[:-2], channels)), weights


def _by_head(x: Tensor, num_heads: int) -> Tensor:
    *outer, channels = ops.shape(x)
    return ops.reshape(x, (*outer, num_heads, channels // num_heads))
