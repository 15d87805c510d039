"""ACmix: numbers of the authors' code, and weights of the ablations."""

import numpy as np
import pytest
from acmix_helpers import random_layer
from acmix_helpers import sample
from layer_contract import as_array
from layer_contract import DTYPE
from layer_contract import gradients
from layer_contract import LIMIT
from vectors import load_vectors

from keras_equiattn.layers import ACmix2D
from keras_equiattn.testing import relative_difference

THEIRS = {
    **{
        f"{name}_{part}": f"conv{number}.{theirs}"
        for number, name in enumerate(("query", "key", "value"), 1)
        for part, theirs in (("kernel", "weight"), ("bias", "bias"))
    },
    "position_kernel": "conv_p.weight",
    "position_bias": "conv_p.bias",
    "mixing_kernel": "fc.weight",
    "shift_kernel": "dep_conv.weight",
    "attention_rate": "rate1",
    "convolution_rate": "rate2",
}


def last(x):
    return np.moveaxis(x, 1, -1).astype(DTYPE)


def vector_layer(v, **options):
    *channels, height, width, strides, size, heads, kernel_size, _, _ = (
        int(n) for n in v["meta"]
    )
    layer = ACmix2D(
        channels[1],
        kernel_size,
        size,
        heads,
        strides,
        data_format="channels_last",
        dtype=DTYPE,
        **options,
    )
    layer.build((None, height, width, channels[0]))
    return layer


def ours(array, shape):
    """Their weight or its gradient with our axes."""
    if array.ndim == 4:
        array = array.transpose(2, 3, 1, 0)
    return array.reshape(shape)


VECTORS = (
    "s1_8to16_8x8",
    "s1_8to8_4x4_min",
    "s1_8to8_h2_k5_5x11",
    "s2_8to16_8x8",
)


@pytest.mark.torch_first
@pytest.mark.parametrize("name", [*VECTORS, "s1_8to16_8x8_official_init"])
def test_vectors_with_gradients(name):
    v = load_vectors(f"acmix_resnet_{name}")
    layer = vector_layer(v)
    for variable in layer.weights:
        theirs = v[f"w/{THEIRS[variable.name]}"]
        variable.assign(ours(theirs, variable.shape))
    x = last(v["x"])
    assert relative_difference(as_array(layer(x)), last(v["y"])) < LIMIT
    if name not in VECTORS:  # initial weights: no gradients
        return
    of_x, *found = gradients(layer, x, last(v["cotangent"]))
    assert relative_difference(of_x, last(v["g/x"])) < LIMIT
    largest = max(np.abs(gradient).max() for gradient in found)
    for variable, gradient in zip(
        layer.trainable_variables, found, strict=True
    ):
        theirs = v[f"g/{THEIRS[variable.name]}"]
        if variable.name == "position_bias":  # no output depends on it
            assert np.abs(gradient).max() < LIMIT * largest
            continue
        wanted = ours(theirs, variable.shape)
        assert relative_difference(gradient, wanted) < LIMIT, variable.name


@pytest.mark.torch_first
@pytest.mark.parametrize("name", [*VECTORS, "s1_8to16_8x8_official_init"])
@pytest.mark.parametrize("path", ["attention", "convolution"])
def test_vectors_of_each_path(path, name):
    v = load_vectors(f"acmix_resnet_{name}")
    layer = vector_layer(v, paths=path)
    for variable in layer.weights:
        theirs = v[f"w/{THEIRS[variable.name]}"]
        variable.assign(ours(theirs, variable.shape))
    expected = last(v["y_att" if path == "attention" else "y_conv"])
    y = as_array(layer(last(v["x"])))
    assert relative_difference(y, expected) < LIMIT


@pytest.mark.once
@pytest.mark.parametrize(
    ("filters", "count"),
    [(64, 17_822), (128, 60_110), (256, 218_414), (512, 829_934)],
)
def test_parameters(filters, count):
    layer = ACmix2D(filters)
    layer.build((None, 8, 8, filters))
    assert layer.count_params() == count


def names(**options):
    layer = ACmix2D(8, **options)
    layer.build((None, 6, 6, 3))
    return [variable.name for variable in layer.weights]


@pytest.mark.once
def test_weights_of_the_ablations():
    maps = [
        f"{name}_{part}"
        for name in ("query", "key", "value")
        for part in ("kernel", "bias")
    ]
    position = ["position_kernel", "position_bias"]
    convolution = ["mixing_kernel", "shift_kernel"]
    rates = ["attention_rate", "convolution_rate"]
    assert names() == [*maps, *position, *convolution, *rates]
    assert names(rates="fixed") == [*maps, *position, *convolution]
    assert names(paths="attention") == [*maps, *position]
    assert names(paths="convolution") == [*maps, *convolution]
    assert names(shift_kernels="fixed", use_bias=False) == [
        *maps[::2],
        *position,
        "mixing_kernel",
        *rates,
    ]


def test_paths_add_up():
    both = random_layer(filters=8, group="p4")
    x = sample(both)
    total = 0
    for path in ("attention", "convolution"):
        one = random_layer(filters=8, group="p4", paths=path)
        for variable in one.weights:
            variable.assign(getattr(both, variable.name))
        total = total + as_array(getattr(both, f"{path}_rate")) * as_array(
            one(x)
        )
    assert relative_difference(as_array(both(x)), total) < LIMIT
    plain = ACmix2D(
        8,
        attention_kernel_size=3,
        group="p4",
        rates="fixed",
        dtype=DTYPE,
        data_format="channels_last",
    )
    plain.build(x.shape)
    for variable in plain.weights:
        variable.assign(getattr(both, variable.name))
    for rate in (both.attention_rate, both.convolution_rate):
        rate.assign(1.0)
    assert relative_difference(as_array(plain(x)), as_array(both(x))) < LIMIT
