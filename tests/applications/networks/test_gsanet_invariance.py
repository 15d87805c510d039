"""Networks of group self-attention do not see turns of the image."""

import keras
import pytest
from gsanet_helpers import BLOCK
from gsanet_helpers import NARROW
from gsanet_helpers import strong_attention
from gsanet_helpers import TINY
from network_helpers import assert_images_matter
from network_helpers import images
from network_helpers import invariance_error
from sweeps import swept

from keras_equiattn import groups
from keras_equiattn.applications import GSANet
from keras_equiattn.applications import GSANetCIFAR10
from keras_equiattn.applications import GSANetPCam
from keras_equiattn.applications import GSANetRotMNIST
from keras_equiattn.applications.networks import gsanet_blocks
from keras_equiattn.visualization import attention_maps


@pytest.mark.parametrize(
    ("group", "options"),
    [
        ("p4", BLOCK),
        # These compile slowly; the layers are tested on every backend.
        pytest.param(
            "p4", {**TINY, "norm_between": True}, marks=pytest.mark.once
        ),
        pytest.param(
            "p4m", {**TINY, "kernel_size": None}, marks=pytest.mark.once
        ),
        pytest.param(
            "p4",
            {**TINY, "norm": "batch", "head": "mean"},
            marks=pytest.mark.once,
        ),
    ],
)
def test_invariance_with_strong_attention(group, options):
    model = GSANet(group, **options)
    strong_attention(model)
    # One turn, and one turn after a mirror.
    elements = [1, 5] if group == "p4m" else [1]
    assert invariance_error(model, elements=elements) < 1e-5
    assert_images_matter(model)
    if group == "p4":  # a mirror is not of the group
        assert invariance_error(model, "p4m", elements=[4]) > 1e-4


@pytest.mark.parametrize(
    "group", swept(("z2m", "p8", "p12", "p16", "p8m"), "p8")
)
def test_invariance_of_every_registered_group(group):
    """Under elements that keep the grid; p4 and p4m are tested above."""
    model = GSANet(group, **TINY)
    strong_attention(model)
    assert_images_matter(model)
    grid = groups.get(group).grid_elements
    assert len(grid) == {"z2m": 2, "p8m": 8}.get(group, 4)
    assert invariance_error(model, elements=grid[1:]) < 1e-5
    # Another group's mirror, or the quarter turn that z2m lacks.
    other, element = ("p4", 1) if group == "z2m" else ("p4m", 4)
    if group != "p8m":
        assert invariance_error(model, other, elements=[element]) > 1e-4


@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow",
    reason="Keras computes dense layers in float32 on PyTorch and JAX",
)
@pytest.mark.parametrize("norm", gsanet_blocks.NORMS)
def test_invariance_float64(norm):
    keras.config.set_dtype_policy("float64")
    model = GSANet("p4", **BLOCK, norm=norm)
    strong_attention(model)
    assert invariance_error(model, elements=[1]) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "group", "options", "limit"),
    [
        (GSANetRotMNIST, "p4", {}, 1e-5),
        (GSANetRotMNIST, "p8", NARROW, 1e-5),
        (GSANetRotMNIST, "p4m", NARROW, 1e-5),
        # On many pixels, or in many channels, rounding adds up.
        (GSANetCIFAR10, "z2m", {}, 3e-4),
        (GSANetCIFAR10, "z2m", NARROW, 1e-4),
        (GSANetCIFAR10, "p4", NARROW, 1e-4),
        (GSANetPCam, "p4", {}, 1e-4),
        (GSANetPCam, "p4m", NARROW, 1e-5),
    ],
)
def test_invariance_at_full_size(network, group, options, limit):
    model = network(group, **options)
    strong_attention(model)
    elements = (
        [1, 5] if group == "p4m" else [groups.get(group).grid_elements[1]]
    )
    assert invariance_error(model, elements=elements) < limit
    assert_images_matter(model)


@pytest.mark.slow
def test_crops_of_the_authors_are_approximate():
    """They are approximate at 96 pixels, and exact at 88."""
    options = {**NARROW, "crops": (0, 2, 1, 1)}
    for size, exact in ((96, False), (88, True)):
        model = GSANetPCam(
            "p4", input_shape=(size, size, 3), exact=exact, **options
        )
        strong_attention(model)
        error = invariance_error(model, elements=[1])
        assert error < 1e-5 if exact else error > 1e-3


@pytest.mark.once
@pytest.mark.parametrize("group", ["z2", "z2m", "p2", "p2m", "p4", "p4m", "p8"])
def test_every_group(group):
    model = GSANet(group, **TINY)
    found = {x.group.name for x in model.layers if hasattr(x, "group")}
    assert found == {group}


def test_attention_maps():
    model = GSANet("p4", **TINY)
    found = attention_maps(model, images((2, 6, 6, 2)))
    blocks = ("stage1_block1", "stage2_block1")
    assert set(found) == {"lift", *(f"{block}_attention" for block in blocks)}
    windows = found["stage2_block1_attention"]["window"]
    assert windows.shape == (2, 2, 2, 4, 2, 4, 3, 3)
