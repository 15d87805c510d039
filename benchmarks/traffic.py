"""Bytes that a training step of each family moves, and kernels that it runs.

    KERAS_BACKEND=jax python benchmarks/traffic.py
    KERAS_BACKEND=tensorflow python benchmarks/traffic.py
    KERAS_BACKEND=torch python benchmarks/traffic.py
    KERAS_BACKEND=torch python benchmarks/traffic.py --compiled

A step is the output of a layer, with its linear maps, and the gradients of the
sum of its squares with respect to weights and input. The numbers are the same
on every machine whose compiler makes the same program, so noise does not touch
them. They are counted at the level of kernels, in units of the input:

- JAX and TensorFlow: operands and results of every instruction of the program
  that XLA has compiled, see `xla_traffic.py`; under JAX also the result of
  XLA's own `cost_analysis`, which counts repeated reads within a fusion;
- PyTorch, one operator after the other: operands and results of each operator
  that is no view;
- PyTorch with `--compiled`: the bytes that the kernels of Inductor access by
  its own count, for each run, and the operators outside of them as before.

"bound" is the least that a step can move: every argument and every result once,
forward and backward. "largest" lists what moves the most: bytes in units of the
input, runs, and the kernel or operator. Writes
`benchmarks/results/traffic-<backend>-<dtype>-<batch>-<date>.json`.
"""

import argparse
import collections
import math
import os
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import report_files
import xla_traffic

from keras_equiattn import layers
from keras_equiattn.ops.backend import inductor

# Kernels, or operators, that a result lists: those that move the most.
LARGEST = 10
Family = tuple[Callable[[], Any], tuple[int, ...]]


def families(size: int = 32, width: int = 64) -> dict[str, Family]:
    """For each family, a function that makes the layer, and its input shape.

    Args:
        size: rows and columns of the image; layers that need much memory get
            half as many.
        width: channels of all group elements together. Group self-attention
            and the layers of transformers have the sizes of their networks.

    Returns:
        Functions and shapes without the batch.
    """
    image = (size, size, width)
    group_image = (size, size, 4, width // 4)
    half = (size // 2, size // 2, 4, width // 4)
    return {
        "conv2d": (
            lambda: keras.layers.Conv2D(width, 3, padding="same"),
            image,
        ),
        "sasa": (
            lambda: layers.StandAloneSelfAttention2D(
                width, kernel_size=5, num_heads=8, group="z2"
            ),
            image,
        ),
        "asc": (
            lambda: layers.AffineSelfConv2D(
                width, kernel_size=5, num_heads=8, group="z2"
            ),
            image,
        ),
        "simple_asc": (
            lambda: layers.SimpleAffineSelfConv2D(
                width, kernel_size=5, num_heads=8, group="z2"
            ),
            image,
        ),
        "acmix": (lambda: layers.ACmix2D(width, group="z2"), image),
        "acmix_patchwise": (lambda: layers.PatchwiseACmix2D(width), image),
        "acmix_window": (
            lambda: layers.WindowACmix2D(width, 8, window_size=8, shift=4),
            image,
        ),
        "acmix_reduction": (
            lambda: layers.SpatialReductionACmix2D(width, 8, reduction=4),
            image,
        ),
        "lifting_conv_p4": (
            lambda: layers.LiftingConv2D(
                width // 4, 3, group="p4", padding="same"
            ),
            image,
        ),
        "group_conv_p4": (
            lambda: layers.GroupConv2D(
                width // 4, 3, group="p4", padding="same"
            ),
            group_image,
        ),
        "asc_p4": (
            lambda: layers.AffineSelfConv2D(
                width // 4, kernel_size=5, num_heads=8, group="p4"
            ),
            group_image,
        ),
        "acmix_p4": (
            lambda: layers.ACmix2D(width // 4, group="p4"),
            group_image,
        ),
        "full_attention_p4": (
            lambda: layers.AttentiveGroupConv2D(
                width // 4, 3, group="p4", padding="same"
            ),
            half,
        ),
        "channel_attention_p4": (
            lambda: layers.AttentiveGroupConv2D(
                width // 4, 3, "channel", group="p4", padding="same"
            ),
            half,
        ),
        "spatial_attention_p4": (
            lambda: layers.AttentiveGroupConv2D(
                width // 4, 3, "spatial", group="p4", padding="same"
            ),
            half,
        ),
        "input_attention_p4": (
            lambda: layers.InputAttention(group="p4"),
            group_image,
        ),
        "gsa_p4": (
            lambda: layers.GroupSelfAttention2D(20, 5, 9, 5, "p4"),
            (14, 14, 4, 20),
        ),
        "gsa_global_p4": (
            lambda: layers.GroupSelfAttention2D(20, 5, 9, None, "p4"),
            (7, 7, 4, 20),
        ),
        "group_dense_p4m": (
            lambda: layers.GroupDense(48, group="p4m"),
            (16, 16, 8, 48),
        ),
        "multi_head_p4m": (
            lambda: layers.GroupMultiHeadAttention2D(6, group="p4m"),
            (8, 8, 8, 48),
        ),
    }


FAMILIES = families()


def measure(
    name: str, batch: int, dtype: str, compiled: bool
) -> dict[str, Any]:
    """Traffic of a step of this family, in units of its input."""
    make, shape = FAMILIES[name]
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(dtype)
    layer = make()
    layer.build((batch, *shape))
    keras.config.set_dtype_policy("float32")
    x = np.random.default_rng(0).normal(size=(batch, *shape))
    x = keras.ops.cast(x, layer.compute_dtype)
    unit = math.prod(x.shape) * _bytes_of(layer.compute_dtype)
    start = time.perf_counter()
    found = {
        "jax": _jax,
        "tensorflow": _tensorflow,
        "torch": _torch_compiled if compiled else _torch,
    }[keras.backend.backend()](layer, x)
    seconds = time.perf_counter() - start
    found["largest"] = [
        [round(moved / unit, 1), runs, what]
        for moved, runs, what in sorted(found.pop("each"), reverse=True)
    ][:LARGEST]
    for what in ("bytes", "cost_analysis", "inductor"):
        if what in found:
            found[what.replace("bytes", "moved")] = round(
                found.pop(what) / unit, 1
            )
    return {
        **found,
        "bound": round(_bound(layer, x) / unit, 1),
        "seconds": round(seconds, 1),
    }


def _bytes_of(dtype: str) -> int:
    """Bytes of a number."""
    return {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}[dtype]


def _bound(layer: Any, x: Any) -> float:
    """Bytes of input, weights and output, and of their gradients."""
    y = layer.compute_output_shape(tuple(x.shape))
    size = _bytes_of(layer.compute_dtype)
    weights = sum(
        math.prod(v.shape) * _bytes_of(v.dtype)
        for v in layer.trainable_variables
    )
    # Input and weights are read forward and backward.
    return 3 * (math.prod(x.shape) * size + weights) + 2 * math.prod(y) * size


def _jax(layer: Any, x: Any) -> dict[str, Any]:
    import jax

    others = [v.value for v in layer.non_trainable_variables]

    def loss(weights: Any, x: Any) -> Any:
        y, _ = layer.stateless_call(weights, others, x)
        return (y.astype("float32") ** 2).sum()

    weights = [v.value for v in layer.trainable_variables]
    step = jax.jit(jax.grad(loss, (0, 1))).lower(weights, x).compile()
    memory = step.memory_analysis()
    return {
        **xla_traffic.count(step.as_text())._asdict(),
        "cost_analysis": step.cost_analysis()["bytes accessed"],
        "temporaries_mib": round(memory.temp_size_in_bytes / 2**20, 1),
    }


def _tensorflow(layer: Any, x: Any) -> dict[str, Any]:
    import tensorflow as tf

    weights = [v.value for v in layer.trainable_variables]

    @tf.function(jit_compile=True)
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.cast(layer(x), "float32") ** 2)
        return tape.gradient(loss, [x, *weights])

    text = step.experimental_get_compiler_ir(x)(stage="optimized_hlo")
    return xla_traffic.count(text)._asdict()


def _torch_step(layer: Any, x: Any) -> None:
    y = layer(x)
    (y.float() ** 2).sum().backward()


def _torch(layer: Any, x: Any) -> dict[str, Any]:
    """The traffic of every operator that is no view."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    moved: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])

    class Count(TorchDispatchMode):
        def __torch_dispatch__(
            self, f: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = f(*args, **(kwargs or {}))
            # An empty tensor is made without touching its memory.
            if f.is_view or "_unsafe_view" in str(f) or "empty" in str(f):
                return result
            tensors = torch.utils._pytree.tree_leaves((args, kwargs, result))
            one = moved[str(f)]
            one[0] += sum(
                _spanned(t) for t in tensors if isinstance(t, torch.Tensor)
            )
            one[1] += 1
            return result

    x.requires_grad_()
    _torch_step(layer, x)
    with Count():
        _torch_step(layer, x)
    each = [(size, runs, what) for what, (size, runs) in moved.items()]
    return {
        "bytes": sum(size for size, _, _ in each),
        "kernels": sum(runs for _, runs, _ in each),
        "each": each,
    }


def _spanned(x: Any) -> int:
    """Bytes of memory behind a tensor, less than its own if parts overlap."""
    if not x.numel():
        return 0
    steps = zip(x.shape, x.stride(), strict=True)
    extent = 1 + sum((n - 1) * abs(step) for n, step in steps)
    return min(x.numel(), extent) * x.element_size()


def _torch_compiled(layer: Any, x: Any) -> dict[str, Any]:
    """The traffic of the kernels of Inductor and of the operators outside.

    Layers that Keras computes with convolutions alone have no such kernels.
    """
    x.requires_grad_()
    for _ in range(inductor.PATIENCE + 1):
        _torch_step(layer, x)
    _inside.clear()
    outside = _torch(layer, x)
    # `_torch` runs two steps and counts the second.
    each = [
        (size // 2, runs // 2, what) for what, (size, runs) in _inside.items()
    ]
    size = sum(size for size, _, _ in each)
    return {
        "bytes": size + outside["bytes"],
        "inductor": size,
        "kernels": sum(runs for _, runs, _ in each) + outside["kernels"],
        "each": each + outside["each"],
    }


# Bytes and kernels of what Inductor has compiled and a step has run.
_inside: dict[str, list[int]] = {}


def _count_what_is_compiled() -> None:
    """From now on `_inside` gets what each compiled function accesses.

    Families share functions, so this is done once, before all of them.
    """
    import logging

    import torch
    from torch._inductor import metrics
    from torch._inductor.compile_fx import inductor_metrics_log

    compile_before = inductor._compile

    def compile_counted(function: Any, *arguments: Any) -> Any:
        """What is compiled once may run many times in a step."""
        metrics.reset()
        run = compile_before(function, *arguments)
        of_run = metrics.num_bytes_accessed, metrics.generated_kernel_count
        inner = getattr(function, "func", function)
        name = f"compiled {inner.__qualname__}"

        def counted(tensors: Any) -> Any:
            one = _inside.setdefault(name, [0, 0])
            one[:] = (n + more for n, more in zip(one, of_run, strict=True))
            with torch.utils._python_dispatch._disable_current_modes():
                return run(tensors)

        return counted

    # Inductor counts bytes only where it logs them.
    inductor_metrics_log.setLevel(logging.INFO)
    inductor_metrics_log.info = lambda *_, **__: None
    inductor._compile = compile_counted


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument(
        "--families", nargs="+", choices=tuple(FAMILIES), default=FAMILIES
    )
    options = parser.parse_args()
    backend = keras.backend.backend()
    if options.compiled and backend != "torch":
        parser.error("--compiled needs KERAS_BACKEND=torch")
    if options.compiled and not inductor.can_compile("cpu"):
        parser.error("--compiled needs a C++ compiler, such as g++")
    if options.batch < 1:
        parser.error(f"--batch must be positive. Received: {options.batch}")
    if options.compiled:
        _count_what_is_compiled()
    else:
        os.environ["TORCH_COMPILE_DISABLE"] = "1"
    results = {}
    for name in options.families:
        results[name] = measure(
            name, options.batch, options.dtype, options.compiled
        )
        print(name, results[name], flush=True)
    results |= {
        "settings": {**vars(options), "families": list(options.families)},
    }
    how = f"{backend}-inductor" if options.compiled else backend
    report_files.write(
        f"traffic-{how}-{options.dtype}-{options.batch}", results
    )


if __name__ == "__main__":
    main()
