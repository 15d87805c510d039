"""Products of small matrices, one for each pixel.

The first two axes of a tensor hold a matrix of group elements and channels, and
the others the pixels. A single row or column may stand for all pixels.
Equations name the first two axes: "cm,cg->mg" adds up channels for each pair of
a key element and a query element.

Compilers get the sums written out, which they fuse with what the products are
made of. Without one, PyTorch adds one term after the other in place, or calls a
kernel for all matrices of a product, see `dispatch.form_of_products`. Sums are
in single precision at least.
"""

import functools
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any
from typing import TypeAlias

from keras import ops

from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.numerics import in_full_precision
from keras_equiattn.ops.pairs.dispatch import form_of_products

# Two axes of the matrix, then rows, columns and images, of any sizes.
Matrix: TypeAlias = Float[Tensor, "_ _ _ _ _"]
# Terms of a product: a matrix with one more axis first, which is summed over.
Terms: TypeAlias = Float[Tensor, "_ _ _ _ _ _"]
Pair: TypeAlias = tuple[Matrix, Matrix]
PIXELS = "yxb"


def products(
    equation: str,
    pairs: Sequence[Pair],
    dtype: Any,
    start: Matrix | None = None,
) -> list[Matrix]:
    """The product of each pair, for results that are used more than once.

    Args:
        equation: the equation of the first two axes.
        pairs: the two factors of each product.
        dtype: the dtype of the results.
        start: a matrix that is added to each of them.
    """
    form = form_of_products(pairs[0][0])
    if form == "in_place":
        found = [_in_place(equation, *pair) for pair in pairs]
    elif form == "kernel":
        found = [_einsum(equation, *pair) for pair in pairs]
    else:
        terms = (
            map(in_full_precision, _terms(equation, *pair)) for pair in pairs
        )
        found = backend.sums_together(
            (backend.product(x, y) for x, y in terms), 0
        )
    if start is not None:
        found = [x + ops.cast(start, x.dtype) for x in found]
    return [ops.cast(x, dtype) for x in found]


def add_products(total: Matrix, equation: str, pairs: Sequence[Pair]) -> Matrix:
    """Adds the product of each pair to a sum, which nothing else may use.

    Args:
        total: the sum, in single precision at least.
        equation: the equation of the first two axes.
        pairs: the two factors of each product.
    """
    form = form_of_products(pairs[0][0])
    if form == "in_place":
        for pair in pairs:
            total = _in_place(equation, *pair, total)
        return total
    if form == "kernel":
        return add(total, (_einsum(equation, *pair) for pair in pairs))
    return add(total, [t for pair in pairs for t in _written(equation, *pair)])


def product(equation: str, x: Matrix, y: Matrix, over: str) -> Matrix:
    """A product that is added up over pixels.

    Args:
        equation: the equation of the first two axes.
        x, y: the matrices.
        over: the axes of the pixels that are added up: rows `y`, columns `x`
            and images `b`. They keep size one.
    """
    form = form_of_products(x)
    if form == "kernel":
        return _einsum(equation, x, y, over)
    if form == "in_place":
        total = _in_place(equation, x, y)
    else:
        terms = _written(equation, x, y)
        total = sum(terms[1:], terms[0])
    axes = [2 + PIXELS.index(axis) for axis in over]
    return ops.sum(total, axis=axes, keepdims=True) if over else total


def add(total: Matrix, terms: Iterable[Matrix]) -> Matrix:
    """Adds tensors to a sum, which nothing else may use."""
    return functools.reduce(backend.added, terms, total)


def _written(equation: str, x: Matrix, y: Matrix) -> list[Matrix]:
    """The terms of a product, which XLA vectorises on CPUs.

    It does not vectorise the reduction of a single product.
    """
    pairs = _factors(equation, x, y)
    return [in_full_precision(a) * in_full_precision(b) for a, b in pairs]


def _in_place(
    equation: str, x: Matrix, y: Matrix, total: Matrix | None = None
) -> Matrix:
    """A product whose terms are added to the total, or to the first of them."""
    for a, b in _factors(equation, x, y):
        if total is None:
            total = in_full_precision(a) * in_full_precision(b)
        else:
            total = backend.add_product(total, a, b)
    return total


def _factors(
    equation: str, x: Matrix, y: Matrix
) -> Iterable[tuple[Matrix, Matrix]]:
    """Both factors of each term."""
    first, second, inner, found = _axes(equation)
    return zip(
        _cut(x, first, inner, found),
        _cut(y, second, inner, found),
        strict=True,
    )


def _axes(equation: str) -> tuple[str, str, str, str]:
    """The axes of both factors, the summed axis, and those of the result."""
    factors, found = equation.split("->")
    first, second = factors.split(",")
    (inner,) = set(first) & set(second)
    return first, second, inner, found


def _cut(x: Matrix, names: str, inner: str, found: str) -> list[Matrix]:
    """The slices of a factor along the axis that is added up.

    They have an axis of size one for what the result has from the other factor.
    """
    missing = 1 if found[0] in names else 0
    slices = [
        x[n] if names[0] == inner else x[:, n]
        for n in range(x.shape[names.index(inner)])
    ]
    return [ops.expand_dims(s, missing) for s in slices]


def _einsum(equation: str, x: Matrix, y: Matrix, over: str = "") -> Matrix:
    """One product, by the kernel of the backend."""
    first, second, _, found = _axes(equation)
    kept = "".join(axis for axis in PIXELS if axis not in over)
    z = ops.einsum(f"{first}{PIXELS},{second}{PIXELS}->{found}{kept}", x, y)
    return ops.expand_dims(z, [2 + PIXELS.index(axis) for axis in over])


def _terms(equation: str, x: Matrix, y: Matrix) -> tuple[Terms, Terms]:
    """Two tensors whose product has the terms along its first axis."""
    first, second, inner, found = _axes(equation)
    return (
        _aligned(x, first, inner + found),
        _aligned(y, second, inner + found),
    )


def _aligned(x: Matrix, names: str, wanted: str) -> Terms:
    """Adds an axis of size one where the factor lacks a wanted name."""
    if names[0] != wanted[0]:
        x, names = ops.swapaxes(x, 0, 1), names[::-1]
    return x[:, None] if names[1] == wanted[2] else x[:, :, None]
