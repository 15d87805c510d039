"""Linear maps on a group, pixel by pixel."""

from keras import activations
from keras import ops

from keras_equiattn import _checks
from keras_equiattn import groups
from keras_equiattn.groups import Group
from keras_equiattn.ops import backend
from keras_equiattn.ops._arguments import checked
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.group import dispatch
from keras_equiattn.ops.group.block_linear import block_linear

# How a linear map is computed: as one matrix, or as blocks.
BASES = ("regular", "irreps")
# The activations of Keras that may come before a linear map. Each value is
# activated by itself, so that a feature map can be activated part by part.
ELEMENTWISE_ACTIVATIONS = (
    "elu",
    "gelu",
    "leaky_relu",
    "relu",
    "sigmoid",
    "silu",
    "tanh",
)


@checked()
def group_linear(
    x: Float[Tensor, "batch height width elements channels"],
    kernel: Float[Tensor, "elements channels filters"],
    bias: Float[Tensor, " filters"] | None,
    group: str | Group,
    basis: str | None = None,
    input_activation: str | None = None,
) -> Float[Tensor, "batch height width elements filters"]:
    """A linear map on the group, pixel by pixel: a 1 x 1 group convolution.

    `y(x, p) = sum_r f(x, r) W(p^-1 r) + b`, with the feature map `f` after the
    activation of the input, if there is one.

    Args:
        x: feature maps on the group.
        kernel: the map.
        bias: added for every group element; None for none.
        group: a group or its name.
        basis: how it is computed, with equal results but for rounding.
            "regular" multiplies with one matrix over group elements and
            channels. "irreps" multiplies with the blocks of this matrix in the
            basis of the irreducible representations. Unless
            `config.disable_recompute` was called, a map by blocks cannot be
            differentiated twice under TensorFlow, nor in forward mode (such as
            `jax.jvp`) under any backend. None takes "irreps" on a CPU, in
            single or double precision, for groups of four elements or more,
            where both input and output have at least 192 values per pixel, 384
            under TensorFlow: there a training step takes less time, as measured
            for six groups in single precision; p4 under JAX with 192 values was
            the one exception.
        input_activation: what is applied to `x` first, value by value: "elu",
            "gelu", "leaky_relu", "relu", "sigmoid", "silu" or "tanh"; None is
            the identity. With "irreps" its result is not kept for the gradient,
            unless `config.disable_recompute` was called.

    Returns:
        Feature maps on the group.

    Raises:
        ValueError: for shapes that do not fit, and for an unknown basis or
            activation.
    """
    group = groups.get(group)
    _checks.choice(basis, "basis", (None, *BASES))
    _checks.choice(
        input_activation, "input_activation", (None, *ELEMENTWISE_ACTIVATIONS)
    )
    order, channels, filters = kernel.shape
    if order != group.order:
        raise ValueError(
            f"A linear map on '{group.name}' has a kernel ({group.order}, "
            "channels, filters) and takes (batch, height, width, "
            f"{group.order}, channels). Received: "
            f"kernel.shape={tuple(kernel.shape)}, x.shape={tuple(x.shape)}"
        )
    if dispatch.by_blocks(x, filters, basis):
        return block_linear(x, kernel, bias, group, input_activation)
    if input_activation is not None:
        x = activations.get(input_activation)(x)
    relative = backend.constant(group.relative_table, kernel)
    copies = ops.take(kernel, relative, axis=0)  # (p, r, c, d)
    folded = ops.reshape(
        ops.transpose(copies, (1, 2, 0, 3)), (order * channels, order * filters)
    )
    size = ops.shape(x)[:3]
    y = ops.reshape(x, (*size, order * channels))
    y = backend.times_matrix(y, folded)
    y = ops.reshape(y, (*size, order, filters))
    return y if bias is None else y + bias
