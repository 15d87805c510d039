"""Says layer by layer whether a network is equivariant, and why it is not."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_equiattn import _checks
from keras_equiattn import groups
from keras_equiattn import testing
from keras_equiattn.graphs import has_graph
from keras_equiattn.graphs import nodes
from keras_equiattn.ops.exactness import is_exact
from keras_equiattn.ops.group.action import group_action

__all__ = ["EquivarianceReport", "LayerError", "equivariance_report"]

# Layers of Keras that slide filters over pixels, and what to take instead.
CONVOLUTIONS: dict[str, str] = {
    "Conv2D": "`LiftingConv2D`, and `GroupConv2D` after it",
    "Conv3D": "`GroupConv2D`",
    "DepthwiseConv2D": "`GroupDepthwiseConv2D`",
    "SeparableConv2D": "`GroupSeparableConv2D`",
    "Conv2DTranspose": "`GroupConv2DTranspose`",
    "Conv3DTranspose": "`GroupConv2DTranspose`",
}
RESHAPES = ("Flatten", "Permute", "Reshape")


@dataclasses.dataclass(frozen=True)
class LayerError:
    """The error of the output of one layer.

    Attributes:
        name: the name of the layer; `outer/inner` for a layer of a nested
            model.
        kind: the class of the layer.
        shape: the shape of its output, with None for the batch.
        error: relative error of the output, worst over the elements; infinite
            where the turned output has another shape.
    """

    name: str
    kind: str
    shape: tuple[int | None, ...]
    error: float


@dataclasses.dataclass(frozen=True)
class EquivarianceReport:
    """The result of `equivariance_report`; `print` shows it as a table.

    Attributes:
        group: name of the group.
        layers: one entry for each layer, in the order of the computation.
        error: the relative error of the output of the network.
        tolerance: the largest error that counts as rounding.
        culprit: name of the first layer whose output is not equivariant
            although its input is; None if the network is equivariant.
        reason: the reason why that layer is not equivariant.
        advice: how to mend it.
    """

    group: str
    layers: tuple[LayerError, ...]
    error: float
    tolerance: float
    culprit: str | None
    reason: str
    advice: str

    def __str__(self) -> str:
        rows = [("layer", "class", "output", "error")]
        rows += [
            (x.name, x.kind, str(x.shape), f"{x.error:.1e}")
            for x in self.layers
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for row in rows:
            cells = zip(row, widths, strict=True)
            line = "  ".join(cell.ljust(width) for cell, width in cells)
            lines.append(line.rstrip() + " <--" * (row[0] == self.culprit))
        if self.culprit is None:
            group = groups.get(self.group)
            elements = ", ".join(map(str, group.grid_elements))
            some = "" if group.acts_on_grid else f"the elements {elements} of "
            lines.append(
                f"The network is equivariant under {some}'{self.group}': its "
                f"output is off by {self.error:.1e}."
            )
            if some:
                lines.append(
                    "The other elements do not map pixels to pixels, and were "
                    "not tried."
                )
        else:
            lines += [
                f"The network is not equivariant under '{self.group}': its "
                f"output is off by {self.error:.1e}. It begins with "
                f"'{self.culprit}'.",
                self.reason,
                self.advice,
            ]
        return "\n".join(lines)


def equivariance_report(
    model: keras.Model,
    group: str | groups.Group,
    images: Any,
    *,
    tolerance: float = 1e-4,
    training: bool = False,
) -> EquivarianceReport:
    """Finds the layer with which a network stops being equivariant.

    The network sees the images in every pose. The output of each layer must
    turn with them: outputs of rank 5 as feature maps on the group, outputs of
    rank 4 as images; outputs of a lower rank must not change.

    Args:
        model: a functional or Sequential model with one input, an image or a
            feature map, channels last. A nested model is examined layer by
            layer if it is the first to fail.
        group: a group or its name. For groups that do not act on the grid, the
            elements that do are tried.
        images: an array, or its shape with the batch: then normally distributed
            values are drawn.
        tolerance: the largest relative error that counts as rounding.
        training: whether layers compute as in training, for example with
            statistics of the batch.

    Returns:
        The report. `print` shows it as a table.

    Raises:
        ValueError: for a model without a graph or with several inputs, and for
            images that do not fit.

    Example:
        >>> plain = keras.Sequential([
        ...     keras.Input((8, 8, 1)),
        ...     keras.layers.Conv2D(4, 3, name="conv"),
        ...     keras.layers.GlobalAveragePooling2D(),
        ... ])
        >>> report = equivariance_report(plain, "p4", (2, 8, 8, 1))
        >>> report.culprit
        'conv'
    """
    group = groups.get(group)
    if not has_graph(model) or len(model.inputs) != 1:
        raise ValueError(
            "`model` must be a functional or Sequential Keras model that is "
            f"built and has one input. Received: {model!r}"
        )
    _checks.number(tolerance, "tolerance", "above zero", lambda n: n > 0)
    x = testing.drawn_sample(images, None, 0)
    return _report(model, group, x, tolerance, training, "")


def _report(
    model: keras.Model,
    group: groups.Group,
    x: Any,
    tolerance: float,
    training: bool,
    prefix: str,
) -> EquivarianceReport:
    """The report of a model, or of a nested model."""
    calls = [node for node in nodes(model) if not node.is_input]
    symbols = [tensor for node in calls for tensor in node.outputs]
    values = _errors(model, symbols, group, x, training)
    errors = {
        id(symbol): error
        for symbol, (error, _) in zip(symbols, values, strict=True)
    }
    layers = tuple(
        LayerError(
            prefix + node.operation.name,
            type(node.operation).__name__,
            tuple(node.outputs[0].shape),
            max(errors[id(tensor)] for tensor in node.outputs),
        )
        for node in calls
    )
    error = max(errors.get(id(tensor), 0.0) for tensor in model.outputs)
    report = EquivarianceReport(
        group.name, layers, error, tolerance, None, "", ""
    )
    if error <= tolerance:
        return report
    place, node = next(
        (place, node)
        for place, node in enumerate(calls)
        if layers[place].error > tolerance
        and all(
            errors.get(id(tensor), 0.0) <= tolerance
            for tensor in node.input_tensors
        )
    )
    operation, tensors = node.operation, list(node.input_tensors)
    if has_graph(operation) and len(operation.inputs) == 1:
        # The input of the inner model is equivariant.
        (value,) = _values(model, tensors, x, training)
        inner = _report(
            operation,
            group,
            value,
            tolerance,
            training,
            f"{layers[place].name}/",
        )
        if inner.culprit is not None:
            around = layers[:place], layers[place:]
            return dataclasses.replace(
                inner,
                layers=around[0] + inner.layers + around[1],
                error=error,
            )
    sizes = [tuple(v.shape) for v in _values(model, tensors, x, training)]
    reason, advice = _explanation(operation, sizes, group, training)
    return dataclasses.replace(
        report, culprit=layers[place].name, reason=reason, advice=advice
    )


def _values(
    model: keras.Model, tensors: list[Any], x: Any, training: bool
) -> list[np.ndarray]:
    """The values of symbolic tensors of a model."""
    probe = keras.Model(model.inputs, tensors)
    found = keras.tree.flatten(probe([x], training=training))
    return [np.asarray(keras.ops.convert_to_numpy(value)) for value in found]


def _errors(
    model: keras.Model,
    tensors: list[Any],
    group: groups.Group,
    x: Any,
    training: bool,
) -> list[tuple[float, tuple[int, ...]]]:
    """For each tensor the worst relative error, and the shape."""
    expected = _values(model, tensors, x, training)
    worst = [0.0] * len(tensors)
    for element in map(int, group.grid_elements):
        turned = group_action(x, group, element)
        actual = _values(model, tensors, turned, training)
        for n, (y, of_turned) in enumerate(zip(expected, actual, strict=True)):
            worst[n] = max(worst[n], _error(y, of_turned, group, element))
    return [(e, y.shape) for e, y in zip(worst, expected, strict=True)]


def _error(
    y: np.ndarray, of_turned: np.ndarray, group: groups.Group, element: int
) -> float:
    """`max |F(L_g x) - L_g F(x)| / max |F(x)|` for one tensor."""
    if y.ndim == 4 or (y.ndim == 5 and y.shape[3] == group.order):
        moved = group_action(keras.ops.convert_to_tensor(y), group, element)
        y = np.asarray(keras.ops.convert_to_numpy(moved))
    if y.shape != of_turned.shape:
        return float("inf")
    return testing.relative_difference(of_turned, y)


def _explanation(
    operation: Any,
    shapes: Sequence[tuple[int, ...]],
    group: groups.Group,
    training: bool,
) -> tuple[str, str]:
    """Why a layer is not equivariant, and what to do about it.

    Args:
        operation: the layer.
        shapes: the shapes of its inputs.
        group: the group under which it is not.
        training: whether it computes as in training.
    """
    kind, shape = type(operation).__name__, shapes[0]
    own = getattr(operation, "group", None)
    if isinstance(own, groups.Group) and own != group:
        return (
            f"The layer is of the group '{own.name}'.",
            f"Pass `group='{group.name}'` to the layer, or ask for a report "
            f"under '{own.name}'.",
        )
    if len(shape) == 5 and shape[3] != group.order:
        return (
            f"The axis of the group has {shape[3]} entries, and '{group.name}' "
            f"has {group.order} elements.",
            f"Build the network for '{group.name}'.",
        )
    if kind in RESHAPES:
        return (
            f"`{kind}` gives every pixel a place of its own, which it leaves "
            "when the image is turned.",
            "Pool over all pixels instead, for example with "
            "`GlobalAveragePooling2D`, or `GlobalAveragePooling3D` for feature "
            "maps on a group.",
        )
    window = _window(operation)
    if window and len(shape) >= 4:
        size = shape[1:3]
        if not isinstance(own, groups.Group) and kind in CONVOLUTIONS:
            return (
                "Its filters do not turn: each of them finds a pattern in one "
                "orientation.",
                f"Take {CONVOLUTIONS[kind]}.",
            )
        if not is_exact(group, size, **window):
            return (
                f"The windows of {window['window']} pixels with strides "
                f"{window['strides']} and padding '{window['padding']}' do not "
                f"fall onto themselves when an image of {size} is turned.",
                "Choose another size, or the same layer of `keras_equiattn`, "
                "whose message names the sizes that fit.",
            )
    sides = _sides(operation)
    if sides is not None:
        return (
            f"It adds or takes away {sides} pixels at the sides of the image, "
            "which differ from side to side.",
            "Do the same at all sides, for example with `SpatialPadding2D`.",
        )
    place = _weight_of_places(operation, shape)
    if place is not None:
        name, of_shape, what = place
        return (
            f"Its weight '{name}' of shape {of_shape} has an entry for each "
            f"{what}.",
            "Share the weight, for example with `PReLU(shared_axes=[1, 2, 3])` "
            "or a normalisation over the channels alone, or make it relative, "
            "as `GroupSelfAttention2D` does with positions.",
        )
    if training and getattr(operation, "seed_generator", None) is not None:
        return (
            "It draws random numbers, which differ from pose to pose.",
            "Measure with `training=False`.",
        )
    return (
        f"`{kind}` is not known to this report.",
        "Measure the layer by itself with `testing.equivariance_error`.",
    )


def _window(operation: Any) -> dict[str, Any] | None:
    """Window, strides, dilation and padding of what slides over pixels."""
    window = getattr(operation, "kernel_size", None)
    window = window or getattr(operation, "pool_size", None)
    padding = getattr(operation, "padding", "valid")
    if window is None or not isinstance(padding, str):
        return None
    strides = getattr(operation, "strides", None) or 1
    dilation = getattr(operation, "dilation_rate", None) or 1
    return {
        "window": _pair(window),
        "strides": _pair(strides),
        "dilation": _pair(dilation),
        "padding": padding,
    }


def _pair(value: Any) -> tuple[int, int]:
    """The numbers for rows and columns; layers for volumes have one more."""
    values = tuple(value) if isinstance(value, Sequence) else (value, value)
    return int(values[0]), int(values[1])


def _sides(operation: Any) -> Any:
    """The rows and columns that a layer adds or removes, if sides differ."""
    for name in ("padding", "cropping"):
        sides = getattr(operation, name, None)
        if isinstance(sides, Sequence) and not isinstance(sides, str):
            pairs = list(sides)[:2]
            if all(isinstance(pair, Sequence) for pair in pairs) and (
                any(pair[0] != pair[1] for pair in pairs)
                or pairs[0] != pairs[1]
            ):
                return tuple(pairs)
    return None


def _weight_of_places(
    operation: Any, shape: tuple[int, ...]
) -> tuple[str, tuple[int, ...], str] | None:
    """A weight with an entry for each pixel, or for each pose.

    Returns:
        Its name, its shape, and what it has entries for.
    """
    axes = ("pixel", "pixel", "pose")[: len(shape) - 2]
    for weight in getattr(operation, "weights", ()):
        sizes = tuple(weight.shape)
        # The shape with which it is broadcast over the input; it has no batch.
        aligned = (1,) * (len(shape) - 1 - len(sizes)) + sizes
        for axis, size in zip(axes, aligned, strict=False):
            if size > 1 and len(aligned) == len(shape) - 1:
                return weight.name, sizes, axis
        # Normalisations broadcast along the axis that they are given.
        if len(shape) == 5 and getattr(operation, "axis", None) in (3, -2):
            return weight.name, sizes, "pose"
    return None
