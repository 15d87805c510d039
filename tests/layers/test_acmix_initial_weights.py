"""ACmix: what its weights are before training."""

import keras
import numpy as np
import pytest
from layer_contract import as_array
from layer_contract import DTYPE
from layer_contract import LIMIT
from layer_contract import weights_of

from keras_equiattn.layers import ACmix2D
from keras_equiattn.testing import relative_difference


def test_starts_as_a_sum_of_shifted_maps():
    layers = {
        kind: ACmix2D(
            8,
            kernel_size=3,
            paths="convolution",
            shift_kernels=kind,
            kernel_initializer=keras.initializers.RandomNormal(seed=3),
            mixing_initializer=keras.initializers.RandomNormal(seed=4),
            data_format="channels_last",
        )
        for kind in ("learned", "fixed", "random")
    }
    x = np.random.default_rng(0).normal(size=(1, 4, 5, 2)).astype("float32")
    y = {kind: as_array(layer(x)) for kind, layer in layers.items()}
    assert relative_difference(y["learned"], y["fixed"]) < 1e-6
    assert relative_difference(y["random"], y["fixed"]) > 0.1
    # All the outputs of a channel of a head are the same.
    of_channels = y["learned"].reshape(1, 4, 5, 2, 4)
    assert np.ptp(of_channels, axis=-1).max() < 1e-6
    w = weights_of(layers["learned"])
    maps = np.concatenate(
        [
            (x @ w[f"{name}_kernel"][0]).reshape(1, 4, 5, 4, 2)
            for name in ("query", "key", "value")
        ],
        axis=3,
    )
    mixed = np.einsum("byxmc,mt->byxct", maps, w["mixing_kernel"])
    padded = np.pad(mixed, [(0, 0), (1, 1), (1, 1), (0, 0), (0, 0)])
    total = sum(
        padded[:, i : i + 4, j : j + 5, :, 3 * i + j]
        for i in range(3)
        for j in range(3)
    )
    assert relative_difference(of_channels[..., 0], total) < 1e-5


@pytest.mark.once
def test_initializers():
    layer = ACmix2D(
        8,
        shift_kernels="random",
        kernel_initializer="ones",
        mixing_initializer=keras.initializers.Constant(2),
        bias_initializer=keras.initializers.Constant(3),
    )
    layer.build((None, 6, 6, 3))
    for name, values in weights_of(layer).items():
        start = {"kernel": 1, "bias": 3, "rate": 0.5}[name.split("_")[-1]]
        if name in ("mixing_kernel", "shift_kernel"):
            start = 2
        np.testing.assert_array_equal(values, start)


@pytest.mark.torch_first
def test_weights_start_differently():
    layer = ACmix2D(8)
    layer.build((None, 6, 6, 8))
    w = weights_of(layer)
    values = np.stack([w["query_kernel"].ravel(), w["key_kernel"].ravel()])
    assert abs(np.corrcoef(values)[0, 1]) < 0.5
    # PyTorch's default, as in the authors' code.
    assert 0.3 < np.abs(w["query_kernel"]).max() <= 8**-0.5


@pytest.mark.torch_first
def test_convolution_starts_by_what_each_kernel_sees():
    """Uniform within one over the square root of the fan-in."""
    layer = ACmix2D(64, (3, 5), num_heads=4, shift_kernels="random")
    layer.build((None, 6, 6, 8))
    w = weights_of(layer)
    for name, fan_in in (("mixing_kernel", 12), ("shift_kernel", 15 * 15)):
        largest = np.abs(w[name]).max()
        assert 0.95 * fan_in**-0.5 < largest <= fan_in**-0.5, name


@pytest.mark.torch_first
def test_fixed_shifts_are_those_that_learned_ones_start_as():
    """In windows that are not square, too."""
    layers = {
        kind: ACmix2D(
            4,
            kernel_size=(3, 5),
            num_heads=2,
            paths="convolution",
            shift_kernels=kind,
            kernel_groups=1,
            data_format="channels_last",
            dtype=DTYPE,
        )
        for kind in ("learned", "fixed")
    }
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 5, 6, 3)).astype(DTYPE)
    for layer in layers.values():
        layer.build(x.shape)
    for variable in layers["fixed"].weights:
        variable.assign(rng.normal(size=variable.shape))
        getattr(layers["learned"], variable.name).assign(variable)
    learned, fixed = (as_array(layer(x)) for layer in layers.values())
    assert relative_difference(fixed, learned) < LIMIT
    shift = as_array(layers["learned"].shift_kernel)
    for n, (i, j) in enumerate(np.ndindex(3, 5)):
        wanted = np.zeros((3, 5))
        wanted[i, j] = 1
        np.testing.assert_array_equal(shift[:, :, n, 0], wanted)
