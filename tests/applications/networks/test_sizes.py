"""Input sizes that networks refuse and take."""

import pytest

from keras_equiattn.applications import AllCNNC
from keras_equiattn.applications import PCamDenseNet
from keras_equiattn.applications import ResNet44


@pytest.mark.parametrize(
    ("network", "arguments", "message"),
    [
        (
            AllCNNC,
            {"input_shape": (30, 32, 3)},
            r"`input_shape` of AllCNNC with group 'p4' and "
            r"downsampling='exact' .* such as 24 x 24, 28 x 28, 32 x 32, "
            r"36 x 36: .* not exactly equivariant. Received: \(30, 32, 3\). "
            "downsampling='strided' takes this size",
        ),
        (
            ResNet44,
            {"input_shape": (33, 33, 3), "group": "z2m"},
            r"28 x 28, 32 x 32, 36 x 36, 40 x 40.*\(33, 33, 3\)",
        ),
        (
            PCamDenseNet,
            {"input_shape": (100, 100, 3)},
            r"80 x 80, 96 x 96, 112 x 112, 128 x 128.*\(100, 100, 3\)",
        ),
        (
            AllCNNC,
            {"input_shape": (3, 32, 3), "group": "z2"},
            r"on smaller ones .* do not fit. Received: \(3, 32, 3\)",
        ),
        (
            PCamDenseNet,
            {"input_shape": (64, 64, 3), "downsampling": "strided"},
            r"65 x 65, 66 x 66, 67 x 67, 68 x 68: on smaller ones .*\(64, 64",
        ),
    ],
)
def test_sizes_that_are_refused(network, arguments, message):
    with pytest.raises(ValueError, match=message):
        network(**arguments)


@pytest.mark.once
@pytest.mark.parametrize(
    ("network", "arguments"),
    [
        (AllCNNC, {"group": "z2", "input_shape": (7, 5, 3)}),
        (AllCNNC, {"group": "z2m", "input_shape": (7, 8, 3)}),
        (AllCNNC, {"group": "p4", "input_shape": (4, 8, 1)}),
        (ResNet44, {"group": "p4", "input_shape": (4, 8, 1)}),
        (PCamDenseNet, {"group": "p4", "input_shape": (80, 96, 1)}),
    ],
)
def test_sizes_that_are_taken(network, arguments, short_resnet):
    assert network(filters=1, **arguments).output_shape[0] is None
