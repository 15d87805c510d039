"""Trainable parameters of the networks that the papers count.

    KERAS_BACKEND=torch python benchmarks/parameters.py

The script builds every registered network for rotated MNIST, every ResNet29 and
every network of group self-attention symbolically, so nothing is trained.
ResNet29 is built with 10 and with 100 classes, the others with those of their
dataset. Writes `benchmarks/results/parameters-<date>.json`.
"""

import argparse

import keras
import report_files

from keras_equiattn import applications
from keras_equiattn.applications.training import reporting

FAMILIES = ("rotmnist_", "resnet29_", "gsanet_")
# "resnet29_z2, 100 classes" is how a network with a number of classes is named.
CLASSES = {"resnet29_": (10, 100)}


def counts(family: str) -> dict[str, int]:
    """Trainable parameters of each network of a family, by its name."""
    found = {}
    for name in applications.list_models():
        if not name.startswith(family):
            continue
        for classes in CLASSES.get(family, (None,)):
            keras.backend.clear_session()
            given = {} if classes is None else {"classes": classes}
            model = applications.get_model(name, **given)
            label = name if classes is None else f"{name}, {classes} classes"
            found[label] = reporting.count_parameters(model)
    return found


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    ).parse_args()
    results = {
        "benchmark": "trainable parameters, without moving statistics",
        "parameters": {
            name: count
            for family in FAMILIES
            for name, count in counts(family).items()
        },
        "settings": {"families": FAMILIES},
    }
    print(report_files.write("parameters", results))


if __name__ == "__main__":
    main()
