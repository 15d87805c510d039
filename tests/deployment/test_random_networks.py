"""Plain networks and those of 8 bits, of layers in random order.

`make fuzz` writes what came out to benchmarks/results.
"""

import functools
import warnings

import hypothesis
import keras
import numpy as np
import pytest
from fuzzing import EXAMPLES
from fuzzing import MARKS
from fuzzing import settings
from hypothesis import strategies as st
from layer_contract import as_array
from rewritten_layers import LAYERS

from keras_equiattn import layers
from keras_equiattn import plain
from keras_equiattn import quantize
from keras_equiattn.testing import equivariance_error
from keras_equiattn.testing import relative_difference

pytestmark = MARKS
SIDE = 9
# These end the group axis.
LAST = ("group maximum", "group mean", "projection", "learned")
BETWEEN = {
    **{kind: step for kind, step in LAYERS.items() if kind not in LAST},
    "batch normalization": lambda g: keras.layers.BatchNormalization(),
    "relu": lambda g: keras.layers.ReLU(),
    "softmax of channels": lambda g: keras.layers.Softmax(),
    "layer normalization": lambda g: keras.layers.LayerNormalization(),
    "mean of all": lambda g: keras.layers.GlobalAveragePooling3D(keepdims=True),
}


def network(group, kinds):
    """Lifting, then these layers; None where an image becomes too small."""
    inputs = keras.Input((SIDE, SIDE, 2))
    x = layers.LiftingConv2D(3, 3, group=group)(inputs)
    try:
        for kind in kinds:
            x = {**LAYERS, **BETWEEN}[kind](group)(x)
    except ValueError:
        return None
    if len(x.shape) == 5 and x.shape[3] == 1:
        # A mean over all poses is no feature map, but invariant numbers.
        x = keras.layers.Flatten()(x)
    model = keras.Model(inputs, x)
    rng = np.random.default_rng(0)
    for weight in model.weights:
        if keras.backend.is_float_dtype(weight.dtype):
            value = rng.normal(scale=0.5, size=weight.shape)
            value = abs(value) + 0.5 if "variance" in weight.name else value
            weight.assign(value.astype("float32"))
    return model


def predicted(model, x):
    """Predicts from a contiguous copy, since a turned image may be a view."""
    return model.predict_on_batch(np.ascontiguousarray(as_array(x)))


@pytest.mark.parametrize("group", ["p4", "p4m"])
def test_networks_are_the_same_in_every_pose(group, fuzz_counts):
    """Plain ones to rounding, those of 8 bits exactly or with a warning."""
    counts = fuzz_counts["deployed networks"][group]
    rng = np.random.default_rng(1)
    images = rng.normal(size=(2, SIDE, SIDE, 2)).astype("float32")

    @settings(EXAMPLES // 3)
    @hypothesis.given(
        st.lists(st.sampled_from(sorted(BETWEEN)), min_size=1, max_size=4),
        st.sampled_from([None, *LAST]),
    )
    def check(kinds, last):
        model = network(group, [*kinds, *([last] if last else [])])
        hypothesis.assume(model is not None)
        expected = as_array(model(images))
        found = as_array(plain(model, fold_batch_normalization=True)(images))
        assert relative_difference(found, expected) < 1e-4
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", UserWarning)
            small = quantize(model, images)
        is_named = any("to rounding only" in str(w.message) for w in said)
        elements = [1, model.layers[1].group.order - 1]
        errors = equivariance_error(
            functools.partial(predicted, small),
            group,
            images,
            elements=elements,
        )
        counts["worked"] += 1
        if is_named:
            # One level may become the next one.
            return
        assert not errors.any(), errors
        counts["exact"] += 1

    check()
