"""How attention on responses is computed on each machine, and why.

Chunks and schedules are chosen here, and the constants of the choice stand here
with what was measured.
"""

import math
from typing import Any
from typing import NamedTuple

import keras

from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Shape
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.geometry import FilterWindow
from keras_equiattn.ops.numerics import item_size
from keras_equiattn.ops.numerics import part_size
from keras_equiattn.ops.responses.spec import AllPlanes
from keras_equiattn.ops.responses.spec import Kernel
from keras_equiattn.ops.responses.spec import Planes

# The bytes that one step may hold with "auto", beside input and output, and the
# number of tensors of the size of a chunk's output that are counted for it.
# With a fourth of the bytes, a step for 128 images of 24 x 24 pixels and 10
# filters on p4 takes 1.6 (channel) and 1.7 (full) times as long under JAX, and
# its temporaries take 82 in place of 88 and 95 in place of 140 MiB (AMD EPYC,
# two cores, busy, JAX 0.10.2).
MEMORY_LIMIT = 2**28
LIVE = 8
# The batch and the size that "auto" assumes where they are not known.
ASSUMED_BATCH = 128
ASSUMED_PIXELS = 64 * 64
# The batch that is assumed where the compiler gets every step by itself:
# `predict` has this one.
PREDICTED_BATCH = 32
# Bytes that the responses may take that are computed at a time. On a CPU they
# stay in its cache, and on an accelerator they are enough to keep it busy.
# "unrolled" is for a compiler that gets every step by itself: OpenVINO compiled
# allcnnc_p4_full in 8 s, and not within 400 s with 2**20 and a batch of 128
# (AMD EPYC, two cores, OpenVINO 2026.4.1).
RESPONSES = {"cpu": 2**20, "accelerator": 2**26, "unrolled": 2**29}
# Entries of a filter up to which a compiler gets a response as a sum of
# products, which it need not store to reduce it. That moves 0.4 of the bytes.
# XLA on a CPU multiplies matrices faster all the same: with 128 images of 16 x
# 16 pixels, 16 channels on p4 and 3 x 3 filters a training step took 3.5 s
# written out and 1.9 s with products (AMD EPYC, two cores, JAX 0.10.2).
TAPS_WRITTEN_OUT = 25
# Columns of an image over which a gradient of the convolution of statistics is
# written out. With 16 and 64 spatial attention takes up to 1.03 and 1.09 times
# as long (benchmarks/results/tuning-<backend>-128-<date>.json).
COLUMNS = 32


class Schedule(NamedTuple):
    """How the responses of one chunk are computed.

    Attributes:
        together: how many input channels are seen at a time.
        stacked: how many channels' views are stacked at once, where no
            responses are stored.
        reduced: how many channels are seen at a time, where responses are
            reduced at once.
        written_out: whether a response is a sum of products, or a product of
            matrices.
        one_by_one: whether the maximum over the channels is taken of one
            channel after the other, or by a reduction.
        depthwise_columns: over how many columns the convolution of statistics
            is written out term by term; None leaves it to the backend.
    """

    together: int
    stacked: int
    reduced: int
    written_out: bool
    one_by_one: bool
    depthwise_columns: int | None


def chunk_size(
    wanted: int | str, filters: int, size: Shape, planes: AllPlanes
) -> int:
    """How many output channels are computed at a time.

    Chunks are of equal size but for the last, see `numerics.part_size`.

    Args:
        wanted: the largest size, or "auto".
        filters: how many output channels there are.
        size: height and width of the output.
        planes: the padded input.
    """
    if isinstance(wanted, str):  # "auto"
        target = backend.find_target(planes)
        plane = _plane_bytes(planes.shape[2], size, planes, target, least=4)
        wanted = max(MEMORY_LIMIT // (LIVE * plane), 1)
    return part_size(filters, wanted)


def schedule(window: FilterWindow, planes: Planes, kernel: Kernel) -> Schedule:
    """How the responses of these channels to these filters are computed.

    Args:
        window: where the filters look.
        planes: the padded input at one input group element.
        kernel: the filters of a chunk.
    """
    target = backend.find_target(planes)
    channels, taps, filters = kernel.shape
    size = window.output_size(tuple(planes.shape)[2:], "valid")
    plane = _plane_bytes(planes.shape[1], size, planes, target, least=2)
    limit = RESPONSES["unrolled" if target.unrolls else target.device]
    together = min(max(limit // (filters * plane), 1), channels)
    written_out = (
        target.fuses_sums and not target.xla_on_cpu and taps <= TAPS_WRITTEN_OUT
    )
    return Schedule(
        together=together,
        # These views take as much memory as responses of `together` channels.
        stacked=max(together * filters // taps, 1),
        # Responses that a compiler does not store take no memory.
        reduced=channels if written_out else together,
        written_out=written_out,
        one_by_one=target.eager_on_cpu or target.xla_on_cpu,
        depthwise_columns=COLUMNS
        if target.xla_on_cpu and None not in size
        else None,
    )


def blocks(batch: Any) -> int:
    """How many parts of a batch have gradients of weights of their own.

    Several devices, with some images each, then add them up once, when all
    loops are over, and not in each step. There is one part for each device of
    the distribution that is set in Keras.

    Args:
        batch: the number of images; None, or a symbol, if it is not known.
    """
    distribution = keras.distribution.distribution()
    if distribution is None or not isinstance(batch, int) or not batch:
        return 1
    mesh = distribution.device_mesh
    axis = mesh.axis_names.index(distribution.batch_dim_name)
    return math.gcd(batch, int(mesh.shape[axis]))


def _plane_bytes(
    batch: Any,
    size: Shape,
    like: Float[Tensor, "..."],
    target: backend.Target,
    least: int,
) -> int:
    """The bytes of one output channel of the whole batch.

    Args:
        batch: the number of images; None, or a symbol, if it is not known.
        size: height and width of the output.
        like: a tensor whose numbers have as many bytes.
        target: where the computation runs.
        least: how many bytes a number has at least.
    """
    number = item_size(like)
    height, width = size
    pixels = ASSUMED_PIXELS
    # JAX exports sizes as symbols.
    if isinstance(height, int) and isinstance(width, int):
        pixels = height * width
    assumed = PREDICTED_BATCH if target.unrolls else ASSUMED_BATCH
    images = batch if isinstance(batch, int) else assumed
    return max(max(number, least) * images * pixels, 1)
