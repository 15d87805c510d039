"""Window primitives against the neighbours written out."""

import inspect
import itertools
import re

import keras
import numpy as np
import oracles
import pytest
from keras import ops
from layer_contract import as_array

from keras_equiattn.ops import backend
from keras_equiattn.ops.geometry import Window
from keras_equiattn.ops.windows import dispatch
from keras_equiattn.ops.windows import gradients
from keras_equiattn.ops.windows import planes as window_planes
from keras_equiattn.ops.windows import products as window_products
from keras_equiattn.ops.windows import tiles as window_tiles
from keras_equiattn.ops.windows import views as window_views
from keras_equiattn.ops.windows.api import AffineMap
from keras_equiattn.ops.windows.api import UNCHANGED
from keras_equiattn.ops.windows.api import window_attention
from keras_equiattn.ops.windows.api import window_scores
from keras_equiattn.ops.windows.api import window_softmax
from keras_equiattn.ops.windows.api import window_sum
from keras_equiattn.ops.windows.form import Form
from keras_equiattn.testing import relative_difference

FLOAT64 = keras.backend.backend() != "jax"
DTYPE, RTOL = ("float64", 1e-12) if FLOAT64 else ("float32", 1e-5)
# Of derivatives found by differences.
NUMERIC_RTOL = max(RTOL, 1e-6)


def neighbours(x, window):
    """`(neighbours, batch, new_height, new_width, order, channels)`."""
    height, width = x.shape[1:3]
    modes = {"zeros": {}, "mask": {}, "reflect": {"mode": "reflect"}}
    down, along = (
        d * (n // 2)
        for d, n in zip(window.dilation_rate, window.size, strict=True)
    )
    pads = [(0, 0), (down, down), (along, along), (0, 0), (0, 0)]
    x = np.pad(x, pads, **modes[window.border])
    planes = []
    for u, v in itertools.product(*map(range, window.size)):
        i, j = u * window.dilation_rate[0], v * window.dilation_rate[1]
        plane = x[:, i : i + height, j : j + width]
        planes.append(plane[:, :: window.strides[0], :: window.strides[1]])
    return np.stack(planes)


def affine(x, window, weight, bias):
    """Neighbours as each query element sees them."""
    seen = neighbours(x, window)
    count = len(seen)
    if weight is not None:
        weight = weight.reshape(count, *weight.shape[2:])
        seen = np.einsum("nbyxrc,nprc->nbyxpc", seen, weight)
    if bias is not None:
        bias = bias.reshape(count, *bias.shape[2:])
        seen = seen + bias[:, None, None, None]
    return seen


def scores_oracle(query, keys, window, heads, weight, bias):
    products = query * affine(keys, window, weight, bias)
    *outer, channels = products.shape
    s = products.reshape(*outer, heads, channels // heads).sum(-1)
    return s.transpose(0, 1, 4, 5, 2, 3)


def sum_oracle(weights, values, window, weight, bias):
    seen = affine(values, window, weight, bias)
    a = weights.transpose(0, 1, 4, 5, 2, 3)
    a = np.repeat(a, seen.shape[-1] // a.shape[-1], axis=-1)
    return (a * seen).sum(0)


def softmax_oracle(scores, window, size):
    if window.border == "mask":
        inside = neighbours(np.ones((1, *size, 1, 1)), window)[:, 0, ..., 0, 0]
        scores = np.where(inside[:, None, None, None] > 0, scores, -np.inf)
    p = np.exp(scores - scores.max(0))
    counts = oracles.window_weights(*window.size, window.shape)
    p = counts.reshape(-1, 1, 1, 1, 1, 1) * p
    return p / p.sum(0)


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def value_and_gradients(function, arrays, cotangent):
    """The value, and gradients of `sum(value * cotangent)`."""
    tensors = [ops.convert_to_tensor(a, DTYPE) for a in arrays]
    cotangent = ops.convert_to_tensor(cotangent, DTYPE)
    backend = keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        @tf.function
        def step(*tensors):
            with tf.GradientTape() as tape:
                tape.watch(tensors)
                value = function(*tensors)
            return value, tape.gradient(value, tensors, cotangent)

        value, gradients = step(*tensors)
    elif backend == "jax":
        import jax

        @jax.jit
        def both(cotangent, *tensors):
            value, pull_back = jax.vjp(function, *tensors)
            return value, pull_back(cotangent)

        value, gradients = both(cotangent, *tensors)
    else:
        import torch

        tensors = [t.requires_grad_() for t in tensors]
        value = function(*tensors)
        gradients = torch.autograd.grad(value, tensors, cotangent)
        value = value.detach()
    return as_array(value), [as_array(g) for g in gradients]


def numeric_gradient(function, arrays, cotangent, directions):
    """Derivatives of `sum(function * cotangent)` along random directions."""
    step = 1e-4
    found = []
    for index, direction in enumerate(directions):
        ends = []
        for sign in (1, -1):
            moved = list(arrays)
            moved[index] = arrays[index] + sign * step * direction
            ends.append((function(*moved) * cotangent).sum())
        found.append((ends[0] - ends[1]) / (2 * step))
    return np.array(found)


WINDOWS = [
    Window((3, 3)),
    Window((3, 5), border="mask"),
    Window((3, 3), border="reflect", dilation_rate=(2, 1)),
    Window((5, 3), strides=(2, 2), border="reflect"),
    Window((3, 3), strides=(2, 3), border="mask"),
    Window((1, 3), strides=(3, 1), border="mask", dilation_rate=(1, 2)),
]
DISCS = [
    Window((5, 5), shape="disc"),
    Window((3, 3), strides=(2, 2), border="mask", shape="disc"),
    Window((1, 1), shape="disc"),
]
# Order of queries and keys, transformed or not, with a bias or not.
KINDS = [
    (1, 1, False, False),
    (2, 2, False, True),
    (1, 1, True, True),
    (2, 3, True, False),
    (3, 2, True, True),
]


def arguments(window, order, key_order, weighted, biased, channels=6):
    height, width = 7, 6
    new = window.output_size((height, width))
    x = random(2, *new, order, channels, seed=1)
    k = random(2, height, width, key_order, channels, seed=2)
    rest = []
    if weighted:
        rest.append(random(*window.size, order, key_order, channels, seed=3))
    if biased:
        rest.append(random(*window.size, order, channels, seed=4))
    return x, k, rest


def unpack(rest, weighted, biased):
    rest = list(rest)
    weight = rest.pop(0) if weighted else None
    return weight, rest.pop(0) if biased else None


# Every window and every kind, not every pair.
PAIRS = [
    (window, KINDS[index % len(KINDS)]) for index, window in enumerate(WINDOWS)
]


# How many images `views` computes as one, and how many columns it adds to those
# of the keys of each.
VIEWS = {
    "views": lambda batch: (1, 0),
    "views with more columns": lambda batch: (1, 3),
    "views side by side": lambda batch: (batch or 1, 1),
}


@pytest.fixture(params=["planes", "rows", "products", "tiles", *VIEWS])
def realisation(request, monkeypatch):
    """Forces each one, also where another would be chosen."""
    name = request.param
    if (
        name not in ("planes", "rows", "products")
        and keras.backend.backend() != "torch"
    ):
        pytest.skip("made of PyTorch's views")
    if name in ("planes", "rows"):
        monkeypatch.setattr(dispatch, "choose", lambda *_: "planes")
        monkeypatch.setattr(dispatch, "NEIGHBOURS_OF_SUM", 2)
        monkeypatch.setattr(dispatch, "CHANNELS_OF_SUM", 2)
    if name == "products":
        monkeypatch.setattr(dispatch, "choose", lambda *_: "products")
        monkeypatch.setattr(dispatch, "CACHE", 1)
    if name in VIEWS:
        monkeypatch.setattr(dispatch, "choose", lambda *_: "views")

        def side_by_side(keys, reach):
            count, more = VIEWS[name](keys.shape[1])
            return count, keys.shape[3] + more

        monkeypatch.setattr(dispatch, "side_by_side", side_by_side)
    if name == "rows":
        monkeypatch.setattr(dispatch, "CHANNELS_AT_ONCE", 1)
        monkeypatch.setattr(dispatch, "NEIGHBOURS_WRITTEN_OUT", 1)
    if name == "tiles":
        monkeypatch.setattr(dispatch, "choose", lambda *_: "tiles")
        monkeypatch.setattr(dispatch, "CACHE", 1)
        # Two rows, so that tiles overlap and the last of them is not full.
        monkeypatch.setattr(window_tiles, "_tile_size", lambda *_: 2)
    gradients.differentiable.cache_clear()
    yield name
    gradients.differentiable.cache_clear()


@pytest.mark.once
@pytest.mark.parametrize(
    ("target", "size", "channels", "weighted", "expected"),
    [
        (("cpu", "inductor"), 8, 8, True, "views"),
        (("cpu", "inductor"), 8, 4, False, "views"),
        (("cpu", "inductor"), 8, 8, False, "tiles"),
        (("gpu", "inductor"), 8, 8, False, "views"),
        (("cpu", "inductor"), 9, 8, False, "views"),
        (("cpu", "inductor"), 9, 64, False, "tiles"),
        (("cpu", "inductor"), 16, 64, False, "views"),
        (("cpu", "xla"), 8, 16, True, "planes"),
        (("cpu", "xla"), 8, 16, False, "planes"),
        (("cpu", None), 8, 8, False, "tiles"),
        (("cpu", None), 8, 4, False, "products"),
        (("cpu", None), 8, 8, True, "products"),
        (("cpu", "graph"), 8, 8, False, "products"),
    ],
)
def test_choice(target, size, channels, weighted, expected, monkeypatch):
    target = backend.Target(*target)
    monkeypatch.setattr(backend, "find_target", lambda *_: target)
    form = Form(Window((5, 5)).neighbours, heads=2)
    k = keras.KerasTensor((1, None, size + 4, size + 4, 1, 2 * channels))
    assert dispatch.choose(form, k, weighted) == expected


@pytest.mark.once
@pytest.mark.parametrize(
    ("batch", "width", "device", "expected"),
    [
        (128, 32, "cpu", (1, 36)),
        (128, 14, "cpu", (1, 20)),
        (128, 7, "cpu", (4, 11)),
        (2, 7, "cpu", (2, 11)),
        (1, 7, "cpu", (1, 20)),
        (3, 3, "cpu", (3, 7)),
        (97, 7, "cpu", (1, 20)),
        (None, 7, "cpu", (1, 20)),
        (128, 7, "gpu", (1, 11)),
    ],
)
def test_narrow_images_lie_side_by_side(
    batch, width, device, expected, monkeypatch
):
    target = backend.Target(device, "inductor")
    monkeypatch.setattr(backend, "find_target", lambda *_: target)
    keys = keras.KerasTensor((1, batch, 11, width + 4, 1, 16))
    assert dispatch.side_by_side(keys, reach=4) == expected


@pytest.mark.once
@pytest.mark.parametrize(
    ("size", "order", "expected"),
    [((5, 5), 32, True), ((7, 7), 32, False), ((1, 123), 1, False)],
)
def test_a_compiler_gets_no_long_programs(size, order, expected):
    form = Form(Window(size).neighbours, heads=1)
    assert dispatch.writes_window_out(form, order) == expected


@pytest.mark.once
@pytest.mark.parametrize(("channels", "count"), [(16, 2), (63, 8), (64, 1)])
def test_wide_heads_have_one_reduction(channels, count, monkeypatch):
    """A compiler gets as many loops as there are reductions."""
    sums = []

    def sums_together(tensors, axis):
        sums.append(len(tensors))
        return [ops.sum(x, axis=axis) for x in tensors]

    monkeypatch.setattr(backend, "sums_together", sums_together)
    terms = [ops.convert_to_tensor(random(1, 1, 1, channels, 2, 2))] * 3
    found = window_planes._channel_sums(terms)
    assert sums == [3] * count
    for y in found:
        expected = as_array(terms[0]).sum(axis=3)
        np.testing.assert_allclose(as_array(y), expected, rtol=1e-5)


@pytest.mark.torch_first
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_narrow_views_have_the_shapes_of_products(window):
    """What `views` puts between images is in no result."""
    if keras.backend.backend() != "torch":
        pytest.skip("made of PyTorch's views")
    x, k, _ = arguments(window, 1, 1, False, False)
    x, k = (ops.convert_to_tensor(t, DTYPE) for t in (x, k))
    keys = window.frames(k)
    form = Form(window.neighbours, 2, keys.shape[0])
    size = (len(window.offsets), 2, 1, 2, *x.shape[1:3])
    weights = ops.convert_to_tensor(random(*size, seed=5), DTYPE)
    assert dispatch.side_by_side(keys, form.reach[1])[0] == 2
    for wanted in (("weights", "keys"), ("queries", "keys")):
        given = form, wanted, weights, x, keys, None, None
        narrow = window_views.derivatives(*given)
        expected = window_products.derivatives(*given)
        for y, z in zip(narrow, expected, strict=True):
            assert y.shape == z.shape
            assert relative_difference(as_array(y), as_array(z)) < RTOL


def skip_weighted(realisation, kind):
    if realisation == "tiles" and kind[2]:
        pytest.skip("tiles take no weighted keys")


@pytest.mark.torch_first
@pytest.mark.parametrize(("window", "kind"), PAIRS, ids=str)
def test_scores(window, kind, realisation):
    skip_weighted(realisation, kind)
    check_scores(window, kind)


@pytest.mark.torch_first
@pytest.mark.parametrize(("window", "kind"), PAIRS, ids=str)
def test_sums(window, kind, realisation):
    skip_weighted(realisation, kind)
    check_sums(window, kind)


@pytest.mark.torch_first
@pytest.mark.parametrize("kind", [KINDS[1], KINDS[4]], ids=str)
def test_gradients_of_the_backend(kind):
    check_scores(WINDOWS[1], kind, recompute=False)
    check_sums(WINDOWS[1], kind, recompute=False)


@pytest.mark.torch_first
@pytest.mark.parametrize(
    ("window", "size"),
    [
        (Window((1, 1)), (3, 2)),
        (Window((5, 3), border="reflect"), (1, 2)),
        (Window((3, 3), strides=(4, 5)), (6, 7)),
        (Window((3, 3), dilation_rate=(4, 4), border="mask"), (3, 3)),
    ],
    ids=str,
)
def test_unusual_sizes(window, size):
    new = window.output_size(size)
    x = random(1, *new, 1, 4, seed=1)
    k = random(1, *size, 1, 4, seed=2)
    tensors = [ops.convert_to_tensor(t, DTYPE) for t in (x, k)]
    scores = window_scores(*tensors, window, 2)
    expected = scores_oracle(x, k, window, 2, None, None)
    assert relative_difference(as_array(scores), expected) < RTOL
    weights = window_softmax(scores, window, size)
    expected = softmax_oracle(expected, window, size)
    assert relative_difference(as_array(weights), expected) < max(RTOL, 1e-6)
    y = window_sum(weights, tensors[1], window)
    expected = sum_oracle(expected, k, window, None, None)
    assert relative_difference(as_array(y), expected) < max(RTOL, 1e-5)


@pytest.mark.torch_first
@pytest.mark.parametrize("window", WINDOWS[2:], ids=str)
def test_frames_of_an_unknown_size(window):
    class Frames(keras.layers.Layer):
        def call(self, x):
            return ops.moveaxis(window.frames(x), 1, 0)

    model = keras.Sequential([keras.Input((None, None, 1, 2)), Frames()])
    for size in ((7, 6), (1, 2)):
        x = random(2, *size, 1, 2).astype("float32")
        expected = as_array(window.frames(ops.convert_to_tensor(x)))
        found = model.predict(x, verbose=0)
        np.testing.assert_array_equal(found, np.moveaxis(expected, 1, 0))


@pytest.mark.torch_first
@pytest.mark.parametrize("weighted", [False, True])
def test_empty_batches(weighted, realisation):
    kind = (2, 2, weighted, True)
    skip_weighted(realisation, kind)
    window = WINDOWS[1]
    x, k, rest = arguments(window, *kind)

    def attend(x, k, *rest):
        maps = unpack(rest, weighted, True)
        scores = window_scores(x, k, window, 2, *maps)
        weights = window_softmax(scores, window, (7, 6))
        return window_sum(weights, k, window, *maps)

    arrays = [x[:0], k[:0], *rest]
    y, gradients = value_and_gradients(attend, arrays, x[:0])
    assert y.shape == x[:0].shape
    assert [g.shape for g in gradients] == [a.shape for a in arrays]
    assert not any(g.any() for g in gradients)


def test_a_long_window_of_one_row():
    """It has more neighbours than are written out, and no rows to loop over."""
    window = Window((1, 123))
    rng = np.random.default_rng(0)
    values = rng.normal(size=(1, 2, 3, 1, 4)).astype("float32")
    weights = np.zeros((123, 1, 1, 2, 2, 3), "float32")
    weights[62] = 2  # the pixel to the right
    y = as_array(
        window_sum(*map(ops.convert_to_tensor, (weights, values)), window)
    )
    np.testing.assert_allclose(y[:, :, :-1], 2 * values[:, :, 1:], rtol=1e-6)
    np.testing.assert_array_equal(y[:, :, -1], 0)


@pytest.mark.torch_first
@pytest.mark.parametrize(
    ("device", "compiler", "expected"),
    [
        ("cpu", None, [2, 2, 1]),
        ("accelerator", None, [5]),
        ("cpu", "graph", [5]),
    ],
)
def test_few_images_at_a_time(device, compiler, expected, monkeypatch):
    """Where there is a cache to fill, and no compiler that sees to it."""
    target = backend.Target(device, compiler)
    monkeypatch.setattr(backend, "find_target", lambda *_: target)
    monkeypatch.setattr(dispatch, "CACHE", 2 * 4 * 10)
    x = np.arange(10, dtype="float32").reshape(5, 1, 1, 1, 2)
    k, found = x[None], []

    def double(weights, queries, keys):
        assert weights is None
        found.append(len(queries))
        return 2 * queries, 3 * keys, ops.sum(queries, axis=0)

    y, z, total = window_products.over_images(
        double, ("queries", "keys"), None, x, k, 10
    )
    assert found == expected
    np.testing.assert_array_equal(as_array(y), 2 * x)
    np.testing.assert_array_equal(as_array(z), 3 * k)
    np.testing.assert_array_equal(as_array(total), x.sum(axis=0))


@pytest.mark.torch_first
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_comes_out_in_the_dtypes_that_went_in(dtype):
    window = Window((3, 3), border="mask")
    x, k = random(2, 4, 5, 1, 4, seed=1), random(2, 4, 5, 1, 4, seed=2)
    x, k = (ops.convert_to_tensor(t, dtype) for t in (x, k))
    scores = window_scores(x, k, window, 2)
    weights = window_softmax(scores, window, (4, 5))
    y = window_sum(weights, k, window)
    names = [keras.backend.standardize_dtype(t.dtype) for t in (scores, y)]
    assert names == ["float32", dtype]
    x, k = (as_array(ops.cast(t, "float32")) for t in (x, k))
    expected = scores_oracle(x, k, window, 2, None, None)
    assert relative_difference(as_array(scores), expected) < 4e-3
    expected = softmax_oracle(expected, window, (4, 5))
    expected = sum_oracle(expected, k, window, None, None)
    y = as_array(ops.cast(y, "float32"))
    assert relative_difference(y, expected) < 1e-2


@pytest.mark.parametrize(
    "weighted", [False, pytest.param(True, marks=pytest.mark.torch_first)]
)
def test_sums_of_half_precision_are_in_float32(weighted):
    """In bfloat16, 256 and one is 256."""
    window = Window((3, 3))
    x = ops.ones((1, 3, 3, 1, 512), "bfloat16")
    w = ops.ones((3, 3, 1, 1, 512), "bfloat16") if weighted else None
    scores = window_scores(x, x, window, 1, w)
    np.testing.assert_array_equal(as_array(scores[:, 0, 0, 0, 1, 1]), 512)
    weights = ops.reshape([256.0] + 8 * [1.0], (9, 1, 1, 1, 1, 1))
    weights = ops.broadcast_to(weights, (9, 1, 1, 1, 3, 3))
    y = window_sum(weights, x, window, w)
    y = as_array(ops.cast(y, "float32"))
    np.testing.assert_array_equal(y[0, 1, 1, 0], 264)


@pytest.mark.torch_first
def test_softmax_over_pairs_with_key_elements():
    window = Window((3, 3), border="mask")
    scores = random(18, 2, 1, 2, 4, 5)
    weights = window_softmax(
        ops.convert_to_tensor(scores, DTYPE), window, (4, 5)
    )
    inside = neighbours(np.ones((1, 4, 5, 1, 1)), window)[:, 0, ..., 0, 0]
    inside = np.concatenate([inside, inside])[:, None, None, None] > 0
    p = np.where(inside, np.exp(scores), 0)
    expected = p / p.sum(0)
    assert relative_difference(as_array(weights), expected) < max(RTOL, 1e-6)


@pytest.mark.torch_first
def test_number_of_heads_is_checked_first():
    window, x = Window((3, 3)), np.zeros((1, 4, 4, 1, 6), "float32")
    for heads in (0, -1):
        with pytest.raises(ValueError, match=rf"`num_heads`.*{heads}"):
            window_scores(x, x, window, heads)


@pytest.mark.sweep
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_pair(window, kind, realisation):
    skip_weighted(realisation, kind)
    check_scores(window, kind)
    check_sums(window, kind)


def check_scores(window, kind, heads=2, **options):
    weighted, biased = kind[2:]
    x, k, rest = arguments(window, *kind)

    def ours(x, k, *rest):
        weight, bias = unpack(rest, weighted, biased)
        return window_scores(x, k, window, heads, weight, bias, **options)

    def oracle(x, k, *rest):
        weight, bias = unpack(rest, weighted, biased)
        return scores_oracle(x, k, window, heads, weight, bias)

    check(ours, oracle, [x, k, *rest])


def check_sums(window, kind, heads=2, **options):
    weighted, biased = kind[2:]
    x, k, rest = arguments(window, *kind)
    a = random(len(window.offsets), 2, kind[0], heads, *x.shape[1:3], seed=5)

    def ours(a, k, *rest):
        weight, bias = unpack(rest, weighted, biased)
        return window_sum(a, k, window, weight, bias, **options)

    def oracle(a, k, *rest):
        weight, bias = unpack(rest, weighted, biased)
        return sum_oracle(a, k, window, weight, bias)

    check(ours, oracle, [a, k, *rest])


def check(ours, oracle, arrays, rtol=NUMERIC_RTOL):
    expected = oracle(*arrays)
    cotangent = random(*expected.shape, seed=6)
    value, gradients = value_and_gradients(ours, arrays, cotangent)
    assert value.shape == expected.shape
    assert relative_difference(value, expected) < RTOL
    directions = [random(*a.shape, seed=7) for a in arrays]
    along = [(g * d).sum() for g, d in zip(gradients, directions, strict=True)]
    numeric = numeric_gradient(oracle, arrays, cotangent, directions)
    assert relative_difference(np.array(along), numeric) < rtol
    # One direction could miss an error in a few places: a second one.
    directions = [random(*a.shape, seed=8) ** 3 for a in arrays]
    along = [(g * d).sum() for g, d in zip(gradients, directions, strict=True)]
    numeric = numeric_gradient(oracle, arrays, cotangent, directions)
    assert relative_difference(np.array(along), numeric) < rtol


@pytest.mark.torch_first
@pytest.mark.parametrize("window", WINDOWS + DISCS, ids=str)
def test_softmax(window):
    size = (5, 4)
    shape = (len(window.offsets), 2, 3, 2, *window.output_size(size))
    check(
        lambda s: window_softmax(s, window, size),
        lambda s: softmax_oracle(s, window, size),
        [3 * random(*shape)],
        rtol=1e-5,
    )


@pytest.mark.parametrize(
    "window",
    [DISCS[0], pytest.param(DISCS[1], marks=pytest.mark.torch_first)],
    ids=str,
)
def test_attention_of_discs(window):
    """Its three parts, one after the other."""
    kind = (2, 2, False, True)
    query, keys, (bias,) = arguments(window, *kind)
    values = random(*keys.shape, seed=5)

    def ours(query, keys, values, bias):
        affine = AffineMap(None, bias)
        given = query, keys, values, window, 2, affine, UNCHANGED
        return window_attention(*given, return_weights=False)[0]

    def oracle(query, keys, values, bias):
        scores = scores_oracle(query, keys, window, 2, None, bias)
        weights = softmax_oracle(scores, window, keys.shape[1:3])
        return sum_oracle(weights, values, window, None, None)

    # Differences of exponentials are less precise than those of products.
    check(ours, oracle, [query, keys, values, bias], rtol=1e-5)


@pytest.mark.torch_first
def test_softmax_over_pairs_of_a_disc():
    """Each neighbour counts the same for every key element."""
    window = Window((3, 3), shape="disc")
    scores = ops.zeros((18, 1, 1, 1, 2, 2), DTYPE)
    found = as_array(window_softmax(scores, window))[:, 0, 0, 0, 0, 0]
    expected = np.tile(oracles.window_weights(3, 3, "disc").ravel(), 2)
    np.testing.assert_allclose(found, expected / expected.sum(), rtol=1e-5)


@pytest.mark.torch_first
def test_shapes_that_do_not_fit():
    window = Window((3, 3), strides=(2, 2))
    keys, query = np.zeros((2, 5, 6, 1, 4)), np.zeros((2, 3, 3, 1, 4))
    weights = np.zeros((9, 2, 1, 2, 3, 3))
    tensors = {
        "query": query[:, :2],
        "weights": weights[:8],
        "weight": np.zeros((5, 3, 1, 1, 4)),
        "bias": np.zeros((3, 5, 1, 4)),
    }
    with pytest.raises(ValueError, match=r"`query`.*\(2, 3, 3, 1, 4\)"):
        window_scores(tensors["query"], keys, window, 2)
    with pytest.raises(ValueError, match=r"`weights`.*\(9, 2, 1, 2, 3, 3\)"):
        window_sum(tensors["weights"], keys, window)
    for name in ("weight", "bias"):
        with pytest.raises(ValueError, match=rf"`{name}` must have shape"):
            window_scores(query, keys, window, 2, **{name: tensors[name]})
    with pytest.raises(ValueError, match=r"4 channels.*num_heads=3"):
        window_scores(query, keys, window, 3)
    with pytest.raises(ValueError, match=r"queries of order 2.*same order"):
        window_scores(np.zeros((2, 3, 3, 2, 4)), keys, window, 2)


@pytest.mark.torch_first
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": (2, 3)}, r"odd.*\(2, 3\)"),
        ({"size": (0, 3)}, r"`size`.*0"),
        ({"size": (3, 3), "strides": (0, 1)}, r"`strides`.*0"),
        ({"size": (3, 3), "border": "wrap"}, r"`border`.*'wrap'"),
        ({"size": (3, 3), "shape": "round"}, r"`shape`.*'round'"),
        ({"size": (3, 5), "shape": "disc"}, r"A disc.*size=\(3, 5\)"),
        (
            {"size": (3, 3), "dilation_rate": (1, 2), "shape": "disc"},
            r"one dilation rate.*dilation_rate=\(1, 2\)",
        ),
    ],
)
def test_bad_windows(arguments, message):
    with pytest.raises(ValueError, match=message):
        Window(**arguments)


@pytest.mark.torch_first
@pytest.mark.parametrize("border", ["mask", "zeros"])
@pytest.mark.parametrize(
    ("shape", "size", "message"),
    [
        ((10, 1, 1, 1, 2, 3), (4, 5), "10 neighbours.*9"),
        ((0, 1, 1, 1, 2, 3), (4, 5), "0 neighbours.*9"),
        ((9, 1, 1, 1, 2, 3), (5, 5), r"`size` must be.*size=\(5, 5\), scores"),
        ((9, 1, 1, 1, 2, 3), (4, 4), r"`size` must be.*size=\(4, 4\), scores"),
        ((9, 1, 1, 1, 2, 3), (4,), r"`size` must be.*size=\(4,\), scores"),
        ((9, 1, 1, 1, 2, 3), 4, "`size` must be.*size=4, scores"),
    ],
)
def test_scores_of_another_window(border, shape, size, message):
    window = Window((3, 3), strides=(2, 2), border=border)
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(window_softmax)(np.zeros(shape), window, size)


@pytest.mark.torch_first
def test_scores_without_group_elements():
    message = r"`scores` must have 6 axes.*\(9, 1, 1, 2"
    with pytest.raises(ValueError, match=message):
        window_softmax(np.zeros((9, 1, 1, 2, 3), "float32"))


@pytest.mark.torch_first
def test_mask_needs_the_size():
    scores = np.zeros((9, 1, 1, 1, 2, 2))
    with pytest.raises(ValueError, match=r"`size`.*None"):
        window_softmax(scores, Window((3, 3), border="mask"))
    window_softmax(scores, Window((3, 3)))


@pytest.mark.torch_first
@pytest.mark.parametrize("window", [(3, 3), 3, None])
def test_windows_that_are_none(window):
    x, scores = np.zeros((1, 4, 4, 1, 4)), np.zeros((9, 1, 1, 1, 4, 4))
    message = rf"`window` must be .*Window.*{re.escape(repr(window))}"
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(window_scores)(x, x, window)
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(window_sum)(scores, x, window)
    if window is not None:
        with pytest.raises(ValueError, match=message):
            inspect.unwrap(window_softmax)(scores, window)
