"""Independent NumPy forms, slow and literal: loops over the group.

They use nothing of the package: quarter turns are `np.rot90`, mirrors are
reversed columns, products of elements are arithmetic on (turns, mirrored).
"""

from oracles.acmix import acmix
from oracles.acmix import patchwise_acmix
from oracles.acmix import reflected
from oracles.acmix import spatial_reduction_acmix
from oracles.attentive import attentive_conv
from oracles.attentive import co_attentive_conv
from oracles.attentive import input_attention
from oracles.attentive import sigmoid
from oracles.attentive import squeeze_excite
from oracles.convolution import correlate
from oracles.convolution import group_conv
from oracles.convolution import group_conv_transpose
from oracles.convolution import group_depthwise_conv
from oracles.convolution import group_linear
from oracles.convolution import lifting_conv
from oracles.convolution import pool
from oracles.convolution import upsample
from oracles.self_attention import encoder
from oracles.self_attention import group_self_attention
from oracles.self_attention import multi_head_attention
from oracles.turns import act
from oracles.turns import act_on_kernel
from oracles.turns import harmonics
from oracles.turns import offset_matrix
from oracles.turns import order
from oracles.turns import relative
from oracles.turns import split
from oracles.turns import steer
from oracles.turns import turn
from oracles.vectors import act_on_vectors
from oracles.vectors import vector_matrix
from oracles.vectors import vectors
from oracles.windows import affine_attention
from oracles.windows import affine_query
from oracles.windows import window_weights

__all__ = [
    "acmix",
    "act",
    "act_on_kernel",
    "act_on_vectors",
    "affine_attention",
    "affine_query",
    "attentive_conv",
    "co_attentive_conv",
    "correlate",
    "encoder",
    "group_conv",
    "group_conv_transpose",
    "group_depthwise_conv",
    "group_linear",
    "group_self_attention",
    "harmonics",
    "input_attention",
    "lifting_conv",
    "multi_head_attention",
    "offset_matrix",
    "order",
    "patchwise_acmix",
    "pool",
    "reflected",
    "relative",
    "sigmoid",
    "spatial_reduction_acmix",
    "split",
    "squeeze_excite",
    "steer",
    "turn",
    "upsample",
    "vector_matrix",
    "vectors",
    "window_weights",
]
