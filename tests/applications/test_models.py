"""Every registered network: parameters, symmetry, training, files, errors."""

import re

import keras
import numpy as np
import pytest
from dataset_helpers import needs
from layer_contract import as_array
from layer_contract import GOLDEN

from keras_equiattn import applications
from keras_equiattn import groups
from keras_equiattn.applications import AllCNNC
from keras_equiattn.applications import building
from keras_equiattn.applications import datasets
from keras_equiattn.applications import pcam_densenet
from keras_equiattn.applications import PCamDenseNet
from keras_equiattn.applications import reporting
from keras_equiattn.applications import ResNet44
from keras_equiattn.applications import resnet44
from keras_equiattn.applications import rotmnist
from keras_equiattn.applications import RotMNISTCNN
from keras_equiattn.layers import InputAttention
from keras_equiattn.layers import SpatialPooling2D
from keras_equiattn.testing import equivariance_error
from keras_equiattn.testing import relative_difference

# Of the papers' networks what the authors' code instantiates.
PARAMETERS = {
    "allcnnc_z2": 1_370_996,
    "allcnnc_p4": 1_370_372,
    "allcnnc_p4_full": 3_642_388,
    "allcnnc_p4_channel": 3_407_972,
    "allcnnc_p4_spatial": 1_604_788,
    "allcnnc_p4_input": 1_400_120,
    "allcnnc_p4m": 1_219_252,
    "allcnnc_p4m_input": 1_249_192,
    "pcam_densenet_z2": 130_598,
    "pcam_densenet_p4": 129_649,
    "pcam_densenet_p4_input": 140_453,
    "pcam_densenet_p4m": 124_209,
    "pcam_densenet_p4m_input": 141_221,
    "resnet44_z2": 2_636_064,
    "resnet44_p4m": 2_621_683,
    "resnet44_p4m_input": 2_693_911,
    "rotmnist_z2cnn": 21_620,
    "rotmnist_p4cnn": 24_610,
    "rotmnist_p4cnn_full": 73_130,
    "rotmnist_p4cnn_channel": 48_630,
    "rotmnist_p4cnn_spatial": 49_110,
    "rotmnist_p4cnn_input": 29_462,
    "rotmnist_p4cnn_co": 24_851,
    "rotmnist_p4cnn_big11": 29_051,
    "rotmnist_p4cnn_big15": 50_415,
    "rotmnist_p4cnn_big19": 77_539,
    "rotmnist_p4mcnn": 26_747,  # not in the papers
    "rotmnist_p8cnn": 26_747,  # not in the papers
}
SHIPPED = pytest.mark.parametrize(
    "name", ["rotmnist_p4cnn", "rotmnist_p4cnn_input", "rotmnist_p4cnn_co"]
)
# By family: input shape and classes.
INPUTS = {
    "allcnnc": ((32, 32, 3), 10),
    "pcam": ((96, 96, 3), 2),
    "resnet44": ((32, 32, 3), 10),
    "rotmnist": ((28, 28, 1), 10),
}
# Each network, and images that it takes when it is `short`.
SMALL = {
    AllCNNC: (4, 4, 3),
    PCamDenseNet: (10, 10, 3),
    ResNet44: (4, 4, 3),
    RotMNISTCNN: (28, 28, 1),
}
NETWORKS = pytest.mark.parametrize(
    "network", SMALL, ids=lambda network: network.__name__
)


@pytest.fixture
def short_resnet(monkeypatch):
    """One block in each stage of the residual network, not seven."""
    monkeypatch.setattr(resnet44, "BLOCKS", 1)


@pytest.fixture
def short(short_resnet, monkeypatch):
    """Two blocks in the dense network as well."""
    blocks = pcam_densenet.BLOCK_ATTENTION[:2]
    monkeypatch.setattr(pcam_densenet, "BLOCK_ATTENTION", blocks)


def randomize(model):
    """Batch statistics and gains away from zero and one, large attention.

    The variance is about the same in all layers. As initialised, scales rest
    on batch statistics, without which images would not matter to All-CNN.
    """
    rng = np.random.default_rng(0)
    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            shape = layer.gamma.shape
            layer.set_weights(
                [
                    # Attention takes away what is above one on average.
                    rng.uniform(0.8, 1.8, shape),
                    rng.uniform(-0.3, 0.3, shape),
                    rng.uniform(-0.3, 0.3, shape),
                    rng.uniform(0.5, 1.5, shape),
                ]
            )
            continue
        # What is added up in residual networks must not grow.
        gain = 0.1 if layer.name.endswith("_conv2") else 1.0
        for variable in layer.trainable_variables:
            deviation = gain * np.sqrt(2 / np.prod(variable.shape[:-1]))
            variable.assign(rng.normal(0, deviation, variable.shape))


def images(shape):
    """Random images of large patches, which global means do not level."""
    batch, height, width, channels = shape
    patch = -(-max(height, width) // 4)
    values = np.random.default_rng(1).normal(size=(batch, 4, 4, channels))
    values *= np.arange(1, batch + 1)[:, None, None, None]  # contrast
    values = values.repeat(patch, axis=1).repeat(patch, axis=2)
    return values[:, :height, :width].astype("float32")


def invariance_error(model, group=None, elements=None):
    """Worst relative change of the logits; one compilation per model."""
    return equivariance_error(
        lambda x: model.predict_on_batch(as_array(x)),
        group or reporting.group_of(model),
        images((2, *model.input_shape[1:])),
        elements=elements,
    ).max()


def assert_images_matter(model):
    y = model.predict_on_batch(images((2, *model.input_shape[1:])))
    assert relative_difference(y[:1], y[1:]) > 1e-2


@pytest.mark.once
def test_registry_is_complete():
    assert applications.list_models() == sorted(PARAMETERS)


@pytest.mark.once
@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name):
    model = applications.get_model(name)
    assert reporting.count_parameters(model) == PARAMETERS[name]
    assert model.name == name
    shape, classes = INPUTS[name.partition("_")[0]]
    assert model.input_shape == (None, *shape)
    assert model.output_shape == (None, classes)


@pytest.mark.parametrize("name", ["rotmnist_p4cnn", "rotmnist_p4mcnn"])
def test_invariance_at_full_size(name):
    model = applications.get_model(name, normalization=(0.13, 0.29))
    randomize(model)
    assert invariance_error(model) < 1e-4
    # With batch statistics too; dropout would tell the turns apart.
    for layer in model.layers:
        if isinstance(layer, keras.layers.Dropout):
            layer.rate = 0.0
    errors = equivariance_error(
        lambda x: model(x, training=True),
        reporting.group_of(model),
        images((2, 28, 28, 1)),
        elements=[1],
    )
    assert errors.max() < 1e-4
    assert_images_matter(model)


@pytest.mark.parametrize(
    "name",
    [
        "allcnnc_p4_input",
        "pcam_densenet_p4m_input",
        "resnet44_p4m_input",
        "rotmnist_p4cnn_full",
    ],
)
def test_invariance_with_attention(name, short_resnet):
    """At the real input size; narrow, and the residual network short."""
    model = applications.get_model(name, filters=2)
    randomize(model)
    order = groups.get(reporting.group_of(model)).order
    # One turn, and one turn after a mirror.
    assert invariance_error(model, elements=[1, 5][: order // 4]) < 1e-4
    assert_images_matter(model)


@pytest.mark.parametrize(
    ("name", "size", "exact"),
    [
        ("allcnnc_p4", 32, False),
        ("allcnnc_p4", 33, True),  # where windows with strides of 2 fit
        ("pcam_densenet_p4", 96, False),
        ("resnet44_p4m_input", 32, False),
        ("rotmnist_p4cnn", 28, False),
    ],
)
def test_strided_downsampling(name, size, exact, short_resnet):
    model = applications.get_model(
        name,
        filters=2,
        input_shape=(size, size, 1),
        downsampling="strided",
    )
    pools = [x for x in model.layers if isinstance(x, SpatialPooling2D)]
    assert {x.name for x in pools} <= {"pool_out"}
    randomize(model)
    error = invariance_error(model, elements=[1])
    assert error < 1e-4 if exact else error > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", PARAMETERS)
def test_invariance_of_all(name):
    model = applications.get_model(name)
    randomize(model)
    group = groups.get(reporting.group_of(model))
    assert invariance_error(model, elements=group.grid_elements) < 1e-4
    other = invariance_error(model, "p4m", [1, 4])
    assert (other > 1e-3) == (group.name != "p4m")


@pytest.mark.parametrize(
    ("attention", "policy"),
    [
        # Takes long to compile; the layers are tested on every backend.
        pytest.param("full", "float32", marks=pytest.mark.once),
        ("input", "mixed_bfloat16"),
    ],
)
@NETWORKS
def test_one_step_of_fit_with_attention(network, attention, policy, short):
    keras.config.set_dtype_policy(policy)
    shape = SMALL[network]
    model = network("p4", attention, filters=2, input_shape=shape, classes=3)
    model.compile(
        "sgd",
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        run_eagerly=attention == "full",
    )
    before = [as_array(v).copy() for v in model.trainable_variables]
    loss = model.train_on_batch(images((2, *shape)), np.array([0, 2]))
    assert np.isfinite(loss)
    changed = {
        variable.path: not np.array_equal(as_array(variable), start)
        for variable, start in zip(
            model.trainable_variables, before, strict=True
        )
    }
    assert all(np.isfinite(value).all() for value in model.get_weights())
    assert changed["conv1/kernel"]
    assert any(changed[path] for path in changed if "spatial_kernel" in path)
    assert any(changed[path] for path in changed if "channel_kernel" in path)


@pytest.mark.slow
@NETWORKS
def test_files(network, short, tmp_path):
    shape = SMALL[network]
    model = network("p4", "input", filters=2, input_shape=shape, classes=3)
    randomize(model)
    x = images((2, *shape))
    expected = model.predict(x, verbose=0)
    model.save(tmp_path / "m.keras")
    revived = keras.saving.load_model(tmp_path / "m.keras", safe_mode=True)
    np.testing.assert_array_equal(revived.predict(x, verbose=0), expected)
    model.save_weights(tmp_path / "m.weights.h5")
    again = network(
        "p4",
        "input",
        filters=2,
        input_shape=shape,
        classes=3,
        weights=tmp_path / "m.weights.h5",
    )
    np.testing.assert_array_equal(again.predict(x, verbose=0), expected)


def test_mixed_precision_returns_float32():
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = RotMNISTCNN(filters=2, classifier_activation="softmax")
    y = model(np.zeros((1, 28, 28, 1), "float32"))
    assert keras.backend.standardize_dtype(y.dtype) == "float32"
    assert model.get_layer("conv1").compute_dtype == "bfloat16"
    np.testing.assert_allclose(as_array(y).sum(), 1, rtol=1e-5)


def test_float64_is_kept():
    keras.config.set_dtype_policy("float64")
    assert RotMNISTCNN(filters=2).output.dtype == "float64"


@pytest.mark.once
@pytest.mark.parametrize("key", rotmnist.SHIPPED)
def test_shipped_weights_expect_the_images_of_their_dataset(key):
    (shipped,) = rotmnist.SHIPPED[key].values()
    assert shipped.path.is_file()
    info = datasets.info("rot_mnist")
    channels = info.shape[-1]
    assert building.check_normalization(
        shipped.normalization, channels
    ) == building.check_normalization(info.normalization, channels)
    assert (shipped.input_shape, shipped.classes) == (info.shape, info.classes)


def test_normalization_is_the_first_layer():
    x = np.random.default_rng(0).uniform(size=(2, 28, 28, 3))
    x = x.astype("float32")
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    shape = (28, 28, 3)
    model = RotMNISTCNN("p4", None, 2, shape, normalization=(mean, std))
    plain = RotMNISTCNN("p4", None, 2, shape)
    plain.set_weights(model.get_weights())
    expected = as_array(plain((x - np.array(mean)) / np.array(std)))
    assert relative_difference(as_array(model(x)), expected) < 1e-5


@pytest.mark.once
@pytest.mark.parametrize(
    ("group", "width"),
    [("z2", 20), ("p4", 10), ("p4m", 7), ("p8", 7), ("p16m", 4), ("p2", 14)],
)
def test_group_width(group, width):
    assert building.group_width(20, groups.get(group)) == width
    assert building.group_width(1, groups.get(group), 3) == 3


@pytest.mark.once
@pytest.mark.parametrize("attention", building.ATTENTION)
@pytest.mark.parametrize("group", ["z2", "z2m", "p2", "p2m", "p4", "p4m", "p8"])
@NETWORKS
def test_every_group_and_attention(network, group, attention, short):
    model = network(group, attention, 2, SMALL[network])
    convolutions = [x for x in model.layers if hasattr(x, "kernel_size")]
    assert {x.group.name for x in convolutions} == {group}
    if attention == "input":
        attended = [x for x in model.layers if isinstance(x, InputAttention)]
        names = {f"{x.name}_attention" for x in convolutions}
        assert {x.name for x in attended} == names
    elif attention is not None:
        # The weights of the attention beside the kernel.
        assert {len(x.weights) > 1 for x in convolutions} == {True}


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
    ):
        kernel = as_array(model.get_layer(name).kernel)
        assert 0.95 * bound < np.abs(kernel).max() < 1.001 * bound
    for model, bound in (
        (allcnn, np.pi / 2 * 0.035 / np.sqrt(98)),
        (densenet, np.pi * np.sqrt(2 / 98)),
    ):
        attention = model.get_layer(
            "conv2_attention" if model is allcnn else "block1_conv_attention"
        )
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"group": "p3"}, "Unknown group 'p3'"),
        ({"attention": "ful"}, r"`attention` must be None or 'full'.*'ful'"),
        ({"filters": 0}, "`filters` must be a positive integer.*0"),
        ({"classes": 1.5}, "`classes` must be a positive integer.*1.5"),
        ({"downsampling": "pool"}, "must be 'exact' or 'strided'.*'pool'"),
        ({"input_shape": (28, 28)}, r"must be \(height, width, channels\)"),
        ({"normalization": (0.1, 0.0)}, "`normalization` must be"),
        ({"normalization": 3}, "`normalization` must be"),
        ({"input_shape": 28}, r"must be \(height, width, channels\).*28"),
        ({"input_shape": (28, 28, True)}, "positive integers.*True"),
        ({"weights": __file__}, r"a .weights.h5 or .keras file"),
        ({"classifier_activation": "no"}, "no"),
    ],
)
@NETWORKS
def test_bad_arguments(network, arguments, message):
    with pytest.raises(ValueError, match=message):
        network(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_shape": (32, 32, 1)}, r"must be \(28, 28, channels\).*32"),
        ({"normalization": ((0, 0), (1, 1))}, r"channel \(1\)"),
        ({"normalization": ((0,), (1, 2))}, "`normalization` must be"),
        ({"weights": "imagenet"}, r"name of shipped weights \('rot_mnist'\)"),
        ({"weights": 3}, "`weights` of RotMNISTCNN must be.*3"),
    ],
)
def test_bad_arguments_of_rotmnist(arguments, message):
    with pytest.raises(ValueError, match=message):
        RotMNISTCNN(**arguments)


@pytest.mark.parametrize(
    ("network", "arguments", "message"),
    [
        (
            AllCNNC,
            {"input_shape": (30, 32, 3)},
            r"`input_shape` of AllCNNC with group 'p4' and "
            r"downsampling='exact' .* such as 24 x 24, 28 x 28, 32 x 32, "
            r"36 x 36: .* not exactly equivariant. Received: \(30, 32, 3\). "
            "downsampling='strided' takes this size",
        ),
        (
            ResNet44,
            {"input_shape": (33, 33, 3), "group": "z2m"},
            r"28 x 28, 32 x 32, 36 x 36, 40 x 40.*\(33, 33, 3\)",
        ),
        (
            PCamDenseNet,
            {"input_shape": (100, 100, 3)},
            r"80 x 80, 96 x 96, 112 x 112, 128 x 128.*\(100, 100, 3\)",
        ),
        (
            AllCNNC,
            {"input_shape": (3, 32, 3), "group": "z2"},
            r"on smaller ones .* do not fit. Received: \(3, 32, 3\)",
        ),
        (
            PCamDenseNet,
            {"input_shape": (64, 64, 3), "downsampling": "strided"},
            r"65 x 65, 66 x 66, 67 x 67, 68 x 68: on smaller ones .*\(64, 64",
        ),
    ],
)
def test_sizes_that_are_refused(network, arguments, message):
    with pytest.raises(ValueError, match=message):
        network(**arguments)


@pytest.mark.once
@pytest.mark.parametrize(
    ("network", "arguments"),
    [
        (AllCNNC, {"group": "z2", "input_shape": (7, 5, 3)}),
        (AllCNNC, {"group": "z2m", "input_shape": (7, 8, 3)}),
        (AllCNNC, {"group": "p4", "input_shape": (4, 8, 1)}),
        (ResNet44, {"group": "p4", "input_shape": (4, 8, 1)}),
        (PCamDenseNet, {"group": "p4", "input_shape": (80, 96, 1)}),
    ],
)
def test_sizes_that_are_taken(network, arguments, short_resnet):
    assert network(filters=1, **arguments).output_shape[0] is None


def test_unknown_name():
    with pytest.raises(ValueError, match="Did you mean 'rotmnist_p4cnn'"):
        applications.get_model("rotmnist_p4_cnn")
    with pytest.raises(ValueError, match="The models are: allcnnc_p4, allcnn"):
        applications.get_model("resnet50")


def test_does_not_depend_on_the_configured_data_format():
    x = np.random.default_rng(0).uniform(size=(2, 28, 28, 1))
    model = RotMNISTCNN(filters=2)
    expected = as_array(model(x))
    keras.config.set_image_data_format("channels_first")
    other = RotMNISTCNN(filters=2)
    other.set_weights(model.get_weights())
    assert relative_difference(as_array(other(x)), expected) < 1e-6


@SHIPPED
def test_shipped_weights_give_the_same_logits_everywhere(name, request):
    """Committed logits of one backend, within 1e-4 of their size."""
    model = applications.get_model(name, weights="rot_mnist")
    values = GOLDEN / f"{name}-rot_mnist.npz"
    if request.config.getoption("--update-golden"):
        images, labels = next(
            iter(datasets.load_pydataset("digits", "test", 16))
        )
        logits = as_array(model(images))
        np.savez_compressed(values, images=images, labels=labels, y=logits)
    with np.load(values) as arrays:
        logits = as_array(model(arrays["images"]))
        assert relative_difference(logits, arrays["y"]) < 1e-4
        # Digits of another collection, scanned at a quarter of the size.
        assert (logits.argmax(-1) == arrays["labels"]).mean() > 0.6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"classes": 3}, "trained with.*classes=10.*Received.*classes=3"),
        ({"input_shape": (28, 28, 3)}, r"trained with input_shape=\(28, 28, 1"),
        ({"filters": 11}, "none for this network"),
        ({"group": "z2"}, "none for this network"),
        ({"attention": "spatial"}, "none for this network"),
        ({"downsampling": "strided"}, "none for this network"),
    ],
)
def test_shipped_weights_fit_what_they_were_trained_for(arguments, message):
    with pytest.raises(ValueError, match=message):
        RotMNISTCNN(**{"weights": "rot_mnist", **arguments})


@needs("rot_mnist")
@SHIPPED
def test_shipped_weights_on_all_test_digits(name):
    """The error on the model card, on 50,000 digits."""
    card = building.WEIGHTS_FOLDER / f"{name}-rot_mnist.md"
    (error,) = re.findall(r"\| test error \| ([\d.]+) %", card.read_text())
    model = applications.get_model(name, weights="rot_mnist")
    test = datasets.load_pydataset("rot_mnist", "test", 500)
    assert sum(len(labels) for _, labels in test) == 50_000
    right = sum(
        (model.predict_on_batch(images).argmax(-1) == labels).sum()
        for images, labels in test
    )
    np.testing.assert_allclose(100 - right / 500, float(error), atol=0.01)
