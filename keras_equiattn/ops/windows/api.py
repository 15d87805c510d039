"""Queries that look at a window of neighbours: scores, softmax, sums.

The parts of local self-attention. Scores take one number for each query,
neighbour and head; neighbours with all their channels are never built, neither
in the forward nor in the backward pass, which computes anew what it needs.
"""

import functools
import math
from typing import Any
from typing import NamedTuple

from keras import ops

from keras_equiattn import _checks
from keras_equiattn.ops import backend
from keras_equiattn.ops._arguments import checked
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Shape
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.geometry import Window
from keras_equiattn.ops.numerics import in_full_precision
from keras_equiattn.ops.numerics import MASKED
from keras_equiattn.ops.windows import bands as window_bands
from keras_equiattn.ops.windows import planes as window_planes
from keras_equiattn.ops.windows import products as window_products
from keras_equiattn.ops.windows import tiles as window_tiles
from keras_equiattn.ops.windows.form import Form

# Neighbours up to which XLA gets a loop over the pixels for each.
WRITTEN_OUT = 64
# Neighbours up to which they are cheaper one by one than as matrix products.
ONE_BY_ONE = 160
# Neighbours and channels of a head from which tiles are cheaper on CPUs
# without a compiler: those of 3 x 3 are too few, and 8 channels about the same.
TILED_NEIGHBOURS = 9
TILED_CHANNELS = 16


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
    _check_kind(window)
    _check_rank("query", query)
    _check_rank("keys", keys)
    _check(window, num_heads, keys, weight, bias, order=query.shape[3])
    height, width = window.output_size(tuple(keys.shape[1:3]))
    order, channels = query.shape[3], keys.shape[-1]
    expected = (keys.shape[0], height, width, order, channels)
    _check_shape("query", query, expected, window, keys)
    query, keys, weight, bias = map(_tensor, (query, keys, weight, bias))
    heads = num_heads
    if weight is None:
        query, keys, bias = map(_as_channels, (query, keys, bias))
        heads = num_heads * order
    form = Form(window.neighbours, heads, math.prod(window.strides))
    batch, height, width = ops.shape(query)[:3]
    tensors = (query, window.frames(keys), *_by_neighbour(weight, bias))
    given = weight is not None, bias is not None
    scores = _scores(form, *given, recompute, _shapes(tensors))(*tensors)
    count = len(form.neighbours)
    return ops.reshape(scores, (count, batch, order, num_heads, height, width))


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
    scores = _tensor(scores)
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
    if backend.compiles() and recompute:
        return _softmax(_shapes((scores,)))(scores)
    return _plain_softmax(scores)


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
    count, batch, order, heads, height, width = ops.shape(weights)
    _check(window, heads, values, weight, bias, order=order)
    size = window.output_size(tuple(values.shape[1:3]))
    expected = (len(window.offsets), values.shape[0], order, heads, *size)
    _check_shape("weights", weights, expected, window, values)
    dtype, channels = values.dtype, values.shape[-1]
    weights, values, weight, bias = map(
        _tensor, (weights, values, weight, bias)
    )
    if weight is None:
        values, bias = map(_as_channels, (values, bias))
        heads = order * heads
        weights = ops.reshape(weights, (count, batch, 1, heads, height, width))
    form = Form(window.neighbours, heads, math.prod(window.strides))
    tensors = (weights, window.frames(values), *_by_neighbour(weight, bias))
    given = weight is not None, bias is not None
    y = _sums(form, *given, recompute, _shapes(tensors))(*tensors)
    y = ops.reshape(y, (batch, height, width, order, channels))
    return ops.cast(y, dtype)


@functools.lru_cache(maxsize=512)
def _scores(
    form: Form, weighted: bool, biased: bool, recompute: bool, shapes: Any
) -> Any:
    """The scores as a differentiable function of two to four tensors.

    One for each set of shapes: TensorFlow would run one that it has compiled
    for unknown sizes where they are known, too.
    """

    def forward(x: Tensor, k: Tensor, *rest: Tensor) -> Any:
        w, bias = _optional(rest, weighted, biased)
        return _realisation(form, x, k, weighted).scores(
            form, x, k, w, bias
        ), ()

    def backward(
        arguments: tuple[Tensor, ...], _: Any, d: Tensor
    ) -> tuple[Tensor, ...]:
        x, k, *rest = arguments
        w, bias = _optional(rest, weighted, biased)
        how = _realisation(form, x, k, weighted)
        return how.score_gradients(form, d, x, k, w, bias)

    return _differentiable(forward, backward, recompute)


@functools.lru_cache(maxsize=512)
def _sums(
    form: Form, weighted: bool, biased: bool, recompute: bool, shapes: Any
) -> Any:
    """The weighted sums as a differentiable function, see `_scores`."""

    def forward(a: Tensor, k: Tensor, *rest: Tensor) -> Any:
        w, bias = _optional(rest, weighted, biased)
        return _realisation(form, a[0], k, weighted).weighted_sums(
            form, a, k, w, bias
        ), ()

    def backward(
        arguments: tuple[Tensor, ...], _: Any, d: Tensor
    ) -> tuple[Tensor, ...]:
        a, k, *rest = arguments
        w, bias = _optional(rest, weighted, biased)
        how = _realisation(form, a[0], k, weighted)
        return how.sum_gradients(form, d, a, k, w, bias)

    return _differentiable(forward, backward, recompute)


@functools.lru_cache(maxsize=512)
def _softmax(shape: Any) -> Any:
    """Softmax over the first axis, in loops over it.

    XLA cannot merge a loop with what follows. It would compute the maximum
    and the sum of all neighbours again for each of them.
    """

    def forward(scores: Tensor) -> Any:
        def larger(top: Tensor, plane: Tensor) -> Any:
            return ops.maximum(top, plane), ()

        def add(total: Tensor, plane: Tensor) -> Any:
            plane = ops.exp(plane - top)
            return total + plane, plane

        top, _ = backend.scan(larger, scores[0], scores)
        total, planes = backend.scan(
            add, ops.zeros_like(top), scores, like=scores
        )
        scale = 1 / total
        _, weights = backend.scan(
            lambda _, plane: ((), plane * scale), (), planes, like=scores
        )
        return weights, weights

    def backward(_: Any, weights: Tensor, d: Tensor) -> tuple[Tensor]:
        mean, _ = backend.scan(
            lambda total, piece: (total + piece[0] * piece[1], ()),
            ops.zeros_like(d[0]),
            (weights, d),
        )
        _, gradient = backend.scan(
            lambda _, piece: ((), piece[0] * (piece[1] - mean)),
            (),
            (weights, d),
            like=d,
        )
        return (gradient,)

    return backend.recomputed(forward, backward, "recompute=False")


def _plain_softmax(scores: Tensor) -> Tensor:
    # Flat: TensorFlow's own takes no more than five axes.
    count = scores.shape[0]
    if count == 1:  # Keras warns of it
        # Ones, through which a gradient of zeros still passes.
        return 0 * scores + 1
    weights = ops.softmax(ops.reshape(scores, (count, -1)), axis=0)
    return ops.reshape(weights, ops.shape(scores))


def _differentiable(forward: Any, backward: Any, recompute: bool) -> Any:
    if recompute:
        return backend.recomputed(forward, backward, "recompute=False")
    return lambda *arguments: forward(*arguments)[0]


def _realisation(form: Form, x: Tensor, k: Tensor, weighted: bool) -> Any:
    """Where scores and sums over the window come from."""
    known = None not in (*x.shape[1:], *k.shape[2:])
    xla = backend.in_xla()
    count = len(form.neighbours)
    tiles = backend.step_by_step_on_cpu()
    if tiles and known and not weighted and _fills_tiles(form, k.shape[-1]):
        return window_tiles
    if count > (WRITTEN_OUT if xla else ONE_BY_ONE) and not weighted:
        # All pairs of pixels in a row pay off where windows hold many of them.
        reach, seen = form.reach[1], k.shape[3]
        if xla or seen is None or 2 * reach >= seen - reach:
            return window_bands
    if xla and known and count <= WRITTEN_OUT:
        return window_planes
    return window_products


def _fills_tiles(form: Form, channels: int) -> bool:
    """Whether products of tiles have enough to do for what they copy."""
    large = len(form.neighbours) > TILED_NEIGHBOURS
    return large and channels // form.heads >= TILED_CHANNELS


def _shapes(tensors: Any) -> tuple[tuple[int | None, ...], ...]:
    return tuple(tuple(x.shape) for x in tensors)


def _optional(
    tensors: Any, weighted: bool, biased: bool
) -> tuple[Tensor | None, Tensor | None]:
    left = iter(tensors)
    return next(left) if weighted else None, next(left) if biased else None


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
    """What there is as a tensor, at least in single precision."""
    return None if x is None else in_full_precision(ops.convert_to_tensor(x))


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
) -> tuple[
    Float[Tensor, "batch new_height new_width order channels"],
    Float[Tensor, "neighbours batch order heads new_height new_width"],
]:
    """Attention of each query over its window.

    Args:
        query: scaled, one for each position of the window.
        keys, values: one for each pixel.
        window: the neighbours.
        num_heads: number of heads, contiguous blocks of channels.
        of_keys, of_values: affine maps of the neighbours.
        recompute: see `window_scores`.

    Returns:
        The weighted sums, and the weights.
    """
    size = ops.shape(keys)[1:3]
    scores = window_scores(
        query, keys, window, num_heads, *of_keys, recompute=recompute
    )
    weights = window_softmax(scores, window, tuple(size), recompute=recompute)
    y = window_sum(weights, values, window, *of_values, recompute=recompute)
    return y, weights


def by_position(
    weights: Float[Tensor, "neighbours batch order heads height width"],
    window: Window,
) -> Float[Tensor, "batch height width order heads rows columns"]:
    """Weights of a window as an image for each pixel."""
    weights = ops.transpose(weights, (1, 4, 5, 2, 3, 0))
    return ops.reshape(weights, (*ops.shape(weights)[:5], *window.size))
