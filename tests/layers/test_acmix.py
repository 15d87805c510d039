"""ACmix: contract, oracle, options, limits of the original."""

import keras
import numpy as np
import oracles
import pytest
from acmix_helpers import ARGUMENTS
from acmix_helpers import case
from acmix_helpers import random_layer
from acmix_helpers import sample
from keras import ops
from layer_contract import as_array
from layer_contract import assert_regularizes
from layer_contract import assert_strides_leave_out_pixels
from layer_contract import DTYPE
from layer_contract import gradients
from layer_contract import LayerContract
from layer_contract import LIMIT
from layer_contract import second_derivative
from layer_contract import weights_of
from sweeps import swept

from keras_equiattn.layers import ACmix2D
from keras_equiattn.layers import FoldedACmix2D
from keras_equiattn.ops.papers.acmix import image_coordinates
from keras_equiattn.testing import relative_difference

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


def values_of(layer):
    """Weights by name, those of shift kernels for each pixel."""
    found = weights_of(layer)
    if layer.convolves:
        kernel = layer.filters_of(layer.shift_kernel, layer.kernel_size[0])
        found["shift_kernel"] = as_array(kernel)
    return found


def oracle(layer, x):
    return oracles.acmix(
        x.astype("float64"),
        values_of(layer),
        layer.group.name,
        layer.num_heads,
        layer.attention_kernel_size,
        layer.strides[0],
        layer.dilation_rate[0],
        layer.border,
        layer.window_shape,
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
        ("p8", (3, 4), {"kernel_groups": 2}),
        ("p4m", (4, 3), {"filter_basis": "steerable", "kernel_size": 5}),
        ("p4", (3, 4), {"window_shape": "disc", "border": "mask"}),
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
        pytest.param("p4", {"border": "mask"}, marks=pytest.mark.sweep),
        pytest.param(
            *("p4m", {"kernel_groups": 2, "filters": 8, "num_heads": 4}),
            marks=pytest.mark.sweep,
        ),
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
    """Those pixels, the last one included, are an image of their own."""
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
@pytest.mark.parametrize("shape", ["square", "disc"])
def test_positions_between_quarter_turns(shape):
    """The linear map of positions is defined for every angle."""
    options = {"filters": 2, "num_heads": 1, "group": "p8m"}
    layer = random_layer(window_shape=shape, **options)
    alone = random_layer(paths="attention", window_shape=shape, **options)
    for variable in alone.weights:
        variable.assign(getattr(layer, variable.name))
    x = sample(layer, (3, 4))
    expected, _, weights = oracle(layer, x)
    y, maps = alone(x, return_attention_maps=True)
    assert relative_difference(as_array(y), expected) < LIMIT
    assert relative_difference(as_array(maps["window"]), weights) < LIMIT


@pytest.mark.parametrize("kind", [ACmix2D, FoldedACmix2D])
def test_what_windows_and_shift_kernels_are_made_of(kind):
    for name, expected in (
        ("p4m", ("pixel", "square")),
        ("p8", ("steerable", "disc")),
    ):
        made = kind(4, group=name)
        assert (made.filter_basis, made.window_shape) == expected
        assert made.window.shape == expected[1]
        config = made.get_config()
        del config["filter_basis"], config["window_shape"]
        made = kind.from_config(config)  # as in older files
        assert (made.filter_basis, made.window_shape) == ("pixel", "square")


@pytest.mark.torch_first
@pytest.mark.parametrize("shifts", ["learned", "random"])
def test_shift_kernels_are_steerable_filters(shifts):
    layer = ACmix2D(
        4, num_heads=2, group="p8", shift_kernels=shifts, dtype=DTYPE
    )
    layer.build((None, 5, 5, 8, 3))
    kernel = as_array(layer.convolution().kernel)
    projection = oracles.steer(kernel, 0.0)
    assert relative_difference(kernel, projection) < LIMIT


@pytest.mark.torch_first
def test_random_shift_kernels_have_the_variance_of_pixels():
    layer = ACmix2D(16, num_heads=4, group="p8", shift_kernels="random")
    layer.build((None, 5, 5, 8, 3))
    assert layer.shift_kernel.shape == (6, 9, 16)
    pixels = as_array(layer.filters_of(layer.shift_kernel, 3))
    # Uniform within a ninth, since a shift kernel has 9 inputs of 9 pixels.
    assert np.mean(pixels**2) == pytest.approx(1 / 243, rel=0.2)


@pytest.mark.torch_first
def test_steerable_shift_kernels_start_as_the_fixed_ones():
    """Shifts are no steerable filters: both are their projections."""
    learned, fixed = (
        ACmix2D(
            4,
            num_heads=2,
            group="p8",
            rates="fixed",
            shift_kernels=shifts,
            dtype=DTYPE,
        )
        for shifts in ("learned", "fixed")
    )
    x = sample(learned)
    y = as_array(learned(x))
    fixed.build(x.shape)
    for variable in fixed.variables:
        variable.assign(getattr(learned, variable.name))
    assert relative_difference(as_array(fixed(x)), y) < LIMIT


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


@pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="the format is JAX's"
)
def test_compiled_code_can_be_kept_in_a_file():
    """JAX refuses to export calls that other versions may not support."""
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


@pytest.mark.once
def test_regularizer_is_of_the_linear_maps():
    layer = ACmix2D(8, kernel_regularizer=keras.regularizers.L2(0.5))
    layer.build((None, 6, 6, 3))
    names = ("query", "key", "value")
    assert_regularizes(layer, names, 0.5)


@pytest.mark.torch_first
@pytest.mark.parametrize("policy", ["float16", "bfloat16", "mixed_bfloat16"])
@pytest.mark.parametrize("size", swept(((1, 1), (3, 6), (7, 7)), (1, 1)))
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
    """They may differ without quarter turns, or with `exact=False`."""
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
