"""The mathematics: stateless functions on tensors, in `keras.ops` only."""

from keras_equiattn.ops.action import group_action
from keras_equiattn.ops.convolution import group_conv
from keras_equiattn.ops.convolution import lifting_conv
from keras_equiattn.ops.exactness import is_exact
from keras_equiattn.ops.kernels import kernel_orbit
from keras_equiattn.ops.pooling import group_pool
from keras_equiattn.ops.pooling import spatial_pool

__all__ = [
    "group_action",
    "group_conv",
    "group_pool",
    "is_exact",
    "kernel_orbit",
    "lifting_conv",
    "spatial_pool",
]
