"""Arguments that group self-attention refuses, and seeds that it takes."""

import inspect
import re

import keras
import numpy as np
import pytest
from keras import ops
from layer_contract import as_array
from pairs_helpers import arguments
from pairs_helpers import BACKEND
from pairs_helpers import DTYPE

from keras_equiattn.ops.pairs import api as module
from keras_equiattn.ops.pairs.api import group_attention_weights
from keras_equiattn.ops.pairs.api import group_self_attention

pytestmark = pytest.mark.torch_first


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
