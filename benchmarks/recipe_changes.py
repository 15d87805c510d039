"""Which part of the recipe matters for rotated MNIST with input attention?

    KERAS_BACKEND=tensorflow python benchmarks/recipe_changes.py

Trains `rotmnist_p4cnn_input` on 10,000 digits for 30 epochs: by the recipe of
the package without its kernel factors, with a learning rate that falls to a
tenth for the last fifth of the epochs. Then it trains with one change at a
time:

- "constant rate": the rate stays constant, as it does in the authors' code.
- "former start": two kernels start in another range, as by the former recipe
  of `docs/results.md`. That of attention on the image is pi / 2 times as wide,
  that of the last convolution 2 / pi times.
- "factor outside": attention on the group and the last convolution learn as in
  the authors' code, where the kernel that is learnt is multiplied by pi / 2.
  Steps of the product are pi / 2 times as long, and its decay (pi / 2)^2 times
  as weak. Today the recipe of the package has these factors. In this benchmark
  no other run has them.
- "no decay of attention": weights of attention do not decay.
- "dropout after attention": dropout comes after input attention instead of
  before it.

After each epoch the network is tested on 10,000 digits: the 2,000 that are held
out, and the 8,000 of MNIST that rotated MNIST uses neither for training nor for
its test, each turned by an angle of its own. Writes
`benchmarks/results/recipe_changes-<backend>-<epochs>-<date>.json` after each
run. With `--resume` it goes on from the newest such file.

Prepare the digits first: `python -m keras_equiattn.applications.data prepare
rot_mnist`. They must be built from MNIST; the files of 2007 do not say which
digits they hold.
"""

import argparse
import dataclasses
import math
from typing import Any

import keras
import numpy as np
import report_files

from keras_equiattn.applications import get_model
from keras_equiattn.applications.data import datasets
from keras_equiattn.applications.data.sources import pixels
from keras_equiattn.applications.data.sources import rot_mnist
from keras_equiattn.applications.data.sources import tfds
from keras_equiattn.applications.data.sources.catalogue import resolve_data_dir
from keras_equiattn.applications.training import optimizers
from keras_equiattn.applications.training import recipes

BENCHMARK = "recipe_changes.py"
NAME = "rotmnist_p4cnn_input"
CHANGES = (
    "none",
    "constant rate",
    "former start",
    "factor outside",
    "no decay of attention",
    "dropout after attention",
)
WITH_FACTORS = recipes.get_recipe(NAME)
RECIPE = dataclasses.replace(WITH_FACTORS, kernel_factors=())
FACTOR = math.pi / 2


class AdamWithoutDecayOfAttention(optimizers.CoupledAdam):
    """Adam of a recipe, but weights of attention do not decay."""

    def update_step(
        self, gradient: Any, variable: Any, learning_rate: Any
    ) -> None:
        rule = super()
        if "attention" in self.path_of(variable):
            rule = super(optimizers.CoupledDecay, self)
        rule.update_step(gradient, variable, learning_rate)


def make_optimizer(change: str) -> keras.optimizers.Optimizer:
    """Adam with the rate of the first epochs."""
    if change == "no decay of attention":
        return AdamWithoutDecayOfAttention(
            RECIPE.learning_rate,
            epsilon=RECIPE.epsilon,
            decay=RECIPE.weight_decay,
        )
    recipe = WITH_FACTORS if change == "factor outside" else RECIPE
    return recipes.make_optimizer(recipe, steps_per_epoch=1)


def network(change: str) -> keras.Model:
    """The network, with the weights that it starts with."""
    info = datasets.info("rot_mnist")
    model = get_model(
        NAME,
        normalization=info.normalization,
        dropout_after_attention=change == "dropout after attention",
    )
    if change == "former start":
        attention = model.get_layer("conv1_attention").spatial_kernel
        attention.assign(attention * FACTOR)
        last = model.get_layer("conv7").kernel
        last.assign(last / FACTOR)
    return model


def held_out_digits() -> tuple[np.ndarray, np.ndarray]:
    """10,000 digits that are neither trained on nor test digits."""
    folder = resolve_data_dir(None)
    images, labels = tfds.load("rot_mnist", folder, "train")  # upright
    with np.load(rot_mnist.cache(folder)) as arrays:
        if "train_source" not in arrays:
            raise SystemExit(
                f"{BENCHMARK} needs rotated MNIST as it is built from "
                f"MNIST. Received: {rot_mnist.cache(folder)}"
            )
        used = np.concatenate([arrays["train_source"], arrays["test_source"]])
    unused = np.setdiff1d(np.arange(len(images)), used)
    angles = np.random.default_rng(0).uniform(0, 360, len(unused))
    upright = images[unused, :, :, 0].astype("float32") / 255
    turned = pixels.to_uint8(pixels.rotate(upright, angles))[..., None]
    x, y = datasets.load_pydataset("rot_mnist", "validation", 2000)[0]
    return (
        np.concatenate([x, turned.astype("float32") / 255]),
        np.concatenate([y, labels[unused]]),
    )


def run(
    change: str, seed: int, epochs: int, digits: tuple[np.ndarray, np.ndarray]
) -> dict[str, Any]:
    """The error on the held-out digits after each epoch, in percent."""
    keras.utils.set_random_seed(seed)
    model = network(change)
    model.compile(
        make_optimizer(change),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
    )

    def rate(epoch: int) -> float:
        falls = change != "constant rate" and epoch >= 0.8 * epochs
        return RECIPE.learning_rate * (0.1 if falls else 1)

    batches = datasets.load_pydataset(
        "rot_mnist", "train", RECIPE.batch_size, seed=seed
    )
    history = model.fit(
        batches,
        validation_data=digits,
        validation_batch_size=500,
        epochs=epochs,
        callbacks=[
            keras.callbacks.LearningRateScheduler(rate),
            datasets.EpochCounter(batches),
        ],
        shuffle=False,
        verbose=2,
    ).history
    errors = [100 * (1 - accuracy) for accuracy in history["val_accuracy"]]
    return {"change": change, "seed": seed, "errors": errors}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--changes", nargs="+", choices=CHANGES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    backend = keras.backend.backend()
    kind = f"recipe_changes-{backend}-{options.epochs}"
    settings = {"model": NAME, "epochs": options.epochs}
    resume = options.resume
    runs = report_files.earlier(kind, settings, "runs") if resume else []
    done = {(found["change"], found["seed"]) for found in runs}
    digits = held_out_digits()
    for seed in options.seeds:
        for change in options.changes or CHANGES:
            if (change, seed) in done:
                continue
            runs.append(run(change, seed, options.epochs, digits))
            results = {"settings": settings, "runs": runs}
            report_files.write(kind, {"benchmark": BENCHMARK, **results})


if __name__ == "__main__":
    main()
