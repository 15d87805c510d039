"""The mathematics: stateless functions on tensors, written in `keras.ops`.

There are three exceptions. `backend` alone imports TensorFlow, JAX or PyTorch,
for what `keras.ops` lacks or is slow at. `windows.views` and `windows.tiles`
are forms that run under PyTorch only, since they need its views with strides.
And one function of `numerics` calls PyTorch's own sum.

Nothing here may own weights. Only `backend.dynamo`, which hides layers from
PyTorch's compiler, knows what a layer is.

Some words mean the same in all of these modules:

    window       what a pixel sees; `Window` says where its neighbours lie
    neighbour    an entry of a window, at one offset from the pixel
    frame        an image in which adjacent queries have adjacent neighbours; an
                 image is cut into several frames if the window has strides
    planes       a tensor whose last axes are rows and columns, so that loops
                 run along the columns
    tile         a small rectangle of pixels whose queries meet the keys in one
                 product of matrices
    line         neighbours in one row, which are computed together
    block        what one step of a loop computes: some heads and rows of
                 attention, or some images of a batch; in `group.block_linear`,
                 the matrix of one irreducible representation
    written out  unrolled: the program has each term of a sum, and no loop
    recomputed   computed again in the backward pass instead of being kept

`queries`, `keys`, `values` and `weights` are those of attention. Each system
(`windows`, `pairs`, `responses`) orders their axes in its own way, and names
that order in one module: `windows.form`, `pairs.lines`, `responses.spec`.
"""

from keras_equiattn.ops.exactness import is_exact
from keras_equiattn.ops.geometry import Window
from keras_equiattn.ops.group.action import group_action
from keras_equiattn.ops.group.bases import steerable_basis
from keras_equiattn.ops.group.convolution import group_conv
from keras_equiattn.ops.group.convolution import group_conv_transpose
from keras_equiattn.ops.group.convolution import group_depthwise_conv
from keras_equiattn.ops.group.convolution import lifting_conv
from keras_equiattn.ops.group.directions import group_vectors
from keras_equiattn.ops.group.directions import vector_action
from keras_equiattn.ops.group.irreps import irreps
from keras_equiattn.ops.group.irreps import regular_basis
from keras_equiattn.ops.group.kernels import kernel_orbit
from keras_equiattn.ops.group.linear import group_linear
from keras_equiattn.ops.group.pooling import group_pool
from keras_equiattn.ops.group.pooling import spatial_pool
from keras_equiattn.ops.group.resampling import spatial_pad
from keras_equiattn.ops.group.resampling import spatial_upsample
from keras_equiattn.ops.multi_head import multi_head_attention
from keras_equiattn.ops.pairs.api import group_attention_weights
from keras_equiattn.ops.pairs.api import group_self_attention
from keras_equiattn.ops.papers.affine import affine_map
from keras_equiattn.ops.papers.affine import relative_positions
from keras_equiattn.ops.papers.input_attention import co_attention
from keras_equiattn.ops.papers.input_attention import input_attention
from keras_equiattn.ops.papers.squeeze_excite import squeeze_excite
from keras_equiattn.ops.responses.api import AttentionKernels
from keras_equiattn.ops.responses.api import attentive_group_conv
from keras_equiattn.ops.responses.api import attentive_lifting_conv
from keras_equiattn.ops.responses.api import response_attention
from keras_equiattn.ops.windows.api import AffineMap
from keras_equiattn.ops.windows.api import window_attention
from keras_equiattn.ops.windows.api import window_scores
from keras_equiattn.ops.windows.api import window_softmax
from keras_equiattn.ops.windows.api import window_sum

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
    "group_conv_transpose",
    "group_depthwise_conv",
    "group_linear",
    "group_pool",
    "group_self_attention",
    "group_vectors",
    "input_attention",
    "irreps",
    "is_exact",
    "kernel_orbit",
    "lifting_conv",
    "multi_head_attention",
    "regular_basis",
    "relative_positions",
    "response_attention",
    "spatial_pad",
    "spatial_pool",
    "spatial_upsample",
    "squeeze_excite",
    "steerable_basis",
    "vector_action",
    "window_attention",
    "window_scores",
    "window_softmax",
    "window_sum",
]
