"""Cost of a linear map on a group, in two bases, over that of a dense layer.

    KERAS_BACKEND=jax python benchmarks/pointwise.py
    KERAS_BACKEND=jax python benchmarks/pointwise.py --parts

Training steps (the output, gradients of input and kernel) and the output alone
are timed, alternating in one process. The dense layer has the same number of
values per pixel, "regular" is one matrix over group elements and channels, and
"irreps" are its blocks in the basis of the irreducible representations.

`--parts` times the parts of a training step in blocks, for the first width and
the first three groups: each part alone, and how often a step has it.

Writes `benchmarks/results/pointwise-<backend>-<date>.json`, on a GPU
`pointwise-<backend>-gpu-<date>.json`; parts write `pointwise_parts-...`.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Callable

import numpy as np
import report_files
import timing
from keras import ops

from keras_equiattn import groups
from keras_equiattn.ops import backend
from keras_equiattn.ops import group_linear
from keras_equiattn.ops.group import block_linear
from keras_equiattn.ops.group.block_linear import Form
from keras_equiattn.ops.group.linear import BASES

# How often a training step has each part: `x` is transformed for the output and
# for the gradients, and so is the upstream gradient.
TIMES = {"to waves": 3, "from waves": 2, "products": 2, "outer products": 1}


def tensors(*shapes: tuple[int, ...]) -> list:
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape).astype("float32") for shape in shapes]
    return [ops.convert_to_tensor(array) for array in arrays]


def dense(options: argparse.Namespace, width: int) -> tuple[Callable, list]:
    # A list of pixels, not an image: the fastest form on each backend.
    shape = (options.batch * options.size**2, width)
    return lambda x, kernel: x @ kernel, tensors(shape, (width, width))


def on_group(
    options: argparse.Namespace, width: int, name: str, basis: str
) -> tuple[Callable, list]:
    order = groups.get(name).order
    channels = width // order
    shape = (options.batch, options.size, options.size, order, channels)
    return (
        lambda x, kernel: group_linear(x, kernel, None, name, basis),
        tensors(shape, (order, channels, channels)),
    )


def steps(options: argparse.Namespace) -> list[dict]:
    """Training steps and outputs of all widths, groups and bases."""
    rows = []
    for width in options.widths:
        maps = {"dense": dense(options, width)}
        for name, basis in itertools.product(options.groups, BASES):
            maps[f"{name}, {basis}"] = on_group(options, width, name, basis)
        # The training steps come first: after some of them PyTorch compiles.
        training, forward = (
            timing.alternate(
                {name: step(*found) for name, found in maps.items()},
                options.repeats,
                warm_up=warm_up,
            )
            for step, warm_up in (
                (timing.gradient_step, 5),
                (timing.forward_step, 2),
            )
        )
        for name in maps:
            if name == "dense":
                continue
            group, basis = name.split(", ")
            found = training[name]
            ratios = [
                a / b for a, b in zip(found, training["dense"], strict=True)
            ]
            rows.append(
                {
                    "group": group,
                    "basis": basis,
                    "width": width,
                    "seconds_median": statistics.median(found),
                    "ratio_of_medians": statistics.median(found)
                    / statistics.median(training["dense"]),
                    "ratio_quartiles": statistics.quantiles(ratios, n=4),
                    "forward_ratio_of_medians": statistics.median(forward[name])
                    / statistics.median(forward["dense"]),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


def parts(options: argparse.Namespace) -> list[dict]:
    """The parts of a step by blocks, for the first width."""
    width, rows = options.widths[0], []
    plain = dense(options, width)
    found = {"dense": timing.forward_step(*plain)}
    for name in options.groups[:3]:
        group = groups.get(name)
        _, (x, kernel) = on_group(options, width, name, "irreps")
        # As arrays, whose memory is contiguous.
        sums = [
            ops.convert_to_tensor(ops.convert_to_numpy(part))
            for part in block_linear.to_sums(x, group=group)
        ]
        matrices = block_linear._matrices(kernel, Form(group))
        count = len(sums)
        functions = {
            "to waves": (
                lambda x, g=group: block_linear.to_sums(x, group=g),
                [x],
            ),
            "from waves": (
                lambda *s, g=group: block_linear.from_sums(list(s), group=g),
                sums,
            ),
            "products": (
                lambda *t, n=count: block_linear._products(t[:n], t[n:]),
                [*sums, *matrices],
            ),
            "outer products": (
                lambda *s, n=count: list(
                    map(block_linear._outer, s[:n], s[n:])
                ),
                [*sums, *(ops.copy(part) for part in sums)],
            ),
        }
        for part, (function, arguments) in functions.items():
            compiled = _compiled(function)
            found[f"{name}, {part}"] = timing.forward_step(compiled, arguments)
    # Before 50 calls PyTorch does not compile what has no gradient.
    for step in found.values():
        for _ in range(51):
            step()
    seconds = timing.alternate(found, options.repeats)
    of_dense = statistics.median(seconds.pop("dense"))
    for name, of_part in seconds.items():
        group, part = name.split(", ")
        megabytes = 2 * 4 * options.batch * options.size**2 * width / 1e6
        median = statistics.median(of_part)
        rows.append(
            {
                "group": group,
                "part": part,
                "times_in_a_step": TIMES[part],
                "seconds_median": median,
                "over_a_dense_product": median / of_dense,
                "gigabytes_per_second": megabytes / 1e3 / median,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def _compiled(function: Callable) -> Callable:
    """The function as it is compiled within a linear map."""

    def forward(*arguments):
        found = function(*arguments)
        return (tuple(found) if isinstance(found, list) else found), ()

    return backend.custom_vjp(forward, lambda *_: None, advice="")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--parts", action="store_true")
    parser.add_argument(
        "--groups",
        nargs="+",
        default=["p4", "p4m", "p8", "p8m", "p16", "p2m"],
    )
    parser.add_argument(
        "--widths", nargs="+", type=int, default=[512, 384, 256, 192, 128]
    )
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    results = {
        "benchmark": "pointwise.py",
        "settings": vars(options),
        "rows": parts(options) if options.parts else steps(options),
    }
    kind = "pointwise_parts" if options.parts else "pointwise"
    report_files.write(f"{kind}-{timing.place()}", results)


if __name__ == "__main__":
    main()
