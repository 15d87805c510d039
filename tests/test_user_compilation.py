"""Layers within what a user compiles: the same numbers as without."""

import keras
import numpy as np
import pytest
from families import build
from families import FAMILIES
from families import images
from layer_contract import as_array

from keras_equiattn import layers
from keras_equiattn.testing import relative_difference

BACKEND = keras.backend.backend()
SWEPT = (pytest.mark.slow, pytest.mark.every_backend)


def families(*fast):
    """All families; the tests of those that are not `fast` are slow."""
    return [
        pytest.param(name, marks=() if name in fast else SWEPT)
        for name in FAMILIES
    ]


def network(name, **options):
    """A classifier with one layer of the family, compiled for training."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input(FAMILIES[name][1])
    x = build(name)(inputs)
    x = keras.layers.Dense(3)(keras.layers.Flatten()(x))
    model = keras.Model(inputs, x)
    model.compile(keras.optimizers.SGD(0.01), "mse", **options)
    return model


def trained(model, x, y, **options):
    """The losses of two epochs, and what is predicted afterwards."""
    history = model.fit(
        x, y, batch_size=2, epochs=2, shuffle=False, verbose=0, **options
    )
    return history.history["loss"], model.predict(x, verbose=0)


def examples(name):
    """Images of the family, and targets for them."""
    y = np.random.default_rng(1).normal(size=(4, 3)).astype("float32")
    return images(name, 4), y


@pytest.fixture
def with_dynamo():
    """All other tests have it turned off."""
    if BACKEND != "torch":
        yield
        return
    import torch

    # Dynamo compiles the same code, such as that of Keras' networks, for a few
    # callers, and gives up on others.
    torch._dynamo.reset()
    with torch._dynamo.config.patch(disable=False):
        yield


@pytest.mark.torch_first
@pytest.mark.parametrize(
    "name", families() if BACKEND == "torch" else families("asc")
)
@pytest.mark.usefixtures("with_dynamo")
def test_training_with_jit_compile(name):
    """Under PyTorch it is `torch.compile`, which takes a minute."""
    x, y = examples(name)
    losses, predictions = trained(network(name, jit_compile=True), x, y)
    expected = trained(network(name, jit_compile=False), x, y)
    np.testing.assert_allclose(losses, expected[0], rtol=1e-4)
    np.testing.assert_allclose(predictions, expected[1], rtol=1e-4, atol=1e-5)


@pytest.mark.torch_first
@pytest.mark.skipif(BACKEND == "torch", reason="Keras has no such steps there.")
@pytest.mark.parametrize("name", families("asc"))
def test_training_with_several_steps_in_one(name):
    x, y = examples(name)
    # Keras reports the loss of the last of them.
    _, predictions = trained(
        network(name, steps_per_execution=2, jit_compile=False), x, y
    )
    _, expected = trained(network(name, jit_compile=False), x, y)
    np.testing.assert_allclose(predictions, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name", families("gsa") if BACKEND == "torch" else families()
)
def test_rematerialized_layers(name):
    """`keras.RematScope`; TensorFlow takes no keywords such as `training`."""
    x = images(name, 4)
    losses = []
    for mode in (None, "full"):
        with keras.RematScope(mode=mode):
            layer = build(name)
        inputs = keras.Input(FAMILIES[name][1])
        model = keras.Model(inputs, layer(inputs))
        model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=False)
        y = np.zeros((4, *model.output_shape[1:]), "float32")
        losses.append(model.fit(x, y, epochs=2, verbose=0).history["loss"])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)


@pytest.mark.skipif(BACKEND != "torch", reason="torch.compile is PyTorch's")
@pytest.mark.parametrize("name", families("asc"))
@pytest.mark.usefixtures("with_dynamo")
def test_torch_compile(name):
    """The model is one graph, with the same output and gradients.

    Traced as for Inductor, which would compile it for a minute; the test of
    `jit_compile` does that.
    """
    import torch

    model = network(name)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.tensor(images(name, 2), requires_grad=True)
    found = []
    for function in (model, compiled):
        y = function(x)
        tensors = (x, *(v.value for v in model.trainable_variables))
        found.append((y, *torch.autograd.grad((y**2).sum(), tensors)))
    for ours, other in zip(*found, strict=True):
        np.testing.assert_allclose(
            as_array(other), as_array(ours), rtol=1e-4, atol=1e-5
        )


@pytest.mark.skipif(BACKEND != "torch", reason="Transforms of PyTorch.")
@pytest.mark.parametrize("name", FAMILIES)
def test_torch_func_grad(name):
    """It gives the gradient of autograd."""
    import torch

    layer = build(name)
    x = keras.ops.convert_to_tensor(images(name, 2))

    def loss(x):
        return (layer(x) ** 2).sum()

    found = torch.func.grad(loss)(x)
    x.requires_grad_()
    (expected,) = torch.autograd.grad(loss(x), x)
    np.testing.assert_allclose(
        as_array(found), as_array(expected), rtol=1e-4, atol=1e-5
    )


@pytest.mark.slow
@pytest.mark.every_backend
@pytest.mark.skipif(BACKEND != "torch", reason="torch.compile is PyTorch's")
@pytest.mark.usefixtures("with_dynamo")
def test_torch_compile_with_dropout_of_attention():
    """One graph, whose calls draw what calls of the layer itself draw."""
    import torch

    def layer():
        keras.utils.set_random_seed(0)
        found = layers.GroupSelfAttention2D(
            2, 3, 1, 3, "p2", attention_dropout=0.5, seed=3
        )
        found.build((None, *FAMILIES["gsa"][1]))
        return found

    alone = layer()
    compiled = torch.compile(layer(), fullgraph=True, backend="aot_eager")
    x = torch.tensor(images("gsa", 2))
    outputs = []
    for _ in range(2):
        outputs.append(as_array(compiled(x, training=True)))
        np.testing.assert_allclose(
            outputs[-1], as_array(alone(x, training=True)), 1e-4, 1e-5
        )
    assert abs(outputs[1] - outputs[0]).max() > 0.01


# All layers beside this one are traced, and those of Keras: it takes longest.
@pytest.mark.slow
@pytest.mark.every_backend
@pytest.mark.skipif(BACKEND != "torch", reason="torch.compile is PyTorch's")
@pytest.mark.usefixtures("with_dynamo")
def test_torch_compile_with_dropout_of_keras():
    """The layer runs uncompiled, and the others are compiled."""
    import torch

    layer = layers.WindowACmix2D(4, 2, window_size=2, dropout=0.5)
    inputs = keras.Input(FAMILIES["acmix_window"][1])
    model = keras.Model(inputs, layer(inputs))
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.tensor(images("acmix_window", 2))
    found = as_array(compiled(x, training=True))
    assert 0.1 < (found == 0).mean() < 0.9
    np.testing.assert_allclose(as_array(compiled(x)), as_array(model(x)), 1e-4)


@pytest.mark.slow
@pytest.mark.every_backend
@pytest.mark.skipif(BACKEND != "torch", reason="torch.compile is PyTorch's")
@pytest.mark.usefixtures("with_dynamo")
def test_torch_compile_of_several_layers():
    """Dynamo takes sizes that change from layer to layer for symbols."""
    import torch

    x = inputs = keras.Input((9, 9, 3))
    for layer in (
        layers.LiftingConv2D(4, 3, group="p4"),
        layers.SqueezeExcite(group="p4", reduction_ratio=1),
        layers.SpatialPooling2D(2, strides=1, group="p4"),
        layers.GroupConv2D(4, 3, group="p4"),
        layers.GroupPooling(),
    ):
        x = layer(x)
    model = keras.Model(inputs, x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for batch in (2, 3):
        x = torch.rand(batch, 9, 9, 3)
        np.testing.assert_allclose(
            as_array(compiled(x)), as_array(model(x)), rtol=1e-4, atol=1e-5
        )


def loss_of(name):
    """A loss of a layer of the family, as a function for JAX, and weights."""
    layer = build(name)
    others = [v.value for v in layer.non_trainable_variables]

    def loss(values, x):
        y, _ = layer.stateless_call(values, others, x)
        return (y**2).sum()

    return loss, [v.value for v in layer.trainable_variables]


@pytest.mark.torch_first
@pytest.mark.skipif(BACKEND != "jax", reason="of functions of JAX")
@pytest.mark.parametrize("name", families("asc"))
def test_second_derivatives_by_jax(name):
    """Forward over reverse, as in `jax.hessian`, and reverse over reverse."""
    import jax

    loss, values = loss_of(name)
    x = jax.numpy.asarray(images(name, 2))
    direction = jax.numpy.asarray(np.random.default_rng(2).normal(size=x.shape))

    def gradient(x):
        return jax.grad(loss, argnums=1)(values, x)

    def forward(x):
        return jax.jvp(gradient, (x,), (direction,))[1]

    def reverse(x):
        return jax.vjp(gradient, x)[1](direction)[0]

    expected = as_array(jax.jit(reverse)(x))
    assert np.abs(expected).max() > 0
    assert relative_difference(as_array(jax.jit(forward)(x)), expected) < 1e-5


@pytest.mark.torch_first
@pytest.mark.skipif(BACKEND != "jax", reason="of functions of JAX")
@pytest.mark.parametrize("name", families("asc"))
def test_gradients_of_each_image_by_jax(name):
    """`jax.vmap` of `jax.grad`, compiled, against one image at a time."""
    import jax

    loss, values = loss_of(name)
    x = jax.numpy.asarray(images(name, 3))[:, None]
    each = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(values, x)
    for n, image in enumerate(x):
        alone = jax.grad(loss)(values, image)
        for ours, other in zip(each, alone, strict=True):
            np.testing.assert_allclose(ours[n], other, rtol=1e-3, atol=1e-4)
