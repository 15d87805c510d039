"""Every registered network: symmetry, training, files, errors."""

import functools

import keras
import numpy as np
import pytest
from layer_contract import as_array
from network_helpers import assert_images_matter
from network_helpers import images
from network_helpers import invariance_error
from network_helpers import randomize
from sweeps import swept

from keras_equiattn import applications
from keras_equiattn import groups
from keras_equiattn.applications import ACmixPVTTiny
from keras_equiattn.applications import ACmixResNet26
from keras_equiattn.applications import ACmixSAN10
from keras_equiattn.applications import ACmixSwinTiny
from keras_equiattn.applications import AllCNNC
from keras_equiattn.applications import PCamDenseNet
from keras_equiattn.applications import ResNet44
from keras_equiattn.applications import RotMNISTCNN
from keras_equiattn.applications.networks.common import convolution
from keras_equiattn.applications.training import reporting
from keras_equiattn.layers import InputAttention
from keras_equiattn.layers import SpatialPooling2D
from keras_equiattn.testing import equivariance_error
from keras_equiattn.testing import relative_difference

# Each network, and images that it takes when it is `short`.
SMALL = {
    AllCNNC: (4, 4, 3),
    PCamDenseNet: (10, 10, 3),
    ResNet44: (4, 4, 3),
    RotMNISTCNN: (28, 28, 1),
}
SLOW = pytest.mark.slow
NETWORKS = pytest.mark.parametrize(
    "network", SMALL, ids=lambda network: network.__name__
)


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


@pytest.mark.parametrize("kernel_size", [5, 7])
@pytest.mark.parametrize("group", ["p4", "p8"])
def test_wider_kernels_for_rotmnist(group, kernel_size):
    """Maps keep the sizes of the paper's network, and its symmetry."""
    model = RotMNISTCNN(group, "input", filters=2, kernel_size=kernel_size)
    paper = RotMNISTCNN(group, "input", filters=2)
    for index in range(1, 8):
        layer = model.get_layer(f"conv{index}")
        shapes = layer.output.shape, paper.get_layer(layer.name).output.shape
        assert shapes[0] == shapes[1]
        assert layer.kernel_size[0] == (4 if index == 7 else kernel_size)
    randomize(model)
    quarter = model.get_layer("conv1").group.grid_elements[1]
    assert invariance_error(model, elements=[quarter]) < 1e-4
    assert_images_matter(model)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("rotmnist_p4cnn_input_late_dropout", {"downsampling": "strided"}),
        ("rotmnist_p8cnn_input_late_dropout", {"kernel_size": 5}),
    ],
)
def test_dropout_after_attention_of_rotmnist(name, options):
    """Each dropout comes between attention and its convolution."""
    model = applications.get_model(name, filters=2, **options)
    names = [layer.name for layer in model.layers]
    for index in (1, 3, 4, 5, 6):
        place = names.index(f"dropout{index}")
        neighbours = names[place - 1], names[place + 1]
        assert neighbours == (f"conv{index + 1}_attention", f"conv{index + 1}")


def test_place_of_dropout_matters_in_training_alone(tmp_path):
    """Both networks start alike, and can exchange their weights."""
    models = []
    for late in (False, True):
        keras.utils.set_random_seed(0)
        models.append(
            RotMNISTCNN("p4", "input", filters=2, dropout_after_attention=late)
        )
    early, late = models
    for before, after in zip(early.weights, late.weights, strict=True):
        np.testing.assert_array_equal(as_array(before), as_array(after))
    before, after = (
        as_array(model.get_layer("dropout1").seed_generator.state)
        for model in (early, late)
    )
    np.testing.assert_array_equal(before, after)
    randomize(early)
    early.save_weights(tmp_path / "early.weights.h5")
    late.load_weights(tmp_path / "early.weights.h5")
    x = images((2, 28, 28, 1))
    assert relative_difference(as_array(late(x)), as_array(early(x))) < 1e-5


def test_activation_of_rotmnist():
    """It replaces every ReLU, and keeps the symmetry."""
    paper, model = (
        RotMNISTCNN("p8", filters=2, activation=name)
        for name in ("relu", "silu")
    )
    for layer, same in zip(model.layers, paper.layers, strict=True):
        assert layer.name == same.name.replace("relu", "silu")
    activations = [model.get_layer(f"silu{n}") for n in range(1, 7)]
    assert {x.activation for x in activations} == {keras.activations.silu}
    randomize(model)
    quarter = model.get_layer("conv1").group.grid_elements[1]
    assert invariance_error(model, elements=[quarter]) < 1e-4
    with pytest.raises(ValueError, match=r"`activation` must be.*'softmax'"):
        RotMNISTCNN(activation="softmax")


def test_wider_kernels_with_strides():
    models = [
        RotMNISTCNN(filters=2, downsampling="strided", kernel_size=size)
        for size in (3, 5)
    ]
    shapes = [
        [model.get_layer(f"conv{n}").output.shape for n in range(1, 8)]
        for model in models
    ]
    assert shapes[0] == shapes[1]
    assert as_array(models[1](np.ones((1, 28, 28, 1), "float32"))).any()


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


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("allcnnc_p4", (8, 8)),
        ("allcnnc_z2", (5, 7)),
        pytest.param("pcam_densenet_p4", (80, 80), marks=pytest.mark.sweep),
        pytest.param("resnet44_p4m", (8, 8), marks=pytest.mark.sweep),
        ("rotmnist_p4cnn", (28, 28)),
    ],
)
def test_antialiased_downsampling(name, size, short_resnet):
    """The sizes and the exact symmetry are those of pooling."""
    exact, antialiased = (
        applications.get_model(
            name,
            filters=2,
            input_shape=(*size, 1),
            downsampling=downsampling,
        )
        for downsampling in ("exact", "antialiased")
    )
    for layer in exact.layers:
        same = antialiased.get_layer(layer.name)
        assert same.output.shape == layer.output.shape
        if isinstance(layer, SpatialPooling2D) and layer.name != "pool_out":
            assert (same.mode, same.pool_size) == ("binomial", (4, 4))
            pad = antialiased.get_layer(f"{layer.name}_pad")
            assert (pad.mode, pad.padding) == ("reflect", (1, 1))
    randomize(antialiased)
    if "z2" not in name:
        assert invariance_error(antialiased, elements=[1]) < 1e-5
    assert_images_matter(antialiased)


@pytest.mark.once
@pytest.mark.parametrize(
    ("network", "size"),
    [(AllCNNC, 8), (ResNet44, 8), (PCamDenseNet, 80)],
)
@pytest.mark.parametrize(
    ("group", "antialiased"), [("p4m", False), ("p8", True)]
)
def test_downsampling_follows_the_group(
    network, size, group, antialiased, short_resnet
):
    """Groups with turns between the quarter turns have binomial means."""
    model = network(group, filters=1, input_shape=(size, size, 1))
    pools = [x for x in model.layers if isinstance(x, SpatialPooling2D)]
    modes = {x.mode for x in pools if x.name != "pool_out"}
    assert modes == {"binomial"} if antialiased else "binomial" not in modes


@pytest.mark.once
@pytest.mark.parametrize(
    ("group", "downsampling", "activation"),
    [
        ("p4", "exact", "relu"),
        ("p12m", "antialiased", "silu"),
        ("p16", "antialiased", "silu"),
    ],
)
def test_operators_of_rotmnist_follow_the_group(
    group, downsampling, activation
):
    default, chosen = (
        RotMNISTCNN(group, filters=1, **options)
        for options in (
            {},
            {"downsampling": downsampling, "activation": activation},
        )
    )
    assert default.name == chosen.name
    names = [layer.name for layer in default.layers]
    assert names == [layer.name for layer in chosen.layers]
    assert f"{activation}1" in names
    assert ("pool2_pad" in names) == (downsampling == "antialiased")
    for layer, same in zip(default.layers, chosen.layers, strict=True):
        config, expected = layer.get_config(), same.get_config()
        for name in ("mode", "pool_size", "activation"):
            assert config.get(name) == expected.get(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    # Those of self-attention take long, and have tests of their own: see
    # test_gsanet.py, test_group_vit.py, test_octic_vit.py. Those of ACmix are
    # large, and have no symmetry.
    [
        x
        for x in applications.list_models()
        # The U-Net returns images.
        if not x.startswith(("acmix", "gsanet", "octic", "unet", "vit"))
    ],
)
def test_invariance_of_all(name):
    model = applications.get_model(name)
    randomize(model)
    group = groups.get(reporting.group_of(model))
    assert invariance_error(model, elements=group.grid_elements) < 1e-4
    other = invariance_error(model, "p4m", [1, 4])
    assert (other > 1e-3) == (group.name != "p4m")


@pytest.mark.parametrize(
    ("attention", "policy", "network"),
    [
        # The one network that the fast tests of every backend train.
        pytest.param(
            *("input", "mixed_bfloat16", RotMNISTCNN),
            marks=pytest.mark.every_backend,
        ),
        ("input", "mixed_bfloat16", AllCNNC),
        ("input", "mixed_bfloat16", PCamDenseNet),
        ("input", "mixed_bfloat16", ResNet44),
        ("full", "float32", RotMNISTCNN),
        pytest.param("full", "float32", AllCNNC, marks=pytest.mark.sweep),
        pytest.param("full", "float32", PCamDenseNet, marks=pytest.mark.sweep),
        pytest.param("full", "float32", ResNet44, marks=pytest.mark.sweep),
    ],
)
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
@pytest.mark.parametrize("attention", convolution.ATTENTION)
@pytest.mark.parametrize(
    "group",
    swept(("z2", "z2m", "p2", "p2m", "p4", "p4m", "p8"), "p4m", "p8"),
)
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"group": "p3"}, "Unknown group 'p3'"),
        ({"attention": "ful"}, r"`attention` must be None or 'full'.*'ful'"),
        ({"filters": 0}, "`filters` must be a positive integer.*0"),
        ({"classes": 1.5}, "`classes` must be a positive integer.*1.5"),
        (
            {"downsampling": "pool"},
            "'antialiased' or 'strided'.*'pool'",
        ),
        ({"input_shape": (28, 28)}, r"must be \(height, width, channels\)"),
        ({"normalization": (0.1, 0.0)}, "`normalization` must be"),
        ({"normalization": 3}, "`normalization` must be"),
        ({"input_shape": 28}, r"must be \(height, width, channels\).*28"),
        ({"input_shape": (28, 28, True)}, "positive integers.*True"),
        ({"weights": __file__}, r"a .weights.h5 or .keras file"),
        (
            {"classifier_activation": "no"},
            "`classifier_activation` must be .* Received: 'no'",
        ),
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
        ({"kernel_size": 4}, "`kernel_size` must be odd.*Received: 4"),
        ({"kernel_size": 1}, "`kernel_size` must be an integer of at least 3"),
        (
            {"attention": "full", "dropout_after_attention": True},
            "`dropout_after_attention` must be False unless.*'full'",
        ),
    ],
)
def test_bad_arguments_of_rotmnist(arguments, message):
    with pytest.raises(ValueError, match=message):
        RotMNISTCNN(**arguments)


def test_unknown_name():
    with pytest.raises(ValueError, match="Did you mean 'rotmnist_p4cnn'"):
        applications.get_model("rotmnist_p4_cnn")
    with pytest.raises(ValueError, match="'acmix_resnet50' or 'resnet"):
        applications.get_model("resnet50")
    with pytest.raises(ValueError, match=r"'unheard of'\. The \d+ names"):
        applications.get_model("unheard of")


@pytest.mark.parametrize(
    ("network", "shape"),
    [
        (functools.partial(RotMNISTCNN, filters=2), (28, 28, 1)),
        (functools.partial(ACmixResNet26, mixer="conv"), (32, 48, 3)),
        pytest.param(ACmixResNet26, (32, 48, 3), marks=SLOW),
        pytest.param(ACmixSAN10, (32, 48, 3), marks=SLOW),
        pytest.param(
            functools.partial(ACmixSwinTiny, patch_size=2, window_size=4),
            (32, 64, 3),
            marks=SLOW,
        ),
        pytest.param(ACmixPVTTiny, (32, 64, 3), marks=SLOW),
    ],
)
def test_does_not_depend_on_the_configured_data_format(network, shape):
    x = np.random.default_rng(0).uniform(size=(2, *shape))
    model = network(input_shape=shape)
    expected = as_array(model(x))
    keras.config.set_image_data_format("channels_first")
    other = network(input_shape=shape)
    other.set_weights(model.get_weights())
    assert relative_difference(as_array(other(x)), expected) < 1e-5
