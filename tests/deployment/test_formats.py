"""Networks as files of other programs, run by those programs."""

import importlib
import os
import subprocess
import sys
import types

import keras
import numpy as np
import pytest
from families import FAMILIES
from layer_contract import as_array
from sweeps import swept

from keras_equiattn import export
from keras_equiattn import layers
from keras_equiattn import load_exported
from keras_equiattn import plain
from keras_equiattn import quantize
from keras_equiattn.deployment.formats import FORMATS
from keras_equiattn.testing import relative_difference

BACKEND = keras.backend.backend()
# What the backend that runs writes by itself.
OWN = [name for name, f in FORMATS.items() if f.backend == BACKEND]
OTHERS = [name for name in FORMATS if name not in OWN]
BATCHES = (1, 3, 5)


def convolutions():
    """Lifting, group convolution, pooling and a classifier."""
    inputs = keras.Input((9, 9, 2))
    x = layers.LiftingConv2D(3, 3, group="p4", activation="relu")(inputs)
    x = keras.layers.BatchNormalization()(x)
    x = layers.GroupConv2D(4, 3, group="p4")(x)
    x = layers.SpatialPooling2D(3, 2, group="p4")(x)
    x = keras.layers.GlobalAveragePooling2D()(layers.GroupPooling()(x))
    return keras.Model(inputs, keras.layers.Dense(3)(x))


def pixels():
    """A direction for each pixel, from depthwise and transposed kernels."""
    inputs = keras.Input((9, 9, 2))
    x = layers.LiftingConv2D(3, 3, group="p4")(inputs)
    x = layers.GroupDepthwiseConv2D(3, group="p4")(x)
    x = layers.GroupConv2DTranspose(2, 3, strides=2, group="p4")(x)
    x = layers.SpatialUpSampling2D(2, "bilinear", group="p4")(x)
    return keras.Model(inputs, layers.GroupToVector2D(group="p4")(x))


def any_angle():
    """A group that does not act on the grid."""
    inputs = keras.Input((9, 9, 2))
    x = layers.LiftingConv2D(3, 3, group="p8")(inputs)
    return keras.Model(inputs, layers.GroupConv2D(2, 3, group="p8")(x))


def turning_windows():
    """Steerable weights of windows, and discs."""
    inputs = keras.Input((5, 5, 2))
    x = layers.LiftingSelfAttention2D(2, 2, 1, 3, group="p8")(inputs)
    x = layers.AffineSelfConv2D(2, 3, num_heads=1, group="p8")(x)
    x = layers.GroupSelfAttention2D(2, 3, 1, 3, group="p8")(x)
    return keras.Model(inputs, x)


def of_family(name):
    make, shape = FAMILIES[name]
    inputs = keras.Input(shape)
    return keras.Model(inputs, make()(inputs))


NETWORKS = {
    "convolutions": convolutions,
    "pixels": pixels,
    "any angle": any_angle,
    **{name: lambda name=name: of_family(name) for name in FAMILIES},
}
# Not in the tables, where every family has a row already.
MORE = {"turning windows": turning_windows}
SOME = "convolutions"


def build(name):
    """The network, with weights that differ from their first values."""
    model = (NETWORKS | MORE)[name]()
    rng = np.random.default_rng(0)
    for variable in model.weights:
        if keras.backend.is_float_dtype(variable.dtype):
            value = rng.normal(scale=0.5, size=variable.shape)
            if "variance" in variable.name:
                value = abs(value) + 0.5
            variable.assign(value)
    return model


def images(shape, batch):
    rng = np.random.default_rng(batch)
    return rng.normal(size=(batch, *shape)).astype("float32")


def largest_difference(model, path):
    """Between the network and the file, over batches of several sizes."""
    run = load_exported(path)
    differences = []
    for batch in BATCHES:
        x = images(model.input_shape[1:], batch)
        (y,) = run(x)
        expected = as_array(model(x))
        assert y.shape == expected.shape
        differences.append(relative_difference(y, expected))
    return max(differences)


@pytest.mark.parametrize("name", swept(NETWORKS | MORE, SOME))
@pytest.mark.parametrize("format", swept(OWN, *OWN[:1]))
def test_file_computes_the_same(format, name, tmp_path):
    model = build(name)
    path = tmp_path / f"network{FORMATS[format].suffix}"
    export(model, path)
    assert largest_difference(model, path) < 1e-5


@pytest.mark.slow
@pytest.mark.every_backend
@pytest.mark.parametrize("format", OTHERS)
@pytest.mark.parametrize("name", [SOME, "gsa"])
def test_file_of_another_backend(name, format, tmp_path):
    model = build(name)
    path = tmp_path / f"network{FORMATS[format].suffix}"
    export(model, path, format)
    assert largest_difference(model, path) < 1e-5


@pytest.mark.slow
@pytest.mark.every_backend
@pytest.mark.parametrize("format", OWN)
@pytest.mark.parametrize("name", ["convolutions", "pixels"])
def test_plain_network(name, format, tmp_path):
    model = plain(build(name), fold_batch_normalization=True)
    path = tmp_path / f"network{FORMATS[format].suffix}"
    export(model, path)
    assert largest_difference(model, path) < 1e-5


@pytest.mark.sweep
@pytest.mark.parametrize("format", OWN)
def test_network_of_whole_numbers(format, tmp_path):
    """With tables, and two inputs for levels that one tensor gives."""
    inputs = keras.Input((9, 9, 2))
    x = layers.LiftingConv2D(3, 3, group="p4", activation="silu")(inputs)
    x = layers.InputAttention("p4", attention_kernel_size=3)(x)
    x = layers.SqueezeExcite(1, group="p4")(x)
    model = keras.Model(inputs, layers.GroupPooling("mean")(x))
    small = quantize(model, images((9, 9, 2), 16))
    path = tmp_path / f"network{FORMATS[format].suffix}"
    export(small, path)
    # Another runtime may round to the next level.
    assert largest_difference(small, path) < 0.02


@pytest.mark.sweep
@pytest.mark.parametrize("format", OWN)
def test_several_inputs_and_outputs(format, tmp_path):
    """In the order of the model, not of names."""
    second, first = (
        keras.Input((5, 5, 1), name="b"),
        keras.Input((2,), name="a"),
    )
    x = layers.LiftingConv2D(2, 3, group="p4")(second)
    x = keras.layers.GlobalAveragePooling3D(name="zeta")(x)
    model = keras.Model(
        [second, first], [x, keras.layers.Dense(3, name="alpha")(first)]
    )
    path = tmp_path / f"network{FORMATS[format].suffix}"
    export(model, path)
    run = load_exported(path)
    for batch in BATCHES:
        given = images((5, 5, 1), batch), images((2,), batch)
        for y, expected in zip(run(*given), model(list(given)), strict=True):
            assert relative_difference(y, as_array(expected)) < 1e-5


@pytest.mark.sweep
@pytest.mark.parametrize("format", OWN)
def test_dictionaries(format, tmp_path):
    """In the order of `model.inputs` and `model.outputs`."""
    x, y = keras.Input((5, 5, 1), name="x"), keras.Input((2,), name="y")
    first = layers.LiftingConv2D(2, 3, group="p4")(x)
    second = keras.layers.Dense(3)(y)
    model = keras.Model({"y": y, "x": x}, {"b": first, "a": second})
    path = tmp_path / f"network{FORMATS[format].suffix}"
    export(model, path)
    shapes = {"x": (5, 5, 1), "y": (2,)}
    given = {n: images(shape, 3) for n, shape in shapes.items()}
    expected = keras.tree.flatten(model(given))
    found = load_exported(path)(*[given[t.name] for t in model.inputs])
    for y, z in zip(found, expected, strict=True):
        assert relative_difference(y, as_array(z)) < 1e-5


@pytest.mark.sweep
@pytest.mark.parametrize("format", OWN)
def test_dictionary_of_outputs(format, tmp_path):
    """The numbers in their names do not follow the order of outputs."""
    x = keras.Input((5, 5, 1))
    heads = {
        name: keras.layers.Conv2D(2, 3)(x)
        for name in ("head_2", "head_10", "b_1")
    }
    model = keras.Model(x, heads)
    path = tmp_path / f"network{FORMATS[format].suffix}"
    export(model, path)
    given = images((5, 5, 1), 3)
    expected = keras.tree.flatten(model(given))
    for y, z in zip(load_exported(path)(given), expected, strict=True):
        assert relative_difference(y, as_array(z)) < 1e-5


@pytest.mark.sweep
@pytest.mark.parametrize("format", OWN)
def test_arrays_that_a_file_cannot_take(format, tmp_path):
    path = tmp_path / f"network{FORMATS[format].suffix}"
    export(small(), path)
    run = load_exported(path)
    with pytest.raises(ValueError, match=r"cannot take.*float32\[2, 5, 5\]"):
        run(images((5, 5), 2))


@pytest.mark.sweep
@pytest.mark.parametrize("format", OWN)
def test_damaged_file(format, tmp_path):
    path = tmp_path / f"network{FORMATS[format].suffix}"
    export(small(), path)
    if path.is_dir():
        (path / "saved_model.pb").write_bytes(b"no such thing")
    else:
        path.write_bytes(b"no such thing")
    with pytest.raises(ValueError, match=f"format '{format}', or is damaged"):
        load_exported(path)


@pytest.mark.slow
@pytest.mark.every_backend
def test_registered_function_of_a_module(tmp_path, monkeypatch):
    """The process that writes the file imports the function's module."""
    if not OTHERS:
        pytest.skip("This backend writes every format by itself.")
    (tmp_path / "my_activations.py").write_text(
        "import keras\n"
        "@keras.saving.register_keras_serializable('mine')\n"
        "def twice(x):\n    return 2 * x\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    twice = importlib.import_module("my_activations").twice
    inputs = keras.Input((5, 5, 1))
    y = layers.LiftingConv2D(2, 3, group="p4", activation=twice)(inputs)
    model = keras.Model(inputs, y)
    path = tmp_path / f"network{FORMATS[OTHERS[0]].suffix}"
    export(model, path)
    assert largest_difference(model, path) < 1e-5


@pytest.mark.parametrize("format", OWN[-1:])
def test_batch_of_known_size(format, tmp_path):
    inputs = keras.Input(batch_shape=(3, 5, 5, 1))
    model = keras.Model(inputs, layers.LiftingConv2D(2, 3, group="p4")(inputs))
    path = tmp_path / f"network{FORMATS[format].suffix}"
    export(model, path)
    x = images((5, 5, 1), 3)
    (y,) = load_exported(path)(x)
    assert relative_difference(y, as_array(model(x))) < 1e-5


@pytest.mark.sweep
@pytest.mark.skipif(BACKEND != "torch", reason="It uses torch.export.Dim.")
def test_keras_exports_batches_of_any_size(tmp_path):
    """Narrow images lie side by side only where their number is known."""
    import torch

    model = build("sasa")
    path = str(tmp_path / "network.pt2")
    batch = torch.export.Dim("batch", min=1)
    model(images(model.input_shape[1:], 2))
    model.export(path, "torch", verbose=False, dynamic_shapes={0: batch})
    assert largest_difference(model, path) < 1e-5


def small():
    inputs = keras.Input((5, 5, 1))
    return keras.Model(inputs, layers.LiftingConv2D(2, 3, group="p4")(inputs))


@pytest.mark.sweep
def test_network_trains_as_before(tmp_path):
    """Training does not reuse what was cached to write a file."""
    if not OWN:
        pytest.skip("No format is written by this backend.")
    model = build("sasa")
    x, y = (
        images(model.input_shape[1:], 2),
        np.zeros((2, 4, 4, 2, 4), "float32"),
    )
    model.compile("sgd", "mse")
    export(model, tmp_path / f"network{FORMATS[OWN[0]].suffix}")
    before = [as_array(v).copy() for v in model.trainable_variables]
    model.train_on_batch(x, y)
    for variable, start in zip(model.trainable_variables, before, strict=True):
        assert not np.array_equal(as_array(variable), start), variable.path


class TestErrors:
    def test_suffix(self):
        with pytest.raises(ValueError, match=r"'\.onnx'.*path='a\.h5'"):
            export(small(), "a.h5")

    def test_format(self):
        with pytest.raises(ValueError, match=r"'onnx'.*format='caffe'"):
            export(small(), "a.onnx", "caffe")
        with pytest.raises(ValueError, match=r"'onnx'.*format=\[\]"):
            export(small(), "a.onnx", [])

    def test_suffix_of_another_format(self):
        with pytest.raises(
            ValueError, match=r"'onnx'.*'\.onnx'.*path='a\.xml'"
        ):
            export(small(), "a.xml", "onnx")

    def test_suffix_of_a_file_for_a_folder(self):
        with pytest.raises(ValueError, match=r"no suffix.*path='a\.onnx'"):
            export(small(), "a.onnx", "tf_saved_model")

    @pytest.mark.parametrize("path", [None, 3, ""])
    def test_no_path(self, path):
        with pytest.raises(TypeError, match=f"path={path!r}"):
            export(small(), path)
        with pytest.raises(TypeError, match=f"path={path!r}"):
            load_exported(path)

    def test_folder_where_a_file_shall_be(self, tmp_path):
        (tmp_path / "a.onnx").mkdir()
        with pytest.raises(ValueError, match=r"is a file.*a folder"):
            export(small(), tmp_path / "a.onnx")
        (tmp_path / "a").write_text("")
        with pytest.raises(ValueError, match=r"is a folder.*a file"):
            export(small(), tmp_path / "a")
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "thesis.txt").write_text("")
        with pytest.raises(ValueError, match=r"new folder.*\['thesis.txt'\]"):
            export(small(), tmp_path / "mine")

    def test_no_graph(self):
        with pytest.raises(ValueError, match="functional or Sequential"):
            export(layers.GroupPooling(), "a.onnx")

    def test_half_precision(self):
        inputs = keras.Input((5, 5, 1))
        layer = layers.LiftingConv2D(2, 3, group="p4", dtype="mixed_bfloat16")
        with pytest.raises(ValueError, match=f"{layer.name}.*bfloat16"):
            export(keras.Model(inputs, layer(inputs)), "a.onnx")

    def test_unknown_size(self):
        inputs = keras.Input((None, None, 1))
        model = keras.Model(inputs, keras.layers.Conv2D(2, 3)(inputs))
        with pytest.raises(ValueError, match=r"known size.*None, None, 1"):
            export(model, "a.onnx")

    def test_package_is_missing(self, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ImportError, match="Not installed: torch, onnx"):
            export(small(), "a.onnx")

    @pytest.mark.skipif(not OTHERS, reason="writes every format by itself")
    def test_layer_of_main(self, monkeypatch):
        model = small()
        monkeypatch.setattr(layers.LiftingConv2D, "__module__", "__main__")
        path = f"a{FORMATS[OTHERS[0]].suffix}"
        with pytest.raises(ValueError, match="cannot import"):
            export(model, path, OTHERS[0])

    def test_process_fails(self, monkeypatch):
        def failed(*_, **__):
            said = f"{1000 * 'Warning: '}\nValueError: no\nsuch thing"
            return types.SimpleNamespace(returncode=1, stderr=said)

        monkeypatch.setattr(subprocess, "run", failed)
        path = f"a{FORMATS[OTHERS[0]].suffix}"
        with pytest.raises(RuntimeError, match="could not") as told:
            export(small(), path, OTHERS[0])
        assert str(told.value).endswith(": ValueError: no\nsuch thing")
        assert "Warning: " in told.value.__notes__[0]

    def test_nothing_there(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"nothing\.onnx"):
            load_exported(tmp_path / "nothing.onnx")


ALONE = """
import numpy as np, onnxruntime, sys
session = onnxruntime.InferenceSession(sys.argv[1])
x = np.load(sys.argv[2])
(y,) = session.run(None, {session.get_inputs()[0].name: x})
np.save(sys.argv[3], y)
assert not {"keras", "torch", "keras_equiattn"} & set(sys.modules)
"""


@pytest.mark.once
@pytest.mark.slow
@pytest.mark.every_backend
def test_demo_network_where_onnxruntime_and_numpy_are_alone(tmp_path):
    """Two lines write the file; an environment without Keras runs it."""
    from keras_equiattn import applications

    model = applications.RotMNISTCNN("p4", "input", weights="rot_mnist")
    export(model, tmp_path / "digits.onnx")

    x = np.random.default_rng(0).uniform(size=(5, 28, 28, 1)).astype("float32")
    np.save(tmp_path / "x.npy", x)
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = environment / "bin" / "python"
    packages = ["numpy", "onnxruntime"]
    subprocess.run(
        [python, "-m", "pip", "install", "-q", *packages], check=True
    )
    files = [tmp_path / n for n in ("digits.onnx", "x.npy", "y.npy")]
    subprocess.run(
        [python, "-c", ALONE, *files],
        check=True,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )
    y = np.load(tmp_path / "y.npy")
    assert relative_difference(y, as_array(model(x))) < 1e-5
