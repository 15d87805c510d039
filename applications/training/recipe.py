"""A training protocol, and the optimiser and the loss that it means."""

import dataclasses
from typing import Any
from typing import Literal

import keras

from keras_equiattn import _checks
from keras_equiattn.applications.training import losses
from keras_equiattn.applications.training import optimizers


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A training protocol.

    Args:
        source: Paper and section, or the authors' code, that states it; or a
            note that it is recalled from memory and not verified, or ours.
        dataset: Name of the dataset.
        epochs: Number of epochs.
        batch_size: Examples per update.
        optimizer: `"adam"`, `"adamw"` or `"sgd"`.
        learning_rate: Learning rate before any milestone.
        momentum: Momentum of SGD, 0 for other optimizers.
        nesterov: Whether SGD's momentum is Nesterov's.
        epsilon: Epsilon of Adam and AdamW. PyTorch's default is 1e-8, Keras'
            1e-7.
        weight_decay: Coupled decay: this times the variable is added to the
            gradient of every trainable variable. The decay of AdamW is
            decoupled: this times the learning rate times the variable is
            subtracted; biases, gains, offsets, rates and position embeddings
            are left out.
        kernel_factors: Pairs of a pattern and a factor. The pattern is for the
            end of a kernel's path. The authors' code multiplies the kernel by
            the factor where it uses it; our layers have no such factor, but
            the kernel learns as if it had one, see `optimizers.CoupledDecay`.
            AdamW takes none.
        milestones: Numbers of completed epochs at which the learning rate is
            multiplied by `factor`; all before the last epoch.
        factor: See `milestones`.
        warmup_epochs: Epochs over which the learning rate rises linearly.
        cosine: Whether the learning rate falls to zero as half a cosine, from
            the warm-up to the end. The warm-up then starts at
            `warmup_start`, and `milestones` must be ().
        warmup_start: Fraction of the learning rate at which the warm-up
            before a cosine begins.
        plateau_patience: How many epochs in a row may pass without a better
            validation accuracy. One more multiplies the learning rate by
            `plateau_factor`, as in PyTorch. None leaves the rate alone;
            milestones, warm-up and cosine cannot be combined with a number.
        plateau_factor: See `plateau_patience`.
        padding: Pixels of zero padding from which a crop of the original
            size is drawn at random; 0 draws none.
        flip: Whether images are mirrored at random.
        turn: Whether images are turned by random multiples of 90 degrees.
        resized_crop: Whether images are random crops of several sizes that are
            resized. This needs a folder of images, and a `padding` of 0.
        label_smoothing: How much of the target the other classes share; the
            loss on validation and test images has it too.
        validation_size: Training examples that are held out; None takes the
            dataset's usual number.
        normalization: `"dataset"` (mean and deviation of the training
            set), `"imagenet"` (those of ImageNet, in RGB) or None.
    """

    source: str
    dataset: str
    epochs: int
    batch_size: int
    optimizer: Literal["adam", "adamw", "sgd"]
    learning_rate: float
    momentum: float = 0.0
    nesterov: bool = False
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    kernel_factors: tuple[tuple[str, float], ...] = ()
    milestones: tuple[int, ...] = ()
    factor: float = 0.1
    warmup_epochs: int = 0
    cosine: bool = False
    warmup_start: float = 0.0
    plateau_patience: int | None = None
    plateau_factor: float = 0.5
    padding: int = 0
    flip: bool = False
    turn: bool = False
    resized_crop: bool = False
    label_smoothing: float = 0.0
    validation_size: int | None = None
    normalization: Literal["dataset", "imagenet"] | None = "dataset"

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            _checks.integer(getattr(self, name), name)
        for name in ("warmup_epochs", "padding"):
            _checks.integer(getattr(self, name), name, 0)
        _checks.optional_integer(self.validation_size, "validation_size")
        for name in ("learning_rate", "epsilon"):
            _checks.number(
                getattr(self, name),
                name,
                "a finite number above 0",
                lambda value: value > 0,
            )
        _checks.number(
            self.weight_decay,
            "weight_decay",
            "a finite number of at least 0",
            lambda value: value >= 0,
        )
        _checks.number(
            self.momentum,
            "momentum",
            "a number in [0, 1)",
            lambda value: 0 <= value < 1,
        )
        _checks.number(
            self.factor,
            "factor",
            "a number in (0, 1]",
            lambda value: 0 < value <= 1,
        )
        _checks.number(
            self.plateau_factor,
            "plateau_factor",
            "a number in (0, 1)",
            lambda value: 0 < value < 1,
        )
        optimizers.checked_factors(self.kernel_factors)
        if self.kernel_factors and self.optimizer == "adamw":
            raise ValueError(
                "`kernel_factors` must be () with the optimizer 'adamw'. "
                f"Received: {self.kernel_factors}"
            )
        losses.check_smoothing(self.label_smoothing, "label_smoothing")
        _checks.choice(self.optimizer, "optimizer", ("adam", "adamw", "sgd"))
        _checks.choice(
            self.normalization, "normalization", ("dataset", "imagenet", None)
        )
        for name in ("nesterov", "flip", "turn", "resized_crop", "cosine"):
            _checks.flag(getattr(self, name), name)
        if self.resized_crop and self.padding:
            raise ValueError(
                "`padding` must be 0 where `resized_crop` is True. Received: "
                f"{self.padding}"
            )
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(
                f"`momentum` must be 0 with the optimizer '{self.optimizer}'. "
                f"Received: {self.momentum}"
            )
        if self.nesterov and not self.momentum:
            raise ValueError(
                "`nesterov` must be False where `momentum` is 0. Received: True"
            )
        self._check_warmup_start()
        self._check_milestones()
        self._check_plateau()

    def _check_warmup_start(self) -> None:
        start = _checks.number(
            self.warmup_start,
            "warmup_start",
            "a number in [0, 1)",
            lambda value: 0 <= value < 1,
        )
        if start and not (self.cosine and self.warmup_epochs):
            raise ValueError(
                "`warmup_start` must be 0 without a warm-up before a cosine. "
                f"Received: {start}, with cosine={self.cosine}, "
                f"warmup_epochs={self.warmup_epochs}"
            )

    def _check_milestones(self) -> None:
        received = f"Received: {self.milestones!r}"
        try:
            epochs = [_checks.integer(e, "milestones") for e in self.milestones]
        except (TypeError, ValueError):
            epochs = [0]
        if epochs != sorted(set(epochs)) or 0 in epochs:
            raise ValueError(
                "`milestones` must be positive integers that increase. "
                f"{received}"
            )
        if epochs and epochs[-1] >= self.epochs:
            raise ValueError(
                f"`milestones` must be less than the {self.epochs} epochs of "
                f"the run: later ones would do nothing. {received}"
            )
        if epochs and self.cosine:
            raise ValueError(
                "`milestones` must be () where `cosine` changes the learning "
                f"rate. {received}"
            )

    def _check_plateau(self) -> None:
        if self.plateau_patience is None:
            return
        _checks.integer(self.plateau_patience, "plateau_patience", 0)
        names = ("milestones", "warmup_epochs", "cosine")
        others = [name for name in names if getattr(self, name)]
        if others:
            having = ", ".join(f"{n}={getattr(self, n)!r}" for n in others)
            raise ValueError(
                "`plateau_patience` must be None where `milestones`, "
                "`warmup_epochs` or `cosine` change the learning rate. "
                f"Received: {self.plateau_patience!r}, with {having}"
            )


def learning_rate(recipe: Recipe, steps_per_epoch: int) -> Any:
    """The rate of `recipe` as a number or as a Keras schedule."""
    warmup_steps = recipe.warmup_epochs * steps_per_epoch
    if recipe.cosine:
        steps = recipe.epochs * steps_per_epoch - warmup_steps
        return keras.optimizers.schedules.CosineDecay(
            recipe.learning_rate * (recipe.warmup_start if warmup_steps else 1),
            max(steps, 1),  # a short run may be all warm-up
            warmup_target=recipe.learning_rate if warmup_steps else None,
            warmup_steps=warmup_steps,
        )
    if not recipe.milestones and not warmup_steps:
        return recipe.learning_rate
    return optimizers.StepSchedule(
        recipe.learning_rate,
        [epoch * steps_per_epoch for epoch in recipe.milestones],
        recipe.factor,
        warmup_steps,
    )


def make_optimizer(
    recipe: Recipe, steps_per_epoch: int
) -> keras.optimizers.Optimizer:
    """The optimiser of `recipe`, with decay and schedule."""
    rate = learning_rate(recipe, steps_per_epoch)
    if recipe.optimizer == "adamw":
        return optimizers.DecoupledAdam(
            rate, epsilon=recipe.epsilon, weight_decay=recipe.weight_decay
        )
    if recipe.optimizer == "adam":
        return optimizers.CoupledAdam(
            rate,
            epsilon=recipe.epsilon,
            decay=recipe.weight_decay,
            kernel_factors=dict(recipe.kernel_factors),
        )
    return optimizers.CoupledSGD(
        rate,
        momentum=recipe.momentum,
        nesterov=recipe.nesterov,
        decay=recipe.weight_decay,
        kernel_factors=dict(recipe.kernel_factors),
    )


def make_loss(recipe: Recipe) -> keras.losses.Loss:
    """The cross-entropy of logits of `recipe`."""
    if recipe.label_smoothing:
        return losses.SmoothedCrossentropy(recipe.label_smoothing)
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
