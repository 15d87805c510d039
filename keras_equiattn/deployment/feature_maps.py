"""Feature maps on a group in a network of plain layers."""

from collections.abc import Callable
from typing import Any

import keras


class FeatureMap:
    """A feature map on a group, with the group folded into the channels or not.

    Convolutions and pooling of Keras take the folded form, an image `(batch,
    height, width, order * channels)`, group-major: the channels of one element
    lie beside each other. Layers that act on the axis of the group take five
    axes. Each form is made when it is first asked for, by a `Reshape`, which
    moves no data.

    Args:
        order: the number of group elements.
        image: the folded form.
        map: the form with five axes, `(batch, height, width, order, channels)`.
        reshape: reshapes a tensor; it takes the tensor, the sizes of the new
            axes without that of the batch, and the suffix of a name.

    One of `image` and `map` is given.
    """

    def __init__(
        self,
        order: int,
        reshape: Callable[[Any, tuple[int | None, ...], str], Any],
        *,
        image: Any = None,
        map: Any = None,
    ) -> None:
        self.order = order
        self._reshape = reshape
        self._image = image
        self._map = map

    @property
    def is_folded(self) -> bool:
        """Whether there is a folded form already."""
        return self._image is not None

    @property
    def channels(self) -> int:
        """The number of channels for each group element."""
        if self._map is not None:
            return int(self._map.shape[-1])
        return int(self._image.shape[-1]) // self.order

    @property
    def image(self) -> Any:
        """`(batch, height, width, order * channels)`."""
        if self._image is None:
            self._image = self._folded(self._map)
        return self._image

    @property
    def map(self) -> Any:
        """`(batch, height, width, order, channels)`."""
        if self._map is None:
            self._map = self._unfolded(self._image)
        return self._map

    def _folded(self, x: Any) -> Any:
        if _is_known(x.shape[1:3]):
            shape = (*x.shape[1:3], self.order * x.shape[-1])
            return self._reshape(x, shape, "folded")
        # `Reshape` infers one unknown size, not two.
        parts = keras.ops.unstack(x, num=self.order, axis=3)
        return keras.ops.concatenate(parts, axis=-1)

    def _unfolded(self, x: Any) -> Any:
        if _is_known(x.shape[1:3]):
            shape = (*x.shape[1:3], self.order, self.channels)
            return self._reshape(x, shape, "unfolded")
        parts = keras.ops.split(x, self.order, axis=-1)
        return keras.ops.stack(parts, axis=3)


def _is_known(size: tuple[int | None, ...]) -> bool:
    """Whether at most one of height and width is unknown."""
    return size.count(None) < 2
