"""The table of the layers that a plain network was converted to."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any


@dataclasses.dataclass(frozen=True)
class ConvertedLayer:
    """The conversion of one layer.

    Attributes:
        name: the name of the plain layer.
        kind: the class of the plain layer.
        becomes: the classes of the layers that take its place; empty if the
            layer cannot be converted.
        parameters: how many parameters the layer had, and has now.
        multiply_adds: how many multiplications and additions the layer took
            for one image, and takes now. Only products with kernels count; None
            where the size of the image is unknown.
        note: how the new layer differs from the plain one, beyond the symmetry.
        problem: why the layer cannot be converted, and what to do.
    """

    name: str
    kind: str
    becomes: tuple[str, ...]
    parameters: tuple[int, int]
    multiply_adds: tuple[int | None, int | None]
    note: str = ""
    problem: str = ""


@dataclasses.dataclass(frozen=True)
class ConversionSummary:
    """The conversion of a plain network; `print` shows it as a table.

    Attributes:
        network: the name of the plain network.
        group: the name of the group.
        width: the quantity that the equivariant network has in common with the
            plain one: "parameters", "compute" or "channels".
        layers: one entry for each call of a layer, in the order of computation.
    """

    network: str
    group: str
    width: str
    layers: tuple[ConvertedLayer, ...]

    @property
    def problems(self) -> tuple[ConvertedLayer, ...]:
        """The layers that cannot be converted."""
        return tuple(layer for layer in self.layers if layer.problem)

    @property
    def notes(self) -> tuple[ConvertedLayer, ...]:
        """The layers that differ from the plain ones beyond the symmetry."""
        return tuple(layer for layer in self.layers if layer.note)

    @property
    def parameters(self) -> tuple[int, int]:
        """The number of parameters of the plain and of the new network."""
        before, after = ([x.parameters[n] for x in self.layers] for n in (0, 1))
        return sum(before), sum(after)

    @property
    def multiply_adds(self) -> tuple[int | None, int | None]:
        """Multiply-adds for one image, of the plain and of the new network."""
        before, after = (
            [x.multiply_adds[n] for x in self.layers] for n in (0, 1)
        )
        return _total(before), _total(after)

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            (
                "layer",
                "class",
                "becomes",
                "parameters",
                "now",
                "multiply-adds",
                "now",
            )
        ]
        rows += [
            (
                layer.name,
                layer.kind,
                ", ".join(layer.becomes) or _nothing(layer),
                *map(_short, layer.parameters),
                *map(_short, layer.multiply_adds),
            )
            for layer in self.layers
        ]
        totals = map(_short, self.parameters + self.multiply_adds)
        rows.append(("total", "", "", *totals))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for row in rows:
            cells = [
                cell.rjust(width) if place > 2 else cell.ljust(width)
                for place, (cell, width) in enumerate(
                    zip(row, widths, strict=True)
                )
            ]
            lines.append("  ".join(cells).rstrip())
        lines += [f"'{x.name}': {x.note}" for x in self.notes]
        if self.problems:
            lines += ["", self.refusal()]
        return "\n".join(lines)

    def refusal(self) -> str:
        """The message that lists all layers that cannot be converted."""
        count = len(self.problems)
        lines = [
            f"{count} layer{'s' * (count > 1)} of '{self.network}' cannot be "
            f"converted to '{self.group}':"
        ]
        lines += [
            f"- '{x.name}' ({x.kind}): {x.problem}" for x in self.problems
        ]
        return "\n".join(lines)


def multiply_adds(
    layer: Any, inputs: tuple[Any, ...], outputs: tuple[Any, ...]
) -> int | None:
    """Products with kernels that a layer computes for one image.

    Every entry of a kernel is applied once for each pixel and each pose of the
    output; a transposed convolution applies it at each pixel of its input.

    Args:
        layer: a layer that is built, with channels last.
        inputs: the shape of its input.
        outputs: the shape of its output.

    Returns:
        The number; None if it depends on a size that is unknown.
    """
    kernels = sum(
        _entries(layer, weight)
        for weight in getattr(layer, "weights", ())
        if "kernel" in weight.name
    )
    if not kernels:
        return 0
    transposed = "Transpose" in type(layer).__name__
    places = [
        *(inputs if transposed else outputs)[1:-1][:2],
        *outputs[3:-1],  # the poses
    ]
    if any(n is None for n in places):
        return None
    return kernels * math.prod(places)


def _entries(layer: Any, weight: Any) -> int:
    """The numbers of a kernel that a layer applies."""
    shape = tuple(weight.shape)
    steerable = getattr(layer, "filter_basis", "pixel") == "steerable"
    if steerable and weight.name == "kernel":
        # Pixels take the place of the coefficients.
        shape = (*layer.kernel_size, *shape[1:])
    return math.prod(shape)


def _nothing(layer: ConvertedLayer) -> str:
    """The note in the table for a layer that is not replaced."""
    return "(refused)" if layer.problem else "(not needed)"


def _total(numbers: Iterable[int | None]) -> int | None:
    """The sum, or None if one of the numbers is unknown."""
    known = list(numbers)
    return None if None in known else sum(n for n in known if n is not None)


def _short(number: int | None) -> str:
    """A number for the table; "-" stands for none."""
    if number is None or number == 0:
        return "?" if number is None else "-"
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.1f} {letter}"
    return str(number)
