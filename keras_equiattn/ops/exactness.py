"""When a windowed operation is exactly equivariant.

A convolution or pooling window moves over the grid from the top left corner.
Turned or mirrored, the grid of windows must fall onto itself: no row or column
may be left over at one side only. That depends on size, window, strides and
padding, and on nothing else, so it can be decided before anything runs.
"""

from keras_equiattn import groups
from keras_equiattn.groups import Group

Pair = int | tuple[int, int]
Size = int | None | tuple[int | None, int | None]


def effective_window(window: int, dilation: int) -> int:
    """Extent of a dilated window, in pixels."""
    return dilation * (window - 1) + 1


def output_size(
    size: int | None,
    window: int,
    strides: int = 1,
    dilation: int = 1,
    padding: str = "valid",
) -> int | None:
    """Number of window positions along one axis, as Keras counts them."""
    if size is None:
        return None
    if padding == "same":
        return -(-size // strides)
    return (size - effective_window(window, dilation)) // strides + 1


def is_exact(
    group: str | Group,
    size: Size,
    window: Pair,
    strides: Pair = 1,
    dilation: Pair = 1,
    padding: str = "valid",
) -> bool:
    """Whether a windowed operation commutes with the group, to rounding.

    Along an axis of size `n`, with a window that covers `k` pixels and stride
    `s`, the windows fall onto themselves under reversal of the axis if and
    only if

    - "valid": `n - k` is divisible by `s`;
    - "same": `t = (ceil(n / s) - 1) s + k - n`, the padding, is even and not
      negative.

    `"z2"` asks for nothing, `"z2m"` for this along the width, all others along
    both axes. Groups with quarter turns also exchange the axes: window,
    strides and dilation must be equal along them. For groups that do not act
    on the grid ("p8", "p12", ...) the answer is about their subgroup that
    does: between its elements every operation is approximate.

    Args:
        group: a group or its name.
        size: height and width of the input, or one integer for both. None is
            a size known only at run time: exact only if every size would be.
        window: kernel or pool size, an integer or a pair.
        strides: an integer or a pair.
        dilation: dilation rate of the window, an integer or a pair.
        padding: "valid" or "same".

    Returns:
        True or False.
    """
    group = groups.get(group)
    if padding not in ("valid", "same"):
        raise ValueError(
            f"`padding` must be 'valid' or 'same'. Received: {padding!r}"
        )
    axes = list(
        zip(
            *(_pair(value) for value in (size, window, strides, dilation)),
            strict=True,
        )
    )
    if group.order == 1:
        return True
    if group.name == "z2m":  # mirrors columns only
        return _reversible(*axes[1], padding)
    if group.quarter_turns and axes[0][1:] != axes[1][1:]:
        return False
    return all(_reversible(*axis, padding) for axis in axes)


def require_exact(
    name: str,
    group: str | Group,
    size: Size,
    window: Pair,
    strides: Pair = 1,
    dilation: Pair = 1,
    padding: str = "valid",
) -> None:
    """Raises `ValueError` unless `is_exact`; the message says what would be.

    Args:
        name: what to call the operation in the message.
        group, size, window, strides, dilation, padding: as in `is_exact`.
    """
    group = groups.get(group)
    if is_exact(group, size, window, strides, dilation, padding):
        return
    pairs = [_pair(value) for value in (size, window, strides, dilation)]
    raise ValueError(
        f"{name} would not be exactly equivariant under '{group.name}': "
        f"window {pairs[1]}, strides {pairs[2]}, dilation {pairs[3]}, "
        f"padding '{padding}' on an input of size {pairs[0]} do not map onto "
        f"themselves when the input is turned or mirrored. "
        f"{_advice(group, *pairs, padding)} "
        "Or pass `exact=False` to accept an approximate layer."
    )


def _reversible(
    size: int | None, window: int, strides: int, dilation: int, padding: str
) -> bool:
    """The rule for one axis under reversal."""
    if size is None and strides > 1:
        return False
    extent = effective_window(window, dilation)
    if size is None or strides == 1:
        # No window position is left over; "same" must pad evenly.
        return padding == "valid" or extent % 2 == 1
    if padding == "valid":
        return (size - extent) % strides == 0
    positions = -(-size // strides)
    total = (positions - 1) * strides + extent - size
    return total >= 0 and total % 2 == 0


def _advice(group, size, window, strides, dilation, padding) -> str:  # type: ignore[no-untyped-def]
    """One sentence that names what would be exact instead."""
    if group.quarter_turns and any(
        value[0] != value[1] for value in (window, strides, dilation)
    ):
        return (
            "Quarter turns need a square window and equal strides and "
            "dilation rates along both axes."
        )

    def exact(n: int | None, s: tuple[int, int] = strides) -> bool:
        return is_exact(group, n, window, s, dilation, padding)

    if max(strides) == 1:
        return "With padding 'same' use an odd window, or use padding 'valid'."
    known = [n for n in size if n is not None]
    around = max(known, default=32)
    sizes = sorted(
        (n for n in range(max(window), around + 16) if exact(n)),
        key=lambda n: (abs(n - around), n),
    )[:4]
    parts = []
    if sizes:
        listed = ", ".join(map(str, sorted(sizes)))
        parts.append(f"With these strides sizes such as {listed} are exact.")
    if len(known) == 2:
        fitting = [
            s
            for s in range(1, max(strides) + 2)
            if is_exact(group, size, window, s, dilation, padding)
        ]
        if fitting:
            listed = ", ".join(map(str, fitting))
            parts.append(f"On this size these strides are exact: {listed}.")
    else:
        parts.append("A size known only at run time is exact with strides 1.")
    parts.append(
        "A layer with strides 1 followed by `SpatialPooling2D` keeps more "
        "sizes exact."
    )
    return " ".join(parts)


def _pair(value):  # type: ignore[no-untyped-def]
    return (value, value) if value is None or isinstance(value, int) else value
