"""Irreducible representations of planar groups, and the basis that they make.

A feature map has a number for each group element. Written as a sum of waves
over the group, it has a coefficient for each wave instead. The group mixes few
of the coefficients with each other, and so does every linear map that commutes
with the group: its matrix falls into small blocks.
"""

import functools
from typing import NamedTuple

import numpy as np

from keras_equiattn import groups
from keras_equiattn.groups import Group
from keras_equiattn.ops.group.fourier import Wave
from keras_equiattn.ops.group.fourier import wave_values


class Irrep(NamedTuple):
    """An irreducible representation by real matrices.

    Attributes:
        frequency: how often it turns while the image turns once. At half the
            number of rotations it changes its sign from turn to turn.
        sign: the factor of the mirror in matrices with one row, 1 or -1; 1 for
            larger matrices.
        matrices: `(order, dimension, dimension)`, orthogonal, one for each
            element of the group.
        copies: its multiplicity in a feature map on the group: as many copies
            as it has rows, so two of the vectors of p4m. On a group without
            mirrors, such as p4, there is one copy of the vectors.
    """

    frequency: int
    sign: int
    matrices: np.ndarray
    copies: int

    @property
    def dimension(self) -> int:
        """Rows and columns of the matrices."""
        return int(self.matrices.shape[1])

    @property
    def turns_alone(self) -> bool:
        """Whether its matrices turn a plane, and none of them mirrors it."""
        return self.copies < self.dimension


class Block(NamedTuple):
    """Some of the sums along waves, which linear maps mix among themselves.

    Attributes:
        first: the index of its first wave in `waves`.
        rows: how many sets of `size` waves the same matrix mixes, each by
            itself: two sets of two for the vectors of p4m, one for those of p4.
        size: how many waves are mixed, one or two.
        mixing: `(size, size, order)`: the weight of each element of a kernel
            in the matrix, from an input to an output.
        scale: the factor between products of sums and products of feature maps.
    """

    first: int
    rows: int
    size: int
    mixing: np.ndarray
    scale: float


def irreps(group: str | Group) -> tuple[Irrep, ...]:
    """The irreducible representations of a group, by real matrices.

    Args:
        group: a group or its name.

    Returns:
        All inequivalent ones, in the order of their frequencies.

    Raises:
        ValueError: for an unknown group.

    Example:
        >>> tuple(irrep.dimension for irrep in irreps("p4m"))
        (1, 1, 2, 1, 1)
    """
    return _irreps(groups.get(group))


@functools.cache
def _irreps(group: Group) -> tuple[Irrep, ...]:
    """`irreps` of a group."""
    rotations = group.rotations
    flips, turns = np.divmod(np.arange(group.order), rotations)
    found = []
    for frequency in range(rotations // 2 + 1):
        cos, sin = (
            wave_values(kind, frequency, turns, rotations)
            for kind in ("cos", "sin")
        )
        if 2 * frequency in (0, rotations):
            for sign in (1, -1)[: 1 + group.mirrors]:
                values = cos * sign**flips
                found.append(
                    Irrep(frequency, sign, _frozen(values[:, None, None]), 1)
                )
        else:
            matrices = np.stack([cos, -sin, sin, cos], -1).reshape(-1, 2, 2)
            matrices[:, :, 1] *= (-1.0) ** flips[:, None]
            copies = 1 + group.mirrors
            found.append(Irrep(frequency, 1, _frozen(matrices), copies))
    return tuple(found)


def regular_basis(group: str | Group) -> np.ndarray:
    """The waves over a group, which are a basis of its feature maps.

    Args:
        group: a group or its name.

    Returns:
        `(order, order)`, orthogonal: each row is a wave of unit norm. The
        waves of an `Irrep` follow each other. Each is an entry of its matrices,
        `matrices[:, a, b]` divided by its norm; `b` changes faster than `a`.
        Element `g` of the group acts on the coefficients of all `a` with the
        same `b` by the matrix of `g`.

    Raises:
        ValueError: for an unknown group.

    Example:
        >>> (2 * regular_basis("p4")[[0, 3]]).round().astype(int).tolist()
        [[1, 1, 1, 1], [1, -1, 1, -1]]

    References:
        - Serre, Linear Representations of Finite Groups, 1977, section 2.4:
          what the regular representation holds
    """
    return _regular_basis(groups.get(group))


@functools.cache
def _regular_basis(group: Group) -> np.ndarray:
    """`regular_basis` of a group."""
    rows = []
    for irrep in irreps(group):
        waves = irrep.matrices[:, :, : irrep.copies].reshape(group.order, -1).T
        rows.append(waves / np.linalg.norm(waves, axis=1, keepdims=True))
    return _frozen(np.concatenate(rows))


@functools.cache
def blocks(group: Group) -> tuple[Block, ...]:
    """The blocks of a linear map on a group, which mix sums along `waves`.

    With `x` the sums in a row of a block, `y_b = sum_a x_a M_ab`, and `M_ab =
    sum_s mixing_abs W(s)` for the kernel `W` of `y(p) = sum_r x(r) W(p^-1 r)`.
    For two feature maps `x` and `y`, `sum_h x(h) y(h)` is the sum over all
    waves of `scale` times the product of their sums, so that the transposed
    transform of `scale` times the sums leads back to a feature map.
    """
    found: list[Block] = []
    first = 0
    for irrep in irreps(group):
        # The columns of its matrices are mixed. Turns alone have one column,
        # and commute.
        axes = (1, 2, 0) if irrep.turns_alone else (2, 1, 0)
        found.append(
            Block(
                first,
                1 if irrep.turns_alone else irrep.dimension,
                irrep.dimension,
                _frozen(irrep.matrices.transpose(axes)),
                irrep.dimension / group.order,
            )
        )
        first += irrep.dimension * irrep.copies
    return tuple(found)


@functools.cache
def waves(group: Group) -> tuple[Wave, ...]:
    """The rows of `regular_basis`, up to their norms."""
    found = []
    for irrep in irreps(group):
        k = irrep.frequency
        if irrep.dimension == 1:
            found.append(Wave(int(irrep.sign < 0), "cos", k))
        elif irrep.turns_alone:
            found += [Wave(0, "cos", k), Wave(0, "sin", k)]
        else:
            found += [Wave(0, "cos", k), Wave(1, "sin", k, -1)]
            found += [Wave(0, "sin", k), Wave(1, "cos", k)]
    return tuple(found)


def _frozen(table: np.ndarray) -> np.ndarray:
    """The table in one piece of memory that nobody can write to."""
    table = np.ascontiguousarray(table)
    table.setflags(write=False)
    return table
