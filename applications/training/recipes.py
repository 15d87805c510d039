"""How networks are trained: a recipe for each of them.

Most recipes are those of papers and their authors' code. Where the `source` of
a recipe says so, it is recalled from memory and not verified, or it is ours.
Options that are not given on the command line of `examples/train.py` are taken
from here.
"""

import dataclasses
import math

from keras_equiattn.applications import registry
from keras_equiattn.applications.training.recipe import learning_rate
from keras_equiattn.applications.training.recipe import make_loss
from keras_equiattn.applications.training.recipe import make_optimizer
from keras_equiattn.applications.training.recipe import Recipe

__all__ = [
    "Recipe",
    "get_recipe",
    "learning_rate",
    "list_recipes",
    "make_loss",
    "make_optimizer",
]

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

# On p4 the authors multiply sums over the group by pi / 2. Batch normalisation
# cancels the factor where it follows. Their attention on responses sees sums
# without it. Their other networks have such factors too; their effect has not
# been measured here, and the recipes leave them out.
_ROTMNIST_P4 = dataclasses.replace(
    _ROTMNIST,
    kernel_factors=(
        ("conv[2-7]_attention/spatial_kernel", math.pi / 2),
        ("conv[2-7]/attention_kernel", math.pi / 2),
        ("conv7/kernel", math.pi / 2),
        ("conv7/channel_kernel_1", 2 / math.pi),
        ("conv7/spatial_kernel", 2 / math.pi),
    ),
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

# The protocol is the same for CIFAR-100. Their rate rises from epoch to epoch
# of the warm-up, ours with every update.
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
    source="ours, based on that for ImageNet; no paper has this network",
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

_VIT = dataclasses.replace(
    _ACMIX_SWIN,
    source=(
        "recalled from Touvron et al. 2021, https://arxiv.org/abs/2012.12877, "
        "and not verified, without distillation, mixup, CutMix, RandAugment, "
        "random erasing, repeated augmentation and stochastic depth"
    ),
    warmup_epochs=5,
)
_VIT_SMALL = dataclasses.replace(
    _ACMIX_SWIN_CIFAR10,
    label_smoothing=0.0,
)


# By the names of networks, see `registry.list_models`. Where several patterns
# match a name, the last one counts.
_BY_PATTERN = {
    "rotmnist_*": _ROTMNIST,
    "rotmnist_p4cnn*": _ROTMNIST_P4,
    # The authors' code trains the plain network three times as long.
    "rotmnist_z2cnn": dataclasses.replace(_ROTMNIST, epochs=300),
    "allcnnc_*": _ALLCNN,
    "resnet44_*": _RESNET44,
    "pcam_densenet_*": _PCAM,
    "resnet29_*": _RESNET29,
    "resnet83_*": _RESNET83,
    "gsanet_rotmnist_*": _GSA_ROTMNIST,
    "gsanet_cifar10_*": _GSA_CIFAR10,
    "gsanet_pcam_*": _GSA_PCAM,
    "acmix_resnet*": _ACMIX_RESNET,
    "acmix_san*": _ACMIX_SAN,
    "acmix_pvt_*": _ACMIX_PVT,
    "acmix_swin_*": _ACMIX_SWIN,
    "acmix_swin_tiny_cifar10*": _ACMIX_SWIN_CIFAR10,
    "vit_*": _VIT,
    "vit_cifar10_*": _VIT_SMALL,
    "vit_pcam_*": dataclasses.replace(
        _VIT_SMALL,
        dataset="pcam",
        epochs=30,
        warmup_epochs=2,
        padding=0,
        validation_size=None,
    ),
}
_RECIPES = {
    name: recipe
    for pattern, recipe in _BY_PATTERN.items()
    for name in registry.list_models(pattern)
}


def list_recipes() -> list[str]:
    """Returns the names of the networks that have a recipe, sorted."""
    return sorted(_RECIPES)


def get_recipe(model: str) -> Recipe:
    """Returns the protocol with which a network is trained.

    Its `source` says where it comes from: a paper and its authors' code, memory
    or this library.

    Args:
        model: name of a network, see `list_recipes`.

    Returns:
        The recipe.

    Raises:
        ValueError: if there is no network of this name, or no recipe for it.
    """
    if model not in list_recipes():
        name = registry.check_name(model)
        raise ValueError(
            f"There is no recipe for the model '{name}'. The models that have "
            "one are what `list_recipes()` returns."
        )
    return _RECIPES[model]
