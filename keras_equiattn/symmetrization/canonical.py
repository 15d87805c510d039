"""One pose for each image, which a small network chooses."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from keras_equiattn import _checks
from keras_equiattn import groups
from keras_equiattn.layers.base.group_layer import as_floats
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Shape
from keras_equiattn.ops._types import Shaped
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.numerics import in_full_precision
from keras_equiattn.ops.numerics import mean
from keras_equiattn.symmetrization.base import options_of
from keras_equiattn.symmetrization.base import Symmetrized
from keras_equiattn.symmetrization.canonicalizer import canonicalizer_network


@keras.saving.register_keras_serializable(package="keras_equiattn")
class Canonicalization(Symmetrized):
    """The layer of `symmetrize` for `average="canonical"`.

    `F(x) = L_c f(L_c^-1 x)` with `c = argmax_h s(x)_h`: a canonicalizer `s`
    gives each pose `h` a score, the pose `c` with the highest score is undone,
    the model `f` sees the resulting image, and its output is turned back by
    `c`. The model is called once.

    **Why it is equivariant.** The canonicalizer is equivariant: for a turned
    image the scores are permuted, `s(L_g x)_h = s(x)_(g^-1 h)`. So the choice
    turns with the image, `c(L_g x) = g c(x)`, and the model sees the same
    image: `L_(gc)^-1 L_g x = L_c^-1 x`. Turns only move pixels, so the model
    sees it bit for bit.

    **Ties.** An image that looks the same after the turns `S`, its stabiliser,
    has the same score at all poses `S c`, and rounding chooses one of them. All
    of them lead to the same image, and to the same output of the model, so an
    invariant output does not notice. An image or a field of vectors would be
    turned back by one element of `S c` or another. The layer therefore finds
    all poses that lead to the same image, to the bit, and returns the mean of
    the output turned back by each of them:
    `F(x) = 1 / |S| sum_(s in S) L_(sc) f(L_c^-1 x)`. That is equivariant at
    symmetric images too, and as symmetric as they are. The only other ties are
    equal scores of poses that lead to different images. Inputs with such ties
    are rare, but near them rounding decides. This cannot be avoided: no choice
    of a pose is continuous everywhere.

    **Training.** A choice has no gradient. In the backward pass, the layer
    takes the softmax `p` of the scores in place of the choice (the
    straight-through estimate). The canonicalizer then learns from the loss how
    the output changes where a pose gets more weight. `prior` adds `-prior *
    mean(log p(x)_0)` to the loss in training: the cross entropy with the pose
    0, in which images stay as they are. It teaches the canonicalizer which way
    is up in the training images, so that a model that was trained on upright
    images always sees upright images.

    Args:
        model: the model that is applied to the chosen pose.
        group, output, canonicalizer, prior, data_format: see `symmetrize`.
        **kwargs: `name`, `dtype`, `trainable`.

    Call arguments:
        inputs: images; square ones if the group holds quarter turns.
        training: passed on to the model and to the canonicalizer, if they take
            it. The prior is part of the loss if it is True.

    Input shape:
        The shape that the model takes, of rank 4.

    Output shape:
        The output shape of the model.

    Symmetry:
        The output is invariant, or turns with the input, for every element of
        the group, to rounding of the model, wherever the scores of poses that
        lead to different images differ by more than rounding.

    Variables:
        The variables of the model and of the canonicalizer.

    Example:
        >>> pool = keras.layers.GlobalAveragePooling2D()
        >>> layer = Canonicalization(pool, "p4m")
        >>> tuple(layer(keras.ops.ones((2, 8, 8, 3))).shape)
        (2, 3)

    References:
        - [Kaba et al., 2023](https://arxiv.org/abs/2211.06489), on learned
          canonicalization. They find no stabilisers: outputs for symmetric
          images are off by an element of them.
        - [Mondal et al., 2023](https://arxiv.org/abs/2310.01647), on the prior
        - [Dym et al., 2024](https://arxiv.org/abs/2402.16077), on why no choice
          is continuous
    """

    def __init__(
        self,
        model: Callable[[Tensor], Tensor],
        group: str | groups.Group = "p4",
        output: str = "invariant",
        canonicalizer: Callable[[Tensor], Tensor] | None = None,
        prior: float = 1.0,
        data_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, group, output, data_format, **kwargs)
        if canonicalizer is not None and not callable(canonicalizer):
            raise ValueError(
                "`canonicalizer` must be a Keras model or layer, a function, "
                f"or None. Received: {canonicalizer!r}"
            )
        self._has_own = canonicalizer is None
        self.canonicalizer: Any = canonicalizer
        self.prior = _checks.number(
            prior, "prior", "zero or a positive number", lambda n: n >= 0
        )

    def build(self, input_shape: Shape) -> None:
        self._check_square(input_shape, "images")
        if self.canonicalizer is None:
            self.canonicalizer = canonicalizer_network(
                tuple(input_shape)[1:],
                self.group,
                data_format=self.data_format,
                dtype=self.dtype_policy,
            )
        elif (
            isinstance(self.canonicalizer, keras.layers.Layer)
            and not self.canonicalizer.built
        ):
            self.canonicalizer.build(input_shape)
        super().build(input_shape)

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
        self._check_square(inputs.shape, "images")
        x = as_floats(inputs, self.compute_dtype)
        scores = self.scores(x, training)
        logs = ops.log_softmax(scores, axis=-1)
        if training and self.prior:
            self.add_loss(-self.prior * mean(logs[:, 0], 0))
        soft = ops.exp(logs)
        # Exactly zero: only its gradient matters.
        gradient = soft - ops.stop_gradient(soft)
        chosen = _one_of(ops.argmax(scores, axis=-1), self.group.order)
        order = range(self.group.order)
        poses = [self.act(x, self.group.inverse[h]) for h in order]
        image = _weighted(poses, chosen + gradient)
        y = self.model(image, **options_of(self.model, training))
        if self.output_kind == "invariant":
            return y
        self._check_square(y.shape, "outputs")
        ties = _ties(poses, chosen)
        return _weighted(
            [self.turned_back(y, h) for h in order], ties + gradient
        )

    def compute_output_shape(self, input_shape: Shape) -> Any:
        self._check_square(input_shape, "images")
        if self.canonicalizer is not None:
            image = keras.KerasTensor(tuple(input_shape), self.compute_dtype)
            self._check_scores(self.canonicalizer(image).shape)
        shape = super().compute_output_shape(input_shape)
        if self.output_kind != "invariant":
            self._check_square(shape, "outputs")
        return shape

    @property
    def inner(self) -> list[Any]:
        return [self.model, self.canonicalizer]

    def scores(
        self, x: Float[Tensor, "batch _ _ _"], training: bool | None = None
    ) -> Float[Tensor, "batch order"]:
        """The score of each pose by the canonicalizer, in float32 at least.

        Args:
            x: images.
            training: passed on to the canonicalizer, if it takes that.

        Returns:
            A score for each image and each pose.
        """
        scores = self.canonicalizer(
            x, **options_of(self.canonicalizer, training)
        )
        self._check_scores(scores.shape)
        return in_full_precision(scores)

    def poses(self, images: Tensor) -> Shaped[Tensor, " batch"]:
        """Finds the pose of each image.

        Args:
            images: the images, as in the call.

        Returns:
            The index of a group element for each image: 0 if the image stays
            as it is, otherwise the element whose inverse is applied to it.
        """
        x = as_floats(ops.convert_to_tensor(images), self.compute_dtype)
        return ops.argmax(self.scores(x), axis=-1)

    def get_config(self) -> dict[str, Any]:
        given = None
        if not self._has_own:
            given = keras.saving.serialize_keras_object(self.canonicalizer)
        return {
            **super().get_config(),
            "canonicalizer": given,
            "prior": self.prior,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Symmetrized:
        given = config["canonicalizer"]
        given = keras.saving.deserialize_keras_object(given)
        return super().from_config({**config, "canonicalizer": given})

    def _check_scores(self, shape: Shape) -> None:
        """Raises unless the canonicalizer returns a score for each pose."""
        if tuple(shape)[1:] != (self.group.order,):
            raise ValueError(
                "`canonicalizer` must return a score for each pose, (batch, "
                f"{self.group.order}) for the group '{self.group.name}'. "
                f"Received: scores of shape {tuple(shape)}"
            )

    def _check_square(self, shape: Shape, what: str) -> None:
        """Raises where poses of one image have several shapes."""
        if what == "images":
            self.check_images(shape)
        else:
            self.check_output(shape)
        first = self.data_format == "channels_first"
        height, width = tuple(shape)[2:] if first else tuple(shape)[1:3]
        if self.group.quarter_turns and height != width:
            raise ValueError(
                f"Group '{self.group.name}' exchanges height and width, so "
                f"`average='canonical'` takes square {what} alone. Crop or pad "
                "them, or take a group without quarter turns, such as 'p2'. "
                f"Received: {what} of shape {tuple(shape)}"
            )


def _one_of(
    indices: Shaped[Tensor, " batch"], order: int
) -> Float[Tensor, "batch order"]:
    """Vectors that are one at an index and zero elsewhere."""
    return ops.one_hot(indices, order, dtype="float32")


def _weighted(
    tensors: Sequence[Float[Tensor, "..."]],
    weights: Float[Tensor, "batch order"],
) -> Float[Tensor, "..."]:
    """The sum of tensors, each with a weight for each image.

    It is not a product of matrices, which some devices round more coarsely:
    weights of zero and one give one of the tensors to the bit.
    """
    rest = (1,) * (len(tensors[0].shape) - 1)
    weights = ops.cast(weights, tensors[0].dtype)
    parts = [
        ops.reshape(weights[:, h], (-1, *rest)) * tensor
        for h, tensor in enumerate(tensors)
    ]
    return sum(parts[1:], start=parts[0])


def _all_pixels(x: Shaped[Tensor, "batch _ _ _"]) -> Shaped[Tensor, "..."]:
    """Whether all values of each image are true."""
    for axis in (3, 2, 1):
        x = ops.all(x, axis=axis)
    return x


def _ties(
    poses: Sequence[Float[Tensor, "batch _ _ _"]],
    chosen: Float[Tensor, "batch order"],
) -> Float[Tensor, "batch order"]:
    """Equal weights, of sum one, for all poses that lead to the same image.

    Args:
        poses: the image that each pose leads to.
        chosen: one at the pose that was chosen, zero elsewhere.
    """
    image = _weighted(poses, chosen)
    # One axis at a time: older Keras reduces several wrongly under PyTorch.
    same = [_all_pixels(pose == image) for pose in poses]
    weights = ops.cast(ops.stack(same, axis=-1), chosen.dtype)
    weights = ops.maximum(weights, chosen)  # NaN equals nothing
    return weights / ops.sum(weights, axis=-1, keepdims=True)
