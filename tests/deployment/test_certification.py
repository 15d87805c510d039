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


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing"):
        certificate(tmp_path / f"nothing{OWN[-1]}", "p4m", images())
