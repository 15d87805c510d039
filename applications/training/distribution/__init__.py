"""Training on several devices, in one process or in several.

Every process builds the same network and reads its own part of each batch. The
gradients are averaged over all devices, so that a run is equivalent to one on a
single device with the same batch size. How processes are started is up to the
backend:

* PyTorch: `torchrun`, one process for each device;
* JAX: `keras.distribution`, with the environment variables
  `KERAS_DISTRIBUTION_JOB_ADDRESSES`, `KERAS_DISTRIBUTION_NUM_PROCESSES` and
  `KERAS_DISTRIBUTION_PROCESS_ID`;
* TensorFlow: `tf.distribute`, with the environment variable `TF_CONFIG`.

Under JAX and TensorFlow one process serves all devices of its machine, and
without these variables there is only one.
"""

from keras_equiattn.applications.training.distribution.base import Distribution
from keras_equiattn.applications.training.distribution.base import (
    ProcessLostError,
)
from keras_equiattn.applications.training.distribution.environment import (
    variables,
)
from keras_equiattn.applications.training.distribution.joining import start

__all__ = ["Distribution", "ProcessLostError", "start", "variables"]
