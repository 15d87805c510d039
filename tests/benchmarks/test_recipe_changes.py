"""The benchmark of changes of the recipe: what each of them changes."""

import math
import types
from pathlib import Path

import keras
import numpy as np
import pytest
from layer_contract import as_array

pytestmark = pytest.mark.once


@pytest.fixture
def benchmark(monkeypatch):
    folder = Path(__file__).parents[2] / "benchmarks"
    monkeypatch.syspath_prepend(folder)
    import recipe_changes

    return recipe_changes


def test_former_start(benchmark):
    models = []
    for change in ("none", "former start"):
        keras.utils.set_random_seed(0)
        models.append(benchmark.network(change))
    factors = {
        old.path: np.abs(as_array(new)).mean() / np.abs(as_array(old)).mean()
        for old, new in zip(
            *(model.trainable_variables for model in models), strict=True
        )
        if np.any(as_array(new) != as_array(old))
    }
    assert factors == {
        "conv1_attention/spatial_kernel": pytest.approx(math.pi / 2),
        "conv7/kernel": pytest.approx(2 / math.pi),
    }


def test_dropout_after_attention(benchmark):
    """One change alone moves the dropouts."""
    for change in benchmark.CHANGES:
        names = [layer.name for layer in benchmark.network(change).layers]
        late = names.index("dropout1") > names.index("conv2_attention")
        assert late == (change == "dropout after attention")


class TwoKernels(keras.layers.Layer):
    """`x (factor a) b`, with the kernels `a` and `b`."""

    def __init__(self, factor, names, **kwargs):
        super().__init__(**kwargs)
        self.factor, self.names = factor, names

    def build(self, input_shape):
        self.a, self.b = (
            self.add_weight(shape=(3, 3), name=name) for name in self.names
        )

    def call(self, x):
        return x @ (self.factor * self.a) @ self.b


def trained(optimizer, factor, names, layer, start):
    """Both kernels after some steps, without the factor."""
    inputs = keras.Input((3,))
    model = keras.Model(inputs, TwoKernels(factor, names, name=layer)(inputs))
    model.set_weights(start)
    model.compile(optimizer, "mse")
    rng = np.random.default_rng(0)
    for _ in range(20):
        model.train_on_batch(rng.normal(size=(8, 3)), rng.normal(size=(8, 3)))
    return model.get_weights()


def test_steps_and_decay(benchmark):
    """With the factor outside, Adam acts on the kernel without it."""
    rng = np.random.default_rng(1)
    start = [rng.normal(size=(3, 3)) for _ in range(2)]
    names = ("spatial_kernel", "kernel")
    factor = math.pi / 2

    def usual():
        return benchmark.optimizers.CoupledAdam(1e-3, epsilon=1e-8, decay=1e-4)

    plain = trained(usual(), 1.0, names, "conv2_attention", start)
    divided = [start[0] / factor, start[1]]
    a, b = trained(usual(), factor, names, "conv2_attention", divided)
    expected = {"none": plain, "factor outside": [factor * a, b]}
    for change, kernels in expected.items():
        optimizer = benchmark.make_optimizer(change)
        found = trained(optimizer, 1.0, names, "conv2_attention", start)
        for kernel, same in zip(kernels, found, strict=True):
            np.testing.assert_allclose(kernel, same, atol=1e-5)
    assert np.abs(plain[0] - factor * a).max() > 1e-3


@pytest.mark.parametrize(
    ("layer", "decays"), [("conv2_attention", False), ("conv2", True)]
)
def test_no_decay_of_attention(benchmark, layer, decays):
    """Without a gradient, a kernel moves by its decay alone."""
    optimizer = benchmark.make_optimizer("no decay of attention")
    start = [np.ones((3, 3)), np.zeros((3, 3))]
    a, _ = trained(optimizer, 0.0, ("a", "b"), layer, start)
    assert (a < 1).all() if decays else (a == 1).all()


@pytest.fixture
def collection(benchmark, monkeypatch, tmp_path):
    """A stand-in for MNIST: 20 images whose labels are their numbers.

    Returns a function that says which of them rotated MNIST uses.
    """
    images = np.zeros((20, 28, 28, 1), "uint8")
    held_out = np.zeros((2, 28, 28, 1), "float32"), np.array([100, 101])
    archive = tmp_path / "digits.npz"
    replaced = {
        (benchmark.tfds, "load"): lambda *_: (images, np.arange(20)),
        (benchmark.rot_mnist, "cache"): lambda folder: archive,
        (benchmark.datasets, "load_pydataset"): lambda *_: [held_out],
    }
    for (module, name), function in replaced.items():
        monkeypatch.setattr(module, name, function)
    return lambda **sources: np.savez(archive, **sources)


def test_held_out_digits(benchmark, collection):
    """They are those of validation, and those that no split uses."""
    collection(train_source=np.arange(5), test_source=np.arange(12, 20))
    images, labels = benchmark.held_out_digits()
    assert sorted(labels) == [*range(5, 12), 100, 101]
    assert images.shape == (9, 28, 28, 1)


def test_digits_of_unknown_source(benchmark, collection):
    collection(train_images=np.arange(5))
    with pytest.raises(SystemExit, match="needs rotated MNIST as it is built"):
        benchmark.held_out_digits()


class Recorder:
    """A model that keeps the callbacks of `fit`."""

    def compile(self, *_, **__):
        pass

    def fit(self, *_, callbacks, **__):
        self.callbacks = callbacks
        return types.SimpleNamespace(history={"val_accuracy": [0.5, 0.75]})


def test_rate(benchmark, monkeypatch):
    """It stays constant for one change, and falls for all others."""
    model = Recorder()
    replaced = {
        (benchmark, "network"): lambda change: model,
        (benchmark.datasets, "load_pydataset"): lambda *_, **__: None,
        (benchmark.datasets, "EpochCounter"): lambda batches: None,
    }
    for (module, name), function in replaced.items():
        monkeypatch.setattr(module, name, function)
    for change in benchmark.CHANGES:
        found = benchmark.run(change, 0, 10, (None, None))
        assert found == {"change": change, "seed": 0, "errors": [50, 25]}
        rates = [model.callbacks[0].schedule(epoch) for epoch in range(10)]
        last = 1e-3 if change == "constant rate" else 1e-4
        np.testing.assert_allclose(rates, [1e-3] * 8 + [last] * 2)
