"""What the benchmarks share: training steps, taken in turns."""

import ctypes
import os
import time
from collections.abc import Callable

import keras
import numpy as np
from keras import ops

from keras_equiattn.applications.training import reporting

HUGE_PAGES = "glibc.malloc.hugetlb=1"


def place() -> str:
    """The backend and what it runs on, for the name of a file of results.

    That is "gpu" on a GPU, "one_core" where the process may use a single core,
    and "huge_pages" where the environment variable `GLIBC_TUNABLES` makes glibc
    2.35 or newer ask Linux for pages of 2 MiB, so that JAX has hardly any page
    faults.
    """
    backend = keras.backend.backend()
    if reporting.device() != "CPU":
        return f"{backend}-gpu"
    one_core = reporting.hardware()["cores"] == 1
    huge_pages = HUGE_PAGES in os.environ.get("GLIBC_TUNABLES", "")
    return backend + "-one_core" * one_core + "-huge_pages" * huge_pages


def training_step(layer: keras.layers.Layer, x: np.ndarray) -> Callable:
    """A function without arguments that runs one step and waits for it.

    A step computes the output and the gradients of the input and the weights,
    in the mode that Keras compiles in by default on a CPU.
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

        # As arguments: XLA computes what depends on constants alone only once.
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
    """`training_step` for a function from tensors to a tensor.

    It returns the output too, since compilers leave out unused results.
    """
    y = function(*tensors)
    upstream = np.random.default_rng(1).normal(size=tuple(y.shape))
    upstream = ops.cast(ops.convert_to_tensor(upstream), y.dtype)
    backend = keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                tape.watch(tensors)
                y = function(*tensors)
            gradients = tape.gradient(y, tensors, upstream)
            # Gradients of gathers are sparse.
            return y, *(
                tf.convert_to_tensor(gradient) for gradient in gradients
            )

        return lambda: [found.numpy() for found in step()]
    if backend == "jax":
        import jax

        @jax.jit
        def both(upstream, *tensors):
            y, pull_back = jax.vjp(function, *tensors)
            return y, pull_back(upstream)

        return lambda: jax.block_until_ready(both(upstream, *tensors))
    import torch

    leaves = [tensor.requires_grad_() for tensor in tensors]

    def step():
        y = function(*leaves)
        gradients = torch.autograd.grad(y, leaves, upstream)
        _wait()
        return y, *gradients

    return step


def _wait() -> None:
    """Waits for a GPU, which may still compute when PyTorch has returned."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def keep_memory() -> None:
    """Keeps PyTorch from giving memory back to the system, with glibc.

    Otherwise it asks for each tensor of more than 32 MiB anew. Then page faults
    take up to a third of a step, depending on what ran before; in a network,
    which has used much memory, there are few. For TensorFlow this makes no
    difference, and JAX takes longer with it.
    """
    if keras.backend.backend() != "torch":
        return
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        no_mapped_blocks, trim_threshold = (-4, 0), (-1, -1)
        for option in no_mapped_blocks, trim_threshold:
            set_option(*option)


def alternate(
    steps: dict[str, Callable],
    repeats: int,
    warm_up: int = 5,
    untimed: int = 0,
) -> dict[str, list[float]]:
    """Seconds of each step, taken in turns.

    Args:
        steps: the steps by their names.
        repeats: number of turns that count.
        warm_up: number of turns before these.
        untimed: runs of a step in each turn before the one that counts. After
            another step that needs much memory, a step must allocate its own.
    """
    keep_memory()
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
