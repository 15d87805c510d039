"""Tables of the guides to deployment and to distributed training."""

import statistics

from report_files import block
from report_files import Results
from report_files import run
from report_files import versioned

FORMATS = {
    "onnx": "ONNX",
    "openvino": "OpenVINO",
    "torch": "`.pt2`",
    "litert": "LiteRT",
    "tf_saved_model": "SavedModel",
}
KINDS = {"network": "float32", "plain": "float32, plain", "int8": "8 bits"}


def plain_time(results: Results) -> str:
    """Milliseconds of a prediction, and the ratios of plain networks to it."""
    command = run("deployment.py plain")
    files = results.by_backend("deployment-plain-{}", command)
    rows = []
    for name in next(iter(files.values()))["found"]:
        cells = [f"`{name}`"]
        for file in files.values():
            entry = file["found"][name]
            before = 1000 * entry["network"]["seconds"]
            ratios = (entry[kind]["ratio"] for kind in ("plain", "folded"))
            cells.append(
                f"{before:.0f} ms: {', '.join(f'{r:.2f}' for r in ratios)}"
            )
        rows.append(cells)
    header = (
        "network: plain, and with normalization folded",
        *(versioned(backend, file) for backend, file in files.items()),
    )
    return block(header, rows, list(files.values()), command)


def int8(results: Results) -> str:
    """Test errors, errors in other poses, sizes and times of the files."""
    command = run("deployment.py int8", "torch")
    file = results.latest("deployment-int8-torch", command)
    rows = []
    for name, entry in file["found"].items():
        if name == "test_images":
            continue
        for kind, label in KINDS.items():
            found = entry[kind]
            error = found.get("test_error")
            time = found["onnxruntime"]
            rows.append(
                [
                    f"`{name}`",
                    label,
                    "" if error is None else f"{error:.2f}",
                    _poses(found["files"]),
                    ", ".join(
                        f"{f['bytes'] / 1000:.0f}" for f in found["files"]
                    ),
                    f"{1000 * time['seconds']:.1f} ({time['ratio']:.2f})",
                ]
            )
    header = (
        "network",
        "computes in",
        "test error, %",
        "largest relative error of a quarter turn",
        f"kB in {', '.join(FORMATS.values())}",
        "ms for 64 images in onnxruntime (ratio)",
    )
    return block(header, rows, [file], command)


def _poses(files: list) -> str:
    """The error of each format; one zero where all are exact."""
    errors = {FORMATS[f["format"]]: max(f["errors"]) for f in files}
    if not any(errors.values()):
        return f"0 in {', '.join(errors)}"
    return ", ".join(f"{e:.0e} in {name}" for name, e in errors.items())


def processes(results: Results) -> str:
    """How much a run in two processes differs from one in one process."""
    command = run("scale.py processes")
    files = results.by_backend("scale-processes-{}", command)
    rows = []
    for backend, file in files.items():
        found = file["found"]
        one, two = (
            statistics.median(row["seconds"] for row in log)
            for log in found["logs"].values()
        )
        differences = found["differences"]
        rows.append(
            [
                versioned(backend, file),
                f"{found['logs']['1'][-1]['loss']:.4f}",
                *(f"{differences[n]:.0e}" for n in ("loss", "val_loss")),
                f"{one:.1f}, {two:.1f}",
            ]
        )
    settings = next(iter(files.values()))["settings"]
    header = (
        f"`{settings['model']}`, {settings['epochs']} epochs of "
        f"{settings['images']} digits, batch 64",
        "last training loss",
        "largest relative difference of the training loss",
        "of the validation loss",
        "seconds of an epoch in one process, in two",
    )
    return block(header, rows, list(files.values()), command)


def folders(results: Results) -> str:
    """The memory of a process that reads an epoch of a folder of images."""
    command = run("scale.py folders", "torch")
    file = results.latest("scale-folders", command)
    rows = [
        [
            f"{entry['files']:,}",
            entry["reader"],
            f"{entry['images'] / entry['seconds']:,.0f}",
            f"{entry['peak_before_mib']:,.0f}",
            f"{entry['peak_mib']:,.0f}",
        ]
        for entry in file["found"]
    ]
    header = (
        "files",
        "read by",
        "images per second",
        "MiB before the epoch",
        "largest MiB",
    )
    return block(header, rows, [file], command)


TABLES = (folders, int8, plain_time, processes)
