"""Attention or evidence in an image, as one map of the size of the image."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_equiattn import _checks
from keras_equiattn.visualization import borders
from keras_equiattn.visualization import drawing
from keras_equiattn.visualization import sites as attention_sites
from keras_equiattn.visualization.evidence import evidence
from keras_equiattn.visualization.fields import Field
from keras_equiattn.visualization.fields import limits
from keras_equiattn.visualization.fields import most_varied
from keras_equiattn.visualization.sites import Maps
from keras_equiattn.visualization.sites import Pitch
from keras_equiattn.visualization.sites import Site
from keras_equiattn.visualization.sites import Sites

BORDERS = ("mask", "keep")
# The colours of attention, and of evidence for and against a class.
COLORMAPS = ("viridis", "RdBu_r")


def attention_overlays(
    model: keras.Model,
    images: Any,
    layer: str | None = None,
    class_index: int | None = None,
    border: str = "mask",
) -> np.ndarray:
    """Returns one map for each image, as large as the image.

    Without a class it is the effective attention of a layer, as a mean over
    channels and poses. With a class it is evidence: how much the features that
    the layer lets through speak for this class at each pixel, and where they
    are negative, against it. It is the output of the layer times the gradient
    of the score of the class, less the mean score of all classes, added up over
    channels and poses: by how much the score would grow, to first order, if
    the features there grew.

    Maps that are smaller than the image are interpolated linearly.

    Args:
        model: see `attention_maps`. For evidence its output is scores, the
            classes on the last axis; logits rather than probabilities, whose
            gradients vanish where the network is sure.
        images: a batch, of the rank that the model takes.
        layer: name of a layer, as in `attention_maps`; None takes the one
            whose attention varies most over space.
        class_index: the class to show evidence for; None shows attention.
        border: "mask" leaves out positions whose receptive field reaches
            beyond the image, where a network sees the zeros of the padding and
            attends to the frame; "keep" shows all.

    Returns:
        `(batch, height, width)`. It is NaN where `border` leaves a pixel out,
        and where the map of the layer does not reach.

    Symmetry:
        Invariant to the pose, equivariant on the plane: the overlay of an
        image that is acted on by the group is the overlay, turned and mirrored
        in the same way, to rounding where the network is exact.

    Raises:
        ValueError: see `attention_maps`; for classes that the model does not
            have; if no position is left because every one sees beyond the
            border; if it is not known what an operation before the layer sees.

    Example:
        >>> from keras_equiattn.applications import RotMNISTCNN
        >>> from keras_equiattn.visualization import attention_overlays
        >>> model = RotMNISTCNN(group="p4", attention="co", filters=2)
        >>> images = np.random.default_rng(0).uniform(size=(2, 28, 28, 1))
        >>> attention_overlays(model, images, "conv2").shape
        (2, 28, 28)
    """
    images = keras.ops.convert_to_numpy(images)
    return _Overlays.of(model, images, layer, class_index, border).values


def plot_overlays(
    model: keras.Model,
    images: Any,
    layer: str | None = None,
    class_index: int | None = None,
    border: str = "mask",
    titles: Sequence[str] | None = None,
    columns: int = 1,
    opacity: float = 0.6,
    size: float = 2.0,
) -> Any:
    """Draws images, and beside each the attention or evidence in it.

    The overlay lies on the image in shades of grey. All overlays share one
    scale of colours. Attention covers the image with the given opacity.
    Evidence for a class is red, evidence against it blue, and the image shows
    where there is little of either. A frame surrounds the positions that
    `border="mask"` keeps.

    Args:
        model: see `attention_overlays`.
        images: a batch, or one image without a batch axis.
        layer: see `attention_overlays`.
        class_index: see `attention_overlays`.
        border: see `attention_overlays`.
        titles: the text above each image.
        columns: pairs of panels in a row.
        opacity: the opacity of the colours over the image, from 0 to 1.
        size: the size of a panel, in inches.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        ImportError: without matplotlib.
        ValueError: see `attention_overlays`; if there are not as many titles as
            images.

    Example:
        >>> from keras_equiattn.applications import RotMNISTCNN
        >>> from keras_equiattn.visualization import plot_overlays
        >>> model = RotMNISTCNN(group="p4", attention="co", filters=2)
        >>> images = np.random.default_rng(0).uniform(size=(4, 28, 28, 1))
        >>> figure = plot_overlays(model, images, class_index=7, columns=2)
        >>> len(figure.axes)  # two rows of two pairs, and a colour bar
        9
    """
    figure_class, normalize = drawing.matplotlib_parts()
    opacity = _checks.number(
        opacity, "opacity", "a number from 0 to 1", lambda n: 0 <= n <= 1
    )
    columns = _checks.integer(columns, "columns")
    images = keras.ops.convert_to_numpy(images)
    if images.ndim == 3:
        images = images[None]
    titles = [""] * len(images) if titles is None else list(titles)
    if len(titles) != len(images):
        raise ValueError(
            f"`titles` must hold one for each of {len(images)} images. "
            f"Received: {len(titles)}"
        )
    found = _Overlays.of(model, images, layer, class_index, border)
    low, high, what = found.scale()
    columns = min(columns, len(images))
    rows = math.ceil(len(images) / columns)
    figure = figure_class(
        figsize=(1.3 + 2 * size * columns, 0.7 + 1.1 * size * rows),
        layout="constrained",
    )
    figure.suptitle(f"{model.name}, {found.layer}, {what}", fontsize="medium")
    grid = figure.subplots(rows, 2 * columns, squeeze=False)
    for panel in grid.ravel():
        panel.set_axis_off()
    pictures = drawing.displayed(found.images)
    panels = grid.reshape(-1, 2)[: len(images)]
    for (left, right), pixels, values, title in zip(
        panels, pictures, found.values, titles, strict=True
    ):
        drawing.draw_image(left, pixels)
        left.set_title(title, fontsize="medium", loc="left")
        grey = pixels.mean(-1, keepdims=True)  # colours are left to the overlay
        drawing.draw_image(right, 0.4 + 0.6 * grey)
        shown = ~np.isnan(values)
        strength = np.sqrt(np.abs(values) / high) if found.of_class else shown
        drawn = right.imshow(
            np.where(shown, values, 0),
            alpha=opacity * np.where(shown, strength, 0),
            cmap=COLORMAPS[found.of_class],
            norm=normalize(low, high),
        )
        _draw_frame(right, shown)
    bar = figure.colorbar(drawn, ax=grid, label=found.label(), aspect=40)
    bar.solids.set_alpha(1)
    return figure


def _draw_frame(panel: Any, shown: np.ndarray) -> None:
    """Draws a frame around the pixels that are shown, unless all are."""
    if shown.all():
        return
    rows, columns = np.flatnonzero(shown.any(1)), np.flatnonzero(shown.any(0))
    top, bottom = rows[0] - 0.5, rows[-1] + 0.5
    left, right = columns[0] - 0.5, columns[-1] + 0.5
    panel.plot(
        [left, right, right, left, left],
        [top, top, bottom, bottom, top],
        color="black",
        linewidth=0.8,
    )


@dataclasses.dataclass
class _Overlays:
    """Overlays of several images.

    Attributes:
        layer: name of the layer that they are of.
        images: `(batch, height, width, channels)`.
        values: `(batch, height, width)`, NaN where there are none.
        class_index: the class that they are evidence for; None for attention.
    """

    layer: str
    images: np.ndarray
    values: np.ndarray
    class_index: int | None

    @classmethod
    def of(
        cls,
        model: keras.Model,
        images: np.ndarray,
        layer: str | None,
        class_index: int | None,
        border: str,
    ) -> "_Overlays":
        mask = _checks.choice(border, "border", BORDERS) == "mask"
        sites = attention_sites.select(attention_sites.find(model), layer)
        chains = _chains(sites)
        shown = images
        if (
            next(iter(chains.values()))[-1].operation.data_format
            == "channels_first"
        ):
            shown = np.moveaxis(images, 1, -1)
        size = shown.shape[1], shown.shape[2]

        def spread(name: str, values: np.ndarray, of_output: bool) -> Any:
            chain = chains[name]
            kept = None
            if mask:
                kept = borders.inside(model, chain, size, of_output)
            pitch = chain[-1].pitches[of_output]
            return _spread(values, pitch, kept, size)

        if layer is None or class_index is None:
            maps = attention_sites.read(model, images, sites)
            attention = {
                name: spread(name, field.values.mean(-1), field.of_output)
                for name, field in _fields(chains, maps, layer).items()
            }
            layer = max(attention, key=lambda name: _variation(attention[name]))
            values = attention[layer]
        if class_index is not None:
            found = evidence(model, images, chains[layer], class_index)
            values = spread(layer, found, True)
        if np.isnan(values).all():
            raise ValueError(
                f"Every position of '{layer}' sees beyond the border of images "
                f"of size {size}: take an earlier layer, larger images or "
                '`border="keep"`.'
            )
        return cls(layer, shown, values, class_index)

    @property
    def of_class(self) -> bool:
        return self.class_index is not None

    def label(self) -> str:
        """The meaning of the colours."""
        return "evidence" if self.of_class else "attention"

    def scale(self) -> tuple[float, float, str]:
        """The ends of the scale of colours, and what a title says of it."""
        low, high = np.nanmin(self.values), np.nanmax(self.values)
        if self.of_class:
            high = max(abs(low), abs(high)) or 1.0
            return -high, high, f"evidence for class {self.class_index}"
        return limits(float(low), float(high))


def _chains(sites: Sites, prefix: str = "") -> dict[str, list[Site]]:
    """For each attentive layer the models around it and then its site."""
    chains = {}
    for name, site in sites.items():
        if not site.inner:
            chains[prefix + name] = [site]
        for inner, chain in _chains(site.inner, f"{prefix}{name}/").items():
            chains[inner] = [site, *chain]
    return chains


def _fields(
    chains: dict[str, list[Site]], maps: dict[str, Maps], layer: str | None
) -> dict[str, Field]:
    """The effective attention of the layers that have some.

    Raises:
        ValueError: if the one that was asked for, or every one, has none.
    """
    if layer is None:
        most_varied(maps)
        maps = {name: maps[name] for name in maps if "effective" in maps[name]}
    return {name: Field.of(name, chains[name][-1], maps[name]) for name in maps}


def _variation(values: np.ndarray) -> float:
    """The standard deviation over space where there are values, else -1."""
    return (
        -1.0
        if np.isnan(values).all()
        else float(np.nanstd(values, (1, 2)).max())
    )


def _spread(
    values: np.ndarray,
    pitch: Pitch,
    kept: borders.Inside | None,
    size: tuple[int, int],
) -> np.ndarray:
    """Interpolates maps to the size of the image.

    Args:
        values: `(batch, height, width)`, of maps that lie centred on the image.
        pitch: rows and columns of the image per pixel of the maps.
        kept: which rows and columns of the maps are used; None is all.
        size: height and width of the image.

    Returns:
        `(batch, *size)`, NaN around what is kept.
    """
    if kept is None:
        down, along = values.shape[1:]
        kept = np.ones(down, bool), np.ones(along, bool)
    rows, columns = (
        _interpolation(*axis) for axis in zip(size, pitch, kept, strict=True)
    )
    return np.einsum("Hh,bhw,Ww->bHW", rows, values.astype("float64"), columns)


def _interpolation(size: int, pitch: float, kept: np.ndarray) -> np.ndarray:
    """`(size, count)`: the share of each position of a map in each pixel.

    A pixel is interpolated between the two kept positions around its centre.
    Beyond the centre of the last one it takes the value of that one, and beyond
    its edge it is NaN.
    """
    count = len(kept)
    shares = np.full((size, count), np.nan)
    if not kept.any():
        return shares
    centres = (size - 1) / 2 + (np.arange(count) - (count - 1) / 2) * pitch
    centres = centres[kept]
    pixels = np.arange(size)
    edge = pitch / 2
    near = (pixels >= centres[0] - edge) & (pixels <= centres[-1] + edge)
    shares[near] = 0
    for place, unit in zip(
        np.flatnonzero(kept), np.eye(len(centres)), strict=True
    ):
        shares[near, place] = np.interp(pixels[near], centres, unit)
    return shares
