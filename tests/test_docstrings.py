"""Examples in docstrings run and show what they say."""

import doctest
import importlib
import pkgutil

import pytest

import keras_equiattn
from keras_equiattn import applications

# An editable install keeps applications in a folder of its own.
MODULES = sorted(
    {
        module.name
        for package in (keras_equiattn, applications)
        for module in pkgutil.walk_packages(
            package.__path__, f"{package.__name__}."
        )
    }
)


def examples(module):
    finder = doctest.DocTestFinder(exclude_empty=True)
    return [test for test in finder.find(module) if test.examples]


@pytest.mark.torch_first
@pytest.mark.parametrize("name", MODULES)
def test_examples(name, tmp_path, monkeypatch):
    module = importlib.import_module(name)
    monkeypatch.chdir(tmp_path)  # some write files
    runner = doctest.DocTestRunner()
    for test in examples(module):
        test.globs |= {**vars(keras_equiattn), **vars(keras_equiattn.layers)}
        runner.run(test)
    assert runner.failures == 0


@pytest.mark.once
def test_every_layer_has_an_example():
    for name in keras_equiattn.layers.__all__:
        layer = getattr(keras_equiattn.layers, name)
        assert ">>> " in layer.__doc__, name
        for part in ("Symmetry:", "Input shape:", "Output shape:", "Referen"):
            assert part in layer.__doc__, f"{name}: {part}"
