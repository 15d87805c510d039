"""Trains a plain and two rotation-equivariant networks on the bundled digits.

    python examples/demo.py

All see the same 4,400 rotated images of handwritten digits and have about the
same number of parameters; the third one attends to its inputs. The table shows
how well they read upright and rotated digits that they have not seen, and how
much their output changes when an image is turned by 90, 180 or 270 degrees (the
equivariance error; for the p4 networks it is rounding). Takes about four
minutes on two cores.
"""

import json
import shutil
from pathlib import Path

import keras
import train
from rich.console import Console
from rich.table import Table

from keras_equiattn.applications import datasets
from keras_equiattn.applications import training

OUT = Path("runs/demo")
MODELS = {
    "z2": "rotmnist_z2cnn",
    "p4": "rotmnist_p4cnn",
    "p4 input attention": "rotmnist_p4cnn_input",
}
EPOCHS = 12


def run(model: str) -> dict[str, float]:
    """Trains one network and measures what the table shows."""
    out = OUT / model
    shutil.rmtree(out, ignore_errors=True)
    train.train(
        training.TrainOptions(
            model=model, dataset="digits", epochs=EPOCHS, out=out, verbose=2
        )
    )
    results = json.loads((out / "results.json").read_text())
    trained = keras.saving.load_model(out / "last.keras")
    upright = trained.evaluate(
        datasets.load_pydataset("digits_upright", "test"),
        verbose=0,
        return_dict=True,
    )
    return {
        "parameters": results["parameters"],
        "test_accuracy": results["test"]["accuracy"],
        "upright_test_accuracy": upright["accuracy"],
        "equivariance_error": results["equivariance"]["error"],
        "wall_time_seconds": results["wall_time_seconds"],
    }


def main() -> None:
    models = {title: run(model) for title, model in MODELS.items()}
    table = Table(title=f"Digits, {EPOCHS} epochs, last epoch")
    for column in (
        "model",
        "parameters",
        "upright test digits",
        "rotated test digits",
        "equivariance error",
    ):
        table.add_column(column, justify="right")
    for title, measured in models.items():
        table.add_row(
            title,
            f"{measured['parameters']:,}",
            f"{measured['upright_test_accuracy']:.1%}",
            f"{measured['test_accuracy']:.1%}",
            f"{measured['equivariance_error']:.1e}",
        )
    Console().print(table)
    training.write_json(OUT / "results.json", {"models": models})
    print(f"Written to {OUT}/results.json")


if __name__ == "__main__":
    main()
