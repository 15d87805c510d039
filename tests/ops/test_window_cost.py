"""What attention over windows keeps, builds and runs, seen by PyTorch."""

import functools
import gc
import math

import keras
import numpy as np
import pytest
from keras import ops

from keras_equiattn.ops.geometry import Window
from keras_equiattn.ops.pairs import dispatch
from keras_equiattn.ops.pairs.api import group_self_attention
from keras_equiattn.ops.windows.api import AffineMap
from keras_equiattn.ops.windows.api import window_attention
from keras_equiattn.ops.windows.api import window_sum

pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="counts what PyTorch runs"
)
SIZE, CHANNELS, HEADS = (12, 12), 32, 2


def watch(function):
    """Runs a function, and counts what it computes.

    Returns:
        The result, bytes of the results that outlive the call, the largest
        number of values that was built at once, and the number of operators.
    """
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode

    built, largest, count = {}, [0], [0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            result = operator(*args, **(kwargs or {}))
            count[0] += 1
            for tensor in keras.tree.flatten(result):
                if hasattr(tensor, "untyped_storage"):
                    storage = tensor.untyped_storage()
                    reference = StorageWeakRef(storage)
                    built[reference.cdata] = reference, storage.nbytes()
                    values = storage.nbytes() // tensor.element_size()
                    largest[0] = max(largest[0], values)
            return result

    with Watch():
        result = function()
    gc.collect()
    kept = sum(n for reference, n in built.values() if not reference.expired())
    return result, kept, largest[0], count[0]


def random(*shape, seed=0):
    values = np.random.default_rng(seed).normal(size=shape).astype("float32")
    return ops.convert_to_tensor(values).requires_grad_()


def attention(kernel_size, weighted, recompute):
    """A function that attends, and its arguments."""
    window = Window((kernel_size, kernel_size))
    shape = (1, *SIZE, 1, CHANNELS)
    tensors = [random(*shape, seed=seed) for seed in range(3)]
    if weighted:
        tensors.append(random(*window.size, 1, 1, CHANNELS))
    tensors.append(random(*window.size, 1, CHANNELS))

    def attend():
        query, keys, values, *rest = tensors
        affine = AffineMap(*rest) if weighted else AffineMap(None, *rest)
        return window_attention(
            *(query, keys, values, window, HEADS, affine, affine, recompute)
        )[0]

    return attend, tensors


@pytest.mark.parametrize(
    ("kernel_size", "weighted"),
    [
        (7, True),
        pytest.param(7, False, marks=pytest.mark.sweep),
        pytest.param(15, False, marks=pytest.mark.sweep),
    ],
)
def test_neighbours_of_all_pixels_are_never_held(kernel_size, weighted):
    """Neither for the backward pass, nor within one of the passes."""
    import torch

    weights = kernel_size**2 * HEADS * math.prod(SIZE)
    neighbours = weights // HEADS * CHANNELS
    kept = {}
    for recompute in (True, False):
        attend, tensors = attention(kernel_size, weighted, recompute)
        y, kept[recompute], largest, _ = watch(attend)
        if recompute:
            assert largest < neighbours / 4
            gradients, _, largest, _ = watch(
                functools.partial(torch.autograd.grad, y.sum(), tensors)
            )
            assert all(gradient.any() for gradient in gradients)
            assert largest < neighbours / 4
    # In bytes: the weights, keys and values with their surroundings, and some
    # feature maps.
    maps = math.prod(SIZE) * CHANNELS
    around = math.prod(n + kernel_size - 1 for n in SIZE) * CHANNELS
    assert kept[True] < 4 * (weights + 2 * around + 8 * maps)
    # Tiles leave less to the backend.
    assert kept[True] < kept[False] / (4 if weighted else 2)


@pytest.mark.sweep
def test_operators_do_not_grow_with_a_window_that_is_tiled():
    counts = []
    for size in ((3, 61), (3, 81), (5, 61)):
        window = Window(size)
        values = random(1, *SIZE, 1, CHANNELS)
        weights = random(math.prod(size), 1, 1, HEADS, *SIZE)
        y, _, _, forward = watch(
            functools.partial(window_sum, weights, values, window)
        )
        _, _, _, backward = watch(y.sum().backward)
        counts.append((forward, backward))
    totals = list(map(sum, counts))
    assert max(totals) - min(totals) <= 2  # keys that overlap more often


# --- Group self-attention ---------------------------------------------------


def group_attention(window, recompute):
    """A function that attends, its tensors, and the pairs of a head."""
    order, heads, channels = 4, 2, 6
    shape = (1, *SIZE, order, heads, channels)
    tensors = [random(*shape, seed=seed) for seed in range(3)]
    seen = (window, window) if window else tuple(2 * n - 1 for n in SIZE)
    tensors.append(random(*seen, order, channels // 2))
    tensors.append(random(order, order, channels // 2))
    attend = functools.partial(
        group_self_attention,
        *tensors,
        local=window is not None,
        dropout=0.2,
        seed=ops.convert_to_tensor([1, 2]),
        recompute=recompute,
    )
    neighbours = window**2 if window else math.prod(SIZE)
    return attend, tensors, neighbours * order**2 * math.prod(SIZE)


@pytest.mark.parametrize(
    "window",
    [3, *(pytest.param(n, marks=pytest.mark.sweep) for n in (7, None))],
)
def test_pairs_of_group_elements_are_held_a_block_at_a_time(
    window, monkeypatch
):
    import torch

    attend, tensors, pairs = group_attention(window, True)
    monkeypatch.setattr(dispatch, "EAGER_BLOCK", pairs // 4)
    monkeypatch.setattr(dispatch, "EAGER_TOGETHER", 1)
    y, kept, largest, _ = watch(attend)
    # Windows have pixels in excess, and are copied for products with channels.
    limit = 6 * pairs / 3
    assert largest < limit
    gradients, _, largest, _ = watch(
        functools.partial(torch.autograd.grad, y.sum(), tensors)
    )
    assert all(gradient.any() for gradient in gradients)
    assert largest < limit
    # The arguments padded, the output, a number for each pixel and pair of
    # elements, and the encoding turned around.
    around = math.prod(n + (window or 1) - 1 for n in SIZE)
    limit = 6 * around * tensors[0][0, 0, 0].numel() + tensors[3].numel()
    assert kept < 4 * limit
    _, held, largest, _ = watch(group_attention(window, False)[0])
    assert held > 4 * (2 * 4 * pairs)
    assert largest >= 2 * 4 * pairs
