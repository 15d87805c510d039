"""The axes, types and two formulas of attention on responses.

The axes of all modules of this package:

    elements            input group elements
    channels            input channels
    batch               images
    padded_height,      rows and columns of the input with its padding
    padded_width
    taps                entries of the filter of the convolution, row by row
    height, width       rows and columns of the output
    filters             output channels: elements of the group times filters,
                        or some of them, a chunk
    blocks              parts of the batch, one for each device, see
                        `dispatch.blocks`

A response is what one filter makes of one input channel at one input group
element. There are `elements * channels * filters` of them at each output
position, which are weighted by attention and summed over the first two.

In half precision the responses, their gradients and all tensors of that size
stay in half precision. Statistics, attention and the sum of the attended
responses are in float32, and so are the views and filters that this sum is a
product of: the layer returns the difference between a convolution and this sum,
which may be a thousandth of the sum.
"""

import dataclasses
from typing import TypeAlias

from keras import ops

from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Shaped
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.geometry import FilterWindow
from keras_equiattn.ops.responses.depthwise import depthwise_native

# The padded input, at one input group element and at all of them.
Planes: TypeAlias = Float[Tensor, "channels batch padded_height padded_width"]
AllPlanes: TypeAlias = Float[
    Tensor, "elements channels batch padded_height padded_width"
]
Kernel: TypeAlias = Float[Tensor, "channels taps filters"]
Responses: TypeAlias = Float[Tensor, "channels batch height width filters"]
# One number for all positions of a response.
Overall: TypeAlias = Float[Tensor, "channels batch filters"]
# The output, and statistics of the responses over the channels.
Pixels: TypeAlias = Float[Tensor, "batch height width filters"]
# The number of a channel at each pixel.
Places: TypeAlias = Shaped[Tensor, "batch height width filters"]
# Mean and maximum over the channels, and the filters on them.
Statistics: TypeAlias = Float[Tensor, "batch height width 2 filters"]
SpatialKernel: TypeAlias = Float[Tensor, "rows columns 2 filters"]
# The weights by name, see `AttentionSpec`.
Weights: TypeAlias = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """A convolution and the attention on its responses.

    Functions that take `weights` take a dictionary with the entries `kernel
    (channels, taps, filters)`; for channel attention `first (channels, hidden,
    filters)` and `second (hidden, channels, filters)`; and for spatial
    attention `spatial (rows, columns, 2, filters)`, for mean and maximum.

    Attributes:
        window: where the filters of the convolution look.
        has_channel: whether there is channel attention.
        has_spatial: whether there is spatial attention.
        attention_dilation_rate: the distance between adjacent entries of the
            filters of spatial attention.
    """

    window: FilterWindow
    has_channel: bool
    has_spatial: bool
    attention_dilation_rate: int = 1

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the weights, in the order in which they are passed."""
        channel = ("first", "second") if self.has_channel else ()
        return "kernel", *channel, *(("spatial",) if self.has_spatial else ())


def channel_scores(
    means: Float[Tensor, "*chunks channels batch filters"],
    maxima: Float[Tensor, "*chunks channels batch filters"],
    first: Float[Tensor, "*chunks channels hidden filters"],
    second: Float[Tensor, "*chunks hidden channels filters"],
) -> Float[Tensor, "*chunks channels batch filters"]:
    """The scores of channel attention, which is their sigmoid.

    A two-layer perceptron over the input channels sees each statistic, for
    every filter by itself, and its outputs for both statistics are added up.

    Args:
        means, maxima: the statistics of the responses over space.
        first, second: the weights of both layers.
    """
    scores = 0.0
    for statistic in (means, maxima):
        hidden = ops.einsum("...cbn,...ckn->...kbn", statistic, first)
        hidden = ops.relu(hidden)
        scores = scores + ops.einsum("...kbn,...kcn->...cbn", hidden, second)
    return scores


def spatial_attention(
    statistics: Statistics, kernel: SpatialKernel, dilation_rate: int
) -> Pixels:
    """Spatial attention: a filter on mean and maximum, then a sigmoid.

    Every output channel has a filter of its own.

    Args:
        statistics: mean and maximum of the responses over the channels.
        kernel: the filters.
        dilation_rate: the distance between adjacent entries of a filter.
    """
    return ops.sigmoid(depthwise_native(statistics, kernel, dilation_rate))
