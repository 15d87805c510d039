"""Any model as a black box, made equivariant by its orbit under a group."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from keras_equiattn import _checks
from keras_equiattn import groups
from keras_equiattn.layers import GlobalSpatialPooling2D
from keras_equiattn.layers import GroupConv2D
from keras_equiattn.layers import LiftingConv2D
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Shape
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.group.action import group_action
from keras_equiattn.ops.group.directions import vector_action
from keras_equiattn.ops.numerics import mean

__all__ = ["Canonicalization", "OrbitAverage", "pose_scores", "symmetrize"]

OUTPUTS = ("invariant", "image", "vector")
AVERAGES = ("logits", "probabilities", "canonical")


def symmetrize(
    model: Callable[[Tensor], Tensor],
    group: str | groups.Group = "p4",
    output: str = "invariant",
    average: str = "logits",
    *,
    input_shape: Sequence[int | None] | None = None,
    batch_poses: int | None = None,
    canonicalizer: keras.layers.Layer | None = None,
    upright_weight: float | None = None,
    data_format: str | None = None,
    name: str | None = None,
) -> keras.Model:
    """Makes a model exactly equivariant by averaging over all poses.

    `F(x) = 1 / order * sum_h L_h f(L_h^-1 x)`: the model sees the image in
    every pose, its outputs are turned back, and their mean is returned. It may
    be any model, trained or not. The result costs `order` times as much, and
    can be trained like any other.

    With `average="canonical"` the model sees one pose instead, which a small
    equivariant network chooses: `F(x) = L_h f(L_h^-1 x)`, where `h` is the pose
    with the largest score. That costs little more than the model, but the
    network that chooses has to be trained; see `Canonicalization`.

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
            logits along the channels; "canonical": no mean, but one pose.
        input_shape: height, width and channels in the order of `data_format`.
            Needed where the model does not say it.
        batch_poses: how many poses the model sees at a time, as one batch. None
            is all of them. Fewer take less memory. Not with "canonical".
        canonicalizer, upright_weight: of `Canonicalization`, for "canonical"
            alone.
        data_format: of the images, "channels_last", "channels_first" or None
            (what `keras.config.image_data_format()` says).
        name: of the new model.

    Returns:
        A functional model with the same inputs and outputs. Its layer
        `OrbitAverage` or `Canonicalization` has the weights of `model`, which
        are not copied.

    Symmetry:
        The output is invariant, or turns with the input, to rounding, for every
        element of the group and every size that the model takes. For
        "canonical" this holds where one pose has the largest score.

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
        - [Kaba et al., 2023](https://arxiv.org/abs/2211.06489), on "canonical"
    """
    _checks.choice(average, "average", AVERAGES)
    layer: keras.layers.Layer
    if average == "canonical":
        if batch_poses is not None:
            raise ValueError(
                "With average='canonical' the model sees one pose of each "
                f"image. Received: batch_poses={batch_poses}"
            )
        weight = 1.0 if upright_weight is None else upright_weight
        layer = Canonicalization(
            model, group, output, canonicalizer, weight, data_format
        )
    else:
        if canonicalizer is not None or upright_weight is not None:
            raise ValueError(
                "`canonicalizer` and `upright_weight` are arguments of "
                f"average='canonical'. Received: average='{average}'"
            )
        layer = OrbitAverage(
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
    return keras.Model(inputs, layer(inputs), name=name)


class PosedModel(keras.layers.Layer):
    """What the layers of `symmetrize` share: a model of images in some pose.

    Args:
        model: what is applied to the poses.
        group, output, data_format: of `symmetrize`.
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
                f"Group '{self.group.name}' does not act on the grid: images "
                "would be interpolated, and nothing would be exact. Take a "
                "group of quarter turns, such as 'p4'."
            )
        self.output_kind = _checks.choice(output, "output", OUTPUTS)
        self.data_format = _checks.data_format(data_format)
        takes = getattr(model, "_call_has_training_arg", False)
        self._takes_training = bool(takes)

    @property
    def metrics(self) -> list[keras.Metric]:
        """None. What the model was compiled with says nothing of this layer.

        Keras reports the metrics of layers, and those of the model would
        replace the loss of the model around it.
        """
        return []

    def build(self, input_shape: Shape) -> None:
        if isinstance(self.model, keras.layers.Layer) and not self.model.built:
            self.model.build(input_shape)
        self.built = True

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
            "data_format": self.data_format,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "PosedModel":
        read = keras.saving.deserialize_keras_object
        objects = {
            name: read(config[name])
            for name in ("model", "canonicalizer")
            if config.get(name) is not None
        }
        return cls(**{**config, **objects})

    def _options(self, training: bool | None) -> dict[str, Any]:
        """What the model is called with beside the images."""
        return {"training": training} if self._takes_training else {}

    def _poses(
        self, x: Float[Tensor, "batch _ _ _"], elements: Iterable[int]
    ) -> list[Float[Tensor, "batch _ _ _"]]:
        """`L_h^-1 x` for some elements, which must have one shape."""
        if len(x.shape) != 4:
            raise ValueError(
                "`symmetrize` takes images of rank 4. Received: an input of "
                f"shape {tuple(x.shape)}"
            )
        poses = [self._act(x, int(self.group.inverse[h])) for h in elements]
        shapes = {tuple(pose.shape)[1:] for pose in poses}
        if len(shapes) > 1:
            raise ValueError(
                f"Group '{self.group.name}' exchanges height and width, so "
                "several poses of an image make one batch only if it is "
                f"square. {self.one_shape} Received: an input of shape "
                f"{tuple(x.shape)}"
            )
        return poses

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


@keras.saving.register_keras_serializable(package="keras_equiattn")
class OrbitAverage(PosedModel):
    """The mean over poses of `symmetrize`, with the same arguments; see there.

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

    one_shape = "Pass `batch_poses=1` for others."

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
        super().__init__(model, group, output, data_format, **kwargs)
        self.average = _checks.choice(average, "average", AVERAGES[:2])
        if batch_poses is not None:
            _checks.integer(batch_poses, "batch_poses")
        self.batch_poses = batch_poses

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
        most = self.batch_poses or self.group.order
        outputs: list[Tensor] = []
        for start in range(0, self.group.order, most):
            elements = range(start, min(start + most, self.group.order))
            poses = self._poses(inputs, elements)
            together = ops.concatenate(poses, axis=0)
            y = self.model(together, **self._options(training))
            parts = ops.split(y, len(poses), axis=0)
            outputs += map(self._turned_back, parts, elements)
        if self.average == "logits":
            return mean(ops.stack(outputs), 0)
        axis = self._channel_axis(len(outputs[0].shape))
        logs = [ops.log_softmax(y, axis=axis) for y in outputs]
        total = ops.logsumexp(ops.stack(logs), axis=0)
        return total - ops.log(ops.cast(len(logs), total.dtype))

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "average": self.average,
            "batch_poses": self.batch_poses,
        }

    def _channel_axis(self, rank: int) -> int:
        """The axis along which the model returns logits."""
        first = self.data_format == "channels_first"
        return 1 if first and rank == 4 else -1


@keras.saving.register_keras_serializable(package="keras_equiattn")
class Canonicalization(PosedModel):
    """Shows a model one pose of each image, which a small network chooses.

    `F(x) = L_h f(L_h^-1 x)` with `h = argmax s(x)`. The scores `s` come from an
    equivariant network: when the image is turned, `s(L_g x)(h) = s(x)(g^-1 h)`,
    so that `g h` is chosen, and the model sees the same picture as before.

    In training the choice is `o = onehot(argmax s) + p - stop_gradient(p)` with
    `p = softmax(s)`: forward it is the choice, and its gradient is that of the
    softmax, as in the straight-through estimate of Kaba et al. Images that are
    upright in training also teach which pose is the upright one:
    `upright_weight` times `-log p(identity)` is added to the loss. That is all
    that is needed to prepare a model that was trained on upright images and is
    frozen.

    Args:
        model: what is applied to the pose that was chosen.
        group, output: of `symmetrize`.
        canonicalizer: a model or layer that returns scores `(batch, order)` of
            images, and permutes them when the image is turned. None is that of
            `pose_scores`.
        upright_weight: what `-log p(identity)` weighs in the loss. 0 for images
            that have no up.
        data_format: of `symmetrize`.
        **kwargs: `name`, `dtype`, `trainable`.

    Call arguments:
        inputs: images.
        training: passed on to the model, if it takes that.

    Input shape:
        That of the model, rank 4; square if the group holds quarter turns.

    Output shape:
        That of the model.

    Symmetry:
        The output is invariant, or turns with the input, to rounding, where one
        pose has the largest score. Poses in which the image is the same have
        the same score. Invariant outputs do not depend on which of them is
        chosen; an image or a field of vectors does, and is then off by an
        element of the group that leaves the input as it is.

    Raises:
        ValueError: for bad arguments; for images that are not square if the
            group holds quarter turns; for scores of another shape.

    Example:
        >>> flatten = keras.layers.Flatten()
        >>> layer = Canonicalization(flatten, "p4")
        >>> tuple(layer(keras.ops.ones((2, 8, 8, 3))).shape)
        (2, 192)

    References:
        - [Kaba et al., 2023](https://arxiv.org/abs/2211.06489)
        - [Mondal et al., 2023](https://arxiv.org/abs/2310.01647), on
          `upright_weight`
    """

    one_shape = "Take `average='logits'` with `batch_poses=1` for others."

    def __init__(
        self,
        model: Callable[[Tensor], Tensor],
        group: str | groups.Group = "p4",
        output: str = "invariant",
        canonicalizer: keras.layers.Layer | None = None,
        upright_weight: float = 1.0,
        data_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, group, output, data_format, **kwargs)
        if canonicalizer is None:
            canonicalizer = pose_scores(self.group, self.data_format)
        if not isinstance(canonicalizer, keras.layers.Layer):
            raise ValueError(
                "`canonicalizer` must be a Keras model or layer. Received: "
                f"{canonicalizer!r}"
            )
        self.canonicalizer = canonicalizer
        self.upright_weight = float(
            _checks.number(
                upright_weight, "upright_weight", "at least 0", lambda n: n >= 0
            )
        )

    def build(self, input_shape: Shape) -> None:
        super().build(input_shape)
        if not self.canonicalizer.built:
            self.canonicalizer.build(input_shape)

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
        elements = range(self.group.order)
        poses = self._poses(inputs, elements)
        scores = self.canonicalizer(inputs)
        if tuple(scores.shape)[1:] != (self.group.order,):
            raise ValueError(
                f"The canonicalizer must return a score for each of the "
                f"{self.group.order} elements of '{self.group.name}', "
                "(batch, order). Received: scores of the shape "
                f"{tuple(scores.shape)}"
            )
        scores = ops.cast(scores, "float32")
        soft = ops.softmax(scores, axis=-1)
        chosen = ops.one_hot(ops.argmax(scores, axis=-1), self.group.order)
        # Nothing is added but the gradient.
        weights = chosen + (soft - ops.stop_gradient(soft))
        if training and self.upright_weight:
            upright = ops.log_softmax(scores, axis=-1)[:, 0]
            self.add_loss(-self.upright_weight * ops.mean(upright))
        x = _chosen(poses, weights)
        y = self.model(x, **self._options(training))
        if self.output_kind == "invariant":
            return y
        turned = [self._turned_back(y, element) for element in elements]
        return _chosen(turned, weights)

    def get_config(self) -> dict[str, Any]:
        serialize = keras.saving.serialize_keras_object
        return {
            **super().get_config(),
            "canonicalizer": serialize(self.canonicalizer),
            "upright_weight": self.upright_weight,
        }


def pose_scores(
    group: str | groups.Group,
    data_format: str | None = None,
    filters: int = 4,
) -> keras.Sequential:
    """A small network that scores the poses of an image.

    A lifting convolution and a group convolution of 5 x 5 pixels, a mean over
    all pixels, and two linear maps on the group with a GELU between them. For
    each pixel it takes about `25 * order * filters * (channels + order *
    filters)` multiplications: 6,800 for "p4" and grey images.

    Args:
        group: a group or its name.
        data_format: of the images.
        filters: of each layer but the last.

    Returns:
        A model of images that returns scores, `(batch, order)`.

    Example:
        >>> tuple(pose_scores("p4")(keras.ops.ones((2, 8, 8, 3))).shape)
        (2, 4)
    """
    options: dict[str, Any] = {
        "group": group,
        "data_format": data_format,
        "dtype": "float32",
    }
    order = groups.get(group).order
    convolution: dict[str, Any] = {
        "padding": "same",
        "activation": "gelu",  # a ReLU may be zero for all poses of an image
        **options,
    }
    return keras.Sequential(
        [
            LiftingConv2D(filters, 5, **convolution),
            GroupConv2D(filters, 5, **convolution),
            GlobalSpatialPooling2D("mean", **options),
            GroupConv2D(filters, 1, activation="gelu", **options),
            GroupConv2D(1, 1, use_bias=False, **options),
            keras.layers.Reshape((order,), dtype="float32"),
        ],
        name="pose_scores",
    )


def _chosen(
    poses: Sequence[Float[Tensor, "batch ..."]],
    weights: Float[Tensor, "batch _"],
) -> Float[Tensor, "batch ..."]:
    """The pose of each image that has weight one, with a gradient for all."""
    rank = len(poses[0].shape)
    total: Any = 0
    for number, pose in enumerate(poses):
        weight = ops.cast(weights[:, number], pose.dtype)
        total += pose * ops.reshape(weight, (-1, *[1] * (rank - 1)))
    return total
