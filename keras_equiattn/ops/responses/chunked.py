"""Attentive convolution without holding its responses.

The responses of a convolution, one for each pair of input and output channel
and of group elements, are too many to be stored: about 100 GB for 128 CIFAR
images in the p4 All-CNN. Only their statistics are needed, so here they are
computed for a few input channels at a time, reduced at once, and computed again
in the backward pass.

Axes: `j` input group elements, `c` input channels, `b` batch, `n` output
channels (group elements times filters) of one chunk, `t` window positions.
"""

import dataclasses
import functools
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Shape
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.exactness import effective_window
from keras_equiattn.ops.exactness import output_size
from keras_equiattn.ops.numerics import mean
from keras_equiattn.ops.responses.depthwise import depthwise_gradients
from keras_equiattn.ops.responses.depthwise import depthwise_native
from keras_equiattn.ops.responses.depthwise import depthwise_sum

Weights = dict[str, Tensor]

# Input channels whose responses XLA computes in one loop.
TOGETHER = 8


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Where the windows of a convolution lie on a padded plane."""

    kernel_size: tuple[int, int]
    strides: tuple[int, int] = (1, 1)
    dilation_rate: tuple[int, int] = (1, 1)
    attention_dilation_rate: int = 1

    def output_size(self, size: Shape, padding: str) -> list[int | None]:
        """Height and width of the output for an input that is not padded."""
        return [
            output_size(n, window, stride, dilation, padding)
            for n, window, stride, dilation in self._axes(size)
        ]

    def padding(self, size: Shape, padding: str) -> list[tuple[int, int]]:
        """Zeros before and after along both axes, as Keras pads."""
        if padding == "valid":
            return [(0, 0), (0, 0)]
        pads = []
        for n, window, stride, dilation in self._axes(size):
            extent = effective_window(window, dilation)
            if stride == 1:
                total = extent - 1
            elif n is None:
                raise ValueError(
                    "Attention on responses needs a known height and width "
                    "where padding is 'same' and strides are above 1. "
                    f"Received: size {tuple(size)}"
                )
            else:
                total = (-(-n // stride) - 1) * stride + extent - n
            pads.append((max(total, 0) // 2, -(-max(total, 0) // 2)))
        return pads

    def _axes(self, size: Shape) -> Any:
        return zip(
            size,
            self.kernel_size,
            self.strides,
            self.dilation_rate,
            strict=True,
        )

    def windows(self, plane: Tensor) -> Tensor:
        """`(..., height, width)` to `(..., t, new_height, new_width)`."""
        return ops.stack(self.positions(plane), axis=-3)

    def positions(self, plane: Tensor) -> list[Tensor]:
        """What each position of the window sees, `(..., new_height,
        new_width)` for each of `t`.
        """
        ends = [
            dilation * (size - 1)
            for size, dilation in zip(
                self.kernel_size, self.dilation_rate, strict=True
            )
        ]
        pieces = []
        for u in range(self.kernel_size[0]):
            for v in range(self.kernel_size[1]):
                starts = u * self.dilation_rate[0], v * self.dilation_rate[1]
                rows, columns = (
                    slice(start, (start - end) or None, stride)
                    for start, end, stride in zip(
                        starts, ends, self.strides, strict=True
                    )
                )
                pieces.append(plane[..., rows, columns])
        return pieces


def channel_attention(
    means: Tensor, maxima: Tensor, first: Tensor, second: Tensor
) -> Tensor:
    """A two-layer perceptron over the input channels, for every `n` alone.

    Args:
        means, maxima: statistics of the responses `(c, b, n)`.
        first, second: weights `(c, hidden, n)` and `(hidden, c, n)`.

    Returns:
        Values in (0, 1), `(c, b, n)`.
    """
    scores = 0.0
    for statistic in (means, maxima):
        hidden = ops.relu(ops.einsum("cbn,ckn->kbn", statistic, first))
        scores = scores + ops.einsum("kbn,kcn->cbn", hidden, second)
    return ops.sigmoid(scores)


def spatial_attention(
    means: Tensor, maxima: Tensor, kernel: Tensor, dilation_rate: int
) -> Tensor:
    """One filter on mean and maximum over the channels, for every `n` alone.

    Args:
        means, maxima: `(b, height, width, n)`.
        kernel: `(rows, columns, 2, n)`.
        dilation_rate: of the kernel.

    Returns:
        Values in (0, 1) like `means`.
    """
    statistics = ops.stack([means, maxima], axis=3)
    return ops.sigmoid(depthwise_native(statistics, kernel, dilation_rate))


def attended_sum(
    planes: Tensor, weights: Weights, geometry: Geometry, together: int = 1
) -> Tensor:
    """Sum of the attended responses over `j` and `c`: of `aX aC f`.

    Args:
        planes: padded input `(j, c, b, height, width)`.
        weights: by name, each with leading axes `(j, chunks)`: `kernel (c, t,
            n)`; for channel attention `first (c, hidden, n)` and `second
            (hidden, c, n)`; for spatial attention `spatial (rows, columns, 2,
            n)`.
        geometry: of the convolution.
        together: how many input channels are seen at a time.

    Returns:
        `(chunks, b, new_height, new_width, n)`.
    """
    names = tuple(weights)
    compute = _attended_sum(names, geometry, together)
    return compute(planes, *weights.values())


def attention_maps(
    planes: Tensor, weights: Weights, geometry: Geometry, together: int = 1
) -> tuple[Tensor, Tensor]:
    """Channel attention `(j, chunks, c, b, n)`, ones where there is none, and
    spatial attention `(j, chunks, b, new_height, new_width, n)`, likewise.

    Arguments as in `attended_sum`. No gradient passes through the result.
    """
    names = tuple(weights)
    compute = _attention_maps(names, geometry, together)
    return compute(planes, *weights.values())


@functools.lru_cache(maxsize=256)
def _attended_sum(
    names: tuple[str, ...], geometry: Geometry, together: int
) -> Any:
    def forward(planes: Tensor, *weights: Tensor) -> Any:
        named = dict(zip(names, weights, strict=True))
        return _forward(planes, named, geometry, together)

    def backward(arguments: Any, peaks: Tensor, upstream: Tensor) -> Any:
        planes, *weights = arguments
        named = dict(zip(names, weights, strict=True))
        d_planes, d_weights = _backward(
            planes, named, peaks, upstream, geometry, together
        )
        return (d_planes, *(d_weights[name] for name in names))

    return backend.custom_vjp(forward, backward, "chunk_size=None")


@functools.lru_cache(maxsize=256)
def _attention_maps(
    names: tuple[str, ...], geometry: Geometry, together: int
) -> Any:
    def maps(planes: Tensor, *weights: Tensor) -> Any:
        def element(carry: Any, piece: Any) -> Any:
            planes, weights = piece

            def chunk(carry: Any, weights: Weights) -> Any:
                seen = _Chunk(planes, weights, geometry, together)
                return carry, seen.maps()

            return carry, backend.scan(chunk, (), weights, (planes, planes))[1]

        named = dict(zip(names, weights, strict=True))
        return backend.scan(element, (), (planes, named), (planes, planes))[1]

    return backend.without_gradient(maps)


def _forward(
    planes: Tensor, weights: Weights, geometry: Geometry, together: int
) -> Any:
    """The sum, and the maxima of the responses `(j, chunks, c, b, n)`."""

    def element(total: Tensor, piece: Any) -> Any:
        planes, weights = piece

        def chunk(carry: Any, weights: Weights) -> Any:
            seen = _Chunk(planes, weights, geometry, together)
            peaks = seen.peaks()
            total, maximum, _, _ = seen.reduce(peaks)
            return carry, (total * seen.gate(total, maximum), peaks)

        _, (attended, peaks) = backend.scan(
            chunk, (), weights, (planes, planes)
        )
        return total + attended, peaks

    chunks, n = weights["kernel"].shape[1], weights["kernel"].shape[-1]
    like = geometry.positions(planes[0, 0])[0][..., None]
    zeros = ops.zeros_like(like) + ops.zeros((chunks, 1, 1, 1, n), like.dtype)
    return backend.scan(element, zeros, (planes, weights), planes)


def _backward(
    planes: Tensor,
    weights: Weights,
    peaks: Tensor,
    upstream: Tensor,
    geometry: Geometry,
    together: int,
) -> Any:
    def element(carry: Any, piece: Any) -> Any:
        planes, weights, peaks = piece

        def chunk(d_planes: Tensor, piece: Any) -> Any:
            weights, peaks, upstream = piece
            seen = _Chunk(planes, weights, geometry, together)
            of_planes, of_weights = seen.gradients(peaks, upstream)
            return d_planes + of_planes, of_weights

        return carry, backend.scan(
            chunk, ops.zeros_like(planes), (weights, peaks, upstream), weights
        )

    _, gradients = backend.scan(
        element, (), (planes, weights, peaks), (planes, weights)
    )
    return gradients


class _Chunk:
    """Some output channels, seen through one input group element.

    Everything that is as large as the responses lives within one step of a
    scan over groups of `together` input channels, `g` of them.
    """

    def __init__(
        self,
        planes: Tensor,
        weights: Weights,
        geometry: Geometry,
        together: int,
    ) -> None:
        self.planes = planes  # (c, b, height, width)
        self.weights = weights
        self.geometry = geometry
        self.together = together
        self.channels = planes.shape[0]
        self.has_channel = "first" in weights
        self.has_spatial = "spatial" in weights

    def windows(self, planes: Tensor) -> Tensor:
        """`(g, b, height, width)` to `(g, b, t, positions)`."""
        seen = self.geometry.windows(planes)
        *front, height, width = ops.shape(seen)
        return ops.reshape(seen, (*front, height * width))

    def of_planes(self, planes: Tensor, d_windows: Tensor) -> Tensor:
        """Gradient of the planes from that of their windows."""
        return backend.vjp(self.windows, (planes,), d_windows)[1][0]

    def mean_windows(self, planes: Tensor) -> Tensor:
        """Mean of each window position over space: `(c, b, t)`.

        The mean of a response is this times the kernel.
        """
        seen = self.geometry.positions(planes)
        return ops.stack([mean(x, (2, 3)) for x in seen], axis=-1)

    def peaks(self) -> Tensor:
        """Maximum of each response over space: `(c, b, n)`."""
        if not self.has_channel:  # nothing to keep
            return ops.zeros_like(self.planes[:, :, 0, :1])

        def step(carry: Any, pieces: Any) -> Any:
            planes, kernel = pieces
            return carry, ops.max(_responses(self.windows(planes), kernel), 2)

        pieces = self.planes, self.weights["kernel"]
        scanned = backend.scan_groups(
            step, (), pieces, self.together, self.planes
        )
        return scanned[1]

    def channel(self, peaks: Tensor) -> Tensor:
        """Channel attention `(c, b, n)`, ones where there is none."""
        if not self.has_channel:
            return ops.ones_like(peaks[..., :1])
        means = ops.einsum(
            "cbt,ctn->cbn",
            self.mean_windows(self.planes),
            self.weights["kernel"],
        )
        first, second = self.weights["first"], self.weights["second"]
        return channel_attention(means, peaks, first, second)

    def gate(self, total: Tensor, maximum: Tensor) -> Tensor | float:
        """Spatial attention, or 1."""
        if not self.has_spatial:
            return 1.0
        return self._gate(self._statistics(total, maximum))

    def _statistics(self, total: Tensor, maximum: Tensor) -> Tensor:
        """Mean and maximum over the channels, `(b, height, width, 2, n)`."""
        return ops.stack([total / self.channels, maximum], axis=3)

    def _gate(self, statistics: Tensor) -> Tensor:
        rate = self.geometry.attention_dilation_rate
        kernel = self.weights["spatial"]
        return ops.sigmoid(depthwise_sum(statistics, kernel, rate))

    def maps(self) -> tuple[Tensor, Tensor]:
        """Channel attention `(c, b, n)` and spatial attention."""
        total, maximum, _, alpha = self.reduce(self.peaks())
        alpha = alpha + ops.zeros_like(self.weights["kernel"][:, :1])
        return alpha, self.gate(total, maximum) * ops.ones_like(total)

    def responses(
        self, planes: Tensor, kernel: Tensor, shape: tuple[Any, ...]
    ) -> Iterator[Tensor]:
        """The response of each channel in turn.

        Args:
            planes: of some channels `(g, b, height, width)`.
            kernel: `(g, b, t, n)`.
            shape: of a response, `(b, new_height, new_width, n)`.
        """
        channels = range(planes.shape[0])
        if backend.xla_on_cpu():
            # Not a product: XLA makes one loop of all this.
            for i in channels:
                seen = self.geometry.positions(planes[i])
                weight = kernel[i, :, None, None]
                yield sum(
                    values[..., None] * weight[..., t, :]
                    for t, values in enumerate(seen)
                )
            return
        found = _responses(self.windows(planes), kernel)
        found = ops.reshape(found, (len(channels), *shape))
        yield from (found[i] for i in channels)

    def reduce(self, peaks: Tensor, where: bool = False) -> tuple[Any, ...]:
        """What is kept of the responses over the input channels.

        Args:
            peaks: of the responses.
            where: whether to say which channel has the maximum.

        Returns:
            Sum, maximum and its channel, of `aC f` over `c`, each `(b,
            height, width, n)`; and `aC (c, b, n)`. Maximum and channel are
            only there for spatial attention.
        """
        kernel = self.weights["kernel"]
        alpha = self.channel(peaks)
        like = self.geometry.positions(self.planes[0])[0][..., None]
        total = ops.zeros_like(like) + ops.zeros(kernel.shape[-1:], like.dtype)
        shape = ops.shape(total)
        maximum = index = ()
        if self.has_spatial:
            maximum = total + float(np.finfo(_dtype(total)).min)
            if where:
                index = ops.zeros_like(total)

        def step(carry: Any, pieces: Any) -> Any:
            total, maximum, index = carry
            planes, kernel, alpha, channels = pieces
            kernel = kernel[:, None] * alpha[:, :, None]
            seen = self.responses(planes, kernel, shape)
            for i, response in enumerate(seen):
                total = total + response
                if self.has_spatial and where:
                    # Not `where`: it is slow under PyTorch.
                    better = _compared(ops.greater, response, maximum)
                    index = index + better * (channels[i] - index)
                if self.has_spatial:
                    maximum = backend.maximum(maximum, response)
            return (total, maximum, index), ()

        size = TOGETHER if backend.xla_on_cpu() else self.together
        pieces = self.planes, kernel, alpha, self._indices()
        carry, _ = backend.scan_groups(
            step, (total, maximum, index), pieces, size
        )
        return *carry, alpha

    def _indices(self) -> Tensor:
        return ops.arange(self.channels, dtype=_dtype(self.planes))

    def gradients(self, peaks: Tensor, upstream: Tensor) -> Any:
        """Gradients with respect to the planes and the weights."""
        kernel = self.weights["kernel"]
        total, maximum, index, alpha = self.reduce(peaks, where=True)
        d_weights = {}
        d_total = upstream
        if self.has_spatial:
            statistics = self._statistics(total, maximum)
            gate = self._gate(statistics)
            d_statistics, d_weights["spatial"] = depthwise_gradients(
                statistics,
                self.weights["spatial"],
                upstream * total * gate * (1 - gate),
                self.geometry.attention_dilation_rate,
            )
            d_total = upstream * gate + d_statistics[..., 0, :] / self.channels
            d_maximum = d_statistics[..., 1, :]
        batch, height, width, n = ops.shape(upstream)
        flat = batch, height * width, n
        d_total = ops.reshape(d_total, flat)
        if self.has_spatial:
            d_maximum = ops.reshape(d_maximum, flat)
            index = ops.reshape(index, flat)

        def linear(carry: Any, pieces: Any) -> Any:
            """Through the sum and the maximum over the channels; where they
            tie, through the first.
            """
            planes, kernel, alpha, channels = pieces
            d_responses = d_total[None]
            if self.has_spatial:
                away = ops.abs(index - channels[:, None, None, None])
                d_responses = d_responses + ops.relu(1 - away) * d_maximum
            d_scaled = self.windows(planes) @ d_responses
            scaled = kernel[:, None] * alpha[:, :, None]
            d_windows = scaled @ ops.swapaxes(d_responses, 2, 3)
            return carry, (
                self.of_planes(planes, d_windows),
                ops.sum(d_scaled * alpha[:, :, None], axis=1),
                ops.sum(d_scaled * kernel[:, None], axis=2),
            )

        pieces = self.planes, kernel, alpha, self._indices()
        _, (d_planes, d_kernel, d_alpha) = backend.scan_groups(
            linear, (), pieces, self.together, pieces[:3]
        )
        d_weights["kernel"] = d_kernel
        if self.has_channel:
            d_planes, d_weights = self._through_channel(
                peaks, d_alpha, d_planes, d_weights
            )
        return d_planes, d_weights

    def _through_channel(
        self,
        peaks: Tensor,
        d_alpha: Tensor,
        d_planes: Tensor,
        d_weights: Weights,
    ) -> Any:
        """Adds what flows through the channel attention."""
        kernel = self.weights["kernel"]
        first, second = self.weights["first"], self.weights["second"]
        mean_windows = self.mean_windows(self.planes)
        means = ops.einsum("cbt,ctn->cbn", mean_windows, kernel)
        _, (d_means, d_peaks, d_first, d_second) = backend.vjp(
            channel_attention, (means, peaks, first, second), d_alpha
        )

        def step(carry: Any, pieces: Any) -> Any:
            """Through the maxima over space; ties share."""
            planes, kernel, d_peaks = pieces
            windows = self.windows(planes)
            responses = _responses(windows, kernel)
            peaks = ops.max(responses, axis=2, keepdims=True)
            hits = _compared(ops.equal, responses, peaks)
            share = (d_peaks / ops.sum(hits, axis=2))[:, :, None]
            d_kernel = ops.sum((windows @ hits) * share, axis=1)
            d_windows = (kernel[:, None] * share) @ ops.swapaxes(hits, 2, 3)
            return carry, (self.of_planes(planes, d_windows), d_kernel)

        pieces = self.planes, kernel, d_peaks
        _, (of_planes, d_kernel) = backend.scan_groups(
            step, (), pieces, self.together, pieces[:2]
        )
        _, (through_means,) = backend.vjp(
            self.mean_windows,
            (self.planes,),
            ops.einsum("cbn,ctn->cbt", d_means, kernel),
        )
        d_kernel = d_kernel + ops.einsum("cbt,cbn->ctn", mean_windows, d_means)
        return d_planes + of_planes + through_means, {
            **d_weights,
            "kernel": d_weights["kernel"] + d_kernel,
            "first": d_first,
            "second": d_second,
        }


def _responses(windows: Tensor, kernel: Tensor) -> Tensor:
    """`(g, b, t, positions)` and `(g, [b,] t, n)` to `(g, b, positions, n)`."""
    if len(kernel.shape) == 3:
        kernel = kernel[:, None]
    return ops.swapaxes(windows, 2, 3) @ kernel


def _compared(how: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
    """1 where a comparison holds, else 0.

    Not by the sign of a difference: compilers that put `a * b - y` in one
    instruction do not round the product, so that what is equal would differ.
    """
    return ops.cast(how(x, y), _dtype(x))


def _dtype(x: Tensor) -> str:
    return str(keras.backend.standardize_dtype(x.dtype))
