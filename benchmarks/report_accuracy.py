"""Tables of what networks reach, and of how exact layers are."""

import re
import statistics
from collections import defaultdict

from report_files import BACKENDS
from report_files import block
from report_files import count
from report_files import File
from report_files import Results
from report_files import run

from keras_equiattn.applications import reporting

# What papers print, by the name of our network.
PRINTED: dict[str, dict[str, tuple[str, ...]]] = {
    # Romero et al. (2020), Table 1: test error in %.
    "romero2020": {
        "rotmnist_p4cnn": ("2.048 ± 0.045",),
        "rotmnist_p4cnn_big11": ("1.996",),
        "rotmnist_p4cnn_big15": ("1.848",),
        "rotmnist_p4cnn_big19": ("1.796",),
        "rotmnist_p4cnn_co": ("1.980",),
        "rotmnist_p4cnn_channel": ("1.825",),
        "rotmnist_p4cnn_spatial": ("1.761",),
        "rotmnist_p4cnn_input": ("1.795 ± 0.028",),
        "rotmnist_p4cnn_full": ("1.696 ± 0.021",),
    },
    # Diaconu and Worrall (2019), Tables 1 and 2: parameters in thousands and
    # test accuracy in %, on CIFAR-10 and on CIFAR-100.
    "diaconu2019": {
        "resnet29_z2": ("313", "91.18", "336", "68.34"),
        "resnet29_z2_se": ("347", "91.39", "", ""),
        "resnet29_z2_sasa": ("235", "89.43", "", ""),
        "resnet29_z2_simple_asc": ("217", "91.01", "240", "68.40"),
        "resnet29_z2_asc": ("268", "91.24", "291", "68.68"),
        "resnet29_z2_asc_se": ("301", "91.21", "", ""),
        "resnet29_p4": ("310", "93.02", "321", "72.03"),
        "resnet29_p4_se": ("342", "93.24", "354", "72.03"),
        "resnet29_p4_asc": ("272", "93.03", "283", "72.71"),
    },
}


def trainings(results: Results) -> dict[str, list[File]]:
    """Trainings on rotated MNIST that differ in the seed alone, by settings."""
    same = defaultdict(list)
    for file in results.all("training/*.json", "python examples/train.py"):
        same[reporting.settings_key(file)].append(file)
    return dict(sorted(same.items()))


def test_error(files: list[File]) -> str:
    """Mean and standard deviation over the seeds, in %."""
    errors = [file["test"]["error_percent"] for file in files if file["test"]]
    if not errors:
        return "not tested"
    if None in errors:
        return "not finite"
    mean = f"{statistics.mean(errors):.3f}"
    if len(errors) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(errors):.3f}"


def symmetry_error(files: list[File]) -> str:
    """The largest equivariance error of the seeds."""
    errors = [file["equivariance"]["error"] for file in files]
    return reporting.number(None if None in errors else max(errors), ".1e")


def rotmnist_runs(results: Results) -> str:
    runs = list(trainings(results).values())
    rows = []
    for files in runs:
        first = files[0]
        validation = first["validation"]
        rows.append(
            [
                first["model"],
                count(first["parameters"]),
                str(first["epochs"]),
                ", ".join(
                    str(seed)
                    for seed in sorted(f["options"]["seed"] for f in files)
                ),
                reporting.number(validation["error_percent"], ".3f")
                if validation
                else "trained on",
                test_error(files),
                symmetry_error(files),
            ]
        )
    header = (
        "network",
        "parameters",
        "epochs",
        "seeds",
        "validation error, %",
        "test error, %",
        "equivariance error",
    )
    return block(
        header,
        rows,
        [file for files in runs for file in files],
        "python examples/train.py --model rotmnist_p4cnn --dataset rot_mnist "
        "\\\n    --epochs 100 --milestones 80 --train-on-all --seed 0 "
        "--out runs/p4",
    )


def parameters(results: Results) -> File:
    """The file that benchmarks/parameters.py makes."""
    return results.latest("parameters", run("parameters.py", "torch"))


def rotmnist_paper(results: Results) -> str:
    counts = parameters(results)
    tested = {
        files[0]["model"]: files
        for files in trainings(results).values()
        if files[0]["test"]
    }
    rows = []
    for model, (printed,) in PRINTED["romero2020"].items():
        files = tested.get(model, [])
        rows.append(
            [
                model,
                count(counts["parameters"][model]),
                test_error(files) if files else "",
                str(len(files) or ""),
                printed,
            ]
        )
    return block(
        ("network", "parameters", "ours", "seeds", "paper"),
        rows,
        [counts, *(file for files in tested.values() for file in files)],
        run("parameters.py", "torch"),
    )


def checkpoints(results: Results) -> str:
    command = "python examples/evaluate_checkpoint.py"
    file = results.latest("checkpoints", command)
    rows = [
        [
            row["weights"].split("/")[0],
            row["model"],
            count(row["images"]),
            f"{row['error_percent']:.2f}",
        ]
        for row in file["rows"]
    ]
    return block(
        ("weights of the authors", "our network", "digits", "test error, %"),
        rows,
        [row | {"date": file["date"]} for row in file["rows"]],
        f"{command} p4cnn.pth --model rotmnist_p4cnn --transpose",
    )


def resnet29(results: Results) -> str:
    file = parameters(results)
    rows = []
    for model, printed in PRINTED["diaconu2019"].items():
        ours = [
            count(file["parameters"][f"{model}, {classes} classes"])
            for classes in (10, 100)
        ]
        thousands = [f"{p},000" if p else "" for p in printed[::2]]
        rows.append(
            [
                model,
                *(ours[0], thousands[0], printed[1]),
                *(ours[1], thousands[1], printed[3]),
            ]
        )
    header = ["network"]
    for data in ("CIFAR-10", "CIFAR-100"):
        header += [f"{data}: parameters", "paper", "paper's accuracy, %"]
    return block(header, rows, [file], run("parameters.py", "torch"))


def gsanet_parameters(results: Results) -> str:
    file = parameters(results)
    groups = ("z2", "z2m", "p4", "p8", "p4m", "p12", "p16", "p8m")
    rows = [
        [name, *(count(file["parameters"][f"{name}_{g}"]) for g in groups)]
        for name in ("gsanet_rotmnist", "gsanet_cifar10", "gsanet_pcam")
    ]
    command = run("parameters.py", "torch")
    return block(("network", *groups), rows, [file], command)


def gsanet_epochs(results: Results) -> str:
    command = (
        "KERAS_BACKEND=jax python examples/train.py "
        "--model gsanet_rotmnist_p4 --epochs 2 \\\n    "
        "--validation-size 4000 --evaluation-size 1000 --log-steps 25 "
        "--seed 0 --out runs/gsa"
    )
    (file,) = results.all("gsanet_rotmnist_p4-two_epochs/*.json", command)
    row = [
        file["model"],
        str(file["epochs"]),
        f"{file['validation']['error_percent']:.1f}",
        test_error([file]),
        f"{file['wall_time_seconds'] / 60:.0f}",
    ]
    header = ("network", "epochs", "validation error, %", "test error, %")
    return block((*header, "minutes"), [row], [file], command)


def short_training(results: Results, policy: str) -> list[File]:
    """Short trainings, each a file with one of its runs as "run".

    Of the runs of a network the one with the most images counts, and of those
    the latest.
    """
    command = run("short_runs.py", "tensorflow")
    found: dict[str, File] = {}
    for file in results.all(f"short_runs-*-{policy}-*.json", command):
        for one in file["runs"]:
            before = found.get(one["model"], file)
            if file["settings"]["images"] >= before["settings"]["images"]:
                found[one["model"]] = file | {"run": one}
    most = sorted(found.items(), key=lambda item: _order(*item))
    return [file for _, file in most]


def _order(model: str, file: File) -> tuple[int, str, bool]:
    """Large runs first; networks on z2 and on p4 stand together."""
    pair = re.sub("_(z2|p4)", "", model)
    return -file["settings"]["images"], pair, "_p4" in model


def short_runs(results: Results) -> str:
    files = short_training(results, "float32")
    rows = []
    for file in files:
        settings, found = file["settings"], file["run"]
        rows.append(
            [
                found["model"],
                settings["dataset"],
                f"{settings['images']:,} x {settings['epochs']}",
                str(settings["batch"]),
                BACKENDS[file["versions"]["backend"]],
                ", ".join(f"{loss:.2f}" for loss in found["training_loss"]),
                f"{found['test_accuracy_percent']:.1f}",
                f"{found['rotated_test_accuracy_percent']:.1f}",
                count(settings["test_images"]),
            ]
        )
    header = (
        "network",
        "data",
        "images x epochs",
        "batch",
        "backend",
        "training loss",
        "accuracy upright, %",
        "turned, %",
        "test images",
    )
    return block(header, rows, files, run("short_runs.py", "tensorflow"))


def short_runs_bfloat16(results: Results) -> str:
    files = short_training(results, "mixed_bfloat16")
    rows = [
        [
            file["run"]["model"],
            f"{file['settings']['images']} x {file['settings']['epochs']}",
            ", ".join(f"{x:.2f}" for x in file["run"]["training_loss"]),
        ]
        for file in files
    ]
    return block(
        ("network", "images x epochs", "training loss"),
        rows,
        files,
        run("short_runs.py --policy mixed_bfloat16 \\\n    ", "torch")
        + "--images 128 --test-images 32 --epochs 3 --batch 32",
    )


def angles(results: Results) -> str:
    windows = run("windows.py angles", "torch")
    pairs = run("group_self_attention.py angles", "torch")
    files = [
        results.latest("windows-angles-torch", windows),
        results.latest("group_self_attention-angles-torch", pairs),
    ]
    rows = [
        [
            row.get("layer", "LiftingSelfAttention2D"),
            f"{row['kernel_size']} x {row['kernel_size']}",
            f"{row['error / size']:.2f}" if "size" in row else "",
            f"{row['error / spread']:.2f}",
        ]
        for file in files
        for row in file["rows"]
    ]
    header = ("layer", "window", "error over size", "error over spread")
    return block(header, rows, files, windows, pairs)


def equivariance(results: Results) -> str:
    trained = list(trainings(results).values())
    rows = [
        [files[0]["model"], "rotated MNIST", symmetry_error(files)]
        for files in trained
        if files[0]["test"]
    ]
    brief = short_training(results, "float32")
    rows += [
        [
            file["run"]["model"],
            f"{file['settings']['dataset']}, short run",
            f"{file['run']['equivariance_error_p4']:.1e}",
        ]
        for file in brief
    ]
    return block(
        ("network", "data", "equivariance error"),
        sorted(rows, key=lambda row: float(row[-1])),
        [file for files in trained for file in files] + brief,
        "python examples/train.py --model rotmnist_p4cnn --dataset rot_mnist "
        "--out runs/p4",
        run("short_runs.py", "tensorflow"),
    )


TABLES = (
    angles,
    checkpoints,
    equivariance,
    gsanet_epochs,
    gsanet_parameters,
    resnet29,
    rotmnist_paper,
    rotmnist_runs,
    short_runs,
    short_runs_bfloat16,
)
