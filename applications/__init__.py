"""Networks of the papers, by constructor or by name."""

from collections.abc import Callable
from typing import Any
from typing import TypeAlias

import keras

from keras_equiattn import _checks
from keras_equiattn.applications import gsanet
from keras_equiattn.applications import resnet29
from keras_equiattn.applications.acmix_pvt import ACmixPVTSmall
from keras_equiattn.applications.acmix_pvt import ACmixPVTTiny
from keras_equiattn.applications.acmix_resnet import ACmixResNet26
from keras_equiattn.applications.acmix_resnet import ACmixResNet38
from keras_equiattn.applications.acmix_resnet import ACmixResNet50
from keras_equiattn.applications.acmix_san import ACmixSAN10
from keras_equiattn.applications.acmix_san import ACmixSAN15
from keras_equiattn.applications.acmix_san import ACmixSAN19
from keras_equiattn.applications.acmix_swin import ACmixSwinSmall
from keras_equiattn.applications.acmix_swin import ACmixSwinTiny
from keras_equiattn.applications.allcnn import AllCNNC
from keras_equiattn.applications.gsanet import GSANet
from keras_equiattn.applications.gsanet import GSANetCIFAR10
from keras_equiattn.applications.gsanet import GSANetPCam
from keras_equiattn.applications.gsanet import GSANetRotMNIST
from keras_equiattn.applications.pcam_densenet import PCamDenseNet
from keras_equiattn.applications.resnet29 import ResNet29
from keras_equiattn.applications.resnet29 import ResNet83
from keras_equiattn.applications.resnet44 import ResNet44
from keras_equiattn.applications.rotmnist import RotMNISTCNN

__all__ = [
    "ACmixPVTSmall",
    "ACmixPVTTiny",
    "ACmixResNet26",
    "ACmixResNet38",
    "ACmixResNet50",
    "ACmixSAN10",
    "ACmixSAN15",
    "ACmixSAN19",
    "ACmixSwinSmall",
    "ACmixSwinTiny",
    "AllCNNC",
    "GSANet",
    "GSANetCIFAR10",
    "GSANetPCam",
    "GSANetRotMNIST",
    "PCamDenseNet",
    "ResNet29",
    "ResNet44",
    "ResNet83",
    "RotMNISTCNN",
    "get_model",
    "list_models",
]

_Model: TypeAlias = tuple[Callable[..., keras.Model], dict[str, Any]]

# Constructor, name with a place for the group, and "group_attention" of each.
_FAMILIES = [
    (
        RotMNISTCNN,
        "rotmnist_{}cnn",
        "z2 p4 p4_full p4_channel p4_spatial p4_input p4_co p4m p8",
    ),
    (
        AllCNNC,
        "allcnnc_{}",
        "z2 p4 p4_full p4_channel p4_spatial p4_input p4m p4m_input",
    ),
    (ResNet44, "resnet44_{}", "z2 p4m p4m_input"),
    (PCamDenseNet, "pcam_densenet_{}", "z2 p4 p4_input p4m p4m_input"),
]
# Images of 32 pixels, patches and windows that fill them.
_CIFAR10: dict[str, Any] = {
    "input_shape": (32, 32, 3),
    "classes": 10,
    "patch_size": 2,
    "window_size": 4,
}
# Constructor and name with ACmix, mixer of the plain one, and arguments.
_MIXED: list[tuple[Callable[..., keras.Model], str, str, dict[str, Any]]] = [
    (ACmixResNet26, "acmix_resnet26", "conv", {}),
    (ACmixResNet38, "acmix_resnet38", "conv", {}),
    (ACmixResNet50, "acmix_resnet50", "conv", {}),
    (ACmixSAN10, "acmix_san10", "attention", {}),
    (ACmixSAN15, "acmix_san15", "attention", {}),
    (ACmixSAN19, "acmix_san19", "attention", {}),
    (ACmixPVTTiny, "acmix_pvt_tiny", "attention", {}),
    (ACmixPVTSmall, "acmix_pvt_small", "attention", {}),
    (ACmixSwinTiny, "acmix_swin_tiny", "attention", {}),
    (ACmixSwinSmall, "acmix_swin_small", "attention", {}),
    (ACmixSwinTiny, "acmix_swin_tiny_cifar10", "attention", _CIFAR10),
]


def _variants() -> dict[str, _Model]:
    """The families by group and attention, such as `allcnnc_p4m_input`."""
    models: dict[str, _Model] = {}
    for constructor, name, variants in _FAMILIES:
        for variant in variants.split():
            group, *attention = variant.split("_")
            models["_".join([name.format(group), *attention])] = (
                constructor,
                {"group": group, "attention": next(iter(attention), None)},
            )
    return models


_MODELS = _variants()
for _width in (11, 15, 19):  # the wider baselines
    _MODELS[f"rotmnist_p4cnn_big{_width}"] = (
        RotMNISTCNN,
        {"group": "p4", "filters": _width},
    )
for _variant in resnet29.VARIANTS:
    _group, *_parts = _variant.removesuffix("_se").split("_")
    for _constructor in (ResNet29, ResNet83):
        _MODELS[f"{_constructor.__name__.lower()}_{_variant}"] = (
            _constructor,
            {
                "group": _group,
                "mixer": "_".join(_parts) or "conv",
                "squeeze_excite": _variant.endswith("_se"),
            },
        )
_PRESETS: dict[str, Callable[..., keras.Model]] = {
    "rotmnist": GSANetRotMNIST,
    "cifar10": GSANetCIFAR10,
    "pcam": GSANetPCam,
}
for _preset, _network in _PRESETS.items():
    for _group in gsanet.VARIANTS:
        _MODELS[f"gsanet_{_preset}_{_group}"] = (_network, {"group": _group})
for _constructor, _name, _plain, _arguments in _MIXED:
    _MODELS[_name] = (_constructor, _arguments)
    _MODELS[f"{_name}_{_plain}"] = (
        _constructor,
        {"mixer": _plain, **_arguments},
    )


def list_models() -> list[str]:
    """Names that `get_model` takes."""
    return sorted(_MODELS)


def get_model(name: str, **overrides: Any) -> keras.Model:
    """Builds a registered network.

    Args:
        name: one of `list_models()`.
        **overrides: arguments of its constructor, in place of the registered
            ones: `classes`, `input_shape`, `normalization`, `weights`, ...

    Returns:
        A functional `keras.Model`.

    Raises:
        ValueError: for an unknown name, or from the constructor.
    """
    _checks.known_name(name, "model", list_models())
    constructor, arguments = _MODELS[name]
    return constructor(**{"name": name, **arguments, **overrides})
