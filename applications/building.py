"""What group equivariant networks share: arguments, widths, blocks."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

from keras_equiattn import _checks
from keras_equiattn import layers
from keras_equiattn.applications import _sizes
from keras_equiattn.applications import ends
from keras_equiattn.groups import Group

# What `attention` of a network can be.
ATTENTION = (None, "full", "channel", "spatial", "input", "co")
# What `downsampling` of a network can be.
DOWNSAMPLING = ("exact", "strided")


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
        normalization: ends.Statistics | None,
        downsampling: str,
        weights: str | Path | None,
        planar: Callable[[], keras.initializers.Initializer],
        scale: float = 1.0,
        windows: _sizes.Windows = lambda exact: (),
        shipped: ends.Shipped | None = None,
        choices: tuple[str, str] = _sizes.CHOICES,
    ) -> None:
        self.kind = kind
        self.group = group
        self.attention = _checks.choice(attention, "attention", ATTENTION)
        self.filters = _checks.integer(filters, "filters")
        self.classes = _checks.integer(classes, "classes")
        ends.check_activation(classifier_activation)
        self.classifier_activation = classifier_activation
        self.downsampling = _checks.choice(
            downsampling, "downsampling", DOWNSAMPLING
        )
        self.exact = downsampling == "exact"
        self.input_shape = ends.check_image_shape(input_shape)
        _sizes.check(
            kind, self.input_shape, group, windows, self.exact, choices
        )
        self.planar = planar
        self.scale = scale
        self.weights = weights
        key = (group.name, attention, self.filters)
        self.shipped = (shipped or {}).get(key, {}) if self.exact else {}
        found = ends.check_weights(
            weights, self.shipped, kind, self.input_shape, self.classes
        )
        if found and normalization is None:
            normalization = found.normalization
        self.statistics = ends.check_normalization(
            normalization, self.input_shape[-1]
        )

    def start(self) -> tuple[Any, Any]:
        """The images, and the images normalised."""
        inputs = keras.Input(self.input_shape, name="image")
        return inputs, ends.normalize(inputs, self.statistics)

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
        outputs = ends.predictions(x, self.classifier_activation)
        model = keras.Model(inputs, outputs, name=name)
        ends.load_weights(model, self.weights, self.shipped)
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


def batch_norm(x: Any, name: str, **options: Any) -> Any:
    """Batch normalisation with the constants of all networks."""
    return keras.layers.BatchNormalization(
        momentum=0.9, epsilon=2e-5, name=name, **options
    )(x)


def batch_norm_relu(x: Any, names: str) -> Any:
    """Batch normalisation and ReLU; "block1_{}" names them "block1_bn", ..."""
    x = batch_norm(x, names.format("bn"))
    return keras.layers.ReLU(name=names.format("relu"))(x)
