"""Layers within `torch.compile(model)`.

Dynamo, which traces a model for Inductor, follows every line of Python. Most of
the lines of our layers check arguments and make NumPy tables; Dynamo takes the
tables for tensors, gives up on some of their functions, and breaks the graph:
two convolutions became 34 graphs. So Dynamo gets each layer as one operation,
whose tensors are traced afterwards, while Python runs as usual.
"""

import weakref
from collections.abc import Callable
from typing import Any

import keras

from keras_equiattn.ops._types import Tensor

# Layers by `id`: an operation takes tensors, numbers and names alone.
_layers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
# Made with the first layer: they must exist before Dynamo runs.
_functions: dict[str, Callable[..., Any]] = {}


def remember(layer: Any) -> None:
    """Makes a layer known to `in_one_piece`, before anything is compiled."""
    if keras.backend.backend() != "torch":
        return
    _layers[id(layer)] = layer
    if not _functions:
        import torch

        _functions["opaque"] = torch._dynamo.nonstrict_trace(_run)
        _functions["uncompiled"] = torch.compiler.disable(_run_as_it_is)


def is_in_dynamo() -> bool:
    """Whether Dynamo follows this very line."""
    if keras.backend.backend() != "torch":
        return False
    import torch

    return bool(torch.compiler.is_dynamo_compiling())


def in_one_piece(layer: Any, method: str, *arguments: Any) -> Any:
    """Calls a method of a layer, which Dynamo takes as one operation.

    If the layer holds Keras' dropout, its operators run one by one: Keras draws
    with generators of PyTorch, which cannot be compiled.

    Args:
        layer: a layer that is remembered.
        method: name of a method.
        *arguments: nests of tensors, numbers and strings.
    """
    # Keras' dropout is a layer within this one. The state of its seed generator
    # is among its variables, but not among its weights.
    others = layer._flatten_layers(include_self=False)
    if any(len(x.variables) != len(x.weights) for x in others):
        return _functions["uncompiled"](layer, method, *arguments)
    values = [v.value for v in layer.variables]
    found, changed = _functions["opaque"](id(layer), method, values, *arguments)
    for number, value in changed.items():
        layer.variables[number].assign(value)
    return found


def _run(
    number: int, method: str, values: list[Tensor], *arguments: Any
) -> tuple[Any, dict[int, Tensor]]:
    """Returns the result of the method, and new values of changed variables."""
    layer = _layers[number]
    values, arguments = keras.tree.map_structure(
        _with_known_sizes, (values, arguments)
    )
    pairs = list(zip(layer.variables, values, strict=True))
    with keras.StatelessScope(state_mapping=pairs) as scope:
        found = getattr(layer, method)(*arguments)
        now = [scope.get_current_value(v) for v in layer.variables]
    return found, {
        n: new
        for n, (new, old) in enumerate(zip(now, values, strict=True))
        if new is not old
    }


def _with_known_sizes(x: Any) -> Any:
    """The tensor with plain integers for sizes.

    Dynamo makes symbols of sizes that it has seen change, such as the last
    batch of an epoch, or the weights of two layers. What is traced is then for
    these sizes alone.
    """
    import torch

    if not isinstance(x, torch.Tensor):
        return x
    return x.view([int(n) for n in x.shape])


def _run_as_it_is(layer: Any, method: str, *arguments: Any) -> Any:
    """Returns the result of the method; Dynamo leaves this call uncompiled."""
    return getattr(layer, method)(*arguments)
