"""The public layers: they own weights and configuration, and call `ops`.

Mathematics does not belong here: it is in the functions of
`keras_equiattn.ops`, which do not depend on layers. Networks do not belong here
either, and no layer may depend on one: they are in
`keras_equiattn.applications`.
"""

from keras_equiattn.layers.acmix.grid import ACmix2D
from keras_equiattn.layers.acmix.grid import FoldedACmix2D
from keras_equiattn.layers.acmix.patchwise import PatchwiseACmix2D
from keras_equiattn.layers.acmix.spatial_reduction import (
    SpatialReductionACmix2D,
)
from keras_equiattn.layers.acmix.window import WindowACmix2D
from keras_equiattn.layers.attentive.convolution import AttentiveGroupConv2D
from keras_equiattn.layers.attentive.convolution import AttentiveLiftingConv2D
from keras_equiattn.layers.attentive.input_attention import (
    CoAttentiveGroupConv2D,
)
from keras_equiattn.layers.attentive.input_attention import (
    CoAttentiveLiftingConv2D,
)
from keras_equiattn.layers.attentive.input_attention import InputAttention
from keras_equiattn.layers.convolution import GroupConv2D
from keras_equiattn.layers.convolution import GroupConv2DTranspose
from keras_equiattn.layers.convolution import LiftingConv2D
from keras_equiattn.layers.dense import GroupDense
from keras_equiattn.layers.depthwise import GroupDepthwiseConv2D
from keras_equiattn.layers.depthwise import GroupSeparableConv2D
from keras_equiattn.layers.dropout import GroupDropout
from keras_equiattn.layers.group_self_attention import GroupSelfAttention2D
from keras_equiattn.layers.group_self_attention import LiftingSelfAttention2D
from keras_equiattn.layers.multi_head_attention import GroupMultiHeadAttention2D
from keras_equiattn.layers.pooling import GlobalSpatialPooling2D
from keras_equiattn.layers.pooling import GroupPooling
from keras_equiattn.layers.pooling import SpatialPooling2D
from keras_equiattn.layers.position_encoding import RelativePositionEncoding
from keras_equiattn.layers.projection import GroupProjection
from keras_equiattn.layers.projection import GroupToAngle2D
from keras_equiattn.layers.projection import GroupToVector2D
from keras_equiattn.layers.resampling import SpatialPadding2D
from keras_equiattn.layers.resampling import SpatialUpSampling2D
from keras_equiattn.layers.squeeze_excite import SqueezeExcite
from keras_equiattn.layers.window_attention import AffineSelfConv2D
from keras_equiattn.layers.window_attention import SimpleAffineSelfConv2D
from keras_equiattn.layers.window_attention import StandAloneSelfAttention2D

__all__ = [
    "ACmix2D",
    "AffineSelfConv2D",
    "AttentiveGroupConv2D",
    "AttentiveLiftingConv2D",
    "CoAttentiveGroupConv2D",
    "CoAttentiveLiftingConv2D",
    "FoldedACmix2D",
    "GlobalSpatialPooling2D",
    "GroupConv2D",
    "GroupConv2DTranspose",
    "GroupDense",
    "GroupDepthwiseConv2D",
    "GroupDropout",
    "GroupMultiHeadAttention2D",
    "GroupPooling",
    "GroupProjection",
    "GroupSelfAttention2D",
    "GroupSeparableConv2D",
    "GroupToAngle2D",
    "GroupToVector2D",
    "InputAttention",
    "LiftingConv2D",
    "LiftingSelfAttention2D",
    "PatchwiseACmix2D",
    "RelativePositionEncoding",
    "SimpleAffineSelfConv2D",
    "SpatialPadding2D",
    "SpatialPooling2D",
    "SpatialReductionACmix2D",
    "SpatialUpSampling2D",
    "SqueezeExcite",
    "StandAloneSelfAttention2D",
    "WindowACmix2D",
]
