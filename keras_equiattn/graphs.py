"""The graphs of functional and Sequential models.

What this file reads of Keras is not public; it is the one place that does.
"""

from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras


def has_graph(operation: Any) -> bool:
    """Whether it is a functional or Sequential model that is built."""
    return isinstance(operation, keras.Model) and bool(
        getattr(operation, "inputs", None)
    )


def nodes(model: keras.Model) -> Iterator[Any]:
    """The calls that make a graph, each after those that it depends on."""
    histories = [tensor._keras_history for tensor in reversed(model.outputs)]
    stack = [
        (h.operation._inbound_nodes[h.node_index], False) for h in histories
    ]
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
        Positional arguments, and those with names.
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
