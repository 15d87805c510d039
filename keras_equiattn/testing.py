"""Measures and asserts the equivariance of functions, layers and models.

It works for your own layers, too::

    from keras_equiattn.testing import assert_equivariant

    assert_equivariant(my_layer, "p4", (2, 8, 8, 4, 3))
"""

import numbers
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_equiattn import _checks
from keras_equiattn import groups
from keras_equiattn.ops.group.action import group_action
from keras_equiattn.ops.group.directions import vector_action

__all__ = ["assert_equivariant", "equivariance_error", "relative_difference"]

Function = Callable[[Any], Any]
Outputs = dict[str, np.ndarray]
# Applies an element of a group, by its index, to an output.
Action = Callable[[Any, int], np.ndarray]


def equivariance_error(
    function: Function,
    group: str | groups.Group,
    sample: Any,
    *,
    elements: Iterable[int] | None = None,
    dtype: str | None = None,
    data_format: str = "channels_last",
    outputs: str = "images",
    seed: int = 0,
) -> np.ndarray:
    """Worst relative error of `F(L_g x) = L_g F(x)`, for every element.

    `max |F(L_g x) - L_g F(x)| / max |F(x)|`, worst over the outputs of `F`.
    Outputs of rank 4 are taken as images or, on request, as fields of vectors,
    and those of rank 5 as feature maps on the group, on which `L_g` acts;
    outputs of a lower rank must be invariant.

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
        dtype: the dtype of the input; None is the dtype of `sample`, "float32"
            for a shape.
        data_format: layout of input and outputs, "channels_last" (default,
            whatever Keras is configured to) or "channels_first".
        outputs: the kind of outputs of rank 4: "images", or the "vectors" or
            "axes" of `GroupToVector2D`, which turn with the image.
        seed: the seed of the drawn values.

    Returns:
        NumPy array with one error per element tried.

    Raises:
        ValueError: for bad arguments; if shapes of `F(L_g x)` and `L_g F(x)`
            differ, or an output is not finite.
    """
    group = groups.get(group)
    data_format = _data_format(data_format)
    act = _action(group, data_format, outputs)
    x = drawn_sample(sample, dtype, seed)
    tried = _elements(group, elements)
    expected = _outputs_of(function(x))
    errors = []
    for element in tried:
        actual = _outputs_of(function(_act(x, group, element, data_format)))
        errors.append(_error(actual, expected, group, element, act))
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
    outputs: str = "images",
    seed: int = 0,
) -> None:
    """Asserts that `F(L_g x) = L_g F(x)`, and that this is not trivially true.

    A constant output is equivariant and so is one that forgets the group: the
    assertion also demands that every output varies over the batch, over space
    and over the group axis where it has them, and that acting on the output
    with a wrong element gives an error above 1e-2.

    Args:
        function, group, sample, elements, dtype, data_format, outputs, seed:
            see `equivariance_error`; the sample must hold two images or more.
        rtol: largest relative error allowed.

    Raises:
        AssertionError: if an error is above `rtol`, or if the outputs cannot
            tell right from wrong.
        ValueError: see `equivariance_error`; for a sample of one image, and for
            `elements` that hold only the identity.
    """
    group = groups.get(group)
    data_format = _data_format(data_format)
    act = _action(group, data_format, outputs)
    x = drawn_sample(sample, dtype, seed)
    tried = _elements(group, elements)
    if x.shape[0] < 2:
        raise ValueError(
            "`sample` must hold two images or more, to show that the output "
            f"depends on them. Received: shape {tuple(x.shape)}"
        )
    if group.order > 1 and set(tried) == {0}:
        raise ValueError(
            "`elements` must hold more than the identity, under which "
            f"everything is equivariant. Received: {tried}"
        )
    expected = _outputs_of(function(x))
    for element in tried:
        actual = _outputs_of(function(_act(x, group, element, data_format)))
        error = _error(actual, expected, group, element, act)
        hint = ""
        if element not in group.grid_elements:
            hint = (
                ". This element does not map pixels to pixels, so layers are "
                "approximate: pass elements=group.grid_elements to try those "
                "that do"
            )
        _require(
            error <= rtol,
            f"Not equivariant under '{group.name}': relative error "
            f"{error:.2e} for element {element}, allowed {rtol:.0e}{hint}",
        )
    for name, output in expected.items():
        _require_variation(name, _to_last(output, data_format))
        # `actual` is what the last element gave.
        _require_discernment(name, output, actual[name], group, tried[-1], act)


def relative_difference(
    actual: np.ndarray, expected: np.ndarray, where: str = "output"
) -> float:
    """`max |actual - expected| / max |expected|`, in float64.

    Args:
        actual, expected: arrays of the same shape.
        where: the name of the outputs in messages.

    Returns:
        The difference; absolute where everything expected is zero.

    Raises:
        ValueError: if shapes differ or a value is not finite.
    """
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


def _error(
    actual: Outputs,
    expected: Outputs,
    group: groups.Group,
    element: int,
    act: Action,
) -> float:
    """Worst over the outputs, `actual` being `F(L_g x)`, `expected` `F(x)`."""
    return max(
        relative_difference(
            actual[name],
            act(expected[name], element),
            f"{name}, element {element} of '{group.name}'",
        )
        for name in expected
    )


def _action(group: groups.Group, data_format: str, outputs: str) -> Action:
    """The action of the group on outputs of this kind."""
    frequencies = {"images": 0, "vectors": 1, "axes": 2}
    frequency = frequencies[_checks.choice(outputs, "outputs", frequencies)]

    def act(x: Any, element: int) -> np.ndarray:
        return _act(x, group, element, data_format, frequency)

    return act


def _act(
    x: Any,
    group: groups.Group,
    element: int,
    data_format: str,
    frequency: int = 0,
) -> np.ndarray:
    """`L_g x` as an array; values of rank below 4 stay as they are.

    With a frequency other than 0 images are fields of directions.
    """
    x = np.asarray(keras.ops.convert_to_numpy(x))
    if x.ndim < 4:
        return x
    if frequency and x.ndim == 4:
        last = keras.ops.convert_to_tensor(_to_last(x, data_format))
        moved = vector_action(last, group, element, frequency)
    else:
        moved = group_action(_to_last(x, data_format), group, element)
    moved = np.asarray(keras.ops.convert_to_numpy(moved))
    if data_format == "channels_first":
        moved = np.moveaxis(moved, -1, 1)
    return moved


def _outputs_of(outputs: Any) -> Outputs:
    """Flattens a tensor, or a nest of tensors, to arrays by name."""
    if isinstance(outputs, Mapping):
        items: Iterable[tuple[Any, Any]] = outputs.items()
    elif isinstance(outputs, (list, tuple)):
        items = enumerate(outputs)
    else:
        array = keras.ops.convert_to_numpy(outputs)
        return {"output": np.asarray(array)}
    return {
        f"{name} {key}": array
        for key, value in items
        for name, array in _outputs_of(value).items()
    }


def drawn_sample(sample: Any, dtype: str | None, seed: int) -> Any:
    """The input as a tensor; drawn if only its shape is given."""
    if isinstance(sample, Sequence) and all(
        n is None or isinstance(n, numbers.Integral) for n in sample
    ):
        shape = tuple(sample)
        if None in shape or len(shape) not in (4, 5):
            raise ValueError(
                "`sample` must be an array, or a shape without unknown sizes, "
                "of rank 4 (images) or 5 (feature maps). "
                f"Received: {shape}"
            )
        sample = np.random.default_rng(seed).standard_normal(shape)
        dtype = dtype or "float32"
    x = keras.ops.convert_to_tensor(sample, dtype=dtype)
    if len(x.shape) not in (4, 5):
        raise ValueError(
            "`sample` must be of rank 4 (images) or 5 (feature maps). "
            f"Received: shape {tuple(x.shape)}"
        )
    return x


def _elements(group: groups.Group, elements: Iterable[int] | None) -> list[int]:
    if elements is None:
        elements = range(group.order)
    tried = [group.check_element(element) for element in elements]
    if not tried:
        raise ValueError(
            "`elements` must hold one element or more. Received: none"
        )
    return tried


def _data_format(data_format: str) -> str:
    known = ("channels_last", "channels_first")
    return str(_checks.choice(data_format, "data_format", known))


def _to_last(x: np.ndarray, data_format: str) -> np.ndarray:
    if data_format == "channels_first" and x.ndim >= 4:
        return np.moveaxis(x, 1, -1)
    return x


def _require(condition: bool, message: str) -> None:
    """An assertion that Python's `-O` keeps."""
    if not condition:
        raise AssertionError(message)


def _require_variation(name: str, output: np.ndarray) -> None:
    """Every axis but the channels must matter to the output."""
    axes = {0: "batch", 1: "height", 2: "width", 3: "group"}
    last = output.ndim - 1
    for axis in range(min(last, 4) if output.ndim >= 4 else 1):
        if output.shape[axis] == 1:
            continue
        spread = np.ptp(output.astype("float64"), axis=axis).max()
        _require(
            spread > 1e-3 * np.abs(output).max(),
            f"{name} does not vary over the {axes[axis]} axis: being "
            "equivariant says nothing",
        )


def _require_discernment(
    name: str,
    output: np.ndarray,
    right: np.ndarray,
    group: groups.Group,
    element: int,
    act: Action,
) -> None:
    """Acting on the output with a wrong element must show."""
    if output.ndim < 4:
        return
    for wrong in group.grid_elements:
        moved = act(output, int(wrong))
        if wrong != element and moved.shape == right.shape:
            error = relative_difference(moved, right)
            _require(
                error > 1e-2,
                f"{name} does not tell element {wrong} of '{group.name}' "
                f"from element {element} (difference {error:.1e})",
            )
