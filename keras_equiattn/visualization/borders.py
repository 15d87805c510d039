"""Which positions of a map see nothing beyond the border of the image."""

from collections.abc import Callable
from typing import Any

import numpy as np

from keras_equiattn.graphs import has_graph
from keras_equiattn.graphs import nodes
from keras_equiattn.layers.attentive.convolution import BaseAttentiveConv2D
from keras_equiattn.layers.attentive.input_attention import InputAttention
from keras_equiattn.ops.geometry import before_and_after
from keras_equiattn.ops.geometry import effective_window
from keras_equiattn.ops.geometry import same_padding
from keras_equiattn.visualization.sites import Site

# For each row and for each column of a map whether it is inside: a position is
# inside when its row and its column are.
Inside = tuple[np.ndarray, np.ndarray]


def inside(
    model: Any, chain: list[Site], size: tuple[int, int], of_output: bool
) -> Inside:
    """Which positions of a site see nothing beyond the border of the image.

    At such a position, no convolution, window or pooling on the way, and none
    of the layer itself, has a pixel of padding in sight. Statistics of the
    whole image, such as a mean over all pixels, count for nothing.

    Args:
        model: the model whose graph holds the first site.
        chain: a site of the model; if that is a nested model a site in it
            comes next, and so on.
        size: height and width of the image.
        of_output: whether positions of the output of the layer are asked for,
            or those of its effective map.

    Raises:
        ValueError: if it is not known what an operation on the way sees.
    """
    x = np.ones(size[0], bool), np.ones(size[1], bool)
    for site in chain:
        found = _trace(model, x)
        model = site.operation
        x = _merged(model, _known(site.tensors, found))
    return _after(model, x) if of_output else _of_map(model, x)


def _trace(model: Any, start: Inside) -> dict[int, Inside | None]:
    """The inside positions of tensors; None for those without rows and columns.

    The keys are the identities of the tensors.
    """
    found: dict[int, Inside | None] = {
        id(tensor): start for tensor in model.inputs
    }
    for node in nodes(model):
        if node.is_input:
            continue
        before = _known(node.input_tensors, found)
        after = None
        if before and all(len(x.shape) > 3 for x in node.outputs):
            after = _after(node.operation, _merged(node.operation, before))
        found |= {id(tensor): after for tensor in node.outputs}
    return found


def _known(tensors: list[Any], found: dict[int, Inside | None]) -> list[Inside]:
    """The inside positions of those tensors that have rows and columns."""
    values = (found[id(tensor)] for tensor in tensors)
    return [value for value in values if value is not None]


def _merged(operation: Any, values: list[Inside]) -> Inside:
    """The positions that are inside in all of several maps of one size."""
    if len({(len(rows), len(columns)) for rows, columns in values}) != 1:
        raise ValueError(_unknown(operation))
    rows, columns = zip(*values, strict=True)
    return np.all(rows, axis=0), np.all(columns, axis=0)


def _after(operation: Any, x: Inside) -> Inside:
    """The inside positions of the output of an operation."""
    if has_graph(operation):
        found = _trace(operation, x)
        return _merged(operation, _known(operation.outputs, found))
    if isinstance(operation, InputAttention):
        return _of_map(operation, x)
    if isinstance(operation, BaseAttentiveConv2D):
        return _of_map(operation, x)
    window = getattr(operation, "window", None)
    if window is not None:
        return _each_axis(
            _around, x, window.size, window.strides, window.dilation_rate
        )
    name = type(operation).__name__
    if "Transpose" in name:
        raise ValueError(_unknown(operation))
    if "UpSampling" in name:
        return _each_axis(np.repeat, x, operation.size)
    if "Cropping" in name or "ZeroPadding" in name:
        by = getattr(operation, "cropping", None)
        if by is not None:
            return _each_axis(
                lambda n, ends: n[ends[0] : len(n) - ends[1]], x, by
            )
        return _each_axis(np.pad, x, operation.padding)
    return _slid(operation, x)


def _of_map(operation: Any, x: Inside) -> Inside:
    """The inside positions of the effective map of a layer with this input."""
    if isinstance(operation, BaseAttentiveConv2D):  # the map of responses
        x = _slid(operation, x)
    size = getattr(operation, "attention_kernel_size", 1)
    if getattr(operation, "attention", "channel") == "channel":
        size = 1
    dilation = getattr(operation, "attention_dilation_rate", 1)
    return _each_axis(_around, x, (size,) * 2, (1, 1), (dilation,) * 2)


def _slid(operation: Any, x: Inside) -> Inside:
    """The inside positions after an operation with a window, or with none."""
    size = getattr(operation, "kernel_size", None)
    size = size or getattr(operation, "pool_size", None)
    if size is None:
        return x
    strides = getattr(operation, "strides", None) or (1, 1)
    dilation = getattr(operation, "dilation_rate", None) or (1, 1)
    padding = getattr(operation, "padding", "valid")

    def slide(
        n: np.ndarray, window: int, stride: int, dilation: int
    ) -> np.ndarray:
        added = 0
        if padding == "same":
            added = same_padding(len(n), window, stride, dilation)
        padded = np.pad(n, before_and_after(added))
        reach = effective_window(window, dilation)
        starts = range(0, len(padded) - reach + 1, stride)
        return np.array(
            [padded[i : i + reach : dilation].all() for i in starts]
        )

    return _each_axis(slide, x, size, strides, dilation)


def _around(
    n: np.ndarray, window: int, stride: int, dilation: int
) -> np.ndarray:
    """The inside positions for windows centred on each `stride`-th position."""
    reach = window // 2 * dilation
    padded = np.pad(n, reach)
    return np.array(
        [
            padded[i : i + 2 * reach + 1 : dilation].all()
            for i in range(0, len(n), stride)
        ]
    )


def _each_axis(
    function: Callable[..., np.ndarray], x: Inside, *arguments: Any
) -> Inside:
    """Applies a function to rows and columns, each with its own arguments."""
    pairs = (np.broadcast_to(a, 2) if np.ndim(a) == 0 else a for a in arguments)
    rows, columns = zip(*(pair[:2] for pair in pairs), strict=True)
    return function(x[0], *rows), function(x[1], *columns)


def _unknown(operation: Any) -> str:
    return (
        f"It is not known what '{operation.name}' sees of the image, and so "
        'which positions see beyond its border: pass `border="keep"`.'
    )
