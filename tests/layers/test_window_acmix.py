"""ACmix in windows: contract, oracle, vectors, shifts, maps."""

import keras
import numpy as np
import pytest
from keras import ops
from layer_contract import as_array
from layer_contract import assert_regularizes
from layer_contract import DTYPE
from layer_contract import gradients
from layer_contract import LayerCase
from layer_contract import LayerContract
from layer_contract import LIMIT
from vectors import load_vectors

from keras_equiattn.layers import SpatialReductionACmix2D
from keras_equiattn.layers import WindowACmix2D
from keras_equiattn.ops.dense import dense_attention
from keras_equiattn.ops.dense import join
from keras_equiattn.ops.dense import neighbours_in_image
from keras_equiattn.ops.dense import partition
from keras_equiattn.ops.dense import relative_places
from keras_equiattn.ops.papers.acmix import joint_convolution
from keras_equiattn.testing import relative_difference

ARGUMENTS = {
    "filters": 8,
    "num_heads": 4,
    "window_size": (4, 2),
    "shift": (2, 1),
    "kernel_size": (5, 1),
    "paths": "convolution",
    "rates": "fixed",
    "shift_kernels": "random",
    "kernel_groups": 2,
    "attention_dropout": 0.1,
    "dropout": 0.2,
    "kernel_initializer": keras.initializers.HeNormal(seed=1),
    "mixing_initializer": keras.initializers.HeNormal(seed=2),
    "bias_initializer": keras.initializers.Constant(0.5),
    "kernel_regularizer": keras.regularizers.L2(0.01),
    "data_format": "channels_first",
}


def case(shape, **options):
    arguments = {
        "filters": 4,
        "num_heads": 2,
        "window_size": 2,
        "kernel_initializer": "he_normal",
        **options,
    }
    return LayerCase(
        WindowACmix2D,
        arguments,
        shape,
        (*shape[:-1], 4),
        weights=14,
        group="z2",
        reach=None,
        no_shift="pixels change their windows",
        unknown_size=False,
    )


class TestWindowACmix2D(LayerContract):
    layer = WindowACmix2D
    cases = (
        case((2, 4, 6, 3), shift=1),
        case((2, 4, 6, 3), window_size=(4, 3), shift=(2, 0)),
    )
    arguments = (ARGUMENTS,)
    without = ("group",)  # it is planar


def assign(layer, v, prefix):
    """Their weights, or their gradients by our names."""
    filters, heads = layer.filters, layer.num_heads
    rows, columns = layer.window_size
    qkv = v[f"{prefix}qkv.weight"].T.reshape(-1, 3, filters)
    bias = v[f"{prefix}qkv.bias"].reshape(3, filters)
    found = {
        "position_bias": v[f"{prefix}relative_position_bias_table"].reshape(
            2 * rows - 1, 2 * columns - 1, heads
        ),
        "output_kernel": v[f"{prefix}proj.weight"].T,
        "output_bias": v[f"{prefix}proj.bias"],
        "mixing_kernel": v[f"{prefix}fc.weight"][:, :, 0, 0].T,
        "mixing_bias": v[f"{prefix}fc.bias"],
        "shift_kernel": v[f"{prefix}dep_conv.weight"].transpose(2, 3, 1, 0),
        "attention_rate": v[f"{prefix}rate1"][0],
        "convolution_rate": v[f"{prefix}rate2"][0],
    }
    for index, name in enumerate(("query", "key", "value")):
        found[f"{name}_kernel"] = qkv[None, :, index]
        found[f"{name}_bias"] = bias[index]
    return found


@pytest.mark.torch_first
@pytest.mark.parametrize("shift", [0, 2])
def test_vectors_with_gradients(shift):
    v = load_vectors(f"acmix_swin_12_8x8_w4_h3_shift{shift}")
    channels, _, _, window, heads, *_ = (int(n) for n in v["meta"])
    layer = WindowACmix2D(
        channels,
        heads,
        window,
        shift,
        data_format="channels_last",
        dtype=DTYPE,
    )
    layer.build(v["x"].shape)
    weights = assign(layer, v, "w/attn.")
    assert set(weights) == {variable.name for variable in layer.weights}
    for variable in layer.weights:
        variable.assign(weights[variable.name])

    def rolled(x):  # theirs takes and gives images that are rolled
        return np.roll(x, (shift, shift), axis=(1, 2)).astype(DTYPE)

    x, cotangent, expected = (
        rolled(v[name]) for name in ("x", "cotangent", "y_attn_module")
    )
    assert relative_difference(as_array(layer(x)), expected) < LIMIT
    of_x, *found = gradients(layer, x, cotangent)
    assert relative_difference(of_x, rolled(v["g/x"])) < LIMIT
    wanted = assign(layer, v, "g/attn.")
    # A key's bias does not change a softmax, but changes the convolution.
    for variable, gradient in zip(
        layer.trainable_variables, found, strict=True
    ):
        difference = relative_difference(gradient, wanted[variable.name])
        assert difference < LIMIT, variable.name


def random_layer(seed=0, channels=3, size=(4, 6), **arguments):
    arguments = {"window_size": 2, "dtype": DTYPE, **arguments}
    layer = WindowACmix2D(data_format="channels_last", **arguments)
    layer.build((None, *size, channels))
    rng = np.random.default_rng(seed)
    for variable in layer.weights:
        variable.assign(0.7 * rng.normal(size=variable.shape))
    return layer


@pytest.mark.torch_first
@pytest.mark.parametrize("shift", [(0, 0), (1, 0), (1, 2)])
def test_attention_pixel_by_pixel(shift):
    layer = random_layer(
        filters=4, num_heads=2, window_size=(2, 3), shift=shift, rates="fixed"
    )
    alone = random_layer(
        filters=4,
        num_heads=2,
        window_size=(2, 3),
        shift=shift,
        paths="attention",
    )
    x = np.random.default_rng(1).normal(size=(2, 4, 6, 3)).astype(DTYPE)
    w = {v.name: as_array(v).astype("float64") for v in alone.weights}
    query, keys, values = (
        (x @ w[f"{name}_kernel"][0] + w[f"{name}_bias"]).reshape(2, 4, 6, 2, 2)
        for name in ("query", "key", "value")
    )
    expected = np.zeros((2, 4, 6, 4))
    maps = np.zeros((2, 4, 6, 2, 4, 6))
    for i, j in np.ndindex(4, 6):
        near = []
        for k, m in np.ndindex(4, 6):
            a, b = (i - shift[0]) % 4, (j - shift[1]) % 6
            c, d = (k - shift[0]) % 4, (m - shift[1]) % 6
            same_window = a // 2 == c // 2 and b // 3 == d // 3
            # Neighbours in the rolled image are neighbours in the image.
            if same_window and (a - c, b - d) == (i - k, j - m):
                near.append((k, m))
        scores = np.stack(
            [
                (query[:, i, j] * keys[:, k, m]).sum(-1) / 2**0.5
                + w["position_bias"][i - k + 1, j - m + 2]
                for k, m in near
            ]
        )
        a = np.exp(scores - scores.max(0))
        a /= a.sum(0)
        for weight, (k, m) in zip(a, near, strict=True):
            maps[:, i, j, :, k, m] = weight
            expected[:, i, j] += (weight[..., None] * values[:, k, m]).reshape(
                2, 4
            )
    expected = expected @ w["output_kernel"] + w["output_bias"]
    y, found = alone(x, return_attention_maps=True)
    assert relative_difference(as_array(y), expected) < LIMIT
    found = as_array(found["image"])
    assert found.shape == (2, 4, 6, 1, 2, 1, 4, 6)
    assert relative_difference(found[:, :, :, 0, :, 0], maps) < LIMIT
    one = alone(x, return_attention_maps=True, query=(3, 5))[1]["image"]
    assert relative_difference(as_array(one)[:, 0, :, 0], maps[:, 3, 5]) < LIMIT
    # With both paths the attention is the same; the rest is a convolution.
    for variable in alone.weights:
        getattr(layer, variable.name).assign(variable)
    rest = as_array(layer(x)) - expected
    for variable in (layer.position_bias, layer.output_kernel):
        variable.assign(0 * variable)
    changed = as_array(layer(x)) - w["output_bias"]
    assert relative_difference(rest, changed) < LIMIT


@pytest.mark.torch_first
def test_images_rolled_by_whole_windows():
    options = {"filters": 4, "num_heads": 2, "window_size": (3, 2)}
    layer = random_layer(size=(12, 10), **options)
    alone = random_layer(size=(12, 10), paths="attention", **options)
    for variable in alone.weights:
        variable.assign(getattr(layer, variable.name))
    x = np.random.default_rng(1).normal(size=(2, 12, 10, 3)).astype(DTYPE)

    def rolled(x, shift=(3, -2)):
        return np.roll(x, shift, axis=(1, 2))

    moved = as_array(alone(rolled(x)))
    assert relative_difference(moved, rolled(as_array(alone(x)))) < LIMIT
    # The convolution sees zeros along the border, which has moved to row 3
    # and column 8.
    difference = as_array(layer(rolled(x))) - rolled(as_array(layer(x)))
    rows, columns = [0, 2, 3, -1], [0, 7, 8, -1]
    inside = np.ones((12, 10), bool)
    inside[rows] = inside[:, columns] = False
    assert np.abs(difference[:, inside]).max() < 10 * LIMIT
    assert np.abs(difference[:, rows]).max((0, 2, 3)).min() > 1e-2
    assert np.abs(difference[:, :, columns]).max((0, 1, 3)).min() > 1e-2
    # Shifts by less than a window change the attention.
    other = as_array(alone(rolled(x, (1, 0))))
    wanted = rolled(as_array(alone(x)), (1, 0))
    assert relative_difference(other, wanted) > 1e-2


@pytest.mark.once
def test_partition():
    x = np.arange(48.0).reshape(1, 4, 6, 2)
    windows = partition(x, (2, 3))
    assert windows.shape == (1, 2, 2, 6, 2)
    first = x[0, :2, 3:].reshape(6, 2)
    np.testing.assert_array_equal(as_array(windows)[0, 0, 1], first)
    np.testing.assert_array_equal(as_array(join(windows, (2, 3))), x)


@pytest.mark.once
def test_tables_of_the_authors():
    v = load_vectors("acmix_swin_12_8x8_w4_h3_shift2")
    np.testing.assert_array_equal(
        relative_places((4, 4)), v["relative_position_index"]
    )
    seen = neighbours_in_image((8, 8), (4, 4), (2, 2))
    np.testing.assert_array_equal(seen.reshape(4, 16, 16), v["mask"] == 0)
    assert neighbours_in_image((8, 8), (4, 4), (0, 0)).all()


@pytest.mark.torch_first
def test_dropout():
    x = np.ones((4, 4, 4, 3), "float32")
    layer = WindowACmix2D(4, 2, 2, dropout=0.5, data_format="channels_last")
    y = as_array(layer(x, training=True))
    assert 0.2 < (y == 0).mean() < 0.8
    assert np.array_equal(as_array(layer(x)), as_array(layer(x)))
    layer = WindowACmix2D(
        4,
        2,
        2,
        attention_dropout=0.5,
        paths="attention",
        data_format="channels_last",
    )
    plain, dropped = (as_array(layer(x, training=t)) for t in (False, True))
    assert np.ptp(plain, axis=(1, 2)).max() < 1e-6
    assert np.ptp(dropped, axis=(1, 2)).max() > 1e-4
    # The maps show the weights before dropout.
    kept, shown = (
        as_array(
            layer(x, return_attention_maps=True, training=training)[1]["image"]
        )
        for training in (False, True)
    )
    np.testing.assert_allclose(shown, kept, rtol=1e-5)


@pytest.mark.torch_first
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_position_biases_beside_large_scores(dtype):
    """What they add would be lost in the rounding of half precision."""
    full = np.full((1, 1, 16), 8.0)  # scores of 1024
    query = ops.cast(full, dtype)
    keys, values = (ops.cast(np.tile(full, (1, 4, 1)), dtype) for _ in "kv")
    bias = np.array([0.0, 0.1, 0.2, -0.1]).reshape(1, 1, 4)
    _, weights = dense_attention(
        query, keys, values, 1, ops.convert_to_tensor(bias, dtype="float32")
    )
    assert keras.backend.standardize_dtype(weights.dtype) == dtype
    expected = np.exp(bias) / np.exp(bias).sum()
    found = as_array(ops.cast(weights, "float32"))[0]
    assert relative_difference(found, expected) < 5e-3


@pytest.mark.once
def test_initializers():
    layer = WindowACmix2D(
        8,
        4,
        2,
        shift_kernels="random",
        kernel_initializer="ones",
        mixing_initializer=keras.initializers.Constant(2),
        bias_initializer=keras.initializers.Constant(3),
    )
    layer.build((None, 4, 4, 3))
    for variable in layer.weights:
        name = variable.name
        start = {"kernel": 1, "bias": 3, "rate": 0.5}[name.split("_")[-1]]
        if name in ("mixing_kernel", "shift_kernel"):
            start = 2
        if name == "position_bias":  # as the kernels
            start = 1
        np.testing.assert_array_equal(as_array(variable), start, err_msg=name)


@pytest.mark.once
def test_regularizer_is_of_the_linear_maps():
    layer = WindowACmix2D(
        8, 4, 2, kernel_regularizer=keras.regularizers.L2(0.5)
    )
    layer.build((None, 4, 4, 3))
    names = ("query", "key", "value", "output")
    assert_regularizes(layer, names, 0.5)


@pytest.mark.once
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"filters": 10}, "filters=10 is not divisible by num_heads=4"),
        ({"shift": 7}, r"`shift` must be.*below window_size=\(7, 7\).*7"),
        ({"shift": (1, -1)}, r"`shift` must be.*Received: \(1, -1\)"),
        ({"shift": "half"}, "`shift` must be"),
        ({"window_size": 0}, "`window_size` must be a positive integer"),
        ({"kernel_size": 4}, "`kernel_size` must be odd"),
        ({"dropout": 1}, "`dropout` must be a number from 0 to below 1"),
        ({"attention_dropout": "x"}, "`attention_dropout` must be a number"),
        ({"paths": None}, "`paths` must be"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        WindowACmix2D(**{"filters": 8, "num_heads": 4, **arguments})


@pytest.mark.once
def test_bad_sizes():
    layer = WindowACmix2D(8, 4, 4, data_format="channels_last")
    with pytest.raises(ValueError, match=r"multiples of window_size=\(4, 4\)"):
        layer.build((None, 8, 10, 3))
    layer.build((None, 8, 8, 3))
    with pytest.raises(ValueError, match=r"Received: input_shape=\(1, 6, 8"):
        layer(np.ones((1, 6, 8, 3), "float32"))
    for data_format, shape in (
        ("channels_last", (None, 8, 6, 3)),
        ("channels_first", (None, 3, 8, 6)),
    ):
        layer = WindowACmix2D(8, 4, 4, data_format=data_format)
        with pytest.raises(ValueError, match="multiples of") as error:
            layer.build(shape)
        assert str(error.value).endswith(f"Received: input_shape={shape}")
    alone = WindowACmix2D(8, 4, 4, paths="convolution")
    with pytest.raises(ValueError, match="no attention to show"):
        alone(np.ones((1, 4, 4, 3), "float32"), return_attention_maps=True)


@pytest.mark.once
@pytest.mark.parametrize("layer", [WindowACmix2D, SpatialReductionACmix2D])
def test_kernels_that_no_memory_holds(layer):
    message = r"'output_kernel' of .* would hold 1,000,000,000,000 .* GiB"
    with pytest.raises(ValueError, match=message):
        layer(10**6, num_heads=4).build((None, 14, 14, 1))


@pytest.mark.once
def test_joint_kernels_that_no_memory_holds():
    maps, mixing, shift = (
        keras.KerasTensor(shape)
        for shape in ((12, 1, 10**3, 10**6), (12, 9), (3, 3, 9, 10**6))
    )
    with pytest.raises(ValueError, match="The joint kernel would hold 9,000,0"):
        joint_convolution(maps, None, mixing, shift, 1)
