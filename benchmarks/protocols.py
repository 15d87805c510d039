"""The error on rotated MNIST with a constant rate or a later dropout.

    KERAS_BACKEND=tensorflow python benchmarks/protocols.py \
        rotmnist_p4cnn_input --seed 0

By default the learning rate stays constant, as in the released code of Romero
et al. (2020), which reports the lowest error of all epochs on the test digits.
With `--milestones 80` it falls after 80 epochs, as for the trained networks of
`docs/results.md`. With `--dropout-after-attention` a dropout that stands before
input attention comes after it, so that attention sees all values in training as
well. Everything else is as in the recipe of the package: all 12,000 digits, and
the kernel factors. To save time the network is tested on the 50,000 test digits
after each of the last epochs alone (`--tested`).

Writes
`benchmarks/results/protocol-<network>-<rate>-<epochs>-seed<seed>-<date>.json`,
where the rate is "constant", or "falling" with the milestones, such as
"falling_80". "-dropout_after_attention" follows it if that was asked for.
"""

import argparse
import dataclasses
import fnmatch
from collections.abc import Sequence

import keras
import report_files

from keras_equiattn.applications import get_model
from keras_equiattn.applications.data import datasets
from keras_equiattn.applications.training import recipes

DATASET = "rot_mnist"


def train(
    network: str,
    *,
    seed: int,
    epochs: int,
    tested: int,
    milestones: Sequence[int],
    dropout_after_attention: bool,
) -> list[float]:
    """The error after each of the last epochs on the test digits, in %."""
    keras.utils.set_random_seed(seed)
    recipe = dataclasses.replace(
        recipes.get_recipe(network), milestones=tuple(milestones)
    )
    info = datasets.info(DATASET)
    # Networks without input attention need not know the argument.
    changed = (
        {"dropout_after_attention": True} if dropout_after_attention else {}
    )
    model = get_model(network, normalization=info.normalization, **changed)
    batches = datasets.load(
        DATASET, "train+validation", recipe.batch_size, seed=seed
    )
    model.compile(
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
    parser.add_argument("network", help="name of a registered network")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument(
        "--tested", type=int, default=30, help="epochs that are tested"
    )
    parser.add_argument(
        "--milestones",
        nargs="*",
        type=int,
        default=[],
        help="epochs after which the rate falls to a tenth",
    )
    parser.add_argument(
        "--dropout-after-attention",
        action="store_true",
        help="place dropout after input attention, not before it",
    )
    options = parser.parse_args()
    if not 0 < options.tested <= options.epochs:
        parser.error(
            f"--tested must be from 1 to --epochs, {options.epochs}. "
            f"Received: {options.tested}"
        )
    if "_late_dropout" in options.network:
        parser.error(
            "Pass the network without _late_dropout, and "
            f"--dropout-after-attention. Received: {options.network}"
        )
    of_mnist = fnmatch.fnmatch(options.network, "rotmnist_*_input")
    if options.dropout_after_attention and not of_mnist:
        parser.error(
            "--dropout-after-attention needs a network of rotated MNIST with "
            "input attention, such as rotmnist_p4cnn_input. Received: "
            f"{options.network}"
        )
    if recipes.get_recipe(options.network).dataset != DATASET:
        parser.error(
            f"The network must be one for {DATASET}. "
            f"Received: {options.network}"
        )
    errors = train(**vars(options))
    falling = "_".join(map(str, ["falling", *options.milestones]))
    how = falling if options.milestones else "constant"
    how += "-dropout_after_attention" * options.dropout_after_attention
    report_files.write(
        f"protocol-{options.network}-{how}-{options.epochs}-seed{options.seed}",
        {
            "benchmark": "protocols.py",
            "settings": vars(options),
            "errors": errors,
        },
    )


if __name__ == "__main__":
    main()
