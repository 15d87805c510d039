"""Queries that look at a window of neighbours: scores, softmax, sums.

The parts of local self-attention. Scores take one number for each query,
neighbour and head; neighbours with all their channels are never built, neither
in the forward nor in the backward pass, which computes anew what it needs.
"""

from typing import Any
from typing import NamedTuple

import keras
from keras import ops

from keras_equiattn import _checks
from keras_equiattn import config
from keras_equiattn.ops import backend
from keras_equiattn.ops._arguments import checked
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Shape
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.geometry import Window
from keras_equiattn.ops.numerics import dtype_of_sums
from keras_equiattn.ops.numerics import in_full_precision
from keras_equiattn.ops.numerics import MASKED
from keras_equiattn.ops.numerics import softmax
from keras_equiattn.ops.windows import gradients


class AffineMap(NamedTuple):
    """What becomes of a neighbour before a query sees it.

    Attributes:
        weight: `(rows, columns, order, key_order, channels)`; None for none.
        bias: `(rows, columns, order, channels)`; None for none.
    """

    weight: Tensor | None = None
    bias: Tensor | None = None


# Neighbours seen as they are.
UNCHANGED = AffineMap()


@checked()
def window_scores(
    query: Float[Tensor, "batch new_height new_width order channels"],
    keys: Float[Tensor, "batch height width key_order channels"],
    window: Window,
    num_heads: int = 1,
    weight: Float[Tensor, "rows columns order key_order channels"]
    | None = None,
    bias: Float[Tensor, "rows columns order channels"] | None = None,
    recompute: bool = True,
) -> Float[Tensor, "neighbours batch order heads new_height new_width"]:
    """Scores of queries against the keys in their windows.

    `s(n, p, i) = sum_c q(i, p, c) (sum_r w(n, p, r, c) k(i + d_n, r, c) +
    b(n, p, c))` over the channels of each head.

    Args:
        query: one for each position of the window, scaled.
        keys: one for each pixel.
        window: the neighbours.
        num_heads: number of heads, contiguous blocks of channels.
        weight: transforms the keys. None: a query element sees the keys of
            the same element as they are.
        bias: added to the keys.
        recompute: the backward pass keeps the arguments alone and computes
            everything else anew. False leaves the gradient to the backend:
            more memory, but it can be differentiated again.

    Returns:
        Scores, in float32 for half precision. Neighbours are ordered row by
        row.

    Raises:
        ValueError: for shapes that do not fit.
    """
    num_heads = _checks.integer(num_heads, "num_heads")
    _check_queries(query, keys, window, num_heads, AffineMap(weight, bias))
    order = query.shape[3]
    side, seen = _side(keys, window, num_heads, weight, bias)
    query = _elements(side, _tensor(query))
    tensors = (query, *seen)
    recompute = recompute and config.is_recompute_enabled()
    tensors = _of_one_dtype(tensors)
    found = gradients.scores(side, recompute, _shapes(tensors))(*tensors)
    return _elements_of(found, order, num_heads)


@checked()
def window_softmax(
    scores: Float[Tensor, "neighbours batch order heads height width"],
    window: Window | None = None,
    size: tuple[Any, Any] | None = None,
    recompute: bool = True,
) -> Float[Tensor, "neighbours batch order heads height width"]:
    """Softmax over the neighbours, in float32 at least.

    Args:
        scores: of `window_scores`, or several of them joined along the first
            axis, such as those against several key elements: whatever lies
            along it shares the weight of one.
        window: for border "mask", the window the scores are of. With other
            borders it is only checked.
        size: for border "mask", height and width of the keys.
        recompute: see `window_scores`.

    Returns:
        Weights that add up to one; zero for what is masked.

    Raises:
        ValueError: if the scores do not belong to the window.
    """
    _check_rank("scores", scores, 6)
    if window is not None:
        _check_kind(window)
        _check_scores(scores, window, size)
    scores = in_full_precision(ops.convert_to_tensor(scores))
    if window is not None and window.border == "mask":
        if size is None:
            raise ValueError(
                "`size`, height and width of the keys, says what a window "
                'with border="mask" leaves out. Received: size=None'
            )
        pairs = scores.shape[0] // len(window.offsets)
        inside = ops.tile(window.inside(size), (pairs, 1, 1))
        inside = inside[:, None, None, None]
        scores = ops.where(inside, scores, ops.cast(MASKED, scores.dtype))
    return softmax(scores, (0,))


@checked()
def window_sum(
    weights: Float[Tensor, "neighbours batch order heads new_height new_width"],
    values: Float[Tensor, "batch height width key_order channels"],
    window: Window,
    weight: Float[Tensor, "rows columns order key_order channels"]
    | None = None,
    bias: Float[Tensor, "rows columns order channels"] | None = None,
    recompute: bool = True,
) -> Float[Tensor, "batch new_height new_width order channels"]:
    """Values in windows, weighted and added up.

    `y(i, p, c) = sum_n a(n, p, i) (sum_r w(n, p, r, c) v(i + d_n, r, c) +
    b(n, p, c))`, with the weights `a` of the head of channel `c`.

    Args:
        weights: of the neighbours, for each position, element and head.
        values: one for each pixel.
        window: the neighbours.
        weight: transforms the values, see `window_scores`.
        bias: added to the values.
        recompute: see `window_scores`.

    Returns:
        One sum for each position of the window, in the dtype of the values.

    Raises:
        ValueError: for shapes that do not fit.
    """
    _check_kind(window)
    _check_rank("weights", weights, 6)
    _check_rank("values", values)
    batch, order, heads, height, width = ops.shape(weights)[1:]
    _check(window, heads, values, weight, bias, order=order)
    size = window.output_size(tuple(values.shape[1:3]))
    expected = (len(window.offsets), values.shape[0], order, heads, *size)
    _check_shape("weights", weights, expected, window, values)
    side, seen = _side(values, window, heads, weight, bias)
    weights = _elements_of(
        _tensor(weights), order * heads // side.heads, side.heads
    )
    tensors = (weights, *_of_one_dtype(seen))
    recompute = recompute and config.is_recompute_enabled()
    y = gradients.sums(side, recompute, _shapes(tensors))(*tensors)
    y = ops.reshape(y, (batch, height, width, order, values.shape[-1]))
    return ops.cast(y, values.dtype)


def _side(
    x: Float[Tensor, "batch height width key_order channels"],
    window: Window,
    num_heads: int,
    weight: Float[Tensor, "rows columns order key_order channels"] | None,
    bias: Float[Tensor, "rows columns order channels"] | None,
) -> tuple[gradients.Side, tuple[Tensor, ...]]:
    """How neighbours are seen, and the tensors that say what is seen."""
    x, weight, bias = map(_tensor, (x, weight, bias))
    heads = num_heads
    if weight is None:
        # A query element sees the keys of the same element: more heads.
        heads = num_heads * x.shape[3]
        x, bias = map(_as_channels, (x, bias))
    given = weight is not None, bias is not None
    side = gradients.Side(window, heads, *given)
    return side, (x, *_by_neighbour(weight, bias))


def _elements(
    side: gradients.Side, x: Float[Tensor, "batch height width order channels"]
) -> Float[Tensor, "batch height width elements all"]:
    """Queries with the elements that the form has: one without weights."""
    return x if side.weighted else _as_channels(x)


def _elements_of(
    a: Float[Tensor, "neighbours batch elements heads height width"],
    order: int,
    num_heads: int,
) -> Float[Tensor, "neighbours batch order num_heads height width"]:
    """Scores or weights with elements and heads apart as asked for."""
    count, batch, _, _, height, width = ops.shape(a)
    return ops.reshape(a, (count, batch, order, num_heads, height, width))


def _of_one_dtype(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The tensors in one dtype: float32 at least where theirs differ."""
    dtypes = {keras.backend.standardize_dtype(x.dtype) for x in tensors}
    if len(dtypes) == 1:
        return tensors
    dtype = "float64" if "float64" in dtypes else "float32"
    return tuple(ops.cast(x, dtype) for x in tensors)


def _shapes(tensors: Any) -> tuple[tuple[tuple[int | None, ...], str], ...]:
    """Shapes and dtypes, for each of which there is one compiled function."""
    return tuple(
        (tuple(x.shape), keras.backend.standardize_dtype(x.dtype))
        for x in tensors
    )


def _by_neighbour(*tensors: Tensor | None) -> list[Tensor]:
    """Rows and columns of what there is joined to neighbours."""
    return [
        ops.reshape(w, (-1, *w.shape[2:])) for w in tensors if w is not None
    ]


def _as_channels(x: Tensor | None) -> Tensor | None:
    """`(..., order, channels)` to `(..., 1, order * channels)`."""
    if x is None:
        return None
    *outer, order, channels = ops.shape(x)
    return ops.reshape(x, (*outer, 1, order * channels))


def _tensor(x: Tensor | None) -> Tensor | None:
    """What there is as a tensor that products can be made of."""
    if x is None:
        return None
    x = ops.convert_to_tensor(x)
    target = backend.find_target(x)
    float16 = keras.backend.standardize_dtype(x.dtype) == "float16"
    # PyTorch and TensorFlow multiply matrices of float16 a hundred times as
    # slowly as those of float32 on a CPU.
    slow = target.device == "cpu" and not target.xla
    return in_full_precision(x) if float16 and slow else x


def _check_kind(window: Any) -> None:
    if not isinstance(window, Window):
        raise ValueError(
            "`window` must be a `keras_equiattn.ops.Window`. "
            f"Received: window={window!r}"
        )


def _check_scores(scores: Tensor, window: Window, size: Any) -> None:
    """Whether scores may be those of a window on keys of this size."""
    count, shape = len(window.offsets), tuple(scores.shape)
    if shape[0] % count or not shape[0]:
        raise ValueError(
            f"Scores of {shape[0]} neighbours are none of {window}, "
            f"which has {count}, or of several such windows."
        )
    if size is None:
        return
    try:
        known = [n if isinstance(n, int) else None for n in size]
    except TypeError:  # no sequence
        known = []
    if len(known) != 2 or not _checks.fits(
        shape[4:], window.output_size(known)
    ):
        raise ValueError(
            "`size` must be (height, width) of the keys that the scores of "
            f"{window} are of. Received: size={size}, scores.shape={shape}"
        )


def _check_rank(name: str, tensor: Tensor, rank: int = 5) -> None:
    if len(tensor.shape) != rank:
        raise ValueError(
            f"`{name}` must have {rank} axes. "
            f"Received: {name}.shape={tuple(tensor.shape)}"
        )


def _check_shape(
    name: str, tensor: Tensor, expected: Shape, window: Window, x: Tensor
) -> None:
    """Compares what is known of the shape of a tensor."""
    shape = tuple(tensor.shape)
    if not _checks.fits(shape, expected):
        raise ValueError(
            f"`{name}` must have shape {tuple(expected)} for {window} on "
            f"{tuple(x.shape)}. Received: {name}.shape={shape}"
        )


def _check_queries(
    query: Tensor,
    keys: Tensor,
    window: Any,
    num_heads: int,
    of_keys: AffineMap,
) -> None:
    _check_kind(window)
    _check_rank("query", query)
    _check_rank("keys", keys)
    _check(window, num_heads, keys, *of_keys, order=query.shape[3])
    height, width = window.output_size(tuple(keys.shape[1:3]))
    expected = (keys.shape[0], height, width, query.shape[3], keys.shape[-1])
    _check_shape("query", query, expected, window, keys)


def _check(
    window: Window,
    num_heads: int,
    keys: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    order: int,
) -> None:
    key_order, channels = keys.shape[3:]
    if channels % num_heads:
        raise ValueError(
            f"{channels} channels are not divisible by num_heads={num_heads}."
        )
    expected: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "weight": (weight, (*window.size, order, key_order, channels)),
        "bias": (bias, (*window.size, order, channels)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(
                f"`{name}` must have shape {shape}. "
                f"Received: {name}.shape={tuple(tensor.shape)}"
            )
    if weight is None and key_order != order:
        raise ValueError(
            f"Without `weight`, queries of order {order} need keys and values "
            f"of the same order. Received: shape={tuple(keys.shape)}"
        )


def window_attention(
    query: Float[Tensor, "batch new_height new_width order channels"],
    keys: Float[Tensor, "batch height width order channels"],
    values: Float[Tensor, "batch height width order channels"],
    window: Window,
    num_heads: int,
    of_keys: AffineMap = UNCHANGED,
    of_values: AffineMap = UNCHANGED,
    recompute: bool = True,
    return_weights: bool = True,
) -> tuple[
    Float[Tensor, "batch new_height new_width order channels"],
    Float[Tensor, "neighbours batch order heads new_height new_width"] | None,
]:
    """Attention of each query over its window.

    Args:
        query: scaled, one for each position of the window.
        keys, values: one for each pixel.
        window: the neighbours.
        num_heads: number of heads, contiguous blocks of channels.
        of_keys, of_values: affine maps of the neighbours.
        recompute: see `window_scores`.
        return_weights: whether to return the weights.

    Returns:
        The weighted sums, and the weights or None.
    """
    num_heads = _checks.integer(num_heads, "num_heads")
    _check_queries(query, keys, window, num_heads, of_keys)
    _check_rank("values", values)
    order, dtype = query.shape[3], values.dtype
    _check(window, num_heads, values, *of_values, order=order)
    expected = (*tuple(keys.shape)[:3], *tuple(values.shape)[3:])
    _check_shape("values", values, expected, window, keys)
    keys_side, seen = _side(keys, window, num_heads, *of_keys)
    values_side, seen_values = _side(values, window, num_heads, *of_values)
    query = _elements(keys_side, _tensor(query))
    tensors = _of_one_dtype((query, *seen, *seen_values))
    masked = window.border == "mask"
    if masked:
        size = tuple(ops.shape(keys)[1:3])
        tensors = (*tensors, _mask(window, size, seen[0]))
    recompute = recompute and config.is_recompute_enabled()
    attend = gradients.attention(
        keys_side,
        values_side,
        masked,
        return_weights,
        recompute,
        _shapes(tensors),
    )
    found = attend(*tensors)
    y, weights = found if return_weights else (found, None)
    size = ops.shape(query)[:3]
    y = ops.reshape(y, (*size, order, values.shape[-1]))
    if weights is not None:
        weights = _elements_of(weights, order, num_heads)
    return ops.cast(y, dtype), weights


def _mask(
    window: Window, size: tuple[Any, Any], like: Tensor
) -> Float[Tensor, "neighbours 1 1 1 height width"]:
    """What leaves neighbours outside of the image out of a softmax."""
    inside = window.inside(size)[:, None, None, None]
    return ops.cast(ops.where(inside, 0.0, MASKED), dtype_of_sums(like))


def by_position(
    weights: Float[Tensor, "neighbours batch order heads height width"],
    window: Window,
) -> Float[Tensor, "batch height width order heads rows columns"]:
    """Weights of a window as an image for each pixel."""
    weights = ops.transpose(weights, (1, 4, 5, 2, 3, 0))
    return ops.reshape(weights, (*ops.shape(weights)[:5], *window.size))
