"""How common architectures convert: the table of the documentation."""

import collections
import pathlib
import re

import keras
import numpy as np
import pytest
from layer_contract import as_array
from plain_architectures import ARCHITECTURES
from plain_networks import in_every_pose
from plain_networks import outputs_of
from plain_networks import with_random_weights

from keras_equiattn import conversion_summary
from keras_equiattn import equivariant
from keras_equiattn.testing import equivariance_error
from keras_equiattn.testing import relative_difference

PAGE = pathlib.Path(__file__).parents[2] / "docs/guide/converted.md"
HEAD = """\
| network | image | result | strides that changed | parameters | multiply-adds |
|---|---|---|---|---|---|
"""
pytestmark = pytest.mark.slow


def short(number):
    if number is None:
        return "?"
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.1f} {letter}"
    return str(number)


def row(name):
    """The line of the table for an architecture."""
    size, build = ARCHITECTURES[name]
    summary = conversion_summary(build(size), "p4")
    cells = [name, f"{size} x {size}"]
    if summary.problems:
        reasons = collections.Counter(
            re.sub(r" \(.*\)", "", problem.problem.partition(". ")[0])
            for problem in summary.problems
        )
        listed = "; ".join(
            f"{count} layer{'s' * (count > 1)}: {reason}"
            for reason, count in reasons.items()
        )
        cells += [f"refused: {listed}", "-", "-", "-"]
    else:
        cells += [
            "converted",
            str(len(summary.notes) or "none"),
            " to ".join(map(short, summary.parameters)),
            " to ".join(map(short, summary.multiply_adds)),
        ]
    return f"| {' | '.join(cells)} |\n"


def lines_of_page():
    text = PAGE.read_text(encoding="utf-8")
    before, head, rest = text.partition(HEAD)
    table, blank, after = rest.partition("\n\n")
    return before + head, table + "\n", blank[1:] + after


def test_every_line_of_the_table(pytestconfig):
    table = "".join(map(row, ARCHITECTURES))
    assert len(ARCHITECTURES) >= 20
    before, old, after = lines_of_page()
    if pytestconfig.getoption("update_golden"):
        PAGE.write_text(before + table + after, encoding="utf-8")
        old = table
    assert old == table


INFLATED = {
    "ResNet50": 65,
    "MobileNetV2": 65,
    "EfficientNetB0": 65,
    "ConvNeXtTiny": 64,
}


@pytest.mark.parametrize("name", INFLATED)
def test_inflated_applications_are_the_plain_ones_on_every_pose(name):
    size = INFLATED[name]
    build = getattr(keras.applications, name)
    plain = build(
        weights=None, input_shape=(size, size, 3), classifier_activation=None
    )
    check_inflation(with_random_weights(plain), size)


def with_statistics_of(model, x):
    """Sets the moving statistics to those of `x`, or signals would fade."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.momentum = 0.0
    model(x, training=True)


def check_inflation(plain, size):
    """The output of the inflated network is the mean over the poses."""
    x = np.random.default_rng(0).uniform(0, 255, (2, size, size, 3))
    x = x.astype("float32")
    with_statistics_of(plain, x)
    (every,) = in_every_pose(plain, [x], "p4")
    assert relative_difference(every[1], every[0]) > 1e-2
    inflated = equivariant(plain, "p4", inflate=True)
    (found,) = outputs_of(inflated, [x])
    assert relative_difference(found, every.mean(0)) < 1e-4
    return inflated, every, x


def test_resnet50_at_its_size():
    shape = (225, 225, 3)
    plain = keras.applications.ResNet50(
        weights=None, input_shape=shape, classifier_activation=None
    )
    model = with_random_weights(equivariant(plain, "p4"))
    assert max(equivariance_error(model, "p4", (2, *shape))) < 1e-4
    del model
    inflated, _, x = check_inflation(with_random_weights(plain), 225)
    # Not only their mean: every pose has the features of the plain network.
    name = "avg_pool"
    features = keras.Model(plain.inputs[0], plain.get_layer(name).output)
    (every,) = in_every_pose(features, [x], "p4")
    poses = keras.Model(inflated.inputs[0], inflated.get_layer(name).output)
    found = np.moveaxis(as_array(poses(x, training=False))[:, 0, 0], 1, 0)
    assert relative_difference(found, every) < 1e-4
