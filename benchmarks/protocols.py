"""The error of a network on rotated MNIST after other ways of training it.

    KERAS_BACKEND=tensorflow python benchmarks/protocols.py \
        rotmnist_p4cnn_input --seed 0

The networks of `docs/results.md` were trained with a learning rate that falls
after 80 of 100 epochs, and only their last epoch was tested. Without options
this benchmark follows the released code of Romero et al. (2020) instead, where
the rate stays constant and the lowest error of all epochs on the test digits
counts. Everything else is as in the recipe of the package: all 12,000 digits,
and the kernel factors. The network is tested on all 50,000 test digits after
each of the last epochs alone (`--tested`), since earlier ones are worse.

With `--dropout-after-attention` a dropout that stands before input attention
comes after it, so that attention sees all values in training as well. With
`--milestones 80` the rate falls as in `docs/results.md`.

Writes `benchmarks/results/protocol-<network>-<rate>-seed<seed>-<date>.json`,
where the rate is "constant" or "falling", with "-dropout_after_attention" after
the rate if that was asked for.
"""

import argparse
import dataclasses

import keras
import recipe_changes
import report_files

from keras_equiattn.applications import get_model
from keras_equiattn.applications.data import datasets
from keras_equiattn.applications.training import recipes

DATASET = "rot_mnist"


def train(
    name: str,
    seed: int,
    epochs: int,
    tested: int,
    milestones: tuple[int, ...] = (),
    dropout_after_attention: bool = False,
) -> list[float]:
    """The error after each of the last epochs on the test digits, in %."""
    keras.utils.set_random_seed(seed)
    recipe = dataclasses.replace(
        recipes.get_recipe(name), milestones=milestones
    )
    info = datasets.info(DATASET)
    model = get_model(name, normalization=info.normalization)
    if dropout_after_attention:
        model = recipe_changes.with_dropout_after_attention(model)
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
    parser.add_argument("network")
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
    parser.add_argument("--dropout-after-attention", action="store_true")
    options = parser.parse_args()
    if not 0 < options.tested <= options.epochs:
        parser.error(
            f"--tested must be from 1 to --epochs, {options.epochs}. "
            f"Received: {options.tested}"
        )
    settings = vars(options)
    errors = train(
        options.network,
        options.seed,
        options.epochs,
        options.tested,
        tuple(options.milestones),
        options.dropout_after_attention,
    )
    how = "falling" if options.milestones else "constant"
    how += "-dropout_after_attention" * options.dropout_after_attention
    report_files.write(
        f"protocol-{options.network}-{how}-seed{options.seed}",
        {"settings": settings, "errors": errors},
    )


if __name__ == "__main__":
    main()
