"""The loss of directions."""

import keras
import numpy as np
import pytest
from layer_contract import as_array

from keras_equiattn.losses import AngularLoss


def angles(seed):
    return np.random.default_rng(seed).uniform(-4, 4, (2, 3, 3, 2))


@pytest.mark.parametrize(("signed", "frequency"), [(True, 1), (False, 2)])
def test_agrees_with_numpy(signed, frequency):
    true, predicted = angles(0), angles(1)
    expected = (1 - np.cos(frequency * (true - predicted))).mean(axis=-1)
    found = AngularLoss(signed, reduction=None)(true, predicted)
    np.testing.assert_allclose(as_array(found), expected, rtol=1e-4, atol=1e-5)
    found = AngularLoss(signed)(true, predicted)
    np.testing.assert_allclose(as_array(found), expected.mean(), rtol=1e-5)
    # Whole periods change nothing, nor do turns of both angles together.
    turned = predicted + 2 * np.pi / frequency
    np.testing.assert_allclose(
        as_array(AngularLoss(signed)(true, turned)), expected.mean(), rtol=1e-4
    )
    np.testing.assert_allclose(
        as_array(AngularLoss(signed)(true + 1, predicted + 1)),
        expected.mean(),
        rtol=1e-4,
    )


def test_small_differences_are_not_lost():
    found = as_array(AngularLoss()(np.zeros((1, 1)), np.full((1, 1), 1e-5)))
    np.testing.assert_allclose(found, 5e-11, rtol=1e-3)


def test_is_revived_from_its_config():
    loss = AngularLoss(signed=False, reduction="sum", name="axes")
    config = keras.losses.serialize(loss)
    revived = keras.losses.deserialize(config)
    assert not revived.signed
    assert (revived.reduction, revived.name) == ("sum", "axes")


@pytest.mark.once
def test_bad_arguments():
    with pytest.raises(ValueError, match="`signed` must be True or False"):
        AngularLoss(signed="no")
    with pytest.raises(ValueError, match=r"same shape.*\(2, 3\).*\(2, 4\)"):
        AngularLoss()(np.zeros((2, 3)), np.zeros((2, 4)))
