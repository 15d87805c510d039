"""The base of layers with attention: the maps that they can return."""

import functools
from typing import Any

import keras

from keras_equiattn import _checks
from keras_equiattn.layers.base.group_layer import GroupLayer
from keras_equiattn.ops._types import Shape
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.geometry import Window
from keras_equiattn.ops.geometry import WINDOW_SHAPES
from keras_equiattn.ops.windows.api import by_position


class AttentionLayer(GroupLayer):
    """Base of layers that can return what they attend to.

    Subclasses write `attend_channels_last`, which returns the output and the
    attention maps by name.
    """

    @property
    def attends(self) -> bool:
        """Whether there are any maps to return."""
        return True

    def attend_channels_last(
        self, x: Tensor, query: tuple[int, int] | None = None
    ) -> Any:
        """The output, and attention maps by name, see `call_channels_last`.

        Args:
            x: `(batch, height, width, order, channels)`.
            query: the only position to return maps of; None for all.
        """
        raise NotImplementedError(f"{type(self).__name__}.attend_channels_last")

    def call(
        self,
        inputs: Tensor,
        return_attention_maps: bool = False,
        query: tuple[int, int] | None = None,
    ) -> Any:
        return self.call_or_attend(inputs, return_attention_maps, query)

    def call_or_attend(
        self,
        inputs: Tensor,
        return_attention_maps: bool,
        query: tuple[int, int] | None,
        **options: Any,
    ) -> Any:
        """The output, with maps if asked for; options go to both methods."""
        if not return_attention_maps:
            if query is not None:
                raise ValueError(
                    "`query` selects an attention map and needs "
                    f"`return_attention_maps=True`. Received: query={query}"
                )
            return self.on_channels_last(
                "call_channels_last", inputs, **options
            )
        return self.on_channels_last(
            "attend_channels_last", inputs, query=query, **options
        )

    def compute_output_spec(
        self,
        inputs: Any,
        return_attention_maps: bool = False,
        query: tuple[int, int] | None = None,
        **options: Any,
    ) -> Any:
        if not return_attention_maps:
            return super().compute_output_spec(inputs)
        # Not from `compute_output_shape`: that knows nothing of the maps.
        return self.traced_output_spec(inputs, True, query, **options)

    def traced_output_spec(
        self,
        inputs: Any,
        return_attention_maps: bool = False,
        query: tuple[int, int] | None = None,
        **options: Any,
    ) -> Any:
        """The specs of the results of a call, found by tracing it."""
        # Under JAX Keras also traces the numbers within a tuple or a list,
        # and a position must be known: so the trace does not see it.
        call = keras.Operation(name=self.name)
        call.call = functools.partial(
            self.call, return_attention_maps=return_attention_maps, query=query
        )
        return call.compute_output_spec(inputs, **options)

    def check_query(
        self, query: tuple[int, int], size: Shape
    ) -> tuple[int, int]:
        """A position `(row, column)` of an output of this size."""
        return _checks.place(query, "query", size)

    def at_query(
        self, attention: Tensor, query: tuple[int, int] | None
    ) -> Tensor:
        """A map `(batch, height, width, ...)`, or what it is at one pixel."""
        if query is None:
            return attention
        row, column = self.check_query(query, attention.shape[1:3])
        return attention[:, row, column]

    def window_map(
        self,
        weights: Tensor,
        window: Window,
        query: tuple[int, int] | None,
    ) -> Tensor:
        """The map of attention to a window, for all pixels or for one.

        Args:
            weights: the weights of the neighbours, as `window_softmax` returns
                them.
            window: the window of the weights.
            query: a pixel of the output; None is all.
        """
        if query is None:
            return by_position(weights, window)
        row, column = self.check_query(query, weights.shape[-2:])
        weights = weights[..., row : row + 1, column : column + 1]
        return by_position(weights, window)[:, 0, 0]


class WindowLayer(AttentionLayer):
    """Base of layers whose pixels attend to a window around them.

    Args:
        window_shape: "square", "disc" or None, which is "square" for groups
            that act on the grid, and "disc" for others.
        **kwargs: arguments of the other bases.
    """

    def __init__(self, window_shape: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if window_shape is None:
            window_shape = "square" if self.group.acts_on_grid else "disc"
        self.window_shape = _checks.choice(
            window_shape, "window_shape", WINDOW_SHAPES
        )

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "window_shape": self.window_shape}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        # Before there was a choice, all windows were squares.
        return super().from_config({"window_shape": "square", **config})
