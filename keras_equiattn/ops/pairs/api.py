"""Self-attention on groups with relative positions, local and global.

`group_self_attention` has the formula. `ops.pairs.fused` says how it is
computed without all three elements at once.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from keras import ops

from keras_equiattn import _checks
from keras_equiattn import config
from keras_equiattn.ops import backend
from keras_equiattn.ops._arguments import checked
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Shaped
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.geometry import disc_log_weights
from keras_equiattn.ops.geometry import WINDOW_SHAPES
from keras_equiattn.ops.numerics import in_full_precision
from keras_equiattn.ops.numerics import MASKED
from keras_equiattn.ops.numerics import of_one_dtype
from keras_equiattn.ops.numerics import softmax
from keras_equiattn.ops.pairs import dispatch
from keras_equiattn.ops.pairs.blocks import attend_in_blocks
from keras_equiattn.ops.pairs.blocks import Settings

# Both numbers of a seed are below this one.
SEED_LIMIT = 2**31


@checked()
def group_self_attention(
    query: Float[Tensor, "batch height width query_order heads channels"],
    keys: Float[Tensor, "batch height width key_order heads channels"],
    values: Float[Tensor, "batch height width key_order heads channels"],
    encoding: Float[Tensor, "rows columns order encoded"],
    embedding: Float[Tensor, "query_order key_order embedded"] | None = None,
    local: bool = True,
    dropout: float = 0.0,
    seed: Sequence[int] | Shaped[Tensor, "2"] | None = None,
    recompute: bool = True,
    window_shape: str = "square",
) -> Float[Tensor, "batch height width order heads channels"]:
    """Group self-attention over windows or whole images.

    For output elements `v`, query elements `g`, key elements `m`, pixels `i`
    and offsets `o`, with relative elements in the group,

        S(v, g, m, i, o) = <q(i, g), k(i + o, m)> + <q'(i, g), e(v^-1 o)>
                           + <q''(i, g), E(g^-1 m)>
        y(i, v) = sum_g sum_(m, o) softmax_(m, o)(S) x(i + o, m)

    where `k` are the keys, `x` the values, `e` is the encoding of offsets and
    `E` the embedding of relative elements. `q'` are the first channels of the
    queries `q`, as many as `e` has, and `q''` are the others. Lifting has one
    query and key element, and no embedding.

    Args:
        query: the queries, scaled.
        keys, values: one for each pixel and group element.
        encoding: the encoding of offsets as each output element sees them,
            `e(v^-1 o)`. With `local` it covers the window, which is square and
            odd; otherwise it covers all offsets, from `1 - height` to `height -
            1` and from `1 - width` to `width - 1`.
        embedding: the embedding of the relative elements, `E(g^-1 m)`.
        local: whether a pixel sees the window around it, or all pixels.
            Neighbours outside of the image are left out.
        dropout: rate at which factors `(g, m, i, o)` of the attention are
            dropped.
        seed: two whole numbers from 0 to below 2**31; needed with dropout.
        recompute: both passes compute one block at a time. The backward pass
            keeps the arguments and a number for each pixel, head and pair of
            elements, and computes everything else anew. False computes all
            elements at once, for tests and where gradients are differentiated
            again.
        window_shape: "square" or, for windows alone, "disc", see `ops.Window`.

    Returns:
        The weighted sums of values for each output element.

    Raises:
        ValueError: for shapes that do not fit, a bad rate, dropout without a
            seed, or a bad seed, of which only the shape is looked at if it is
            a tensor; with `recompute=False` for a height or width known only
            at run time.

    Example:
        >>> import keras
        >>> from keras_equiattn import ops
        >>> x = keras.ops.ones((2, 6, 6, 4, 2, 3))  # two heads, on p4
        >>> encoding = keras.ops.ones((5, 5, 4, 2))  # of a 5 x 5 window
        >>> embedding = keras.ops.ones((4, 4, 1))
        >>> y = ops.group_self_attention(x, x, x, encoding, embedding)
        >>> tuple(y.shape)
        (2, 6, 6, 4, 2, 3)
    """
    _check(query, encoding, embedding, local, window_shape)
    _checks.rate(dropout, "dropout")
    if dropout and seed is None:
        raise ValueError(
            f"Dropout needs a seed. Received: dropout={dropout}, seed=None"
        )
    seed = _checked_seed(seed) if dropout else None
    dtype, count = query.dtype, query.shape[0]
    query, keys, values = map(backend.with_an_image, (query, keys, values))
    # Encoding and embedding may be more precise, and are cast to this dtype.
    query, keys, values = of_one_dtype((query, keys, values))
    tensors = (query, keys, values, encoding, embedding, seed)
    recompute = recompute and config.is_recompute_enabled()
    # Without gradients there is nothing to keep. OpenVINO also computes the
    # plain form wrongly where the size of the batch is not known.
    if not recompute and backend.has_gradients():
        y = plain_attention(*tensors, local, window_shape, dropout)
    else:
        size = encoding.shape[0] if local else None
        disc = local and window_shape == "disc"
        height = query.shape[1] if isinstance(query.shape[1], int) else None
        blocks = dispatch.choose(query, keys, encoding, local)
        rate = 0.0 if seed is None else dropout
        settings = Settings(
            size=size,
            disc=disc,
            blocks=blocks,
            height=height,
            rate=rate,
            embedded=embedding is not None,
        )
        y = attend_in_blocks(settings, *tensors)
    return ops.cast(y if count != 0 else y[:0], dtype)


def plain_attention(
    query: Float[Tensor, "batch height width query_order heads channels"],
    keys: Float[Tensor, "batch height width key_order heads channels"],
    values: Float[Tensor, "batch height width key_order heads channels"],
    encoding: Float[Tensor, "rows columns order encoded"],
    embedding: Float[Tensor, "query_order key_order embedded"] | None = None,
    seed: Float[Tensor, "4"] | None = None,
    local: bool = True,
    window_shape: str = "square",
    dropout: float = 0.0,
) -> Float[Tensor, "batch height width order heads channels"]:
    """The formula of `group_self_attention`, for all elements at once.

    It takes memory in proportion to the cube of the order of the group, times
    the neighbours of all pixels. With dropout it draws other numbers than the
    blocks do; the seed is the result of `backend.seed_as_floats`.
    """
    query, keys, values, encoding, embedding = _precise(
        query, keys, values, encoding, embedding
    )
    seen = neighbourhood(ops.shape(keys)[1:3], encoding, local, window_shape)
    content, position = _scores(query, keys, encoding, embedding, seen)
    scores = content[:, :, None] + position[:, :, :, :, :, None]
    weights = softmax(scores, (-2, -1))
    if seed is not None:
        keep = backend.dropout_factors(
            ops.shape(content),
            dropout,
            backend.prepared_seed(seed),
            (),
            content,
        )
        weights = weights * keep[:, :, None]
    y = ops.einsum("btvigmo,biomtc->bivtc", weights, seen.of(values))
    return ops.reshape(y, (*ops.shape(query)[:3], *ops.shape(y)[2:]))


@checked()
def group_attention_weights(
    query: Float[Tensor, "batch height width query_order heads channels"],
    keys: Float[Tensor, "batch height width key_order heads channels"],
    encoding: Float[Tensor, "rows columns order encoded"],
    embedding: Float[Tensor, "query_order key_order embedded"] | None = None,
    local: bool = True,
    pixel: tuple[int, int] | None = None,
    window_shape: str = "square",
) -> Float[Tensor, "batch pixels order heads key_order neighbours"]:
    """The weights of the values in `group_self_attention`.

    Args:
        query, keys, encoding, embedding, local: see there.
        pixel: row and column of the only query; None for all of them.
        window_shape: see there.

    Returns:
        Weights, added up over the query elements: they add up to
        `query_order` over key elements and neighbours. Neighbours are those
        of the window, or all pixels, row by row.

    Raises:
        ValueError: for shapes that do not fit, a pixel outside of the image,
            and a height or width known only at run time.
    """
    _check(query, encoding, embedding, local, window_shape)
    count = query.shape[0]
    query, keys = map(backend.with_an_image, (query, keys))
    query, keys, encoding, embedding = _precise(
        query, keys, encoding, embedding
    )
    size = ops.shape(keys)[1:3]
    seen = neighbourhood(size, encoding, local, window_shape, pixel)
    content, position = _scores(query, keys, encoding, embedding, seen)
    # The softmax has the same two factors as in `ops.pairs.fused`.
    of_elements = softmax(content, (-2,))
    logits = position + ops.logsumexp(content, axis=-2)[:, :, None]
    of_neighbours = softmax(logits, (-1,))
    y = ops.einsum("btigmo,btvigo->bivtmo", of_elements, of_neighbours)
    return y if count != 0 else y[:0]


@dataclasses.dataclass(frozen=True)
class Neighbourhood:
    """The neighbours of some pixels, row by row.

    Attributes:
        queries: `(pixels,)`, where the pixels lie.
        places: `(pixels, neighbours)`, where their neighbours lie.
        offsets: `(pixels, neighbours)`, which encodings these have.
        inside: `(pixels, neighbours)`, whether they lie in the image.
        log_weights: `(neighbours,)`, added to the scores of discs.
    """

    queries: np.ndarray
    places: np.ndarray
    offsets: np.ndarray
    inside: np.ndarray
    log_weights: np.ndarray | None

    def of(
        self, x: Float[Tensor, "batch height width *rest"]
    ) -> Float[Tensor, "batch pixels neighbours *rest"]:
        """`(batch, pixels, neighbours, ...)` of an image."""
        places = backend.constant(self.places, x, "int32")
        return ops.take(_by_pixel(x), places, axis=1)


def neighbourhood(
    size: tuple[Any, Any],
    encoding: Float[Tensor, "rows columns order encoded"],
    local: bool,
    window_shape: str = "square",
    pixel: tuple[int, int] | None = None,
) -> Neighbourhood:
    """The neighbours of all pixels of an image of this size, or of one pixel.

    Raises:
        ValueError: if the size is known only at run time, or the pixel lies
            outside of the image.
    """
    if not all(isinstance(n, int) for n in size):
        raise ValueError(
            "Attention that is not computed in blocks (`recompute=False`, "
            "attention maps) needs a height and width that are known before "
            f"run time. Received: height={size[0]}, width={size[1]}"
        )
    queries = np.indices(size).reshape(2, -1)
    if pixel is not None:
        pixel = _checks.place(pixel, "pixel", size)
        queries = np.array(pixel)[:, None]
    window = encoding.shape[:2]
    centre = np.array(window)[:, None, None] // 2
    if local:
        offsets = np.indices(window).reshape(2, 1, -1) - centre
        places = queries[:, :, None] + offsets
    else:
        places = np.indices(size).reshape(2, 1, -1)
        offsets = places - queries[:, :, None]
    limits = np.array(size)[:, None, None]
    inside = ((places >= 0) & (places < limits)).all(axis=0)
    rows, columns = np.clip(places, 0, limits - 1)
    offset_rows, offset_columns = offsets + centre
    shape = (queries.shape[1], offsets.shape[2])
    return Neighbourhood(
        queries[0] * size[1] + queries[1],
        np.broadcast_to(rows * size[1] + columns, shape),
        np.broadcast_to(offset_rows * window[1] + offset_columns, shape),
        np.broadcast_to(inside, shape),
        disc_log_weights(window[0]).ravel()
        if local and window_shape == "disc"
        else None,
    )


def _check(
    query: Float[Tensor, "batch height width query_order heads channels"],
    encoding: Float[Tensor, "rows columns order encoded"],
    embedding: Float[Tensor, "query_order key_order embedded"] | None,
    local: bool,
    window_shape: str,
) -> None:
    """Checks conditions on several axes, as far as sizes are known."""
    known = WINDOW_SHAPES if local else ("square",)
    _checks.choice(window_shape, "window_shape", known)
    image, channels = tuple(query.shape[1:3]), query.shape[-1]
    *window, _, encoded = shape = tuple(encoding.shape)
    # The embedding meets the channels that the encoding does not.
    left = None if None in (channels, encoded) else channels - encoded
    if left is not None and left < (embedding is not None):
        limit = "at most" if embedding is None else "fewer channels than"
        raise ValueError(
            f"`encoding` must have {limit} the {channels} channels of the "
            f"queries. Received: encoding.shape={shape}"
        )
    if local and (window[0] != window[1] or not (window[0] or 0) % 2):
        raise ValueError(
            "`encoding` must be of a square window of odd size, which has a "
            f"centre. Received: encoding.shape={shape}"
        )
    if not local:
        offsets = tuple(None if n is None else 2 * n - 1 for n in image)
        if not _checks.fits(tuple(window), offsets):
            raise ValueError(
                f"`encoding` must have rows and columns for {offsets} offsets "
                f"of the pixels of whole images, for query.shape="
                f"{tuple(query.shape)}. Received: encoding.shape={shape}"
            )
    if embedding is not None and not _checks.fits(
        tuple(embedding.shape[-1:]), (left,)
    ):
        raise ValueError(
            f"`embedding` must meet the {left} channels of the queries that "
            "`encoding` leaves. Received: embedding.shape="
            f"{tuple(embedding.shape)}, encoding.shape={shape}"
        )


def _checked_seed(seed: Any) -> Any:
    """A seed as `backend.seed_as_floats` gives it, or None.

    The numbers of a tensor are not checked: they are not known, or only after
    waiting for a GPU.
    """
    if seed is None:
        return None
    if hasattr(seed, "shape") and not isinstance(seed, np.ndarray):
        fits = _checks.fits(seed.shape, (2,))
    else:
        try:
            numbers = [_checks.integer(int(n), "seed", 0) for n in seed]
            fits = len(numbers) == 2 and max(numbers) < SEED_LIMIT
            fits = fits and numbers == list(seed)
        except (OverflowError, TypeError, ValueError):
            fits = False
    if not fits:
        raise ValueError(
            "`seed` must be two whole numbers from 0 to below 2**31. "
            f"Received: {seed!r}"
        )
    return backend.seed_as_floats(ops.convert_to_tensor(seed))


def _scores(
    query: Float[Tensor, "batch height width query_order heads channels"],
    keys: Float[Tensor, "batch height width key_order heads channels"],
    encoding: Float[Tensor, "rows columns order encoded"],
    embedding: Float[Tensor, "query_order key_order embedded"] | None,
    seen: Neighbourhood,
) -> tuple[
    Float[Tensor, "batch heads pixels query_order key_order neighbours"],
    Float[Tensor, "batch heads order pixels query_order neighbours"],
]:
    """Scores of content and group, and of positions."""
    queries = backend.constant(seen.queries, query, "int32")
    query = ops.take(_by_pixel(query), queries, axis=1)
    content = ops.einsum("bigtc,biomtc->btigmo", query, seen.of(keys))
    *_, order, encoded = ops.shape(encoding)
    if embedding is not None:
        rest = query[..., encoded:]
        group = ops.einsum("bigtc,gmc->btigm", rest, embedding)
        content = content + group[..., None]
    encoding = ops.reshape(encoding, (-1, order, encoded))
    offsets = backend.constant(seen.offsets, query, "int32")
    encoding = ops.take(encoding, offsets, axis=0)
    position = ops.einsum("bigtc,iovc->btvigo", query[..., :encoded], encoding)
    if seen.log_weights is not None:
        weights = seen.log_weights
        position = position + backend.constant(
            weights, position, position.dtype
        )
    if not seen.inside.all():
        hidden = backend.constant(~seen.inside, position)[:, None]
        position = backend.masked(position, hidden, MASKED)
    return content, position


def _precise(*tensors: Float[Tensor, "..."] | None) -> list[Any]:
    """The tensors in single precision at least."""
    return [None if x is None else in_full_precision(x) for x in tensors]


def _by_pixel(
    x: Float[Tensor, "batch height width *rest"],
) -> Float[Tensor, "batch pixels *rest"]:
    """The pixels of the image along one axis, row by row."""
    batch, height, width, *rest = ops.shape(x)
    return ops.reshape(x, (batch, height * width, *rest))
