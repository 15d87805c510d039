"""Attention on responses with all of them at hand, in plain operations.

What the other modules are compared with, and what can be differentiated twice
on every backend.
"""

from keras import ops

from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.numerics import mean
from keras_equiattn.ops.responses.form import channel_scores
from keras_equiattn.ops.responses.form import Form
from keras_equiattn.ops.responses.form import spatial_attention
from keras_equiattn.ops.responses.form import Weights


def responses_held(
    form: Form,
    planes: Float[Tensor, "elements channels batch padded_height padded_width"],
    weights: Weights,
) -> Float[Tensor, "batch height width filters"]:
    """Sum of the attended responses, see `chunked.attended_sum`.

    Args:
        form: what is computed.
        planes: the padded input.
        weights: by name, each with a first axis of the elements.
    """
    views = ops.stack(form.window.views(planes), axis=3)
    responses = ops.einsum("jcbtxy,jctn->jcbxyn", views, weights["kernel"])
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
            total = total * spatial_attention(
                total / planes.shape[1],
                ops.max(f, axis=0),
                weights["spatial"][j],
                form.attention_dilation_rate,
            )
        attended.append(total)
    return sum(attended[1:], attended[0])
