"""Attentive convolution: attention on responses before they are summed.

A convolution sums the responses of its filter on every input channel and input
group element. Here each of them is weighted first. They are `order * channels`
times as many numbers as the output, so they are never all held:
`chunked` says how.
"""

from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import keras
from keras import ops

from keras_equiattn import _checks
from keras_equiattn import config
from keras_equiattn import groups
from keras_equiattn.groups import Group
from keras_equiattn.ops._arguments import checked
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.geometry import FilterWindow
from keras_equiattn.ops.group.convolution import group_conv
from keras_equiattn.ops.group.convolution import lifting_conv
from keras_equiattn.ops.group.kernels import kernel_orbit
from keras_equiattn.ops.numerics import in_full_precision
from keras_equiattn.ops.numerics import mean
from keras_equiattn.ops.responses import chunked
from keras_equiattn.ops.responses import dispatch
from keras_equiattn.ops.responses.form import Form
from keras_equiattn.ops.responses.form import Weights
from keras_equiattn.ops.responses.reference import responses_held


class AttentionKernels(NamedTuple):
    """Weights of the attention of a convolution on a group.

    Attributes:
        channel_1: `([order,] channels, hidden, filters)` or None.
        channel_2: `([order,] hidden, channels, filters)` or None.
        spatial: `(rows, columns, [order,] 2, filters)` for (mean, maximum),
            or None.
    """

    channel_1: Tensor | None = None
    channel_2: Tensor | None = None
    spatial: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> "AttentionKernels":
        """A function applied to the weights that there are."""
        return AttentionKernels(
            *(None if w is None else function(w) for w in self)
        )


@checked(
    attention_channel_1="channels hidden filters",
    attention_channel_2="hidden channels filters",
    attention_spatial="seen_rows seen_columns 2 filters",
)
def attentive_lifting_conv(
    x: Float[Tensor, "batch height width channels"],
    kernel: Float[Tensor, "rows columns channels filters"],
    attention: AttentionKernels,
    group: str | Group,
    **options: Any,
) -> Float[Tensor, "batch new_height new_width order filters"]:
    """Lifting convolution with attention on the responses.

    See `attentive_group_conv`; here there is no sum over `j`, and the channel
    weights do not depend on `h`.
    """
    return _attentive(lifting_conv, x, kernel, attention, group, options)


@checked(
    attention_channel_1="order channels hidden filters",
    attention_channel_2="order hidden channels filters",
    attention_spatial="seen_rows seen_columns order 2 filters",
)
def attentive_group_conv(
    x: Float[Tensor, "batch height width order channels"],
    kernel: Float[Tensor, "rows columns order channels filters"],
    attention: AttentionKernels,
    group: str | Group,
    **options: Any,
) -> Float[Tensor, "batch new_height new_width order filters"]:
    """Group convolution with attention on the responses.

    With the responses `f(x, h, j, c, o) = sum_d in(x + d, j, c)
    K_o(h^-1 d, h^-1 j, c)` it is `y(x, h, o) = sum_jc (1 - aX aC) f`. Channel
    attention `aC(h, j, c, o)` comes from mean and maximum of `f` over space,
    spatial attention `aX(x, h, j, o)` from mean and maximum of `aC f` over the
    channels. Weights are transformed with `h` like the kernel.

    Args:
        x: feature maps on the group.
        kernel: filters on the group.
        attention: weights of the attention.
        group: a group or its name.
        **options: `strides`, `padding`, `dilation_rate` of the convolution,
            `attention_dilation_rate`, `chunk_size`, see `attended_sum`.

    Returns:
        A feature map on the group.
    """
    return _attentive(group_conv, x, kernel, attention, group, options)


def _attentive(
    convolve: Callable[..., Tensor],
    x: Tensor,
    kernel: Tensor,
    attention: AttentionKernels,
    group: str | Group,
    options: dict[str, Any],
) -> Tensor:
    """The convolution without what attention takes away."""
    dtype = keras.backend.standardize_dtype(x.dtype)
    # The difference can be a thousandth of the terms: too few digits in half.
    x, kernel = in_full_precision(x), in_full_precision(kernel)
    attention = attention.map(in_full_precision)
    names = ("strides", "padding", "dilation_rate")
    plain = {name: options[name] for name in names if name in options}
    y = convolve(x, kernel, group, **plain)
    y = y - attended_sum(x, kernel, attention, group, **options)
    return ops.cast(y, dtype)


@checked(
    attention_channel_1="*order channels hidden filters",
    attention_channel_2="*order hidden channels filters",
    attention_spatial="seen_rows seen_columns *order 2 filters",
)
def attended_sum(
    x: Float[Tensor, "batch height width *order channels"],
    kernel: Float[Tensor, "rows columns *order channels filters"],
    attention: AttentionKernels,
    group: str | Group,
    *,
    strides: tuple[int, int] = (1, 1),
    padding: str = "valid",
    dilation_rate: tuple[int, int] = (1, 1),
    attention_dilation_rate: int = 1,
    chunk_size: int | str | None = "auto",
) -> Float[Tensor, "batch new_height new_width order filters"]:
    """What attention takes away: `sum_jc aX aC f`.

    Args:
        x, kernel, attention, group: see `attentive_group_conv`.
        strides, padding, dilation_rate: of the convolution.
        attention_dilation_rate: of the spatial kernel.
        chunk_size: how many of the `order * filters` output channels are
            computed at a time: up to this many, the same result for every
            number. "auto" chooses it so that what one step holds, beside the
            input and its gradient, stays below 256 MB, or 1 where that does
            not suffice; where batch or size are not known it counts with 128
            images of 64 x 64 pixels. None holds all responses. Its gradient
            can be differentiated again on every backend, that of the others
            only under JAX. Where the maximum of several channels ties, the
            gradient goes to the first; with None they share it.

    Returns:
        A feature map on the group.

    Raises:
        ValueError: for a bad `padding` or `chunk_size`, or if there are no
            attention weights.
    """
    _check(attention, padding)
    check_chunk_size(chunk_size)
    dtype = keras.backend.standardize_dtype(x.dtype)
    window = FilterWindow(tuple(kernel.shape[:2]), strides, dilation_rate)
    form = _form(window, attention, attention_dilation_rate)
    planes, weights = _prepare(x, kernel, attention, group, window, padding)
    # From `x`: what was compiled for several sizes has forgotten them.
    known = window.output_size(tuple(x.shape)[1:3], padding)
    filters = weights["kernel"].shape[-1]
    if chunk_size is None or not config.is_recompute_enabled():
        y = responses_held(form, planes, weights)
    else:
        chunk = dispatch.chunk_size(chunk_size, filters, known, planes)
        chunks = {name: _split(w, chunk) for name, w in weights.items()}
        y = chunked.attended_sum(form, planes, chunks)
        y = ops.transpose(y, (1, 2, 3, 0, 4))
        y = ops.reshape(y, (*ops.shape(y)[:3], -1))[..., :filters]
    size = (n or ops.shape(y)[i] for i, n in enumerate(known, 1))
    shape = ops.shape(x)[0], *size, groups.get(group).order, kernel.shape[-1]
    return ops.cast(ops.reshape(y, shape), dtype)


@checked(
    attention_channel_1="*order channels hidden filters",
    attention_channel_2="*order hidden channels filters",
    attention_spatial="seen_rows seen_columns *order 2 filters",
)
def response_attention(
    x: Float[Tensor, "batch height width *order channels"],
    kernel: Float[Tensor, "rows columns *order channels filters"],
    attention: AttentionKernels,
    group: str | Group,
    *,
    strides: tuple[int, int] = (1, 1),
    padding: str = "valid",
    dilation_rate: tuple[int, int] = (1, 1),
    attention_dilation_rate: int = 1,
    query: tuple[int, int] | None = None,
) -> dict[str, Tensor]:
    """The attention as applied: `1 - alpha`. No gradient passes through it.

    Args:
        x, kernel, attention, group: see `attentive_group_conv`.
        strides, padding, dilation_rate: of the convolution.
        attention_dilation_rate: of the spatial kernel.
        query: row and column of an output; None for all.

    Returns:
        By name, with `h` the output and `j` the input group element, which a
        lifting convolution does not have:

        - "channel" `(batch, h[, j], channels, filters)`: `1 - aC`, unless
          there is spatial attention alone;
        - "spatial" `(batch, new_height, new_width, h[, j], filters)`:
          `1 - aX`, unless there is channel attention alone;
        - "effective": without a query the mean of `1 - aX aC` over `j`,
          channels and filters, `(batch, new_height, new_width, h, 1)`; with
          a query all of it there, `(batch, h[, j], channels, filters)`.

    Raises:
        ValueError: for a bad `padding`, or if there are no attention weights.
    """
    _check(attention, padding)
    window = FilterWindow(tuple(kernel.shape[:2]), strides, dilation_rate)
    form = _form(window, attention, attention_dilation_rate)
    planes, weights = _prepare(x, kernel, attention, group, window, padding)
    known = window.output_size(tuple(x.shape)[1:3], padding)
    count = weights["kernel"].shape[-1]
    chunk = dispatch.chunk_size("auto", count, known, planes)
    chunks = {name: _split(w, chunk) for name, w in weights.items()}
    alpha, gate = chunked.attention_maps(form, planes, chunks)
    inputs, channels = planes.shape[:2]
    order, filters = groups.get(group).order, kernel.shape[-1]
    batch, size = ops.shape(planes)[2], ops.shape(gate)[3:5]
    # (j, chunks, c, b, n) to (b, h, j, c, o).
    alpha = ops.transpose(alpha, (3, 0, 2, 1, 4))
    alpha = ops.reshape(alpha, (batch, inputs, channels, -1))[..., :count]
    alpha = ops.reshape(alpha, (batch, inputs, channels, order, filters))
    alpha = ops.transpose(alpha, (0, 3, 1, 2, 4))
    # (j, chunks, b, x, y, n) to (b, x, y, h, j, o).
    gate = ops.transpose(gate, (2, 3, 4, 0, 1, 5))
    gate = ops.reshape(gate, (batch, *size, inputs, -1))[..., :count]
    gate = ops.reshape(gate, (batch, *size, inputs, order, filters))
    gate = ops.transpose(gate, (0, 1, 2, 4, 3, 5))
    if query is None:
        both = ops.einsum("bxyhjo,bhjo->bxyh", gate, mean(alpha, 3))
        effective = (1 - both / (inputs * filters))[..., None]
    else:
        row, column = _checks.place(query, "query", gate.shape[1:3])
        effective = 1 - gate[:, row, column, :, :, None] * alpha
    maps = {}
    if form.has_channel:
        maps["channel"] = 1 - alpha
    if form.has_spatial:
        maps["spatial"] = 1 - gate
    maps["effective"] = effective
    if len(x.shape) == 4:  # no input group element
        axes = {"channel": 2, "spatial": 4}
        if query is not None:
            axes["effective"] = 2
        for name, axis in axes.items():
            if name in maps:
                maps[name] = ops.squeeze(maps[name], axis)
    dtype = keras.backend.standardize_dtype(x.dtype)
    return {name: ops.cast(value, dtype) for name, value in maps.items()}


def _form(
    window: FilterWindow, attention: AttentionKernels, dilation_rate: int
) -> Form:
    """What these weights of attention ask for."""
    return Form(
        window,
        has_channel=attention.channel_1 is not None,
        has_spatial=attention.spatial is not None,
        attention_dilation_rate=dilation_rate,
    )


def _prepare(
    x: Tensor,
    kernel: Tensor,
    attention: AttentionKernels,
    group: str | Group,
    window: FilterWindow,
    padding: str,
) -> tuple[Tensor, Weights]:
    """Padded planes, and the orbits of all weights with `(h, o)` as `n`."""
    group = groups.get(group)
    on_group = len(x.shape) == 5
    if not on_group:
        x = ops.expand_dims(x, 3)
    # Equal maxima and sums over pixels want digits.
    x, kernel = in_full_precision(x), in_full_precision(kernel)
    attention = attention.map(in_full_precision)
    pads = window.padding(tuple(x.shape)[1:3], padding)
    planes = ops.pad(
        ops.transpose(x, (3, 4, 0, 1, 2)), ((0, 0), (0, 0), (0, 0), *pads)
    )

    def orbit(weight: Tensor) -> Tensor:
        """`(h, rows, columns, j, ..., o)` to `(j, rows, columns, ..., n)`."""
        moved = kernel_orbit(weight, group, group_axis=on_group)
        if not on_group:
            moved = ops.expand_dims(moved, 3)
        rank = len(moved.shape)
        order = (3, 1, 2, *range(4, rank - 1), 0, rank - 1)
        moved = ops.transpose(moved, order)
        return ops.reshape(
            moved, (*moved.shape[:-2], group.order * kernel.shape[-1])
        )

    kernels = orbit(kernel)  # (j, rows, columns, c, n)
    j, rows, columns, channels, n = kernels.shape
    kernels = ops.reshape(kernels, (j, rows * columns, channels, n))
    weights = {"kernel": ops.transpose(kernels, (0, 2, 1, 3))}
    if attention.channel_1 is not None:
        first, second = attention.channel_1, attention.channel_2
        # Not by indices: OpenVINO then computes a product of it wrongly.
        for name, weight in (("first", first), ("second", second)):
            moved = orbit(ops.expand_dims(weight, (0, 1)))
            weights[name] = ops.squeeze(moved, (1, 2))
    if attention.spatial is not None:
        weights["spatial"] = orbit(attention.spatial)
    return planes, weights


def _split(
    weight: Float[Tensor, "elements *axes filters"], size: int
) -> Float[Tensor, "elements chunks *axes size"]:
    """Filters in chunks of equal size; zeros fill the last one."""
    *axes, filters = weight.shape
    count = -(-filters // size)
    if count * size > filters:
        pads = [(0, 0)] * len(axes) + [(0, count * size - filters)]
        weight = ops.pad(weight, pads)
    split = ops.reshape(weight, (*axes, count, size))
    rank = len(axes)
    return ops.transpose(split, (0, rank, *range(1, rank), rank + 1))


def _check(attention: AttentionKernels, padding: str) -> None:
    both = attention.channel_1 is None, attention.channel_2 is None
    if any(both) and not all(both):
        raise ValueError(
            "`attention` must have both `channel_1` and `channel_2`, or none "
            "of them."
        )
    if all(both) and attention.spatial is None:
        raise ValueError("`attention` has no weights: all three are None.")
    _checks.choice(padding, "padding", ("valid", "same"))


def check_chunk_size(value: Any) -> int | str | None:
    """A positive integer, "auto" or None."""
    if value is None or (isinstance(value, str) and value == "auto"):
        return value
    try:
        return _checks.integer(value, "chunk_size")
    except ValueError:
        raise ValueError(
            "`chunk_size` must be a positive integer, 'auto' or None. "
            f"Received: {value!r}"
        ) from None
