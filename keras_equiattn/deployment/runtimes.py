"""Runs exported networks in the programs that they are written for."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from keras_equiattn.deployment.formats import format_of

# From arrays, in the order of the inputs, to those of the outputs.
Network = Callable[..., list[np.ndarray]]


def load_exported(path: str | os.PathLike[str]) -> Network:
    """Opens an exported network in its own runtime: no layer of Keras runs.

    ONNX files run in onnxruntime, SavedModels in TensorFlow, LiteRT files in
    LiteRT, OpenVINO files in OpenVINO on the CPU and in single precision, and
    `.pt2` files in PyTorch; the package has to be installed.

    Args:
        path: a file or folder that `keras_equiattn.export` has written.

    Returns:
        A function from NumPy arrays, one for each input, to a list of NumPy
        arrays, one for each output.

    Raises:
        FileNotFoundError: if nothing is there.
        ValueError: for a suffix that no format has.
        ImportError: if the runtime is not installed.
    """
    path = os.fspath(path)
    format = format_of(path)
    if not Path(path).exists():
        raise FileNotFoundError(f"No exported network at path={path!r}")
    return RUNTIMES[format](path)


def _onnx(path: str) -> Network:
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    names = [x.name for x in session.get_inputs()]

    def run(*inputs: np.ndarray) -> list[np.ndarray]:
        return session.run(None, dict(zip(names, inputs, strict=True)))

    return run


def _openvino(path: str) -> Network:
    import openvino

    options = {"INFERENCE_PRECISION_HINT": "f32"}
    model = openvino.compile_model(path, "CPU", options)

    def run(*inputs: np.ndarray) -> list[np.ndarray]:
        found = model(list(inputs))
        return [np.array(found[x]) for x in model.outputs]

    return run


def _litert(path: str) -> Network:
    try:
        from ai_edge_litert.interpreter import Interpreter
    except ImportError:
        import tensorflow as tf

        Interpreter = tf.lite.Interpreter
    interpreter = Interpreter(path)
    runner = interpreter.get_signature_runner()
    # The signature has the inputs in the order of their names, which the
    # tensors, in the order of the network, have as a part of theirs.
    names = [
        x["name"].removeprefix("serving_default_").partition(":")[0]
        for x in interpreter.get_input_details()
    ]
    outputs = sorted(
        runner.get_output_details(), key=lambda x: int(x.rpartition("_")[2])
    )

    def run(*inputs: np.ndarray) -> list[np.ndarray]:
        found = runner(**dict(zip(names, inputs, strict=True)))
        return [found[name] for name in outputs]

    return run


def _saved_model(path: str) -> Network:
    import tensorflow as tf

    loaded = tf.saved_model.load(path)

    def run(*inputs: np.ndarray) -> list[np.ndarray]:
        tensors = [tf.constant(x) for x in inputs]
        # It was saved with all its inputs in one list, unless there is one.
        found = loaded.serve(tensors if len(tensors) > 1 else tensors[0])
        return [np.asarray(x) for x in tf.nest.flatten(found)]

    return run


def _torch(path: str) -> Network:
    import torch

    module = torch.export.load(path).module()

    def run(*inputs: np.ndarray) -> list[np.ndarray]:
        with torch.no_grad():
            found = module(*map(torch.as_tensor, inputs))
        # A file of Keras may return a tensor alone.
        several = isinstance(found, (tuple, list))
        return [x.numpy() for x in (found if several else [found])]

    return run


RUNTIMES: dict[str, Callable[[str], Network]] = {
    "litert": _litert,
    "onnx": _onnx,
    "openvino": _openvino,
    "tf_saved_model": _saved_model,
    "torch": _torch,
}
