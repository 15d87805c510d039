"""What a network attends to: the maps of its layers, and pictures of them.

    maps = attention_maps(model, images)
    figure = plot_attention_maps(model, images[0])
    figure.savefig("maps.png")

Pictures need matplotlib, the extra `viz`; arrays do not.
"""

import dataclasses
import math
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from keras_equiattn import _checks
from keras_equiattn import groups
from keras_equiattn.layers.base import AttentionLayer
from keras_equiattn.ops.action import group_action

__all__ = ["attention_maps", "plot_attention_maps"]

# A map that varies by less is called uniform, and drawn as such.
UNIFORM = 1e-3
# About as many positions with arrows along the shorter side.
ARROWS = 7
# Of the arrows of rotations and of mirrored elements.
COLORS = ("tab:orange", "deepskyblue")
# Turns the arrows of mirrored elements away from those of the others.
TILT = np.pi / 12

Pitch = tuple[float, float]
Maps = dict[str, np.ndarray]


def attention_maps(
    model: keras.Model,
    images: Any,
    query: tuple[int, int] | None = None,
    layers: str | Iterable[str] | None = None,
) -> dict[str, Maps]:
    """What every attentive layer of a model returns for a batch of images.

    The model runs once, in inference mode, for the inputs of these layers;
    then each is called with `return_attention_maps=True`. The model itself
    stays as it is.

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
        height, width, channels)` for attention on images; each layer documents
        the other arrays. Half precision is returned as float32.

    Symmetry:
        Each map is a feature map on the group, an image or constant in space,
        and transforms like one.

    Raises:
        ValueError: if the model has no graph (a subclassed model, a Sequential
            one that is not built), no attentive layer or several inputs; for a
            layer that contains attentive layers in its own code; for unknown
            names in `layers`; if the images have another rank than the input.

    Example:
        >>> from keras_equiattn.applications import RotMNISTCNN
        >>> from keras_equiattn.visualization import attention_maps
        >>> model = RotMNISTCNN(group="p4", attention="input", filters=2)
        >>> maps = attention_maps(model, np.ones((1, 28, 28, 1), "float32"))
        >>> list(maps)[:2]
        ['conv1_attention', 'conv2_attention']
        >>> maps["conv2_attention"]["effective"].shape
        (1, 26, 26, 4, 2)
    """
    calls = _calls(model, images, layers)
    return {name: call.maps(query) for name, call in calls.items()}


def plot_attention_maps(
    model: keras.Model,
    image: Any,
    layer: str | None = None,
    group_element: int | None = None,
    elements: Iterable[int] | None = None,
    arrows: bool | None = None,
    colormap: str = "viridis",
    opacity: float = 0.6,
    size: float = 1.5,
) -> Any:
    """Draws the effective attention of one layer over a turned image.

    There is a row for each element `g` that acts on the image. It shows the
    image, arrows that stand for all group elements `h` of the map at once, and
    the map for each `h`. That the maps turn with the image shows: the panel
    `(g, g h)` is the panel `(identity, h)` acted on by `g`.

    Maps of several channels are averaged over them. A map smaller than the
    image lies centred on it, a pixel of the map as wide as the strides on the
    way make it. All panels share one colour scale, from the least to the
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
        arrows: whether to draw the arrows: at a coarse grid of positions one
            for each `h`, in the direction into which `h` turns "up", its length
            from zero for the least value to half the spacing for the largest.
            Those of mirrored elements are tilted away, the other way round.
            None draws them where the group holds rotations.
        colormap: matplotlib's name of the colours.
        opacity: of the map over the image, 1 hides the image.
        size: of one panel, in inches.

    Returns:
        A `matplotlib.figure.Figure` that belongs to no window and no pyplot.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: see `attention_maps`; for an image of another rank or
            several images, unknown layers, `h` where the map has no group
            axis, elements that turn a rectangle on its side.

    Example:
        >>> from keras_equiattn.applications import RotMNISTCNN
        >>> from keras_equiattn.visualization import plot_attention_maps
        >>> model = RotMNISTCNN(group="p4", attention="input", filters=2)
        >>> image = np.random.default_rng(0).uniform(size=(28, 28, 1))
        >>> figure = plot_attention_maps(model, image, "conv2_attention")
        >>> len(figure.axes)  # 4 rows of image, arrows, 4 maps; a colour bar
        25
    """
    figure_class, normalize = _matplotlib()
    image = _one_image(image)
    opacity = _checks.number(
        opacity, "opacity", "a number from 0 to 1", lambda n: 0 <= n <= 1
    )
    if layer is None:
        layer = _most_varied(_calls(model, image[None]))
    attentive = _calls(model, image[None], layer)[layer].site.operation
    group = attentive.group
    first = attentive.data_format == "channels_first"
    if first:
        image = np.moveaxis(image, 0, -1)
    tried = _elements(group, elements, image)
    images = np.concatenate([_act(image[None], group, g) for g in tried])
    batch = np.moveaxis(images, -1, 1) if first else images
    field = _Field.of(layer, _calls(model, batch, layer)[layer])
    shown = list(range(field.values.shape[-1]))
    if group_element is not None:
        field.require_group_axis("group_element", group_element)
        shown = [group.check_element(group_element)]
    if arrows is None:
        arrows = field.on_group and group.rotations > 1
    elif _checks.flag(arrows, "arrows"):
        field.require_group_axis("arrows", arrows)

    low, high = float(field.values.min()), float(field.values.max())
    title = f"{model.name}, {layer}\nattention {low:.4g} to {high:.4g}"
    if high - low < UNIFORM:
        title += ", uniform"
        # On a range of their own rounding errors would look like attention.
        low, high = (low + high - UNIFORM) / 2, (low + high + UNIFORM) / 2
    colors = {"cmap": colormap, "norm": normalize(low, high)}
    heads = ["image", *(["all h"] if arrows else [])]
    for h in shown:
        name = f"h: {element_name(group, h)}"
        heads.append(name if field.on_group else "attention")
    figure = figure_class(
        figsize=(1.3 + size * len(heads), 0.8 + size * len(tried)),
        layout="constrained",
    )
    figure.suptitle(title)
    grid = figure.subplots(len(tried), len(heads), squeeze=False)
    extent = field.extent(image.shape[:2])
    drawn = None
    for g, pixels, values, panels in zip(
        tried, _displayed(images), field.values, grid, strict=True
    ):
        _draw_image(panels[0], pixels)
        panels[0].set_ylabel(element_name(group, g))
        grey = pixels.mean(-1, keepdims=True)  # colours are left to the map
        if arrows:
            _draw_image(panels[1], 0.4 * grey)
            _draw_arrows(panels[1], values, extent, group, (low, high))
        for h, panel in zip(shown, panels[-len(shown) :], strict=True):
            _draw_image(panel, 0.4 + 0.6 * grey)
            drawn = panel.imshow(
                values[..., h],
                extent=extent,
                alpha=opacity,
                interpolation="nearest",
                **colors,
            )
            _frame(panel, pixels)
    for panel, text in zip(grid[0], heads, strict=True):
        panel.set_title(text, fontsize="medium")
    figure.colorbar(drawn, ax=grid, label="effective attention")
    return figure


def element_name(group: str | groups.Group, element: int) -> str:
    """What an element does, in words: "90°", "mirror", "mirror, 90°".

    Args:
        group: a group or its name.
        element: index of the element.
    """
    group = groups.get(group)
    mirror, turn = divmod(group.check_element(element), group.rotations)
    angle = f"{360 * turn / group.rotations:g}°"
    if not mirror:
        return angle
    return f"mirror, {angle}" if turn else "mirror"


# --- Layers in a graph ------------------------------------------------------


@dataclasses.dataclass
class _Site:
    """Where a graph calls an attentive layer, or a model that has some.

    Attributes:
        operation: the layer or the model.
        tensors: its symbolic inputs.
        pitches: rows and columns of the image per pixel, before and after.
        inner: sites by name, of a model.
    """

    operation: Any
    tensors: list[Any]
    pitches: tuple[Pitch, Pitch]
    inner: dict[str, "_Site"]


@dataclasses.dataclass
class _Call:
    """An attentive layer and what it is called with."""

    site: _Site
    inputs: Any

    def maps(self, query: tuple[int, int] | None = None) -> Maps:
        _, maps = self.site.operation(
            self.inputs, return_attention_maps=True, query=query
        )
        return {name: _to_numpy(value) for name, value in maps.items()}


def _calls(
    model: keras.Model, images: Any, layers: str | Iterable[str] | None = None
) -> dict[str, _Call]:
    """What a model calls its attentive layers with, by name."""
    if not _has_graph(model):
        raise ValueError(
            "`model` must be a functional or Sequential Keras model that is "
            "built: layers are found in its graph, which subclassed models do "
            f"not have. Received: {model!r}"
        )
    sites, _ = _sites(model)
    names = list(_names(sites))
    if not names:
        raise ValueError(
            f"Model '{model.name}' has no attentive layers: none of its "
            "layers is a `keras_equiattn.layers.base.AttentionLayer`."
        )
    if layers is not None:
        wanted = [layers] if isinstance(layers, str) else list(layers)
        for name in wanted:
            _checks.known_name(name, "attentive layer", names)
        sites = _keep(sites, wanted)
    if len(model.inputs) != 1:
        raise ValueError(
            f"`model` must have one input. Received: '{model.name}' with "
            f"{len(model.inputs)}"
        )
    images = keras.ops.convert_to_tensor(images)
    expected = tuple(model.inputs[0].shape)
    if len(images.shape) != len(expected):
        raise ValueError(
            f"`images` must be a batch of rank {len(expected)}: the model "
            f"'{model.name}' takes {expected}. "
            f"Received: shape {tuple(images.shape)}"
        )
    return dict(_run(model, [images], sites))


def _has_graph(operation: Any) -> bool:
    return isinstance(operation, keras.Model) and bool(
        getattr(operation, "inputs", None)
    )


def _sites(
    model: keras.Model, pitch: Pitch = (1.0, 1.0)
) -> tuple[dict[str, _Site], Pitch]:
    """Sites in the order of execution, and the pitch of the output."""
    sites: dict[str, _Site] = {}
    pitches = {id(tensor): pitch for tensor in model.inputs}
    for node in _nodes(model):
        if node.is_input:
            continue
        operation, tensors = node.operation, list(node.input_tensors)
        before = max(pitches[id(tensor)] for tensor in tensors)
        after = _after(operation, before)
        inner: dict[str, _Site] = {}
        attentive = isinstance(operation, AttentionLayer)
        if not attentive and _has_graph(operation):
            inner, after = _sites(operation, before)
        elif not attentive and _hides_attention(operation):
            raise ValueError(
                f"Layer '{operation.name}' of '{model.name}' calls attentive "
                "layers in its own code, where they cannot be found. Build it "
                "as a functional model."
            )
        if attentive or inner:
            name, uses = operation.name, 1
            while name in sites:
                uses += 1
                name = f"{operation.name}#{uses}"
            sites[name] = _Site(operation, tensors, (before, after), inner)
        pitches |= {id(tensor): after for tensor in node.outputs}
    return sites, max(pitches[id(tensor)] for tensor in model.outputs)


def _nodes(model: keras.Model) -> Iterator[Any]:
    """The calls that make a graph, each after those that it depends on."""
    # Not recursive: graphs are deeper than Python's stack.
    pending = [
        (tensor._keras_history.operation, tensor._keras_history.node_index)
        for tensor in reversed(model.outputs)
    ]
    stack = [(op._inbound_nodes[index], False) for op, index in pending]
    seen = set()
    while stack:
        node, complete = stack.pop()
        if complete:
            yield node
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            stack.extend((n, False) for n in reversed(node.parent_nodes))


def _after(operation: Any, pitch: Pitch) -> Pitch:
    """The pitch behind an operation: strides widen it."""
    strides = getattr(operation, "strides", None)
    strides = strides or getattr(operation, "pool_size", None) or 1
    strides = np.atleast_1d(strides).astype(float)
    if "Transpose" in type(operation).__name__:
        strides = 1 / strides
    return pitch[0] * float(strides[0]), pitch[1] * float(strides[:2][-1])


def _hides_attention(operation: Any) -> bool:
    return isinstance(operation, keras.Layer) and any(
        isinstance(layer, AttentionLayer)
        for layer in operation._flatten_layers(include_self=False)
    )


def _names(sites: dict[str, _Site], prefix: str = "") -> Iterator[str]:
    """Full names of the attentive layers."""
    for name, site in sites.items():
        if not site.inner:
            yield prefix + name
        yield from _names(site.inner, f"{prefix}{name}/")


def _keep(
    sites: dict[str, _Site], wanted: list[str], prefix: str = ""
) -> dict[str, _Site]:
    kept = {}
    for name, site in sites.items():
        inner = _keep(site.inner, wanted, f"{prefix}{name}/")
        if inner or prefix + name in wanted:
            kept[name] = dataclasses.replace(site, inner=inner)
    return kept


def _run(
    model: keras.Model,
    inputs: list[Any],
    sites: dict[str, _Site],
    prefix: str = "",
) -> Iterator[tuple[str, _Call]]:
    """Computes what goes into each site; nested models run for their own."""
    tensors = [tensor for site in sites.values() for tensor in site.tensors]
    if not tensors:
        return
    probe = keras.Model(model.inputs, tensors, name="attention_inputs")
    values = iter(keras.tree.flatten(probe(inputs, training=False)))
    for name, site in sites.items():
        own = [next(values) for _ in site.tensors]
        if site.inner:
            inner = f"{prefix}{name}/"
            yield from _run(site.operation, own, site.inner, inner)
        else:
            yield prefix + name, _Call(site, own[0])


def _to_numpy(x: Any) -> np.ndarray:
    values = np.asarray(keras.ops.convert_to_numpy(x))
    return values.astype("float32") if values.itemsize < 4 else values


# --- Drawing ----------------------------------------------------------------


@dataclasses.dataclass
class _Field:
    """The effective attention of a layer, averaged over its channels.

    Attributes:
        layer: name of the layer.
        values: `(batch, height, width, h)`, one `h` for attention on images.
        on_group: whether there is a group axis.
        pitch: rows and columns of the image per pixel.
    """

    layer: str
    values: np.ndarray
    on_group: bool
    pitch: Pitch

    @classmethod
    def of(cls, layer: str, call: _Call) -> "_Field":
        maps = call.maps()
        if "effective" not in maps:
            raise ValueError(
                f"Layer '{layer}' returns no map \"effective\" to draw, but "
                f"{', '.join(map(repr, maps))}."
            )
        values = maps["effective"].mean(-1)
        on_group = values.ndim == 4
        if not on_group:
            values = values[..., None]
        first = call.site.operation.data_format == "channels_first"
        size = tuple(
            call.inputs.shape[2:4] if first else call.inputs.shape[1:3]
        )
        before, after = call.site.pitches
        unchanged = values.shape[1:3] == size
        return cls(layer, values, on_group, before if unchanged else after)

    def require_group_axis(self, name: str, value: Any) -> None:
        if not self.on_group:
            raise ValueError(
                f"`{name}` must be None: the map of '{self.layer}' has no "
                f"group axis. Received: {value!r}"
            )

    def extent(self, size: tuple[int, int]) -> tuple[float, ...]:
        """Left, right, bottom, top in pixels of the image, centred on it."""
        (rows, columns), (height, width) = self.values.shape[1:3], size
        y, x = rows * self.pitch[0] / 2, columns * self.pitch[1] / 2
        middle = (height - 1) / 2, (width - 1) / 2
        return middle[1] - x, middle[1] + x, middle[0] + y, middle[0] - y


def _matplotlib() -> tuple[Any, Any]:
    """Its `Figure`, which needs no pyplot and no window, and `Normalize`."""
    try:
        from matplotlib.colors import Normalize
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "`plot_attention_maps` needs matplotlib, which is not installed: "
            'pip install "keras-equiattn[viz]"'
        ) from error
    return Figure, Normalize


def _one_image(image: Any) -> np.ndarray:
    pixels = np.asarray(keras.ops.convert_to_numpy(image))
    if pixels.ndim == 4 and len(pixels) == 1:
        pixels = pixels[0]
    if pixels.ndim != 3:
        raise ValueError(
            "`image` must be one image (height, width, channels). "
            f"Received: shape {pixels.shape}"
        )
    return pixels


def _most_varied(calls: dict[str, _Call]) -> str:
    """The layer whose map has the largest standard deviation over space."""

    def spread(name: str) -> float:
        values = _Field.of(name, calls[name]).values
        return float(values.std(axis=(1, 2)).max())

    return max(calls, key=spread)


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
    return _to_numpy(group_action(image, group, element))


def _displayed(images: np.ndarray) -> np.ndarray:
    """Values in [0, 1], one or three channels."""
    images = images.astype("float64")
    if images.shape[-1] not in (1, 3):
        images = images.mean(-1, keepdims=True)
    low, high = images.min(), images.max()
    if low < 0 or high > 1:
        images = (images - low) / (high - low or 1)
    return images


def _frame(panel: Any, pixels: np.ndarray) -> None:
    """Shows the image's frame, however far a map reaches."""
    height, width = pixels.shape[:2]
    panel.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5))
    panel.set(xticks=[], yticks=[])


def _draw_image(panel: Any, pixels: np.ndarray) -> None:
    panel.imshow(
        pixels if pixels.shape[-1] == 3 else pixels[..., 0],
        cmap="gray",
        vmin=0,
        vmax=1,
        interpolation="nearest",
    )
    _frame(panel, pixels)


def _draw_arrows(
    panel: Any,
    values: np.ndarray,
    extent: tuple[float, ...],
    group: groups.Group,
    limits: tuple[float, float],
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
    low, high = limits
    share = (values[np.ix_(rows, columns)] - low) / (high - low)
    tilt = TILT if group.mirrors else 0.0
    # As offsets (row, column), on which the matrices act.
    up = np.array([-math.cos(tilt), math.sin(tilt)])
    directions = group.matrices @ up * pitch.min() * step / 2
    arrows = share[..., None] * directions
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
        width=0.015,
        minlength=0,
    )


def _centred(size: int, step: int) -> np.ndarray:
    """Positions in steps, the same seen from either end, the step or more."""
    while (size - 1) % step % 2:
        step += 1
    return np.arange((size - 1) % step // 2, size, step)
