"""Tables of the accuracy of networks, and of how exact they are."""

import json
import re
import statistics
from collections import Counter
from collections import defaultdict
from itertools import chain

import training_table
from report_files import BACKENDS
from report_files import block
from report_files import count
from report_files import File
from report_files import Results
from report_files import run
from report_files import short
from report_files import with_deviation

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


TRAIN = (
    "python examples/train.py --model rotmnist_p4cnn --dataset rot_mnist \\\n"
    "    --epochs 100 --milestones 80 --train-on-all \\\n"
    "    --no-use-kernel-factors --seed 0 --out runs/p4"
)


def trainings(results: Results) -> list[list[File]]:
    """Trainings on rotated MNIST that differ in the seed alone."""
    return training_table.grouped(results.all("training/*.json", TRAIN))


def rotmnist_runs(results: Results) -> str:
    runs = trainings(results)
    rows = [training_table.row(files) for files in runs]
    return block(
        training_table.HEADER, rows, list(chain.from_iterable(runs)), TRAIN
    )


def tested(results: Results, dataset: str) -> dict[str, list[File]]:
    """The tested trainings of each network.

    If a network has several, those with kernel factors are taken before others,
    and then those with the most seeds.
    """
    runs = [
        files
        for files in trainings(results)
        if files[0]["test"] and files[0]["dataset"]["name"] == dataset
    ]
    runs.sort(
        key=lambda of: (bool(training_table.kernel_factor(of[0])), len(of))
    )
    return {files[0]["model"]: files for files in runs}


def parameters(results: Results) -> File:
    """The file that benchmarks/parameters.py makes."""
    return results.latest("parameters", run("parameters.py", "torch"))


def rotmnist_paper(results: Results) -> str:
    counts = parameters(results)
    runs = {
        model: files
        for model, files in tested(results, "rot_mnist").items()
        if model in PRINTED["romero2020"]
    }
    rows = []
    for model, (printed,) in PRINTED["romero2020"].items():
        files = runs.get(model, [])
        rows.append(
            [
                model,
                count(counts["parameters"][model]),
                training_table.kernel_factor(files[0]) if files else "",
                training_table.test_error(files) if files else "",
                str(len(files) or ""),
                printed,
            ]
        )
    return block(
        (
            "network",
            "parameters",
            "kernel factor",
            "ours, %",
            "seeds",
            "paper, %",
        ),
        rows,
        [counts, *chain.from_iterable(runs.values())],
        run("parameters.py", "torch"),
        TRAIN,
    )


def multiply_adds(results: Results) -> str:
    """Parameters and multiply-adds of networks for one image."""
    command = run("multiply_adds.py", "jax")
    file = results.latest("multiply_adds", command)
    rows = [
        [
            model,
            " x ".join(map(str, found["input_shape"])),
            count(found["parameters"]),
            short(found["millions"]),
        ]
        for model, found in file["networks"].items()
    ]
    header = ("network", "image", "parameters", "million multiply-adds")
    return block(header, rows, [file], command)


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
    runs = {name: tested(results, name) for name in ("cifar10", "cifar100")}
    rows = []
    for model, printed in PRINTED["diaconu2019"].items():
        cells = [model]
        for data, (thousands, accuracy) in zip(
            runs, (printed[:2], printed[2:]), strict=True
        ):
            classes = data.removeprefix("cifar")
            ours = file["parameters"][f"{model}, {classes} classes"]
            errors = [
                one["test"]["error_percent"]
                for one in runs[data].get(model, [])
            ]
            cells += [
                count(ours),
                f"{thousands},000" if thousands else "",
                f"{100 - statistics.mean(errors):.2f}" if errors else "",
                accuracy,
            ]
        rows.append(cells)
    header = ["network"]
    for data in ("CIFAR-10", "CIFAR-100"):
        header += [f"{data}: parameters", "paper", "accuracy, %", "paper"]
    used = [
        one
        for found in runs.values()
        for one in chain.from_iterable(found.values())
    ]
    return block(header, rows, [file, *used], run("parameters.py", "torch"))


def gsanet_parameters(results: Results) -> str:
    file = parameters(results)
    groups = ("z2", "z2m", "p4", "p8", "p4m", "p12", "p16", "p8m")
    rows = [
        [name, *(count(file["parameters"][f"{name}_{g}"]) for g in groups)]
        for name in ("gsanet_rotmnist", "gsanet_cifar10", "gsanet_pcam")
    ]
    command = run("parameters.py", "torch")
    return block(("network", *groups), rows, [file], command)


TWO_EPOCHS = (
    "KERAS_BACKEND=jax python examples/train.py "
    "--model gsanet_rotmnist_p4 --epochs 2 \\\n    "
    "--validation-size 4000 --evaluation-size 1000 --log-steps 25 "
    "--seed 0 --out runs/gsa"
)


def two_epochs(results: Results) -> File:
    """The short training of group self-attention on rotated MNIST."""
    folder = "gsanet_rotmnist_p4-two_epochs"
    (file,) = results.all(f"{folder}/results.json", TWO_EPOCHS)
    return file


def gsanet_epochs(results: Results) -> str:
    file = two_epochs(results)
    row = [
        file["model"],
        str(file["epochs"]),
        f"{file['validation']['error_percent']:.1f}",
        f"{file['test']['error_percent']:.1f}",
        f"{file['wall_time_seconds'] / 60:.0f}",
    ]
    header = ("network", "epochs", "validation error, %", "test error, %")
    return block((*header, "minutes"), [row], [file], TWO_EPOCHS)


def short_training(results: Results, policy: str) -> list[File]:
    """Short trainings, each a file with one of its runs as "run".

    Of the runs of a network, the one with the most images counts, and of
    several such runs the latest.
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


ONE_THREAD = "OMP_NUM_THREADS=1 KERAS_BACKEND=torch \\\n    "
TRANSFORMERS = f"{ONE_THREAD}python examples/transformers.py z2 p4 p4m"


def transformers(results: Results) -> str:
    """What transformers learn in the same time."""
    file = results.latest("transformers-torch", TRANSFORMERS)
    rows = []
    for group, log in file["runs"].items():
        last = log["tests"][-1]
        rows.append(
            [
                f'`GroupViT("{group}")`',
                count(log["parameters"]),
                count(log["steps"]),
                str(log["epochs"]),
                f"{100 * last['upright']:.1f}",
                f"{100 * last['turned']:.1f}",
            ]
        )
    header = (
        "network",
        "parameters",
        "steps",
        "epochs begun",
        "accuracy upright, %",
        "turned, %",
    )
    return block(header, rows, [file], ONE_THREAD + file["command"])


# Three summaries of the errors after each epoch of a run.
SUMMARIES = (
    "error in the last epoch, %",
    "mean of the last five, %",
    "lowest of all tested epochs, %",
)


def summaries(runs: list[list[float]], form: str) -> list[str]:
    """The columns `SUMMARIES`, means over the seeds."""
    return [
        with_deviation([summary(errors) for errors in runs], form)
        for summary in (
            lambda errors: errors[-1],
            lambda errors: statistics.mean(errors[-5:]),
            min,
        )
    ]


def recipe_changes(results: Results) -> str:
    """Errors on held-out digits with one change of the recipe at a time."""
    command = run("recipe_changes.py", "tensorflow")
    file = results.latest("recipe_changes-tensorflow-30", command)
    runs = defaultdict(list)
    for one in file["runs"]:
        runs[one["change"]].append(one)
    rows = [
        [
            change,
            ", ".join(str(one["seed"]) for one in of_seeds),
            *summaries([one["errors"] for one in of_seeds], ".2f"),
        ]
        for change, of_seeds in runs.items()
    ]
    return block(("change", "seeds", *SUMMARIES), rows, [file], command)


def protocols(results: Results) -> str:
    """Errors on the test digits after other ways of training."""
    command = run("protocols.py rotmnist_p4cnn_input", "tensorflow")
    files = results.all("protocol-*.json", command)
    # Of files with the same settings the newest, which comes last.
    newest = {
        json.dumps(file["settings"], sort_keys=True): file for file in files
    }
    variants = defaultdict(list)
    for file in newest.values():
        settings = file["settings"]
        after = settings["dropout_after_attention"]
        falls = ", ".join(map(str, settings["milestones"]))
        variant = (
            settings["network"],
            f"falls after {falls} epochs" if falls else "constant",
            "after attention" if after else "before attention",
            str(settings["epochs"]),
            f"last {settings['tested']}",
        )
        variants[variant].append(file)
    rows = [
        [
            *variant,
            ", ".join(str(file["settings"]["seed"]) for file in of_seeds),
            *summaries([file["errors"] for file in of_seeds], ".3f"),
        ]
        for variant, of_seeds in variants.items()
    ]
    header = ("network", "rate", "dropout", "epochs", "tested", "seeds")
    return block(
        (*header, *SUMMARIES),
        rows,
        list(newest.values()),
        f"{command} --seed 0",
        f"for seed in 0 1 2; do\n  {command} \\\n"
        "    --milestones 80 --dropout-after-attention --tested 5 "
        "--seed $seed\ndone",
    )


def equivariance(results: Results) -> str:
    trained = [files for files in trainings(results) if files[0]["test"]]
    trained.append([two_epochs(results)])
    rows = [
        [
            files[0]["model"],
            f"{files[0]['dataset']['name']}, {files[0]['epochs']} epochs"
            + ", kernel factors" * bool(training_table.kernel_factor(files[0])),
            training_table.symmetry_error(files),
        ]
        for files in trained
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
        ("network", "training", "equivariance error"),
        rows,
        [*chain.from_iterable(trained), *brief],
        TRAIN,
        TWO_EPOCHS,
        run("short_runs.py", "tensorflow"),
    )


def fuzz(results: Results) -> str:
    """How calls with random arguments ended."""
    file = results.latest("fuzz-torch", "make fuzz")
    head = ("calls of", "worked", "of these, exact on a turned input")
    rows = []
    for kind in ("layers", "networks", "operations", "deployed networks"):
        total = sum(map(Counter, file[kind].values()), Counter())
        exact = count(total["exact"]) if "exact" in total else ""
        row = [kind, count(total["worked"]), exact, count(total["refused"])]
        rows.append(row)
    return block((*head, "refused"), rows, [file], "make fuzz")


TABLES = (
    checkpoints,
    equivariance,
    fuzz,
    gsanet_epochs,
    gsanet_parameters,
    multiply_adds,
    protocols,
    recipe_changes,
    resnet29,
    rotmnist_paper,
    rotmnist_runs,
    short_runs,
    short_runs_bfloat16,
    transformers,
)
