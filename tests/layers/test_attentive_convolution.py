"""Attention on responses, on inputs, per pixel: contract, oracle, vectors."""

import keras
import numpy as np
import oracles
import pytest
from layer_contract import as_array
from layer_contract import FLOAT64_BACKENDS
from layer_contract import gradients
from layer_contract import LayerCase
from layer_contract import LayerContract

from keras_equiattn import groups
from keras_equiattn.layers import AttentiveGroupConv2D
from keras_equiattn.layers import AttentiveLiftingConv2D
from keras_equiattn.layers import CoAttentiveGroupConv2D
from keras_equiattn.layers import CoAttentiveLiftingConv2D
from keras_equiattn.layers import InputAttention
from keras_equiattn.ops import AttentionKernels
from keras_equiattn.ops import input_attention
from keras_equiattn.ops import response_attention
from keras_equiattn.ops.backend import inductor
from keras_equiattn.ops.responses import channels
from keras_equiattn.ops.responses import dispatch
from keras_equiattn.ops.responses.api import attended_sum
from keras_equiattn.testing import relative_difference

SLOW = (pytest.mark.slow, pytest.mark.every_backend)

CONVOLUTION = {
    "filters": 3,
    "kernel_size": (5, 5),
    "padding": "same",
    "data_format": "channels_first",
    "activation": "tanh",
    "use_bias": False,
    "kernel_initializer": keras.initializers.HeNormal(seed=1),
    "bias_initializer": keras.initializers.Constant(0.5),
    "kernel_regularizer": keras.regularizers.L2(0.01),
    "bias_regularizer": keras.regularizers.L1(0.01),
    "activity_regularizer": keras.regularizers.L2(0.02),
    "kernel_constraint": keras.constraints.MaxNorm(3.0),
    "bias_constraint": keras.constraints.NonNeg(),
    "group": "p4m",
    "exact": False,
}
ATTENTION = {
    "attention": "channel",
    "attention_kernel_size": 5,
    "attention_dilation_rate": 2,
    "reduction_ratio": 3,
    "channel_kernel_initializer": keras.initializers.HeNormal(seed=2),
    "spatial_kernel_initializer": keras.initializers.HeNormal(seed=3),
    "attention_regularizer": keras.regularizers.L2(0.03),
}
STEPS = ({"strides": (2, 2)}, {"dilation_rate": (2, 2)})
SMALL = {"attention_kernel_size": 3, "reduction_ratio": 1}


def convolution_cases(layer, planar):
    weights = {"full": 5, "channel": 4, "spatial": 3, None: 3}

    def case(group, arguments, shape, output, **options):
        order = groups.get(group).order
        if "attention_kernel_size" not in arguments:
            attention = None
        else:
            attention = arguments.get("attention", "full")
        return LayerCase(
            layer,
            {"group": group, "filters": 2, "kernel_size": 3, **arguments},
            (2, *shape, *(() if planar else (order,)), 2),
            (2, *output, order, 2),
            weights=weights[attention],
            group=group,
            **options,
        )

    own = {} if layer.__name__.startswith("Co") else SMALL
    if not own:
        return (
            case("p4", {}, (8, 8), (6, 6), rectangle=(7, 5)),
            case("p4m", {"padding": "same"}, (7, 7), (7, 7), reach=1),
            case("z2m", {"kernel_size": (2, 3)}, (6, 9), (5, 7)),
        )
    # Statistics over space see the border: no shift shows exactly.
    full = case("p4m", own, (8, 8), (6, 6), reach=None, rectangle=(7, 5))
    spatial = {
        **own,
        "attention": "spatial",
        "padding": "same",
        "attention_dilation_rate": 2,
    }
    channel = {**own, "attention": "channel", "strides": (1, 2)}
    if planar:
        unknown = {"reach": None, "unknown_size": False}
        return full, case("z2m", channel, (6, 9), (4, 4), **unknown)
    return full, case("p4", spatial, (9, 9), (9, 9), reach=3)


# Its group form runs in the fast suite.
@pytest.mark.slow
@pytest.mark.every_backend
class TestAttentiveLiftingConv2D(LayerContract):
    layer = AttentiveLiftingConv2D
    empty_batches = False
    cases = convolution_cases(AttentiveLiftingConv2D, planar=True)
    arguments = tuple(
        {**CONVOLUTION, **ATTENTION, "chunk_size": 5, **steps}
        for steps in STEPS
    )


class TestAttentiveGroupConv2D(LayerContract):
    layer = AttentiveGroupConv2D
    empty_batches = False
    cases = convolution_cases(AttentiveGroupConv2D, planar=False)
    arguments = tuple(
        {**CONVOLUTION, **ATTENTION, "chunk_size": 5, **steps}
        for steps in STEPS
    )


CO = {
    "attention_initializer": keras.initializers.HeNormal(seed=2),
    "attention_regularizer": keras.regularizers.L2(0.03),
}


# Its group form runs in the fast suite.
@pytest.mark.slow
@pytest.mark.every_backend
class TestCoAttentiveLiftingConv2D(LayerContract):
    layer = CoAttentiveLiftingConv2D
    cases = convolution_cases(CoAttentiveLiftingConv2D, planar=True)
    arguments = tuple({**CONVOLUTION, **CO, **steps} for steps in STEPS)


class TestCoAttentiveGroupConv2D(LayerContract):
    layer = CoAttentiveGroupConv2D
    cases = convolution_cases(CoAttentiveGroupConv2D, planar=False)
    arguments = tuple({**CONVOLUTION, **CO, **steps} for steps in STEPS)


class TestInputAttention(LayerContract):
    layer = InputAttention
    cases = (
        LayerCase(
            InputAttention,
            {"group": "p4m", **SMALL},
            (2, 8, 8, 8, 2),
            (2, 8, 8, 8, 2),
            weights=3,
            group="p4m",
            rectangle=(7, 5),
            reach=None,
        ),
        LayerCase(
            InputAttention,
            {"group": "p4", **SMALL, "attention_dilation_rate": 2},
            (2, 7, 7, 3),
            (2, 7, 7, 3),
            weights=3,
            group="p4",
            reach=None,
        ),
        LayerCase(
            InputAttention,
            {"group": "z2m", "attention": "spatial", **SMALL},
            (2, 6, 9, 2, 2),
            (2, 6, 9, 2, 2),
            weights=1,
            group="z2m",
            reach=1,
        ),
    )
    arguments = (
        {**ATTENTION, "group": "p4m", "data_format": "channels_first"},
    )


def random_layer(
    layer, shape, group, dtype="float32", on_group=False, **arguments
):
    """A built layer and an input; scores that saturate no sigmoid."""
    rng = np.random.default_rng(0)
    built = layer(group=group, dtype=dtype, **arguments)
    if layer in (AttentiveGroupConv2D, CoAttentiveGroupConv2D) or on_group:
        shape = (*shape[:3], groups.get(group).order, shape[-1])
    built.build(shape)
    for variable in built.weights:
        scale = 0.2 if variable.name == "spatial_kernel" else 0.7
        variable.assign(scale * rng.normal(size=variable.shape))
    return built, rng.normal(size=shape)


def weights_of(layer):
    names = (
        "kernel",
        "channel_kernel_1",
        "channel_kernel_2",
        "spatial_kernel",
        "attention_kernel",
        "bias",
    )
    arrays = {v.name: as_array(v.value) for v in layer.weights}
    arrays = {name: a.astype("float64") for name, a in arrays.items()}
    return {name: arrays.get(name) for name in names}


def attentive_oracle(layer, x, weights):
    y, channel, spatial = oracles.attentive_conv(
        x,
        weights["kernel"],
        weights["channel_kernel_1"],
        weights["channel_kernel_2"],
        weights["spatial_kernel"],
        layer.group.name,
        attention_dilation=layer.attention_dilation_rate,
        strides=layer.strides[0],
        padding=layer.padding,
        dilation=layer.dilation_rate[0],
    )
    return y + weights["bias"], channel, spatial


def input_oracle(layer, x, weights):
    return oracles.input_attention(
        x,
        weights["channel_kernel_1"],
        weights["channel_kernel_2"],
        weights["spatial_kernel"],
        layer.group.name,
        layer.attention_dilation_rate,
    )


def co_oracle(layer, x, weights):
    y = oracles.co_attentive_conv(
        x, weights["kernel"], weights["attention_kernel"], layer.group.name
    )
    return y + weights["bias"]


def check_oracle(layer, x, oracle, tolerance=1e-5):
    """Outputs, and gradients by central differences of the oracle."""
    weights = weights_of(layer)
    dtype = keras.backend.standardize_dtype(layer.compute_dtype)
    expected = oracle(x, weights)
    y = as_array(layer(x.astype(dtype)))
    assert relative_difference(y, expected) < tolerance

    rng = np.random.default_rng(1)
    cotangent = rng.normal(size=expected.shape)
    names = ["x", *(v.name for v in layer.trainable_variables)]
    found = gradients(layer, x.astype(dtype), cotangent.astype(dtype))
    for name, gradient in zip(names, found, strict=True):
        values = x if name == "x" else weights[name]
        direction = rng.normal(size=values.shape)
        step = 1e-5 * direction
        ends = []
        for sign in (1, -1):
            if name == "x":
                moved = oracle(x + sign * step, weights)
            else:
                changed = {**weights, name: values + sign * step}
                moved = oracle(x, changed)
            ends.append((moved * cotangent).sum())
        np.testing.assert_allclose(
            (gradient * direction).sum(),
            (ends[0] - ends[1]) / 2e-5,
            rtol=2e-3,
            atol=2e-3 * np.abs(cotangent).mean(),
            err_msg=name,
        )


@pytest.mark.parametrize(
    ("layer", "group", "size", "arguments"),
    [
        (AttentiveGroupConv2D, "p4m", (6, 6), {"padding": "same"}),
        pytest.param(
            AttentiveGroupConv2D,
            "p4",
            (7, 7),
            {
                "attention": "spatial",
                "dilation_rate": 2,
                "attention_dilation_rate": 2,
            },
            marks=pytest.mark.torch_first,
        ),
        pytest.param(
            AttentiveGroupConv2D,
            "z2m",
            (6, 5),
            {"attention": "channel"},
            marks=pytest.mark.torch_first,
        ),
        pytest.param(
            AttentiveLiftingConv2D,
            "p4m",
            (7, 7),
            {"strides": 2},
            marks=pytest.mark.torch_first,
        ),
        (AttentiveLiftingConv2D, "z2", (5, 6), {"chunk_size": 1}),
    ],
)
def test_attention_on_responses_agrees_with_oracle(
    layer, group, size, arguments
):
    arguments = {"attention_kernel_size": 3, "reduction_ratio": 1, **arguments}
    built, x = random_layer(
        layer, (2, *size, 2), group, filters=2, kernel_size=3, **arguments
    )
    check_oracle(built, x, lambda x, w: attentive_oracle(built, x, w)[0])


@pytest.mark.skipif(
    keras.backend.backend() not in FLOAT64_BACKENDS,
    reason="float64 is off by default on this backend",
)
@pytest.mark.parametrize(
    ("layer", "arguments", "oracle"),
    [
        (InputAttention, {}, input_oracle),
        (CoAttentiveLiftingConv2D, {"filters": 2, "kernel_size": 3}, co_oracle),
        (CoAttentiveGroupConv2D, {"filters": 2, "kernel_size": 3}, co_oracle),
    ],
)
@pytest.mark.parametrize("on_group", [True, False])
def test_attention_on_inputs_in_float64(layer, arguments, oracle, on_group):
    if on_group and layer is not InputAttention:
        pytest.skip("the layer says what it takes")
    built, x = random_layer(
        layer, (2, 5, 5, 2), "p4m", "float64", on_group, **arguments
    )
    y = as_array(built(keras.ops.convert_to_tensor(x, "float64")))
    expected = oracle(built, x, weights_of(built))
    assert relative_difference(y, expected) < 1e-12


@pytest.mark.parametrize("chunk_size", ["auto", None])
def test_attention_on_responses_in_float64(chunk_size):
    if keras.backend.backend() not in FLOAT64_BACKENDS:
        pytest.skip("float64 is off by default on this backend")
    built, x = random_layer(
        AttentiveGroupConv2D,
        (2, 5, 5, 3),
        "p4m",
        "float64",
        filters=2,
        kernel_size=3,
        padding="same",
        chunk_size=chunk_size,
    )
    check_oracle(built, x, lambda x, w: attentive_oracle(built, x, w)[0], 1e-12)


@pytest.mark.parametrize("lifting", [True, False])
@pytest.mark.parametrize(
    ("group", "arguments"),
    [
        ("p4m", {"attention_kernel_size": 3}),
        pytest.param(
            "z2", {"attention": "channel"}, marks=pytest.mark.torch_first
        ),
        pytest.param(
            "p4",
            {"attention": "spatial", "attention_dilation_rate": 2},
            marks=pytest.mark.torch_first,
        ),
    ],
)
def test_input_attention_agrees_with_oracle(lifting, group, arguments):
    built, x = random_layer(
        InputAttention,
        (2, 6, 6, 3),
        group,
        on_group=not lifting,
        reduction_ratio=2,
        **arguments,
    )
    check_oracle(built, x, lambda x, w: input_oracle(built, x, w))


@pytest.mark.parametrize(
    "layer", [CoAttentiveLiftingConv2D, CoAttentiveGroupConv2D]
)
@pytest.mark.parametrize("group", ["p4m", "z2"])
def test_co_attention_agrees_with_oracle(layer, group):
    built, x = random_layer(
        layer, (2, 5, 5, 2), group, filters=2, kernel_size=3
    )
    check_oracle(built, x, lambda x, w: co_oracle(built, x, w))


def assert_chunks_agree(chunk_sizes, shape, group, **arguments):
    """Outputs and gradients in float32, with those of the first size."""
    results = []
    for chunk_size in chunk_sizes:
        layer, x = random_layer(
            AttentiveGroupConv2D,
            shape,
            group,
            chunk_size=chunk_size,
            **arguments,
        )
        x = x.astype("float32")
        y = as_array(layer(x))
        cotangent = np.random.default_rng(2).normal(size=y.shape)
        found = gradients(layer, x, cotangent.astype("float32"))
        results.append([y, *found])
    for result in results[1:]:
        for actual, expected in zip(result, results[0], strict=True):
            assert relative_difference(actual, expected) < 1e-5


@pytest.mark.torch_first
@pytest.mark.parametrize(
    "attention",
    ["full", *(pytest.param(a, marks=SLOW) for a in ("channel", "spatial"))],
)
def test_every_chunk_size_gives_the_same(attention):
    """Outputs and gradients; 5 does not divide the 12 output channels."""
    assert_chunks_agree(
        (None, "auto", 5),
        (2, 6, 6, 3),
        "p4",
        filters=3,
        kernel_size=3,
        attention=attention,
    )


def test_gradients_where_compilers_skip_a_rounding():
    """A product is put in one instruction with what takes the maximum off."""
    assert_chunks_agree(
        (None, "auto"),
        (2, 5, 5, 3),
        "p4",
        filters=3,
        kernel_size=1,
        attention="channel",
    )


@pytest.mark.slow
@pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="Of Inductor, for PyTorch."
)
@pytest.mark.parametrize("attention", ["full", "channel", "spatial"])
def test_parts_that_inductor_compiles(attention, monkeypatch):
    """Outputs and gradients; 5 channels are two groups of 2 and one left."""
    compiled = []

    def compile_part(function, *arguments):
        compiled.append(function.func.__name__)
        return compile_before(function, *arguments)

    # What another case has compiled would not be compiled again.
    parts = "peaks", "sums", "maxima", "through_attention", "_gradients"
    for name in parts:
        getattr(channels, name).programs.cache_clear()
    compile_before = inductor._compile
    monkeypatch.setattr(inductor, "_compile", compile_part)
    monkeypatch.setattr(inductor, "PATIENCE", 0)
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "0")
    monkeypatch.setattr(dispatch, "RESPONSES", {"cpu": 2**14})
    assert_chunks_agree(
        (None, "auto"),
        (2, 6, 7, 5),
        "p2",
        filters=2,
        kernel_size=3,
        attention=attention,
    )
    assert set(compiled) == {
        "sums",
        "_gradients",
        *(("peaks", "through_attention") if attention != "spatial" else ()),
        *(("maxima",) if attention != "channel" else ()),
    }


@pytest.mark.torch_first
def test_input_channels_in_groups(monkeypatch):
    """Outputs and gradients; 5 channels are two groups of 2 and one left."""
    monkeypatch.setattr(dispatch, "RESPONSES", {"cpu": 2**14})
    assert_chunks_agree(
        (None, "auto"), (2, 6, 7, 5), "p2", filters=2, kernel_size=(2, 3)
    )


@pytest.mark.slow
@pytest.mark.skipif(
    keras.backend.backend() == "torch", reason="Inductor gets them in any case."
)
def test_responses_as_sums_of_products(monkeypatch):
    """What XLA gets for accelerators; 5 x 3 filters are in no other test, so
    nothing was compiled for them before."""

    def schedule(window, planes, kernel):
        found = schedule_before(window, planes, kernel)
        return found._replace(
            written_out=True, one_by_one=False, reduced=len(kernel)
        )

    schedule_before = dispatch.schedule
    monkeypatch.setattr(dispatch, "schedule", schedule)
    assert_chunks_agree(
        (None, "auto"), (2, 6, 7, 5), "p2", filters=2, kernel_size=(5, 3)
    )


@pytest.mark.torch_first
def test_equal_responses_share_the_gradient_of_their_maximum():
    """As in automatic differentiation: a flat image has only ties in space."""
    found = []
    for chunk_size in ("auto", None):
        layer, _ = random_layer(
            AttentiveLiftingConv2D,
            (2, 5, 5, 1),
            "p4",
            filters=2,
            kernel_size=3,
            chunk_size=chunk_size,
        )
        x = np.full((2, 5, 5, 1), 0.5, "float32")
        y = as_array(layer(x))
        found.append(gradients(layer, x, np.ones_like(y)))
    for actual, expected in zip(*found, strict=True):
        assert relative_difference(actual, expected) < 1e-5


@pytest.mark.torch_first
def test_equal_channels_and_the_gradient_of_their_maximum():
    """Held, they share it; else the first has it all, as if it were larger."""

    def gradient(chunk_size, larger=1.0):
        layer, _ = random_layer(
            AttentiveLiftingConv2D,
            (1, 5, 6, 2),
            "p2",
            filters=2,
            kernel_size=3,
            attention="spatial",
            attention_kernel_size=3,
            chunk_size=chunk_size,
        )
        weights = weights_of(layer)
        layer.kernel.assign(np.abs(weights["kernel"][:, :, [0, 0]]))
        x = np.random.default_rng(2).uniform(size=(1, 5, 6, 1))
        x = (x * [larger, 1.0]).astype("float32")
        cotangent = np.ones((1, 3, 4, 2, 2), "float32")
        return gradients(layer, x, cotangent)[0]

    held, chunked, first = gradient(None), gradient(1), gradient(None, 1.0001)
    assert relative_difference(held[..., 0], held[..., 1]) < 1e-5
    assert relative_difference(chunked.sum(-1), held.sum(-1)) < 1e-5
    assert relative_difference(chunked, first) < 1e-2
    assert relative_difference(held, first) > 0.1


def gradient_penalty(chunk_size):
    """Gradient of the squared norm of a gradient, with respect to x."""
    layer, x = random_layer(
        AttentiveLiftingConv2D,
        (1, 5, 5, 3),
        "p4",
        filters=2,
        kernel_size=3,
        chunk_size=chunk_size,
    )
    x = x.astype("float32")
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        def loss(x):
            return (layer(x) ** 2).sum()

        return as_array(jax.grad(lambda x: (jax.grad(loss)(x) ** 2).sum())(x))
    if backend == "tensorflow":
        import tensorflow as tf

        x = tf.convert_to_tensor(x)
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = tf.reduce_sum(layer(x) ** 2)
            penalty = tf.reduce_sum(inner.gradient(loss, x) ** 2)
        return as_array(outer.gradient(penalty, x))
    import torch

    x = torch.tensor(x, requires_grad=True)
    (first,) = torch.autograd.grad((layer(x) ** 2).sum(), x, create_graph=True)
    return as_array(torch.autograd.grad((first**2).sum(), x)[0])


@pytest.mark.torch_first
def test_second_derivatives_are_right_or_refused():
    held = gradient_penalty(None)
    assert np.abs(held).max() > 0
    if keras.backend.backend() == "jax":
        assert relative_difference(gradient_penalty("auto"), held) < 1e-4
    else:
        errors = (NotImplementedError, LookupError)
        with pytest.raises(errors, match="chunk_size=None"):
            gradient_penalty("auto")


def half(x):
    """The numbers that bfloat16 has."""
    return as_array(keras.ops.cast(keras.ops.cast(x, "bfloat16"), "float32"))


@pytest.mark.torch_first
@pytest.mark.parametrize(
    ("layer", "arguments", "on_group", "scale"),
    [
        (InputAttention, {}, True, 0.5),
        (InputAttention, {}, False, 2.0),
        (InputAttention, {"attention": "spatial"}, False, 1.0),
        (CoAttentiveLiftingConv2D, {"filters": 2, "kernel_size": 3}, False, 1),
        (CoAttentiveGroupConv2D, {"filters": 2, "kernel_size": 3}, True, 0.5),
    ],
)
def test_half_precision_of_attention_on_inputs(
    layer, arguments, on_group, scale
):
    """Every number keeps its digits where attention is near 1."""
    results = []
    for dtype in ("float32", "mixed_bfloat16"):
        built, x = random_layer(
            layer, (2, 5, 5, 4), "p4", dtype, on_group, **arguments
        )
        # All positive, so that the scores are.
        weights = [half(scale * np.abs(w)) for w in built.get_weights()]
        built.set_weights(weights)
        y, maps = built(half(np.abs(x)), return_attention_maps=True)
        found = y, *(maps[name] for name in sorted(maps))
        results.append([as_array(keras.ops.cast(a, "float32")) for a in found])
    assert results[0][1].min() < 0.005
    for exact, rounded in zip(*results, strict=True):
        np.testing.assert_allclose(rounded, exact, rtol=1e-2)


def test_half_precision_where_little_remains():
    """Attention near 1 takes nearly all away; what remains keeps its digits."""
    results = []
    for dtype in ("float32", "mixed_bfloat16"):
        layer, x = random_layer(
            AttentiveLiftingConv2D,
            (1, 6, 6, 3),
            "p4",
            filters=2,
            kernel_size=3,
            attention="spatial",
            use_bias=False,
            dtype=dtype,
        )
        # All positive, so that the scores are.
        kernel, spatial = map(np.abs, layer.get_weights())
        layer.set_weights([half(kernel), half(0.2 * spatial)])
        x = half(np.abs(x))
        results.append(as_array(keras.ops.cast(layer(x), "float32")))
    exact, rounded = results
    kernel = layer.get_weights()[0]
    plain = as_array(keras.ops.conv(x, kernel, data_format="channels_last"))
    assert np.abs(exact).max() < 0.1 * plain.max()
    # Rounding of the result alone is 2 ** -9; attention sees rounded maxima.
    assert relative_difference(rounded, exact) < 6e-3


def test_input_attention_needs_kernels():
    with pytest.raises(ValueError, match="both are None"):
        input_attention(np.ones((1, 5, 5, 3), "float32"), None, None, "p4")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"chunk_size": "all"}, "`chunk_size` must be .* Received: 'all'"),
        ({"chunk_size": 0}, "`chunk_size` must be .* Received: 0"),
        ({"padding": "full"}, "'valid' or 'same'. Received: 'full'"),
        ({"attention": {}}, "no weights"),
        ({"attention": {"channel_1": np.ones((3, 1, 2))}}, "both `channel_1`"),
    ],
)
def test_operation_refuses(arguments, message):
    x, kernel = np.ones((1, 5, 5, 3)), np.ones((3, 3, 3, 2))
    spatial = {"spatial": np.ones((3, 3, 2, 2))}
    others = {k: v for k, v in arguments.items() if k != "attention"}
    weights = AttentionKernels(**arguments.get("attention", spatial))
    with pytest.raises(ValueError, match=message):
        attended_sum(x, kernel, weights, "p4", **others)
    if "chunk_size" not in others:
        with pytest.raises(ValueError, match=message):
            response_attention(x, kernel, weights, "p4", **others)


@pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="only XLA tells its memory"
)
def test_responses_are_not_held():
    """Temporaries of a training step, as the compiler counts them."""
    import jax

    sizes = []
    for chunk_size in (2, None):
        layer, x = random_layer(
            AttentiveGroupConv2D,
            (4, 12, 12, 8),
            "p4",
            filters=4,
            kernel_size=3,
            chunk_size=chunk_size,
        )

        def loss(values, x, layer=layer):
            return (layer.stateless_call(values, [], x)[0] ** 2).sum()

        values = [v.value for v in layer.trainable_variables]
        compiled = jax.jit(jax.grad(loss)).lower(values, x.astype("float32"))
        analysis = compiled.compile().memory_analysis()
        sizes.append(analysis.temp_size_in_bytes)
    assert sizes[0] < sizes[1] / 2


@pytest.mark.torch_first
@pytest.mark.parametrize(
    "attention",
    ["full", *(pytest.param(a, marks=SLOW) for a in ("channel", "spatial"))],
)
@pytest.mark.parametrize(
    "layer", [AttentiveLiftingConv2D, AttentiveGroupConv2D]
)
def test_maps_of_attention_on_responses(layer, attention):
    built, x = random_layer(
        layer,
        (2, 5, 6, 3),
        "z2m",
        filters=2,
        kernel_size=3,
        attention=attention,
    )
    x32 = x.astype("float32")
    y, maps = built(x32, return_attention_maps=True)
    _, at = built(x32, return_attention_maps=True, query=(1, 3))
    assert relative_difference(as_array(y), as_array(built(x32))) < 1e-6
    expected, channel, spatial = attentive_oracle(built, x, weights_of(built))
    assert relative_difference(as_array(y), expected) < 1e-5
    # 1 - aX aC for every response: (b, rows, columns, h, j, c, o).
    whole = 1 - (1 - channel[:, None, None]) * (1 - spatial[..., None, :])
    wanted = {
        "channel": channel,
        "spatial": spatial,
        "effective": whole.mean(axis=(4, 5, 6))[..., None],
        "query": whole[:, 1, 3],
    }
    if layer is AttentiveLiftingConv2D:  # no input group element
        for name, axis in (("channel", 2), ("spatial", 4), ("query", 2)):
            wanted[name] = wanted[name].squeeze(axis)
    names = {"full": {"channel", "spatial"}}.get(attention, {attention})
    assert set(maps) == {"effective", *names}
    for name, values in maps.items():
        assert relative_difference(as_array(values), wanted[name]) < 1e-5
    found = as_array(at["effective"])
    assert relative_difference(found, wanted["query"]) < 1e-5


def test_attention_kernels_start_differently():
    layer = InputAttention("p4", reduction_ratio=1)
    layer.build((None, 6, 6, 4, 8))
    first, second = layer.channel_kernel_1, layer.channel_kernel_2
    values = np.stack([as_array(first).ravel(), as_array(second).ravel()])
    assert abs(np.corrcoef(values)[0, 1]) < 0.5


@pytest.mark.parametrize("shape", [(6, 6, 3), (6, 6, 4, 3)])
def test_input_attention_keeps_its_channels(shape):
    layer = InputAttention("p4")
    layer.build((None, *shape))
    other = np.ones((2, *shape[:-1], 5), "float32")
    with pytest.raises(ValueError, match=r"expected axis -1 .* value 3"):
        layer(other)


@pytest.mark.parametrize(
    ("ratio", "channels", "hidden"),
    [(None, 3, 4), (None, 64, 4), (None, 96, 6), (16, 3, 1), (16, 96, 6)],
)
def test_hidden_units(ratio, channels, hidden):
    """At least four, unless a ratio is asked for as in the paper."""
    layers = (
        InputAttention("p4", reduction_ratio=ratio),
        AttentiveGroupConv2D(2, 3, reduction_ratio=ratio),
    )
    for layer in layers:
        layer.build((None, 6, 6, 4, channels))
        assert layer.channel_kernel_1.shape[2] == hidden
        revived = type(layer).from_config(layer.get_config())
        assert revived.reduction_ratio == ratio


@pytest.mark.torch_first
def test_channel_attention_seldom_starts_dead():
    rng, dead = np.random.default_rng(0), 0
    for seed in range(30):
        keras.utils.set_random_seed(seed)
        x = np.maximum(rng.normal(size=(8, 6, 6, 4, 10)), 0).astype("float32")
        layer = InputAttention("p4", attention="channel")
        _, maps = layer(x, return_attention_maps=True)
        dead += np.ptp(as_array(maps["channel"])) < 1e-3
    assert dead <= 1
