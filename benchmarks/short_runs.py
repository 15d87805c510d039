"""Short trainings on a part of a dataset, tested upright and rotated.

    KERAS_BACKEND=tensorflow python benchmarks/short_runs.py
    KERAS_BACKEND=tensorflow python benchmarks/short_runs.py \
        --policy mixed_bfloat16 --images 1280 --epochs 2
    KERAS_BACKEND=tensorflow python benchmarks/short_runs.py \
        --models gsanet_pcam_p4 --dataset pcam --images 256 --batch 8 \
        --optimizer adam --learning-rate 1e-3

A few epochs on the first images show whether a network trains, not how good it
gets: losses fall without NaN, and an invariant network is as accurate on test
images that are turned, by quarter turns drawn once for all networks. Networks
are not trained by their recipes: the learning rate rises over the first epoch
and then follows a cosine, with decoupled weight decay 1e-4 and no augmentation.
Writes
`short_runs-<dataset>-<backend>-<policy>-<images>x<epochs>x<batch>-<date>.json`
in `benchmarks/results` after each network; results of other networks under the
same settings are kept. A file with other settings (the name does not hold all
of them) is never overwritten: it has to be moved away first.
"""

import argparse
import datetime
import itertools
import json
import math
import time
from pathlib import Path

import keras
import numpy as np

from keras_equiattn import applications
from keras_equiattn.applications.data import datasets
from keras_equiattn.applications.training import reporting
from keras_equiattn.testing import equivariance_error

RESULTS = Path(__file__).parent / "results"
# ResNet29 with every mixer, on z2 and p4.
MODELS = tuple(
    f"resnet29_{group}{mixer}"
    for mixer, group in itertools.product(
        ("", "_sasa", "_simple_asc", "_asc"), ("z2", "p4")
    )
)
# Datasets that have another name in tensorflow-datasets.
TFDS_NAMES = {"pcam": "patch_camelyon"}
OPTIMIZERS = {
    "sgd": lambda rate: keras.optimizers.SGD(
        rate, momentum=0.9, nesterov=True, weight_decay=1e-4
    ),
    "adam": lambda rate: keras.optimizers.AdamW(rate, weight_decay=1e-4),
}


def images(
    dataset: str, split: str, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """The first images of a prepared dataset in [0, 1], and their labels."""
    import tensorflow_datasets as tfds

    name = TFDS_NAMES.get(dataset, dataset)
    data = tfds.load(name, split=f"{split}[:{count}]", batch_size=-1)
    arrays = tfds.as_numpy(data)
    found = len(arrays["label"])
    if found < count:
        raise SystemExit(
            f"{dataset} has {found} images of '{split}'. Received: {count}"
        )
    return arrays["image"].astype("float32") / 255, arrays["label"]


def turned(x: np.ndarray, seed: int) -> np.ndarray:
    """Turns each image by a random multiple of 90 degrees."""
    turns = np.random.default_rng(seed).integers(0, 4, len(x))
    return np.stack(
        [np.rot90(image, k) for image, k in zip(x, turns, strict=True)]
    )


def run(name: str, data: dict, options: argparse.Namespace) -> dict:
    keras.utils.set_random_seed(options.seed)
    info = datasets.info(options.dataset)
    model = applications.get_model(
        name,
        classes=info.classes,
        input_shape=tuple(info.shape),
        normalization=info.normalization,
    )
    steps = math.ceil(options.images / options.batch)
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0,
        steps * (options.epochs - 1) or 1,
        warmup_target=options.learning_rate,
        warmup_steps=steps,
    )
    model.compile(
        OPTIMIZERS[options.optimizer](schedule),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    start = time.time()
    history = model.fit(
        *data["train"],
        batch_size=options.batch,
        epochs=options.epochs,
        verbose=2,
    ).history
    seconds = time.time() - start
    x, y = data["test"]
    upright, rotated = (
        100 * model.evaluate(seen, y, batch_size=options.batch, verbose=0)[1]
        for seen in (x, turned(x, seed=0))
    )
    error = equivariance_error(model, "p4", x[:4])
    return {
        "model": name,
        "parameters": reporting.count_parameters(model),
        "training_loss": [round(value, 4) for value in history["loss"]],
        "test_accuracy_percent": round(upright, 2),
        "rotated_test_accuracy_percent": round(rotated, 2),
        "equivariance_error_p4": float(max(error)),
        "seconds": round(seconds, 1),
    }


def runs(path: Path, settings: dict) -> list[dict]:
    """The runs in the file, if there is one; it must have these settings."""
    if not path.exists():
        return []
    before = json.loads(path.read_text())
    found = before["settings"]
    if found != settings:
        names = [n for n in settings if found.get(n) != settings[n]]
        names += [n for n in found if n not in settings]
        raise SystemExit(
            f"{path} holds runs with other settings: "
            + ", ".join(f"{n}={found.get(n)}" for n in names)
            + ". Received: "
            + ", ".join(f"{n}={settings.get(n)}" for n in names)
            + ". Move it away to make a new one."
        )
    return before["runs"]


def others(path: Path, settings: dict, result: dict) -> list[dict]:
    """The runs in the file that the new result does not replace."""
    return [
        run for run in runs(path, settings) if run["model"] != result["model"]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = applications.list_models()
    parser.add_argument("--models", nargs="+", default=MODELS, choices=known)
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--test-images", type=int, default=2_000)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--optimizer", default="sgd", choices=OPTIMIZERS)
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--policy", default="float32")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    keras.config.set_dtype_policy(options.policy)
    date = datetime.date.today().isoformat()
    backend = keras.backend.backend()
    size = f"{options.images}x{options.epochs}x{options.batch}"
    kind = f"{options.dataset}-{backend}-{options.policy}-{size}-{date}"
    path = RESULTS / f"short_runs-{kind}.json"
    RESULTS.mkdir(exist_ok=True)
    settings = vars(options)
    models = settings.pop("models")
    runs(path, settings)
    data = {
        "train": images(options.dataset, "train", options.images),
        "test": images(options.dataset, "test", options.test_images),
    }
    for name in models:
        result = run(name, data, options)
        losses = result["training_loss"]
        if not np.isfinite(losses).all():
            raise SystemExit(f"{name}: losses {losses}")
        print(json.dumps(result), flush=True)
        results = {
            "benchmark": "short trainings on the first images: whether "
            "networks train, not how good they get",
            "runs": [*others(path, settings, result), result],
            "settings": settings,
            "hardware": reporting.hardware(),
            "versions": reporting.versions(),
        }
        path.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
