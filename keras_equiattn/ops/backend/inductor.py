"""Functions of PyTorch tensors, compiled with Inductor once that pays off."""

import functools
import importlib.util
import logging
import os
import shutil
import sys
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
        counts: whether each call counts. Those of the body of a loop do not:
            its caller counts with `count` instead.
    """

    def __init__(
        self, function: Callable[..., Any], counts: bool = True
    ) -> None:
        self.function = function
        self.counts = counts
        self.calls = 0
        # One for each set of arguments that are None, and for each layout.
        self.compiled: dict[Any, Callable[..., Any]] = {}

    def count(self) -> None:
        """Counts a call of what this function is part of."""
        self.calls += 1

    def __call__(self, *arguments: Any) -> Any:
        flat = keras.tree.flatten(arguments)
        given = tuple(None if x is None else _layout(x) for x in flat)
        tensors = [x for x in flat if x is not None]
        if given in self.compiled and not _is_transformed():
            return self.compiled[given](tensors)
        if self.counts:
            self.count()
        if self.calls <= PATIENCE or not _may_compile(tensors):
            return self.function(*arguments)
        try:
            self.compiled[given] = _compile(self.function, arguments)
        except Exception as error:  # any of a compiler's own
            _log.warning(
                "Inductor could not compile a function of keras_equiattn, "
                "which runs uncompiled from now on: %s",
                error,
            )
            self.calls = -sys.maxsize
            return self.function(*arguments)
        return self.compiled[given](tensors)


def _layout(x: Tensor) -> tuple[int, ...]:
    """What Inductor wants to be the same in every call: not the strides of
    axes of size one."""
    sizes = zip(x.shape, x.stride(), strict=True)
    return tuple(step for size, step in sizes if size > 1)


def _compile(
    function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Callable[[list[Tensor]], Any]:
    """Traces the function with its arguments, and compiles the trace."""
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx

    results: list[Any] = []

    def flat(*tensors: Tensor) -> list[Tensor]:
        left = iter(tensors)
        nest = keras.tree.map_structure(
            lambda x: None if x is None else next(left), arguments
        )
        with tracing_for("inductor"):
            results[:] = [function(*nest)]
        return list(keras.tree.flatten(results[0]))

    tensors = [x for x in keras.tree.flatten(arguments) if x is not None]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = make_fx(flat, tracing_mode="fake")(*tensors)
        run = torch._inductor.compile(graph, tensors)
    # Tensors that are two of the results are one again.
    places: dict[int, int] = {}
    nest = keras.tree.map_structure(
        lambda x: places.setdefault(id(x), len(places)), results[0]
    )
    leaves = keras.tree.flatten(nest)
    first = [leaves.index(n) for n in range(len(places))]

    def compiled(tensors: list[Tensor]) -> Any:
        found = run(*tensors)
        return keras.tree.map_structure(lambda n: found[first[n]], nest)

    return compiled


def _may_compile(tensors: list[Tensor]) -> bool:
    kinds = {x.device.type for x in tensors}
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
    return importlib.util.find_spec("triton") is not None
