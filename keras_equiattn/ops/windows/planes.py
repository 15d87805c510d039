"""The window form for XLA: sums written out over planes of pixels.

XLA makes one loop of a sum that is written out, and vectorises it along the
last axis: so the columns of the image come last here. Query elements, and the
rows of large windows, are loops that XLA compiles once. Sizes must be known.
`ops.windows.form` says what `derivatives` computes.
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
from keras_equiattn.ops.windows.form import NeighbourWeights
from keras_equiattn.ops.windows.form import Queries
from keras_equiattn.ops.windows.form import QueryPlanes
from keras_equiattn.ops.windows.form import Scales


def scores(
    form: Form,
    queries: Queries,
    keys: Keys,
    scale: Scales | None,
    bias: Biases | None,
) -> NeighbourWeights:
    """The derivative of the form with respect to the weights."""
    queries, keys = _planes(form, queries), _planes(form, keys)
    size = tuple(ops.shape(queries)[-2:])

    def step(some: Form, _: Any, first: Any, *affine: Any) -> Any:
        """The derivatives of some neighbours, see `_over_neighbours`."""
        near = _rows_from(keys, first, some, size)
        wide = in_full_precision(queries)
        found = []
        for numbers in _some(some):
            seen = _seen(some, numbers, near, size, *affine)
            found += _channel_sums([wide * y for y in seen])
        return (), ops.stack(found)

    affine = _columns(form, scale), _columns(form, bias)
    like = in_full_precision(queries)
    order = keys.shape[2]
    return _over_neighbours(form, order, step, (), affine, like)[1]


def sums(
    form: Form,
    weights: NeighbourWeights,
    keys: Keys,
    scale: Scales | None,
    bias: Biases | None,
) -> Queries:
    """The derivative of the form with respect to the queries."""
    keys = _planes(form, keys)
    weights = ops.expand_dims(weights, axis=4)
    size = tuple(ops.shape(weights)[-2:])

    def step(
        some: Form, total: Tensor, first: Any, weights: Tensor, *affine: Any
    ) -> Any:
        """Adds some weighted neighbours to the total."""
        near = _rows_from(keys, first, some, size)
        for numbers in _some(some):
            seen = _seen(some, numbers, near, size, *affine)
            for n, y in zip(numbers, seen, strict=True):
                total = total + in_full_precision(weights[n]) * y
        return total, ()

    pieces = weights, _columns(form, scale), _columns(form, bias)
    elements = ops.shape(weights)[1:4], ops.shape(keys)[4]
    nothing = ops.zeros((*elements[0], elements[1], *size), dtype_of_sums(keys))
    order = keys.shape[2]
    return _pixels(_over_neighbours(form, order, step, nothing, pieces)[0])


def spread(
    form: Form,
    weights: NeighbourWeights,
    queries: Queries,
    scale: Scales | None,
) -> Keys:
    """The derivative of the form with respect to the keys."""
    queries, scale = _planes(form, queries), _columns(form, scale)
    order = 1 if scale is None else scale.shape[2]
    batch, elements, *channels, height, width = ops.shape(queries)
    _, along = form.reach

    def step(
        some: Form, totals: Any, first: Any, weights: Any, scale: Any
    ) -> Any:
        """Adds what some neighbours get from the queries to their frames.

        Without totals it returns new frames.
        """
        down = some.reach[0]
        around = ((down, down), (along, along))
        size = height + down, width + along
        weights = ops.pad(ops.expand_dims(weights, 4), ((0, 0),) * 5 + around)
        padded = ops.pad(queries, ((0, 0),) * 4 + around)

        def add(found: list[Tensor], piece: Any) -> Any:
            """Adds the part of one query element to the frames."""
            weights, queries, scale = piece
            found = list(found)
            for n, place in enumerate(some.neighbours):
                i, j = down - place.row, along - place.column
                rows, columns = slice(i, i + size[0]), slice(j, j + size[1])
                term = in_full_precision(weights[n, ..., rows, columns])
                term = term * in_full_precision(queries[..., rows, columns])
                if scale is not None:
                    term = term * scale[n]
                found[place.frame] = found[place.frame] + term
            return found, ()

        shape = batch, order, *channels, *size
        nothing = [
            ops.zeros(shape, dtype_of_sums(queries)) for _ in range(form.frames)
        ]
        pieces: Any = _elements(weights, 2), _elements(padded, 1), scale
        if scale is not None:
            pieces = *pieces[:2], ops.moveaxis(scale, 1, 0)
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
    totals = None
    if _rows(form, order):
        totals = [ops.zeros(shape, dtype_of_sums(queries))]
    found, _ = _over_neighbours(form, order, step, totals, (weights, scale))
    return _pixels(ops.stack(found))


def affine_gradients(
    form: Form,
    weights: NeighbourWeights,
    queries: Queries,
    keys: Keys,
    scale: Scales | None,
    bias: Biases | None,
) -> list[Tensor]:
    """The derivatives with respect to the scale and the bias, if given.

    Terms are added up over the rows first, in loops that are vectorised along
    the columns, and then over images and columns: short sums lose few digits.
    """
    weighted, biased = scale is not None, bias is not None
    if not weighted and not biased:
        return []
    queries, keys = _planes(form, queries), _planes(form, keys)
    size = tuple(ops.shape(queries)[-2:])
    elements = keys.shape[2] if weighted else 0

    def step(some: Form, _: Any, first: Any, weights: Tensor) -> Any:
        """The derivatives of some neighbours.

        Each neighbour has one with respect to its map for every key element,
        and one with respect to its bias.
        """
        near = _rows_from(keys, first, some, size)
        # (batch, elements, heads, 1, height, width) for each neighbour.
        weights = ops.expand_dims(weights, axis=4)
        of_scale, of_bias = [], []
        for numbers in _some(some):
            terms = []
            for n in numbers:
                product = in_full_precision(weights[n])
                product = product * in_full_precision(queries)
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
                    of_scale.append(ops.stack(sums[:elements], axis=1))
                    sums = sums[elements:]
                of_bias += [sums.pop(0)] if biased else []
        return (), [ops.stack(found) for found in (of_scale, of_bias) if found]

    like = [in_full_precision(queries)] * (weighted + biased)
    order = keys.shape[2]
    _, found = _over_neighbours(form, order, step, (), (weights,), like)
    return [joined(x) for x in found]


derivatives = derivatives_from(scores, sums, spread, affine_gradients)


def _over_neighbours(
    form: Form,
    order: int,
    step: Callable[..., Any],
    total: Any,
    pieces: tuple[Float[Tensor, "neighbours ..."] | None, ...],
    like: Any = (),
) -> tuple[Any, Any]:
    """Runs a step for all neighbours, or for row after row of a large window.

    Args:
        form: the sum that is computed.
        order: how many key elements each neighbour has.
        step: takes the form of some neighbours, the total, the row of the keys
            that they start at, and the part of each piece that is theirs;
            returns the total, and a nest of tensors with the neighbours first.
        total: to start with.
        pieces: tensors with the neighbours along the first axis, or None.
        like: a nest of tensors with structure and dtypes of what is found.

    Returns:
        The last total, and what was found for all neighbours.
    """
    rows = _rows(form, order)
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


def _rows(form: Form, order: int) -> tuple[Form, int, int] | None:
    """How a window with many neighbours is cut into rows.

    Args:
        form: the sum that is computed.
        order: how many key elements each neighbour has.

    Returns:
        The form of one row, how many there are, and how far apart they are;
        None for a window that is written out as a whole.
    """
    if form.frames > 1 or dispatch.writes_window_out(form, order):
        return None
    rows = sorted({place.row for place in form.neighbours})
    columns = sorted({place.column for place in form.neighbours})
    one = tuple(Neighbour(0, 0, column) for column in columns)
    dilation = rows[-1] // max(len(rows) - 1, 1)
    return form._replace(neighbours=one), len(rows), dilation


def _rows_from(
    keys: KeyPlanes,
    first: Any,
    form: Form,
    size: tuple[Any, Any],
) -> Float[Tensor, "frames batch key_elements heads channels some columns"]:
    """The rows of the keys that neighbours of this form lie in."""
    if first is None:
        return keys
    *outer, _, columns = ops.shape(keys)
    shape = (*outer, size[0] + form.reach[0], columns)
    return backend.part_at(keys, (0,) * 5 + (first, 0), shape)


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
    keys: KeyPlanes,
    size: tuple[Any, Any],
    scale: Float[Tensor, "neighbours elements key_elements heads channels 1 1"]
    | None,
    bias: Float[Tensor, "neighbours elements heads channels 1 1"] | None,
) -> list[QueryPlanes]:
    """Some of the neighbours, as the query elements see them."""
    found = []
    for n in some:
        seen = _window(keys, form.neighbours[n], size)
        seen = in_full_precision(seen[:, None])
        # Each use takes its own slice: XLA would store one of all elements.
        parts = [
            seen[:, :, r] if scale is None else seen[:, :, r] * scale[n, :, r]
            for r in range(keys.shape[2])
        ]
        if bias is not None:
            parts.append(bias[n])
        found.append(sum(parts[1:], parts[0]))
    return found


def _channel_sums(
    terms: list[QueryPlanes],
) -> list[Float[Tensor, "batch elements heads height width"]]:
    """Sums over the channels of a head, a few at a time unless it has many."""
    channels = terms[0].shape[3]
    whole = channels >= dispatch.CHANNELS_AT_ONCE
    size = channels if whole else dispatch.CHANNELS_OF_SUM
    blocks = [
        backend.sums_together(
            [x[:, :, :, start : start + size] for x in terms], axis=3
        )
        for start in range(0, channels, size)
    ]
    return [sum(parts[1:], parts[0]) for parts in zip(*blocks, strict=True)]


def _planes(
    form: Form, x: Float[Tensor, "*outer height width elements all"]
) -> Float[Tensor, "*outer elements heads channels height width"]:
    """Moves rows and columns to the last axes, along which XLA vectorises."""
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
    form: Form, x: Float[Tensor, "neighbours *elements all"] | None
) -> Float[Tensor, "neighbours *elements heads channels 1 1"] | None:
    """Weights or a bias with the axes of planes, if there are any."""
    if x is None:
        return None
    return form.split(in_full_precision(x))[..., None, None]


def _window(
    keys: KeyPlanes, place: Neighbour, size: tuple[Any, Any]
) -> Float[Tensor, "batch key_elements heads channels height width"]:
    """The keys that every pixel sees at this place."""
    return keys[(place.frame, ..., *place.seen(size))]


def _elements(
    x: Float[Tensor, "*axes"], axis: int
) -> Float[Tensor, "elements ..."]:
    """Moves an axis to the front, and leaves one of size one in its place."""
    return ops.expand_dims(ops.moveaxis(x, axis, 0), axis + 1)
