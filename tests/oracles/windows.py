"""Attention over windows with keys and values that are transformed."""

import math

import numpy as np

from oracles.turns import order
from oracles.turns import relative
from oracles.turns import turn


def window_weights(rows, columns, shape="square"):
    """`(rows, columns)`: how much neighbours count, at most one."""
    weights = np.ones((rows, columns))
    if shape == "disc":
        edge = min(2, rows / 2)
        for i, j in np.ndindex(rows, columns):
            radius = math.hypot(i - rows // 2, j - columns // 2)
            outside = radius - (rows / 2 - edge)  # of the flat part
            if outside >= edge:
                weights[i, j] = 0
            elif outside > 0:
                weights[i, j] = math.cos(math.pi / 2 * outside / edge) ** 2
    return weights


def affine_attention(
    query,
    keys,
    values,
    of_keys,
    of_values,
    group,
    heads,
    scale,
    border,
    shape="square",
):
    """Attention over windows with keys and values that are transformed.

    query, keys, values (b, y, x, order, c); of_keys, of_values: psi (order, k,
    l, c) and beta (k, l, c), psi None for the element itself as it is.
    """
    rows, columns = of_keys[1].shape[:2]
    counts = window_weights(rows, columns, shape).ravel()
    height, width = keys.shape[1:3]
    pads = [(0, 0), (rows // 2,) * 2, (columns // 2,) * 2, (0, 0), (0, 0)]
    mode = {"mode": "reflect"} if border == "reflect" else {}
    keys, values = np.pad(keys, pads, **mode), np.pad(values, pads, **mode)
    inside = np.pad(np.ones(query.shape), pads)
    outputs, maps = [], []
    for p in range(order(group)):
        scores, seen = [], []
        for i in range(rows):
            for j in range(columns):
                near = slice(i, i + height), slice(j, j + width)
                k, v = (
                    _transformed(x[:, near[0], near[1]], maps, group, p, i, j)
                    for x, maps in ((keys, of_keys), (values, of_values))
                )
                products = query[:, :, :, p] * k
                s = products.reshape(*products.shape[:3], heads, -1).sum(-1)
                if border == "mask":
                    known = inside[:, near[0], near[1], 0, :1]
                    s = np.where(known > 0, s, -np.inf)
                scores.append(scale * s)
                seen.append(v)
        scores = np.stack(scores, axis=-1)
        weights = counts * np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        each = np.repeat(weights, query.shape[-1] // heads, axis=3)
        outputs.append((each * np.stack(seen, axis=-1)).sum(-1))
        maps.append(weights.reshape(*weights.shape[:-1], rows, columns))
    return np.stack(outputs, axis=3), np.stack(maps, axis=3)


def _transformed(x, maps, group, p, i, j):
    """One neighbour of every pixel as element p sees it."""
    psi, beta = maps
    if psi is None:
        y = x[..., p, :]
    else:
        y = sum(
            x[..., r, :] * turn(psi[relative(group, p, r)], group, p)[i, j]
            for r in range(order(group))
        )
    return y + turn(beta, group, p)[i, j]


def affine_query(x, psi, beta, group):
    """x (b, y, x, order, c), psi (order, c), beta (c): at the pixel itself."""
    count = order(group)
    return beta + np.stack(
        [
            sum(x[..., r, :] * psi[relative(group, p, r)] for r in range(count))
            for p in range(count)
        ],
        axis=3,
    )
