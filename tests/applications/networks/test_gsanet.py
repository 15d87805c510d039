"""The networks of group self-attention."""

import functools
import re

import keras
import numpy as np
import pytest
from layer_contract import as_array
from network_helpers import assert_files_load
from network_helpers import assert_images_matter
from network_helpers import images
from network_helpers import invariance_error
from network_helpers import randomize
from network_helpers import unmoved_by_a_step
from vectors import load_vectors

from keras_equiattn import applications
from keras_equiattn import convert
from keras_equiattn import groups
from keras_equiattn import layers
from keras_equiattn.applications import GSANet
from keras_equiattn.applications import GSANetCIFAR10
from keras_equiattn.applications import GSANetPCam
from keras_equiattn.applications import GSANetRotMNIST
from keras_equiattn.applications.networks import gsanet
from keras_equiattn.applications.networks import gsanet_blocks
from keras_equiattn.applications.networks.common import network as networks
from keras_equiattn.applications.training import reporting
from keras_equiattn.convert.from_g_selfatt import gsa_parts
from keras_equiattn.testing import relative_difference
from keras_equiattn.visualization import attention_maps

# Two blocks, the second of which has a shortcut of its own.
TINY = {
    "kernel_size": 3,
    "filters": 6,
    "block_sizes": (1, 1),
    "expansion": (1, 2),
    "crops": (1, 0),
    "num_heads": 2,
    "input_shape": (6, 6, 2),
    "classes": 3,
}
# One block, with everything that a block can have, compiled sooner.
BLOCK = {
    **TINY,
    "block_sizes": (1,),
    "expansion": 2,
    "crops": 1,
    "norm_between": True,
    "last_pool": True,
}
# Of few channels, for images of the real size.
NARROW = {"filters": 6, "num_heads": 1, "kernel_size": 3}
# With the least size that its crops and pooling leave something of, or nearly.
PRESETS = (
    (GSANetRotMNIST, (24, 24, 1)),
    (GSANetCIFAR10, (8, 8, 3)),
    (GSANetPCam, (80, 80, 3)),
)


def strong_attention(model):
    """Gains and shifts away from one and zero, scores far from equal.

    Small shifts: where maps are normalised again and again, large ones leave
    little of the image. Kernels are drawn anew: on every backend the same.
    """
    rng = np.random.default_rng(0)
    for variable in model.trainable_variables:
        if len(variable.shape) == 1 or variable.name.endswith("bias"):
            start = 1.0 if variable.name.endswith("gamma") else 0.0
            values = start + rng.uniform(-0.3, 0.3, variable.shape)
        else:
            values = rng.normal(0, as_array(variable).std(), variable.shape)
        variable.assign(values)
    for layer in model.layers:
        if hasattr(layer, "query_kernel"):
            for kernel in (layer.query_kernel, layer.key_kernel):
                kernel.assign(6 * kernel)


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
END = ["logits", "logits_sum", "group_max", "flatten", "predictions"]


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
    """Which is twice that of their training script."""
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


@pytest.mark.torch_first
@pytest.mark.parametrize(
    ("group", "options"),
    [
        ("p4", BLOCK),
        # Compile long; the layers are tested on every backend.
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


@pytest.mark.torch_first
@pytest.mark.parametrize("group", ["z2m", "p8", "p12", "p16", "p8m"])
def test_invariance_of_every_registered_group(group):
    """Under what maps the grid onto itself; p4 and p4m are above."""
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
    reason="Keras' dense layers are in float32 on PyTorch, all is on JAX",
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
    """At 96 pixels; at 88 they fit."""
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


@pytest.mark.torch_first
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


@pytest.mark.torch_first
@pytest.mark.parametrize(("network", "shape"), PRESETS)
def test_one_step_of_fit_of_each_preset(network, shape):
    model = network(**NARROW, input_shape=shape)
    still = unmoved_by_a_step(model, images((2, *shape)), np.array([0, 1]))
    assert all(np.isfinite(value).all() for value in model.get_weights())
    # What is added to all scores of a query the softmax takes away again.
    blind = {"key_bias", "row_bias_2", "column_bias_2"}
    assert {path.rsplit("/", 1)[-1] for path in still} <= blind


@pytest.mark.torch_first
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


@pytest.mark.torch_first
def test_files(tmp_path):
    options = {**TINY, "norm_between": True, "input_dropout": 0.1}
    model = GSANet("p4", **options)
    randomize(model)
    x = images((2, 6, 6, 2))
    build = functools.partial(GSANet, "p4", **options)
    assert_files_load(build, model, x, tmp_path)


@pytest.mark.torch_first
@pytest.mark.parametrize(("network", "shape"), PRESETS)
def test_files_of_each_preset(network, shape, tmp_path):
    build = functools.partial(network, **NARROW, input_shape=shape)
    model = build()
    strong_attention(model)
    assert_images_matter(model)
    assert_files_load(build, model, images((2, *shape)), tmp_path)


@pytest.mark.torch_first
def test_attention_maps():
    model = GSANet("p4", **TINY)
    found = attention_maps(model, images((2, 6, 6, 2)))
    blocks = ("stage1_block1", "stage2_block1")
    assert set(found) == {"lift", *(f"{block}_attention" for block in blocks)}
    windows = found["stage2_block1_attention"]["window"]
    assert windows.shape == (2, 2, 2, 4, 2, 4, 3, 3)


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
        ({"epsilon": 0.0}, "`epsilon` must be a positive number.*0.0"),
        ({"epsilon": "1"}, "`epsilon` must be a positive number.*'1'"),
        ({"exact": "no"}, "`exact` must be True or False.*'no'"),
        ({"classes": 0}, "`classes` must be a positive integer.*0"),
        ({"normalization": 3}, "`normalization` must be"),
        ({"weights": "rot_mnist"}, "none for this network"),
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


def load_vector_network(dtype, **options):
    """The authors' network of the vectors, its inputs and outputs."""
    keras.config.set_dtype_policy(dtype)
    arrays = load_vectors("gsa_net_p4")
    model = GSANet(
        "p4",
        3,
        filters=12,
        block_sizes=(1, 2),
        expansion=(1, 2),
        crops=(1, 0, 1),
        num_heads=3,
        norm_between=True,
        epsilon=1e-12,
        input_shape=(14, 14, 2),
        classes=4,
        **options,
    )
    state = {
        key.removeprefix("w."): value
        for key, value in arrays.items()
        if key.startswith("w.")
    }
    return model, state, arrays


@pytest.mark.once
def test_agrees_with_the_authors():
    # On PyTorch Keras computes dense layers in float32 all the same.
    double = keras.backend.backend() == "tensorflow"
    model, state, arrays = load_vector_network(
        "float64" if double else "float32"
    )
    assert convert.g_selfatt(model, state) is model
    inverse = groups.get("p4").inverse
    expected = {
        key.removeprefix("y."): value
        for key, value in arrays.items()
        if key.startswith("y.")
    }
    assert len(expected) == 11
    outputs = keras.Model(
        model.input, [model.get_layer(name).output for name in expected]
    )(arrays["x"].transpose(0, 2, 3, 1).astype(model.input.dtype))
    for y, theirs in zip(outputs, expected.values(), strict=True):
        if theirs.ndim == 5:
            theirs = theirs.transpose(0, 3, 4, 2, 1)[..., inverse, :]
        # Of most layers there is the first image alone.
        error = relative_difference(as_array(y)[: len(theirs)], theirs)
        assert error < (1e-10 if double else 1e-4)
    # Their code itself is not equivariant.
    error = relative_difference(as_array(outputs[-1]), arrays["y_theirs"])
    assert 1e-3 < error < 0.1


@pytest.mark.once
@pytest.mark.parametrize(
    ("network", "blocks", "norms", "last"),
    [
        (GSANetRotMNIST, (0, 1, 3, 4, 5), (), 6),
        (
            GSANetCIFAR10,
            (0, 3, 8, 11, 16, 19),
            (1, 4, 9, 12, 17, 20),
            22,
        ),
        (GSANetPCam, (1, 5, 8, 12), (2, 6, 9, 13), 16),
    ],
)
@pytest.mark.parametrize("norm", gsanet_blocks.NORMS)
def test_names_of_the_authors(network, blocks, norms, last, norm):
    """Where the blocks are in their list, pooling and dropout counted."""
    found = gsa_parts(network("p4", norm=norm, epsilon=1e-12))
    modules = {}
    for key in found:
        module, *rest = key.split(".")
        if module == "transformer":
            modules.setdefault(int(rest[0]), set()).add(rest[1])
    assert set(modules) == {*blocks, *norms, last}
    for index in blocks:
        assert modules[index] - {"shortcut"} == {"attention", "mlp"}
    end = "weight" if norm == "batch" else "layer_norm"
    assert all(end in modules[index] for index in norms)
    assert modules[last] == {"weight"}
    moving = [key for key in found if key.endswith("running_mean")]
    count = 1 + 4 * len(blocks) + len(norms)
    assert len(moving) == (count if norm == "batch" else 0)


@pytest.mark.once
def test_what_does_not_fit_is_named_and_nothing_is_loaded():
    model, state, _ = load_vector_network("float32")
    before = model.get_weights()
    missing = "transformer.4.shortcut.0.weight"
    state[f"{missing}s"] = state.pop(missing)
    key = "transformer.0.attention.2.query.weight"
    state[key] = state[key][:, :6]
    with pytest.raises(ValueError, match="does not fit 'gsanet_p4'") as error:
        convert.g_selfatt(model, state)
    message = str(error.value)
    assert f"Missing: {missing}." in message
    assert f"Not used by the model: {missing}s." in message
    assert f"{key} is (18, 6, 1, 1, 1), must be (18, 12, 1, 1, 1)" in message
    assert "looks" not in message
    assert all(map(np.array_equal, before, model.get_weights()))
    other = GSANet("p4m", **TINY, epsilon=1e-12)
    message = "looks on a group of order 4, the model is on a group of order 8"
    with pytest.raises(ValueError, match=message):
        convert.g_selfatt(other, state)


@pytest.mark.once
def test_another_epsilon_is_refused():
    message = "with epsilon=1e-12.*LiftingSelf.* with epsilon=0.001"
    with pytest.raises(ValueError, match=message):
        convert.g_selfatt(GSANet("p4", **TINY), {})


@pytest.mark.once
def test_models_that_are_no_gsanet():
    with pytest.raises(ValueError, match=r"must be a `GSANet`.*'p4'"):
        convert.g_selfatt("p4", {})
    x = inputs = keras.Input((6, 6, 2))
    x = layers.LiftingSelfAttention2D(6, 3, 2, 3, epsilon=1e-12, name="lift")(x)
    model = keras.Model(inputs, keras.layers.Dense(2, name="mine")(x))
    with pytest.raises(ValueError, match="must be a `GSANet`"):
        convert.g_selfatt(model, {})
    x = keras.layers.Dense(2, name="mine")(x)
    model = keras.Model(inputs, keras.layers.Dense(2, name="logits")(x))
    with pytest.raises(ValueError, match="Dense 'mine' has 'kernel'"):
        convert.g_selfatt(model, {})
