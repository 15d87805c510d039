"""Tables of the guide to deployment."""

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
    """Milliseconds of a prediction, and what the plain network takes of it."""
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
                    name,
                    label,
                    "" if error is None else f"{error:.2f}",
                    _poses(found["files"]),
                    f"{found['files'][0]['bytes'] / 1000:.0f}",
                    f"{1000 * time['seconds']:.1f} ({time['ratio']:.2f})",
                ]
            )
    header = (
        "network",
        "computes in",
        "test error, %",
        "largest relative error of a quarter turn",
        "ONNX file, kB",
        "ms for 64 images in onnxruntime (ratio)",
    )
    return block(header, rows, [file], command)


def _poses(files: list) -> str:
    """The error of each format; one word where all are exact."""
    errors = {FORMATS[f["format"]]: max(f["errors"]) for f in files}
    if not any(errors.values()):
        return f"0 in {', '.join(errors)}"
    return ", ".join(f"{e:.0e} in {name}" for name, e in errors.items())


TABLES = (int8, plain_time)
