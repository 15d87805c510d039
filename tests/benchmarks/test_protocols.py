"""`benchmarks/protocols.py`: rate, kernel factors and tested epochs."""

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
    import protocols

    return protocols


class Batches(keras.utils.PyDataset):
    """Some images of one split in batches of five."""

    def __init__(self, count, seed):
        super().__init__()
        rng = np.random.default_rng(seed)
        self.x = rng.normal(size=(count, 28, 28, 1)).astype("float32")
        self.y = rng.integers(0, 10, size=count)

    def __len__(self):
        return len(self.y) // 5

    def __getitem__(self, index):
        part = slice(5 * index, 5 * index + 5)
        return self.x[part], self.y[part]

    def set_epoch(self, epoch):
        pass


@pytest.mark.parametrize("milestones", [(), (3,)])
@pytest.mark.parametrize("later", [False, True])
def test_rate_factors_and_tested_epochs(
    benchmark, monkeypatch, milestones, later
):
    """Rate, place of dropout, and the epochs whose error is measured."""
    tested = []
    splits = {"train+validation": Batches(20, 0), "test": Batches(10, 1)}
    opened, rates, models, asked = [], [], [], []

    def load(name, split, *options, **named):
        opened.append(split)
        return splits[split]

    class Rates(keras.callbacks.Callback):
        def __init__(self, *_):
            super().__init__()

        def on_epoch_end(self, epoch, logs=None):
            tested.append("val_accuracy" in logs)
            rates.append(float(as_array(self.model.optimizer.learning_rate)))

    def get_model(name, **options):
        asked.append(options.get("dropout_after_attention", False))
        models.append(
            keras.Sequential(
                [keras.layers.Flatten(), keras.layers.Dense(10, name="conv7")]
            )
        )
        return models[-1]

    monkeypatch.setattr(benchmark.datasets, "load", load)
    monkeypatch.setattr(benchmark.datasets, "EpochCounter", Rates)
    monkeypatch.setattr(benchmark, "get_model", get_model)
    errors = benchmark.train(
        "rotmnist_p4cnn_input",
        seed=0,
        epochs=4,
        tested=2,
        milestones=milestones,
        dropout_after_attention=later,
    )
    assert set(opened) == {"train+validation", "test"}
    assert asked == [later]
    assert tested == [False, False, True, True]
    # The rate at the end of an epoch is that of the step which follows.
    expected = [1e-3, 1e-3, 1e-4, 1e-4] if milestones else [1e-3] * 4
    assert rates == pytest.approx(expected)
    assert len(errors) == 2
    test = splits["test"]
    right = as_array(models[0](test.x)).argmax(-1) == test.y
    assert errors[-1] == pytest.approx(100 * (1 - right.mean()), abs=1e-4)
    assert "conv7/kernel" in dict(models[0].optimizer.kernel_factors)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ("rotmnist_p4cnn_input_late_dropout", "without _late_dropout"),
        ("rotmnist_p4cnn", "with input attention, such as"),
        ("allcnnc_p4_input", "of rotated MNIST"),
    ],
)
def test_networks_that_are_refused(
    benchmark, monkeypatch, capsys, network, message
):
    arguments = ["protocols.py", network, "--dropout-after-attention"]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit):
        benchmark.main()
    assert message in " ".join(capsys.readouterr().err.split())


def test_networks_for_other_images_are_refused(benchmark, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["protocols.py", "allcnnc_p4"])
    with pytest.raises(SystemExit):
        benchmark.main()
    assert "must be one for rot_mnist" in capsys.readouterr().err
