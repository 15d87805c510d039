"""Tables of errors between the quarter turns."""

from collections.abc import Sequence

from report_files import block
from report_files import count
from report_files import File
from report_files import Results
from report_files import run
from report_files import with_deviation

ANGLES = run("angles.py --draws 3", "torch")
DILATED_ANGLES = run("angles.py --draws 3 --dilation 2", "torch")
WHOLE_IMAGE_ANGLES = run("angles.py --draws 3 --whole-image", "torch")
EVEN_ANGLES = run("angles.py --draws 3 --even", "torch")
OTHER_ANGLES = run("angles.py --groups p12 p16 p8m", "jax")
TRAINED_ANGLES = "TORCH_COMPILE_DISABLE=1 " + run(
    "angles.py --trained --sizes 5", "torch"
)


# The forms of a layer, see benchmarks/angles.py.
FORMS = ("paper", "pixel", "steerable")


def angle_rows(
    file: File,
    columns: list[list[tuple[str, str, str]]],
    names: Sequence[str] | None = None,
    spread: bool = False,
) -> list[list[str]]:
    """A row for each layer and size, with the largest error in each column.

    Cells without a measurement are empty.

    Args:
        file: the results of benchmarks/angles.py.
        columns: the group, basis and images of the errors that share a cell.
        names: the layers, or None for all.
        spread: whether the distance of the poses follows each error.
    """
    found: dict[tuple[str, int], dict[tuple, str]] = {}
    for row in file["rows"]:
        if names and row["layer"] not in names:
            continue
        cell = f"{max(row['errors']):.3f}"
        if spread:
            cell += f" / {row['pose_spread']:.3f}"
        of_layer = found.setdefault((row["layer"], row["kernel_size"]), {})
        of_layer[row["group"], row["basis"], row["images"]] = cell
    return [
        [
            layer,
            f"{size} x {size}",
            *(
                " / ".join(cells[key] for key in keys)
                if set(keys) <= set(cells)
                else ""
                for keys in columns
            ),
        ]
        for (layer, size), cells in found.items()
    ]


def angles(results: Results) -> str:
    """Largest errors on p8 of layers with their initial weights."""
    return errors_by_images(results.latest("angles-p8_draws_3", ANGLES), ANGLES)


def dilated_angles(results: Results) -> str:
    """Largest errors on p8 of layers that see every second pixel."""
    file = results.latest("angles-p8_dilation_2_draws_3", DILATED_ANGLES)
    return errors_by_images(file, DILATED_ANGLES)


def whole_image_angles(results: Results) -> str:
    """Largest errors on p8 of layers that attend to the whole image."""
    file = results.latest("angles-p8_whole_image_draws_3", WHOLE_IMAGE_ANGLES)
    return errors_by_images(file, WHOLE_IMAGE_ANGLES)


def even_angles(results: Results) -> str:
    """Errors on p8 of pooling that halves the size of its input."""
    file = results.latest("angles-p8_even_draws_3", EVEN_ANGLES)
    return errors_by_images(file, EVEN_ANGLES)


def trained_angles(results: Results) -> str:
    """Largest errors on p8 of layers that have learnt."""
    file = results.latest("angles-p8_trained_5", TRAINED_ANGLES)
    return errors_by_images(file, TRAINED_ANGLES)


def errors_by_images(file: File, command: str) -> str:
    """The largest errors on p8 of all bases in a file, by images."""
    measured = {row["basis"] for row in file["rows"]}
    columns = [
        ("p8", basis, images)
        for images in file["settings"]["images"]
        for basis in FORMS
        if basis in measured
    ]
    rows = angle_rows(file, [[column] for column in columns])
    header = [f"{basis}, {images}" for _, basis, images in columns]
    return block(("layer", "window", *header), rows, [file], command)


def other_angles(results: Results) -> str:
    """The largest errors by group, each on all kinds of images."""
    file = results.latest("angles-p12_p16_p8m", OTHER_ANGLES)
    columns = [
        (group, basis)
        for group in ("p12", "p16", "p8m")
        for basis in ("pixel", "steerable")
    ]
    keys = [
        [(*column, images) for images in file["settings"]["images"]]
        for column in columns
    ]
    header = map(", ".join, columns)
    rows = angle_rows(file, keys)
    return block(("layer", "window", *header), rows, [file], OTHER_ANGLES)


def pose_spread(results: Results) -> str:
    """Errors on p8 of self-attention, beside how far its poses lie apart."""
    file = results.latest("angles-p8_draws_3", ANGLES)
    columns = [[("p8", basis, "smooth")] for basis in FORMS]
    names = ("LiftingSelfAttention2D", "GroupSelfAttention2D")
    rows = angle_rows(file, columns, names, spread=True)
    header = [f"{basis}: error / poses" for basis in FORMS]
    return block(("layer", "window", *header), rows, [file], ANGLES)


def angle_choices(results: Results) -> str:
    """Errors on p8 by the width of rings and of the edge of discs."""
    command = "TORCH_COMPILE_DISABLE=1 " + run("angle_choices.py", "torch")
    file = results.latest("angle_choices", command)
    rows = [
        [
            row["choice"],
            f"{row['value']:.2f}{' (chosen)' if row['chosen'] else ''}",
            row["layer"],
            *(f"{error:.3f}" for error in row["errors"]),
        ]
        for row in file["rows"]
    ]
    sizes = [f"{size} x {size}" for size in file["settings"]["sizes"]]
    header = ("width of", "pixels", "layer", *sizes)
    return block(header, rows, [file], command)


def by_angle(network: File) -> dict[float, File]:
    """The measurements of a network by the angle of the turn."""
    return {row["angle"]: row for row in network["angles"]}


def change_under_quarters(found: dict[float, File]) -> float:
    """The largest change of the logits under quarter turns."""
    return max(found[angle]["change"] for angle in (90, 180, 270))


def network_angles(results: Results) -> str:
    """How much a turn by 45 degrees changes the logits of trained networks."""
    command = run("network_angles.py", "tensorflow")
    file = results.latest("network_angles-convolution", command)
    networks: dict[tuple[str, ...], list[File]] = {}
    kinds = ("basis", "downsampling", "activation")
    for row in file["rows"]:
        found = by_angle(row)
        key = tuple(row[kind] for kind in kinds)
        run_of = {**row, **found[45], "exact": change_under_quarters(found)}
        networks.setdefault(key, []).append(run_of)
    rows = []
    for key, of_seeds in networks.items():
        changes, there_and_back = (
            with_deviation([of_seed[name] for of_seed in of_seeds], ".3f")
            for name in ("change", "there_and_back")
        )
        accuracy, same = (
            with_deviation([100 * of_seed[name] for of_seed in of_seeds], ".1f")
            for name in ("accuracy", "same")
        )
        rows.append(
            [
                *key,
                count(of_seeds[0]["parameters"]),
                ", ".join(str(of_seed["seed"]) for of_seed in of_seeds),
                accuracy,
                changes,
                there_and_back,
                same,
                f"{max(of_seed['exact'] for of_seed in of_seeds):.0e}",
            ]
        )
    header = (
        "filters",
        "downsampling",
        "activation",
        "parameters",
        "seeds",
        "accuracy, %",
        "change, turned by 45°",
        "there and back",
        "same class, %",
        "change under quarter turns",
    )
    return block(header, rows, [file], command)


def shipped_angles(results: Results) -> str:
    """How much turns by multiples of 22.5 degrees change shipped networks."""
    command = run("network_angles.py --shipped", "tensorflow")
    file = results.latest("network_angles-shipped", command)
    rows = []
    for network in file["rows"]:
        found = by_angle(network)
        between = [found[angle] for angle in (22.5, 45, 67.5)]
        rows.append(
            [
                network["network"],
                count(network["parameters"]),
                f"{100 * network['accuracy']:.1f}",
                *(f"{turn['change']:.3f}" for turn in between),
                f"{max(turn['there_and_back'] for turn in between):.3f}",
                f"{100 * min(turn['same'] for turn in between):.1f}",
                f"{change_under_quarters(found):.0e}",
            ]
        )
    header = (
        "network",
        "parameters",
        "accuracy, %",
        "change, turned by 22.5°",
        "45°",
        "67.5°",
        "there and back",
        "same class, %",
        "change under quarter turns",
    )
    return block(header, rows, [file], command)


TABLES = (
    angle_choices,
    angles,
    dilated_angles,
    even_angles,
    whole_image_angles,
    network_angles,
    other_angles,
    pose_spread,
    shipped_angles,
    trained_angles,
)
