"""Where a computation runs: on which device, and through which compiler."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any
from typing import NoReturn

import keras

from keras_equiattn.ops._types import Shaped
from keras_equiattn.ops._types import Tensor

# The backends that have gradients. Others, such as OpenVINO, only predict: they
# take plain `keras.ops` wherever these three have code of their own.
DIFFERENTIABLE = ("jax", "tensorflow", "torch")

# Whether what is traced now is for a program without this library.
_portable: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "portable", default=False
)
# The compiler for which TensorFlow or PyTorch traces now, if there is one, and
# whether it fuses sums.
_tracing_for: contextvars.ContextVar[tuple[str | None, bool]] = (
    contextvars.ContextVar("tracing_for", default=(None, False))
)


@dataclasses.dataclass(frozen=True)
class Target:
    """Where and how an operator runs; its form is chosen by that.

    Attributes:
        device: "cpu" or "accelerator".
        compiler: "xla", "inductor", "portable" for a program with operators
            that all backends have, "graph" where TensorFlow runs the operators
            of a graph, or None where operators run one by one.
        fuses_sums: whether the compiler fuses a sum of many terms into the
            reduction that uses it, and never stores the sum.
    """

    device: str
    compiler: str | None
    fuses_sums: bool = False

    @property
    def eager_on_cpu(self) -> bool:
        """Whether a CPU runs one operator after the other."""
        return self.device == "cpu" and self.compiler is None

    @property
    def unrolls(self) -> bool:
        """Whether the compiler gets every step of a loop by itself."""
        return self.compiler == "portable"

    @property
    def fuses(self) -> bool:
        """Whether elementwise operators that follow each other become one."""
        return self.compiler in ("xla", "inductor")

    @property
    def xla(self) -> bool:
        """Whether XLA compiles for any device."""
        return self.compiler == "xla"

    @property
    def xla_on_cpu(self) -> bool:
        """Whether XLA compiles for a CPU."""
        return self.device == "cpu" and self.xla


def find_target(*tensors: Shaped[Tensor, "..."]) -> Target:
    """The target of a computation on these tensors.

    Nothing is computed or copied for it. While Keras finds shapes, tensors
    have no device; the answer is then of no consequence.

    Args:
        *tensors: the arguments of the computation.
    """
    backend = keras.backend.backend()
    device = {
        "jax": _device_jax,
        "tensorflow": _device_tensorflow,
        "torch": _device_torch,
    }.get(backend, lambda _: "cpu")(tensors)
    compiler = _compiler(backend)
    fuses_sums = compiler == "xla" or _tracing_for.get()[1]
    return Target(device, compiler, fuses_sums)


def has_gradients() -> bool:
    """Whether computations have gradients; without them they only predict."""
    return keras.backend.backend() in DIFFERENTIABLE and not is_portable()


def is_portable() -> bool:
    """Whether only operators of all backends may be used, see `portable`."""
    return _portable.get()


@contextlib.contextmanager
def portable() -> Iterator[None]:
    """A context in which traced programs can predict anywhere.

    Such a program has no custom gradients and no operators that only the
    compiler of its backend knows, and its loops are unrolled.
    """
    token = _portable.set(True)
    try:
        yield
    finally:
        _portable.reset(token)


def refuse_to_train(what: str) -> NoReturn:
    """Raises the error of a backend that can only predict.

    Args:
        what: the subject of its first sentence, in the plural.
    """
    raise NotImplementedError(
        f"{what} are not available with the '{keras.backend.backend()}' "
        "backend, which only predicts. Train with KERAS_BACKEND set to one of "
        f"{', '.join(DIFFERENTIABLE)}, and load the saved weights."
    )


@contextlib.contextmanager
def tracing_for(compiler: str, fuses_sums: bool = False) -> Iterator[None]:
    """A context in which tracing is for this compiler, see `Target`."""
    token = _tracing_for.set((compiler, fuses_sums))
    try:
        yield
    finally:
        _tracing_for.reset(token)


def _compiler(backend: str) -> str | None:
    """The compiler of a `Target`, for what runs or is traced now."""
    if is_portable() or backend == "openvino":
        return "portable"
    if backend == "jax":
        return "xla"
    if backend == "torch":
        import torch

        # This also holds where users compile a model with our layers.
        compiled = torch.compiler.is_compiling() or _tracing_for.get()[0]
        return "inductor" if compiled else None
    # A `custom_vjp` is a graph also where a person calls it by hand.
    return _tracing_for.get()[0] or "graph"


def within_torch_func() -> bool:
    """Whether `torch.func` transforms what PyTorch computes now."""
    import torch

    return bool(torch._C._are_functorch_transforms_active())


def may_be_sharded() -> bool:
    """Whether one program may run on several devices, each with some images."""
    if keras.backend.backend() != "jax":
        return False
    import jax

    return jax.device_count() > 1


def _device_jax(tensors: tuple[Any, ...]) -> str:
    """Where the first concrete array lies; traced ones have no device."""
    import jax

    for x in tensors:
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
            platform = next(iter(x.devices())).platform
            return "cpu" if platform == "cpu" else "accelerator"
    return "cpu" if jax.default_backend() == "cpu" else "accelerator"


def _device_tensorflow(tensors: tuple[Any, ...]) -> str:
    """Where the first tensor lies that has a device."""
    import tensorflow as tf

    for x in tensors:
        place = getattr(x, "device", None)
        if place:
            on_cpu = tf.DeviceSpec.from_string(place).device_type == "CPU"
            return "cpu" if on_cpu else "accelerator"
    # Within a graph tensors have no device: it runs on an accelerator if
    # there is one.
    kinds = {device.device_type for device in tf.config.list_logical_devices()}
    return "cpu" if kinds <= {"CPU"} else "accelerator"


def _device_torch(tensors: tuple[Any, ...]) -> str:
    """Where the first tensor lies; the others lie there, too."""
    for x in tensors:
        device = getattr(x, "device", None)
        # The device of NumPy's arrays is a string.
        if device is not None and not isinstance(device, str):
            return "cpu" if device.type in ("cpu", "meta") else "accelerator"
    return "cpu"
