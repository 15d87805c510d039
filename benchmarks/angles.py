"""How equivariant are groups that do not act on the grid?

    KERAS_BACKEND=torch python benchmarks/angles.py --draws 3
    KERAS_BACKEND=jax python benchmarks/angles.py --groups p12 p16 p8m
    KERAS_BACKEND=torch python benchmarks/angles.py --draws 3 --dilation 2
    KERAS_BACKEND=torch python benchmarks/angles.py --draws 3 --whole-image
    KERAS_BACKEND=torch python benchmarks/angles.py --draws 3 --even
    TORCH_COMPILE_DISABLE=1 KERAS_BACKEND=torch \\
        python benchmarks/angles.py --trained --sizes 5

Each layer is measured on images and on feature maps that are turned by elements
of the group: with filters of pixels and square windows ("pixel"), and with
steerable filters and discs as windows ("steerable"), both with the same initial
weights and scale of the scores. Where the paper initialises a layer
differently, it is also measured with filters of pixels, square windows, and the
initial weights and scale of the paper ("paper").

Inputs and outputs are turned with splines of degree 5, so that interpolation
adds little to the error. "identity" shows how much: the error of inputs that
are turned and turned back. An error is the largest difference over the largest
output, within a disc that the border does not influence, as a mean over draws
of the weights. "pose_spread" is the largest difference between two poses over
the largest output: where it is small, a small error means little.

Turns by 90 degrees and mirrors are exact. So the elements that are measured
turn by at most 90 degrees, with and without a mirror.

Images are blurred noise with a standard deviation of two pixels ("smooth"),
photographs of CIFAR-10 and patches of tissue of PatchCamelyon in shades of grey
("CIFAR-10", "tissue"; prepare them first), all darkened towards the border.

With `--trained` a layer is part of a small network that is first trained to
classify photographs of CIFAR-10 with 17 x 17 pixels in random poses. Training
is so short that compilation costs more than it saves: PyTorch with
`TORCH_COMPILE_DISABLE=1` takes a tenth of the time of JAX. Pooling has no
weights and is left out.

With `--dilation` the layers that have a `dilation_rate` are measured with that
one. With `--whole-image` layers are measured whose pixels attend to the whole
image. Their images are smaller, and `--sizes` are the sizes of the images. With
`--even` pooling is measured on an image with an even number of rows, as most
networks have it: over windows of 2 x 2 pixels, or of 4 x 4 after padding by a
mirrored pixel.

Writes `benchmarks/results/angles-<groups>-<date>.json` after each measurement,
for trained layers `angles-<groups>_trained-<date>.json`, for dilated ones
`angles-<groups>_dilation_<rate>-<date>.json`, for attention to the whole image
`angles-<groups>_whole_image-<date>.json`, and for even windows
`angles-<groups>_even-<date>.json`. If there are several draws, or not all
layers, sizes or images are measured, the name says so too. With `--resume` it
goes on from the newest such file.
"""

import argparse
import functools
import itertools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import keras
import numpy as np
import report_files
from scipy import ndimage

from keras_equiattn import groups
from keras_equiattn import layers
from keras_equiattn.applications.data import datasets
from keras_equiattn.ops import group_action

SIZE = 49
# Radius of the disc that is compared, in pixels of an image of that size.
DISC = 14
# Sizes of the images that layers attend to as a whole.
WHOLE_IMAGES = (17, 25)
# The size of images that windows of these sizes halve.
EVEN_SIZE = 48
EVEN_WINDOWS = (2, 4)
CHANNELS = 4
IMAGES = ("smooth", "CIFAR-10", "tissue")
DATASETS = {"CIFAR-10": "cifar10", "tissue": "pcam"}
# The photographs and epochs that a layer is trained with.
PHOTOGRAPHS, EPOCHS = 1000, 4
# Rows and columns of the photographs that a layer learns from. Layers with
# strides of 2 need an odd number.
SMALL = 17
# Of layers that attend to windows.
HEADS, FILTERS = 2, 16
BASES = ("pixel", "steerable")
# The entries that identify a row of a file.
CASE = ("layer", "group", "basis", "kernel_size", "images")


class Kind(NamedTuple):
    """A kind of layer.

    Attributes:
        make: makes the layer from a basis, a size, and its other arguments.
        takes_images: whether its inputs are images.
        bases: the forms that are measured. Layers whose initial values differ
            from the paper's on groups that do not act on the grid have "paper"
            too.
        has_weights: whether the layer can learn.
        dilates: whether the layer has a dilation rate.
        whole_image: whether a pixel attends to the whole image, the size of
            which is then the size of the layer.
        even: whether the window and the image have an even number of rows.
    """

    make: Callable[..., keras.layers.Layer]
    takes_images: bool = False
    bases: Sequence[str] = BASES
    has_weights: bool = True
    dilates: bool = False
    whole_image: bool = False
    even: bool = False


def filters_of(basis: str) -> dict[str, Any]:
    """Arguments of layers with filters."""
    return {"filter_basis": "steerable" if basis == "steerable" else "pixel"}


def window_of(basis: str) -> dict[str, Any]:
    """Arguments of layers with windows."""
    return {"window_shape": "disc" if basis == "steerable" else "square"}


def convolution(layer, *arguments, **of_layer):
    """Makes a convolution, padded unless its arguments say otherwise."""

    def make(basis, size, **options):
        options = {**filters_of(basis), **of_layer, **options}
        options.setdefault("padding", "same")
        return layer(*arguments, kernel_size=size, **options)

    return make


def attentive(layer, attention="full"):
    """Makes an attentive convolution with equal kernels for both."""

    def make(basis, size, group):
        made = convolution(layer, CHANNELS, attention=attention)
        return made(basis, size, group=group, attention_kernel_size=size)

    return make


def pooling(mode):
    """Makes a pooling layer with strides of 2."""

    def make(basis, size, group):
        del basis  # there are no filters
        return layers.SpatialPooling2D(size, 2, mode, group=group)

    return make


def halving(mode):
    """Makes pooling that halves an even size, after mirrored padding."""

    def make(basis, size, group):
        pool = pooling(mode)(basis, size, group)
        if size == 2:
            return pool
        order = groups.get(group).order
        image = keras.Input((EVEN_SIZE, EVEN_SIZE, order, CHANNELS))
        pad = layers.SpatialPadding2D(size // 2 - 1, "reflect", group=group)
        return keras.Sequential([image, pad, pool])

    return make


def resampled(basis, size, group):
    """Bilinear upsampling and a convolution, not a transposed convolution."""
    any_size = keras.Input((None, None, groups.get(group).order, CHANNELS))
    larger = layers.SpatialUpSampling2D(2, "bilinear", group=group)
    make = convolution(layers.GroupConv2D, CHANNELS)
    return keras.Sequential([any_size, larger, make(basis, size, group=group)])


def input_attention(basis, size, **options):
    """Input attention with this size of its spatial kernel."""
    options = {**filters_of(basis), **options}
    return layers.InputAttention(attention_kernel_size=size, **options)


def window_attention(layer):
    """Makes attention over windows with the weights of steerable filters."""

    def make(basis, size, group, **options):
        options = {**filters_of(basis), **window_of(basis), **options}
        made = layer(FILTERS, size, HEADS, group, **options)
        if basis == "pixel":
            # The initial values of the steerable layer.
            steerable = layer(FILTERS, size, HEADS, group)
            start = steerable.window_initializer
            made = layer(
                FILTERS, size, HEADS, group, window_initializer=start, **options
            )
        return made

    return make


def acmix(basis, size, group, **options):
    """ACmix with equal sizes of its convolution and attention."""
    options = {**filters_of(basis), **window_of(basis), **options}
    return layers.ACmix2D(
        FILTERS, size, size, num_heads=HEADS, group=group, **options
    )


def self_attention(layer, whole_image=False):
    """Makes group self-attention with the scale of its form."""

    def make(basis, size, group):
        width = FILTERS // HEADS
        # The scale of the scores in discs; None is that of the paper.
        scale = None if basis == "paper" else 1 / (4 * width**0.5)
        size = None if whole_image else size
        options = {"scale": scale, **window_of(basis)}
        return layer(FILTERS, width, HEADS, size, group, **options)

    return make


def multi_head_attention(basis, size, group, **options):
    """Multi-head attention, whose size is that of the images."""
    del size  # the layer learns it when it is built
    return layers.GroupMultiHeadAttention2D(
        HEADS, group, **filters_of(basis), **options
    )


def large_embedding(basis, size, group):
    """Multi-head attention whose embedding changes the output by a tenth."""
    # The initializer of the layer has numbers up to 0.05.
    largest = 0.75 if basis == "steerable" else 1.5
    start = keras.initializers.RandomUniform(-largest, largest)
    return multi_head_attention(basis, size, group, embedding_initializer=start)


LAYERS = {
    "LiftingConv2D": Kind(
        convolution(layers.LiftingConv2D, CHANNELS), True, dilates=True
    ),
    "GroupConv2D": Kind(
        convolution(layers.GroupConv2D, CHANNELS), dilates=True
    ),
    "GroupDepthwiseConv2D": Kind(convolution(layers.GroupDepthwiseConv2D)),
    "GroupSeparableConv2D": Kind(
        convolution(layers.GroupSeparableConv2D, CHANNELS)
    ),
    "GroupConv2D, strides 2": Kind(
        convolution(layers.GroupConv2D, CHANNELS, strides=2)
    ),
    "GroupConv2DTranspose, strides 2": Kind(
        # This padding is symmetric for filters of odd size.
        convolution(
            layers.GroupConv2DTranspose, CHANNELS, strides=2, padding="valid"
        )
    ),
    "SpatialUpSampling2D, GroupConv2D": Kind(resampled),
    "AttentiveLiftingConv2D": Kind(
        attentive(layers.AttentiveLiftingConv2D), True
    ),
    "AttentiveGroupConv2D": Kind(attentive(layers.AttentiveGroupConv2D)),
    "AttentiveGroupConv2D, channel": Kind(
        attentive(layers.AttentiveGroupConv2D, "channel")
    ),
    "AttentiveGroupConv2D, spatial": Kind(
        attentive(layers.AttentiveGroupConv2D, "spatial")
    ),
    "CoAttentiveLiftingConv2D": Kind(
        convolution(layers.CoAttentiveLiftingConv2D, CHANNELS), True
    ),
    "CoAttentiveGroupConv2D": Kind(
        convolution(layers.CoAttentiveGroupConv2D, CHANNELS)
    ),
    "InputAttention": Kind(input_attention),
    "StandAloneSelfAttention2D": Kind(
        window_attention(layers.StandAloneSelfAttention2D), dilates=True
    ),
    "SimpleAffineSelfConv2D": Kind(
        window_attention(layers.SimpleAffineSelfConv2D),
        bases=("paper", *BASES),
        dilates=True,
    ),
    "AffineSelfConv2D": Kind(
        window_attention(layers.AffineSelfConv2D),
        bases=("paper", *BASES),
        dilates=True,
    ),
    "ACmix2D": Kind(acmix, dilates=True),
    "LiftingSelfAttention2D": Kind(
        self_attention(layers.LiftingSelfAttention2D),
        True,
        ("paper", *BASES),
    ),
    "GroupSelfAttention2D": Kind(
        self_attention(layers.GroupSelfAttention2D), bases=("paper", *BASES)
    ),
    # The whole image is a square, so there is no disc.
    "LiftingSelfAttention2D, whole image": Kind(
        self_attention(layers.LiftingSelfAttention2D, whole_image=True),
        True,
        ("paper", "pixel"),
        whole_image=True,
    ),
    "GroupSelfAttention2D, whole image": Kind(
        self_attention(layers.GroupSelfAttention2D, whole_image=True),
        bases=("paper", "pixel"),
        whole_image=True,
    ),
    "GroupMultiHeadAttention2D": Kind(multi_head_attention, whole_image=True),
    "GroupMultiHeadAttention2D, large embedding": Kind(
        large_embedding, whole_image=True
    ),
    # Between layers. `SIZE` is odd, so windows with strides of 2 are odd too.
    "SpatialPooling2D, max": Kind(
        pooling("max"), bases=("steerable",), has_weights=False
    ),
    "SpatialPooling2D, binomial": Kind(
        pooling("binomial"), bases=("steerable",), has_weights=False
    ),
    **{
        f"SpatialPooling2D, {mode}, even": Kind(
            halving(mode), bases=("steerable",), has_weights=False, even=True
        )
        for mode in ("max", "mean", "binomial")
    },
}


def window(size: int) -> np.ndarray:
    """`(size, size)`: about one in the middle, and zero in the corners."""
    radius = np.hypot(*(np.indices((size, size)) - (size - 1) / 2))
    return np.exp(-((radius * SIZE / size / 16) ** 6))


def images(kind: str, count: int, seed: int, size: int = SIZE) -> np.ndarray:
    """`(count, size, size)`, with mean zero before they are darkened."""
    if kind == "smooth":
        noise = np.random.default_rng(seed).normal(size=(count, size, size))
        found = ndimage.gaussian_filter(noise, (0, 2, 2))
    else:
        photographs = test_images(DATASETS[kind], size)
        places = np.arange(seed * count, (seed + 1) * count)
        found = photographs[places % len(photographs)]
    return found / found.std() * window(size)


@functools.cache
def test_images(dataset: str, size: int) -> np.ndarray:
    """Images `(count, size, size)` in shades of grey, each with mean zero."""
    found = np.asarray(datasets.load_pydataset(dataset, "test", 180)[0][0])
    found = found.mean(axis=-1)
    missing = size - found.shape[1]
    if missing > 0:
        pads = (missing // 2, missing - missing // 2)
        found = np.pad(found, ((0, 0), pads, pads), "reflect")
    first = (found.shape[1] - size) // 2
    found = found[:, first : first + size, first : first + size]
    return found - found.mean(axis=(1, 2), keepdims=True)


def turned(x: np.ndarray, group: groups.Group, element: int) -> np.ndarray:
    """`L_g x` of images or feature maps on a group, by splines."""
    flip, step = divmod(element, group.rotations)
    y = x[:, :, ::-1] if flip else x
    angle = 360 * step / group.rotations
    if step:
        y = ndimage.rotate(y, angle, axes=(2, 1), reshape=False, order=5)
    if x.ndim == 5:
        # Element h of the result is g^-1 h of what is turned.
        y = y[:, :, :, group.relative_table[element]]
    return y


def check_direction(group: groups.Group) -> None:
    """Raises unless `turned` turns as the library does."""
    x = np.random.default_rng(0).normal(size=(1, 9, 9, group.order, 1))
    for element in group.grid_elements:
        expected = keras.ops.convert_to_numpy(group_action(x, group, element))
        np.testing.assert_allclose(
            turned(x, group, element), expected, atol=1e-6
        )


def measured_elements(group: groups.Group) -> list[int]:
    """The elements that turn by at most 90 degrees, mirrored ones included."""
    steps = range(group.rotations // 4 + 1)
    flips = range(group.order // group.rotations)
    return [flip * group.rotations + step for flip in flips for step in steps]


def inner_disc(size: int) -> np.ndarray:
    """`(size, size)`: whether a pixel of an output is compared."""
    radius = np.hypot(*(np.indices((size, size)) - (size - 1) / 2))
    return radius < DISC * size / SIZE


def errors(
    function, x: np.ndarray, group: groups.Group
) -> tuple[np.ndarray, float]:
    """The error of each measured element, and how far poses lie apart."""
    found = []
    y = function(x)
    inside = inner_disc(y.shape[1])
    largest = np.abs(y)[:, inside].max()
    for element in measured_elements(group):
        expected = turned(y, group, element)
        actual = function(turned(x, group, element))
        difference = np.abs(actual - expected)[:, inside].max()
        found.append(difference / largest)
    # Feature maps have their poses on axis 3.
    spread = np.ptp(y, axis=3)[:, inside].max()
    return np.array(found), spread / largest


def new_layer(name, group, basis, size, seed, dilation=1):
    """A layer with the weights that it starts with."""
    keras.utils.set_random_seed(seed)
    options = {"dilation_rate": dilation} if LAYERS[name].dilates else {}
    return LAYERS[name].make(basis, size, group=group, **options)


@functools.cache
def photographs() -> tuple[np.ndarray, np.ndarray]:
    """Some photographs of CIFAR-10 in shades of grey, and their classes.

    They are half as large, with one row and one column more.
    """
    x, y = datasets.load_pydataset("cifar10", "train", PHOTOGRAPHS)[0]
    x = np.asarray(x).mean(axis=-1, keepdims=True)
    x = x.reshape(len(x), 16, 2, 16, 2, 1).mean(axis=(2, 4))
    missing = SMALL - x.shape[1]
    x = np.pad(x, ((0, 0), (0, missing), (0, missing), (0, 0)), "edge")
    return (x - x.mean()) / x.std(), np.asarray(y)


def trained_layer(name, group, basis, size, seed, dilation=1):
    """A layer that has learnt in a small network."""
    layer = new_layer(name, group, basis, size, seed, dilation)
    inputs = keras.Input((SMALL, SMALL, 1))
    x = inputs
    if not LAYERS[name].takes_images:
        lifting = new_layer("LiftingConv2D", group, basis, 5, seed)
        x = keras.layers.ReLU()(lifting(x))
    x = layer(x)
    x = layers.GroupPooling("max")(keras.layers.ReLU()(x))
    x = keras.layers.GlobalAveragePooling2D()(x)
    network = keras.Model(inputs, keras.layers.Dense(10)(x))
    network.compile(
        keras.optimizers.Adam(3e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    x, y = photographs()
    rng = np.random.default_rng(seed)
    for epoch in range(EPOCHS):
        poses = np.array([np.rot90(i, rng.integers(4)) for i in x])
        network.fit(
            poses, y, 64, epochs=epoch + 1, initial_epoch=epoch, verbose=0
        )
    return layer


def input_axes(name, group) -> tuple[int, ...]:
    """The axes of the input after height and width."""
    return (1,) if LAYERS[name].takes_images else (group.order, CHANNELS)


def image_size(name, size) -> int:
    """Rows and columns of the images that a layer is measured on."""
    if LAYERS[name].whole_image:
        return size
    return EVEN_SIZE if LAYERS[name].even else SIZE


# At least as many as draws: all kinds of images share the layers.
@functools.lru_cache(maxsize=8)
def function_of(name, group, basis, size, seed, trained, dilation):
    """A layer as a function of arrays."""
    make = trained_layer if trained else new_layer
    layer = make(name, group, basis, size, seed, dilation)
    side = image_size(name, size)
    shape = (side, side, *input_axes(name, group))
    # A model computes no gradients when it predicts.
    model = keras.Sequential([keras.Input(shape), layer])

    def function(x):
        y = model.predict_on_batch(x.astype("float32"))
        return np.asarray(y, "float64")

    return function


def measure(name, group, basis, size, kind, draws, trained=False, dilation=1):
    """Mean error of each measured element over several layers and images."""
    group = groups.get(group)
    rest = input_axes(name, group)
    side = image_size(name, size)
    found, spreads, of_input = [], [], []
    for seed in range(draws):
        count = int(np.prod(rest))
        x = images(kind, count, seed, side)
        x = np.moveaxis(x, 0, -1).reshape(1, side, side, *rest)
        function = function_of(
            name, group, basis, size, seed, trained, dilation
        )
        of_elements, spread = errors(function, x, group)
        found.append(of_elements)
        spreads.append(spread)
        there = turned(x, group, 1)
        back = turned(there, group, int(group.inverse[1]))
        of_input.append(np.abs(back - x).max() / np.abs(x).max())
    elements = measured_elements(group)
    return {
        "layer": name,
        "group": group.name,
        "basis": basis,
        "kernel_size": size,
        "images": kind,
        "weights": "trained" if trained else "new",
        "angles": [
            360 * (n % group.rotations) / group.rotations for n in elements
        ],
        "mirrored": [n >= group.rotations for n in elements],
        "errors": np.mean(found, axis=0).tolist(),
        "pose_spread": float(np.mean(spreads)),
        "identity": float(np.mean(of_input)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", nargs="+", choices=LAYERS)
    parser.add_argument("--groups", nargs="+", default=["p8"])
    parser.add_argument("--sizes", nargs="+", type=int)
    parser.add_argument(
        "--images", nargs="+", choices=IMAGES, default=list(IMAGES)
    )
    parser.add_argument("--draws", type=int, default=1)
    parser.add_argument("--dilation", type=int, default=1)
    parser.add_argument("--whole-image", action="store_true")
    parser.add_argument("--even", action="store_true")
    parser.add_argument("--trained", action="store_true")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    dilated = options.dilation > 1
    if options.whole_image + (options.trained or dilated) + options.even > 1:
        parser.error(
            "--whole-image and --even go neither together nor with --trained "
            "or --dilation."
        )
    sizes = [3, 5, 7]
    if options.whole_image or options.even:
        sizes = list(EVEN_WINDOWS if options.even else WHOLE_IMAGES)
    everything = {
        "layers": [
            name
            for name, kind in LAYERS.items()
            if (kind.has_weights or not options.trained)
            and (kind.dilates or not dilated)
            and kind.whole_image == options.whole_image
            and kind.even == options.even
        ],
        "sizes": sizes,
        "images": list(IMAGES),
    }
    options.layers = options.layers or everything["layers"]
    options.sizes = options.sizes or everything["sizes"]
    if options.even and any(size % 2 for size in options.sizes):
        parser.error(f"--even needs even --sizes. Received: {options.sizes}")
    for name in options.layers:
        if options.trained and not LAYERS[name].has_weights:
            parser.error(f"{name} has no weights, so it cannot be trained.")
        if dilated and not LAYERS[name].dilates:
            parser.error(f"{name} has no dilation rate.")
        if LAYERS[name].whole_image and not options.whole_image:
            parser.error(f"{name} is measured with --whole-image.")
        if options.whole_image and not LAYERS[name].whole_image:
            parser.error(f"{name} does not attend to the whole image.")
        if LAYERS[name].even != options.even:
            only = "only" if LAYERS[name].even else "not"
            parser.error(f"{name} is {only} measured with --even.")
    for group in options.groups:
        check_direction(groups.get(group))
    what = [*options.groups, *["trained"] * options.trained]
    what += [f"dilation_{options.dilation}"] * dilated
    what += ["whole_image"] * options.whole_image
    what += ["even"] * options.even
    what += [f"draws_{options.draws}"] * (options.draws > 1)
    for name, values in everything.items():
        chosen = getattr(options, name)
        what += map(str, chosen) if chosen != values else []
    kind = f"angles-{'_'.join(what)}"
    settings = vars(options)
    resume = settings.pop("resume")
    rows = report_files.earlier(kind, settings, "rows") if resume else []
    measured = {tuple(row[key] for key in CASE) for row in rows}
    cases = [
        (name, group, basis, size, images)
        for name in options.layers
        for group, basis, size, images in itertools.product(
            options.groups, LAYERS[name].bases, options.sizes, options.images
        )
    ]
    for case in cases:
        if case in measured:
            continue
        row = measure(
            *case,
            draws=options.draws,
            trained=options.trained,
            dilation=options.dilation,
        )
        rows.append(row)
        print(
            f"{' '.join(map(str, case))}: {max(row['errors']):.3f}, "
            f"identity {row['identity']:.3f}",
            flush=True,
        )
        results = {"benchmark": "angles.py", "settings": settings}
        report_files.write(kind, {**results, "rows": rows})


if __name__ == "__main__":
    main()
