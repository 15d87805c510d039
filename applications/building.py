"""What the networks share: argument checks, widths, input and output ends."""

import dataclasses
import math
import os
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_equiattn import _checks
from keras_equiattn import layers
from keras_equiattn.applications import _sizes
from keras_equiattn.groups import Group
from keras_equiattn.ops._types import Shape

# What `attention` of a network can be.
ATTENTION = (None, "full", "channel", "spatial", "input", "co")
# What `downsampling` of a network can be.
DOWNSAMPLING = ("exact", "strided")
# What networks for ImageNet can end with instead of a classifier.
POOLING = (None, "avg", "max")

WEIGHTS_FOLDER = Path(__file__).parent / "weights"
Statistics = tuple[float | Sequence[float], float | Sequence[float]]


@dataclasses.dataclass(frozen=True)
class ShippedWeights:
    """Trained weights in the package, and the input scaling they expect."""

    file: str
    normalization: Statistics
    input_shape: tuple[int, int, int]
    classes: int

    @property
    def path(self) -> Path:
        return WEIGHTS_FOLDER / self.file


def group_width(planar_width: int, group: Group, multiple: int = 1) -> int:
    """Channels per group element that keep the number of parameters.

    The planar width over `sqrt(order)`, rounded to the nearest multiple, at
    least one multiple.
    """
    width = planar_width / math.sqrt(group.order)
    return max(1, round(width / multiple)) * multiple


@dataclasses.dataclass(frozen=True)
class AttentionSettings:
    """How the attention of one layer is built, where there is any.

    Attributes:
        reduction_ratio: input channels per hidden unit of channel attention.
        kernel_size, dilation_rate: of spatial attention.
        scale: half-width of the uniform start of the spatial kernels, times
            `sqrt(channels) * kernel_size`.
    """

    reduction_ratio: int = 16
    kernel_size: int = 7
    dilation_rate: int = 1
    scale: float = 1.0


def group_convolution(
    x: Any,
    filters: int,
    kernel_size: int,
    *,
    group: Group,
    attention: str | None,
    settings: AttentionSettings,
    name: str,
    **options: Any,
) -> Any:
    """A convolution of images or feature maps, with attention or without.

    Without bias, as everywhere in these networks. Input attention is a layer
    of its own, `<name>_attention`.

    Args:
        x: images or feature maps on the group.
        filters, kernel_size: of the convolution.
        group: the group.
        attention: one of `ATTENTION`.
        settings: of the attention.
        name: of the layer.
        **options: more arguments of the convolution.

    Returns:
        A feature map on the group.
    """
    lifting = len(x.shape) == 4
    channels = x.shape[-1]
    layer: Any
    options = {
        "group": group,
        "use_bias": False,
        "data_format": "channels_last",
        "name": name,
        **options,
    }
    if attention is None or attention == "input":
        if attention == "input":
            x = layers.InputAttention(
                data_format="channels_last",
                group=group,
                name=f"{name}_attention",
                **_attention_arguments(settings, haar(group)),
            )(x)
        layer = layers.LiftingConv2D if lifting else layers.GroupConv2D
        return layer(filters, kernel_size, **options)(x)
    if attention == "co":
        layer = (
            layers.CoAttentiveLiftingConv2D
            if lifting
            else layers.CoAttentiveGroupConv2D
        )
        bound = settings.scale / math.sqrt(channels)
        if not lifting:
            bound *= haar(group)
        return layer(
            filters,
            kernel_size,
            attention_initializer=uniform(bound),
            **options,
        )(x)
    layer = (
        layers.AttentiveLiftingConv2D
        if lifting
        else layers.AttentiveGroupConv2D
    )
    arguments = _attention_arguments(settings)
    hidden = max(1, channels // settings.reduction_ratio)
    order = 1 if lifting else group.order
    arguments["channel_kernel_initializer"] = uniform(
        1 / math.sqrt(hidden * channels * order)
    )
    return layer(
        filters, kernel_size, attention=attention, **arguments, **options
    )(x)


def haar(group: Group) -> float:
    """The constant by which the authors' code multiplies sums over the group.

    Ours is part of the kernels; where nothing rescales a kernel later, it
    starts with this factor: pi / 2 for p4 and pi for p4m, as theirs, and at
    most pi for other groups.
    """
    if group.order == 1:
        return 1.0
    copies = group.order // group.rotations
    return math.pi * min(1.0, 2 * copies / group.rotations)


def uniform(bound: float) -> keras.initializers.Initializer:
    """Uniform within the bound on both sides."""
    return keras.initializers.RandomUniform(-bound, bound)


def _attention_arguments(
    settings: AttentionSettings, factor: float = 1.0
) -> dict[str, Any]:
    # The spatial filter sees mean and maximum.
    bound = settings.scale / (math.sqrt(2) * settings.kernel_size)
    return {
        "reduction_ratio": settings.reduction_ratio,
        "attention_kernel_size": settings.kernel_size,
        "attention_dilation_rate": settings.dilation_rate,
        "spatial_kernel_initializer": uniform(factor * bound),
    }


# Shipped weights by (group, attention, filters), then by name.
Shipped = Mapping[tuple[str, str | None, int], Mapping[str, ShippedWeights]]


class Network:
    """Checks the arguments that all networks share, and builds with them.

    Args:
        kind: name of the constructor, for messages.
        group, attention, filters, input_shape, classes, classifier_activation,
            normalization, downsampling, weights: of the constructor; `filters`
            is a number here.
        planar: makes the initialiser of kernels of the group `z2`.
        scale: half-width of the uniform start of all other kernels, times
            `sqrt(channels) * kernel_size`.
        windows: what feature maps go through, see `_sizes.check`.
        shipped: the weights that are shipped, of exact networks.
        choices: see `_sizes.check`.

    Raises:
        ValueError: for bad arguments.
    """

    def __init__(
        self,
        kind: str,
        *,
        group: Group,
        attention: str | None,
        filters: int,
        input_shape: tuple[int, int, int],
        classes: int,
        classifier_activation: str | None,
        normalization: Statistics | None,
        downsampling: str,
        weights: str | Path | None,
        planar: Callable[[], keras.initializers.Initializer],
        scale: float = 1.0,
        windows: _sizes.Windows = lambda exact: (),
        shipped: Shipped | None = None,
        choices: tuple[str, str] = _sizes.CHOICES,
    ) -> None:
        self.kind = kind
        self.group = group
        self.attention = _checks.choice(attention, "attention", ATTENTION)
        self.filters = _checks.integer(filters, "filters")
        self.classes = _checks.integer(classes, "classes")
        keras.activations.get(classifier_activation)  # raises for unknown ones
        self.classifier_activation = classifier_activation
        self.downsampling = _checks.choice(
            downsampling, "downsampling", DOWNSAMPLING
        )
        self.exact = downsampling == "exact"
        self.input_shape = check_image_shape(input_shape)
        _sizes.check(
            kind, self.input_shape, group, windows, self.exact, choices
        )
        self.planar = planar
        self.scale = scale
        self.weights = weights
        key = (group.name, attention, self.filters)
        self.shipped = (shipped or {}).get(key, {}) if self.exact else {}
        found = check_weights(
            weights, self.shipped, kind, self.input_shape, self.classes
        )
        if found and normalization is None:
            normalization = found.normalization
        self.statistics = check_normalization(
            normalization, self.input_shape[-1]
        )

    def start(self) -> tuple[Any, Any]:
        """The images, and the images normalised."""
        inputs = keras.Input(self.input_shape, name="image")
        return inputs, normalize(inputs, self.statistics)

    def convolution(
        self,
        x: Any,
        filters: int,
        kernel_size: int,
        settings: AttentionSettings,
        *,
        name: str,
        rescaled: bool = True,
        **options: Any,
    ) -> Any:
        """`group_convolution` of this network, started as the authors do.

        Args:
            x, filters, kernel_size, settings, name: see `group_convolution`.
            rescaled: whether batch normalisation of these channels alone takes
                the scale of the kernel away. Otherwise it starts with the
                authors' constant, see `haar`.
            **options: more arguments of the convolution.
        """
        lifting = len(x.shape) == 4
        constant = 1.0 if rescaled or lifting else haar(self.group)
        return group_convolution(
            x,
            filters,
            kernel_size,
            group=self.group,
            attention=self.attention,
            settings=settings,
            kernel_initializer=self._kernel_initializer(lifting, constant),
            name=name,
            **options,
        )

    def halving_convolution(
        self,
        x: Any,
        filters: int,
        kernel_size: int,
        settings: AttentionSettings,
        *,
        name: str,
        pool: str,
        mode: str = "max",
        **options: Any,
    ) -> Any:
        """A convolution and 2 x 2 pooling, or one with strides of 2.

        Args:
            x, filters, kernel_size, settings, name: see `convolution`.
            pool: name of the pooling layer.
            mode: of the pooling layer.
            **options: more arguments of `convolution`.
        """
        if not self.exact:
            options |= {"strides": 2, "exact": False}
        x = self.convolution(
            x, filters, kernel_size, settings, name=name, **options
        )
        return self.pool(x, pool, mode) if self.exact else x

    def pool(self, x: Any, name: str, mode: str = "max") -> Any:
        """2 x 2 pooling with strides of 2."""
        return layers.SpatialPooling2D(
            2,
            mode=mode,
            group=self.group,
            data_format="channels_last",
            name=name,
        )(x)

    def finish(self, inputs: Any, x: Any, name: str) -> keras.Model:
        """The model from images to logits, its weights loaded."""
        outputs = predictions(x, self.classifier_activation)
        model = keras.Model(inputs, outputs, name=name)
        load_weights(model, self.weights, self.shipped)
        return model

    @property
    def suffix(self) -> str:
        """What follows the group in the name of the model."""
        parts = (self.attention, None if self.exact else self.downsampling)
        return "".join(f"_{part}" for part in parts if part)

    def _kernel_initializer(
        self, lifting: bool, constant: float
    ) -> keras.initializers.Initializer:
        # A new one each time: one initialiser draws the same values again.
        if self.group.order == 1:
            return self.planar()
        # Uniform within scale / sqrt(channels k^2): the authors' fan-in leaves
        # out the order, ours has it where the kernel has it.
        order = 1 if lifting else self.group.order
        return keras.initializers.VarianceScaling(
            order * (self.scale * constant) ** 2 / 3, "fan_in", "uniform"
        )


# Of the residual and dense networks: the variance before a ReLU is kept.
HE_SCALE = math.sqrt(2)


def he_normal() -> keras.initializers.Initializer:
    """Normal with variance `2 / fan-in`."""
    return keras.initializers.VarianceScaling(
        2.0, mode="fan_in", distribution="untruncated_normal"
    )


def batch_norm(x: Any, name: str, **options: Any) -> Any:
    """Batch normalisation with the constants of all networks."""
    return keras.layers.BatchNormalization(
        momentum=0.9, epsilon=2e-5, name=name, **options
    )(x)


def batch_norm_relu(x: Any, names: str) -> Any:
    """Batch normalisation and ReLU; "block1_{}" names them "block1_bn", ..."""
    x = batch_norm(x, names.format("bn"))
    return keras.layers.ReLU(name=names.format("relu"))(x)


def global_mean(x: Any) -> Any:
    """The mean over space and group: `(batch, channels)`, invariant."""
    return keras.layers.GlobalAveragePooling3D(
        data_format="channels_last", dtype=_end_dtype(), name="global_mean"
    )(x)


def logits(x: Any, classes: int, use_bias: bool = True) -> Any:
    """A dense layer to the classes."""
    return keras.layers.Dense(
        classes,
        use_bias=use_bias,
        kernel_initializer=he_normal(),
        dtype=_end_dtype(),
        name="logits",
    )(x)


@dataclasses.dataclass(frozen=True)
class End:
    """What networks for ImageNet end with, as those of `keras.applications`.

    Attributes:
        include_top: whether there is a classifier.
        pooling: without it: None for none, "avg" or "max" over space.
        classes: number of classes.
        classifier_activation: of the classifier; None for logits.
        features_only: whether the maps of all stages are returned instead.
    """

    include_top: bool
    pooling: str | None
    classes: int
    classifier_activation: str | None
    features_only: bool

    def __post_init__(self) -> None:
        _checks.flag(self.include_top, "include_top")
        _checks.choice(self.pooling, "pooling", POOLING)
        _checks.integer(self.classes, "classes")
        keras.activations.get(self.classifier_activation)
        _checks.flag(self.features_only, "features_only")
        if self.features_only and (self.include_top or self.pooling):
            raise ValueError(
                "`features_only` returns feature maps, without classifier and "
                "pooling. Received: features_only=True, "
                f"include_top={self.include_top}, pooling={self.pooling!r}"
            )

    def __call__(self, features: Sequence[Any], summary: Any = None) -> Any:
        """The outputs.

        Args:
            features: maps of the stages.
            summary: what the classifier takes; None for the mean over space
                of the last map.
        """
        if self.features_only:
            return list(features)
        *_, x = features
        if self.include_top:
            x = self._pooled(x, "mean") if summary is None else summary
            x = logits(x, self.classes)
            return predictions(x, self.classifier_activation)
        if self.pooling is None:
            return x
        return self._pooled(x, "max" if self.pooling == "max" else "mean")

    def _pooled(self, x: Any, kind: str) -> Any:
        layer = {
            "mean": keras.layers.GlobalAveragePooling2D,
            "max": keras.layers.GlobalMaxPooling2D,
        }[kind]
        return layer(
            data_format="channels_last",
            dtype=_end_dtype(),
            name=f"global_{kind}",
        )(x)


def imagenet_network(
    title: str,
    stages: Callable[[Any], Any],
    *,
    include_top: bool,
    weights: str | Path | None,
    input_shape: Shape,
    pooling: str | None,
    classes: int,
    classifier_activation: str | None,
    name: str | None,
    normalization: Statistics | None,
    features_only: bool,
) -> keras.Model:
    """A network with the arguments of those of `keras.applications`.

    Args:
        title: what to call it in messages and, in lower case, by default.
        stages: from normalised images to the feature maps of the stages, and
            what else an `End` takes, as a tuple.
        include_top, pooling, classes: see `End`.
        classifier_activation, features_only: see `End`.
        weights: None or the path of a weights file.
        input_shape: `(height, width, channels)`; height and width may be
            None.
        name: of the model; None for the title.
        normalization: see `check_normalization`.
    """
    end = End(
        include_top, pooling, classes, classifier_activation, features_only
    )
    shape = check_image_shape(input_shape, any_size=True)
    check_weights(weights, {}, title, shape, end.classes)
    statistics = check_normalization(normalization, shape[-1])
    inputs = keras.Input(shape, name="image")
    outputs = end(*stages(normalize(inputs, statistics)))
    model = keras.Model(inputs, outputs, name=name or title.lower())
    load_weights(model, weights, {})
    return model


def check_image_shape(input_shape: Any, any_size: bool = False) -> Any:
    """An image shape `(height, width, channels)` of positive integers.

    Args:
        input_shape: the shape asked for.
        any_size: whether height and width may be None.
    """
    try:
        *size, channels = input_shape
        height, width = (
            n if any_size and n is None else _checks.integer(n, "input_shape")
            for n in size
        )
        return height, width, _checks.integer(channels, "input_shape")
    except (TypeError, ValueError):
        unknown = "; height and width may be None" if any_size else ""
        raise ValueError(
            "`input_shape` must be (height, width, channels), positive "
            f"integers{unknown}. Received: {input_shape!r}"
        ) from None


def check_normalization(
    normalization: Statistics | None, channels: int
) -> tuple[list[float], list[float]] | None:
    """Mean and standard deviation per channel as two lists, or None."""
    if normalization is None:
        return None
    try:
        mean, std = (
            np.broadcast_to(np.asarray(part, "float64"), (channels,)).tolist()
            for part in normalization
        )
    except (TypeError, ValueError):
        mean, std = [np.nan], [np.nan]
    if not np.isfinite([*mean, *std]).all() or min(std) <= 0:
        raise ValueError(
            "`normalization` must be (mean, std), numbers or one number per "
            f"channel ({channels}), std positive. Received: {normalization!r}"
        )
    return mean, std


def normalize(
    x: Any, statistics: tuple[list[float], list[float]] | None
) -> Any:
    """`(x - mean) / std` as a layer, or x itself."""
    if statistics is None:
        return x
    mean, std = statistics
    return keras.layers.Normalization(
        axis=-1, mean=mean, variance=[s * s for s in std], name="normalization"
    )(x)


def predictions(x: Any, activation: str | None) -> Any:
    """The last layer; half precision ends before it."""
    return keras.layers.Activation(
        activation, dtype=_end_dtype(), name="predictions"
    )(x)


def _end_dtype() -> str | None:
    """Of the layers at the end: float32 instead of half precision."""
    half = keras.config.dtype_policy().compute_dtype in ("float16", "bfloat16")
    return "float32" if half else None


def load_weights(
    model: keras.Model,
    weights: str | Path | None,
    shipped: Mapping[str, ShippedWeights],
) -> None:
    """Loads shipped weights by name, or a file by path."""
    if weights is None:
        return
    path = shipped[str(weights)].path if weights in shipped else weights
    model.load_weights(path)


def check_weights(
    weights: str | Path | None,
    shipped: Mapping[str, ShippedWeights],
    network: str,
    input_shape: Shape,
    classes: int,
) -> ShippedWeights | None:
    """Finds out what `weights` means before a network is built.

    Args:
        weights: None, the name of shipped weights or a path.
        shipped: what is shipped for this network, by name.
        network: what to call the network in messages.
        input_shape: image shape asked for.
        classes: number of classes asked for.

    Returns:
        The shipped weights that were named, or None.
    """
    if weights is None:
        return None
    if weights in shipped:
        found = shipped[str(weights)]
        if (found.input_shape, found.classes) != (input_shape, classes):
            raise ValueError(
                f"weights={str(weights)!r} were trained with "
                f"input_shape={found.input_shape}, classes={found.classes}. "
                f"Received: input_shape={input_shape}, classes={classes}"
            )
        return found
    is_path = isinstance(weights, (str, os.PathLike))
    endings = (".weights.h5", ".keras")
    if (
        not is_path
        or not os.fspath(weights).endswith(endings)
        or not Path(weights).is_file()
    ):
        names = ", ".join(map(repr, shipped)) or "none for this network"
        raise ValueError(
            f"`weights` of {network} must be None, the name of shipped "
            f"weights ({names}) or the path of a .weights.h5 or .keras file "
            f"that exists. Received: {weights!r}"
        )
    return None
