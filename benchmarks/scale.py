"""Training in two processes, and reading folders that do not fit into memory.

    KERAS_BACKEND=jax python benchmarks/scale.py processes
    KERAS_BACKEND=torch python benchmarks/scale.py folders

`processes` runs `examples/train.py` twice, in one process and in two that
communicate on this machine, with the same batches of digits, and compares their
logs.

`folders` makes folders of small PNG files, and new processes read one epoch of
each by `tf.data` and by grain, without a network. The largest memory of a
process (its peak resident set) is compared with that before it read anything.

Both write `benchmarks/results/scale-<mode>[-<backend>]-<date>.json`.
"""

import argparse
import csv
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import report_files

from keras_equiattn.applications.data import datasets
from keras_equiattn.applications.training import distribution

TRAIN = Path(__file__).parents[1] / "examples" / "train.py"
READERS = {"tf.data": "load", "grain": "load_pydataset"}


def write_digits(path: Path, count: int) -> None:
    """Writes the first embedded digits as a dataset of its own."""
    with tempfile.TemporaryDirectory() as folder:
        whole = datasets.export("digits", Path(folder) / "digits.npz")
        with np.load(whole) as file:
            arrays = {
                name: values if name == "metadata" else values[:count]
                for name, values in file.items()
            }
    np.savez(path, **arrays)


def addresses() -> list[str]:
    """Two addresses of this machine with free ports."""
    sockets = [socket.socket() for _ in range(2)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    found = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    for one in sockets:
        one.close()
    return found


def train(options: argparse.Namespace, data: Path, count: int) -> list[dict]:
    """The log of a run in one process or in two, one row for each epoch."""
    with tempfile.TemporaryDirectory() as out:
        command = [
            *(sys.executable, str(TRAIN), "--model", options.model),
            *("--dataset", str(data), "--validation-size", "128"),
            *("--epochs", f"{options.epochs}", "--batch-size", "64"),
            *("--milestones", f"{options.epochs - 1}"),
            *("--learning-rate", f"{options.learning_rate}"),
            *("--out", f"{out}/run", "--no-test", "--verbose", "0"),
            *(["--distribute"] if count > 1 else []),
        ]
        others = addresses()
        processes = [
            subprocess.Popen(
                command,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": f"{2 // count}",
                    **(
                        distribution.variables(index, others)
                        if count > 1
                        else {}
                    ),
                },
            )
            for index in range(count)
        ]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit(f"{' '.join(command)} ended with {codes}")
        with open(f"{out}/run/log.csv", newline="") as file:
            rows = list(csv.DictReader(file))
    return [{name: float(x) for name, x in row.items()} for row in rows]


def compare_processes(options: argparse.Namespace) -> Any:
    """Logs of both runs, and the largest relative difference of each metric."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "digits.npz"
        write_digits(data, options.images)
        logs = {f"{n}": train(options, data, n) for n in (1, 2)}
    metrics = ("loss", "accuracy", "val_loss", "val_accuracy")
    differences = {
        name: max(
            abs(one[name] - two[name]) / abs(one[name])
            for one, two in zip(logs["1"], logs["2"], strict=True)
        )
        for name in metrics
    }
    return {"logs": logs, "differences": differences}


def make_folder(folder: Path, count: int) -> None:
    """Makes a folder of `count` images in ten classes, and ten to validate."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for part, images in (("train", count), ("val", 10)):
        for index in range(images):
            path = folder / part / f"class_{index % 10}" / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, 256, (16, 16, 3), dtype="uint8")
            Image.fromarray(pixels).save(path)


def read_folder(folder: str, reader: str) -> dict[str, float]:
    """Reads one shuffled epoch with augmentation in this process."""

    def peak() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    load = getattr(datasets, READERS[reader])
    augment = datasets.Augmentation(0, resized_crop=True)
    # This loads the libraries, and reads a few images.
    next(iter(load(folder, "validation", 8)))
    before = peak()
    start = time.perf_counter()
    images = sum(len(y) for _, y in load(folder, "train", 64, augment))
    return {
        "images": images,
        "seconds": time.perf_counter() - start,
        "peak_before_mib": before,
        "peak_mib": peak(),
    }


def measure_folders(options: argparse.Namespace) -> Any:
    """Peak memory of an epoch, for each number of files and each reader."""
    found = []
    for count in options.files:
        with tempfile.TemporaryDirectory() as folder:
            make_folder(Path(folder), count)
            for reader in READERS:
                done = subprocess.run(
                    [sys.executable, __file__, "read", folder, reader],
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                )
                entry = json.loads(done.stdout.splitlines()[-1])
                found.append({"files": count, "reader": reader, **entry})
                print(found[-1], flush=True)
    return found


def main() -> None:
    if sys.argv[1:2] == ["read"]:
        print(json.dumps(read_folder(*sys.argv[2:])))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("mode", choices=("processes", "folders"))
    parser.add_argument("--model", default="resnet29_p4_se")
    parser.add_argument("--images", type=int, default=448, help="digits")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=0.001)
    parser.add_argument(
        "--files", type=int, nargs="+", default=[1_000, 10_000, 100_000]
    )
    options = parser.parse_args()
    processes = options.mode == "processes"
    measure = compare_processes if processes else measure_folders
    results = {
        "benchmark": f"scale.py {options.mode}",
        "settings": {k: v for k, v in vars(options).items() if k != "mode"},
        "found": measure(options),
    }
    kind = f"scale-{options.mode}"
    if processes:
        kind += f"-{keras.backend.backend()}"
    report_files.write(kind, results)


if __name__ == "__main__":
    main()
