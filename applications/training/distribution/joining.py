"""Joins the other processes, with the distribution of the backend in use."""

import keras

from keras_equiattn.applications.training.distribution.base import Distribution
from keras_equiattn.applications.training.distribution.environment import (
    check_variables,
)
from keras_equiattn.applications.training.distribution.environment import (
    VARIABLES,
)
from keras_equiattn.applications.training.distribution.on_jax import (
    JaxDistribution,
)
from keras_equiattn.applications.training.distribution.on_tensorflow import (
    TensorFlowDistribution,
)
from keras_equiattn.applications.training.distribution.on_torch import (
    TorchDistribution,
)
from keras_equiattn.applications.training.options import OptionsError
from keras_equiattn.applications.training.options import TrainOptions


def start(options: TrainOptions) -> Distribution:
    """Joins the other processes, before the backend computes anything.

    Raises:
        OptionsError: If an option is not accepted, the process was not started
            as the backend requires, or the others cannot be reached.
    """
    backend = keras.backend.backend()
    statistics = options.batch_statistics
    check_variables(backend, options.distribute)
    if not options.distribute:
        if statistics != "synchronized":
            raise OptionsError(
                f"--batch-statistics {statistics} needs --distribute: "
                "without it there is only one device."
            )
        return Distribution()
    if backend == "jax" and statistics != "synchronized":
        raise OptionsError(
            "Under JAX batch statistics are those of all devices: "
            "--batch-statistics must be 'synchronized'. Received: "
            f"{statistics!r}"
        )
    if backend == "tensorflow" and options.dtype_policy == "mixed_float16":
        # Keras looks for infinite gradients before they are summed, and each
        # device would decide for itself whether to make the step.
        raise OptionsError(
            "Under TensorFlow --distribute needs the dtype policy 'float32' "
            f"or 'mixed_bfloat16'. Received: {options.dtype_policy!r}"
        )
    kinds = {
        "tensorflow": TensorFlowDistribution,
        "jax": JaxDistribution,
        "torch": TorchDistribution,
    }
    try:
        distribution = kinds[backend]()
        same = distribution.mean([distribution.devices])
    except Exception as error:
        raise OptionsError(
            "--distribute cannot join the processes that "
            f"{' and '.join(VARIABLES[backend])} name: {error}"
        ) from error
    if same[0] != distribution.devices:
        raise OptionsError(
            "All processes must have the same number of devices. Process "
            f"{distribution.index} has {distribution.devices}, and the mean is "
            f"{same[0]:g}."
        )
    return distribution
