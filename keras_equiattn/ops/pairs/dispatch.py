"""How group self-attention is computed, and why.

The size of the blocks and the form of single products are chosen here, and the
constants of the choice stand here, with what was measured.
"""

from typing import NamedTuple

from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor
from keras_equiattn.ops.numerics import item_size
from keras_equiattn.ops.numerics import part_size

# The tuning files that are named below are
# benchmarks/results/tuning-<backend>-128-<date>.json.

# Scores of a block, for XLA on a CPU. For 128 images on p4, the blocks are then
# the smallest possible ones, both for windows of 5 x 5 in images of 14 x 14
# pixels and for whole images of 7 x 7. With four times as many scores, a
# training step takes 1.47 times as long and moves 1.07 (windows) and 1.26 times
# (whole images) as much, and its temporaries grow from 214 to 242 and from 48
# to 73 MiB (AMD EPYC, two cores, busy, JAX 0.10.2).
COMPILED_BLOCK = 5 * 2**17
# Scores of a block for all other devices and compilers, and for TensorFlow,
# which chooses blocks before it calls XLA. On that machine, with a quarter and
# four times as many scores, PyTorch takes 1 and 0.9 times as long, and
# TensorFlow 0.96 and 1.57 times (tuning files, batch 128). On accelerators
# nothing was measured yet.
EAGER_BLOCK = 5 * 2**21
# Scores of a block where the compiler gets every step by itself. OpenVINO
# compiled gsanet_rotmnist_p4 in 18 s with lines of 2**26 scores and in 121 s
# with lines of 2**21, and then took 0.9 s and 1.8 s for two images (AMD EPYC,
# two cores, OpenVINO 2026.4.1).
UNROLLED_BLOCK = 5 * 2**26
# The fewest images and heads that the last axis holds. XLA unrolls the loop
# over few of them, and vectorises it badly: with 8 images and 9 heads a
# training step of windows of 5 x 5 took 0.24 s with 24 numbers there, 0.19 s
# with 8 and 0.14 s with 72, and with 72 it moved 0.87 of the bytes that it
# moved with 24 (the same machine). PyTorch, which runs one loop over that axis
# at a time, took 220 ms an image with 64 numbers there and 75 with 576.
COMPILED_TOGETHER = 48
EAGER_TOGETHER = 1024
# The most neighbours of a line of the whole image: each is written out. In
# images of 13 x 13, lines of 7 took 0.35 of the time of lines of one under JAX,
# and 0.81 under PyTorch (steps of 8 images, Intel Xeon, one core). In images of
# 7 x 7, lines of two take 1.13 to 1.45 times as long as lines of 7 (tuning
# files).
NEIGHBOURS_OF_LINE = 8
# Images that are assumed where the size of the batch is not known before run
# time.
UNKNOWN_BATCH = 32


class Blocks(NamedTuple):
    """How attention is cut, see `ops.pairs.blocks`.

    Attributes:
        heads: how many heads of every image a block has.
        rows: how many rows of pixels a block has; None for all rows.
        neighbours: how many neighbours a line has, see `ops.pairs.lines`.
    """

    heads: int
    rows: int | None
    neighbours: int


def choose(
    query: Float[Tensor, "batch height width query_order heads channels"],
    keys: Float[Tensor, "batch height width key_order heads channels"],
    encoding: Float[Tensor, "rows columns order encoded"],
    local: bool,
) -> Blocks:
    """How attention to these keys is cut into blocks."""
    target = backend.find_target(query, keys, encoding)
    if target.xla_on_cpu:
        sizes = COMPILED_BLOCK, COMPILED_TOGETHER
    elif target.unrolls:
        sizes = UNROLLED_BLOCK, EAGER_TOGETHER
    else:
        sizes = EAGER_BLOCK, EAGER_TOGETHER
    return blocks(query, keys, encoding, local, *sizes)


def form_of_products(x: Float[Tensor, "..."]) -> str:
    """How products with this tensor are computed.

    PyTorch's kernel for many small matrices moves the fewest bytes without a
    compiler, 0.7 of those of terms that are added in place. But on CPUs it
    copies one matrix after the other, since pixels come last: a training step
    of 128 images took 5.6 s in place of 2.7 s with windows of 5 x 5, and 8.7 s
    in place of 1.7 s with the whole image of 7 x 7 (AMD EPYC, two cores). In
    half precision terms would be widened, and moved nearly twice.

    Args:
        x: a factor of the product.

    Returns:
        "terms" that are written out, for compilers and graphs of TensorFlow;
        "in_place" for one term after the other; "kernel" for one kernel.
    """
    target = backend.find_target(x)
    if target.compiler is not None:
        return "terms"
    return "in_place" if target.eager_on_cpu and item_size(x) > 2 else "kernel"


def reduces_score_gradients(x: Float[Tensor, "..."], dropout: bool) -> bool:
    """Whether each gradient of scores is one reduction, or made of products.

    A compiler stores the result of a reduction, but not its terms. It may
    compute what is added to products again for each use of the sum, and
    TensorFlow's XLA does not vectorise that: a training step of 128 images took
    2.9 s in place of 1.3 s with windows of 5 x 5, and 1.3 s in place of 0.6 s
    with the whole image of 7 x 7 (AMD EPYC, two cores, TensorFlow 2.21.0). JAX
    takes as long either way, and Inductor takes 0.8 of the time with windows.
    Reductions move 0.80 (JAX) to 0.90 (Inductor) of the bytes. With dropout,
    terms are made of five tensors, and Inductor stores them: its functions
    would move 1.33 times as much.

    Args:
        x: a tensor of the computation.
        dropout: whether there is dropout.
    """
    target = backend.find_target(x)
    return target.xla or (target.fuses and not dropout)


def blocks(
    query: Float[Tensor, "batch height width query_order heads channels"],
    keys: Float[Tensor, "batch height width key_order heads channels"],
    encoding: Float[Tensor, "rows columns order encoded"],
    local: bool,
    limit: int,
    least: int,
) -> Blocks:
    """Blocks that have no more scores than the limit, if possible.

    Args:
        query, keys, encoding, local: arguments of `ops.group_self_attention`.
        limit: the most scores of a block, over all neighbours.
        least: how many images and heads a block has at least, if there are that
            many.
    """
    batch, height, width, elements, heads, _ = query.shape
    size = encoding.shape[0]
    if not (isinstance(height, int) and isinstance(width, int)):
        return Blocks(1, None, size) if local else Blocks(1, 1, 1)
    # JAX exports sizes as symbols.
    images = batch if isinstance(batch, int) else UNKNOWN_BATCH
    pairs = elements * max(keys.shape[3], encoding.shape[2])
    row = (size**2 if local else height * width) * pairs * images * width
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    enough = (n for n in divisors if n * images >= least)
    fitting = (n for n in divisors if n * row * height <= limit)
    together = max(next(enough, heads), max(fitting, default=1))
    # Blocks have as many rows as the limit allows, but none has far fewer rows
    # than the others.
    most = min(max(limit // (together * row), 1), height)
    neighbours = size if local else part_size(width, NEIGHBOURS_OF_LINE)
    return Blocks(together, part_size(height, most), neighbours)
