"""How the networks of `keras_equiattn.applications` are trained.

A `Recipe` states a published training protocol with its source. What
the command line of `examples/train.py` leaves open comes from here.
"""

import dataclasses
from typing import Any
from typing import Literal

import keras

from keras_equiattn.applications import optimizers


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A training protocol.

    Args:
        source: Paper and section, or the authors' code, that states it.
        dataset: Name of the dataset.
        epochs: Number of epochs.
        batch_size: Examples per update.
        optimizer: `"adam"` or `"sgd"`.
        learning_rate: Learning rate before any milestone.
        momentum: Momentum of SGD.
        nesterov: Whether SGD's momentum is Nesterov's.
        epsilon: Epsilon of Adam. PyTorch's default is 1e-8, Keras' 1e-7.
        weight_decay: Coupled decay: this times the variable is added to the
            gradient of every trainable variable.
        milestones: Numbers of completed epochs at which the learning rate is
            multiplied by `factor`.
        factor: See `milestones`.
        warmup_epochs: Epochs over which the learning rate rises linearly.
        padding: Pixels of zero padding from which a crop of the original
            size is drawn at random; 0 draws none.
        flip: Whether images are mirrored at random.
        validation_size: Training examples that are held out; None takes the
            dataset's usual number.
        normalization: `"dataset"` (mean and deviation of the training
            set), `"imagenet"` (those of ImageNet, in RGB) or None.
    """

    source: str
    dataset: str
    epochs: int
    batch_size: int
    optimizer: Literal["adam", "sgd"]
    learning_rate: float
    momentum: float = 0.0
    nesterov: bool = False
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    milestones: tuple[int, ...] = ()
    factor: float = 0.1
    warmup_epochs: int = 0
    padding: int = 0
    flip: bool = False
    validation_size: int | None = None
    normalization: Literal["dataset", "imagenet"] | None = "dataset"

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            _require(getattr(self, name) >= 1, self, name, ">= 1")
        _require(self.learning_rate > 0, self, "learning_rate", "> 0")
        _require(self.epsilon > 0, self, "epsilon", "> 0")
        _require(0 <= self.momentum < 1, self, "momentum", "in [0, 1)")
        _require(0 < self.factor <= 1, self, "factor", "in (0, 1]")
        for name in ("weight_decay", "warmup_epochs", "padding"):
            _require(getattr(self, name) >= 0, self, name, ">= 0")
        _require(
            self.optimizer in ("adam", "sgd"),
            self,
            "optimizer",
            "'adam' or 'sgd'",
        )
        _require(
            self.normalization in ("dataset", "imagenet", None),
            self,
            "normalization",
            "'dataset', 'imagenet' or None",
        )
        _require(
            self.validation_size is None or self.validation_size >= 1,
            self,
            "validation_size",
            "None or >= 1",
        )
        _require(
            list(self.milestones) == sorted(set(self.milestones))
            and all(epoch >= 1 for epoch in self.milestones),
            self,
            "milestones",
            "increasing and >= 1",
        )
        _require(
            not self.nesterov or self.momentum > 0,
            self,
            "nesterov",
            "False where momentum is 0",
        )


def _require(valid: bool, recipe: Recipe, name: str, expected: str) -> None:
    if not valid:
        raise ValueError(
            f"`{name}` must be {expected}. Received: "
            f"{name}={getattr(recipe, name)!r}"
        )


def learning_rate(recipe: Recipe, steps_per_epoch: int) -> Any:
    """The rate of `recipe` as a number or as a Keras schedule."""
    if not recipe.milestones and not recipe.warmup_epochs:
        return recipe.learning_rate
    return optimizers.StepSchedule(
        recipe.learning_rate,
        [epoch * steps_per_epoch for epoch in recipe.milestones],
        recipe.factor,
        recipe.warmup_epochs * steps_per_epoch,
    )


def make_optimizer(
    recipe: Recipe, steps_per_epoch: int
) -> keras.optimizers.Optimizer:
    """The optimiser of `recipe`, with coupled decay and schedule."""
    rate = learning_rate(recipe, steps_per_epoch)
    if recipe.optimizer == "adam":
        return optimizers.CoupledAdam(
            rate, epsilon=recipe.epsilon, decay=recipe.weight_decay
        )
    return optimizers.CoupledSGD(
        rate,
        momentum=recipe.momentum,
        nesterov=recipe.nesterov,
        decay=recipe.weight_decay,
    )


_ROTMNIST = Recipe(
    source=(
        "Romero et al. 2020, https://arxiv.org/abs/2002.03830, and the "
        "authors' code, dwromero/att_gconvs, experiments/rot_mnist"
    ),
    dataset="rot_mnist",
    epochs=100,
    batch_size=128,
    optimizer="adam",
    learning_rate=1e-3,
    weight_decay=1e-4,
    validation_size=2000,
)

_RECIPES: dict[str, Recipe] = {
    # The authors' code trains the plain network three times as long.
    "rotmnist_z2cnn": dataclasses.replace(_ROTMNIST, epochs=300),
    "rotmnist_p4cnn": _ROTMNIST,
    "rotmnist_p4mcnn": _ROTMNIST,
    "rotmnist_p4cnn_big11": _ROTMNIST,
    "rotmnist_p4cnn_big15": _ROTMNIST,
    "rotmnist_p4cnn_big19": _ROTMNIST,
    "rotmnist_p8cnn": _ROTMNIST,
}


def list_recipes() -> list[str]:
    """Names of the networks that have a recipe."""
    return sorted(_RECIPES)


def get_recipe(model: str) -> Recipe:
    """The protocol with which the authors train the network `model`."""
    try:
        return _RECIPES[model]
    except KeyError:
        raise ValueError(
            f"There is no recipe for {model!r}. Available: "
            f"{', '.join(list_recipes())}"
        ) from None
