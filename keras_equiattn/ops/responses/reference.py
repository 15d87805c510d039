"""Attention on responses with all of them at hand, in plain operations.

What the other modules are compared with, and what can be differentiated twice
on every backend.
"""

from keras import ops

from keras_equiattn.ops.numerics import in_full_precision
from keras_equiattn.ops.numerics import mean
from keras_equiattn.ops.responses.form import AllPlanes
from keras_equiattn.ops.responses.form import channel_scores
from keras_equiattn.ops.responses.form import Form
from keras_equiattn.ops.responses.form import Pixels
from keras_equiattn.ops.responses.form import spatial_attention
from keras_equiattn.ops.responses.form import Weights


def responses_held(form: Form, planes: AllPlanes, weights: Weights) -> Pixels:
    """Sum of the attended responses, see `chunked.attended_sum`.

    Each of the weights has a first axis of the elements.
    """
    views = ops.stack(form.window.views(in_full_precision(planes)), axis=3)
    kernel = in_full_precision(weights["kernel"])
    responses = ops.einsum("jcbtxy,jctn->jcbxyn", views, kernel)
    attended = []
    for j in range(planes.shape[0]):
        f = responses[j]
        if form.has_channel:
            scores = channel_scores(
                mean(f, (2, 3)),
                ops.max(f, axis=(2, 3)),
                weights["first"][j],
                weights["second"][j],
            )
            f = f * ops.sigmoid(scores)[:, :, None, None]
        total = ops.sum(f, axis=0)
        if form.has_spatial:
            statistics = total / planes.shape[1], ops.max(f, axis=0)
            total = total * spatial_attention(
                ops.stack(statistics, axis=3),
                weights["spatial"][j],
                form.attention_dilation_rate,
            )
        attended.append(total)
    return sum(attended[1:], attended[0])
