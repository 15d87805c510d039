"""A model that sees one pose of each image, chosen by a small network."""

import keras
import numpy as np
import oracles
import pytest
from layer_contract import as_array
from sweeps import swept
from symmetrization_helpers import images
from symmetrization_helpers import moved
from symmetrization_helpers import plain
from symmetrization_helpers import SIDE

from keras_equiattn import groups
from keras_equiattn import layers
from keras_equiattn import symmetrize
from keras_equiattn.symmetrization import Canonicalization
from keras_equiattn.testing import assert_equivariant
from keras_equiattn.testing import equivariance_error
from keras_equiattn.testing import relative_difference

OUTPUTS = ["invariant", "image", "vector"]
GROUPS = ["z2m", "p2", "p4", "p4m"]


def canonical(model, group="p4", output="invariant", **options):
    return symmetrize(model, group, output, average="canonical", **options)


def no_loss(targets, outputs):
    """A loss of zero, which leaves that of the prior alone."""
    return 0.0 * outputs[:, 0]


def first_place(scores):
    """The pose with the highest score."""
    return int(np.argmax(scores))


def oracle(model, canonicalizer, x, group, output, choose=first_place):
    """One image after the other, turned by NumPy."""
    results = []
    for image in x:
        image = image[None]
        chosen = choose(as_array(canonicalizer(image))[0])
        inverses = [
            oracles.relative(group, h, 0) for h in range(oracles.order(group))
        ]
        poses = [moved(image, group, inverse) for inverse in inverses]
        y = as_array(model(np.ascontiguousarray(poses[chosen])))
        back = [
            moved(y, group, h, output)
            for h, pose in enumerate(poses)
            if (pose == poses[chosen]).all()
        ]
        results.append(np.mean(back, axis=0)[0])
    return np.stack(results)


def symmetric(x, group):
    """Images that all elements of the group leave as they are."""
    poses = [moved(x, group, h) for h in range(oracles.order(group))]
    # Whole numbers, whose sums no order of summation changes.
    return np.sum(np.rint(poses), axis=0).astype("float32")


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("group", swept(GROUPS, "p4m"))
def test_agrees_with_oracle(group, output):
    """Every image of the batch has a pose of its own."""
    model = plain(output)
    chooses = canonical(model, group, output)
    layer = chooses.layers[-1]
    x = np.concatenate([images(), images()[:, ::-1, ::-1] ** 2])
    found = as_array(chooses(x))
    expected = oracle(model, layer.canonicalizer, x, group, output)
    assert relative_difference(found, expected) < 1e-5
    assert chooses.output_shape == model.output_shape
    assert len(set(as_array(layer.poses(x)).tolist())) > 1
    outputs = "vectors" if output == "vector" else "images"
    assert_equivariant(chooses, group, x, outputs=outputs)
    error = equivariance_error(model, group, x, outputs=outputs)
    assert error[1:].min() > 1e-2


def test_the_pose_turns_with_the_image():
    layer = Canonicalization(plain(), "p4m")
    x = images()
    layer(x)
    before = as_array(layer.poses(x))
    table = groups.get("p4m").product_table
    for g in range(8):
        after = as_array(layer.poses(moved(x, "p4m", g)))
        np.testing.assert_array_equal(after, table[g, before])


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("group", ["p4", "p4m"])
def test_symmetric_images(group, output):
    """Whichever of the tied poses is chosen, the output is the same.

    It is as symmetric as the image, unlike the output of the model.
    """
    model = plain(output)
    chooses = canonical(model, group, output)
    canonicalizer = chooses.layers[-1].canonicalizer
    x = symmetric(4 * images(), group)
    found = as_array(chooses(x))
    for last in (False, True):
        expected = oracle(
            model,
            canonicalizer,
            x,
            group,
            output,
            choose=lambda scores, last=last: len(scores) - 1 if last else 0,
        )
        assert relative_difference(found, expected) < 1e-5
    for g in range(oracles.order(group)):
        turned = moved(found, group, g, output)
        assert relative_difference(turned, found) < 1e-5
    if output != "invariant":
        alone = as_array(model(x))
        turned = moved(alone, group, 1, output)
        assert relative_difference(turned, alone) > 1e-2


def test_images_with_some_symmetry():
    """A bar, which half a turn leaves as it is, keeps its two directions."""
    model = plain("vector")
    x = symmetric(4 * images(), "p2")
    chooses = canonical(model, "p4m", "vector")
    errors = equivariance_error(chooses, "p4m", x, outputs="vectors")
    assert errors.max() < 1e-5
    y = as_array(chooses(x))
    half = moved(y, "p4m", 2, "vector")
    assert relative_difference(half, y) < 1e-5
    assert relative_difference(moved(y, "p4m", 1, "vector"), y) > 1e-2


def test_gradients_reach_the_canonicalizer():
    """Through the image that the model sees, and through what is turned back.

    With few inputs they are those of `sum_h p_h L_h f(sum_h p_h L_h^-1 x)` at
    the choice, which NumPy finds by differences.
    """
    model = plain("image")
    model.trainable = False
    scores = keras.Sequential(
        [
            keras.Input((SIDE, SIDE, 2)),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(2, name="scores"),
        ]
    )
    layer = Canonicalization(model, "p2", "image", scores)
    x, target = images(), images() ** 2
    trained = keras.Sequential([keras.Input((SIDE, SIDE, 2)), layer])
    trained.compile(keras.optimizers.SGD(1.0), "mse")
    bias = scores.layers[-1].bias
    before = as_array(bias).copy()
    means = x.mean(axis=(1, 2)) @ as_array(scores.layers[-1].kernel)
    layer.prior = 0.0

    def loss(shift):
        """The loss if `shift` at the first score softens the choice."""
        total = 0
        for image, goal, at in zip(x, target, means, strict=True):
            soft = np.exp(at) / np.exp(at).sum()
            d = shift * (soft * (np.arange(2) == 0) - soft * soft[0])
            weights = (np.arange(2) == np.argmax(at)) + d
            both = [image[None], moved(image[None], "p2", 1)]
            seen = sum(w * p for w, p in zip(weights, both, strict=True))
            y = as_array(model(seen.astype("float32")))
            back = [y, moved(y, "p2", 1)]
            found = sum(w * p for w, p in zip(weights, back, strict=True))
            total += np.mean((found - goal) ** 2)
        return total / len(x)

    expected = (loss(0.02) - loss(-0.02)) / 0.04
    trained.train_on_batch(x, target)
    found = before[0] - as_array(bias)[0]
    assert abs(expected) > 1e-3
    assert found == pytest.approx(expected, rel=0.02)


def test_prior_leaves_training_images_as_they_are(tmp_path):
    """After some steps of `fit`, and in a file."""
    rng = np.random.default_rng(0)
    # Upright images are bright at the top, most at the left.
    slope = (
        np.linspace(1, 0, SIDE)[:, None, None]
        + np.linspace(0.5, 0, SIDE)[:, None]
    )
    x = (slope + 0.2 * rng.normal(size=(32, SIDE, SIDE, 2))).astype("float32")
    model = plain()
    model.trainable = False
    chooses = canonical(model, "p4", prior=2.0, name="chosen")
    layer = chooses.layers[-1]
    assert chooses.name == "chosen"
    chooses.compile(keras.optimizers.Adam(0.01), no_loss)
    history = chooses.fit(
        x, np.zeros(32), batch_size=32, epochs=30, verbose=0
    ).history["loss"]
    logs = keras.ops.log_softmax(layer.scores(x), axis=-1)
    assert history[-1] == pytest.approx(-2 * as_array(logs)[:, 0].mean(), 0.2)
    assert history[-1] < 0.5 * history[0]
    assert (as_array(layer.poses(x)) == 0).mean() > 0.95
    # The loss of the prior belongs to training.
    assert chooses.evaluate(x, np.zeros(32), verbose=0) == pytest.approx(0)
    turned = moved(x, "p4", 3)
    assert (as_array(layer.poses(turned)) == 3).mean() > 0.95
    agree = as_array(chooses(turned)) - as_array(model(x))
    assert (abs(agree).max(axis=-1) < 1e-5).mean() > 0.95

    chooses.save(tmp_path / "model.keras")
    revived = keras.saving.load_model(tmp_path / "model.keras", compile=False)
    np.testing.assert_array_equal(
        as_array(revived.layers[-1].poses(turned)),
        as_array(layer.poses(turned)),
    )
    np.testing.assert_allclose(
        as_array(revived(turned)), as_array(chooses(turned)), rtol=1e-6
    )
    config, own = revived.layers[-1].get_config(), layer.get_config()
    assert {**config, "model": None} == {**own, "model": None}
    assert own["canonicalizer"] is None
    assert own["prior"] == 2.0


def own_canonicalizer(group="p4"):
    """Scores that are maxima of a group convolution."""
    order = groups.get(group).order
    return keras.Sequential(
        [
            keras.Input((SIDE, SIDE, 2)),
            layers.LiftingConv2D(1, 3, padding="same", group=group),
            keras.layers.Reshape((-1, order)),
            keras.layers.GlobalMaxPooling1D(),
        ]
    )


def test_own_canonicalizer(tmp_path):
    own = own_canonicalizer()
    model = plain("image")
    chooses = canonical(model, "p4", "image", canonicalizer=own)
    assert_equivariant(chooses, "p4", images())
    expected = oracle(model, own, images(), "p4", "image")
    found = as_array(chooses(images()))
    assert relative_difference(found, expected) < 1e-5
    assert len(chooses.weights) == len(model.weights) + len(own.weights)
    chooses.save(tmp_path / "model.keras")
    revived = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(as_array(revived(images())), found, rtol=1e-6)


def test_channels_first():
    x = np.moveaxis(images(), -1, 1)
    for output in ("invariant", "image", "vector"):
        model = plain(output, data_format="channels_first")
        chooses = canonical(model, "p4m", output, data_format="channels_first")
        assert chooses.output_shape == model.output_shape
        if keras.backend.backend() == "tensorflow":
            continue  # Keras convolves these on a GPU alone
        kind = "vectors" if output == "vector" else "images"
        options = {"data_format": "channels_first", "outputs": kind}
        assert_equivariant(chooses, "p4m", x, **options)


@pytest.mark.parametrize("size", [(3, 3), (7, 7), (29, 29), (58, 58)])
def test_images_of_any_size(size):
    model = plain("image", size=(None, None))
    chooses = canonical(model, "p4", "image", input_shape=(*size, 2))
    assert_equivariant(chooses, "p4", images(*size))


def test_images_of_unknown_size():
    chooses = canonical(plain("image", size=(None, None)), "p4", "image")
    for side in (5, 6):
        assert_equivariant(chooses, "p4", images(side, side))


def test_images_that_are_not_square():
    for size in ((3, 30), (30, 7)):
        for group in ("z2m", "p2m"):
            model = plain("image", size=size)
            chooses = canonical(model, group, "image")
            assert_equivariant(chooses, group, images(*size))
    with pytest.raises(ValueError, match=r"takes square images.*\(None, 4, 6"):
        canonical(plain("image", size=(4, 6)), "p4")
    unknown = canonical(plain("image", size=(None, None)), "p4")
    with pytest.raises(ValueError, match=r"takes square images.*\(3, 4, 6"):
        unknown(images(4, 6))


def test_images_of_bytes():
    x = np.random.default_rng(0).integers(256, size=(3, SIDE, SIDE, 2))
    x = x.astype("uint8")
    layer = Canonicalization(plain("image"), "p4", "image")
    np.testing.assert_array_equal(
        as_array(layer(x)), as_array(layer(x.astype("float32")))
    )


def test_half_precision():
    """The model sees pixels of half precision, to the bit."""
    identity = keras.layers.Identity(dtype="mixed_bfloat16")
    layer = Canonicalization(identity, "p4m", "image", dtype="mixed_bfloat16")
    y = layer(images())
    assert keras.backend.standardize_dtype(y.dtype) == "bfloat16"
    expected = keras.ops.cast(images(), "bfloat16")
    np.testing.assert_array_equal(as_array(y), as_array(expected))


def test_functions():
    def corner(x):
        return x[:, 0, 0]

    chooses = canonical(corner, "p4", input_shape=(SIDE, SIDE, 2))
    chosen = as_array(chooses.layers[-1].poses(images()))
    inverses = groups.get("p4").inverse[chosen]
    expected = [
        moved(image[None], "p4", inverse)[0, 0, 0]
        for image, inverse in zip(images(), inverses, strict=True)
    ]
    np.testing.assert_array_equal(as_array(chooses(images())), expected)


def test_a_group_of_one_element():
    model = plain()
    chooses = canonical(model, "z2")
    np.testing.assert_allclose(
        as_array(chooses(images())), as_array(model(images())), rtol=1e-6
    )


def test_dropout_hears_of_training():
    dropout = keras.layers.Dropout(0.9, seed=1)
    layer = Canonicalization(dropout, "p2", "image")
    np.testing.assert_array_equal(as_array(layer(images())), images())
    trained = as_array(layer(images(), training=True))
    assert abs(trained - images()).max() > 0.1


@pytest.mark.once
@pytest.mark.parametrize(
    ("group", "weights", "millions"), [("p4", 5832, 4.1), ("p4m", 11016, 13.7)]
)
def test_cost_of_the_canonicalizer(group, weights, millions):
    """The documented cost, which is no larger for larger images."""
    order = groups.get(group).order
    costs = []
    for side in (24, 28, 96, 224, 225):
        layer = Canonicalization(plain("image"), group)
        layer.build((None, side, side, 3))
        network = layer.canonicalizer
        assert network.count_params() == weights
        convolutions = [x for x in network.layers if hasattr(x, "kernel")]
        # Every weight of a kernel works once at each pixel, in each pose.
        costs.append(
            sum(
                order * np.prod(x.kernel.shape) * np.prod(x.output.shape[1:3])
                for x in convolutions
            )
        )
    assert max(costs) == costs[0]
    assert costs[0] / 1e6 == pytest.approx(millions, abs=0.05)


@pytest.mark.once
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"group": "p8"}, "must act on the grid: z2m.*'p8'"),
        ({"average": "median"}, "'probabilities' or 'canonical'.*'median'"),
        ({"batch_poses": 2}, "`batch_poses` has no meaning.*batch_poses=2"),
        ({"prior": -1}, "`prior` must be zero or a positive number.*-1"),
        ({"canonicalizer": 3}, "`canonicalizer` must be a Keras model.*3"),
        (
            {"canonicalizer": own_canonicalizer, "average": "logits"},
            "`canonicalizer` is for `average='canonical'`.*'logits'",
        ),
        (
            {"canonicalizer": keras.layers.GlobalAveragePooling2D()},
            r"\(batch, 4\) for the group 'p4'.*\(None, 2\)",
        ),
        ({"output": "image"}, r"must return images of rank 4.*\(None, 3\)"),
        ({"model": keras.layers.Flatten()}, "needs its `input_shape`"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        symmetrize(**{"model": plain(), "average": "canonical", **arguments})


@pytest.mark.once
def test_outputs_that_are_not_square():
    def half(x):
        return x[:, ::2]

    shape = (SIDE, SIDE, 2)
    with pytest.raises(ValueError, match=r"takes square outputs.*3, 6, 2"):
        canonical(half, "p4", "image", input_shape=shape)


@pytest.mark.once
def test_inputs_that_are_no_images():
    with pytest.raises(ValueError, match=r"images of rank 4.*\(2, 3\)"):
        Canonicalization(plain())(np.zeros((2, 3), "float32"))
