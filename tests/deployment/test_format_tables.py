"""The tables of docs/guide/formats.md: what can be written, and what runs.

`pytest --update-golden` rewrites the tables of the current backend, and
`make formats` those of all backends, with the packages that only they need.
"""

import importlib.metadata
import importlib.util
import re
import warnings
from pathlib import Path

import jaxtyping
import keras
import numpy as np
import pytest
from layer_contract import as_array
from test_formats import build
from test_formats import images
from test_formats import largest_difference
from test_formats import NETWORKS

from keras_equiattn import export
from keras_equiattn import load_exported
from keras_equiattn.deployment.formats import FORMATS
from keras_equiattn.testing import relative_difference

BACKEND = keras.backend.backend()
PAGE = Path(__file__).parents[2] / "docs" / "guide" / "formats.md"
TITLES = {
    "onnx": "ONNX",
    "openvino": "OpenVINO",
    "torch": "`.pt2`",
    "tf_saved_model": "SavedModel",
    "litert": "LiteRT",
}
ROWS = {
    "plain": "plain `Conv2D` network",
    "convolutions": "group convolution, pooling",
    "pixels": "depthwise, transposed, upsampling",
    "any angle": "group convolution on p8",
    "sasa": "`StandAloneSelfAttention2D`",
    "asc": "`AffineSelfConv2D`",
    "squeeze": "`SqueezeExcite`",
    "full": "`AttentiveGroupConv2D`",
    "input": "`InputAttention`",
    "lifting": "`LiftingSelfAttention2D`",
    "gsa": "`GroupSelfAttention2D`",
    "gsa_global": "`GroupSelfAttention2D` on whole images",
    "dense": "`GroupDense`",
    "multi_head": "`GroupMultiHeadAttention2D`",
    "acmix": "`ACmix2D`",
    "acmix_window": "`WindowACmix2D`",
    "acmix_patchwise": "`PatchwiseACmix2D`",
    "acmix_reduction": "`SpatialReductionACmix2D`",
}
# What `keras.Model.export` writes from each backend, and the package that it
# needs beside those of the tests.
BY_KERAS = {
    "tensorflow": {
        "tf_saved_model": None,
        "litert": None,
        "onnx": "tf2onnx",
        "openvino": None,
    },
    "jax": {"tf_saved_model": None, "onnx": "jax2onnx", "openvino": None},
    "torch": {
        "torch": None,
        "onnx": None,
        "openvino": None,
        "tf_saved_model": None,
    },
}
NOT_TRIED = "not tried"
# The packages whose versions the page states.
VERSIONS = {
    "Keras": "keras",
    "TensorFlow": "tensorflow-cpu",
    "JAX": "jax",
    "PyTorch": "torch",
    "onnx": "onnx",
    "onnxscript": "onnxscript",
    "onnxruntime": "onnxruntime",
    "OpenVINO": "openvino",
    "ai-edge-litert": "ai-edge-litert",
    "tf2onnx": "tf2onnx",
    "jax2onnx": "jax2onnx",
}


@pytest.fixture(autouse=True)
def as_for_users(monkeypatch):
    """Switches off the checks of annotations, which only tests run."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def network(name):
    if name != "plain":
        return build(name)
    inputs = keras.Input((9, 9, 2))
    x = keras.layers.Conv2D(4, 3, activation="relu")(inputs)
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(3)(x))


def table(head, columns, cells):
    lines = [
        [head, *(TITLES[name] for name in columns)],
        ["---"] * (len(columns) + 1),
        *([ROWS[name], *cells[name]] for name in ROWS),
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


# What `test_export` allows: below 1e-4.
ROUNDING = re.compile(r"\b(0|\de-\d\d)\b")


def compare(found, head, update):
    """Compares a table with that of the page, or puts it there.

    Rounding errors differ from machine to machine, and may be zero: here they
    compare as equal.
    """
    text = PAGE.read_text(encoding="utf-8")
    start = text.index(f"| {head} |")
    end = text.index("\n\n", start) + 1
    pairs = [
        list(zip(new.split("|"), before.split("|"), strict=True))
        for new, before in zip(
            found.splitlines(), text[start:end].splitlines(), strict=True
        )
    ]
    if update:
        # What needs a package that is missing stays as it was.
        rows = [
            "|".join(old if NOT_TRIED in new else new for new, old in row)
            for row in pairs
        ]
        text = text[:start] + "\n".join(rows) + "\n" + text[end:]
        PAGE.write_text(with_versions(text), encoding="utf-8")
        return
    for row in pairs:
        for cell, before in row:
            if NOT_TRIED not in cell:
                assert ROUNDING.sub("rounding", cell) == ROUNDING.sub(
                    "rounding", before
                )


def with_versions(text):
    """The page with the versions of the packages that are installed."""
    for title, package in VERSIONS.items():
        try:
            version = importlib.metadata.version(package).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
        text, found = re.subn(
            rf"\b{re.escape(title)}(\s+)\d[\w.]*\d",
            rf"{title}\g<1>{version}",
            text,
        )
        assert found, title
    return text


@pytest.mark.slow
@pytest.mark.every_backend
@pytest.mark.timeout(2400)
@pytest.mark.skipif(BACKEND != "torch", reason="PyTorch's run covers them all")
def test_export(tmp_path, request):
    """Every format, with batches of 1, 3 and 5, in its own runtime."""
    update = request.config.getoption("--update-golden")
    cells = {}
    # test_formats.py has the others, each format under the backend that writes
    # it.
    for name in ROWS if update else ["plain"]:
        cells[name] = []
        for format in TITLES:
            model = network(name)
            path = tmp_path / f"{name}-{format}{FORMATS[format].suffix}"
            export(model, path, format)
            difference = largest_difference(model, path)
            assert difference < 1e-4, (name, format)
            cells[name].append("0" if not difference else f"{difference:.0e}")
    if update:
        found = table("`keras_equiattn.export`", TITLES, cells)
        compare(found, "`keras_equiattn.export`", update)


def works(model, path, format):
    """Whether a file that Keras writes gives what the network gives."""
    options = {}
    if format == "torch":
        import torch

        batch = torch.export.Dim("batch", min=1)
        options["dynamic_shapes"] = {0: batch}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.export(path, format=format, verbose=False, **options)
        run = load_exported(path)
        for batch in (1, 3, 5):
            x = images(model.input_shape[1:], batch)
            y = np.asarray(run(x)[0])
            expected = as_array(model(x))
            if y.shape != expected.shape:
                return False
            if not relative_difference(y, expected) < 1e-4:
                return False
    except Exception:
        # Whatever a converter or a runtime raises: it does not work.
        return False
    return True


@pytest.mark.slow
@pytest.mark.every_backend
@pytest.mark.timeout(1800)
def test_export_of_keras(tmp_path, request):
    """What `keras.Model.export` writes, from the backend that runs."""
    formats = BY_KERAS[BACKEND]
    cells = {}
    for name in ROWS:
        cells[name] = []
        for format, package in formats.items():
            if package and importlib.util.find_spec(package) is None:
                cells[name].append(NOT_TRIED)
                continue
            model = network(name)
            # Keras exports to ONNX what was called.
            model(images(model.input_shape[1:], 2))
            path = str(tmp_path / f"{name}{FORMATS[format].suffix}")
            cells[name].append("yes" if works(model, path, format) else "no")
    head = f"`keras.Model.export`, {BACKEND}"
    compare(
        table(head, formats, cells),
        head,
        request.config.getoption("--update-golden"),
    )


@pytest.mark.once
def test_every_network_has_a_row():
    assert set(ROWS) == {"plain", *NETWORKS}
