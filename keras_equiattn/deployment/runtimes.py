"""Runs exported networks in the programs that they are written for."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from keras_equiattn import _checks
from keras_equiattn.deployment.formats import format_of

# It takes arrays in the order of the inputs, and returns those of the outputs.
Network = Callable[..., list[np.ndarray]]


class Opened(NamedTuple):
    """A network in its runtime.

    Attributes:
        inputs: how many it takes.
        run: takes that many arrays, and returns those of the outputs.
    """

    inputs: int
    run: Network


class Runtime(NamedTuple):
    """The program that runs a format.

    Attributes:
        packages: the names that the package may have where it is installed.
        open: opens a file.
    """

    packages: tuple[str, ...]
    open: Callable[[str], Opened]


def load_exported(path: str | os.PathLike[str]) -> Network:
    """Opens an exported network in its own runtime: no layer of Keras runs.

    ONNX files run in onnxruntime, SavedModels in TensorFlow, LiteRT files in
    LiteRT, OpenVINO files in OpenVINO on the CPU and in single precision, and
    `.pt2` files in PyTorch; the package has to be installed.

    Args:
        path: a file or folder that `keras_equiattn.export` has written.

    Returns:
        A function from NumPy arrays, one for each input, to a list of NumPy
        arrays, one for each output, in the order of `model.inputs` and
        `model.outputs`. It converts arrays in float64 to float32.

    Raises:
        FileNotFoundError: if nothing is there.
        ValueError: for a suffix that no format has, and for a file that the
            runtime cannot open. The function raises it for another number of
            arrays, or arrays that the network cannot take.
        ImportError: if the runtime is not installed.
    """
    path = _checks.path(path, "path")
    format = format_at(path)
    if not Path(path).exists():
        raise FileNotFoundError(f"No exported network at path={path!r}")
    try:
        opened = RUNTIMES[format].open(path)
    except ImportError:
        raise
    except Exception as error:
        # Each runtime has errors of its own.
        raise ValueError(
            f"The file at path={path!r} is not a network in the format "
            f"'{format}', or is damaged: {_first_line(error)}"
        ) from error

    def run(*inputs: np.ndarray) -> list[np.ndarray]:
        if len(inputs) != opened.inputs:
            raise ValueError(
                f"The network at path={path!r} takes {opened.inputs} arrays. "
                f"Received: {len(inputs)}"
            )
        arrays = list(map(_prepared, inputs))
        try:
            return opened.run(*arrays)
        except Exception as error:
            kinds = ", ".join(f"{x.dtype}{list(x.shape)}" for x in arrays)
            raise ValueError(
                f"The network at path={path!r} cannot take arrays of these "
                f"types and shapes: {kinds}. Its runtime says: "
                f"{_first_line(error)}"
            ) from error

    return run


def format_at(path: str) -> str:
    """The format of a file, by its suffix; a folder is a SavedModel."""
    return "tf_saved_model" if Path(path).is_dir() else format_of(path)


def _first_line(error: Exception) -> str:
    """The first line of a message, or the kind of error without one."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def _prepared(x: np.ndarray) -> np.ndarray:
    """An array that every runtime takes: not a turned view of another."""
    x = np.ascontiguousarray(x)
    return x.astype("float32") if x.dtype == "float64" else x


def _onnx(path: str) -> Opened:
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    names = [x.name for x in session.get_inputs()]

    def run(*inputs: np.ndarray) -> list[np.ndarray]:
        return session.run(None, dict(zip(names, inputs, strict=True)))

    return Opened(len(names), run)


def _openvino(path: str) -> Opened:
    import openvino

    options = {"INFERENCE_PRECISION_HINT": "f32"}
    model = openvino.compile_model(path, "CPU", options)

    def run(*inputs: np.ndarray) -> list[np.ndarray]:
        found = model(list(inputs))
        return [np.array(found[x]) for x in model.outputs]

    return Opened(len(model.inputs), run)


def _litert(path: str) -> Opened:
    try:
        from ai_edge_litert.interpreter import Interpreter
    except ImportError:
        import tensorflow as tf

        Interpreter = tf.lite.Interpreter
    interpreter = Interpreter(path)
    runner = interpreter.get_signature_runner()
    # The names of several are "input_0", "input_1", ..., and "output_0", ...
    names = sorted(runner.get_input_details(), key=_place)
    outputs = sorted(runner.get_output_details(), key=_place)

    def run(*inputs: np.ndarray) -> list[np.ndarray]:
        found = runner(**dict(zip(names, inputs, strict=True)))
        return [found[name] for name in outputs]

    return Opened(len(names), run)


def _place(name: str) -> int:
    """The number in the name of an input or output of a LiteRT file."""
    number = name.rpartition("_")[2]
    return int(number) if number.isdecimal() else 0


def _saved_model(path: str) -> Opened:
    import tensorflow as tf

    loaded = tf.saved_model.load(path)
    signature = loaded.serve.concrete_functions[0].structured_input_signature

    def run(*inputs: np.ndarray) -> list[np.ndarray]:
        tensors = [tf.constant(x) for x in inputs]
        args, kwargs = tf.nest.pack_sequence_as(signature, tensors)
        found = loaded.serve(*args, **kwargs)
        return [np.asarray(x) for x in tf.nest.flatten(found)]

    return Opened(len(tf.nest.flatten(signature)), run)


def _torch(path: str) -> Opened:
    import torch

    program = torch.export.load(path)
    module = program.module()

    def run(*inputs: np.ndarray) -> list[np.ndarray]:
        with torch.no_grad():
            found = module(*map(torch.as_tensor, inputs))
        # A file of Keras may return a tensor alone.
        several = isinstance(found, (tuple, list))
        return [x.numpy() for x in (found if several else [found])]

    return Opened(len(program.graph_signature.user_inputs), run)


RUNTIMES = {
    "litert": Runtime(
        ("ai-edge-litert", "tensorflow", "tensorflow-cpu"), _litert
    ),
    "onnx": Runtime(("onnxruntime", "onnxruntime-gpu"), _onnx),
    "openvino": Runtime(("openvino",), _openvino),
    "tf_saved_model": Runtime(("tensorflow", "tensorflow-cpu"), _saved_model),
    "torch": Runtime(("torch",), _torch),
}
