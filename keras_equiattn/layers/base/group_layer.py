"""The base of all layers: the group, the data format and exactness."""

from typing import Any

import keras
from keras import ops

from keras_equiattn import _checks
from keras_equiattn import groups
from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Shape
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.exactness import require_exact


class GroupLayer(keras.layers.Layer):
    """Base of layers on images and on feature maps on a group.

    Subclasses write `call_channels_last` and `output_shape_channels_last`
    once, for `(batch, height, width, order, channels)`; this class brings
    every accepted input to that layout and the output back from it. Inputs of
    integers or booleans, such as images of bytes, become floating point numbers
    of the compute dtype, with the values that they have.

    Args:
        group: a group or its name.
        data_format: "channels_last", "channels_first" or None (what
            `keras.config.image_data_format()` says).
        **kwargs: `name`, `dtype`, `trainable`.
    """

    # The kind of inputs: "image" (rank 4), "group" (rank 5; for "z2" also rank
    # 4) or "any" of the two. Except for "image", an input of rank 4 is a
    # feature map of order 1 inside, and its output has rank 4.
    takes = "group"
    # The kind of outputs: None for the kind of the input, or "image" where no
    # axis of the group is left.
    gives: str | None = None
    # The layer that makes feature maps of images, for messages.
    lifted_by = "LiftingConv2D"
    # Whether inexact sizes are refused. With "call" a size that is not known
    # yet passes, and is looked at when the layer is called with it.
    exact: bool | str = True
    # Whether gradients of our own may be used, which save memory or time and
    # cannot be differentiated everywhere: an argument of some layers.
    recompute = True
    # Whether `group` is an argument of the layer, and part of its config.
    # Planar layers are of group "z2", and say nothing of groups.
    has_group_argument = True

    def __init__(
        self,
        group: str | groups.Group = "p4",
        data_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.group = groups.get(group)
        self.data_format = _checks.data_format(data_format)
        backend.remember(self)

    def add_weight(
        self, shape: Any = None, *arguments: Any, **options: Any
    ) -> Any:
        """Creates a weight as Keras does. Raises if it is too large."""
        name = f"The weight '{options.get('name')}' of {self._label()}"
        _checks.weight_size(shape or (), name)
        return super().add_weight(shape, *arguments, **options)

    def add_filters(
        self,
        name: str,
        shape: Shape,
        initializer: Any,
        axis: int = 0,
        keeps_variance: bool = True,
        **options: Any,
    ) -> Any:
        """A new weight that is a function of the offset.

        Args:
            name: the name of the variable.
            shape: the shape of its values, `(..., rows, columns, ...)`.
            initializer: the initializer of a weight of this shape.
            axis: the axis of the rows.
            keeps_variance: whether steerable filters start with the variance
                that the initializer gives to pixels. Otherwise they start as
                the projections of the pixels.
            **options: options of `add_weight`.
        """
        return self.add_weight(
            name=name, shape=shape, initializer=initializer, **options
        )

    def filters_of(self, weight: Any, size: int, axis: int = 0) -> Tensor:
        """The values `(..., rows, columns, ...)` of a weight of `add_filters`.

        Args:
            weight: the variable.
            size: rows and columns; only needed where they are not its axes.
            axis: the axis of the rows.
        """
        return ops.convert_to_tensor(weight)

    def call_channels_last(self, x: Tensor) -> Any:
        """The output, `(batch, height, width, order, channels)`.

        Layers that take or give images alone have no axis of the order there.

        Args:
            x: the input with the same axes.
        """
        raise NotImplementedError(f"{type(self).__name__}.call_channels_last")

    def output_shape_channels_last(self, shape: Shape) -> Shape:
        """The shape that `call_channels_last` returns for this one."""
        raise NotImplementedError(
            f"{type(self).__name__}.output_shape_channels_last"
        )

    def call(self, inputs: Tensor) -> Any:
        return self.on_channels_last("call_channels_last", inputs)

    def rematerialized_call(
        self, layer_call: Any, *arguments: Any, **options: Any
    ) -> Any:
        """The function that `keras.RematScope` calls in place of `call`.

        Within a graph TensorFlow rematerialises no function with keywords, so
        options such as `training` are bound before it sees the function.
        """

        def bound(*given: Any, **tensors: Any) -> Any:
            return layer_call(*given, **{**options, **tensors})

        call = super().rematerialized_call(bound, *arguments, **options)

        def rematerialized(*given: Any, **options: Any) -> Any:
            tensors = {k: v for k, v in options.items() if ops.is_tensor(v)}
            return call(*given, **tensors)

        return rematerialized

    def on_channels_last(
        self, method: str, inputs: Tensor, **options: Any
    ) -> Any:
        """Applies a method for channels-last tensors to any accepted input.

        The method may return more than a feature map; the rest is left as it
        is. While `torch.compile` traces a model, it takes the layer as one
        operation.

        Args:
            method: the name of the method.
            inputs: the inputs of the layer.
            **options: options of the method; those that are None are left out.
        """
        options = {k: v for k, v in options.items() if v is not None}
        if backend.is_in_dynamo():
            return backend.in_one_piece(
                self, "_on_channels_last", method, inputs, options
            )
        return self._on_channels_last(method, inputs, options)

    def _on_channels_last(
        self, method: str, inputs: Tensor, options: dict[str, Any]
    ) -> Any:
        """`on_channels_last`, whether `torch.compile` traces or not."""
        shape = self.check_shape(inputs.shape)
        # Looks at the size once more: a layer built at 31 may see 32 here.
        self.output_shape_channels_last(shape)
        planar = self._planar(inputs.shape)
        inputs = as_floats(inputs, self.compute_dtype)
        x = _to_channels_last(inputs) if self._channels_first else inputs
        if planar:
            x = ops.expand_dims(x, axis=3)
        y = getattr(self, method)(x, **options)
        y, *others = y if isinstance(y, tuple) else (y,)
        if planar and self.gives is None:
            y = ops.squeeze(y, axis=3)
        y = _to_channels_first(y) if self._channels_first else y
        return (y, *others) if others else y

    def compute_output_shape(self, input_shape: Shape) -> tuple[Any, ...]:
        shape = self.check_shape(input_shape)
        output = list(self.output_shape_channels_last(shape))
        if self._planar(input_shape) and self.gives is None:
            del output[3]
        if self._channels_first:
            output = [output[0], output[-1], *output[1:-1]]
        return tuple(output)

    def check_shape(self, input_shape: Shape) -> tuple[Any, ...]:
        """Validates an input shape.

        Returns:
            The shape in channels-last layout, `(batch, height, width,
            channels)` for layers that take images alone, otherwise `(batch,
            height, width, order, channels)` with order 1 for rank 4.
        """
        shape = tuple(input_shape)
        ranks = {"image": (4,), "group": (5,), "any": (4, 5)}[self.takes]
        if self.takes == "group" and self.group.order == 1:
            ranks = (4, 5)
        if len(shape) not in ranks:
            raise ValueError(
                f"{self._label()} takes {self._expected()}. "
                f"Received: input_shape={shape}"
            )
        last = (
            (shape[0], *shape[2:], shape[1]) if self._channels_first else shape
        )
        if len(shape) == 5 and last[3] != self.group.order:
            raise ValueError(
                f"{self._label()} takes {self._expected()}. The group axis "
                f"has size {last[3]}, group '{self.group.name}' has "
                f"{self.group.order} elements. Received: input_shape={shape}"
            )
        if 0 in last[1:3]:
            raise ValueError(
                f"{self._label()} needs a height and width of at least one. "
                f"Received: input_shape={shape}"
            )
        if not last[-1]:
            raise ValueError(
                f"{self._label()} needs a known number of channels, at least "
                f"one. Received: input_shape={shape}"
            )
        if self._planar(shape):
            last = (*last[:3], 1, *last[3:])
        return last

    def fix_input_channels(self, channels: int | None) -> None:
        """Refuses inputs of other channels from now on.

        Inputs of fewer axes than an image are refused, too: Keras looks for the
        channels before `check_shape` sees them.
        """
        axis = 1 if self._channels_first else -1
        self.input_spec = keras.layers.InputSpec(
            min_ndim=4, axes={axis: channels}
        )

    def require_exact(self, size: Shape, **window: Any) -> None:
        """Raises where `exact` forbids a window of this kind on this size."""
        if not self.exact:
            return
        height, width = size
        require_exact(
            self._label(),
            self.group,
            (height, width),
            **window,
            allow_unknown=self.exact == "call",
        )

    def get_config(self) -> dict[str, Any]:
        config = {**super().get_config(), "data_format": self.data_format}
        if self.has_group_argument:
            config["group"] = self.group.name
        return config

    @property
    def _channels_first(self) -> bool:
        """Whether channels come before height and width."""
        return self.data_format == "channels_first"

    def _planar(self, shape: Shape) -> bool:
        """Whether a rank-4 input stands for a feature map of order 1."""
        return self.takes != "image" and len(shape) == 4

    def _label(self) -> str:
        """The name of the layer in messages."""
        return f"{type(self).__name__} '{self.name}'"

    def _expected(self) -> str:
        """The inputs that the layer takes, for messages."""
        first = self._channels_first
        image = (
            "images (batch, channels, height, width)"
            if first
            else "images (batch, height, width, channels)"
        )
        feature_map = (
            f"feature maps on '{self.group.name}' "
            + (
                "(batch, channels, height, width, order)"
                if first
                else "(batch, height, width, order, channels)"
            )
            + f" with order={self.group.order}"
        )
        lift = "" if self.group.order == 1 else f" (see {self.lifted_by})"
        if self.takes == "image":
            return image
        if self.takes == "any" or self.group.order == 1:
            return f"{image} or {feature_map}"
        return feature_map + lift


def as_floats(x: Tensor, dtype: str) -> Tensor:
    """Integers and booleans in this dtype; floating point numbers as they are.

    Keras casts the latter alone to the compute dtype of a layer.
    """
    of_x = keras.backend.standardize_dtype(x.dtype)
    return x if keras.backend.is_float_dtype(of_x) else ops.cast(x, dtype)


def check_feature_map(layer: Any, shape: Shape) -> None:
    """Raises where a layer for any group sees no feature map."""
    if len(shape) != 5:
        layout = (
            "(batch, channels, height, width, order)"
            if layer.data_format == "channels_first"
            else "(batch, height, width, order, channels)"
        )
        raise ValueError(
            f"{type(layer).__name__} '{layer.name}' takes feature maps on a "
            f"group {layout}. Received: input_shape={tuple(shape)}"
        )


def check_window(
    group: groups.Group,
    name: str,
    size: tuple[int, int],
    dilation_rate: tuple[int, int],
) -> None:
    """Raises unless a window has a centre and goes with the group."""
    rows, columns = size
    if rows % 2 == 0 or columns % 2 == 0:
        raise ValueError(
            f"`{name}` must be odd: an even window has no centre. "
            f"Received: {name}={size}"
        )
    unequal = rows != columns or len(set(dilation_rate)) > 1
    if group.quarter_turns and unequal:
        raise ValueError(
            f"Group '{group.name}' holds quarter turns, which need a square "
            f"window. Received: {name}={size}, dilation_rate={dilation_rate}"
        )


def _to_channels_last(x: Tensor) -> Tensor:
    """`(batch, ..., channels)` of `(batch, channels, ...)`."""
    return ops.transpose(x, (0, *range(2, len(x.shape)), 1))


def _to_channels_first(x: Tensor) -> Tensor:
    """`(batch, channels, ...)` of `(batch, ..., channels)`."""
    rank = len(x.shape)
    return ops.transpose(x, (0, rank - 1, *range(1, rank - 1)))
