"""The picture of a report has a bar for each layer."""

import keras
import numpy as np
import pytest

from keras_equiattn import equivariance_report
from keras_equiattn import layers
from keras_equiattn.visualization import plot_equivariance_report

pytestmark = pytest.mark.once


def picture(*others):
    model = keras.Sequential(
        [
            keras.Input((7, 7, 2)),
            layers.LiftingConv2D(3, 3, padding="same", name="lift"),
            *others,
        ]
    )
    report = equivariance_report(model, "p4", (2, 7, 7, 2))
    figure = plot_equivariance_report(report)
    return report, figure.axes[0]


def test_bars_are_errors():
    report, panel = picture(
        keras.layers.ReLU(name="relu"),
        keras.layers.MaxPooling3D((2, 2, 1), name="pool"),
    )
    widths = [bar.get_width() for bar in panel.patches]
    errors = [max(layer.error, 1e-9) for layer in report.layers]
    np.testing.assert_allclose(widths, errors)
    names = [label.get_text() for label in panel.get_yticklabels()]
    assert names == ["lift", "relu", "pool"]
    weights = [label.get_weight() for label in panel.get_yticklabels()]
    assert weights == ["normal", "normal", "bold"]
    colors = [bar.get_facecolor() for bar in panel.patches]
    assert colors[0] == colors[1] != colors[2]
    assert panel.get_title() == "not equivariant under p4"


def test_sound_networks_have_one_colour():
    _, panel = picture()
    assert len(panel.patches) == 1
    assert panel.get_title() == "equivariant under p4"
