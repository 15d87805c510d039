"""Group self-attention with relative positions."""

import numpy as np

from oracles.attentive import sigmoid
from oracles.convolution import group_linear
from oracles.turns import offset_matrix
from oracles.turns import order
from oracles.turns import relative
from oracles.turns import turn
from oracles.windows import window_weights


def group_self_attention(
    x,
    w,
    group,
    size=None,
    epsilon=1e-3,
    embedded=None,
    shape="square",
    scale=None,
):
    """Self-attention with relative positions, each (v, g) by itself.

    x (b, y, x, [order,] c), w: weights by the names that the layers give them;
    size of the window, None for the whole image; embedded: from v, g, m to the
    row of the embedding, None for `g^-1 m`.

    Returns:
        The output, and the weights of the values (b, y, x, v, head, m, row,
        column), added up over g.
    """
    x = x[:, :, :, None] if x.ndim == 4 else x
    embedded = embedded or (lambda v, g, m: relative(group, g, m))
    batch, rows, columns, elements, channels = x.shape
    query, keys, values = (
        np.einsum("byxgc,chd->byxghd", x, w[f"{name}_kernel"])
        + w[f"{name}_bias"]
        for name in ("query", "key", "value")
    )
    query = query * (scale or 1 / np.sqrt(channels))
    heads, key_dim = w["output_kernel"].shape[:2]
    positions = 2 * w["row_kernel_2"].shape[1]
    seen = (size or rows, size or columns)
    y = np.zeros((batch, rows, columns, order(group), heads, key_dim))
    maps = np.zeros((*y.shape[:5], elements, *seen))
    counts = window_weights(*seen, shape).ravel()
    for i, j in np.ndindex(rows, columns):
        places = np.indices(seen).reshape(2, -1)
        if size:
            places += np.array([[i - size // 2], [j - size // 2]])
        offsets = (places - [[i], [j]]) / max(
            size // 2 if size else max(rows, columns) - 1, 1
        )
        inside = (places >= 0).all(0) & (places < [[rows], [columns]]).all(0)
        r, c = places * inside
        near_keys, near_values = keys[:, r, c], values[:, r, c]
        for v in range(order(group)):
            row, column = offset_matrix(group, v).T @ offsets
            encoding = np.concatenate(
                [
                    encoder(row, w, "row", epsilon),
                    encoder(column, w, "column", epsilon),
                ],
                axis=1,
            )
            for g in range(elements):
                q = query[:, i, j, g]
                s = np.einsum("bhd,bnmhd->bhmn", q, near_keys)
                s += (q[..., :positions] @ encoding.T)[:, :, None]
                if "group_embedding" in w:
                    table = [embedded(v, g, m) for m in range(elements)]
                    rest = w["group_embedding"][table].T
                    s += (q[..., positions:] @ rest)[..., None]
                s = np.where(inside, s, -np.inf)
                a = counts * np.exp(s - s.max((-1, -2), keepdims=True))
                a /= a.sum((-1, -2), keepdims=True)
                y[:, i, j, v] += np.einsum("bhmn,bnmhd->bhd", a, near_values)
                maps[:, i, j, v] += a.reshape(*a.shape[:3], *seen)
    y = np.einsum("byxvhd,hdo->byxvo", y, w["output_kernel"])
    return y + w["output_bias"], maps


def encoder(x, w, axis, epsilon):
    """Encodes each number as a few channels."""
    first, bias, gamma, beta, second, end = (
        w[f"{axis}_{name}"]
        for name in (
            *("kernel_1", "bias_1", "gamma", "beta"),
            *("kernel_2", "bias_2"),
        )
    )
    x = x[:, None] * first + bias
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(
        x.var(-1, keepdims=True) + epsilon
    )
    x = gamma * x + beta
    return x * sigmoid(x) @ second + end


def multi_head_attention(x, w, group, heads):
    """x (b, y, x, order, c), weights by name: outputs, and a map per pixel."""
    query, key, value = (
        group_linear(x, w[f"{name}_kernel"], w[f"{name}_bias"], group)
        for name in ("query", "key", "value")
    )
    count = order(group)
    batch, height, width, _, channels = x.shape
    each = channels // heads
    seen = [turn(w["embedding"], group, p) for p in range(count)]
    middle = len(w["embedding"]) // 2
    y = np.zeros_like(query)
    weights = np.zeros((batch, height, width, heads, height, width))
    for b, row, column, head in np.ndindex(batch, height, width, heads):
        part = slice(head * each, (head + 1) * each)
        scores = np.zeros((height, width))
        for r, c, p in np.ndindex(height, width, count):
            offset = r - row + middle, c - column + middle
            neighbour = key[b, r, c, p, part] + seen[p][offset][part]
            scores[r, c] += query[b, row, column, p, part] @ neighbour
        scores = np.exp(scores / np.sqrt(count * each))
        of_pixel = scores / scores.sum()
        weights[b, row, column, head] = of_pixel
        y[b, row, column, :, part] = np.einsum(
            "rc,rcpd->pd", of_pixel, value[b, :, :, :, part]
        )
    return group_linear(y, w["output_kernel"], w["output_bias"], group), weights
