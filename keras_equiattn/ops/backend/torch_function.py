"""Gradients of our own under PyTorch."""

from collections.abc import Callable
from typing import Any

import keras
import torch
from keras import ops

from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.backend.inductor import Compiled


def torch_custom_vjp(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    alternative: str,
    inductor: bool,
) -> Callable[..., Any]:
    """`custom_vjp` for PyTorch, see there.

    Not Keras' `custom_gradient`: that would hold arguments and kept tensors in
    a closure, where autograd can neither free them nor check that nobody has
    changed them, nor move them away and back.
    """
    run: Callable[..., Any] = Compiled(forward) if inductor else forward
    run_back: Callable[..., Any] = backward
    if inductor:
        run_back = Compiled(backward)
    # How the nest of kept tensors looks, once there has been a call.
    nest: list[Any] = [()]

    class Function(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*arguments: Tensor) -> Any:
            result, kept = run(*arguments)
            nest[0] = keras.tree.map_structure(lambda _: 0, kept)
            # Kept tensors are results: transformations see them so.
            return result, *keras.tree.flatten(kept)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            _, *kept = output
            ctx.mark_non_differentiable(*kept)
            ctx.set_materialize_grads(False)
            ctx.count = len(inputs)
            ctx.save_for_backward(*inputs, *kept)

        @staticmethod
        def backward(ctx: Any, upstream: Any, *_: Any) -> Any:
            if upstream is None:
                return (None,) * ctx.count
            _refuse_second_derivative(alternative)
            tensors = ctx.saved_tensors
            arguments, flat = tensors[: ctx.count], tensors[ctx.count :]
            kept = keras.tree.pack_sequence_as(nest[0], list(flat))
            return tuple(run_back(tuple(arguments), kept, upstream))

    def function(*arguments: Tensor) -> Tensor:
        result, *_ = Function.apply(*map(ops.convert_to_tensor, arguments))
        return result

    return function


def _refuse_second_derivative(alternative: str) -> None:
    """PyTorch differentiates a gradient if it is computed with gradients on.

    `torch.func` computes all gradients like that.
    """
    if torch._C._are_functorch_transforms_active():
        return
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "This gradient cannot be differentiated (create_graph=True). "
            f"Pass `{alternative}` to differentiate twice."
        )
