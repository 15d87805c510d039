"""Attention on responses that are all held, in plain operations.

The other modules are compared with this one, which can be differentiated twice
on every backend.
"""

from keras import ops

from keras_equiattn.ops.numerics import in_full_precision
from keras_equiattn.ops.numerics import mean
from keras_equiattn.ops.responses.spec import AllPlanes
from keras_equiattn.ops.responses.spec import AttentionSpec
from keras_equiattn.ops.responses.spec import channel_scores
from keras_equiattn.ops.responses.spec import Pixels
from keras_equiattn.ops.responses.spec import spatial_attention
from keras_equiattn.ops.responses.spec import Weights


def responses_held(
    spec: AttentionSpec, planes: AllPlanes, weights: Weights
) -> Pixels:
    """The sum of the attended responses over input elements and channels.

    Args:
        spec: the convolution and the attention.
        planes: the padded input.
        weights: by name, each with a first axis of the elements.
    """
    views = ops.stack(spec.window.views(in_full_precision(planes)), axis=3)
    kernel = in_full_precision(weights["kernel"])
    responses = ops.einsum("jcbtxy,jctn->jcbxyn", views, kernel)
    attended = []
    for j in range(planes.shape[0]):
        f = responses[j]
        if spec.has_channel:
            scores = channel_scores(
                mean(f, (2, 3)),
                ops.max(f, axis=(2, 3)),
                weights["first"][j],
                weights["second"][j],
            )
            f = f * ops.sigmoid(scores)[:, :, None, None]
        total = ops.sum(f, axis=0)
        if spec.has_spatial:
            statistics = total / planes.shape[1], ops.max(f, axis=0)
            total = total * spatial_attention(
                ops.stack(statistics, axis=3),
                weights["spatial"][j],
                spec.attention_dilation_rate,
            )
        attended.append(total)
    return sum(attended[1:], attended[0])
