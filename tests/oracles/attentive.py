"""Attention on the responses of filters, and squeeze-and-excitation."""

import numpy as np

from oracles.convolution import correlate
from oracles.convolution import group_conv
from oracles.convolution import lifting_conv
from oracles.turns import order
from oracles.turns import relative
from oracles.turns import turn


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
