"""Linear maps of layers: how they are created, and how they are read.

A linear map `name` of a layer is its variables `<name>_kernel` and
`<name>_bias`, which are attributes of the layer too. The only map of a layer
needs no name: its variables are `kernel` and `bias`. All linear maps of a layer
are initialized and regularized alike.
"""

from typing import Any

import keras
from keras import ops

from keras_equiattn.layers.base.group_layer import GroupLayer
from keras_equiattn.layers.base.initializers import fresh
from keras_equiattn.layers.base.initializers import with_fan_in
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.group.linear import group_linear


def configure(
    layer: GroupLayer,
    kernel_initializer: Any,
    bias_initializer: Any,
    kernel_regularizer: Any,
) -> None:
    """Keeps the arguments of a layer from which its linear maps are made."""
    layer.kernel_initializer = keras.initializers.get(kernel_initializer)
    layer.bias_initializer = keras.initializers.get(bias_initializer)
    layer.kernel_regularizer = keras.regularizers.get(kernel_regularizer)


def config(layer: GroupLayer) -> dict[str, Any]:
    """The arguments of `configure`, for the config of the layer."""
    initializer = keras.initializers.serialize
    regularizer = keras.regularizers.serialize
    return {
        "kernel_initializer": initializer(layer.kernel_initializer),
        "bias_initializer": initializer(layer.bias_initializer),
        "kernel_regularizer": regularizer(layer.kernel_regularizer),
    }


def add(
    layer: GroupLayer,
    name: str,
    shape: tuple[int, ...],
    bias_shape: tuple[int, ...] | None,
    fan_in: int,
    bias_regularizer: Any = None,
) -> None:
    """Creates the variables of a linear map.

    Args:
        layer: the layer that they belong to.
        name: the name of the map; "" for the only one.
        shape: the shape of the kernel.
        bias_shape: the shape of the bias; None for no bias.
        fan_in: how many inputs each output has.
        bias_regularizer: the regularizer of the bias.
    """
    of_kernel, of_bias = _names(name)
    kernel = layer.add_weight(
        name=of_kernel,
        shape=shape,
        initializer=with_fan_in(layer.kernel_initializer, fan_in),
        regularizer=layer.kernel_regularizer,
    )
    bias = None
    if bias_shape is not None:
        bias = layer.add_weight(
            name=of_bias,
            shape=bias_shape,
            initializer=fresh(layer.bias_initializer),
            regularizer=bias_regularizer,
        )
    setattr(layer, of_kernel, kernel)
    setattr(layer, of_bias, bias)


def add_on_group(
    layer: GroupLayer,
    name: str,
    channels: int,
    filters: int,
    use_bias: bool = True,
) -> None:
    """Creates the variables of a linear map on the group of the layer."""
    order = layer.group.order
    add(
        layer,
        name,
        (order, channels, filters),
        (filters,) if use_bias else None,
        order * channels,
    )


def kernel_and_bias(
    layer: GroupLayer, name: str
) -> tuple[Tensor, Tensor | None]:
    """The kernel and the bias of a linear map; None for no bias."""
    kernel, bias = (getattr(layer, variable) for variable in _names(name))
    return (
        ops.convert_to_tensor(kernel),
        None if bias is None else ops.convert_to_tensor(bias),
    )


def on_group(layer: GroupLayer, name: str, x: Tensor) -> Tensor:
    """Applies a linear map on the group of the layer."""
    return applied(layer, x, *kernel_and_bias(layer, name))


def applied(
    layer: GroupLayer, x: Tensor, kernel: Tensor, bias: Tensor | None
) -> Tensor:
    """Applies the linear map of any kernel and bias."""
    # `recompute=False` promises second derivatives, which blocks may lack.
    basis = None if layer.recompute else "regular"
    return group_linear(x, kernel, bias, layer.group, basis)


def _names(name: str) -> tuple[str, str]:
    """The names of the variables of a linear map."""
    prefix = f"{name}_" if name else ""
    return f"{prefix}kernel", f"{prefix}bias"
