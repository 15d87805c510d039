"""Attention over windows: what is refused."""

import inspect

import numpy as np
import pytest

from keras_equiattn.layers import AffineSelfConv2D
from keras_equiattn.layers import StandAloneSelfAttention2D
from keras_equiattn.ops.group.linear import group_linear
from keras_equiattn.ops.papers.affine import affine_map
from keras_equiattn.ops.papers.affine import relative_positions


@pytest.mark.torch_first
def test_affine_map_refuses_what_does_not_turn():
    psi, beta = np.zeros((4, 3, 5, 2)), np.zeros((3, 5, 2))
    with pytest.raises(ValueError, match="square"):
        affine_map(psi, beta, "p4")


@pytest.mark.torch_first
@pytest.mark.parametrize(
    ("rows", "columns", "heads", "message"),
    [
        ((3, 4), (3, 4), 3, r"divisible by num_heads=3.*\(3, 4\)"),
        ((3, 4), (3, 4), 0, "`num_heads`.*0"),
    ],
)
def test_relative_positions_refuse_what_does_not_fit(
    rows, columns, heads, message
):
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(relative_positions)(
            np.zeros(rows), np.zeros(columns), heads, "z2"
        )


@pytest.mark.torch_first
@pytest.mark.parametrize(
    ("layer", "arguments", "message"),
    [
        (AffineSelfConv2D, {"filters": 10}, r"filters=10.*num_heads=8"),
        (
            StandAloneSelfAttention2D,
            {"filters": 8},
            r"filters=8.*2 \* num_heads=16",
        ),
        (AffineSelfConv2D, {"filters": 0}, r"`filters`.*0"),
        (AffineSelfConv2D, {"num_heads": -1}, r"`num_heads`.*-1"),
        (AffineSelfConv2D, {"kernel_size": 4}, r"`kernel_size`.*odd.*4"),
        (
            AffineSelfConv2D,
            {"kernel_size": (3, 5), "group": "p4"},
            r"'p4'.*square.*\(3, 5\)",
        ),
        (
            AffineSelfConv2D,
            {"dilation_rate": (1, 2), "group": "p4"},
            r"square.*dilation_rate=\(1, 2\)",
        ),
        (AffineSelfConv2D, {"border": "wrap"}, r"`border`.*'mask'.*'wrap'"),
        (AffineSelfConv2D, {"scale": 0}, r"`scale`.*positive.*0"),
        (AffineSelfConv2D, {"recompute": 1}, r"`recompute`.*1"),
    ],
)
def test_bad_arguments(layer, arguments, message):
    with pytest.raises(ValueError, match=message):
        layer(**{"filters": 16, **arguments})


@pytest.mark.torch_first
def test_bad_shapes():
    layer = AffineSelfConv2D(8, group="p4")
    with pytest.raises(ValueError, match=r"group axis.*8.*'p4'.*4"):
        layer.build((None, 6, 6, 8, 3))
    with pytest.raises(ValueError, match="feature maps on 'p4'"):
        layer.build((None, 6, 6, 3))
    for shape in ((None, 4, 4, 0), (None, 4, 4, None)):
        with pytest.raises(ValueError, match=rf"channels.*{shape[-1]}\)"):
            AffineSelfConv2D(8).build(shape)


@pytest.mark.torch_first
def test_linear_map_refuses_what_does_not_fit():
    x, kernel = np.zeros((1, 5, 5, 2, 3)), np.zeros((2, 3, 2))
    with pytest.raises(ValueError, match=r"\(4, channels, .*\(2, 3, 2\)"):
        group_linear(x, kernel, None, "p4")
