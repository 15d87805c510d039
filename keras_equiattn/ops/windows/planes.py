"""The window form as XLA likes it: sums written out over planes of pixels.

XLA makes one loop of a sum that is written out, and vectorises it along the
last axis: so the columns of the image come last here. What can be long (key
elements, blocks of channels) is a loop that XLA compiles once. Sizes must be
known. `ops.windows.form` says what `derivatives` computes.
"""

from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.geometry import Neighbour
from keras_equiattn.ops.numerics import dtype_of_sums
from keras_equiattn.ops.numerics import in_full_precision
from keras_equiattn.ops.windows import dispatch
from keras_equiattn.ops.windows.form import Biases
from keras_equiattn.ops.windows.form import derivatives_from
from keras_equiattn.ops.windows.form import Form
from keras_equiattn.ops.windows.form import joined
from keras_equiattn.ops.windows.form import KeyPlanes
from keras_equiattn.ops.windows.form import Keys
from keras_equiattn.ops.windows.form import Maps
from keras_equiattn.ops.windows.form import NeighbourWeights
from keras_equiattn.ops.windows.form import Queries
from keras_equiattn.ops.windows.form import QueryPlanes


def scores(
    form: Form, x: Queries, k: Keys, w: Maps | None, bias: Biases | None
) -> NeighbourWeights:
    """The derivative of the form with respect to `a`."""
    x, k = _planes(form, x), _planes(form, k)
    size = tuple(ops.shape(x)[-2:])

    def step(some: Form, _: Any, first: Any, *weights: Any) -> Any:
        """The derivatives of some neighbours, see `_over_neighbours`."""
        found = []
        for numbers in _some(some):
            seen = _seen(
                some, numbers, _rows_from(k, first, some, size), size, *weights
            )
            queries = in_full_precision(x)
            found += _channel_sums([queries * y for y in seen])
        return (), ops.stack(found)

    weights = _columns(form, w), _columns(form, bias)
    return _over_neighbours(form, step, (), weights, in_full_precision(x))[1]


def sums(
    form: Form,
    a: NeighbourWeights,
    k: Keys,
    w: Maps | None,
    bias: Biases | None,
) -> Queries:
    """The derivative of the form with respect to `x`."""
    k = _planes(form, k)
    a = ops.expand_dims(a, axis=4)
    size = tuple(ops.shape(a)[-2:])

    def step(
        some: Form, total: Tensor, first: Any, a: Tensor, *weights: Any
    ) -> Any:
        """Adds some weighted neighbours to the total."""
        near = _rows_from(k, first, some, size)
        for numbers in _some(some):
            seen = _seen(some, numbers, near, size, *weights)
            for n, y in zip(numbers, seen, strict=True):
                total = total + in_full_precision(a[n]) * y
        return total, ()

    pieces = a, _columns(form, w), _columns(form, bias)
    elements = ops.shape(a)[1:4], ops.shape(k)[4]
    nothing = ops.zeros((*elements[0], elements[1], *size), dtype_of_sums(k))
    return _pixels(_over_neighbours(form, step, nothing, pieces)[0])


def spread(form: Form, a: NeighbourWeights, x: Queries, w: Maps | None) -> Keys:
    """The derivative of the form with respect to `k`."""
    x, w = _planes(form, x), _columns(form, w)
    order = 1 if w is None else w.shape[2]
    batch, elements, *channels, height, width = ops.shape(x)
    _, along = form.reach

    def step(some: Form, totals: Any, first: Any, a: Any, w: Any) -> Any:
        """Adds what some neighbours get from the queries to the frames of the
        totals. Without totals it returns new frames."""
        down = some.reach[0]
        around = ((down, down), (along, along))
        size = height + down, width + along
        a = ops.pad(ops.expand_dims(a, 4), ((0, 0),) * 5 + around)
        queries = ops.pad(x, ((0, 0),) * 4 + around)

        def add(found: list[Tensor], piece: Any) -> Any:
            """Adds the part of one query element to the frames."""
            a, x, w = piece
            found = list(found)
            for n, place in enumerate(some.neighbours):
                i, j = down - place.row, along - place.column
                rows, columns = slice(i, i + size[0]), slice(j, j + size[1])
                term = in_full_precision(a[n, ..., rows, columns])
                term = term * in_full_precision(x[..., rows, columns])
                if w is not None:
                    term = term * w[n]
                found[place.frame] = found[place.frame] + term
            return found, ()

        shape = batch, order, *channels, *size
        nothing = [
            ops.zeros(shape, dtype_of_sums(x)) for _ in range(form.frames)
        ]
        pieces: Any = _elements(a, 2), _elements(queries, 1), w
        if w is not None:
            pieces = *pieces[:2], ops.moveaxis(w, 1, 0)
        if elements == 1:
            first_pieces = [None if x is None else x[0] for x in pieces]
            found, _ = add(nothing, first_pieces)
        else:
            found, _ = backend.scan(add, nothing, pieces)
        if totals is None:
            return found, ()
        start = 0, 0, 0, 0, first, 0
        return [
            backend.add_at(total, start, y)
            for total, y in zip(totals, found, strict=True)
        ], ()

    shape = batch, order, *channels, height + form.reach[0], width + along
    totals = [ops.zeros(shape, dtype_of_sums(x))] if _rows(form) else None
    found, _ = _over_neighbours(form, step, totals, (a, w))
    return _pixels(ops.stack(found))


def weight_gradients(
    form: Form,
    a: NeighbourWeights,
    x: Queries,
    k: Keys,
    w: Maps | None,
    bias: Biases | None,
) -> list[Tensor]:
    """The derivatives with respect to `w` and `bias`, of those given.

    Summed over the rows first, in loops that are vectorised along the
    columns, then over images and columns: short sums lose few digits.
    """
    weighted, biased = w is not None, bias is not None
    if not weighted and not biased:
        return []
    x, k = _planes(form, x), _planes(form, k)
    size = tuple(ops.shape(x)[-2:])
    elements = k.shape[2] if weighted else 0

    def step(some: Form, _: Any, first: Any, a: Tensor) -> Any:
        """The derivatives of some neighbours: for each of them one with respect
        to its map for every key element, and one with respect to its bias."""
        near = _rows_from(k, first, some, size)
        # (batch, elements, heads, 1, height, width) for each neighbour.
        a = ops.expand_dims(a, axis=4)
        of_w, of_bias = [], []
        for numbers in _some(some):
            terms = []
            for n in numbers:
                product = in_full_precision(a[n]) * in_full_precision(x)
                seen = _window(near, some.neighbours[n], size)
                seen = in_full_precision(seen)
                terms += [product * seen[:, None, r] for r in range(elements)]
                terms += [product] if biased else []
            sums = [
                ops.sum(y, axis=(0, 4))
                for y in backend.sums_together(terms, axis=4)
            ]
            while sums:
                if weighted:
                    of_w.append(ops.stack(sums[:elements], axis=1))
                    sums = sums[elements:]
                of_bias += [sums.pop(0)] if biased else []
        return (), [ops.stack(found) for found in (of_w, of_bias) if found]

    like = [in_full_precision(x)] * (weighted + biased)
    _, found = _over_neighbours(form, step, (), (a,), like)
    return [joined(w) for w in found]


derivatives = derivatives_from(scores, sums, spread, weight_gradients)


def _over_neighbours(
    form: Form,
    step: Callable[..., Any],
    total: Any,
    pieces: tuple[Float[Tensor, "neighbours ..."] | None, ...],
    like: Any = (),
) -> tuple[Any, Any]:
    """A step for all neighbours, or of a large window for one row at a time.

    Args:
        form: the sum that is computed.
        step: takes the form of some neighbours, the total, the row of the keys
            that they start at, and what there is of each piece for them;
            returns the total, and a nest of tensors with the neighbours first.
        total: to start with.
        pieces: tensors with the neighbours along the first axis, or None.
        like: a nest of tensors with structure and dtypes of what is found.

    Returns:
        The last total, and what was found for all neighbours.
    """
    rows = _rows(form)
    if rows is None:
        return step(form, total, None, *pieces)
    one, count, dilation = rows
    numbers = ops.arange(count, dtype="int32") * dilation
    cut = [
        None
        if x is None
        else ops.reshape(x, (count, len(one.neighbours), *ops.shape(x)[1:]))
        for x in pieces
    ]
    total, found = backend.scan(
        lambda total, row: step(one, total, *row), total, (numbers, *cut), like
    )
    return total, keras.tree.map_structure(
        lambda x: ops.reshape(x, (len(form.neighbours), *ops.shape(x)[2:])),
        found,
    )


def _rows(form: Form) -> tuple[Form, int, int] | None:
    """How a window with many neighbours is cut into rows.

    Returns:
        The form of one row, how many there are, and how far apart they are;
        None for a window that is written out as a whole.
    """
    if len(form.neighbours) <= dispatch.WRITTEN_OUT or form.frames > 1:
        return None
    rows = sorted({place.row for place in form.neighbours})
    columns = sorted({place.column for place in form.neighbours})
    one = tuple(Neighbour(0, 0, column) for column in columns)
    dilation = rows[-1] // max(len(rows) - 1, 1)
    return form._replace(neighbours=one), len(rows), dilation


def _rows_from(
    k: KeyPlanes,
    first: Any,
    form: Form,
    size: tuple[Any, Any],
) -> Float[Tensor, "frames batch key_elements heads channels some columns"]:
    """The rows of the keys that neighbours of this form lie in."""
    if first is None:
        return k
    *outer, _, columns = ops.shape(k)
    shape = (*outer, size[0] + form.reach[0], columns)
    return backend.part_at(k, (0,) * 5 + (first, 0), shape)


def _some(form: Form) -> list[range]:
    """The neighbours, as many at a time as are reduced together."""
    count = len(form.neighbours)
    return [
        range(start, min(start + dispatch.NEIGHBOURS_OF_SUM, count))
        for start in range(0, count, dispatch.NEIGHBOURS_OF_SUM)
    ]


def _seen(
    form: Form,
    some: range,
    k: KeyPlanes,
    size: tuple[Any, Any],
    w: Float[Tensor, "neighbours elements key_elements heads channels 1 1"]
    | None,
    bias: Float[Tensor, "neighbours elements heads channels 1 1"] | None,
) -> list[QueryPlanes]:
    """Some of the neighbours, as the query elements see them."""
    found = []
    for n in some:
        seen = in_full_precision(_window(k, form.neighbours[n], size)[:, None])
        # A slice for each use: XLA would store one of all key elements.
        parts = [
            seen[:, :, r] if w is None else seen[:, :, r] * w[n, :, r]
            for r in range(k.shape[2])
        ]
        if bias is not None:
            parts.append(bias[n])
        found.append(sum(parts[1:], parts[0]))
    return found


def _channel_sums(
    terms: list[QueryPlanes],
) -> list[Float[Tensor, "batch elements heads height width"]]:
    """Sums over the channels of a head, some channels at a time."""
    size = dispatch.CHANNELS_OF_SUM
    blocks = [
        backend.sums_together(
            [x[:, :, :, start : start + size] for x in terms], axis=3
        )
        for start in range(0, terms[0].shape[3], size)
    ]
    return [sum(parts[1:], parts[0]) for parts in zip(*blocks, strict=True)]


def _planes(
    form: Form, x: Float[Tensor, "*outer height width elements all"]
) -> Float[Tensor, "*outer elements heads channels height width"]:
    """Queries last, so that XLA vectorises along the columns."""
    n = len(x.shape) - 4
    *outer, height, width, elements, channels = ops.shape(x)
    x = ops.reshape(x, (*outer, height, width, elements * channels))
    x = backend.by_parts(_pixels_last, x, axis=n + 2, joined=n)
    split = (elements, form.heads, channels // form.heads)
    return ops.reshape(x, (*outer, *split, height, width))


def _pixels(
    x: Float[Tensor, "*outer elements heads channels height width"],
) -> Float[Tensor, "*outer height width elements all"]:
    """Undoes `_planes`."""
    n = len(x.shape) - 5
    *outer, elements, heads, channels, height, width = ops.shape(x)
    x = ops.reshape(x, (*outer, elements * heads * channels, height, width))
    x = backend.by_parts(_pixels_first, x, axis=n + 1, joined=n)
    return ops.reshape(x, (*outer, height, width, elements, heads * channels))


def _pixels_last(
    x: Float[Tensor, "*outer height width channels"],
) -> Float[Tensor, "*outer channels height width"]:
    """Channels before rows and columns."""
    return ops.moveaxis(x, -1, -3)


def _pixels_first(
    x: Float[Tensor, "*outer channels height width"],
) -> Float[Tensor, "*outer height width channels"]:
    """Undoes `_pixels_last`."""
    return ops.moveaxis(x, -3, -1)


def _columns(
    form: Form, w: Float[Tensor, "neighbours *elements all"] | None
) -> Float[Tensor, "neighbours *elements heads channels 1 1"] | None:
    """Weights or a bias with the axes of planes, if there are any."""
    if w is None:
        return None
    return form.split(in_full_precision(w))[..., None, None]


def _window(
    k: KeyPlanes, place: Neighbour, size: tuple[Any, Any]
) -> Float[Tensor, "batch key_elements heads channels height width"]:
    """The keys that every pixel sees at this place."""
    return k[(place.frame, ..., *place.seen(size))]


def _elements(
    x: Float[Tensor, "*axes"], axis: int
) -> Float[Tensor, "elements ..."]:
    """An axis as the first, with 1 left in its place."""
    return ops.expand_dims(ops.moveaxis(x, axis, 0), axis + 1)
