"""Counts what ACmix costs: its two stages, and the networks of all papers.

It counts the multiply-adds of linear maps and mixers, and parameters; nothing
runs. The commands are `stages` and `networks` of `benchmarks/acmix.py`.
"""

import math
from collections.abc import Sequence

import keras

from keras_equiattn import applications
from keras_equiattn import layers


def stages(widths: Sequence[int]) -> dict:
    """Parameters, and multiply-adds for each pixel, of the two stages."""
    found = {}
    for width in widths:
        layer = layers.ACmix2D(width, data_format="channels_last")
        layer.build((None, None, None, width))
        parameters = {"projection": 0, "aggregation": 0}
        for variable in layer.trainable_variables:
            first = variable.name.split("_")[0] in ("query", "key", "value")
            stage = "projection" if first else "aggregation"
            parameters[stage] += math.prod(variable.shape)
        maps, neighbours = layer.mixing_kernel.shape
        seen = math.prod(layer.attention_kernel_size)
        per_head = width // layer.num_heads
        attention = 2 * seen * width + 2 * per_head
        mixing = maps * neighbours * per_head
        shifting = neighbours**2 * width
        found[f"{width} channels"] = {
            "parameters": with_shares(parameters),
            "multiply-adds": with_shares(
                {
                    "projection": 3 * width**2,
                    "aggregation": attention + mixing + shifting,
                }
            ),
            "aggregation": {
                "attention": attention,
                "mixing": mixing,
                "shift kernels": shifting,
                "mixing and shift kernels in one, grouped": maps
                * neighbours
                * width,
                "with the projections in one, dense": neighbours * width**2,
            },
            "convolution of the same width": neighbours * width**2,
        }
    return {
        "benchmark": "parameters of ACmix2D and multiply-adds for a pixel: "
        "linear maps (projection) and what follows (aggregation), as the paper "
        "counts; the layer puts all of the second path into one convolution",
        "stages": found,
    }


def networks() -> dict:
    """Multiply-adds of networks, and parameters, also when folded."""
    found = {}
    for network, plain in NETWORKS.items():
        model = network()
        total = of_network(model)
        total["plain"] = of_network(network(mixer=plain))["dense"]
        found[network.__name__] = {
            "multiply-adds": total,
            "parameters": model.count_params(),
        }
        foldable = [x for x in model.layers if isinstance(x, layers.ACmix2D)]
        if foldable:
            found[network.__name__]["parameters, folded"] = (
                model.count_params()
                + sum(
                    layer.folded().count_params() - layer.count_params()
                    for layer in foldable
                )
            )
    return {
        "benchmark": "multiply-adds of networks on an image, with dense and "
        "with grouped convolutions, for putting the dense kernels together, "
        "and of the plain networks; parameters, with moving statistics",
        "networks": found,
    }


def of_network(model: keras.Model) -> dict[str, int]:
    """Multiply-adds of maps and mixers; norms and the like are left out."""
    total = dict.fromkeys(("dense", "grouped", "kernels"), 0)
    for layer in model.layers:
        count = of_map(layer)
        counts = {"dense": count, "grouped": count}
        for kind, of_mixer in MIXERS.items():
            if isinstance(layer, kind):
                counts = of_mixer(layer)
        for form, count in counts.items():
            total[form] += count
    return total


def of_map(layer: keras.layers.Layer) -> int:
    """Multiply-adds of a convolution or a dense layer; 0 for other layers."""
    if not isinstance(layer, (keras.layers.Conv2D, keras.layers.Dense)):
        return 0
    pixels = math.prod(layer.output.shape[1:-1])
    return pixels * math.prod(layer.kernel.shape)


def of_acmix(layer: layers.ACmix2D) -> dict[str, int]:
    """Multiply-adds of a layer on an image, and of putting its kernel together.

    Position terms and biases are left out.
    """
    before, after = pixels(layer)
    channels, filters = layer.query_kernel.shape[1:]
    shared = (
        channels * filters * (after + 2 * before)  # one query per output pixel
        + 2 * math.prod(layer.attention_kernel_size) * filters * after
    )
    counts = with_shared(of_convolution(layer, channels), shared)
    # This form needs the queries of all pixels of the input, too.
    counts["grouped"] += channels * filters * (before - after)
    return counts


def of_window(layer: layers.WindowACmix2D) -> dict[str, int]:
    """As `of_acmix`."""
    _, after = pixels(layer)
    channels, filters = layer.query_kernel.shape[1:]
    shared = after * (
        3 * channels * filters
        + 2 * math.prod(layer.window_size) * filters
        + filters**2  # the linear map of the output
    )
    return with_shared(of_convolution(layer, channels), shared)


def of_patchwise(layer: layers.PatchwiseACmix2D) -> dict[str, int]:
    """As `of_acmix`, without strides."""
    _, after = pixels(layer)
    channels, filters = layer.value_kernel.shape[1:]
    keys = layer.key_filters
    heads, neighbours = filters // layer.share, len(layer.window.offsets)
    shared = after * (
        channels * (2 * keys + filters)
        + (1 + neighbours) * keys * heads  # features of a window
        + heads * neighbours * heads  # its weights
        + neighbours * filters  # what they weigh
    )
    return with_shared(of_convolution(layer, channels), shared)


def of_spatial_reduction(
    layer: layers.SpatialReductionACmix2D,
) -> dict[str, int]:
    """As `of_acmix`, with tokens; keys and values are repeated for mixing."""
    _, after = pixels(layer)
    size = keras.tree.flatten(layer.output)[0].shape[1:3]
    tokens = sum(x.shape[1] for x in keras.tree.flatten(layer.input)[1:])
    reduced = math.prod(
        -(-n // r) for n, r in zip(size, layer.reduction, strict=True)
    )
    channels, filters = layer.query_kernel.shape[1:]
    rows, seen = after + tokens, reduced + tokens
    shared = (
        channels * filters * (rows + 2 * seen)
        + 2 * filters * rows * seen
        + filters**2 * rows  # the linear map of the output
    )
    if layer.reduces:
        shared += math.prod(layer.reduction_kernel.shape) * reduced
        channels *= 2  # the convolution sees both images
    return with_shared(of_convolution(layer, channels), shared)


def of_convolution(layer: keras.layers.Layer, channels: int) -> dict[str, int]:
    """Multiply-adds of the convolution path; 0 if there is none.

    "grouped" leaves out the linear maps before the mixing.

    Args:
        layer: the mixer.
        channels: number of channels that the path sees.
    """
    if not layer.convolves:
        return dict.fromkeys(("dense", "grouped", "kernels"), 0)
    before, after = pixels(layer)
    maps, neighbours = layer.mixing_kernel.shape
    filters = layer.filters
    mixing = maps * neighbours * layer.convolution_path.size * before
    shifting = neighbours**2 * filters * after
    return {
        "dense": neighbours * channels * filters * after,
        "grouped": mixing + shifting,
        "kernels": maps * neighbours * filters * (neighbours + channels),
    }


def with_shared(counts: dict[str, int], shared: int) -> dict[str, int]:
    """Adds what the dense and the grouped form share."""
    return {
        form: count + (form != "kernels") * shared
        for form, count in counts.items()
    }


def pixels(layer: keras.layers.Layer) -> tuple[int, int]:
    """The numbers of pixels of the input and of the output."""
    before, after = (
        math.prod(keras.tree.flatten(x)[0].shape[1:3])
        for x in (layer.input, layer.output)
    )
    return before, after


MIXERS = {
    layers.ACmix2D: of_acmix,
    layers.WindowACmix2D: of_window,
    layers.PatchwiseACmix2D: of_patchwise,
    layers.SpatialReductionACmix2D: of_spatial_reduction,
}
# The networks, and the mixers of the plain ones.
NETWORKS = {
    applications.ACmixResNet26: "conv",
    applications.ACmixResNet38: "conv",
    applications.ACmixResNet50: "conv",
    applications.ACmixSwinTiny: "attention",
    applications.ACmixSwinSmall: "attention",
    applications.ACmixSAN10: "attention",
    applications.ACmixSAN15: "attention",
    applications.ACmixSAN19: "attention",
    applications.ACmixPVTTiny: "attention",
    applications.ACmixPVTSmall: "attention",
}


def with_shares(counts: dict[str, int]) -> dict[str, float]:
    share = counts["aggregation"] / sum(counts.values())
    return {**counts, "share of aggregation": round(share, 3)}
