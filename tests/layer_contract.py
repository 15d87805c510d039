"""What every layer must pass, on every backend.

A test module describes its layers as `LayerCase`s and subclasses
`LayerContract`; pytest runs each check below on each case.
"""

import dataclasses
import functools
import inspect
import pathlib
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

from keras_equiattn import groups
from keras_equiattn.layers.base.group_layer import GroupLayer
from keras_equiattn.testing import assert_equivariant
from keras_equiattn.testing import relative_difference

try:  # private to Keras: this is the one place that knows where it is
    from keras.src.testing import TestCase as KerasTestCase
except ImportError:
    KerasTestCase = None

GOLDEN = pathlib.Path(__file__).parent / "golden"
FLOAT64_BACKENDS = ("tensorflow", "torch")
# The most precise dtype here, and how far results may be from an oracle in it.
DTYPE = "float64" if keras.backend.backend() != "jax" else "float32"
LIMIT = 1e-10 if DTYPE == "float64" else 2e-5


@dataclasses.dataclass(frozen=True)
class LayerCase:
    """One layer class with one set of arguments.

    Attributes:
        layer: the class.
        arguments: of `__init__`.
        input_shape: channels last, with the batch, at least 2.
        output_shape: what the layer must return for it.
        weights: number of trainable variables.
        group: the group under which the layer is equivariant.
        rectangle: another height and width that the layer takes, not equal.
        reach: width of the border, in pixels, within which a shift need not
            show exactly; None where no shift does.
        no_shift: the reason for `reach=None`.
        unknown_size: whether height and width may be None.
        seed_generators: number of seed generators that the layer owns.
        statistics: number of variables that are not trained.
        outputs: what outputs of rank 4 are, see `equivariance_error`.
    """

    layer: type[keras.layers.Layer]
    arguments: dict[str, Any]
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    weights: int
    group: str
    rectangle: tuple[int, int] | None = None
    reach: int | None = 0
    unknown_size: bool = True
    seed_generators: int = 0
    statistics: int = 0
    outputs: str = "images"
    no_shift: str = "statistics of the whole image see its border"

    @property
    def name(self):
        arguments = self.arguments
        return "-".join(
            [self.layer.__name__, self.group]
            + [
                str(arguments[key])
                for key in ("padding", "mode")
                if key in arguments
            ]
        )

    def make(self, **changes):
        """The layer with weights away from zero and one, built.

        A data format is left out where the layer takes none.
        """
        if "data_format" not in init_arguments(self.layer):
            changes.pop("data_format", None)
        layer = self.layer(**{**self.arguments, **changes})
        shape = (None, *self.input_shape[1:])
        if getattr(layer, "data_format", None) == "channels_first":
            shape = (None, shape[-1], *shape[1:-1])
        layer.build(shape)
        rng = np.random.default_rng(1)
        for variable in layer.weights:
            values = rng.uniform(0.2, 0.7, variable.shape)
            signs = rng.choice([-1, 1], variable.shape)
            positive = variable.name == "moving_variance"
            variable.assign(values if positive else values * signs)
        return layer

    def sample(self, shape=None, dtype="float32", seed=0):
        shape = shape or self.input_shape
        return np.random.default_rng(seed).normal(size=shape).astype(dtype)


class LayerContract:
    """The checks; subclasses say on what.

    Attributes:
        layer: the class.
        arguments: sets of arguments that together give every argument of
            `__init__` a value that is not its default, so that a value lost
            on the way shows.
        without: arguments of its base classes that the layer does not take.
        cases: what all other checks run on; those marked `conduct` run on the
            first alone where every shape has to be compiled.
    """

    layer: type[keras.layers.Layer]
    arguments: tuple[dict[str, Any], ...]
    cases: tuple[LayerCase, ...] = ()
    without: tuple[str, ...] = ()

    @pytest.mark.conduct
    @pytest.mark.torch_first
    def test_keras_own_contract(self, case):
        if KerasTestCase is None:
            pytest.skip("this version of Keras has no layer test")
        check_keras_contract(case)

    def test_config_holds_every_argument_with_its_value(self):
        check_config(self.layer, self.arguments, self.without)

    @pytest.mark.conduct
    @pytest.mark.torch_first
    def test_file_round_trip(self, case, tmp_path):
        check_file_round_trip(case, tmp_path)

    @pytest.mark.conduct
    @pytest.mark.torch_first
    def test_file_round_trip_with_a_query(self, case, tmp_path):
        if not getattr(case.make(), "attends", False):
            pytest.skip("the layer has no attention to show")
        check_file_round_trip_with_a_query(case, tmp_path)

    def test_golden_weights(self, request):
        update = request.config.getoption("--update-golden")
        check_golden(self.cases[0], update)

    def test_equivariance(self, case):
        skip_without_symmetry(case)
        check_equivariance(case)

    def test_equivariance_in_training(self, case):
        skip_without_symmetry(case)
        check_equivariance(case, training=True)

    @pytest.mark.skipif(
        keras.backend.backend() not in FLOAT64_BACKENDS,
        reason="float64 is off by default on this backend",
    )
    def test_equivariance_float64(self, case):
        skip_without_symmetry(case)
        check_equivariance(case, dtype="float64", rtol=1e-12)

    def test_translation(self, case):
        if case.reach is None:
            pytest.skip(case.no_shift)
        check_translation(case)

    @pytest.mark.torch_first
    def test_data_formats_agree(self, case):
        check_data_formats(case)

    @pytest.mark.torch_first
    def test_dynamic_batch(self, case):
        check_dynamic_batch(case)

    @pytest.mark.torch_first
    def test_empty_batch(self, case):
        check_empty_batch(case)

    @pytest.mark.torch_first
    @pytest.mark.parametrize("dtype", ["uint8", "int32", "bool"])
    def test_integers(self, dtype):
        check_integers(self.cases[0], dtype)

    def test_empty_images_are_refused(self):
        if not issubclass(self.layer, GroupLayer):
            pytest.skip("takes maps of any size")
        check_empty_images_are_refused(self.cases[0])

    def test_unknown_size(self, case):
        if case.unknown_size:
            check_unknown_size(case)
        else:
            check_unknown_size_is_refused(case)

    @pytest.mark.parametrize(
        "policy",
        [
            pytest.param("float32", marks=pytest.mark.torch_first),
            pytest.param("float16", marks=pytest.mark.torch_first),
            pytest.param("bfloat16", marks=pytest.mark.torch_first),
            "mixed_bfloat16",
        ],
    )
    def test_dtype_policies(self, policy):
        check_dtype_policy(self.cases[0], policy)


def skip_without_symmetry(case):
    if groups.get(case.group).order == 1:
        pytest.skip("the group has no element that moves anything")


def check_keras_contract(case):
    keras_case = KerasTestCase()
    keras_case.setUp()
    keras_case.run_layer_test(
        case.layer,
        init_kwargs=case.arguments,
        input_shape=case.input_shape,
        expected_output_shape=case.output_shape,
        expected_num_trainable_weights=case.weights,
        expected_num_non_trainable_weights=case.statistics,
        expected_num_seed_generators=case.seed_generators,
        expected_num_losses=None,
        # Only our layers that derive from Keras' Dropout do.
        supports_masking=issubclass(case.layer, keras.layers.Dropout),
    )


def check_config(layer_class, argument_sets, without=()):
    defaults = init_arguments(layer_class)
    for key in without:
        del defaults[key]
    for key, default in defaults.items():
        assert any(
            plain(arguments.get(key, default)) != plain(default)
            for arguments in argument_sets
        ), f"the contract gives `{key}` no value but its default"
    for arguments in argument_sets:
        layer = layer_class(**arguments)
        config = layer.get_config()
        missing = set(defaults) - set(config)
        assert not missing, f"get_config lacks {sorted(missing)}"
        revived = layer_class.from_config(config)
        for key, value in arguments.items():
            given = plain(getattr(layer, key))
            assert given == plain(value), f"`{key}` was {value}, is {given}"
            came_back = plain(getattr(revived, key))
            assert came_back == given, (
                f"`{key}` was {given}, after a config round trip {came_back}"
            )


def check_file_round_trip(case, folder):
    layer = case.make()
    model = keras.Sequential([keras.Input(case.input_shape[1:]), layer])
    x = case.sample()
    expected = as_array(call_of(model)(x))
    path = folder / "model.keras"
    model.save(path)
    revived = keras.saving.load_model(path, safe_mode=True)
    np.testing.assert_array_equal(as_array(call_of(revived)(x)), expected)


def check_file_round_trip_with_a_query(case, folder):
    """A file holds the position as a list, and no backend may trace it."""
    layer = case.make()
    inputs = keras.Input(batch_shape=case.input_shape)
    outputs = layer(inputs, return_attention_maps=True, query=(1, 0))
    model = keras.Model(inputs, outputs)
    x = case.sample()
    expected = keras.tree.flatten(model(x))
    path = folder / "model.keras"
    model.save(path)
    revived = keras.saving.load_model(path, safe_mode=True)
    found = keras.tree.flatten(revived.predict(x, verbose=0))
    for one, other in zip(found, expected, strict=True):
        assert relative_difference(one, as_array(other)) < 1e-5


def check_golden(case, update=False):
    """Committed weights give the committed output, whatever the backend."""
    layer = case.make(data_format="channels_last")
    model = keras.Sequential([keras.Input(case.input_shape[1:]), layer])
    weights = GOLDEN / f"{case.layer.__name__}.weights.h5"
    values = GOLDEN / f"{case.layer.__name__}.npz"
    if update:
        model.save_weights(weights)
        x = case.sample()
        np.savez_compressed(values, x=x, y=as_array(model(x)))
    for variable in layer.weights:
        variable.assign(np.zeros(variable.shape))
    model.load_weights(weights)
    with np.load(values) as arrays:
        y = as_array(call_of(model)(arrays["x"]))
        assert relative_difference(y, arrays["y"]) < 1e-5


def check_equivariance(case, training=False, dtype="float32", rtol=1e-5):
    layer = case.make(data_format="channels_last", dtype=dtype)
    options = {"training": training} if takes(layer, "training") else {}
    for shape in shapes(case):
        assert_equivariant(
            call_of(layer, **options),
            case.group,
            case.sample(shape, dtype),
            rtol=rtol,
            elements=groups.get(case.group).grid_elements,
            outputs=case.outputs,
        )


def check_translation(case):
    """Shifting the input by one stride shifts the inside of the output."""
    layer = case.make(data_format="channels_last")
    height, width = case.input_shape[1:3]
    strides = getattr(layer, "strides", (1, 1))
    rest = case.input_shape[3:]
    large = case.sample((2, height + strides[0], width + strides[1], *rest))
    call = call_of(layer)
    first = as_array(call(large[:, :height, :width]))
    second = as_array(call(large[:, strides[0] :, strides[1] :]))
    near, far = case.reach, -case.reach or None
    expected = first[:, near + 1 : far, near + 1 : far]
    assert expected.size, "the case is too small for its reach"
    last = -case.reach - 1
    actual = second[:, near:last, near:last]
    assert relative_difference(actual, expected) < 1e-5


def check_data_formats(case):
    last = case.make(data_format="channels_last")
    first = case.make(data_format="channels_first")
    x = case.sample()
    expected = np.moveaxis(as_array(call_of(last)(x)), -1, 1)
    moved = np.ascontiguousarray(np.moveaxis(x, -1, 1))
    actual = as_array(call_of(first)(moved))
    assert relative_difference(actual, expected) < 1e-6
    spec = first.compute_output_shape(moved.shape)
    assert tuple(spec) == expected.shape


def check_dynamic_batch(case):
    layer = case.make(data_format="channels_last")
    x = case.sample((3, *case.input_shape[1:]))
    call = call_of(layer)
    expected = as_array(call(x[:2]))
    alone = as_array(call(x[:1]))
    assert alone.shape == (1, *expected.shape[1:])
    assert relative_difference(alone, expected[:1]) < 1e-5
    model = keras.Sequential([keras.Input(case.input_shape[1:]), layer])
    assert model.output_shape == (None, *expected.shape[1:])
    actual = model.predict(x, batch_size=2, verbose=0)
    assert actual.shape == (3, *expected.shape[1:])
    assert relative_difference(actual[:2], expected) < 1e-5
    alone = as_array(call(x[2:]))
    assert relative_difference(actual[2:], alone) < 1e-5


def check_empty_batch(case):
    """No images: none come out, and nothing is learned from them."""
    layer = case.make(data_format="channels_last")
    before = [as_array(variable).copy() for variable in layer.weights]
    x = case.sample((0, *case.input_shape[1:]))
    options = {"training": True} if takes(layer, "training") else {}
    shape = (0, *case.output_shape[1:])
    assert tuple(layer(x).shape) == shape
    assert tuple(layer(x, **options).shape) == shape
    if takes(layer, "return_attention_maps"):
        for arguments in ({}, {"query": (0, 0)}):
            y, maps = layer(x, return_attention_maps=True, **arguments)
            assert tuple(y.shape) == shape
            assert all(of_image.shape[0] == 0 for of_image in maps.values())
    cotangent = np.zeros(shape, "float32")
    of_x, *found = gradients(layer, x, cotangent, **options)
    assert of_x.shape == x.shape
    assert not any(gradient.any() for gradient in found)
    for variable, start in zip(layer.weights, before, strict=True):
        np.testing.assert_array_equal(as_array(variable), start)


def check_integers(case, dtype):
    """Images of bytes, and masks, count as the numbers that they are."""
    layer = case.make(data_format="channels_last")
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2 if dtype == "bool" else 9, case.input_shape)
    expected = as_array(layer(x.astype("float32")))
    y = as_array(layer(ops.convert_to_tensor(x.astype(dtype), dtype)))
    assert y.dtype == expected.dtype
    assert relative_difference(y, expected) < 1e-6
    inputs = keras.Input(case.input_shape[1:], dtype=dtype)
    assert keras.Model(inputs, layer(inputs)).output.dtype == "float32"


def check_empty_images_are_refused(case):
    batch, height, width, *rest = case.input_shape
    for size in ((0, width), (height, 0), (0, None)):
        layer = case.layer(**{**case.arguments, "data_format": "channels_last"})
        with pytest.raises(
            ValueError, match="height and width of at least one"
        ):
            layer.compute_output_shape((batch, *size, *rest))


def check_unknown_size(case):
    layer = case.make(data_format="channels_last")
    unknown = (None, None, *case.input_shape[3:])
    model = keras.Sequential([keras.Input(unknown), layer])
    for shape in shapes(case):
        x = case.sample(shape)
        expected = as_array(call_of(layer)(x))
        actual = model.predict(x, verbose=0)
        assert relative_difference(actual, expected) < 1e-5


def check_unknown_size_is_refused(case):
    layer = case.layer(**{**case.arguments, "data_format": "channels_last"})
    with pytest.raises(ValueError, match="known only at run time"):
        layer.build((None, None, None, *case.input_shape[3:]))


def check_dtype_policy(case, policy):
    layer = case.make(dtype=policy, data_format="channels_last")
    compute = keras.DTypePolicy(policy).compute_dtype
    y = call_of(layer)(case.sample())
    assert keras.backend.standardize_dtype(y.dtype) == compute
    values = as_array(ops.cast(y, "float32"))
    assert np.isfinite(values).all()
    reference = case.make(dtype="float32", data_format="channels_last")
    tolerance = {"float32": 1e-6, "float16": 1e-2, "bfloat16": 5e-2}[compute]
    expected = as_array(call_of(reference)(case.sample()))
    assert relative_difference(values, expected) < tolerance


def init_arguments(layer):
    """Arguments of `__init__` of the layer's own classes, with defaults."""
    arguments = {}
    for cls in layer.__mro__:
        if cls is keras.layers.Layer:
            break
        if "__init__" in vars(cls):
            for name, parameter in inspect.signature(
                cls.__init__
            ).parameters.items():
                if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
                    arguments.setdefault(name, parameter.default)
    arguments.pop("self", None)
    return arguments


def plain(value):
    """A value that compares by content."""
    if isinstance(value, groups.Group):
        return value.name
    if hasattr(value, "get_config"):
        return (type(value).__name__, repr(value.get_config()))
    return getattr(value, "__name__", value)  # activations are functions


def shapes(case):
    yield case.input_shape
    if case.rectangle:
        yield (case.input_shape[0], *case.rectangle, *case.input_shape[3:])


def takes(layer, argument):
    return argument in inspect.signature(layer.call).parameters


def call_of(layer, **options):
    """The call of a layer with these options.

    JAX compiles the layer as a whole, unless training changes its variables:
    that takes half as long as to compile operator after operator.
    """
    call = functools.partial(layer, **options)
    changes = options.get("training") and layer.non_trainable_variables
    if keras.backend.backend() != "jax" or changes:
        return call
    import jax

    return jax.jit(call)


def as_array(x):
    return np.asarray(ops.convert_to_numpy(x))


def weights_of(layer):
    """Arrays in double precision by the names of the variables."""
    return {v.name: as_array(v).astype("float64") for v in layer.weights}


def gradients(layer, x, cotangent, **options):
    """Gradients of `sum(layer(x) * cotangent)` with respect to x and weights.

    Args:
        layer: the layer.
        x: its input.
        cotangent: like its output.
        **options: more arguments of the call.

    Returns:
        A list of arrays: for x, then for `layer.trainable_variables`.
    """
    backend = keras.backend.backend()
    variables = layer.trainable_variables
    if backend == "tensorflow":
        import tensorflow as tf

        x = tf.convert_to_tensor(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(layer(x, **options) * cotangent)
        sources = [x, *(variable.value for variable in variables)]
        return [as_array(grad) for grad in tape.gradient(loss, sources)]
    if backend == "jax":
        import jax

        def loss_of(x, values):
            y, _ = layer.stateless_call(values, others, x, **options)
            return (y * cotangent).sum()

        values = [variable.value for variable in variables]
        others = [v.value for v in layer.non_trainable_variables]
        of_x, of_values = jax.jit(jax.grad(loss_of, argnums=(0, 1)))(
            ops.convert_to_tensor(x), values
        )
        return [as_array(grad) for grad in (of_x, *of_values)]
    import torch

    # Where Keras puts tensors, which may be a GPU.
    x = ops.convert_to_tensor(x).requires_grad_()
    loss = (layer(x, **options) * ops.convert_to_tensor(cotangent)).sum()
    sources = [x, *(variable.value for variable in variables)]
    return [as_array(grad) for grad in torch.autograd.grad(loss, sources)]


def second_derivative(layer, x, direction):
    """`d^T H d` of the sum of squares of the output."""
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        values = [variable.value for variable in layer.trainable_variables]
        others = [v.value for v in layer.non_trainable_variables]

        def loss(t):
            y, _ = layer.stateless_call(values, others, x + t * direction)
            return (y**2).sum()

        return float(jax.jit(jax.grad(jax.grad(loss)))(0.0))
    if backend == "tensorflow":
        import tensorflow as tf

        t = tf.constant(0.0, x.dtype)
        with tf.GradientTape() as outer:
            outer.watch(t)
            with tf.GradientTape() as inner:
                inner.watch(t)
                y = layer(x + t * direction)
                loss = tf.reduce_sum(y**2)
            slope = inner.gradient(loss, t)
        return float(outer.gradient(slope, t))
    import torch

    x, direction = map(ops.convert_to_tensor, (x, direction))
    t = torch.zeros_like(x.sum(), requires_grad=True)
    y = layer(x + t * direction)
    (slope,) = torch.autograd.grad((y**2).sum(), t, create_graph=True)
    return float(torch.autograd.grad(slope, t)[0])


def assert_strides_leave_out_pixels(layer, dense, x, limit):
    """Outputs and maps are some of those of the same layer without strides."""
    some = (slice(None), *(slice(None, None, step) for step in layer.strides))
    y, maps = layer(x, return_attention_maps=True)
    expected, of_all = dense(x, return_attention_maps=True)
    expected = as_array(expected)[some]
    assert y.shape == expected.shape
    assert relative_difference(as_array(y), expected) < limit
    of_all = as_array(of_all["window"])[some]
    assert relative_difference(as_array(maps["window"]), of_all) < limit
    for place in ((1, 0), (2, 1)):
        one = layer(x, return_attention_maps=True, query=place)[1]["window"]
        wanted = of_all[:, place[0], place[1]]
        assert relative_difference(as_array(one), wanted) < limit


def assert_regularizes(layer, names, rate):
    """The built layer's `L2(rate)` applies to these kernels alone."""
    kernels = (as_array(getattr(layer, f"{name}_kernel")) for name in names)
    expected = sum(rate * (kernel**2).sum() for kernel in kernels)
    found = sum(as_array(loss) for loss in layer.losses)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
