"""Which form computes group self-attention, and in blocks of which size.

The only place that chooses, and that holds what was tuned.
"""

from typing import NamedTuple

from keras_equiattn.ops import backend
from keras_equiattn.ops._types import Float
from keras_equiattn.ops._types import Tensor

# Scores of a line of a block, for a compiler on a CPU. Of a training step of
# 14 x 14 pixels on p4 with windows of 5 x 5 (AMD EPYC, two cores, JAX 0.10.2),
# 2**17 to 2**20 take the same time, memory grows from 2**20 on.
COMPILED_LINE = 2**19
# Images and heads that lie beside each other, at least: XLA makes no vectors
# of 8 or 16 numbers, since it writes their loop out (50 ms an image in place
# of 18, the same machine).
LEAST_TOGETHER = 24
# The same for an accelerator, on which nothing was measured yet.
ACCELERATOR_LINE = 2**22
# Scores of a tile without a compiler: what makes up for the calls of many
# small functions, on a CPU and on an accelerator.
CPU_TILE = 2**21
ACCELERATOR_TILE = 2**24
# Images of a batch whose size is not known before run time.
UNKNOWN_BATCH = 32


class Blocks(NamedTuple):
    """Blocks for a compiler, see `ops.pairs.blocks`."""

    heads: int
    rows: int


class Tiles(NamedTuple):
    """Tiles without a compiler, see `ops.pairs.tiles`.

    Attributes:
        together: heads, of any images, in a tile.
        rows: of a tile at a time; None for all.
    """

    together: int
    rows: int | None


def choose(
    query: Float[Tensor, "batch height width query_order heads channels"],
    keys: Float[Tensor, "batch height width key_order heads channels"],
    encoding: Float[Tensor, "rows columns order encoded"],
    local: bool,
) -> Blocks | Tiles:
    """How attention to these keys is computed."""
    target = backend.find_target(query, keys, encoding)
    known = all(isinstance(n, int) for n in query.shape[1:3])
    if known and backend.will_compile():
        limit = COMPILED_LINE if target.on_cpu else ACCELERATOR_LINE
        return blocks(query, keys, encoding, local, limit)
    limit = CPU_TILE if target.on_cpu else ACCELERATOR_TILE
    return tiles(query, keys, encoding, local, limit)


def blocks(
    query: Tensor, keys: Tensor, encoding: Tensor, local: bool, limit: int
) -> Blocks:
    """Blocks whose lines have no more scores than the limit, if possible."""
    batch, height, width, elements, heads, _ = query.shape
    # JAX exports sizes as symbols.
    images = batch if isinstance(batch, int) else UNKNOWN_BATCH
    neighbours = encoding.shape[1] if local else width
    pairs = elements * max(keys.shape[3], encoding.shape[2])
    row = neighbours * pairs * images * width
    # For whole images a block is one row, and a line one row of neighbours.
    head = row * height if local else row
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    enough = (n for n in divisors if n * images >= LEAST_TOGETHER)
    together = max(
        next(enough, heads),
        max((n for n in divisors if n * head <= limit), default=1),
    )
    if not local:
        return Blocks(together, 1)
    count = -(-together * head // limit)
    return Blocks(together, -(-height // min(count, height)))


def tiles(
    query: Tensor, keys: Tensor, encoding: Tensor, local: bool, limit: int
) -> Tiles:
    """Tiles that have no more scores than the limit, if possible."""
    _, height, width, elements, _, _ = query.shape
    if not local:
        return Tiles(1, 1)
    if not (isinstance(height, int) and isinstance(width, int)):
        return Tiles(1, None)
    rows, columns, order, _ = encoding.shape
    pairs = elements * max(keys.shape[3], order)
    scores = rows * columns * pairs * height * (width + columns - 1)
    together = max(limit // scores, 1)
    return Tiles(together, -(-height // -(-scores // limit)))
