"""Group self-attention compiled by PyTorch, and exported by JAX and PyTorch."""

import keras
import pytest
from keras import ops
from layer_contract import as_array
from pairs_helpers import arguments
from pairs_helpers import BACKEND
from pairs_helpers import check
from pairs_helpers import DTYPE
from pairs_helpers import RTOL
from sweeps import swept

from keras_equiattn.ops.pairs import blocks as pair_blocks
from keras_equiattn.ops.pairs import fused
from keras_equiattn.ops.pairs.api import group_self_attention
from keras_equiattn.testing import relative_difference

pytestmark = pytest.mark.torch_first


BODIES = {"add_exponentials", "add_values", "add_means", "add_gradients"}
ONLY_TORCH = pytest.mark.skipif(
    BACKEND != "torch", reason="Bodies of loops are compiled under PyTorch."
)


def programs(name):
    """The cache of what a body was compiled to."""
    return getattr(fused, name).programs


@pytest.fixture
def compiled(monkeypatch):
    """Which bodies are compiled from now on."""
    from keras_equiattn.ops.backend import inductor

    compile, names = inductor._compile, []

    def recording(function, *arguments):
        names.append(function.func.__name__)
        return compile(function, *arguments)

    monkeypatch.setattr(inductor, "_compile", recording)
    # Fast tests compile nothing.
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    for function in (pair_blocks._attention, *map(programs, sorted(BODIES))):
        function.cache_clear()
    yield names
    for function in (pair_blocks._attention, *map(programs, sorted(BODIES))):
        function.cache_clear()


@ONLY_TORCH
@pytest.mark.slow
@pytest.mark.every_backend
@pytest.mark.parametrize("window", [3, None])
def test_compiled_bodies(window, compiled, monkeypatch, limited):
    from keras_equiattn.ops.backend import inductor

    monkeypatch.setattr(inductor, "PATIENCE", 0)
    # Blocks of one row, so bodies are run in several places.
    limited(50)
    check(arguments(window, (3, 4), 2, 3), local=window is not None)
    # Each of them once, for all lines and blocks.
    assert sorted(compiled) == sorted(BODIES)


@ONLY_TORCH
def test_first_calls_compile_nothing(compiled, monkeypatch):
    from keras_equiattn.ops.backend import inductor

    monkeypatch.setattr(inductor, "can_compile", lambda device: True)
    monkeypatch.setattr(inductor, "_compile", _not_compiled(compiled))
    arrays = arguments(3, (3, 4), 2, 3)
    for _ in range(inductor.PATIENCE):
        check(arrays, local=True)
        assert not compiled
    check(arrays, local=True)
    assert sorted(compiled) == sorted(BODIES)


def _not_compiled(names):
    """In place of a compiler: what it gives runs the function as it is."""

    def compile(function, arguments, _):
        names.append(function.func.__name__)

        def run(tensors):
            left = iter(tensors)
            return function(
                *keras.tree.map_structure(
                    lambda x: None if x is None else next(left), arguments
                )
            )

        return run

    return compile


@pytest.mark.skipif(BACKEND != "jax", reason="the format is JAX's")
@pytest.mark.parametrize("local", [True, False])
def test_functions_of_any_batch_can_be_exported_by_jax(local):
    from jax import export
    from jax import jit
    from jax import ShapeDtypeStruct

    arrays = arguments(3 if local else None, (3, 2), 2, 2)
    arrays = [a.astype("float32") for a in arrays]
    scope = export.SymbolicScope()

    def attend(*arrays):
        return group_self_attention(*arrays, local=local)

    shapes = [
        ShapeDtypeStruct(
            export.symbolic_shape(
                ", ".join(map(str, ("b", *a.shape[1:]))), scope=scope
            )
            if index < 3
            else a.shape,
            "float32",
        )
        for index, a in enumerate(arrays)
    ]
    kept = export.deserialize(export.export(jit(attend))(*shapes).serialize())
    found = as_array(kept.call(*arrays))
    assert relative_difference(found, as_array(attend(*arrays))) < RTOL


@pytest.mark.skipif(BACKEND != "torch", reason="the format is PyTorch's")
@pytest.mark.parametrize("local", swept((True, False), True))
def test_programs_can_be_exported_by_torch(local):
    import torch

    class Attend(torch.nn.Module):
        def forward(self, *arrays):
            return group_self_attention(*arrays, local=local)

    arrays = arguments(3 if local else None, (3, 2), 2, 2)
    tensors = tuple(ops.convert_to_tensor(a, DTYPE) for a in arrays)
    program = torch.export.export(Attend(), tensors, strict=False).module()
    found = as_array(program(*tensors))
    assert relative_difference(found, as_array(Attend()(*tensors))) < RTOL
