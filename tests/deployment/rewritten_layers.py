"""Layers that `plain` rewrites as layers of Keras, by what each tests."""

from keras_equiattn import layers
from keras_equiattn.layers import GroupConv2D

LAYERS = {
    "convolution": lambda g: GroupConv2D(4, 3, padding="same", group=g),
    "strides": lambda g: GroupConv2D(4, 3, strides=2, group=g),
    "dilation": lambda g: GroupConv2D(
        4, 3, dilation_rate=2, use_bias=False, group=g
    ),
    "softmax": lambda g: GroupConv2D(4, 1, activation="softmax", group=g),
    "transposed": lambda g: layers.GroupConv2DTranspose(
        4, 4, strides=2, padding="same", activation="silu", group=g
    ),
    "depthwise": lambda g: layers.GroupDepthwiseConv2D(
        3, depth_multiplier=2, activation="relu", group=g
    ),
    "separable": lambda g: layers.GroupSeparableConv2D(
        4, 3, padding="same", activation="log_softmax", group=g
    ),
    "maximum": lambda g: layers.SpatialPooling2D(3, 2, group=g),
    "mean": lambda g: layers.SpatialPooling2D(3, 1, "mean", group=g),
    "binomial": lambda g: layers.SpatialPooling2D(3, 2, "binomial", group=g),
    "global maximum": lambda g: layers.GlobalSpatialPooling2D("max", group=g),
    "global mean": lambda g: layers.GlobalSpatialPooling2D("mean", group=g),
    "nearest": lambda g: layers.SpatialUpSampling2D(2, group=g),
    "bilinear": lambda g: layers.SpatialUpSampling2D(3, "bilinear", group=g),
    "zeros": lambda g: layers.SpatialPadding2D(1, group=g),
    "reflect": lambda g: layers.SpatialPadding2D(2, "reflect", group=g),
    "wrap": lambda g: layers.SpatialPadding2D(2, "wrap", group=g),
    "group maximum": lambda g: layers.GroupPooling(),
    "group mean": lambda g: layers.GroupPooling("mean"),
    "projection": lambda g: layers.GroupProjection(group=g),
    "learned": lambda g: layers.GroupProjection("learned", group=g),
    "dropout": lambda g: layers.GroupDropout(0.5),
    "squeeze_excite": lambda g: layers.SqueezeExcite(1, group=g),
    "input_attention": lambda g: layers.InputAttention(
        g, attention_kernel_size=3, attention_dilation_rate=2
    ),
    "channel": lambda g: layers.InputAttention(g, attention="channel"),
    "spatial": lambda g: layers.InputAttention(g, attention="spatial"),
    "co": lambda g: layers.CoAttentiveGroupConv2D(4, 3, group=g),
}
