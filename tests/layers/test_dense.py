"""Linear maps of pixels: contract, and both bases."""

import keras
import numpy as np
import pytest
from keras import ops
from layer_contract import as_array
from layer_contract import LayerCase
from layer_contract import LayerContract

from keras_equiattn.layers import GroupConv2D
from keras_equiattn.layers import GroupDense
from keras_equiattn.testing import relative_difference


class TestGroupDense(LayerContract):
    layer = GroupDense
    cases = (
        LayerCase(
            GroupDense,
            {
                "filters": 3,
                "group": "p4m",
                "basis": "irreps",
                "activation": "tanh",
            },
            (2, 5, 5, 8, 4),
            (2, 5, 5, 8, 3),
            weights=2,
            group="p4m",
            rectangle=(6, 4),
        ),
        LayerCase(
            GroupDense,
            {
                "filters": 3,
                "group": "p4",
                "basis": "irreps",
                "input_activation": "gelu",
            },
            (2, 5, 5, 4, 2),
            (2, 5, 5, 4, 3),
            weights=2,
            group="p4",
            rectangle=(4, 3),
        ),
        LayerCase(
            GroupDense,
            {"filters": 3, "group": "p4", "use_bias": False},
            (2, 5, 5, 4, 2),
            (2, 5, 5, 4, 3),
            weights=1,
            group="p4",
            rectangle=(4, 3),
        ),
        LayerCase(
            GroupDense,
            {"filters": 3, "group": "z2", "basis": "irreps"},
            (2, 5, 4, 2),
            (2, 5, 4, 3),
            weights=2,
            group="z2",
        ),
    )
    arguments = (
        {
            "filters": 3,
            "group": "p4m",
            "basis": "irreps",
            "activation": "relu",
            "input_activation": "silu",
            "use_bias": False,
            "kernel_initializer": keras.initializers.HeNormal(seed=1),
            "bias_initializer": keras.initializers.Constant(0.5),
            "kernel_regularizer": keras.regularizers.L2(0.01),
            "data_format": "channels_first",
        },
    )


@pytest.mark.parametrize("basis", ["regular", "irreps"])
def test_it_is_a_convolution_with_filters_of_one_pixel(basis):
    x = ops.convert_to_tensor(
        np.random.default_rng(0).normal(size=(1, 3, 3, 8, 2))
    )
    x = ops.cast(x, "float32")
    layer = GroupDense(5, "p4m", basis, "relu")
    convolution = GroupConv2D(5, 1, group="p4m", activation="relu")
    layer.build(x.shape)
    convolution.build(x.shape)
    kernel, bias = layer.get_weights()
    convolution.set_weights([kernel[None, None], bias + 0.1])
    layer.bias.assign(bias + 0.1)
    assert (
        relative_difference(*map(as_array, (layer(x), convolution(x)))) < 1e-5
    )


def test_the_fan_in_counts_the_poses():
    spread = keras.initializers.VarianceScaling(1.0, "fan_in", seed=0)
    layer = GroupDense(64, "p4", kernel_initializer=spread)
    layer.build((None, 4, 4, 4, 64))
    assert np.isclose(as_array(layer.kernel).std(), 1 / 16, rtol=0.05)


def test_errors():
    with pytest.raises(ValueError, match=r"`basis`.*'blocks'"):
        GroupDense(3, basis="blocks")
    with pytest.raises(ValueError, match=r"`filters`.*0"):
        GroupDense(0)
    with pytest.raises(ValueError, match=r"`input_activation`.*'swish'"):
        GroupDense(3, input_activation="swish")
    layer = GroupDense(3, "p4m")
    with pytest.raises(ValueError, match="'p4m' has 8 elements"):
        layer.build((None, 4, 4, 4, 3))
