"""Writes and reads the files of results, and what the pages show of them."""

import datetime
import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_equiattn.applications.training import reporting

RESULTS = Path(__file__).parent / "results"
BACKENDS = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "PyTorch"}
# Packages that the pages name, each as the files call it.
PACKAGES = {
    "keras": "Keras",
    "jax": "JAX",
    "tensorflow-cpu": "TensorFlow",
    "tensorflow": "TensorFlow",
    "torch": "PyTorch",
}
File = dict[str, Any]


class MissingResultError(Exception):
    """No file of this kind has been made yet."""


@dataclass
class Results:
    """The folder of results, which is `benchmarks/results` except in tests."""

    folder: Path = RESULTS

    def latest(self, kind: str, command: str) -> File:
        """The newest file of a kind, by the date in its name.

        Args:
            kind: how the name of the file begins, up to the date.
            command: what makes such a file.

        Raises:
            MissingResultError: if there is no file; it names the command.
        """
        name = re.compile(re.escape(kind) + r"-\d{4}-\d\d-\d\d\.json")
        paths = [
            p for p in self.folder.glob("*.json") if name.fullmatch(p.name)
        ]
        if not paths:
            raise MissingResultError(
                f"{self.folder} has no {kind}-<date>.json. `{command}` "
                "makes it."
            )
        return read(max(paths))

    def by_backend(self, kind: str, command: str) -> dict[str, File]:
        """The newest file of every backend, by its name.

        `kind` and `command` have "{}" in place of the backend.
        """
        return {
            backend: self.latest(kind.format(backend), command.format(backend))
            for backend in BACKENDS
        }

    def all(self, pattern: str, command: str) -> list[File]:
        """All files that a pattern finds, in the order of their dates."""
        paths = sorted(self.folder.glob(pattern), key=lambda p: (date(p), p))
        if not paths:
            raise MissingResultError(
                f"{self.folder} has no {pattern}. `{command}` makes it."
            )
        return [read(path) for path in paths]


def earlier(kind: str, settings: File, entries: str) -> list[File]:
    """The entries of the newest file of a kind, for a benchmark to resume.

    Args:
        kind: how the name of the file begins, up to the date.
        settings: the "settings" that the file must have.
        entries: the name of the list in the file.

    Raises:
        SystemExit: where the file has other settings, hardware or versions.
    """
    try:
        file = Results(RESULTS).latest(kind, "")
    except MissingResultError:
        return []
    wanted = {
        "settings": settings,
        "hardware": reporting.hardware(),
        "versions": reporting.versions(),
    }
    for name, value in wanted.items():
        if file[name] != value:
            raise SystemExit(
                f"The newest {kind}-<date>.json has other {name}: "
                f"{file[name]}. Move it away to start anew. Received: {value}"
            )
    return file[entries]


def write(kind: str, results: File) -> Path:
    """Writes `<kind>-<date>.json`, with the hardware and the versions.

    Args:
        kind: what is measured, and where: how the name of the file begins.
        results: what the file holds; its own "versions" take precedence.
    """
    about = {
        "hardware": reporting.hardware(),
        "versions": reporting.versions(),
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{kind}-{datetime.date.today().isoformat()}.json"
    path.write_text(json.dumps(about | results, indent=2) + "\n")
    return path


def with_deviation(values: Sequence[float], form: str) -> str:
    """The mean of some values, with their standard deviation if several."""
    mean = format(statistics.mean(values), form)
    if len(values) == 1:
        return mean
    return f"{mean} ± {format(statistics.stdev(values), form)}"


def date(path: Path) -> str:
    """The date in the name of a file; empty where there is none."""
    found = re.search(r"\d{4}-\d\d-\d\d", path.name)
    return found.group() if found else ""


def read(path: Path) -> File:
    """A file of results; "date" is that of its name."""
    return json.loads(path.read_text()) | {"date": date(path)}


def machine(files: Sequence[File]) -> str:
    """One sentence: on which hardware, with which versions and when."""
    hardware = [file["hardware"] for file in files]
    places = [_processors([of for of in hardware if of["device"] == "CPU"])]
    places += sorted(
        {
            f"an {of['device']} beside {of['cores']} cores of an "
            f"{of['processor']}"
            for of in hardware
            if of["device"] != "CPU"
        }
    )
    on = " and on ".join(place for place in places if place)
    versions = sorted(
        {
            f"{title} {file['versions'][package]}"
            for file in files
            for package, title in PACKAGES.items()
            if package in file["versions"]
        }
    )
    dates = sorted({file["date"] for file in files})
    # Files of trainings have no date.
    when = f" on {listed(dates)}" if all(dates) else ""
    return f"Measured{when} on {on}, with {listed(versions)}."


def _processors(hardware: Sequence[File]) -> str:
    """The processors of machines without a GPU; empty without machines."""
    if not hardware:
        return ""
    cores = sorted({of["cores"] for of in hardware})
    count = " or ".join(map(str, cores))
    noun = "core" if cores == [1] else "cores"
    processors = " or ".join(sorted({of["processor"] for of in hardware}))
    memory = " or ".join(sorted({f"{of['memory_gib']:.0f}" for of in hardware}))
    return f"{count} {noun} of an {processors} with {memory} GiB of memory"


def listed(words: Sequence[str]) -> str:
    """Words with commas between them, and "and" before the last."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def block(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    files: Sequence[File],
    *commands: str,
) -> str:
    """The machine, the table, and the commands that made its files."""
    # {} in a command stands for the backends.
    lines = "\n".join(
        command.format(backend)
        for command in commands
        for backend in (BACKENDS if "{}" in command else [""])
    )
    return f"{machine(files)}\n\n{table(header, rows)}\n\n```bash\n{lines}\n```"


def run(command: str, backend: str = "{}") -> str:
    """The command line of a script of benchmarks/; {} are all backends."""
    return f"KERAS_BACKEND={backend} python benchmarks/{command}"


def versioned(backend: str, file: File) -> str:
    """The name of a backend and its version."""
    versions = file["versions"]
    package = backend if backend in versions else f"{backend}-cpu"
    return f"{BACKENDS[backend]} {versions[package]}"


def count(number: float | None, digits: int = 0) -> str:
    """A number with commas; nothing for None."""
    return "" if number is None else f"{number:,.{digits}f}"


def short(number: float | None) -> str:
    """A number with two digits at least; nothing for None."""
    if number is None:
        return ""
    return count(number, 0 if number >= 20 else 1 if number >= 2 else 2)
