"""Functions that Inductor compiles, against the same ones uncompiled."""

import keras
import numpy as np
import pytest
from families import build
from families import FAMILIES
from families import images
from layer_contract import as_array

from keras_equiattn.ops.backend import inductor

pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="Inductor is PyTorch's."
)


@pytest.fixture(autouse=True)
def with_inductor(monkeypatch):
    """All other tests have it turned off."""
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "0")
    if not inductor._has_compiler("cpu"):
        pytest.skip("There is no C++ compiler.")


def count_compilations(monkeypatch):
    """A list that gets an entry whenever something is compiled."""
    compiled, compile = [], inductor._compile

    def counting(*arguments):
        compiled.append(arguments)
        return compile(*arguments)

    monkeypatch.setattr(inductor, "_compile", counting)
    return compiled


def test_tensors_that_lie_elsewhere(monkeypatch):
    """Transposed tensors, those without memory, and missing ones."""
    import torch

    compilations = count_compilations(monkeypatch)

    def function(x, pair):
        y, z = pair
        return (x * y if z is None else x * y + z), (x, x)

    compiled = inductor.Compiled(function)
    x, y = torch.rand(2, 4, 4)
    calls = [(x, (y, None))] * (inductor.PATIENCE + 2)
    calls += [(x.T, (y, None)), (x, (y, y)), (x.double(), (y.double(), None))]
    for arguments in calls:
        found, (first, second) = compiled(*arguments)
        expected = function(*arguments)[0]
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        assert first is second
    assert len(compilations) == 4 == inductor.LAYOUTS
    found, _ = compiled(x[::2], (y[::2], None))
    np.testing.assert_allclose(found, x[::2] * y[::2])
    assert len(compilations) == inductor.LAYOUTS
    shape, _ = compiled(*(t.to("meta") for t in (x,)), (y.to("meta"), None))
    assert shape.is_meta


def test_compilers_that_fail(monkeypatch, caplog):
    def broken(*_):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(inductor, "_compile", broken)
    compiled = inductor.Compiled(lambda x: 2 * x)
    x = keras.ops.ones(3)
    for _ in range(inductor.PATIENCE + 3):
        np.testing.assert_array_equal(as_array(compiled(x)), 2)
    assert caplog.text.count("no such instruction") == 1


@pytest.mark.slow
@pytest.mark.every_backend
@pytest.mark.parametrize("name", FAMILIES)
def test_training_steps(name, monkeypatch):
    """The first calls run uncompiled, the last ones compiled, if any does."""
    import torch

    compilations = count_compilations(monkeypatch)
    layer = build(name)
    x = torch.tensor(images(name, 5), requires_grad=True)
    steps = []
    for _ in range(inductor.PATIENCE + 2):
        y = layer(x)
        tensors = (x, *(v.value for v in layer.trainable_variables))
        steps.append((y, *torch.autograd.grad((y**2).sum(), tensors)))
        if len(steps) == 1:
            assert not compilations
    for first, last in zip(steps[0], steps[-1], strict=True):
        np.testing.assert_allclose(
            as_array(last), as_array(first), rtol=1e-4, atol=1e-5
        )
    # What looks at windows is compiled.
    assert bool(compilations) or name not in ("sasa", "asc", "acmix")
