"""What is said of each layer, and of those that cannot be converted."""

import re

import keras
import numpy as np
import pytest
from plain_networks import image_input
from plain_networks import images_for
from plain_networks import outputs_of
from plain_networks import sequential
from plain_networks import turned
from plain_networks import with_random_weights

from keras_equiattn import conversion_summary
from keras_equiattn import equivariant
from keras_equiattn import register_conversion
from keras_equiattn.from_plain import ConversionError
from keras_equiattn.testing import relative_difference


def network(*others, side=8, first=True):
    """A convolution, other layers, and the mean over all pixels."""
    x = inputs = image_input(side)
    if first:
        x = keras.layers.Conv2D(4, 3, padding="same", name="first")(x)
    for layer in others:
        x = layer(x)
    if len(x.shape) == 4:
        x = keras.layers.ReLU()(x)
        x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(3, name="head")(x))


def test_numbers_of_a_convolution():
    plain = keras.Sequential(
        [
            image_input(),
            keras.layers.Conv2D(6, 3, name="lift"),
            keras.layers.Conv2D(8, 3, padding="same", name="group"),
            keras.layers.DepthwiseConv2D(3, name="depthwise"),
            keras.layers.Conv2DTranspose(5, 3, name="transposed"),
            keras.layers.GlobalAveragePooling2D(name="pool"),
            keras.layers.Dense(3, name="head"),
        ]
    )
    summary = conversion_summary(plain, "p4", "channels")
    rows = {row.name: row for row in summary.layers}
    assert rows["lift"].becomes == ("LiftingConv2D",)
    assert rows["lift"].parameters == (9 * 2 * 6 + 6, 9 * 2 * 6 + 6)
    assert rows["lift"].multiply_adds == (49 * 108, 4 * 49 * 108)
    assert rows["group"].parameters == (9 * 48 + 8, 4 * 9 * 48 + 8)
    assert rows["group"].multiply_adds == (49 * 9 * 48, 16 * 49 * 9 * 48)
    assert rows["depthwise"].multiply_adds == (25 * 72, 16 * 25 * 72)
    assert rows["transposed"].multiply_adds == (25 * 360, 16 * 25 * 360)
    assert rows["pool"].multiply_adds == (0, 0)
    assert rows["head"].becomes == ("GlobalAveragePooling3D", "Dense")
    assert rows["head"].multiply_adds == (15, 15)
    assert summary.parameters == (
        plain.count_params(),
        equivariant(plain, "p4", "channels").count_params(),
    )
    assert summary.multiply_adds == tuple(
        sum(row.multiply_adds[n] for row in summary.layers) for n in (0, 1)
    )


@pytest.mark.parametrize(
    ("width", "which"), [("parameters", 0), ("compute", 1)]
)
def test_width_keeps_what_it_says(width, which):
    plain = network(
        *(keras.layers.Conv2D(32, 3, padding="same") for _ in range(6))
    )
    summary = conversion_summary(plain, "p4", width)
    before, after = (summary.parameters, summary.multiply_adds)[which]
    assert 0.9 < after / before < 1.1
    others = (summary.multiply_adds, summary.parameters)[which]
    ratio = others[1] / others[0]
    assert 3.5 < ratio < 4.5 if width == "parameters" else 0.2 < ratio < 0.3


def test_width_keeps_parameters_of_steerable_filters():
    """What is not widened, such as a second input, makes no difference."""
    image, numbers = keras.Input((9, 9, 3)), keras.Input((4,))
    x, y = image, keras.layers.Dense(512)(numbers)
    for size in (3, 5, 1):
        x = keras.layers.Conv2D(32, size, padding="same", name=f"of{size}")(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    x = keras.layers.Concatenate()([x, y])
    plain = keras.Model([image, numbers], keras.layers.Dense(1000)(x))
    rows = conversion_summary(plain, "p8").layers
    counts = [row.parameters for row in rows if row.name.startswith("of")]
    before, after = map(sum, zip(*counts, strict=True))
    assert 0.9 < after / before < 1.1


@pytest.mark.parametrize(
    ("group", "interpolation", "notes"),
    [("p8", "nearest", 1), ("p8", "bilinear", 0), ("p4", "nearest", 0)],
)
def test_note_on_repeated_pixels(group, interpolation, notes):
    plain = network(keras.layers.UpSampling2D(2, interpolation=interpolation))
    found = conversion_summary(plain, group).notes
    assert ["repeats pixels" in row.note for row in found] == [True] * notes


def test_steerable_filters_take_the_multiply_adds_of_pixels():
    plain = network(
        keras.layers.Conv2D(4, 3, padding="same"),
        keras.layers.DepthwiseConv2D(5, padding="same"),
        keras.layers.SeparableConv2D(4, 3, padding="same"),
        keras.layers.Conv2DTranspose(4, 3, padding="same"),
    )
    (_, steerable), (_, pixels) = (
        conversion_summary(plain, group, "channels").multiply_adds
        for group in ("p8", "p4m")  # of the same order
    )
    assert steerable == pixels


def test_table():
    text = str(conversion_summary(sequential(), "p4"))
    lines = text.splitlines()
    assert re.match(r"layer +class +becomes +parameters +now", lines[0])
    assert "GlobalSpatialPooling2D" in text
    assert lines[-1].startswith("total")
    refused = str(conversion_summary(network(keras.layers.Flatten())))
    assert "(refused)" in refused
    assert "1 layer of 'functional" in refused


def test_unknown_sizes():
    inputs = keras.Input((None, None, 2))
    x = keras.layers.Conv2D(4, 3, strides=2)(inputs)
    x = keras.layers.MaxPooling2D(3, 2)(keras.layers.ReLU()(x))
    plain = keras.Model(inputs, keras.layers.GlobalAveragePooling2D()(x))
    summary = conversion_summary(plain, "p4")
    assert summary.multiply_adds == (None, None)
    assert "?" in str(summary)
    model = with_random_weights(equivariant(plain, "p4"))
    x = np.random.default_rng(0).normal(size=(2, 15, 15, 2))
    x = x.astype("float32")
    (expected,) = outputs_of(model, [x])
    (found,) = outputs_of(model, turned([x], "p4", 1))
    assert relative_difference(found, expected) < 1e-5
    with pytest.raises(ValueError, match="would not be exactly equivariant"):
        model(x[:, 1:, 1:])


SHIFTING = {
    "conv": (keras.layers.Conv2D(4, 3, strides=2, padding="same"), "mean over"),
    "depthwise": (keras.layers.DepthwiseConv2D(3, 2), "mean over"),
    "pooling": (keras.layers.MaxPooling2D(3, 2), r"windows have \(4, 4\)"),
    "padded": (
        keras.layers.AveragePooling2D(3, 2, padding="same"),
        r"windows have \(2, 2\)",
    ),
    "padding": (
        keras.Sequential(
            [
                keras.layers.ZeroPadding2D(((0, 1), (0, 1))),
                keras.layers.Conv2D(4, 3, strides=2),
            ]
        ),
        "1 pixels at every side",
    ),
    "transposed": (
        keras.layers.Conv2DTranspose(4, 3, strides=2, padding="same"),
        r"\(4, 4\) pixels",
    ),
}


@pytest.mark.parametrize("name", SHIFTING)
def test_strides_become_exact_or_are_kept(name):
    layer, note = SHIFTING[name]
    plain = network(
        keras.models.clone_model(layer)
        if name == "padding"
        else (type(layer).from_config(layer.get_config()))
    )
    summary = conversion_summary(plain, "p4")
    assert re.search(note, str(summary))
    assert summary.notes
    inputs = images_for(plain)
    errors = {}
    for downsampling in ("exact", "keep"):
        model = equivariant(plain, "p4", downsampling=downsampling)
        assert model.output_shape == plain.output_shape
        with_random_weights(model)
        (expected,) = outputs_of(model, inputs)
        (found,) = outputs_of(model, turned(inputs, "p4", 1))
        errors[downsampling] = relative_difference(found, expected)
    assert errors["exact"] < 1e-5
    assert errors["keep"] > 1e-3
    kept = conversion_summary(plain, "p4", downsampling="keep")
    assert any("not exactly equivariant" in row.note for row in kept.notes)
    with pytest.raises(ConversionError, match=r"first|1 layer|2 layers"):
        equivariant(plain, "p4", inflate=True)
    inflated = equivariant(plain, "p4", downsampling="keep", inflate=True)
    assert inflated.output_shape == plain.output_shape


@pytest.mark.parametrize("strides", [1, 2])
@pytest.mark.parametrize("kind", ["conv", "pooling"])
def test_padding_at_one_side_changes_no_size(kind, strides):
    """On 9 pixels strides of 2 are exact after padding at all sides."""
    inputs = image_input(9)
    x = keras.layers.ZeroPadding2D(((0, 1), (0, 1)))(inputs)
    if kind == "conv":
        x = keras.layers.Conv2D(4, 3, strides, name="last")(x)
    else:
        x = keras.layers.MaxPooling2D(3, strides, name="last")(x)
    x = keras.layers.Conv2D(3, 3, padding="same", activation="relu")(x)
    plain = keras.Model(inputs, x)
    model = with_random_weights(equivariant(plain, "p4"))
    assert model.output_shape == plain.output_shape
    inputs = images_for(model)
    (expected,) = turned(outputs_of(model, inputs), "p4", 1)
    (found,) = outputs_of(model, turned(inputs, "p4", 1))
    assert relative_difference(found, expected) < 1e-5


class Unknown(keras.layers.Layer):
    def call(self, x):
        return 2 * x


class OfConv(keras.layers.Conv2D):
    """Might compute anything."""


REFUSED = {
    "flatten": (keras.layers.Flatten(), "GlobalAveragePooling2D"),
    "reshape": (keras.layers.Reshape((64, 4)), "a place of its own"),
    "permute": (keras.layers.Permute((2, 1, 3)), "a place of its own"),
    "unknown": (Unknown(), "nothing is known of how `Unknown`"),
    "subclass": (OfConv(4, 3), "nothing is known of how `OfConv`"),
    "even": (keras.layers.Conv2D(4, 2, padding="same"), "use an odd window"),
    "oblong": (keras.layers.Conv2D(4, (1, 3)), "square"),
    "groups": (keras.layers.Conv2D(4, 3, groups=2), "groups=2 for 4 channels"),
    "first": (
        keras.layers.MaxPooling2D(2, data_format="channels_first"),
        "data_format='channels_last'",
    ),
    "bicubic": (
        keras.layers.UpSampling2D(2, interpolation="bicubic"),
        "'nearest' or 'bilinear'",
    ),
    "cropping": (
        keras.layers.Cropping2D(((0, 1), (0, 1))),
        "same number at all",
    ),
    "slopes": (keras.layers.PReLU(), r"shared_axes=\[1, 2\]"),
    "normalization": (
        keras.layers.LayerNormalization(axis=[1, 2, 3]),
        r"axes \(1, 2, 3\)",
    ),
    "noise": (
        keras.layers.AlphaDropout(0.1, noise_shape=(None, 1, 1, 4)),
        "noise_shape=",
    ),
    "softmax": (keras.layers.Softmax(axis=1), r"axes \(1,\)"),
    "augmentation": (keras.layers.RandomFlip(), "before the first convolution"),
    "output padding": (
        keras.layers.Conv2DTranspose(4, 4, 2, output_padding=1),
        "output_padding",
    ),
}


def refused(name):
    layer, _ = REFUSED[name]
    new = type(layer).from_config(layer.get_config())
    new.name = "culprit"
    if name == "output padding":
        new.output_padding = 1  # older Keras forgets it
    return new


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_what_to_do(name):
    plain = network(refused(name))
    with pytest.raises(ConversionError, match=REFUSED[name][1]) as error:
        equivariant(plain, "p4")
    (problem,) = error.value.summary.problems
    assert problem.name == "culprit"
    assert not problem.becomes


def test_all_problems_are_reported_at_once():
    names = ["even", "unknown", "subclass", "slopes", "flatten"]
    made = [refused(name) for name in names]
    for layer, name in zip(made, names, strict=True):
        layer.name = name
    plain = network(*made)
    problems = conversion_summary(plain, "p4").problems
    assert [problem.name for problem in problems] == names
    with pytest.raises(ConversionError, match="5 layers of"):
        equivariant(plain, "p4")


def test_group_normalization():
    plain = network(keras.layers.GroupNormalization(2))
    assert not conversion_summary(plain, "p4").problems
    with pytest.raises(ConversionError, match="all poses together"):
        equivariant(plain, "p4", inflate=True)
    odd = network(keras.layers.Conv2D(6, 3), keras.layers.GroupNormalization(6))
    assert not conversion_summary(odd, "p4").notes
    # 8 channels become 3 for each pose, which 4 groups do not divide.
    odd = network(keras.layers.Conv2D(8, 3), keras.layers.GroupNormalization(4))
    (row,) = conversion_summary(odd, "p4m").notes
    assert row.note == "The number of its groups of channels is 1, not 4."


class Doubled(keras.layers.Layer):
    """Doubles, and scales each channel."""

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[-1:], initializer="ones")

    def call(self, x):
        return 2 * x * self.scale


def test_converters_of_ones_own():
    plain = with_random_weights(network(Doubled()))
    with pytest.raises(ConversionError, match="register_conversion"):
        equivariant(plain)

    @register_conversion(Doubled)
    def doubled(layer, x, to):
        return to.apply(Doubled(name=to.name()), x)

    inputs = images_for(plain)
    model = equivariant(plain, "p4", inflate=True)
    every = [outputs_of(plain, turned(inputs, "p4", h))[0] for h in range(4)]
    (found,) = outputs_of(model, inputs)
    assert relative_difference(found, np.mean(every, axis=0)) < 1e-5


class Wider(Doubled):
    """A layer whose converter passes on no weights."""


def test_converter_without_weights():
    @register_conversion(Wider)
    def wider(layer, x, to):
        return to.apply(keras.layers.Dense(3, name=to.name()), x)

    plain = network(Wider())
    assert equivariant(plain, "p4").output_shape == (None, 3)
    with pytest.raises(ConversionError, match="must pass `weights`"):
        equivariant(plain, "p4", inflate=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"width": "narrow"}, "`width` must be"),
        ({"downsampling": "strided"}, "`downsampling` must be"),
        ({"inflate": 1}, "`inflate` must be"),
        ({"inflate": True, "width": "compute"}, "width='compute'"),
        ({"inflate": True, "group": "p8"}, "must act on the grid.*'p8'"),
        ({"group": "p5"}, "p5"),
    ],
)
def test_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        equivariant(network(), **arguments)


def test_models():
    with pytest.raises(ValueError, match="functional or Sequential"):
        equivariant(keras.layers.Conv2D(3, 3))
    with pytest.raises(ValueError, match="functional or Sequential"):
        equivariant(keras.Sequential([keras.layers.Conv2D(3, 3)]))
    inputs = keras.Input((8,))
    with pytest.raises(ValueError, match="must take an image"):
        equivariant(keras.Model(inputs, keras.layers.Dense(3)(inputs)))
    inputs = keras.Input((8, 8, 8, 1))
    with pytest.raises(ValueError, match="must take an image"):
        equivariant(keras.Model(inputs, keras.layers.Conv3D(3, 3)(inputs)))
