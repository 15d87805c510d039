"""The pictures of the gallery."""

import sys
from pathlib import Path

import numpy as np
import pytest

from keras_equiattn.ops import group_action


@pytest.fixture
def gallery(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    import gallery

    return gallery


@pytest.mark.once
def test_lifted_maps_turn_and_move_on_by_one_pose(gallery):
    figure = gallery.lifting()
    panels = np.array([panel.images[0].get_array() for panel in figure.axes])
    upright, turned = panels.reshape(2, 5, 28, 28)[:, 1:]
    for pose in range(4):
        np.testing.assert_allclose(
            turned[(pose + 1) % 4], np.rot90(upright[pose]), atol=1e-5
        )


@pytest.mark.once
def test_the_orbit_has_every_pose(gallery):
    panels = [panel.images[0].get_array() for panel in gallery.orbit().axes]
    assert len({panel.tobytes() for panel in panels}) == 8
    for element, panel in enumerate(panels):
        expected = np.asarray(group_action(gallery.digit(), "p4m", element))
        np.testing.assert_array_equal(panel, expected[0, ..., 0])


@pytest.mark.slow
def test_all_pictures_are_written(gallery, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gallery, "EPOCHS", 1)
    monkeypatch.setattr(sys, "argv", ["gallery.py", "--out", str(tmp_path)])
    gallery.main()
    for name in gallery.PICTURES:
        size = (tmp_path / f"{name}.png").stat().st_size
        assert 2_000 < size < 150_000
    assert "acmix: test accuracy" in capsys.readouterr().out
