"""The base of the layers of this package: a model, and turns around it."""

from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_equiattn import _checks
from keras_equiattn import groups
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Shape
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.group.action import group_action
from keras_equiattn.ops.group.directions import check_components
from keras_equiattn.ops.group.directions import vector_action

OUTPUTS = ("invariant", "image", "vector")


class Symmetrized(keras.layers.Layer):
    """A layer that applies a model to turned images, and turns outputs back.

    Args:
        model: a Keras model or layer, or a function of a tensor.
        group: a group that acts on the grid, or its name.
        output: the kind of outputs of the model: "invariant", "image" or
            "vector".
        data_format: the data format of the images, "channels_last",
            "channels_first" or None (what `keras.config.image_data_format()`
            says).
        **kwargs: `name`, `dtype`, `trainable`.
    """

    def __init__(
        self,
        model: Callable[[Tensor], Tensor],
        group: str | groups.Group = "p4",
        output: str = "invariant",
        data_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if not callable(model):
            raise ValueError(
                "`model` must be a Keras model or layer, or a function. "
                f"Received: {model!r}"
            )
        self.model = model
        self.group = groups.get(group)
        if not self.group.acts_on_grid:
            raise ValueError(
                "`group` must act on the grid: z2m, p2, p2m, p4 or p4m. For "
                "others images would be interpolated, and nothing would be "
                f"exact. Received: group='{self.group.name}'"
            )
        self.output_kind = _checks.choice(output, "output", OUTPUTS)
        self.data_format = _checks.data_format(data_format)

    def build(self, input_shape: Shape) -> None:
        if isinstance(self.model, keras.layers.Layer) and not self.model.built:
            self.model.build(input_shape)
        self.built = True

    def compute_output_shape(self, input_shape: Shape) -> Any:
        image = keras.KerasTensor(tuple(input_shape), self.compute_dtype)
        shape = self.model(image).shape
        self.check_output(shape)
        return shape

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "model": keras.saving.serialize_keras_object(self.model),
            "group": self.group.name,
            "output": self.output_kind,
            "data_format": self.data_format,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Symmetrized":
        model = keras.saving.deserialize_keras_object(config["model"])
        return cls(**{**config, "model": model})

    @property
    def inner(self) -> list[Any]:
        """The models that the layer calls."""
        return [self.model]

    @property
    def metrics(self) -> list[Any]:
        """The metrics of this layer, without those of compiled models in it.

        Those have the same names as the metrics of the model around the layer,
        and would replace them in what `fit` reports.
        """
        hidden = {
            id(metric)
            for model in self.inner
            if isinstance(model, keras.Model)
            for metric in model.metrics
        }
        return [x for x in super().metrics if id(x) not in hidden]

    def check_images(self, shape: Shape) -> None:
        """Raises for inputs that are no images."""
        if len(shape) != 4:
            raise ValueError(
                "`symmetrize` takes images of rank 4. Received: an input of "
                f"shape {tuple(shape)}"
            )

    def check_output(self, shape: Shape) -> None:
        """Raises where the model returns no images although it must."""
        if self.output_kind != "invariant" and len(shape) != 4:
            raise ValueError(
                f"A model with output='{self.output_kind}' must return images "
                f"of rank 4. Received: an output of shape {tuple(shape)}"
            )
        if self.output_kind == "vector":
            first = self.data_format == "channels_first"
            check_components(shape[1 if first else -1], tuple(shape))

    def turned_back(self, y: Tensor, element: int) -> Tensor:
        """`L_h y`, for what the model returns.

        Args:
            y: the output of the model.
            element: the index of `h`.
        """
        if self.output_kind == "invariant":
            return y
        self.check_output(y.shape)
        return self.act(y, element, self.output_kind == "vector")

    def act(
        self, x: Float[Tensor, "..."], element: int, vectors: bool = False
    ) -> Float[Tensor, "..."]:
        """`L_h x` of images, or of fields of vectors, in either layout.

        Args:
            x: images of rank 4.
            element: the index of `h`.
            vectors: whether the channels are the components of vectors.
        """
        first = self.data_format == "channels_first"
        x = ops.transpose(x, (0, 2, 3, 1)) if first else x
        act = vector_action if vectors else group_action
        x = act(x, self.group, element)
        return ops.transpose(x, (0, 3, 1, 2)) if first else x


def options_of(model: Any, training: bool | None) -> dict[str, Any]:
    """The keyword `training` for models that take it.

    Args:
        model: the model that is called.
        training: the argument of the layer that calls it.
    """
    takes = getattr(model, "_call_has_training_arg", False)
    return {"training": training} if takes else {}
