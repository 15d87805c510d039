"""The path of convolution that the layers of ACmix hold."""

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from keras_equiattn import _checks
from keras_equiattn.layers.base.group_layer import GroupLayer
from keras_equiattn.layers.base.initializers import fresh
from keras_equiattn.layers.base.initializers import uniform_by_fan_in
from keras_equiattn.layers.base.initializers import with_fan_in
from keras_equiattn.ops._types import Shape
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.numerics import in_full_precision
from keras_equiattn.ops.papers.acmix import Convolution
from keras_equiattn.ops.papers.acmix import joint_convolution
from keras_equiattn.ops.papers.acmix import shifts
from keras_equiattn.ops.papers.acmix import split_maps

RATES = ("learned", "fixed")
SHIFT_KERNELS = ("learned", "fixed", "random")
# The initial value of a rate when both are learned.
INITIAL_RATE = 0.5


class ConvolutionPath:
    """A convolution from queries, keys and values, and the rates of paths.

    It is not a layer. The layer that holds it owns the weights, and has them
    as attributes too, so that a saved file knows of one layer alone.

    Args:
        size: channels of each map, of which a linear map holds one or more
            side by side.
        maps: how many maps queries, keys and values hold together.
        outputs: how many output channels there are for each channel of the
            maps.
        kernel_size: rows and columns of the convolution.
        paths: "both", "attention" or "convolution": the paths of the layer.
        rates, shift_kernels, kernel_groups, mixing_initializer: see `ACmix2D`.

    Raises:
        ValueError: for bad arguments.
    """

    mixing_kernel: Any
    mixing_bias: Any = None
    shift_kernel: Any
    attention_rate: Any
    convolution_rate: Any
    # Turns shift kernels into pixels, see `GroupLayer`.
    _filters_of: Any

    def __init__(
        self,
        *,
        size: int,
        maps: int,
        outputs: int,
        kernel_size: tuple[int, int],
        paths: str,
        rates: str,
        shift_kernels: str,
        kernel_groups: int | None,
        mixing_initializer: Any,
    ) -> None:
        self.size = size
        self.maps = maps
        self.outputs = outputs
        self.kernel_size = kernel_size
        self.paths = paths
        self.rates = _checks.choice(rates, "rates", RATES)
        self.shift_kernels = _checks.choice(
            shift_kernels, "shift_kernels", SHIFT_KERNELS
        )
        self.kernel_groups = outputs
        kernel_groups = _checks.optional_integer(kernel_groups, "kernel_groups")
        if kernel_groups is not None:
            self.kernel_groups = kernel_groups
        if outputs % self.kernel_groups:
            raise ValueError(
                f"`kernel_groups` must divide {outputs}, the outputs of a "
                f"channel. Received: kernel_groups={kernel_groups}"
            )
        self.mixing_initializer = keras.initializers.get(
            mixing_initializer or uniform_by_fan_in()
        )

    @property
    def learns_rates(self) -> bool:
        """Whether there are both paths, whose rates are learned."""
        return self.paths == "both" and self.rates == "learned"

    def build(self, layer: GroupLayer, use_bias: bool = False) -> None:
        """Creates the weights of the layer.

        Args:
            layer: the layer.
            use_bias: whether the mixing has a bias.
        """
        if self.paths != "attention":
            self._add_kernels(layer, use_bias)
        if self.learns_rates:
            for path in ("attention", "convolution"):
                self._add(
                    layer,
                    f"{path}_rate",
                    shape=(),
                    initializer=keras.initializers.Constant(INITIAL_RATE),
                )

    def _add_kernels(self, layer: GroupLayer, use_bias: bool) -> None:
        rows, columns = self.kernel_size
        count = rows * columns
        self._add(
            layer,
            "mixing_kernel",
            shape=(self.maps, count),
            initializer=with_fan_in(self.mixing_initializer, self.maps),
            autocast=False,
        )
        if use_bias:
            self._add(
                layer,
                "mixing_bias",
                shape=(count,),
                initializer=fresh(layer.bias_initializer),
                autocast=False,
            )
        if self.shift_kernels == "fixed":
            return
        initializer = with_fan_in(self.mixing_initializer, count**2)
        if self.shift_kernels == "learned":
            initializer = _shifts
        options: dict[str, Any] = {
            "shape": (rows, columns, count, self.size * self.kernel_groups),
            "initializer": initializer,
            "autocast": False,
            "keeps_variance": self.shift_kernels == "random",
        }
        weight = layer.add_filters("shift_kernel", **options)
        self._keep(layer, "shift_kernel", weight)
        self._filters_of = layer.filters_of

    def _add(self, layer: GroupLayer, name: str, **options: Any) -> None:
        self._keep(layer, name, layer.add_weight(name=name, **options))

    def _keep(self, layer: GroupLayer, name: str, weight: Any) -> None:
        setattr(self, name, weight)
        setattr(layer, name, weight)

    def convolution(
        self,
        linear_maps: Sequence[tuple[Tensor, Tensor | None]],
        dtype: str,
    ) -> Convolution:
        """The path as one convolution.

        Args:
            linear_maps: kernels and biases of queries, keys and values.
            dtype: the dtype of the convolution.
        """
        kernels, biases = zip(*linear_maps, strict=True)
        bias = None
        if biases[0] is not None:
            bias = ops.concatenate(
                [ops.reshape(precise(x), (-1, self.size)) for x in biases]
            )
        joint = joint_convolution(
            ops.concatenate(
                [split_maps(precise(x), self.size) for x in kernels]
            ),
            bias,
            precise(self.mixing_kernel),
            self._shift(),
            self.outputs,
            None if self.mixing_bias is None else precise(self.mixing_bias),
        )
        return Convolution(
            *(None if x is None else ops.cast(x, dtype) for x in joint)
        )

    def _shift(self) -> Tensor:
        """The shift kernels, those that are fixed as well."""
        if self.shift_kernels != "fixed":
            kernel = precise(self.shift_kernel)
            return self._filters_of(kernel, self.kernel_size[0])
        dtype = precise(self.mixing_kernel).dtype
        return _shifts((*self.kernel_size, None, self.size), dtype)

    def rates_of_paths(self) -> tuple[Any, Any]:
        """The factors of attention and convolution, if they are learned."""
        return (
            ops.convert_to_tensor(self.attention_rate),
            ops.convert_to_tensor(self.convolution_rate),
        )

    def get_config(self) -> dict[str, Any]:
        """Its part of the config of the layer."""
        return {
            "rates": self.rates,
            "shift_kernels": self.shift_kernels,
            "kernel_groups": self.kernel_groups,
            "mixing_initializer": keras.initializers.serialize(
                self.mixing_initializer
            ),
        }


def precise(x: Any) -> Tensor:
    """A variable as a tensor, at least in single precision."""
    return in_full_precision(ops.convert_to_tensor(x))


def _shifts(shape: Shape, dtype: Any = None) -> Tensor:
    """Shift kernels, each of which picks a neighbour of its own."""
    rows, columns, _, filters = shape
    start = shifts(int(rows or 0), int(columns or 0))[..., None]
    return ops.tile(ops.convert_to_tensor(start, dtype), (1, 1, 1, filters))
