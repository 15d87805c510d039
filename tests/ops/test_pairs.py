"""Group self-attention in blocks, two softmaxes, against one over all."""

import keras
import numpy as np
import pytest
from keras import ops
from layer_contract import as_array
from pairs_helpers import arguments
from pairs_helpers import BACKEND
from pairs_helpers import check
from pairs_helpers import FLOAT64
from pairs_helpers import RTOL
from pairs_helpers import value_and_gradients
from sweeps import swept

from keras_equiattn.ops.pairs import dispatch
from keras_equiattn.ops.pairs.api import group_self_attention
from keras_equiattn.ops.pairs.api import plain_attention
from keras_equiattn.testing import relative_difference

pytestmark = pytest.mark.torch_first


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
@pytest.mark.parametrize("limit", swept((1, 100, 1000, 10**6), 100))
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
@pytest.mark.parametrize("local", swept((True, False), True))
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
