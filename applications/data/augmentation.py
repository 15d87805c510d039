"""Random crops, mirror images and turns, drawn anew for every epoch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keras_equiattn import _checks


@dataclass(frozen=True)
class Augmentation:
    """Crops, mirrors and turns images at random.

    With `flip` and `turn` every image comes in all eight poses of `p4m`, as a
    plain network has to see them where images have no up.

    Attributes:
        padding: Pixels of zeros added to every side before the crop.
        flip: Whether half of the images are mirrored left to right.
        resized_crop: Whether the images are instead crops of 8 to 100 % of the
            area, with sides in a ratio of 3/4 to 4/3, that are resized to what
            the network sees. Only folders of images can be cropped like this,
            and `padding` must be 0.
        turn: Whether images, which must be square, are turned by a random
            multiple of 90 degrees.

    Raises:
        ValueError: An argument has the wrong type or value.
    """

    padding: int = 4
    flip: bool = True
    resized_crop: bool = False
    turn: bool = False

    def __post_init__(self) -> None:
        _checks.integer(self.padding, "padding", 0)
        _checks.flag(self.flip, "flip")
        _checks.flag(self.turn, "turn")
        if _checks.flag(self.resized_crop, "resized_crop") and self.padding:
            raise ValueError(
                "`padding` must be 0 where `resized_crop` is True. Received: "
                f"{self.padding}"
            )


class Plan:
    """Every random choice of one epoch, drawn from `(seed, epoch)`.

    The order is drawn first, so that the images come in the same order with
    and without augmentation.

    Args:
        count: Number of images.
        seed: Seed of the run.
        epoch: Number of the epoch, from 0.
        shuffle: Whether the order is random.
        augment: The augmentation, or None.
    """

    def __init__(
        self,
        count: int,
        seed: int,
        epoch: int,
        shuffle: bool,
        augment: Augmentation | None,
    ) -> None:
        rng = np.random.default_rng((seed, epoch))
        order = rng.permutation(count)
        self.order = order if shuffle else np.arange(count)
        self.augment = augment
        if augment is not None:
            self.offsets = rng.integers(0, 2 * augment.padding + 1, (count, 2))
            self.flips = rng.random(count) < 0.5
            if augment.resized_crop:
                self.boxes = draw_boxes(rng, count)
            # Drawn last, so that turns do not change the other choices.
            self.turns = np.zeros(count, "int64")
            if augment.turn:
                self.turns = rng.integers(0, 4, count)

    def apply(self, images: NDArray[Any], start: int) -> NDArray[Any]:
        """Augments a batch.

        Args:
            images: `(b, height, width, channels)`.
            start: Position of the first of them in the epoch.

        Returns:
            Images of the same shape and type.
        """
        if self.augment is None:
            return images
        margin = self.augment.padding
        height, width = images.shape[1:3]
        padded = np.pad(
            images, ((0, 0), (margin, margin), (margin, margin), (0, 0))
        )
        result = np.empty_like(images)
        # Slicing one image after the other is three times faster than indexing
        # all of them at once.
        for index in range(len(images)):
            top, left = self.offsets[start + index]
            crop = padded[index, top : top + height, left : left + width]
            flip = self.augment.flip and self.flips[start + index]
            crop = crop[:, ::-1] if flip else crop
            result[index] = np.rot90(crop, self.turns[start + index])
        return result


def draw_boxes(rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    """Draws crops of the unit square for `Augmentation.resized_crop`.

    Returns:
        `(count, 4)`: top, left, bottom and right of each crop, in [0, 1].
    """
    boxes = np.empty((count, 4))
    left = np.arange(count)
    while len(left):
        area = rng.uniform(0.08, 1, len(left))
        ratio = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3), len(left)))
        sides = np.sqrt([area / ratio, area * ratio]).T
        corner = rng.random((len(left), 2)) * (1 - sides)
        fits = (sides <= 1).all(axis=1)
        boxes[left[fits]] = np.hstack([corner, corner + sides])[fits]
        left = left[~fits]
    return boxes


def check_augment(
    augment: bool | Augmentation | None, crops: bool, shape: Sequence[int]
) -> Augmentation | None:
    """Returns the augmentation that an argument `augment` means.

    Args:
        augment: None or False for none, True for `Augmentation()`, or one.
        crops: Whether the images can be crops of several sizes.
        shape: Shape of one image, `(height, width, channels)`.

    Raises:
        ValueError: The argument has another type, needs crops of several sizes,
            or turns images that are not square.
    """
    if augment is None or augment is False:
        return None
    if augment is True:
        return Augmentation()
    if not isinstance(augment, Augmentation):
        raise ValueError(
            "`augment` must be None, True, False or an Augmentation. "
            f"Received: {augment!r}"
        )
    if augment.resized_crop and not crops:
        raise ValueError(
            "`resized_crop` must be False except for folders of images, such "
            "as the dataset 'imagenet_folder'. Received: True"
        )
    if augment.turn and shape[0] != shape[1]:
        raise ValueError(
            "`turn` must be False for images that are not square. Received: "
            f"True, for images of the shape {tuple(shape)}"
        )
    return augment
