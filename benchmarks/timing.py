"""What the benchmarks share: training steps, taken in turns."""

import time
from collections.abc import Callable

import keras
import numpy as np
from keras import ops

from keras_equiattn.applications.training import reporting


def place() -> str:
    """What names a file of results: the backend, and "gpu" on a GPU."""
    backend = keras.backend.backend()
    return backend if reporting.device() == "CPU" else f"{backend}-gpu"


def training_step(layer: keras.layers.Layer, x: np.ndarray) -> Callable:
    """A function without arguments that runs one step and waits for it.

    Outputs, and gradients of the input and the weights, in the mode that Keras
    compiles in by default on a CPU.
    """
    layer(x[:1])
    variables = layer.trainable_variables

    def function(x, *values):
        # Not `stateless_call`, which leaves out the casts of a dtype policy.
        pairs = list(zip(variables, values, strict=True))
        with keras.StatelessScope(state_mapping=pairs):
            return layer(x)

    values = [variable.value for variable in variables]
    return gradient_step(function, [ops.convert_to_tensor(x), *values])


def inference_step(layer: keras.layers.Layer, x: np.ndarray) -> Callable:
    """The output alone, as `training_step` compiles it."""
    images = ops.convert_to_tensor(x)
    backend = keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        graph = tf.function(layer)
        return lambda: graph(images).numpy()
    if backend == "jax":
        import jax

        # Arguments: what is made of constants alone is made only once.
        values = [variable.value for variable in layer.variables]

        @jax.jit
        def output(x, values):
            pairs = list(zip(layer.variables, values, strict=True))
            with keras.StatelessScope(state_mapping=pairs):
                return layer(x)

        return lambda: jax.block_until_ready(output(images, values))
    import torch

    def step():
        with torch.no_grad():
            y = layer(images)
        _wait()
        return y

    return step


def forward_step(function: Callable, tensors: list) -> Callable:
    """The result of a function of tensors, as `gradient_step` compiles it."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        graph = tf.function(function)
        return lambda: [y.numpy() for y in tf.nest.flatten(graph(*tensors))]
    if backend == "jax":
        import jax

        compiled = jax.jit(function)
        return lambda: jax.block_until_ready(compiled(*tensors))
    import torch

    def step():
        with torch.no_grad():
            y = function(*tensors)
        _wait()
        return y

    return step


def gradient_step(function: Callable, tensors: list) -> Callable:
    """`training_step` for a function from tensors to a tensor."""
    shape = tuple(function(*tensors).shape)
    y = np.random.default_rng(1).normal(size=shape).astype("float32")
    y = ops.convert_to_tensor(y)
    backend = keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                tape.watch(tensors)
                loss = tf.reduce_sum(function(*tensors) * y)
            gradients = tape.gradient(loss, tensors)
            # Those of gathers are sparse.
            return [tf.convert_to_tensor(gradient) for gradient in gradients]

        return lambda: [gradient.numpy() for gradient in step()]
    if backend == "jax":
        import jax

        def loss(*tensors):
            return (function(*tensors) * y).sum()

        gradients = jax.jit(jax.grad(loss, argnums=range(len(tensors))))
        return lambda: jax.block_until_ready(gradients(*tensors))
    import torch

    leaves = [tensor.requires_grad_() for tensor in tensors]

    def step():
        gradients = torch.autograd.grad((function(*leaves) * y).sum(), leaves)
        _wait()
        return gradients

    return step


def _wait() -> None:
    """A GPU still computes when PyTorch has returned."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def alternate(
    steps: dict[str, Callable],
    repeats: int,
    warm_up: int = 5,
    untimed: int = 0,
) -> dict[str, list[float]]:
    """Seconds of each step, taken in turns.

    Args:
        steps: by name.
        repeats: turns that count.
        warm_up: turns before.
        untimed: steps in each turn before that which counts. After a step of
            another that takes much memory, the next must ask for its own.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(repeats + warm_up):
        for name, step in steps.items():
            for _ in range(untimed):
                step()
            start = time.perf_counter()
            step()
            if turn >= warm_up:
                seconds[name].append(time.perf_counter() - start)
    return seconds
