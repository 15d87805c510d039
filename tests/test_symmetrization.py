"""Averages over the orbit of an image make any model equivariant."""

import keras
import numpy as np
import oracles
import pytest
from layer_contract import as_array
from symmetrization_helpers import images
from symmetrization_helpers import moved
from symmetrization_helpers import plain
from symmetrization_helpers import SIDE

from keras_equiattn import symmetrization
from keras_equiattn import symmetrize
from keras_equiattn.testing import assert_equivariant
from keras_equiattn.testing import equivariance_error
from keras_equiattn.testing import relative_difference


def oracle(model, x, group, output="invariant"):
    """One pose after the other."""
    total = 0
    for h in range(oracles.order(group)):
        inverse = oracles.relative(group, h, 0)
        y = as_array(model(np.ascontiguousarray(moved(x, group, inverse))))
        total = total + moved(y, group, h, output)
    return total / oracles.order(group)


@pytest.mark.parametrize("output", ["invariant", "image", "vector"])
@pytest.mark.parametrize("group", ["z2m", "p2", "p4", "p4m"])
def test_agrees_with_oracle(group, output):
    model = plain(output)
    average = symmetrize(model, group, output)
    x = images()
    found = as_array(average(x))
    assert relative_difference(found, oracle(model, x, group, output)) < 1e-5
    assert average.output_shape == model.output_shape
    outputs = "vectors" if output == "vector" else "images"
    assert_equivariant(average, group, x, outputs=outputs)
    error = equivariance_error(model, group, x, outputs=outputs)
    assert error[1:].min() > 1e-2


@pytest.mark.parametrize("batch_poses", [1, 2, 3, 8, 9])
def test_poses_in_batches_of_any_size(batch_poses):
    model = plain("image")
    expected = as_array(symmetrize(model, "p4m", "image")(images()))
    average = symmetrize(model, "p4m", "image", batch_poses=batch_poses)
    assert relative_difference(as_array(average(images())), expected) < 1e-6


@pytest.mark.parametrize("output", ["invariant", "image"])
def test_probabilities_are_averaged(output):
    """For a classifier, and for every pixel."""
    model = plain(output)
    found = symmetrize(model, "p4", output, average="probabilities")
    x = images()
    probabilities = keras.Sequential([model, keras.layers.Softmax()])
    expected = np.log(oracle(probabilities, x, "p4", output))
    assert relative_difference(as_array(found(x)), expected) < 1e-5
    assert_equivariant(found, "p4", x)


def test_channels_first():
    x = np.moveaxis(images(), -1, 1)
    for output in ("invariant", "image"):
        model = plain(output, data_format="channels_first")
        average = symmetrize(model, "p4m", output, data_format="channels_first")
        if keras.backend.backend() == "tensorflow":
            assert average.output_shape == model.output_shape
            continue  # Keras convolves these on a GPU alone
        assert_equivariant(average, "p4m", x, data_format="channels_first")


def test_images_that_are_not_square():
    x = images(4, 6)
    model = plain("image", size=(None, None))
    for group in ("z2m", "p2m"):
        assert_equivariant(symmetrize(model, group, "image"), group, x)
    average = symmetrize(model, "p4", "image", batch_poses=1)
    assert_equivariant(average, "p4", x)
    with pytest.raises(ValueError, match=r"square. Pass `batch_poses=1`"):
        symmetrize(model, "p4", "image")(x)


@pytest.mark.every_backend
def test_training_and_files(tmp_path):
    """The weights are those of the model, and train in all poses at once."""
    model = plain()
    average = symmetrize(model, "p4", name="averaged")
    assert average.name == "averaged"
    assert [v.path for v in average.trainable_variables] == [
        v.path for v in model.trainable_variables
    ]
    before = [as_array(v).copy() for v in model.trainable_variables]
    average.compile("sgd", "mse")
    x = images()
    average.fit(x, np.ones((3, 3), "float32"), verbose=0)
    after = [as_array(v) for v in model.trainable_variables]
    for one, other in zip(before, after, strict=True):
        assert abs(one - other).max() > 1e-6
    assert_equivariant(average, "p4", x)
    average.save(tmp_path / "model.keras")
    revived = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(
        as_array(revived(x)), as_array(average(x)), rtol=1e-6
    )


@pytest.mark.parametrize(
    "average",
    [pytest.param("logits", marks=pytest.mark.every_backend), "canonical"],
)
def test_reports_its_own_loss(average):
    """Not that of a compiled model in it."""
    model = plain()
    targets = np.ones((3, 3), "float32")
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae"])
    model.fit(images(), targets, verbose=0)
    model.trainable = False
    around = symmetrize(model, "p4", average=average, prior=0.0)
    around.compile(keras.optimizers.SGD(0.0), "mse")
    history = around.fit(images(), targets, verbose=0).history
    expected = np.mean((as_array(around(images())) - targets) ** 2)
    assert history == {"loss": [pytest.approx(expected, rel=1e-4)]}
    evaluated = around.evaluate(images(), targets, verbose=0)
    assert evaluated == pytest.approx(expected, rel=1e-4)


def test_dropout_of_the_model_hears_of_training():
    model = keras.Sequential(
        [keras.Input((SIDE, SIDE, 2)), keras.layers.Dropout(0.9, seed=1)]
    )
    average = symmetrize(model, "p2", "image")
    np.testing.assert_allclose(as_array(average(images())), images(), 1e-5)
    trained = as_array(average(images(), training=True))
    assert abs(trained - images()).max() > 0.1


def test_functions():
    def corner(x):
        return x[:, 0, 0]

    average = symmetrize(corner, "p4", input_shape=(SIDE, SIDE, 2))
    found = as_array(average(images()))
    corners = images()[:, [0, 0, -1, -1], [0, -1, 0, -1]]
    np.testing.assert_allclose(found, corners.mean(axis=1), atol=1e-6)


@pytest.mark.once
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"group": "p8"}, "must act on the grid: z2m.*'p8'"),
        ({"output": "logits"}, "'invariant' or 'image' or 'vector'.*'logits'"),
        ({"average": "median"}, "'logits' or 'probabilities'.*'median'"),
        ({"batch_poses": 0}, "`batch_poses` must be None or a positive.*0"),
        ({"model": 3}, "`model` must be a Keras model.*3"),
        ({"model": keras.layers.Flatten()}, "needs its `input_shape`"),
        ({"output": "image"}, r"must return images of rank 4.*\(None, 3\)"),
        (
            {"output": "vector", "average": "probabilities"},
            "components of vectors.*Take average='logits'",
        ),
        (
            {
                "model": lambda x: x,
                "output": "vector",
                "input_shape": (9, 9, 3),
            },
            r"must be even. Received: shape=\(None, 9, 9, 3\)",
        ),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        symmetrize(**{"model": plain(), **arguments})


@pytest.mark.once
def test_inputs_that_are_no_images():
    with pytest.raises(ValueError, match=r"images of rank 4.*\(2, 3\)"):
        symmetrization.OrbitAverage(plain())(np.zeros((2, 3), "float32"))
