"""Images reduced by windows that do not overlap, and brought back."""

from keras import ops

from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.convolution import conv


def reduce_space(
    x: Float[Tensor, "batch height width channels"],
    kernel: Float[Tensor, "rows columns channels reduced_channels"],
    bias: Float[Tensor, " reduced_channels"],
) -> Float[Tensor, "batch down along reduced_channels"]:
    """One pixel for each `rows x columns` of an image.

    The first window sits on the first pixel; the last ones may reach beyond
    the image, where they see zeros.
    """
    window = kernel.shape[:2]
    size = ops.shape(x)[1:3]
    beyond = [(0, -n % w) for n, w in zip(size, window, strict=True)]
    x = ops.pad(x, [(0, 0), *beyond, (0, 0)])
    return conv(x, kernel, strides=tuple(window), padding="valid") + bias


def enlarge_space(
    x: Float[Tensor, "batch down along channels"],
    window: tuple[int, int],
    size: tuple[int | Tensor, int | Tensor],
) -> Float[Tensor, "batch height width channels"]:
    """Each pixel over all of its window, as far as the image reaches."""
    rows, columns = window
    height, width = size
    x = ops.repeat(ops.repeat(x, rows, axis=1), columns, axis=2)
    return x[:, :height, :width]
