"""Batches of prepared datasets that stay on disk, read by `tf.data`."""

from collections.abc import Iterator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_equiattn.applications.data.augmentation import Plan
from keras_equiattn.applications.data.epochs import Batch
from keras_equiattn.applications.data.epochs import Epochs
from keras_equiattn.applications.data.normalization import to_float
from keras_equiattn.applications.data.prefetching import prefetched
from keras_equiattn.applications.data.sources import tfds
from keras_equiattn.applications.data.sources.catalogue import INFOS
from keras_equiattn.applications.data.sources.optional import import_tensorflow
from keras_equiattn.applications.data.sources.optional import optional_import

# How many examples the shuffle of a streamed dataset holds, still compressed.
SHUFFLE_BUFFER = 16_384


class StreamedBatches(Epochs):
    """Batches of a prepared dataset that is too large for memory.

    `tf.data` reads them, shuffles them within a buffer and decodes them.
    Augmentation and normalisation are those of `Batches`. With several
    processes, each reads its own part of the examples.

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
        # All processes get the same number of examples.
        self.count -= self.count % self.shard.count

    def epoch(self, epoch: int) -> Iterator[Batch]:
        tf = import_tensorflow()
        tensorflow_datasets = optional_import("tensorflow_datasets", "datasets")
        skip = tensorflow_datasets.decode.SkipDecoding()
        parts = tensorflow_datasets.even_splits(
            self._parts, n=self.shard.count, drop_remainder=True
        )
        data = self._builder.as_dataset(
            split=parts[self.shard.index],
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
        share = self.batch_size // self.shard.count
        data = prefetched(data.batch(share))
        # tf.data decides the order, and the plan the augmentation.
        plan = Plan(self.count, self.seed, epoch, False, self.augment)
        batches = zip(range(len(self)), data.as_numpy_iterator(), strict=False)
        for index, (images, labels) in batches:
            rows = self.rows(index)
            size = rows.stop - rows.start
            images = plan.apply(images[:size], rows.start)
            yield (
                to_float(images, self.normalization),
                labels[:size].astype("int32"),
            )


def _one_seed(seed: int, epoch: int) -> int:
    """Returns one number for the pair, as tf.data takes no pair of seeds."""
    return int(np.random.default_rng((seed, epoch)).integers(2**31))
