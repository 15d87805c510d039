"""Batches of images, reproducible epoch by epoch; no framework needed."""

from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from keras_equiattn import _checks
from keras_equiattn.applications import _sources

Batch: TypeAlias = tuple[NDArray[np.float32], NDArray[np.int32]]
PerChannel: TypeAlias = float | Sequence[float]

# Examples, still compressed, that the shuffle of a streamed dataset holds.
SHUFFLE_BUFFER = 16_384


@dataclass(frozen=True)
class Augmentation:
    """Zero-pads, crops back at random and flips at random.

    Attributes:
        padding: Pixels of zeros added to every side before the crop.
        flip: Whether half of the images are mirrored left to right.
    """

    padding: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        _checks.integer(self.padding, "padding", 0)
        _checks.flag(self.flip, "flip")


class _Plan:
    """Every random choice of one epoch, drawn from `(seed, epoch)`.

    All of them are drawn whatever the options, so that the same images come in
    the same order with and without augmentation.
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

    def apply(self, images: NDArray[Any], start: int) -> NDArray[Any]:
        """Augments the images at positions `start`, ... of the epoch."""
        if self.augment is None:
            return images
        margin = self.augment.padding
        height, width = images.shape[1:3]
        padded = np.pad(
            images, ((0, 0), (margin, margin), (margin, margin), (0, 0))
        )
        result = np.empty_like(images)
        # Slices, one image after the other: three times faster than indexing
        # all of them at once.
        for index in range(len(images)):
            top, left = self.offsets[start + index]
            crop = padded[index, top : top + height, left : left + width]
            flip = self.augment.flip and self.flips[start + index]
            result[index] = crop[:, ::-1] if flip else crop
        return result


def _pixels(
    images: NDArray[Any],
    normalization: tuple[NDArray[np.float32], NDArray[np.float32]] | None,
) -> NDArray[np.float32]:
    """Converts images to float32 in [0, 1] and then normalises them."""
    if images.dtype == np.uint8:
        images = images.astype("float32") / np.float32(255)
    if normalization is not None:
        # Whole images at a time: NumPy is slow along an axis of 3.
        mean, std = (
            np.tile(part, images.shape[1] * images.shape[2])
            for part in normalization
        )
        images = ((images.reshape(len(images), -1) - mean) / std).reshape(
            images.shape
        )
    return images


class _Epochs:
    """What `Batches` and `StreamedBatches` have in common."""

    def __init__(
        self,
        count: int,
        shape: tuple[int, int, int],
        batch_size: int,
        *,
        shuffle: bool = False,
        augment: bool | Augmentation | None = None,
        seed: int = 0,
        normalization: tuple[PerChannel, PerChannel] | None = None,
        initial_epoch: int = 0,
    ) -> None:
        self.count = count
        self.shape = shape
        self.batch_size = _checks.integer(batch_size, "batch_size")
        self.shuffle = _checks.flag(shuffle, "shuffle")
        self.augment = check_augment(augment)
        self.seed = _checks.integer(seed, "seed", 0)
        self.normalization = check_normalization(normalization, shape[2])
        self.initial_epoch = _checks.integer(initial_epoch, "initial_epoch", 0)

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        return -(-self.count // self.batch_size)


class Batches(_Epochs):
    """Batches of arrays in memory, reproducible epoch by epoch.

    Args:
        images: uint8 in 0..255 or float32 in [0, 1], of shape
            `(n, height, width, channels)`.
        labels: Integers of shape `(n,)`.
        batch_size: Images per batch; the last batch may have fewer.
        shuffle: Whether each epoch has its own order.
        augment: None, True for `Augmentation()`, or an `Augmentation`.
        seed: Seed of the order and of the augmentation.
        normalization: None for images in [0, 1], or `(mean, std)` of pixels
            in [0, 1], each a number or one per channel.
        initial_epoch: The epoch with which iterating starts.

    Raises:
        ValueError: An argument has the wrong type, value or shape.
    """

    def __init__(
        self,
        images: NDArray[Any],
        labels: NDArray[Any],
        batch_size: int = 128,
        *,
        shuffle: bool = False,
        augment: bool | Augmentation | None = None,
        seed: int = 0,
        normalization: tuple[PerChannel, PerChannel] | None = None,
        initial_epoch: int = 0,
    ) -> None:
        if (
            not isinstance(images, np.ndarray)
            or images.ndim != 4
            or images.dtype not in (np.uint8, np.float32)
            or not images.size
        ):
            raise ValueError(
                "`images` must be a NumPy array of uint8 or float32 and shape "
                "(n, height, width, channels), n > 0. Received: "
                f"{describe(images)}"
            )
        if (
            not isinstance(labels, np.ndarray)
            or labels.shape != images.shape[:1]
            or labels.dtype.kind not in "iu"
        ):
            raise ValueError(
                f"`labels` must be a NumPy array of {len(images)} integers. "
                f"Received: {describe(labels)}"
            )
        super().__init__(
            len(images),
            images.shape[1:],
            batch_size,
            shuffle=shuffle,
            augment=augment,
            seed=seed,
            normalization=normalization,
            initial_epoch=initial_epoch,
        )
        self.images = images
        self.labels = labels.astype("int32", copy=False)
        self._plan: tuple[int, _Plan] | None = None

    def batch(self, epoch: int, index: int) -> Batch:
        """Returns one batch of an epoch.

        Args:
            epoch: Number of the epoch, from 0.
            index: Number of the batch in it.

        Returns:
            float32 images of shape `(b, height, width, channels)` and int32
            labels of shape `(b,)`.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"There is no batch {index} of {len(self)}.")
        plan = self._epoch_plan(epoch)
        start = index * self.batch_size
        rows = plan.order[start : start + self.batch_size]
        images = plan.apply(self.images[rows], start)
        return _pixels(images, self.normalization), self.labels[rows]

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Yields the batches of one epoch, as `batch` returns them."""
        for index in range(len(self)):
            yield self.batch(epoch, index)

    def _epoch_plan(self, epoch: int) -> _Plan:
        cached = self._plan
        if cached is None or cached[0] != epoch:
            plan = _Plan(
                self.count, self.seed, epoch, self.shuffle, self.augment
            )
            cached = self._plan = epoch, plan
        return cached[1]


class StreamedBatches(_Epochs):
    """Batches of a prepared dataset that is too large for memory.

    tf.data reads, shuffles within a buffer and decodes; the options are those
    of `Batches`, and so are augmentation and normalisation.
    """

    def __init__(
        self,
        name: str,
        data_dir: Path,
        parts: Sequence[str],
        batch_size: int,
        **options: Any,
    ) -> None:
        self._builder = _sources.tfds_builder(name, data_dir)
        self._parts = "+".join(parts)
        splits = self._builder.info.splits
        super().__init__(
            sum(splits[part].num_examples for part in parts),
            _sources.INFOS[name].shape,
            batch_size,
            **options,
        )

    def epoch(self, epoch: int) -> Iterator[Batch]:
        tf = _sources.import_tensorflow()
        tfds = _sources.optional_import("tensorflow_datasets", "datasets")
        data = self._builder.as_dataset(
            split=self._parts,
            shuffle_files=False,
            decoders={"image": tfds.decode.SkipDecoding()},
        )
        if self.shuffle:
            # One number for the pair: tf.data takes no sequence of seeds.
            seed = int(
                np.random.default_rng((self.seed, epoch)).integers(2**31)
            )
            data = data.shuffle(SHUFFLE_BUFFER, seed=seed)
        decode = self._builder.info.features["image"].decode_example
        data = data.map(
            lambda example: (decode(example["image"]), example["label"]),
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        )
        data = data.batch(self.batch_size).prefetch(tf.data.AUTOTUNE)
        # tf.data has the order; the plan has the augmentation.
        plan = _Plan(self.count, self.seed, epoch, False, self.augment)
        for index, (images, labels) in enumerate(data.as_numpy_iterator()):
            images = plan.apply(images, index * self.batch_size)
            yield (
                _pixels(images, self.normalization),
                labels.astype("int32"),
            )


def describe(value: object) -> str:
    """Says what an array or another object is."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} of shape {value.shape}"
    return type(value).__name__


def check_augment(
    augment: bool | Augmentation | None,
) -> Augmentation | None:
    """Returns the augmentation that an `augment` argument means."""
    if augment is None or augment is False:
        return None
    if augment is True:
        return Augmentation()
    if not isinstance(augment, Augmentation):
        raise ValueError(
            "`augment` must be None, True, False or an Augmentation. "
            f"Received: {augment!r}"
        )
    return augment


def check_normalization(
    normalization: tuple[PerChannel, PerChannel] | None, channels: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]] | None:
    """Returns mean and std as float32 arrays of shape `(channels,)`."""
    if normalization is None:
        return None
    try:
        mean, std = (
            np.broadcast_to(np.asarray(part, "float32"), (channels,))
            for part in normalization
        )
    except (TypeError, ValueError) as error:
        raise ValueError(
            "`normalization` must be None or (mean, std), each a number or "
            f"{channels} of them. Received: {normalization!r}"
        ) from error
    if not np.isfinite(mean).all() or not (np.isfinite(std) & (std > 0)).all():
        raise ValueError(
            "`normalization` must have finite means and positive, finite "
            f"stds. Received: {normalization!r}"
        )
    return mean, std
