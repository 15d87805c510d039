"""Independent NumPy forms, slow and literal: loops over the group.

They use nothing of the package: quarter turns are `np.rot90`, mirrors are
reversed columns, products of elements are arithmetic on (turns, mirrored).
"""

import math

import numpy as np


def order(group):
    rotations = {"z2": 1, "z2m": 1}.get(group) or int(group.strip("pm"))
    return rotations * (2 if group.endswith("m") else 1)


def split(group, element):
    """(turns, mirrored, number of rotations) of an element."""
    rotations = order(group) // (2 if group.endswith("m") else 1)
    mirrored, turns = divmod(element, rotations)
    return turns, mirrored, rotations


def relative(group, h, j):
    """The element `h^-1 j`."""
    a, s, rotations = split(group, h)
    b, t, _ = split(group, j)
    turns = (a - b if s else b - a) % rotations
    return (s ^ t) * rotations + turns


def turn(plane, group, element):
    """`L_h` of an array whose first two axes are rows and columns."""
    turns, mirrored, rotations = split(group, element)
    if turns * 4 % rotations:
        return steer(plane, 2 * math.pi * turns / rotations, bool(mirrored))
    if mirrored:
        plane = plane[:, ::-1]
    return np.rot90(plane, turns * 4 // rotations, axes=(0, 1))


def steer(plane, angle, mirrored=False):
    """A sum of circular harmonics, mirrored, then turned by any angle."""
    size = plane.shape[0]
    flat = plane.reshape(size * size, -1)
    parts = np.linalg.lstsq(harmonics(size), flat, rcond=None)[0]
    return (harmonics(size, angle, mirrored) @ parts).reshape(plane.shape)


def harmonics(size, angle=0.0, mirrored=False, multiplied=False):
    """`(size * size, count)`: circular harmonics on rings, moved.

    Mirrored, left and right are exchanged. Those that are multiplied have no
    frequency above the number of the ring.
    """
    half = (size - 1) / 2
    found = []
    for ring in np.arange(half % 1, half + 1):
        largest = math.floor(ring + (0 if multiplied else 1)) if ring else 0
        for frequency in range(largest + 1):
            for phase in (0, math.pi / 2) if frequency else (0,):
                values = []
                for row in np.arange(-half, half + 1):
                    for column in np.arange(-half, half + 1):
                        # Back to where the value comes from.
                        x = math.cos(angle) * column - math.sin(angle) * row
                        y = -math.sin(angle) * column - math.cos(angle) * row
                        x = -x if mirrored else x
                        values.append(_harmonic(ring, frequency, phase, -y, x))
                found.append(values)
    return np.array(found).T


def _harmonic(ring, frequency, phase, row, column):
    """One of them at one offset, row and column from the centre."""
    radius = math.hypot(row, column)
    height = math.exp(-((radius - ring) ** 2) / (2 * 0.45**2))
    if not frequency:
        return height
    if not radius:
        return 0.0
    angle = math.atan2(-row, column)
    return height * math.cos(frequency * angle - phase)


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


def act(x, group, element):
    """`L_g` of one feature map (rows, columns, order, channels)."""
    moved = turn(x, group, element)
    return np.stack(
        [moved[:, :, relative(group, element, j)] for j in range(x.shape[2])],
        axis=2,
    )


def correlate(x, kernel, strides=1, padding="valid", dilation=1):
    """x (b, rows, columns, c), kernel (k, l, c, o), as Keras' Conv2D."""
    extent = [dilation * (k - 1) + 1 for k in kernel.shape[:2]]
    if padding == "same":
        pads = []
        for n, k in zip(x.shape[1:3], extent, strict=True):
            total = max((-(-n // strides) - 1) * strides + k - n, 0)
            pads.append((total // 2, total - total // 2))
        x = np.pad(x, [(0, 0), *pads, (0, 0)])
    rows, columns = (
        (n - k) // strides + 1
        for n, k in zip(x.shape[1:3], extent, strict=True)
    )
    y = np.zeros((len(x), rows, columns, kernel.shape[-1]))
    for r in range(rows):
        for c in range(columns):
            window = x[
                :,
                r * strides : r * strides + extent[0] : dilation,
                c * strides : c * strides + extent[1] : dilation,
            ]
            y[:, r, c] = np.einsum("bklc,klco->bo", window, kernel)
    return y


def lifting_conv(x, kernel, group, **options):
    return np.stack(
        [
            correlate(x, turn(kernel, group, h), **options)
            for h in range(order(group))
        ],
        axis=3,
    )


def group_conv(x, kernel, group, **options):
    outputs = []
    for h in range(order(group)):
        moved = act_on_kernel(kernel, group, h)
        outputs.append(
            sum(
                correlate(x[:, :, :, j], moved[:, :, j], **options)
                for j in range(order(group))
            )
        )
    return np.stack(outputs, axis=3)


def act_on_kernel(kernel, group, h):
    """`L_h` of a kernel (rows, columns, order, in, out)."""
    moved = turn(kernel, group, h)
    return np.stack(
        [moved[:, :, relative(group, h, j)] for j in range(order(group))],
        axis=2,
    )


def pool(x, size, strides, mode):
    """x (b, rows, columns, ...), windows without padding."""
    rows, columns = ((n - size) // strides + 1 for n in x.shape[1:3])
    reduce = {"max": np.max, "mean": np.mean}[mode]
    return np.stack(
        [
            np.stack(
                [
                    reduce(
                        x[
                            :,
                            r * strides : r * strides + size,
                            c * strides : c * strides + size,
                        ],
                        axis=(1, 2),
                    )
                    for c in range(columns)
                ],
                axis=1,
            )
            for r in range(rows)
        ],
        axis=1,
    )


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def attentive_conv(
    x, kernel, first, second, spatial, group, attention_dilation=1, **options
):
    """Attention on the responses of a convolution.

    x (b, rows, columns, [order,] c), kernel (k, l, [order,] c, o), first
    ([order,] c, hidden, o), second ([order,] hidden, c, o), spatial (k, l,
    [order,] 2, o); channel or spatial weights may be None.

    Returns:
        The output, `1 - aC (b, h, j, c, o)` and `1 - aX (b, rows, columns, h,
        j, o)`; for images j has size 1.
    """
    lifting = x.ndim == 4
    if lifting:
        x = x[:, :, :, None]
        kernel = kernel[:, :, None]
        spatial = None if spatial is None else spatial[:, :, None]
        first, second = (w if w is None else w[None] for w in (first, second))
    inputs, channels, filters = kernel.shape[2:]
    outputs, all_alpha, all_gates = [], [], []
    for h in range(order(group)):
        total = 0.0
        alphas, gates = [], []
        for j in range(inputs):
            source = 0 if lifting else relative(group, h, j)
            k = turn(kernel[:, :, source], group, h)
            # f (b, rows, columns, c, o): nothing is summed.
            f = np.stack(
                [
                    correlate(
                        x[:, :, :, j, c, None], k[:, :, c, None], **options
                    )
                    for c in range(channels)
                ],
                axis=3,
            )
            alpha = np.ones((len(x), channels, filters))
            if first is not None:
                score = 0.0
                for statistic in (f.mean(axis=(1, 2)), f.max(axis=(1, 2))):
                    hidden = np.einsum("bco,cko->bko", statistic, first[source])
                    score = score + np.einsum(
                        "bko,kco->bco", np.maximum(hidden, 0), second[source]
                    )
                alpha = sigmoid(score)
            g = alpha[:, None, None] * f
            gate = np.ones((*g.shape[:3], filters))
            if spatial is not None:
                statistics = np.stack([g.mean(axis=3), g.max(axis=3)], axis=3)
                psi = turn(spatial[:, :, source], group, h)
                gate = sigmoid(
                    np.concatenate(
                        [
                            correlate(
                                statistics[..., o],
                                psi[..., o : o + 1],
                                padding="same",
                                dilation=attention_dilation,
                            )
                            for o in range(filters)
                        ],
                        axis=-1,
                    )
                )
            total = total + (f - gate[:, :, :, None] * g).sum(axis=3)
            alphas.append(alpha)
            gates.append(gate)
        outputs.append(total)
        all_alpha.append(np.stack(alphas, axis=1))
        all_gates.append(np.stack(gates, axis=3))
    return (
        np.stack(outputs, axis=3),
        1 - np.stack(all_alpha, axis=1),
        1 - np.stack(all_gates, axis=3),
    )


def input_attention(x, first, second, spatial, group, dilation=1):
    """Channel, then spatial attention on images or feature maps.

    Weights ([order,] c, hidden), ([order,] hidden, c), (k, l, [order,] 2, 1),
    channel or spatial ones None.
    """
    lifting = x.ndim == 4
    attended = x
    if first is not None:
        score = 0.0
        for statistic in (x.mean(axis=(1, 2)), x.max(axis=(1, 2))):
            if lifting:
                hidden = np.maximum(statistic @ first, 0)
                score = score + hidden @ second
            else:
                hidden = np.maximum(_group_dense(statistic, first, group), 0)
                score = score + _group_dense(hidden, second, group)
        attended = x * sigmoid(score)[:, None, None]
    if spatial is not None:
        statistics = np.stack([attended.mean(-1), attended.max(-1)], axis=-1)
        convolve = lifting_conv if lifting else group_conv
        score = convolve(
            statistics, spatial, group, padding="same", dilation=dilation
        )[..., 0]
        if lifting:
            score = score.max(axis=-1)
        attended = attended * sigmoid(score)[..., None]
    return x - attended


def _group_dense(x, weight, group):
    """x (b, order, c), weight (order, c, k): a convolution on the group."""
    count = order(group)
    return np.stack(
        [
            sum(x[:, j] @ weight[relative(group, h, j)] for j in range(count))
            for h in range(count)
        ],
        axis=1,
    )


def co_attentive_conv(x, kernel, attention, group, **options):
    """x, kernel as for the convolution; attention (1, 1, [order,] c, 1)."""
    if x.ndim == 4:
        alpha = sigmoid(x @ attention[0, 0])
        return lifting_conv(x * (1 - alpha), kernel, group, **options)
    alpha = sigmoid(group_conv(x, attention, group))
    return group_conv(x * (1 - alpha), kernel, group, **options)


def group_linear(x, kernel, bias, group):
    """x (b, y, x, order, c), kernel (order, c, d): one map for each pair."""
    count = order(group)
    y = np.stack(
        [
            sum(
                x[..., r, :] @ kernel[relative(group, p, r)]
                for r in range(count)
            )
            for p in range(count)
        ],
        axis=3,
    )
    return y if bias is None else y + bias


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
            row, column = _matrix(group, v).T @ offsets
            encoding = np.concatenate(
                [
                    _encoder(row, w, "row", epsilon),
                    _encoder(column, w, "column", epsilon),
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
        row, column = np.linalg.inv(_matrix(group, p)) @ place
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
                row, column = _reflected(row, height), _reflected(column, width)
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
                [_reflected(i + dilation * (n - m // 2), limit) for i in axis]
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


def _reflected(n, limit):
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


def _matrix(group, element):
    """On offsets (row, column): its transpose is its inverse."""
    turns, mirrored, rotations = split(group, element)
    angle = 2 * np.pi * turns / rotations
    rotation = [
        [np.cos(angle), -np.sin(angle)],
        [np.sin(angle), np.cos(angle)],
    ]
    return np.array(rotation) @ np.diag([1, -1 if mirrored else 1])


def _encoder(x, w, axis, epsilon):
    """One number to a few channels."""
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


def squeeze_excite(x, reduce_kernel, reduce_bias, expand_kernel, expand_bias):
    """Images or feature maps; also for complex numbers near real ones."""
    outputs = []
    for one in x:  # the mean over all but the channels, place by place
        places = one.reshape(-1, one.shape[-1])
        total = sum(places[index] for index in range(len(places)))
        hidden = total / len(places) @ reduce_kernel + reduce_bias
        hidden = hidden * (hidden.real > 0)
        outputs.append(one * sigmoid(hidden @ expand_kernel + expand_bias))
    return np.stack(outputs)
