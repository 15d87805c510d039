"""The base of all layers of ACmix: two paths, and their sum."""

from typing import Any

from keras_equiattn import _checks
from keras_equiattn.layers.acmix.convolution_path import ConvolutionPath
from keras_equiattn.layers.base import linear_maps
from keras_equiattn.layers.base.attention_layer import AttentionLayer
from keras_equiattn.layers.base.group_layer import check_window
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.geometry import Window
from keras_equiattn.ops.papers.acmix import Convolution
from keras_equiattn.ops.papers.acmix import convolve

MAPS = ("query", "key", "value")
PATHS = ("both", "attention", "convolution")


class TwoPaths(AttentionLayer):
    """Base of layers with a path of attention, one of convolution, or both.

    Subclasses call `hold_convolution_path` in `__init__`, and build what it
    makes in `build`.
    """

    # A `ConvolutionPath`; None where there is one convolution from the start.
    convolution_path: Any = None
    filters: int
    kernel_size: tuple[int, int]
    # The `Window` that a pixel attends to; None for all of the image.
    window: Any = None
    # The values of layers without these arguments.
    filter_basis: str = "pixel"
    window_shape: str = "square"
    # The strides and the dilation of both paths.
    strides: tuple[int, int] = (1, 1)
    dilation_rate: tuple[int, int] = (1, 1)

    def __init__(self, paths: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.paths = _checks.choice(paths, "paths", PATHS)

    def set_windows(
        self,
        kernel_size: int | tuple[int, int],
        attention_kernel_size: int | tuple[int, int],
        strides: int | tuple[int, int],
        dilation_rate: int | tuple[int, int],
        border: str,
    ) -> None:
        """Sets the windows of convolution and attention around a pixel."""
        self.strides = _checks.pair(strides, "strides")
        self.dilation_rate = _checks.pair(dilation_rate, "dilation_rate")
        _checks.strides_or_dilation(self.strides, self.dilation_rate)
        for name, value in (
            ("kernel_size", kernel_size),
            ("attention_kernel_size", attention_kernel_size),
        ):
            size = _checks.pair(value, name)
            check_window(self.group, name, size, self.dilation_rate)
            setattr(self, name, size)
        self.window = Window(
            self.attention_kernel_size,
            self.strides,
            self.dilation_rate,
            border,
            self.window_shape,
        )

    def hold_convolution_path(self, **options: Any) -> None:
        """Makes the path of convolution.

        Args:
            **options: arguments of `ConvolutionPath` that are not attributes
                of the layer already.
        """
        path = ConvolutionPath(
            kernel_size=self.kernel_size, paths=self.paths, **options
        )
        self.convolution_path = path
        # The arguments are attributes, as those of every layer.
        self.rates = path.rates
        self.shift_kernels = path.shift_kernels
        self.kernel_groups = path.kernel_groups
        self.mixing_initializer = path.mixing_initializer

    def add_linear_maps(self, channels: int, use_bias: bool = True) -> None:
        """Creates queries, keys and values of as many channels as filters."""
        for name in MAPS:
            linear_maps.add_on_group(
                self, name, channels, self.filters, use_bias
            )

    @property
    def attends(self) -> bool:
        return self.paths != "convolution"

    @property
    def convolves(self) -> bool:
        return self.paths != "attention"

    def convolution(self) -> Convolution:
        """The path of convolution as one convolution."""
        maps = [self.linear_map_seen(name) for name in MAPS]
        return self.convolution_path.convolution(maps, self.compute_dtype)

    def linear_map_seen(self, name: str) -> tuple[Tensor, Tensor | None]:
        """A linear map of all that the convolution sees."""
        return linear_maps.kernel_and_bias(self, name)

    @property
    def learns_rates(self) -> bool:
        """Whether there are both paths, whose rates are learned."""
        path = self.convolution_path
        return path is not None and path.learns_rates

    def rates_of_paths(self) -> tuple[Any, Any]:
        """The factors of attention and convolution; None stands for one."""
        if not self.learns_rates:
            return None, None
        return self.convolution_path.rates_of_paths()

    def join_paths(self, x: Tensor, attention: Tensor | None) -> Tensor:
        """The sum of both paths at their rates, or the only path."""
        convolved = None
        if self.convolves:
            convolved = convolve(
                x,
                self.convolution(),
                self.group,
                self.strides,
                self.dilation_rate,
                self.filter_basis,
            )
        return self.sum_of_paths(attention, convolved)

    def sum_of_paths(
        self, attention: Tensor | None, convolved: Tensor | None
    ) -> Tensor:
        """The sum of both tensors at their rates, or the only tensor."""
        pairs = zip((attention, convolved), self.rates_of_paths(), strict=True)
        terms = [times(x, rate) for x, rate in pairs if x is not None]
        return sum(terms[1:], terms[0])

    def require_attention(self) -> None:
        """Raises where there are no attention maps to return."""
        if not self.attends:
            raise ValueError(
                f"{self._label()} has no attention to show. Take paths='both' "
                f"or 'attention'. Received: paths='{self.paths}'"
            )

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "paths": self.paths}


def times(x: Tensor, rate: Any) -> Tensor:
    """The product with a rate that may be None for one."""
    return x if rate is None else x * rate
