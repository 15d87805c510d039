"""Converts the graph of a plain network, call by call."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import keras

from keras_equiattn import _checks
from keras_equiattn import groups
from keras_equiattn.from_plain.conversion import Conversion
from keras_equiattn.from_plain.conversion import converter_of
from keras_equiattn.from_plain.conversion import RefusalError
from keras_equiattn.from_plain.summary import ConversionSummary
from keras_equiattn.from_plain.summary import ConvertedLayer
from keras_equiattn.from_plain.summary import multiply_adds
from keras_equiattn.graphs import arguments
from keras_equiattn.graphs import has_graph
from keras_equiattn.graphs import like_inputs
from keras_equiattn.graphs import nodes
from keras_equiattn.graphs import require_graph
from keras_equiattn.graphs import structure
from keras_equiattn.ops.group.bases import default_share

WIDTHS = ("parameters", "compute", "channels")
DOWNSAMPLINGS = ("exact", "keep")
# Layers whose channels do not depend on those of their input.
CHOOSES_CHANNELS = (
    keras.layers.Conv2D,
    keras.layers.Conv2DTranspose,
    keras.layers.Dense,
    keras.layers.SeparableConv2D,
)
# Layers that may follow the last linear layer, since they mix nothing.
AFTER_LOGITS = (
    keras.layers.Activation,
    keras.layers.Flatten,
    keras.layers.Identity,
    keras.layers.Rescaling,
    keras.layers.Reshape,
    keras.layers.Softmax,
)


class ConversionError(ValueError):
    """Says which layers of a network cannot be converted, and what to do.

    Attributes:
        summary: the conversion of each layer, as far as it is known.
    """

    def __init__(self, summary: ConversionSummary) -> None:
        super().__init__(summary.refusal())
        self.summary = summary


def equivariant(
    model: keras.Model,
    group: str | groups.Group = "p4",
    width: str | None = None,
    downsampling: str = "exact",
    inflate: bool = False,
    name: str | None = None,
) -> keras.Model:
    """Makes an equivariant network with the topology of a plain one.

    Every layer is replaced by its counterpart: the first convolution lifts the
    image to the group, the others are group convolutions, pooling, padding and
    upsampling are exact ones, and layers that act on values or channels stay
    what they are. The poses are merged by their mean at the end, before the
    last linear layer where nothing mixes them after it. So the output has the
    shape that it had: numbers for the image, which do not change when the image
    is turned, or an image, which turns with it.

    With `inflate=True` the weights of the plain network survive. A plain kernel
    `K` becomes the kernel on the group that is `K` at the identity and zero
    elsewhere. The feature map at pose `h` then is `L_h f(L_h^-1 x)`, where `f`
    is the plain network: it is computed on all poses at once, each apart from
    the others, and the output is the mean over the poses. Further training
    changes all entries of the kernels, so that the poses see each other.

    Args:
        model: a functional or Sequential Keras model that is built, channels
            last. Nested models are converted as well. It is not changed.
        group: a group or its name.
        width: the quantity that the new network has in common with the plain
            one. "parameters": its channels are divided by the square root of
            the order of the group, so that it has about as many parameters, and
            takes about `order` times as many multiplications. Where filters
            are steerable, and so have fewer parameters, the channels are
            divided by somewhat less, and the network takes more
            multiplications. "compute": the channels are divided by the order,
            for about as many multiplications;
            "channels": every pose has as many channels as the plain network,
            which takes `order ** 2` times as many multiplications. None is
            "channels" with `inflate`, and "parameters" otherwise. The channels
            of the outputs stay.
        downsampling: "exact": strides that are not exact on the size of the
            input become strides 1 with pooling; "keep": they stay, and the
            network is not exactly equivariant.
        inflate: whether the new network takes over the weights. Otherwise its
            weights are drawn by the initializers of the plain layers.
        name: the name of the new model. None is the name of the plain one with
            the name of the group.

    Returns:
        A functional model with the same inputs, and outputs of the same shape.
        Its layers have the names of the plain ones. `conversion_summary` says
        what became of each.

    Symmetry:
        Numbers are invariant, and images turn with the input, to rounding, for
        every element of a group that acts on the grid, and on every size that
        the layers accept; see `LiftingConv2D` for other groups.

    Raises:
        ConversionError: if layers cannot be converted. It lists all of them,
            with what to do.
        ValueError: for bad arguments.

    Example:
        >>> plain = keras.Sequential([
        ...     keras.Input((32, 32, 3)),
        ...     keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
        ...     keras.layers.MaxPooling2D(2),
        ...     keras.layers.GlobalAveragePooling2D(),
        ...     keras.layers.Dense(10),
        ... ])
        >>> equivariant(plain, "p4").output_shape
        (None, 10)

    References:
        - [Cohen and Welling, 2016](https://arxiv.org/abs/1602.07576), which
          converts networks by hand, with the channels of "parameters"
    """
    network, summary = _converted(
        model, group, width, downsampling, inflate, name
    )
    if network is None:
        raise ConversionError(summary)
    return network


def conversion_summary(
    model: keras.Model,
    group: str | groups.Group = "p4",
    width: str | None = None,
    downsampling: str = "exact",
    inflate: bool = False,
) -> ConversionSummary:
    """Says what becomes of each layer of a plain network.

    Args:
        model, group, width, downsampling, inflate: see `equivariant`.

    Returns:
        The summary, also for networks that cannot be converted. `print` shows
        it as a table, with the numbers of parameters and of multiply-adds
        before and after.

    Raises:
        ValueError: for bad arguments.

    Example:
        >>> plain = keras.Sequential([
        ...     keras.Input((32, 32, 3)),
        ...     keras.layers.Flatten(name="flat"),
        ...     keras.layers.Dense(10),
        ... ])
        >>> conversion_summary(plain).problems[0].name
        'flat'
    """
    return _converted(model, group, width, downsampling, inflate, None)[1]


@dataclasses.dataclass(frozen=True)
class _Call:
    """One call of a layer or operation in the plain network.

    Attributes:
        operation: the layer or operation that is called.
        node: Keras' record of the call.
        inputs: the numbers of the tensors that it takes.
        outputs: the numbers of the tensors that it returns.
    """

    operation: Any
    node: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class _Graph:
    """The calls of a network, with those of the models in it.

    Tensors have numbers, since a model that is called twice has the same
    symbolic tensors both times.

    Attributes:
        calls: the calls, each after those that it depends on.
        shapes: the shapes of the tensors.
        inputs: the numbers of the inputs of the network.
        outputs: the numbers of its outputs.
    """

    def __init__(self, model: keras.Model) -> None:
        self.calls: list[_Call] = []
        self.shapes: list[tuple[Any, ...]] = []
        self.inputs = [self._tensor(x.shape) for x in model.inputs]
        self.outputs = self._walk(model, self.inputs)
        self._users: dict[int, list[_Call]] = {}
        self._sources: dict[int, _Call] = {}
        for call in self.calls:
            self._sources.update(dict.fromkeys(call.outputs, call))
            for number in call.inputs:
                self._users.setdefault(number, []).append(call)
        self._keeps: dict[int, bool] = {}
        self._last: dict[int, bool] = {}
        for call in reversed(self.calls):
            for number in call.outputs:
                self._look_ahead(number)

    def keeps_width(self, call: _Call) -> bool:
        """Whether the channels of a call are those of an output."""
        return any(self._keeps[number] for number in call.outputs)

    def is_last(self, call: _Call) -> bool:
        """Whether nothing mixes what a call returns."""
        return all(self._last[number] for number in call.outputs)

    def merged_width(self, call: _Call, values: dict[int, Any]) -> int | None:
        """The channels that a layer needs to match a tensor it is merged with.

        The channels of concatenated tensors are rounded one by one, and may
        differ from those of the layer to whose output they are added.

        Args:
            call: the call of a layer that chooses its channels.
            values: the tensors of the new network that are known already.

        Returns:
            The number of channels; None if the output is merged with none of
            `values`.
        """
        channels = self.shapes[call.outputs[0]][-1]
        number, users = call.outputs[0], self._users.get(call.outputs[0], [])
        while len(users) == 1 and self._is_alike(users[0], channels):
            (number,) = users[0].outputs
            users = self._users.get(number, [])
        for user in users:
            if isinstance(user.operation, keras.layers.Concatenate):
                continue
            for other in user.inputs:
                if other != number and self.shapes[other][-1] == channels:
                    width = self._width(other, values)
                    if width is not None:
                        return width
        return None

    def _width(self, number: int, values: dict[int, Any]) -> int | None:
        """The channels of a tensor, or of the one that it is made of."""
        channels = self.shapes[number][-1]
        while number not in values:
            source = self._sources[number]
            if not self._is_alike(source, channels):
                return None
            (number,) = source.inputs
        return int(values[number].shape[-1])

    def _is_alike(self, call: _Call, channels: int) -> bool:
        """Whether a call has the channels of its only input."""
        return (
            len(call.inputs) == len(call.outputs) == 1
            and not isinstance(call.operation, CHOOSES_CHANNELS)
            and self.shapes[call.inputs[0]][-1] == channels
        )

    def _look_ahead(self, number: int) -> None:
        """Finds out what becomes of a tensor."""
        users = self._users.get(number, [])
        self._keeps[number] = number in self.outputs or any(
            self.keeps_width(call)
            for call in users
            if not isinstance(call.operation, CHOOSES_CHANNELS)
        )
        self._last[number] = all(
            isinstance(call.operation, AFTER_LOGITS) and self.is_last(call)
            for call in users
        )

    def _walk(self, model: keras.Model, inputs: list[int]) -> list[int]:
        """Adds the calls of a model; returns the numbers of its outputs."""
        numbers = {
            id(tensor): number
            for tensor, number in zip(model.inputs, inputs, strict=True)
        }
        for node in nodes(model):
            if node.is_input:
                continue
            taken = [numbers[id(tensor)] for tensor in node.input_tensors]
            if has_graph(node.operation):
                given = self._walk(node.operation, taken)
            else:
                given = [self._tensor(s) for s in self._given(node, taken)]
                self.calls.append(
                    _Call(node.operation, node, tuple(taken), tuple(given))
                )
            numbers.update(zip(map(id, node.outputs), given, strict=True))
        return [numbers[id(tensor)] for tensor in model.outputs]

    def _given(self, node: Any, taken: list[int]) -> Iterator[tuple[Any, ...]]:
        """The shapes of what a call returns.

        A model that was built for any size may be called with a known one.
        """
        outputs = node.outputs
        shapes = [self.shapes[number] for number in taken]
        if shapes != [tuple(x.shape) for x in node.input_tensors]:
            tensors = [
                keras.KerasTensor(shape, x.dtype)
                for shape, x in zip(shapes, node.input_tensors, strict=True)
            ]
            args, kwargs = arguments(node, tensors)
            outputs = keras.tree.flatten(
                node.operation.compute_output_spec(*args, **kwargs)
            )
        return (tuple(x.shape) for x in outputs)

    def _tensor(self, shape: tuple[Any, ...]) -> int:
        """The number of a new tensor."""
        self.shapes.append(tuple(shape))
        return len(self.shapes) - 1


def _converted(
    model: keras.Model,
    group: str | groups.Group,
    width: str | None,
    downsampling: str,
    inflate: bool,
    name: str | None,
) -> tuple[keras.Model | None, ConversionSummary]:
    """The new network, None if there are problems, and the summary."""
    group = groups.get(group)
    _checks.flag(inflate, "inflate")
    if width is None:
        width = "channels" if inflate else "parameters"
    _checks.choice(width, "width", WIDTHS)
    _checks.choice(downsampling, "downsampling", DOWNSAMPLINGS)
    _check_model(model)
    if inflate:
        _check_inflation(group, width)
    graph = _Graph(model)
    scale = {
        "parameters": (group.order * _share(graph, group)) ** -0.5,
        "compute": 1 / group.order,
        "channels": 1.0,
    }[width]
    names = (x.name for x in model.inputs)
    to = Conversion(names, group, scale, inflate, downsampling == "keep")
    inputs = like_inputs(model)
    values: dict[int, Any] = dict(zip(graph.inputs, inputs, strict=True))
    outputs = dict(values)
    rows = []
    known: set[int] = set()
    for call in graph.calls:
        taken = [values[number] for number in call.inputs]
        shapes = [graph.shapes[number] for number in call.inputs]
        shape = graph.shapes[call.outputs[0]]
        to.begin_call(
            call.node,
            shapes,
            shape,
            graph.keeps_width(call),
            graph.is_last(call),
            graph.merged_width(call, values),
        )
        problem = ""
        try:
            given = _converted_call(call, taken, to)
        except (RefusalError, TypeError, ValueError) as error:
            # Layers raise the other two, also when they are made from a config.
            problem = str(error)
            given = [
                _stand_in(graph.shapes[number], taken, shapes, to)
                for number in call.outputs
            ]
            instead = getattr(error, "instead", None)
            given = given if instead is None else [instead, *given[1:]]
        values.update(zip(call.outputs, given, strict=True))
        for number, x in zip(call.outputs, given, strict=True):
            if number in graph.outputs:
                outputs[number] = to.merged_poses(x, graph.shapes[number])
        rows.append(
            _row(
                call, to, shapes[0], shape, id(call.operation) in known, problem
            )
        )
        known.add(id(call.operation))
    summary = ConversionSummary(model.name, group.name, width, tuple(rows))
    if summary.problems:
        return None, summary
    of_inputs, of_outputs = structure(
        model, inputs, [outputs[number] for number in graph.outputs]
    )
    name = name or f"{model.name}_{group.name}"
    return keras.Model(of_inputs, of_outputs, name=name), summary


def _share(graph: _Graph, group: groups.Group) -> float:
    """The parameters of filters on a group for each pixel of the plain ones."""
    # What does not come from an image stays as it is, and so do the channels
    # of the outputs.
    of_image = {n for n in graph.inputs if len(graph.shapes[n]) == 4}
    layers = {}
    for call in graph.calls:
        if of_image.isdisjoint(call.inputs):
            continue
        of_image.update(call.outputs)
        layer = call.operation
        if (
            isinstance(layer, CHOOSES_CHANNELS)
            and getattr(layer, "groups", 1) == 1
            and not graph.keeps_width(call)
        ):
            layers[id(layer)] = layer
    kernels = [
        weight.shape
        for layer in layers.values()
        for weight in layer.weights
        if len(weight.shape) in (2, 4)
    ]
    total = sum(math.prod(shape) for shape in kernels)
    learned = sum(
        math.prod(shape) * default_share(group, shape[0])
        if len(shape) == 4 and shape[0] == shape[1]
        else math.prod(shape)
        for shape in kernels
    )
    return learned / total if total else 1.0


def _converted_call(
    call: _Call, inputs: list[Any], to: Conversion
) -> list[Any]:
    """Returns the new outputs of a call."""
    if all(len(x.shape) <= 3 for x in inputs):
        return to.unchanged(inputs)
    converter = converter_of(call.operation)
    if converter is None:
        kind = type(call.operation).__name__
        to.refuse(
            f"nothing is known of how `{kind}` acts on feature maps. Register "
            "a converter with `register_conversion`, or replace the layer."
        )
    return list(keras.tree.flatten(converter(call.operation, *inputs, to=to)))


def _stand_in(
    shape: tuple[Any, ...],
    inputs: list[Any],
    input_shapes: list[tuple[Any, ...]],
    to: Conversion,
) -> keras.KerasTensor:
    """A tensor that takes the place of what cannot be converted."""
    x = inputs[0]
    if len(shape) not in (2, 4) or len(x.shape) < 4:
        return keras.KerasTensor(shape, x.dtype)
    same = shape[-1] == input_shapes[0][-1]
    channels = x.shape[-1] if same else to.filters(shape[-1])
    size = shape[1:3] if len(shape) == 4 else (1, 1)
    return keras.KerasTensor(
        (shape[0], *size, to.group.order, channels), x.dtype
    )


def _row(
    call: _Call,
    to: Conversion,
    input_shape: tuple[Any, ...],
    output_shape: tuple[Any, ...],
    is_known: bool,
    problem: str,
) -> ConvertedLayer:
    """The entry of a call in the summary."""
    layer = call.operation
    count = getattr(layer, "count_params", int)
    parts = [part for _, _, part in to.rows]
    return ConvertedLayer(
        layer.name,
        type(layer).__name__,
        tuple(kind for kind, _, _ in to.rows),
        (0 if is_known else count(), sum(n for _, n, _ in to.rows)),
        (
            multiply_adds(layer, input_shape, output_shape),
            None if None in parts else sum(n for n in parts if n is not None),
        ),
        " ".join(dict.fromkeys(to.notes)),
        problem,
    )


def _check_model(model: Any) -> None:
    """Raises for a model without a graph, or without an image as input."""
    require_graph(model)
    ranks = [len(x.shape) for x in model.inputs]
    if 4 not in ranks or max(ranks) > 4:
        raise ValueError(
            "`model` must take an image, `(batch, height, width, channels)`, "
            "and no other input with more axes. Received: inputs of the "
            f"shapes {[tuple(x.shape) for x in model.inputs]}"
        )


def _check_inflation(group: groups.Group, width: str) -> None:
    """Raises where weights cannot be taken over."""
    if width != "channels":
        raise ValueError(
            "With `inflate=True` every pose has the channels of the plain "
            f"network, `width='channels'`. Received: width='{width}'"
        )
    if not group.acts_on_grid:
        raise ValueError(
            "With `inflate=True` the group must act on the grid: z2m, p2, p2m, "
            "p4 or p4m. Others turn filters in ways that the plain ones do not "
            f"allow. Received: group='{group.name}'"
        )
