"""Queries that look at a window of neighbours: scores, softmax, sums.

These are the parts of local self-attention. Scores take one number for each
query, neighbour and head. Neighbours with all their channels are never built
for all pixels, neither in the forward nor in the backward pass. For the
backward pass `window_scores` and `window_sum` keep only their arguments;
`window_attention` also keeps its result and the weights, so that it need not
compute the softmax again.
"""

from typing import Any
from typing import NamedTuple
from typing import TypeAlias

import numpy as np
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
from keras_equiattn.ops.numerics import of_one_dtype
from keras_equiattn.ops.numerics import softmax
from keras_equiattn.ops.windows import gradients
from keras_equiattn.ops.windows.form import NeighbourWeights
from keras_equiattn.ops.windows.form import Queries
from keras_equiattn.ops.windows.form import Source

Scores: TypeAlias = Float[Tensor, "neighbours batch order heads height width"]
NewImage: TypeAlias = Float[Tensor, "batch new_height new_width order channels"]
NewScores: TypeAlias = Float[
    Tensor, "neighbours batch order heads new_height new_width"
]
KeyImage: TypeAlias = Float[Tensor, "batch height width key_order channels"]
MapImage: TypeAlias = Float[Tensor, "rows columns order key_order channels"]
BiasImage: TypeAlias = Float[Tensor, "rows columns order channels"]


class AffineMap(NamedTuple):
    """An affine map that neighbours go through before queries see them.

    Attributes:
        weight: `(rows, columns, order, key_order, channels)`; None for none.
        bias: `(rows, columns, order, channels)`; None for none.
    """

    weight: MapImage | None = None
    bias: BiasImage | None = None


# Neighbours seen as they are.
UNCHANGED = AffineMap()


@checked()
def window_scores(
    query: NewImage,
    keys: KeyImage,
    window: Window,
    num_heads: int = 1,
    weight: MapImage | None = None,
    bias: BiasImage | None = None,
    recompute: bool = True,
) -> NewScores:
    """Scores of queries against the keys in their windows.

    `s(n, p, i) = sum_c q(i, p, c) (sum_r w(n, p, r, c) k(i + d_n, r, c) +
    b(n, p, c))` over the channels of each head.

    Args:
        query: the queries, one for each position of the output, times the
            factor of the scores.
        keys: one for each pixel.
        window: the neighbours.
        num_heads: number of heads, contiguous blocks of channels.
        weight: transforms the keys. None: a query element sees the keys of
            the same element as they are.
        bias: added to the keys.
        recompute: the backward pass keeps only the arguments and computes
            everything else anew. False leaves the gradient to the backend:
            more memory, but it can be differentiated again.

    Returns:
        Scores, in float32 for half precision. Neighbours are ordered row by
        row.

    Raises:
        ValueError: for shapes that do not fit.
    """
    num_heads = _checks.integer(num_heads, "num_heads")
    affine = AffineMap(weight, bias)
    _check_queries(query, keys, window, num_heads, affine)
    side, seen = _side(keys, window, num_heads, affine)
    tensors = of_one_dtype((_query(query, affine), *seen))
    found = _run(
        gradients.DERIVATIVE, tensors, recompute, side=side, wanted="weights"
    )
    return _with_heads(in_full_precision(found), query.shape[3], num_heads)


@checked()
def window_softmax(
    scores: Scores,
    window: Window | None = None,
    size: tuple[Any, Any] | None = None,
) -> Scores:
    """Softmax over the neighbours, in float32 at least.

    Args:
        scores: the result of `window_scores`, or several such results joined
            along the first axis, such as the scores against several key
            elements: the weights along that axis add up to one. Scores must
            be finite, including those of neighbours outside of the image.
        window: the window of the scores. It says which neighbours the border
            "mask" leaves out, and how much the neighbours in a disc count.
            For other windows only shapes are checked.
        size: for border "mask", height and width of the keys.

    Returns:
        Weights that add up to one; zero for what is masked.

    Raises:
        ValueError: if the scores do not belong to the window.
    """
    scores = in_full_precision(ops.convert_to_tensor(scores))
    if window is None:
        return softmax(scores, (0,))
    _check_kind(window)
    _check_scores(scores, window, size)
    if window.border == "mask" and size is None:
        raise ValueError(
            'A window with border="mask" needs `size`, (height, width) of the '
            "keys. Received: size=None"
        )
    added = _added_to_scores(window, scores, size)
    if added is None:
        return softmax(scores, (0,))
    # What is added is the same for all key elements.
    shape, neighbours = ops.shape(scores), len(window.offsets)
    pairs = scores.shape[0] // neighbours, neighbours
    scores = ops.reshape(scores, (*pairs, *shape[1:])) + added
    return softmax(ops.reshape(scores, shape), (0,))


@checked()
def window_sum(
    weights: NewScores,
    values: KeyImage,
    window: Window,
    weight: MapImage | None = None,
    bias: BiasImage | None = None,
    recompute: bool = True,
) -> NewImage:
    """Values in windows, weighted and added up.

    `y(i, p, c) = sum_n a(n, p, i) (sum_r w(n, p, r, c) v(i + d_n, r, c) +
    b(n, p, c))`, with the weights `a` of the head of channel `c`.

    Args:
        weights: the weights of the neighbours, for each position, element and
            head.
        values: one for each pixel.
        window: the neighbours.
        weight: transforms the values, see `window_scores`.
        bias: added to the values.
        recompute: see `window_scores`.

    Returns:
        One sum for each position of the output, in the dtype of the values.

    Raises:
        ValueError: for shapes that do not fit.
    """
    _check_kind(window)
    affine = AffineMap(weight, bias)
    batch, order, heads, height, width = ops.shape(weights)[1:]
    _check(window, heads, values, affine, order=order)
    size = window.output_size(tuple(values.shape[1:3]))
    expected = (len(window.offsets), values.shape[0], order, heads, *size)
    _check_shape("weights", weights, expected, window, values)
    side, seen = _side(values, window, heads, affine)
    tensors = side.own(_tensor(weights)), *of_one_dtype(seen)
    y = _run(
        gradients.DERIVATIVE, tensors, recompute, side=side, wanted="queries"
    )
    y = ops.reshape(y, (batch, height, width, order, values.shape[-1]))
    return ops.cast(y, values.dtype)


@checked(
    of_keys_weight="rows columns order key_order channels",
    of_keys_bias="rows columns order channels",
    of_values_weight="rows columns order key_order channels",
    of_values_bias="rows columns order channels",
)
def window_attention(
    query: NewImage,
    keys: KeyImage,
    values: KeyImage,
    window: Window,
    num_heads: int,
    of_keys: AffineMap = UNCHANGED,
    of_values: AffineMap = UNCHANGED,
    recompute: bool = True,
    return_weights: bool = True,
) -> tuple[NewImage, NewScores | None]:
    """Attention of each query over its window.

    Args:
        query: scaled, one for each position of the output.
        keys, values: one for each pixel.
        window: the neighbours.
        num_heads: number of heads, contiguous blocks of channels.
        of_keys, of_values: affine maps of the neighbours.
        recompute: the backward pass keeps the arguments, the result and the
            weights, and computes everything else that it needs anew. False
            leaves the gradient to the backend: more memory, but it can be
            differentiated again.
        return_weights: whether to return the weights.

    Returns:
        The weighted sums, and the weights or None.

    Raises:
        ValueError: for shapes that do not fit.
        TypeError: for affine maps of another kind.
    """
    _check_queries(query, keys, window, num_heads, of_keys)
    order = query.shape[3]
    _check(window, num_heads, values, of_values, order=order)
    keys_side, seen = _side(keys, window, num_heads, of_keys)
    values_side, seen_values = _side(values, window, num_heads, of_values)
    tensors = (_query(query, of_keys), *seen, *seen_values)
    tensors = of_one_dtype(tensors)
    mask = _added_to_scores(window, tensors[0], tuple(ops.shape(keys)[1:3]))
    found = _run(
        gradients.ATTENTION,
        (*tensors, mask),
        recompute,
        of_keys=keys_side,
        of_values=values_side,
        return_weights=return_weights,
    )
    y, weights = found if return_weights else (found, None)
    size = ops.shape(query)[:3]
    y = ops.reshape(y, (*size, order, values.shape[-1]))
    if weights is not None:
        weights = _with_heads(weights, order, num_heads)
    return ops.cast(y, values.dtype), weights


def _added_to_scores(
    window: Window,
    like: Float[Tensor, "..."],
    size: Any,
) -> Float[Tensor, "neighbours 1 1 1 height_or_1 width_or_1"] | None:
    """Returns what the shape of the window and its border add to all scores.

    Args:
        window: the window.
        like: a tensor that scores are computed from.
        size: height and width of the keys, for the border "mask".
    """
    added, dtype = None, dtype_of_sums(like)
    if window.log_weights is not None:
        weights = np.reshape(window.log_weights, (-1, 1, 1, 1, 1, 1))
        added = backend.constant(weights, like, dtype)
    if window.border == "mask":
        inside = window.inside(size)
        hidden = ops.logical_not(inside)[:, None, None, None]
        nothing = ops.zeros(ops.shape(hidden), dtype)
        added = nothing if added is None else nothing + added
        added = backend.masked(added, hidden, MASKED)
    return added


def by_position(
    weights: Scores, window: Window
) -> Float[Tensor, "batch height width order heads rows columns"]:
    """Weights of a window as an image for each pixel."""
    weights = ops.transpose(weights, (1, 4, 5, 2, 3, 0))
    return ops.reshape(weights, (*ops.shape(weights)[:5], *window.size))


def _run(
    functions: Any,
    tensors: tuple[Float[Tensor, "..."] | None, ...],
    recompute: bool,
    **options: Any,
) -> Any:
    """Runs one of the pairs of functions of `gradients` on these tensors."""
    recompute = recompute and config.is_recompute_enabled()
    shapes = backend.signature(tensors)
    run = gradients.differentiable(functions, recompute, shapes, **options)
    return run(*tensors)


def _side(
    image: Float[Tensor, "batch height width key_order own_channels"],
    window: Window,
    num_heads: int,
    affine: AffineMap,
) -> tuple[gradients.Side, Source]:
    """How neighbours are seen, and the tensors that say what is seen.

    Without weights a query element sees the keys of the same element. The heads
    of all elements are then heads of one element.
    """
    x: Any = _tensor(image)
    weight, bias = map(_tensor, affine)
    if weight is None:
        num_heads = num_heads * x.shape[3]
        x, bias = map(_as_channels, (x, bias))
    # Rows and columns are joined to neighbours.
    weight, bias = (
        None if w is None else ops.reshape(w, (-1, *w.shape[2:]))
        for w in (weight, bias)
    )
    return gradients.Side(window, num_heads), (x, weight, bias)


def _query(
    query: Float[Tensor, "batch height width order own_channels"],
    affine: AffineMap,
) -> Queries:
    """Queries for the form, which has one element if there are no weights."""
    query = _tensor(query)
    return _as_channels(query) if affine.weight is None else query


def _with_heads(
    weights: NeighbourWeights, order: int, num_heads: int
) -> Float[Tensor, "neighbours batch order num_heads height width"]:
    """Splits scores or weights into this many elements and heads."""
    count, batch, _, _, height, width = ops.shape(weights)
    return ops.reshape(weights, (count, batch, order, num_heads, height, width))


def _as_channels(
    x: Float[Tensor, "*outer order channels"] | None,
) -> Float[Tensor, "*outer 1 all"] | None:
    """The channels of all group elements along one axis."""
    if x is None:
        return None
    *outer, order, channels = ops.shape(x)
    return ops.reshape(x, (*outer, 1, order * channels))


def _tensor(x: Float[Tensor, "*axes"] | None) -> Float[Tensor, "*axes"] | None:
    """Converts a tensor, if there is one, to a dtype for fast products."""
    if x is None:
        return None
    return backend.for_products(ops.convert_to_tensor(x))


def _check_kind(window: Any) -> None:
    """Raises unless this is a `Window`."""
    if not isinstance(window, Window):
        raise ValueError(
            "`window` must be a `keras_equiattn.ops.Window`. "
            f"Received: window={window!r}"
        )


def _check_scores(scores: Scores, window: Window, size: Any) -> None:
    """Whether scores may be those of a window on keys of this size."""
    count, shape = len(window.offsets), tuple(scores.shape)
    if shape[0] % count or not shape[0]:
        raise ValueError(
            f"Scores of {shape[0]} neighbours do not belong to {window}, which "
            f"has {count} neighbours, or to several such windows."
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
            "`size` must be (height, width) of the keys that were scored with "
            f"{window}. Received: size={size}, scores.shape={shape}"
        )


def _check_shape(
    name: str,
    tensor: Float[Tensor, "..."],
    expected: Shape,
    window: Window,
    keys: KeyImage,
) -> None:
    """Compares what is known of the shape of a tensor."""
    shape = tuple(tensor.shape)
    if not _checks.fits(shape, expected):
        raise ValueError(
            f"`{name}` must have shape {tuple(expected)} for {window} on "
            f"{tuple(keys.shape)}. Received: {name}.shape={shape}"
        )


def _check_queries(
    query: NewImage,
    keys: KeyImage,
    window: Any,
    num_heads: int,
    affine: AffineMap,
) -> None:
    """Whether there is a query for each position of a window on keys."""
    _check_kind(window)
    _check(window, num_heads, keys, affine, order=query.shape[3])
    height, width = window.output_size(tuple(keys.shape[1:3]))
    expected = (keys.shape[0], height, width, query.shape[3], keys.shape[-1])
    _check_shape("query", query, expected, window, keys)


def _check(
    window: Window,
    num_heads: int,
    keys: KeyImage,
    affine: AffineMap,
    order: int,
) -> None:
    """Whether keys have channels for the heads, and fit their affine map."""
    key_order, channels = keys.shape[3:]
    if channels % num_heads:
        raise ValueError(
            f"{channels} channels are not divisible by num_heads={num_heads}."
        )
    expected = {
        "weight": (*window.size, order, key_order, channels),
        "bias": (*window.size, order, channels),
    }
    for name, shape in expected.items():
        tensor = getattr(affine, name)
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(
                f"`{name}` must have shape {shape}. "
                f"Received: {name}.shape={tuple(tensor.shape)}"
            )
    if affine.weight is None and key_order != order:
        raise ValueError(
            f"Without `weight`, queries of order {order} need keys and values "
            f"of the same order. Received: shape={tuple(keys.shape)}"
        )
