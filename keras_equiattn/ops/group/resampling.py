"""Larger feature maps: pixels divided into several, or added at the border."""

from keras import ops

from keras_equiattn import _checks
from keras_equiattn.ops._arguments import checked
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Shape
from keras_equiattn.ops._types import Tensor

INTERPOLATIONS = ("nearest", "bilinear")
PADDINGS = ("zeros", "reflect", "wrap")


@checked()
def spatial_upsample(
    x: Float[Tensor, "batch height width order channels"],
    factors: int | tuple[int, int],
    interpolation: str = "nearest",
) -> Float[Tensor, "batch new_height new_width order channels"]:
    """Divides every pixel into `factors` rows and columns.

    Args:
        x: feature maps on any group.
        factors: rows and columns that a pixel becomes, an integer or a pair.
        interpolation: "nearest" repeats the value of the pixel; "bilinear"
            mixes it with its neighbours, weighted by the distances between
            centres. Beyond the border, the outermost pixels are repeated.

    Returns:
        Feature maps, `factors` times as high and wide.

    Raises:
        ValueError: for bad factors, and an unknown interpolation.
    """
    factors = _checks.pair(factors, "factors")
    _checks.choice(interpolation, "interpolation", INTERPOLATIONS)
    for axis, factor in zip((1, 2), factors, strict=True):
        if interpolation == "nearest":
            x = ops.repeat(x, factor, axis=axis)
        else:
            x = _interpolate(x, factor, axis)
    return x


def _interpolate(
    x: Float[Tensor, "batch height width order channels"],
    factor: int,
    axis: int,
) -> Float[Tensor, "batch new_height new_width order channels"]:
    """Linear interpolation along one axis.

    It is not `keras.ops.image.resize`, which TensorFlow computes in float32
    alone.
    """
    first, all_but_last, all_but_first, last = (
        x[(slice(None),) * axis + (slice(*ends),)]
        for ends in ((0, 1), (0, -1), (1, None), (-1, None))
    )
    before = ops.concatenate([first, all_but_last], axis=axis)
    after = ops.concatenate([all_but_first, last], axis=axis)
    parts = []
    for place in range(factor):
        # How far the centre of the part is from that of the pixel, in pixels.
        offset = (place + 0.5) / factor - 0.5
        other = after if offset > 0 else before
        parts.append((1 - abs(offset)) * x + abs(offset) * other)
    size = list(ops.shape(x))
    size[axis] = size[axis] * factor
    return ops.reshape(ops.stack(parts, axis=axis + 1), size)


@checked()
def spatial_pad(
    x: Float[Tensor, "batch height width order channels"],
    padding: tuple[int, int],
    mode: str = "zeros",
) -> Float[Tensor, "batch new_height new_width order channels"]:
    """Adds rows and columns, the same number at opposite sides.

    Args:
        x: feature maps on any group.
        padding: how many rows are added above and below, and how many columns
            at the left and at the right.
        mode: "zeros"; "reflect": the image continues as its mirror image,
            which does not repeat the outermost pixels; "wrap": the image
            continues with the pixels of the opposite side.

    Returns:
        Feature maps with more rows and columns.

    Raises:
        ValueError: if more is added than the image has, and for an unknown
            mode.
    """
    check_padding(tuple(x.shape)[1:3], padding, mode)
    for axis, count in zip((1, 2), padding, strict=True):
        x = _padded(x, count, axis, mode)
    return x


def check_padding(size: Shape, padding: tuple[int, int], mode: str) -> None:
    """Raises where an image has fewer pixels than its padding shows.

    Args:
        size: height and width of the image.
        padding, mode: see `spatial_pad`.
    """
    _checks.choice(mode, "mode", PADDINGS)
    for n, count in zip(size, padding, strict=True):
        # The mirror image leaves out the outermost pixel.
        least = {"zeros": 0, "reflect": count + 1, "wrap": count}[mode]
        if isinstance(n, int) and n < least:
            raise ValueError(
                f"Padding '{mode}' of {count} pixels needs at least {least} "
                f"along each axis. Received: an image of size {tuple(size)}"
            )


def _padded(
    x: Float[Tensor, "batch height width order channels"],
    count: int,
    axis: int,
    mode: str,
) -> Float[Tensor, "batch new_height new_width order channels"]:
    """Pads one axis at both ends."""
    if mode == "zeros":
        pads = [(count, count) if n == axis else (0, 0) for n in range(5)]
        return ops.pad(x, pads)

    def part(start: int | None, end: int | None) -> Tensor:
        return x[(*[slice(None)] * axis, slice(start, end))]

    if mode == "wrap":
        ends = part(-count, None), part(None, count)
    else:
        ends = part(1, count + 1), part(-count - 1, -1)
        ends = tuple(ops.flip(end, axis=axis) for end in ends)
    return ops.concatenate([ends[0], x, ends[1]], axis=axis)
