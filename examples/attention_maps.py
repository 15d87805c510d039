r"""Draws what a network attends to, over an image in all its poses.

    python examples/attention_maps.py --out runs/maps
    python examples/attention_maps.py --model rotmnist_p4cnn_input \
        --dataset rot_mnist --weights runs/input/last.weights.h5 \
        --downsampling strided --out runs/maps

Writes `<model>.png`: the effective attention of one layer, for a test image and
the same image turned. The table gives, for every layer, the range of its
attention, its standard deviation over space, and the largest error of rotation:
the difference between the maps of turned images and the turned maps of the
images, relative to the largest value.

`--weights` takes a weights file, the name of shipped weights, or a file that
the authors of attentive group convolution, of group self-attention or, for
Swin, of ACmix trained (.npz, .pth, .pt). Without it the network is trained on
the dataset first, `--epochs` times.

`--downsampling strided` compares the approximate network with the exact one, in
a second table and in `<model>_strided.png`. It has the weights of the exact one
unless `--strided-weights` gives its own.

`--pixel ROW COLUMN` is for networks that attend to windows or to the whole
image. It draws instead which neighbours of this pixel each head of a layer
attends to, in `<model>_pixel.png`, and for one head (`--head`) what the turned
pixel of the turned image attends to, in `<model>_pixel_turned.png`: windows
turn with the image, and the group axis permutes. With crops, maps cover only
the middle of the image, and other pixels are refused before any training.
`--key-element` shows only one group element of the input. The error of rotation
is printed: the difference between the weights of the turned pixel and the
turned weights of the pixel, relative to the largest weight.
"""

import argparse
import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
from rich.console import Console
from rich.table import Table

from keras_equiattn import applications
from keras_equiattn import groups
from keras_equiattn import visualization
from keras_equiattn.applications.data import datasets
from keras_equiattn.applications.training import reporting
from keras_equiattn.ops import group_action

AUTHORS_FILES = (".npz", ".pth", ".pt")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="rotmnist_p4cnn_input", help="registered name")
    add("--weights", help="file or name; without it the network is trained")
    add("--strided-weights", help="weights of the strided network")
    add("--dataset", default="digits", help="name, or .npz file")
    add("--data-dir", type=Path, help="folder of the prepared datasets")
    add("--index", type=int, default=0, help="index of the test image")
    add("--transpose", action="store_true", help="exchange rows and columns")
    add("--elements", type=int, nargs="+", help="elements to use; default all")
    add("--layer", help="layer to draw; by default the most varied one")
    add("--strided-layer", help="layer to compare; by default the worst one")
    add(
        "--downsampling",
        default="exact",
        choices=("exact", "strided"),
        help="'strided' compares the approximate network with the exact one",
    )
    add(
        "--pixel",
        type=int,
        nargs=2,
        metavar=("ROW", "COLUMN"),
        help="draw the window of this pixel",
    )
    add("--key-element", type=int, help="element of the input; default: sum")
    add("--head", type=int, help="head to turn; by default the least uniform")
    add("--images", type=int, default=8, help="test images for the tables")
    add("--epochs", type=int, default=3, help="epochs without --weights")
    add("--batch-size", type=int, default=32, help="of that training")
    add("--seed", type=int, default=0)
    add("--dpi", type=int, default=80)
    add("--out", type=Path, required=True, help="folder of the pictures")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    keras.utils.set_random_seed(options.seed)
    try:
        image, images = test_images(options)
        exact = load(options, image)
    except (ImportError, OSError, ValueError) as error:
        raise SystemExit(f"attention_maps.py: error: {error}") from None
    print(reporting.model_line(exact), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.pixel:
        draw_pixel(options, exact, image)
        return
    maps = turned_maps(exact, images)
    show_table(options.model, maps)
    try:
        figure = visualization.plot_attention_maps(
            exact, image, options.layer, elements=options.elements
        )
    except ValueError as error:  # --layer, --elements
        raise SystemExit(f"attention_maps.py: error: {error}") from None
    write(figure, options, f"{options.model}.png")
    if options.downsampling == "exact":
        return
    strided = strided_network(options, exact)
    deformed = turned_maps(strided, images)
    show_table(f"{options.model}, strided", deformed)
    errors = {name: turn_error(*found) for name, found in deformed.items()}
    layer = options.strided_layer or max(errors, key=lambda name: errors[name])
    figure = compare({"exact": exact, "strided": strided}, image, layer)
    write(figure, options, f"{options.model}_strided.png")


# --- Networks and images ----------------------------------------------------


def load(options: argparse.Namespace, image: np.ndarray) -> keras.Model:
    """The exact network, its weights loaded or trained."""
    if str(options.weights).endswith(AUTHORS_FILES):
        try:
            converter, overrides = applications.converter_of(options.model)
        except ValueError as error:  # --model, with such a file
            raise SystemExit(f"attention_maps.py: error: {error}") from None
        model = build(options, **overrides)
        return converter(require_kind(model, options, image), options.weights)
    model = build(options, weights=options.weights)
    require_kind(model, options, image)
    return model if options.weights else train(model, options)


def require_kind(
    model: keras.Model, options: argparse.Namespace, image: np.ndarray
) -> keras.Model:
    """Raises before any training if the network cannot be drawn."""
    windows = any(hasattr(layer, "window") for layer in model.layers)
    if windows and not options.pixel:
        raise ValueError(
            f"{options.model} attends to windows or to the whole image: choose "
            "a pixel with --pixel ROW COLUMN."
        )
    if options.pixel and not windows:
        raise ValueError(
            f"--pixel: {options.model} has no layer that attends to windows or "
            "to the whole image."
        )
    if options.pixel:  # is there such a pixel in such a layer?
        visualization.pixel_attention(
            model, image, options.pixel, options.layer
        )
    return model


def build(options: argparse.Namespace, **overrides: Any) -> keras.Model:
    info = datasets.info(options.dataset)
    arguments = {
        "input_shape": tuple(info.shape),
        "classes": info.classes,
        "normalization": info.normalization,
        **overrides,
    }
    return applications.get_model(options.model, **arguments)


def train(model: keras.Model, options: argparse.Namespace) -> keras.Model:
    """A short training, to have something to look at."""
    info = datasets.info(options.dataset)
    data = datasets.load_pydataset(
        options.dataset,
        "train+validation",
        options.batch_size,
        seed=options.seed,
        data_dir=options.data_dir,
        # Not used; the smallest split that can be cut off.
        validation_size=info.validation_size and info.views,
    )
    model.compile(
        "adam",
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(
        data,
        epochs=options.epochs,
        shuffle=False,  # the dataset does
        callbacks=[datasets.EpochCounter(data)],
        verbose=2,
    )
    return model


def strided_network(
    options: argparse.Namespace, exact: keras.Model
) -> keras.Model:
    """The approximate network."""
    strided = build(
        options, downsampling="strided", weights=options.strided_weights
    )
    if options.strided_weights is None:
        for layer in strided.layers:  # pooling, which it lacks, has none
            if layer.weights:
                values = exact.get_layer(layer.name).get_weights()
                layer.set_weights(values)
    return strided


def test_images(options: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """The image to draw, and those for the tables."""
    data = datasets.load_pydataset(
        options.dataset, "test", 1, data_dir=options.data_dir
    )
    if not 0 <= options.index < len(data):
        raise ValueError(
            f"--index must be from 0 to {len(data) - 1}. "
            f"Received: {options.index}"
        )
    count = min(options.images, len(data))
    images = np.concatenate(
        [data[n][0] for n in (options.index, *range(count))]
    )
    if options.transpose:
        images = np.swapaxes(images, 1, 2)
    return images[0], images[1:]


# --- Maps of turned images --------------------------------------------------


def act(x: np.ndarray, group: groups.Group, element: int) -> np.ndarray:
    return keras.ops.convert_to_numpy(group_action(x, group, element))


def turned_maps(
    model: keras.Model, images: np.ndarray, layers: str | None = None
) -> dict[str, tuple[groups.Group, np.ndarray]]:
    """For each layer, the group and the effective attention.

    The first axis of the attention is the group element by which the images
    were turned; only those that map the grid onto itself are used.
    """
    group = groups.get(reporting.group_of(model))
    elements = group.grid_elements
    batch = np.concatenate([act(images, group, g) for g in elements])
    found = visualization.attention_maps(model, batch, layers=layers)
    return {
        name: (group, np.split(maps["effective"], len(elements)))
        for name, maps in found.items()
        if "effective" in maps
    }


def turn_error(group: groups.Group, maps: Sequence[np.ndarray]) -> float:
    """`max |maps(L_g x) - L_g maps(x)| / max |maps(x)|`, the worst `g`."""
    differences = [
        np.abs(found - act(maps[0], group, g)).max()
        for g, found in zip(group.grid_elements, maps, strict=True)
    ]
    return float(max(differences) / np.abs(maps[0]).max())


def show_table(
    title: str, maps: dict[str, tuple[groups.Group, np.ndarray]]
) -> None:
    table = Table(title=title)
    for column in ("layer", "size", "min", "max", "spatial std", "error"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, (group, found) in maps.items():
        upright = found[0]
        height, width = upright.shape[1:3]
        table.add_row(
            name,
            f"{height} x {width}",
            f"{upright.min():.4f}",
            f"{upright.max():.4f}",
            f"{upright.std(axis=(1, 2)).mean():.4f}",
            f"{turn_error(group, found):.1e}",
        )
    Console(width=100).print(table)  # names are long


# --- Pictures ---------------------------------------------------------------


def compare(
    models: dict[str, keras.Model], image: np.ndarray, layer: str
) -> Any:
    """Maps of turned images, turned back: all alike for exact equivariance.

    They are drawn for the group element whose map of the upright image varies
    most. A row below the maps shows their difference from the first.
    """
    from matplotlib.figure import Figure

    fields = {
        name: back_again(model, image, layer) for name, model in models.items()
    }
    group = groups.get(reporting.group_of(models["exact"]))
    turns = group.grid_elements
    title = f"{models['exact'].name}, {layer}"
    if fields["exact"].ndim == 4:
        h = int(fields["exact"][0].std(axis=(0, 1)).argmax())
        fields = {name: field[..., h] for name, field in fields.items()}
        title += f", h: {visualization.element_name(group, h)}"
    figure = Figure(
        figsize=(1.3 + 1.5 * len(turns), 0.8 + 1.5 * (1 + 2 * len(fields))),
        layout="constrained",
    )
    figure.suptitle(f"{title}\nmaps of turned images, turned back")
    rows = figure.subplots(1 + 2 * len(fields), len(turns), squeeze=False)
    for panel, g in zip(rows[0], turns, strict=True):
        pixels = act(image[None], group, g)[0]
        panel.imshow(pixels.squeeze(), cmap="gray", vmin=0, vmax=1)
        panel.set_title(visualization.element_name(group, g))
    rows[0, 0].set_ylabel("image")
    for index, (name, field) in enumerate(fields.items()):
        shown, changed = rows[1 + 2 * index : 3 + 2 * index]
        low, high = field.min(), field.max()
        reach = float(high - low)
        for panel, values in zip(shown, field, strict=True):
            drawn = panel.imshow(values, vmin=low, vmax=high)
        figure.colorbar(drawn, ax=shown)
        shown[0].set_ylabel(name)
        for panel, values in zip(changed, field - field[0], strict=True):
            # On the scale of the map, so that rounding stays white.
            drawn = panel.imshow(
                values, cmap="RdBu", vmin=-reach / 2, vmax=reach / 2
            )
            share = np.abs(values).max() / reach
            panel.set_xlabel(f"{share:.1e} of the range", fontsize="small")
        figure.colorbar(drawn, ax=changed)
        changed[0].set_ylabel("difference")
    for panel in rows.ravel():
        panel.set(xticks=[], yticks=[])
    return figure


def draw_pixel(
    options: argparse.Namespace, model: keras.Model, image: np.ndarray
) -> None:
    """Draws what a pixel attends to, also when the image is turned."""
    try:
        figure = visualization.plot_window_attention(
            model,
            image,
            options.pixel,
            options.layer,
            key_element=options.key_element,
        )
        views = turned_views(model, image, options)
        turned = compare_views(model, views, options)
    except ValueError as error:  # --pixel, --layer, --elements, ...
        raise SystemExit(f"attention_maps.py: error: {error}") from None
    error = view_error(groups.get(reporting.group_of(model)), views)
    print(f"Error of rotation at the pixel: {error:.1e}", flush=True)
    write(figure, options, f"{options.model}_pixel.png")
    write(turned, options, f"{options.model}_pixel_turned.png")


@dataclasses.dataclass
class View:
    """A turned image, the turned pixel and what it attends to.

    Attributes:
        element: the group element that turns the image.
        image: `(height, width, channels)`.
        pixel: row and column.
        weights: see `visualization.pixel_attention`.
    """

    element: int
    image: np.ndarray
    pixel: tuple[int, int]
    weights: np.ndarray


def turned_views(
    model: keras.Model, image: np.ndarray, options: argparse.Namespace
) -> list[View]:
    """Views for `--elements`, or for all that map the grid onto itself."""
    group = groups.get(reporting.group_of(model))
    marked = np.zeros((1, *image.shape[:2], 1))
    marked[0, options.pixel[0], options.pixel[1]] = 1
    views = []
    for g in (0, *(g for g in options.elements or group.grid_elements if g)):
        group.check_element(int(g))
        turned = act(image[None], group, g)[0]
        place = act(marked, group, g)[0, ..., 0]
        row, column = divmod(int(place.argmax()), place.shape[1])
        weights = visualization.pixel_attention(
            model, turned, (row, column), options.layer
        )
        views.append(View(int(g), turned, (row, column), weights))
    return views


def view_error(group: groups.Group, views: Sequence[View]) -> float:
    """`turn_error` of what one pixel attends to; the first is not turned."""
    still = views[0].weights
    key_order, *seen = still.shape[2:]
    # Windows as images, or as feature maps on the group.
    windows = np.moveaxis(still.reshape(-1, key_order, *seen), 1, -1)
    if key_order == group.order:
        windows = windows[..., None]
    differences = []
    for view in views[1:]:
        expected = act(windows, group, view.element)
        expected = expected.reshape(-1, *expected.shape[1:3], key_order)
        expected = np.moveaxis(expected, -1, 1).reshape(view.weights.shape)
        expected = expected[group.relative(view.element)]
        differences.append(np.abs(view.weights - expected).max())
    return float(max(differences, default=0.0) / still.max())


def compare_views(
    model: keras.Model, views: Sequence[View], options: argparse.Namespace
) -> Any:
    """The panel `(g, g h)` is the panel `(identity, h)`, turned by `g`."""
    from matplotlib.figure import Figure

    group = groups.get(reporting.group_of(model))
    heads = views[0].weights.shape[1]
    head = options.head
    if head is None:
        spreads = views[0].weights.sum(2).std(axis=(-2, -1)).max(axis=0)
        head = int(spreads.argmax())
    if not 0 <= head < heads:
        raise ValueError(
            f"--head must be from 0 to {heads - 1}. Received: {head}"
        )
    chosen = slice(None)
    if options.key_element is not None:
        chosen = slice(options.key_element, options.key_element + 1)
    shown = [view.weights[:, head, chosen].sum(axis=1) for view in views]
    high = max(weights.max() for weights in shown)
    figure = Figure(
        figsize=(1.3 + 1.5 * (1 + group.order), 0.8 + 1.5 * len(views)),
        layout="constrained",
    )
    figure.suptitle(f"{model.name}, head {head}, pixel {tuple(options.pixel)}")
    rows = figure.subplots(len(views), 1 + group.order, squeeze=False)
    for view, weights, panels in zip(views, shown, rows, strict=True):
        panels[0].imshow(view.image.squeeze(), cmap="gray", vmin=0, vmax=1)
        panels[0].plot(
            *view.pixel[::-1], "s", color="tab:orange", fillstyle="none"
        )
        panels[0].set_ylabel(visualization.element_name(group, view.element))
        for panel, window in zip(panels[1:], weights, strict=True):
            drawn = panel.imshow(window, vmin=0, vmax=high)
    names = [visualization.element_name(group, h) for h in range(group.order)]
    titles = ["image", *(f"h: {name}" for name in names)]
    for panel, title in zip(rows[0], titles, strict=True):
        panel.set_title(title, fontsize="medium")
    for panel in rows.ravel():
        panel.set(xticks=[], yticks=[])
    figure.colorbar(drawn, ax=rows, label="attention weight")
    return figure


def back_again(model: keras.Model, image: np.ndarray, layer: str) -> np.ndarray:
    """Maps of the turned images, turned back, as means over the channels."""
    group, maps = turned_maps(model, image[None], layer)[layer]
    fields = [
        act(found, group, group.inverse[g])[0].mean(-1)
        for g, found in zip(group.grid_elements, maps, strict=True)
    ]
    return np.stack(fields)


def write(figure: Any, options: argparse.Namespace, name: str) -> None:
    """Writes a PNG of 256 colours, a third of the size for tissue."""
    from PIL import Image

    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=options.dpi)
    picture = Image.open(buffer).convert("RGB")
    path = options.out / name
    picture.quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=5).save(
        path, optimize=True
    )
    print(f"Written to {path}", flush=True)


if __name__ == "__main__":
    main()
