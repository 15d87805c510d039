"""The graphs of functional and Sequential models, and how they are rewritten.

The module reads parts of Keras that are not public. Two other places do so:
`ops.backend.dynamo`, which is earlier in the order of imports, and the training
on several devices in `applications`, which replaces the statistics of batch
normalisation.
"""

import itertools
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras

# Layers of Keras that act on each value of a tensor alone.
POINTWISE = (
    keras.layers.AlphaDropout,
    keras.layers.ELU,
    keras.layers.GaussianDropout,
    keras.layers.GaussianNoise,
    keras.layers.Identity,
    keras.layers.LeakyReLU,
    keras.layers.ReLU,
)
# Layers of Keras that act on values at the same place of several tensors.
MERGING = (
    keras.layers.Add,
    keras.layers.Average,
    keras.layers.Maximum,
    keras.layers.Minimum,
    keras.layers.Multiply,
    keras.layers.Subtract,
)


def has_graph(operation: Any) -> bool:
    """Whether an operation is a built functional or Sequential model."""
    return isinstance(operation, keras.Model) and bool(
        getattr(operation, "inputs", None)
    )


def require_graph(model: Any) -> None:
    """Raises unless a model is functional or Sequential, and built."""
    if not has_graph(model):
        raise ValueError(
            "`model` must be a functional or Sequential Keras model that is "
            f"built. Received: {model!r}"
        )


def require_float32(model: keras.Model) -> None:
    """Raises unless all layers with weights compute in float32."""
    for layer in layers_within(model):
        dtype = layer.compute_dtype
        if dtype not in ("float32", None) and layer.weights:
            raise ValueError(
                "`model` must compute in float32. Make it with the dtype "
                "policy 'float32' and load its weights. Received: layer "
                f"'{layer.name}', which computes in {dtype}"
            )


def nodes(model: keras.Model) -> Iterator[Any]:
    """The calls that make a graph, each after those that it depends on."""
    stack = [(producer(tensor), False) for tensor in reversed(model.outputs)]
    seen = set()
    while stack:
        node, complete = stack.pop()
        if complete:
            yield node
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            stack.extend((n, False) for n in reversed(node.parent_nodes))


def arguments(node: Any, tensors: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of a call, with other tensors in place of its own.

    Args:
        node: the call.
        tensors: in the order of `node.input_tensors`.

    Returns:
        Positional and keyword arguments.
    """
    own = map(id, node.input_tensors)
    args, kwargs = node.arguments.fill_in(dict(zip(own, tensors, strict=True)))
    return args, kwargs


def structure(
    model: keras.Model, inputs: Sequence[Any], outputs: Sequence[Any]
) -> tuple[Any, Any]:
    """Inputs and outputs in the lists or dictionaries that a model has."""
    functional = getattr(model, "_functional", None) or model
    packed = keras.tree.pack_sequence_as
    return (
        packed(functional._inputs_struct, list(inputs)),
        packed(functional._outputs_struct, list(outputs)),
    )


def input_names(model: keras.Model) -> list[str]:
    """The keys of a dictionary of inputs, in the order of `model.inputs`."""
    functional = getattr(model, "_functional", None) or model
    inputs = functional._inputs_struct
    if isinstance(inputs, dict):
        return keras.tree.flatten({name: name for name in inputs})
    return [x.name for x in model.inputs]


def like_inputs(model: keras.Model) -> list[keras.KerasTensor]:
    """Inputs for another model, each like one of this one."""
    return [
        keras.Input(batch_shape=x.shape, dtype=x.dtype, name=x.name)
        for x in model.inputs
    ]


def with_calls(
    model: keras.Model, call: Callable[[Any, list[Any]], Sequence[Any]]
) -> keras.Model:
    """A model in which each call is replaced.

    Args:
        model: a functional or Sequential model without models in it.
        call: takes a call and what stands for its tensors, and returns what
            stands for its outputs.
    """
    inputs = like_inputs(model)
    values = dict(zip(map(id, model.inputs), inputs, strict=True))
    for node in nodes(model):
        if not node.is_input:
            given = call(node, [values[id(x)] for x in node.input_tensors])
            values.update(zip(map(id, node.outputs), given, strict=True))
    outputs = [values[id(x)] for x in model.outputs]
    return keras.Model(*structure(model, inputs, outputs), name=model.name)


def producer(tensor: Any) -> Any:
    """The call that made a symbolic tensor; for an input, its input node."""
    operation, call, _ = tensor._keras_history
    return operation._inbound_nodes[call]


def layers_within(layer: Any) -> Iterator[Any]:
    """A layer, and all those that it consists of."""
    yield from layer._flatten_layers()


class Rewriting:
    """Names and shares the layers of a network made of the calls of another.

    Args:
        names: names that no new layer may have, such as the names of inputs.

    Attributes:
        node: Keras' record of the call that is rewritten.
        source: the layer or operation that it calls.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.node: Any = None
        self.source: Any = None
        self._names = set(names)
        self._calls: Iterator[int] = iter(())
        self._shared: dict[tuple[int, int], keras.layers.Layer] = {}

    def begin(self, node: Any) -> None:
        """Turns to the next call of the first network."""
        self.node = node
        self.source = node.operation
        self._calls = itertools.count()

    def arguments(self, inputs: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
        """The arguments of the call with other tensors.

        Args:
            inputs: the values in place of the tensors, in their order.

        Returns:
            Positional and keyword arguments.
        """
        return arguments(self.node, inputs)

    def call(self, inputs: Sequence[Any]) -> list[Any]:
        """Calls the source on other tensors, or on numbers."""
        args, kwargs = self.arguments(inputs)
        return keras.tree.flatten(self.source(*args, **kwargs))

    def name(self, suffix: str = "") -> str:
        """A name for a new layer: the name of the source, with a suffix."""
        first = "_".join(filter(None, (self.source.name, suffix)))
        names = (f"{first}_{n}" if n else first for n in itertools.count())
        return next(name for name in names if name not in self._names)

    def named(self, suffix: str = "") -> dict[str, Any]:
        """The name and the dtype policy of a layer of Keras.

        Args:
            suffix: the suffix of the name, see `name`.
        """
        policy = getattr(self.source, "dtype_policy", None)
        return {"name": self.name(suffix), "dtype": policy}

    def shared(
        self, layer: keras.layers.Layer
    ) -> tuple[keras.layers.Layer, bool]:
        """The layer to call: this one, or that of an earlier call.

        A layer of the first network that is called several times becomes one
        layer, too.

        Args:
            layer: the layer in place of the source; if there are several, they
                come in the same order each time.

        Returns:
            The layer, and whether it is the one that was passed.
        """
        key = id(self.source), next(self._calls)
        is_new = key not in self._shared
        layer = self._shared.setdefault(key, layer)
        self._names.add(layer.name)
        return layer, is_new
