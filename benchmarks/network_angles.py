"""How much turns by less than 90 degrees change the logits of a network.

    KERAS_BACKEND=tensorflow python benchmarks/network_angles.py
    KERAS_BACKEND=tensorflow python benchmarks/network_angles.py --shipped

Trains the rotated MNIST network on p8 in four forms: with filters of pixels;
with steerable filters and as many parameters; with steerable filters and
antialiased downsampling; and with these two and SiLU in place of ReLU. For each
seed, all have the same data and schedule: Adam with a learning rate that falls
to a tenth for the last fifth of the epochs. Then it turns test digits by each
angle of the group with splines of degree 3, and compares logits, from which
their mean over the classes is subtracted: the root mean square of their change
over that of the logits, and how many digits keep their class. As a reference it
compares the logits of digits that are turned there and back again: that change
comes from two interpolations alone. "layers" is the equivariance error of the
feature maps under the smallest turn: the root mean square of the difference
between the map of the turned digit and the turned map, within the disc that
stays in the image, over that of the map, from which the mean of each channel is
subtracted.

With `--shipped` it trains nothing, and measures networks whose weights are part
of the package under the turns of p16, whatever their own group is.

Prepare the digits first: `python -m keras_equiattn.applications.data prepare
rot_mnist`. Writes `benchmarks/results/network_angles-<attention, convolution or
shipped>-<date>.json` after each network. With `--resume` it goes on from the
newest such file.
"""

import argparse
import itertools
import json

import keras
import numpy as np
import report_files
from scipy import ndimage

from keras_equiattn import groups
from keras_equiattn.applications import from_preset
from keras_equiattn.applications import RotMNISTCNN
from keras_equiattn.applications.data import datasets

GROUP = "p8"
NORMALIZATION = (0.1309, 0.2901)
# Digits with which layers are measured: their feature maps are large.
LAYER_IMAGES = 250
# Filters that make the networks of both bases about equally large on p8.
WIDTHS = {"pixel": 7, "steerable": 9}
NETWORKS = (
    ("pixel", "exact", "relu"),
    ("steerable", "exact", "relu"),
    ("steerable", "antialiased", "relu"),
    ("steerable", "antialiased", "silu"),
)
SHIPPED = (
    "rotmnist_p4cnn",
    "rotmnist_p8cnn_input",
    "rotmnist_p8cnn_smooth",
    "rotmnist_p16cnn",
    "rotmnist_p16cnn_5x5",
)
SHIPPED_TURNS = groups.get("p16")


def network(
    group: str,
    attention: str | None,
    basis: str,
    downsampling: str,
    activation: str,
) -> keras.Model:
    """The network, with filters of this basis in all of its layers."""
    model = RotMNISTCNN(
        group,
        attention,
        WIDTHS[basis],
        normalization=NORMALIZATION,
        downsampling=downsampling,
        activation=activation,
    )

    def clone(layer):
        config = layer.get_config()
        if "filter_basis" in config:
            config["filter_basis"] = basis
        return type(layer).from_config(config)

    return keras.models.clone_model(model, clone_function=clone)


def trained(model: keras.Model, epochs: int, seed: int) -> keras.Model:
    def rate(epoch):
        return 1e-3 if epoch < 0.8 * epochs else 1e-4

    model.compile(
        keras.optimizers.Adam(1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    batches = datasets.load_pydataset("rot_mnist", "train", 128, seed=seed)
    schedule = keras.callbacks.LearningRateScheduler(rate)
    model.fit(batches, epochs=epochs, verbose=2, callbacks=[schedule])
    return model


def logits(model: keras.Model, x: np.ndarray) -> np.ndarray:
    y = model.predict(x.astype("float32"), batch_size=250, verbose=0)
    return y - y.mean(axis=1, keepdims=True)


def turned(x: np.ndarray, angle: float) -> np.ndarray:
    if not angle:
        return x
    return ndimage.rotate(x, angle, axes=(2, 1), reshape=False, order=3)


def layer_errors(
    model: keras.Model, group: groups.Group, x: np.ndarray
) -> dict[str, float]:
    """The equivariance error of each layer that returns a feature map."""
    names = [la.name for la in model.layers if len(la.output.shape) == 5]
    if not names:
        return {}
    outputs = [model.get_layer(name).output for name in names]
    network = keras.Model(model.inputs, outputs)
    element, angle = 1, 360 / group.rotations
    maps, maps_of_turned = (
        network.predict(images.astype("float32"), batch_size=250, verbose=0)
        for images in (x, turned(x, angle))
    )
    found = {}
    for name, y, actual in zip(names, maps, maps_of_turned, strict=True):
        size = y.shape[1]
        if size == 1:
            continue
        expected = turned(y, angle)[:, :, :, group.relative_table[element]]
        middle = (size - 1) / 2
        disc = np.hypot(*(np.indices((size, size)) - middle)) <= middle
        spread = y - y.mean(axis=(0, 1, 2, 3))
        difference, spread = (
            np.mean(z[:, disc] ** 2) for z in (actual - expected, spread)
        )
        found[name] = float(np.sqrt(difference / spread))
    return found


def measure(model, group, x: np.ndarray, y: np.ndarray) -> dict:
    """Changes and agreement by angle, and the accuracy on the digits.

    The angles are the turns of `group`.
    """
    still = logits(model, x)

    def change(moved):
        return float(np.sqrt(((moved - still) ** 2).mean() / (still**2).mean()))

    rows = []
    for step in range(group.rotations):
        angle = 360 * step / group.rotations
        there = turned(x, angle)
        moved, back = logits(model, there), logits(model, turned(there, -angle))
        same = np.mean(moved.argmax(axis=1) == still.argmax(axis=1))
        rows.append(
            {
                "angle": angle,
                "change": change(moved),
                "there_and_back": change(back),
                "same": float(same),
            }
        )
    return {
        "accuracy": float(np.mean(still.argmax(axis=1) == y)),
        "angles": rows,
    }


def measure_trained(settings: dict, seeds: list[int], resume: bool) -> None:
    """Trains each form of the network with each seed, and measures it."""
    kind = f"network_angles-{settings['attention'] or 'convolution'}"
    rows = report_files.earlier(kind, settings, "rows") if resume else []
    digits = test_digits(settings["images"])
    kinds = ("basis", "downsampling", "activation")
    for seed, network_kind in itertools.product(seeds, NETWORKS):
        about = {"seed": seed, **dict(zip(kinds, network_kind, strict=True))}
        if any(about.items() <= row.items() for row in rows):
            continue
        keras.utils.set_random_seed(seed)
        model = network(GROUP, settings["attention"], *network_kind)
        trained(model, settings["epochs"], seed)
        group = groups.get(GROUP)
        about |= {
            "parameters": parameters(model),
            **measure(model, group, *digits),
            "layers": layer_errors(model, group, digits[0][:LAYER_IMAGES]),
        }
        add_row(kind, settings, rows, about)


def measure_shipped(images: int, resume: bool) -> None:
    """Measures networks whose weights are part of the package."""
    kind, settings = "network_angles-shipped", {"images": images}
    rows = report_files.earlier(kind, settings, "rows") if resume else []
    digits = test_digits(images)
    for name in SHIPPED:
        if any(row["network"] == name for row in rows):
            continue
        model = from_preset(name)
        about = {
            "network": name,
            "parameters": parameters(model),
            **measure(model, SHIPPED_TURNS, *digits),
        }
        add_row(kind, settings, rows, about)


def test_digits(count: int) -> tuple[np.ndarray, np.ndarray]:
    images, classes = datasets.load_pydataset("rot_mnist", "test", count)[0]
    return np.asarray(images), np.asarray(classes)


def parameters(model: keras.Model) -> int:
    return sum(int(np.prod(w.shape)) for w in model.trainable_weights)


def add_row(kind: str, settings: dict, rows: list[dict], row: dict) -> None:
    """Adds a row to those before it, prints it, and writes all."""
    rows.append(row)
    print(json.dumps(row), flush=True)
    results = {"benchmark": "network_angles.py", "settings": settings}
    report_files.write(kind, {**results, "rows": rows})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shipped", action="store_true")
    parser.add_argument("--attention", choices=("full", "input"))
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    if options.shipped:
        if options.attention:
            parser.error("--shipped takes no --attention.")
        measure_shipped(options.images, options.resume)
        return
    settings = {
        "attention": options.attention,
        "epochs": options.epochs,
        "images": options.images,
    }
    measure_trained(settings, options.seeds, options.resume)


if __name__ == "__main__":
    main()
