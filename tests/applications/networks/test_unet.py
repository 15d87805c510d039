"""The U-Net: what it returns turns with the image."""

import keras
import numpy as np
import pytest
from layer_contract import as_array
from network_helpers import draw

from keras_equiattn import applications
from keras_equiattn import groups
from keras_equiattn.applications import GroupUNet
from keras_equiattn.testing import assert_equivariant
from keras_equiattn.testing import equivariance_error

SLOW = pytest.mark.slow
OTHERS = ("full", "channel", "spatial", "co")
VARIANTS = [
    *("unet_z2", "unet_p4", "unet_p4m"),
    *("unet_p4_input", "unet_p4_asc", "unet_p4_acmix"),
]


def small(group="p4", size=(8, 8), **options):
    model = GroupUNet(
        group,
        **{
            "depth": 1,
            "width": 4,
            "classes": 3,
            "input_shape": (*size, 2),
            **options,
        },
    )
    draw(model, small=("query_kernel", "key_kernel"))
    return model


def images(size=(8, 8), channels=2):
    """With contrasts that attention does not hide."""
    rng = np.random.default_rng(0)
    return 8 * rng.normal(size=(2, *size, channels)).astype("float32")


def with_statistics_of(model, x):
    """Sets the moving statistics to those of `x`, or maps would grow."""
    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.momentum = 0.0
    model(x, training=True)


@pytest.mark.once
def test_variants():
    assert applications.list_models("unet*") == sorted(VARIANTS)


@pytest.mark.parametrize("outputs", ["scores", "vectors", "axes"])
@pytest.mark.parametrize(
    "group", ["p4m", *(pytest.param(g, marks=SLOW) for g in ("z2m", "p2m"))]
)
def test_outputs_turn_with_the_image(group, outputs):
    model = small(group, outputs=outputs)
    kind = "images" if outputs == "scores" else outputs
    x = images()
    assert_equivariant(model, group, x, outputs=kind, rtol=1e-5)
    if outputs != "scores":
        # Measured as scalar images, they do not turn.
        error = equivariance_error(model, group, x, outputs="images")
        assert error[1:].max() > 1e-2
    assert model.output_shape[-1] == (3 if outputs == "scores" else 6)


def test_plain_network_does_not_turn():
    model = small("z2")
    x = images()
    error = equivariance_error(model, "p4", x, outputs="images")
    assert error[1:].min() > 1e-2


@pytest.mark.parametrize(
    "attention",
    ["input", *(pytest.param(a, marks=SLOW) for a in OTHERS)],
)
def test_attention(attention):
    model = small(attention=attention)
    assert_equivariant(model, "p4", images(), rtol=1e-4)


@pytest.mark.parametrize("mixer", ["asc", "acmix"])
def test_mixers(mixer):
    model = small("p4m", mixer=mixer)
    with_statistics_of(model, images())
    assert_equivariant(model, "p4m", images(), rtol=1e-4, elements=[1, 4, 6])


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_at_full_size(name):
    model = applications.get_model(name, input_shape=(32, 32, 3))
    draw(model)
    x = images((32, 32), 3)
    with_statistics_of(model, x)
    assert_equivariant(model, name.split("_")[1], x, rtol=1e-4)


def test_rectangles_and_groups_between_the_quarter_turns():
    flat = small(size=(8, 12))
    assert_equivariant(flat, "p4", images((8, 12)), rtol=1e-5, elements=[2])
    for mixer in ("conv", "acmix"):
        model = small("p8", mixer=mixer)
        with_statistics_of(model, images())
        elements = groups.get("p8").grid_elements
        assert_equivariant(model, "p8", images(), rtol=1e-4, elements=elements)


def test_training_and_files(tmp_path):
    model = small(normalization=(0.5, 0.25))
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(4, 8, 8, 2)).astype("float32")
    labels = rng.integers(3, size=(4, 8, 8))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss)
    losses = model.fit(x, labels, epochs=8, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    model.save(tmp_path / "model.keras")
    revived = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(
        as_array(revived(x)), as_array(model(x)), rtol=1e-5
    )


def test_probabilities():
    y = as_array(small(classifier_activation="softmax")(images()))
    np.testing.assert_allclose(y.sum(-1), 1, rtol=1e-5)


def test_weights_of_a_file(tmp_path):
    model = small()
    model.save_weights(tmp_path / "model.weights.h5")
    again = GroupUNet(
        "p4",
        depth=1,
        width=4,
        classes=3,
        input_shape=(8, 8, 2),
        weights=tmp_path / "model.weights.h5",
    )
    for one, other in zip(model.weights, again.weights, strict=True):
        np.testing.assert_array_equal(as_array(one), as_array(other))


@pytest.mark.once
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"depth": 0}, "`depth` must be a positive integer.*0"),
        ({"depth": 4, "input_shape": (32, 40, 1)}, "divisible by 16.*40"),
        ({"width": 6, "mixer": "asc"}, "width=6 is not divisible by the 4"),
        ({"width": 0}, "`width` must be a positive integer"),
        ({"mixer": "swin"}, "`mixer` must be 'conv' or 'asc' or 'acmix'"),
        ({"outputs": "angles"}, "`outputs` must be 'scores' or"),
        ({"attention": "self"}, "`attention` must be"),
        (
            {"outputs": "vectors", "classifier_activation": "softmax"},
            "outputs='vectors' takes no `classifier_activation`",
        ),
    ],
)
def test_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        GroupUNet(**arguments)
