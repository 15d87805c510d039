"""What deployment changes: time of plain networks, int8 networks as files.

    KERAS_BACKEND=jax python benchmarks/deployment.py plain
    KERAS_BACKEND=torch python benchmarks/deployment.py int8

`plain` predicts with a network and with what `keras_equiattn.plain` makes of
it, alternating in one process, in the mode that Keras compiles in by default on
a CPU.

`int8` measures the shipped networks of rotated digits (prepare `rot_mnist`
first): test errors before and after `keras_equiattn.quantize`, errors of the
files under quarter turns in their runtimes, their sizes, and their time in
onnxruntime, in turns, with as many threads as cores.

Both write `benchmarks/results/deployment-<mode>-<backend>-<date>.json`.
"""

import argparse
import functools
import json
import statistics
import tempfile
import time

import keras
import numpy as np
import report_files
import timing

from keras_equiattn import certificate
from keras_equiattn import export
from keras_equiattn import load_exported
from keras_equiattn import plain
from keras_equiattn import quantize
from keras_equiattn.applications import get_model
from keras_equiattn.applications import list_presets
from keras_equiattn.applications.data import datasets

PLAIN = (
    "rotmnist_p4cnn",
    "rotmnist_p4cnn_input",
    "resnet29_p4_se",
    "resnet44_p4m",
)
SUFFIXES = (".onnx", ".xml", ".pt2", ".tflite", "")
CALIBRATION = 200


def medians(steps, repeats):
    """Median seconds of each step, and median ratio to the first step."""
    seconds = timing.alternate(steps, repeats)
    first = next(iter(seconds.values()))
    return {
        name: {
            "seconds": statistics.median(times),
            "ratio": statistics.median(
                t / u for t, u in zip(times, first, strict=True)
            ),
        }
        for name, times in seconds.items()
    }


def time_plain(options):
    found = {}
    for name in options.networks:
        model = get_model(name)
        x = np.random.default_rng(0).normal(
            size=(options.batch, *model.input_shape[1:])
        )
        x = x.astype("float32")
        variants = {
            "network": model,
            "plain": plain(model),
            "folded": plain(model, fold_batch_normalization=True),
        }
        steps = {
            kind: timing.inference_step(variant, x)
            for kind, variant in variants.items()
        }
        found[name] = medians(steps, options.repeats)
        print(name, json.dumps(found[name]))
    return found


def test_images(count):
    """Images and labels of the test set, and images to calibrate with."""
    x, y = zip(
        *datasets.load_pydataset("rot_mnist", "test", batch_size=1000),
        strict=True,
    )
    calibration, _ = datasets.load_pydataset(
        "rot_mnist", "train", batch_size=CALIBRATION
    )[0]
    x, y = (np.concatenate([np.asarray(a) for a in b]) for b in (x, y))
    return x[:count], y[:count], np.asarray(calibration)


def error(model, x, y):
    """Test error in percent."""
    scores = model.predict(x, batch_size=500, verbose=0)
    return 100 * float((scores.argmax(1) != y).mean())


def certify_int8(options):
    x, y, calibration = test_images(options.images)
    found = {"test_images": len(x)}
    for name in options.networks:
        network = get_model(name, weights="rot_mnist")
        networks = {
            "network": network,
            "plain": plain(network, fold_batch_normalization=True),
            "int8": quantize(network, calibration),
        }
        entry = {
            kind: {"test_error": error(model, x, y)}
            for kind, model in networks.items()
            if kind != "plain"
        }
        with tempfile.TemporaryDirectory() as folder:
            paths = {}
            for kind, model in networks.items():
                suffixes = SUFFIXES[:1] if kind == "plain" else SUFFIXES
                paths[kind] = [f"{folder}/{kind}{s}" for s in suffixes]
                for path in paths[kind]:
                    export(model, path)
            runs = {k: load_exported(p[0]) for k, p in paths.items()}
            batch = x[: options.batch]
            steps = {
                kind: functools.partial(run, batch)
                for kind, run in runs.items()
            }
            times = medians(steps, options.repeats)
            for kind, of_kind in paths.items():
                checked = certificate(of_kind, "p4", x[:64])
                entry.setdefault(kind, {}).update(
                    onnxruntime=times[kind],
                    files=[
                        {
                            "format": file.format,
                            "runtime": file.runtime,
                            "bytes": file.bytes,
                            "errors": file.errors,
                        }
                        for file in checked.files
                    ],
                )
        found[name] = entry
        print(name, json.dumps(entry))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("mode", choices=("plain", "int8"))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--images", type=int, default=None, help="test images")
    parser.add_argument(
        "--networks",
        nargs="+",
        help="default: some of each kind for `plain`, all shipped for `int8`",
    )
    options = parser.parse_args()
    if options.networks is None:
        of_mode = {"plain": PLAIN, "int8": list_presets()}
        options.networks = of_mode[options.mode]
    keras.utils.set_random_seed(0)
    start = time.perf_counter()
    measure = time_plain if options.mode == "plain" else certify_int8
    results = {
        "benchmark": f"deployment.py {options.mode}",
        "settings": {k: v for k, v in vars(options).items() if k != "mode"},
        "found": measure(options),
        "minutes": (time.perf_counter() - start) / 60,
    }
    backend = keras.backend.backend()
    report_files.write(f"deployment-{options.mode}-{backend}", results)


if __name__ == "__main__":
    main()
