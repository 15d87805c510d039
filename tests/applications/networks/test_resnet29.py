"""The residual networks of convolution, affine self-convolution and SASA."""

import keras
import numpy as np
import pytest
from layer_contract import as_array
from network_helpers import assert_images_matter
from network_helpers import images
from network_helpers import invariance_error
from network_helpers import randomize
from sweeps import swept

from keras_equiattn import layers
from keras_equiattn.applications import ResNet29
from keras_equiattn.applications import ResNet83
from keras_equiattn.applications.networks import resnet29
from keras_equiattn.applications.training import reporting
from keras_equiattn.visualization import attention_maps

SMALL = {"filters": 4, "num_heads": 2}
TINY = {**SMALL, "input_shape": (4, 4, 3), "classes": 3}


@pytest.fixture
def small(short_resnet, monkeypatch):
    """One block a stage, and a window that compiles faster."""
    monkeypatch.setattr(resnet29, "WINDOW", 3)


@pytest.mark.once
@pytest.mark.parametrize(
    ("group", "mixer", "squeeze_excite", "shallow", "deep"),
    [
        ("z2", "conv", False, 336_244, 892_660),
        pytest.param(
            "z2", "conv", True, 369_928, 993_712, marks=pytest.mark.sweep
        ),
        pytest.param(
            "z2", "sasa", False, 258_292, 658_804, marks=pytest.mark.sweep
        ),
        pytest.param(
            "z2", "simple_asc", False, 240_484, 605_380, marks=pytest.mark.sweep
        ),
        pytest.param(
            "z2", "asc", False, 290_884, 756_580, marks=pytest.mark.sweep
        ),
        pytest.param(
            "z2", "asc", True, 324_568, 857_632, marks=pytest.mark.sweep
        ),
        ("p4", "conv", False, 320_748, 873_132),
        pytest.param(
            "p4", "conv", True, 353_844, 972_420, marks=pytest.mark.sweep
        ),
        pytest.param(
            "p4", "asc", False, 283_452, 761_244, marks=pytest.mark.sweep
        ),
        ("p4", "asc", True, 316_548, 860_532),
    ],
)
@pytest.mark.parametrize(
    "network", [ResNet29, pytest.param(ResNet83, marks=pytest.mark.slow)]
)
def test_parameters_for_100_classes(
    network, group, mixer, squeeze_excite, shallow, deep
):
    model = network(group, mixer, squeeze_excite, classes=100)
    expected = shallow if network is ResNet29 else deep
    assert reporting.count_parameters(model) == expected


@pytest.mark.once
@pytest.mark.parametrize(
    ("group", "mixer", "widths", "count"),
    [
        pytest.param(
            "z2m", "conv", (11, 23, 45), 309_785, marks=pytest.mark.sweep
        ),
        pytest.param(
            "z2m", "sasa", (16, 16, 48), 231_578, marks=pytest.mark.sweep
        ),
        pytest.param(
            "z2m", "simple_asc", (8, 24, 48), 231_410, marks=pytest.mark.sweep
        ),
        pytest.param(
            "z2m", "asc", (8, 24, 48), 285_938, marks=pytest.mark.sweep
        ),
        ("p4", "sasa", (16, 16, 32), 269_274),
        pytest.param(
            "p4", "simple_asc", (8, 16, 32), 217_410, marks=pytest.mark.sweep
        ),
        ("p4m", "conv", (6, 11, 23), 313_280),
        pytest.param(
            "p4m", "sasa", (16, 16, 16), 293_146, marks=pytest.mark.sweep
        ),
        pytest.param(
            "p4m", "simple_asc", (8, 8, 24), 220_034, marks=pytest.mark.sweep
        ),
        pytest.param(
            "p4m", "asc", (8, 8, 24), 282_146, marks=pytest.mark.sweep
        ),
        ("z2", "acmix", (16, 32, 64), 245_812),
        pytest.param(
            "z2m", "acmix", (12, 24, 44), 236_216, marks=pytest.mark.sweep
        ),
        pytest.param(
            "p4", "acmix", (8, 16, 32), 227_598, marks=pytest.mark.sweep
        ),
        ("p4m", "acmix", (4, 12, 24), 239_158),
    ],
)
def test_groups_that_the_paper_lacks(group, mixer, widths, count):
    model = ResNet29(group, mixer)
    assert reporting.count_parameters(model) == count
    found = [
        model.get_layer(f"stage{stage}_block1_conv{index}").filters
        for stage in (1, 2, 3)
        for index in (1, 3)
    ]
    assert found == [n * factor for n in widths for factor in (1, 4)]


@pytest.mark.once
@pytest.mark.parametrize(("network", "blocks"), [(ResNet29, 3), (ResNet83, 9)])
def test_layers_are_named_after_the_architecture(network, blocks):
    for mixer, middle in (("conv", "conv2"), ("asc", "attention")):
        model = network("p4", mixer, True)
        expected = ["image", "conv1", "bn1", "relu1"]
        for stage in (1, 2, 3):
            for block in range(1, blocks + 1):
                parts = ["conv1", "bn1", "relu1", middle, "bn2", "relu2"]
                parts += ["conv3", "bn3", "se", "add", "relu3"]
                if block == 1:
                    parts += ["shortcut", "shortcut_bn"]
                    parts += ["pool", "shortcut_pool"] if stage > 1 else []
                name = f"stage{stage}_block{block}"
                expected += [f"{name}_{part}" for part in parts]
        expected += ["global_mean", "logits", "predictions"]
        assert sorted(x.name for x in model.layers) == sorted(expected)
        assert model.name == f"{network.__name__.lower()}_p4" + (
            "_asc_se" if mixer == "asc" else "_se"
        )
        sizes = [
            model.get_layer(f"stage{stage}_block1_relu3").output.shape[1:3]
            for stage in (1, 2, 3)
        ]
        assert sizes == [(32, 32), (16, 16), (8, 8)]


@pytest.mark.once
def test_names_of_models(short_resnet):
    for arguments, name in (
        ({}, "resnet29_z2"),
        ({"group": "p4", "mixer": "simple_asc"}, "resnet29_p4_simple_asc"),
        ({"squeeze_excite": True, "name": "mine"}, "mine"),
        (
            {
                "mixer": "sasa",
                "squeeze_excite": True,
                "downsampling": "strided",
            },
            "resnet29_z2_sasa_se_strided",
        ),
    ):
        assert ResNet29(**arguments, **TINY).name == name


@pytest.mark.once
def test_weights_start_as_in_the_paper(short_resnet):
    for group, order in (("z2", 1), ("p4", 4)):
        model = ResNet29(group, "asc", True)
        width = 64 if group == "z2" else 32
        for name, fan_in in (
            ("stage3_block1_conv1", 2 * width * order),
            ("stage3_block1_conv3", width * order),
            ("logits", 4 * width),
        ):
            kernel = as_array(model.get_layer(name).kernel.value)
            deviation = np.sqrt(2 / fan_in)
            np.testing.assert_allclose(kernel.std(), deviation, rtol=0.06)
        attention = model.get_layer("stage3_block1_attention")
        kernel = as_array(attention.query_kernel.value)
        deviation = np.sqrt(2 / (width * order))
        np.testing.assert_allclose(kernel.std(), deviation, rtol=0.06)
        for weight in (attention.key_psi, attention.value_psi):
            np.testing.assert_allclose(
                as_array(weight.value).std(), 1, rtol=0.1
            )
        for layer in model.layers:
            if isinstance(layer, keras.layers.BatchNormalization):
                gain = 0 if layer.name.endswith("_bn3") else 1
                np.testing.assert_array_equal(as_array(layer.gamma.value), gain)
    gains = ResNet29(**TINY).get_layer("stage1_block1_bn3").gamma
    np.testing.assert_array_equal(as_array(gains.value), 1)


@pytest.mark.once
@pytest.mark.parametrize(
    ("group", "hidden"), [("z2", 16), ("p4", 32), ("p4m", 46), ("p16m", 44)]
)
def test_hidden_units_of_squeeze_and_excitation(group, hidden, short_resnet):
    layer = ResNet29(group, squeeze_excite=True).get_layer("stage3_block1_se")
    assert layer.reduce_kernel.shape[-1] == hidden


@pytest.mark.parametrize(
    ("group", "mixer"),
    [
        ("p4", "asc"),
        pytest.param("p4", "sasa", marks=pytest.mark.sweep),
        pytest.param("p4", "simple_asc", marks=pytest.mark.sweep),
        ("p4", "acmix"),
        ("p4m", "conv"),
        pytest.param(
            "p4m",
            "asc",
            marks=[pytest.mark.slow, pytest.mark.every_backend],
        ),
    ],
)
def test_invariance_at_full_size(group, mixer, small):
    """Narrow, and one block a stage."""
    model = ResNet29(group, mixer, True, **SMALL)
    randomize(model)
    # One turn, and one turn after a mirror.
    elements = [1, 5] if group == "p4m" else [1]
    assert invariance_error(model, elements=elements) < 1e-4
    assert_images_matter(model)


@pytest.mark.parametrize(
    ("group", "mixer", "heads"),
    [
        ("z2m", "conv", 2),
        ("z2m", "sasa", 1),
        ("z2m", "simple_asc", 2),
        ("z2m", "asc", 2),
        ("p4m", "sasa", 2),
        ("p4m", "simple_asc", 1),
    ],
)
def test_invariance_under_groups_that_the_paper_lacks(
    group, mixer, heads, small
):
    arguments = {**SMALL, "num_heads": heads, "input_shape": (16, 16, 3)}
    model = ResNet29(group, mixer, **arguments)
    randomize(model)
    elements = [1, 5] if group == "p4m" else [1]
    assert invariance_error(model, elements=elements) < 2e-6
    assert_images_matter(model)


@pytest.mark.parametrize(
    ("mixer", "size", "exact"),
    [
        ("conv", 32, False),
        ("conv", 33, True),  # where windows with strides of 2 fit
        ("asc", 32, False),
    ],
)
def test_strided_downsampling(mixer, size, exact, small):
    shape = (size, size, 1)
    model = ResNet29(
        "p4", mixer, input_shape=shape, downsampling="strided", **SMALL
    )
    pools = [x for x in model.layers if isinstance(x, layers.SpatialPooling2D)]
    assert len(pools) == (2 if mixer == "asc" else 0)
    randomize(model)
    error = invariance_error(model, elements=[1])
    assert error < 1e-4 if exact else error > 1e-3


def test_antialiased_downsampling(small):
    """Both paths of a block that downsamples take binomial means."""
    options = {"input_shape": (8, 8, 1), "downsampling": "antialiased"}
    model = ResNet29("p4", "asc", **options, **SMALL)
    pools = [x for x in model.layers if isinstance(x, layers.SpatialPooling2D)]
    assert [x.mode for x in pools] == ["binomial"] * 4
    assert model.name.endswith("_antialiased")
    randomize(model)
    assert invariance_error(model, elements=[1]) < 1e-5


@pytest.mark.once
@pytest.mark.parametrize(
    ("group", "mode"), [("p4", "mean"), ("p8", "binomial")]
)
def test_downsampling_follows_the_group(small, group, mode):
    """Groups with turns between the quarter turns have binomial means."""
    model = ResNet29(group, input_shape=(8, 8, 1), **SMALL)
    pools = [x for x in model.layers if isinstance(x, layers.SpatialPooling2D)]
    assert {x.mode for x in pools} == {mode}


@pytest.mark.parametrize(
    ("mixer", "policy"),
    [
        ("asc", "float32"),
        pytest.param("acmix", "float32", marks=pytest.mark.sweep),
        # The layers are tested on every backend.
        ("sasa", "mixed_bfloat16"),
        pytest.param("simple_asc", "float32", marks=pytest.mark.sweep),
        pytest.param("acmix", "mixed_bfloat16", marks=pytest.mark.sweep),
    ],
)
def test_one_step_of_fit(mixer, policy, small):
    keras.config.set_dtype_policy(policy)
    model = ResNet29("p4", mixer, True, **TINY)
    model.compile(
        "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    # Away from gains of zero, through which no gradient passes.
    for layer in model.layers:
        if layer.name.endswith("_bn3"):
            layer.gamma.assign(np.ones(layer.gamma.shape))
    before = [as_array(v.value) for v in model.trainable_variables]
    loss = model.train_on_batch(images((2, 4, 4, 3)), np.array([0, 2]))
    assert np.isfinite(loss)
    assert all(np.isfinite(value).all() for value in model.get_weights())
    changed = {
        variable.path: not np.array_equal(as_array(variable.value), start)
        for variable, start in zip(
            model.trainable_variables, before, strict=True
        )
    }
    for name in ("conv1/kernel", "logits/bias"):
        assert changed[name]
    # Of each path of ACmix.
    kernels = ("position", "shift") if mixer == "acmix" else ("output",)
    parts = [f"attention/{name}_kernel" for name in kernels]
    for part in (*parts, "se/expand_kernel"):
        assert changed[f"stage1_block1_{part}"]


@pytest.mark.slow
def test_files(small, tmp_path):
    model = ResNet29("p4", "asc", True, **TINY)
    randomize(model)
    x = images((2, 4, 4, 3))
    expected = model.predict(x, verbose=0)
    model.save(tmp_path / "m.keras")
    revived = keras.saving.load_model(tmp_path / "m.keras", safe_mode=True)
    np.testing.assert_array_equal(revived.predict(x, verbose=0), expected)
    path = tmp_path / "m.weights.h5"
    model.save_weights(path)
    again = ResNet29("p4", "asc", True, weights=path, **TINY)
    np.testing.assert_array_equal(again.predict(x, verbose=0), expected)


def test_attention_maps(small):
    model = ResNet29("p4", "asc", True, **TINY)
    randomize(model)
    found = attention_maps(model, images((2, 4, 4, 3)))
    names = {f"stage{stage}_block1_" for stage in (1, 2, 3)}
    parts = ("attention", "se")
    assert set(found) == {name + part for name in names for part in parts}
    assert found["stage1_block1_se"]["channel"].shape == (2, 16)
    windows = found["stage2_block1_attention"]["window"]
    assert windows.shape == (2, 4, 4, 4, 2, 3, 3)


@pytest.mark.once
@pytest.mark.parametrize("mixer", resnet29.MIXERS)
@pytest.mark.parametrize(
    "group",
    swept(("z2", "z2m", "p2", "p2m", "p4", "p4m", "p8"), "p4m", "p8"),
)
def test_every_group_and_mixer(group, mixer, small):
    model = ResNet29(group, mixer, True, **TINY)
    assert {x.group.name for x in model.layers if hasattr(x, "group")} == {
        group
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"group": "p3"}, "Unknown group 'p3'"),
        ({"mixer": "attention"}, "`mixer` must be 'conv' or .*'attention'"),
        ({"squeeze_excite": 1}, "`squeeze_excite` must be True or False.*1"),
        ({"num_heads": 0}, "`num_heads` must be a positive integer.*0"),
        ({"filters": 0}, "`filters` must be a positive integer.*0"),
        (
            {"filters": 12, "mixer": "asc"},
            "filters=12 is not divisible by num_heads=8",
        ),
        (
            {"filters": 8, "mixer": "sasa"},
            r"filters=8 is not divisible by 2 \* num_heads=16",
        ),
        ({"classes": 1.5}, "`classes` must be a positive integer.*1.5"),
        (
            {"downsampling": "pool"},
            "'antialiased' or 'strided'.*'pool'",
        ),
        ({"input_shape": (28, 28)}, r"must be \(height, width, channels\)"),
        ({"normalization": (0.1, 0.0)}, "`normalization` must be"),
        ({"weights": "cifar10"}, "None, the name of shipped weights"),
        (
            {"classifier_activation": "no"},
            "`classifier_activation` must be .* Received: 'no'",
        ),
        (
            {"group": "p4", "input_shape": (30, 32, 3)},
            "of ResNet.. with group 'p4' and downsampling='exact' .* 32 x 32, "
            r".*not exactly equivariant. Received: \(30, 32, 3\). "
            "downsampling='strided' takes this size",
        ),
        ({"input_shape": (3, 32, 3)}, r"on smaller ones .* \(3, 32, 3\)"),
        (
            {
                "mixer": "asc",
                "input_shape": (32, 30, 3),
                "downsampling": "strided",
            },
            r"mixer='asc' .* divisible by 4: .* \(32, 30, 3\)",
        ),
    ],
)
@pytest.mark.parametrize("network", [ResNet29, ResNet83])
def test_bad_arguments(network, arguments, message):
    with pytest.raises(ValueError, match=message):
        network(**arguments)


@pytest.mark.once
@pytest.mark.parametrize(
    "arguments",
    [
        {"mixer": "asc", "input_shape": (5, 7, 3)},
        {"group": "z2m", "input_shape": (5, 8, 3)},
        {"group": "p4", "input_shape": (4, 8, 1)},
        {"input_shape": (5, 7, 3), "downsampling": "strided"},
        {"mixer": "sasa", "input_shape": (4, 8, 3), "downsampling": "strided"},
    ],
)
def test_sizes_that_are_taken(arguments, short_resnet):
    assert ResNet29(**SMALL, **arguments).output_shape == (None, 10)
