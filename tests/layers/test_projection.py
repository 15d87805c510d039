"""From feature maps on a group to images of numbers and of vectors."""

import keras
import numpy as np
import oracles
import pytest
from layer_contract import as_array
from layer_contract import call_of
from layer_contract import DTYPE
from layer_contract import gradients
from layer_contract import LayerCase
from layer_contract import LayerContract
from layer_contract import LIMIT

from keras_equiattn import groups
from keras_equiattn import ops
from keras_equiattn.layers import GroupConv2D
from keras_equiattn.layers import GroupProjection
from keras_equiattn.layers import GroupToAngle2D
from keras_equiattn.layers import GroupToVector2D
from keras_equiattn.layers import LiftingConv2D
from keras_equiattn.ops.group.directions import direction_matrices
from keras_equiattn.testing import assert_equivariant
from keras_equiattn.testing import equivariance_error
from keras_equiattn.testing import relative_difference


class TestGroupProjection(LayerContract):
    layer = GroupProjection
    arguments = (
        {
            "mode": "learned",
            "kernel_initializer": keras.initializers.Constant(0.5),
            "kernel_regularizer": keras.regularizers.L2(0.01),
            "kernel_constraint": keras.constraints.MaxNorm(3.0),
            "group": "p4m",
            "data_format": "channels_first",
        },
    )
    cases = tuple(
        LayerCase(
            GroupProjection,
            {"mode": mode, "group": group},
            (2, 5, 5, groups.get(group).order, 3),
            (2, 5, 5, 3),
            weights=int(mode == "learned"),
            group=group,
            rectangle=(4, 6),
        )
        for mode, group in (
            ("learned", "p4"),
            ("mean", "p4m"),
            ("max", "p2"),
            ("learned", "p8"),
        )
    )


class TestGroupToVector2D(LayerContract):
    layer = GroupToVector2D
    arguments = (
        {"signed": False, "group": "p4m", "data_format": "channels_first"},
    )
    cases = tuple(
        LayerCase(
            GroupToVector2D,
            {"signed": signed, "group": group},
            (2, 5, 5, groups.get(group).order, 4),
            (2, 5, 5, 4),
            weights=0,
            group=group,
            rectangle=(4, 6),
            outputs="vectors" if signed else "axes",
        )
        for signed, group in (
            (True, "p4"),
            (False, "p4m"),
            (True, "p4m"),
            (True, "z2m"),
            (False, "p8"),
        )
    )


class TestGroupToAngle2D(LayerContract):
    """All but the symmetry: the contract knows no angles."""

    layer = GroupToAngle2D
    arguments = TestGroupToVector2D.arguments
    cases = (
        LayerCase(
            GroupToAngle2D,
            {"group": "z2"},
            (2, 5, 5, 1, 4),
            (2, 5, 5, 2),
            weights=0,
            group="z2",
            rectangle=(4, 6),
        ),
    )


def images(group, channels=4, size=(3, 4)):
    shape = (2, *size, groups.get(group).order, channels)
    return np.random.default_rng(0).normal(size=shape)


def test_learned_projection_agrees_with_numpy():
    x = images("p4m")
    layer = GroupProjection("learned", group="p4m", dtype=DTYPE)
    layer.build(x.shape)
    kernel = np.random.default_rng(1).normal(size=4)

    def oracle(x, kernel):
        scores = np.exp(x @ kernel)
        weights = scores / scores.sum(axis=3, keepdims=True)
        return np.einsum("bxyh,bxyhc->bxyc", weights, x)

    layer.kernel.assign(kernel)
    given = x.astype(DTYPE)
    found = as_array(call_of(layer)(given))
    assert relative_difference(found, oracle(x, kernel)) < LIMIT
    rng = np.random.default_rng(2)
    cotangent = rng.normal(size=found.shape)
    of_x, of_kernel = gradients(layer, given, cotangent.astype(DTYPE))
    step = 1e-6 * rng.normal(size=x.shape)
    change = oracle(x + step, kernel) - oracle(x - step, kernel)
    np.testing.assert_allclose(
        (of_x * step).sum(), (change * cotangent).sum() / 2, rtol=1e-3
    )
    step = 1e-6 * rng.normal(size=kernel.shape)
    change = oracle(x, kernel + step) - oracle(x, kernel - step)
    np.testing.assert_allclose(
        (of_kernel * step).sum(), (change * cotangent).sum() / 2, rtol=1e-3
    )


@pytest.mark.torch_first
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("group", ["z2m", "p2", "p4", "p4m", "p8m"])
def test_vectors_agree_with_oracle(group, signed):
    x = images(group)
    frequency = 1 if signed else 2
    layer = GroupToVector2D(signed, group, dtype=DTYPE)
    expected = oracles.vectors(x, group, frequency)
    given = x.astype(DTYPE)
    found = as_array(call_of(layer)(given))
    assert relative_difference(found, expected) < LIMIT
    cotangent = np.random.default_rng(1).normal(size=expected.shape)
    (of_x,) = gradients(layer, given, cotangent.astype(DTYPE))
    np.testing.assert_allclose(
        (of_x * x).sum(), (expected * cotangent).sum(), rtol=1e-4
    )


@pytest.mark.once
@pytest.mark.parametrize("frequency", [1, 2])
@pytest.mark.parametrize("group", groups.names())
def test_matrices_are_a_representation(group, frequency):
    """`R(g) R(h) = R(g h)`; at frequency 1 they are those of the group."""
    group = groups.get(group)
    matrices = direction_matrices(group, frequency)
    products = matrices[:, None] @ matrices[None]
    np.testing.assert_allclose(
        products, matrices[group.product_table], atol=1e-12
    )
    if frequency == 1:
        np.testing.assert_allclose(matrices, group.matrices, atol=1e-12)
    for element in range(group.order):
        np.testing.assert_allclose(
            matrices[element],
            oracles.vector_matrix(group.name, element, frequency),
            atol=1e-12,
        )


@pytest.mark.torch_first
@pytest.mark.parametrize("frequency", [1, 2])
@pytest.mark.parametrize("group", ["p2m", "p4", "p4m"])
def test_vector_action_agrees_with_oracle(group, frequency):
    v = np.random.default_rng(0).normal(size=(2, 3, 4, 6)).astype("float32")
    for element in range(groups.get(group).order):
        found = as_array(ops.vector_action(v, group, element, frequency))
        expected = oracles.act_on_vectors(v, group, element, frequency)
        assert relative_difference(found, expected) < 1e-6


def edges(group):
    """A network that ends in a vector for each pixel."""
    inputs = keras.Input((6, 6, 2))
    x = LiftingConv2D(3, 3, group=group, padding="same")(inputs)
    x = GroupConv2D(2, 3, group=group, padding="same", activation="tanh")(x)
    return keras.Model(inputs, GroupToVector2D(group=group)(x))


@pytest.mark.torch_first
@pytest.mark.parametrize("group", ["p4", "p4m"])
def test_networks_give_vectors_that_turn(group):
    """And `equivariance_error` tells vectors from images."""
    model = edges(group)
    assert_equivariant(model, group, (2, 6, 6, 2), outputs="vectors")
    as_images = equivariance_error(model, group, (2, 6, 6, 2))
    assert as_images[1:].min() > 0.1
    as_axes = equivariance_error(model, group, (2, 6, 6, 2), outputs="axes")
    assert as_axes[1] > 0.1


def test_the_right_of_each_pose():
    """In the second channel, pose `h` votes for the right, turned by `h`."""
    for element, (row, column) in enumerate([(0, 1), (-1, 0), (0, -1), (1, 0)]):
        x = np.zeros((1, 1, 1, 4, 2), "float32")
        x[..., element, 1] = 1
        y = as_array(GroupToVector2D(group="p4")(x))
        np.testing.assert_allclose(y.ravel(), (row, column), atol=1e-6)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize(
    "group", ["p4", pytest.param("p4m", marks=pytest.mark.torch_first)]
)
def test_angles_are_those_of_the_vectors(group, signed):
    x = images(group).astype(DTYPE)
    layer = GroupToAngle2D(signed, group, dtype=DTYPE)
    found = as_array(layer(x))
    vectors = as_array(GroupToVector2D(signed, group, dtype=DTYPE)(x))
    angle = np.arctan2(-vectors[..., ::2], vectors[..., 1::2])
    expected = angle if signed else angle / 2
    # Keras computes arc tangents in single precision under PyTorch.
    assert relative_difference(found, expected) < 2e-6
    assert layer.compute_output_shape(x.shape) == found.shape
    # Turned by 90 degrees, the angles of moved pixels grow by as much.
    turned = as_array(layer(as_array(ops.group_action(x, group, 1))))
    moved = np.rot90(found, axes=(1, 2)) + np.pi / 2
    period = 2 * np.pi if signed else np.pi
    difference = (turned - moved + period / 2) % period - period / 2
    assert abs(difference).max() < 1e-4


def test_angles_of_nothing_have_no_gradient():
    layer = GroupToAngle2D(group="p4")
    x = np.zeros((1, 2, 2, 4, 2), "float32")
    np.testing.assert_array_equal(as_array(layer(x)), 0)
    (of_x,) = gradients(layer, x, np.ones((1, 2, 2, 1), "float32"))
    assert np.isfinite(of_x).all()


@pytest.mark.once
def test_bad_arguments():
    with pytest.raises(
        ValueError, match=r"'max' or 'mean' or 'learned'.*'sum'"
    ):
        GroupProjection("sum")
    with pytest.raises(ValueError, match="`signed` must be True or False"):
        GroupToVector2D(signed=2)
    with pytest.raises(ValueError, match=r"two channels for each vector.*3"):
        GroupToVector2D()(np.zeros((1, 2, 2, 4, 3)))
    with pytest.raises(ValueError, match="`outputs` must be 'images' or"):
        equivariance_error(edges("p4"), "p4", (2, 6, 6, 2), outputs="angles")
    with pytest.raises(ValueError, match=r"even. Received: shape=\(1, 2, 2, 4"):
        ops.group_vectors(np.zeros((1, 2, 2, 4, 3), "float32"), "p4")
    with pytest.raises(
        ValueError, match=r"even. Received: shape=\(1, 2, 2, 3\)"
    ):
        ops.vector_action(np.zeros((1, 2, 2, 3), "float32"), "p4", 1)


@pytest.mark.parametrize("name", ["avg", "average"])
def test_names_of_the_mean(name):
    x = np.random.default_rng(0).normal(size=(2, 3, 3, 4, 2))
    found, expected = (
        as_array(GroupProjection(mode)(x)) for mode in (name, "mean")
    )
    np.testing.assert_array_equal(found, expected)


def test_z2_leaves_images_as_they_are():
    x = np.random.default_rng(0).normal(size=(2, 3, 3, 2)).astype("float32")
    y = as_array(GroupProjection(group="z2")(x))
    np.testing.assert_array_equal(y, x)
    assert GroupProjection(group="z2").compute_output_shape(x.shape) == x.shape
