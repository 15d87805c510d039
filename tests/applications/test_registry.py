"""Networks by name, and the former places of modules."""

import runpy
import sys

import keras
import pytest

from keras_equiattn import applications
from keras_equiattn.applications import registry
from keras_equiattn.applications.data import datasets
from keras_equiattn.applications.training import recipes

pytestmark = pytest.mark.once


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        (
            "rotmnist_p4cnn_big*",
            [f"rotmnist_p4cnn_big{size}" for size in (11, 15, 19)],
        ),
        ("acmix_pvt_tin?", ["acmix_pvt_tiny"]),
        ("rotmnist_p[48]cnn", ["rotmnist_p4cnn", "rotmnist_p8cnn"]),
        # A pattern must match the whole name.
        ("rotmnist", []),
    ],
)
def test_names_that_match_a_pattern(pattern, names):
    assert applications.list_models(pattern) == names


def test_registered_arguments_give_way_to_those_of_the_call(monkeypatch):
    monkeypatch.setattr(registry, "_MODELS", {})

    @registry.register({"small": {"units": 2}, "large": {"units": 5}})
    def net(units, name):
        inputs = keras.Input((3,))
        outputs = keras.layers.Dense(units)(inputs)
        return keras.Model(inputs, outputs, name=name)

    assert registry.list_models() == ["large", "small"]
    assert registry.get_model("large").output_shape == (None, 5)
    model = registry.get_model("small", units=4)
    assert (model.name, model.output_shape) == ("small", (None, 4))
    with pytest.raises(ValueError, match="'large' is registered already"):
        registry.register({"new": {}, "large": {}})(net)
    # Nothing of what was refused is registered.
    assert registry.list_models() == ["large", "small"]


def test_former_places_of_modules():
    from keras_equiattn.applications import datasets as former_datasets
    from keras_equiattn.applications import recipes as former_recipes

    assert former_datasets is datasets
    assert former_recipes is recipes


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_former_command_line_of_the_datasets(monkeypatch, capsys):
    """The same as the new one, with the same exit status."""
    found = []
    for module in ("datasets", "data"):
        name = f"keras_equiattn.applications.{module}"
        monkeypatch.setattr(sys, "argv", [module])
        monkeypatch.delitem(sys.modules, name, raising=False)
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(name, run_name="__main__")
        found.append((ended.value.code, capsys.readouterr()))
    assert found[0] == found[1]
    assert "prepare" in found[0][1].out + found[0][1].err
