"""The mean over all poses of an image."""

from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_equiattn import _checks
from keras_equiattn import groups
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.numerics import mean
from keras_equiattn.symmetrization.base import options_of
from keras_equiattn.symmetrization.base import Symmetrized

AVERAGES = ("logits", "probabilities")


@keras.saving.register_keras_serializable(package="keras_equiattn")
class OrbitAverage(Symmetrized):
    """The layer of `symmetrize` for averages, with the same arguments.

    Args:
        model: the model that is applied to every pose.
        group, output, average, batch_poses, data_format: see `symmetrize`.
        **kwargs: `name`, `dtype`, `trainable`.

    Call arguments:
        inputs: images.
        training: passed on to the model, if it takes that.

    Input shape:
        The shape that the model takes, of rank 4.

    Output shape:
        The output shape of the model.

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
        super().__init__(model, group, output, data_format, **kwargs)
        self.average = _checks.choice(average, "average", AVERAGES)
        if average == "probabilities" and output == "vector":
            raise ValueError(
                "`average='probabilities'` takes logits along the channels, "
                "but `output='vector'` has components of vectors there. Take "
                "average='logits'. Received: average='probabilities', "
                "output='vector'"
            )
        self.batch_poses = _checks.optional_integer(batch_poses, "batch_poses")

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
        self.check_images(inputs.shape)
        options = options_of(self.model, training)
        most = self.batch_poses or self.group.order
        outputs: list[Tensor] = []
        for start in range(0, self.group.order, most):
            elements = range(start, min(start + most, self.group.order))
            poses = [self.act(inputs, self.group.inverse[h]) for h in elements]
            y = self.model(self._together(poses), **options)
            parts = ops.split(y, len(poses), axis=0)
            outputs += map(self.turned_back, parts, elements)
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

    def _channel_axis(self, rank: int) -> int:
        """The axis along which the model returns logits."""
        first = self.data_format == "channels_first"
        return 1 if first and rank == 4 else -1
