"""What layers share that attend to linear maps of their input."""

from typing import Any

from keras import ops

from keras_equiattn.layers.base.attention_layer import AttentionLayer
from keras_equiattn.layers.base.initializers import fresh
from keras_equiattn.layers.base.initializers import with_fan_in
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.group.linear import group_linear


class LinearMapsLayer(AttentionLayer):
    """Base of layers that attend to linear maps of their input.

    Subclasses set `filters`, `kernel_initializer`, `bias_initializer` and
    `kernel_regularizer` in `__init__`.
    """

    filters: int
    kernel_initializer: Any
    bias_initializer: Any
    kernel_regularizer: Any

    def _linear(self, x: Tensor, name: str) -> Tensor:
        """The linear map `<name>_kernel`, `<name>_bias` of the input."""
        kernel, bias = (
            None if weight is None else ops.convert_to_tensor(weight)
            for weight in self._map(name)
        )
        return group_linear(x, kernel, bias, self.group)

    def _map(self, name: str) -> tuple[Any, Any]:
        """The variables of a linear map: kernel, and bias or None."""
        return getattr(self, f"{name}_kernel"), getattr(self, f"{name}_bias")

    def _add_linear(
        self,
        name: str,
        channels: int,
        use_bias: bool = True,
        filters: int | None = None,
    ) -> None:
        """Creates a linear map, to `self.filters` channels or to others."""
        kernel, bias = f"{name}_kernel", f"{name}_bias"
        filters = filters or self.filters
        setattr(self, kernel, self._kernel(kernel, channels, filters))
        setattr(self, bias, None)
        if use_bias:
            weight = self.add_weight(
                name=bias,
                shape=(filters,),
                initializer=fresh(self.bias_initializer),
            )
            setattr(self, bias, weight)

    def _kernel(
        self, name: str, channels: int, filters: int | None = None
    ) -> Any:
        fan_in = self.group.order * channels
        return self.add_weight(
            name=name,
            shape=(self.group.order, channels, filters or self.filters),
            initializer=with_fan_in(self.kernel_initializer, fan_in),
            regularizer=self.kernel_regularizer,
        )
