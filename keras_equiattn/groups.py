"""Planar symmetry groups: rotations by 360/n degrees, with or without mirrors.

The module needs NumPy alone. A `Group` is a set of tables: how its elements act
on an offset in the plane, and how they multiply. Every layer takes its group by
name::

    >>> p4m = groups.get("p4m")
    >>> p4m.order, p4m.acts_on_grid
    (8, True)
    >>> p4m.matrices[1] @ (0, 1)    # a quarter turn moves "right" to "up"
    array([-1.,  0.])
"""

import dataclasses
import functools
import re

import numpy as np

from keras_equiattn import _checks

ROTATIONS = (1, 2, 4, 8, 12, 16)


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """A point group of the plane, as tables.

    Elements are numbered. On offsets `(row, column)`, element `h < rotations`
    is the rotation by `360 h / rotations` degrees, counter-clockwise on the
    screen (what `np.rot90` does for a quarter turn). In a group with mirrors,
    element `rotations + h` first mirrors the columns, then rotates by `h`
    steps. Element 0 is the identity.

    Attributes:
        name: canonical name, for example `"p4m"`.
        rotations: number of rotations.
        mirrors: whether the group holds mirrors.
        order: number of elements.
        matrices: `(order, 2, 2)` float64, the elements as matrices on offsets
            `(row, column)`; exact integers for quarter turns.
        product_table: `(order, order)`, `product_table[g, h]` is the element
            `g h` (first `h`, then `g`).
        inverse: `(order,)`, the inverse of each element.
        acts_on_grid: whether every element maps the pixel grid onto itself.
    """

    name: str
    rotations: int
    mirrors: bool
    order: int
    matrices: np.ndarray
    product_table: np.ndarray
    inverse: np.ndarray

    @property
    def relative_table(self) -> np.ndarray:
        """`(order, order)`: `relative_table[h, j]` is the element `h^-1 j`."""
        return self.product_table[self.inverse].astype(np.int32)

    @property
    def acts_on_grid(self) -> bool:
        return self.rotations in (1, 2, 4)

    @property
    def quarter_turns(self) -> bool:
        """Whether rotations by 90 degrees belong to the group."""
        return self.rotations % 4 == 0

    @property
    def grid_elements(self) -> np.ndarray:
        """The elements that map the pixel grid onto itself, as indices."""
        rounded = np.rint(self.matrices)
        exact = (self.matrices == rounded).all(axis=(1, 2))
        return np.flatnonzero(exact)

    def relative(self, element: int | np.integer) -> np.ndarray:
        """`relative(g)[h]` is `g^-1 h`: where `L_g[f](x, h)` reads `f`."""
        return self.product_table[self.inverse[element]]

    def check_element(self, element: int | np.integer) -> int:
        """Returns `element` as an int, or raises `ValueError`."""
        if (
            isinstance(element, bool)
            or not isinstance(element, (int, np.integer))
            or not 0 <= element < self.order
        ):
            raise ValueError(
                f"`element` must be an integer from 0 to {self.order - 1} "
                f"for group '{self.name}'. Received: {element!r}"
            )
        return int(element)

    # A group is its name: the tables follow from it.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Group) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"Group({self.name!r}, order={self.order})"

    # Tables are read-only and shared, copies included.
    def __deepcopy__(self, memo: object) -> "Group":
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return get, (self.name,)


def names() -> list[str]:
    """Names of all groups, smaller rotation numbers first."""
    return [_name(n, mirror) for n in ROTATIONS for mirror in ("", "m")]


def _name(rotations: int, mirror: str) -> str:
    return f"{'z2' if rotations == 1 else f'p{rotations}'}{mirror}"


# The names of the point groups elsewhere: cyclic, and dihedral with mirrors.
ALIASES = {
    f"{letter}{n}": _name(n, mirror)
    for n in ROTATIONS
    for letter, mirror in (("c", ""), ("d", "m"))
}


def get(identifier: "str | Group") -> Group:
    """Returns the group of that name; a `Group` passes through.

    Args:
        identifier: a `Group`, or one of `names()`: `"z2"` (translations
            only), `"z2m"` (and the mirror of columns), `"p{n}"` (and `n`
            rotations), `"p{n}m"` (and their mirrors). `"c{n}"` is another
            name of `"p{n}"`, `"d{n}"` one of `"p{n}m"`; upper and lower case
            are the same.

    Raises:
        ValueError: for a name that is not in `names()`.
        TypeError: for anything that is neither a name nor a `Group`.
    """
    if isinstance(identifier, Group):
        return identifier
    if not isinstance(identifier, str):
        raise TypeError(
            "A group is given by name or as a `Group`. "
            f"Received: {identifier!r} (of type {type(identifier).__name__})"
        )
    name = identifier.strip().lower()
    name = ALIASES.get(name, name)
    _checks.known_name(name, "group", names())
    return _make(name)


@functools.cache
def _make(name: str) -> Group:
    rotations = 1 if name.startswith("z2") else int(re.findall(r"\d+", name)[0])
    mirrors = name.endswith("m")
    # Rotations first, then the mirrored ones: element = flip * rotations + h.
    flip, turn = np.divmod(np.arange((1 + mirrors) * rotations), rotations)

    angle = 2 * np.pi * turn / rotations
    cos, sin = np.cos(angle), np.sin(angle)
    rotation = np.stack([cos, -sin, sin, cos], axis=-1).reshape(-1, 2, 2)
    sign = np.where(flip, -1, 1)
    matrices = rotation.copy()
    matrices[:, :, 1] *= sign[:, None]  # R^h diag(1, -1 where mirrored)
    # Quarter turns are exact integers, not 6e-17.
    rounded = np.rint(matrices)
    matrices = np.where(np.abs(matrices - rounded) < 1e-12, rounded, matrices)
    matrices += 0.0  # no negative zeros

    # (R^a M^s)(R^b M^t) = R^(a + (-1)^s b) M^(s + t)
    product_turn = (turn[:, None] + sign[:, None] * turn) % rotations
    product_table = (flip[:, None] ^ flip) * rotations + product_turn
    inverse = np.argmin(product_table, axis=1)  # the identity is 0

    for table in (matrices, product_table, inverse):
        table.setflags(write=False)
    return Group(
        name=name,
        rotations=rotations,
        mirrors=mirrors,
        order=len(turn),
        matrices=matrices,
        product_table=product_table,
        inverse=inverse,
    )
