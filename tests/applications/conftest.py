"""Fixtures of the tests of networks and datasets."""

import pytest

from keras_equiattn.applications.data import datasets
from keras_equiattn.applications.networks import pcam_densenet
from keras_equiattn.applications.networks import resnet29
from keras_equiattn.applications.networks import resnet44


@pytest.fixture(scope="module")
def digits_npz(tmp_path_factory):
    """The upright digits, exported."""
    path = tmp_path_factory.mktemp("export") / "digits.npz"
    return datasets.export("digits_upright", path)


@pytest.fixture
def short_resnet(monkeypatch):
    """One block in each stage of the residual networks."""
    monkeypatch.setattr(resnet44, "BLOCKS", 1)
    monkeypatch.setattr(resnet29, "BLOCKS", dict.fromkeys(resnet29.BLOCKS, 1))


@pytest.fixture
def short(short_resnet, monkeypatch):
    """Two blocks in the dense network as well."""
    blocks = pcam_densenet.BLOCK_ATTENTION[:2]
    monkeypatch.setattr(pcam_densenet, "BLOCK_ATTENTION", blocks)
