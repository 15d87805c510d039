"""Gradients of our own under PyTorch."""

from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.backend.inductor import with_compiled_parts


def torch_custom_vjp(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    alternative: str,
) -> Callable[..., Any]:
    """`custom_vjp` for PyTorch, see there.

    Not Keras' `custom_gradient`: that would hold arguments and kept tensors in
    a closure, where autograd can neither free them nor check that nobody has
    changed them, nor move them away and back.
    """
    import torch

    run, run_back = map(with_compiled_parts, (forward, backward))
    # The nests of results and kept tensors of the last call, as places in the
    # list of all: tensors may be both.
    nests: list[Any] = [0, ()]

    class Function(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*arguments: Tensor) -> Any:
            result, kept = run(*arguments)
            found: list[Tensor] = []

            def place(x: Tensor) -> int:
                for n, other in enumerate(found):
                    if other is x:
                        return n
                found.append(x)
                return len(found) - 1

            nests[0] = keras.tree.map_structure(place, result)
            results = len(found)
            nests[1] = keras.tree.map_structure(place, kept)
            nests[2:] = [results]
            # Kept tensors are results: transformations see them so.
            return tuple(found)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            result, kept, results = nests
            ctx.nests, ctx.count = (result, kept), len(inputs)
            ctx.mark_non_differentiable(*output[results:])
            ctx.set_materialize_grads(False)
            saved = {n: output[n] for n in keras.tree.flatten(kept)}
            ctx.places = {n: len(inputs) + i for i, n in enumerate(saved)}
            ctx.save_for_backward(*inputs, *saved.values())

        @staticmethod
        def backward(ctx: Any, *upstream: Any) -> Any:
            result, kept = ctx.nests
            of_results = [upstream[n] for n in keras.tree.flatten(result)]
            if all(d is None for d in of_results):
                return (None,) * ctx.count
            _refuse_second_derivative(alternative)
            tensors = ctx.saved_tensors
            kept = keras.tree.map_structure(
                lambda n: tensors[ctx.places[n]], kept
            )
            d = (
                tuple(of_results)
                if isinstance(result, tuple)
                else of_results[0]
            )
            return tuple(run_back(tensors[: ctx.count], kept, d))

    def function(*arguments: Tensor) -> Any:
        found = Function.apply(*map(ops.convert_to_tensor, arguments))
        return keras.tree.map_structure(lambda n: found[n], nests[0])

    return function


def _refuse_second_derivative(alternative: str) -> None:
    """Raises an error where this gradient would be differentiated.

    Autograd differentiates a gradient that it computes with gradients enabled.
    `torch.func` enables them for every gradient, but differentiates only those
    within another one.
    """
    import torch

    if torch._C._are_functorch_transforms_active():
        functorch = torch._C._functorch
        levels = [x.key() for x in functorch.get_interpreter_stack() or ()]
        twice = levels.count(functorch.TransformType.Grad) > 1
    else:
        twice = torch.is_grad_enabled()
    if twice:
        raise NotImplementedError(
            "This gradient cannot be differentiated (create_graph=True, or "
            "one gradient of `torch.func` within another). "
            f"Pass `{alternative}` to differentiate twice, or call "
            "`keras_equiattn.config.disable_recompute()` for all layers."
        )
