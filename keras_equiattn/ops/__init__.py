"""The mathematics: stateless functions on tensors, in `keras.ops` only."""

from keras_equiattn.ops.action import group_action
from keras_equiattn.ops.affine_self_convolution import affine_map
from keras_equiattn.ops.affine_self_convolution import AffineMap
from keras_equiattn.ops.affine_self_convolution import group_linear
from keras_equiattn.ops.affine_self_convolution import relative_positions
from keras_equiattn.ops.affine_self_convolution import window_attention
from keras_equiattn.ops.attention import co_attention
from keras_equiattn.ops.attention import input_attention
from keras_equiattn.ops.attentive_convolution import AttentionKernels
from keras_equiattn.ops.attentive_convolution import attentive_group_conv
from keras_equiattn.ops.attentive_convolution import attentive_lifting_conv
from keras_equiattn.ops.attentive_convolution import response_attention
from keras_equiattn.ops.convolution import group_conv
from keras_equiattn.ops.convolution import lifting_conv
from keras_equiattn.ops.exactness import is_exact
from keras_equiattn.ops.group_self_attention import group_attention_weights
from keras_equiattn.ops.group_self_attention import group_self_attention
from keras_equiattn.ops.kernels import kernel_orbit
from keras_equiattn.ops.pooling import group_pool
from keras_equiattn.ops.pooling import spatial_pool
from keras_equiattn.ops.squeeze_excite import squeeze_excite
from keras_equiattn.ops.windows import Window
from keras_equiattn.ops.windows import window_scores
from keras_equiattn.ops.windows import window_softmax
from keras_equiattn.ops.windows import window_sum

__all__ = [
    "AffineMap",
    "AttentionKernels",
    "Window",
    "affine_map",
    "attentive_group_conv",
    "attentive_lifting_conv",
    "co_attention",
    "group_action",
    "group_attention_weights",
    "group_conv",
    "group_linear",
    "group_pool",
    "group_self_attention",
    "input_attention",
    "is_exact",
    "kernel_orbit",
    "lifting_conv",
    "relative_positions",
    "response_attention",
    "spatial_pool",
    "squeeze_excite",
    "window_attention",
    "window_scores",
    "window_softmax",
    "window_sum",
]
