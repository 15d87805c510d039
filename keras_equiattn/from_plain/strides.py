"""Strides whose positions are kept when an image is turned."""

from typing import Any
from typing import NoReturn

from keras_equiattn.from_plain.conversion import Conversion
from keras_equiattn.ops.exactness import is_exact
from keras_equiattn.ops.exactness import require_exact
from keras_equiattn.ops.geometry import output_size

Size = tuple[int | None, ...]
Pair = tuple[int, ...]


def exactness(
    to: Conversion,
    size: Size,
    window: Pair,
    strides: Pair,
    dilation: Pair | int,
    padding: str,
) -> bool | str:
    """The argument `exact` of a layer.

    Args:
        to: the conversion; receives a note if inexact strides stay.
        size: height and width of the input.
        window: the size of the windows.
        strides: the distance of the windows.
        dilation: the dilation of the windows.
        padding: "valid" or "same".

    Returns:
        True where windows of this kind are exact and give the size that the
        plain layer gives, "call" where that depends on a size that is not known
        yet, and False otherwise.
    """
    options = (window, strides, dilation, padding)
    if is_exact(to.group, size, *options):
        # Padding that became the same at all sides may have enlarged the
        # output.
        plain = to.output_shape[1:-1]
        return plain in ((), _outputs(size, *options))
    if None in size and not to.keep:
        try:
            require_exact("", to.group, size, *options, allow_unknown=True)
        except ValueError:
            return False
        return "call"
    if to.keep:
        to.note("It stays, and is not exactly equivariant.")
    return False


def stride_one(size: Size, window: Pair, dilation: Pair, padding: str) -> Size:
    """Height and width after a convolution with strides 1."""
    return _outputs(size, window, (1, 1), dilation, padding)


def _outputs(
    size: Size, window: Pair, strides: Pair, dilation: Pair | int, padding: str
) -> Size:
    """Height and width of the output."""
    rates = (dilation, dilation) if isinstance(dilation, int) else dilation
    return tuple(
        output_size(n, k, s, d, padding)
        for n, k, s, d in zip(size, window, strides, rates, strict=True)
    )


def fitting_window(
    to: Conversion, size: Size, strides: Pair
) -> tuple[int, int] | None:
    """The pooling windows that are exact and give the size of the plain layer.

    There is one such window along each axis: it has as many pixels as there are
    from the start of the last window to the border.

    Args:
        to: the conversion, which knows the size.
        size: height and width of the input.
        strides: the distance of the windows.

    Returns:
        Rows and columns; None if there is no such window.
    """
    target = to.output_shape[1:3]
    if None in size or None in target:
        return None
    window = tuple(
        n - (m - 1) * s for n, m, s in zip(size, target, strides, strict=True)
    )
    if min(window) < 1 or not is_exact(to.group, size, window, strides):
        return None
    return window[0], window[1]


def refuse_strides(
    to: Conversion,
    size: Size,
    window: Pair,
    strides: Pair,
    dilation: Any,
    padding: str,
) -> NoReturn:
    """Refuses a layer whose windows are not exact, and says why."""
    unequal = window[0] != window[1] or strides[0] != strides[1]
    if to.group.quarter_turns and unequal:
        to.refuse(
            "quarter turns need square windows and equal strides "
            f"(the windows have {window} pixels, the strides are {strides}). "
            "Use those, or a group without quarter turns, such as 'p2m'."
        )
    message = ""
    try:
        require_exact("it", to.group, size, window, strides, dilation, padding)
    except ValueError as error:
        message = str(error).partition(" Or pass ")[0]
    to.refuse(
        f"{message} Build the plain network for such a size, or pass "
        "`downsampling='keep'` to accept that it is not exact."
    )
