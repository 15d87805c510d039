"""``examples/attention_maps.py``: tables and pictures."""

import re
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_equiattn import applications
from keras_equiattn import groups
from keras_equiattn.applications import registry
from keras_equiattn.applications.data import datasets
from keras_equiattn.layers import GroupPooling
from keras_equiattn.layers import GroupSelfAttention2D
from keras_equiattn.layers import InputAttention
from keras_equiattn.layers import LiftingConv2D
from keras_equiattn.layers import LiftingSelfAttention2D
from keras_equiattn.layers import SimpleAffineSelfConv2D
from keras_equiattn.layers import SpatialPooling2D

SCRIPT = Path(__file__).parents[2] / "examples" / "attention_maps.py"


def tiny_network(
    input_shape, classes, normalization, downsampling="exact", weights=None
):
    """Attention after downsampling by two."""
    exact = downsampling == "exact"
    x = inputs = keras.Input(input_shape)
    x = LiftingConv2D(
        2, 3, strides=1 if exact else 2, exact=exact, group="p4", name="conv"
    )(x)
    if exact:
        x = SpatialPooling2D(2, group="p4", name="pool")(x)
    x = InputAttention(group="p4", name="attention")(x)
    x = keras.layers.GlobalAveragePooling2D(name="mean")(
        GroupPooling(name="group_max")(x)
    )
    x = keras.layers.Dense(classes, name="dense")(x)
    model = keras.Model(inputs, x, name=f"tiny_{downsampling}")
    if weights is not None:
        model.load_weights(weights)
    return model


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    monkeypatch.setattr(
        applications, "get_model", lambda name, **kwargs: tiny_network(**kwargs)
    )
    import attention_maps

    return attention_maps


@pytest.fixture
def weights(tmp_path):
    model = tiny_network((28, 28, 1), 10, None)
    rng = np.random.default_rng(0)
    for variable in model.get_layer("attention").weights:
        variable.assign(rng.normal(size=variable.shape))
    model.save_weights(tmp_path / "tiny.weights.h5")
    return tmp_path / "tiny.weights.h5"


def arguments(npz, out, *more):
    return ["--model=tiny", f"--dataset={npz}", f"--out={out}", *more]


def rotation_errors(shown):
    """The last column of the tables."""
    return [float(e) for e in re.findall(r"(\d\.\de[+-]\d+) │", shown)]


def test_trains_prints_and_draws(example, npz, tmp_path, capsys):
    out = tmp_path / "new" / "maps"
    more = ("--epochs=1", "--images=2", "--index=3")
    example.main(arguments(npz, out, *more))
    shown = capsys.readouterr().out
    assert "tiny_exact: " in shown
    (error,) = rotation_errors(shown)
    assert error < 1e-5
    assert [path.name for path in out.iterdir()] == ["tiny.png"]
    assert (out / "tiny.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.sweep
def test_strided_beside_exact(example, npz, weights, tmp_path, capsys):
    more = (f"--weights={weights}", "--downsampling=strided", "--images=2")
    example.main(arguments(npz, tmp_path / "a", *more))
    exact, strided = rotation_errors(capsys.readouterr().out)
    assert exact < 1e-5
    assert strided > 1e-2
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == ["tiny.png", "tiny_strided.png"]
    # The same weights, given.
    more = (*more, f"--strided-weights={weights}")
    example.main(arguments(npz, tmp_path / "b", *more))
    again = rotation_errors(capsys.readouterr().out)
    assert again == pytest.approx([exact, strided])


def test_comparison_shows_what_changes(example, npz, weights):
    models = {
        name: tiny_network((28, 28, 1), 10, None, name, weights)
        for name in ("exact", "strided")
    }
    image = np.random.default_rng(0).uniform(size=(28, 28, 1))
    figure = example.compare(models, image, "attention")
    panels = np.array(figure.axes[:20]).reshape(5, 4)
    values = np.array(
        [[panel.images[0].get_array() for panel in row] for row in panels[1:]]
    )
    exact, nothing, strided, changed = values
    np.testing.assert_allclose(exact, exact[:1].repeat(4, 0), atol=1e-5)
    np.testing.assert_allclose(nothing, 0, atol=1e-5)
    np.testing.assert_array_equal(changed, strided - strided[0])
    assert np.abs(changed[1:]).max(axis=(1, 2)).min() > 1e-2
    limits = [panel.images[0].get_clim() for panel in panels[3]]
    assert set(limits) == {(strided.min(), strided.max())}
    assert [panel.get_title() for panel in panels[0]] == [
        "0°",
        "90°",
        "180°",
        "270°",
    ]


def test_rotation_error(example):
    """The error of maps that do not turn agrees with its definition."""
    group = groups.get("p4")
    rng = np.random.default_rng(0)
    plane = rng.uniform(size=(2, 5, 5, 1)).astype("float32")
    still = [plane] * 4
    turned = [np.rot90(plane, g, axes=(1, 2)) for g in range(4)]
    worst = max(np.abs(plane - other).max() for other in turned)
    found = example.turn_error(group, still)
    assert found == pytest.approx(worst / plane.max())
    assert example.turn_error(group, turned) == 0


def test_transposed_digits(example, npz):
    options = example.parse(arguments(npz, "out", "--index=1"))
    image, images = example.test_images(options)
    np.testing.assert_array_equal(image, images[1])
    options = example.parse(arguments(npz, "out", "--index=1", "--transpose"))
    found, _ = example.test_images(options)
    np.testing.assert_array_equal(found, np.swapaxes(image, 0, 1))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--index=48"], "--index must be from 0 to 47. Received: 48"),
        (["--layer=attentive"], "Did you mean 'attention'"),
        (["--elements", "0", "4"], "from 0 to 3 for group 'p4'"),
        (["--weights=nowhere.weights.h5"], "nowhere.weights.h5"),
    ],
)
def test_errors_are_one_line(example, npz, weights, tmp_path, more, message):
    command = arguments(npz, tmp_path, f"--weights={weights}", *more)
    with pytest.raises(SystemExit, match="error: .*" + re.escape(message)):
        example.main(command)


@pytest.mark.slow
def test_command_line_on_a_real_network(npz, tmp_path):
    """The command of the documentation, on a few images."""
    command = [
        sys.executable,
        str(SCRIPT),
        f"--dataset={npz}",
        "--epochs=1",
        "--images=2",
        "--downsampling=strided",
        "--out=maps",
    ]
    process = subprocess.run(
        command, cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert "conv7_attention" in process.stdout
    errors = rotation_errors(process.stdout)
    assert len(errors) == 14
    assert max(errors[:7]) < 1e-5
    assert len(list((tmp_path / "maps").iterdir())) == 2


@pytest.mark.slow
def test_command_line_on_group_self_attention(npz, tmp_path):
    """The command of the guide, with weights instead of the training."""
    name = "gsanet_rotmnist_p4"
    info = datasets.info(str(npz))
    network = applications.get_model(name, normalization=info.normalization)
    network.save_weights(tmp_path / "random.weights.h5")
    command = [
        *(sys.executable, str(SCRIPT), f"--model={name}", "--pixel", "4", "9"),
        *(f"--dataset={npz}", "--weights=random.weights.h5", "--out=runs/maps"),
    ]
    process = subprocess.run(
        command, cwd=tmp_path, check=True, capture_output=True, text=True
    )
    found = re.search(r"Error of rotation at the pixel: (\S+)", process.stdout)
    assert float(found[1]) < 1e-5
    pictures = sorted(path.name for path in (tmp_path / "runs/maps").iterdir())
    assert pictures == [f"{name}_pixel.png", f"{name}_pixel_turned.png"]
    for picture in pictures:
        assert (tmp_path / "runs/maps" / picture).stat().st_size > 1000


def windowed_network(input_shape, classes, normalization, weights=None):
    x = inputs = keras.Input(input_shape)
    x = LiftingConv2D(2, 3, group="p4")(x)
    x = SimpleAffineSelfConv2D(2, 3, 1, group="p4", name="window")(x)
    x = keras.layers.GlobalAveragePooling3D()(x)
    return keras.Model(inputs, keras.layers.Dense(classes)(x), name="windowed")


def test_draws_the_window_of_a_pixel(example, npz, tmp_path, monkeypatch):
    monkeypatch.setattr(
        applications, "get_model", lambda name, **kw: windowed_network(**kw)
    )
    more = ("--epochs=1", "--pixel", "14", "9", "--elements", "0", "2")
    example.main(arguments(npz, tmp_path, *more))
    assert (tmp_path / "tiny_pixel.png").stat().st_size > 1000
    assert not (tmp_path / "tiny.png").exists()


def attending_network(input_shape, classes, normalization):
    x = inputs = keras.Input(input_shape)
    x = SpatialPooling2D(4, group="p4m")(x)
    x = LiftingSelfAttention2D(3, 2, 1, 3, "p4m", name="lift")(x)
    x = GroupSelfAttention2D(2, 3, 1, None, "p4m", name="far")(x)
    x = keras.layers.GlobalAveragePooling3D()(x)
    return keras.Model(inputs, keras.layers.Dense(classes)(x), name="attending")


@pytest.mark.parametrize(
    "layer", ["lift", pytest.param("far", marks=pytest.mark.sweep)]
)
def test_draws_what_a_pixel_of_a_group_attends_to(
    layer, example, npz, tmp_path, monkeypatch, capsys
):
    model = attending_network((28, 28, 1), 10, None)
    weights = tmp_path / "attending.weights.h5"
    model.save_weights(weights)

    def build(name, weights=None, **kwargs):
        model.load_weights(weights)
        return model

    monkeypatch.setattr(applications, "get_model", build)
    more = (f"--weights={weights}", "--pixel", "9", "20", f"--layer={layer}")
    example.main(arguments(npz, tmp_path, *more))
    found = re.search(r"at the pixel: (\S+)", capsys.readouterr().out)
    assert float(found[1]) < 1e-5
    for name in ("pixel", "pixel_turned"):
        assert (tmp_path / f"tiny_{name}.png").stat().st_size > 1000
    with pytest.raises(SystemExit, match="--head must be from 0 to 0"):
        example.main(arguments(npz, tmp_path, *more, "--head=1"))
    if layer == "lift":
        with pytest.raises(SystemExit, match="'lift' does not weigh"):
            example.main(arguments(npz, tmp_path, *more, "--key-element=1"))


def test_the_turned_picture_shows_turned_windows(example):
    """The panel of `(g, g h)` is that of `(identity, h)`, turned."""
    model = attending_network((28, 28, 1), 10, None)
    image = np.random.default_rng(0).uniform(size=(28, 28, 1)).astype("float32")
    options = example.parse(
        ["--out=.", "--pixel", "9", "20", "--layer=lift", "--elements", "1"]
    )
    views = example.turned_views(model, image, options)
    assert [view.element for view in views] == [0, 1]
    assert views[1].pixel == (28 - 1 - 20, 9)
    figure = example.compare_views(model, views, options)
    still, turned = np.array(figure.axes[:18]).reshape(2, 9)
    p4m = groups.get("p4m")
    for h in range(8):
        before = still[1 + h].images[0].get_array()
        after = turned[1 + p4m.product_table[1, h]].images[0].get_array()
        np.testing.assert_allclose(after, np.rot90(before), atol=1e-5)
    assert np.ptp(before) > 1e-3


@pytest.mark.parametrize(
    ("build", "pixel", "message"),
    [
        (tiny_network, ("--pixel", "14", "9"), "no layer that attends"),
        (windowed_network, (), "choose a pixel with --pixel ROW COLUMN"),
        (
            windowed_network,
            ("--pixel", "0", "9"),
            "'window' covers: rows 1 to 26 and columns 1 to 26 of the image",
        ),
        (
            windowed_network,
            ("--pixel", "14", "9", "--layer=windw"),
            "Did you mean 'window'",
        ),
    ],
)
def test_networks_that_cannot_be_drawn_are_not_trained(
    build, pixel, message, example, npz, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        applications, "get_model", lambda name, **kw: build(**kw)
    )
    monkeypatch.setattr(example, "train", None)
    with pytest.raises(SystemExit, match=message):
        example.main(arguments(npz, tmp_path, *pixel))


def test_weights_of_the_authors_of_group_self_attention(
    example, tmp_path, monkeypatch
):
    """They go to their own converter, into a network with their constants."""
    built = []

    def build(name, epsilon, normalization, **kwargs):
        built.append((epsilon, normalization))
        return attending_network((28, 28, 1), 10, None)

    def converted(model, path):
        assert path == "authors.pth"
        return model

    monkeypatch.setattr(applications, "get_model", build)
    entry = registry._MODELS["gsanet_rotmnist_p4"]
    monkeypatch.setitem(
        registry._MODELS,
        "gsanet_rotmnist_p4",
        entry._replace(converter=converted),
    )
    options = example.parse(
        [
            *("--model=gsanet_rotmnist_p4", "--dataset=rot_mnist"),
            *("--weights=authors.pth", "--out=.", "--pixel", "9", "20"),
        ]
    )
    image = np.zeros((28, 28, 1))
    assert example.load(options, image).name == "attending"
    assert built == [(1e-12, (0.1307, 0.3081))]


def test_weights_of_the_authors_of_acmix(example, monkeypatch):
    """Those of Swin go to their own converter, too."""
    model = attending_network((32, 32, 3), 10, None)
    monkeypatch.setattr(applications, "get_model", lambda name, **_: model)
    found = []
    entry = registry._MODELS["acmix_swin_tiny_cifar10"]
    monkeypatch.setitem(
        registry._MODELS,
        "acmix_swin_tiny_cifar10",
        entry._replace(converter=lambda *given: found.append(given) or model),
    )
    options = example.parse(
        [
            *("--model=acmix_swin_tiny_cifar10", "--dataset=cifar10"),
            *("--weights=authors.pth", "--out=.", "--pixel", "9", "20"),
        ]
    )
    assert example.load(options, np.zeros((32, 32, 3))) is model
    assert found == [(model, "authors.pth")]
