"""The example of distillation, with a few digits and epochs."""

import json
import types
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_equiattn.testing import assert_equivariant


@pytest.fixture
def distillation(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    import distillation

    return distillation


@pytest.mark.once
def test_student_is_invariant(distillation):
    images = np.random.default_rng(0).uniform(size=(2, 28, 28, 1))
    assert_equivariant(
        distillation.student(), "p4", images.astype("float32"), rtol=1e-4
    )


@pytest.mark.once
def test_students_of_a_teacher_come_near_to_it(distillation):
    """Also to one that measures brightness, if labels have no weight."""
    images, labels = distillation.digits("train", 96)
    # Brightness, rather than digits.
    x = inputs = keras.Input((28, 28, 1))
    x = keras.layers.GlobalAveragePooling2D()(x)
    x = keras.layers.Rescaling(60.0, -60 * images.mean())(x)
    outputs = keras.layers.ZeroPadding1D((0, 9))(x[..., None])[..., 0]
    teacher = keras.Model(inputs, outputs)
    found = distillation.distilled(teacher, (images, labels), 12, 0.0, "")
    wanted, learned = (
        keras.ops.convert_to_numpy(model(images)) for model in (teacher, found)
    )
    # The softmax does not fix the sum of the logits.
    wanted, learned = (y[:, 0] - y[:, 1:].mean(-1) for y in (wanted, learned))
    assert np.corrcoef(wanted, learned)[0, 1] > 0.9


@pytest.mark.once
def test_keras_that_cannot_distil(distillation):
    distillation.require_distillation()
    older = types.SimpleNamespace(__version__="3.0.0")
    with pytest.raises(SystemExit, match=r"Keras 3\.0\.0 has no `keras\.dist"):
        distillation.require_distillation(older)


@pytest.mark.slow
def test_everything_is_made_by_one_command(
    distillation, tmp_path, monkeypatch, capsys
):
    digits = distillation.digits
    monkeypatch.setattr(
        distillation, "digits", lambda split, n=64: digits(split, n)
    )
    options = "--seeds 0 1 --epochs 1 --choice-epochs 1 --repeats 1"
    command = [*options.split(), "--images", "64", "--out", str(tmp_path)]
    distillation.main(command)
    results = json.loads((tmp_path / "results.json").read_text())
    assert f"{options} --images 64" in results["command"]
    assert results["data"]["training_digits"] == 64
    assert [run["seed"] for run in results["runs"]] == [0, 1]
    shown = capsys.readouterr().out
    for name, means in results["means"].items():
        own = [run["networks"][name] for run in results["runs"]]
        for key, mean in means.items():
            assert mean == pytest.approx(np.mean([run[key] for run in own]))
        assert f"{means['weights']:,.0f}" in shown
        for run in own:
            exact = run["equivariance_error"] < 1e-4
            assert exact == (name != "plain")
            if exact:
                upright = run["upright_accuracy"]
                poses = run["accuracy_in_all_poses"]
                assert poses == pytest.approx(upright, abs=0.005)
