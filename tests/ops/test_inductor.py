"""Functions that Inductor compiles, against the same ones uncompiled."""

import threading
import time

import keras
import numpy as np
import pytest
from families import build
from families import FAMILIES
from families import images
from layer_contract import as_array

from keras_equiattn import layers
from keras_equiattn.ops.backend import inductor
from keras_equiattn.ops.backend import torch_function
from keras_equiattn.ops.group import block_linear
from keras_equiattn.ops.windows import dispatch
from keras_equiattn.ops.windows import gradients

pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="Inductor is PyTorch's."
)


@pytest.fixture(autouse=True)
def with_inductor(monkeypatch):
    """All other tests have it turned off."""
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "0")
    if not inductor.can_compile("cpu"):
        pytest.skip("There is no C++ compiler.")


# Families that PyTorch's kernels compute, in one product of matrices or more.
UNCOMPILED = "squeeze", "input", "acmix_window", "acmix_reduction"


def count_compilations(monkeypatch):
    """A list that gets an entry whenever something is compiled."""
    compiled, compile = [], inductor._compile

    def counting(*arguments):
        compiled.append(arguments)
        return compile(*arguments)

    monkeypatch.setattr(inductor, "_compile", counting)
    return compiled


@pytest.mark.slow
@pytest.mark.every_backend
def test_tensors_that_lie_elsewhere(monkeypatch):
    """Transposed tensors, those without memory, and missing ones."""
    import torch

    compilations = count_compilations(monkeypatch)

    def function(x, pair):
        y, z = pair
        return (x * y if z is None else x * y + z), (x, x)

    compiled = inductor.Compiled(function)
    x, y = torch.rand(2, 4, 4)
    calls = [(x, (y, None))] * 2
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
    for _ in range(3):
        np.testing.assert_array_equal(as_array(compiled(x)), 2)
    assert caplog.text.count("no such instruction") == 1


def test_one_thread_compiles_at_a_time(monkeypatch):
    """Two threads call two functions each, all of them for the first time."""
    running, most, compiled = [], [], []
    together = threading.Barrier(2)

    def compile(function, arguments, _):
        running.append(function)
        most.append(len(running))
        time.sleep(0.05)
        running.remove(function)
        compiled.append(function)
        return lambda tensors: function(*tensors)

    monkeypatch.setattr(inductor, "_compile", compile)
    functions = [
        inductor.Compiled(lambda x, n=n: (n + 2) * x) for n in range(2)
    ]
    found = []

    def call():
        for n, function in enumerate(functions):
            together.wait()
            found.append((n, float(function(keras.ops.ones(())))))

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [(0, 2.0), (0, 2.0), (1, 3.0), (1, 3.0)]
    assert max(most) == 1
    assert len(compiled) == 2


@pytest.fixture
def compilations(monkeypatch):
    """Names of functions that a stand-in for a compiler was called with."""
    names = []

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

    monkeypatch.setattr(inductor, "_compile", compile)
    for part in (gradients._attention, gradients._attention_gradients):
        part.programs.cache_clear()
    gradients.differentiable.cache_clear()
    yield names
    for part in (gradients._attention, gradients._attention_gradients):
        part.programs.cache_clear()


def four_equal_layers():
    """A network whose layers all have the same shapes, and its input."""
    model = keras.Sequential(
        [
            keras.Input((4, 4, 2, 4)),
            *(
                layers.StandAloneSelfAttention2D(
                    4, kernel_size=3, num_heads=2, group="p2"
                )
                for _ in range(4)
            ),
        ]
    )
    return model, keras.ops.ones((2, 4, 4, 2, 4))


def test_calls_by_hand_compile_nothing(compilations):
    import torch

    model, x = four_equal_layers()
    calls = inductor.CALLS // 4
    with torch.no_grad():
        for _ in range(calls):
            model(x)
        assert compilations == []
        model(x)
    assert compilations == ["_attention"]


@pytest.mark.parametrize("rematerialized", [False, True])
def test_training_compiles_after_some_steps(compilations, rematerialized):
    """Steps count, and not how many layers there are in each."""
    with keras.RematScope(mode="full" if rematerialized else None):
        model, x = four_equal_layers()

    def step():
        loss = keras.ops.sum(model(x) ** 2)
        loss.backward()

    for _ in range(inductor.PATIENCE):
        step()
    assert compilations == []
    step()
    assert compilations == ["_attention", "_attention_gradients"]


def test_threads_do_not_share_what_a_call_returns(monkeypatch):
    """A thread computes another gradient in the midst of this one's call."""
    import torch

    def forward(x):
        y = 2 * x
        # The other call returns two tensors, and keeps one of them.
        return (y, ()) if len(x) == 1 else ((y, 3 * x), (y,))

    def backward(tensors, kept, d):
        return (2 * d if len(tensors[0]) == 1 else 2 * d[0] + 3 * d[1],)

    function = torch_function.torch_custom_vjp(forward, backward, "")
    without_repeats = torch_function._without_repeats
    of_thread = []

    def other():
        x = torch.ones(2, requires_grad=True)
        y, z = function(x)
        of_thread.extend(torch.autograd.grad((y + z).sum(), x))

    def interrupted(result, kept):
        found = without_repeats(result, kept)
        if isinstance(result, torch.Tensor):
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
        return found

    monkeypatch.setattr(torch_function, "_without_repeats", interrupted)
    x = torch.ones(1, requires_grad=True)
    y = function(x)
    assert torch.autograd.grad(y.sum(), x)[0].item() == 2
    assert of_thread[0].tolist() == [5, 5]


def training_steps(name, count, monkeypatch):
    """Results and gradients of steps before and after compilation, as arrays.

    Also returns the names of the compiled functions.
    """
    import torch

    compilations = count_compilations(monkeypatch)
    layer = build(name)
    # Programs are kept for each shape, so every test has its own count; two
    # families have these programs in common.
    for part in (block_linear.to_sums, block_linear.from_sums):
        part.programs.cache_clear()
    x = torch.tensor(images(name, count), requires_grad=True)
    steps = []
    for _ in range(inductor.PATIENCE + 1):
        y = layer(x)
        tensors = (x, *(v.value for v in layer.trainable_variables))
        steps.append((y, *torch.autograd.grad((y.float() ** 2).sum(), tensors)))
        if len(steps) == 1:
            assert not compilations
    first, last = ([as_array(x) for x in steps[n]] for n in (0, -1))
    return first, last, {one[0].func.__name__ for one in compilations}


@pytest.mark.slow
@pytest.mark.every_backend
@pytest.mark.parametrize(
    ("name", "constants", "count"),
    [
        *((name, {}, 5) for name in FAMILIES),
        ("asc", {}, 1),
        ("asc", {"LEAST_COLUMNS": 1, "NARROW": 1}, 4),
        ("sasa", {"TILED_CHANNELS": 1}, 4),
        ("acmix", {"TILED_CHANNELS": 1}, 4),
    ],
)
def test_training_steps(name, constants, count, monkeypatch):
    """The first calls run uncompiled; in most families the last ones do not.

    All images are narrow: windows see five side by side, or one in 16 columns.
    With other constants they see each as it is, or tiles of it.
    """
    for constant, value in constants.items():
        monkeypatch.setattr(dispatch, constant, value)
    first, last, compiled = training_steps(name, count, monkeypatch)
    for before, after in zip(first, last, strict=True):
        np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-5)
    assert bool(compiled) == (name not in UNCOMPILED)


@pytest.mark.slow
@pytest.mark.every_backend
@pytest.mark.parametrize(
    "name", ["sasa", "asc", "acmix", "acmix_patchwise", "gsa", "full"]
)
def test_training_steps_in_half_precision(name, monkeypatch):
    """Compiled and uncompiled functions round at different places."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        first, last, compiled = training_steps(name, 6, monkeypatch)
    finally:
        keras.config.set_dtype_policy(before)
    assert compiled
    first, last = (
        np.concatenate([x.ravel() for x in s]) for s in (first, last)
    )
    error = np.linalg.norm(last - first) / np.linalg.norm(first)
    assert 0 < error < 0.01
