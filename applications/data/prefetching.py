"""Prefetching without the tuning of `tf.data`, whose end takes long."""

from typing import Any

from keras_equiattn.applications.data.sources.optional import import_tensorflow


def prefetched(data: Any) -> Any:
    """A `tf.data.Dataset` that reads ahead, with a fixed number of threads.

    Otherwise a thread of TensorFlow 2.21 tunes how many calls run at a time.
    Between two looks it sleeps, each time twice as long, and the end of an
    iteration may wait until it wakes up: an epoch then takes up to twice its
    time. Without tuning, `tf.data.AUTOTUNE` stands for a fixed number.

    Args:
        data: a `tf.data.Dataset`.
    """
    tf = import_tensorflow()
    options = tf.data.Options()
    options.autotune.enabled = False
    return data.prefetch(tf.data.AUTOTUNE).with_options(options)
