"""Linear maps on a group: both bases against the oracle, and each other."""

import functools

import keras
import numpy as np
import oracles
import pytest
from keras import ops
from layer_contract import as_array
from layer_contract import DTYPE
from layer_contract import LIMIT
from sweeps import swept

from keras_equiattn import config
from keras_equiattn import groups
from keras_equiattn.ops import backend
from keras_equiattn.ops import group_conv
from keras_equiattn.ops import group_linear
from keras_equiattn.ops import lifting_conv
from keras_equiattn.ops.group import block_linear
from keras_equiattn.ops.group import dispatch
from keras_equiattn.ops.group import linear
from keras_equiattn.ops.group.linear import BASES
from keras_equiattn.ops.group.linear import ELEMENTWISE_ACTIVATIONS
from keras_equiattn.testing import relative_difference

NAMES = ("z2", "z2m", "p2m", "p4", "p4m", "p8", "p8m", "p12", "p16")


def difference(actual, expected):
    return relative_difference(as_array(actual), as_array(expected))


def arguments(name, channels=3, filters=5):
    order = groups.get(name).order
    rng = np.random.default_rng(0)
    shapes = (2, 4, 3, order, channels), (order, channels, filters), (filters,)
    return [rng.normal(size=shape).astype(DTYPE) for shape in shapes]


@pytest.mark.parametrize("basis", ["regular", "irreps"])
@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_oracle(name, basis):
    x, kernel, bias = arguments(name)
    found = group_linear(
        *map(ops.convert_to_tensor, (x, kernel, bias)), name, basis
    )
    expected = oracles.group_linear(x, kernel, bias, name)
    assert difference(found, expected) < LIMIT


@pytest.mark.parametrize("name", ["p4", "p4m", "p8"])
def test_gradients_agree(name):
    """Of a weighted sum of the output, with respect to all arguments."""
    tensors = [ops.convert_to_tensor(array) for array in arguments(name)]
    x = tensors[0]
    upstream = np.random.default_rng(1).normal(size=(*x.shape[:4], 5))
    upstream = ops.convert_to_tensor(upstream.astype(DTYPE))

    def gradients(basis):
        def function(*tensors):
            return group_linear(*tensors, name, basis)

        return backend.vjp(function, tuple(tensors), upstream)[1]

    pairs = zip(gradients("regular"), gradients("irreps"), strict=True)
    for regular, irreps in pairs:
        assert difference(irreps, regular) < LIMIT


@pytest.mark.parametrize("name", ["p4", "p8m"])
def test_the_forms_of_a_change_of_basis_agree(name, monkeypatch):
    """One adds term by term, for compilers; the other is a product."""
    group = groups.get(name)
    x = ops.convert_to_tensor(arguments(name)[0])
    found = []
    for fuses in (True, False):
        monkeypatch.setattr(backend.Target, "fuses", fuses)
        sums = block_linear.to_sums(x, group=group)
        found.append((*sums, block_linear.from_sums(sums, group=group)))
    for fused, product in zip(*found, strict=True):
        assert difference(fused, product) < LIMIT


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("activation", ELEMENTWISE_ACTIVATIONS)
def test_input_activations(activation, basis, recompute):
    """The result, and all gradients, as with the activation before the map."""
    x, kernel, bias = arguments("p4m")
    given = tuple(map(ops.convert_to_tensor, (x, kernel, bias)))
    upstream = np.random.default_rng(1).normal(size=(*x.shape[:4], 5))
    upstream = ops.convert_to_tensor(upstream.astype(DTYPE))
    activated = getattr(keras.activations, activation)

    def inside(*given):
        return group_linear(*given, "p4m", basis, activation)

    def before(x, *others):
        return group_linear(activated(x), *others, "p4m", "regular")

    if not recompute:
        config.disable_recompute()
    try:
        y, found = backend.vjp(inside, given, upstream)
    finally:
        config.enable_recompute()
    expected = oracles.group_linear(
        as_array(activated(given[0])), kernel, bias, "p4m"
    )
    assert difference(y, expected) < LIMIT
    others = backend.vjp(before, given, upstream)[1]
    for one, other in zip(found, others, strict=True):
        assert difference(one, other) < LIMIT


@pytest.mark.skipif(
    keras.backend.backend() == "torch", reason="PyTorch takes all rows at once"
)
@pytest.mark.parametrize("activation", swept((None, "gelu"), None))
@pytest.mark.parametrize(
    ("height", "known"),
    [
        pytest.param(6, True, marks=pytest.mark.sweep),
        (7, True),
        pytest.param(
            7,
            False,
            marks=pytest.mark.skipif(
                keras.backend.backend() != "tensorflow",
                reason="it knows the number of images",
            ),
        ),
    ],
)
def test_rows_of_feature_maps(height, known, activation, monkeypatch):
    """A compiled loop over one row, some rows or half of them at a time.

    Of 35 rows, three at a time leave two for the last step, and twelve leave
    eleven. Without an activation one map gives sums to the next one, which
    takes them.
    """
    group = groups.get("p4")
    tensors = [ops.convert_to_tensor(array) for array in arguments("p4")]
    rng = np.random.default_rng(1)
    second = ops.convert_to_tensor(rng.normal(size=(4, 5, 5)).astype(DTYPE))
    shape = 5, height, 3, 4
    x = ops.convert_to_tensor(rng.normal(size=(*shape, 3)).astype(DTYPE))
    upstream = rng.normal(size=(*shape, 5)).astype(DTYPE)
    upstream = ops.convert_to_tensor(upstream)

    def gradients(basis):
        def function(*given):
            if basis == "regular" or activation is not None:
                y = group_linear(*given, group, basis, activation)
                return group_linear(y, second, tensors[2], group, basis)
            sums = block_linear.linear_to_sums(*given, group)
            return block_linear.linear_from_sums(
                sums, second, tensors[2], group
            )

        def both(upstream, *given):
            y, found = backend.vjp(function, given, upstream)
            return (y, *found)

        given = (upstream, x, *tensors[1:])
        if keras.backend.backend() == "jax":
            return both(*given)
        import tensorflow as tf

        shapes = [tensor.shape for tensor in given]
        if not known:
            # What `fit` does where the last batch is smaller.
            shapes[:2] = [(None, *shape[1:]) for shape in shapes[:2]]
        signature = [tf.TensorSpec(shape, DTYPE) for shape in shapes]
        return tf.function(both, input_signature=signature)(*given)

    tall = ops.reshape(x, (1, 5 * height, *x.shape[2:]))
    in_one_product = gradients("regular")
    row = 3 * 4 * 5
    for values, rows in (
        (1, 1),
        (3 * row, 3),
        (10**9, {6: 15, 7: 12}[height]),
    ):
        monkeypatch.setattr(dispatch, "VALUES_OF_STEP", values)
        assert dispatch.rows_of_step(tall, 4 * 5) == rows
        block_linear._function.cache_clear()
        pairs = zip(gradients("irreps"), in_one_product, strict=True)
        for one, other in pairs:
            assert difference(one, other) < LIMIT
    block_linear._function.cache_clear()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(dtype):
    """Large numbers do not overflow, and the bias and its gradient fit."""
    x, kernel, bias = arguments("p4m")
    given = [
        ops.cast(array, dtype) for array in (1e4 * x, 1e-2 * kernel, 1e3 * bias)
    ]
    upstream = ops.ones((2, 4, 3, 8, 5), dtype)

    def both(basis):
        def function(*tensors):
            return group_linear(*tensors, "p4m", basis)

        y, found = backend.vjp(function, tuple(given), upstream)
        return [as_array(ops.cast(array, "float32")) for array in (y, *found)]

    precise = group_linear(
        *(ops.cast(array, "float32") for array in given), "p4m"
    )
    limit = 3e-3 if dtype == "float16" else 2e-2
    y, *gradients = both("irreps")
    assert difference(y, precise) < limit
    # Those of the kernel overflow in float16 in both bases.
    for one, other in zip(gradients[::2], both("regular")[1::2], strict=True):
        assert difference(one, other) < limit


@pytest.mark.skipif(
    keras.backend.backend() == "openvino", reason="it only predicts"
)
def test_the_faster_basis(monkeypatch):
    """Blocks for many values per pixel, on a CPU, in single precision."""

    def on(device):
        target = backend.Target(device, None)
        monkeypatch.setattr(backend, "find_target", lambda *_: target)

    def found(channels, filters, name="p4", dtype="float32"):
        order = groups.get(name).order
        x = ops.zeros((1, 2, 2, order, channels), dtype)
        return dispatch.linear_basis(x, filters)

    on("cpu")
    fewest = dispatch.FEWEST_VALUES[keras.backend.backend()] // 4
    assert found(fewest, fewest) == found(fewest, 2 * fewest) == "irreps"
    assert found(fewest, fewest // 2 - 1, "p8") == "regular"
    assert found(fewest // 2, fewest // 2, "p8") == "irreps"
    assert found(fewest - 1, fewest) == found(fewest, fewest - 1) == "regular"
    assert found(512, 512, "z2m") == "regular"
    assert found(512, 512, dtype="bfloat16") == "regular"
    with backend.portable():
        assert found(fewest, fewest) == "regular"
    on("accelerator")
    assert found(fewest, fewest) == "regular"


def test_the_faster_basis_is_taken(monkeypatch):
    """Also for an array of NumPy, which has a device of its own."""
    x, kernel, bias = arguments("p4m")
    given = (x, ops.convert_to_tensor(kernel), ops.convert_to_tensor(bias))
    expected = group_linear(*given, "p4m", "regular")
    taken = []
    by_blocks = linear.block_linear
    monkeypatch.setattr(
        linear, "block_linear", lambda *a: taken.append(0) or by_blocks(*a)
    )
    assert difference(group_linear(*given, "p4m"), expected) < LIMIT
    assert not taken
    fewest = dict.fromkeys(dispatch.FEWEST_VALUES, 8)
    monkeypatch.setattr(dispatch, "FEWEST_VALUES", fewest)
    assert difference(group_linear(*given, "p4m"), expected) < LIMIT
    assert taken


@pytest.mark.parametrize("strides", [1, 2])
def test_liftings_of_one_pixel(strides):
    """All poses are the same, as with kernels that are padded with zeros."""
    rng = np.random.default_rng(0)
    x = ops.convert_to_tensor(rng.normal(size=(2, 5, 5, 3)).astype(DTYPE))
    kernel = rng.normal(size=(1, 1, 3, 4)).astype(DTYPE)
    wider = np.pad(kernel, ((1, 1), (1, 1), (0, 0), (0, 0)))
    options = {"strides": strides, "padding": "same"}
    found = lifting_conv(x, ops.convert_to_tensor(kernel), "p4m", **options)
    expected = lifting_conv(x, ops.convert_to_tensor(wider), "p4m", **options)
    assert found.shape == (2, -(-5 // strides), -(-5 // strides), 8, 4)
    assert difference(found, expected) < LIMIT


@pytest.mark.parametrize("options", [{}, {"strides": 2, "padding": "same"}])
def test_convolutions_with_one_pixel(options, monkeypatch):
    """Blocks compute them where a backend can differentiate twice."""
    x, kernel, _ = arguments("p4m")
    given = [ops.convert_to_tensor(a) for a in (x, kernel[None, None])]
    expected = group_conv(*given, "p4m", **options)
    taken = []
    by_blocks = linear.block_linear
    monkeypatch.setattr(
        linear, "block_linear", lambda *a: taken.append(0) or by_blocks(*a)
    )
    fewest = dict.fromkeys(dispatch.FEWEST_VALUES, 8)
    monkeypatch.setattr(dispatch, "FEWEST_VALUES", fewest)
    target = backend.Target("cpu", None)
    monkeypatch.setattr(dispatch.backend, "find_target", lambda *_: target)
    found = group_conv(*given, "p4m", **options)
    can = keras.backend.backend() not in ("openvino", "tensorflow")
    assert bool(taken) == can
    assert difference(found, expected) < LIMIT
    with pytest.raises(ValueError, match="`padding`"):
        group_conv(*given, "p4m", padding="wrap")
    with pytest.raises(ValueError, match="`filter_basis`"):
        group_conv(*given, "p4m", filter_basis="fourier")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_input_activation_in_half_precision(dtype):
    x, kernel, bias = arguments("p4m")
    half = tuple(ops.cast(array, dtype) for array in (x, kernel, bias))
    precise = tuple(ops.cast(array, DTYPE) for array in half)
    upstream = np.ones((2, 4, 3, 8, 5), DTYPE)

    def gradients(given, basis):
        def function(*given):
            return group_linear(*given, "p4m", basis, "gelu")

        of_y = ops.cast(ops.convert_to_tensor(upstream), given[0].dtype)
        y, found = backend.vjp(function, given, of_y)
        return [ops.cast(array, DTYPE) for array in (y, *found)]

    limit = 1e-2 if dtype == "float16" else 6e-2
    pairs = zip(
        gradients(half, "irreps"), gradients(precise, "regular"), strict=True
    )
    for one, other in pairs:
        assert difference(one, other) < limit


def chain(basis, x, kernel, bias, second, third):
    """A number from three maps, two of them with sums in between."""
    group = groups.get("p4m")
    y = group_linear(x, kernel, bias, group, basis, "gelu")
    y = y * y * y
    if basis == "regular":
        y = group_linear(y, second, None, group, basis)
        y = group_linear(y, third, bias, group, basis)
    else:
        sums = block_linear.linear_to_sums(y, second, None, group)
        y = block_linear.linear_from_sums(sums, third, bias, group)
    return ops.sum(y * y * y)


def links():
    """The arrays of the chain."""
    rng = np.random.default_rng(0)
    shapes = (2, 4, 3, 8, 3), (8, 3, 5), (5,), (8, 5, 4), (8, 4, 5)
    given = [rng.normal(size=shape).astype(DTYPE) / 4 for shape in shapes]
    return tuple(map(ops.convert_to_tensor, given))


@pytest.mark.skipif(
    keras.backend.backend() not in ("jax", "torch"),
    reason="it cannot differentiate twice",
)
@pytest.mark.parametrize("values", [1, dispatch.VALUES_OF_STEP])
def test_gradients_of_gradients(values, monkeypatch):
    """Of a penalty on all gradients, and of the input's gradient alone.

    Steps take one row at a time, or as many as usual.
    """
    monkeypatch.setattr(dispatch, "VALUES_OF_STEP", values)

    def gradients(basis):
        function = functools.partial(chain, basis)
        found = of_penalty(function, links())
        return [as_array(array) for array in found]

    pairs = zip(gradients("regular"), gradients("irreps"), strict=True)
    for regular, irreps in pairs:
        assert difference(irreps, regular) < 10 * LIMIT


def of_penalty(function, given):
    """Gradients of a gradient penalty, and others by function transforms."""
    if keras.backend.backend() == "torch":
        import torch

        leaves = [array.detach().requires_grad_() for array in given]
        first = torch.autograd.grad(
            function(*leaves), leaves, create_graph=True
        )
        total = sum((gradient**2).sum() for gradient in first)
        found = torch.autograd.grad(total, leaves)

        def penalty(*arrays):
            return (torch.func.grad(function)(*arrays) ** 2).sum()

        return *found, torch.func.grad(penalty)(*given)
    import jax

    everything = tuple(range(len(given)))

    def penalty(*arrays):
        gradients = jax.grad(function, everything)(*arrays)
        return sum((gradient**2).sum() for gradient in gradients)

    found = jax.jit(jax.grad(penalty, everything))(*given)
    # The derivative of the gradient, forward.
    _, tangent = jax.jvp(jax.grad(function), given, given)
    return *found, tangent


@pytest.mark.skipif(
    keras.backend.backend() not in ("jax", "torch"),
    reason="it has no `vmap`",
)
def test_mapped_over_feature_maps(monkeypatch):
    """`vmap` of a gradient, against one feature map at a time."""
    monkeypatch.setattr(dispatch, "VALUES_OF_STEP", 1)
    x, kernel, bias = map(ops.convert_to_tensor, arguments("p4m"))

    def loss(x):
        return ops.sum(
            group_linear(x[None], kernel, bias, "p4m", "irreps", "gelu") ** 2
        )

    if keras.backend.backend() == "torch":
        from torch.func import grad
        from torch.func import vmap
    else:
        from jax import grad
        from jax import vmap
    found = vmap(grad(loss))(x)
    for one, image in zip(found, x, strict=True):
        assert difference(one, grad(loss)(image)) < LIMIT


@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="JAX and PyTorch can"
)
@pytest.mark.parametrize("compiled", swept((False, True), False))
def test_tensorflow_refuses_what_it_cannot_do(compiled, monkeypatch):
    """Without custom gradients it can."""
    import tensorflow as tf

    given = links()

    def found(basis):
        with tf.GradientTape() as outer:
            outer.watch(given[0])
            with tf.GradientTape() as inner:
                inner.watch(given[0])
                result = chain(basis, *given)
            penalty = tf.reduce_sum(inner.gradient(result, given[0]) ** 2)
        return outer.gradient(penalty, given[0])

    def forward():
        with tf.autodiff.ForwardAccumulator(given[0], given[0]) as accumulator:
            result = chain("irreps", *given)
        return accumulator.jvp(result)

    def run(function):
        return tf.function(function, autograph=False) if compiled else function

    with pytest.raises(LookupError):
        run(lambda: found("irreps"))()
    with pytest.raises(LookupError):
        run(forward)()
    config.disable_recompute()
    try:
        pair = [run(lambda basis=b: found(basis))() for b in BASES]
    finally:
        config.enable_recompute()
    assert difference(*pair) < 10 * LIMIT


@pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="others give zeros themselves"
)
def test_sums_that_nobody_uses():
    import torch

    x, kernel, *_ = links()
    x = x.detach().requires_grad_()
    sums = block_linear.linear_to_sums(x, kernel, None, groups.get("p4m"))
    (found,) = torch.autograd.grad(sums[0].sum(), x)
    expected = 8**0.5 / 8 * kernel.sum((0, 2))
    assert difference(found, expected.expand(found.shape)) < LIMIT


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_in_half_precision(dtype):
    """One map gives them, and the next one takes them."""
    x, kernel, bias = map(ops.convert_to_tensor, arguments("p4m"))
    second = ops.swapaxes(kernel, 1, 2)

    def mapped(*given):
        sums = block_linear.linear_to_sums(*given[:3], groups.get("p4m"))
        return block_linear.linear_from_sums(
            sums, given[3], None, groups.get("p4m")
        )

    half = [ops.cast(array, dtype) for array in (x, kernel, bias, second)]
    precise = [ops.cast(array, DTYPE) for array in half]
    found = ops.cast(mapped(*half), DTYPE)
    assert difference(found, mapped(*precise)) < (
        5e-3 if dtype == "float16" else 4e-2
    )


def test_errors():
    x, kernel, bias = map(ops.convert_to_tensor, arguments("p4"))
    with pytest.raises(ValueError, match=r"`basis`.*'fourier'"):
        group_linear(x, kernel, bias, "p4", "fourier")
    with pytest.raises(ValueError, match=r"`input_activation`.*'softmax'"):
        group_linear(x, kernel, bias, "p4", "irreps", "softmax")
    with pytest.raises(ValueError, match=r"kernel \(8, channels, filters\)"):
        group_linear(x, kernel, bias, "p4m")


@pytest.fixture
def float64():
    """Float64, which JAX must be told to have."""
    if keras.backend.backend() != "jax":
        yield
        return
    import jax

    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def in_float64(name):
    """Arguments of a linear map, and a second kernel for its result."""
    rng = np.random.default_rng(0)
    order = groups.get(name).order
    shapes = (2, 4, 3, order, 3), (order, 3, 5), (5,), (order, 5, 5)
    return [ops.convert_to_tensor(rng.normal(size=shape)) for shape in shapes]


def compare_in_float64(one, other, given):
    """Results and gradients of two functions of the same arguments."""

    def both(function):
        upstream = given[0][..., :1] * ops.ones(5, "float64")
        y, gradients = backend.vjp(function, tuple(given), upstream)
        return (y, *gradients)

    for pair in zip(both(one), both(other), strict=True):
        assert pair[0].dtype == pair[1].dtype == ops.ones(1, "float64").dtype
        assert difference(*pair) < 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_float64_is_as_precise(name, float64):
    def by(basis):
        return lambda *given: group_linear(*given, name, basis)

    compare_in_float64(*map(by, BASES), in_float64(name)[:3])


@pytest.mark.parametrize("name", NAMES[1:])
def test_float64_between_linear_maps(name, float64):
    """Two maps with sums between them, as in multi-head attention."""
    group = groups.get(name)

    def with_sums(x, kernel, bias, second):
        sums = block_linear.linear_to_sums(x, kernel, bias, group)
        return block_linear.linear_from_sums(sums, second, bias, group)

    def with_matrices(x, kernel, bias, second):
        y = group_linear(x, kernel, bias, name, "regular")
        return group_linear(y, second, bias, name, "regular")

    compare_in_float64(with_sums, with_matrices, in_float64(name))


@pytest.mark.skipif(
    keras.backend.backend() not in ("jax", "torch"),
    reason="other backends take no blocks here",
)
@pytest.mark.parametrize("name", ["p4", "p4m", "p8", "p8m", "p16"])
def test_float64_of_convolutions(name, float64, monkeypatch):
    """Of one pixel, by blocks and by the matrix."""
    target = backend.Target("cpu", None)
    monkeypatch.setattr(dispatch.backend, "find_target", lambda *_: target)
    taken = []
    by_blocks = linear.block_linear
    monkeypatch.setattr(
        linear, "block_linear", lambda *a: taken.append(True) or by_blocks(*a)
    )

    def from_values(fewest, blocks):
        def function(x, kernel):
            values = dict.fromkeys(dispatch.FEWEST_VALUES, fewest)
            monkeypatch.setattr(dispatch, "FEWEST_VALUES", values)
            taken.clear()
            y = group_conv(x, kernel[None, None], name)
            assert bool(taken) == blocks
            return y

        return function

    given = in_float64(name)[:2]
    compare_in_float64(from_values(8, True), from_values(10**9, False), given)
