"""A small network chooses one pose of each image, which a model then sees."""

import keras
import numpy as np
import oracles
import pytest
from layer_contract import as_array
from test_symmetrization import images
from test_symmetrization import moved
from test_symmetrization import plain
from test_symmetrization import SIDE

from keras_equiattn import symmetrize
from keras_equiattn.symmetrization import Canonicalization
from keras_equiattn.symmetrization import pose_scores
from keras_equiattn.testing import assert_equivariant
from keras_equiattn.testing import relative_difference

SLOW = pytest.mark.slow


def canonical(model, group="p4", output="invariant", **options):
    """The layer in a model, with weights that choose different poses."""
    found = symmetrize(model, group, output, "canonical", **options)
    rng = np.random.default_rng(2)
    layer = found.layers[-1]
    for weight in layer.canonicalizer.weights:
        weight.assign(rng.normal(size=weight.shape))
    return found


def scores(model, x):
    return as_array(model.layers[-1].canonicalizer(x))


@pytest.mark.parametrize("output", ["invariant", "image", "vector"])
@pytest.mark.parametrize(
    "group",
    ["p4m", *(pytest.param(g, marks=SLOW) for g in ("z2m", "p2", "p4"))],
)
def test_agrees_with_oracle(group, output):
    model = plain(output)
    found = canonical(model, group, output)
    x = np.concatenate([images(), images()[:, ::-1], -images()])
    chosen = scores(found, x).argmax(-1)
    assert len(set(chosen)) > 1
    for image, h, y in zip(x, chosen, as_array(found(x)), strict=True):
        inverse = oracles.relative(group, h, 0)
        pose = np.ascontiguousarray(moved(image[None], group, inverse))
        expected = moved(as_array(model(pose)), group, h, output)
        assert relative_difference(y[None], expected) < 1e-5
    outputs = "vectors" if output == "vector" else "images"
    assert_equivariant(found, group, x, outputs=outputs)


def test_scores_move_with_the_image():
    model = pose_scores("p4m")
    x = images()
    found = as_array(model(x))
    for element in range(8):
        of_turned = as_array(model(moved(x, "p4m", element)))
        order = [oracles.relative("p4m", element, h) for h in range(8)]
        np.testing.assert_allclose(of_turned, found[:, order], atol=1e-5)


def test_images_that_are_the_same_in_several_poses():
    """All poses of a point reflection look the same, two of the four differ."""
    x = images()
    x = x + np.rot90(x, 2, (1, 2))
    model = canonical(plain(), "p4")
    assert_equivariant(model, "p4", x)
    # An image that is turned back may be off by the half turn.
    model = canonical(plain("image"), "p4", "image")
    y, turned = as_array(model(x)), as_array(model(np.rot90(x, 2, (1, 2))))
    np.testing.assert_allclose(turned, y, atol=1e-5)
    assert np.abs(y - np.rot90(y, 2, (1, 2))).max() > 1e-2


@pytest.mark.every_backend
def test_training_and_files(tmp_path):
    model = plain()
    model.trainable = False
    found = canonical(model, "p4", upright_weight=0.0)
    of_chooser = found.layers[-1].canonicalizer.trainable_variables
    assert [v.path for v in found.trainable_variables] == [
        v.path for v in of_chooser
    ]
    before = [as_array(v).copy() for v in of_chooser]
    found.compile(keras.optimizers.SGD(1.0), "mse")
    x = images()
    found.fit(x, np.ones((3, 3), "float32"), verbose=0)
    # The gradient of the task reaches the network that chooses.
    changed = [
        np.abs(as_array(v) - old).max()
        for v, old in zip(of_chooser, before, strict=True)
    ]
    assert min(changed) > 0
    assert_equivariant(found, "p4", x)
    found.save(tmp_path / "model.keras")
    revived = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(
        as_array(revived(x)), as_array(found(x)), rtol=1e-5
    )


def test_upright_images_teach_which_pose_is_upright():
    x = np.abs(images()) * np.linspace(0, 3, SIDE)[:, None, None]
    x = x.astype("float32")  # brighter at the bottom
    model = plain()
    model.trainable = False
    found = symmetrize(model, "p4", average="canonical", upright_weight=1.0)
    found.compile(keras.optimizers.Adam(0.01), "mse")
    target = as_array(model(x))
    found.fit(x, target, epochs=60, verbose=0)
    assert not scores(found, x).argmax(-1).any()
    for turns in range(4):
        y = as_array(found(np.ascontiguousarray(np.rot90(x, turns, (1, 2)))))
        np.testing.assert_allclose(y, target, atol=1e-5)


def test_own_canonicalizer():
    class Corner(keras.layers.Layer):
        """The brightness of the corner that is the first in each pose."""

        def call(self, x):
            at = ((0, 0), (-1, 0), (-1, -1), (0, -1))
            corners = [x[:, row, column, 0] for row, column in at]
            return keras.ops.stack(corners, axis=1)

    found = symmetrize(
        plain(), "p4", average="canonical", canonicalizer=Corner()
    )
    assert_equivariant(found, "p4", images())


def test_shapes():
    bad = Canonicalization(
        plain(), "p4", canonicalizer=keras.layers.GlobalAveragePooling2D()
    )
    with pytest.raises(ValueError, match=r"each of the 4 elements.*\(3, 2\)"):
        bad(images())
    flat = Canonicalization(plain("image", (None, None)), "p4", "image")
    with pytest.raises(ValueError, match=r"square. Take `average='logits'`"):
        flat(images(4, 6))
    flat = Canonicalization(plain("image", (None, None)), "p2", "image")
    assert_equivariant(flat, "p2", images(4, 6))


def test_channels_first():
    if keras.backend.backend() == "tensorflow":
        pytest.skip("Keras convolves these on a GPU alone")
    model = plain("image", data_format="channels_first")
    found = canonical(model, "p4", "image", data_format="channels_first")
    x = np.moveaxis(images(), -1, 1)
    assert_equivariant(found, "p4", x, data_format="channels_first")
