"""Fixtures of the tests of networks and datasets."""

import pytest

from keras_equiattn.applications import datasets


@pytest.fixture(scope="module")
def digits_npz(tmp_path_factory):
    """The upright digits, exported."""
    path = tmp_path_factory.mktemp("export") / "digits.npz"
    return datasets.export("digits_upright", path)
