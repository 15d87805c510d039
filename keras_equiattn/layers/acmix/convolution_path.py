"""What the layers of ACmix share: the path of convolution, and the rates."""

from typing import Any

import keras
from keras import ops

from keras_equiattn import _checks
from keras_equiattn.layers.base.initializers import fresh
from keras_equiattn.layers.base.initializers import with_fan_in
from keras_equiattn.layers.base.linear_maps import LinearMapsLayer
from keras_equiattn.ops._types import Shape
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.geometry import Window
from keras_equiattn.ops.numerics import in_full_precision
from keras_equiattn.ops.papers.acmix import Convolution
from keras_equiattn.ops.papers.acmix import convolve
from keras_equiattn.ops.papers.acmix import joint_convolution
from keras_equiattn.ops.papers.acmix import shifts
from keras_equiattn.ops.papers.acmix import split_maps
from keras_equiattn.ops.windows.api import by_position

MAPS = ("query", "key", "value")
PATHS = ("both", "attention", "convolution")
RATES = ("learned", "fixed")
SHIFT_KERNELS = ("learned", "fixed", "random")
# What a rate starts at when both are learned.
INITIAL_RATE = 0.5


class TwoPaths(LinearMapsLayer):
    """Base of layers with a path of attention, one of convolution, or both.

    Subclasses say in `convolution` what the path of convolution is, and in
    `rates_of_paths` what the paths are multiplied by.
    """

    paths: str
    # Of both paths.
    strides: tuple[int, int] = (1, 1)
    dilation_rate: tuple[int, int] = (1, 1)

    @property
    def attends(self) -> bool:
        return self.paths != "convolution"

    @property
    def convolves(self) -> bool:
        return self.paths != "attention"

    def convolution(self) -> Convolution:
        """The path of convolution as one convolution."""
        raise NotImplementedError(f"{type(self).__name__}.convolution")

    def rates_of_paths(self) -> tuple[Any, Any]:
        """What attention and convolution are multiplied by; None for one."""
        raise NotImplementedError(f"{type(self).__name__}.rates_of_paths")

    def join_paths(self, x: Tensor, attention: Tensor | None) -> Tensor:
        """Both paths, or the one that there is."""
        return self.sum_of_paths(attention, self.convolved(x))

    def convolved(self, x: Tensor) -> Tensor | None:
        """The path of convolution, if there is one."""
        if not self.convolves:
            return None
        return convolve(
            x,
            self.convolution(),
            self.group,
            self.strides,
            self.dilation_rate,
        )

    def sum_of_paths(
        self, attention: Tensor | None, convolved: Tensor | None
    ) -> Tensor:
        """Both paths at their rates, or the one that there is."""
        rate, rate_of_convolution = self.rates_of_paths()
        if attention is None:
            return times(convolved, rate_of_convolution)
        if convolved is None:
            return times(attention, rate)
        return times(attention, rate) + times(convolved, rate_of_convolution)

    def require_attention(self) -> None:
        """Raises where there are no attention maps to return."""
        if not self.attends:
            raise ValueError(
                f"{self._label()} has no attention to show. "
                f"Received: paths='{self.paths}'"
            )

    def window_map(
        self,
        weights: Tensor,
        window: Window,
        query: tuple[int, int] | None,
        size: Shape,
    ) -> Tensor:
        """The map of attention to a window, for all pixels or for one.

        Args:
            weights: of the neighbours, as `window_softmax` returns them.
            window: what they are in.
            query: a pixel of the output; None is all.
            size: of the output.
        """
        if query is None:
            return by_position(weights, window)
        row, column = self.check_query(query, size)
        weights = weights[..., row : row + 1, column : column + 1]
        return by_position(weights, window)[:, 0, 0]


class ConvolutionPath(TwoPaths):
    """Base of layers with a convolution from queries, keys and values.

    Subclasses set `kernel_size`, `outputs` and what `LinearMapsLayer` asks
    for, and call `choose` in `__init__`, `add_convolution` and `add_rates` in
    `build`.

    Attributes:
        outputs: how many output channels there are for each channel of the
            maps, of which each linear map holds one or more side by side.
    """

    kernel_size: tuple[int, int]
    outputs: int

    def choose(
        self,
        paths: str,
        rates: str,
        shift_kernels: str,
        kernel_groups: int | None,
        mixing_initializer: Any,
    ) -> None:
        """Checks what the ablations of the paper vary, and takes the rest."""
        self.mixing_initializer = keras.initializers.get(
            mixing_initializer or uniform_by_fan_in()
        )
        self.paths = _checks.choice(paths, "paths", PATHS)
        self.rates = _checks.choice(rates, "rates", RATES)
        self.shift_kernels = _checks.choice(
            shift_kernels, "shift_kernels", SHIFT_KERNELS
        )
        self.kernel_groups = self.outputs
        if kernel_groups is not None:
            self.kernel_groups = _checks.integer(kernel_groups, "kernel_groups")
        if self.outputs % self.kernel_groups:
            raise ValueError(
                f"`kernel_groups` must divide {self.outputs}, the outputs of a "
                f"channel. Received: kernel_groups={kernel_groups}"
            )

    def add_convolution(self, use_bias: bool = False) -> None:
        """Creates the mixing kernel, and the shift kernels where learned."""
        rows, columns = self.kernel_size
        size, count = self.filters // self.outputs, rows * columns
        maps = sum(self._map(name)[0].shape[-1] // size for name in MAPS)
        self.mixing_kernel = self.add_weight(
            name="mixing_kernel",
            shape=(maps, count),
            initializer=with_fan_in(self.mixing_initializer, maps),
            autocast=False,
        )
        self.mixing_bias = None
        if use_bias:
            self.mixing_bias = self.add_weight(
                name="mixing_bias",
                shape=(count,),
                initializer=fresh(self.bias_initializer),
                autocast=False,
            )
        if self.shift_kernels == "fixed":
            return
        initializer = with_fan_in(self.mixing_initializer, count**2)
        if self.shift_kernels == "learned":
            initializer = _shifts
        self.shift_kernel = self.add_weight(
            name="shift_kernel",
            shape=(rows, columns, count, size * self.kernel_groups),
            initializer=initializer,
            autocast=False,
        )

    @property
    def learns_rates(self) -> bool:
        """Whether there are two paths, and rates of theirs to learn."""
        return self.paths == "both" and self.rates == "learned"

    def add_rates(self) -> None:
        """Creates the rates, where they are learned."""
        if not self.learns_rates:
            return
        self.attention_rate, self.convolution_rate = (
            self.add_weight(
                name=f"{path}_rate",
                shape=(),
                initializer=keras.initializers.Constant(INITIAL_RATE),
            )
            for path in ("attention", "convolution")
        )

    def convolution(self) -> Convolution:
        size = self.filters // self.outputs
        maps = [split_maps(self.kernel_seen(name), size) for name in MAPS]
        biases = [self._map(name)[1] for name in MAPS]
        bias = None
        if biases[0] is not None:
            bias = ops.concatenate(
                [ops.reshape(full(bias), (-1, size)) for bias in biases]
            )
        joint = joint_convolution(
            ops.concatenate(maps),
            bias,
            full(self.mixing_kernel),
            self.shift_seen(),
            self.outputs,
            None if self.mixing_bias is None else full(self.mixing_bias),
        )
        return Convolution(
            *(
                None if x is None else ops.cast(x, self.compute_dtype)
                for x in joint
            )
        )

    def shift_seen(self) -> Tensor:
        """The shift kernels, those that are fixed as well."""
        if self.shift_kernels != "fixed":
            return full(self.shift_kernel)
        shift = ops.convert_to_tensor(
            shifts(*self.kernel_size)[..., None],
            dtype=full(self.mixing_kernel).dtype,
        )
        return ops.tile(shift, (1, 1, 1, self.filters // self.outputs))

    def kernel_seen(self, name: str) -> Tensor:
        """The kernel of a linear map, of all that the convolution sees."""
        return full(self._map(name)[0])

    def rates_of_paths(self) -> tuple[Any, Any]:
        if not self.learns_rates:
            return None, None
        return (
            ops.convert_to_tensor(self.attention_rate),
            ops.convert_to_tensor(self.convolution_rate),
        )

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "paths": self.paths,
            "rates": self.rates,
            "shift_kernels": self.shift_kernels,
            "kernel_groups": self.kernel_groups,
            "mixing_initializer": keras.initializers.serialize(
                self.mixing_initializer
            ),
        }


def uniform_by_fan_in() -> keras.initializers.Initializer:
    """Uniform within one over the square root of the fan-in."""
    return keras.initializers.VarianceScaling(1 / 3, "fan_in", "uniform")


def times(x: Tensor, rate: Any) -> Tensor:
    """The product with a rate that may be None for one."""
    return x if rate is None else x * rate


def full(x: Any) -> Tensor:
    """A variable as a tensor, at least in single precision."""
    return in_full_precision(ops.convert_to_tensor(x))


def _shifts(shape: Shape, dtype: str | None = None) -> Tensor:
    """Starts each of the kernels as the shift of its own."""
    rows, columns, _, filters = shape
    start = shifts(int(rows or 0), int(columns or 0))[..., None]
    return ops.tile(ops.convert_to_tensor(start, dtype), (1, 1, 1, filters))
