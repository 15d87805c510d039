"""Checks the arguments of public operations against their annotations."""

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any
from typing import TypeVar

import keras

from keras_equiattn import _checks
from keras_equiattn import groups
from keras_equiattn.ops._types import Shape

Function = TypeVar("Function", bound=Callable[..., Any])
# Name of an axis -> its sizes, and the argument that has them.
_Sizes = dict[str, tuple[Shape, str]]

# Axes that may not be empty. A batch may have no images.
AT_LEAST_ONE = {"height", "width", "rows", "columns", "channels", "filters"}
AT_LEAST_ONE |= {"hidden", "heads", "half", "order"}
AT_LEAST_ONE |= {"query_order", "key_order", "neighbours"}


def checked(**parts: str) -> Callable[[Function], Function]:
    """A decorator that refuses arguments that do not fit the annotations.

    Tensors must have the rank of their annotated shape, and axes of one name
    must have the same size in all tensors, as far as sizes are known. `order`
    is the order of `group`, and `*order` stands for one axis or none. `Float`
    asks for floating point numbers. What is annotated as an integer or a pair
    of integers must be positive, and flags must be booleans. The operation
    checks all else.

    Args:
        **parts: the shapes of the items of an argument that is a tuple:
            `attention_spatial="rows columns 2 filters"` for the attribute
            `spatial` or `kernels_0` for the first item; None passes.

    Returns:
        The decorator. It adds only comparisons of static shapes to a call.
    """

    def decorate(function: Function) -> Function:
        parameters = inspect.signature(function).parameters
        checks = []
        for place, (name, parameter) in enumerate(parameters.items()):
            check = _check_of(name, parameter, parts)
            if check is not None:
                fallback = parameter.default
                checks.append((place, name, fallback, check))
        # The group is checked first, since it determines the order.
        checks.sort(key=lambda entry: entry[1] != "group")

        @functools.wraps(function)
        def wrapper(*arguments: Any, **options: Any) -> Any:
            sizes: _Sizes = {}
            for place, name, fallback, check in checks:
                if place < len(arguments):
                    value = arguments[place]
                else:
                    value = options.get(name, fallback)
                # Python reports a missing argument itself.
                if value is not inspect.Parameter.empty:
                    check(value, sizes)
            return function(*arguments, **options)

        return typing.cast(Function, wrapper)

    return decorate


def _check_of(
    name: str, parameter: inspect.Parameter, parts: dict[str, str]
) -> Callable[[Any, _Sizes], None] | None:
    """Returns the check of one argument, or None if it has none."""
    if parameter.kind is inspect.Parameter.VAR_KEYWORD:
        return None
    annotation = parameter.annotation
    if name == "group":
        return _check_group
    own = {
        part.removeprefix(f"{name}_"): shape.split()
        for part, shape in parts.items()
        if part.startswith(f"{name}_")
    }
    if own:
        return functools.partial(_check_parts, name, own, annotation)
    if name in parts:
        axes = parts[name].split()
        return functools.partial(_check_tensor, name, axes, True, True)
    if annotation is int:
        return lambda value, _: _ignore(_checks.integer(value, name))
    if annotation is bool:
        return lambda value, _: _ignore(_checks.flag(value, name))
    if annotation == tuple[int, int]:
        return functools.partial(_check_pair, name)
    choices = typing.get_args(annotation) or (annotation,)
    shapes = [choice for choice in choices if hasattr(choice, "dim_str")]
    others = set(choices) - {*shapes, type(None)}
    if not shapes or others:
        return None
    axes = shapes[0].dim_str.split()
    floats = "float32" in shapes[0].dtypes
    optional = type(None) in choices
    return functools.partial(_check_tensor, name, axes, floats, optional)


def _check_pair(name: str, value: Any, _: _Sizes) -> None:
    """Raises unless the value is a tuple of two positive integers."""
    if not isinstance(value, tuple):
        raise TypeError(
            f"`{name}` must be a tuple of two positive integers. "
            f"Received: {value!r}"
        )
    _checks.pair(value, name)


def _ignore(_: Any) -> None:
    """Drops the value that a check returns."""
    return None


def _check_group(group: Any, sizes: _Sizes) -> None:
    """Raises unless this is a group, and notes its order."""
    sizes["order"] = (groups.get(group).order,), "group"


def _check_parts(
    name: str,
    parts: dict[str, list[str]],
    annotation: Any,
    value: Any,
    sizes: _Sizes,
) -> None:
    """Checks the tensors of a tuple, by attribute or by index."""
    named = not next(iter(parts)).isdigit()
    if value is None and not named:
        return
    kind = annotation if named else (tuple, list)
    if not isinstance(value, kind) or (not named and len(value) != len(parts)):
        what = annotation.__name__ if named else f"a tuple of {len(parts)}"
        raise TypeError(f"`{name}` must be {what}. Received: {name}={value!r}")
    for part, axes in parts.items():
        tensor = getattr(value, part) if named else value[int(part)]
        label = f"{name}.{part}" if named else f"{name}[{part}]"
        _check_tensor(label, axes, True, named, tensor, sizes)


def _check_tensor(
    name: str,
    axes: list[str],
    floats: bool,
    optional: bool,
    value: Any,
    sizes: _Sizes,
) -> None:
    """Checks rank, sizes and kind of a tensor, and notes its sizes.

    Args:
        name: the name of the argument.
        axes: names of its axes, `*` before those that may be missing.
        floats: whether it must hold floating point numbers.
        optional: whether it may be None.
        value: the value that was passed.
        sizes: the sizes of all axes that are known so far.
    """
    if value is None and optional:
        return
    dtype = getattr(value, "dtype", None)
    if not hasattr(value, "shape") or (floats and not _is_float(dtype)):
        kind = "a tensor of floating point numbers" if floats else "a tensor"
        raise TypeError(
            f"`{name}` must be {kind}. Received: "
            + (f"{name}.dtype={dtype}" if dtype else f"{name}={value!r}")
        )
    try:
        shape = tuple(value.shape)
    except ValueError:  # TensorFlow may not know the rank yet
        return
    most = len(axes)
    least = most - sum(axis.startswith("*") for axis in axes)
    if not least <= len(shape) <= most:
        count = str(most) if least == most else f"{least} or {most}"
        raise ValueError(
            f"`{name}` must have {count} axes ({_written(axes)}). "
            f"Received: {name}.shape={shape}"
        )
    place = 0
    for axis in axes:
        key = axis.lstrip("*")
        optional_axis = axis != key
        here = shape[place : place + (len(shape) == most or not optional_axis)]
        place += len(here)
        if key in AT_LEAST_ONE and 0 in here:
            raise ValueError(
                f"`{name}` must have a size of at least one along {key} of "
                f"({_written(axes)}). Received: {name}.shape={shape}"
            )
        # All tensors have the axis, with one size, or none of them has it.
        keys = [key] if here else []
        for known in [axis, *keys] if optional_axis else keys:
            size = (int(key),) if key.isdigit() else here
            expected, source = sizes.setdefault(known, (size, name))
            if not _checks.fits(here, expected):
                raise ValueError(
                    f"`{name}` must have shape ({_written(axes)})"
                    f"{_reason(key, expected, source, name)}. "
                    f"Received: {name}.shape={shape}"
                )


def _reason(key: str, expected: Shape, source: str, name: str) -> str:
    """The reason why an axis must have its size, for a message."""
    if source == name:
        return ""
    if not expected:
        return f" without {key}, as `{source}` has none"
    return f" with {key}={expected[0]}, as in `{source}`"


def _written(axes: list[str]) -> str:
    """The axes as they stand in documentation."""
    return ", ".join(
        f"[{axis[1:]}]" if axis.startswith("*") else axis for axis in axes
    )


@functools.lru_cache(maxsize=64)
def _is_float(dtype: Any) -> bool:
    """Whether this is a dtype of floating point numbers."""
    try:
        name = keras.backend.standardize_dtype(dtype)
    except (TypeError, ValueError):
        return False
    return dtype is not None and keras.backend.is_float_dtype(name)
