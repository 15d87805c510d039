"""The networks of group self-attention: architecture and arguments."""

import re

import keras
import numpy as np
import pytest
from gsanet_helpers import END
from gsanet_helpers import NARROW
from gsanet_helpers import TINY
from layer_contract import as_array

from keras_equiattn import applications
from keras_equiattn import groups
from keras_equiattn.applications import GSANet
from keras_equiattn.applications import GSANetCIFAR10
from keras_equiattn.applications import GSANetPCam
from keras_equiattn.applications import GSANetRotMNIST
from keras_equiattn.applications.networks import gsanet
from keras_equiattn.applications.networks import gsanet_blocks
from keras_equiattn.applications.networks.common import network as networks
from keras_equiattn.applications.training import reporting


@pytest.mark.once
@pytest.mark.parametrize("kernel_size", [3, None])
def test_parameters_do_not_depend_on_the_window(kernel_size):
    model = GSANetRotMNIST("p4", kernel_size)
    assert reporting.count_parameters(model) == 44_428


@pytest.mark.once
def test_parameters_are_where_the_authors_have_them():
    model = GSANetRotMNIST()
    counts = {}
    for layer in model.layers:
        for variable in layer.trainable_weights:
            kind = variable.name.split("_")[0]
            kind = kind if hasattr(layer, "query_kernel") else "other"
            counts[kind] = counts.get(kind, 0) + int(np.prod(variable.shape))
    assert counts == {
        **dict.fromkeys(("query", "key", "value"), 9_630),
        "output": 10_920,
        **dict.fromkeys(("row", "column"), 724),
        "group": 80,
        "other": 2_450 + 440 + 200,
    }


def block_names(block, *, crops=False, shortcut=False, between=False):
    parts = ["norm1", "silu1", "attention", "norm2", "silu2", "dropout"]
    parts += ["add1", "dense1", "norm3", "silu3", "dense2", "norm4", "add2"]
    parts += ["crop", "shortcut_crop"] if crops else []
    parts += ["shortcut"] if shortcut else []
    parts += ["norm5", "silu5"] if between else []
    return [f"{block}_{part}" for part in parts]


START = ["image", "lift", "lift_norm", "lift_silu"]


@pytest.mark.once
def test_layers_are_named_after_the_architecture():
    expected = [*START, *END, "stage1_pool"]
    for block, crop in (
        ("stage1_block1", True),
        ("stage1_block2", False),
        ("stage2_block1", True),
        ("stage2_block2", True),
        ("stage2_block3", True),
    ):
        expected += block_names(block, crops=crop)
    model = GSANetRotMNIST()
    assert sorted(x.name for x in model.layers) == sorted(expected)
    # All that is computed is a layer, and called the same every time.
    assert sorted(x.name for x in model.operations) == sorted(expected)

    expected = [*START, *END, "image_dropout"]
    for stage in (1, 2, 3):
        for block in (1, 2):
            expected += block_names(
                f"stage{stage}_block{block}",
                shortcut=(stage, block) == (2, 1),
                between=True,
            )
        if stage < 3:
            expected += [f"stage{stage}_pool", f"stage{stage}_dropout"]
    names = [x.name for x in GSANetCIFAR10().layers]
    assert sorted(names) == sorted(expected)

    expected = [*START, *END, *(f"stage{n}_pool" for n in (1, 2, 3, 4))]
    for block, crop, shortcut in (
        ("stage2_block1", False, True),
        ("stage3_block1", True, True),
        ("stage3_block2", True, False),
        ("stage4_block1", True, True),
    ):
        expected += block_names(
            block, crops=crop, shortcut=shortcut, between=True
        )
    names = [x.name for x in GSANetPCam(value_dropout=0.1).layers]
    assert sorted(names) == sorted(expected)


@pytest.mark.once
@pytest.mark.parametrize(
    ("network", "options", "sizes", "widths"),
    [
        (GSANetRotMNIST, {}, [24, 24, 8, 6, 4], 5 * [20]),
        (GSANetCIFAR10, {}, [32, 32, 16, 16, 8, 8], [96, 96, *4 * [192]]),
        (GSANetPCam, {}, [48, 20, 16, 4], [24, 48, 48, 96]),
        (
            GSANetPCam,
            {"crops": (0, 2, 1, 1), "exact": False},
            [48, 20, 18, 7],
            [24, 48, 48, 96],
        ),
    ],
)
def test_sizes_of_maps(network, options, sizes, widths):
    model = network("p4", **options)
    outputs = [x.output for x in model.layers if x.name.endswith("_add2")]
    assert [tuple(x.shape[1:]) for x in outputs] == [
        (size, size, 4, width)
        for size, width in zip(sizes, widths, strict=True)
    ]
    attention = [x for x in model.layers if x.name.endswith("_attention")]
    assert [x.key_dim for x in attention] == [width // 2 for width in widths]
    assert {x.num_heads for x in attention} == {9}


@pytest.mark.once
def test_expansion_of_a_stage_of_none_is_not_used():
    options = {**TINY, "block_sizes": (0, 1), "crops": 0}
    for expansion in ((5, 1), (1, 1)):
        model = GSANet("p4", **{**options, "expansion": expansion})
        assert model.get_layer("logits").kernel.shape == (6, 3)


@pytest.mark.once
@pytest.mark.parametrize("norm", gsanet_blocks.NORMS)
@pytest.mark.parametrize(
    ("network", "others"),
    [
        (GSANetRotMNIST, {}),
        (
            GSANetCIFAR10,
            {"image_dropout": {0.2}, "stage_dropout": {0.3}},
        ),
        (GSANetPCam, {}),
    ],
)
def test_dropout_and_epsilon_of_the_presets(network, others, norm):
    model = network(norm=norm)
    rates, epsilons = {}, set()
    for layer in model.layers:
        if isinstance(layer, keras.layers.Dropout):
            kind = re.sub(r"\d", "", layer.name)
            rates.setdefault(kind, set()).add(layer.rate)
        if hasattr(layer, "attention_dropout"):
            rates.setdefault("attention", set()).add(layer.attention_dropout)
            epsilons.add(("positions", layer.positions.epsilon))
        if "norm" in layer.name:
            epsilons.add(("norm", layer.epsilon))
    blocks = {"attention": {0.1}, "stage_block_dropout": {0.1}}
    assert rates == {**blocks, **others}
    of_norm = 1e-5 if norm == "batch" else 1e-3
    assert epsilons == {("positions", 1e-3), ("norm", of_norm)}


@pytest.mark.once
def test_names_of_models():
    assert GSANet("p4m", **TINY).name == "gsanet_p4m"
    assert GSANet(name="mine", **TINY).name == "mine"
    assert GSANetPCam("p4").name == "gsanet_pcam_p4"
    group = groups.get("z2m")
    assert GSANetRotMNIST(group, 3).name == "gsanet_rotmnist_z2m"


@pytest.mark.once
@pytest.mark.parametrize(
    ("network", "width"),
    [(GSANetRotMNIST, 20), (GSANetCIFAR10, 96), (GSANetPCam, 12)],
)
def test_widths_of_the_paper(network, width):
    model = network("z2", filters=None, block_sizes=(1,), expansion=1, crops=0)
    assert model.get_layer("lift").filters == width


@pytest.mark.once
def test_third_arguments_of_presets_are_named():
    with pytest.raises(TypeError, match="positional arguments"):
        GSANetRotMNIST("p4", 5, 20)


@pytest.mark.once
def test_groups_that_are_none():
    with pytest.raises(TypeError, match="Received: 4"):
        GSANet(4)


@pytest.mark.once
def test_kernels_start_with_the_variance_of_the_authors_class():
    """That variance is twice the one of their training script."""
    model = GSANetCIFAR10("p4")
    for name, fan_in in (
        ("stage2_block1_shortcut", 96),
        ("stage2_block1_dense1", 192),
        ("stage2_block1_dense2", 96),
        ("logits", 192),
    ):
        layer = model.get_layer(name)
        deviation = np.sqrt(2 / fan_in)
        np.testing.assert_allclose(
            as_array(layer.kernel.value).std(), deviation, rtol=0.06
        )
        if layer.use_bias:
            np.testing.assert_array_equal(as_array(layer.bias.value), 0)
    attention = model.get_layer("stage2_block1_attention")
    for weight, fan_in in (
        (attention.query_kernel, 96),
        (attention.output_kernel, 9 * 96),
        (attention.positions.row_kernel_2, 16),
    ):
        deviation = np.sqrt(2 / fan_in)
        found = as_array(weight.value).std()
        np.testing.assert_allclose(found, deviation, rtol=0.15)
    embedding = as_array(attention.group_embedding.value)
    np.testing.assert_allclose(embedding.std(), 1, rtol=0.2)


@pytest.mark.once
def test_windows_are_those_of_the_authors_unless_asked_for():
    for options, expected in (
        ({}, "square"),
        ({"window_shape": "disc"}, "disc"),
    ):
        model = GSANet("p8", **TINY, **options)
        shapes = {
            layer.window_shape
            for layer in model.layers
            if hasattr(layer, "window_shape")
        }
        assert shapes == {expected}
    preset = GSANetRotMNIST("p8", window_shape="disc")
    assert preset.get_layer("lift").window_shape == "disc"


@pytest.mark.once
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"group": "p3"}, "Unknown group 'p3'"),
        ({"kernel_size": 4}, "`kernel_size` must be an odd .*or None.*: 4"),
        ({"kernel_size": 0}, "`kernel_size` must be an odd .*or None.*: 0"),
        ({"kernel_size": "5"}, "`kernel_size` must be an odd .*or None.*'5'"),
        ({"filters": 5}, "`filters` must be an integer of at least 6.*5"),
        ({"num_heads": 0}, "`num_heads` must be a positive integer.*0"),
        ({"num_heads": "9"}, "`num_heads` must be a positive integer.*'9'"),
        ({"block_sizes": ()}, r"one for each stage. Received: \(\)"),
        ({"block_sizes": 3}, "`block_sizes` must be non-negative.*3"),
        ({"block_sizes": (1, -1)}, r"`block_sizes` must be .*\(1, -1\)"),
        (
            {"expansion": (1, 2, 3)},
            "`expansion` must be a positive integer or 2 of them, one for "
            r"each stage of `block_sizes`. Received: \(1, 2, 3\)",
        ),
        ({"expansion": 0}, "`expansion` must be a positive integer.*0"),
        (
            {"crops": (1, 2)},
            "`crops` must be a non-negative integer or 5 of them, one for "
            r"each block of `block_sizes`. Received: \(1, 2\)",
        ),
        ({"crops": 1.5}, "`crops` must be a non-negative integer.*1.5"),
        ({"crops": "10000"}, "`crops` must be a non-negative .*'10000'"),
        (
            {"crops": np.full(5, 0.5)},
            r"`crops` must be a non-negative integer or 5 .*array\(\[0.5, ",
        ),
        (
            {"expansion": np.array([[1], [2]])},
            r"`expansion` must be a positive integer or 2 .*array\(\[\[1\]",
        ),
        ({"norm": "group"}, "`norm` must be 'layer' or 'batch'.*'group'"),
        ({"norm": None}, "`norm` must be 'layer' or 'batch'.*None"),
        ({"norm_between": 1}, "`norm_between` must be True or False.*1"),
        ({"last_pool": 1}, "`last_pool` must be True or False.*1"),
        ({"head": "sum"}, "`head` must be 'max' or 'mean'.*'sum'"),
        ({"value_dropout": 1}, "`value_dropout` must be a number from 0.*1"),
        ({"attention_dropout": -1}, "`attention_dropout` must be .*-1"),
        ({"window_shape": "round"}, "`window_shape` must be 'square'.*'round'"),
        (
            {"window_shape": "disc", "kernel_size": None},
            "`window_shape` must be 'square'. Received: 'disc'",
        ),
        ({"epsilon": 0.0}, "`epsilon` must be a positive number.*0.0"),
        ({"epsilon": "1"}, "`epsilon` must be a positive number.*'1'"),
        ({"exact": "no"}, "`exact` must be True or False.*'no'"),
        ({"classes": 0}, "`classes` must be a positive integer.*0"),
        ({"normalization": 3}, "`normalization` must be"),
        ({"weights": "rot_mnist"}, "none for these arguments"),
        ({"input_shape": (28, 28)}, r"must be \(height, width, channels\)"),
        (
            {"input_shape": (29, 29, 1)},
            "of GSANet with group 'p4' and exact=True must have a size such as "
            r"26 x 26, 28 x 28, 30 x 30, 32 x 32: .* not exactly equivariant. "
            r"Received: \(29, 29, 1\). exact=False takes this size and is",
        ),
        (
            {"crops": 20},
            r"such as 322 x 322, 324 x 324, 326 x 326, 328 x 328: .* do not "
            r"fit .* Received: \(28, 28, 1\)",
        ),
        (
            {"crops": 2000},
            "group 'p4' and exact=True: no image of up to 4096 x 4096 pixels "
            r".* cut off up to 2000 pixels .* Received: \(28, 28, 1\)",
        ),
        ({"input_shape": (18, 18, 1)}, r"do not fit .* \(18, 18, 1\)"),
    ],
)
def test_bad_arguments(arguments, message, monkeypatch):
    """Before anything is built."""

    def fail(network):
        pytest.fail("It began to build before the arguments were checked.")

    monkeypatch.setattr(networks.Network, "start", fail)
    with pytest.raises(ValueError, match=message):
        GSANet(**arguments)


@pytest.mark.once
def test_numbers_and_sequences_of_numpy():
    def sizes(**options):
        model = GSANet("p4", **{**TINY, **options})
        attention = model.get_layer("stage2_block1_attention")
        return [x.output.shape for x in model.layers], attention.get_config()

    names = ("block_sizes", "expansion", "crops")
    as_arrays = {name: np.array(TINY[name]) for name in names}
    of_numbers = {name: tuple(array) for name, array in as_arrays.items()}
    numbers = {
        "kernel_size": np.int64(3),
        "filters": np.int32(6),
        "num_heads": np.array(2),
        "epsilon": np.float32(1e-3),
    }
    expected = sizes(epsilon=float(np.float32(1e-3)))
    assert sizes(**as_arrays, **numbers) == expected
    assert sizes(**of_numbers, **numbers) == expected
    assert sizes(crops=np.array(0)) == sizes(crops=0)


@pytest.mark.once
def test_crops_that_are_not_exact_are_refused():
    message = (
        "group 'p4m' and exact=True must have a size such as 72 x 72, "
        r"88 x 88, 104 x 104, 120 x 120: .* Received: \(96, 96, 3\). "
        "exact=False takes this size and is approximate"
    )
    with pytest.raises(ValueError, match=message):
        GSANetPCam("p4m", crops=(0, 2, 1, 1))
    for options in (
        {"exact": False},
        {"group": "z2"},
        {"input_shape": (88, 104, 3)},
    ):
        model = GSANetPCam(**{"crops": (0, 2, 1, 1), **options})
        assert model.output_shape == (None, 2)


@pytest.mark.once
@pytest.mark.parametrize("name", gsanet.VARIANTS)
def test_registered_groups(name):
    """A group of every name, with what `get_model` passes on."""
    options = {"block_sizes": (1,), "crops": 0, **NARROW}
    model = applications.get_model(
        f"gsanet_rotmnist_{name}", input_shape=(6, 6, 3), **options
    )
    assert reporting.group_of(model) == name
