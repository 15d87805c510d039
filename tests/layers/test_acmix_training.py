"""All layers of ACmix in one network, trained in half precision."""

import keras
import numpy as np
import pytest
from layer_contract import as_array

from keras_equiattn import layers


@pytest.mark.torch_first
def test_fit_in_half_precision():
    """Keras scales the loss, and leaves out steps that overflow."""
    keras.config.set_dtype_policy("mixed_float16")
    options = {"data_format": "channels_last"}
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.ACmix2D(8, attention_kernel_size=3, **options),
            layers.WindowACmix2D(8, 2, 4, 2, **options),
            layers.SpatialReductionACmix2D(8, 2, 2, **options),
            layers.PatchwiseACmix2D(
                8, attention_kernel_size=3, share=4, **options
            ),
            keras.layers.GlobalAveragePooling2D(**options),
            keras.layers.Dense(3, dtype="float32"),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.05),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    before = [as_array(v).copy() for v in model.trainable_variables]
    x = np.random.default_rng(0).normal(size=(8, 8, 8, 3)).astype("float32")
    model.fit(x, np.arange(8) % 3, batch_size=4, epochs=4, verbose=0)
    # The loss scale starts high, and soon is low enough for steps.
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert as_array(model.optimizer.inner_optimizer.iterations) >= 4
    assert all(np.isfinite(value).all() for value in model.get_weights())
    still = [
        variable.path
        for variable, start in zip(
            model.trainable_variables, before, strict=True
        )
        if np.array_equal(as_array(variable), start)
    ]
    # No output depends on it.
    assert all(path.endswith("position_bias") for path in still), still
