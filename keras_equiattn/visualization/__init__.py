"""Attention of a network: the maps of its layers, and pictures of them.

    maps = attention_maps(model, images)
    figure = plot_attention_maps(model, images[0])
    figure.savefig("maps.png")
    figure = plot_overlays(model, images, class_index=1)

Arrays come first, pictures second: `sites` finds the layers and reads their
maps, `borders` says which positions see beyond the image, `evidence` what
speaks for a class, and everything else draws. Pictures need matplotlib, the
extra `viz`; arrays do not. Nothing here may train or change a network.
"""

from keras_equiattn.visualization.drawing import element_name
from keras_equiattn.visualization.maps import attention_maps
from keras_equiattn.visualization.maps import plot_attention_maps
from keras_equiattn.visualization.overlays import attention_overlays
from keras_equiattn.visualization.overlays import plot_overlays
from keras_equiattn.visualization.rates import path_rates
from keras_equiattn.visualization.rates import plot_path_rates
from keras_equiattn.visualization.reports import plot_equivariance_report
from keras_equiattn.visualization.window_pictures import pixel_attention
from keras_equiattn.visualization.window_pictures import plot_window_attention

__all__ = [
    "attention_maps",
    "attention_overlays",
    "element_name",
    "path_rates",
    "pixel_attention",
    "plot_attention_maps",
    "plot_equivariance_report",
    "plot_overlays",
    "plot_path_rates",
    "plot_window_attention",
]
