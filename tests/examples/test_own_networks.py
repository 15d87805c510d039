"""The examples of inflation, segmentation and transformers, shortened."""

import importlib
import json
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from scipy import ndimage


@pytest.fixture
def example(monkeypatch, tmp_path, capsys):
    """Runs an example, and returns its results and what it printed."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")

    def run(name, *options, draws=True):
        module = importlib.import_module(name)
        folders = ["--results", str(tmp_path)]
        if draws:
            folders += ["--pictures", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *options, *folders])
        module.main()
        (file,) = tmp_path.glob(f"{name}-{keras.backend.backend()}-*.json")
        return json.loads(file.read_text()), capsys.readouterr().out

    return run


def module(monkeypatch, name):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    return importlib.import_module(name)


def made_up(split, count, data_dir):
    """Images whose class is the quadrant that is bright."""
    rng = np.random.default_rng(len(split))
    labels = rng.integers(4, size=min(count, 96))
    images = rng.normal(0, 0.3, (len(labels), 32, 32, 3))
    for image, label in zip(images, labels, strict=True):
        row, column = divmod(label, 2)
        image[16 * row : 16 * row + 16, 16 * column : 16 * column + 16] += 1
    return images.astype("float32"), labels.astype("int32")


@pytest.mark.slow
def test_inflation(example, monkeypatch, tmp_path):
    inflation = module(monkeypatch, "inflation")
    monkeypatch.setattr(inflation, "images_of", made_up)
    options = ("--epochs=2", "--more-epochs=1", "--test-images=64")
    results, shown = example("inflation", *options)
    rows = {row["network"]: row for row in results["rows"]}
    mean, inflated = rows["plain, mean over four poses"], rows["inflated"]
    assert inflated["upright"] == pytest.approx(mean["upright"], abs=0.02)
    assert inflated["turned"] == pytest.approx(mean["turned"], abs=0.02)
    assert rows["inflated, trained on"]["changed"] < 0.02
    before, after = results["multiply_adds"]["channels"]
    assert 13 < after / before < 16
    assert (tmp_path / "inflation.png").stat().st_size > 5_000
    assert "equivariant from scratch" in shown


@pytest.mark.slow
def test_segmentation(example, tmp_path, monkeypatch):
    segmentation = module(monkeypatch, "segmentation")
    monkeypatch.setattr(segmentation, "ANGLES", (0, 15, 45, 90, 180))
    options = ("--images=64", "--test-images=20", "--epochs=2")
    results, shown = example("segmentation", *options)
    for name in ("p4", "p8"):
        angles = results["results"][name]["angles"]
        for key in ("accuracy", "iou", "degrees"):
            # Quarter turns change nothing but the rounding of near ties.
            upright = angles["0"][key]
            assert angles["90"][key] == pytest.approx(upright, abs=0.02)
    assert results["results"]["plain"]["angles"]["90"]["degrees"] > 0
    assert (tmp_path / "segmentation.png").stat().st_size > 5_000
    assert "error of direction" in shown


@pytest.mark.slow
@pytest.mark.skipif(
    keras.backend.backend() == "jax",
    reason="Keras does not see a rate that changes from step to step",
)
def test_transformers(example, tmp_path, monkeypatch):
    transformers = module(monkeypatch, "transformers")
    design = {"patch_size": 7, "depth": 1, "width": 16, "num_heads": 2}
    monkeypatch.setattr(transformers, "DESIGN", design)
    options = ["--dataset=digits_upright", "--test-images=60", "--minutes=0.02"]
    options.append(f"--out={tmp_path / 'runs'}")
    example("transformers", "z2", *options, draws=False)
    # A run that is over stays as it is.
    before = (tmp_path / "runs" / "z2" / "log.json").read_text()
    results, _ = example("transformers", "p4m", "z2", *options, draws=False)
    assert (tmp_path / "runs" / "z2" / "log.json").read_text() == before
    with pytest.raises(SystemExit, match="has other settings"):
        example("transformers", "z2", *options, "--seed=1", draws=False)
    runs = results["runs"]
    assert list(runs) == ["z2", "p4m"]
    assert runs["p4m"]["parameters"] < runs["z2"]["parameters"] / 4
    for run in runs.values():
        assert 1.2 <= run["seconds"] < 10
        assert 1 <= len(run["tests"]) <= transformers.TESTS
        assert run["tests"][-1]["images"] == 60
    last = runs["p4m"]["tests"][-1]
    assert last["turned"] == last["upright"]


@pytest.mark.once
def test_rate_of_transformers(monkeypatch):
    rate = module(monkeypatch, "transformers").learning_rate
    assert rate(0) == 0
    assert rate(0.05) == 1e-3
    assert rate(0.525) == pytest.approx(5e-4)
    assert rate(1) == rate(1.1) == 0


@pytest.mark.once
def test_strokes_run_where_they_run(monkeypatch):
    segmentation = module(monkeypatch, "segmentation")
    for angle in (0, 20, 45, 90, 140):
        image = np.zeros((64, 64))
        image[31:33, 8:56] = 1.0
        image = ndimage.rotate(image, angle, reshape=False, order=1)
        vector = segmentation.strokes(image[None, ..., None])[0, 31, 31]
        found = np.degrees(np.arctan2(-vector[0], vector[1])) / 2
        difference = (found - angle + 90) % 180 - 90
        assert abs(difference) < 2


@pytest.mark.once
def test_scenes_have_the_class_of_every_pixel(monkeypatch):
    segmentation = module(monkeypatch, "segmentation")
    images, classes = segmentation.scenes("test", 20, 0)
    assert images.shape == (20, 32, 32, 1)
    ink = classes != segmentation.BACKGROUND
    assert (images[..., 0][ink] > 0.4).all()
    assert 0.02 < ink.mean() < 0.5
    # One to four digits, each of one class.
    for of_pixels in classes:
        quarters = of_pixels.reshape(2, 16, 2, 16).transpose(0, 2, 1, 3)
        for quarter in quarters.reshape(4, 256):
            assert len(set(quarter) - {segmentation.BACKGROUND}) <= 1
