"""Which module computes the window form, and why.

The module that computes derivatives is chosen here, and the tuned constants of
all modules stand here, with what was measured.
"""

from keras_equiattn.ops import backend
from keras_equiattn.ops.numerics import item_size
from keras_equiattn.ops.windows.form import Form
from keras_equiattn.ops.windows.form import Keys
from keras_equiattn.ops.windows.form import Queries

# Channels of a head from which products of tiles are worth what they copy. With
# 8 (SASA 5 x 5) and 16 (ACmix 7 x 7) they move 0.52 and 0.34 of the bytes of
# `products`, and take 0.99 and 0.70 of its time
# (benchmarks/results/window_forms-torch-128-2026-11-24.json); with 4 (ACmix on
# p4) 0.62 of the bytes and 1.6 times the time (steps of 64 images of 32 x 32,
# AMD EPYC, two cores, PyTorch 2.13).
TILED_CHANNELS = 8
# The costs of other values of a constant are from the files
# benchmarks/results/tuning-<backend>-128-<date>.json, unless a comment names a
# machine.

# `tiles`: what the keys of a tile cost to set up, in rows of queries. With 1
# and 16 ACmix takes 1.12 and 1.16 times as long.
TILE_SETUP_ROWS = 4
# `products`: bytes that one pass writes, about the cache of a core. With
# a quarter and four times as many ASC takes 1.41 and 1.33 times as long.
CACHE = 2**22
# `planes`: neighbours up to which all are written out: 11 x 11 take a compiler
# less than 16 s (AMD EPYC, two cores, JAX 0.10.2). It gets one row if there are
# more, but for windows with strides, which are written out whatever their size:
# 13 x 13 of them with strides of 2 take 13 s. Neighbours with weights of their
# own have a term for each key element: 800 terms (5 x 5 on p16m) take 19 s.
NEIGHBOURS_WRITTEN_OUT = 121
TERMS_WRITTEN_OUT = 800
# `planes`: neighbours whose channels one reduction adds up. With fewer, queries
# and keys are read more often: sums of one neighbour alone take 9.5 times as
# long under JAX. With 10 SASA takes 0.99 of the time under JAX, and 1.07 times
# as long under TensorFlow.
NEIGHBOURS_OF_SUM = 5
# `planes`: channels up to which a reduction is vectorised along the columns,
# since XLA writes out as many terms. With 4 and 16 ACmix takes up to 1.05 and
# 1.13 times as long.
CHANNELS_OF_SUM = 8
# `planes`: heads with this many channels or more have one reduction for all of
# them, instead of one for every eight, each of which is a loop to compile.
# Attention of ACmix then takes as long with 64 channels (14 x 14 pixels) and
# 1.13 times as long with 128 (7 x 7), but is compiled in 6 s in place of 18 and
# 26 s under TensorFlow, and in 3 s in place of 7 and 10 s under JAX (AMD EPYC,
# two cores, TensorFlow 2.21.0, JAX 0.10.2).
CHANNELS_AT_ONCE = 64
# `views`: the columns that images have at least on a CPU. Inductor does not
# vectorise a loop shorter than a vector, which is 16 numbers with AVX-512: a
# step of SASA for 32 images and 64 channels took 0.31 s with 15 x 15 pixels
# and 0.055 s with 16 x 16, and takes 0.064 s with 15 x 15 pixels in 16 columns
# (AMD EPYC, two cores, PyTorch 2.13, as all that follows).
LEAST_COLUMNS = 16
# `views`: images of up to this many columns lie side by side instead, until
# there are WIDE columns. Steps of 128 images of 7 x 7 pixels and 512 channels
# then take 0.64 (ASC on p4) to 0.75 (ACmix) of the time of one image in 16
# columns. With 14 x 14 pixels and 256 channels two images take 0.87 (ASC) to
# 1.13 (ASC on p4) of it.
NARROW = 8
WIDE = 32
# Inductor gets `tiles` on a CPU for heads with this many channels or more, if
# images have more than NARROW and fewer than LEAST_COLUMNS columns. Narrower
# images get `tiles` wherever they would without a compiler. Steps of 128 images
# take 0.67 (ACmix on p4) to 0.84 (ACmix) of the time of `views` with 7 x 7
# pixels and 512 channels, and 0.88 with 14 x 14 and heads of 64 channels, but
# 1.11 with heads of 32 (SASA), and 1.11 with 32 x 32 and heads of 64.
TILED_CHANNELS_COMPILED = 64


def choose(form: Form, keys: Keys, weighted: bool) -> str:
    """The name of the module that computes derivatives with these keys.

    Args:
        form: the sum that is computed.
        keys: the keys, which say where it is computed.
        weighted: whether the keys have weights.
    """
    target = backend.find_target(keys)
    if target.compiler == "xla":
        return "planes"
    channels = keys.shape[-1] // form.heads
    tiled = not weighted and channels >= TILED_CHANNELS
    if target.compiler == "inductor":
        width = keys.shape[3] - form.reach[1]
        narrow = width <= NARROW or (
            width < LEAST_COLUMNS and channels >= TILED_CHANNELS_COMPILED
        )
        tiled = tiled and narrow and target.device == "cpu"
        return "tiles" if tiled else "views"
    if target.compiler is None and tiled:
        return "tiles"
    return "products"


def side_by_side(keys: Keys, reach: int) -> tuple[int, int]:
    """How many images `views` puts side by side, and the columns of each.

    Args:
        keys: the keys of all images.
        reach: the columns that keys have more than queries.

    Returns:
        How many images make a wide one, and the columns that each takes there,
        which are those of its keys or more.
    """
    batch, columns = keys.shape[1], keys.shape[3]
    if backend.find_target(keys).device != "cpu":
        return 1, columns
    # An exported program takes batches of any size.
    if columns - reach > NARROW or not isinstance(batch, int):
        return 1, max(columns, LEAST_COLUMNS + reach)
    counts = [n for n in range(1, WIDE + 1) if batch % n == 0]
    wide = [n for n in counts if n * columns - reach >= WIDE]
    count = min(wide, default=max(counts))
    return count, max(columns, -(-(LEAST_COLUMNS + reach) // count))


def writes_window_out(form: Form, order: int) -> bool:
    """Whether `planes` writes out the whole window, or one row at a time.

    Args:
        form: the sum that is computed.
        order: how many key elements each neighbour has.
    """
    count = len(form.neighbours)
    return (
        count <= NEIGHBOURS_WRITTEN_OUT and count * order <= TERMS_WRITTEN_OUT
    )


def images_together(keys: Keys, size: int | None) -> int | None:
    """How many images `products` takes at a time; None for all.

    Args:
        keys: the keys of all images.
        size: how many numbers are built at once for an image, if known.
    """
    if size is None or not backend.find_target(keys).eager_on_cpu:
        return None
    # Half precision is widened.
    item = max(item_size(keys), 4)
    return max(1, CACHE // (item * size or 1))


def writes_sums_out(queries: Queries) -> bool:
    """Whether the map of a query is a sum with a term for each group element.

    Compilers fuse the terms. The other form is one product of matrices, which
    OpenVINO computes wrongly.
    """
    target = backend.find_target(queries)
    return target.fuses or target.unrolls
