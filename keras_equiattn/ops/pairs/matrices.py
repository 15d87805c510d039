"""Products of small matrices, one for each pixel.

A matrix of group elements and channels stands on the first two axes, and pixels
on the others, where one row or column may stand for all pixels.
Equations name the first two axes: "cm,cg->mg" adds up channels for each pair of
a key element and a query element.

Compilers get the sums written out, which they fuse with what the products are
made of. Without one, PyTorch has a kernel for matrices, which reads and writes
each number once. Sums are in single precision at least.
"""

from collections.abc import Sequence
from typing import Any
from typing import TypeAlias

from keras import ops

from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.numerics import in_full_precision

# Two axes of the matrix, then rows, columns and images, of any sizes.
Matrix: TypeAlias = Float[Tensor, "_ _ _ _ _"]
Pair: TypeAlias = tuple[Matrix, Matrix]
PIXELS = "yxb"


def products(
    equation: str,
    pairs: Sequence[Pair],
    dtype: Any,
    start: Matrix | None = None,
) -> list[Matrix]:
    """The product of each pair, for use by several others.

    Args:
        equation: of the first two axes.
        pairs: two matrices each.
        dtype: of the results.
        start: what to add to each of them.
    """
    if backend.find_target(*pairs[0]).compiler is None:
        found = [_einsum(equation, *pair) for pair in pairs]
    else:
        terms = (_terms(equation, *pair) for pair in pairs)
        found = backend.sums_together(
            (backend.product(x, y) for x, y in terms), 0
        )
    if start is not None:
        found = [x + start for x in found]
    return [ops.cast(x, dtype) for x in found]


def product(
    equation: str,
    pairs: Sequence[Pair],
    over: str = "",
) -> Matrix:
    """The sum of the products of all pairs.

    Args:
        equation: of the first two axes.
        pairs: two matrices each.
        over: of the pixels' rows `y`, columns `x` and images `b` those that
            are added up; they keep an axis of size one.
    """
    if backend.find_target(*pairs[0]).compiler is None:
        total: Any = in_full_precision(_einsum(equation, *pairs[0], over))
        for pair in pairs[1:]:
            total += _einsum(equation, *pair, over)
        return total
    # Written out: XLA for CPUs makes no vectors of a reduction.
    terms = [
        one * other
        for pair in pairs
        for one, other in zip(
            *map(ops.unstack, _terms(equation, *pair)), strict=True
        )
    ]
    total = sum(terms[1:], terms[0])
    axes = [2 + PIXELS.index(axis) for axis in over]
    return ops.sum(total, axis=axes, keepdims=True) if over else total


def _einsum(equation: str, x: Tensor, y: Tensor, over: str = "") -> Tensor:
    """One product, by PyTorch."""
    import torch

    names, found = equation.split("->")
    first, second = (name + PIXELS for name in names.split(","))
    kept = "".join(axis for axis in PIXELS if axis not in over)
    z = torch.einsum(f"{first},{second}->{found}{kept}", x, y)
    for axis in over:
        z = z.unsqueeze(2 + PIXELS.index(axis))
    return z


def _terms(equation: str, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors whose product has what is added up along the first axis."""
    names, found = equation.split("->")
    first, second = names.split(",")
    (inner,) = set(first) & set(second)
    return (
        _aligned(x, first, inner + found),
        _aligned(y, second, inner + found),
    )


def _aligned(x: Tensor, names: str, wanted: str) -> Tensor:
    """With one more axis, of size one, where a name is missing."""
    if names[0] != wanted[0]:
        x, names = ops.swapaxes(x, 0, 1), names[::-1]
    return x[:, None] if names[1] == wanted[2] else x[:, :, None]
