"""The project on tissue, with a few made-up patches."""

import json
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_equiattn.ops import group_action


@pytest.fixture
def tissue(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    import tissue

    return tissue


def made_up(split, count, data_dir):
    """Patches whose label is whether the middle is bright."""
    rng = np.random.default_rng(len(split))
    labels = rng.integers(2, size=min(count, 24))
    images = rng.uniform(0, 0.5, (len(labels), 96, 96, 3))
    images[:, 40:56, 40:56] += 0.5 * labels[:, None, None, None]
    return images.astype("float32"), labels.astype("int32")


@pytest.mark.once
def test_poses_are_those_of_the_group(tissue):
    images = np.random.default_rng(0).uniform(size=(2, 6, 6, 3))
    for element in range(8):
        expected = keras.ops.convert_to_numpy(
            group_action(images, "p4m", element)
        )
        np.testing.assert_array_equal(
            tissue.in_pose(images, element), expected.astype(images.dtype)
        )


@pytest.mark.once
@pytest.mark.parametrize("augmented", [False, True])
def test_batches_have_every_image_once_before_any_comes_again(
    tissue, augmented
):
    count = 40
    images = np.arange(count).reshape(-1, 1, 1, 1) * np.ones((1, 4, 4, 3))
    batches = tissue.batches(images, np.arange(count), augmented, seed=0)
    drawn = [next(batches) for _ in range(5)]  # 4 times all images
    seen = np.concatenate([labels for _, labels in drawn])
    for n in range(4):
        turn = seen[count * n : count * (n + 1)]
        np.testing.assert_array_equal(np.sort(turn), np.arange(count))
    for images, labels in drawn:
        np.testing.assert_array_equal(images[:, 0, 0, 0], labels)


@pytest.mark.once
def test_networks_are_equally_large(tissue):
    counts = [
        tissue.network(group, widths, tissue.CROP).count_params()
        for group, widths, _ in tissue.NETWORKS.values()
    ]
    assert max(counts) / min(counts) < 1.01


@pytest.mark.slow
def test_everything_is_made_by_one_command(tissue, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tissue, "patches", made_up)
    options = "--sizes 12 24 --seeds 0 1 --steps 3"
    folders = "--results results --pictures pictures"
    command = f"tissue.py {options} {folders}"
    monkeypatch.setattr(sys, "argv", command.split())
    tissue.main()
    (file,) = Path("results").glob("tissue-*-3-*.json")
    results = json.loads(file.read_text())
    assert options in results["command"]
    assert results["difference_after_reloading"] < 1e-5
    assert results["equivariance_error"] < 1e-4
    assert len(results["runs"]) == 2 * 2 * len(tissue.NETWORKS)
    for row in results["means"]:
        own = [
            run["accuracy"]
            for run in results["runs"]
            if run["network"] == row["network"]
            and run["training_patches"] == row["training_patches"]
        ]
        assert len(own) == 2
        assert row["accuracy"] == pytest.approx(np.mean(own))
    for run in results["runs"]:
        assert run["changed"] == 0 or run["network"] != "equivariant"
    for name in ("accuracy", "evidence", "attention", "poses"):
        assert Path(f"pictures/tissue-{name}.png").stat().st_size > 5_000
    assert Path("runs/tissue/tissue.keras").exists()
