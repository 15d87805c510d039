"""The registered networks are those of the papers."""

import contextlib
import re

import keras
import numpy as np
import pytest
from layer_contract import as_array

from keras_equiattn import applications
from keras_equiattn import groups
from keras_equiattn.applications import AllCNNC
from keras_equiattn.applications import GroupUNet
from keras_equiattn.applications import PCamDenseNet
from keras_equiattn.applications import ResNet44
from keras_equiattn.applications import RotMNISTCNN
from keras_equiattn.applications.networks.common import convolution
from keras_equiattn.applications.training import reporting

# For networks of papers, what the authors' code instantiates.
PARAMETERS = {
    "acmix_pvt_small": 24_824_755,  # our reading
    "acmix_pvt_small_attention": 24_485_864,
    "acmix_pvt_tiny": 13_396_128,  # our reading
    "acmix_pvt_tiny_attention": 13_229_288,
    "acmix_resnet26": 10_487_816,
    "acmix_resnet26_conv": 13_696_552,
    "acmix_resnet38": 14_410_896,
    "acmix_resnet38_conv": 19_626_792,
    "acmix_resnet50": 18_333_976,
    "acmix_resnet50_conv": 25_557_032,
    "acmix_san10": 11_994_612,  # our reading
    "acmix_san10_attention": 11_841_124,
    "acmix_san15": 16_414_134,  # our reading
    "acmix_san15_attention": 16_181_310,
    "acmix_san19": 20_829_278,  # our reading
    "acmix_san19_attention": 20_518_470,
    "acmix_swin_small": 50_345_080,
    "acmix_swin_small_attention": 49_606_258,
    "acmix_swin_tiny": 28_649_908,
    "acmix_swin_tiny_attention": 28_288_354,
    "acmix_swin_tiny_cifar10": 27_866_662,  # ours
    "acmix_swin_tiny_cifar10_attention": 27_505_108,  # ours
    "allcnnc_z2": 1_370_996,
    "allcnnc_p4": 1_370_372,
    "allcnnc_p4_full": 3_642_388,
    "allcnnc_p4_channel": 3_407_972,
    "allcnnc_p4_spatial": 1_604_788,
    "allcnnc_p4_input": 1_400_120,
    "allcnnc_p4m": 1_219_252,
    "allcnnc_p4m_input": 1_249_192,
    "gsanet_cifar10_z2": 3_001_648,
    "gsanet_cifar10_p4": 3_002_128,
    "gsanet_cifar10_p8": 3_002_768,
    "gsanet_cifar10_p12": 3_003_408,
    "gsanet_cifar10_p16": 3_004_048,
    "gsanet_cifar10_z2m": 3_001_808,
    "gsanet_cifar10_p4m": 3_002_768,
    "gsanet_cifar10_p8m": 3_004_048,
    "gsanet_pcam_z2": 206_926,
    "gsanet_pcam_p4": 207_034,
    "gsanet_pcam_p8": 207_178,
    "gsanet_pcam_p12": 207_322,
    "gsanet_pcam_p16": 207_466,
    "gsanet_pcam_z2m": 206_962,
    "gsanet_pcam_p4m": 207_178,
    "gsanet_pcam_p8m": 207_466,
    "gsanet_rotmnist_z2": 44_368,
    "gsanet_rotmnist_p4": 44_428,
    "gsanet_rotmnist_p8": 44_508,
    "gsanet_rotmnist_p12": 44_588,
    "gsanet_rotmnist_p16": 44_668,
    "gsanet_rotmnist_z2m": 44_388,
    "gsanet_rotmnist_p4m": 44_508,
    "gsanet_rotmnist_p8m": 44_668,
    "octic_vit_huge_hybrid": 355_710_120,  # printed as 356 M
    # Printed as 362 M and 175 M, which polynomial invariants have.
    "octic_vit_huge_invariant": 356_940_200,
    "octic_vit_large_hybrid": 171_258_088,  # printed as 171 M
    "octic_vit_large_invariant": 172_045_544,
    "pcam_densenet_z2": 130_598,
    "pcam_densenet_p4": 129_649,
    "pcam_densenet_p4_input": 140_453,
    "pcam_densenet_p4m": 124_209,
    "pcam_densenet_p4m_input": 141_221,
    "resnet29_z2": 313_114,
    "resnet29_z2_se": 346_798,
    "resnet29_z2_sasa": 235_162,
    "resnet29_z2_simple_asc": 217_354,
    "resnet29_z2_asc": 267_754,
    "resnet29_z2_asc_se": 301_438,
    "resnet29_p4": 309_138,  # printed as 310k
    "resnet29_p4_se": 342_234,
    "resnet29_p4_sasa": 269_274,  # not in the paper
    "resnet29_p4_simple_asc": 217_410,  # not in the paper
    "resnet29_p4_asc": 271_842,
    "resnet29_p4_asc_se": 304_938,  # not in the paper
    "resnet29_p4m": 313_280,  # not in the paper
    "resnet29_p4m_asc": 282_146,  # not in the paper
    "resnet29_z2_acmix": 245_812,  # ours
    "resnet29_p4_acmix": 227_598,
    "resnet29_p4m_acmix": 239_158,
    "resnet44_z2": 2_636_064,
    "resnet44_p4m": 2_621_683,
    "resnet44_p4m_input": 2_693_911,
    # The paper prints none for the deeper network.
    "resnet83_z2": 869_530,
    "resnet83_z2_se": 970_582,
    "resnet83_z2_sasa": 635_674,
    "resnet83_z2_simple_asc": 582_250,
    "resnet83_z2_asc": 733_450,
    "resnet83_z2_asc_se": 834_502,
    "resnet83_p4": 861_522,
    "resnet83_p4_se": 960_810,
    "resnet83_p4_sasa": 719_322,
    "resnet83_p4_simple_asc": 586_338,
    "resnet83_z2_acmix": 667_624,  # ours
    "resnet83_p4_acmix": 616_902,
    "resnet83_p4m_acmix": 652_966,
    "resnet83_p4_asc": 749_634,
    "resnet83_p4_asc_se": 848_922,
    "resnet83_p4m": 875_936,
    "resnet83_p4m_asc": 801_410,
    "rotmnist_z2cnn": 21_620,
    "rotmnist_p4cnn": 24_610,
    "rotmnist_p4cnn_full": 73_130,
    "rotmnist_p4cnn_channel": 48_630,
    "rotmnist_p4cnn_spatial": 49_110,
    "rotmnist_p4cnn_input": 29_462,
    "rotmnist_p4cnn_input_late_dropout": 29_462,  # ours
    "rotmnist_p4cnn_co": 24_851,
    "rotmnist_p4cnn_big11": 29_051,
    "rotmnist_p4cnn_big15": 50_415,
    "rotmnist_p4cnn_big19": 77_539,
    "rotmnist_p4mcnn": 26_747,  # not in the papers
    # Not in the papers, with steerable filters.
    "rotmnist_p8cnn": 25_362,
    "rotmnist_p8cnn_smooth": 25_362,
    "rotmnist_p8cnn_small5": 9_290,
    "rotmnist_p8cnn_big10": 30_580,
    "rotmnist_p8cnn_full_small2": 10_048,
    "rotmnist_p8cnn_input": 30_976,
    "rotmnist_p8cnn_input_late_dropout": 30_976,
    "rotmnist_p16cnn": 25_068,
    "rotmnist_p16cnn_smooth": 25_068,
    "rotmnist_p16cnn_big8": 41_104,
    "rotmnist_p16cnn_input_small5": 24_680,
    "rotmnist_p16cnn_5x5": 45_270,
    "rotmnist_p16cnn_5x5_smooth": 45_270,
    "rotmnist_p16cnn_5x5_big20": 442_100,
    "unet_z2": 537_586,  # ours
    "unet_p4": 536_570,
    "unet_p4m": 603_260,
    "unet_p4_input": 550_758,
    "unet_p4_asc": 446_298,
    "unet_p4_acmix": 389_440,
    "vit_base_p4m": 11_637_832,
    "vit_base_p4m_hybrid": 52_444_360,
    "vit_base_z2": 93_095_656,
    "vit_cifar10_p4": 733_786,
    "vit_cifar10_p4m": 366_898,
    "vit_cifar10_z2": 2_935_114,
    "vit_pcam_p4": 827_858,
    "vit_pcam_p4m": 413_930,
    "vit_pcam_z2": 3_311_426,
    "vit_small_p4m": 3_165_208,
    "vit_small_p4m_hybrid": 14_278_744,
    "vit_small_z2": 25_314_664,
    "vit_tiny_p4m": 919_552,
    "vit_tiny_p4m_hybrid": 4_153_888,
    "vit_tiny_z2": 7_349_416,
}
# Input shape and classes, by how names begin.
INPUTS = {
    "acmix": ((224, 224, 3), 1000),
    "acmix_swin_tiny_cifar10": ((32, 32, 3), 10),
    "allcnnc": ((32, 32, 3), 10),
    "gsanet_cifar10": ((32, 32, 3), 10),
    "gsanet_pcam": ((96, 96, 3), 2),
    "gsanet_rotmnist": ((28, 28, 1), 10),
    "pcam": ((96, 96, 3), 2),
    "resnet29": ((32, 32, 3), 10),
    "resnet44": ((32, 32, 3), 10),
    "resnet83": ((32, 32, 3), 10),
    "rotmnist": ((28, 28, 1), 10),
    "unet": ((32, 32, 1), 2),
    "octic": ((224, 224, 3), 1000),
    "vit": ((224, 224, 3), 1000),
    "vit_cifar10": ((32, 32, 3), 10),
    "vit_pcam": ((96, 96, 3), 2),
}


@pytest.mark.once
def test_registry_is_complete():
    # Tests of examples, which may have run in this process, add their own.
    others = {"tiny", "tiny_without_dropout"}
    found = [name for name in applications.list_models() if name not in others]
    assert found == sorted(PARAMETERS)


# One or two of each constructor, which build in a moment.
FAST = (
    *("acmix_pvt_tiny", "acmix_resnet26", "acmix_san10", "acmix_swin_tiny"),
    *("allcnnc_p4", "gsanet_rotmnist_p4", "octic_vit_large_hybrid"),
    *("pcam_densenet_p4m_input", "resnet29_p4_asc", "resnet44_p4m"),
    *("rotmnist_p16cnn", "rotmnist_p4cnn_full", "unet_p4", "vit_cifar10_p4m"),
)


def without_values():
    """A context in which weights have only shapes, if the backend can.

    Their first values would take most of the time to build a large network.
    """
    if keras.backend.backend() == "torch":
        return keras.device("meta")
    return contextlib.nullcontext()


@pytest.mark.once
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FAST else pytest.mark.sweep)
        for name in PARAMETERS
    ],
)
def test_parameters(name):
    with without_values():
        model = applications.get_model(name)
    assert reporting.count_parameters(model) == PARAMETERS[name]
    assert model.name == name
    family = max((x for x in INPUTS if f"{name}_".startswith(f"{x}_")), key=len)
    shape, classes = INPUTS[family]
    assert model.input_shape == (None, *shape)
    pixels = shape[:2] if family == "unet" else ()
    assert model.output_shape == (None, *pixels, classes)


@pytest.mark.once
@pytest.mark.parametrize(
    ("group", "width"),
    [("z2", 20), ("p4", 10), ("p4m", 7), ("p8", 9), ("p16m", 4), ("p2", 14)],
)
def test_group_width(group, width):
    assert convolution.group_width(20, groups.get(group)) == width
    assert convolution.group_width(1, groups.get(group), multiple=3) == 3


@pytest.mark.once
@pytest.mark.parametrize("group", ["p4", "p8"])
@pytest.mark.parametrize(
    "network", [RotMNISTCNN, AllCNNC, GroupUNet, PCamDenseNet, ResNet44]
)
def test_groups_have_about_as_many_parameters(network, group):
    plain, model = network("z2"), network(group)
    ratio = reporting.count_parameters(model) / reporting.count_parameters(
        plain
    )
    assert 0.9 < ratio < 1.2


@pytest.mark.once
def test_layers_are_named_after_the_architecture():
    names = [x.name for x in PCamDenseNet("z2", filters=1).layers]
    block = ["bn", "relu", "conv", "crop", "concat"]
    transition = ["bn", "relu", "conv", "pool"]
    expected = ["image", "conv1", *(f"block1_{part}" for part in block)]
    for index in range(2, 6):
        expected += [f"transition{index - 1}_{part}" for part in transition]
        expected += [f"block{index}_{part}" for part in block]
    expected += ["bn_out", "relu_out", "conv_out", "global_mean", "predictions"]
    assert sorted(names) == sorted(expected)

    names = [x.name for x in ResNet44("z2", filters=1).layers]
    convolutions = [x for x in names if re.search("conv|shortcut$", x)]
    assert len(convolutions) == 44 + 2
    assert {"stage3_block7_conv2", "stage2_block1_pool1"} < set(names)
    assert ("stage1_block1_shortcut" in names) is False


@pytest.mark.once
def test_widths():
    def widths(model, names):
        return [model.get_layer(name).filters for name in names]

    stages = [f"stage{stage}_block7_conv2" for stage in (1, 2, 3)]
    for group, filters, expected in (
        ("z2", None, [32, 64, 128]),
        ("p4", None, [16, 32, 64]),
        ("p4m", None, [11, 23, 45]),
        ("p4m", 11, [11, 22, 44]),
    ):
        assert widths(ResNet44(group, None, filters), stages) == expected
    names = ["conv1", "conv3", "conv4", "conv8", "conv9"]
    assert widths(AllCNNC("p2", classes=7), names) == [68, 68, 136, 136, 7]
    names = ["conv1", "block5_conv", "transition4_conv", "conv_out"]
    assert widths(PCamDenseNet("p2", classes=7), names) == [18, 18, 90, 7]


@pytest.mark.once
def test_attention_is_that_of_the_authors():
    def settings(model, name):
        layer = model.get_layer(f"{name}_attention")
        return (
            layer.channel_kernel_1.shape[-1],
            layer.attention_kernel_size,
            layer.attention_dilation_rate,
        )

    densenet = applications.get_model("pcam_densenet_p4_input")
    for name, expected in {
        "conv1": (3, 7, 4),
        "block1_conv": (2, 7, 4),
        "block2_conv": (2, 7, 4),
        "block3_conv": (2, 7, 3),
        "block4_conv": (2, 7, 2),
        "block5_conv": (2, 5, 1),
        "transition1_conv": (2, 7, 4),
        "transition2_conv": (2, 7, 4),
        "transition3_conv": (2, 7, 3),
        "transition4_conv": (2, 7, 1),
        "conv_out": (2, 3, 1),
    }.items():
        assert settings(densenet, name) == expected
    allcnn = applications.get_model("allcnnc_p4m_input")
    for name, hidden in {
        "conv1": 3,
        "conv2": 2,
        "conv4": 2,
        "conv9": 4,
    }.items():
        assert settings(allcnn, name) == (hidden, 7, 1)
    rotmnist = applications.get_model("rotmnist_p4cnn_input")
    assert settings(rotmnist, "conv1") == (1, 7, 4)
    assert settings(rotmnist, "conv7") == (5, 7, 1)


@pytest.mark.once
def test_kernels_start_as_those_of_the_authors():
    """Uniform within a bound, and normal in the planar networks."""
    allcnn = AllCNNC("p4", "input")
    densenet = PCamDenseNet("p4m", "input")
    resnet = ResNet44("p4m")
    for model, name, bound in (
        (allcnn, "conv1", 0.035 / np.sqrt(3 * 9)),
        (allcnn, "conv5", 0.035 / np.sqrt(96 * 9)),
        (densenet, "block2_conv", np.sqrt(2 / (18 * 9))),
        (densenet, "conv_out", np.pi * np.sqrt(2 / 54)),
        (resnet, "conv1", np.sqrt(2 / 27)),
        (resnet, "stage1_block1_conv1", np.sqrt(2 / 99)),
        (resnet, "stage1_block1_conv2", np.pi * np.sqrt(2 / 99)),
        (resnet, "stage2_block1_shortcut", np.pi * np.sqrt(2 / 11)),
        (RotMNISTCNN("p4"), "conv2", 1 / np.sqrt(90)),
        # No batch normalisation follows the last one.
        (RotMNISTCNN("p4"), "conv7", np.pi / 2 / np.sqrt(160)),
    ):
        kernel = as_array(model.get_layer(name).kernel)
        assert 0.95 * bound < np.abs(kernel).max() < 1.001 * bound
    # Layers that lift an image do not sum over the group.
    for model, name, bound in (
        (allcnn, "conv2", np.pi / 2 * 0.035 / np.sqrt(98)),
        (densenet, "block1_conv", np.pi * np.sqrt(2 / 98)),
        (RotMNISTCNN("p4", "input"), "conv1", 1 / np.sqrt(98)),
    ):
        attention = model.get_layer(f"{name}_attention")
        kernel = as_array(attention.spatial_kernel)
        assert 0.95 * bound < np.abs(kernel).max() < 1.001 * bound
    for model, name, deviation in (
        (AllCNNC("z2"), "conv5", 0.05),
        (PCamDenseNet("z2"), "block5_conv", np.sqrt(2 / (130 * 9))),
        (ResNet44("z2"), "stage2_block2_conv2", np.sqrt(2 / (64 * 9))),
    ):
        kernel = as_array(model.get_layer(name).kernel)
        np.testing.assert_allclose(kernel.std(), deviation, rtol=0.05)
        assert np.abs(kernel).max() > 2.5 * deviation  # not truncated
