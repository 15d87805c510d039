"""Keras layers: their weights and configuration; the mathematics is in ops."""

from keras_equiattn.layers.convolution import GroupConv2D
from keras_equiattn.layers.convolution import LiftingConv2D
from keras_equiattn.layers.pooling import GroupPooling
from keras_equiattn.layers.pooling import SpatialPooling2D

__all__ = [
    "GroupConv2D",
    "GroupPooling",
    "LiftingConv2D",
    "SpatialPooling2D",
]
