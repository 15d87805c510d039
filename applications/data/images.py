"""Batches of a folder of images, read by `tf.data` or by grain."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from typing import Literal
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from keras_equiattn.applications.data.augmentation import Augmentation
from keras_equiattn.applications.data.augmentation import Plan
from keras_equiattn.applications.data.epochs import Batch
from keras_equiattn.applications.data.epochs import Epochs
from keras_equiattn.applications.data.normalization import to_float
from keras_equiattn.applications.data.prefetching import prefetched
from keras_equiattn.applications.data.sources import folders
from keras_equiattn.applications.data.sources.optional import import_tensorflow
from keras_equiattn.applications.data.sources.optional import optional_import

Reader = Literal["tf.data", "grain"]
# Threads of grain that decode images, and images that wait for a batch.
THREADS, WAITING = 16, 256


class FolderBatches(Epochs):
    """Batches of a folder of images, of which only a few are in memory.

    The central square of each image is resized bilinearly, without smoothing,
    to 256 x 256 pixels, and the network sees the central 224 x 224 of them.
    With `Augmentation(0, resized_crop=True)` the network sees a random crop of
    the 256 x 256 pixels, resized to 224 x 224. (It is more usual to crop the
    whole image, with what lies beside the central square.)

    Both readers give the same images in the same order; pixels of JPEG files
    may differ by one or two levels of 255, because the decoders differ.

    Args:
        folder: Folder with a sub-folder for each class.
        batch_size: Images per batch; the last batch may have fewer.
        reader: `"tf.data"`, which needs TensorFlow, or `"grain"`, which needs
            grain and Pillow.
        **options: See `Epochs`.
    """

    crops = True

    def __init__(
        self,
        folder: Path,
        batch_size: int,
        reader: Reader = "tf.data",
        **options: Any,
    ) -> None:
        self._paths, self._labels = folders.image_files(folder)
        self._read = {"tf.data": _with_tensorflow, "grain": _with_grain}[reader]
        side = folders.IMAGE_SIZE
        super().__init__(
            len(self._paths), (side, side, 3), batch_size, **options
        )

    def epoch(self, epoch: int) -> Iterator[Batch]:
        plan = Plan(self.count, self.seed, epoch, self.shuffle, self.augment)
        # The positions in the epoch of all images that this process reads.
        rows = np.concatenate(
            [np.r_[self.rows(index)] for index in range(len(self))]
        )
        files = plan.order[rows]
        views = _views(plan, rows)
        share = self.batch_size // self.shard.count
        batches = self._read(self._paths[files], views, share, self.augment)
        for index, images in enumerate(batches):
            labels = self._labels[files[index * share :][: len(images)]]
            yield to_float(images, self.normalization), labels


class Views(NamedTuple):
    """The choices by which the network sees each of `n` images that were read.

    Attributes:
        boxes: (n, 4), the pixels top, left, bottom and right.
        offsets: (n, 2), top and left of the crop from the zero-padded image.
        flips: (n,), whether the image is mirrored.
        turns: (n,), the number of quarter turns.
    """

    boxes: NDArray[np.int64]
    offsets: NDArray[np.int64]
    flips: NDArray[np.bool_]
    turns: NDArray[np.int64]


def _views(plan: Plan, rows: NDArray[np.int64]) -> Views:
    """The choices of a plan for the images in some positions."""
    size, augment = folders.READ_SIZE, plan.augment
    margin = (size - folders.IMAGE_SIZE) // 2
    boxes = np.tile(
        [margin, margin, size - margin, size - margin], (len(rows), 1)
    )
    if augment is None:
        zeros = np.zeros(len(rows), "int64")
        return Views(boxes, np.zeros((len(rows), 2), "int64"), zeros > 0, zeros)
    if augment.resized_crop:
        boxes = np.rint(plan.boxes[rows] * size).astype("int64")
    flips = plan.flips[rows] & augment.flip
    return Views(boxes, plan.offsets[rows], flips, plan.turns[rows])


def _with_tensorflow(
    paths: NDArray[np.bytes_],
    views: Views,
    batch_size: int,
    augment: Augmentation | None,
) -> Iterator[NDArray[np.float32]]:
    """Yields batches of images in [0, 1], read by `tf.data`."""
    tf = import_tensorflow()
    side = folders.IMAGE_SIZE
    padding = 0 if augment is None else augment.padding

    def read(path: Any, box: Any, offset: Any, flip: Any, turns: Any) -> Any:
        image = tf.io.decode_image(
            tf.io.read_file(path), channels=3, expand_animations=False
        )
        height, width = tf.unstack(tf.shape(image)[:2])
        square = tf.minimum(height, width)
        top, left = (height - square) // 2, (width - square) // 2
        image = image[top : top + square, left : left + square]
        image = tf.image.resize(image, 2 * [folders.READ_SIZE]) / 255.0
        image = image[box[0] : box[2], box[1] : box[3]]
        if augment is not None and augment.resized_crop:
            image = tf.image.resize(image, (side, side))
        if padding:
            image = tf.pad(image, [2 * [padding], 2 * [padding], [0, 0]])
            image = image[offset[0] :, offset[1] :][:side, :side]
        image = tf.cond(flip, lambda: image[:, ::-1], lambda: image)
        image = tf.image.rot90(image, tf.cast(turns, "int32"))
        return tf.ensure_shape(image, (side, side, 3))

    data = tf.data.Dataset.from_tensor_slices((paths, *views))
    data = data.map(
        read, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
    )
    batches = prefetched(data.batch(batch_size)).as_numpy_iterator()
    for first in range(0, len(paths), batch_size):
        try:
            batch = next(batches)
        except tf.errors.OpError:
            # TensorFlow does not say which file it was.
            for path in map(os.fsdecode, paths[first : first + batch_size]):
                try:
                    content = tf.io.read_file(path)
                    tf.io.decode_image(
                        content, channels=3, expand_animations=False
                    )
                except tf.errors.InvalidArgumentError:
                    raise unreadable(
                        path, "it is not a JPEG, PNG, BMP or GIF, or is damaged"
                    ) from None
                except tf.errors.OpError as error:
                    raise unreadable(path, error.message) from None
            raise
        yield batch


def unreadable(path: str, reason: object) -> OSError:
    """The error of a file that holds no image."""
    return OSError(f"The image {path} cannot be read: {reason}")


def _with_grain(
    paths: NDArray[np.bytes_],
    views: Views,
    batch_size: int,
    augment: Augmentation | None,
) -> Iterator[NDArray[np.float32]]:
    """Yields batches of images in [0, 1], read by threads of grain."""
    grain = optional_import("grain", "grain")
    pillow = optional_import("PIL.Image", "grain")
    side = folders.IMAGE_SIZE
    padding = 0 if augment is None else augment.padding

    def read(index: int) -> NDArray[np.float32]:
        box, offset, flip, turns = (part[index] for part in views)
        path = os.fsdecode(paths[index])
        try:
            with pillow.open(path) as file:
                image = np.asarray(file.convert("RGB"))
        # Pillow raises many kinds of errors for broken files.
        except Exception as error:
            raise unreadable(path, error) from error
        height, width = image.shape[:2]
        square = min(height, width)
        top, left = (height - square) // 2, (width - square) // 2
        image = image[top : top + square, left : left + square]
        image = _resized(image, folders.READ_SIZE) / np.float32(255)
        image = image[box[0] : box[2], box[1] : box[3]]
        if augment is not None and augment.resized_crop:
            image = _resized(image, side)
        if padding:
            image = np.pad(image, (2 * (padding,), 2 * (padding,), (0, 0)))
            image = image[offset[0] :, offset[1] :][:side, :side]
        image = image[:, ::-1] if flip else image
        return np.rot90(image, turns)

    options = grain.ReadOptions(
        num_threads=THREADS, prefetch_buffer_size=WAITING
    )
    data = grain.MapDataset.range(len(paths)).map(read)
    batches = iter(data.to_iter_dataset(options).batch(batch_size))
    try:
        yield from batches
    finally:
        batches.close()  # the threads would go on to the end of their queue


def _resized(image: NDArray[Any], side: int) -> NDArray[np.float32]:
    """Resizes (height, width, 3) to a square bilinearly, as TensorFlow does."""
    image = image.astype("float32")
    for axis in (0, 1):
        length = image.shape[axis]
        places = (np.arange(side, dtype="float32") + 0.5) * length / side - 0.5
        places = places.clip(0, length - 1).astype("float32")
        low = places.astype("int64")
        part = (places - low).astype("float32")
        part = np.expand_dims(part, (1, 2) if axis == 0 else (0, 2))
        first = image.take(low, axis)
        second = image.take(np.minimum(low + 1, length - 1), axis)
        image = first + (second - first) * part
    return image
