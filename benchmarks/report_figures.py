"""Figures of the results: one for each topic, all in one style.

A figure is drawn from a dictionary that is also stored in the picture, so that
a picture shows by itself whether it is out of date.
"""

import json
from pathlib import Path
from typing import Any

import report_accuracy
import report_angles
import report_costs
from report_files import Results

# Marker, colour and size of each series: points in the same place are drawn one
# inside the other.
STYLES = (
    ("o", "#1f5fa8", 110),
    ("s", "#e07b39", 60),
    ("D", "#2f8f5b", 28),
    ("^", "#111111", 12),
)


def accuracy(results: Results) -> dict[str, Any]:
    files = [
        file
        for file in report_accuracy.short_training(results, "float32")
        if file["run"]["model"].startswith("resnet29")
    ]
    return {
        "rows": [file["run"]["model"] for file in files],
        "series": {
            label: [file["run"][key] for file in files]
            for label, key in (
                ("upright test images", "test_accuracy_percent"),
                ("turned test images", "rotated_test_accuracy_percent"),
            )
        },
        "axis": "test accuracy after a short training (%)",
        "log": False,
        "alt": "Accuracy on upright and on turned images of short trainings",
    }


def step_time(results: Results) -> dict[str, Any] | None:
    files = report_costs.step_times(results)
    if not files:
        return None
    names = [
        name
        for name in report_costs.FAMILIES
        if any(name in file for file in files.values())
    ]
    return {
        "rows": [label(name) for name in names],
        "series": {
            report_costs.STEP_TIMES[how]: [
                file[name]["ratio"] if name in file else None for name in names
            ]
            for how, file in files.items()
        },
        "axis": "time of a training step over a 3 x 3 convolution's",
        "log": True,
        "alt": "Time of a training step of every family over a convolution's",
    }


def memory(results: Results) -> dict[str, Any]:
    file = report_costs.attentive_memory_file(results)
    rows = [row for row in file["gib"] if "held" in file["gib"][row]]
    return {
        "rows": [row.replace(" ", ", ") for row in rows],
        "series": {
            form: [file["gib"][row][form] for row in rows]
            for form in ("chunked", "held", "naive")
        },
        "axis": "temporaries of a training step (GiB)",
        "log": True,
        "alt": "Memory of attentive networks: chunked, held and naive",
    }


def traffic(results: Results) -> dict[str, Any]:
    files = {
        report_costs.TRAFFIC[how]: file
        for how, file in report_costs.traffic_files(results).items()
        if "bfloat16" not in how
    }
    return {
        "rows": [label(name) for name in report_costs.FAMILIES],
        "series": {
            how: [
                file[name]["moved"] if name in file else None
                for name in report_costs.FAMILIES
            ]
            for how, file in files.items()
        },
        "axis": "bytes moved by a training step (sizes of the input)",
        "log": True,
        "alt": "Bytes that a training step of every family moves",
    }


ANGLE_LAYERS = (
    "GroupConv2D",
    "AffineSelfConv2D",
    "ACmix2D",
    "GroupSelfAttention2D",
)


def angles(results: Results) -> dict[str, Any]:
    command = report_angles.OTHER_ANGLES
    file = results.latest("angles-p12_p16_p8m", command)
    rows = [
        row
        for row in file["rows"]
        if (row["group"], row["kernel_size"], row["images"])
        == ("p16", 5, "smooth")
    ]
    return {
        "x": rows[0]["angles"],
        "lines": {
            layer: {
                row["basis"]: row["errors"]
                for row in rows
                if row["layer"] == layer and row["basis"] != "paper"
            }
            for layer in ANGLE_LAYERS
        },
        "solid": "steerable",
        "x axis": "angle (degrees)",
        "axis": "largest error over the largest output",
        "alt": "Error against the angle on p16, pixels and steerable filters",
    }


def transformers(results: Results) -> dict[str, Any]:
    command = report_accuracy.TRANSFORMERS
    runs = results.latest("transformers-torch", command)["runs"]
    # All networks are tested after the same parts of the time.
    tests = max((log["tests"] for log in runs.values()), key=len)
    return {
        "x": [round(row["seconds"] / 60) for row in tests],
        "lines": {
            f'GroupViT("{group}")': {
                kind: [100 * row[kind] for row in log["tests"]]
                for kind in ("upright", "turned")
            }
            for group, log in runs.items()
        },
        "solid": "upright",
        "x axis": "minutes of processor time",
        "axis": "accuracy on test images (%)",
        "alt": "Accuracy of transformers against the time that they trained",
    }


FIGURES = {
    function.__name__: function
    for function in (
        accuracy,
        angles,
        step_time,
        memory,
        traffic,
        transformers,
    )
}


def label(family: str) -> str:
    """The name of a family without Markdown, and without "the same"."""
    text = report_costs.FAMILIES[family].replace("`", "")
    return text.replace("the same,", "group self-attention,")


def file_name(name: str) -> str:
    return f"results-{name}.png"


def link(name: str, results: Results) -> str:
    """The picture in Markdown; nothing where nothing is measured."""
    shown = FIGURES[name](results)
    return f"![{shown['alt']}](images/{file_name(name)})" if shown else ""


def stale(results: Results, folder: Path) -> list[str]:
    """Names of the figures that differ from what the files hold."""
    return [
        name
        for name, function in FIGURES.items()
        if stored(folder / file_name(name)) != function(results)
    ]


def stored(path: Path) -> dict[str, Any] | None:
    """What a picture was drawn from."""
    from PIL import Image

    if not path.exists():
        return None
    with Image.open(path) as image:
        return json.loads(image.info["Description"])


def draw_all(results: Results, folder: Path) -> None:
    """Draws every figure that has changed; removes those without results."""
    for name in stale(results, folder):
        shown = FIGURES[name](results)
        path = folder / file_name(name)
        if shown is None:
            path.unlink()
        else:
            draw(shown, path)


def draw(shown: dict[str, Any], path: Path) -> None:
    """Draws a figure, and stores in the picture what it shows."""
    figure = (draw_lines if "lines" in shown else draw_rows)(shown)
    metadata = {"Description": json.dumps(shown)}
    figure.savefig(path, dpi=110, metadata=metadata)


def draw_lines(shown: dict[str, Any]) -> Any:
    """Lines of several colours, each solid and dashed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for (marker, colour, _), (name, lines) in zip(
        STYLES, shown["lines"].items(), strict=False
    ):
        for how, values in lines.items():
            axes.plot(
                shown["x"],
                values,
                linestyle="-" if how == shown["solid"] else "--",
                marker=marker,
                markersize=4,
                color=colour,
                label=f"{name}, {how}",
            )
    axes.set_xticks(shown["x"])
    axes.set_xlabel(shown["x axis"])
    axes.set_ylabel(shown["axis"])
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return figure


def draw_rows(shown: dict[str, Any]) -> Any:
    """Rows of points, one for each series, joined by a line."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator
    from matplotlib.ticker import NullLocator

    rows, series = shown["rows"], shown["series"]
    # A figure by itself takes the Agg canvas and leaves pyplot alone.
    figure = Figure(figsize=(7, 1.4 + 0.3 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for y in range(len(rows)):
        values = [v[y] for v in series.values() if v[y] is not None]
        ends = (min(values), max(values))
        axes.plot(ends, (y, y), color="#c4c9d0", linewidth=2, zorder=1)
    for (marker, colour, size), (name, values) in zip(
        STYLES, series.items(), strict=False
    ):
        points = [(v, y) for y, v in enumerate(values) if v is not None]
        axes.scatter(
            *zip(*points, strict=True),
            label=name,
            marker=marker,
            color=colour,
            s=size,
            linewidths=0,
            zorder=2,
        )
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.5, -0.5)  # the first row on top
    axes.set_xlabel(shown["axis"])
    if shown["log"]:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(axis="x", alpha=0.3)
    axes.tick_params(axis="x", labelsize=8.5)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(
        loc="outside upper center",
        ncols=2 if len(series) > 3 else 3,
        frameon=False,
    )
    return figure
