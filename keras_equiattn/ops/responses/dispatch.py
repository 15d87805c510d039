"""How attention on responses is computed on which machine, and why.

The only place of this package that chooses, and that holds what was tuned.
"""

import math
from typing import NamedTuple

import keras

from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Shape
from keras_equiattn.ops._types import Tensor

# What "auto" lets one step hold, beside input and output, and how many tensors
# of the size of a chunk's output are then counted with
# (benchmarks/results/attentive_conv-memory-jax-2026-11-21.json).
MEMORY_LIMIT = 2**28
LIVE = 8
# What "auto" counts with where batch or size of the image are not known.
ASSUMED_BATCH = 128
ASSUMED_PIXELS = 64 * 64
# The batch where the compiler gets every step by itself: that of `predict`.
PREDICTED_BATCH = 32
# What the responses of some input channels may take, which are computed at a
# time. On a CPU they stay in its cache, on an accelerator they fill it.
# "unrolled" is for a compiler that gets every step by itself: OpenVINO compiled
# allcnnc_p4_full in 8 s, and not within 400 s with 2**20 and a batch of 128
# (AMD EPYC, two cores, OpenVINO 2026.4.1).
RESPONSES = {"cpu": 2**20, "accelerator": 2**26, "unrolled": 2**29}
# Under a compiler, at least how many: fewer make too many steps.
LEAST_TOGETHER = 2
# Up to how many of them XLA takes sum and maximum one by one on a CPU: its
# reductions would be stored before they are added to those of others. Operators
# that run one after the other on a CPU read each response less often, too.
FOLDED = 16
# Entries of a filter up to which a compiler gets a response as a sum of
# products, which it need not store to reduce it. That moves 0.4 of the bytes.
# XLA on a CPU multiplies matrices faster all the same: with 128 images of 16 x
# 16 pixels, 16 channels on p4 and 3 x 3 filters a training step took 3.5 s
# written out and 1.9 s with products (AMD EPYC, two cores, JAX 0.10.2).
# Inductor makes vectors of the sums. On an accelerator nothing was measured
# yet.
WRITTEN_OUT = 25
# Blocks of images for which gradients of weights are kept apart until all loops
# are over: several devices, with some images each, then add them up once.
BLOCKS = 8
# Columns of an image over which a sum is written out.
COLUMNS = 32


class Plan(NamedTuple):
    """How the responses of one chunk are computed.

    Attributes:
        together: how many input channels are seen at a time.
        reduced: how many where responses are reduced at once.
        written_out: whether a response is a sum of products, or a product of
            matrices.
        blocks: of images, see `BLOCKS`.
    """

    together: int
    reduced: int
    written_out: bool
    blocks: int


def chunk_size(
    wanted: int | str, filters: int, size: Shape, planes: Tensor
) -> int:
    """How many output channels are computed at a time.

    Chunks are of equal size, but for what is added to the last one.

    Args:
        wanted: the most, or "auto".
        filters: output channels that there are.
        size: height and width of the output.
        planes: the padded input, with the images on axis 2.
    """
    if isinstance(wanted, str):  # "auto"
        plane = _plane_bytes(planes.shape[2], size, planes, least=4)
        wanted = max(MEMORY_LIMIT // (LIVE * plane), 1)
    chunks = -(-filters // wanted)
    return -(-filters // chunks)


def plan(response: Tensor, channels: int, taps: int, filters: int) -> Plan:
    """The plan for some chunk.

    Args:
        response: a tensor `(batch, height, width)`.
        channels: input channels.
        taps: entries of the filter.
        filters: output channels of the chunk.
    """
    target = backend.find_target(response)
    batch, *size = response.shape
    known = isinstance(batch, int) and batch > 0
    plane = _plane_bytes(batch, size, response, least=2)
    limit = RESPONSES["unrolled" if target.unrolls else target.device]
    fitting = limit // (filters * plane)
    least = LEAST_TOGETHER if target.compiler else 1
    together = min(max(fitting, least), channels)
    fused = target.fuses_sums and not target.xla_on_cpu
    written_out = fused and taps <= WRITTEN_OUT
    return Plan(
        together=together,
        # What a compiler does not store takes no memory.
        reduced=channels if written_out else together,
        written_out=written_out,
        blocks=math.gcd(batch, BLOCKS) if target.xla and known else 1,
    )


def folds(responses: Tensor) -> bool:
    """Whether sum and maximum are taken of one channel after the other.

    Args:
        responses: with the channels on axis 0.
    """
    target = backend.find_target(responses)
    few = responses.shape[0] <= FOLDED
    return target.eager_on_cpu or (target.xla_on_cpu and few)


def writes_depthwise_out(x: Tensor) -> bool:
    """Whether a convolution of statistics is written out term by term.

    Args:
        x: statistics `(batch, height, width, ...)`.
    """
    return backend.find_target(x).xla_on_cpu and None not in x.shape[1:3]


def _plane_bytes(
    batch: int | None, size: Shape, like: Tensor, least: int
) -> int:
    """Bytes of one output channel of the whole batch, if a number has `least`
    or as many as one of a tensor.
    """
    dtype = keras.backend.standardize_dtype(like.dtype)
    number = {"float32": 4, "float64": 8}.get(dtype, 2)
    height, width = size
    pixels = ASSUMED_PIXELS
    # JAX exports sizes as symbols.
    if isinstance(height, int) and isinstance(width, int):
        pixels = height * width
    unrolls = backend.find_target(like).unrolls
    assumed = PREDICTED_BATCH if unrolls else ASSUMED_BATCH
    images = batch if isinstance(batch, int) else assumed
    return max(max(number, least) * images * pixels, 1)
