"""Where a computation runs: on which device, through which compiler."""

import contextvars

import keras
from keras import ops

# Whether TensorFlow is tracing a function that it will compile with XLA.
_in_xla = contextvars.ContextVar("in_xla", default=False)


def in_xla() -> bool:
    """Whether what runs now is compiled by XLA."""
    return keras.backend.backend() == "jax" or _in_xla.get()


def will_compile() -> bool:
    """Whether XLA compiles `recomputed` functions that are called now."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return bool(tf.inside_function())
    return keras.backend.backend() == "jax"


def compiles() -> bool:
    """Whether loops are compiled, so that short steps cost nothing extra."""
    return keras.backend.backend() != "torch"


def on_cpu() -> bool:
    """Whether the backend takes a CPU, without an accelerator or told to."""
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        return jax.default_backend() == "cpu"
    if backend == "tensorflow":
        import tensorflow as tf

        return not tf.config.list_physical_devices("GPU")
    # What Keras takes. While shapes are found it is "meta", where only they
    # count.
    device: str = ops.convert_to_tensor(0.0).device.type
    return device in ("cpu", "meta")


def step_by_step_on_cpu() -> bool:
    """Whether a CPU runs one operator after the other, without a compiler."""
    return on_cpu() and not compiles()


def xla_on_cpu() -> bool:
    """Whether what runs now is compiled by XLA for a CPU.

    It turns a long sum of products into one loop.
    """
    return in_xla() and on_cpu()
