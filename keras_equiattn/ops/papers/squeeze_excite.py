"""Squeeze-and-Excitation: one weight per channel from the whole feature map."""

from keras import ops

from keras_equiattn.ops._arguments import checked
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.numerics import dtype_name
from keras_equiattn.ops.numerics import dtype_of_sums
from keras_equiattn.ops.numerics import in_full_precision
from keras_equiattn.ops.numerics import mean


@checked()
def squeeze_excite(
    x: Float[Tensor, "batch height width *order channels"],
    reduce_kernel: Float[Tensor, "channels hidden"],
    reduce_bias: Float[Tensor, " hidden"],
    expand_kernel: Float[Tensor, "hidden channels"],
    expand_bias: Float[Tensor, " channels"],
) -> tuple[
    Float[Tensor, "batch height width *order channels"],
    Float[Tensor, "batch channels"],
]:
    """`y = s x`, where `s` comes from the mean of `x` over space and group.

    `s = sigmoid(relu(mean W_1 + b_1) W_2 + b_2)`. The mean is invariant under
    every group, so that `s` is too.

    Args:
        x: images or feature maps on any group.
        reduce_kernel, reduce_bias: `W_1` and `b_1`.
        expand_kernel, expand_bias: `W_2` and `b_2`.

    Returns:
        `y` like `x`, and `s`.

    Raises:
        ValueError: for shapes that do not fit.
        TypeError: for tensors that do not hold floating point numbers.
    """
    dtype = dtype_name(x)
    axes = tuple(range(1, len(x.shape) - 1))
    reduce_kernel, reduce_bias, expand_kernel, expand_bias = map(
        in_full_precision,
        (reduce_kernel, reduce_bias, expand_kernel, expand_bias),
    )
    # Not `ops.matmul`: under PyTorch it rounds float64 to float32.
    statistic = mean(x, axes, dtype_of_sums(x))
    hidden = ops.relu(statistic @ reduce_kernel + reduce_bias)
    scores = hidden @ expand_kernel + expand_bias
    channel = ops.cast(ops.sigmoid(scores), dtype)
    return x * ops.expand_dims(channel, axes), channel
