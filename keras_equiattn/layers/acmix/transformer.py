"""The base of the layers of ACmix for transformers."""

from typing import Any

import keras

from keras_equiattn import _checks
from keras_equiattn.layers.acmix.two_paths import MAPS
from keras_equiattn.layers.acmix.two_paths import TwoPaths
from keras_equiattn.layers.base import linear_maps
from keras_equiattn.layers.base.group_layer import check_window
from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Shape
from keras_equiattn.ops._types import Tensor


class TransformerACmix(TwoPaths):
    """Base of planar layers whose attention ends with one more linear map.

    Subclasses call `add_linear_maps`, `add_output` and `finish_build` in
    `build`, and write `call_channels_last` and `attend_channels_last` with
    `training`.
    """

    has_group_argument = False

    def __init__(
        self,
        *,
        filters: int,
        num_heads: int,
        kernel_size: int | tuple[int, int],
        paths: str,
        rates: str,
        shift_kernels: str,
        kernel_groups: int | None,
        attention_dropout: float,
        dropout: float,
        kernel_initializer: Any,
        mixing_initializer: Any,
        bias_initializer: Any,
        kernel_regularizer: Any,
        data_format: str | None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            paths=paths, group="z2", data_format=data_format, **kwargs
        )
        self.filters = _checks.integer(filters, "filters")
        self.num_heads = _checks.integer(num_heads, "num_heads")
        _checks.divisible(self.filters, self.num_heads, "num_heads")
        self.kernel_size = _checks.pair(kernel_size, "kernel_size")
        check_window(self.group, "kernel_size", self.kernel_size, (1, 1))
        self.hold_convolution_path(
            size=self.filters // self.num_heads,
            maps=len(MAPS) * self.num_heads,
            outputs=self.num_heads,
            rates=rates,
            shift_kernels=shift_kernels,
            kernel_groups=kernel_groups,
            mixing_initializer=mixing_initializer,
        )
        self.attention_dropout = _checks.rate(
            attention_dropout, "attention_dropout"
        )
        self.dropout = _checks.rate(dropout, "dropout")
        if kernel_initializer is None:
            kernel_initializer = keras.initializers.TruncatedNormal(stddev=0.02)
        linear_maps.configure(
            self, kernel_initializer, bias_initializer, kernel_regularizer
        )
        # Parts of a layer are not rematerialised by themselves.
        with keras.RematScope(mode=None):
            self.drop_weights, self.drop = (
                keras.layers.Dropout(rate, dtype=self.dtype_policy)
                for rate in (self.attention_dropout, self.dropout)
            )

    def add_output(self) -> None:
        """Creates the linear map at the end of attention."""
        size = self.filters
        linear_maps.add(self, "output", (size, size), (size,), size)

    def finish_build(self, shape: Shape) -> None:
        """Creates the path of convolution and the rates."""
        self.convolution_path.build(self, use_bias=True)
        self.fix_input_channels(shape[-1])
        self.built = True

    @property
    def scale(self) -> float:
        """The factor of the scores: one over the root of a head's channels."""
        return (self.filters // self.num_heads) ** -0.5

    def output_map(self, y: Tensor) -> Tensor:
        """The linear map at the end of attention."""
        kernel, bias = linear_maps.kernel_and_bias(self, "output")
        return backend.times_matrix(y, kernel) + bias

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            **self.convolution_path.get_config(),
            "filters": self.filters,
            "num_heads": self.num_heads,
            "kernel_size": self.kernel_size,
            "attention_dropout": self.attention_dropout,
            "dropout": self.dropout,
            **linear_maps.config(self),
        }
