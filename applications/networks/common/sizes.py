"""Which image sizes a network takes."""

import dataclasses
import itertools
from collections.abc import Callable
from collections.abc import Sequence
from typing import TypeAlias

from keras_equiattn import groups
from keras_equiattn.groups import Group
from keras_equiattn.ops.exactness import is_exact
from keras_equiattn.ops.geometry import output_size


@dataclasses.dataclass(frozen=True)
class Window:
    """A square window of a convolution or of pooling."""

    size: int
    strides: int = 1
    padding: str = "valid"


# The windows that maps go through, given whether downsampling is exact.
Windows: TypeAlias = Callable[[bool], Sequence[Window]]

# The largest size that a message may suggest.
LARGEST = 2**12


def check(
    network: str,
    input_shape: tuple[int, int, int],
    group: Group,
    windows: Windows,
    exact: bool,
    choices: tuple[str, str],
) -> None:
    """Raises `ValueError` unless images can go through a network.

    Args:
        network: the name of the network in the message.
        input_shape: shape of the images.
        group: the group of the network.
        windows: the windows of the network, first to last; layers that change
            no size and are always exact may be left out.
        exact: whether downsampling must be exact.
        choices: the arguments by which the network chooses exact downsampling,
            or not.
    """
    size = input_shape[:2]
    if _passes(size, group, windows, exact):
        return
    where = f"`input_shape` of {network} with group '{group.name}' and "
    where += choices[not exact]
    accepted = _accepted(max(size), group, windows, exact)
    if not accepted:
        widest = max(window.size for window in windows(exact))
        raise ValueError(
            f"{where}: no image of up to {LARGEST} x {LARGEST} pixels fits its "
            f"windows or crops, which cut off up to {widest // 2} pixels at "
            f"every border at once. Received: {input_shape}"
        )
    examples = ", ".join(f"{n} x {n}" for n in accepted)
    reason = "on smaller ones its windows do not fit"
    if exact and group.order > 1:
        reason = (
            "on others its windows do not fit or are not exactly equivariant"
        )
    message = (
        f"{where} must have a size such as {examples}: {reason}. "
        f"Received: {input_shape}"
    )
    if exact and group.order > 1 and _passes(size, group, windows, False):
        message += f". {choices[1]} takes this size and is approximate."
    raise ValueError(message)


def _accepted(
    around: int, group: Group, windows: Windows, exact: bool
) -> list[int]:
    """Up to four sizes near a given one, or else the smallest ones beyond."""
    near = sorted(range(1, around + 129), key=lambda n: abs(n - around))
    larger = range(around + 129, LARGEST + 1)
    for sizes in (near, larger):
        fitting = (n for n in sizes if _passes((n, n), group, windows, exact))
        if found := sorted(itertools.islice(fitting, 4)):
            return found
    return []


def _passes(
    size: tuple[int, ...], group: Group, windows: Windows, exact: bool
) -> bool:
    """Whether all windows fit in turn, and exactly where that is required."""
    if not exact:
        group = groups.get("z2")  # requires only that they fit
    for window in windows(exact):
        options = (window.size, window.strides, 1, window.padding)
        if not is_exact(group, size, *options):
            return False
        size = tuple(output_size(n, *options) or 0 for n in size)
    return True
