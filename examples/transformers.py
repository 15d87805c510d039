r"""Trains a plain and equivariant vision transformers for the same time.

    python -m keras_equiattn.applications.data prepare cifar10
    export OMP_NUM_THREADS=1 KERAS_BACKEND=torch
    python examples/transformers.py z2
    python examples/transformers.py p4
    python examples/transformers.py p4m

All networks are equally wide, learn from the same upright images with the same
recipe, and stop after two hours on one processor core. The learning rate
follows the time, and falls to zero at the end. Networks are tested on images
that are upright or turned by 90, 180 or 270 degrees: on the first 2,000 several
times during training, and on all at the end; the time of tests does not count.
A run that was stopped goes on where it was last saved, after its last whole
epoch. Two networks can train side by side, each on a core. The comparison is at
a small scale.

Writes `transformers-<backend>-<date>.json` to `--results`, with all networks
whose run in `--out` is finished; `python benchmarks/report.py` draws them. Use
TensorFlow or PyTorch: under JAX, Keras does not see a rate that changes from
step to step.
"""

import argparse
import datetime
import json
import math
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_equiattn.applications import GroupViT
from keras_equiattn.applications import training
from keras_equiattn.applications.data import datasets
from keras_equiattn.applications.training import reporting

ROOT = Path(__file__).parents[1]
DESIGN = {"patch_size": 4, "depth": 6, "width": 192, "num_heads": 3}
BATCH = 128
LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.05
WARM_UP = 0.05  # the part of the time in which the rate grows
TESTS = 20  # in a run, the last one at its end
IMAGES_WHILE_TRAINING = 2_000
TEST_BATCH = 500


def learning_rate(part: float) -> float:
    """The rate after a part of the time, from 0 to 1."""
    if part < WARM_UP:
        return LEARNING_RATE * part / WARM_UP
    part = (part - WARM_UP) / (1 - WARM_UP)
    return LEARNING_RATE * (1 + math.cos(math.pi * min(part, 1.0))) / 2


class Run(keras.callbacks.Callback):
    """Stops after some seconds of training, and tests and saves on the way.

    Args:
        folder: where the network and the log are kept.
        seconds: how much processor time the network trains for.
        images, labels: the test images, upright.
        settings: what is kept in the log, and must be the same in a run that is
            resumed.
    """

    def __init__(
        self,
        folder: Path,
        seconds: float,
        images: np.ndarray,
        labels: np.ndarray,
        settings: dict[str, Any],
    ) -> None:
        super().__init__()
        self.folder, self.seconds = folder, seconds
        self.images, self.labels = images, labels
        self.log: dict[str, Any] = {
            "settings": settings,
            "seconds": 0.0,
            "epochs": 0,
            "steps": 0,
            "tests": [],
        }
        if (folder / "log.json").exists():
            self.log = json.loads((folder / "log.json").read_text())
        if self.log.get("settings") != settings:
            raise SystemExit(
                f"The run in {folder} has other settings. Pass another --out "
                f"or the same settings. It has: {self.log.get('settings')}. "
                f"Received: {settings}"
            )

    @property
    def is_over(self) -> bool:
        return self.log["seconds"] >= self.seconds

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        part = self.log["seconds"] / self.seconds
        self.model.optimizer.learning_rate = learning_rate(part)
        self._start = time.process_time()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.log["seconds"] += time.process_time() - self._start
        self.log["steps"] += 1
        done = len(self.log["tests"])
        if self.log["seconds"] * TESTS >= self.seconds * (done + 1):
            self.test()
        self.model.stop_training = self.is_over

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.log["epochs"] = epoch + 1
        self.save()

    def test(self) -> None:
        """Adds the accuracy on upright and on turned images to the log."""
        count = None if self.is_over else IMAGES_WHILE_TRAINING
        upright, labels = self.images[:count], self.labels[:count]
        turned = np.stack(
            [np.rot90(x, 1 + n % 3) for n, x in enumerate(upright)]
        )
        row = {"seconds": self.log["seconds"], "images": len(upright)}
        for name, images in (("upright", upright), ("turned", turned)):
            found = self.model.predict(images, TEST_BATCH, verbose=0)
            row[name] = float((found.argmax(-1) == labels).mean())
        self.log["tests"].append(row)
        print(json.dumps(row), flush=True)

    def save(self) -> None:
        """Writes the network, and the log last."""
        self.model.save(self.folder / "network.keras")
        training.write_json(self.folder / "log.json", self.log)


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """What all networks of a comparison have in common."""
    return {
        **DESIGN,
        "dataset": options.dataset,
        "minutes": options.minutes,
        "test_images": options.test_images,
        "batch": BATCH,
        "learning_rate": LEARNING_RATE,
        "weight_decay": WEIGHT_DECAY,
        "seed": options.seed,
    }


def train(group: str, options: argparse.Namespace) -> None:
    """Trains a network until its time is over."""
    folder = options.out / group
    folder.mkdir(parents=True, exist_ok=True)
    facts = datasets.info(options.dataset)
    test = datasets.load_pydataset(
        options.dataset, "test", normalization=facts.normalization
    )
    pairs = [test[n] for n in range(len(test))]
    images, labels = map(np.concatenate, zip(*pairs, strict=True))
    count = options.test_images
    run = Run(
        folder,
        60 * options.minutes,
        images[:count],
        labels[:count],
        settings(options),
    )
    keras.utils.set_random_seed(options.seed)
    model = GroupViT(
        group, input_shape=facts.shape, classes=facts.classes, **DESIGN
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(LEARNING_RATE, WEIGHT_DECAY), loss)
    if run.log["epochs"]:
        model = keras.saving.load_model(folder / "network.keras")
    data = datasets.load_pydataset(
        options.dataset,
        "train+validation",
        BATCH,
        datasets.Augmentation(4, True),
        options.seed,
        normalization=facts.normalization,
        initial_epoch=run.log["epochs"],
    )
    while not run.is_over:
        epoch = run.log["epochs"]
        model.fit(
            data,
            initial_epoch=epoch,
            epochs=epoch + 1,
            shuffle=False,
            callbacks=[datasets.EpochCounter(data), run],
            verbose=0,
        )
    run.log["parameters"] = reporting.count_parameters(model)
    run.set_model(model)
    run.save()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("groups", nargs="+")
    add("--dataset", default="cifar10")
    add("--minutes", type=float, default=120, help="of processor time")
    add("--test-images", type=int, default=10_000)
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=ROOT / "runs" / "transformers")
    add("--results", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    if keras.backend.backend() not in ("tensorflow", "torch"):
        parser.error("the backend must be tensorflow or torch")
    options.results.mkdir(parents=True, exist_ok=True)
    for group in options.groups:
        train(group, options)
    runs = {}
    for path in sorted(options.out.glob("*/log.json")):
        log = json.loads(path.read_text())
        # Runs with other settings, and those under way, are not compared.
        same = log.pop("settings", None) == settings(options)
        if same and log["seconds"] >= 60 * options.minutes:
            runs[path.parent.name] = log
    # The plain network first.
    runs = dict(sorted(runs.items(), key=lambda run: (run[0] != "z2", run[0])))
    backend, today = keras.backend.backend(), datetime.date.today()
    file = options.results / f"transformers-{backend}-{today}.json"
    command = f"python examples/transformers.py {' '.join(runs)}"
    training.write_json(
        file,
        {
            **reporting.measured_by(f"{command} --minutes {options.minutes}"),
            "settings": settings(options),
            "runs": runs,
        },
    )
    print(file)


if __name__ == "__main__":
    main()
