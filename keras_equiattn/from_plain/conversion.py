"""The tools for converting a layer, and the registry of converters."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any
from typing import NoReturn

import keras

from keras_equiattn import groups
from keras_equiattn.from_plain.summary import multiply_adds
from keras_equiattn.graphs import Rewriting
from keras_equiattn.layers.projection import GroupProjection

# A converter takes the plain layer, the tensors that the new network has in
# place of the inputs of the layer, and the `Conversion`. It returns the tensor
# that takes the place of the output.
Converter = Callable[..., keras.KerasTensor]

# The mean over the poses goes before the last layer if it has one of these
# activations, so that the logits are averaged.
OF_LOGITS = ("linear", "log_sigmoid", "log_softmax", "sigmoid", "softmax")

_converters: dict[type | str, Converter] = {}


def register_conversion(
    *classes: type | str,
) -> Callable[[Converter], Converter]:
    """Registers how `equivariant` converts layers of a class.

    The decorated function is called as `converter(layer, *inputs, to=to)` for
    each call of such a layer, so its last parameter must be called `to`.
    `inputs` are symbolic tensors of the new network: feature maps on the group
    `(batch, height, width, order, channels)`, images `(batch, height, width,
    channels)`, or tensors of a lower rank, which have no pixels and do not
    change when the image is turned. What the plain network has as `(batch,
    channels)` after global pooling is a feature map of one pixel here, because
    its poses are not merged before the end. The function returns what takes the
    place of the output. `to` is a `Conversion`.

    Args:
        *classes: the classes of layers. Their subclasses are not converted,
            because they may compute something else. A class that is not
            exported may be given by its name.

    Returns:
        The decorator.

    Example:
        >>> class Halve(keras.layers.Layer):
        ...     def call(self, x):
        ...         return x / 2
        >>> @register_conversion(Halve)
        ... def halve(layer, x, to):
        ...     return to.apply(Halve(name=layer.name), x)
    """

    def register(converter: Converter) -> Converter:
        _converters.update(dict.fromkeys(classes, converter))
        return converter

    return register


def converter_of(operation: Any) -> Converter | None:
    """The converter for a layer; None if there is none.

    Classes that Keras does not export are known by their names.
    """
    kind = type(operation)
    if kind in _converters:
        return _converters[kind]
    return _converters.get(kind.__name__) if _is_of_keras(kind) else None


class RefusalError(Exception):
    """Says that a layer cannot be converted.

    Attributes:
        instead: the tensor with which the conversion goes on, so that all
            problems of a network are found at once; None for a tensor like the
            plain one.
    """

    def __init__(
        self, message: str, instead: keras.KerasTensor | None = None
    ) -> None:
        super().__init__(message)
        self.instead = instead


class Conversion(Rewriting):
    """The facts about the call that is converted, and the tools to convert it.

    Attributes:
        group: the group of the new network.
        inflate: whether the new network applies the plain one to every pose,
            with the weights of the plain one.
        keep: whether strides that are not exact stay.
        input_shapes: the shapes of the inputs in the plain network.
        output_shape: the shape of the output in the plain network.
        is_last: whether nothing after the layer has weights or several inputs.
            If the layer is linear, the mean over the poses can then be taken
            before it with the same result, which is cheaper.
    """

    def __init__(
        self,
        names: Iterable[str],
        group: groups.Group,
        scale: float,
        inflate: bool,
        keep: bool,
    ) -> None:
        super().__init__(names)
        self.group = group
        self.inflate = inflate
        self.keep = keep
        self.input_shapes: list[tuple[Any, ...]] = []
        self.output_shape: tuple[Any, ...] = ()
        self.is_last = False
        self.rows: list[tuple[str, int, int | None]] = []
        self.notes: list[str] = []
        self._scale = scale
        self._keeps_width = False
        self._width: int | None = None

    def begin_call(
        self,
        node: Any,
        input_shapes: Sequence[tuple[Any, ...]],
        output_shape: tuple[Any, ...],
        keeps_width: bool,
        is_last: bool,
        width: int | None,
    ) -> None:
        """Turns to the next call of a layer of the plain network.

        Args:
            node: Keras' record of the call.
            input_shapes: the shapes of its inputs.
            output_shape: the shape of its output.
            keeps_width: whether its channels are those of an output.
            is_last: see the attribute.
            width: the number of channels that it must have, None for any.
        """
        self.begin(node)
        self.input_shapes = list(input_shapes)
        self.output_shape = output_shape
        self.is_last = is_last
        self.rows = []
        self.notes = []
        self._keeps_width = keeps_width
        self._width = width

    def filters(self, count: int) -> int:
        """How many filters stand for this number of the plain layer.

        Args:
            count: the number of filters, or of units, of the plain layer.

        Returns:
            The number for each pose; at least one. It is that of the plain
            layer where the filters are channels of an output of the network.
        """
        if self._keeps_width:
            return count
        if self._width is not None:
            return self._width
        return max(1, round(count * self._scale))

    def apply(
        self,
        layer: keras.layers.Layer,
        *inputs: keras.KerasTensor,
        weights: Sequence[Any] | None = None,
    ) -> keras.KerasTensor:
        """Calls a layer of the new network.

        A plain layer that is called several times becomes one layer, too: at
        later calls the layer of the first one is taken in place of this one.

        Args:
            layer: a layer that is not built.
            *inputs: the inputs of the layer; several are passed as a list.
            weights: the values of the weights for an inflated network. None
                stands for the weights of the plain layer, if they have the same
                shapes.

        Returns:
            The output of the layer.
        """
        x = inputs[0] if len(inputs) == 1 else list(inputs)
        return self._applied(layer, (x,), {}, weights)

    def like(
        self,
        layer: keras.layers.Layer,
        *inputs: keras.KerasTensor,
        **changes: Any,
    ) -> keras.KerasTensor:
        """Calls a new layer with the configuration of the plain one.

        Args:
            layer: the plain layer.
            *inputs: the inputs of the new layer.
            **changes: the options that differ from those of the plain layer.

        Returns:
            The output of the new layer.
        """
        config = {**layer.get_config(), "name": self.name(), **changes}
        return self.apply(type(layer).from_config(config), *inputs)

    def recorded(self, function: Any, y: keras.KerasTensor) -> Any:
        """Records a function of `keras.ops` for the summary, and returns `y`.

        Args:
            function: the function that was called.
            y: the result of the call.
        """
        self.rows.append((type(function).__name__, 0, 0))
        return y

    def unchanged(self, inputs: Sequence[Any]) -> list[Any]:
        """Calls the layer or operation of the plain network without changes.

        Args:
            inputs: the tensors without pixels that it is called with.

        Returns:
            All that it returns.
        """
        args, kwargs = self.arguments(inputs)
        if not isinstance(self.source, keras.layers.Layer):
            return keras.tree.flatten(self.source(*args, **kwargs))
        config = {**self.source.get_config(), "name": self.name()}
        layer = type(self.source).from_config(config)
        return keras.tree.flatten(self._applied(layer, args, kwargs, None))

    def lifted(self, x: keras.KerasTensor) -> keras.KerasTensor:
        """A feature map that is the image in every pose.

        Args:
            x: an image, a feature map, or numbers without pixels.
        """
        if len(x.shape) == 2:
            x = keras.ops.expand_dims(x, (1, 2))
        if len(x.shape) == 4:
            x = keras.ops.expand_dims(x, 3)
            x = keras.ops.repeat(x, self.group.order, axis=3)
        return x

    def merged_poses(
        self, x: keras.KerasTensor, plain: tuple[Any, ...] | None = None
    ) -> keras.KerasTensor:
        """The mean over the poses, with the rank that the plain tensor has.

        Args:
            x: a feature map on the group; others are returned as they are.
            plain: the shape of the plain tensor; None is the first input's.
        """
        if len(x.shape) != 5:
            return x
        if len(plain or self.input_shapes[0]) == 2:
            pool = keras.layers.GlobalAveragePooling3D(**self.named("poses"))
            return self.apply(pool, x)
        return self.apply(GroupProjection(**self.common("poses")), x)

    def common(self, suffix: str = "") -> dict[str, Any]:
        """The arguments that all layers of this library have.

        Args:
            suffix: the suffix of the name, see `name`.
        """
        return {
            "group": self.group.name,
            "data_format": "channels_last",
            **self.named(suffix),
        }

    def require_channels_last(self) -> None:
        """Refuses a layer whose channels come first."""
        if self.source.data_format != "channels_last":
            self.refuse(
                "its channels come first. Build the plain network with "
                "data_format='channels_last'."
            )

    def note(self, text: str) -> None:
        """Adds a sentence to what the summary says of the layer."""
        self.notes.append(text)

    def refuse(
        self, message: str, instead: keras.KerasTensor | None = None
    ) -> NoReturn:
        """Raises the error that the layer cannot be converted.

        Args:
            message: the reason, and what to do.
            instead: the tensor to go on with in search of further problems.
        """
        raise RefusalError(message, instead)

    def _applied(
        self,
        layer: keras.layers.Layer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        weights: Sequence[Any] | None,
    ) -> Any:
        """Calls a layer, or that of an earlier call, and records it."""
        layer, is_new = self.shared(layer)
        y = layer(*args, **kwargs)
        if is_new:
            self._fill(layer, weights)
        shapes = [
            tuple(keras.tree.flatten(tensors)[0].shape)
            for tensors in ((args, kwargs), y)
        ]
        count = layer.count_params() if is_new else 0
        cost = multiply_adds(layer, *shapes)
        self.rows.append((type(layer).__name__, count, cost))
        return y

    def _fill(
        self, layer: keras.layers.Layer, weights: Sequence[Any] | None
    ) -> None:
        """Sets the weights of a new layer of an inflated network.

        Normalisations that were adapted to data keep its statistics in any
        case.
        """
        adapted = isinstance(layer, keras.layers.Normalization)
        if not layer.weights or not (self.inflate or adapted):
            return
        if weights is None:
            weights = self.source.get_weights()
        shapes = [tuple(weight.shape) for weight in layer.weights]
        if shapes != [tuple(weight.shape) for weight in weights]:
            self.refuse(
                f"`{type(layer).__name__}` has weights of the shapes {shapes}, "
                "which are not those of the plain layer. Its converter must "
                "pass `weights` to `apply`."
            )
        layer.set_weights(weights)
        if adapted:
            layer.finalize_state()


def _is_of_keras(kind: type) -> bool:
    return kind.__module__.split(".")[0] == "keras"
