"""ACmix with attention to a reduced image: contract, oracle, tokens, maps."""

import keras
import numpy as np
import oracles
import pytest
from keras import ops
from layer_contract import as_array
from layer_contract import assert_regularizes
from layer_contract import DTYPE
from layer_contract import gradients
from layer_contract import LayerCase
from layer_contract import LayerContract
from layer_contract import LIMIT
from layer_contract import weights_of

from keras_equiattn.layers import SpatialReductionACmix2D
from keras_equiattn.ops.dense import enlarge_space
from keras_equiattn.ops.dense import reduce_space
from keras_equiattn.testing import relative_difference

ARGUMENTS = {
    "filters": 8,
    "num_heads": 4,
    "reduction": (4, 2),
    "kernel_size": (5, 1),
    "paths": "convolution",
    "rates": "fixed",
    "shift_kernels": "random",
    "kernel_groups": 2,
    "attention_dropout": 0.1,
    "dropout": 0.2,
    "kernel_initializer": keras.initializers.HeNormal(seed=1),
    "mixing_initializer": keras.initializers.HeNormal(seed=2),
    "bias_initializer": keras.initializers.Constant(0.5),
    "kernel_regularizer": keras.regularizers.L2(0.01),
    "data_format": "channels_first",
}


def case(shape, weights, rectangle=None, **options):
    arguments = {
        "filters": 4,
        "num_heads": 2,
        "reduction": 2,
        "kernel_initializer": "he_normal",
        **options,
    }
    return LayerCase(
        SpatialReductionACmix2D,
        arguments,
        shape,
        (*shape[:-1], 4),
        weights=weights,
        group="z2",
        rectangle=rectangle,
        reach=None,
        no_shift="attention is to the whole image",
    )


class TestSpatialReductionACmix2D(LayerContract):
    layer = SpatialReductionACmix2D
    cases = (
        case((2, 4, 6, 3), 17, rectangle=(5, 3)),
        case((2, 4, 3, 3), 13, reduction=1),
    )
    arguments = (ARGUMENTS,)
    without = ("group",)  # it is planar


def random_layer(seed=0, channels=3, **arguments):
    arguments = {"dtype": DTYPE, "data_format": "channels_last", **arguments}
    layer = SpatialReductionACmix2D(**arguments)
    layer.build((None, None, None, channels))
    rng = np.random.default_rng(seed)
    for variable in layer.weights:
        variable.assign(0.7 * rng.normal(size=variable.shape))
    return layer


def share_weights(source, *layers):
    for layer in layers:
        for variable in layer.weights:
            variable.assign(getattr(source, variable.name))


def sample(shape, seed=1):
    return np.random.default_rng(seed).normal(size=shape).astype(DTYPE)


def oracle(layer, x, tokens=None):
    if tokens is not None:
        tokens = tokens.astype("float64")
    return oracles.spatial_reduction_acmix(
        x.astype("float64"),
        weights_of(layer),
        layer.num_heads,
        layer.reduction,
        tokens,
    )


@pytest.mark.torch_first
@pytest.mark.parametrize(
    ("size", "options"),
    [
        ((4, 6), {}),
        ((5, 3), {"reduction": (2, 3), "kernel_groups": 1}),
        ((4, 4), {"reduction": 4, "kernel_size": (1, 3)}),
        ((3, 2), {"reduction": 8, "kernel_size": 5}),
        ((4, 3), {"reduction": 1}),
        ((1, 1), {"reduction": 1}),
        ((6, 5), {"reduction": (1, 2), "kernel_groups": 2}),
    ],
)
def test_oracle(size, options):
    layer = random_layer(filters=8, num_heads=4, **options)
    x = sample((2, *size, 3))
    attention, convolution, _, weights = oracle(layer, x)
    w = weights_of(layer)
    expected = (
        w["attention_rate"] * attention + w["convolution_rate"] * convolution
    )
    assert relative_difference(as_array(layer(x)), expected) < LIMIT
    y, maps = layer(x, return_attention_maps=True)
    assert relative_difference(as_array(y), expected) < LIMIT
    down, along = (
        -(-n // r) for n, r in zip(size, layer.reduction, strict=True)
    )
    weights = weights.reshape(2, *size, 1, 4, 1, down, along)
    assert list(maps) == ["image"]
    assert maps["image"].shape == weights.shape
    assert relative_difference(as_array(maps["image"]), weights) < LIMIT
    place = (size[0] - 1, 0)
    one = layer(x, return_attention_maps=True, query=place)[1]["image"]
    assert relative_difference(as_array(one), weights[:, place[0], 0]) < LIMIT
    for path, wanted in (
        ("attention", attention),
        ("convolution", convolution),
    ):
        alone = random_layer(filters=8, num_heads=4, paths=path, **options)
        share_weights(layer, alone)
        assert relative_difference(as_array(alone(x)), wanted) < LIMIT
    fixed = random_layer(filters=8, num_heads=4, rates="fixed", **options)
    share_weights(layer, fixed)
    total = attention + convolution
    assert relative_difference(as_array(fixed(x)), total) < LIMIT


@pytest.mark.torch_first
@pytest.mark.parametrize("reduction", [1, 2])
@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
def test_tokens(reduction, data_format):
    layer = random_layer(
        filters=4, num_heads=2, reduction=reduction, data_format="channels_last"
    )
    x, tokens = sample((2, 3, 4, 3)), sample((2, 2, 3), seed=2)
    attention, convolution, of_tokens, weights = oracle(layer, x, tokens)
    w = weights_of(layer)
    expected = (
        w["attention_rate"] * attention + w["convolution_rate"] * convolution
    )
    if data_format == "channels_first":
        other = SpatialReductionACmix2D(
            4, 2, reduction, data_format=data_format, dtype=DTYPE
        )
        other.build((None, 3, None, None))
        share_weights(layer, other)
        layer, x = other, np.ascontiguousarray(np.moveaxis(x, -1, 1))
        expected = np.moveaxis(expected, -1, 1)
    y, found = layer(x, tokens=tokens)
    assert relative_difference(as_array(y), expected) < LIMIT
    # The convolution does not see tokens.
    of_tokens = w["attention_rate"] * of_tokens
    assert relative_difference(as_array(found), of_tokens) < LIMIT
    (same, _), maps = layer(x, tokens=tokens, return_attention_maps=True)
    np.testing.assert_array_equal(as_array(same), as_array(y))
    seen = (3, 4) if reduction == 1 else (2, 2)
    pixels = weights[..., : np.prod(seen)]
    wanted = {
        "image": pixels[:, :12].reshape(2, 3, 4, 1, 2, 1, *seen),
        "tokens": pixels[:, 12:].reshape(2, 2, 2, *seen),
    }
    assert list(maps) == list(wanted)
    for name, values in wanted.items():
        assert maps[name].shape == values.shape
        assert relative_difference(as_array(maps[name]), values) < LIMIT
    # An empty array of tokens changes nothing.
    y, none = layer(x, tokens=np.zeros((2, 0, 3), DTYPE))
    assert none.shape == (2, 0, 4)
    assert relative_difference(as_array(y), as_array(layer(x))) < LIMIT


class PlainForm(keras.layers.Layer):
    """The same with keys and values repeated, mixed and shifted in turn."""

    def __init__(self, layer):
        super().__init__(dtype=layer.dtype_policy)
        self.layer = layer
        self.built = True

    def call(self, x):
        layer, heads = self.layer, self.layer.num_heads
        each = layer.filters // heads
        w = {v.name: ops.convert_to_tensor(v) for v in layer.weights}
        batch, height, width, channels = x.shape
        rows, columns = layer.reduction
        patches = ops.reshape(
            x, (batch, height // rows, rows, width // columns, columns, -1)
        )
        r = ops.einsum("bhiwjc,ijcd->bhwd", patches, w["reduction_kernel"])
        r = r + w["reduction_bias"]
        r = r - ops.sum(r, -1, keepdims=True) / channels
        variance = ops.sum(r * r, -1, keepdims=True) / channels
        r = r / ops.sqrt(variance + 1e-5)
        r = r * w["reduction_gamma"] + w["reduction_beta"]

        def linear(f, name):
            f = f @ w[f"{name}_kernel"][0] + w[f"{name}_bias"]
            return ops.reshape(f, (*f.shape[:3], heads, each))

        q, k, v = linear(x, "query"), linear(r, "key"), linear(r, "value")
        scores = ops.einsum("bhwnc,bijnc->bhwnij", q, k) * each**-0.5
        a = ops.exp(scores)
        a = a / ops.sum(a, (-1, -2), keepdims=True)
        attention = ops.einsum("bhwnij,bijnc->bhwnc", a, v)
        attention = ops.reshape(attention, (batch, height, width, -1))
        attention = attention @ w["output_kernel"] + w["output_bias"]
        k, v = (
            ops.repeat(ops.repeat(f, rows, axis=1), columns, axis=2)
            for f in (k, v)
        )
        f = ops.concatenate([q, k, v], axis=3)
        f = ops.einsum("bhwmc,mt->bhwct", f, w["mixing_kernel"])
        f = f + w["mixing_bias"]
        f = ops.pad(f, [(0, 0), (1, 1), (1, 1), (0, 0), (0, 0)])
        shift = ops.reshape(w["shift_kernel"], (3, 3, 9, each, heads))
        y = 0
        for i, j in np.ndindex(3, 3):
            moved = f[:, i : i + height, j : j + width]
            y = y + ops.einsum("bhwct,tcn->bhwcn", moved, shift[i, j])
        convolution = ops.reshape(y, (batch, height, width, -1))
        return (
            w["attention_rate"] * attention
            + w["convolution_rate"] * convolution
        )


@pytest.mark.torch_first
def test_gradients_of_the_plain_form():
    layer = random_layer(filters=4, num_heads=2, reduction=(2, 3))
    plain = PlainForm(layer)
    x, cotangent = sample((2, 4, 6, 3)), sample((2, 4, 6, 4), seed=2)
    assert relative_difference(as_array(layer(x)), as_array(plain(x))) < LIMIT
    names = ["x", *(v.name for v in layer.trainable_variables)]
    found = gradients(layer, x, cotangent)
    wanted = gradients(plain, x, cotangent)
    assert [v.name for v in plain.trainable_variables] == names[1:]
    for name, ours, theirs in zip(names, found, wanted, strict=True):
        assert relative_difference(ours, theirs) < LIMIT, name


@pytest.mark.torch_first
def test_images_rolled_by_whole_reductions():
    layer = random_layer(filters=4, num_heads=2, reduction=(2, 3))
    alone = random_layer(
        filters=4, num_heads=2, reduction=(2, 3), paths="attention"
    )
    share_weights(layer, alone)
    x = sample((2, 10, 12, 3))

    def rolled(x, shift=(2, -3)):
        return np.roll(x, shift, axis=(1, 2))

    moved = as_array(alone(rolled(x)))
    assert relative_difference(moved, rolled(as_array(alone(x)))) < LIMIT
    # The convolution sees zeros along the border, which has moved to row 2
    # and column 9.
    difference = as_array(layer(rolled(x))) - rolled(as_array(layer(x)))
    inside = np.ones((10, 12), bool)
    inside[[0, 1, 2, -1]] = False
    inside[:, [0, 8, 9, -1]] = False
    assert np.abs(difference[:, inside]).max() < 10 * LIMIT
    assert np.abs(difference[:, ~inside]).max() > 1e-2
    # Shifts by less than the reduction change the attention.
    other = as_array(alone(rolled(x, (1, 0))))
    wanted = rolled(as_array(alone(x)), (1, 0))
    assert relative_difference(other, wanted) > 1e-2


@pytest.mark.once
@pytest.mark.parametrize(
    ("channels", "heads", "reduction", "more"),
    [(64, 1, 8, 5_222), (320, 5, 2, 26_066), (512, 8, 1, 41_699)],
)
def test_parameters(channels, heads, reduction, more):
    both, alone = (
        SpatialReductionACmix2D(channels, heads, reduction, paths=paths)
        for paths in ("both", "attention")
    )
    for layer in (both, alone):
        layer.build((None, 16, 16, channels))
    plain = 4 * (channels**2 + channels)
    if reduction > 1:
        plain += reduction**2 * channels**2 + 3 * channels
    assert alone.count_params() == plain
    assert both.count_params() == plain + more
    assert more == 27 * heads + 9 + 81 * channels + 2


def names(**options):
    layer = SpatialReductionACmix2D(8, 4, **options)
    layer.build((None, 6, 6, 3))
    return [variable.name for variable in layer.weights]


@pytest.mark.once
def test_weights_of_the_ablations():
    maps = [
        f"{name}_{part}"
        for name in ("query", "key", "value")
        for part in ("kernel", "bias")
    ]
    reduction = [
        f"reduction_{part}" for part in ("kernel", "bias", "gamma", "beta")
    ]
    output = ["output_kernel", "output_bias"]
    mixing = ["mixing_kernel", "mixing_bias"]
    rates = ["attention_rate", "convolution_rate"]
    convolution = [*mixing, "shift_kernel"]
    assert names() == [*maps, *reduction, *output, *convolution, *rates]
    assert names(reduction=1) == [*maps, *output, *convolution, *rates]
    assert names(paths="attention") == [*maps, *reduction, *output]
    assert names(paths="convolution") == [*maps, *reduction, *convolution]
    assert names(shift_kernels="fixed", rates="fixed") == [
        *maps,
        *reduction,
        *output,
        *mixing,
    ]


@pytest.mark.torch_first
@pytest.mark.parametrize("policy", ["float16", "bfloat16", "mixed_float16"])
def test_half_precision_with_tokens(policy):
    layer = random_layer(filters=4, num_heads=2, reduction=2, dtype=policy)
    reference = random_layer(
        filters=4, num_heads=2, reduction=2, dtype="float32"
    )
    x, tokens = sample((2, 5, 4, 3)), sample((2, 1, 3))
    for ours, theirs in zip(reference.weights, layer.weights, strict=True):
        ours.assign(ops.cast(theirs, "float32"))
    wanted = reference(x.astype("float32"), tokens=tokens.astype("float32"))
    found = layer(x, tokens=tokens)
    for y, expected in zip(found, wanted, strict=True):
        assert keras.backend.standardize_dtype(y.dtype) == layer.compute_dtype
        y, expected = as_array(ops.cast(y, "float32")), as_array(expected)
        assert relative_difference(y, expected) < 5e-2


@pytest.mark.torch_first
def test_functional_model_with_tokens(tmp_path):
    x, token = keras.Input((4, 6, 3)), keras.Input((1, 3))
    layer = SpatialReductionACmix2D(
        4, 2, 2, data_format="channels_last", name="mix"
    )
    y, of_token = layer(x, tokens=token)
    assert y.shape == (None, 4, 6, 4)
    assert of_token.shape == (None, 1, 4)
    model = keras.Model([x, token], [y, of_token])
    values = [sample((3, 4, 6, 3)).astype("float32"), np.ones((3, 1, 3))]
    expected = model.predict(values, verbose=0)
    model.save(tmp_path / "model.keras")
    revived = keras.saving.load_model(tmp_path / "model.keras")
    for before, after in zip(
        expected, revived.predict(values, verbose=0), strict=True
    ):
        np.testing.assert_array_equal(after, before)


@pytest.mark.torch_first
def test_dropout():
    x = np.ones((4, 4, 4, 3), "float32")
    tokens = np.ones((4, 2, 3), "float32")
    layer = SpatialReductionACmix2D(
        4, 2, dropout=0.5, data_format="channels_last"
    )
    for y in layer(x, tokens=tokens, training=True):
        assert 0.1 < (as_array(y) == 0).mean() < 0.9
    assert np.array_equal(as_array(layer(x)), as_array(layer(x)))
    layer = SpatialReductionACmix2D(
        4,
        2,
        attention_dropout=0.5,
        paths="attention",
        bias_initializer="ones",
        data_format="channels_last",
    )
    plain, dropped = (as_array(layer(x, training=t)) for t in (False, True))
    assert np.ptp(plain, axis=(1, 2)).max() < 1e-6
    assert np.ptp(dropped, axis=(1, 2)).max() > 1e-4
    # The maps show the weights before dropout.
    kept, shown = (
        layer(x, return_attention_maps=True, training=t, tokens=tokens)[1]
        for t in (False, True)
    )
    for name in ("image", "tokens"):
        expected, found = as_array(kept[name]), as_array(shown[name])
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.once
def test_initializers():
    layer = SpatialReductionACmix2D(
        8,
        4,
        2,
        shift_kernels="random",
        kernel_initializer="ones",
        mixing_initializer=keras.initializers.Constant(2),
        bias_initializer=keras.initializers.Constant(3),
    )
    layer.build((None, 4, 4, 3))
    starts = {"kernel": 1, "bias": 3, "rate": 0.5, "gamma": 1, "beta": 0}
    for name, values in weights_of(layer).items():
        start = starts[name.split("_")[-1]]
        if name in ("mixing_kernel", "shift_kernel", "reduction_kernel"):
            start = 2
        np.testing.assert_array_equal(values, start, err_msg=name)


@pytest.mark.once
def test_regularizer_is_of_the_linear_maps():
    layer = SpatialReductionACmix2D(
        8, 4, kernel_regularizer=keras.regularizers.L2(0.5)
    )
    layer.build((None, 4, 4, 3))
    names = ("query", "key", "value", "output", "reduction")
    assert_regularizes(layer, names, 0.5)


@pytest.mark.torch_first
def test_how_weights_start():
    layer = SpatialReductionACmix2D(16, 2, 2)
    layer.build((None, 4, 4, 16))
    w = weights_of(layer)
    assert 0.035 < np.abs(w["query_kernel"]).max() <= 0.041
    # PyTorch's default, as in the authors' code.
    bound = (4 * 16) ** -0.5
    assert 0.95 * bound < np.abs(w["reduction_kernel"]).max() <= bound
    assert (w["reduction_gamma"] == 1).all()
    assert (w["reduction_beta"] == 0).all()


@pytest.mark.once
def test_there_and_back():
    x = np.arange(15.0).reshape(1, 3, 5, 1)
    kernel, bias = map(
        ops.convert_to_tensor, (np.ones((2, 2, 1, 1)), np.ones(1))
    )
    y = as_array(reduce_space(x, kernel, bias))
    wanted = [[13, 21, 14], [22, 26, 15]]
    np.testing.assert_array_equal(y[0, :, :, 0], wanted)
    back = as_array(enlarge_space(y, (2, 2), (3, 5)))
    wanted = np.repeat(np.repeat(wanted, 2, axis=0), 2, axis=1)[:3, :5]
    np.testing.assert_array_equal(back[0, :, :, 0], wanted)


@pytest.mark.once
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"filters": 10}, "filters=10 is not divisible by num_heads=4"),
        ({"reduction": 0}, "`reduction` must be a positive.*Received: 0"),
        ({"reduction": (2, -1)}, r"`reduction` must be.*Received: \(2, -1\)"),
        ({"reduction": "half"}, "`reduction` must be.*Received: 'half'"),
        ({"kernel_size": 4}, r"`kernel_size` must be odd.*\(4, 4\)"),
        ({"dropout": 1}, "`dropout` must be a number from 0 to below 1"),
        ({"attention_dropout": "x"}, "`attention_dropout` must be a number"),
        ({"paths": None}, "`paths` must be.*Received: None"),
        ({"rates": 1}, "`rates` must be 'learned' or 'fixed'. Received: 1"),
        ({"kernel_groups": 3}, "must divide 4.*kernel_groups=3"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        SpatialReductionACmix2D(**{"filters": 8, "num_heads": 4, **arguments})


@pytest.mark.once
def test_bad_calls():
    x = np.ones((1, 4, 4, 3), "float32")
    options = {"data_format": "channels_last", "name": "mix"}
    layer = SpatialReductionACmix2D(8, 4, 2, **options)
    with pytest.raises(ValueError, match=r"takes images.*\(None, 4, 3\)"):
        layer.build((None, 4, 3))
    for shape in ((1, 2, 4), (1, 3)):
        with pytest.raises(
            ValueError, match=rf"\(batch, count, 3\).*\({shape[0]}, {shape[1]}"
        ):
            layer(x, tokens=np.ones(shape, "float32"))
    for count in (0, 2):
        with pytest.raises(
            ValueError, match=rf"as many images.*\({count}, 1, 3\).*\(1, 4, 4"
        ):
            layer(x, tokens=np.ones((count, 1, 3), "float32"))
    unknown = layer(keras.Input((4, 4, 3)), tokens=keras.Input((1, 3)))
    assert [y.shape[0] for y in unknown] == [None, None]
    with pytest.raises(ValueError, match=r"within the output.*\(4, 0\)"):
        layer(x, return_attention_maps=True, query=(4, 0))
    with pytest.raises(ValueError, match="needs `return_attention_maps=True`"):
        layer(x, query=(0, 0))
    alone = SpatialReductionACmix2D(8, 4, 2, paths="convolution", **options)
    with pytest.raises(ValueError, match="no attention to show"):
        alone(x, return_attention_maps=True)
    with pytest.raises(ValueError, match=r"'convolution'.*\(1, 1, 3\)"):
        alone(x, tokens=np.ones((1, 1, 3), "float32"))
