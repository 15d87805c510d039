"""Batches of images that stay on disk, which `tf.data` reads."""

from collections.abc import Iterator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from keras_equiattn.applications.data.augmentation import Plan
from keras_equiattn.applications.data.epochs import Batch
from keras_equiattn.applications.data.epochs import Epochs
from keras_equiattn.applications.data.normalization import to_float
from keras_equiattn.applications.data.sources import folders
from keras_equiattn.applications.data.sources import tfds
from keras_equiattn.applications.data.sources.catalogue import (
    DatasetNotPreparedError,
)
from keras_equiattn.applications.data.sources.catalogue import INFOS
from keras_equiattn.applications.data.sources.optional import import_tensorflow
from keras_equiattn.applications.data.sources.optional import optional_import

# How many examples the shuffle of a streamed dataset holds, still compressed.
SHUFFLE_BUFFER = 16_384


class StreamedBatches(Epochs):
    """Batches of a prepared dataset that is too large for memory.

    `tf.data` reads them, shuffles them within a buffer and decodes them.
    Augmentation and normalisation are those of `Batches`.

    Args:
        name: Name of the dataset.
        data_dir: Folder of the prepared datasets.
        parts: The splits of tensorflow_datasets that are read.
        batch_size: Images per batch; the last batch may have fewer.
        **options: See `Epochs`.
    """

    def __init__(
        self,
        name: str,
        data_dir: Path,
        parts: Sequence[str],
        batch_size: int,
        **options: Any,
    ) -> None:
        self._builder = tfds.builder(name, data_dir)
        self._parts = "+".join(parts)
        splits = self._builder.info.splits
        super().__init__(
            sum(splits[part].num_examples for part in parts),
            INFOS[name].shape,
            batch_size,
            **options,
        )

    def epoch(self, epoch: int) -> Iterator[Batch]:
        tf = import_tensorflow()
        tensorflow_datasets = optional_import("tensorflow_datasets", "datasets")
        skip = tensorflow_datasets.decode.SkipDecoding()
        data = self._builder.as_dataset(
            split=self._parts,
            shuffle_files=False,
            decoders={"image": skip},
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
        # tf.data decides the order, and the plan the augmentation.
        plan = Plan(self.count, self.seed, epoch, False, self.augment)
        for index, (images, labels) in enumerate(data.as_numpy_iterator()):
            images = plan.apply(images, index * self.batch_size)
            yield (
                to_float(images, self.normalization),
                labels.astype("int32"),
            )


class FolderBatches(Epochs):
    """Batches of a folder of images, read by Keras with tf.data.

    The central square of each image is resized bilinearly, without smoothing,
    to 256 x 256 pixels, and the network sees the central 224 x 224 of them.
    With `Augmentation(0, resized_crop=True)` the network sees a random crop of
    the 256 x 256 pixels, resized to 224 x 224. (It is more usual to crop the
    whole image, with what lies beside the central square.)

    As wherever `tf.data` shuffles, the order also depends on
    `tf.random.set_seed`.

    Args:
        folder: Folder with a sub-folder for each class.
        batch_size: Images per batch; the last batch may have fewer.
        **options: See `Epochs`.
    """

    crops = True

    def __init__(self, folder: Path, batch_size: int, **options: Any) -> None:
        self._folder = folder
        side = folders.IMAGE_SIZE
        super().__init__(
            len(self._read()), (side, side, 3), batch_size, **options
        )

    def epoch(self, epoch: int) -> Iterator[Batch]:
        tf = import_tensorflow()
        seed = _one_seed(self.seed, epoch) if self.shuffle else None
        # Keras decides the order, and the plan the augmentation.
        plan = Plan(self.count, self.seed, epoch, False, self.augment)
        choices = tf.data.Dataset.from_tensor_slices(self._choices(plan))
        data = tf.data.Dataset.zip((self._read(seed), choices)).map(
            self._augmented,
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        )
        data = data.batch(self.batch_size).prefetch(tf.data.AUTOTUNE)
        for images, labels in data.as_numpy_iterator():
            yield to_float(images, self.normalization), labels

    def _read(self, seed: int | None = None) -> Any:
        """Reads every image and its label, shuffled if there is a seed."""
        import_tensorflow()
        try:
            return keras.utils.image_dataset_from_directory(
                self._folder,
                batch_size=None,
                image_size=(folders.READ_SIZE, folders.READ_SIZE),
                shuffle=seed is not None,
                seed=seed,
                crop_to_aspect_ratio=True,
                data_format="channels_last",
                verbose=False,
            )
        except ValueError as error:  # it found no images
            raise DatasetNotPreparedError(
                f"{self._folder} must hold images in its class folders. {error}"
            ) from error

    def _choices(self, plan: Plan) -> tuple[NDArray[Any], ...]:
        """Returns the box of pixels, offset, flip and turns of each image."""
        size, margin = folders.READ_SIZE, folders.READ_SIZE - self.shape[0]
        boxes = np.array([margin // 2, margin // 2] + 2 * [size - margin // 2])
        boxes = np.tile(boxes, (self.count, 1))
        offsets = np.zeros((self.count, 2), "int64")
        flips = np.zeros(self.count, bool)
        turns = np.zeros(self.count, "int64")
        if self.augment is not None:
            offsets = plan.offsets
            flips = plan.flips & self.augment.flip
            turns = plan.turns
            if self.augment.resized_crop:
                boxes = np.rint(plan.boxes * size).astype("int64")
        return boxes, offsets, flips, turns

    def _augmented(self, example: Any, choices: Any) -> tuple[Any, Any]:
        """Computes what the network sees of one image, in `tf.data`."""
        tf = import_tensorflow()
        (image, label), (box, offset, flip, turns) = example, choices
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
            image = tf.image.rot90(image, tf.cast(turns, "int32"))
        return tf.ensure_shape(image, self.shape), label


def _one_seed(seed: int, epoch: int) -> int:
    """Returns one number for the pair, as tf.data takes no pair of seeds."""
    return int(np.random.default_rng((seed, epoch)).integers(2**31))
