"""Three layers of ACmix: on pixels, patchwise, and with reduced keys."""

import numpy as np

from oracles.convolution import correlate
from oracles.convolution import group_linear
from oracles.turns import offset_matrix
from oracles.turns import turn
from oracles.windows import window_weights


def acmix(
    x,
    w,
    group,
    heads,
    size,
    strides=1,
    dilation=1,
    border="reflect",
    shape="square",
):
    """The paths of attention and convolution, and the weights of attention.

    x (b, y, x, order, c); w by the names of the layer; size: rows and columns
    of attention. Pixel by pixel, with all parts of the scores written out.
    """
    maps = [
        group_linear(x, w[f"{name}_kernel"], w.get(f"{name}_bias"), group)
        for name in ("query", "key", "value")
    ]
    batch, height, width, count, filters = maps[0].shape
    each = filters // heads
    query, keys, values = (
        f.reshape(batch, height, width, count, heads, each) for f in maps
    )
    kernel, bias = w["position_kernel"], w["position_bias"]

    def position(p, row, column):
        place = [
            2 * n / (limit - 1) - 1 if limit > 1 else 0
            for n, limit in ((row, height), (column, width))
        ]
        row, column = np.linalg.inv(offset_matrix(group, p)) @ place
        return column * kernel[0] + row * kernel[1] + bias

    places = [
        (i, j)
        for i in range(0, height, strides)
        for j in range(0, width, strides)
    ]
    new = -(-height // strides), -(-width // strides)
    attention = np.zeros((batch, len(places), count, heads, each))
    weights = np.zeros((batch, len(places), count, heads, *size))
    for n, (i, j) in enumerate(places):
        for p in range(count):
            scores = np.full((*size, batch, heads), -np.inf)
            seen = np.zeros((*size, batch, heads, each))
            for a, b in np.ndindex(*size):
                row = i + dilation * (a - size[0] // 2)
                column = j + dilation * (b - size[1] // 2)
                inside = 0 <= row < height and 0 <= column < width
                if border == "mask" and not inside:
                    continue
                row, column = reflected(row, height), reflected(column, width)
                key = keys[:, row, column, p]
                key = key + position(p, i, j) - position(p, row, column)
                scores[a, b] = (query[:, i, j, p] * key).sum(-1) / each**0.5
                seen[a, b] = values[:, row, column, p]
            scores = np.exp(scores - scores.max((0, 1)))
            scores *= window_weights(*size, shape)[:, :, None, None]
            scores /= scores.sum((0, 1))
            weights[:, n, p] = np.moveaxis(scores, (0, 1), (-2, -1))
            attention[:, n, p] = (scores[..., None] * seen).sum((0, 1))
    attention = attention.reshape(batch, *new, count, filters)
    weights = weights.reshape(batch, *new, count, heads, *size)

    stacked = np.concatenate([query, keys, values], axis=4)
    convolution = _acmix_convolution(stacked, w, group, strides, dilation)
    return attention, convolution, weights


def patchwise_acmix(
    x, w, share, size, strides=1, dilation=1, training=True, epsilon=1e-5
):
    """The paths of attention and convolution, the weights, new statistics.

    x (b, y, x, c); w by the names of the layer, those of its normalisations
    with "patch_norm/" or "feature_norm/" before; size: rows and columns of
    attention. The keys of all windows are written out.
    """
    query, keys, values = (
        group_linear(
            x[:, :, :, None], w[f"{name}_kernel"], w.get(f"{name}_bias"), "z2"
        )[:, :, :, 0]
        for name in ("query", "key", "value")
    )
    batch, height, width, _ = values.shape
    places = [range(0, n, strides) for n in (height, width)]

    def unfolded(f):
        """(b, new_y, new_x, neighbours, c)"""
        seen = []
        for a, b in np.ndindex(*size):
            rows, columns = (
                [reflected(i + dilation * (n - m // 2), limit) for i in axis]
                for axis, n, m, limit in zip(
                    places, (a, b), size, (height, width), strict=True
                )
            )
            seen.append(f[:, rows][:, :, columns])
        return np.stack(seen, axis=3)

    new = {}

    def normalized(f, name):
        mean, variance = (
            w[f"{name}/moving_{kind}"] for kind in ("mean", "variance")
        )
        if training:
            of_batch = f.mean((0, 1, 2)), f.var((0, 1, 2))
            for kind, moving, statistic in zip(
                ("mean", "variance"), (mean, variance), of_batch, strict=True
            ):
                new[f"{name}/moving_{kind}"] = 0.9 * moving + 0.1 * statistic
            mean, variance = of_batch
        f = (f - mean) / np.sqrt(variance + epsilon)
        return np.maximum(f * w[f"{name}/gamma"] + w[f"{name}/beta"], 0)

    own = query[:, ::strides, ::strides, None]
    seen = np.concatenate([own, unfolded(keys)], axis=3)
    features = np.einsum(
        "byxnc,nch->byxh", normalized(seen, "patch_norm"), w["reduce_kernel"]
    )
    features = normalized(features, "feature_norm")
    weights = np.einsum("byxh,hna->byxna", features, w["expand_kernel"])
    weights = weights + w["expand_bias"]
    copies = np.tile(weights, share)  # channel c has the weights c mod heads
    attention = (copies * unfolded(values)).sum(3)
    weights = np.moveaxis(weights, 3, 4)
    weights = weights.reshape(*weights.shape[:4], *size)

    stacked = np.concatenate([query, keys, values], axis=-1)
    stacked = stacked.reshape(batch, height, width, 1, -1, query.shape[-1])
    convolution = _acmix_convolution(stacked, w, "z2", strides, dilation)
    return attention, convolution[:, :, :, 0], weights, new


def _acmix_convolution(stacked, w, group, strides, dilation):
    """The path of convolution, from maps (b, y, x, order, maps, channels)."""
    mixed = np.einsum("byxpmc,mt->byxpct", stacked, w["mixing_kernel"])
    shift = w["shift_kernel"]
    rows, columns = shift.shape[:2]
    pads = [
        (0, 0),
        (dilation * (rows // 2),) * 2,
        (dilation * (columns // 2),) * 2,
        (0, 0),
        (0, 0),
    ]
    count, _, each = stacked.shape[3:]
    filters = w["value_kernel"].shape[-1]
    convolved = []
    for p in range(count):
        turned = turn(shift, group, p)
        outputs = []
        for o in range(filters):
            c, j = divmod(o, filters // each)
            of_channel = shift.shape[-1] // each  # kernels
            own = turned[..., c * of_channel + j % of_channel]
            padded = np.pad(mixed[:, :, :, p, c], pads[:-1])
            y = correlate(padded, own[..., None], strides, dilation=dilation)
            outputs.append(y[..., 0])
        convolved.append(np.stack(outputs, axis=-1))
    return np.stack(convolved, axis=3)


def reflected(n, limit):
    """What the mirror image shows at place n."""
    period = max(2 * (limit - 1), 1)
    return min(n % period, period - n % period) if limit > 1 else 0


def spatial_reduction_acmix(x, w, heads, reduction, tokens=None):
    """The paths of attention and convolution, pixel by pixel, and the weights.

    x (b, y, x, c); tokens (b, t, c); w by the names of the layer; reduction:
    rows and columns that become one pixel.

    Returns attention (b, y, x, f), convolution (b, y, x, f), what attention
    gives to tokens (b, t, f), and the weights (b, y x + t, heads, seen).
    """
    batch, height, width, channels = x.shape
    if tokens is None:
        tokens = np.zeros((batch, 0, channels))
    rows, columns = reduction
    reduced = x
    if reduction != (1, 1):
        size = -(-height // rows), -(-width // columns)
        reduced = np.zeros((batch, *size, channels))
        for a, b, i, j in np.ndindex(*size, rows, columns):
            row, column = rows * a + i, columns * b + j
            if row < height and column < width:  # there is nothing beyond
                kernel = w["reduction_kernel"][i, j]
                reduced[:, a, b] += x[:, row, column] @ kernel
        reduced += w["reduction_bias"]
        reduced = reduced - reduced.mean(-1, keepdims=True)
        variance = (reduced**2).mean(-1, keepdims=True)
        reduced = reduced / np.sqrt(variance + 1e-5)
        reduced = reduced * w["reduction_gamma"] + w["reduction_beta"]

    filters = w["query_kernel"].shape[-1]
    each = filters // heads

    def linear(f, name):
        f = f @ w[f"{name}_kernel"][0] + w[f"{name}_bias"]
        return f.reshape(*f.shape[:-1], heads, each)

    def everyone(image, name):
        pixels = linear(image, name).reshape(batch, -1, heads, each)
        return np.concatenate([pixels, linear(tokens, name)], axis=1)

    query = everyone(x, "query")
    keys, values = (everyone(reduced, name) for name in ("key", "value"))
    weights = np.zeros((batch, query.shape[1], heads, keys.shape[1]))
    attention = np.zeros((batch, query.shape[1], heads, each))
    for p in range(query.shape[1]):
        scores = [
            (query[:, p] * keys[:, s]).sum(-1) / each**0.5
            for s in range(keys.shape[1])
        ]
        a = np.exp(scores - np.max(scores, axis=0))
        a /= a.sum(0)
        weights[:, p] = np.moveaxis(a, 0, -1)
        for s in range(keys.shape[1]):
            attention[:, p] += a[s][..., None] * values[:, s]
    attention = attention.reshape(batch, -1, filters)
    attention = attention @ w["output_kernel"] + w["output_bias"]
    of_pixels = attention[:, : height * width]

    nearest = np.stack(
        [
            np.stack(
                [reduced[:, i // rows, j // columns] for j in range(width)], 1
            )
            for i in range(height)
        ],
        axis=1,
    )
    maps = np.concatenate(
        [linear(x, "query"), linear(nearest, "key"), linear(nearest, "value")],
        axis=3,
    )
    mixed = np.einsum("byxmc,mt->byxct", maps, w["mixing_kernel"])
    mixed = mixed + w["mixing_bias"]
    shift = w["shift_kernel"]
    reach = [(n // 2,) * 2 for n in shift.shape[:2]]
    convolved = []
    for o in range(filters):
        c, j = divmod(o, heads)
        count = shift.shape[-1] // each  # kernels of a channel
        own = shift[..., c * count + j % count]
        padded = np.pad(mixed[:, :, :, c], [(0, 0), *reach, (0, 0)])
        convolved.append(correlate(padded, own[..., None])[..., 0])
    return (
        of_pixels.reshape(batch, height, width, filters),
        np.stack(convolved, axis=-1),
        attention[:, height * width :],
        weights,
    )
