"""Any model as a black box, made equivariant by its orbit under a group."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from keras_equiattn import _checks
from keras_equiattn import groups
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Shape
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.group.action import group_action
from keras_equiattn.ops.group.directions import vector_action
from keras_equiattn.ops.numerics import mean

__all__ = ["OrbitAverage", "symmetrize"]

OUTPUTS = ("invariant", "image", "vector")
AVERAGES = ("logits", "probabilities")


def symmetrize(
    model: Callable[[Tensor], Tensor],
    group: str | groups.Group = "p4",
    output: str = "invariant",
    average: str = "logits",
    *,
    input_shape: Sequence[int | None] | None = None,
    batch_poses: int | None = None,
    data_format: str | None = None,
    name: str | None = None,
) -> keras.Model:
    """Makes a model exactly equivariant by averaging over all poses.

    `F(x) = 1 / order * sum_h L_h f(L_h^-1 x)`: the model sees the image in
    every pose, its outputs are turned back, and their mean is returned. It may
    be any model, trained or not. The result costs `order` times as much, and
    can be trained like any other.

    Args:
        model: a Keras model or layer, or a function of a tensor, that returns
            a tensor. A function cannot be saved.
        group: a group that acts on the grid (z2m, p2, p4 or their kind with
            mirrors), or its name.
        output: what the model returns. "invariant": numbers for the image,
            which do not turn; "image": an image that turns with the input, such
            as scores of each pixel; "vector": fields of vectors, with two
            channels for each one, see `layers.GroupToVector2D`.
        average: "logits": the mean of what the model returns; "probabilities":
            the logarithm of the mean of the softmax, for a model that returns
            logits along the channels.
        input_shape: height, width and channels in the order of `data_format`.
            Needed where the model does not say it.
        batch_poses: how many poses the model sees at a time, as one batch. None
            is all of them. Fewer take less memory.
        data_format: of the images, "channels_last", "channels_first" or None
            (what `keras.config.image_data_format()` says).
        name: of the new model.

    Returns:
        A functional model with the same inputs and outputs. Its layer
        `OrbitAverage` has the weights of `model`, which are not copied.

    Symmetry:
        The output is invariant, or turns with the input, to rounding, for every
        element of the group and every size that the model takes.

    Raises:
        ValueError: for bad arguments, and for images that are not square if
            the model sees several poses at a time and the group holds quarter
            turns.

    Example:
        >>> plain = keras.Sequential([
        ...     keras.Input((8, 8, 1)),
        ...     keras.layers.Flatten(),
        ...     keras.layers.Dense(3),
        ... ])
        >>> turned = symmetrize(plain, "p4")
        >>> turned.output_shape
        (None, 3)

    References:
        - [Puny et al., 2022](https://arxiv.org/abs/2110.03336), on averages
          over a group and over frames
    """
    average_ = OrbitAverage(
        model, group, output, average, batch_poses, data_format
    )
    if input_shape is None:
        known = getattr(model, "input_shape", None)
        if not isinstance(known, tuple) or len(known) != 4:
            raise ValueError(
                "`symmetrize` takes a model of one image, and needs its "
                "`input_shape` where the model does not say it. Received: a "
                f"model with the input shape {known}"
            )
        input_shape = known[1:]
    inputs = keras.Input(tuple(input_shape))
    return keras.Model(inputs, average_(inputs), name=name)


@keras.saving.register_keras_serializable(package="keras_equiattn")
class OrbitAverage(keras.layers.Layer):
    """The layer of `symmetrize`, with the same arguments; see there.

    Args:
        model: what is applied to every pose.
        group, output, average, batch_poses, data_format: of `symmetrize`.
        **kwargs: `name`, `dtype`, `trainable`.

    Call arguments:
        inputs: images.
        training: passed on to the model, if it takes that.

    Input shape:
        That of the model, rank 4.

    Output shape:
        That of the model.

    Symmetry:
        See `symmetrize`.

    Example:
        >>> layer = OrbitAverage(keras.layers.GlobalAveragePooling2D(), "p4m")
        >>> tuple(layer(keras.ops.ones((2, 8, 8, 3))).shape)
        (2, 3)

    References:
        - [Puny et al., 2022](https://arxiv.org/abs/2110.03336)
    """

    def __init__(
        self,
        model: Callable[[Tensor], Tensor],
        group: str | groups.Group = "p4",
        output: str = "invariant",
        average: str = "logits",
        batch_poses: int | None = None,
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
                f"Group '{self.group.name}' does not act on the grid: images "
                "would be interpolated, and nothing would be exact. Take a "
                "group of quarter turns, such as 'p4'."
            )
        self.output_kind = _checks.choice(output, "output", OUTPUTS)
        self.average = _checks.choice(average, "average", AVERAGES)
        if batch_poses is not None:
            _checks.integer(batch_poses, "batch_poses")
        self.batch_poses = batch_poses
        self.data_format = _checks.data_format(data_format)
        takes = getattr(model, "_call_has_training_arg", False)
        self._takes_training = bool(takes)

    def build(self, input_shape: Shape) -> None:
        if isinstance(self.model, keras.layers.Layer) and not self.model.built:
            self.model.build(input_shape)
        self.built = True

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
        if len(inputs.shape) != 4:
            raise ValueError(
                "`symmetrize` takes images of rank 4. Received: an input of "
                f"shape {tuple(inputs.shape)}"
            )
        options = {"training": training} if self._takes_training else {}
        most = self.batch_poses or self.group.order
        outputs: list[Tensor] = []
        for start in range(0, self.group.order, most):
            elements = range(start, min(start + most, self.group.order))
            poses = [self._act(inputs, self.group.inverse[h]) for h in elements]
            y = self.model(self._together(poses), **options)
            parts = ops.split(y, len(poses), axis=0)
            outputs += map(self._turned_back, parts, elements)
        if self.average == "logits":
            return mean(ops.stack(outputs), 0)
        axis = self._channel_axis(len(outputs[0].shape))
        logs = [ops.log_softmax(y, axis=axis) for y in outputs]
        total = ops.logsumexp(ops.stack(logs), axis=0)
        return total - ops.log(ops.cast(len(logs), total.dtype))

    def compute_output_shape(self, input_shape: Shape) -> Any:
        image = keras.KerasTensor(tuple(input_shape), self.compute_dtype)
        shape = self.model(image).shape
        self._check_output(shape)
        return shape

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "model": keras.saving.serialize_keras_object(self.model),
            "group": self.group.name,
            "output": self.output_kind,
            "average": self.average,
            "batch_poses": self.batch_poses,
            "data_format": self.data_format,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "OrbitAverage":
        model = keras.saving.deserialize_keras_object(config["model"])
        return cls(**{**config, "model": model})

    def _together(
        self, poses: list[Float[Tensor, "batch _ _ _"]]
    ) -> Float[Tensor, "all _ _ _"]:
        """The poses as one batch."""
        shapes = {tuple(pose.shape)[1:] for pose in poses}
        if len(shapes) > 1:
            raise ValueError(
                f"Group '{self.group.name}' exchanges height and width, so "
                "several poses of an image make one batch only if it is "
                "square. Pass `batch_poses=1` for others. Received: an input "
                f"of shape {tuple(poses[0].shape)}"
            )
        return ops.concatenate(poses, axis=0)

    def _check_output(self, shape: Shape) -> None:
        """Raises where the model returns no images although it must."""
        if self.output_kind != "invariant" and len(shape) != 4:
            raise ValueError(
                f"A model with output='{self.output_kind}' must return images "
                f"of rank 4. Received: an output of shape {tuple(shape)}"
            )

    def _turned_back(self, y: Tensor, element: int) -> Tensor:
        """`L_h y`, for what the model returns."""
        if self.output_kind == "invariant":
            return y
        self._check_output(y.shape)
        return self._act(y, element, self.output_kind == "vector")

    def _act(self, x: Tensor, element: int, vectors: bool = False) -> Tensor:
        """`L_h x` of images, or of fields of vectors, in either layout."""
        first = self.data_format == "channels_first"
        x = ops.transpose(x, (0, 2, 3, 1)) if first else x
        act = vector_action if vectors else group_action
        x = act(x, self.group, element)
        return ops.transpose(x, (0, 3, 1, 2)) if first else x

    def _channel_axis(self, rank: int) -> int:
        """The axis along which the model returns logits."""
        first = self.data_format == "channels_first"
        return 1 if first and rank == 4 else -1
