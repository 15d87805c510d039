"""What the tests of all layers run on."""

import importlib
from pathlib import Path

from layer_contract import LayerContract


def all_cases():
    """Every `LayerCase` of the tests in tests/layers, by a name of its own."""
    folder = Path(__file__).parent / "layers"
    modules = {
        path.stem: importlib.import_module(path.stem)
        for path in sorted(folder.glob("test_*.py"))
    }
    encoding = modules["test_position_encoding"].CASE
    found = {"RelativePositionEncoding": encoding}
    for contract in LayerContract.__subclasses__():
        for n, case in enumerate(contract.cases):
            found[f"{contract.__name__}-{n}"] = case
    return found


def first_cases():
    """The first case of each layer, by the name of the layer."""
    first = {}
    for case in all_cases().values():
        first.setdefault(case.layer.__name__, case)
    return first
