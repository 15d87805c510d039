"""Quantised networks sum whole numbers, and are exact in every pose."""

import re
import warnings

import keras
import numpy as np
import pytest
from keras.layers import Activation
from keras.layers import BatchNormalization
from keras.layers import Conv2D
from keras.layers import Dense
from keras.layers import GlobalAveragePooling3D
from layer_contract import as_array

from keras_equiattn import applications
from keras_equiattn import export
from keras_equiattn import layers
from keras_equiattn import load_exported
from keras_equiattn import plain
from keras_equiattn import quantize
from keras_equiattn.deployment import integers
from keras_equiattn.deployment.integers import integer_weights
from keras_equiattn.deployment.integers import IntegerLayer
from keras_equiattn.deployment.integers import Levels
from keras_equiattn.testing import assert_equivariant
from keras_equiattn.testing import relative_difference


def classifier(group, size=9):
    inputs = keras.Input((size, size, 2))
    x = layers.LiftingConv2D(4, 3, group=group, activation="relu")(inputs)
    x = layers.SpatialPooling2D(3, 2, group=group)(x)
    x = layers.GroupConv2D(4, 3, group=group, padding="same")(x)
    x = keras.layers.ReLU()(BatchNormalization()(x))
    return keras.Model(inputs, Dense(3)(GlobalAveragePooling3D()(x)))


def excited(group):
    inputs = keras.Input((9, 9, 2))
    x = layers.LiftingConv2D(4, 3, group=group)(inputs)
    x = layers.SqueezeExcite(group=group, reduction_ratio=2)(x)
    x = layers.InputAttention(group=group, attention_kernel_size=3)(x)
    return keras.Model(inputs, layers.GroupPooling("mean")(x))


def pixels(group):
    inputs = keras.Input((9, 9, 2))
    x = layers.LiftingConv2D(4, 3, group=group)(inputs)
    x = layers.GroupDepthwiseConv2D(3, group=group, padding="same")(x)
    y = layers.GroupConv2DTranspose(2, 3, strides=2, group=group)(x)
    y = layers.SpatialPooling2D(3, 2, mode="mean", group=group)(y)
    y = layers.SpatialUpSampling2D(2, "bilinear", group=group)(y)
    return keras.Model(inputs, layers.GroupPooling()(y))


NETWORKS = {"classifier": classifier, "excited": excited, "pixels": pixels}
SOME = ("classifier", "p4m")


def images(shape, count=4, seed=1):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, *shape)).astype("float32")


def with_weights(model):
    rng = np.random.default_rng(0)
    for variable in model.weights:
        if keras.backend.is_float_dtype(variable.dtype):
            value = rng.normal(scale=0.4, size=variable.shape)
            if "variance" in variable.name:
                value = abs(value) + 0.5
            variable.assign(value)
    return model


def quantized(name, group, **options):
    model = with_weights(NETWORKS[name](group))
    x = images(model.input_shape[1:], 32, seed=2)
    return model, quantize(model, x, **options)


def cases():
    for name in NETWORKS:
        for group in ("z2", "p2", "p4", "p4m"):
            slow = (name, group) != SOME
            marks = pytest.mark.sweep if slow else ()
            yield pytest.param(name, group, marks=marks)


@pytest.mark.every_backend
@pytest.mark.parametrize(("name", "group"), list(cases()))
def test_every_pose_gives_the_same_bits(name, group):
    model, small = quantized(name, group)
    x = images(model.input_shape[1:])
    if group != "z2":
        assert_equivariant(
            lambda x: small.predict_on_batch(as_array(x)), group, x, rtol=0
        )
    y = small.predict_on_batch(x)
    assert 0 < relative_difference(y, as_array(model(x))) < 0.1


def test_floats_are_not_exact():
    """The other tests would see rounding errors."""
    model = with_weights(classifier("p4", 15))
    x = images((15, 15, 2), 32)
    with pytest.raises(AssertionError, match="Not equivariant"):
        assert_equivariant(
            lambda x: model.predict_on_batch(as_array(x)), "p4", x, rtol=0
        )


def test_files_hold_whole_numbers(tmp_path):
    _, small = quantized(*SOME)
    x = images(small.input_shape[1:])
    small.save(tmp_path / "small.keras")
    loaded = keras.saving.load_model(tmp_path / "small.keras")
    np.testing.assert_array_equal(
        loaded.predict_on_batch(x), small.predict_on_batch(x)
    )
    whole = [x for x in small.layers if isinstance(x, IntegerLayer)]
    assert len(whole) == 3
    for layer in whole:
        kernel, bias = as_array(layer.kernel), as_array(layer.bias)
        assert (kernel.dtype, bias.dtype) == ("int8", "int32")
        assert abs(kernel).max() == 127
        assert not layer.trainable_weights


def test_scales_are_those_of_all_group_elements():
    _, small = quantized(*SOME)
    for layer in small.layers:
        if isinstance(layer, integers.IntegerConv2D):
            scales = as_array(layer.scale).reshape(8, -1)
            np.testing.assert_array_equal(scales, np.tile(scales[:1], (8, 1)))


def test_fewer_bits():
    errors = []
    for bits in (8, 7, 4):
        model, small = quantized("classifier", "p4", weight_bits=bits)
        x = images(model.input_shape[1:])
        errors.append(
            relative_difference(as_array(small(x)), as_array(model(x)))
        )
        most = max(
            abs(as_array(layer.kernel)).max()
            for layer in small.layers
            if isinstance(layer, IntegerLayer)
        )
        assert most == 2 ** (bits - 1) - 1
    assert errors[0] < errors[2]


def test_large_activations_are_cut():
    layer = Levels(0.5, signed=False)
    x = np.array([-1.0, 0.2, 0.3, 1.0, 200.0], "float32")
    np.testing.assert_array_equal(as_array(layer(x)), [0, 0, 1, 2, 255])
    layer = Levels(0.5, signed=True)
    x = np.array([-100.0, -1.0, 100.0], "float32")
    np.testing.assert_array_equal(as_array(layer(x)), [-128, -2, 127])


class TestIntegerWeights:
    def test_rounding(self):
        kernel = np.array([[1.0, -4.0], [0.5, 2.0]])
        found = integer_weights(kernel, np.array([0.1, 0.0]), 1, 0.5, 255, 8)
        kernel, bias, scale = found
        np.testing.assert_array_equal(kernel, [[127, -127], [64, 64]])
        np.testing.assert_allclose(scale, [0.5 / 127, 2 / 127], rtol=1e-6)
        np.testing.assert_array_equal(bias, [25, 0])

    @pytest.mark.parametrize("bias", [0.0, 1e3, -1e6])
    def test_no_sum_is_too_large(self, bias):
        """Also where 127 times the number of terms, or the bias, would be."""
        rng = np.random.default_rng(0)
        kernel = rng.choice([-1.0, 1.0], size=(4000, 3))
        found = integer_weights(kernel, np.full(3, bias), 1, 0.01, 255, 8)
        whole, offset = (x.astype("int64") for x in found[:2])
        largest = 255 * abs(whole).sum(axis=0) + abs(offset)
        assert (largest <= 2**24).all()
        assert (largest > 2**23).all()

    def test_zeros(self):
        whole, offset, scale = integer_weights(
            np.zeros((3, 2)), np.zeros(2), 1, 0.1, 255, 8
        )
        assert not whole.any()
        assert not offset.any()
        assert np.isfinite(scale).all()

    def test_too_many_terms(self):
        with pytest.raises(ValueError, match="140000 products"):
            integer_weights(np.ones((140000, 1)), np.zeros(1), 1, 1.0, 255, 8)


def test_whole_image_of_one_value():
    """Nothing has a range, and nothing divides by zero."""
    inputs = keras.Input((5, 5, 1))
    y = layers.LiftingConv2D(2, 3, group="p4")(inputs)
    small = quantize(keras.Model(inputs, y), np.zeros((2, 5, 5, 1)))
    assert np.isfinite(small.predict_on_batch(images((5, 5, 1)))).all()


def test_several_inputs_and_a_layer_called_twice():
    first, second = keras.Input((5, 5, 1)), keras.Input((5, 5, 1))
    layer = layers.LiftingConv2D(2, 3, group="p4")
    y = keras.layers.Add()([layer(first), layer(second)])
    model = with_weights(keras.Model([first, second], y))
    x = [images((5, 5, 1), 32, seed) for seed in (1, 2)]
    small = quantize(model, [x[0], 5 * x[1]])
    y, expected = small([x[0], 5 * x[1]]), model([x[0], 5 * x[1]])
    assert relative_difference(as_array(y), as_array(expected)) < 0.02


def test_what_stays_is_named():
    inputs = keras.Input((5, 5, 1))
    x = layers.LiftingConv2D(2, 3, group="p4")(inputs)
    y = layers.StandAloneSelfAttention2D(
        4, kernel_size=3, num_heads=1, group="p4", name="looks"
    )(x)
    model = keras.Model(inputs, y)
    with pytest.warns(UserWarning, match="rounding only: 'looks'"):
        small = quantize(model, images((5, 5, 1)))
    assert_equivariant(small, "p4", images((5, 5, 1)))


def named(model):
    """The layers and operations that a warning of `quantize` names."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", UserWarning)
        quantize(model, images(model.input_shape[1:]))
    text = "".join(str(w.message) for w in found)
    return re.findall(r"\((\w+)\)", text)


def lifted(x):
    return layers.LiftingConv2D(2, 3, group="p4", activation="relu")(x)


class Blur(keras.layers.Layer):
    """A layer that `quantize` does not know."""

    def call(self, x):
        return x + keras.ops.roll(x, 1, axis=1)


@keras.saving.register_keras_serializable("test_quantization")
def third(x):
    return x / 3


class MyConv2D(layers.GroupConv2D):
    """Computes what its base does, which `quantize` cannot know."""


INEXACT = {
    "DepthwiseConv2D": lambda x: keras.layers.DepthwiseConv2D(3)(x),
    "SeparableConv2D": lambda x: keras.layers.SeparableConv2D(2, 3)(x),
    "EinsumDense": lambda x: keras.layers.EinsumDense(
        "bhwc,cd->bhwd", (None, None, 2)
    )(x),
    "LayerNormalization": lambda x: keras.layers.LayerNormalization()(x),
    "Blur": lambda x: Blur()(x),
    "Lambda": lambda x: keras.layers.Lambda(lambda x: 2 * x)(x),
    "Conv2D": lambda x: Conv2D(2, 3, activation=third)(x),
    "MyConv2D": lambda x: MyConv2D(2, 3, group="p4")(
        layers.LiftingConv2D(2, 3, group="p4")(x)
    ),
    "BatchNormalization": lambda x: BatchNormalization()(
        Conv2D(2, 3)(x), training=True
    ),
    "UpSampling2D": lambda x: keras.layers.UpSampling2D(
        3, interpolation="bilinear"
    )(x),
    "Var": lambda x: keras.ops.var(x, axis=(1, 2)),
    "GetItem": lambda x: keras.layers.Add()(
        [lifted(x)[:, :, :, n] for n in range(4)]
    ),
    "Unstack": lambda x: keras.layers.Average()(
        keras.ops.unstack(lifted(x), axis=3)
    ),
    "Softmax": lambda x: keras.layers.Softmax()(
        keras.ops.max(lifted(x), axis=-1)
    ),
    "Activation": lambda x: Activation("softmax")(
        keras.layers.Reshape((81,))(Conv2D(1, 1)(x))
    ),
    "LogSoftmax": lambda x: keras.ops.log_softmax(x),
    "Power": lambda x: keras.ops.power(
        Conv2D(2, 3, activation="relu")(x), np.arange(2.0, dtype="float32")
    ),
    "Dense": lambda x: Dense(2)(
        keras.layers.Flatten()(keras.ops.tile(x, (1, 1, 1, 1700)))
    ),
}
EXACT = {
    "softmax of channels": lambda x: keras.layers.Softmax()(
        keras.layers.ReLU()(Conv2D(3, 3)(x))
    ),
    "softmax of classes": lambda x: Activation("softmax")(
        Dense(3)(GlobalAveragePooling3D()(lifted(x)))
    ),
    "some channels": lambda x: lifted(x)[..., :1] ** 2,
    "a smaller image": lambda x: Conv2D(3, 3)(x)[:, 1:-1, 1:-1],
    "sum of branches": lambda x: keras.layers.Add()(
        [Conv2D(3, 3)(x), Conv2D(3, 3)(x), Conv2D(3, 3)(x)]
    ),
    "normalization": lambda x: BatchNormalization()(lifted(x)),
}


@pytest.mark.once
@pytest.mark.parametrize("kind", INEXACT)
def test_what_may_sum_floats_is_named(kind):
    inputs = keras.Input((9, 9, 1))
    model = keras.Model(inputs, INEXACT[kind](inputs))
    assert set(named(model)) == {kind}


@pytest.mark.once
@pytest.mark.parametrize("kind", EXACT)
def test_what_sums_no_floats_is_not_named(kind):
    inputs = keras.Input((9, 9, 1))
    assert named(keras.Model(inputs, EXACT[kind](inputs))) == []


@pytest.mark.every_backend
@pytest.mark.parametrize("name", ["before", "after"])
def test_normalization_that_stays(name):
    """A program may compute the factors of group elements in different ways."""
    inputs = keras.Input((9, 9, 2))
    x = layers.LiftingConv2D(3, 3, group="p4")(inputs)
    if name == "before":
        x = keras.layers.ReLU()(x)
    x = BatchNormalization()(x)
    x = keras.layers.Add()([layers.GroupConv2D(3, 1, group="p4")(x), x])
    model = with_weights(keras.Model(inputs, x))
    small = quantize(model, images((9, 9, 2), 32))
    x = images((9, 9, 2), 3)
    assert_equivariant(
        lambda x: small.predict_on_batch(as_array(x)), "p4", x, rtol=0
    )
    y, expected = small.predict_on_batch(x), model.predict_on_batch(x)
    assert relative_difference(y, expected) < 0.05


def test_wide_sums_leave_few_bits():
    inputs = keras.Input((150, 150, 2))
    dense = Dense(2, name="wide")
    model = keras.Model(inputs, dense(keras.layers.Flatten()(inputs)))
    with pytest.warns(UserWarning, match="less than 6 bits.*'wide' .Dense"):
        quantize(with_weights(model), images((150, 150, 2)))


def test_calibration_by_name():
    inputs = [keras.Input((5, 5, 1), name=name) for name in "ba"]
    outputs = [Conv2D(2, 3)(x) for x in inputs]
    model = with_weights(keras.Model(inputs, outputs))
    x = images((5, 5, 1), 16)
    small = quantize(model, {"a": x, "b": 100 * x})
    y = small([100 * x, x])
    for found, expected in zip(y, model([100 * x, x]), strict=True):
        assert relative_difference(as_array(found), as_array(expected)) < 0.05
    with pytest.raises(ValueError, match=r"for \['b', 'a'\].*\['a', 'c'\]"):
        quantize(model, {"a": x, "c": x})


@pytest.mark.once
@pytest.mark.parametrize(
    "pool",
    [
        GlobalAveragePooling3D(),
        keras.layers.AveragePooling3D((256, 256, 2)),
        lambda x: keras.ops.mean(x, (1, -4, 3)),
    ],
    ids=["global", "pooling", "operation"],
)
@pytest.mark.parametrize("order", [1, 2])
def test_means_of_too_many_levels_are_named(pool, order):
    """65,793 levels of 255 are 2^24 - 1."""
    inputs = keras.Input((256, 257 - order // 2, 1))
    x = keras.ops.stack([inputs] * order, axis=3)
    if order == 1 and isinstance(pool, keras.layers.AveragePooling3D):
        pool = keras.layers.AveragePooling3D((256, 256, 1))
    assert len(named(keras.Model(inputs, pool(x)))) == (order == 2)


def test_no_warning_where_all_is_exact():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        quantized(*SOME)


def test_channels_first_stays_in_floats():
    if keras.backend.backend() == "tensorflow":
        pytest.skip("TensorFlow has no such convolution on a CPU.")
    inputs = keras.Input((1, 5, 5))
    layer = Conv2D(2, 3, data_format="channels_first")
    model = keras.Model(inputs, layer(inputs))
    with pytest.warns(UserWarning, match=layer.name):
        small = quantize(model, images((1, 5, 5)))
    assert not [x for x in small.layers if isinstance(x, IntegerLayer)]


class TestErrors:
    def check(self, match, calibration, **options):
        inputs = keras.Input((5, 5, 1))
        model = keras.Model(
            inputs, layers.LiftingConv2D(2, 3, group="p4")(inputs)
        )
        with pytest.raises(ValueError, match=match):
            quantize(model, calibration, **options)

    def test_shape(self):
        self.check(r"5, 5, 1.*\(2, 6, 6, 1\)", np.zeros((2, 6, 6, 1)))

    def test_count(self):
        self.check("each input", [np.zeros((2, 5, 5, 1))] * 2)

    def test_different_counts(self):
        inputs = [keras.Input((5, 5, 1)), keras.Input((5, 5, 1))]
        model = keras.Model(inputs, keras.layers.Add()(inputs))
        x = [np.zeros((n, 5, 5, 1)) for n in (2, 3)]
        with pytest.raises(ValueError, match=r"equally many.*\(3, 5, 5, 1\)"):
            quantize(model, x)

    @pytest.mark.parametrize("calibration", ["images", [object()]])
    def test_no_arrays(self, calibration):
        self.check("array of images, or one for each input", calibration)

    @pytest.mark.once
    def test_dataset(self):
        tf = pytest.importorskip("tensorflow")
        dataset = tf.data.Dataset.from_tensors(np.zeros((2, 5, 5, 1)))
        self.check("dataset, pass the images of some batches", dataset)

    def test_half_precision(self):
        inputs = keras.Input((5, 5, 1))
        layer = Conv2D(2, 3, dtype="mixed_bfloat16", name="half")
        with pytest.raises(ValueError, match=r"float32.*'half'.*bfloat16"):
            quantize(keras.Model(inputs, layer(inputs)), np.zeros((2, 5, 5, 1)))

    def test_no_images(self):
        self.check(r"\(0, 5, 5, 1\)", np.zeros((0, 5, 5, 1)))

    def test_not_finite(self):
        x = np.zeros((2, 5, 5, 1))
        x[0, 0, 0, 0] = np.nan
        self.check("finite.*1 values", x)

    @pytest.mark.parametrize("bits", [1, 9, 8.5, "8"])
    def test_bits(self, bits):
        self.check("weight_bits", np.zeros((2, 5, 5, 1)), weight_bits=bits)

    def test_no_graph(self):
        with pytest.raises(ValueError, match="functional or Sequential"):
            quantize(layers.GroupPooling(), np.zeros((2, 5, 5, 1)))


@pytest.mark.parametrize(
    "function",
    ["sigmoid", "tanh", "silu", "gelu", "softplus", "elu", "exponential"],
)
def test_functions_become_tables(function):
    """Processors compute a sigmoid in several ways, but a table in one."""
    inputs = keras.Input((7, 7, 3))
    x = layers.LiftingConv2D(3, 3, group="p4", activation=function)(inputs)
    model = with_weights(keras.Model(inputs, x))
    x = images((7, 7, 3), 32)
    assert named(model) == []
    small = quantize(model, x)
    y, expected = small.predict_on_batch(x), model.predict_on_batch(x)
    assert 0 < relative_difference(y, expected) < 0.1
    x = x[:3]
    y = small.predict_on_batch(x)
    turned = small.predict_on_batch(np.rot90(x, 1, (1, 2)).copy())
    np.testing.assert_array_equal(
        turned, np.roll(np.rot90(y, 1, (1, 2)), 1, axis=3)
    )


def test_table_where_a_function_is_not_finite():
    inputs = keras.Input((7, 7, 3))
    model = keras.Model(inputs, keras.ops.log(inputs))
    x = abs(images((7, 7, 3))) + 0.1
    small = quantize(model, x)
    assert np.isfinite(as_array(small(0 * x))).all()
    assert relative_difference(as_array(small(x)), np.log(x)) < 0.01


@pytest.mark.once
class TestIntegersInONNX:
    def operators(self, path):
        onnx = pytest.importorskip("onnx")
        return [node.op_type for node in onnx.load(path).graph.node]

    def test_convolutions_are_of_integers(self, tmp_path):
        path = tmp_path / "small.onnx"
        model, small = quantized("classifier", "p4")
        export(small, path)
        operators = self.operators(path)
        # The second one gives floats, which the mean needs.
        assert operators.count("QLinearConv") == 2
        assert operators.count("Conv") == 0
        x = images(model.input_shape[1:], 5)
        (y,) = load_exported(path)(x)
        assert relative_difference(y, as_array(small(x))) < 0.02
        assert_equivariant(
            lambda x: load_exported(path)(as_array(x)), "p4", x, rtol=0
        )

    @pytest.mark.sweep
    def test_floats_of_a_plain_network_stay(self, tmp_path):
        path = tmp_path / "plain.onnx"
        model = with_weights(classifier("p4"))
        for variable in model.weights:
            # Whole numbers, but not levels.
            variable.assign(np.rint(as_array(variable) * 4))
        export(plain(model), path)
        operators = self.operators(path)
        assert "Conv" in operators
        assert "QLinearConv" not in operators

    @pytest.mark.sweep
    def test_levels_that_others_take_stay_floats(self, tmp_path):
        inputs = keras.Input((9, 9, 2))
        x = Conv2D(4, 3, activation="relu")(inputs)
        y = Conv2D(4, 3, padding="same")(x)
        model = with_weights(keras.Model(inputs, [x, y]))
        small = quantize(model, images((9, 9, 2)))
        path = tmp_path / "both.onnx"
        export(small, path)
        assert "QLinearConv" not in self.operators(path)
        x = images((9, 9, 2), 3)
        for y, expected in zip(load_exported(path)(x), small(x), strict=True):
            assert relative_difference(y, as_array(expected)) < 0.02


@pytest.mark.slow
@pytest.mark.every_backend
@pytest.mark.parametrize("attention", [None, "input", "co"])
def test_shipped_networks_classify_as_before(attention):
    model = applications.RotMNISTCNN("p4", attention, weights="rot_mnist")
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(64, 28, 28, 1)).astype("float32")
    small = quantize(model, x)
    poses = [np.rot90(x, n, (1, 2)).copy() for n in range(4)]
    first, *others = [small.predict_on_batch(x) for x in poses]
    for y in others:
        np.testing.assert_array_equal(y, first)
    expected = model.predict_on_batch(x)
    assert (first.argmax(1) == expected.argmax(1)).mean() > 0.9


@pytest.mark.parametrize("axis", [3, -1])
def test_softmax_over_the_group_is_named(axis, recwarn):
    inputs = keras.Input((9, 9, 1))
    x = layers.LiftingConv2D(4, 3, group="p4")(inputs)
    x = keras.layers.Softmax(axis=axis)(x)
    outputs = keras.layers.GlobalAveragePooling3D()(x)
    images = np.random.default_rng(0).uniform(size=(4, 9, 9, 1))
    quantize(keras.Model(inputs, outputs), images.astype("float32"))
    named = ["Softmax" in str(w.message) for w in recwarn]
    assert any(named) == (axis == 3)


def test_networks_that_have_diverged_are_refused():
    inputs = keras.Input((9, 9, 1))
    x = layers.LiftingConv2D(4, 3, group="p4")(inputs)
    outputs = keras.layers.GlobalAveragePooling3D()(x)
    model = keras.Model(inputs, outputs)
    model.layers[1].kernel.assign(np.nan * model.layers[1].kernel)
    with pytest.raises(ValueError, match="finite values for `calibration`"):
        quantize(model, np.ones((4, 9, 9, 1), "float32"))
