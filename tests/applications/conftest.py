"""Fixtures of the tests of networks and datasets."""

import pytest

# Fixtures import the package, and this file does not: where pytest is given
# this folder, it reads the file before jaxtyping checks what is imported.


@pytest.fixture(scope="module")
def digits_npz(tmp_path_factory):
    """The upright digits, exported."""
    from keras_equiattn.applications.data import datasets

    path = tmp_path_factory.mktemp("export") / "digits.npz"
    return datasets.export("digits_upright", path)


@pytest.fixture
def short_resnet(monkeypatch):
    """One block in each stage of the residual networks."""
    from keras_equiattn.applications.networks import resnet29
    from keras_equiattn.applications.networks import resnet44

    monkeypatch.setattr(resnet44, "BLOCKS", 1)
    monkeypatch.setattr(resnet29, "BLOCKS", dict.fromkeys(resnet29.BLOCKS, 1))


@pytest.fixture
def short(short_resnet, monkeypatch):
    """Two blocks in the dense network as well."""
    from keras_equiattn.applications.networks import pcam_densenet

    blocks = pcam_densenet.BLOCK_ATTENTION[:2]
    monkeypatch.setattr(pcam_densenet, "BLOCK_ATTENTION", blocks)
