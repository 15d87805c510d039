"""All forms of attention on responses give the same numbers and gradients."""

import keras
import numpy as np
import pytest
from attentive_helpers import random_layer
from attentive_helpers import SLOW
from attentive_helpers import weights_of
from layer_contract import as_array
from layer_contract import gradients

from keras_equiattn.layers import AttentiveGroupConv2D
from keras_equiattn.layers import AttentiveLiftingConv2D
from keras_equiattn.layers import CoAttentiveGroupConv2D
from keras_equiattn.layers import CoAttentiveLiftingConv2D
from keras_equiattn.layers import InputAttention
from keras_equiattn.ops.backend import inductor
from keras_equiattn.ops.responses import channels
from keras_equiattn.ops.responses import dispatch
from keras_equiattn.testing import relative_difference


def assert_chunks_agree(
    chunk_sizes, shape, group, dtype="float32", limit=1e-5, **arguments
):
    """Outputs and gradients agree with those of the first size."""
    results = []
    for chunk_size in chunk_sizes:
        layer, x = random_layer(
            AttentiveGroupConv2D,
            shape,
            group,
            dtype,
            chunk_size=chunk_size,
            **arguments,
        )
        x = x.astype(dtype)
        y = as_array(layer(x))
        cotangent = np.random.default_rng(2).normal(size=y.shape)
        found = gradients(layer, x, cotangent.astype(dtype))
        results.append([y, *found])
    for result in results[1:]:
        for actual, expected in zip(result, results[0], strict=True):
            assert relative_difference(actual, expected) < limit


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


@pytest.mark.torch_first
def test_gradients_where_compilers_skip_a_rounding():
    """Compilers fuse a product and the subtraction of the maximum."""
    assert_chunks_agree(
        (None, "auto"),
        (2, 5, 5, 3),
        "p4",
        filters=3,
        kernel_size=1,
        attention="channel",
    )


@pytest.mark.slow
@pytest.mark.every_backend
@pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="Inductor is PyTorch's."
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


@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow",
    reason="TensorFlow's loops are told the dtypes of their outputs.",
)
def test_input_channels_in_groups_in_float64(monkeypatch):
    monkeypatch.setattr(dispatch, "RESPONSES", {"cpu": 1})
    assert_chunks_agree(
        (None, "auto"),
        (1, 4, 4, 3),
        "p2",
        "float64",
        1e-12,
        filters=2,
        kernel_size=3,
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
            written_out=True, one_by_one=False, reduced=kernel.shape[0]
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
    """They share it, but in chunks the first one has it all."""

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

    x = keras.ops.convert_to_tensor(x).requires_grad_()
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
    """Numbers rounded to bfloat16, in float32."""
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


@pytest.mark.torch_first
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


@pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="only XLA reports its memory"
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
