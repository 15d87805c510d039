"""What group self-attention attends to, and the offsets that it sees."""

import numpy as np
import pytest
from keras import ops
from layer_contract import as_array
from pairs_helpers import arguments
from pairs_helpers import DTYPE
from pairs_helpers import random
from pairs_helpers import RTOL

from keras_equiattn.ops.pairs import api as module
from keras_equiattn.ops.pairs import blocks as pair_blocks
from keras_equiattn.ops.pairs.api import group_attention_weights
from keras_equiattn.ops.pairs.api import group_self_attention
from keras_equiattn.ops.papers.position_encoding import image_offsets
from keras_equiattn.ops.papers.position_encoding import seen_offsets
from keras_equiattn.ops.papers.position_encoding import window_offsets
from keras_equiattn.testing import relative_difference

pytestmark = pytest.mark.torch_first


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
