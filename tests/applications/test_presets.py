"""Networks with their weights, in folders and on a stand-in of the hub."""

import json
import shutil
import sys
import types

import keras
import numpy as np
import pytest
from layer_contract import as_array

from keras_equiattn import applications
from keras_equiattn import layers
from keras_equiattn._files import checksum
from keras_equiattn.applications import from_preset
from keras_equiattn.applications import list_presets
from keras_equiattn.applications import presets
from keras_equiattn.applications import save_to_preset

FILES = ["README.md", "config.json", "metadata.json", "model.weights.h5"]


def images(size=9, channels=1):
    rng = np.random.default_rng(0)
    return rng.uniform(size=(2, size, size, channels)).astype("float32")


def network():
    inputs = keras.Input((9, 9, 1))
    x = layers.LiftingConv2D(2, 3, group="p4", activation="relu")(inputs)
    x = keras.layers.BatchNormalization()(layers.GroupConv2D(2, 3)(x))
    return keras.Model(inputs, layers.GroupPooling()(x))


@pytest.fixture
def folder(tmp_path):
    save_to_preset(network(), tmp_path / "net")
    return tmp_path / "net"


@pytest.mark.parametrize(
    "name",
    [
        name
        if name == "rotmnist_p4cnn"
        else pytest.param(name, marks=pytest.mark.torch_first)
        for name in list_presets()
    ],
)
def test_shipped(name):
    model = from_preset(name)
    expected = applications.get_model(name, weights="rot_mnist")
    x = images(28)
    np.testing.assert_array_equal(as_array(model(x)), as_array(expected(x)))


def test_damaged_weights_are_not_loaded_by_name(tmp_path, monkeypatch):
    shutil.copytree(presets.SHIPPED, tmp_path / "weights")
    monkeypatch.setattr(presets, "SHIPPED", tmp_path / "weights")
    path = tmp_path / "weights" / "rotmnist_p4cnn" / presets.WEIGHTS
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="rotmnist_p4cnn' is damaged or was"):
        applications.get_model("rotmnist_p4cnn", weights="rot_mnist")


def test_names():
    assert list_presets() == [
        "rotmnist_p16cnn",
        "rotmnist_p16cnn_5x5",
        "rotmnist_p4cnn",
        "rotmnist_p4cnn_big15",
        "rotmnist_p4cnn_co",
        "rotmnist_p4cnn_full",
        "rotmnist_p4cnn_input",
        "rotmnist_p4cnn_spatial",
        "rotmnist_p8cnn_input",
        "rotmnist_p8cnn_smooth",
    ]


@pytest.mark.once
def test_size_of_the_package():
    files = presets.SHIPPED.rglob("*")
    assert sum(file.stat().st_size for file in files) < 3 * 10**6


@pytest.mark.every_backend
def test_folder(tmp_path):
    model = network()
    save_to_preset(model, tmp_path / "net", card="# About it\n")
    assert sorted(p.name for p in (tmp_path / "net").iterdir()) == FILES
    loaded = from_preset(tmp_path / "net")
    x = images()
    np.testing.assert_array_equal(as_array(loaded(x)), as_array(model(x)))
    assert (tmp_path / "net" / "README.md").read_text() == "# About it\n"


def test_card_of_the_network(folder):
    card = (folder / "README.md").read_text()
    assert "# net\n" in card
    assert "`(None, 9, 9, 1)`" in card


def test_metadata(folder):
    about = json.loads((folder / "metadata.json").read_text())
    assert about["keras_version"] == keras.__version__
    assert about["parameter_count"] == network().count_params()
    assert set(about["sha256"]) == {"config.json", "model.weights.h5"}


def test_saved_again(folder):
    model = network()
    save_to_preset(model, folder)
    x = images()
    loaded = from_preset(folder)
    np.testing.assert_array_equal(as_array(loaded(x)), as_array(model(x)))


def test_architecture_alone(folder):
    (folder / "model.weights.h5").unlink()
    assert from_preset(folder, load_weights=False).count_params() > 0


@pytest.mark.parametrize("name", ["config.json", "model.weights.h5"])
def test_damaged_file(folder, name):
    path = folder / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} of preset.*damaged"):
        from_preset(folder)


@pytest.mark.parametrize(
    "name", ["config.json", "metadata.json", "model.weights.h5"]
)
def test_missing_file(folder, name):
    (folder / name).unlink()
    with pytest.raises(ValueError, match=f"must hold the file {name}"):
        from_preset(folder)


@pytest.mark.parametrize("content", ["[]", "{", '{"sha256": 3}'])
def test_metadata_that_say_nothing(folder, content):
    (folder / "metadata.json").write_text(content)
    with pytest.raises(ValueError, match=r"metadata\.json"):
        from_preset(folder)


def test_unknown_layer(folder):
    config = (folder / "config.json").read_text()
    config = config.replace("LiftingConv2D", "SinkingConv2D")
    (folder / "config.json").write_text(config)
    about = json.loads((folder / "metadata.json").read_text())
    about["sha256"]["config.json"] = checksum(folder / "config.json")
    (folder / "metadata.json").write_text(json.dumps(about))
    with pytest.raises(
        ValueError, match=r"(?s)import that package.*SinkingConv2D"
    ):
        from_preset(folder)


def test_code_in_a_config_does_not_run(tmp_path):
    inputs = keras.Input((2,))
    model = keras.Model(inputs, keras.layers.Lambda(lambda x: x + 1)(inputs))
    save_to_preset(model, tmp_path / "net")
    with pytest.raises(ValueError, match="cannot build the network"):
        from_preset(tmp_path / "net")


def test_unknown_name():
    with pytest.raises(ValueError, match=r"Did you mean 'rotmnist_p4cnn_co'"):
        from_preset("rotmnist_p4cnn_cO")


def test_no_graph(tmp_path):
    with pytest.raises(ValueError, match="functional or Sequential"):
        save_to_preset(keras.layers.Dense(2), tmp_path / "net")
    assert not (tmp_path / "net").exists()


class Hub(types.ModuleType):
    """`huggingface_hub` without a network: repositories are folders."""

    def __init__(self, repositories, cache):
        super().__init__("huggingface_hub")
        self.repositories = repositories
        self.cache = cache
        self.online = True
        self.asked = []

    def snapshot_download(
        self, repo_id, *, revision=None, allow_patterns=None, **_
    ):
        self.asked.append((repo_id, revision, tuple(allow_patterns)))
        kept = self.cache / repo_id.replace("/", "--")
        if not self.online:
            if kept.is_dir():
                return str(kept)
            raise ConnectionError("Cannot reach the hub.")
        if repo_id not in self.repositories:
            raise LookupError(f"404: no repository {repo_id}")
        source = self.repositories[repo_id]
        kept.mkdir(parents=True, exist_ok=True)
        for name in allow_patterns:
            shutil.copy(source / name, kept / name)
        return str(kept)


@pytest.fixture
def hub(folder, tmp_path, monkeypatch):
    hub = Hub({"someone/net": folder}, tmp_path / "cache")
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    return hub


def test_hub(hub, folder):
    x = images()
    found = as_array(from_preset("hf://someone/net")(x))
    np.testing.assert_array_equal(found, as_array(from_preset(folder)(x)))
    ((name, revision, files),) = hub.asked
    assert (name, revision) == ("someone/net", None)
    assert sorted(files) == FILES


def test_revision(hub):
    from_preset("hf://someone/net@v1.2")
    assert hub.asked[0][:2] == ("someone/net", "v1.2")


def test_hub_from_the_cache(hub):
    from_preset("hf://someone/net")
    hub.online = False
    from_preset("hf://someone/net")


@pytest.mark.parametrize("online", [True, False])
def test_hub_without_the_files(hub, online):
    hub.online = online
    with pytest.raises(OSError, match=r"hf://other/net.*Without a connection"):
        from_preset("hf://other/net")


@pytest.mark.parametrize("address", ["hf://net", "hf:///net", "hf://a/b/c"])
def test_bad_address(hub, address):
    with pytest.raises(ValueError, match=r"hf://user/name.*Received"):
        from_preset(address)


def test_hub_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"pip install keras-equiattn\[hub\]"):
        from_preset("hf://someone/net")


def test_damaged_file_of_the_hub(hub, folder):
    (folder / "model.weights.h5").write_bytes(b"other weights")
    with pytest.raises(ValueError, match="damaged"):
        from_preset("hf://someone/net")


def squares(y, z):
    return keras.ops.mean((y - z) ** 2, -1)


def test_compiled_networks_are_saved_without_what_trains_them(tmp_path):
    inputs = keras.Input((6, 6, 1))
    x = keras.layers.Conv2D(2, 3)(inputs)
    model = keras.Model(inputs, keras.layers.GlobalAveragePooling2D()(x))
    model.compile("adam", loss=squares)
    images = np.random.default_rng(0).normal(size=(4, 6, 6, 1))
    model.fit(images, np.zeros((4, 2)), verbose=0)
    presets.save_to_preset(model, tmp_path / "net")
    loaded = presets.from_preset(tmp_path / "net")
    assert not loaded.compiled
    for found, expected in zip(
        loaded.get_weights(), model.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


def test_folders_do_not_hide_shipped_presets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = presets.list_presets()[0]
    (tmp_path / name).mkdir()
    assert presets.from_preset(name, load_weights=False).built
    with pytest.raises(ValueError, match="must hold the file"):
        presets.from_preset(f"./{name}")


@pytest.mark.parametrize(
    ("preset", "message"),
    [
        ("", "Unknown preset ''. The presets are: rotmnist_p16cnn"),
        (None, "`preset` must be a name.*None"),
        (3, "`preset` must be a name.*3"),
    ],
)
def test_presets_that_cannot_be(preset, message):
    with pytest.raises(ValueError, match=message):
        presets.from_preset(preset)
