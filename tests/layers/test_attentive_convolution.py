"""Attention on responses, on inputs, per pixel: contract, maps, options."""

import keras
import numpy as np
import pytest
from attentive_helpers import attentive_oracle
from attentive_helpers import random_layer
from attentive_helpers import SLOW
from attentive_helpers import weights_of
from layer_contract import as_array
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
from keras_equiattn.ops.responses.api import attended_sum
from keras_equiattn.testing import relative_difference

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
    "filter_basis": "steerable",
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
            case("p8", {}, (5, 5), (3, 3)),
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
    steerable = case("p8", own, (5, 5), (3, 3), reach=None)
    if planar:
        unknown = {"reach": None, "unknown_size": False}
        return (
            full,
            case("z2m", channel, (6, 9), (4, 4), **unknown),
            steerable,
        )
    return full, case("p4", spatial, (9, 9), (9, 9), reach=3), steerable


# Its group form runs in the fast suite.
@pytest.mark.slow
@pytest.mark.every_backend
class TestAttentiveLiftingConv2D(LayerContract):
    layer = AttentiveLiftingConv2D
    cases = convolution_cases(AttentiveLiftingConv2D, planar=True)
    arguments = tuple(
        {**CONVOLUTION, **ATTENTION, "chunk_size": 5, **steps}
        for steps in STEPS
    )


class TestAttentiveGroupConv2D(LayerContract):
    layer = AttentiveGroupConv2D
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
        LayerCase(
            InputAttention,
            {"group": "p8", **SMALL},
            (2, 5, 5, 8, 2),
            (2, 5, 5, 8, 2),
            weights=3,
            group="p8",
            reach=None,
        ),
    )
    arguments = (
        {
            **ATTENTION,
            "group": "p4m",
            "data_format": "channels_first",
            "filter_basis": "steerable",
        },
    )


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
