"""Custom gradients, and gradients of functions, on every backend."""

from collections.abc import Callable
from collections.abc import Iterable
from typing import Any

import keras
from keras import ops

from keras_equiattn.ops._types import Shaped
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.backend.target import has_gradients
from keras_equiattn.ops.backend.target import is_portable
from keras_equiattn.ops.backend.target import refuse_to_train
from keras_equiattn.ops.backend.target import tracing_for
from keras_equiattn.ops.backend.target import within_torch_func
from keras_equiattn.ops.numerics import dtype_name

Function = Callable[..., Any]


def custom_vjp(
    forward: Function,
    backward: Function,
    advice: str,
    differentiable: Function | None = None,
) -> Function:
    """A function with a gradient of its own, compiled where that is possible.

    JAX compiles it in any case. Under TensorFlow it is compiled by XLA within
    a `tf.function`, so in `fit`; called eagerly it is not, since that would
    take seconds. Under PyTorch only functions marked with `compiled_part` are
    compiled.

    The gradient can be differentiated once more under JAX. Under TensorFlow
    and PyTorch that is an error: they would lose what flows through the kept
    tensors. PyTorch can do it where `differentiable` is given. A backend that
    only predicts gets `forward` alone.

    Args:
        forward: takes tensors; returns the result, a tensor or a tuple of
            them, and what to keep for `backward`, a nest of tensors.
        backward: takes the same tensors as a tuple, what was kept, and the
            gradient with respect to the result; returns the gradients with
            respect to the tensors. Where there are several results, a gradient
            may be None under PyTorch.
        advice: the argument that the error advises to pass.
        differentiable: `backward`, made of functions that PyTorch can
            differentiate; takes the tensors and the gradient with respect to
            the result.

    Returns:
        A differentiable function from tensors to the result.
    """
    if not has_gradients():
        return lambda *arguments: forward(
            *map(ops.convert_to_tensor, arguments)
        )[0]
    if keras.backend.backend() == "torch":
        from keras_equiattn.ops.backend.torch_function import torch_custom_vjp

        return torch_custom_vjp(forward, backward, advice, differentiable)

    def build(compile: Function) -> Function:
        run, run_back = compile(forward), compile(backward)

        @ops.custom_gradient
        def function(*arguments: Tensor) -> Any:
            arguments = tuple(map(ops.convert_to_tensor, arguments))
            result, kept = run(*arguments)

            def gradient(*upstream: Any) -> Any:
                # TensorFlow passes those of several results one by one.
                upstream = upstream if len(upstream) > 1 else upstream[0]
                gradients = run_back(_as_others(arguments), kept, upstream)
                return tuple(_not_differentiable(x, advice) for x in gradients)

            return result, gradient

        return function

    return _compiled(build)


def signature(tensors: Iterable[Tensor | None]) -> tuple[Any, ...]:
    """The key under which a function of these tensors is kept.

    It holds their shapes and dtypes, and whether the function is `portable`.
    Sizes that PyTorch exports as symbols cannot be keys, and are None.
    """

    def entry(x: Tensor) -> tuple[Any, ...]:
        sizes = (n if _is_key(n) else None for n in x.shape)
        return tuple(sizes), dtype_name(x), is_portable()

    return tuple(None if x is None else entry(x) for x in tensors)


def _is_key(size: Any) -> bool:
    """Whether a size can be compared now, and is not a symbol of PyTorch."""
    return type(size).__name__ != "SymInt"


def without_gradient(function: Function) -> Function:
    """The function, with no gradient passing through its results."""

    def build(compile: Function) -> Function:
        run = compile(function)
        if not has_gradients():
            return run
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            # Not `stop_gradient`: TensorFlow would still look inside.
            @tf.custom_gradient
            def constant(*arguments: Tensor) -> Any:
                return run(*arguments), lambda *_: [None] * len(arguments)

            return constant
        return lambda *arguments: run(*map(ops.stop_gradient, arguments))

    return _compiled(build)


def vjp(
    function: Function,
    arguments: tuple[Tensor, ...],
    cotangent: Any,
    differentiable: bool = False,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A value, and the gradients of `sum(value * cotangent)`.

    Args:
        function: from tensors to one tensor.
        arguments: the arguments of the function.
        cotangent: a tensor like the value of the function.
        differentiable: whether PyTorch must be able to differentiate what is
            returned; the others can in any case.

    Returns:
        `function(*arguments)`, and a gradient for each of the arguments.

    Raises:
        NotImplementedError: on a backend that only predicts.
    """
    backend = keras.backend.backend()
    if not has_gradients():
        refuse_to_train("Gradients")
    if backend == "jax":
        import jax

        value, pull_back = jax.vjp(function, *arguments)
        return value, pull_back(cotangent)
    if backend == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(arguments)
            value = function(*arguments)
        return value, tuple(tape.gradient(value, arguments, cotangent))
    import torch

    # Within `torch.func` a tensor cannot be told to require a gradient.
    if differentiable or within_torch_func():
        value, pull_back = torch.func.vjp(function, *arguments)
        return value, pull_back(cotangent)
    with torch.enable_grad():
        leaves = tuple(a.detach().requires_grad_() for a in arguments)
        value = function(*leaves)
    return value.detach(), torch.autograd.grad(value, leaves, cotangent)


def _compiled(build: Callable[[Function], Function]) -> Function:
    """Returns what `build` makes with the compiler of the backend."""
    backend = keras.backend.backend()
    if is_portable():
        return build(lambda function: function)
    if backend == "jax":
        import jax

        return build(jax.jit)
    if backend != "tensorflow":
        return build(lambda function: function)
    import tensorflow as tf

    def with_xla(function: Function) -> Function:
        def traced(*arguments: Tensor) -> Any:
            with tracing_for("xla"):
                return function(*arguments)

        return tf.function(traced, autograph=False, jit_compile=True)

    in_graph = build(with_xla)
    # A call by hand does not wait seconds for XLA. It runs a graph all the
    # same: else the tape would hold every step of a loop.
    eager = tf.function(build(lambda function: function), autograph=False)
    # TensorFlow warns of retracing once five layers or shapes have traced
    # functions of their own, and has no public switch for that warning.
    eager._omit_frequent_tracing_warning = True

    def function(*arguments: Tensor) -> Any:
        return (in_graph if tf.inside_function() else eager)(*arguments)

    return function


def _as_others(tensors: Any) -> Any:
    """Returns equal tensors that XLA, under JAX, takes for other ones.

    Otherwise XLA would find that the backward pass computes what the forward
    pass has computed, and keep it in memory until then.
    """
    if keras.backend.backend() == "jax":
        import jax

        barrier: Function = jax.lax.optimization_barrier
        return barrier(tensors)
    return tensors


def _not_differentiable(
    x: Shaped[Tensor, "..."], advice: str
) -> Shaped[Tensor, "..."]:
    """Returns `x`; TensorFlow raises an error if it is differentiated."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        message = (
            f"Pass {advice} to differentiate twice, or call "
            "`keras_equiattn.config.disable_recompute()` for all layers."
        )
        return tf.raw_ops.PreventGradient(input=x, message=message)
    return x
