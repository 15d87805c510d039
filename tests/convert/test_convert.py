"""Weights of other people's code in our layers and networks."""

import json
import os
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import torch
from layer_contract import as_array
from layer_contract import FLOAT64_BACKENDS
from vectors import load_vectors

from keras_equiattn import applications
from keras_equiattn import convert
from keras_equiattn import groups
from keras_equiattn import layers
from keras_equiattn import ops
from keras_equiattn.convert import from_att_gconvs
from keras_equiattn.testing import relative_difference

HAS_FLOAT64 = keras.backend.backend() in FLOAT64_BACKENDS

# Their p4m elements in the order of ours, as the README of the vectors says.
ELEMENTS = {"p4": [0, 1, 2, 3], "p4m": [0, 1, 2, 3, 6, 5, 4, 7]}

CASES = [
    *("conv_lift_p4", "conv_group_p4", "conv_lift_p4m", "conv_group_p4m"),
    *("full_att_lift_p4", "full_att_group_p4"),
    *("ch_att_lift_p4", "ch_att_group_p4"),
    *("full_att_group_p4m", "ch_att_group_p4m"),
    *("sp_att_lift_p4", "sp_att_group_p4"),
    *("f_att_lift_p4", "f_att_group_p4"),
    *("f_att_lift_p4m", "f_att_group_p4m", "f_att_lift_dil4_p4"),
    *("f_ch_att_lift_p4", "f_ch_att_group_p4"),
    *("f_sp_att_lift_p4", "f_sp_att_group_p4"),
    *("rh_lift_p4", "rh_group_p4"),
]


def vector_layers(name, filters, dtype):
    """Our layers for one case of the vectors, one after the other."""
    operator, kind = (
        name.removesuffix("_p4")
        .removesuffix("_p4m")
        .split("_lift" if "_lift" in name else "_group")
    )
    lifting = "_lift" in name
    options = {"group": name.split("_")[-1], "dtype": dtype}
    attention = {
        "reduction_ratio": 1 if lifting else 2,
        "attention_dilation_rate": 4 if kind == "_dil4" else 1,
        "attention": {
            "ch_att": "channel",
            "f_ch_att": "channel",
            "sp_att": "spatial",
            "f_sp_att": "spatial",
        }.get(operator, "full"),
    }
    before = []
    if operator in ("conv", "f_att", "f_ch_att", "f_sp_att"):
        if operator != "conv":
            before = [layers.InputAttention(**options, **attention)]
        layer = layers.LiftingConv2D if lifting else layers.GroupConv2D
    elif operator == "rh":
        layer = (
            layers.CoAttentiveLiftingConv2D
            if lifting
            else layers.CoAttentiveGroupConv2D
        )
    else:
        layer = (
            layers.AttentiveLiftingConv2D
            if lifting
            else layers.AttentiveGroupConv2D
        )
        options |= attention
    return [*before, layer(filters, 3, use_bias=False, **options)]


def layer_weights(layer, arrays):
    """The variables of one layer from the arrays of one module."""
    return {
        part.variable.name: part.convert(arrays[part.key])
        for part in from_att_gconvs._parts(layer)
    }


@pytest.mark.parametrize("name", CASES)
def test_layers_agree_with_the_authors(name):
    dtype = "float64" if HAS_FLOAT64 else "float32"
    vectors = load_vectors(name)
    elements = ELEMENTS[name.split("_")[-1]]
    arrays = {
        key.removeprefix("w."): value
        for key, value in vectors.items()
        if key.startswith("w.")
    }
    y = vectors["x"].astype(dtype)
    y = (
        y.transpose(0, 2, 3, 1)
        if y.ndim == 4
        else y.transpose(0, 3, 4, 2, 1)[..., elements, :]
    )
    for layer in vector_layers(name, len(arrays["weight"]), dtype):
        layer.build(y.shape)
        weights = layer_weights(layer, arrays)
        assert set(weights) == {v.name for v in layer.weights}
        layer.set_weights([weights[v.name] for v in layer.weights])
        y = layer(y)
    expected = vectors["y_float64"].transpose(0, 3, 4, 2, 1)[..., elements, :]
    tolerance = {"float32": 1e-5, "float64": 1e-10}[dtype]
    assert relative_difference(as_array(y), expected) < tolerance


def checkpoint(name):
    """Folder of the authors' trained weights, where the machine has them.

    Beside the repository, or where ATT_GCONVS_CHECKPOINTS says.
    """
    beside = Path(__file__).resolve().parents[3]
    beside = beside / "shared/vectors/att_gconvs/checkpoints"
    folder = Path(os.environ.get("ATT_GCONVS_CHECKPOINTS", beside)) / name
    if not folder.is_dir():
        pytest.skip("the authors' checkpoints are not on this machine")
    return folder


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("z2cnn", "rotmnist_z2cnn"),
        ("p4cnn", "rotmnist_p4cnn"),
        ("f_att_p4cnn", "rotmnist_p4cnn_input"),
    ],
)
def test_trained_networks_agree_with_the_authors(folder, name, dtype):
    folder = checkpoint(folder)
    # On PyTorch Keras' BatchNormalization computes in float32 all the same.
    if dtype == "float64" and keras.backend.backend() != "tensorflow":
        pytest.skip("no float64 throughout on this backend")
    keras.config.set_dtype_policy(dtype)
    model = applications.get_model(name)
    assert convert.att_gconvs(model, folder / "weights.npz") is model
    with np.load(folder / "io.npz") as file:
        vectors = dict(file)
    x = vectors["x"].transpose(0, 2, 3, 1)
    both = np.concatenate([x, np.rot90(x, axes=(1, 2))])
    inside = ["conv1", "conv2", "conv7", "predictions"]
    outputs = keras.Model(
        model.input, [model.get_layer(layer).output for layer in inside]
    ).predict_on_batch(both)
    logits, turned = np.split(outputs.pop(), 2)
    if dtype == "float64":
        expected = vectors["logits_float64"]
        assert relative_difference(logits, expected) < 1e-10
    else:
        assert relative_difference(logits, vectors["logits"]) < 1e-4
    assert relative_difference(turned, vectors["logits_rot90"]) < 1e-4
    for y, key in zip(outputs, ("act_c1", "act_c2", "act_c7"), strict=True):
        theirs = vectors[key]
        if theirs.ndim == 4:  # z2 has no group axis there
            theirs = theirs[:, :, None]
        theirs = theirs.transpose(0, 3, 4, 2, 1)
        assert relative_difference(y[: len(x)], theirs) < 1e-4


def check_invariant(model, group, images):
    """Checks that turns do not change the logits, and returns them."""
    moved = [
        as_array(ops.group_action(images, group, g))
        for g in groups.get(group).grid_elements
    ]
    logits = model.predict_on_batch(np.concatenate(moved))
    logits = np.split(logits, len(moved))
    assert np.isfinite(logits).all()
    for turned in logits[1:]:
        assert relative_difference(turned, logits[0]) < 1e-4
    return logits[0]


def load_checkpoint(name, folder):
    model = applications.get_model(name)
    return convert.att_gconvs(model, checkpoint(folder) / "weights.npz")


@pytest.mark.slow
@pytest.mark.every_backend
def test_trained_network_with_full_attention():
    model = load_checkpoint("rotmnist_p4cnn_full", "att_p4cnn")
    images = np.random.default_rng(0).normal(size=(2, 28, 28, 1))
    logits = check_invariant(model, "p4", images.astype("float32"))
    expected = load_vectors("trained_logits")["att_p4cnn"]
    assert relative_difference(logits, expected) < 1e-5


@pytest.mark.slow
@pytest.mark.every_backend
def test_trained_network_with_full_attention_all_at_once():
    model = load_checkpoint("rotmnist_p4cnn_full", "att_p4cnn")
    images = np.random.default_rng(0).normal(size=(2, 28, 28, 1))
    for layer in model.layers:
        if hasattr(layer, "chunk_size"):
            layer.chunk_size = None
    logits = model.predict_on_batch(images.astype("float32"))
    expected = load_vectors("trained_logits")["att_p4cnn"]
    assert relative_difference(logits, expected) < 1e-5


@pytest.mark.slow
@pytest.mark.every_backend
def test_trained_densenet():
    model = load_checkpoint("pcam_densenet_p4m", "p4m_densenet")
    images = np.random.default_rng(0).normal(size=(1, 96, 96, 3))
    logits = check_invariant(model, "p4m", images.astype("float32"))
    expected = load_vectors("trained_logits")["p4m_densenet"]
    assert relative_difference(logits, expected) < 1e-5


BATCH_NORM = ("weight", "bias", "running_mean", "running_var")
INPUT_ATTENTION = (
    "weight",
    "channel_attention.weight_fc1",
    "channel_attention.weight_fc2",
    "spatial_attention.weight",
)


def names(modules, arrays):
    return {f"{module}.{array}" for module in modules for array in arrays}


def rot_mnist_names(convolution=("weight",)):
    return names([f"c{n}" for n in range(1, 8)], convolution) | names(
        [f"bn{n}" for n in range(1, 7)], BATCH_NORM
    )


def residual_names():
    """Names in the authors' code: they published no trained ResNet."""
    blocks = [f"layers_nc{n}.{i}" for n in (32, 16, 8) for i in range(7)]
    convolutions = [f"{b}.c{n}" for b in blocks for n in (1, 2)]
    shortcuts = [f"layers_nc{n}.0.fiber_map" for n in (16, 8)]
    norms = [f"{b}.bn{n}" for b in blocks for n in (1, 2)]
    return names(
        ["c1", *convolutions, *shortcuts, "c_out"], ["weight"]
    ) | names([*norms, "bn_out"], BATCH_NORM)


def dense_names():
    blocks = [f"block_layers.{i}" for i in range(5)]
    blocks += [f"trans_layers.{i}" for i in range(4)]
    return names(
        ["c1", *[f"{b}.conv" for b in blocks], "c_out"], INPUT_ATTENTION
    ) | names([*[f"{b}.bn" for b in blocks], "bn_out"], BATCH_NORM)


@pytest.mark.once
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rotmnist_z2cnn", rot_mnist_names()),
        ("rotmnist_p4cnn_full", rot_mnist_names(INPUT_ATTENTION)),
        (
            "rotmnist_p4cnn_channel",
            rot_mnist_names(INPUT_ATTENTION[:3]),
        ),
        (
            "rotmnist_p4cnn_co",
            rot_mnist_names(("weight", "spatial_attention.weight")),
        ),
        ("rotmnist_p4cnn_input", rot_mnist_names(INPUT_ATTENTION)),
        (
            "allcnnc_p4m",
            names([f"c{n}" for n in range(1, 10)], ["weight"])
            | names([f"bn{n}" for n in range(1, 10)], BATCH_NORM),
        ),
        ("resnet44_p4m", residual_names()),
        ("pcam_densenet_p4m_input", dense_names()),
    ],
)
def test_names_of_the_authors(name, expected):
    model = applications.get_model(name)
    assert set(from_att_gconvs.att_gconvs_parts(model)) == expected


def small_model(group="p4", width=2, attention=None, normalize=True):
    """Two convolutions, and what the authors would call their weights."""
    x = inputs = keras.Input((8, 8, 1), name="image")
    for n, layer in ((1, layers.LiftingConv2D), (2, layers.GroupConv2D)):
        options = {"group": group, "use_bias": False, "name": f"conv{n}"}
        if attention == "input":
            x = layers.InputAttention(
                group,
                attention_kernel_size=3,
                reduction_ratio=1,
                name=f"conv{n}_attention",
            )(x)
        elif attention == "co":
            layer = getattr(layers, f"CoAttentive{layer.__name__}")
        elif attention:
            layer = getattr(layers, f"Attentive{layer.__name__}")
            options |= {"attention": attention, "attention_kernel_size": 3}
        x = layer(width, 3, **options)(x)
        if n == 1 and normalize:
            x = keras.layers.BatchNormalization(name="bn1")(x)
    return keras.Model(inputs, x, name="small")


def random_state(model):
    """Arrays with the names and shapes that a model takes."""
    rng = np.random.default_rng(0)
    state = {
        key: rng.normal(size=part.shape).astype("float32")
        for key, part in from_att_gconvs.att_gconvs_parts(model).items()
    }
    for key in [key for key in state if key.endswith("running_var")]:
        state[key] = np.abs(state[key])
        counter = key.replace("running_var", "num_batches_tracked")
        state[counter] = np.array(7)
    return state


def weights(model):
    return [as_array(w) for w in model.weights]


def check_loaded(model, state):
    kernel = np.pi / 2 * state["c2.weight"].transpose(3, 4, 2, 1, 0)
    found = as_array(model.get_layer("conv2").kernel)
    assert relative_difference(found, kernel) < 1e-6
    for name, key in (("gamma", "weight"), ("moving_mean", "running_mean")):
        found = as_array(getattr(model.get_layer("bn1"), name))
        np.testing.assert_array_equal(found, state[f"bn1.{key}"])


def test_sources(tmp_path):
    """Mappings and files, of NumPy and PyTorch, wrapped or not."""
    model = small_model()
    state = random_state(model)
    tensors = {key: torch.as_tensor(v) for key, v in state.items()}
    parallel = {f"module.{key}": v for key, v in tensors.items()}
    half = {key: v.to(torch.bfloat16) for key, v in tensors.items()}
    np.savez(tmp_path / "plain.npz", **state)
    torch.save(tensors, tmp_path / "plain.pth")
    torch.save({"epoch": 3, "state_dict": parallel}, tmp_path / "wrapped.PT")
    torch.save({"model": tensors}, tmp_path / "wrapped.bin")
    for source in (
        state,
        tensors,
        parallel,
        {"model": state},
        tmp_path / "plain.npz",
        str(tmp_path / "plain.pth"),
        tmp_path / "wrapped.PT",
        tmp_path / "wrapped.bin",
    ):
        model = small_model()
        assert convert.att_gconvs(model, source) is model
        check_loaded(model, state)
    model = small_model()
    convert.att_gconvs(model, half)
    check_loaded(model, {k: v.float().numpy() for k, v in half.items()})


def test_layers_by_the_names_of_the_authors():
    """A user's network, whose layers are not named as ours."""
    model = sequential(layers.LiftingConv2D(2, 3, use_bias=False, name="stem"))
    convert.att_gconvs(model, {"stem.weight": np.ones((2, 1, 3, 3))})
    assert as_array(model.weights[0]).sum() == 18


def test_what_does_not_fit_is_named_and_nothing_is_loaded():
    model = small_model()
    before = weights(model)
    state = random_state(model)
    del state["bn1.bias"]
    state["c1.weight"] = np.ones((5, 1, 3, 3))
    state["c3.weight"] = np.ones(3)
    with pytest.raises(ValueError, match="does not fit 'small'") as error:
        convert.att_gconvs(model, state)
    message = str(error.value)
    assert "Missing: bn1.bias" in message
    assert "Not used by the model: c3.weight" in message
    assert "c1.weight is (5, 1, 3, 3), must be (2, 1, 3, 3)" in message
    assert "seems to be" not in message  # the kind is right
    assert all(map(np.array_equal, before, weights(model)))
    with pytest.raises(ValueError, match=r"Missing: .*, \.\.\. \(6 in all\)"):
        convert.att_gconvs(model, {})


@pytest.mark.parametrize(
    ("loaded", "received"),
    [
        ({}, "on p4 with attention=None"),
        ({"group": "p4m"}, "on p4m with attention=None"),
        ({"group": "z2"}, "on z2 with attention=None"),
        ({"attention": "input"}, "on p4 with attention='input'"),
        ({"attention": "full"}, "on p4 with attention='full'"),
        ({"attention": "channel"}, "on p4 with attention='channel'"),
        ({"attention": "spatial"}, "on p4 with attention='spatial'"),
        (
            {"attention": "co", "group": "p4m"},
            "on p4m with attention='co'",
        ),
    ],
)
def test_another_architecture_is_said(loaded, received):
    state = random_state(small_model(**loaded))
    model = small_model(group="p4m", attention="input")
    message = f"be {received}, and the model is on p4m with attention='input'"
    with pytest.raises(ValueError, match=message):
        convert.att_gconvs(model, state)


def planar(name):
    return layers.GroupConv2D(2, 3, group="z2", use_bias=False, name=name)


def sequential(*stack):
    return keras.Sequential([keras.Input((8, 8, 1)), *stack])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: small_model("p8"), r"'z2' or 'p4' or 'p4m'.*'p8'"),
        (
            lambda: sequential(layers.LiftingConv2D(2, 3, name="image")),
            "'image' must have no 'bias'",
        ),
        (
            lambda: sequential(keras.layers.Dense(2, name="head")),
            "Dense 'head' is none of the layers",
        ),
        (
            lambda: sequential(
                planar("conv1"),
                planar("c1"),
            ),
            r"'c1' would take 'c1\.weight', and so would another",
        ),
        (
            lambda: keras.Sequential([layers.LiftingConv2D(2, 3)]),
            "`model` must be a built",
        ),
        (lambda: "rotmnist_p4cnn", r"`model` must be a built.*rotmnist_p4cnn"),
    ],
)
def test_models_that_the_authors_do_not_have(make, message):
    with pytest.raises(ValueError, match=message):
        convert.att_gconvs(make(), {})


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite(value):
    model = small_model()
    state = random_state(model)
    key = next(iter(state))
    state[key] = np.full_like(state[key], value)
    before = weights(model)
    with pytest.raises(ValueError, match=r"finite weights.*NaN or infinite"):
        convert.att_gconvs(model, state)
    for now, then in zip(weights(model), before, strict=True):
        np.testing.assert_array_equal(now, then)


@pytest.mark.once
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2, 2).to_sparse(),
        lambda: torch.empty(2, 2, device="meta"),
        lambda: torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8),
    ],
    ids=["sparse", "meta", "quantised"],
)
def test_tensors_without_plain_arrays(make):
    model = small_model()
    state = {**random_state(model), "another": make()}
    with pytest.raises(ValueError, match=r"arrays of numbers.*'another'"):
        convert.att_gconvs(model, state)


def test_sources_that_hold_no_weights(tmp_path, monkeypatch):
    model = small_model()

    def load(state):
        convert.att_gconvs(model, state)

    for path in ("no.npz", "no.pth", "weights.h5"):
        with pytest.raises(ValueError, match=rf"file that exists.*{path}"):
            load(tmp_path / path)
    with pytest.raises(ValueError, match=r"must be a mapping.*Received: list"):
        load([1, 2])
    for value in ({"a": 1}, "text", [[1], [1, 2]]):
        with pytest.raises(ValueError, match=r"under all its names.*'epoch'"):
            load({"epoch": value})
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pth")
    (tmp_path / "text.npz").write_text("not one")
    (tmp_path / "text.pt").write_text("not one")
    with open(tmp_path / "array.npz", "wb") as file:
        np.save(file, np.ones(3))
    for name in ("module.pth", "text.npz", "text.pt", "array.npz"):
        with pytest.raises(ValueError, match=rf"{name} is not a file of arr"):
            load(tmp_path / name)
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(ValueError, match=r"must be a mapping.*Received: list"):
        load(tmp_path / "list.pth")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"list\.pth.*PyTorch.*pip install"):
        load(tmp_path / "list.pth")


@pytest.mark.once
def test_example(tmp_path, monkeypatch, capsys):
    """The script counts errors and keeps one result per network."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    import evaluate_checkpoint

    weights, out = tmp_path / "weights.npz", tmp_path / "results.json"
    model = applications.get_model("rotmnist_z2cnn")
    np.savez(weights, **random_state(model))
    command = f"_ {weights} --model rotmnist_z2cnn --dataset digits --out {out}"
    for option in ([], ["--transpose"]):
        monkeypatch.setattr(sys, "argv", [*command.split(), *option])
        evaluate_checkpoint.main()
        rows = json.loads(out.read_text())["rows"]
        assert rows[-1]["weights"] == f"{tmp_path.name}/weights.npz"
        assert f"{rows[-1]['errors']} of" in capsys.readouterr().out
    assert rows[0]["errors"] != rows[1]["errors"]
    evaluate_checkpoint.add(rows[0], out)
    assert json.loads(out.read_text())["rows"] == rows[::-1]


@pytest.mark.once
def test_example_with_weights_of_acmix(tmp_path, monkeypatch):
    """The network and its file go to the converter of the network."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    import evaluate_checkpoint

    model = applications.get_model("rotmnist_z2cnn")  # one that takes digits
    monkeypatch.setattr(applications, "get_model", lambda name, **_: model)
    found = []
    names = []

    def converter_of(name):
        names.append(name)
        return (lambda *given: found.append(given)), {}

    monkeypatch.setattr(applications, "converter_of", converter_of)
    weights = tmp_path / "weights.pth"
    weights.write_bytes(b"")
    command = f"_ {weights} --model acmix_swin_tiny --dataset digits"
    monkeypatch.setattr(sys, "argv", command.split())
    evaluate_checkpoint.main()
    assert names == ["acmix_swin_tiny"]
    assert found == [(model, weights)]


@pytest.mark.once
def test_converters_of_registered_networks():
    """Networks that a converter can fill say which one it is."""
    for name in applications.list_models():
        family = name.split("_")[0]
        if family == "tiny":  # of tests of the training script
            continue
        if (
            family in ("resnet29", "resnet83", "unet", "vit")
            or (family == "acmix" and "swin" not in name)
            # The authors' code has no steerable filters.
            or name.startswith(("rotmnist_p8", "rotmnist_p16"))
        ):
            with pytest.raises(ValueError, match=f"Received: '{name}'"):
                applications.converter_of(name)
            continue
        converter, arguments = applications.converter_of(name)
        expected = {
            "gsanet": convert.g_selfatt,
            "acmix": convert.acmix,
            "octic": convert.octic_vits,
        }
        assert converter is expected.get(family, convert.att_gconvs)
        assert ("epsilon" in arguments) == (family == "gsanet")
        assert ("normalization" in arguments) == ("gsanet_rot" in name)
