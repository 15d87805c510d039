"""Maps of attention of a whole network, and their picture in all poses."""

import dataclasses
import math
import warnings
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from keras_equiattn import _checks
from keras_equiattn import groups
from keras_equiattn.ops.group.action import group_action
from keras_equiattn.visualization import drawing
from keras_equiattn.visualization import sites as attention_sites
from keras_equiattn.visualization.drawing import element_name
from keras_equiattn.visualization.fields import Field
from keras_equiattn.visualization.fields import limits
from keras_equiattn.visualization.fields import most_varied
from keras_equiattn.visualization.fields import UNIFORM
from keras_equiattn.visualization.sites import Maps

Limits = tuple[float, float]

# The approximate number of positions with arrows along the shorter side.
ARROWS = 5
# The colours of the arrows of rotations and of mirrored elements.
COLORS = ("tab:orange", "deepskyblue")
# Turns the arrows of mirrored elements away from those of the others.
TILT = np.pi / 12


def attention_maps(
    model: keras.Model,
    images: Any,
    query: tuple[int, int] | None = None,
    layers: str | Iterable[str] | None = None,
) -> dict[str, Maps]:
    """Returns the maps of every attentive layer of a model for some images.

    The model runs once, in inference mode, compiled as `predict` compiles it;
    on the way each of these layers is called with
    `return_attention_maps=True`. The model itself stays as it is. Layers of
    ACmix with `paths="convolution"` attend to nothing and are left out.

    Args:
        model: a functional or Sequential model, or one of several models
            nested in each other, with one input.
        images: a batch, of the rank that the model takes.
        query: `(row, column)` of one position of the output. Layers whose
            whole map is too large to return give all of it there; see the
            documentation of the layer.
        layers: names to return, as in the result; None means all.

    Returns:
        A dict from names of layers to dicts of NumPy arrays by name, in the
        order in which the model calls the layers. A layer `inner` of a nested
        model `outer` is `"outer/inner"`. A layer that is called more than once
        comes up each time, from the second on as `"name#2"`. "effective" is
        `(batch, height, width, h, ...)` for layers on a group, `(batch,
        height, width, channels)` for attention on images. Layers that attend
        to windows have "window" in its place, those that attend to the whole
        image, and `WindowACmix2D`, "image": the weights of what each pixel
        sees, for each `h` and head. `SpatialReductionACmix2D` with tokens has
        "tokens" beside "image". Each layer documents its arrays. Half
        precision is returned as float32.

    Warns:
        UserWarning: for each layer with a map that holds one value everywhere,
            to within 1e-3: it says nothing about the images.

    Symmetry:
        Each map is a feature map on the group, an image or constant in space,
        and transforms like one. In "window" and "image" what a pixel sees is
        acted on too: places turn, and group elements of the input permute.

    Raises:
        ValueError: if the model has no graph (a subclassed model, a Sequential
            one that is not built), no attentive layer or several inputs; for a
            layer that contains attentive layers in its own code; for unknown
            names in `layers`; if the images have another rank than the input.

    Example:
        >>> from keras_equiattn.applications import RotMNISTCNN
        >>> from keras_equiattn.visualization import attention_maps
        >>> model = RotMNISTCNN("p4", attention="co", weights="rot_mnist")
        >>> images = np.random.default_rng(0).uniform(size=(1, 28, 28, 1))
        >>> maps = attention_maps(model, images)
        >>> len(maps)
        7
        >>> found = maps["conv2"]
        >>> sorted(found)
        ['effective', 'spatial']
        >>> found["spatial"].shape
        (1, 26, 26, 4)
    """
    sites = attention_sites.select(attention_sites.find(model), layers)
    found = attention_sites.read(model, images, sites, query)
    for layer, maps in found.items():
        uniform = [name for name in maps if _is_uniform(maps[name])]
        if uniform:
            warnings.warn(_uniform_message(layer, uniform), stacklevel=2)
    return found


def plot_attention_maps(
    model: keras.Model,
    image: Any,
    layer: str | None = None,
    group_element: int | None = None,
    elements: Iterable[int] | None = None,
    arrows: bool | None = None,
    colormap: str = "viridis",
    opacity: float = 0.7,
    size: float = 1.5,
) -> Any:
    """Draws the effective attention of one layer over a turned image.

    There is a row for each element `g` that acts on the image. It shows the
    image, arrows that stand for all group elements `h` of the map at once, and
    the map for each `h`. The picture shows that the maps turn with the image:
    the panel `(g, g h)` is the panel `(identity, h)` acted on by `g`.

    Maps of several channels are averaged over them. A map smaller than the
    image is centred on it. Strides before it widen its pixels, and upsampling
    narrows them. All panels share one colour scale, from the least to the
    largest value shown; the title says which values those are, and says
    "uniform" where they differ by less than 1e-3: the layer then weighs all
    pixels and poses alike.

    Args:
        model: see `attention_maps`.
        image: `(height, width, channels)`, for a model that takes images;
            with a batch axis of size one if you like. One or three channels
            in [0, 1] are shown as they are; values outside are rescaled and
            other numbers of channels averaged, for the picture alone.
        layer: name of the layer, as in `attention_maps`; None takes the one
            whose map varies most over space.
        group_element: the one `h` to show; None shows all.
        elements: indices of the `g` to act with; None means all that map the
            pixel grid, and the shape of the image, onto themselves.
        arrows: whether to draw the arrows: at each position of a coarse grid
            one for each `h`, in the direction into which `h` turns "up". Its
            length goes from zero for the least value to half the spacing for
            the largest. In groups with mirrors the arrows are tilted to one
            side, those of mirrored elements to the other. None draws them where
            the group holds rotations.
        colormap: matplotlib's name of the colours.
        opacity: the opacity of the map over the image; 1 hides the image.
        size: the size of one panel, in inches.

    Returns:
        A `matplotlib.figure.Figure` that belongs to no window and no pyplot.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: see `attention_maps`; for an image of another rank or
            several images, unknown layers, layers without an effective map,
            `h` where the map has no group axis, elements that turn a rectangle
            on its side.

    Example:
        >>> from keras_equiattn.applications import RotMNISTCNN
        >>> from keras_equiattn.visualization import plot_attention_maps
        >>> model = RotMNISTCNN(group="p4", attention="input", filters=2)
        >>> image = np.random.default_rng(0).uniform(size=(28, 28, 1))
        >>> figure = plot_attention_maps(model, image, "conv2_attention")
        >>> len(figure.axes)  # four rows of six panels, and a colour bar
        25
    """
    figure_class, _ = drawing.matplotlib_parts()
    opacity = _checks.number(
        opacity, "opacity", "a number from 0 to 1", lambda n: 0 <= n <= 1
    )
    poses = _Poses.of(model, drawing.one_image(image), layer, elements)
    columns = _Columns.of(poses, group_element, arrows)
    values = poses.field.values
    low, high, range_text = limits(float(values.min()), float(values.max()))
    figure = figure_class(
        figsize=(
            1.3 + size * len(columns.titles),
            0.8 + size * len(poses.elements),
        ),
        layout="constrained",
    )
    figure.suptitle(f"{model.name}, {poses.field.layer}\n{range_text}")
    shape = len(poses.elements), len(columns.titles)
    grid = figure.subplots(*shape, squeeze=False)
    for panel, text in zip(grid[0], columns.titles, strict=True):
        panel.set_title(text, fontsize="medium")
    for row, panels in enumerate(grid):
        drawn = _draw_row(
            panels, poses, row, columns, (low, high), colormap, opacity
        )
    figure.colorbar(drawn, ax=grid, label="effective attention")
    return figure


@dataclasses.dataclass
class _Poses:
    """An image in several poses, and the attention of a layer in each.

    Attributes:
        group: the group of the layer.
        elements: the group elements that act on the image.
        images: `(element, height, width, channels)`, for the picture.
        field: the attention of the layer, with the elements on its batch axis.
    """

    group: groups.Group
    elements: list[int]
    images: np.ndarray
    field: Field

    @classmethod
    def of(
        cls,
        model: keras.Model,
        image: np.ndarray,
        layer: str | None,
        elements: Iterable[int] | None,
    ) -> "_Poses":
        sites = attention_sites.find(model)
        if layer is None:
            layer = most_varied(attention_sites.read(model, image[None], sites))
        sites = attention_sites.select(sites, layer)
        site = attention_sites.leaves(sites)[layer]
        group = site.operation.group
        first = site.operation.data_format == "channels_first"
        if first:
            image = np.moveaxis(image, 0, -1)
        tried = _elements(group, elements, image)
        images = np.concatenate([_act(image[None], group, g) for g in tried])
        batch = np.moveaxis(images, -1, 1) if first else images
        maps = attention_sites.read(model, batch, sites)[layer]
        return cls(
            group,
            tried,
            drawing.displayed(images),
            Field.of(layer, site, maps),
        )


@dataclasses.dataclass
class _Columns:
    """The panels of a row.

    Attributes:
        titles: the titles of all panels.
        shown: the group elements `h` of the last ones.
        arrows: whether the panel after the image is of arrows.
    """

    titles: list[str]
    shown: list[int]
    arrows: bool

    @classmethod
    def of(
        cls, poses: _Poses, group_element: int | None, arrows: bool | None
    ) -> "_Columns":
        group, field = poses.group, poses.field
        shown = list(range(field.values.shape[-1]))
        if group_element is not None:
            field.require_group_axis("group_element", group_element)
            shown = [group.check_element(group_element)]
        if arrows is None:
            arrows = field.on_group and group.rotations > 1
        elif _checks.flag(arrows, "arrows"):
            field.require_group_axis("arrows", arrows)
        titles = ["image", *(["all h"] if arrows else [])]
        for h in shown:
            name = f"h: {element_name(group, h)}"
            titles.append(name if field.on_group else "attention")
        return cls(titles, shown, arrows)


def _draw_row(
    panels: np.ndarray,
    poses: _Poses,
    row: int,
    columns: _Columns,
    ends: Limits,
    colormap: str,
    opacity: float,
) -> Any:
    """Draws an image in one pose and its maps. Returns one drawn map."""
    pixels, values = poses.images[row], poses.field.values[row]
    extent = poses.field.extent(pixels.shape[:2])
    drawing.draw_image(panels[0], pixels)
    panels[0].set_ylabel(element_name(poses.group, poses.elements[row]))
    grey = pixels.mean(-1, keepdims=True)  # colours are left to the map
    if columns.arrows:
        drawing.draw_image(panels[1], 0.4 * grey)
        _draw_arrows(panels[1], values, extent, poses.group, ends)
    maps = panels[-len(columns.shown) :]
    for h, panel in zip(columns.shown, maps, strict=True):
        drawing.draw_image(panel, 0.4 + 0.6 * grey)
        drawn = panel.imshow(
            values[..., h],
            extent=extent,
            alpha=opacity,
            interpolation="nearest",
            cmap=colormap,
            vmin=ends[0],
            vmax=ends[1],
        )
        drawing.frame(panel, pixels)
    return drawn


def _is_uniform(values: np.ndarray) -> bool:
    """Whether a map of several values holds one value everywhere."""
    return values.size > 1 and float(np.ptp(values)) < UNIFORM


def _uniform_message(layer: str, maps: list[str]) -> str:
    names = " and ".join(f'"{name}"' for name in maps)
    message = (
        f"The attention of layer '{layer}' is uniform: {names} varies by less "
        f"than {UNIFORM:g} over all of these images. If the images are not "
        "uniform themselves, train the model further"
    )
    if "channel" in maps:
        message += (
            ". If that changes nothing the hidden units of its channel "
            "attention are dead and learn nothing: build the layer with more "
            "of them (`reduction_ratio=None` or a smaller ratio) or start from "
            "another seed"
        )
    return message + "."


def _elements(
    group: groups.Group, elements: Iterable[int] | None, image: np.ndarray
) -> list[int]:
    """The elements to act with: images of one shape come out."""
    square = image.shape[0] == image.shape[1]
    lying = [g for g in range(group.order) if group.matrices[g, 0, 0] == 0]
    if elements is None:
        kept = [int(g) for g in group.grid_elements]
        return [g for g in kept if square or g not in lying]
    tried = [group.check_element(element) for element in elements]
    if not tried:
        raise ValueError("`elements` must hold one or more. Received: none")
    if not square and set(tried) & set(lying):
        raise ValueError(
            f"`elements` that turn an image of size {image.shape[:2]} on its "
            f"side cannot be drawn beside it. Received: {tried}"
        )
    return tried


def _act(image: np.ndarray, group: groups.Group, element: int) -> np.ndarray:
    moved = group_action(image, group, element)
    return np.asarray(keras.ops.convert_to_numpy(moved))


def _draw_arrows(
    panel: Any,
    values: np.ndarray,
    extent: tuple[float, ...],
    group: groups.Group,
    ends: Limits,
) -> None:
    """One arrow for each group element at each of some positions."""
    left, right, bottom, top = extent
    height, width, order = values.shape
    step = math.ceil(min(height, width) / ARROWS)
    rows, columns = _centred(height, step), _centred(width, step)
    pitch = np.array([(bottom - top) / height, (right - left) / width])
    y, x = np.meshgrid(
        top + (rows + 0.5) * pitch[0],
        left + (columns + 0.5) * pitch[1],
        indexing="ij",
    )
    low, high = ends
    share = (values[np.ix_(rows, columns)] - low) / (high - low)
    tilt = TILT if group.mirrors else 0.0
    # The direction is an offset (row, column), on which the matrices act.
    up = np.array([-math.cos(tilt), math.sin(tilt)])
    gaps = [axis[1] - axis[0] for axis in (y[:, 0], x[0]) if len(axis) > 1]
    reach = min(gaps, default=pitch.min()) / 2
    arrows = share[..., None] * reach * (group.matrices @ up)
    mirrored = np.arange(order) // group.rotations
    panel.quiver(
        np.repeat(x, order),
        np.repeat(y, order),
        arrows[..., 1].ravel(),
        arrows[..., 0].ravel(),
        color=np.tile(np.array(COLORS)[mirrored], x.size),
        angles="xy",
        scale_units="xy",
        scale=1,
        width=0.012,
        headwidth=3,
        headlength=3,
        headaxislength=3,
        minlength=0,
    )


def _centred(size: int, step: int) -> np.ndarray:
    """Positions that look the same from either end, steps apart or more."""
    step = min(step, max(size - 1, 1))
    while (size - 1) % step % 2:
        step += 1
    return np.arange((size - 1) % step // 2, size, step)
