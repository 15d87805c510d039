"""How the networks of `keras_equiattn.applications` are trained.

A `Recipe` states a training protocol with its source: published, or where
`source` says so recalled. What the command line of `examples/train.py` leaves
open comes from here.
"""

import dataclasses
from typing import Any
from typing import Literal

import keras

from keras_equiattn import _checks
from keras_equiattn import applications
from keras_equiattn.applications import gsanet
from keras_equiattn.applications import losses
from keras_equiattn.applications import optimizers
from keras_equiattn.applications import resnet29


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A training protocol.

    Args:
        source: Paper and section, or the authors' code, that states it; or
            that it is recalled from there, and not verified.
        dataset: Name of the dataset.
        epochs: Number of epochs.
        batch_size: Examples per update.
        optimizer: `"adam"`, `"adamw"` or `"sgd"`.
        learning_rate: Learning rate before any milestone.
        momentum: Momentum of SGD.
        nesterov: Whether SGD's momentum is Nesterov's.
        epsilon: Epsilon of Adam and AdamW. PyTorch's default is 1e-8, Keras'
            1e-7.
        weight_decay: Coupled decay: this times the variable is added to the
            gradient of every trainable variable. Of AdamW decoupled: this
            times the learning rate times the variable is subtracted; biases,
            gains, offsets, rates and position embeddings are left out.
        milestones: Numbers of completed epochs at which the learning rate is
            multiplied by `factor`; all before the last epoch.
        factor: See `milestones`.
        warmup_epochs: Epochs over which the learning rate rises linearly.
        cosine: Whether the learning rate falls to zero as half a cosine, from
            the warm-up to the end. The warm-up then starts at
            `warmup_start`. In place of milestones.
        warmup_start: Fraction of the learning rate at which the warm-up
            before a cosine begins.
        plateau_patience: How many epochs in a row may pass without a better
            validation accuracy. One more multiplies the learning rate by
            `plateau_factor`, as in PyTorch. None leaves it alone; milestones,
            warm-up and cosine cannot be combined with a number.
        plateau_factor: See `plateau_patience`.
        padding: Pixels of zero padding from which a crop of the original
            size is drawn at random; 0 draws none.
        flip: Whether images are mirrored at random.
        resized_crop: Whether images are random crops of several sizes,
            resized, of a folder of images only; in place of `padding`.
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
    milestones: tuple[int, ...] = ()
    factor: float = 0.1
    warmup_epochs: int = 0
    cosine: bool = False
    warmup_start: float = 0.0
    plateau_patience: int | None = None
    plateau_factor: float = 0.5
    padding: int = 0
    flip: bool = False
    resized_crop: bool = False
    label_smoothing: float = 0.0
    validation_size: int | None = None
    normalization: Literal["dataset", "imagenet"] | None = "dataset"

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            _checks.integer(getattr(self, name), name)
        for name in ("warmup_epochs", "padding"):
            _checks.integer(getattr(self, name), name, 0)
        if self.validation_size is not None:
            _checks.integer(self.validation_size, "validation_size")
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
        losses.check_smoothing(self.label_smoothing, "label_smoothing")
        _checks.choice(self.optimizer, "optimizer", ("adam", "adamw", "sgd"))
        _checks.choice(
            self.normalization, "normalization", ("dataset", "imagenet", None)
        )
        for name in ("nesterov", "flip", "resized_crop", "cosine"):
            _checks.flag(getattr(self, name), name)
        if self.resized_crop and self.padding:
            raise ValueError(
                "`padding` must be 0 where `resized_crop` is True. Received: "
                f"{self.padding}"
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
            rate, epsilon=recipe.epsilon, decay=recipe.weight_decay
        )
    return optimizers.CoupledSGD(
        rate,
        momentum=recipe.momentum,
        nesterov=recipe.nesterov,
        decay=recipe.weight_decay,
    )


def make_loss(recipe: Recipe) -> keras.losses.Loss:
    """The cross-entropy of logits of `recipe`."""
    if recipe.label_smoothing:
        return losses.SmoothedCrossentropy(recipe.label_smoothing)
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


_SOURCE = (
    "Romero et al. 2020, https://arxiv.org/abs/2002.03830, and the authors' "
    "code, dwromero/att_gconvs"
)

_ROTMNIST = Recipe(
    source=f"{_SOURCE}, experiments/rot_mnist",
    dataset="rot_mnist",
    epochs=100,
    batch_size=128,
    optimizer="adam",
    learning_rate=1e-3,
    weight_decay=1e-4,
    validation_size=2000,
)

# CIFAR-10. With `padding=4, flip=True` it is what they call CIFAR-10+. They
# train on all 50,000 training images.
_ALLCNN = Recipe(
    source=f"{_SOURCE}; its learning rate is one of 0.01, 0.05, 0.1, 0.25",
    dataset="cifar10",
    epochs=350,
    batch_size=128,
    optimizer="sgd",
    learning_rate=0.05,
    momentum=0.9,
    weight_decay=1e-3,
    milestones=(200, 250, 300),
    normalization="imagenet",
)
_RESNET44 = dataclasses.replace(
    _ALLCNN,
    source=_SOURCE,
    epochs=300,
    weight_decay=0.0,
    milestones=(50, 100, 150),
)

_PCAM = Recipe(
    # The paper watches the validation loss.
    source=f"{_SOURCE}, which watches the validation accuracy",
    dataset="pcam",
    epochs=100,
    batch_size=64,
    optimizer="adam",
    learning_rate=1e-3,
    weight_decay=1e-4,
    plateau_patience=20,
)

# The same for CIFAR-100. Their rate rises from epoch to epoch of the warm-up,
# ours with every update.
_RESNET29 = Recipe(
    source=(
        "Diaconu and Worrall 2019, https://arxiv.org/abs/1911.07704, appendix "
        "C, for CIFAR-10 and CIFAR-100"
    ),
    dataset="cifar10",
    epochs=100,
    batch_size=128,
    optimizer="sgd",
    learning_rate=0.1,
    momentum=0.9,
    nesterov=True,
    weight_decay=1e-4,
    milestones=(50, 75),
    warmup_epochs=10,
    padding=2,  # crops of 32 x 32 pixels from 36 x 36
    flip=True,
    validation_size=5000,
)
_RESNET83 = dataclasses.replace(_RESNET29, epochs=200, milestones=(100, 150))

# The authors' code takes these settings on its command line, and none is
# published.
_GSA_SOURCE = (
    "recalled from Romero and Cordonnier 2021, "
    "https://arxiv.org/abs/2010.00977, and not verified: the authors' code, "
    "dwromero/g_selfatt, gives no commands"
)

_GSA_ROTMNIST = Recipe(
    source=f"{_GSA_SOURCE}; it holds out 2,000 examples",
    dataset="rot_mnist",
    epochs=300,
    batch_size=8,
    optimizer="adam",
    learning_rate=1e-3,
    weight_decay=1e-4,
    validation_size=2000,
)
_GSA_CIFAR10 = Recipe(
    source=_GSA_SOURCE,
    dataset="cifar10",
    epochs=350,
    batch_size=24,
    optimizer="sgd",
    learning_rate=0.01,
    momentum=0.9,
    weight_decay=1e-4,
    warmup_epochs=10,
    cosine=True,
)
_GSA_PCAM = Recipe(
    source=_GSA_SOURCE,
    dataset="pcam",
    epochs=100,
    batch_size=8,
    optimizer="adam",
    learning_rate=1e-3,
    weight_decay=1e-4,
)

_ACMIX_RESNET = Recipe(
    source=(
        "Pan et al. 2022, https://arxiv.org/abs/2111.14556, and the authors' "
        "code, LeapLabTHU/ACmix, which crops from whole images"
    ),
    dataset="imagenet_folder",
    epochs=100,
    batch_size=256,
    optimizer="sgd",
    learning_rate=0.1,
    momentum=0.9,
    weight_decay=1e-4,
    warmup_epochs=5,
    warmup_start=0.25,
    cosine=True,
    flip=True,
    resized_crop=True,
    label_smoothing=0.1,
    normalization="imagenet",
)
_ACMIX_SAN = dataclasses.replace(
    _ACMIX_RESNET,
    source=(
        "recalled from Zhao et al. 2020, https://arxiv.org/abs/2004.13621, and "
        "not verified; Pan et al. 2022, https://arxiv.org/abs/2111.14556, "
        "train as they do"
    ),
    warmup_epochs=0,
    warmup_start=0.0,
)
_ACMIX_SWIN = Recipe(
    source=(
        "Pan et al. 2022, https://arxiv.org/abs/2111.14556, which trains as "
        "Liu et al. 2021, https://arxiv.org/abs/2103.14030, and the code of "
        "the latter, microsoft/Swin-Transformer. Left out are mixup, CutMix, "
        "RandAugment, random erasing and clipping of gradients; theirs crops "
        "from whole images and resizes them bicubically, and its cosine ends "
        "at a hundredth of the rate. Recalled, and not verified: without mixup "
        "it shares the smoothed part of a target among the other classes and "
        "the label, ours among the others"
    ),
    dataset="imagenet_folder",
    epochs=300,
    batch_size=1024,
    optimizer="adamw",
    learning_rate=1e-3,  # 5e-4 for each 512 examples
    weight_decay=0.05,
    warmup_epochs=20,
    warmup_start=1e-3,
    cosine=True,
    flip=True,
    resized_crop=True,
    label_smoothing=0.1,
    normalization="imagenet",
)
_ACMIX_PVT = dataclasses.replace(
    _ACMIX_SWIN,
    source=(
        "recalled from Wang et al. 2021, https://arxiv.org/abs/2102.12122, and "
        "not verified; Pan et al. 2022, https://arxiv.org/abs/2111.14556, "
        "train as they do. Left out are mixup, CutMix, RandAugment and random "
        "erasing"
    ),
    warmup_epochs=5,
)
_ACMIX_SWIN_CIFAR10 = dataclasses.replace(
    _ACMIX_SWIN,
    source="ours, after that for ImageNet; no paper has this network",
    dataset="cifar10",
    epochs=200,
    batch_size=128,
    learning_rate=5e-4,
    warmup_epochs=10,
    padding=4,
    resized_crop=False,
    validation_size=5000,
    normalization="dataset",
)


def _family(prefix: str, recipe: Recipe) -> dict[str, Recipe]:
    """A recipe for all networks whose names begin alike."""
    names = applications.list_models()
    return {name: recipe for name in names if name.startswith(prefix)}


_RECIPES: dict[str, Recipe] = {
    "rotmnist_p4cnn": _ROTMNIST,
    "rotmnist_p4cnn_full": _ROTMNIST,
    "rotmnist_p4cnn_channel": _ROTMNIST,
    "rotmnist_p4cnn_spatial": _ROTMNIST,
    "rotmnist_p4cnn_input": _ROTMNIST,
    "rotmnist_p4cnn_co": _ROTMNIST,
    "rotmnist_p4cnn_big11": _ROTMNIST,
    "rotmnist_p4cnn_big15": _ROTMNIST,
    "rotmnist_p4cnn_big19": _ROTMNIST,
    "rotmnist_p4mcnn": _ROTMNIST,
    "rotmnist_p8cnn": _ROTMNIST,
    # The authors' code trains the plain network three times as long.
    "rotmnist_z2cnn": dataclasses.replace(_ROTMNIST, epochs=300),
    "allcnnc_z2": _ALLCNN,
    "allcnnc_p4": _ALLCNN,
    "allcnnc_p4_full": _ALLCNN,
    "allcnnc_p4_channel": _ALLCNN,
    "allcnnc_p4_spatial": _ALLCNN,
    "allcnnc_p4_input": _ALLCNN,
    "allcnnc_p4m": _ALLCNN,
    "allcnnc_p4m_input": _ALLCNN,
    **{f"resnet29_{variant}": _RESNET29 for variant in resnet29.VARIANTS},
    **{f"resnet83_{variant}": _RESNET83 for variant in resnet29.VARIANTS},
    **{f"gsanet_rotmnist_{g}": _GSA_ROTMNIST for g in gsanet.VARIANTS},
    **{f"gsanet_cifar10_{g}": _GSA_CIFAR10 for g in gsanet.VARIANTS},
    **{f"gsanet_pcam_{g}": _GSA_PCAM for g in gsanet.VARIANTS},
    "resnet44_z2": _RESNET44,
    "resnet44_p4m": _RESNET44,
    "resnet44_p4m_input": _RESNET44,
    "pcam_densenet_z2": _PCAM,
    "pcam_densenet_p4": _PCAM,
    "pcam_densenet_p4_input": _PCAM,
    "pcam_densenet_p4m": _PCAM,
    "pcam_densenet_p4m_input": _PCAM,
    **_family("acmix_resnet", _ACMIX_RESNET),
    **_family("acmix_san", _ACMIX_SAN),
    **_family("acmix_pvt", _ACMIX_PVT),
    **_family("acmix_swin", _ACMIX_SWIN),
    **_family("acmix_swin_tiny_cifar10", _ACMIX_SWIN_CIFAR10),
}


def list_recipes() -> list[str]:
    """Names of the networks that have a recipe."""
    return sorted(_RECIPES)


def get_recipe(model: str) -> Recipe:
    """The protocol with which the authors train the network `model`.

    Published, or where its `source` says so recalled.
    """
    return _RECIPES[_checks.known_name(model, "recipe", list_recipes())]
