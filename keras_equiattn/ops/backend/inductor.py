"""Functions of PyTorch tensors, compiled with Inductor once that pays off."""

import contextvars
import functools
import importlib.util
import logging
import os
import shutil
import threading
import warnings
from collections.abc import Callable
from typing import Any

import keras

from keras_equiattn.ops._types import Shaped
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.backend.target import tracing_for
from keras_equiattn.ops.backend.target import within_torch_func

# The numbers below are choices, and no measurement of other values is kept.
# Nothing is compiled before a function has taken part in this many backward
# passes, which training reaches within a second.
PATIENCE = 3
# Without a backward pass a function is compiled only after this many calls: a
# person who calls a network by hand does not wait for a compiler, even if many
# layers of the network share the function.
CALLS = 50
# A function is compiled for at most this many layouts of its tensors in memory.
# With any other layout it runs uncompiled.
LAYOUTS = 4
# Inductor stores a value that takes more reads or operations than these limits.
# They are above those of any operator here, so that a reduction computes its
# terms without storing them.
FUSES_SUMS = {
    "realize_reads_threshold": 1000,
    "realize_acc_reads_threshold": 1000,
    "realize_opcount_threshold": 10000,
}

_log = logging.getLogger(__name__)
# Inductor has global state, which two threads must not change at once.
_one_at_a_time = threading.RLock()
# Whether the parts of the function that runs now are compiled.
_compiles_parts: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "compiles_parts", default=False
)


class Patience:
    """Says when the parts of a function and of its gradient are compiled.

    A step of training calls a function once for each layer of the same kind and
    shapes, so calls are no measure of how long training has run. Backward
    passes are: autograd numbers them.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.passes = 0
        self.last_pass: int | None = None

    def ends_forward(self) -> bool:
        """Whether the function, which is called now, is compiled."""
        self.calls += 1
        return self.calls > CALLS or self._earlier_passes() >= PATIENCE

    def ends_backward(self) -> bool:
        """Whether its gradient, which is called now, is compiled."""
        import torch

        number = torch._C._current_graph_task_id()
        self.passes += number != self.last_pass
        self.last_pass, self.calls = number, 0
        return self._earlier_passes() >= PATIENCE

    def _earlier_passes(self) -> int:
        """How many passes there were, without the one that runs now, if any.

        Rematerialised functions are called within a backward pass.
        """
        import torch

        number = torch._C._current_graph_task_id()
        return self.passes - (number == self.last_pass)


def with_compiled_parts(
    forward: Callable[..., Any], backward: Callable[..., Any]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A function and its gradient, whose parts are compiled after a while.

    This is for functions with loops, which would take a compiler minutes if
    they were written out. `compiled_part` marks the parts, and `Patience` says
    when they are compiled.

    Args:
        forward, backward: a function and its gradient. All calls must have
            tensors of the same shapes and dtypes.
    """
    patience = Patience()

    def compiled(
        function: Callable[..., Any], ends: Callable[[], bool]
    ) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            token = _compiles_parts.set(ends())
            try:
                return function(*arguments)
            finally:
                _compiles_parts.reset(token)

        return run

    return (
        compiled(forward, patience.ends_forward),
        compiled(backward, patience.ends_backward),
    )


def compiled_part(fuses_sums: bool = False) -> Callable[..., Any]:
    """Marks a function to be compiled within functions `with_compiled_parts`.

    Called from elsewhere the function runs as it is. It takes nests of tensors,
    and options that can be hashed, by name; it returns a nest of tensors, and
    must not call another function that is marked.

    Args:
        fuses_sums: see `Target`. The compiler takes longer where sums have
            other uses, too.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.lru_cache(maxsize=1024)
        def compiled(options: Any, shapes: Any) -> Compiled:
            whole = functools.partial(function, **dict(options))
            return Compiled(whole, fuses_sums)

        @functools.wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            if not _compiles_parts.get():
                return function(*arguments, **options)
            shapes = tuple(
                None if x is None else (x.shape, x.dtype)
                for x in keras.tree.flatten(arguments)
            )
            return compiled(tuple(options.items()), shapes)(*arguments)

        run.programs = compiled  # type: ignore[attr-defined]
        return run

    return decorate


class Compiled:
    """A function that is compiled for its tensors.

    It runs as it is where nothing compiles: without a compiler for the
    device, within `torch.compile` (which compiles it along with its
    surroundings), under transformations of `torch.func`, and if the compiler
    fails.

    A compiled function takes only tensors that have the layout in memory and
    the device of those it was compiled for. There is one compiled function for
    each layout.

    Args:
        function: from nests of tensors to a nest of tensors.
        fuses_sums: see `Target`.
    """

    def __init__(
        self, function: Callable[..., Any], fuses_sums: bool = False
    ) -> None:
        self.function = function
        self.fuses_sums = fuses_sums
        self.failed = False
        self.compiled: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *arguments: Any) -> Any:
        """Calls the function, compiled for the tensors if that is possible."""
        flat = keras.tree.flatten(arguments)
        tensors = [x for x in flat if x is not None]
        # Keras infers shapes with meta tensors, which have no memory: a
        # compiled function must not get them.
        layout = tuple(
            x if x is None else (x.device, x.dtype, x.shape, _strides(x))
            for x in flat
        )
        if layout in self.compiled and not _is_transformed():
            return self.compiled[layout](tensors)
        enough = len(self.compiled) >= LAYOUTS
        if self.failed or enough or not _may_compile(tensors):
            return self.function(*arguments)
        try:
            with _one_at_a_time:
                # Another thread may have compiled it in the meantime.
                if layout not in self.compiled:
                    self.compiled[layout] = _compile(
                        self.function, arguments, self.fuses_sums
                    )
        except Exception as error:  # compilers raise many kinds
            _log.warning(
                "Inductor could not compile a function of keras_equiattn, "
                "which runs uncompiled from now on: %s",
                error,
            )
            self.failed = True
            return self.function(*arguments)
        return self.compiled[layout](tensors)


def _strides(x: Shaped[Tensor, "..."]) -> tuple[int, ...]:
    """The strides of axes longer than one. The others mean nothing."""
    sizes = zip(x.shape, x.stride(), strict=True)
    return tuple(step for size, step in sizes if size > 1)


def _compile(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    fuses_sums: bool = False,
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
        with tracing_for("inductor", fuses_sums):
            results[:] = [function(*nest)]
        return list(keras.tree.flatten(results[0]))

    tensors = [x for x in keras.tree.flatten(arguments) if x is not None]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = make_fx(flat, tracing_mode="fake")(*tensors)
        options = FUSES_SUMS if fuses_sums else {}
        run = torch._inductor.compile(graph, tensors, options=options)
    # A tensor that is returned twice is one tensor again.
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
    """Whether a function of these tensors can be compiled, here and now."""
    kinds = {x.device.type for x in tensors}
    if len(kinds) != 1 or os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        return False
    return not _is_transformed() and can_compile(kinds.pop())


def _is_transformed() -> bool:
    """Whether what runs now is traced, or transformed by `torch.func`."""
    import torch

    return torch.compiler.is_compiling() or within_torch_func()


@functools.lru_cache
def can_compile(device: str) -> bool:
    """Whether Inductor can compile for a kind of device."""
    if device == "cpu":
        names = os.environ.get("CXX"), "g++", "clang++"
        return any(name and shutil.which(name) for name in names)
    if device != "cuda":
        return False
    return importlib.util.find_spec("triton") is not None
