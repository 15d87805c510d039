"""The attention of one pixel, and pictures of it."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from keras_equiattn import _checks
from keras_equiattn import groups
from keras_equiattn.visualization import drawing
from keras_equiattn.visualization import sites as attention_sites


def pixel_attention(
    model: keras.Model,
    image: Any,
    pixel: tuple[int, int],
    layer: str | None = None,
) -> np.ndarray:
    """The weights with which one pixel of an image attends in a layer.

    Args:
        model: see `attention_maps`.
        image: `(height, width, channels)`, for a model that takes images;
            with channels first if that is the data format of the layer.
        pixel: `(row, column)` in the image. After pooling it is the one of the
            smaller map that covers it. Crops, and convolutions without
            padding, leave a map that covers the middle of the image alone.
        layer: name of a layer whose pixels attend to windows or to the whole
            image, as `attention_maps` returns it; None is the first.

    Returns:
        `(order, heads, key_order, rows, columns)`: weights of every group
        element and head, for the group elements of the input (`key_order` is
        one where the layer does not tell them apart) and the places in the
        window or in the image.

    Symmetry:
        The turned pixel of a turned image attends to the same pixels, turned:
        windows are acted on like feature maps, group elements are permuted.

    Raises:
        ValueError: see `plot_window_attention`.

    Example:
        >>> from keras_equiattn.layers import LiftingSelfAttention2D
        >>> from keras_equiattn.visualization import pixel_attention
        >>> inputs = keras.Input((8, 8, 3))
        >>> outputs = LiftingSelfAttention2D(4, 2, num_heads=2)(inputs)
        >>> model = keras.Model(inputs, outputs)
        >>> pixel_attention(model, np.ones((8, 8, 3)), (4, 4)).shape
        (4, 2, 1, 5, 5)
    """
    image = drawing.one_image(image)
    return _PixelAttention.of(model, image, pixel, layer).weights


def plot_window_attention(
    model: keras.Model,
    image: Any,
    pixel: tuple[int, int],
    layer: str | None = None,
    elements: Iterable[int] | None = None,
    key_element: int | None = None,
    zoom: bool = True,
    colormap: str = "viridis",
    opacity: float = 0.7,
    size: float = 1.5,
) -> Any:
    """Draws which neighbours of one pixel each head of a layer attends to.

    There is a row for each group element `h` of the layer, and in it a panel
    for each head. It shows the window of the pixel, drawn where its neighbours
    lie in the image, in the colours of their weights. They add up to one, in
    `GroupSelfAttention2D` to the order of the group, in
    `SpatialReductionACmix2D` with tokens to one minus the weights of these; in
    `PatchwiseACmix2D` they are of any sign and size. The pixel itself has a
    frame. After pooling it is the one of the smaller map that covers the given
    pixel, and the window is larger. Where pixels attend to the whole image,
    that is the window.

    Args:
        model: see `attention_maps`.
        image: `(height, width, channels)`, for a model that takes images;
            with channels first if that is the data format of the layer.
        pixel: `(row, column)` in the image, where the map of the layer covers
            it, see `pixel_attention`.
        layer: name of a layer whose pixels attend to windows or to the whole
            image, as `attention_maps` returns it; None is the first.
        elements: group elements `h` to show; None means all.
        key_element: the group element of the input whose weights are shown,
            for layers that weigh each of them; None adds them up.
        zoom: True shows the surroundings of the window, and False shows the
            whole image.
        colormap: matplotlib's name of the colours of the weights.
        opacity: the opacity of the weights over the image, from 0 to 1.
        size: the size of a panel, in inches.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        ImportError: without matplotlib.
        ValueError: for pixels outside of the image or of what the map covers
            of it, unknown layers or elements, and models without attention to
            windows.

    Example:
        >>> from keras_equiattn.layers import AffineSelfConv2D
        >>> from keras_equiattn.visualization import plot_window_attention
        >>> inputs = keras.Input((8, 8, 3))
        >>> outputs = AffineSelfConv2D(4, 3, num_heads=2)(inputs)
        >>> model = keras.Model(inputs, outputs)
        >>> image = np.random.default_rng(0).uniform(size=(8, 8, 3))
        >>> figure = plot_window_attention(model, image, (4, 4))
        >>> len(figure.axes)  # the image, two heads and a colour bar
        4
    """
    figure_class, normalize = drawing.matplotlib_parts()
    image = drawing.one_image(image)
    opacity = _checks.number(
        opacity, "opacity", "a number from 0 to 1", lambda n: 0 <= n <= 1
    )
    zoom = _checks.flag(zoom, "zoom")
    size = _checks.number(size, "size", "a positive number", lambda n: n > 0)
    found = _PixelAttention.of(model, image, pixel, layer)
    group, place, pixels = found.group, found.place, found.pixels
    weights = found.of_key_element(key_element)  # (h, head, row, column)

    shown = list(range(group.order))
    if elements is not None:
        shown = [group.check_element(element) for element in elements]
    if not shown:
        raise ValueError("`elements` must hold one or more. Received: none")
    heads = weights.shape[1]
    figure = figure_class(
        figsize=(1.3 + size * (1 + heads), 0.8 + size * len(shown)),
        layout="constrained",
    )
    title = f"{model.name}, {found.layer}\npixel {place.pixel}"
    if key_element is not None:
        title += f", input at {drawing.element_name(group, key_element)}"
    figure.suptitle(title)
    grid = figure.subplots(len(shown), 1 + heads, squeeze=False)
    lowest = min(0.0, float(weights.min()))
    norm = normalize(lowest, float(weights.max()))
    colors = {"cmap": colormap, "norm": norm}
    pixels = drawing.displayed(pixels[None])[0]
    grey = pixels.mean(-1, keepdims=True)  # colours are left to the weights
    drawn = None
    for h, panels in zip(shown, grid, strict=True):
        drawing.draw_image(panels[0], pixels)
        panels[0].set_ylabel(f"h: {drawing.element_name(group, h)}")
        for head, panel in enumerate(panels[1:]):
            drawing.draw_image(panel, 0.4 + 0.6 * grey)
            drawn = panel.imshow(
                weights[h, head],
                extent=place.window,
                alpha=opacity,
                interpolation="nearest",
                **colors,
            )
            drawing.frame(panel, pixels)
        for panel in panels:
            place.mark(panel)
            if zoom:
                place.zoom(panel)
    for panel, text in zip(
        grid[0], ["image", *(f"head {n}" for n in range(heads))], strict=True
    ):
        panel.set_title(text, fontsize="medium")
    figure.colorbar(drawn, ax=grid, label="attention weight")
    return figure


@dataclasses.dataclass
class _PixelAttention:
    """The attention of a pixel in a layer.

    Attributes:
        layer: name of the layer.
        group: the group of the layer.
        place: the place of the pixel and its window.
        pixels: the image, channels last.
        weights: see `pixel_attention`.
    """

    layer: str
    group: groups.Group
    place: drawing.Place
    pixels: np.ndarray
    weights: np.ndarray

    @classmethod
    def of(
        cls,
        model: keras.Model,
        image: np.ndarray,
        pixel: tuple[int, int],
        layer: str | None,
    ) -> "_PixelAttention":
        sites = attention_sites.find(model)
        windowed = [
            name
            for name, site in attention_sites.leaves(sites).items()
            if hasattr(site.operation, "window")
        ]
        if not windowed:
            raise ValueError(
                f"Model '{model.name}' has no layer that attends to windows."
            )
        layer = _checks.known_name(
            windowed[0] if layer is None else layer,
            "layer with a window",
            windowed,
            plural="layers with a window",
        )
        sites = attention_sites.select(sites, layer)
        site = attention_sites.leaves(sites)[layer]
        first = site.operation.data_format == "channels_first"
        pixels = np.moveaxis(image, 0, -1) if first else image
        place = drawing.Place.of(site, pixels.shape[:2], pixel)
        maps = attention_sites.read(model, image[None], sites, place.query)
        found = maps[layer]
        weights = found["window" if "window" in found else "image"][0]
        if weights.ndim == 4:  # (h, head, row, column)
            weights = weights[:, :, None]
        return cls(layer, site.operation.group, place, pixels, weights)

    def of_key_element(self, element: int | None) -> np.ndarray:
        """The weights for one group element of the input; None is the sum."""
        count = self.weights.shape[2]
        if element is None:
            return self.weights.sum(axis=2)
        if count < self.group.order:
            raise ValueError(
                f"`key_element` must be None: '{self.layer}' does not weigh "
                f"the group elements of its input. Received: {element!r}"
            )
        return self.weights[:, :, self.group.check_element(element)]
