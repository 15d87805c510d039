"""Coupled and decoupled weight decay, and the smoothed loss."""

import dataclasses

import keras
import numpy as np
import pytest
from keras import ops
from recipe_helpers import tensors

from keras_equiattn.applications.training import losses
from keras_equiattn.applications.training import optimizers
from keras_equiattn.applications.training import recipes

DECAY = 0.1


RATE = 0.05


STEPS = 5


def small_model() -> keras.Model:
    """Dense and batch normalisation, gains and offsets away from 1 and 0."""
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(3),
            keras.layers.BatchNormalization(),
        ]
    )
    rng = np.random.default_rng(0)
    model.set_weights(
        [rng.uniform(0.5, 1.5, value.shape) for value in model.get_weights()]
    )
    return model


def values(variables) -> list[np.ndarray]:
    return [ops.convert_to_numpy(v).astype("float64") for v in variables]


def adam_step(value, gradient, state, step):
    """PyTorch's Adam: the decay is added to the gradient first."""
    gradient = gradient + DECAY * value
    first, second = state or (0.0, 0.0)
    first = 0.9 * first + 0.1 * gradient
    second = 0.999 * second + 0.001 * gradient**2
    mean, variance = first / (1 - 0.9**step), second / (1 - 0.999**step)
    return value - RATE * mean / (np.sqrt(variance) + 1e-8), (first, second)


def sgd_step(value, gradient, state, step):
    """PyTorch's SGD with momentum."""
    gradient = gradient + DECAY * value
    buffer = gradient if state is None else 0.9 * state + gradient
    return value - RATE * buffer, buffer


def nesterov_step(value, gradient, state, step):
    """PyTorch's SGD with Nesterov's momentum."""
    gradient = gradient + DECAY * value
    buffer = gradient if state is None else 0.9 * state + gradient
    return value - RATE * (gradient + 0.9 * buffer), buffer


def adam(**kwargs):
    return optimizers.CoupledAdam(RATE, epsilon=1e-8, decay=DECAY, **kwargs)


def sgd(**kwargs):
    return optimizers.CoupledSGD(RATE, momentum=0.9, decay=DECAY, **kwargs)


CASES = pytest.mark.parametrize(
    ("make", "step_of"),
    [
        (adam, adam_step),
        (sgd, sgd_step),
        (lambda **kwargs: sgd(nesterov=True, **kwargs), nesterov_step),
    ],
    ids=["adam", "sgd", "nesterov"],
)


def gradients_of(model) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(1)
    return [
        [rng.standard_normal(v.shape) for v in model.trainable_variables]
        for _ in range(STEPS)
    ]


def by_hand(start, gradients, step_of):
    """Where the variables end after steps of the hand-written optimiser."""
    found = list(start)
    states = [None] * len(found)
    for step, gradient in enumerate(gradients, 1):
        for index in range(len(found)):
            found[index], states[index] = step_of(
                found[index], gradient[index], states[index], step
            )
    return found


def assert_close(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=2e-5, atol=2e-6)


@CASES
def test_steps_match_hand_written(make, step_of):
    model = small_model()
    gradients = gradients_of(model)
    expected = by_hand(values(model.trainable_variables), gradients, step_of)
    optimizer = make()
    for gradient in gradients:
        optimizer.apply(tensors(gradient), model.trainable_variables)
    assert_close(values(model.trainable_variables), expected)


@CASES
@pytest.mark.skipif(
    keras.backend.backend() == "tensorflow",
    reason="Keras has no stateless_apply on TensorFlow",
)
def test_stateless_steps_match_hand_written(make, step_of):
    model = small_model()
    gradients = gradients_of(model)
    expected = by_hand(values(model.trainable_variables), gradients, step_of)
    optimizer = make()
    optimizer.build(model.trainable_variables)
    found = [v.value for v in model.trainable_variables]
    state = [v.value for v in optimizer.variables]
    for gradient in gradients:
        found, state = optimizer.stateless_apply(
            state, tensors(gradient), found
        )
    assert_close(values(found), expected)


@CASES
def test_kernel_factors_match_hand_written(make, step_of):
    """A kernel is its factor times a variable that learns as usual."""
    model = small_model()
    variables, gradients = model.trainable_variables, gradients_of(model)
    factors = [1.5 if "kernel" in v.path else 1.0 for v in variables]
    assert factors == [1.5, 1.0, 1.0, 1.0]
    learnt = by_hand(
        [v / f for v, f in zip(values(variables), factors, strict=True)],
        [
            [f * g for g, f in zip(gradient, factors, strict=True)]
            for gradient in gradients
        ],
        step_of,
    )
    # The first pattern matches too: the last one counts.
    optimizer = make(kernel_factors={"kernel": 9.0, "dense*/kernel": 1.5})
    for gradient in gradients:
        optimizer.apply(tensors(gradient), variables)
    expected = [f * v for v, f in zip(learnt, factors, strict=True)]
    assert_close(values(variables), expected)


@pytest.mark.parametrize("scaled", [False, True], ids=["float", "scaled"])
def test_kernel_factors_in_fit(scaled):
    """Loss scaling and accumulation of gradients come before the factors."""
    x, found = np.random.default_rng(0).normal(size=(8, 4)), []
    for batch, accumulated in ((8, None), (4, 2)):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        optimizer = sgd(
            kernel_factors={"kernel": 1.5},
            gradient_accumulation_steps=accumulated,
        )
        if scaled and accumulated is None:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, 4.0)
        model.compile(optimizer, "mse")
        y = np.random.default_rng(1).normal(size=(8, 3))
        model.fit(x, y, batch, epochs=2, shuffle=False, verbose=0)
        found.append(values(model.trainable_variables))
    assert_close(*found)


@CASES
def test_matches_torch(make, step_of):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(2)
    start = rng.standard_normal((3, 2)).astype("float32")
    gradients = [rng.standard_normal((3, 2)) for _ in range(STEPS)]
    parameter = torch.nn.Parameter(torch.tensor(start))
    if make is adam:
        theirs = torch.optim.Adam([parameter], lr=RATE, weight_decay=DECAY)
    else:
        theirs = torch.optim.SGD(
            [parameter],
            lr=RATE,
            momentum=0.9,
            nesterov=step_of is nesterov_step,
            weight_decay=DECAY,
        )
    variable, ours = keras.Variable(start), make()
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient, dtype=torch.float32)
        theirs.step()
        ours.apply(tensors([gradient]), [variable])
    expected = parameter.detach().numpy()
    assert_close(values([variable]), [expected])


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "loss_scale"])
def test_fit_decays_every_trainable_variable(scaled):
    """With a gradient of zero, every step applies the decay alone."""
    model = small_model()
    start = values(model.trainable_variables)
    assert len(start) == 4  # kernel, bias, gain, offset
    optimizer = optimizers.CoupledSGD(RATE, decay=DECAY)
    if scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    model.compile(optimizer, loss=lambda y, x: 0.0 * ops.mean(x, axis=-1))
    x = np.ones((6, 4), "float32")
    model.fit(x, x[:, :3], batch_size=2, epochs=2, verbose=0)
    shrunk = (1 - RATE * DECAY) ** 6
    assert_close(values(model.trainable_variables), [shrunk * v for v in start])


def test_fit_matches_hand_written():
    """Gradients of a linear loss are known: decay and momentum in `fit`."""
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    model = keras.Sequential([keras.Input((3,)), layer])
    x = np.array([[1.0, -2.0, 0.5], [3.0, 0.0, -0.5]], "float32")
    model.compile(sgd(), loss=lambda y, prediction: prediction)
    model.fit(x, np.zeros(2), batch_size=2, epochs=STEPS, verbose=0)
    gradient = x.mean(axis=0, dtype="float64")[:, None]
    expected = by_hand([np.ones((3, 1))], [[gradient]] * STEPS, sgd_step)
    assert_close(values(layer.trainable_variables), expected)


def test_clipping_and_scaling_leave_the_decay_alone():
    variable = keras.Variable(np.array([2.0, -4.0], "float32"))
    optimizer = optimizers.CoupledSGD(
        1.0, decay=DECAY, clipnorm=1.0, loss_scale_factor=8.0
    )
    # Unscaled (30, 40), clipped (0.6, 0.8).
    optimizer.apply(tensors([np.array([240.0, 320.0])]), [variable])
    assert_close(values([variable]), [[2 - 0.6 - 0.2, -4 - 0.8 + 0.4]])


def test_accumulated_gradients_decay_once():
    variable = keras.Variable(np.array([2.0], "float32"))
    optimizer = optimizers.CoupledSGD(
        1.0, decay=DECAY, gradient_accumulation_steps=2
    )
    for gradient in (1.0, 3.0):
        optimizer.apply(tensors([np.array([gradient])]), [variable])
    assert_close(values([variable]), [[2 - 2 - 0.2]])


WEIGHTS = {  # as networks have them, and whether they are decayed
    "kernel": ((2, 3), True),
    "shift_kernel": ((3, 3, 1, 2), True),
    "position_kernel": ((2, 2), True),
    "bias": ((3,), False),
    "gamma": ((3,), False),
    "attention_rate": ((), False),
    "position_bias": ((9, 2), False),
    "position_embedding": ((1, 4, 2), False),
    "norm_gamma": ((9, 4), False),
    "token": ((1, 1, 4), False),
}


class Weights(keras.layers.Layer):
    """Has them all, and uses none."""

    def build(self, input_shape):
        for name, (shape, _) in WEIGHTS.items():
            self.add_weight(name=name, shape=shape, initializer="ones")

    def call(self, x):
        return x + sum(0.0 * ops.sum(weight) for weight in self.weights)


def test_decoupled_adam_decays_what_swin_decays(tmp_path):
    recipe = dataclasses.replace(
        recipes.get_recipe("rotmnist_z2cnn"),
        optimizer="adamw",
        learning_rate=RATE,
        weight_decay=DECAY,
    )
    optimizer = recipes.make_optimizer(recipe, steps_per_epoch=2)
    # A copy from the config decays the same weights.
    config = keras.optimizers.serialize(optimizer)
    optimizer = keras.optimizers.deserialize(config)
    assert isinstance(optimizer, optimizers.DecoupledAdam)
    assert optimizer.epsilon == recipe.epsilon
    model = keras.Sequential([keras.Input((1,)), Weights()])
    model.compile(optimizer, loss=lambda y, x: 0.0 * ops.mean(x, axis=-1))
    x = np.ones((6, 1), "float32")
    model.fit(x, x, batch_size=2, epochs=2, verbose=0)
    for variable, (_, decays) in zip(
        model.trainable_variables, WEIGHTS.values(), strict=True
    ):
        expected = (1 - RATE * DECAY) ** 6 if decays else 1.0
        found = ops.convert_to_numpy(variable)
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_decoupled_adam_matches_torch():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(2)
    start = rng.standard_normal((3, 2)).astype("float32")
    parameter = torch.nn.Parameter(torch.tensor(start))
    theirs = torch.optim.AdamW([parameter], lr=RATE, weight_decay=DECAY)
    variable = keras.Variable(start)
    ours = optimizers.DecoupledAdam(RATE, epsilon=1e-8, weight_decay=DECAY)
    for _ in range(STEPS):
        gradient = rng.standard_normal((3, 2))
        parameter.grad = torch.tensor(gradient, dtype=torch.float32)
        theirs.step()
        ours.apply(tensors([gradient]), [variable])
    assert_close(values([variable]), [parameter.detach().numpy()])


def test_smoothed_crossentropy(tmp_path):
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((4, 5)).astype("float32")
    labels = np.array([0, 3, 4, 3])
    target = np.full((4, 5), 0.2 / 4)
    target[np.arange(4), labels] = 0.8
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    expected = -(target * log_p).sum(axis=1).mean()
    recipe = dataclasses.replace(
        recipes.get_recipe("rotmnist_p4cnn"), label_smoothing=0.2
    )
    loss = recipes.make_loss(recipe)
    for y in (labels, labels[:, None]):
        found = ops.convert_to_numpy(loss(y, logits))
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    # Without smoothing it is Keras' cross-entropy.
    plain = recipes.make_loss(dataclasses.replace(recipe, label_smoothing=0.0))
    np.testing.assert_allclose(
        ops.convert_to_numpy(losses.SmoothedCrossentropy(0.0)(labels, logits)),
        ops.convert_to_numpy(plain(labels, logits)),
        rtol=1e-6,
    )
    model = small_model()
    model.compile("sgd", loss)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.loss, losses.SmoothedCrossentropy)
    assert loaded.loss.smoothing == 0.2
    with pytest.raises(
        ValueError, match=r"`smoothing` must be a number in .*1"
    ):
        losses.SmoothedCrossentropy(1)


@CASES
def test_optimizers_survive_serialisation(make, step_of, tmp_path):
    original = make(kernel_factors={"*/kernel": 2.0})
    config = keras.optimizers.serialize(original)
    copy = keras.optimizers.deserialize(config)
    assert type(copy) is type(original)
    assert copy.get_config() == original.get_config()
    assert (copy.decay, copy.kernel_factors) == (DECAY, {"*/kernel": 2.0})
    model = small_model()
    model.compile(original, loss="mse")
    original.build(model.trainable_variables)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.decay == DECAY


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"kernel_factors": {"a": 0.0}},
            "`kernel_factors` must be finite numbers .* Received: {'a': 0.0}",
        ),
        ({"weight_decay": 0.1}, "takes `decay`, which is coupled"),
        ({"decay": -0.1}, "`decay` must be a finite number .* -0.1"),
        ({"decay": None}, "`decay` must be a finite number .* None"),
        ({"decay": float("nan")}, "`decay` must be a finite number .* nan"),
        ({"decay": float("inf")}, "`decay` must be a finite number .* inf"),
    ],
)
def test_optimizers_refuse(kwargs, message):
    with pytest.raises(ValueError, match=message):
        optimizers.CoupledAdam(**kwargs)
