"""Dropout of all poses of a value at once."""

import keras
import numpy as np
import pytest
from layer_contract import as_array
from layer_contract import LayerCase
from layer_contract import LayerContract

from keras_equiattn.layers import GroupDropout


class TestGroupDropout(LayerContract):
    layer = GroupDropout
    arguments = ({"rate": 0.3, "data_format": "channels_first", "seed": 7},)
    without = ("noise_shape",)
    cases = (
        LayerCase(
            GroupDropout,
            {"rate": 0.5},
            (2, 5, 5, 4, 3),
            (2, 5, 5, 4, 3),
            weights=0,
            group="p4",
            rectangle=(4, 6),
            seed_generators=1,
        ),
    )

    def test_equivariance_in_training(self, case):
        pytest.skip("pixels are drawn one by one")


MAPS = np.random.default_rng(0).normal(size=(2, 5, 5, 4, 6)).astype("float32")


@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
def test_poses_share_what_is_dropped(data_format):
    x, axis = MAPS, 3
    if data_format == "channels_first":
        x, axis = np.moveaxis(x, -1, 1), 4
    layer = GroupDropout(0.5, data_format=data_format, seed=1)
    y = as_array(layer(x, training=True))
    dropped = y == 0
    assert (dropped == dropped.take([0], axis=axis)).all()
    assert 0.3 < dropped.mean() < 0.7
    np.testing.assert_allclose(y[~dropped], 2 * x[~dropped], rtol=1e-6)
    # Pixels, channels and images are drawn independently.
    for other in {0, 1, 2, 3, 4} - {axis}:
        assert (dropped != dropped.take([0], axis=other)).any()
    np.testing.assert_array_equal(as_array(layer(x)), x)


def test_files(tmp_path):
    layer = GroupDropout(0.3, data_format="channels_first", seed=7)
    config = layer.get_config()
    assert (config["rate"], config["seed"]) == (0.3, 7)
    assert config["data_format"] == "channels_first"
    again = GroupDropout.from_config(config)
    assert again.noise_shape == layer.noise_shape
    model = keras.Sequential([keras.Input((6, 5, 5, 4)), layer])
    model.save(tmp_path / "model.keras")
    revived = keras.saving.load_model(tmp_path / "model.keras")
    assert revived.layers[0].rate == 0.3


@pytest.mark.once
@pytest.mark.parametrize("rate", [1.0, -0.1, "much"])
def test_bad_rates(rate):
    with pytest.raises(ValueError, match="`rate` must be"):
        GroupDropout(rate)


@pytest.mark.parametrize("training", [False, True])
def test_images_are_refused(training):
    layer = GroupDropout(0.5, name="drop")
    with pytest.raises(
        ValueError, match=r"'drop' takes feature maps.*\(2, 5, 5, 3\)"
    ):
        layer(np.ones((2, 5, 5, 3), "float32"), training=training)
