"""Loops over groups of slices, and pieces of tensors, against plain ones."""

import ast
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
from families import FAMILIES
from families import images
from keras import ops

from keras_equiattn import layers
from keras_equiattn.ops import backend
from keras_equiattn.ops import Window
from keras_equiattn.ops import window_scores
from keras_equiattn.testing import relative_difference


@pytest.mark.parametrize(
    ("length", "size", "groups"),
    [
        (6, 3, {3}),
        (5, 2, {2, 1}),
        (11, 2, {2, 1}),
        (7, 3, {3, 1}),
        (9, 8, {5, 4}),  # not 8 and 1
        (4, 9, {4}),
    ],
)
def test_scan_groups(length, size, groups):
    """Every slice once, in order, in groups that are not larger than asked."""
    rng = np.random.default_rng(length)
    x, y = rng.normal(size=(2, length, 3)).astype("float32")
    seen = set()

    def step(carry, pieces):
        x, y = pieces
        seen.add(x.shape[0])
        outputs = []
        for i in range(x.shape[0]):
            carry = carry / 2 + x[i] * y[i]
            outputs.append(carry)
        return carry, (ops.stack(outputs), 2 * x)

    tensors = tuple(map(ops.convert_to_tensor, (x, y)))
    carry, outputs = backend.scan_groups(
        step, tensors[0][0], tensors, size, tensors
    )
    expected = [x[0]]
    for product in x * y:
        expected.append(expected[-1] / 2 + product)
    assert seen == groups
    for found, wanted in (
        (carry, expected[-1]),
        (outputs[0], np.array(expected[1:])),
        (outputs[1], 2 * x),
    ):
        assert relative_difference(ops.convert_to_numpy(found), wanted) < 1e-6


def test_constants_are_copied_once():
    table, like = np.arange(6).reshape(2, 3), ops.ones(1)
    first, second = (
        backend.constant(table.copy(), like, like.dtype) for _ in range(2)
    )
    np.testing.assert_array_equal(ops.convert_to_numpy(first), table)
    assert keras.backend.standardize_dtype(first.dtype) == "float32"
    assert (first is second) == (keras.backend.backend() == "torch")
    others = backend.constant(table.T, like), backend.constant(table + 1, like)
    for other, expected in zip(others, (table.T, table + 1), strict=True):
        np.testing.assert_array_equal(ops.convert_to_numpy(other), expected)


def drawn(shape, rate=0.1, seed=(3, 5), place=()):
    halves = backend.seed_as_floats(ops.convert_to_tensor(seed, "int32"))
    found = backend.dropout_factors(
        shape, rate, backend.prepared_seed(halves), place, ops.zeros(())
    )
    return ops.convert_to_numpy(found)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 4), (3, 5, 7)])
def test_dropout_of_any_shape(shape):
    found = drawn(shape, 0.5)
    assert found.shape == shape
    assert set(found.ravel()) <= {0, 2}
    np.testing.assert_array_equal(drawn(shape, 0.5), found)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.999999])
def test_rate_of_dropout(rate):
    found = drawn((1000, 400), rate)
    expected = min(rate, 1 - 2**-16)
    deviation = (expected * (1 - expected) / found.size) ** 0.5
    assert abs((found == 0).mean() - expected) <= 5 * deviation
    kept = found[found > 0]
    np.testing.assert_allclose(kept, 1 / (1 - expected), rtol=2e-5)


def test_dropout_of_two_seeds_and_two_places_has_nothing_in_common():
    first = drawn((600, 600), 0.5)
    others = [drawn((600, 600), 0.5, seed) for seed in ((4, 5), (3, 6))]
    others += [drawn((600, 600), 0.5, place=place) for place in ((0,), (1,))]
    others += [drawn((600, 600), 0.5, (2**31 - 1, 5)), others[-1][::-1]]
    # The two halves of a word, neighbours, and one row above the other.
    others += [np.roll(first, by) for by in (300 * 600, 1, 600)]
    for other in others:
        # Of 360,000 pairs: six standard deviations.
        assert abs(np.corrcoef(first.ravel(), other.ravel())[0, 1]) < 0.01


def test_seeds_of_a_generator():
    """They differ in each call, and repeat with the same first seed."""
    generators = [keras.random.SeedGenerator(2**31 - 1) for _ in range(2)]
    first, second = (
        [ops.convert_to_numpy(backend.next_seed(g)).tolist() for _ in range(3)]
        for g in generators
    )
    assert first == second
    assert len(set(map(tuple, first))) == 3
    assert all(0 <= n < 2**31 for seed in first for n in seed)


@pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="others trace what they run"
)
def test_dropout_waits_for_no_device(monkeypatch):
    """Neither pass turns a tensor into a number of Python."""
    import torch

    layer = layers.GroupSelfAttention2D(2, 3, 1, 3, "p2", attention_dropout=0.5)
    layer.build((None, *FAMILIES["gsa"][1]))
    x = torch.tensor(images("gsa", 2), requires_grad=True)

    def wait(*_):
        raise AssertionError("This would wait for a GPU.")

    names = "item", "tolist", "cpu", "numpy", "__array__"
    for name in (*names, "__int__", "__index__", "__float__", "__bool__"):
        monkeypatch.setattr(torch.Tensor, name, wait)
    (layer(x, training=True) ** 2).sum().backward()
    monkeypatch.undo()
    assert float(abs(x.grad).sum()) > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradient_of_a_softmax(dtype):
    """Also where a private operator of PyTorch computes it."""
    rng = np.random.default_rng(0)
    d, scores = rng.normal(size=(2, 6, 3, 4)).astype("float32")
    weights = np.exp(scores) / np.exp(scores).sum(0)
    d, weights = (ops.convert_to_tensor(x, dtype) for x in (d, weights))
    exact, p = (
        ops.convert_to_numpy(ops.cast(x, "float32")) for x in (d, weights)
    )
    mean = (exact * p).sum(0)
    found = backend.softmax_gradient(
        d, weights, lambda: ops.convert_to_tensor(mean)
    )
    assert keras.backend.standardize_dtype(found.dtype) == dtype
    found = ops.convert_to_numpy(ops.cast(found, "float32"))
    limit = 1e-6 if dtype == "float32" else 2e-2
    assert relative_difference(found, p * (exact - mean)) < limit


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_products_of_half_precision_have_sums_in_float32(dtype):
    """A sum that float16 cannot hold."""
    x = ops.full((2, 3, 5000), 8.0, dtype)
    found = backend.einsum_in_full_precision("abp,acp->abc", x, x)
    assert keras.backend.standardize_dtype(found.dtype) == "float32"
    np.testing.assert_allclose(
        ops.convert_to_numpy(found), 64 * 5000, rtol=2**-8
    )


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [("float16", 2**-11), ("bfloat16", 2**-8), ("float32", 1e-6)],
)
def test_exponentials_are_rounded_once(dtype, limit):
    x = np.linspace(-8, 8, 64, dtype="float32")[:, None]
    top = np.float32([[8.03], [3.77]]).T
    x, top = (ops.convert_to_tensor(a, dtype) for a in (x + 0 * top, top))
    exact_x, exact_top = (
        ops.convert_to_numpy(ops.cast(a, "float32")).astype("float64")
        for a in (x, top)
    )
    exact = np.exp(exact_x - exact_top)
    found = backend.exp_below(x, top)
    assert keras.backend.standardize_dtype(found.dtype) == dtype
    found = ops.convert_to_numpy(ops.cast(found, "float32"))
    # The smallest numbers of float16 have few digits.
    error = abs(found - exact) / np.maximum(exact, 1e-4)
    assert error.max() < limit


@pytest.mark.parametrize("size", [1, 2, 5, 6])
def test_transposing_by_parts(size):
    """Parts have equal numbers of channels: one each, if that is a prime."""
    x = np.random.default_rng(0).normal(size=(2, 3, 4, size)).astype("float32")

    def found(x):
        return backend.by_parts(
            lambda x: ops.moveaxis(x, -1, 1), x, axis=3, joined=1
        )

    if keras.backend.backend() == "jax":
        import jax

        found = jax.jit(found)
    moved = ops.convert_to_numpy(found(ops.convert_to_tensor(x)))
    np.testing.assert_array_equal(moved, np.moveaxis(x, -1, 1))


@pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="Autograd of PyTorch."
)
def test_saved_tensors_are_those_of_autograd():
    """So it detects changes in place, and hooks may offload them."""
    import torch

    rng = np.random.default_rng(0)
    query, keys = (
        torch.tensor(rng.normal(size=(1, 4, 4, 1, 4)), requires_grad=True)
        for _ in range(2)
    )

    def gradients():
        y = window_scores(query, keys, Window((3, 3)), num_heads=2)
        return torch.autograd.grad((y * y).sum(), (query, keys))

    expected, packed = gradients(), []

    def pack(x):
        packed.append(tuple(x.shape))
        return x.numpy(force=True).copy()

    with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy):
        found = gradients()
    assert packed.count(tuple(query.shape)) >= 2
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x.numpy(), y.numpy())

    y = window_scores(query, keys, Window((3, 3)), num_heads=2)
    with torch.no_grad():
        keys.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="Transforms of PyTorch."
)
def test_constants_of_a_transform_are_not_kept():
    """They belong to its level, which the next call does not have."""
    import torch

    layer = layers.GroupConv2D(2, 3, group="p4", padding="same")
    x = torch.ones(1, 4, 4, 4, 2)
    layer.build(x.shape)

    def loss(x):
        return (layer(x) ** 3).sum()

    def slope(x):
        return torch.func.grad(loss)(x).sum()

    first, second = (torch.func.grad(slope)(x).detach() for _ in range(2))
    assert first.abs().max() > 0
    np.testing.assert_array_equal(first, second)
    assert loss(x).isfinite()


@pytest.mark.once
def test_only_dispatch_asks_for_the_target():
    """What runs where is decided in one place for each system."""
    folder = Path(backend.__file__).parents[1]

    def asking(what):
        paths = (p for p in folder.rglob("*.py") if what in p.read_text())
        relative = [path.relative_to(folder) for path in paths]
        assert any(path.parts[0] == "backend" for path in relative)
        return {p.name for p in relative if p.parts[0] != "backend"}

    assert asking("find_target(") == {"dispatch.py"}
    # PyTorch's sum and softmax of half precision need no copy.
    assert asking("backend.backend()") == {"dispatch.py", "numerics.py"}


@pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="others copy every table"
)
def test_read_only_tables_are_copied():
    """PyTorch warns of tensors that share the memory of such a table."""
    import torch

    table = np.arange(3.0)
    table.flags.writeable = False

    def function(x):
        return (backend.constant(table, x, x.dtype) * x).sum()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = torch.func.grad(function)(torch.ones(3))
    np.testing.assert_array_equal(found.numpy(), table)


def test_caches_are_bounded():
    """Every new set of shapes adds an entry: without bounds they would grow.

    Groups are a few, so what is kept for each of them needs no bound.
    """
    folder = Path(backend.__file__).parents[2]
    bounds = []
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            for decorator in map(ast.unparse, node.decorator_list):
                if decorator == "functools.cache":
                    assert node.args.args[0].arg in ("group", "name"), node.name
                elif "lru_cache" in decorator:
                    bounds.append(decorator.partition("=")[2] or "128)")
    assert len(bounds) > 10
    assert max(int(bound[:-1]) for bound in bounds) <= 1024


SIZES = pytest.mark.parametrize("size", [1, 16, 17, 19, 23, 29, 31, 40, 101])


@SIZES
def test_reductions_of_any_length(size):
    """Sums of several tensors, and a softmax."""
    rng = np.random.default_rng(size)
    x, y = rng.normal(size=(2, 3, size, 5)).astype("float32")

    def found(x, y):
        softmax = backend.softmax_in_one_reduction(x, 1)
        return *backend.sums_together((x, x * y), 1), softmax

    if keras.backend.backend() == "jax":
        import jax

        found = jax.jit(found)
    weights = np.exp(x) / np.exp(x).sum(1, keepdims=True)
    tensors = map(ops.convert_to_tensor, (x, y))
    for actual, expected in zip(
        found(*tensors), (x.sum(1), (x * y).sum(1), weights), strict=True
    ):
        assert (
            relative_difference(ops.convert_to_numpy(actual), expected) < 1e-5
        )


@SIZES
@pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="It watches calls of jax.lax."
)
def test_xla_gets_no_long_reductions(size, monkeypatch):
    """XLA does not vectorise those on a CPU, whatever divides the length."""
    import jax

    lengths = []

    def reduce(operands, starts, combine, axes):
        lengths.extend(operands[0].shape[axis] for axis in axes)
        return reduce_before(operands, starts, combine, axes)

    reduce_before = jax.lax.reduce
    monkeypatch.setattr(jax.lax, "reduce", reduce)
    x = np.ones((3, size, 5), "float32")
    backend.sums_together((x, 2 * x), 1)
    assert lengths
    assert max(lengths) <= 16


@pytest.mark.parametrize("axis", [0, 1])
def test_equal_numbers_share_the_gradient_of_a_maximum(axis):
    x = np.array([[1, 3, 3, -1, 3], [0, 0, 0, 0, 0], [-2, -1, -3, -3, -1]])
    x = np.repeat(x.astype("float32")[..., None], 3, axis=2)
    x = x if axis == 1 else x.swapaxes(0, 1)
    share = np.array([0, 1, 1, 0, 1]) / 3, np.ones(5) / 5, [0, 0.5, 0, 0, 0.5]
    weights = np.arange(1, 4, dtype="float32")
    expected = np.array(share)[..., None] * weights
    expected = expected if axis == 1 else expected.swapaxes(0, 1)
    cotangent = np.broadcast_to(weights, x.max(axis).shape)
    found, (gradient,) = backend.vjp(
        lambda x: backend.largest(x, axis),
        (ops.convert_to_tensor(x),),
        ops.convert_to_tensor(cotangent),
    )
    np.testing.assert_allclose(found, x.max(axis))
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)


@pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="XLA compiles it for JAX."
)
def test_gradient_of_a_maximum_of_what_is_computed_twice():
    """The gradient was infinite here: nothing was equal to the maximum.

    XLA rounds the batch normalisation in two ways if LLVM does not optimise.
    """
    import jax

    keras.utils.set_random_seed(0)
    network = keras.Sequential(
        [
            keras.Input((7, 7, 1)),
            layers.LiftingConv2D(4, 3, group="p4"),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            layers.GroupPooling(),
        ]
    )
    rng = np.random.default_rng(0)
    for variable in network.trainable_variables:
        variable.assign(variable + 0.1 * rng.normal(size=variable.shape))
    trained = [v.value for v in network.trainable_variables]
    others = [v.value for v in network.non_trainable_variables]

    def loss(trained, x):
        y, _ = network.stateless_call(trained, others, x, training=True)
        return ops.mean(ops.square(y - 1))

    gradient = jax.jit(jax.grad(loss))
    for _ in range(20):
        x = rng.normal(size=(8, 7, 7, 1)).astype("float32")
        for found in gradient(trained, x):
            assert np.isfinite(found).all()
