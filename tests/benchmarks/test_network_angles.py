"""The benchmark of the logits of trained networks between quarter turns."""

from pathlib import Path

import keras
import numpy as np
import pytest

from keras_equiattn import groups
from keras_equiattn import layers

pytestmark = pytest.mark.once
GROUP = groups.get("p8")


@pytest.fixture
def benchmark(monkeypatch):
    folder = Path(__file__).parents[2] / "benchmarks"
    monkeypatch.syspath_prepend(folder)
    import network_angles

    return network_angles


def images():
    """Blurred blobs, far from the border."""
    rng = np.random.default_rng(0)
    rows, columns = np.indices((28, 28))
    blobs = np.zeros((4, 28, 28, 1), "float32")
    for blob in blobs:
        for row, column in rng.uniform(9, 19, (5, 2)):
            distance = (rows - row) ** 2 + (columns - column) ** 2
            blob[..., 0] += np.exp(-distance / 8)
    return blobs


def measured(benchmark, outputs):
    inputs = keras.Input((28, 28, 1))
    model = keras.Model(inputs, outputs(inputs))
    x = images()
    y = model.predict(x, verbose=0).argmax(axis=1)
    found = benchmark.measure(model, GROUP, x, y)
    assert found["accuracy"] == 1
    return {row["angle"]: row for row in found["angles"]}


def test_a_network_that_does_not_see_turns(benchmark):
    """The mean of an image, and the mean of its squares."""

    def outputs(x):
        both = keras.layers.Concatenate()([x, x * x])
        return keras.layers.GlobalAveragePooling2D()(both)

    rows = measured(benchmark, outputs)
    assert list(rows) == [45.0 * n for n in range(8)]
    for angle, row in rows.items():
        most = 1e-5 if angle % 90 == 0 else 0.01
        assert row["change"] < most
        assert row["there_and_back"] < most
        assert row["same"] == 1
    assert rows[45.0]["change"] > 1e-6  # what turning changes


def test_a_network_that_sees_turns(benchmark):
    """One that looks at pixels in one place."""
    keras.utils.set_random_seed(0)

    def outputs(x):
        return keras.layers.Dense(3)(keras.layers.Flatten()(x))

    rows = measured(benchmark, outputs)
    for angle, row in rows.items():
        if angle:
            assert row["change"] > 0.3
        assert row["there_and_back"] < 0.05


def test_layers_turn_with_the_image(benchmark):
    """Steerable filters do, and unequal weights of the poses do not."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((28, 28, 1))
    x = layers.LiftingConv2D(4, 7, group="p8", use_bias=False, name="turns")(
        inputs
    )
    weights = np.arange(1, 9, dtype="float32")[:, None]
    weigh = keras.layers.Lambda(
        lambda x: keras.ops.multiply(x, weights), name="does_not"
    )
    x = weigh(x)
    model = keras.Model(inputs, layers.GroupPooling("max")(x))
    found = benchmark.layer_errors(model, GROUP, images())
    assert list(found) == ["turns", "does_not"]
    assert found["turns"] < 0.1  # backends draw different weights
    assert found["does_not"] > 0.3


def test_shipped_networks_go_on(benchmark, monkeypatch, tmp_path):
    """An interrupted run measures each network once, and fills a table."""
    import report_angles
    import report_files

    built = []

    def network(name):
        built.append(name)
        if len(built) == 2:
            raise KeyboardInterrupt
        inputs = keras.Input((28, 28, 1))
        pooled = keras.layers.GlobalAveragePooling2D()(inputs)
        return keras.Model(inputs, keras.layers.Dense(3)(pooled))

    monkeypatch.setattr(benchmark, "from_preset", network)
    monkeypatch.setattr(benchmark, "SHIPPED", ("first", "second"))
    digits = images(), np.zeros(4, int)
    monkeypatch.setattr(benchmark, "test_digits", lambda count: digits)
    monkeypatch.setattr(report_files, "RESULTS", tmp_path)
    with pytest.raises(KeyboardInterrupt):
        benchmark.measure_shipped(4, resume=False)
    benchmark.measure_shipped(4, resume=True)
    assert built == ["first", "second", "second"]
    results = report_files.Results(tmp_path)
    table = report_angles.shipped_angles(results)
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows[2:]] == ["| first", "| second"]
    # A mean over the image hardly changes, and under quarter turns not at all.
    for row in rows[2:]:
        cells = row.strip("| ").split(" | ")
        assert cells[1] == "6"
        assert max(map(float, cells[3:7])) < 0.05
        assert float(cells[-1]) < 1e-5


def test_networks(benchmark):
    for basis, downsampling, activation in benchmark.NETWORKS:
        model = benchmark.network("p8", None, basis, downsampling, activation)
        assert model.get_layer(f"{activation}1")
        convolutions = [x for x in model.layers if hasattr(x, "filter_basis")]
        assert {x.filter_basis for x in convolutions} == {basis}
        mode = "binomial" if downsampling == "antialiased" else "max"
        assert model.get_layer("pool2").mode == mode
