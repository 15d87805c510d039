"""Networks as files for other programs.

Each format is written by the one backend that does it best. If Keras runs
another backend, a separate process loads the network there.
"""

import contextlib
import importlib
import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from typing import NamedTuple

import keras

from keras_equiattn import _checks
from keras_equiattn.deployment.integer_onnx import with_integers
from keras_equiattn.graphs import layers_within
from keras_equiattn.graphs import require_float32
from keras_equiattn.graphs import require_graph
from keras_equiattn.ops import backend


class Format(NamedTuple):
    """How a format is written.

    Attributes:
        suffix: the suffix of its files; none for a folder.
        backend: the backend of Keras that writes it.
        packages: the packages that must be installed beside Keras.
    """

    suffix: str
    backend: str
    packages: tuple[str, ...]


# The names are those of `keras.Model.export`.
FORMATS = {
    "litert": Format(".tflite", "tensorflow", ("tensorflow",)),
    "onnx": Format(".onnx", "torch", ("torch", "onnx", "onnxscript")),
    "openvino": Format(
        ".xml", "torch", ("torch", "onnx", "onnxscript", "openvino")
    ),
    "tf_saved_model": Format("", "tensorflow", ("tensorflow",)),
    "torch": Format(".pt2", "torch", ("torch",)),
}
# Runs in the process that writes the file.
PROGRAM = "from keras_equiattn.deployment import formats; formats.main()"


def export(
    model: keras.Model,
    path: str | os.PathLike[str],
    format: str | None = None,
) -> None:
    """Writes a network to a file that programs without this library run.

    Unlike `keras.Model.export`, it writes every layer of this library in every
    format, from every backend and for batches of any size: the traced programs
    hold common operators alone. ONNX, OpenVINO and `.pt2` are traced by
    PyTorch, SavedModel and LiteRT by TensorFlow, which has to be installed; if
    Keras runs another backend, a new process does it, and imports the modules
    that define the layers.

    A network of `keras_equiattn.plain` makes a smaller graph, and a faster one
    where the runtime does not fold constants.

    Args:
        model: a functional or Sequential model that is built, and computes in
            float32.
        path: where to write; a file that is there is replaced. OpenVINO keeps
            the weights beside it, in a file with the suffix ".bin". LiteRT
            files do not keep an order: if there are several inputs or outputs,
            they are called "input_0", "input_1", "output_0" and so on.
        format: "onnx", "openvino", "litert", "torch" or "tf_saved_model"; None
            takes it from the suffix of the path, which is ".onnx", ".xml",
            ".tflite", ".pt2" or none.

    Symmetry:
        The symmetry of the model.

    Raises:
        TypeError: if `path` is not a path.
        ValueError: for a model without a graph or with another dtype, an
            unknown format, a suffix that is not that of the format, an image
            whose size is not known, unless TensorFlow traces it, and layers
            that are defined in `__main__` if another process has to import
            them.
        ImportError: if a package is missing.
        RuntimeError: if the process that writes the file fails.

    Example:
        >>> inputs = keras.Input((28, 28, 1))
        >>> x = LiftingConv2D(8, 3, group="p4", activation="relu")(inputs)
        >>> outputs = keras.layers.GlobalAveragePooling3D()(x)
        >>> export(keras.Model(inputs, outputs), "network.onnx")
    """
    require_graph(model)
    path = _checks.path(path, "path")
    format = format_of(path, format)
    _check_place(path, format)
    require_float32(model)
    _check_packages(format)
    writer = FORMATS[format].backend
    if writer == "torch":
        _check_sizes(model, format)
    Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
    if keras.backend.backend() == writer:
        _write(model, path, format)
    else:
        _write_elsewhere(model, path, format)


def main() -> None:
    """Writes a file in a process of its own; its arguments are in JSON."""
    task = json.loads(sys.argv[1])
    for module in task["modules"]:
        # If one is needed that cannot be imported, Keras says what is missing.
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    model = keras.saving.load_model(task["model"], compile=False)
    _write(model, task["path"], task["format"])


def format_of(path: str, format: str | None = None) -> str:
    """The format, which has to fit the suffix of the path."""
    suffix = Path(path).suffix
    if format is None:
        for name, found in FORMATS.items():
            if found.suffix == suffix:
                return name
        known = ", ".join(f"'{f.suffix}'" for f in FORMATS.values() if f.suffix)
        raise ValueError(
            f"The suffix of `path` must be one of {known}, or none for a "
            f"SavedModel, unless `format` is given. Received: path={path!r}"
        )
    if not isinstance(format, str) or format not in FORMATS:
        raise ValueError(
            f"`format` must be one of {', '.join(map(repr, FORMATS))}, or "
            f"None. Received: format={format!r}"
        )
    wanted = FORMATS[format].suffix
    others = {f.suffix for f in FORMATS.values()} - {wanted}
    # The name of a folder may have a dot in it.
    if suffix in others or (wanted and suffix != wanted):
        raise ValueError(
            f"A path in the format '{format}' must have "
            f"{f'the suffix {wanted!r}' if wanted else 'no suffix'}. "
            f"Received: path={path!r}"
        )
    return format


def _check_place(path: str, format: str) -> None:
    """Raises if something else is where the file or folder shall be."""
    place, is_folder = Path(path), not FORMATS[format].suffix
    if place.exists() and place.is_dir() != is_folder:
        raise ValueError(
            f"The format '{format}' is a {'folder' if is_folder else 'file'}, "
            f"and there is a {'file' if is_folder else 'folder'} at "
            f"path={path!r}"
        )
    if is_folder and place.is_dir():
        found = sorted(p.name for p in place.iterdir())
        if found and "saved_model.pb" not in found:
            raise ValueError(
                f"The format '{format}' takes a new folder, an empty one or "
                "one with another SavedModel. Received: "
                f"path={path!r}, which has {found}"
            )


def _check_packages(format: str) -> None:
    """Raises if a package that writes the format is not installed."""
    packages = FORMATS[format].packages
    missing = [p for p in packages if importlib.util.find_spec(p) is None]
    if missing:
        raise ImportError(
            f"The format '{format}' is written with {', '.join(packages)}. "
            f"Not installed: {', '.join(missing)}"
        )


def _check_sizes(model: keras.Model, format: str) -> None:
    """Raises for inputs of which more than the batch is not known."""
    for x in model.inputs:
        if None in x.shape[1:]:
            raise ValueError(
                f"The format '{format}' needs inputs of a known size, except "
                "for that of the batch. Build the model with a known size, and "
                f"load its weights. Received: '{x.name}' of shape {x.shape}"
            )


def _write(model: keras.Model, path: str, format: str) -> None:
    """Writes a file with the backend that runs."""
    with _quiet():
        several = len(model.inputs) > 1 or len(model.outputs) > 1
        if format == "litert" and several:
            model = _numbered(model)
        if FORMATS[format].backend == "tensorflow":
            with backend.portable():
                model.export(path, format=format, verbose=False)
        else:
            _write_torch(model, path, format)


def _numbered(model: keras.Model) -> keras.Model:
    """The network with inputs "input_0", "input_1" and so on, and a list of
    outputs, which TensorFlow then calls "output_0" and so on.

    A LiteRT file keeps the names, but not the order.
    """
    inputs = [
        keras.Input(batch_shape=x.shape, dtype=x.dtype, name=f"input_{n}")
        for n, x in enumerate(model.inputs)
    ]
    outputs = model(keras.tree.pack_sequence_as(model.input, inputs))
    return keras.Model(inputs, keras.tree.flatten(outputs))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Within it, Keras and the converters do not warn about their own code."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _write_elsewhere(model: keras.Model, path: str, format: str) -> None:
    """Writes a file in a new process, which runs the backend of the format."""
    modules = {type(layer).__module__ for layer in layers_within(model)}
    if "__main__" in modules:
        raise ValueError(
            f"The format '{format}' is written by a process that runs Keras on "
            f"{FORMATS[format].backend}, and cannot import what is defined in "
            "`__main__`. Define the layers in a module, or run Keras on that "
            "backend."
        )
    with tempfile.TemporaryDirectory() as folder:
        saved = str(Path(folder) / "model.keras")
        model.save(saved)
        task = {
            "model": saved,
            "path": str(Path(path).absolute()),
            "format": format,
            "modules": sorted(modules | _modules_of_registered()),
        }
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, json.dumps(task)],
            env={
                **os.environ,
                "KERAS_BACKEND": FORMATS[format].backend,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        error = RuntimeError(
            f"The process that runs Keras on {FORMATS[format].backend} could "
            f"not write '{path}': {_last_error(done.stderr)}"
        )
        error.add_note(done.stderr)
        raise error


def _modules_of_registered() -> set[str]:
    """The modules of all classes and functions that Keras can load by name."""
    found = keras.saving.get_custom_objects().values()
    return {module for x in found if (module := getattr(x, "__module__", None))}


def _last_error(text: str) -> str:
    """The message of the last error that a process has printed."""
    starts = [m.start() for m in re.finditer(r"(?m)^[\w.]+: ", text)]
    return text[starts[-1] if starts else 0 :].strip()[:500]


def _write_torch(model: keras.Model, path: str, format: str) -> None:
    """Writes a file from a graph that PyTorch traces once."""
    import torch

    program = _traced(model)
    if format == "torch":
        torch.export.save(program, path)
        return
    names = [x.name for x in model.inputs]
    exported = torch.onnx.export(
        program, input_names=names, dynamo=True, verbose=False
    )
    if format == "onnx":
        import onnx

        onnx.save(with_integers(_without_notes(exported.model_proto)), path)
        return
    import openvino

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        exported.save(file)
        converted = openvino.convert_model(file)
        # Weights in half precision would change the results.
        openvino.save_model(converted, path, compress_to_fp16=False)


def _without_notes(model: Any) -> Any:
    """A model of ONNX without the lines of code that each node comes from.

    They are larger than a small network, and name folders of this machine.
    """
    for node in model.graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    del model.graph.value_info[:]
    return model


def _traced(model: keras.Model) -> Any:
    """The program of a network, for batches of any size unless it has one."""
    import torch

    class Flat(torch.nn.Module):
        """The network as a function of tensors in the order of its inputs."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *inputs: Any) -> Any:
            packed = keras.tree.pack_sequence_as(model.input, list(inputs))
            return tuple(keras.tree.flatten(model(packed, training=False)))

    # PyTorch takes a size of 1 for a constant, but no other size.
    samples = tuple(
        keras.ops.zeros((x.shape[0] or 2, *x.shape[1:]), x.dtype)
        for x in model.inputs
    )
    batch = torch.export.Dim("batch", min=1)
    dynamic = tuple(
        {0: batch} if x.shape[0] is None else {} for x in model.inputs
    )
    with backend.portable(), torch.no_grad():
        program = torch.export.export(
            Flat().eval(), samples, dynamic_shapes=(dynamic,), strict=False
        )
    _without_idle_squeezes(program)
    return program


def _without_idle_squeezes(program: Any) -> None:
    """Removes squeezes of an axis with several entries, which do nothing.

    Keras' `take` makes such squeezes, and ONNX refuses them.
    """
    import torch

    for node in list(program.graph.nodes):
        if node.target is torch.ops.aten.squeeze.dim:
            x, axis = node.args
            size = x.meta["val"].shape[axis]
            if isinstance(size, int) and size != 1:
                node.replace_all_uses_with(x)
                program.graph.erase_node(node)
    program.graph_module.recompile()
