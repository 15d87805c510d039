"""Tests a network that the authors of a paper trained.

    python examples/evaluate_checkpoint.py p4cnn.pth --model rotmnist_p4cnn
        --transpose

Loads PyTorch weights of https://github.com/dwromero/att_gconvs, of
https://github.com/dwromero/g_selfatt or, for Swin transformers, of
https://github.com/LeapLabTHU/ACmix, into a network of this library and prints
its error on the test images of a dataset. Images are normalised with mean and
deviation of the dataset, or those of the authors. `--transpose` exchanges
rows and columns first: that is how the authors' networks for rotated MNIST saw
their digits. With `--out` the result is added to a JSON file.
"""

import argparse
import datetime
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from keras_equiattn import applications
from keras_equiattn.applications import training
from keras_equiattn.applications.data import datasets
from keras_equiattn.applications.training import reporting


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    """Counts the errors of one network."""
    info = datasets.info(options.dataset)
    converter, overrides = applications.converter_of(options.model)
    overrides = {"normalization": info.normalization, **overrides}
    model = applications.get_model(options.model, **overrides)
    converter(model, options.weights)
    print(reporting.model_line(model), flush=True)
    test = datasets.load_pydataset(
        options.dataset, "test", options.batch_size, data_dir=options.data_dir
    )
    start = time.perf_counter()
    count = errors = 0
    for index in range(len(test)):
        images, labels = test[index]
        if options.transpose:
            images = np.swapaxes(images, 1, 2)
        predicted = model.predict_on_batch(images).argmax(axis=-1)
        count += len(labels)
        errors += int((predicted != labels).sum())
    return {
        "model": options.model,
        "weights": "/".join(options.weights.absolute().parts[-2:]),
        "sha256": hashlib.sha256(options.weights.read_bytes()).hexdigest(),
        "dataset": info.name,
        "normalization": overrides["normalization"],
        "transposed": options.transpose,
        "images": count,
        "errors": errors,
        "error_percent": 100 * errors / count,
        "batch_size": options.batch_size,
        "seconds": round(time.perf_counter() - start, 1),
        "date": datetime.date.today().isoformat(),
        "hardware": reporting.hardware(),
        "versions": reporting.versions(),
    }


def add(row: dict[str, Any], path: Path) -> None:
    """Adds a result to a file, in place of one of the same settings."""

    def key(row: dict[str, Any]) -> list[Any]:
        names = ("model", "sha256", "dataset", "transposed")
        return [row[name] for name in names]

    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = [other for other in rows if key(other) != key(row)] + [row]
    results = {"benchmark": "error of the authors' checkpoints", "rows": rows}
    training.write_json(path, results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights", type=Path, help=".pth, .pt, .bin or .npz")
    parser.add_argument("--model", required=True, help="registered network")
    parser.add_argument("--dataset", default="rot_mnist")
    parser.add_argument("--transpose", action="store_true")
    parser.add_argument("--batch-size", type=int, default=500)
    parser.add_argument("--data-dir")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    options = parser.parse_args()
    row = evaluate(options)
    print(
        f"{row['model']}: {row['errors']} of {row['images']} wrong, error "
        f"{row['error_percent']:.3f} %, {row['seconds']:.0f} s"
    )
    if options.out:
        add(row, options.out)


if __name__ == "__main__":
    main()
