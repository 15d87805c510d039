"""Prefetching without the tuning of `tf.data`, whose end takes long."""

from typing import Any

from keras_equiattn.applications.data.sources.optional import import_tensorflow


def prefetched(data: Any) -> Any:
    """A `tf.data.Dataset` that reads ahead, with a fixed number of threads.

    A thread of TensorFlow tunes how many calls run at a time. Between two looks
    it sleeps for about as long as the iteration has lasted, and the end of the
    iteration waits until it wakes up. With TensorFlow 2.21 an epoch therefore
    takes up to twice its time. Without tuning, `tf.data.AUTOTUNE` stands for
    the number of cores, up to 16.

    Args:
        data: a `tf.data.Dataset`.
    """
    tf = import_tensorflow()
    options = tf.data.Options()
    options.autotune.enabled = False
    return data.prefetch(tf.data.AUTOTUNE).with_options(options)
