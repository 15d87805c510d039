"""Checks of arguments; errors say what was received and what is accepted."""

import difflib
import math
import operator
import os
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import keras

# The largest stride, window and dilation rate, and how many numbers a weight
# may hold: backends count with 32 bits.
LARGEST = 2**31 - 1


def integer(value: Any, name: str, least: int = 1) -> int:
    """An integer of any type, `least` or more; booleans are refused."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        kind = {0: "a non-negative integer", 1: "a positive integer"}.get(
            least, f"an integer of at least {least}"
        )
        raise ValueError(f"`{name}` must be {kind}. Received: {value!r}")
    return number


def optional_integer(value: Any, name: str, least: int = 1) -> int | None:
    """None, or an integer that is `least` or more."""
    if value is None:
        return None
    try:
        return integer(value, name, least)
    except ValueError as error:
        raise ValueError(
            str(error).replace("must be", "must be None or", 1)
        ) from None


def number(
    value: Any, name: str, kind: str, valid: Callable[[Any], bool]
) -> float:
    """A finite number that is `valid`; `kind` says in words what that is."""
    try:
        finite = not isinstance(value, bool) and math.isfinite(value)
        fits = finite and valid(value)
    except (OverflowError, TypeError, ValueError):
        fits = False
    if not fits:
        raise ValueError(f"`{name}` must be {kind}. Received: {value!r}")
    return float(value)


def optional_scale(value: Any, name: str) -> float | None:
    """None, or a positive number that scores are multiplied by."""
    if value is None:
        return None
    accepted = "None or a positive number"
    return number(value, name, accepted, lambda n: n > 0)


def rate(value: Any, name: str) -> float:
    """The rate of a dropout."""
    return number(
        value, name, "a number from 0 to below 1", lambda n: 0 <= n < 1
    )


def seed(value: Any) -> int | None:
    """None, or an integer that the seeds of every backend can hold."""
    if value is not None and integer(value, "seed", 0) > LARGEST:
        raise ValueError(f"`seed` must be below 2**31. Received: {value!r}")
    return None if value is None else operator.index(value)


def pair(value: Any, name: str) -> tuple[int, int]:
    """One positive integer for both axes, or a sequence of two."""
    try:
        first, second = value
    except (TypeError, ValueError):
        first = second = value
    try:
        found = integer(first, name), integer(second, name)
    except ValueError:
        raise ValueError(
            f"`{name}` must be a positive integer or a pair of them. "
            f"Received: {value!r}"
        ) from None
    if max(found) > LARGEST:
        raise ValueError(f"`{name}` must be below 2**31. Received: {value!r}")
    return found


def divisible(filters: int, parts: int, name: str) -> None:
    """Raises unless the filters divide into this many equal parts."""
    if filters % parts:
        raise ValueError(
            f"filters={filters} is not divisible by {name}={parts}."
        )


def weight_size(shape: Sequence[int], name: str) -> None:
    """Raises for a weight too large for any memory, before it is allocated."""
    numbers = math.prod(shape)
    if numbers > LARGEST:
        raise ValueError(
            f"{name} would hold {numbers:,} numbers, {4 * numbers / 2**30:,.0f}"
            " GiB in single precision; take fewer filters or smaller windows. "
            f"Fewer than 2**31 are allowed. Received: shape={tuple(shape)}"
        )


def strides_or_dilation(
    strides: tuple[int, int], dilation_rate: tuple[int, int]
) -> None:
    """Raises if both are above 1, which no backend's convolution takes."""
    if max(strides) > 1 and max(dilation_rate) > 1:
        raise ValueError(
            "Strides above 1 and dilation rates above 1 cannot be combined. "
            f"Received: strides={strides}, dilation_rate={dilation_rate}"
        )


def window_size(value: Any, name: str) -> int | None:
    """Rows and columns of a square window; None for the whole image."""
    if value is None:
        return None
    try:
        size = integer(value, name)
    except ValueError:
        size = 0
    if size % 2 == 0:
        raise ValueError(
            f"`{name}` must be an odd positive integer, so that the window has "
            f"a centre, or None for the whole image. Received: {value!r}"
        )
    return size


def place(value: Any, name: str, size: Sequence[int | None]) -> tuple[int, int]:
    """A position `(row, column)` of an output of this size."""
    try:
        row, column = (integer(n, name, 0) for n in value)
    except (TypeError, ValueError):
        row = column = -1
    inside = all(
        n >= 0 and (limit is None or n < limit)
        for n, limit in zip((row, column), size, strict=True)
    )
    if not inside:
        raise ValueError(
            f"`{name}` must be (row, column) within the output of size "
            f"{tuple(size)}. Received: {value!r}"
        )
    return row, column


def fits(shape: Sequence[int | None], expected: Sequence[int | None]) -> bool:
    """Whether a shape is the expected one, where both are known."""
    return len(shape) == len(expected) and all(
        None in pair or pair[0] == pair[1]
        for pair in zip(shape, expected, strict=True)
    )


def flag(value: Any, name: str) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"`{name}` must be True or False. Received: {value!r}")
    return value


def exactness(value: Any, name: str) -> bool | str:
    """True, False or "call", with which the sizes of each call are checked."""
    is_text = isinstance(value, str) and value == "call"
    if not isinstance(value, bool) and not is_text:
        raise ValueError(
            f"`{name}` must be True or False or 'call'. Received: {value!r}"
        )
    return value


def path(value: Any, name: str) -> str:
    """A path, as a string that is not empty."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise TypeError(f"`{name}` must be a path. Received: {name}={value!r}")
    return os.fspath(value)


def choice(value: Any, name: str, known: Iterable[Any]) -> Any:
    """One of a few values."""
    known = tuple(known)
    try:
        found = value in known
    except ValueError:  # an array, which compares entry by entry
        found = False
    if not found:
        raise ValueError(
            f"`{name}` must be {' or '.join(map(repr, known))}. "
            f"Received: {value!r}"
        )
    return value


def known_name(
    value: Any,
    what: str,
    known: Iterable[str],
    also: str = "",
    plural: str | None = None,
) -> str:
    """Checks that a name is a known one; the error suggests the closest.

    `also` says in words what else is accepted; `plural` is the plural of
    `what`, or None if it only adds an s.
    """
    known = list(known)
    if value not in known:
        close = difflib.get_close_matches(str(value), known, n=1)
        hint = f" Did you mean '{close[0]}'?" if close else ""
        raise ValueError(
            f"Unknown {what} '{value}'.{hint} "
            f"The {plural or what + 's'} are: {', '.join(known)}{also}."
        )
    return str(value)


def data_format(value: str | None) -> str:
    """Resolves None to the configured default."""
    if value is None:
        return str(keras.config.image_data_format())
    known = ("channels_last", "channels_first")
    return str(choice(value, "data_format", known))
