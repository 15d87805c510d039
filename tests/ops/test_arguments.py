"""Public operations refuse wrong calls by errors of their own."""

import inspect
import traceback
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_equiattn
from keras_equiattn import ops

HERE = str(Path(keras_equiattn.__file__).parent)
# Kinds that no argument may have.
NOTHING = ("text", -1.5, {}, object(), [[1.0]], b"bytes")


def ones(*shape):
    return np.ones(shape, "float32")


def calls():
    """A right call of each operation, by name."""
    image, maps = ones(2, 6, 6, 3), ones(2, 6, 6, 4, 3)
    kernel, on_group = ones(3, 3, 3, 2), ones(3, 3, 4, 3, 2)
    lifted = ops.AttentionKernels(
        ones(3, 1, 2), ones(1, 3, 2), ones(3, 3, 2, 2)
    )
    attention = ops.AttentionKernels(
        ones(4, 3, 1, 2), ones(4, 1, 3, 2), ones(3, 3, 4, 2, 2)
    )
    heads = ones(2, 6, 6, 4, 2, 4)
    pairs = {
        "query": heads,
        "keys": heads,
        "encoding": ones(3, 3, 4, 2),
        "embedding": ones(4, 4, 2),
    }
    window, group = ops.Window((3, 3)), {"group": "p4"}
    steps = {"strides": (1, 1), "padding": "same", "dilation_rate": (1, 1)}
    more = {**steps, "attention_dilation_rate": 1}
    some = {"chunk_size": 2}
    return {
        "lifting_conv": {"x": image, "kernel": kernel, **group, **steps},
        "group_conv": {"x": maps, "kernel": on_group, **group, **steps},
        "group_conv_transpose": {
            **{"x": maps, "kernel": on_group, "strides": (1, 1)},
            **{"padding": "same", **group},
        },
        "group_depthwise_conv": {
            "x": maps,
            "kernel": ones(3, 3, 4, 3, 2),
            **{**group, **steps},
        },
        "group_vectors": {"x": ones(2, 6, 6, 4, 2), "frequency": 1, **group},
        "vector_action": {
            **{"v": ones(2, 6, 6, 2), "element": 1, "frequency": 1},
            **group,
        },
        "spatial_upsample": {
            **{"x": maps, "factors": (2, 2), "interpolation": "bilinear"}
        },
        "spatial_pad": {"x": maps, "padding": (1, 1), "mode": "wrap"},
        "group_linear": {
            **{"x": maps, "kernel": ones(4, 3, 2), "bias": ones(2)},
            **{"basis": "irreps", **group},
        },
        "multi_head_attention": {
            **{"query": heads, "key": heads, "value": heads},
            "embedding": ones(4, 11, 11, 2, 4),
        },
        "affine_map": {"psi": ones(4, 3, 3, 2), "beta": ones(3, 3, 2), **group},
        "relative_positions": {
            **{"rows": ones(3, 4), "columns": ones(3, 4), "num_heads": 2},
            **group,
        },
        "input_attention": {
            "x": maps,
            "channel_kernels": (ones(4, 3, 2), ones(4, 2, 3)),
            "spatial_kernel": ones(3, 3, 4, 2, 1),
            "dilation_rate": 1,
            **group,
        },
        "co_attention": {"x": maps, "kernel": ones(1, 1, 4, 3, 1), **group},
        "squeeze_excite": {
            "x": maps,
            "reduce_kernel": ones(3, 2),
            "reduce_bias": ones(2),
            "expand_kernel": ones(2, 3),
            "expand_bias": ones(3),
        },
        "group_pool": {"x": maps, "mode": "max", "axis": 3},
        "spatial_pool": {
            **{"x": maps, "pool_size": 2, "strides": 2, "mode": "max"}
        },
        "attentive_lifting_conv": {
            **{"x": image, "kernel": kernel, "attention": lifted},
            **{**group, **more, **some},
        },
        "attentive_group_conv": {
            **{"x": maps, "kernel": on_group, "attention": attention},
            **{**group, **more, **some},
        },
        "response_attention": {
            **{"x": maps, "kernel": on_group, "attention": attention},
            **{**group, **more, "query": (1, 2)},
        },
        "window_scores": {
            **{"query": maps, "keys": maps, "window": window, "num_heads": 3}
        },
        "window_attention": {
            **{"query": maps, "keys": maps, "values": maps},
            **{"window": window, "num_heads": 3},
            "of_keys": ops.AffineMap(ones(3, 3, 4, 4, 3), ones(3, 3, 4, 3)),
        },
        "window_softmax": {
            **{"scores": ones(9, 2, 4, 3, 6, 6), "window": window},
            "size": (6, 6),
        },
        "window_sum": {
            **{"weights": ones(9, 2, 4, 3, 6, 6), "values": maps},
            "window": window,
        },
        "group_self_attention": {
            **{**pairs, "values": heads, "local": True, "dropout": 0.0}
        },
        "group_attention_weights": {**pairs, "local": True, "pixel": (1, 2)},
    }


def mistaken(value, rng):
    """A value that is wrong, and whether it must be refused."""
    if not isinstance(value, np.ndarray):
        return NOTHING[rng.integers(len(NOTHING))], True
    kind, axis = rng.integers(6), rng.integers(value.ndim)
    if kind == 0:
        return NOTHING[rng.integers(len(NOTHING))], True
    if kind == 1:
        return value.astype(["int32", "bool", "uint8"][rng.integers(3)]), True
    if kind == 2:
        return value[None, None], True
    if kind == 3:
        return value[(0,) * min(2, value.ndim)], True
    # Some axes are free: of the batch, height and width, new channels.
    size = 0 if kind == 4 else value.shape[axis] + 1
    return ones(*value.shape[:axis], size, *value.shape[axis + 1 :]), False


@pytest.mark.torch_first
@pytest.mark.parametrize("name", sorted(calls()))
def test_wrong_calls_are_refused(name, unchecked, fuzz_counts):
    counts = fuzz_counts["operations"][name]
    operation, right = getattr(ops, name), calls()[name]
    operation(**tensors(right))
    rng = np.random.default_rng(0)
    for _ in range(60):
        wrong = dict(right)
        argument = list(right)[rng.integers(len(right))]
        value = right[argument]
        if isinstance(value, tuple) and isinstance(value[0], np.ndarray):
            place = rng.integers(len(value))
            part, must = mistaken(value[place], rng)
            parts = [*value[:place], part, *value[place + 1 :]]
            made = type(value)
            value = made(*parts) if hasattr(value, "_fields") else tuple(parts)
        else:
            value, must = mistaken(value, rng)
        wrong[argument] = value
        what = f"{name}({argument}={value!r:.80})"
        error = failure(operation, wrong)
        if error is None:
            assert not must, f"{what} was accepted"
            counts["worked"] += 1
            continue
        assert isinstance(error, (TypeError, ValueError)), f"{what}: {error!r}"
        last = traceback.extract_tb(error.__traceback__)[-1].filename
        assert last.startswith(HERE), f"{what}: {last}: {error}"
        counts["refused"] += 1


def failure(operation, arguments):
    """What the call raises, or None."""
    try:
        operation(**tensors(arguments))
    except Exception as error:
        return error
    return None


def tensors(arguments):
    """NumPy arrays as tensors of the backend."""

    def convert(value):
        return (
            keras.ops.convert_to_tensor(value)
            if isinstance(value, np.ndarray)
            else value
        )

    found = {}
    for name, value in arguments.items():
        if hasattr(value, "_fields"):
            value = type(value)(*map(convert, value))
        elif isinstance(value, tuple):
            value = tuple(map(convert, value))
        found[name] = convert(value)
    return found


@pytest.mark.once
def test_every_operation_with_shapes_is_checked():
    """All but those that check ranks of any kind themselves."""
    others = {"group_action", "is_exact", "kernel_orbit"}
    others |= {"irreps", "regular_basis", "steerable_basis"}  # no tensors
    names = {
        name for name in ops.__all__ if inspect.isfunction(getattr(ops, name))
    }
    assert names == set(calls()) | others


def test_messages(unchecked):
    x, kernel = ones(1, 5, 5, 3), ones(3, 3, 2, 4)
    message = (
        r"`kernel` must have shape \(rows, columns, channels, filters\) with "
        r"channels=3, as in `x`\. Received: kernel\.shape=\(3, 3, 2, 4\)"
    )
    with pytest.raises(ValueError, match=message):
        ops.lifting_conv(x, kernel, "p4")
    with pytest.raises(TypeError, match="`x` must be a tensor of floating"):
        ops.lifting_conv("x", kernel, "p4")
    with pytest.raises(TypeError, match=r"Received: x\.dtype=.*int32"):
        ops.lifting_conv(x.astype("int32"), kernel, "p4")
    with pytest.raises(ValueError, match=r"along filters of.*\(3, 3, 3, 0\)"):
        ops.lifting_conv(x, ones(3, 3, 3, 0), "p4")
    squeeze = (ones(3, 2), ones(2), ones(5, 3), ones(3))
    with pytest.raises(ValueError, match="hidden=2, as in `reduce_kernel`"):
        ops.squeeze_excite(x, *squeeze)
    with pytest.raises(ValueError, match=r"4 or 5 axes .batch, height, w"):
        ops.squeeze_excite(ones(2, 3), *squeeze)


def test_what_is_unknown_or_no_tensor_yet_passes(unchecked):
    x = keras.KerasTensor((None, None, None, 3))
    kernel = keras.Variable(ones(3, 3, 3, 2))
    y = keras.ops.convert_to_tensor(ones(1, 5, 5, 3))
    shape = ops.lifting_conv(y, kernel, "p4").shape
    assert tuple(shape) == (1, 3, 3, 4, 2)
    layer = keras_equiattn.layers.LiftingConv2D(2, 3)
    assert layer(x).shape == (None, None, None, 4, 2)
    with pytest.raises(ValueError, match="must have 4 axes"):
        ops.lifting_conv(keras.KerasTensor((None, 3)), kernel, "p4")
