"""Group self-attention in blocks, two softmaxes, against one over all."""

import inspect
import re

import keras
import numpy as np
import pytest
from keras import ops
from layer_contract import as_array

from keras_equiattn.ops.pairs import api as module
from keras_equiattn.ops.pairs import blocks as pair_blocks
from keras_equiattn.ops.pairs import dispatch
from keras_equiattn.ops.pairs import fused
from keras_equiattn.ops.pairs.api import group_attention_weights
from keras_equiattn.ops.pairs.api import group_self_attention
from keras_equiattn.ops.pairs.api import plain_attention
from keras_equiattn.ops.papers.position_encoding import image_offsets
from keras_equiattn.ops.papers.position_encoding import seen_offsets
from keras_equiattn.ops.papers.position_encoding import window_offsets
from keras_equiattn.testing import relative_difference

pytestmark = pytest.mark.torch_first

# The package has a function of this name.

BACKEND = keras.backend.backend()
FLOAT64 = BACKEND != "jax"
DTYPE, RTOL = ("float64", 1e-12) if FLOAT64 else ("float32", 2e-5)
SLOW = (pytest.mark.slow, pytest.mark.every_backend)


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def arguments(window, size, elements, order, heads=2, channels=5, encoded=2):
    """Query, keys, values, encoding and, but for lifting, embedding.

    Lifting has one query and key element; all channels meet positions.
    """
    shape = (2, *size, elements, heads, channels)
    seen = (window, window) if window else tuple(2 * n - 1 for n in size)
    lifting = elements == 1
    encoded = channels if lifting else encoded
    arrays = [random(*shape, seed=seed) for seed in range(3)]
    arrays.append(random(*seen, order, encoded, seed=3))
    if not lifting:
        rest = channels - encoded
        arrays.append(random(elements, elements, rest, seed=4))
    return arrays


def value_and_gradients(function, arrays, cotangent):
    """The value, and gradients of `sum(value * cotangent)`."""
    tensors = [ops.convert_to_tensor(a, DTYPE) for a in arrays]
    cotangent = ops.convert_to_tensor(cotangent, DTYPE)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(tensors)
            value = function(*tensors)
        gradients = tape.gradient(value, tensors, cotangent)
    elif BACKEND == "jax":
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


def check(arrays, local, rtol=RTOL, compiled=False, shape="square"):
    """Both forms agree, in the value and all gradients."""
    options = {"local": local, "window_shape": shape}

    def in_blocks(*arrays):
        return group_self_attention(*arrays, **options)

    if compiled and BACKEND == "tensorflow":
        import tensorflow as tf

        in_blocks = tf.function(in_blocks)

    def plain(*arrays):
        return plain_attention(*arrays, **options)

    batch, height, width, _, heads, channels = arrays[0].shape
    order = arrays[3].shape[2]
    cotangent = random(batch, height, width, order, heads, channels, seed=6)
    value, gradients = value_and_gradients(in_blocks, arrays, cotangent)
    expected, wanted = value_and_gradients(plain, arrays, cotangent)
    assert value.shape == cotangent.shape
    assert relative_difference(value, expected) < rtol
    names = ("query", "keys", "values", "encoding", "embedding")
    for name, gradient, other in zip(names, gradients, wanted, strict=False):
        # A softmax that sees one place gives none.
        scale = max(np.abs(other).max(), 1)
        assert np.abs(gradient - other).max() < 10 * rtol * scale, name


@pytest.fixture
def limited(monkeypatch):
    """Sets how many scores a line of a block may have."""

    def limit(scores):
        for name in ("COMPILED_BLOCK", "EAGER_BLOCK"):
            monkeypatch.setattr(dispatch, name, scores)

    return limit


CASES = [
    # window, size, elements, order
    (3, (3, 4), 2, 3),
    (3, (4, 2), 1, 4),
    (5, (2, 3), 3, 2),
    (1, (2, 2), 2, 2),
    (3, (1, 3), 4, 4),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_windows(case):
    check(arguments(*case), local=True)


@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=str)
def test_discs(case):
    check(arguments(*case), local=True, shape="disc")


@pytest.mark.parametrize(
    "case",
    [
        (None, (3, 4), 2, 3),
        (None, (4, 2), 1, 4),
        (None, (1, 3), 3, 2),
        (None, (1, 1), 2, 2),
    ],
    ids=str,
)
def test_whole_images(case):
    check(arguments(*case), local=False)


# Compiled in float64, windows that see nothing are easily 0 / 0.
@pytest.mark.parametrize(
    ("window", "elements"),
    [
        pytest.param(3, 2, marks=pytest.mark.every_backend),
        (3, 1),
        (None, 2),
        (None, 1),
    ],
)
def test_compiled_as_in_fit(window, elements):
    arrays = arguments(window, (3, 2), elements, 2)
    check(arrays, local=window is not None, compiled=True)


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("elements", [1, 2])
@pytest.mark.parametrize("limit", [1, 100, 1000, 10**6])
def test_sizes_of_blocks_change_nothing(local, elements, limit, limited):
    arrays = arguments(3 if local else None, (5, 2), elements, 2, heads=6)
    limited(limit)
    check(arrays, local=local)


@pytest.mark.every_backend
def test_whole_images_of_prime_sizes(limited):
    """The last line has neighbours of the one before, which count once, and
    the last block has rows that are not in the image."""
    arrays = arguments(None, (5, 11), 2, 2)
    query = ops.convert_to_tensor(arrays[0])
    encoding = ops.convert_to_tensor(arrays[3])
    limited(2 * arrays[0].size * 5 * 11 * 2 * 2 // (5 * 5))
    _, rows, neighbours = dispatch.choose(query, query, encoding, False)
    assert 1 < rows < 5
    assert 1 < neighbours < 11
    check(arrays, local=False)


@pytest.mark.once
@pytest.mark.parametrize(("width", "neighbours"), [(8, 8), (13, 7), (31, 8)])
def test_lines_of_whole_images_are_long(width, neighbours):
    query = keras.KerasTensor((8, 3, width, 2, 6, 3))
    encoding = keras.KerasTensor((5, 2 * width - 1, 4, 1))
    found = dispatch.blocks(query, query, encoding, False, 1, 24)
    assert found.neighbours == neighbours


@pytest.mark.once
@pytest.mark.parametrize(
    ("batch", "limit", "heads", "rows"),
    [
        # A row of a head has 9 neighbours, 2 * 4 pairs and 7 pixels.
        (24, 24 * 6 * 5 * 504, 6, 5),
        (24, 24 * 4 * 5 * 504, 3, 5),
        (24, 24 * 5 * 504, 1, 5),
        (24, 24 * 3 * 504, 1, 3),
        (24, 1, 1, 1),
        # Few images: at least 24 heads in all, or all that there are.
        (8, 1, 3, 1),
        (1, 6 * 3 * 504, 6, 3),
        (None, dispatch.UNKNOWN_BATCH * 2 * 504, 1, 2),
    ],
)
def test_blocks_hold_all_images(batch, limit, heads, rows):
    """The larger a batch, the fewer heads and rows are in a block."""
    query = keras.KerasTensor((batch, 5, 7, 2, 6, 3))
    encoding = keras.KerasTensor((3, 3, 4, 1))
    found = dispatch.blocks(query, query, encoding, True, limit, 24)
    assert found == (heads, rows, 3)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("local", [True, False])
def test_numbers_of_heads(heads, local):
    window = 3 if local else None
    check(arguments(window, (2, 3), 2, 2, heads=heads), local=local)


@pytest.mark.once
def test_sizes_known_only_at_run_time_are_one_block():
    unknown = keras.KerasTensor((None, None, 4, 2, 6, 3))
    encoding = keras.KerasTensor((3, 3, 2, 1))
    found = dispatch.blocks(unknown, unknown, encoding, True, 10**6, 24)
    assert found == (1, None, 3)
    encoding = keras.KerasTensor((7, 7, 2, 1))
    found = dispatch.blocks(unknown, unknown, encoding, False, 10**6, 24)
    assert found == (1, 1, 1)


@pytest.mark.skipif(
    BACKEND != "tensorflow",
    reason="the other backends know sizes whenever they compute",
)
@pytest.mark.every_backend
@pytest.mark.parametrize(
    "compiled", [True, pytest.param(False, marks=pytest.mark.sweep)]
)
@pytest.mark.parametrize("local", [True, False])
def test_sizes_known_only_at_run_time(local, compiled):
    import tensorflow as tf

    arrays = arguments(3 if local else None, (3, 4), 2, 2)
    maps, rest = arrays[:3], arrays[3:]
    image = tf.TensorSpec((2, None, None, *maps[0].shape[3:]), "float64")

    @tf.function(input_signature=3 * [image], jit_compile=compiled)
    def step(*maps):
        with tf.GradientTape() as tape:
            tape.watch(maps)
            y = group_self_attention(*maps, *rest, local=local)
            loss = tf.reduce_sum(y**2)
        return y, *tape.gradient(loss, maps)

    value, *found = step(*maps)
    cotangent = 2 * as_array(value)
    expected, wanted = value_and_gradients(
        lambda *maps: plain_attention(*maps, *rest, local=local),
        maps,
        cotangent,
    )
    assert relative_difference(as_array(value), expected) < RTOL
    for gradient, other in zip(found, wanted, strict=True):
        assert relative_difference(as_array(gradient), other) < 10 * RTOL


@pytest.mark.parametrize("local", [True, False])
def test_images_without_an_embedding(local):
    """Channels that meet neither positions nor an embedding."""
    window = 3 if local else None
    *arrays, _ = arguments(window, (3, 2), 2, 2)
    check(arrays, local=local)


@pytest.mark.parametrize("local", [True, False])
def test_scores_far_apart(local):
    """Content and positions may point to different neighbours."""
    arrays = arguments(3 if local else None, (3, 3), 2, 2)
    arrays[0] *= 30
    arrays[3] *= 30
    check(arrays, local=local, rtol=1e-9 if FLOAT64 else 1e-2)


@pytest.mark.parametrize("local", [True, False])
def test_attention_to_one_place_is_one(local):
    """Though in float32 a score of this size has an error of about one."""
    arrays = arguments(3 if local else None, (3, 3), 2, 2)
    arrays[0] *= 1e7
    ones = np.ones_like(arrays[2])
    tensors = [ops.convert_to_tensor(a, "float32") for a in arrays]
    tensors[2] = ops.convert_to_tensor(ones, "float32")
    y = as_array(group_self_attention(*tensors, local=local))
    # One for each query element.
    np.testing.assert_allclose(y, 2, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_counts_in_float32(dtype):
    arrays = arguments(3, (3, 4), 2, 3)
    tensors = [ops.convert_to_tensor(a, dtype) for a in arrays]
    y = group_self_attention(*tensors)
    assert keras.backend.standardize_dtype(y.dtype) == dtype
    rounded = [ops.cast(t, "float32") for t in tensors]
    expected = as_array(plain_attention(*rounded))
    y = as_array(ops.cast(y, "float32"))
    assert relative_difference(y, expected) < 1e-2


# --- Compiled by PyTorch ----------------------------------------------------

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


# --- Dropout ----------------------------------------------------------------

SEED = np.array([3, 5], "int32")


def with_dropout(arrays, local, seed=SEED, shape="square"):
    def function(*arrays):
        return group_self_attention(
            *arrays,
            local=local,
            dropout=0.4,
            seed=ops.convert_to_tensor(seed),
            window_shape=shape,
        )

    cotangent = np.ones((*arrays[0].shape[:3], arrays[3].shape[2], 2, 5))
    return value_and_gradients(function, arrays, cotangent)


@pytest.mark.parametrize(
    ("window", "elements", "shape"),
    [
        (3, 2, "square"),
        (None, 1, "square"),
        pytest.param(3, 1, "disc", marks=SLOW),
        pytest.param(None, 2, "square", marks=SLOW),
    ],
)
def test_gradients_drop_what_the_value_dropped(window, elements, shape):
    """Along random directions, by differences."""
    arrays = arguments(window, (2, 3), elements, 2)
    local = window is not None
    step = 1e-5 if FLOAT64 else 1e-2
    _, gradients = with_dropout(arrays, local, shape=shape)
    for index, gradient in enumerate(gradients):
        direction = random(*arrays[index].shape, seed=8)
        ends = []
        for sign in (1, -1):
            moved = list(arrays)
            moved[index] = arrays[index] + sign * step * direction
            ends.append(with_dropout(moved, local, shape=shape)[0].sum())
        numeric = (ends[0] - ends[1]) / (2 * step)
        along = (gradient * direction).sum()
        scale = max(abs(numeric), 1)
        assert abs(along - numeric) < (1e-7 if FLOAT64 else 2e-2) * scale


@pytest.mark.parametrize("local", [True, False])
def test_dropout_follows_the_seed(local):
    arrays = arguments(3 if local else None, (2, 3), 2, 2)
    for array in arrays[:3]:
        array[1] = array[0]
    first, again, other = (
        with_dropout(arrays, local, seed)[0]
        for seed in (SEED, SEED, SEED + np.array([0, 1], "int32"))
    )
    np.testing.assert_array_equal(first, again)
    assert relative_difference(first, other) > 1e-2
    assert relative_difference(first[0], first[1]) > 1e-2  # of each image


# --- Exported ----------------------------------------------------------------


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
@pytest.mark.parametrize("local", [True, False])
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


# --- Weights and offsets ----------------------------------------------------


@pytest.mark.parametrize(
    ("local", "shape"), [(True, "square"), (True, "disc"), (False, "square")]
)
@pytest.mark.parametrize("elements", [1, 2])
def test_weights_give_the_output(local, shape, elements):
    arrays = arguments(3 if local else None, (3, 4), elements, 2)
    tensors = [ops.convert_to_tensor(a, DTYPE) for a in arrays]
    query, keys, values, *rest = tensors
    options = {"local": local, "window_shape": shape}
    weights = as_array(group_attention_weights(query, keys, *rest, **options))
    encoding = rest[0]
    seen = module.neighbourhood((3, 4), encoding, local)
    near = as_array(seen.of(values))
    y = np.einsum("bivtmo,biomtc->bivtc", weights, near)
    expected = as_array(group_self_attention(*tensors, **options))
    y = y.reshape(expected.shape)
    assert relative_difference(y, expected) < max(RTOL, 1e-12)
    one = group_attention_weights(query, keys, *rest, **options, pixel=(2, 1))
    expected = weights[:, [2 * 4 + 1]]
    assert relative_difference(as_array(one), expected) < RTOL


def test_offsets_of_windows():
    np.testing.assert_array_equal(window_offsets(1), np.zeros((1, 1, 2)))
    offsets = window_offsets(5)
    assert offsets.shape == (5, 5, 2)
    np.testing.assert_array_equal(offsets[0, 4], [-1, 1])
    np.testing.assert_array_equal(offsets[2, 3], [0, 0.5])


def test_offsets_of_images():
    offsets = as_array(image_offsets(2, 4, "float32"))
    assert offsets.shape == (3, 7, 2)
    np.testing.assert_allclose(offsets[0, 6], [-1 / 3, 1], rtol=1e-6)
    np.testing.assert_array_equal(offsets[1, 3], [0, 0])
    assert not as_array(image_offsets(1, 1, "float32")).any()


def test_elements_see_offsets_turned_back():
    up = ops.convert_to_tensor(np.array([-1.0, 0.0]), DTYPE)
    seen = as_array(seen_offsets(up, "p4m"))
    # A quarter turn has moved what lay to the right.
    np.testing.assert_allclose(seen[1], [0, 1], atol=1e-12)
    np.testing.assert_allclose(seen[4], [-1, 0], atol=1e-12)


def test_masked_weights_are_zero():
    arrays = arguments(5, (2, 2), 2, 2)
    query, keys, _, *rest = (ops.convert_to_tensor(a, DTYPE) for a in arrays)
    weights = as_array(group_attention_weights(query, keys, *rest))
    inside = module.neighbourhood((2, 2), rest[0], True).inside
    assert inside.sum(axis=1).tolist() == [4] * 4
    outside = np.moveaxis(weights, (1, -1), (0, 1))[~inside]
    assert outside.size
    assert not outside.any()


def test_heads_and_back():
    x = random(2, 3, 4, 2, 6, 5)
    tensor = ops.convert_to_tensor(x)
    for heads in (1, 2, 3, 6):
        found = pair_blocks._by_heads(tensor, heads)
        assert found.shape == (6 // heads, 5, 2, 3, 4, 2 * heads)
        back = as_array(pair_blocks._as_images(found, 2, heads))
        np.testing.assert_array_equal(back, x.astype(back.dtype))


# --- Errors -----------------------------------------------------------------

# As users call them: in tests the annotations are checked before.
UNCHECKED = inspect.unwrap(group_self_attention)


def changed(index, shape, local=True):
    """Arguments of which one has another shape."""
    arrays = arguments(3 if local else None, (3, 4), 2, 4)
    arrays[index] = np.zeros(shape)
    return arrays


@pytest.mark.parametrize(
    ("index", "shape", "message"),
    [
        (3, (2, 2, 4, 2), r"`encoding` must be.* odd size.*\(2, 2, 4, 2\)"),
        (3, (3, 5, 4, 2), r"`encoding` must be.* square.*\(3, 5, 4, 2\)"),
        (3, (3, 3, 4, 5), r"`encoding` must have fewer .* 5 channels.*4, 5\)"),
        (4, (2, 2, 1), r"`embedding` must meet the 3 .*\(2, 2, 1\), enc"),
    ],
)
def test_shapes_that_do_not_fit(index, shape, message):
    arrays = changed(index, shape)
    for recompute in (True, False):
        with pytest.raises(ValueError, match=message):
            UNCHECKED(*arrays, recompute=recompute)
    del arrays[2]
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(group_attention_weights)(*arrays)


def test_whole_images_are_no_discs():
    arrays = arguments(None, (3, 4), 2, 2)
    with pytest.raises(ValueError, match="`window_shape` must be 'square'"):
        UNCHECKED(*arrays, local=False, window_shape="disc")


def test_encodings_of_whole_images_that_do_not_fit():
    message = r"`encoding` must .* \(5, 7\) offsets .*query.*\(3, 3, 4,"
    with pytest.raises(ValueError, match=message):
        UNCHECKED(*changed(3, (3, 3, 4, 2), local=False), local=False)


def test_encodings_of_more_channels_than_queries():
    *arrays, _ = changed(3, (3, 3, 4, 6))
    with pytest.raises(ValueError, match=r"at most the 5 channels.*4, 6\)"):
        UNCHECKED(*arrays)


def test_sizes_known_only_at_run_time_fit():
    unknown = keras.KerasTensor((None, None, None, 2, 2, 5))
    encoding = keras.KerasTensor((3, 3, 4, 2))
    embedding = keras.KerasTensor((2, 2, 3))
    module._check(unknown, encoding, embedding, True, "disc")
    whole = keras.KerasTensor((None, 5, 4, 2))
    module._check(unknown, whole, embedding, False, "square")
    embedding = keras.KerasTensor((2, 2, 4))
    with pytest.raises(ValueError, match=r"the 3 channels.*\(2, 2, 4\)"):
        module._check(unknown, encoding, embedding, True, "square")


@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan"), "0.1"])
def test_rates_that_are_none(rate):
    message = rf"`dropout` must be a number from 0 to below 1.*{rate}"
    with pytest.raises(ValueError, match=message):
        UNCHECKED(*arguments(3, (2, 2), 2, 2), dropout=rate)


@pytest.mark.parametrize(
    "seed",
    [
        *(3, [1], [1, 2, 3], [1.5, 2], [-1, 2], [2**31, 2], "12", [None, 2]),
        *(np.array([1, -2]), np.array([np.nan, 1]), np.float32(1)),
    ],
)
def test_seeds_that_are_none(seed):
    message = (
        r"`seed` must be two whole numbers from 0 to below 2\*\*31.*"
        f"{re.escape(repr(seed))}"
    )
    with pytest.raises(ValueError, match=message):
        UNCHECKED(*arguments(3, (2, 2), 2, 2), dropout=0.1, seed=seed)


def test_seeds_as_lists_arrays_and_tensors():
    arrays = arguments(3, (2, 2), 2, 2)
    tensors = [ops.convert_to_tensor(a, DTYPE) for a in arrays]
    seeds = ([5, 2**31 - 1], np.array([5, 2**31 - 1]))
    seeds += (ops.convert_to_tensor(seeds[0], "int32"),)
    first, *others = (
        as_array(group_self_attention(*tensors, dropout=0.5, seed=seed))
        for seed in seeds
    )
    for y in others:
        np.testing.assert_array_equal(y, first)
    tensor = ops.ones((3,))
    with pytest.raises(ValueError, match="`seed` must be two whole numbers"):
        UNCHECKED(*tensors, dropout=0.5, seed=tensor)


def test_dropout_without_a_seed():
    message = r"Dropout needs a seed\. Received: dropout=0\.5, seed=None"
    for recompute in (True, False):
        with pytest.raises(ValueError, match=message):
            group_self_attention(
                *arguments(3, (2, 2), 2, 2), dropout=0.5, recompute=recompute
            )


@pytest.mark.skipif(
    BACKEND != "tensorflow",
    reason="the other backends know sizes whenever they compute",
)
@pytest.mark.every_backend
@pytest.mark.parametrize("shape", [(None, 4), (3, None)])
@pytest.mark.parametrize("local", [True, False])
def test_what_is_not_in_blocks_needs_a_known_size(shape, local):
    import tensorflow as tf

    arrays = arguments(3 if local else None, (3, 4), 2, 2)
    query, _, _, *rest = arrays

    def refused(function, count, **options):
        def traced(*maps):
            function(*maps, *rest, local=local, **options)

        image = tf.TensorSpec((2, *shape, *query.shape[3:]), "float64")
        message = (
            r"not computed in blocks \(`recompute=False`, attention maps\)"
        )
        with pytest.raises(ValueError, match=f"{message} needs a height"):
            tf.function(traced).get_concrete_function(*count * [image])

    refused(group_self_attention, 3, recompute=False)
    refused(group_attention_weights, 2)


@pytest.mark.parametrize("pixel", [(3, 0), (0, -1)])
def test_pixels_outside_of_the_image(pixel):
    query, keys, _, *rest = arguments(3, (3, 4), 2, 2)
    with pytest.raises(ValueError, match=r"`pixel` must be .*\(3, 4\)"):
        inspect.unwrap(group_attention_weights)(query, keys, *rest, pixel=pixel)
