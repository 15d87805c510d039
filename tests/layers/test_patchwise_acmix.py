"""ACmix of SAN: contract, oracle, the unfolded form, statistics, errors."""

import keras
import numpy as np
import oracles
import pytest
from keras import ops
from layer_contract import as_array
from layer_contract import assert_regularizes
from layer_contract import assert_strides_leave_out_pixels
from layer_contract import DTYPE
from layer_contract import gradients
from layer_contract import LayerCase
from layer_contract import LayerContract
from layer_contract import LIMIT
from layer_contract import second_derivative

from keras_equiattn.layers import PatchwiseACmix2D
from keras_equiattn.layers.base import linear_maps
from keras_equiattn.ops.geometry import Window
from keras_equiattn.ops.papers.patchwise import patch_features
from keras_equiattn.ops.papers.patchwise import patch_moments
from keras_equiattn.testing import relative_difference

ARGUMENTS = {
    "filters": 8,
    "kernel_size": (5, 1),
    "attention_kernel_size": (3, 5),
    "share": 2,
    "key_filters": 4,
    "strides": (1, 1),
    "dilation_rate": (2, 1),
    "paths": "convolution",
    "rates": "fixed",
    "shift_kernels": "random",
    "kernel_groups": 1,
    "activation": "relu",
    "use_bias": False,
    "kernel_initializer": keras.initializers.HeNormal(seed=1),
    "mixing_initializer": keras.initializers.HeNormal(seed=2),
    "bias_initializer": keras.initializers.Constant(0.5),
    "kernel_regularizer": keras.regularizers.L2(0.01),
    "recompute": False,
    "data_format": "channels_first",
}


def case(shape, output, rectangle=None, **options):
    return LayerCase(
        PatchwiseACmix2D,
        {"filters": 8, "attention_kernel_size": 3, "share": 4, **options},
        shape,
        output,
        weights=17,
        group="z2",
        rectangle=rectangle,
        reach=1,
        statistics=4,
    )


class TestPatchwiseACmix2D(LayerContract):
    layer = PatchwiseACmix2D
    cases = (
        case((2, 5, 6, 3), (2, 5, 6, 8), rectangle=(6, 4)),
        case((2, 9, 8, 3), (2, 5, 4, 8), strides=2, key_filters=8),
    )
    arguments = (
        {**ARGUMENTS, "strides": (2, 1), "dilation_rate": (1, 1)},
        ARGUMENTS,
    )
    without = ("group",)  # it is planar


def named(layer):
    """Variables by name, prefixed by the normalisation that owns them."""
    return {
        "/".join(variable.path.split("/")[1:]): variable
        for variable in layer.weights
    }


def weights_of(layer):
    return {
        name: as_array(variable).astype("float64")
        for name, variable in named(layer).items()
    }


def draw(layer, seed=0):
    """Draws every weight anew."""
    rng = np.random.default_rng(seed)
    for name, variable in named(layer).items():
        values = 0.7 * rng.normal(size=variable.shape)
        if name.endswith(("variance", "gamma")):
            values = rng.uniform(0.5, 1.5, variable.shape)
        variable.assign(values)


def random_layer(size=(None, None), cls=PatchwiseACmix2D, **arguments):
    layer = cls(
        data_format="channels_last",
        **{
            "filters": 8,
            "attention_kernel_size": 3,
            "share": 4,
            "dtype": DTYPE,
            **arguments,
        },
    )
    layer.build((None, *size, 3))
    draw(layer)
    return layer


def sample(size=(5, 5), batch=2):
    x = np.random.default_rng(1).normal(size=(batch, *size, 3))
    return x.astype(DTYPE)


def oracle(layer, x, training):
    return oracles.patchwise_acmix(
        x.astype("float64"),
        weights_of(layer),
        layer.share,
        layer.attention_kernel_size,
        layer.strides[0],
        layer.dilation_rate[0],
        training,
    )


@pytest.mark.torch_first
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("size", "options"),
    [
        ((5, 6), {}),
        ((4, 5), {"share": 1, "filters": 4}),
        ((4, 3), {"attention_kernel_size": (5, 3), "key_filters": 4}),
        ((7, 4), {"strides": 2, "kernel_size": 5, "kernel_groups": 2}),
        ((6, 5), {"strides": 3, "use_bias": False}),
        ((6, 7), {"dilation_rate": 2, "share": 8}),
        ((1, 2), {"attention_kernel_size": 7, "recompute": False}),
    ],
)
def test_oracle(size, options, training):
    layer = random_layer(size, **options)
    x = sample(size)
    attention, convolution, weights, statistics = oracle(layer, x, training)
    w = weights_of(layer)
    expected = (
        w["attention_rate"] * attention + w["convolution_rate"] * convolution
    )
    y = layer(x, training=training)
    assert y.shape == expected.shape
    assert relative_difference(as_array(y), expected) < LIMIT
    after = weights_of(layer)
    for name in w:
        wanted = statistics.get(name, w[name])
        assert relative_difference(after[name], wanted) < LIMIT, name
    assert len(statistics) == (4 if training else 0)

    layer = random_layer(size, **options)
    y, maps = layer(x, return_attention_maps=True, training=training)
    assert relative_difference(as_array(y), expected) < LIMIT
    found = as_array(maps["window"])[:, :, :, 0]
    assert found.shape == weights.shape
    assert relative_difference(found, weights) < LIMIT
    one = layer(x, return_attention_maps=True, query=(0, 1))[1]["window"]
    if not training:
        one = as_array(one)[:, 0]
        assert relative_difference(one, weights[:, 0, 1]) < LIMIT


RECTANGULAR = {
    "filters": 4,
    "share": 2,
    "attention_kernel_size": (3, 5),
    "kernel_size": (5, 3),
}


@pytest.mark.torch_first
@pytest.mark.parametrize("strides", [(1, 3), (3, 2)])
def test_strides_of_each_axis_leave_out_pixels(strides):
    layer = random_layer((7, 6), strides=strides, **RECTANGULAR)
    dense = random_layer((7, 6), **RECTANGULAR)
    x = sample((7, 6))
    assert_strides_leave_out_pixels(layer, dense, x, LIMIT)


@pytest.mark.torch_first
@pytest.mark.parametrize("dilation", [(1, 3), (3, 2)])
def test_dilation_of_each_axis_sees_every_other_pixel(dilation):
    """Those pixels, the last one included, are an image of their own."""
    layer = random_layer((7, 7), dilation_rate=dilation, **RECTANGULAR)
    near = random_layer(**RECTANGULAR)
    x = sample((7, 7))
    some = (slice(None), *(slice(None, None, step) for step in dilation))
    expected = as_array(near(x[some]))
    assert relative_difference(as_array(layer(x))[some], expected) < LIMIT


@pytest.mark.torch_first
def test_activation_with_and_without_maps():
    plain, layer = random_layer(), random_layer(activation="relu")
    x = sample()
    expected = np.maximum(as_array(plain(x)), 0)
    assert (expected == 0).any()
    for y in (layer(x), layer(x, return_attention_maps=True)[0]):
        assert relative_difference(as_array(y), expected) < LIMIT


class Unfolded(PatchwiseACmix2D):
    """The keys of all windows as channels, and autodiff for all of it."""

    def _attend(self, x, training):
        query, keys, values = (
            ops.squeeze(linear_maps.on_group(self, name, x), axis=3)
            for name in ("query", "key", "value")
        )
        down, along = self.strides
        query = query[:, ::down, ::along]
        seen = ops.concatenate([query, *self._neighbours(keys)], axis=-1)
        seen = self._normalized(self.patch_norm, seen, training)
        kernel = ops.convert_to_tensor(self.reduce_kernel)
        features = seen @ ops.reshape(kernel, (-1, kernel.shape[-1]))
        features = self._normalized(self.feature_norm, features, training)
        y = 0
        for n, value in enumerate(self._neighbours(values)):
            weights = features @ self.expand_kernel[:, n] + self.expand_bias[n]
            y = y + ops.tile(weights, (1, 1, 1, self.share)) * value
        return ops.expand_dims(y, axis=3), None

    def _neighbours(self, x):
        height, width = x.shape[1:3]
        for offset in self.window.offsets:
            index = [
                [
                    oracles.reflected(int(i + d), limit)
                    for i in range(0, limit, stride)
                ]
                for d, limit, stride in zip(
                    offset, (height, width), self.strides, strict=True
                )
            ]
            rows, columns = (np.array(axis) for axis in index)
            yield ops.take(ops.take(x, rows, axis=1), columns, axis=2)

    @staticmethod
    def _normalized(norm, x, training):
        mean, variance, gamma, beta = (
            ops.reshape(ops.convert_to_tensor(v), (-1,))
            for v in (
                norm.moving_mean,
                norm.moving_variance,
                norm.gamma,
                norm.beta,
            )
        )
        if training:
            count = np.prod(x.shape[:3])
            mean = ops.sum(x, axis=(0, 1, 2)) / count
            variance = ops.sum((x - mean) ** 2, axis=(0, 1, 2)) / count
        x = (x - mean) / ops.sqrt(variance + 1e-5)
        return ops.relu(x * gamma + beta)


@pytest.mark.torch_first
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("size", "options"),
    [
        ((4, 5), {}),
        ((5, 4), {"recompute": False}),
        ((5, 6), {"strides": 2}),
        ((3, 6), {"dilation_rate": 2, "attention_kernel_size": (3, 5)}),
        ((2, 1), {"attention_kernel_size": 5}),
    ],
)
def test_gradients_of_the_unfolded_form(size, options, training):
    x = sample(size, batch=3)
    rng = np.random.default_rng(2)
    layer = random_layer(size, **options)
    reference = random_layer(size, cls=Unfolded, **options)
    cotangent = rng.normal(size=layer.compute_output_shape(x.shape))
    cotangent = cotangent.astype(DTYPE)
    found, wanted = (
        gradients(each, x, cotangent, training=training)
        for each in (layer, reference)
    )
    names = ["x", *(v.path for v in layer.trainable_variables)]
    for name, a, b in zip(names, found, wanted, strict=True):
        error = np.abs(a - b).max() / max(np.abs(b).max(), 1e-2)
        assert error < 10 * LIMIT, name


@pytest.mark.torch_first
def test_second_derivatives_without_recomputation():
    x, direction = sample((4, 4)), np.random.default_rng(3).normal(size=3)
    direction = np.broadcast_to(direction, x.shape).astype(DTYPE)
    found, wanted = (
        second_derivative(
            random_layer((4, 4), cls=cls, recompute=False), x, direction
        )
        for cls in (PatchwiseACmix2D, Unfolded)
    )
    np.testing.assert_allclose(found, wanted, rtol=1e3 * LIMIT)


@pytest.mark.torch_first
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_moments(offset):
    """Far from zero, too, where squares would lose the variance."""
    rng = np.random.default_rng(0)
    keys = (offset + rng.normal(size=(2, 5, 4, 1, 3))).astype("float32")
    window = Window((5, 3), strides=(2, 1), border="reflect")
    query = keys[:, ::2]
    means, variances = patch_moments(query, keys, window)
    keys = np.pad(
        keys.astype("float64"),
        [(0, 0), (2, 2), (1, 1), (0, 0), (0, 0)],
        mode="reflect",
    )
    seen = [
        keys[:, a : a + 5 : 2, b : b + 4] for a, b in np.ndindex(*window.size)
    ]
    seen = np.stack([query.astype("float64"), *seen])
    limit = 1e-4 if offset else 1e-5
    for found, wanted in (
        (means, seen.mean((1, 2, 3, 4))),
        (variances, seen.var((1, 2, 3, 4))),
    ):
        assert relative_difference(as_array(found), wanted) < limit


@pytest.mark.torch_first
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_loses_no_more_than_its_own_digits(dtype):
    """Statistics are exact, and products are of half precision.

    Near 30 a bfloat16 has three binary digits after the point: the error of
    features must not grow with that.
    """
    rng = np.random.default_rng(0)
    half = ops.cast(30 + rng.normal(size=(4, 6, 5, 1, 3)), dtype)
    exact = ops.cast(half, "float32")
    window = Window((3, 3), border="reflect")
    found = patch_moments(half, half, window)
    expected = patch_moments(exact, exact, window)
    for a, b in zip(found, expected, strict=True):
        assert keras.backend.standardize_dtype(a.dtype) == "float32"
        np.testing.assert_array_equal(as_array(a), as_array(b))
    scale, shift = (rng.normal(size=(10, 3)) for _ in range(2))
    weights = [
        ops.cast(w, "float32")
        for w in (scale, shift - 30 * scale, rng.normal(size=(10, 3, 2)))
    ]
    found = patch_features(half, half, *weights, window)
    expected = patch_features(exact, exact, *weights, window)
    limit = {"float16": 1e-3, "bfloat16": 8e-3}[dtype]
    assert relative_difference(as_array(found), as_array(expected)) < limit


@pytest.mark.torch_first
def test_kernels_of_windows_start_by_what_they_see():
    """Uniform within one over the square root of the fan-in."""
    layer = PatchwiseACmix2D(64, (3, 5), (5, 3), shift_kernels="random")
    layer.build((None, 6, 6, 8))
    w = weights_of(layer)
    for name, fan_in in (
        ("reduce_kernel", (1 + 15) * 16),
        ("expand_kernel", 8),
        ("mixing_kernel", 2 + 4),
        ("shift_kernel", 15 * 15),
    ):
        largest = np.abs(w[name]).max()
        assert 0.9 * fan_in**-0.5 < largest <= fan_in**-0.5, name


@pytest.mark.once
def test_regularizer_is_of_the_linear_maps():
    layer = PatchwiseACmix2D(8, kernel_regularizer=keras.regularizers.L2(0.5))
    layer.build((None, 6, 6, 3))
    names = ("query", "key", "value")
    assert_regularizes(layer, names, 0.5)


@pytest.mark.torch_first
def test_frozen_layers_learn_no_statistics():
    layer = random_layer()
    layer.trainable = False
    x, before = sample(), weights_of(layer)
    expected = as_array(layer(x, training=False))
    found = as_array(layer(x, training=True))
    np.testing.assert_array_equal(found, expected)
    after = weights_of(layer)
    for name in before:
        np.testing.assert_array_equal(after[name], before[name])


def names(**options):
    layer = PatchwiseACmix2D(8, **options)
    layer.build((None, 6, 6, 3))
    return list(named(layer))


@pytest.mark.once
def test_weights_of_the_ablations():
    maps = [
        f"{name}_{part}"
        for name in ("query", "key", "value")
        for part in ("kernel", "bias")
    ]
    own = ["reduce_kernel", "expand_kernel", "expand_bias"]
    norms = [
        f"{name}/{part}"
        for name in ("patch_norm", "feature_norm")
        for part in ("gamma", "beta", "moving_mean", "moving_variance")
    ]
    convolution = ["mixing_kernel", "shift_kernel"]
    rates = ["attention_rate", "convolution_rate"]

    def expect(expected, **options):
        assert sorted(names(**options)) == sorted(expected)

    expect([*maps, *own, *norms, *convolution, *rates])
    expect([*maps, *own, *norms, *convolution], rates="fixed")
    expect([*maps, *own, *norms], paths="attention")
    expect([*maps, *convolution], paths="convolution")
    expect(
        [*maps[::2], *own, *norms, "mixing_kernel", *rates],
        shift_kernels="fixed",
        use_bias=False,
    )


@pytest.mark.torch_first
def test_paths_add_up():
    both = random_layer()
    x = sample()
    total = 0
    for path in ("attention", "convolution"):
        one = random_layer(paths=path)
        theirs = named(both)
        for name, variable in named(one).items():
            variable.assign(theirs[name])
        total = total + as_array(theirs[f"{path}_rate"]) * as_array(one(x))
    assert relative_difference(as_array(both(x)), total) < LIMIT


@pytest.mark.torch_first
def test_no_turn_is_a_symmetry():
    layer, x = random_layer(), sample()
    turned = as_array(layer(np.rot90(x, axes=(1, 2)).copy()))
    expected = np.rot90(as_array(layer(x)), axes=(1, 2))
    assert relative_difference(turned, expected) > 1e-2


@pytest.mark.torch_first
@pytest.mark.parametrize("policy", ["float16", "bfloat16", "mixed_bfloat16"])
@pytest.mark.parametrize("size", [(1, 1), (3, 6)])
def test_half_precision_in_training(policy, size):
    x = sample(size, batch=4).astype("float32")
    options = {"attention_kernel_size": 5}
    layer = random_layer(dtype=policy, **options)
    reference = random_layer(dtype="float32", **options)
    y = layer(ops.cast(x, layer.compute_dtype), training=True)
    assert keras.backend.standardize_dtype(y.dtype) == layer.compute_dtype
    for name, variable in named(reference).items():
        variable.assign(ops.cast(named(layer)[name], "float32"))
    expected = as_array(reference(x, training=True))
    found = as_array(ops.cast(y, "float32"))
    assert np.isfinite(found).all()
    if size != (1, 1):  # four numbers, of which statistics make little sense
        assert relative_difference(found, expected) < 0.1


@pytest.mark.torch_first
def test_trained_model_after_a_round_trip(tmp_path):
    """With sizes and batches that are known at run time alone."""
    model = keras.Sequential(
        [
            keras.Input((None, None, 3)),
            PatchwiseACmix2D(
                8,
                attention_kernel_size=3,
                share=4,
                name="mix",
                data_format="channels_last",
            ),
        ]
    )
    model.compile("sgd", "mse")
    x = sample((5, 6), batch=4).astype("float32")
    model.fit(x, np.ones((4, 5, 6, 8), "float32"), verbose=0)
    moved = as_array(model.get_layer("mix").patch_norm.moving_mean)
    assert np.abs(moved).max() > 1e-3
    model.save(tmp_path / "model.keras")
    revived = keras.saving.load_model(tmp_path / "model.keras")
    expected = model.predict(x, verbose=0)
    np.testing.assert_array_equal(revived.predict(x, verbose=0), expected)


@pytest.mark.once
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"filters": 12}, "filters=12 is not divisible by share=8"),
        ({"filters": 0}, "`filters` must be a positive integer. Received: 0"),
        ({"share": 0}, "`share` must be a positive integer. Received: 0"),
        (
            {"filters": 6, "share": 2},
            r"must divide filters=6.*Received: key_filters=None",
        ),
        ({"key_filters": 3}, r"must divide filters=8.*key_filters=3"),
        ({"key_filters": "x"}, "`key_filters` must be None or a positive"),
        ({"kernel_size": 2}, r"`kernel_size` must be odd.*\(2, 2\)"),
        (
            {"attention_kernel_size": (7, 4)},
            r"`attention_kernel_size` must be odd.*\(7, 4\)",
        ),
        (
            {"strides": 2, "dilation_rate": 2},
            r"cannot be combined.*strides=\(2, 2\)",
        ),
        ({"paths": "none"}, "`paths` must be 'both' or 'attention'"),
        ({"kernel_groups": 3}, r"must divide 4.*kernel_groups=3"),
        ({"recompute": 1}, "`recompute` must be True or False"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        PatchwiseACmix2D(**{"filters": 8, **arguments})


@pytest.mark.once
def test_bad_calls():
    layer = PatchwiseACmix2D(8, paths="convolution")
    with pytest.raises(ValueError, match=r"no attention to show.*convolution"):
        layer(np.ones((1, 4, 4, 3), "float32"), return_attention_maps=True)
