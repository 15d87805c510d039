"""Fast Fourier transforms over the elements of a planar group.

A transform is a list of sparse matrices, which are applied one after the other.
Nearly all of their entries are 0, 1 or -1, so that a step is some additions.
The transposed matrices in reverse order are the transposed transform.
"""

import functools
from collections.abc import Iterable
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from keras_equiattn.groups import Group
from keras_equiattn.ops._types import Shaped
from keras_equiattn.ops._types import Tensor


class Wave(NamedTuple):
    """A wave over the group: factors of the elements before they are added up.

    Attributes:
        mirrored: 0 where an element and its mirror image have the same factor,
            1 where they have opposite ones.
        kind: "cos" or "sin".
        frequency: waves in a whole turn.
        sign: 1 or -1, the factor of the sum.
    """

    mirrored: int
    kind: str
    frequency: int
    sign: int = 1


def wave_values(
    kind: str, frequency: int, turns: np.ndarray | int, rotations: int
) -> np.ndarray:
    """The wave at some turns, exact where it is 0, 1 or -1."""
    angle = 2 * np.pi * (frequency * np.asarray(turns) % rotations) / rotations
    values = np.cos(angle) if kind == "cos" else np.sin(angle)
    rounded = np.rint(values)
    near = np.abs(values - rounded) < 1e-12
    return np.where(near, rounded, values) + 0.0


@functools.cache
def transform(group: Group, waves: tuple[Wave, ...]) -> tuple[np.ndarray, ...]:
    """The matrices that take the elements of a group to sums along waves.

    Args:
        group: the group, whose second half of the elements are mirrored ones.
        waves: all waves over the group, in the order that is wanted.

    Returns:
        Matrices `(order, order)`, the first to be applied first.
    """
    rotations = group.rotations
    steps, found = _over_turns(rotations)
    halves = group.order // rotations
    if halves == 2:
        steps = [_butterfly(rotations), *_side_by_side(steps, steps)]
    index = [
        wave.mirrored * rotations + found.index((wave.kind, wave.frequency))
        for wave in waves
    ]
    signs = np.array([[wave.sign] for wave in waves])
    steps[-1] = signs * steps[-1][index] + 0.0
    for step in steps:
        step.setflags(write=False)
    return tuple(steps)


def apply(
    steps: Sequence[np.ndarray], x: Sequence[Shaped[Tensor, "..."]]
) -> list[Shaped[Tensor, "..."]]:
    """Applies sparse matrices to a list of tensors of equal shape."""
    found = list(x)
    for step in steps:
        found = [_combination(row, found) for row in step]
    return found


def transposed(steps: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The steps of the transposed transform."""
    return [step.T for step in reversed(steps)]


def _combination(
    factors: np.ndarray, x: Sequence[Shaped[Tensor, "..."]]
) -> Shaped[Tensor, "..."]:
    """A sum of a few of the tensors, with factors."""
    # Terms that are added come first, so that few signs are changed.
    places = np.flatnonzero(factors).tolist()
    places.sort(key=lambda place: factors[place] < 0)
    total = None
    for place in places:
        term, factor = x[place], float(factors[place])
        if total is None:
            total = term if factor == 1 else factor * term
        elif abs(factor) == 1:
            total = total + term if factor > 0 else total - term
        else:
            total = total + factor * term
    return total


# The steps of a transform over turns, and the waves that it finds.
_Transform = tuple[list[np.ndarray], list[tuple[str, int]]]


def _over_turns(rotations: int) -> _Transform:
    """The transform over all turns, of which there are 1, 3 or an even number.

    Opposite turns are added for the even frequencies, which is a transform of
    half the size, and subtracted for the odd ones.
    """
    if rotations % 2:
        frequencies = range(rotations // 2 + 1)
        waves = _waves(frequencies, rotations)
        return [_table(waves, np.arange(rotations), rotations)], waves
    half = rotations // 2
    even, even_waves = _over_turns(half)
    odd, odd_waves = _over_half_a_turn(half)
    waves = [(kind, 2 * k) for kind, k in even_waves] + odd_waves
    return [_butterfly(half), *_side_by_side(even, odd)], waves


def _over_half_a_turn(half: int) -> _Transform:
    """The odd frequencies of what changes its sign after half a turn."""
    rotations, turns = 2 * half, np.arange(half)
    frequencies = range(1, half + 1, 2)
    waves = _waves(frequencies, rotations)
    if half % 2 or half == 2:
        return [_table(waves, turns, rotations)], waves
    # Turns `r` and `half - r` have opposite cosines, and the same sine.
    middle = half // 2
    fold = np.zeros((half, half))
    for r in range(middle):
        fold[r, [r, -r]] = 1, -1
        fold[middle + r, [r + 1, half - r - 1]] = 1
    fold[0] = turns == 0
    # Waves `k` and `half - k` have the same cosines at even turns, and opposite
    # ones at odd turns; sines have it the other way.
    places = {"cos": np.arange(middle), "sin": np.arange(1, middle + 1)}
    split, join = np.zeros((half, half)), np.zeros((half, half))
    row = 0
    for k in (k for k in frequencies if k <= middle):
        for kind, parity, opposite in (
            ("cos", 0, 1),
            ("cos", 1, -1),
            ("sin", 1, 1),
            ("sin", 0, -1),
        ):
            values = wave_values(kind, k, places[kind], rotations)
            values = values * (places[kind] % 2 == parity)
            if not values.any():
                continue
            first = 0 if kind == "cos" else middle
            split[row, first : first + middle] = values
            join[waves.index((kind, k)), row] = 1
            if half - k != k:
                join[waves.index((kind, half - k)), row] = opposite
            row += 1
    return [fold, split, join], waves


def _waves(frequencies: Iterable[int], rotations: int) -> list[tuple[str, int]]:
    """Cosines and sines of these frequencies, but for sines that are zero."""
    return [
        (kind, k)
        for k in frequencies
        for kind in ("cos", "sin")
        if kind == "cos" or 2 * k not in (0, rotations)
    ]


def _table(
    waves: list[tuple[str, int]], turns: np.ndarray, rotations: int
) -> np.ndarray:
    """`(waves, turns)`: the values of the waves."""
    rows = [wave_values(*wave, turns, rotations) for wave in waves]
    return np.stack(rows)


def _butterfly(half: int) -> np.ndarray:
    """The sums and the differences of a first and a second half."""
    return np.kron([[1, 1], [1, -1]], np.eye(half))


def _side_by_side(
    first: list[np.ndarray], second: list[np.ndarray]
) -> list[np.ndarray]:
    """The steps of a transform of a first half, and of one of a second."""
    found = []
    for a, b in zip_longest(first, second):
        a = np.eye(len(first[0])) if a is None else a
        b = np.eye(len(second[0])) if b is None else b
        zero = np.zeros((len(a), len(b)))
        found.append(np.block([[a, zero], [zero.T, b]]))
    return found
