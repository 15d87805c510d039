"""Networks of group self-attention train, and are saved and loaded."""

import functools

import keras
import numpy as np
import pytest
from gsanet_helpers import BLOCK
from gsanet_helpers import END
from gsanet_helpers import NARROW
from gsanet_helpers import strong_attention
from gsanet_helpers import TINY
from layer_contract import as_array
from network_helpers import assert_files_load
from network_helpers import assert_images_matter
from network_helpers import images
from network_helpers import randomize
from network_helpers import unmoved_by_a_step

from keras_equiattn.applications import GSANet
from keras_equiattn.applications import GSANetCIFAR10
from keras_equiattn.applications import GSANetPCam
from keras_equiattn.applications import GSANetRotMNIST

# Each with about the smallest image that its crops and pooling allow.
PRESETS = (
    (GSANetCIFAR10, (8, 8, 3)),
    (GSANetPCam, (80, 80, 3)),
    (GSANetRotMNIST, (24, 24, 1)),
)
EACH_PRESET = pytest.mark.parametrize(
    ("network", "shape"),
    [
        PRESETS[0],
        *(pytest.param(*x, marks=pytest.mark.sweep) for x in PRESETS[1:]),
    ],
)


def test_one_step_of_fit():
    model = GSANet(
        "p4",
        **BLOCK,
        input_dropout=0.1,
        pool_dropout=0.1,
        normalization=(0.1, 0.5),
    )
    model.compile(
        "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    before = [as_array(v.value) for v in model.trainable_variables]
    loss = model.train_on_batch(images((2, 6, 6, 2)), np.array([0, 2]))
    assert np.isfinite(loss)
    assert all(np.isfinite(value).all() for value in model.get_weights())
    changed = {
        variable.path: not np.array_equal(as_array(variable.value), start)
        for variable, start in zip(
            model.trainable_variables, before, strict=True
        )
    }
    for name in (
        "lift/output_kernel",
        "lift/positions/row_kernel_2",
        "stage1_block1_attention/group_embedding",
        "stage1_block1_shortcut/kernel",
        "logits/kernel",
    ):
        assert changed[name]


@EACH_PRESET
def test_one_step_of_fit_of_each_preset(network, shape):
    model = network(**NARROW, input_shape=shape)
    still = unmoved_by_a_step(model, images((2, *shape)), np.array([0, 1]))
    assert all(np.isfinite(value).all() for value in model.get_weights())
    # The softmax ignores what is added to all scores of a query.
    blind = {"key_bias", "row_bias_2", "column_bias_2"}
    assert {path.rsplit("/", 1)[-1] for path in still} <= blind


def test_mixed_precision_returns_float32():
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = GSANet("p4", **TINY)
    y = model(images((2, 6, 6, 2)))
    assert keras.backend.standardize_dtype(y.dtype) == "float32"
    assert np.isfinite(as_array(y)).all()
    attention = model.get_layer("stage1_block1_attention")
    assert attention.compute_dtype == "bfloat16"
    for name in END:
        assert model.get_layer(name).compute_dtype == "float32"


def test_files(tmp_path):
    options = {**TINY, "norm_between": True, "input_dropout": 0.1}
    model = GSANet("p4", **options)
    randomize(model)
    x = images((2, 6, 6, 2))
    build = functools.partial(GSANet, "p4", **options)
    assert_files_load(build, model, x, tmp_path)


@EACH_PRESET
def test_files_of_each_preset(network, shape, tmp_path):
    build = functools.partial(network, **NARROW, input_shape=shape)
    model = build()
    strong_attention(model)
    assert_images_matter(model)
    assert_files_load(build, model, images((2, *shape)), tmp_path)
