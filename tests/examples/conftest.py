"""Runs of ``examples/train.py`` that several tests look at."""

import keras
import numpy as np
import pytest
from training_run import arguments
from training_run import load_script
from training_run import tiny_registered

from keras_equiattn.applications.data import datasets


@pytest.fixture(scope="session")
def train():
    with tiny_registered():
        yield load_script()


@pytest.fixture(scope="session")
def npz(tmp_path_factory):
    """A few of the embedded digits as an exported dataset."""
    folder = tmp_path_factory.mktemp("data")
    exported = datasets.export("digits", folder / "digits.npz")
    with np.load(exported) as file:
        few = {
            name: values if name == "metadata" else values[:48]
            for name, values in file.items()
        }
    np.savez(folder / "few.npz", **few)
    return folder / "few.npz"


@pytest.fixture(scope="session")
def whole_run(train, npz, tmp_path_factory):
    """Folder of a run that nothing interrupts."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    policy = keras.config.dtype_policy()
    train.main(arguments(npz, out))
    keras.config.set_dtype_policy(policy)
    return out
