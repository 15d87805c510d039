"""Vision transformers on a group: symmetry, both bases, training, errors."""

import keras
import numpy as np
import pytest
from layer_contract import as_array

from keras_equiattn import applications
from keras_equiattn import groups
from keras_equiattn.applications import GroupViT
from keras_equiattn.applications.training import reporting
from keras_equiattn.testing import equivariance_error
from keras_equiattn.testing import relative_difference

SLOW = pytest.mark.slow


def small(group="p4m", **options):
    model = GroupViT(
        group,
        **{
            "patch_size": 4,
            "depth": 2,
            "width": 32,
            "num_heads": 2,
            "input_shape": (12, 12, 3),
            "classes": 5,
            **options,
        },
    )
    rng = np.random.default_rng(0)
    for variable in model.weights:
        variable.assign(rng.normal(0, 0.3, variable.shape))
    return model


def images(model):
    rng = np.random.default_rng(1)
    return rng.normal(size=(2, *model.input_shape[1:])).astype("float32")


@pytest.mark.parametrize("basis", ["regular", "irreps"])
@pytest.mark.parametrize(
    "group",
    [
        "p4",
        "p4m",
        *(
            pytest.param(group, marks=SLOW)
            for group in ("p2", "z2m", "p2m", "p8")
        ),
    ],
)
def test_invariance(group, basis):
    model = small(group, basis=basis)
    elements = groups.get(group).grid_elements
    errors = equivariance_error(model, group, images(model), elements=elements)
    assert errors.max() < 1e-5
    # Others change the logits.
    others = equivariance_error(model, "p4m", images(model), elements=[1, 4])
    assert (others.max() > 1e-2) == (group != "p4m")


@SLOW
@pytest.mark.parametrize(
    "name",
    [
        "vit_tiny_p4m",
        *(
            f"vit_{size}_{group}"
            for size in ("cifar10", "pcam")
            for group in ("p4", "p4m")
        ),
    ],
)
@pytest.mark.parametrize("basis", ["regular", "irreps"])
def test_invariance_of_registered_networks(name, basis):
    """At the size that they are trained at.

    The two larger ones for images of 224 x 224 differ from the tiny one in
    width alone.
    """
    model = applications.get_model(name, basis=basis)
    rng = np.random.default_rng(0)
    for variable in model.weights:
        variable.assign(rng.normal(0, 0.1, variable.shape))
    group = reporting.group_of(model)
    errors = equivariance_error(model, group, images(model))
    assert errors.max() < 1e-4


def test_a_rectangle_turns_too():
    model = small(input_shape=(12, 8, 3))
    x = images(model)
    turned = small(input_shape=(8, 12, 3))
    turned.set_weights(model.get_weights())
    logits = (model(x), turned(np.rot90(x, axes=(1, 2)).copy()))
    assert relative_difference(*map(as_array, logits)) < 1e-5


def test_bases_agree():
    models = [small(basis=basis) for basis in ("regular", "irreps")]
    x = images(models[0])
    assert relative_difference(*(as_array(m(x)) for m in models)) < 1e-5


def test_saved_and_loaded(tmp_path):
    """A network loads, and its weights load into the other basis."""
    model = small(basis="irreps")
    expected = as_array(model(images(model)))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras", safe_mode=True)
    np.testing.assert_array_equal(as_array(loaded(images(model))), expected)
    path = tmp_path / "model.weights.h5"
    model.save_weights(path)
    other = small(basis="regular")
    other.load_weights(path)
    found = as_array(other(images(model)))
    assert relative_difference(found, expected) < 1e-5


def test_a_hybrid_is_not_invariant():
    model = small(head="hybrid", depth=3)
    errors = equivariance_error(model, "p4m", images(model))
    assert errors[1:].min() > 1e-2
    layers = {layer.name: layer for layer in model.layers}
    # One block of three is on the group, and then the poses are channels.
    assert layers["block1_dense1"].group.name == "p4m"
    assert layers["block2_dense1"].group.name == "z2"
    assert tuple(layers["block2_add1"].output.shape) == (None, 3, 3, 1, 32)


def test_training():
    """With block-diagonal maps the network learns and stays invariant."""
    keras.utils.set_random_seed(0)
    shape = {"input_shape": (8, 8, 1), "classes": 2}
    model = GroupViT("p4m", 4, 1, 16, 2, "irreps", dropout=0.1, **shape)
    x = np.random.default_rng(0).normal(size=(8, 8, 8, 1)).astype("float32")
    y = np.arange(8) % 2
    model.compile(
        keras.optimizers.Adam(3e-2),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    losses = model.fit(x, y, 8, epochs=30, verbose=0).history["loss"]
    assert losses[-1] < 0.5 * losses[0]
    assert equivariance_error(model, "p4m", x[:2]).max() < 1e-4


@pytest.mark.once
def test_weights_of_linear_maps_are_fewer():
    """Their number is divided by the order of the group, at the same width."""
    counts = {}
    for group in ("z2", "p4", "p4m"):
        model = small(group)
        counts[group] = sum(
            int(np.prod(variable.shape))
            for variable in model.trainable_variables
            if "block" in variable.path and "kernel" in variable.name
        )
    assert counts["z2"] == 4 * counts["p4"] == 8 * counts["p4m"]
    assert reporting.group_of(small("p4m")) == "p4m"


@pytest.mark.once
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 36}, r"`width` must be divisible.*8 times 2.*36"),
        ({"num_heads": 0}, r"`num_heads`.*0"),
        ({"patch_size": 5}, r"divisible by `patch_size`.*\(12, 12, 3\).*=5"),
        ({"head": "hybrid", "depth": 1}, "A hybrid needs two blocks"),
        ({"head": "plain"}, r"`head`.*'plain'"),
        ({"basis": "fourier"}, r"`basis`.*'fourier'"),
        ({"dropout": 1.5}, r"`dropout`.*1.5"),
    ],
)
def test_errors(change, message):
    with pytest.raises(ValueError, match=message):
        small(**change)
