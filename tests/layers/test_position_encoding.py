"""Position encodings: equivariance, oracle, precision, files, errors."""

import itertools

import keras
import numpy as np
import oracles
import pytest
from keras import ops
from layer_contract import as_array
from layer_contract import check_config
from layer_contract import check_golden
from layer_contract import check_keras_contract
from layer_contract import DTYPE
from layer_contract import FLOAT64_BACKENDS
from layer_contract import KerasTestCase
from layer_contract import LayerCase

from keras_equiattn import groups
from keras_equiattn.layers import GroupSelfAttention2D
from keras_equiattn.layers import RelativePositionEncoding
from keras_equiattn.testing import relative_difference

TOLERANCE = 1e-12 if DTYPE == "float64" else 1e-5


CASE = LayerCase(
    RelativePositionEncoding,
    {"channels": 3, "group": "p4"},
    (5, 2),
    (5, 4, 6),
    weights=12,
    group="p4",
)


def random_encoding(**arguments):
    layer = RelativePositionEncoding(3, **arguments)
    layer.build((None, 2))
    rng = np.random.default_rng(0)
    for variable in layer.weights:
        variable.assign(rng.normal(size=variable.shape))
    return layer


def both_sides_of_zero(epsilon):
    """Encodings of ever smaller offsets, and of the opposite ones."""
    layer = RelativePositionEncoding(3, group="z2", epsilon=epsilon)
    offsets = np.repeat([[1.0], [0.1], [0.01], [0.001]], 2, axis=1)
    offsets = np.stack([offsets, -offsets]).astype("float32")
    right, left = as_array(layer(offsets))[:, :, 0]
    return right, left


class TestRelativePositionEncoding:
    """It takes offsets: no image, no batch of them."""

    def test_config_holds_every_argument_with_its_value(self):
        arguments = {
            "channels": 3,
            "hidden": 8,
            "group": "p4m",
            "epsilon": 1e-6,
            "kernel_initializer": keras.initializers.HeNormal(seed=1),
            "bias_initializer": keras.initializers.Constant(0.5),
        }
        check_config(RelativePositionEncoding, (arguments,))

    @pytest.mark.skipif(
        KerasTestCase is None, reason="this version of Keras has no layer test"
    )
    def test_keras_own_contract(self):
        check_keras_contract(CASE)

    def test_golden_weights(self, request):
        check_golden(CASE, request.config.getoption("--update-golden"))

    @pytest.mark.parametrize("group", ["z2m", "p4m", "p8m"])
    def test_elements_permute_under_the_group(self, group):
        layer = random_encoding(group=group, dtype=DTYPE)
        group = groups.get(group)
        offsets = np.random.default_rng(1).normal(size=(2, 5, 2))
        still = as_array(layer(offsets.astype(DTYPE)))
        assert still.shape == (2, 5, group.order, 6)
        for g in range(group.order):
            turned = offsets @ group.matrices[g].T
            moved = as_array(layer(turned.astype(DTYPE)))
            expected = still[:, :, group.relative(g)]
            assert relative_difference(moved, expected) < TOLERANCE
            if g:
                assert relative_difference(moved, still) > 1e-2

    def test_oracle(self):
        layer = random_encoding(group="p4m", dtype=DTYPE)
        offsets = np.random.default_rng(1).normal(size=(5, 2))
        w = {v.name: as_array(v) for v in layer.weights}
        expected = []
        for h in range(8):
            seen = oracles.offset_matrix("p4m", h).T @ offsets.T
            parts = [
                oracles.encoder(seen[0], w, "row", 1e-3),
                oracles.encoder(seen[1], w, "column", 1e-3),
            ]
            expected.append(np.concatenate(parts, axis=1))
        actual = as_array(layer(offsets.astype(DTYPE)))
        expected = np.stack(expected, axis=1)
        assert relative_difference(actual, expected) < TOLERANCE

    @pytest.mark.parametrize(
        "policy", ["float32", "float16", "mixed_float16", "mixed_bfloat16"]
    )
    def test_single_precision_under_half(self, policy):
        layer = random_encoding(dtype=policy)
        single = random_encoding(dtype="float32")
        assert layer.compute_dtype == layer.variable_dtype == "float32"
        offsets = np.linspace(-1, 1, 30).reshape(15, 2).astype("float32")
        y = layer(offsets)
        assert keras.backend.standardize_dtype(y.dtype) == "float32"
        np.testing.assert_array_equal(as_array(y), as_array(single(offsets)))
        # The same holds within a layer of half precision.
        outer = GroupSelfAttention2D(4, 3, 1, dtype=policy)
        assert outer.positions.compute_dtype == "float32"

    @pytest.mark.skipif(
        keras.backend.backend() not in FLOAT64_BACKENDS,
        reason="float64 is off by default on this backend",
    )
    def test_double_precision_under_double(self):
        layer = random_encoding(dtype="float64")
        y = layer(np.ones((4, 2)))
        assert keras.backend.standardize_dtype(y.dtype) == "float64"

    def test_policy_comes_back_from_the_config(self):
        for policy in ("mixed_float16", "float64"):
            layer = RelativePositionEncoding(3, dtype=policy)
            again = RelativePositionEncoding.from_config(layer.get_config())
            assert again.dtype_policy.name == layer.dtype_policy.name

    def test_epsilon_of_the_authors_leaves_the_sign_alone(self):
        """Where biases are zero, as they start."""
        right, left = both_sides_of_zero(1e-12)
        for side in (right, left):
            for y in side[1:]:
                assert relative_difference(y, side[0]) < 1e-4
        assert relative_difference(left[-1], right[-1]) > 0.1  # a step

    def test_epsilon_keeps_it_smooth(self):
        right, left = both_sides_of_zero(1e-3)
        for side in (right, left):
            for y, farther in itertools.pairwise(side[::-1]):
                assert relative_difference(y, farther) > 1e-3
        # Across zero it changes in proportion to the distance.
        changes = np.abs(right - left).max(axis=1)
        assert changes[-1] < 0.2 * changes[-2]
        assert changes[-1] < 0.1 * changes[0]

    def test_output_shape(self):
        layer = RelativePositionEncoding(3, group="p4m")
        assert layer.compute_output_shape((5, 5, 2)) == (5, 5, 8, 6)
        assert layer(keras.Input((5, 2))).shape == (None, 5, 8, 6)

    def test_is_part_of_a_saved_model(self, tmp_path):
        inputs = keras.Input((5, 2))
        model = keras.Model(inputs, random_encoding(group="p4m")(inputs))
        offsets = np.random.default_rng(1).normal(size=(2, 5, 2))
        expected = model.predict(offsets, verbose=0)
        model.save(tmp_path / "model.keras")
        revived = keras.saving.load_model(tmp_path / "model.keras")
        np.testing.assert_array_equal(
            revived.predict(offsets, verbose=0), expected
        )

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"channels": 0}, "`channels`.*0"),
            ({"hidden": 0}, "`hidden`.*0"),
            ({"epsilon": 0.0}, "`epsilon`.*positive.*0"),
            ({"epsilon": "small"}, "`epsilon`.*small"),
            ({"group": "p5"}, "p5"),
        ],
    )
    def test_bad_arguments(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            RelativePositionEncoding(**{"channels": 3, **arguments})

    def test_a_weight_that_is_too_large(self):
        layer = RelativePositionEncoding(2**31, hidden=1)
        message = r"row_kernel_2.*8 GiB.*Fewer than 2\*\*31.*\(1, 2147483648\)"
        with pytest.raises(ValueError, match=message):
            layer.build((5, 2))

    @pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
    def test_integers_are_seen_as_numbers_between_pixels(self, dtype):
        layer = random_encoding(group="p8")
        offsets = np.moveaxis(np.indices((3, 4)), 0, -1)
        expected = as_array(layer(offsets.astype("float32")))
        for x in (offsets.astype(dtype), ops.convert_to_tensor(offsets, dtype)):
            np.testing.assert_array_equal(as_array(layer(x)), expected)

    @pytest.mark.parametrize("shape", [(5, 3), ()])
    def test_bad_shapes(self, shape):
        with pytest.raises(ValueError, match=r"row and a column.*input_shape"):
            RelativePositionEncoding(3).build(shape)
        with pytest.raises(ValueError, match=r"row and a column.*input_shape"):
            random_encoding()(np.zeros(shape, "float32"))
