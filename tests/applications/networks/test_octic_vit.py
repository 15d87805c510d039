"""Octic vision transformers: their basis, symmetry, training, files, errors."""

import keras
import numpy as np
import pytest
from keras import ops
from layer_contract import as_array

from keras_equiattn import groups
from keras_equiattn.applications import OcticViT
from keras_equiattn.applications.networks import octic_blocks
from keras_equiattn.ops.group.irreps import irreps
from keras_equiattn.ops.group.irreps import regular_basis
from keras_equiattn.testing import equivariance_error
from keras_equiattn.testing import relative_difference

GROUP = groups.get("p4m")


def small(**options):
    model = OcticViT(
        **{
            "input_shape": (12, 12, 3),
            "patch_size": 4,
            "width": 32,
            "depth": 2,
            "num_heads": 2,
            "classes": 5,
            **options,
        }
    )
    rng = np.random.default_rng(0)
    for variable in model.weights:
        variable.assign(rng.normal(0, 0.3, variable.shape))
    return model


def images(*shape):
    rng = np.random.default_rng(1)
    return rng.normal(size=shape or (2, 12, 12, 3)).astype("float32")


@pytest.mark.once
def test_basis_is_that_of_the_irreducible_representations():
    basis = octic_blocks.octic_basis()
    np.testing.assert_allclose(basis @ basis.T, np.eye(8), atol=1e-15)
    for element in range(GROUP.order):
        # `L_g f(h) = f(g^-1 h)`.
        matrix = basis @ np.eye(8)[GROUP.relative(element)] @ basis.T
        expected = np.zeros((8, 8))
        mirrored, turns = divmod(element, 4)
        # A1, A2, B1 and B2, which the mirror of columns and turns change.
        expected[0, 0] = 1
        expected[1, 1] = (-1) ** mirrored
        expected[2, 2] = (-1) ** turns
        expected[3, 3] = (-1) ** (turns + mirrored)
        # Offsets are (down, right), components (right, up).
        right_up = np.array([[0, 1], [-1, 0]])
        plane = right_up @ GROUP.matrices[element] @ right_up.T
        expected[4:, 4:] = np.kron(plane, np.eye(2))
        np.testing.assert_allclose(matrix, expected, atol=1e-15)


@pytest.mark.parametrize(
    "layer",
    [
        octic_blocks.OcticNormalization(),
        octic_blocks.OcticScale(0.5),
        octic_blocks.OcticDense(3),
        octic_blocks.OcticActivation(),
        octic_blocks.OcticAttention(2),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_are_equivariant(layer):
    x = images(2, 5, 8, 4)
    layer.build(x.shape)
    rng = np.random.default_rng(0)
    for variable in layer.weights:
        variable.assign(rng.normal(0, 0.5, variable.shape))

    def acted(x, element):
        x = as_array(octic_blocks.to_regular(ops.convert_to_tensor(x)))
        x = x[:, :, GROUP.relative(element)]
        return octic_blocks.to_octic(ops.convert_to_tensor(x))

    y = as_array(layer(ops.convert_to_tensor(x)))
    assert y.shape == tuple(layer.compute_output_shape(x.shape))
    for element in (1, 4, 7):
        found = as_array(layer(acted(x, element)))
        assert relative_difference(found, as_array(acted(y, element))) < 1e-5
        assert relative_difference(found, y) > 1e-2


def test_basis_spans_the_spaces_of_regular_basis():
    """The same four signs, and the same space of vectors."""
    octic, waves = octic_blocks.octic_basis(), regular_basis(GROUP)
    signs = [irrep.dimension == 1 for irrep in irreps(GROUP)]
    rows, first = [], 0
    for irrep, is_sign in zip(irreps(GROUP), signs, strict=True):
        if is_sign:
            rows.append(first)
        first += irrep.dimension * irrep.copies
    overlap = np.abs(octic[:4] @ waves[rows].T)
    np.testing.assert_allclose(overlap.max(0), 1, atol=1e-12)
    np.testing.assert_allclose(overlap.sum(0), 1, atol=1e-12)
    vectors = np.delete(waves, rows, axis=0)
    spaces = [part.T @ part for part in (octic[4:], vectors)]
    np.testing.assert_allclose(*spaces, atol=1e-12)


def test_errors_of_layers():
    with pytest.raises(ValueError, match=r"divisible by `num_heads`.*=4.*=3"):
        octic_blocks.OcticAttention(3).build((None, 5, 8, 4))
    with pytest.raises(ValueError, match="`units`"):
        octic_blocks.OcticDense(0)


@pytest.mark.parametrize("invariants", octic_blocks.INVARIANTS)
def test_invariance(invariants):
    model = small(head="invariant", invariants=invariants, octic_depth=1)
    errors = equivariance_error(model, "p4m", images())
    assert errors.max() < 1e-5
    hybrid = small(head="hybrid")
    assert equivariance_error(hybrid, "p4m", images())[1:].min() > 1e-2


@pytest.mark.parametrize("invariants", octic_blocks.INVARIANTS)
def test_gradients_where_vectors_are_zero(invariants):
    """The class token has such vectors where LayerScale is zero."""
    model = OcticViT(
        input_shape=(8, 8, 1),
        patch_size=4,
        width=16,
        depth=1,
        num_heads=2,
        head="invariant",
        invariants=invariants,
        classes=2,
        layer_scale=0.0,
    )
    model.compile("sgd", "mse")
    model.fit(images(2, 8, 8, 1), np.ones((2, 2)), verbose=0)
    for variable in model.weights:
        assert np.isfinite(as_array(variable)).all(), variable.path


def test_training():
    """From its own initial weights, where the class token has no vectors."""
    keras.utils.set_random_seed(0)
    model = OcticViT(
        input_shape=(8, 8, 1),
        patch_size=4,
        width=32,
        depth=2,
        num_heads=2,
        head="invariant",
        classes=2,
        layer_scale=1.0,
    )
    x, y = images(8, 8, 8, 1), np.arange(8) % 2
    model.compile(
        keras.optimizers.Adam(5e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    losses = model.fit(x, y, 8, epochs=80, verbose=0).history["loss"]
    assert losses[-1] < 0.5 * losses[0]
    assert equivariance_error(model, "p4m", x[:2]).max() < 1e-4


@pytest.mark.once
def test_paths_are_left_out_in_training_alone():
    x, model = images(), small(drop_path=0.5)
    expected = as_array(small()(x))
    assert relative_difference(as_array(model(x)), expected) == 0
    assert relative_difference(as_array(model(x, training=True)), expected) > 0


def test_saved_and_loaded(tmp_path):
    model = small(head="invariant", invariants="polynomial", layer_scale=0.5)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    x = images()
    assert relative_difference(as_array(loaded(x)), as_array(model(x))) < 1e-6
    assert loaded.get_layer("invariants").kind == "polynomial"
    assert loaded.get_layer("block1_scale1").initial == 0.5
    assert loaded.get_layer("block2_scale1").initial == 0.5


@pytest.mark.parametrize("invariants", octic_blocks.INVARIANTS)
def test_half_precision(invariants):
    options = {"head": "invariant", "invariants": invariants}
    x, expected = images(), as_array(small(**options)(images()))
    keras.config.set_dtype_policy("mixed_bfloat16")
    found = as_array(small(**options)(x))
    assert 0 < relative_difference(found, expected) < 0.1


@pytest.mark.parametrize("invariants", octic_blocks.INVARIANTS)
def test_small_values_in_half_precision(invariants):
    """Their squares would be zero."""
    x = 1e-4 * images(1, 2, 8, 3)
    layer = octic_blocks.OcticInvariants(invariants)
    half = octic_blocks.OcticInvariants(invariants, dtype="float16")
    lengths = as_array(half(x))[..., :18].astype("float64")
    expected = as_array(layer(x))[..., :18]
    if invariants == "power_spectrum":
        assert relative_difference(lengths, expected) < 1e-2
    else:
        assert relative_difference(lengths[..., :3], expected[..., :3]) < 1e-2


@pytest.mark.once
def test_linear_maps_have_an_eighth_of_the_weights():
    model = small(depth=2, octic_depth=1)
    counts = [
        np.prod(model.get_layer(name).weights[0].shape)
        for name in ("block1_dense1", "block2_dense1")
    ]
    counts[0] += np.prod(model.get_layer("block1_dense1").weights[1].shape)
    assert 8 * counts[0] == counts[1]


@pytest.mark.once
def test_without_classifier():
    model = small(include_top=False)
    assert model.output_shape == (None, 32)
    assert model.layers[-1].name == "class_token"


@pytest.mark.once
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_shape": (12, 8, 3)}, r"size, size, channels\).*\(12, 8, 3\)"),
        ({"patch_size": 5}, "divisible by `patch_size`.*patch_size=5"),
        ({"width": 40}, "`width` must be divisible.*width=40, num_heads=2"),
        ({"num_heads": 0}, "`num_heads`.*0"),
        ({"head": "plain"}, "`head`.*'plain'"),
        ({"invariants": "norm"}, "`invariants`.*'norm'"),
        ({"octic_depth": 3}, "at most `depth`.*octic_depth=3, depth=2"),
        ({"drop_path": 1.5}, "`drop_path`.*1.5"),
        ({"layer_scale": "1"}, "`layer_scale`.*'1'"),
        ({"layer_scale": -1}, "`layer_scale`.*-1"),
        ({"include_top": 1}, "`include_top`.*1"),
    ],
)
def test_errors(change, message):
    with pytest.raises((TypeError, ValueError), match=message):
        small(**change)
