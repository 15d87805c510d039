"""Bytes and kernels of a program that XLA has compiled, from its text.

Each instruction moves its operands and its result, those in the body of a loop
as often as the loop runs. A fusion is one instruction: what is computed within
it moves nothing. Where it reads slices of an operand, their bytes count, up to
those of the whole operand; where it writes a slice of its result, only the
slice counts.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "s16": 2,
    "u16": 2,
    "f16": 2,
    "bf16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
    "s64": 8,
    "u64": 8,
    "f64": 8,
}
# These only name what is there already, or are computed where they are used.
FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "iota",
    "partition-id",
}
SAME = ("bitcast", "reshape", "copy")
ARRAY = re.compile(rf"\b({'|'.join(BYTES)})\[([\d,]*)\]")
HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
LINE = re.compile(
    r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$"
)


class Moved(NamedTuple):
    """What a kernel moves in all its runs.

    Attributes:
        bytes: of operands and results.
        runs: how often it runs.
        what: the instruction, its result and where it comes from.
    """

    bytes: int
    runs: int
    what: str


class Traffic(NamedTuple):
    """What a program moves, and how many kernels it runs."""

    bytes: int
    kernels: int
    each: list[Moved]


class Instruction(NamedTuple):
    """One line of a computation.

    Attributes:
        name: of the instruction.
        kind: the shape of its result, as text.
        operation: what it does.
        rest: its operands and attributes, as text.
    """

    name: str
    kind: str
    operation: str
    rest: str

    @property
    def operands(self) -> list[str]:
        """Names of the operands."""
        depth = 0
        for end, sign in enumerate(self.rest):
            depth += (sign == "(") - (sign == ")")
            if depth < 0:
                return re.findall(r"%([\w.\-]+)", self.rest[:end])
        return []

    def called(self, attribute: str) -> list[str]:
        """Names of the computations under an attribute."""
        return re.findall(rf"{attribute}=%?([\w.\-]+)", self.rest)


def count(text: str) -> Traffic:
    """The traffic of a compiled program.

    Args:
        text: the program after all passes of XLA.
    """
    return _Program(text).traffic()


def size_of(kind: str) -> int:
    """Bytes of an array, or of all arrays of a tuple."""
    return sum(
        BYTES[dtype] * math.prod(int(n) for n in sizes.split(",") if n)
        for dtype, sizes in ARRAY.findall(kind)
    )


class _Program:
    def __init__(self, text: str) -> None:
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        body: list[Instruction] = []
        for line in text.splitlines():
            if head := HEAD.match(line):
                body = self.computations.setdefault(head[2], [])
                self.entry = head[2] if head[1] else self.entry
            elif found := LINE.match(line):
                body.append(Instruction(*found.groups()))

    def traffic(self) -> Traffic:
        each = list(self._each(self.entry, 1))
        return Traffic(
            sum(one.bytes for one in each), sum(one.runs for one in each), each
        )

    def _each(self, name: str, times: int) -> Iterator[Moved]:
        """The kernels of a computation that runs so many times."""
        body = self.computations[name]
        kinds = {one.name: one.kind for one in body}
        for one in body:
            if one.operation in FREE:
                continue
            if one.operation in ("while", "call", "conditional"):
                for inner, trips in self._inside(one):
                    yield from self._each(inner, times * trips)
                continue
            origin = re.search(r'op_name="([^"]*)"', one.rest)
            path = origin[1].split("/")[-3:] if origin else []
            what = " ".join([one.operation, one.kind, "/".join(path)])
            yield Moved(times * self._moved(one, kinds), times, what)

    def _inside(self, one: Instruction) -> list[tuple[str, int]]:
        """What an instruction runs, and how often."""
        if one.operation != "while":
            names = one.called("to_apply")
            names += re.findall(r"%([\w.\-]+)", _braces(one.rest))
            return [(name, 1) for name in names]
        trips = re.search(r'known_trip_count":\{"n":"(\d+)"', one.rest)
        (condition,) = one.called("condition")
        count = int(trips[1]) if trips else self._limit(condition)
        return [(one.called("body")[0], count)]

    def _limit(self, condition: str) -> int:
        """The number that a counter from zero is compared with.

        TensorFlow compares it twice, and XLA does not count the trips then.
        """
        texts = [condition]
        for one in self.computations[condition]:
            texts += one.called("calls")
        limits = {
            int(one.rest.split(")")[0])
            for text in texts
            for one in self.computations[text]
            if one.operation == "constant" and one.kind == "s32[]"
        }
        if len(limits) != 1:
            raise ValueError(
                f"The number of trips of the loop with {condition} is unknown."
            )
        return limits.pop()

    def _moved(self, one: Instruction, kinds: dict[str, str]) -> int:
        operands = [size_of(kinds.get(name, "")) for name in one.operands]
        if one.operation in ("slice", "dynamic-slice"):
            return 2 * size_of(one.kind)
        if one.operation == "dynamic-update-slice":
            return 2 * operands[1]
        if one.operation != "fusion":
            return size_of(one.kind) + sum(operands)
        (name,) = one.called("calls")
        read = self._read(name)
        return self._written(name, one.kind) + sum(
            read.get(i, size) for i, size in enumerate(operands)
        )

    def _read(self, name: str) -> dict[int, int]:
        """Bytes that a fused computation reads of each of its parameters."""
        body = self.computations[name]
        found = {}
        for one in body:
            if one.operation != "parameter":
                continue
            names = {one.name}  # of the parameter, also in another shape
            read, full = 0, size_of(one.kind)
            for user in body:
                used = [i for i, x in enumerate(user.operands) if x in names]
                if not used:
                    continue
                if user.operation in ("bitcast", "reshape"):
                    names.add(user.name)
                elif user.operation in ("slice", "dynamic-slice", "gather"):
                    read += size_of(user.kind) if 0 in used else full
                elif user.operation == "dynamic-update-slice" and 0 in used:
                    pass  # what it does not write is left where it is
                elif user.operation == "fusion":
                    inner = self._read(user.called("calls")[0])
                    read += sum(inner.get(i, full) for i in used)
                else:
                    read += full
            found[int(one.rest.split(")")[0])] = min(full, read)
        return found

    def _written(self, name: str, kind: str) -> int:
        """Bytes that a fused computation writes."""
        by_name = {one.name: one for one in self.computations[name]}
        root = self.computations[name][-1]
        while root.operation in SAME and root.operands[0] in by_name:
            root = by_name[root.operands[0]]
        if root.operation == "dynamic-update-slice":
            return size_of(by_name[root.operands[1]].kind)
        return size_of(kind)


def _braces(rest: str) -> str:
    """What `branch_computations={...}` lists, if it is there."""
    found = re.search(r"branch_computations=\{([^}]*)\}", rest)
    return found[1] if found else ""
