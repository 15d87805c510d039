"""Measures and asserts the equivariance of functions, layers and models.

For your own layers too::

    from keras_equiattn.testing import assert_equivariant

    assert_equivariant(my_layer, "p4", (2, 8, 8, 4, 3))
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_equiattn import groups
from keras_equiattn.ops.action import group_action

Function = Callable[[Any], Any]


def equivariance_error(
    function: Function,
    group: str | groups.Group,
    sample: Any,
    *,
    elements: Iterable[int] | None = None,
    dtype: str | None = None,
    data_format: str = "channels_last",
    seed: int = 0,
) -> np.ndarray:
    """Worst relative error of `F(L_g x) = L_g F(x)`, for every element.

    `max |F(L_g x) - L_g F(x)| / max |F(x)|`, worst over the outputs of `F`.
    Outputs of rank 4 are taken as images and of rank 5 as feature maps on the
    group, on which `L_g` acts; outputs of a lower rank must be invariant.

    Args:
        function: a layer, a model or any callable on a tensor that returns a
            tensor, or a dict, list or tuple of them. Called in inference mode
            unless it says otherwise itself.
        group: a group or its name.
        sample: the input, of rank 4 (images) or 5 (feature maps on the
            group), or its shape with the batch axis: then normally
            distributed values are drawn.
        elements: indices of the elements to try; None means all of them. For
            groups that do not act on the grid `group.grid_elements` are those
            for which operators can be exact.
        dtype: of the input; None is the dtype of `sample`, "float32" for a
            shape.
        data_format: layout of input and outputs, for every axis the one that
            Keras gives to that rank.
        seed: of the drawn values.

    Returns:
        NumPy array with one error per element tried.

    Raises:
        ValueError: if shapes of `F(L_g x)` and `L_g F(x)` differ, or an
            output is not finite.
    """
    group = groups.get(group)
    x = _sample(sample, dtype, seed)
    expected = outputs_of(function(x))
    errors = []
    for element in _elements(group, elements):
        moved = act(x, group, element, data_format)
        actual = outputs_of(function(moved))
        errors.append(
            max(
                relative_difference(
                    actual[name],
                    act(expected[name], group, element, data_format),
                    f"output {name}, element {element} of '{group.name}'",
                )
                for name in expected
            )
        )
    return np.array(errors)


def assert_equivariant(
    function: Function,
    group: str | groups.Group,
    sample: Any,
    *,
    rtol: float = 1e-5,
    elements: Iterable[int] | None = None,
    dtype: str | None = None,
    data_format: str = "channels_last",
    seed: int = 0,
) -> None:
    """Asserts that `F(L_g x) = L_g F(x)`, and that this says something.

    A constant output is equivariant and so is one that forgets the group: the
    assertion also demands that every output varies over the batch, over space
    and over the group axis where it has them, and that acting on the output
    with a wrong element gives an error above 1e-2.

    Args:
        function, group, sample, elements, dtype, data_format, seed: see
            `equivariance_error`; the sample must hold two images or more.
        rtol: largest relative error allowed.

    Raises:
        AssertionError: if an error is above `rtol`, or if the outputs cannot
            tell right from wrong.
    """
    group = groups.get(group)
    x = _sample(sample, dtype, seed)
    tried = _elements(group, elements)
    errors = equivariance_error(
        function, group, x, elements=tried, data_format=data_format
    )
    worst = int(np.argmax(errors))
    assert errors[worst] <= rtol, (
        f"Not equivariant under '{group.name}': relative error "
        f"{errors[worst]:.2e} for element {tried[worst]}, allowed {rtol:.0e}"
    )
    for name, output in outputs_of(function(x)).items():
        _assert_varies(name, _to_last(output, data_format))
        _assert_discerns(function, group, x, name, tried, data_format)


def act(
    x: Any, group: groups.Group, element: int, data_format: str
) -> np.ndarray:
    """`L_g x` as an array; values of rank below 4 stay as they are."""
    x = np.asarray(keras.ops.convert_to_numpy(x))
    if x.ndim < 4:
        return x
    moved = group_action(_to_last(x, data_format), group, element)
    moved = np.asarray(keras.ops.convert_to_numpy(moved))
    if data_format == "channels_first":
        moved = np.moveaxis(moved, -1, 1)
    return moved


def outputs_of(outputs: Any) -> dict[str, np.ndarray]:
    """Flattens a tensor, or a nest of tensors, to arrays by name."""
    if isinstance(outputs, Mapping):
        items: Iterable[tuple[Any, Any]] = outputs.items()
    elif isinstance(outputs, (list, tuple)):
        items = enumerate(outputs)
    else:
        array = keras.ops.convert_to_numpy(outputs)
        return {"output": np.asarray(array)}
    return {
        f"{key}.{name}": array
        for key, value in items
        for name, array in outputs_of(value).items()
    }


def relative_difference(
    actual: np.ndarray, expected: np.ndarray, where: str = "output"
) -> float:
    """`max |actual - expected| / max |expected|`, in float64."""
    if actual.shape != expected.shape:
        raise ValueError(
            f"Shapes differ at {where}: {actual.shape} and {expected.shape}"
        )
    actual, expected = actual.astype("float64"), expected.astype("float64")
    if not (np.isfinite(actual).all() and np.isfinite(expected).all()):
        raise ValueError(f"Values that are not finite at {where}")
    scale = np.abs(expected).max(initial=0.0)
    difference = np.abs(actual - expected).max(initial=0.0)
    return float(difference / scale) if scale else float(difference)


def _sample(sample: Any, dtype: str | None, seed: int) -> Any:
    """The input as a tensor; drawn if only its shape is given."""
    is_shape = isinstance(sample, Sequence) and all(
        isinstance(n, int) for n in sample
    )
    if is_shape:
        sample = np.random.default_rng(seed).standard_normal(tuple(sample))
        dtype = dtype or "float32"
    return keras.ops.convert_to_tensor(sample, dtype=dtype)


def _elements(group: groups.Group, elements: Iterable[int] | None) -> list[int]:
    if elements is None:
        elements = range(group.order)
    return [group.check_element(element) for element in elements]


def _to_last(x: np.ndarray, data_format: str) -> np.ndarray:
    if data_format == "channels_first" and x.ndim >= 4:
        return np.moveaxis(x, 1, -1)
    return x


def _assert_varies(name: str, output: np.ndarray) -> None:
    """Every axis but the channels must matter to the output."""
    axes = {0: "batch", 1: "height", 2: "width", 3: "group"}
    last = output.ndim - 1
    for axis in range(min(last, 4) if output.ndim >= 4 else 1):
        if output.shape[axis] == 1:
            continue
        spread = np.ptp(output.astype("float64"), axis=axis).max()
        assert spread > 1e-3 * np.abs(output).max(), (
            f"{name} does not vary over the {axes[axis]} axis: being "
            "equivariant says nothing"
        )


def _assert_discerns(
    function: Function,
    group: groups.Group,
    x: Any,
    name: str,
    elements: list[int],
    data_format: str,
) -> None:
    """Acting on the output with a wrong element must show."""
    right = outputs_of(function(act(x, group, elements[-1], data_format)))
    output = outputs_of(function(x))[name]
    if output.ndim < 4 or group.order == 1:
        return
    for wrong in set(elements) - {elements[-1]}:
        moved = act(output, group, wrong, data_format)
        if moved.shape == right[name].shape:
            error = relative_difference(moved, right[name])
            assert error > 1e-2, (
                f"{name} does not tell element {wrong} of '{group.name}' from "
                f"element {elements[-1]} (difference {error:.1e})"
            )
