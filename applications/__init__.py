"""Networks of the papers, the data that they take, and their training.

    >>> from keras_equiattn import applications
    >>> applications.list_models("rotmnist_p4cnn_b*")
    ['rotmnist_p4cnn_big11', 'rotmnist_p4cnn_big15', 'rotmnist_p4cnn_big19']
    >>> model = applications.get_model("rotmnist_p4cnn", classes=10)

- `networks` has one file for each family; `registry` finds them by name.
- `data` loads, shuffles and augments the datasets.
- `training` has the recipes of the papers and what carries them out.
- `presets` loads and saves networks with their weights; `weights` holds those
  that are shipped.

This file exports names, and defines nothing.
"""

from keras_equiattn.applications.networks.acmix_pvt import ACmixPVTSmall
from keras_equiattn.applications.networks.acmix_pvt import ACmixPVTTiny
from keras_equiattn.applications.networks.acmix_resnet import ACmixResNet26
from keras_equiattn.applications.networks.acmix_resnet import ACmixResNet38
from keras_equiattn.applications.networks.acmix_resnet import ACmixResNet50
from keras_equiattn.applications.networks.acmix_san import ACmixSAN10
from keras_equiattn.applications.networks.acmix_san import ACmixSAN15
from keras_equiattn.applications.networks.acmix_san import ACmixSAN19
from keras_equiattn.applications.networks.acmix_swin import ACmixSwinSmall
from keras_equiattn.applications.networks.acmix_swin import ACmixSwinTiny
from keras_equiattn.applications.networks.allcnn import AllCNNC
from keras_equiattn.applications.networks.group_vit import GroupViT
from keras_equiattn.applications.networks.gsanet import GSANet
from keras_equiattn.applications.networks.gsanet import GSANetCIFAR10
from keras_equiattn.applications.networks.gsanet import GSANetPCam
from keras_equiattn.applications.networks.gsanet import GSANetRotMNIST
from keras_equiattn.applications.networks.octic_vit import OcticViT
from keras_equiattn.applications.networks.pcam_densenet import PCamDenseNet
from keras_equiattn.applications.networks.resnet29 import ResNet29
from keras_equiattn.applications.networks.resnet29 import ResNet83
from keras_equiattn.applications.networks.resnet44 import ResNet44
from keras_equiattn.applications.networks.rotmnist import RotMNISTCNN
from keras_equiattn.applications.networks.unet import GroupUNet
from keras_equiattn.applications.presets import from_preset
from keras_equiattn.applications.presets import list_presets
from keras_equiattn.applications.presets import save_to_preset
from keras_equiattn.applications.registry import converter_of
from keras_equiattn.applications.registry import get_model
from keras_equiattn.applications.registry import list_models

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
    "GroupUNet",
    "GroupViT",
    "OcticViT",
    "PCamDenseNet",
    "ResNet29",
    "ResNet44",
    "ResNet83",
    "RotMNISTCNN",
    "converter_of",
    "from_preset",
    "get_model",
    "list_models",
    "list_presets",
    "save_to_preset",
]
