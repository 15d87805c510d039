"""Custom gradients under PyTorch."""

import threading
from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import keras
from keras import ops

from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.backend.inductor import with_compiled_parts
from keras_equiattn.ops.backend.target import within_torch_func


def torch_custom_vjp(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    advice: str,
    differentiable: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """`custom_vjp` for PyTorch, see there.

    This is not Keras' `custom_gradient`, which would hold arguments and kept
    tensors in a closure. There autograd could not free them, notice that they
    were changed in place, or offload them.
    """
    import torch

    run, run_back = with_compiled_parts(forward, backward)
    # Autograd calls `forward` and `setup_context` one after the other, with
    # nothing but tensors between them. Each thread has nests of its own.
    last = threading.local()

    class Function(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*arguments: Tensor) -> Any:
            last.nests, tensors = _without_repeats(*run(*arguments))
            # Kept tensors are returned too, so that transformations see them.
            return tensors

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            _save(ctx, last.nests, inputs, output)

        @staticmethod
        def backward(ctx: Any, *upstream: Any) -> Any:
            result = ctx.nests.result
            of_results = [upstream[n] for n in keras.tree.flatten(result)]
            if all(d is None for d in of_results):
                return (None,) * ctx.count
            several = isinstance(result, tuple)
            d = tuple(of_results) if several else of_results[0]
            arguments, kept = _saved(ctx)
            if not _is_differentiated():
                return tuple(run_back(arguments, kept, d))
            if differentiable is not None:
                return tuple(differentiable(arguments, d))
            raise NotImplementedError(
                "This gradient cannot be differentiated (create_graph=True, or "
                "one gradient of `torch.func` within another). "
                f"Pass {advice} to differentiate twice, or call "
                "`keras_equiattn.config.disable_recompute()` for all layers."
            )

    def function(*arguments: Tensor) -> Any:
        found = Function.apply(*map(ops.convert_to_tensor, arguments))
        return keras.tree.map_structure(lambda n: found[n], last.nests.result)

    return function


class Nests(NamedTuple):
    """The results of a function, with numbers in place of its tensors.

    A tensor that was returned twice has one number.

    Attributes:
        result: the nest of results.
        kept: the nest of what is kept for the gradient.
        results: how many tensors the results are.
    """

    result: Any
    kept: Any
    results: int


def _without_repeats(result: Any, kept: Any) -> tuple[Nests, tuple[Any, ...]]:
    """The nests of results and kept tensors, and each tensor of them once."""
    tensors: list[Tensor] = []

    def number(x: Tensor) -> int:
        for n, other in enumerate(tensors):
            if other is x:
                return n
        tensors.append(x)
        return len(tensors) - 1

    of_result = keras.tree.map_structure(number, result)
    results = len(tensors)
    of_kept = keras.tree.map_structure(number, kept)
    return Nests(of_result, of_kept, results), tuple(tensors)


def _save(
    ctx: Any, nests: Nests, inputs: tuple[Any, ...], outputs: tuple[Any, ...]
) -> None:
    """Saves arguments and kept tensors for the gradient, each once."""
    ctx.nests, ctx.count = nests, len(inputs)
    ctx.mark_non_differentiable(*outputs[nests.results :])
    ctx.set_materialize_grads(False)
    ctx.numbers = list(dict.fromkeys(keras.tree.flatten(nests.kept)))
    ctx.save_for_backward(*inputs, *(outputs[n] for n in ctx.numbers))


def _saved(ctx: Any) -> tuple[tuple[Any, ...], Any]:
    """The arguments, and the nest of kept tensors."""
    tensors = ctx.saved_tensors
    saved = dict(zip(ctx.numbers, tensors[ctx.count :], strict=True))
    kept = keras.tree.map_structure(saved.get, ctx.nests.kept)
    return tensors[: ctx.count], kept


def _is_differentiated() -> bool:
    """Whether the gradient that is computed now will be differentiated.

    Autograd differentiates a gradient that it computes with gradients enabled.
    `torch.func` enables them for every gradient, but differentiates only those
    within another one.
    """
    import torch

    if within_torch_func():
        functorch = torch._C._functorch
        levels = [x.key() for x in functorch.get_interpreter_stack() or ()]
        return levels.count(functorch.TransformType.Grad) > 1
    return torch.is_grad_enabled()
