"""What the benchmark of angles turns, and what it finds."""

import json
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_equiattn import groups
from keras_equiattn.ops import geometry
from keras_equiattn.ops.group import bases

pytestmark = pytest.mark.once


@pytest.fixture
def angles(monkeypatch):
    folder = Path(__file__).parents[2] / "benchmarks"
    monkeypatch.syspath_prepend(folder)
    import angles

    return angles


@pytest.mark.parametrize("name", ["p8", "p12m", "p16"])
def test_inputs_are_turned_as_the_library_does(name, angles):
    group = groups.get(name)
    angles.check_direction(group)
    elements = angles.measured_elements(group)
    assert elements[: group.rotations // 4 + 1] == [
        *range(group.rotations // 4 + 1)
    ]
    # Every element is one of them, or one of them and a turn on the grid.
    products = group.product_table[np.ix_(elements, group.grid_elements)]
    assert set(products.ravel()) == set(range(group.order))


def test_smooth_images_turn_back(angles):
    x = angles.images("smooth", 2, 0)[..., None]
    group = groups.get("p8")
    again = angles.turned(angles.turned(x, group, 1), group, 7)
    inner = (slice(None), slice(10, -10), slice(10, -10))
    assert np.abs(again - x)[inner].max() < 1e-2 * np.abs(x).max()


def test_turns_on_the_grid_leave_no_error(angles):
    row = angles.measure("GroupConv2D", "p8m", "steerable", 3, "smooth", 1)
    places = zip(row["angles"], row["mirrored"], strict=True)
    errors = dict(zip(places, row["errors"], strict=True))
    assert len(errors) == 6
    for place, error in errors.items():
        if place[0] == 45:
            assert 1e-3 < error < 0.05
        else:
            assert error < 1e-5


def test_filters_of_one_pixel_are_as_good_as_the_turned_input(angles):
    """A filter of one pixel has nothing to turn but its group axis."""
    row = angles.measure("GroupConv2D", "p8", "pixel", 1, "smooth", 2)
    assert row["errors"][1] < 5 * row["identity"] < 1e-2


def test_dilated_filters_are_turned_too(angles):
    """They see more pixels of the same images."""
    near, far = (
        angles.measure(
            "GroupConv2D", "p8", "steerable", 3, "smooth", 1, dilation=dilation
        )
        for dilation in (1, 2)
    )
    assert 2e-3 < near["errors"][1] < far["errors"][1] < 0.1
    assert far["errors"][2] < 1e-5


def test_attention_to_the_whole_image_is_turned_too(angles):
    """With the scale of the paper it is sharper."""
    sharp, even = (
        angles.measure(
            "LiftingSelfAttention2D, whole image", "p8", basis, 17, "smooth", 1
        )
        for basis in ("paper", "pixel")
    )
    assert 5e-3 < even["errors"][1] < sharp["errors"][1] < 0.2
    assert max(even["errors"][2], sharp["errors"][2]) < 1e-5
    assert min(even["pose_spread"], sharp["pose_spread"]) > 0.2


@pytest.mark.parametrize("basis", ["pixel", "steerable"])
def test_large_embeddings_matter(angles, basis):
    group = groups.get("p8")
    name = "GroupMultiHeadAttention2D, large embedding"
    x = angles.images("smooth", 8 * angles.CHANNELS, 0, 17)
    x = np.moveaxis(x, 0, -1).reshape(1, 17, 17, 8, angles.CHANNELS)
    layer = angles.new_layer(name, group, basis, 17, 0)
    usual = layer(x)
    layer.embedding.assign(np.zeros(layer.embedding.shape))
    change = keras.ops.norm(layer(x) - usual) / keras.ops.norm(usual)
    assert 0.05 < change < 0.15


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layers", "GroupMultiHeadAttention2D"], "with --whole-image"),
        (
            ["--whole-image", "--layers", "GroupConv2D"],
            "does not attend to the whole image",
        ),
        (["--dilation", "2", "--layers", "InputAttention"], "no dilation rate"),
        (["--trained", "--whole-image"], "go neither together nor with"),
        (["--even", "--dilation", "2"], "go neither together nor with"),
        (["--even", "--sizes", "3"], "needs even --sizes"),
        (["--even", "--layers", "GroupConv2D"], "is not measured with --even"),
        (
            ["--layers", "SpatialPooling2D, mean, even"],
            "is only measured with --even",
        ),
    ],
)
def test_what_does_not_go_together(
    angles, monkeypatch, capsys, options, message
):
    monkeypatch.setattr(sys, "argv", ["angles.py", *options])
    with pytest.raises(SystemExit):
        angles.main()
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "name", "arguments"),
    [
        ([], "angles-p8-", (1, False, 1)),
        (
            ["--dilation", "2", "--draws", "3"],
            "angles-p8_dilation_2_draws_3-",
            (3, False, 2),
        ),
        (["--whole-image"], "angles-p8_whole_image-", (1, False, 1)),
        (["--even"], "angles-p8_even-", (1, False, 1)),
        (["--trained"], "angles-p8_trained-", (1, True, 1)),
    ],
)
def test_names_of_files(
    angles, monkeypatch, tmp_path, options, name, arguments
):
    asked = set()

    def measure(*case, draws, trained, dilation):
        asked.add((draws, trained, dilation))
        row = dict(zip(angles.CASE, case, strict=True))
        return {**row, "errors": [0.0, 0.5], "identity": 0.0}

    monkeypatch.setattr(angles, "measure", measure)
    monkeypatch.setattr(angles.report_files, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["angles.py", *options])
    angles.main()
    (path,) = tmp_path.iterdir()
    assert path.name.startswith(name)
    assert asked == {arguments}


@pytest.mark.parametrize(
    "name", ["GroupConv2D, strides 2", "SpatialUpSampling2D, GroupConv2D"]
)
def test_layers_that_change_the_size_learn(name, angles, monkeypatch):
    """Photographs have another size than the images that are turned."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, angles.SMALL, angles.SMALL, 1))
    y = rng.integers(10, size=64)
    monkeypatch.setattr(angles, "photographs", lambda: (x, y))
    first, learnt = (
        angles.measure(name, "p8", "steerable", 5, "smooth", 1, trained)
        for trained in (False, True)
    )
    assert learnt["weights"] == "trained"
    assert learnt["errors"] != first["errors"]
    assert max(learnt["errors"]) < 0.06


def test_poses_lie_apart(angles):
    """Those of a mean over the group do not."""
    group = groups.get("p8")
    x = np.random.default_rng(0).normal(size=(1, 9, 9, 8, 2))

    def mean(x):
        return np.broadcast_to(x.mean(axis=3, keepdims=True), x.shape)

    assert angles.errors(lambda x: x, x, group)[1] > 0.5
    assert angles.errors(mean, x, group)[1] < 1e-12


def test_pooling_over_few_pixels_does_not_turn(angles):
    error = {
        mode: max(
            angles.measure(
                f"SpatialPooling2D, {mode}", "p8", "steerable", 3, "smooth", 1
            )["errors"]
        )
        for mode in ("max", "binomial")
    }
    assert error["binomial"] < 0.05 < 0.1 < error["max"]


def test_pooling_of_networks(angles):
    """Padding keeps the size of the output, and adds no error within."""
    error = {
        (mode, size): max(
            angles.measure(
                f"SpatialPooling2D, {mode}, even",
                *("p8", "steerable", size, "smooth", 1),
            )["errors"]
        )
        for mode, size in (("max", 2), ("binomial", 4))
    }
    assert error["binomial", 4] < 0.01 < 0.05 < error["max", 2]


@pytest.mark.parametrize(
    ("module", "constant", "worse", "layer"),
    [
        (bases, "RING_WIDTH", 0.35, "GroupConv2D"),
        (geometry, "DISC_EDGE", 1.0, "StandAloneSelfAttention2D"),
    ],
)
def test_other_choices(angles, monkeypatch, module, constant, worse, layer):
    import angle_choices

    monkeypatch.setattr(angle_choices, "SIZES", (5,))
    chosen = getattr(module, constant)
    basis = bases.steerable_basis("p8", 5)
    usual, other = (
        angle_choices.errors((module, constant), value, layer, 1)[0]
        for value in (chosen, worse)
    )
    assert other > 1.5 * usual
    # The constant is what it was, and nothing is kept from the other one.
    assert getattr(module, constant) == chosen
    np.testing.assert_array_equal(bases.steerable_basis("p8", 5), basis)


def test_an_interrupted_run_goes_on(angles, monkeypatch, tmp_path):
    measured = []

    def measure(*case, **options):
        measured.append(case)
        if len(measured) == 2:
            raise KeyboardInterrupt
        row = dict(zip(angles.CASE, case, strict=True))
        return {**row, "errors": [0.0, 0.5], "identity": 0.0}

    command = "angles.py --layers GroupConv2D --sizes 3 --images smooth tissue"
    monkeypatch.setattr(angles, "measure", measure)
    monkeypatch.setattr(angles.report_files, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", command.split())
    with pytest.raises(KeyboardInterrupt):
        angles.main()
    monkeypatch.setattr(sys, "argv", [*command.split(), "--resume"])
    angles.main()
    (path,) = tmp_path.iterdir()
    rows = json.loads(path.read_text())["rows"]
    found = [tuple(row[key] for key in angles.CASE) for row in rows]
    assert found == [
        ("GroupConv2D", "p8", basis, 3, images)
        for basis in ("pixel", "steerable")
        for images in ("smooth", "tissue")
    ]
    # Only the row that was interrupted is measured twice.
    assert measured == [*found[:2], *found[1:]]


def test_pooling_is_not_trained(angles, monkeypatch, tmp_path, capsys):
    def measure(*case, **options):
        row = dict(zip(angles.CASE, case, strict=True))
        return {**row, "errors": [0.0, 0.5], "identity": 0.0}

    monkeypatch.setattr(angles, "measure", measure)
    monkeypatch.setattr(angles.report_files, "RESULTS", tmp_path)
    command = ["angles.py", "--trained", "--sizes", "3", "--images", "smooth"]
    monkeypatch.setattr(sys, "argv", command)
    angles.main()
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("angles-p8_trained_3_smooth-")
    layers = {row["layer"] for row in json.loads(path.read_text())["rows"]}
    assert layers == {
        name
        for name, kind in angles.LAYERS.items()
        if "Pooling" not in name and not kind.whole_image
    }
    pooling = "SpatialPooling2D, max"
    monkeypatch.setattr(sys, "argv", [*command, "--layers", pooling])
    with pytest.raises(SystemExit):
        angles.main()
    assert f"{pooling} has no weights" in capsys.readouterr().err
