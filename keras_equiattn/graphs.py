"""The graphs of functional and Sequential models.

What this file reads of Keras is not public; it is the one place that does.
"""

from collections.abc import Iterator
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
