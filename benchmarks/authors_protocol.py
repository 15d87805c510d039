"""What is the error on rotated MNIST by the protocol of the authors?

    KERAS_BACKEND=tensorflow python benchmarks/authors_protocol.py \
        rotmnist_p4cnn_input --seed 0

The networks of `docs/results.md` were trained with a learning rate that falls,
and only their last epoch was tested. In the released code of Romero et al.
(2020) the rate stays constant, the network is tested after each epoch, and the
lowest error on the test digits counts. This benchmark does so for one network
and one seed, with the recipe of the package otherwise: 100 epochs on all 12,000
digits, and the kernel factors. It tests on all 50,000 test digits, after each
of the last epochs alone (`--tested`), since earlier ones are worse.

Writes `benchmarks/results/authors_protocol-<network>-seed<seed>-<date>.json`.
"""

import argparse
from typing import Any

import keras
import report_files

from keras_equiattn.applications import get_model
from keras_equiattn.applications.data import datasets
from keras_equiattn.applications.training import recipes

DATASET = "rot_mnist"


def train(name: str, seed: int, epochs: int, tested: int) -> list[float]:
    """The error after each of the last epochs on the test digits, in %."""
    keras.utils.set_random_seed(seed)
    recipe = recipes.get_recipe(name)
    info = datasets.info(DATASET)
    model = get_model(name, normalization=info.normalization)
    batches = datasets.load(
        DATASET, "train+validation", recipe.batch_size, seed=seed
    )
    model.compile(
        # No milestone, so the rate is that of the first epochs throughout.
        recipes.make_optimizer(recipe, steps_per_epoch=len(batches)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
    )
    history = model.fit(
        batches,
        validation_data=datasets.load(DATASET, "test", 500),
        validation_freq=list(range(epochs - tested + 1, epochs + 1)),
        epochs=epochs,
        callbacks=[datasets.EpochCounter(batches)],
        verbose=2,
    ).history
    return [100 * (1 - accuracy) for accuracy in history["val_accuracy"]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("network")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument(
        "--tested", type=int, default=30, help="epochs that are tested"
    )
    options = parser.parse_args()
    if not 0 < options.tested <= options.epochs:
        parser.error(
            f"--tested must be from 1 to --epochs, {options.epochs}. "
            f"Received: {options.tested}"
        )
    settings: dict[str, Any] = vars(options)
    name, seed = options.network, options.seed
    errors = train(name, seed, options.epochs, options.tested)
    report_files.write(
        f"authors_protocol-{name}-seed{seed}",
        {"settings": settings, "errors": errors},
    )


if __name__ == "__main__":
    main()
