"""Batches of images, reproducible epoch by epoch; no framework needed."""

from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from typing import TypeAlias

import keras
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
        resized_crop: Whether the images are instead crops of 8 to 100 % of the
            area with sides in a ratio of 3/4 to 4/3, enlarged or shrunk to
            the size of the network. Of folders of images only.
    """

    padding: int = 4
    flip: bool = True
    resized_crop: bool = False

    def __post_init__(self) -> None:
        _checks.integer(self.padding, "padding", 0)
        _checks.flag(self.flip, "flip")
        if _checks.flag(self.resized_crop, "resized_crop") and self.padding:
            raise ValueError(
                "`padding` must be 0 where `resized_crop` is True. Received: "
                f"{self.padding}"
            )


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
            if augment.resized_crop:
                self.boxes = _draw_boxes(rng, count)

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


def _draw_boxes(rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    """Top, left, bottom and right of crops of the unit square."""
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
    """What `Batches` and those that stream have in common."""

    crops = False  # whether images can be crops of several sizes

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
        self.augment = check_augment(augment, self.crops)
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
            seed = _one_seed(self.seed, epoch)
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


class FolderBatches(_Epochs):
    """Batches of a folder of images, read by Keras with tf.data.

    Images are read as their central square, resized bilinearly without
    smoothing to 256 x 256 pixels, of which the network sees the central 224 x
    224. With `Augmentation(0, resized_crop=True)` it sees a crop of the 256 x
    256 resized to 224 x 224: usual is a crop of the whole image, which also has
    what lies beside the central square.

    The options are those of `Batches`. As wherever tf.data shuffles, the order
    also depends on `tf.random.set_seed`.

    Args:
        folder: Folder with a sub-folder for each class.
        batch_size: Images per batch; the last batch may have fewer.
        **options: See `Batches`.
    """

    crops = True

    def __init__(self, folder: Path, batch_size: int, **options: Any) -> None:
        self._folder = folder
        side = _sources.IMAGE_SIZE
        super().__init__(
            len(self._read()), (side, side, 3), batch_size, **options
        )

    def epoch(self, epoch: int) -> Iterator[Batch]:
        tf = _sources.import_tensorflow()
        seed = _one_seed(self.seed, epoch) if self.shuffle else None
        # Keras has the order; the plan has the augmentation.
        plan = _Plan(self.count, self.seed, epoch, False, self.augment)
        choices = tf.data.Dataset.from_tensor_slices(self._choices(plan))
        data = tf.data.Dataset.zip((self._read(seed), choices)).map(
            self._augmented,
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        )
        data = data.batch(self.batch_size).prefetch(tf.data.AUTOTUNE)
        for images, labels in data.as_numpy_iterator():
            yield _pixels(images, self.normalization), labels

    def _read(self, seed: int | None = None) -> Any:
        """Every image and its label, shuffled if there is a seed."""
        _sources.import_tensorflow()
        try:
            return keras.utils.image_dataset_from_directory(
                self._folder,
                batch_size=None,
                image_size=(_sources.READ_SIZE, _sources.READ_SIZE),
                shuffle=seed is not None,
                seed=seed,
                crop_to_aspect_ratio=True,
                data_format="channels_last",
                verbose=False,
            )
        except ValueError as error:  # it found no images
            raise _sources.DatasetNotPreparedError(
                f"{self._folder} must hold images in its class folders. {error}"
            ) from error

    def _choices(self, plan: _Plan) -> tuple[NDArray[Any], ...]:
        """Of each image: box of pixels, offset in the padding, and flip."""
        size, margin = _sources.READ_SIZE, _sources.READ_SIZE - self.shape[0]
        boxes = np.array([margin // 2, margin // 2] + 2 * [size - margin // 2])
        boxes = np.tile(boxes, (self.count, 1))
        offsets = np.zeros((self.count, 2), "int64")
        flips = np.zeros(self.count, bool)
        if self.augment is not None:
            offsets = plan.offsets
            flips = plan.flips & self.augment.flip
            if self.augment.resized_crop:
                boxes = np.rint(plan.boxes * size).astype("int64")
        return boxes, offsets, flips

    def _augmented(self, example: Any, choices: Any) -> tuple[Any, Any]:
        """Part of tf.data's graph: what the network sees of one image."""
        tf = _sources.import_tensorflow()
        (image, label), (box, offset, flip) = example, choices
        image = image[box[0] : box[2], box[1] : box[3]] / 255.0
        if self.augment is not None:
            if self.augment.resized_crop:
                image = tf.image.resize(image, self.shape[:2])
            if self.augment.padding:
                margins = 2 * [2 * [self.augment.padding]]
                image = tf.pad(image, [*margins, [0, 0]])
                top, left = tf.unstack(offset)
                height, width = self.shape[:2]
                image = image[top : top + height, left : left + width]
            image = tf.cond(flip, lambda: image[:, ::-1], lambda: image)
        return tf.ensure_shape(image, self.shape), label


def _one_seed(seed: int, epoch: int) -> int:
    """One number for the pair: tf.data takes no sequence of seeds."""
    return int(np.random.default_rng((seed, epoch)).integers(2**31))


def describe(value: object) -> str:
    """Says what an array or another object is."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} of shape {value.shape}"
    return type(value).__name__


def check_augment(
    augment: bool | Augmentation | None, crops: bool = False
) -> Augmentation | None:
    """Returns the augmentation that an `augment` argument means.

    `crops` says whether the images can be crops of several sizes.
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
