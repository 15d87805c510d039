"""The tools that build group equivariant networks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

from keras_equiattn import _checks
from keras_equiattn import layers
from keras_equiattn.applications.networks.common import ends
from keras_equiattn.applications.networks.common import pretrained
from keras_equiattn.applications.networks.common import sizes
from keras_equiattn.applications.networks.common.convolution import ATTENTION
from keras_equiattn.applications.networks.common.convolution import (
    AttentionSettings,
)
from keras_equiattn.applications.networks.common.convolution import (
    group_convolution,
)
from keras_equiattn.applications.networks.common.convolution import haar
from keras_equiattn.applications.registry import Variants
from keras_equiattn.groups import Group

# The values of the argument `downsampling` of a network.
DOWNSAMPLING = (None, "exact", "antialiased", "strided")


def variants(name: str, settings: str) -> Variants:
    """Returns the variants of a network that takes `group` and `attention`.

    Args:
        name: the pattern of the names of the variants, with `{}` in place of
            the group.
        settings: "group" or "group_attention" for each variant, separated by
            spaces: "p4m_input" of `"net_{}"` is `net_p4m_input`.
    """
    found = {}
    for setting in settings.split():
        group, *attention = setting.split("_")
        found["_".join([name.format(group), *attention])] = {
            "group": group,
            "attention": next(iter(attention), None),
        }
    return found


class Network:
    """Checks the arguments that group networks share, and builds their layers.

    Args:
        kind: name of the constructor, for messages.
        group, attention, input_shape, classes: arguments of the constructor.
        classifier_activation, normalization: arguments of the constructor.
        downsampling, weights: arguments of the constructor.
        filters: the argument of the constructor, with None replaced by a
            number.
        planar: makes the initialiser of the kernels of the group `z2`.
        scale: half-width of the uniform distribution from which all other
            kernels start, times `sqrt(channels) * kernel_size`.
        windows: the windows that feature maps go through, see `sizes.check`.
        shipped: the weights that are shipped, see `pretrained.Shipped`.
        choices: see `sizes.check`; None where the network has the argument
            `downsampling`.

    Raises:
        ValueError: if an argument has a value that is not accepted.
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
        downsampling: str | None,
        weights: str | Path | None,
        planar: Callable[[], keras.initializers.Initializer],
        scale: float = 1.0,
        windows: sizes.Windows = lambda exact: (),
        shipped: pretrained.Shipped | None = None,
        choices: tuple[str, str] | None = None,
    ) -> None:
        self.kind = kind
        self.group = group
        self.attention = _checks.choice(attention, "attention", ATTENTION)
        self.filters = _checks.integer(filters, "filters")
        self.classes = _checks.integer(classes, "classes")
        ends.check_activation(classifier_activation)
        self.classifier_activation = classifier_activation
        _checks.choice(downsampling, "downsampling", DOWNSAMPLING)
        if downsampling is None:
            # A maximum over pixels is far off between the quarter turns.
            downsampling = "exact" if group.acts_on_grid else "antialiased"
        self.downsampling = downsampling
        self.exact = downsampling != "strided"
        if choices is None:
            choices = f"downsampling='{downsampling}'", "downsampling='strided'"
        self.input_shape = ends.check_image_shape(input_shape)
        sizes.check(kind, self.input_shape, group, windows, self.exact, choices)
        self.planar = planar
        self.scale = scale
        self.weights = weights
        key = (group.name, attention, self.filters, downsampling)
        self.shipped = (shipped or {}).get(key, {})
        found = pretrained.check_weights(
            weights, self.shipped, kind, self.input_shape, self.classes
        )
        if found and normalization is None:
            normalization = found.normalization
        self.statistics = ends.check_normalization(
            normalization, self.input_shape[-1]
        )

    def start(self) -> tuple[Any, Any]:
        """Returns the input of the model, and the normalised images."""
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
        """Applies `group_convolution`, initialised as in the authors' code.

        Args:
            x, filters, kernel_size, settings, name: see `group_convolution`.
            rescaled: whether the scale of the kernel does not matter, because
                batch normalisation of its channels alone follows. Otherwise the
                kernel starts with the authors' factor, see `haar`; attention on
                its responses starts as in all other layers.
            **options: more arguments of `group_convolution`.
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
        """Applies a convolution, and pooling or strides that halve the size.

        Args:
            x, filters, kernel_size, settings, name: see `convolution`.
            pool: name of the pooling layer.
            mode: "max" or "mean"; antialiased downsampling ignores it.
            **options: more arguments of `convolution`.
        """
        if not self.exact:
            options |= {"strides": 2, "exact": False}
        x = self.convolution(
            x, filters, kernel_size, settings, name=name, **options
        )
        return self.pool(x, pool, mode) if self.exact else x

    def pool(self, x: Any, name: str, mode: str = "max") -> Any:
        """Pools 2 x 2 pixels with strides of 2.

        With antialiased downsampling it takes a binomial mean of 4 x 4 pixels,
        after padding by one pixel on each side. The size of the output, and the
        sizes on which it is exact, are the same, so `sizes` needs no case for
        it.
        """
        size = 2
        if self.downsampling == "antialiased":
            x = self.pad(x, 1, f"{name}_pad", "reflect")
            size, mode = 4, "binomial"
        return layers.SpatialPooling2D(
            size,
            2,
            mode,
            group=self.group,
            data_format="channels_last",
            name=name,
        )(x)

    def pad(self, x: Any, pixels: int, name: str, mode: str = "zeros") -> Any:
        """Adds pixels at each side."""
        return layers.SpatialPadding2D(
            pixels,
            mode,
            group=self.group,
            data_format="channels_last",
            name=name,
        )(x)

    def finish(self, inputs: Any, x: Any, name: str) -> keras.Model:
        """Returns the model from images to logits, with its weights loaded."""
        outputs = ends.predictions(x, self.classifier_activation)
        model = keras.Model(inputs, outputs, name=name)
        pretrained.load_weights(model, self.weights, self.shipped)
        return model

    @property
    def suffix(self) -> str:
        """The end of the name of the model, after the group."""
        attention = f"_{self.attention}" if self.attention else ""
        return attention + self.downsampling_suffix

    @property
    def downsampling_suffix(self) -> str:
        """The end of the model's name, empty where downsampling is exact."""
        if self.downsampling == "exact":
            return ""
        return f"_{self.downsampling}"

    def _kernel_initializer(
        self, lifting: bool, constant: float
    ) -> keras.initializers.Initializer:
        # A new one each time, as one initialiser draws the same values again.
        if self.group.order == 1:
            return self.planar()
        # Uniform within scale / sqrt(channels k^2). The authors' fan-in leaves
        # out the order; that of Keras includes it where the kernel has it.
        order = 1 if lifting else self.group.order
        return keras.initializers.VarianceScaling(
            order * (self.scale * constant) ** 2 / 3, "fan_in", "uniform"
        )
