"""ACmix: contract, oracle, vectors, limits of the original, folding."""

import keras
import numpy as np
import oracles
import pytest
from keras import ops
from layer_contract import as_array
from layer_contract import assert_regularizes
from layer_contract import assert_strides_leave_out_pixels
from layer_contract import gradients
from layer_contract import LayerCase
from layer_contract import LayerContract
from layer_contract import second_derivative
from vectors import load_vectors

from keras_equiattn.layers import ACmix2D
from keras_equiattn.layers import FoldedACmix2D
from keras_equiattn.ops.papers.acmix import image_coordinates
from keras_equiattn.testing import assert_equivariant
from keras_equiattn.testing import relative_difference

DTYPE = "float64" if keras.backend.backend() != "jax" else "float32"
LIMIT = 1e-10 if DTYPE == "float64" else 2e-5

ARGUMENTS = {
    "filters": 8,
    "kernel_size": (5, 5),
    "attention_kernel_size": (3, 3),
    "num_heads": 2,
    "strides": (1, 1),
    "dilation_rate": (2, 2),
    "group": "p4m",
    "border": "mask",
    "activation": "relu",
    "use_bias": False,
    "exact": False,
    "recompute": False,
    "data_format": "channels_first",
}
OWN_ARGUMENTS = {
    **ARGUMENTS,
    "paths": "convolution",
    "rates": "fixed",
    "shift_kernels": "random",
    "kernel_groups": 1,
    "kernel_initializer": keras.initializers.HeNormal(seed=1),
    "mixing_initializer": keras.initializers.GlorotNormal(seed=2),
    "bias_initializer": keras.initializers.Constant(0.5),
    "kernel_regularizer": keras.regularizers.L2(0.01),
}
STRIDED = {"filters": 4, "strides": (2, 2)}


def case(layer, group, shape, output, weights, rectangle=None, **options):
    arguments = {
        "filters": 4,
        "attention_kernel_size": 3,
        "num_heads": 2,
        "group": group,
        **options,
    }
    return LayerCase(
        layer,
        arguments,
        shape,
        output,
        weights=weights,
        group=group,
        rectangle=rectangle,
        reach=1,
    )


class TestACmix2D(LayerContract):
    layer = ACmix2D
    cases = (
        case(ACmix2D, "p4", (2, 6, 6, 4, 3), (2, 6, 6, 4, 4), 12, (5, 7)),
        case(ACmix2D, "z2", (2, 9, 11, 3), (2, 5, 6, 4), 12, strides=2),
        case(
            ACmix2D,
            "p4m",
            (2, 5, 5, 8, 3),
            (2, 5, 5, 8, 4),
            12,
            border="mask",
        ),
        case(
            ACmix2D,
            "z2m",
            (2, 5, 6, 2, 3),
            (2, 5, 6, 2, 4),
            12,
            kernel_size=(1, 3),
        ),
        case(ACmix2D, "p8", (2, 4, 4, 8, 3), (2, 4, 4, 8, 4), 12, num_heads=1),
    )
    arguments = (
        {**OWN_ARGUMENTS, "strides": (2, 2), "dilation_rate": (1, 1)},
        OWN_ARGUMENTS,
    )


class TestFoldedACmix2D(LayerContract):
    layer = FoldedACmix2D
    cases = (
        case(FoldedACmix2D, "p4", (2, 6, 6, 4, 3), (2, 6, 6, 4, 4), 10, (5, 7)),
    )
    arguments = (
        {**ARGUMENTS, "strides": (2, 2), "dilation_rate": (1, 1)},
        {**ARGUMENTS, "paths": "attention"},
    )


def random_layer(seed=0, channels=3, size=(None, None), **arguments):
    """Built, with every weight drawn anew."""
    arguments = {"attention_kernel_size": 3, "dtype": DTYPE, **arguments}
    layer = ACmix2D(data_format="channels_last", **arguments)
    layer.build((None, *size, layer.group.order, channels))
    rng = np.random.default_rng(seed)
    for variable in layer.weights:
        variable.assign(0.7 * rng.normal(size=variable.shape))
    return layer


def weights_of(layer):
    return {v.name: as_array(v).astype("float64") for v in layer.weights}


def sample(layer, size=(5, 5), channels=3):
    shape = (2, *size, layer.group.order, channels)
    return np.random.default_rng(1).normal(size=shape).astype(DTYPE)


def oracle(layer, x):
    return oracles.acmix(
        x.astype("float64"),
        weights_of(layer),
        layer.group.name,
        layer.num_heads,
        layer.attention_kernel_size,
        layer.strides[0],
        layer.dilation_rate[0],
        layer.border,
    )


@pytest.mark.torch_first
@pytest.mark.parametrize(
    ("group", "size", "options"),
    [
        ("p4m", (5, 5), {"kernel_groups": 1}),
        ("p4", (3, 4), {"border": "mask", "attention_kernel_size": 5}),
        ("z2m", (4, 5), {"attention_kernel_size": (3, 1)}),
        ("z2", (7, 4), {"strides": 2, "kernel_size": 5}),
        ("z2", (6, 5), {"strides": 3, "use_bias": False, "exact": False}),
        ("z2", (6, 5), {"dilation_rate": 2, "kernel_size": 1}),
        ("p4", (5, 5), {"dilation_rate": 2, "kernel_groups": 2}),
        ("z2", (1, 2), {"attention_kernel_size": 7, "kernel_groups": 2}),
    ],
)
def test_oracle(group, size, options):
    layer = random_layer(
        filters=8, num_heads=4, group=group, size=size, **options
    )
    x = sample(layer, size)
    y, maps = layer(x, return_attention_maps=True)
    attention, convolution, weights = oracle(layer, x)
    w = weights_of(layer)
    expected = (
        w["attention_rate"] * attention + w["convolution_rate"] * convolution
    )
    assert y.shape == expected.shape
    assert relative_difference(as_array(y), expected) < LIMIT
    assert maps["window"].shape == weights.shape
    assert relative_difference(as_array(maps["window"]), weights) < LIMIT
    one = layer(x, return_attention_maps=True, query=(0, 1))[1]["window"]
    assert relative_difference(as_array(one), weights[:, 0, 1]) < LIMIT
    folded = layer.folded()
    assert relative_difference(as_array(folded(x)), expected) < LIMIT


def with_weights_of(layer, **arguments):
    """Another layer with the same weights."""
    other = random_layer(**arguments)
    for ours, theirs in zip(other.weights, layer.weights, strict=True):
        ours.assign(theirs)
    return other


@pytest.mark.torch_first
@pytest.mark.parametrize(
    ("group", "options"),
    [
        ("p4", {"kernel_groups": 1}),
        ("p4m", {"kernel_groups": 2, "filters": 8, "num_heads": 4}),
        ("p4", {"border": "mask"}),
    ],
)
def test_gradients_on_groups(group, options):
    """Along random directions, against differences of the oracle."""
    options = {"filters": 4, "num_heads": 2, **options}
    layer = random_layer(group=group, **options)
    x = sample(layer, (5, 4))
    rng = np.random.default_rng(2)
    cotangent = rng.normal(size=layer.compute_output_shape(x.shape))
    found = gradients(layer, x, cotangent.astype(DTYPE))
    names = [variable.name for variable in layer.trainable_variables]
    assert set(names) == set(weights_of(layer))

    def loss(name, change):
        arrays = {"x": x.astype("float64"), **weights_of(layer)}
        arrays[name] = arrays[name] + change
        w = {name: arrays[name] for name in names}
        attention, convolution, _ = oracles.acmix(
            arrays["x"], w, group, layer.num_heads, (3, 3), border=layer.border
        )
        y = w["attention_rate"] * attention
        y = y + w["convolution_rate"] * convolution
        return (y * cotangent).sum()

    step = 1e-5
    limit = 1e-6 if DTYPE == "float64" else 1e-3
    for name, gradient in zip(("x", *names), found, strict=True):
        if name == "position_bias":  # no output depends on it
            assert np.abs(gradient).max() < limit
            continue
        directions = rng.normal(size=(2, *gradient.shape))
        along = np.array([(gradient * d).sum() for d in directions])
        expected = [
            (loss(name, step * d) - loss(name, -step * d)) / (2 * step)
            for d in directions
        ]
        difference = relative_difference(along, np.array(expected))
        assert difference < limit, name


RECTANGULAR = {
    "filters": 4,
    "num_heads": 2,
    "attention_kernel_size": (3, 5),
    "kernel_size": (5, 3),
}


@pytest.mark.torch_first
@pytest.mark.parametrize("border", ["reflect", "mask"])
@pytest.mark.parametrize("strides", [(1, 3), (3, 2)])
def test_strides_of_each_axis_leave_out_pixels(strides, border):
    options = {**RECTANGULAR, "border": border}
    layer = random_layer(strides=strides, exact=False, size=(7, 6), **options)
    dense = with_weights_of(layer, **options)
    x = sample(layer, (7, 6))
    assert_strides_leave_out_pixels(layer, dense, x, LIMIT)


@pytest.mark.torch_first
@pytest.mark.parametrize("border", ["reflect", "mask"])
@pytest.mark.parametrize("dilation", [(1, 3), (3, 2)])
def test_dilation_of_each_axis_sees_every_other_pixel(dilation, border):
    """Where the last pixel is one of them, they are an image of their own."""
    options = {**RECTANGULAR, "border": border}
    layer = random_layer(dilation_rate=dilation, **options)
    near = with_weights_of(layer, **options)
    x = sample(layer, (7, 7))
    some = (slice(None), *(slice(None, None, step) for step in dilation))
    expected = as_array(near(x[some]))
    assert relative_difference(as_array(layer(x))[some], expected) < LIMIT
    found = as_array(layer.folded()(x))[some]
    assert relative_difference(found, expected) < LIMIT


@pytest.mark.torch_first
@pytest.mark.parametrize("group", ["p8", "p8m"])
def test_positions_between_quarter_turns(group):
    """The linear map of positions knows every angle."""
    options = {"filters": 2, "num_heads": 1, "group": group}
    layer = random_layer(**options)
    alone = random_layer(paths="attention", **options)
    for variable in alone.weights:
        variable.assign(getattr(layer, variable.name))
    x = sample(layer, (3, 4))
    expected, _, weights = oracle(layer, x)
    y, maps = alone(x, return_attention_maps=True)
    assert relative_difference(as_array(y), expected) < LIMIT
    assert relative_difference(as_array(maps["window"]), weights) < LIMIT


@pytest.mark.torch_first
def test_activation_with_and_without_maps():
    plain = random_layer(filters=8)
    layer = with_weights_of(plain, filters=8, activation="relu")
    x = sample(layer)
    expected = np.maximum(as_array(plain(x)), 0)
    assert (expected == 0).any()
    for y in (layer(x), layer(x, return_attention_maps=True)[0]):
        assert relative_difference(as_array(y), expected) < LIMIT


@pytest.mark.torch_first
def test_second_derivatives_without_recomputation():
    layer = random_layer(filters=4, num_heads=2, recompute=False)
    x = sample(layer, (3, 4))
    direction = np.random.default_rng(3).normal(size=3)
    direction = np.broadcast_to(direction, x.shape).astype(DTYPE)
    step = 1e-3 if DTYPE == "float64" else 0.1
    low, middle, high = (
        (as_array(layer(x + t * direction)).astype("float64") ** 2).sum()
        for t in (-step, 0, step)
    )
    expected = (low - 2 * middle + high) / step**2
    found = second_derivative(layer, x, direction)
    tolerance = 1e-4 if DTYPE == "float64" else 0.1
    np.testing.assert_allclose(found, expected, rtol=tolerance)


@pytest.mark.torch_first
@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
def test_coordinates_in_half_precision_are_not_rounded(policy):
    height, width = 613, 2
    rows = np.arange(height) * (2 / (height - 1)) - 1
    found = image_coordinates(height, width, policy)
    assert keras.backend.standardize_dtype(found.dtype) == "float32"
    found = as_array(found)
    np.testing.assert_allclose(found[:, 1, 0], rows, atol=1e-6)
    np.testing.assert_array_equal(found[3, :, 1], [-1, 1])


THEIRS = {
    **{
        f"{name}_{part}": f"conv{number}.{theirs}"
        for number, name in enumerate(("query", "key", "value"), 1)
        for part, theirs in (("kernel", "weight"), ("bias", "bias"))
    },
    "position_kernel": "conv_p.weight",
    "position_bias": "conv_p.bias",
    "mixing_kernel": "fc.weight",
    "shift_kernel": "dep_conv.weight",
    "attention_rate": "rate1",
    "convolution_rate": "rate2",
}


def last(x):
    return np.moveaxis(x, 1, -1).astype(DTYPE)


def vector_layer(v, **options):
    *channels, height, width, strides, size, heads, kernel_size, _, _ = (
        int(n) for n in v["meta"]
    )
    layer = ACmix2D(
        channels[1],
        kernel_size,
        size,
        heads,
        strides,
        data_format="channels_last",
        dtype=DTYPE,
        **options,
    )
    layer.build((None, height, width, channels[0]))
    return layer


def ours(array, shape):
    """Their weight or its gradient with our axes."""
    if array.ndim == 4:
        array = array.transpose(2, 3, 1, 0)
    return array.reshape(shape)


VECTORS = (
    "s1_8to16_8x8",
    "s1_8to8_4x4_min",
    "s1_8to8_h2_k5_5x11",
    "s2_8to16_8x8",
)


@pytest.mark.torch_first
@pytest.mark.parametrize("name", [*VECTORS, "s1_8to16_8x8_official_init"])
def test_vectors_with_gradients(name):
    v = load_vectors(f"acmix_resnet_{name}")
    layer = vector_layer(v)
    for variable in layer.weights:
        theirs = v[f"w/{THEIRS[variable.name]}"]
        variable.assign(ours(theirs, variable.shape))
    x = last(v["x"])
    assert relative_difference(as_array(layer(x)), last(v["y"])) < LIMIT
    if name not in VECTORS:  # as it starts: without gradients
        return
    of_x, *found = gradients(layer, x, last(v["cotangent"]))
    assert relative_difference(of_x, last(v["g/x"])) < LIMIT
    for variable, gradient in zip(
        layer.trainable_variables, found, strict=True
    ):
        theirs = v[f"g/{THEIRS[variable.name]}"]
        if variable.name == "position_bias":  # no output depends on it
            assert np.abs(gradient).max() < LIMIT
            continue
        wanted = ours(theirs, variable.shape)
        assert relative_difference(gradient, wanted) < LIMIT, variable.name


@pytest.mark.torch_first
@pytest.mark.parametrize("name", [*VECTORS, "s1_8to16_8x8_official_init"])
@pytest.mark.parametrize("path", ["attention", "convolution"])
def test_vectors_of_each_path(path, name):
    v = load_vectors(f"acmix_resnet_{name}")
    layer = vector_layer(v, paths=path)
    for variable in layer.weights:
        theirs = v[f"w/{THEIRS[variable.name]}"]
        variable.assign(ours(theirs, variable.shape))
    expected = last(v["y_att" if path == "attention" else "y_conv"])
    y = as_array(layer(last(v["x"])))
    assert relative_difference(y, expected) < LIMIT


@pytest.mark.once
@pytest.mark.parametrize(
    ("filters", "count"),
    [(64, 17_822), (128, 60_110), (256, 218_414), (512, 829_934)],
)
def test_parameters(filters, count):
    layer = ACmix2D(filters)
    layer.build((None, 8, 8, filters))
    assert layer.count_params() == count


def names(**options):
    layer = ACmix2D(8, **options)
    layer.build((None, 6, 6, 3))
    return [variable.name for variable in layer.weights]


@pytest.mark.once
def test_weights_of_the_ablations():
    maps = [
        f"{name}_{part}"
        for name in ("query", "key", "value")
        for part in ("kernel", "bias")
    ]
    position = ["position_kernel", "position_bias"]
    convolution = ["mixing_kernel", "shift_kernel"]
    rates = ["attention_rate", "convolution_rate"]
    assert names() == [*maps, *position, *convolution, *rates]
    assert names(rates="fixed") == [*maps, *position, *convolution]
    assert names(paths="attention") == [*maps, *position]
    assert names(paths="convolution") == [*maps, *convolution]
    assert names(shift_kernels="fixed", use_bias=False) == [
        *maps[::2],
        *position,
        "mixing_kernel",
        *rates,
    ]


def test_paths_add_up():
    both = random_layer(filters=8, group="p4")
    x = sample(both)
    total = 0
    for path in ("attention", "convolution"):
        one = random_layer(filters=8, group="p4", paths=path)
        for variable in one.weights:
            variable.assign(getattr(both, variable.name))
        total = total + as_array(getattr(both, f"{path}_rate")) * as_array(
            one(x)
        )
    assert relative_difference(as_array(both(x)), total) < LIMIT
    plain = ACmix2D(
        8,
        attention_kernel_size=3,
        group="p4",
        rates="fixed",
        dtype=DTYPE,
        data_format="channels_last",
    )
    plain.build(x.shape)
    for variable in plain.weights:
        variable.assign(getattr(both, variable.name))
    for rate in (both.attention_rate, both.convolution_rate):
        rate.assign(1.0)
    assert relative_difference(as_array(plain(x)), as_array(both(x))) < LIMIT


@pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="the format is JAX's"
)
def test_compiled_code_can_be_kept_in_a_file():
    """JAX refuses calls that other versions of it may not know."""
    import jax.export

    layer = random_layer(filters=8, size=(5, 7))
    values = [variable.value for variable in layer.trainable_variables]

    def call(x):
        return layer.stateless_call(values, [], x)[0]

    x = sample(layer, (5, 7))
    kept = jax.export.deserialize(
        jax.export.export(jax.jit(call))(x).serialize()
    )
    found = as_array(kept.call(x))
    assert relative_difference(found, as_array(layer(x))) < LIMIT


def test_starts_as_a_sum_of_shifted_maps():
    layers = {
        kind: ACmix2D(
            8,
            kernel_size=3,
            paths="convolution",
            shift_kernels=kind,
            kernel_initializer=keras.initializers.RandomNormal(seed=3),
            mixing_initializer=keras.initializers.RandomNormal(seed=4),
            data_format="channels_last",
        )
        for kind in ("learned", "fixed", "random")
    }
    x = np.random.default_rng(0).normal(size=(1, 4, 5, 2)).astype("float32")
    y = {kind: as_array(layer(x)) for kind, layer in layers.items()}
    assert relative_difference(y["learned"], y["fixed"]) < 1e-6
    assert relative_difference(y["random"], y["fixed"]) > 0.1
    # All the outputs of a channel of a head are the same.
    of_channels = y["learned"].reshape(1, 4, 5, 2, 4)
    assert np.ptp(of_channels, axis=-1).max() < 1e-6
    w = weights_of(layers["learned"])
    maps = np.concatenate(
        [
            (x @ w[f"{name}_kernel"][0]).reshape(1, 4, 5, 4, 2)
            for name in ("query", "key", "value")
        ],
        axis=3,
    )
    mixed = np.einsum("byxmc,mt->byxct", maps, w["mixing_kernel"])
    padded = np.pad(mixed, [(0, 0), (1, 1), (1, 1), (0, 0), (0, 0)])
    total = sum(
        padded[:, i : i + 4, j : j + 5, :, 3 * i + j]
        for i in range(3)
        for j in range(3)
    )
    assert relative_difference(of_channels[..., 0], total) < 1e-5


@pytest.mark.once
def test_initializers():
    layer = ACmix2D(
        8,
        shift_kernels="random",
        kernel_initializer="ones",
        mixing_initializer=keras.initializers.Constant(2),
        bias_initializer=keras.initializers.Constant(3),
    )
    layer.build((None, 6, 6, 3))
    for name, values in weights_of(layer).items():
        start = {"kernel": 1, "bias": 3, "rate": 0.5}[name.split("_")[-1]]
        if name in ("mixing_kernel", "shift_kernel"):
            start = 2
        np.testing.assert_array_equal(values, start)


@pytest.mark.torch_first
def test_weights_start_differently():
    layer = ACmix2D(8)
    layer.build((None, 6, 6, 8))
    w = weights_of(layer)
    values = np.stack([w["query_kernel"].ravel(), w["key_kernel"].ravel()])
    assert abs(np.corrcoef(values)[0, 1]) < 0.5
    # PyTorch's default, as in the authors' code.
    assert 0.3 < np.abs(w["query_kernel"]).max() <= 8**-0.5


@pytest.mark.torch_first
def test_convolution_starts_by_what_each_kernel_sees():
    """Uniform within one over the square root of the fan-in."""
    layer = ACmix2D(64, (3, 5), num_heads=4, shift_kernels="random")
    layer.build((None, 6, 6, 8))
    w = weights_of(layer)
    for name, fan_in in (("mixing_kernel", 12), ("shift_kernel", 15 * 15)):
        largest = np.abs(w[name]).max()
        assert 0.95 * fan_in**-0.5 < largest <= fan_in**-0.5, name


@pytest.mark.torch_first
def test_fixed_shifts_are_those_that_learned_ones_start_as():
    """In windows that are not square, too."""
    layers = {
        kind: ACmix2D(
            4,
            kernel_size=(3, 5),
            num_heads=2,
            paths="convolution",
            shift_kernels=kind,
            kernel_groups=1,
            data_format="channels_last",
            dtype=DTYPE,
        )
        for kind in ("learned", "fixed")
    }
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 5, 6, 3)).astype(DTYPE)
    for layer in layers.values():
        layer.build(x.shape)
    for variable in layers["fixed"].weights:
        variable.assign(rng.normal(size=variable.shape))
        getattr(layers["learned"], variable.name).assign(variable)
    learned, fixed = (as_array(layer(x)) for layer in layers.values())
    assert relative_difference(fixed, learned) < LIMIT
    shift = as_array(layers["learned"].shift_kernel)
    for n, (i, j) in enumerate(np.ndindex(3, 5)):
        wanted = np.zeros((3, 5))
        wanted[i, j] = 1
        np.testing.assert_array_equal(shift[:, :, n, 0], wanted)


@pytest.mark.once
def test_regularizer_is_of_the_linear_maps():
    layer = ACmix2D(8, kernel_regularizer=keras.regularizers.L2(0.5))
    layer.build((None, 6, 6, 3))
    names = ("query", "key", "value")
    assert_regularizes(layer, names, 0.5)


@pytest.mark.torch_first
@pytest.mark.parametrize("policy", ["float16", "bfloat16", "mixed_bfloat16"])
@pytest.mark.parametrize("size", [(1, 1), (3, 6), (7, 7)])
def test_what_the_original_fails_on(policy, size):
    """Half precision, images smaller than the window, odd with strides."""
    for options in ({}, {"dilation_rate": 2}, {"strides": 2, "exact": False}):
        layer = ACmix2D(8, dtype=policy, data_format="channels_last", **options)
        reference = ACmix2D(8, data_format="channels_last", **options)
        x = np.random.default_rng(0).normal(size=(2, *size, 3))
        y = layer(ops.cast(x, layer.compute_dtype))
        steps = options.get("strides", 1)
        new = tuple(-(-n // steps) for n in size)
        assert y.shape == (2, *new, 8)
        assert keras.backend.standardize_dtype(y.dtype) == layer.compute_dtype
        reference.build(x.shape)
        for ours, theirs in zip(reference.weights, layer.weights, strict=True):
            ours.assign(ops.cast(theirs, "float32"))
        expected = as_array(reference(x.astype("float32")))
        found = as_array(ops.cast(y, "float32"))
        assert relative_difference(found, expected) < 5e-2


@pytest.mark.torch_first
@pytest.mark.parametrize(
    "options",
    [
        {"paths": "attention"},
        {"paths": "convolution"},
        {"rates": "fixed"},
        {"shift_kernels": "fixed", "use_bias": False},
        {"activation": "relu"},
    ],
)
def test_folded_layers_are_equal(options, tmp_path):
    layer = random_layer(filters=8, group="p4", name="mix", **options)
    x = sample(layer)
    expected = as_array(layer(x))
    folded = layer.folded()
    assert isinstance(folded, FoldedACmix2D)
    assert folded.name == "mix"
    assert relative_difference(as_array(folded(x)), expected) < LIMIT
    assert_equivariant(
        folded, "p4", x, rtol=1e-12 if DTYPE == "float64" else 1e-5
    )
    model = keras.Sequential([keras.Input(x.shape[1:], dtype=DTYPE), folded])
    model.save(tmp_path / "folded.keras")
    revived = keras.saving.load_model(tmp_path / "folded.keras")
    y = revived.predict(x, verbose=0)  # on PyTorch in float32
    assert relative_difference(y, expected) < 1e-6


def test_folding_leaves_the_layer_as_it_was():
    """Also after predictions, which may give away the memory of weights."""
    layer = random_layer(filters=4, num_heads=2, dtype="float32")
    x = sample(layer, (3, 4)).astype("float32")
    plain, folded = (
        keras.Sequential([keras.Input(x.shape[1:]), each])
        for each in (layer, layer.folded())
    )
    expected = plain.predict(x, verbose=0)
    y = folded.predict(x, verbose=0)
    assert relative_difference(y, expected) < 1e-5
    np.testing.assert_array_equal(plain.predict(x, verbose=0), expected)


@pytest.mark.torch_first
def test_another_element_is_not_the_symmetry():
    layer = random_layer(filters=8, group="p4")
    x = sample(layer)
    turned = as_array(layer(np.rot90(x, axes=(1, 2)).copy()))  # axis not moved
    expected = np.rot90(as_array(layer(x)), axes=(1, 2))
    assert relative_difference(turned, expected) > 1e-2


@pytest.mark.once
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"filters": 10}, "filters=10 is not divisible by num_heads=4"),
        ({"kernel_size": 2}, r"`kernel_size` must be odd.*\(2, 2\)"),
        (
            {"attention_kernel_size": (7, 4)},
            r"`attention_kernel_size` must be odd.*\(7, 4\)",
        ),
        (
            {"attention_kernel_size": (7, 5), "group": "p4"},
            r"'p4' holds quarter turns.*attention_kernel_size=\(7, 5\)",
        ),
        (
            {"strides": 2, "dilation_rate": 2},
            r"cannot be combined.*strides=\(2, 2\)",
        ),
        (
            {"strides": (1, 2), "group": "p4"},
            r"under 'p4'.*strides \(1, 2\).*equal strides",
        ),
        ({"paths": "none"}, "`paths` must be 'both' or 'attention'"),
        ({"rates": 1}, "`rates` must be 'learned' or 'fixed'. Received: 1"),
        ({"shift_kernels": "no"}, "`shift_kernels` must be 'learned' or"),
        ({"kernel_groups": 3}, r"must divide 4.*kernel_groups=3"),
        ({"border": "zeros"}, "`border` must be 'reflect' or 'mask'"),
        ({"group": "p5"}, "p5"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        ACmix2D(**{"filters": 8, **arguments})


@pytest.mark.once
def test_strides_that_differ():
    """Without quarter turns they may, and where it need not be exact."""
    for options in ({"group": "z2m"}, {"group": "p4", "exact": False}):
        layer = ACmix2D(
            8, strides=(1, 2), data_format="channels_last", **options
        )
        order = layer.group.order
        shape = layer.compute_output_shape((None, 5, 9, order, 3))
        assert shape == (None, 5, 5, order, 8)


@pytest.mark.once
def test_bad_calls():
    with pytest.raises(ValueError, match="no weights to fold"):
        ACmix2D(8).folded()
    layer = ACmix2D(8, paths="convolution")
    with pytest.raises(ValueError, match=r"no attention to show.*convolution"):
        layer(np.ones((1, 4, 4, 3), "float32"), return_attention_maps=True)
    strided = ACmix2D(8, strides=2, group="p4")
    with pytest.raises(ValueError, match="exactly equivariant"):
        strided.build((None, 8, 8, 4, 3))
    strided.build((None, 9, 9, 4, 3))
    with pytest.raises(ValueError, match=r"known only at run time"):
        ACmix2D(8, strides=2, group="p4").build((None, None, None, 4, 3))


def test_unknown_sizes_are_checked_in_the_call():
    layer = ACmix2D(8, strides=2, group="p4", exact="call")
    layer.build((None, None, None, 4, 3))
    assert tuple(layer(np.ones((1, 5, 5, 4, 3))).shape) == (1, 3, 3, 4, 8)
    with pytest.raises(ValueError, match="would not be exactly equivariant"):
        layer(np.ones((1, 6, 6, 4, 3)))
    assert ACmix2D.from_config(layer.get_config()).exact == "call"
