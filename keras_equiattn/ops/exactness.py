"""When a windowed operation is exactly equivariant.

A convolution or pooling window moves over the grid from the top left corner.
Turned or mirrored, the grid of windows must fall onto itself: no row or column
may be left over at one side only. That depends on size, window, strides and
padding, and on nothing else, so it can be decided before anything runs.
"""

from collections.abc import Iterable
from typing import NamedTuple
from typing import SupportsIndex
from typing import TypeAlias

from keras_equiattn import _checks
from keras_equiattn import groups
from keras_equiattn.groups import Group
from keras_equiattn.ops.geometry import effective_window
from keras_equiattn.ops.geometry import same_padding

Pair: TypeAlias = SupportsIndex | Iterable[SupportsIndex]
Size: TypeAlias = SupportsIndex | Iterable[SupportsIndex | None] | None


class _Axis(NamedTuple):
    """Windows along one axis; sizes in pixels."""

    size: int | None
    window: int
    strides: int
    dilation: int


def is_exact(
    group: str | Group,
    size: Size,
    window: Pair,
    strides: Pair = 1,
    dilation: Pair = 1,
    padding: str = "valid",
) -> bool:
    """Whether a windowed operation commutes with a group, up to rounding.

    Along an axis of size `n`, with a window that covers `k` pixels and stride
    `s`, the windows fall onto themselves under reversal of the axis if and
    only if

    - "valid": `n - k` is divisible by `s`;
    - "same": `t = (ceil(n / s) - 1) s + k - n`, the padding, is even and not
      negative.

    `"z2"` does not need this, `"z2m"` needs it along the width, and all other
    groups need it along both axes. Groups with quarter turns also exchange the
    axes: window, strides and dilation must be equal along them. For groups
    that do not act on the grid ("p8", "p12", ...) the answer is about the
    subgroup that does: under all other elements operations are approximate.

    Args:
        group: a group or its name.
        size: height and width of the input, or one integer for both. None is
            a size known only at run time, for which the operation is exact only
            if it is exact for every size.
        window: kernel or pool size, an integer or a pair.
        strides: an integer or a pair.
        dilation: dilation rate of the window, an integer or a pair.
        padding: "valid" or "same".

    Returns:
        True or False; False also for a window that does not fit the size.

    Raises:
        ValueError: for arguments of another form.
    """
    axes = _axes(size, window, strides, dilation)
    return _is_exact(groups.get(group), axes, padding)


def require_exact(
    name: str,
    group: str | Group,
    size: Size,
    window: Pair,
    strides: Pair = 1,
    dilation: Pair = 1,
    padding: str = "valid",
    allow_unknown: bool = False,
) -> None:
    """Raises `ValueError` unless `is_exact`, and says what would be exact.

    Args:
        name: the name of the operation in the message.
        group, size, window, strides, dilation, padding: see `is_exact`.
        allow_unknown: whether an unknown size passes if some size is exact.
    """
    group = groups.get(group)
    axes = _axes(size, window, strides, dilation)
    if _is_exact(group, axes, padding, allow_unknown):
        return
    sizes, windows, steps, rates = zip(*axes, strict=True)
    raise ValueError(
        f"{name} would not be exactly equivariant under '{group.name}': "
        f"window {windows}, strides {steps}, dilation {rates}, "
        f"padding '{padding}' on an input of size {sizes} do not map onto "
        f"themselves when the input is turned or mirrored. "
        f"{_advice(group, axes, padding, allow_unknown)} "
        "Or pass `exact=False` to accept an approximate layer."
    )


def _is_exact(
    group: Group,
    axes: tuple[_Axis, _Axis],
    padding: str,
    allow_unknown: bool = False,
) -> bool:
    """Whether the group maps the windows along both axes onto themselves."""
    _checks.choice(padding, "padding", ("valid", "same"))
    height, width = axes
    if not all(_fits(axis, padding) for axis in axes):
        return False
    if group.quarter_turns and height[1:] != width[1:]:
        return False
    # The axes that an element reverses: "z2" has no mirror, "z2m" mirrors
    # columns only.
    reversed_ = {"z2": (), "z2m": (width,)}.get(group.name, axes)
    return all(_reversible(axis, padding, allow_unknown) for axis in reversed_)


def _fits(axis: _Axis, padding: str) -> bool:
    """Whether at least one window lies within the padded image."""
    extent = effective_window(axis.window, axis.dilation)
    return padding == "same" or axis.size is None or extent <= axis.size


def _reversible(axis: _Axis, padding: str, allow_unknown: bool) -> bool:
    """The rule for one axis under reversal."""
    extent = effective_window(axis.window, axis.dilation)
    if axis.size is None and axis.strides > 1:
        return allow_unknown  # with strides above 1 some size is exact
    if padding == "same":
        # The last window may end too early if windows have gaps between them.
        gaps = same_padding(*axis)
        return gaps >= 0 and gaps % 2 == 0
    if axis.strides == 1 or axis.size is None:
        return True  # no window position is left over
    return (axis.size - extent) % axis.strides == 0


def _advice(
    group: Group,
    axes: tuple[_Axis, _Axis],
    padding: str,
    allow_unknown: bool,
) -> str:
    """Returns the advice of the message: what would be exact instead."""
    height, width = axes
    if group.quarter_turns and height[1:] != width[1:]:
        return (
            "Quarter turns need a square window and equal strides and "
            "dilation rates along both axes."
        )
    if height.strides == width.strides == 1:
        return "With padding 'same' use an odd window, or use padding 'valid'."

    def exact(size: Size, strides: Pair) -> bool:
        windows, dilations = zip(height[1::2], width[1::2], strict=True)
        return is_exact(group, size, windows, strides, dilations, padding)

    parts = []
    strides = (height.strides, width.strides)
    around = max((axis.size for axis in axes if axis.size), default=32)
    sizes = sorted(
        (n for n in range(1, around + 16) if exact(n, strides)),
        key=lambda n: abs(n - around),
    )[:4]
    if sizes:
        which = "the nearest" if any(axis.size for axis in axes) else "some"
        parts.append(
            f"With these strides, {which} exact sizes are: {_list(sizes)}."
        )
    if height.size is None or width.size is None:
        parts.append("A size known only at run time is exact with strides 1.")
        if not allow_unknown:
            parts.append(
                'With `exact="call"` the size is checked when the layer is '
                "called."
            )
    else:
        size = (height.size, width.size)
        # Strides larger than the image leave room for one window alone.
        most = min(max(strides), *size) + 1
        steps = [s for s in range(1, most + 1) if exact(size, s)]
        if steps:
            parts.append(
                f"On this size, the exact strides up to {most} are: "
                f"{_list(steps)}."
            )
    if height.window % 2:  # even windows would need other sizes
        parts.append(
            "Strides 1 followed by `SpatialPooling2D(2)` are exact on even "
            "sizes."
        )
    return " ".join(parts)


def _list(numbers: Iterable[int]) -> str:
    """The numbers in ascending order, for a message."""
    return ", ".join(map(str, sorted(numbers)))


def _axes(
    size: Size, window: Pair, strides: Pair = 1, dilation: Pair = 1
) -> tuple[_Axis, _Axis]:
    """The windows along rows and along columns, checked."""
    sizes = tuple(size) if isinstance(size, Iterable) else (size, size)
    if len(sizes) != 2:
        raise ValueError(
            "`size` must be an integer, None or a pair of them. "
            f"Received: {size!r}"
        )
    known = [n if n is None else _checks.integer(n, "size") for n in sizes]
    pairs = [
        _checks.pair(window, "window"),
        _checks.pair(strides, "strides"),
        _checks.pair(dilation, "dilation"),
    ]
    height, width = map(_Axis, known, *pairs)
    return height, width
