"""Attentive convolution: attention on responses before they are summed.

A convolution sums the responses of its filter on every input channel and input
group element. Here each of them is weighted first. They are `order * channels`
times as many numbers as the output, so they are never all held:
`chunked` says how.
"""

from collections.abc import Callable
from typing import Any
from typing import NamedTuple

from keras import ops

from keras_equiattn import _checks
from keras_equiattn import config
from keras_equiattn import groups
from keras_equiattn.groups import Group
from keras_equiattn.ops._arguments import checked
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Shape
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.backend import with_an_image
from keras_equiattn.ops.geometry import FilterWindow
from keras_equiattn.ops.group.convolution import group_conv
from keras_equiattn.ops.group.convolution import lifting_conv
from keras_equiattn.ops.group.kernels import kernel_orbit
from keras_equiattn.ops.numerics import dtype_name
from keras_equiattn.ops.numerics import in_full_precision
from keras_equiattn.ops.numerics import mean
from keras_equiattn.ops.responses import chunked
from keras_equiattn.ops.responses import dispatch
from keras_equiattn.ops.responses.reference import responses_held
from keras_equiattn.ops.responses.spec import AllPlanes
from keras_equiattn.ops.responses.spec import AttentionSpec
from keras_equiattn.ops.responses.spec import Weights


class AttentionKernels(NamedTuple):
    """Weights of the attention of a convolution on a group.

    Attributes:
        channel_1: the first layer of channel attention, or None. For images,
            weights have no group axis.
        channel_2: the second layer of channel attention, or None.
        spatial: the filters of spatial attention, which see the mean and the
            maximum over the channels; or None.
    """

    channel_1: Float[Tensor, "*order channels hidden filters"] | None = None
    channel_2: Float[Tensor, "*order hidden channels filters"] | None = None
    spatial: Float[Tensor, "rows columns *order 2 filters"] | None = None

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

    Raises:
        ValueError: for shapes that do not fit, and for bad options.
        TypeError: for tensors that do not hold floating point numbers.
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
        **options: `strides` (1, 1), `padding` "valid" (the default) or "same",
            and `dilation_rate` (1, 1) of the convolution;
            `attention_dilation_rate`, the dilation of the spatial kernel, 1;
            `filter_basis`, "pixel" (the default) or "steerable", see
            `kernel_orbit`; `chunk_size`, "auto" unless it is given, see
            `layers.AttentiveGroupConv2D`.

    Returns:
        A feature map on the group.

    Raises:
        ValueError: for shapes that do not fit, and for bad options.
        TypeError: for tensors that do not hold floating point numbers.
    """
    return _attentive(group_conv, x, kernel, attention, group, options)


def _attentive(
    convolve: Callable[..., Tensor],
    x: Float[Tensor, "batch height width *order channels"],
    kernel: Float[Tensor, "rows columns *order channels filters"],
    attention: AttentionKernels,
    group: str | Group,
    options: dict[str, Any],
) -> Float[Tensor, "batch new_height new_width order filters"]:
    """The convolution without what attention takes away."""
    dtype = dtype_name(x)
    names = ("strides", "padding", "dilation_rate", "filter_basis")
    plain = {name: options[name] for name in names if name in options}
    count = x.shape[0]
    x = with_an_image(x)
    attended = attended_sum(x, kernel, attention, group, **options)
    # The difference can be a thousandth of the terms, beyond half precision.
    x, kernel = in_full_precision(x), in_full_precision(kernel)
    y = ops.cast(convolve(x, kernel, group, **plain) - attended, dtype)
    return y[:0] if count == 0 else y


def attended_sum(
    x: Float[Tensor, "batch height width *order channels"],
    kernel: Float[Tensor, "rows columns *order channels filters"],
    attention: AttentionKernels,
    group: str | Group,
    *,
    chunk_size: int | str | None = "auto",
    **options: Any,
) -> Float[Tensor, "batch new_height new_width order filters"]:
    """The part that attention takes away: `sum_jc aX aC f`, float32 at least.

    Args:
        x, kernel, attention, group: see `attentive_group_conv`.
        chunk_size: how many of the `order * filters` output channels are
            computed at a time, at most; the result does not depend on it.
            "auto" chooses it so that what one step holds, beside the input and
            its gradient, stays below 256 MiB, and takes 1 where that does not
            suffice; where batch or size are not known it assumes 128 images of
            64 x 64 pixels. None holds all responses: its gradient can be
            differentiated again on every backend, the gradient with chunks
            only under JAX. Where the maximum of several channels ties, the
            gradient goes to the first; with None they share it.
        **options: the other arguments of `attentive_group_conv`.

    Raises:
        ValueError: for a bad `padding` or `chunk_size`, or if there are no
            attention weights.
    """
    check_chunk_size(chunk_size)
    spec, planes, weights, known = _prepare(
        x, kernel, attention, group, **options
    )
    order, filters = groups.get(group).order, kernel.shape[-1]
    if chunk_size is None or not config.is_recompute_enabled():
        y = responses_held(spec, planes, weights)
        y = ops.reshape(y, (*ops.shape(y)[:-1], order, filters))
    else:
        chunks = _chunks(weights, chunk_size, known, planes)
        y = chunked.attended_sum(spec, planes, chunks)
        y = _joined(y[None], order, filters)[0]
    # TensorFlow loses static sizes where it compiled one function for several.
    size = (n or ops.shape(y)[i] for i, n in enumerate(known, 1))
    return ops.reshape(y, (ops.shape(x)[0], *size, order, filters))


def response_attention(
    x: Float[Tensor, "batch height width *order channels"],
    kernel: Float[Tensor, "rows columns *order channels filters"],
    attention: AttentionKernels,
    group: str | Group,
    *,
    query: tuple[int, int] | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """The attention as applied: `1 - alpha`. No gradient passes through it.

    Args:
        x, kernel, attention, group: see `attentive_group_conv`.
        query: row and column of an output pixel; None for all.
        **options: the others of `attentive_group_conv`, but `chunk_size`.

    Returns:
        By name, with `h` the output and `j` the input group element, which a
        lifting convolution does not have:

        - "channel" `(batch, h[, j], channels, filters)`: `1 - aC`, unless
          there is spatial attention alone;
        - "spatial" `(batch, new_height, new_width, h[, j], filters)`:
          `1 - aX`, unless there is channel attention alone;
        - "effective": without a query the mean of `1 - aX aC` over `j`,
          channels and filters, `(batch, new_height, new_width, h, 1)`; with
          a query `1 - aX aC` at that pixel, `(batch, h[, j], channels,
          filters)`.

    Raises:
        ValueError: for a bad `padding`, or if there are no attention weights.
    """
    spec, planes, weights, known = _prepare(
        x, kernel, attention, group, **options
    )
    if x.shape[0] == 0:
        maps = response_attention(
            with_an_image(x), kernel, attention, group, query=query, **options
        )
        return {name: of_image[:0] for name, of_image in maps.items()}
    order, filters = groups.get(group).order, kernel.shape[-1]
    chunks = _chunks(weights, "auto", known, planes)
    alpha, gate = chunked.attention_maps(spec, planes, chunks)
    # (j, c, b, h, o) to (b, h, j, c, o).
    alpha = _joined(alpha, order, filters)
    alpha = ops.transpose(alpha, (2, 3, 0, 1, 4))
    # (j, b, x, y, h, o) to (b, x, y, h, j, o).
    gate = _joined(gate, order, filters)
    gate = ops.transpose(gate, (1, 2, 3, 4, 0, 5))
    dtype = dtype_name(x)

    def remaining(attended: Tensor, axis: int | None) -> Tensor:
        """`1 - attended`, without the input group elements of an image."""
        if axis is not None and len(x.shape) == 4:
            attended = ops.squeeze(attended, axis)
        return ops.cast(1 - attended, dtype)

    maps = {}
    if spec.has_channel:
        maps["channel"] = remaining(alpha, 2)
    if spec.has_spatial:
        maps["spatial"] = remaining(gate, 4)
    if query is None:
        both = ops.einsum("bxyhjo,bhjo->bxyh", gate, mean(alpha, 3))
        both = both / (planes.shape[0] * filters)
        maps["effective"] = remaining(both[..., None], None)
    else:
        row, column = _checks.place(query, "query", gate.shape[1:3])
        both = gate[:, row, column, :, :, None] * alpha
        maps["effective"] = remaining(both, 2)
    return maps


@checked(
    attention_channel_1="*order channels hidden filters",
    attention_channel_2="*order hidden channels filters",
    attention_spatial="seen_rows seen_columns *order 2 filters",
)
def _prepare(
    x: Float[Tensor, "batch height width *order channels"],
    kernel: Float[Tensor, "rows columns *order channels filters"],
    attention: AttentionKernels,
    group: str | Group,
    *,
    strides: tuple[int, int] = (1, 1),
    padding: str = "valid",
    dilation_rate: tuple[int, int] = (1, 1),
    attention_dilation_rate: int = 1,
    filter_basis: str = "pixel",
) -> tuple[AttentionSpec, AllPlanes, Weights, Shape]:
    """Prepares the arguments of a convolution with attention on its responses.

    Returns:
        The spec; the padded input; the orbits of all weights, with output
        elements and filters on the last axis; height and width of the output,
        as far as they are known.
    """
    _check(attention, padding)
    window = FilterWindow(tuple(kernel.shape[:2]), strides, dilation_rate)
    known = tuple(x.shape)[1:3]
    group, on_group = groups.get(group), len(x.shape) == 5
    if not on_group:
        x = ops.expand_dims(x, 3)
    pads = ((0, 0), (0, 0), (0, 0), *window.padding(known, padding))
    planes = ops.pad(ops.transpose(x, (3, 4, 0, 1, 2)), pads)
    first, second, spatial = attention.map(in_full_precision)

    def orbit(weight: Tensor) -> Tensor:
        """`(h, rows, columns, j, ..., o)` to `(j, rows, columns, ..., n)`."""
        moved = kernel_orbit(
            weight, group, group_axis=on_group, filter_basis=filter_basis
        )
        if not on_group:
            moved = ops.expand_dims(moved, 3)
        rank = len(moved.shape)
        moved = ops.transpose(
            moved, (3, 1, 2, *range(4, rank - 1), 0, rank - 1)
        )
        filters = group.order * kernel.shape[-1]
        return ops.reshape(moved, (*moved.shape[:-2], filters))

    kernels = orbit(kernel)  # (j, rows, columns, c, n)
    kernels = ops.reshape(kernels, (planes.shape[0], -1, *kernels.shape[3:]))
    weights = {"kernel": ops.transpose(kernels, (0, 2, 1, 3))}
    if first is not None:
        # Not by indices: OpenVINO then computes a product of it wrongly.
        for name, weight in (("first", first), ("second", second)):
            moved = orbit(ops.expand_dims(weight, (0, 1)))
            weights[name] = ops.squeeze(moved, (1, 2))
    if spatial is not None:
        weights["spatial"] = orbit(spatial)
    spec = AttentionSpec(
        window,
        has_channel=first is not None,
        has_spatial=spatial is not None,
        attention_dilation_rate=attention_dilation_rate,
    )
    return spec, planes, weights, window.output_size(known, padding)


def _chunks(
    weights: Weights, wanted: int | str, size: Shape, planes: AllPlanes
) -> Weights:
    """Weights with their filters in chunks `(elements, chunks, ...)`.

    Chunks are of equal size; zeros fill the last one.
    """
    filters = weights["kernel"].shape[-1]
    chunk = dispatch.chunk_size(wanted, filters, size, planes)
    count = -(-filters // chunk)
    found = {}
    for name, weight in weights.items():
        inner = len(weight.shape) - 1
        pads = [(0, 0)] * inner + [(0, count * chunk - filters)]
        split = ops.reshape(
            ops.pad(weight, pads), (*weight.shape[:-1], count, chunk)
        )
        found[name] = ops.moveaxis(split, inner, 1)
    return found


def _joined(
    y: Float[Tensor, "elements chunks *axes size"], order: int, filters: int
) -> Float[Tensor, "elements *axes {order} {filters}"]:
    """Chunks as output elements and filters again."""
    y = ops.moveaxis(y, 1, -2)
    y = ops.reshape(y, (*ops.shape(y)[:-2], -1))[..., : order * filters]
    return ops.reshape(y, (*ops.shape(y)[:-1], order, filters))


def _check(attention: AttentionKernels, padding: str) -> None:
    """Refuses half of channel attention, or none at all."""
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
