"""Functions of PyTorch tensors, compiled with Inductor once that pays off."""

import functools
import logging
import os
import shutil
import warnings
from collections.abc import Callable
from typing import Any

import keras

from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.backend.target import tracing_for

# Calls of a function that run one operator after the other before it is
# compiled: a person who calls a layer by hand does not wait for a compiler,
# and training has taken as many steps within a second.
PATIENCE = 3

_log = logging.getLogger(__name__)


class Compiled:
    """A function that is compiled for its tensors after some calls.

    It runs as it is where nothing compiles: without a compiler for the
    device, within `torch.compile` (which compiles it along with its
    surroundings), under transformations of `torch.func`, and if the compiler
    fails.

    All calls must have tensors of the same shapes and dtypes: make one for
    each.

    Args:
        function: from nests of tensors to a nest of tensors.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.calls = 0
        self.compiled: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        if self.compiled is not None and not _is_transformed():
            return self.compiled(*arguments)
        if self.calls < PATIENCE or not _may_compile(arguments):
            self.calls += 1
            return self.function(*arguments)
        try:
            self.compiled = _compile(self.function, arguments)
        except Exception as error:  # any of a compiler's own
            _log.warning(
                "Inductor could not compile a function of keras_equiattn, "
                "which runs uncompiled from now on: %s",
                error,
            )
            self.compiled = self.function
        return self.compiled(*arguments)


def _compile(
    function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Callable[..., Any]:
    """Traces the function with its arguments, and compiles the trace."""
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx

    results: list[Any] = []

    def flat(*tensors: Tensor) -> list[Tensor]:
        nest = keras.tree.pack_sequence_as(arguments, list(tensors))
        with tracing_for("inductor"):
            results[:] = [function(*nest)]
        return list(keras.tree.flatten(results[0]))

    tensors = keras.tree.flatten(arguments)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = make_fx(flat, tracing_mode="fake")(*tensors)
        run = torch._inductor.compile(graph, tensors)
    nest = keras.tree.map_structure(lambda _: 0, results[0])

    def compiled(*arguments: Any) -> Any:
        found = run(*keras.tree.flatten(arguments))
        return keras.tree.pack_sequence_as(nest, list(found))

    return compiled


def _may_compile(arguments: tuple[Any, ...]) -> bool:
    kinds = {x.device.type for x in keras.tree.flatten(arguments)}
    if len(kinds) != 1 or os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        return False
    return not _is_transformed() and _has_compiler(kinds.pop())


def _is_transformed() -> bool:
    """Whether what runs now is traced, or transformed by `torch.func`."""
    import torch

    return bool(
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
    )


@functools.lru_cache
def _has_compiler(device: str) -> bool:
    """Whether Inductor can compile for a kind of device."""
    if device == "cpu":
        names = os.environ.get("CXX"), "g++", "clang++"
        return any(name and shutil.which(name) for name in names)
    if device != "cuda":
        return False
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True
