"""How equivariant a file is, measured where it runs."""

import json

import keras
import numpy as np
import pytest

from keras_equiattn import certificate
from keras_equiattn import export
from keras_equiattn import layers
from keras_equiattn import quantize
from keras_equiattn.deployment.formats import FORMATS

OWN = [
    f.suffix for f in FORMATS.values() if f.backend == keras.backend.backend()
]
pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.skipif(not OWN, reason="writes no format by itself"),
]


def images(count=8, size=9):
    rng = np.random.default_rng(0)
    return rng.uniform(size=(count, size, size, 1)).astype("float32")


def network(group="p4m", broken=False):
    inputs = keras.Input((9, 9, 1))
    x = layers.LiftingConv2D(4, 3, group=group, activation="relu")(inputs)
    x = layers.GroupConv2D(2, 3, group=group)(x)
    if broken:
        return keras.Model(inputs, keras.layers.Flatten()(x))
    return keras.Model(inputs, x)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    keras.utils.set_random_seed(0)
    made = {
        "exact": quantize(network(), images()),
        "rounded": network(),
        "broken": network(broken=True),
    }
    paths = {}
    for name, model in made.items():
        paths[name] = folder / f"{name}{OWN[-1]}"
        export(model, paths[name])
    return paths


def test_bits_rounding_and_errors(files):
    found = certificate(list(files.values()), "p4m", images())
    exact, rounded, broken = found.files
    assert [file.is_exact for file in found.files] == [True, False, False]
    assert exact.errors == (0.0,) * 8
    assert 0 < max(rounded.errors) < 1e-5
    assert max(broken.errors) > 0.1
    assert found.elements == tuple(range(8))
    assert found.images == (8, 9, 9, 1)


def test_table(files):
    found = certificate([files["exact"], files["broken"]], "p4m", images())
    head, _, exact, broken = str(found).splitlines()
    assert "| mirrored, 90° |" in head
    assert exact.strip("| ").split(" | ")[-8:] == 8 * ["exact"]
    assert f"exact{OWN[-1]}" in exact
    assert "e+00" in broken or "e-01" in broken


def test_json(files, tmp_path):
    found = certificate(files["rounded"], "p4m", images())
    found.save(tmp_path / "certificate.json")
    content = json.loads((tmp_path / "certificate.json").read_text())
    (file,) = content["files"]
    assert content["group"] == "p4m"
    assert file["is_exact"] is False
    assert file["errors"] == list(found.files[0].errors)
    assert len(file["sha256"]) == 64
    assert file["bytes"] > 1000


def test_elements_on_the_grid(tmp_path):
    export(network("p8"), tmp_path / f"p8{OWN[-1]}")
    found = certificate(tmp_path / f"p8{OWN[-1]}", "p8", images())
    assert found.elements == (0, 2, 4, 6)
    assert max(found.files[0].errors) < 1e-5


def test_images_that_are_not_finite(files):
    with pytest.raises(
        ValueError, match=r"`images` must be finite.* 81 values"
    ):
        certificate(files["exact"], "p4m", np.nan * images()[:1])


def test_bad_images(files):
    with pytest.raises(ValueError, match=r"\(9, 9, 1\)"):
        certificate(files["exact"], "p4m", images()[0])


@pytest.mark.once
def test_images_that_look_the_same_in_other_poses(files):
    column = np.broadcast_to(np.arange(9.0)[None, :, None, None], (4, 9, 9, 1))
    with pytest.raises(ValueError, match=r"different in every pose.*mirrored"):
        certificate(files["broken"], "p4m", column)
    with pytest.raises(ValueError, match=r"different in every pose.* 90°"):
        certificate(files["broken"], "p4m", np.ones((4, 9, 9, 1)))


@pytest.mark.once
def test_images_in_double_precision(files):
    found = certificate(files["exact"], "p4m", images().astype("float64"))
    assert found.files[0].is_exact


@pytest.mark.once
@pytest.mark.parametrize(
    ("path", "error", "match"),
    [
        ([], ValueError, r"path=\[\]"),
        (None, TypeError, "path=None"),
        ([3], TypeError, "path=3"),
    ],
)
def test_bad_paths(path, error, match):
    with pytest.raises(error, match=match):
        certificate(path, "p4m", images())


@pytest.mark.once
def test_group_that_moves_nothing(files):
    with pytest.raises(ValueError, match="group='z2'"):
        certificate(files["exact"], "z2", images())


@pytest.mark.once
@pytest.mark.parametrize("bad", ["images", [object()]])
def test_images_that_are_no_numbers(files, bad):
    with pytest.raises(ValueError, match="array of numbers"):
        certificate(files["exact"], "p4m", bad)


@pytest.mark.once
def test_images_that_are_not_square(files):
    with pytest.raises(ValueError, match="square"):
        certificate(files["exact"], "p4m", images()[:, :7])


@pytest.mark.once
def test_network_of_two_inputs(tmp_path):
    inputs = [keras.Input((9, 9, 1)), keras.Input((9, 9, 1))]
    path = tmp_path / f"two{OWN[-1]}"
    export(keras.Model(inputs, keras.layers.Add()(inputs)), path)
    with pytest.raises(ValueError, match=r"takes 2 arrays. Received: 1"):
        certificate(path, "p4m", images())


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing"):
        certificate(tmp_path / f"nothing{OWN[-1]}", "p4m", images())
